"""Restarting a cluster: which step is due, by a view of the world. Pure, apart from the loop that acts on each decision.

Giving one up does the steps that end what was begun, without the head's restart.

Every step may be cut off and repeated: the next one is decided by the state of the cluster, never by what a command remembers to have
done. Only the steps after the head's restart are done once more by each command, and change nothing the second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from runtime.errors import InfrastructureFailure, NotPossible
from runtime.faults import reach
from runtime.jobs.maintenance_lock import MaintenanceLock
from runtime.units import count_noun, format_time


class RestartStep(StrEnum):
    HOLD = "hold"
    """Mark the cluster, so that nobody starts jobs meanwhile."""
    ASK = "ask"
    """Ask our jobs to end, which gives their commands the grace for a checkpoint."""
    AWAIT_ENDS = "await_ends"
    FORGET = "forget"
    """Make the head forget the jobs that were asked, so that nobody takes them for cancelled."""
    RESTART = "restart"
    AWAIT_HEAD = "await_head"
    REAP = "reap"
    AWAIT_MEMBERS = "await_members"
    TAKE_UP = "take_up"
    RELEASE = "release"
    DONE = "done"


AFTER_HEAD: Final = (RestartStep.REAP, RestartStep.AWAIT_MEMBERS, RestartStep.TAKE_UP, RestartStep.RELEASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadJob:
    """A job that the head knows."""

    name: str
    """Its submission id; for a program that connected by itself, Ray's id of it."""
    ours: bool
    state: str
    job: str | None = None
    title: str = ""
    owner: str = ""
    here: bool = False
    """Whether its record root is the cluster's."""
    grace_s: float = 0.0

    @property
    def lives(self) -> bool:
        return self.state in ("PENDING", "RUNNING")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartView:
    hold: MaintenanceLock | None
    session: str | None
    """None if the head does not answer."""
    jobs: tuple[HeadJob, ...] = ()
    stale: bool = False
    """Whether the hold no longer counts, so that the restart begins again."""


class ForeignJobs(NotPossible):
    """Jobs that are not ours would be lost, or nobody knows whether there are any. Ray was not restarted, and without a
    `hold` nothing was changed."""

    def __init__(self, jobs: Collection[HeadJob] | None, hold: MaintenanceLock | None = None) -> None:
        self.jobs = jobs
        if jobs is None:
            super().__init__(
                "the head does not answer, so nobody knows whether jobs of others run there",
                facts=["nothing was changed"],
                hint="`--drop-foreign` restarts it all the same",
            )
            return
        left = "nothing was changed"
        if hold is not None:
            left = f"Ray was not restarted; the mark that {hold.by} made stays, and what was asked to end waits"
        super().__init__(
            f"{count_noun(len(jobs), 'job')} would be lost that the runtime did not start",
            facts=[
                *(f"`{each.name}`, {each.state}{f': {each.title}' if each.title else ''}" for each in jobs),
                left,
            ],
            hint="`--drop-foreign` drops them",
        )


class RestartTakenOver(InfrastructureFailure):
    """The mark is no longer this command's: another one took it over, because this one stood still."""

    def __init__(self, hold: MaintenanceLock | None) -> None:
        self.holder = hold.by if hold else None
        super().__init__(
            f"{hold.by} took this restart over"
            if hold
            else "the mark of this restart is gone: another command ended it",
            facts=["this command stood still for too long, and changes nothing more"],
            hint="`runtime cluster restart --dry-run` shows where it stands",
        )


class HeadSilent(InfrastructureFailure):
    """A restart cannot be given up: the head may still know jobs as stopped, which would then count as cancelled."""

    def __init__(self, hold: MaintenanceLock) -> None:
        self.hold = hold
        super().__init__(
            f"the head does not answer, and may know {count_noun(len(hold.asked), 'job')} as stopped",
            facts=["the mark stays, for an hour at most: without it they would count as cancelled"],
            hint="run the same command when the head answers; `runtime cluster restart` brings it back",
        )


def has_restarted(view: RestartView) -> bool:
    """Whether the head that answers is another one than before the hold."""
    hold = view.hold
    return (
        hold is not None
        and view.session is not None
        and view.session != hold.session
        and (hold.session is not None or hold.commanded)
    )


def find_foreign(view: RestartView) -> list[HeadJob]:
    return [each for each in view.jobs if not each.ours and each.lives]


def decide_step(
    view: RestartView, *, token: str, done: Collection[RestartStep] = (), drop_foreign: bool = False
) -> RestartStep:
    """Decide what is due. `token` is that of the hold of this command. Raises `ForeignJobs` and `RestartTakenOver`."""
    if RestartStep.RELEASE in done:
        return RestartStep.DONE
    hold = view.hold
    ours = hold is not None and hold.token == token
    if RestartStep.HOLD in done and not ours:
        raise RestartTakenOver(hold)
    if not drop_foreign:
        _refuse_foreign(view)
    if hold is None or not ours:
        return RestartStep.HOLD
    if not has_restarted(view):
        return _before_restart(view, hold, done)
    return next(step for step in AFTER_HEAD if step not in done)


def _refuse_foreign(view: RestartView) -> None:
    """Raise `ForeignJobs` if a restart of the head now would drop jobs that nobody allowed it to drop."""
    hold = None if view.stale else view.hold
    if hold is None:
        if view.session is None:
            raise ForeignJobs(None)
    elif hold.drops_others or hold.commanded or has_restarted(view):
        return
    if foreign := find_foreign(view):
        raise ForeignJobs(foreign, hold)


def _before_restart(view: RestartView, hold: MaintenanceLock, done: Collection[RestartStep]) -> RestartStep:
    if hold.commanded:
        return RestartStep.AWAIT_HEAD
    living = {each.name for each in view.jobs if each.ours and each.lives}
    if living - {*hold.asked} or (living and RestartStep.ASK not in done):
        return RestartStep.ASK
    known = [each for each in view.jobs if each.name in hold.asked]
    if known and RestartStep.AWAIT_ENDS not in done:
        return RestartStep.AWAIT_ENDS
    if any(not each.lives for each in known) and RestartStep.FORGET not in done:
        return RestartStep.FORGET
    return RestartStep.RESTART


def decide_give_up(view: RestartView, *, token: str, done: Collection[RestartStep] = ()) -> RestartStep:
    """Decide what is due to give a restart up. Raises `HeadSilent` and `RestartTakenOver`."""
    hold = view.hold
    if RestartStep.RELEASE in done or (hold is None and not done):
        return RestartStep.DONE
    if hold is None or hold.token != token:
        if RestartStep.HOLD in done:
            raise RestartTakenOver(hold)
        return RestartStep.HOLD
    if view.session is None:
        if _may_hide_stopped(view, hold):
            raise HeadSilent(hold)
        return RestartStep.RELEASE
    if not has_restarted(view):
        known = [each for each in view.jobs if each.name in hold.asked]
        if known and RestartStep.AWAIT_ENDS not in done:
            return RestartStep.AWAIT_ENDS
        if any(not each.lives for each in known) and RestartStep.FORGET not in done:
            return RestartStep.FORGET
    return RestartStep.RELEASE if RestartStep.TAKE_UP in done else RestartStep.TAKE_UP


def _may_hide_stopped(view: RestartView, hold: MaintenanceLock) -> bool:
    """Whether a head that does not answer may know jobs as stopped."""
    return view.session is None and bool(hold.asked) and not hold.commanded


class World(Protocol):
    def look(self) -> RestartView: ...

    def act(self, step: RestartStep, view: RestartView) -> None:
        """Do one step. Raises what cannot be done; the hold stays, and the same command goes on later."""

    def answers_again(self) -> bool:
        """Wait for a head that is silent. Returns False if it stays so, and counts as down."""


def restart(world: World, *, token: str, drop_foreign: bool = False) -> None:
    """Look, decide and act until all is done."""
    done: set[RestartStep] = set()
    while True:
        view = world.look()
        step = decide_step(view, token=token, done=done, drop_foreign=drop_foreign)
        if step is RestartStep.DONE:
            return
        world.act(step, view)
        done.add(step)
        if step is RestartStep.ASK:
            # A job that was launched just before the mark is given its time too.
            done -= {RestartStep.AWAIT_ENDS, RestartStep.FORGET}
        reach(f"restart.{step}")


def give_up(world: World, *, token: str) -> set[RestartStep]:
    """Look, decide and act until nothing is left of a restart that was begun; returns what was done."""
    done: set[RestartStep] = set()
    while True:
        view = world.look()
        if view.session is None and RestartStep.HOLD in done and world.answers_again():
            continue
        step = decide_give_up(view, token=token, done=done)
        if step is RestartStep.DONE:
            return done
        world.act(step, view)
        done.add(step)
        reach(f"give_up.{step}")


def describe_state(view: RestartView) -> str:
    """Describe the progress of a restart."""
    hold = view.hold
    assert hold is not None
    asked = f"{count_noun(len(hold.asked), 'job')} asked to end" if hold.asked else "no job asked to end"
    if has_restarted(view):
        ray = "Ray restarted"
    elif hold.commanded:
        ray = "the head told to restart Ray, which it may still do"
    else:
        ray = "Ray not restarted"
    return f"{hold.by} began it at {format_time(hold.since)}: {asked}, {ray}"


def foresee_give_up(view: RestartView, *, open_jobs: int) -> Iterator[tuple[RestartStep, str]]:
    """Yield each step that giving up would do now, with what it would do."""
    hold = view.hold
    if hold is None:
        return
    yield RestartStep.HOLD, f"take the mark over, unless its maker is at work; {describe_state(view)}"
    if _may_hide_stopped(view, hold):
        yield RestartStep.RELEASE, f"refused, and the mark stays: {HeadSilent(hold).message}"
        return
    known = [] if has_restarted(view) else [each for each in view.jobs if each.name in hold.asked]
    if living := [each for each in known if each.lives]:
        yield RestartStep.AWAIT_ENDS, f"wait for {count_noun(len(living), 'job')} asked to end"
    if known:
        yield (
            RestartStep.FORGET,
            f"delete {count_noun(len(known), 'job')} on the head, so that none counts as cancelled",
        )
    if view.session is not None:
        yield RestartStep.TAKE_UP, f"take up {count_noun(open_jobs, 'open job')}"
    yield RestartStep.RELEASE, "remove the mark"


def foresee(view: RestartView, *, boot: Mapping[str, str] | None, open_jobs: int) -> Iterator[tuple[RestartStep, str]]:
    """Yield each step that a restart would do now, with what it would do."""
    hold = None if view.stale else view.hold
    ours = [each for each in view.jobs if each.ours and each.lives]
    if view.stale and view.hold is not None:
        yield RestartStep.HOLD, f"{view.hold.tell()}, and gave no sign for an hour: begin anew"
    elif hold is not None:
        yield RestartStep.HOLD, f"{hold.tell()}: go on with it, unless its maker is at work"
    else:
        yield RestartStep.HOLD, "mark the cluster: launches and keepers wait"
    if view.stale or not has_restarted(view):
        if not (hold and hold.commanded):
            yield (
                RestartStep.ASK,
                f"ask {count_noun(len(ours), 'job')} to end with a checkpoint" if ours else "no job lives",
            )
            if (foreign := find_foreign(view)) and not (hold and hold.drops_others):
                yield RestartStep.ASK, f"{count_noun(len(foreign), 'job')} of others would be lost: `--drop-foreign`"
            stale = (boot or {}).get("restart-needed", "no")
            files = "" if stale == "no" else f", which applies {stale}"
            yield RestartStep.RESTART, f"run the boot script on the head and restart Ray{files}"
        yield RestartStep.AWAIT_HEAD, "wait for another session of the head"
    yield RestartStep.REAP, "remove nodes that will never work again"
    yield RestartStep.AWAIT_MEMBERS, "wait for the members that Google runs"
    yield RestartStep.TAKE_UP, f"take up {count_noun(open_jobs, 'open job')}"
    yield RestartStep.RELEASE, "remove the mark"
