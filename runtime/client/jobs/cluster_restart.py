"""What each step of a restart does to the head, the record root and the nodes of a cluster. `runtime.clusters.restart` decides."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from runtime.client.jobs.cluster_jobs import keep_cluster
from runtime.client.jobs.reconcile import KeptJob
from runtime.client.jobs.targets import OpenTarget
from runtime.clusters.nodes import JOINS_LABEL
from runtime.clusters.ray_view import read_ray
from runtime.clusters.reaper import Reaper, reap_once
from runtime.clusters.reaper_state import ReaperState
from runtime.clusters.restart import HeadJob, RestartStep, RestartTakenOver, RestartView, has_restarted
from runtime.config import Settings
from runtime.errors import InfrastructureFailure, NotPossible, explain_briefly
from runtime.jobs import ledger, maintenance_lock
from runtime.jobs.ledger import job_folder
from runtime.jobs.maintenance_lock import MaintenanceLock
from runtime.launchers.ray.client import RayRefused, RayUnavailable
from runtime.launchers.ray.discovery import find_job, read_grace, read_metadata
from runtime.launchers.ray.launcher import RayHost
from runtime.launchers.ray.names import note_name, split_name
from runtime.launchers.ray.restart_notes import is_note, record_asked
from runtime.system import system
from runtime.units import count_noun

LOCK_FOLDER: Final = "restart"
END_S: Final = 120.0
"""How much longer than its grace a job may take to end."""
HEAD_S: Final = 900.0
MEMBERS_S: Final = 300.0
TAKE_UP_S: Final = 300.0
"""A head that has just begun may refuse drivers for a while."""
SILENT_S: Final = 30.0
"""How long a head may be silent before it counts as down: a tunnel that broke opens again."""
_LOOK_S: Final = 1.0
_NO_ONE: Final = "kept by nobody: the same launch takes it up"


class HeadNotBack(InfrastructureFailure):
    """The head did not come back in time; the hold stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The ways to a cluster that its jobs do not need."""

    ray_name: str
    reaper: Callable[[], Reaper]
    """Raises without Google's credentials."""
    restart_head: Callable[[str | None], None]
    """Apply waiting files and restart the unit of Ray's head, unless Ray has begun another session than the named one
    since. Raises `InfrastructureFailure`."""
    read_boot: Callable[[], Mapping[str, str] | None]
    """What the head says of its start, as far as is known; None if nothing."""


class ClusterRestart:
    """A `World` of a real cluster."""

    def __init__(
        self,
        place: OpenTarget,
        settings: Settings,
        means: Means,
        *,
        token: str,
        by: str,
        progress: Callable[[str], None],
        head_s: float = HEAD_S,
        drop_foreign: bool = False,
        gives_up: bool = False,
    ) -> None:
        self._place, self._settings, self._means = place, settings, means
        self._host = cast(RayHost, place.host)
        self._host.holder = token
        self._token, self._by, self._tell, self._head_s = token, by, progress, head_s
        self._drop_foreign, self._gives_up = drop_foreign, gives_up
        self.kept: tuple[KeptJob, ...] = ()
        """What became of each open job."""
        self.marked = False
        """Whether this command has a mark that it has not removed."""

    def look(self) -> RestartView:
        held = self._read_own() if self.marked else maintenance_lock.read_hold(self._place.files)
        try:
            session = self._host.jobs.read_session()
            jobs = self._list_jobs() if session else ()
        except (RayUnavailable, RayRefused):
            session, jobs = None, ()
        if held is not None and self.marked:
            if held.session is None and session is not None and not held.commanded:
                held = self._change(session=session)
            elif ledger.now() - held.renewed >= maintenance_lock.RENEW:
                held = self._change()
        stale = held is not None and not held.blocks(ledger.now())
        return RestartView(hold=held, session=session, jobs=jobs, stale=stale)

    def act(self, step: RestartStep, view: RestartView) -> None:
        getattr(self, f"_{step}")(view)

    # steps

    def _hold(self, view: RestartView) -> None:
        at, old = ledger.now(), view.hold
        if old is not None and self._gives_up:
            new = replace(old, token=self._token, by=self._by, renewed=at)
        elif old is not None and not view.stale:
            self._tell(f"going on with the restart that {old.by} began, whose command has died")
            allowed = old.drops_others or self._drop_foreign
            new = replace(old, token=self._token, by=self._by, renewed=at, drops_others=allowed)
        else:
            if old is not None:
                self._tell(f"the mark of {old.by} is older than an hour: beginning anew")
            # A job that was asked to end stays named: the head may still know it as stopped.
            asked = old.asked if old else ()
            new = MaintenanceLock(
                token=self._token,
                by=self._by,
                since=at,
                renewed=at,
                session=view.session,
                asked=asked,
                drops_others=self._drop_foreign,
            )
        maintenance_lock.write_hold(self._place.files, new)
        self.marked = True
        self._tell("the cluster is marked: launches and keepers wait")

    def _ask(self, view: RestartView) -> None:
        living = [each for each in view.jobs if each.ours and each.lives]
        self._change(asked=tuple(sorted({*self._held(view).asked, *(each.name for each in living)})))
        try:
            # The mark goes when the restart is given up, and a job may end after that.
            record_asked(self._host.jobs, [each.name for each in living])
        except RayRefused as refused:
            if strays := sum(not each.here for each in living):
                self._tell(f"{refused.message}; until the restart {count_noun(strays, 'job')} may look cancelled")
        for each in living:
            try:
                self._host.jobs.stop(each.name)
            except RayRefused as refused:
                self._tell(f"{refused.message}; the restart ends {_report_job(each)}")
                continue
            self._tell(f"asked to end: {_report_job(each)}")

    def _await_ends(self, view: RestartView) -> None:
        asked = {each.name: each for each in view.jobs if each.name in self._held(view).asked}
        grace = max((each.grace_s for each in asked.values()), default=0.0)
        left = self._wait(lambda: self.list_unended(asked), grace + END_S, "job", "to end within the grace")
        for name in left:
            self._tell(f"has not said its end: {_report_job(asked[name])}; its attempt counts as lost")

    def _forget(self, view: RestartView) -> None:
        for each in view.jobs:
            if each.name in self._held(view).asked and not each.lives:
                with contextlib.suppress(RayRefused):  # a head that was restarted has forgotten it too
                    self._host.jobs.delete(each.name)

    def _restart(self, view: RestartView) -> None:
        if view.session is None and self.answers_again():
            return  # what runs there decides what is due
        self._tell("restarting Ray on the head")
        self._means.restart_head(view.session)
        self._change(commanded=True)

    def _await_head(self, view: RestartView) -> None:
        until, said = system.monotonic() + self._head_s, ""
        while not has_restarted(self.look()):
            boot = self.read_boot()
            waits = boot.get("waiting-for", "nothing")
            if waits not in ("nothing", said):
                said = waits
                self._tell(f"the head waits for {waits}")
            if system.monotonic() >= until:
                # The next command restarts the unit once more.
                self._change(commanded=False)
                words = [f"it says `{name}`: {text}" for name, text in sorted(boot.items())]
                raise HeadNotBack(
                    f"the head is not back after {self._head_s:.0f} s",
                    facts=[
                        *words,
                        "the cluster stays marked; jobs that were asked to end are taken up when it is back",
                    ],
                    hint="`runtime cluster exec -- sudo docker logs --tail 100 ray` may say why; then run the same command",
                )
            system.sleep(_LOOK_S)
        self._tell("the head is back")

    def _reap(self, view: RestartView) -> None:
        try:
            run, _ = reap_once(self._means.reaper(), self._means.ray_name, ReaperState(), system.now())
        except (InfrastructureFailure, NotPossible) as problem:
            self._tell(f"nothing was reaped, which the head's reaper does: {explain_briefly(problem)}")
            return
        if run.error is not None:
            self._tell(f"nothing was reaped, which the head's reaper does: {explain_briefly(run.error)}")
        for each in run.removals:
            self._tell(f"node {each.dead.name}: {each.error or 'removed'}")

    def _await_members(self, view: RestartView) -> None:
        left = self._wait(self._list_missing_members, MEMBERS_S, "member", "to join again")
        for name in left:
            self._tell(f"member node `{name}` is READY, and Ray does not see it yet; `runtime cluster status --tunnel`")

    def _take_up(self, view: RestartView) -> None:
        until = system.monotonic() + TAKE_UP_S
        acted: dict[str, KeptJob] = {}
        while True:
            problem: InfrastructureFailure | None = None
            try:
                found = keep_cluster(self._place, self._settings, holder=self._token, progress=self._tell)
                problem = next(iter(found.problems), None)
                acted |= {each.job: each for each in found.jobs if each.done != "left" or each.job not in acted}
            except InfrastructureFailure as silent:
                problem = silent
            if problem is None:
                break
            if system.monotonic() >= until:
                self._tell(f"not all jobs were taken up: {explain_briefly(problem)}")
                break
            system.sleep(_LOOK_S)
            self.look()
        self.kept = tuple(sorted(acted.values(), key=lambda each: each.job))

    def _release(self, view: RestartView) -> None:
        self._read_own()
        maintenance_lock.remove_hold(self._place.files)
        self.marked = False

    # the world

    def _list_jobs(self) -> tuple[HeadJob, ...]:
        listed = self._host.jobs.list().items()
        found = [_read_job(name, info, self._host.place.root) for name, info in listed if not is_note(name)]
        drivers = [
            HeadJob(
                name=str(each.get("job_id") or "?"),
                ours=False,
                state=str(each.get("status")),
                title=str(each.get("entrypoint") or "a program that connected by itself"),
            )
            for each in self._host.jobs.list_drivers()
        ]
        return (*found, *drivers)

    def list_unended(self, asked: Mapping[str, HeadJob]) -> list[str]:
        try:
            known = self._host.jobs.list()
        except (RayUnavailable, RayRefused):
            known = {}  # shims note their ends without a head
        unended = []
        for name, each in asked.items():
            info = known.get(name)
            lives = info is not None and info.get("status") in ("PENDING", "RUNNING")
            if lives or (each.here and self._has_shims(name)):
                unended.append(name)
        return unended

    def _list_running(self, job: str, note: str) -> list[int]:
        """The runs that the driver last knew on its nodes; all that have begun if its note is damaged."""
        folder, files = job_folder(job), self._place.files
        try:
            runs = json.loads(files.read(f"{folder}/{note}") or b"{}").get("runs", {})
            return [int(text) for text, run in runs.items() if run["state"] == "running"]
        except (ValueError, TypeError, LookupError, AttributeError):
            return [int(name) for name in files.names(f"{folder}/runs") if name.isdecimal()]

    def _has_shims(self, name: str) -> bool:
        """Whether a run that the driver last knew on its nodes has not noted its end. A driver that ends in peace waits
        for its shims, and notes that."""
        job, epoch, part = split_name(name)
        folder, files = job_folder(job), self._place.files
        for index in self._list_running(job, note_name(epoch, part)):
            run = f"{folder}/runs/{index}"
            attempts = ledger.list_attempts(files, job, index)
            if (
                attempts
                and not files.names(f"{run}/a{attempts[-1]:04d}", "end.")
                and files.read(f"{run}/result") is None
            ):
                return True
        return False

    def _list_missing_members(self) -> list[str]:
        """Member nodes that Google says are READY and of which Ray does not see every host."""
        try:
            nodes = self._means.reaper().list_nodes()
            members = {
                each.name: each.addresses
                for each in nodes
                if each.labels.get(JOINS_LABEL) == self._means.ray_name and each.state == "READY"
            }
            if not members:
                return []
            alive = read_ray(self._host.jobs.read_address()).alive
        except (InfrastructureFailure, NotPossible) as problem:
            self._tell(f"members are not looked at: {explain_briefly(problem)}")
            return []
        return [name for name, addresses in members.items() if not alive.issuperset(addresses)]

    def _wait(self, left: Callable[[], list[str]], seconds: float, noun: str, what: str) -> list[str]:
        until, before = system.monotonic() + seconds, -1
        while found := left():
            if len(found) != before:
                before = len(found)
                self._tell(f"waiting for {count_noun(before, noun)} {what}, {seconds:.0f} s at most")
            if system.monotonic() >= until:
                break
            system.sleep(_LOOK_S)
            self.look()  # renews the hold
        return found

    def read_boot(self) -> Mapping[str, str]:
        try:
            return self._means.read_boot() or {}
        except (InfrastructureFailure, NotPossible):
            return {}

    def _held(self, view: RestartView) -> MaintenanceLock:
        assert view.hold is not None
        return view.hold

    def answers_again(self) -> bool:
        until = system.monotonic() + SILENT_S
        while self.look().session is None:
            if system.monotonic() >= until:
                return False
            system.sleep(_LOOK_S)
        return True

    def _change(self, **changes: Any) -> MaintenanceLock:
        """Change the mark as it is now, and renew it."""
        held = replace(self._read_own(), renewed=ledger.now(), **changes)
        maintenance_lock.write_hold(self._place.files, held)
        return held

    def _read_own(self) -> MaintenanceLock:
        """The mark. Raises `RestartTakenOver` if it is not ours."""
        held = maintenance_lock.read_hold(self._place.files)
        if held is None or held.token != self._token:
            self.marked = False
            raise RestartTakenOver(held)
        return held


def goes_on(kept: KeptJob) -> bool:
    """Whether an open job runs or waits, or has come to its end."""
    return kept.done != "left" or kept.seen in ("running", "pending")


def describe_strays(view: RestartView) -> list[str]:
    """Jobs of ours whose record is in another root, which no keeper of the cluster sees."""
    asked = view.hold.asked if view.hold else ()
    strays = [each for each in view.jobs if each.ours and not each.here]
    return [f"{_report_job(each)}: {_NO_ONE}" for each in strays if each.lives or each.name in asked]


def _read_job(name: str, info: Mapping[str, Any], root: str) -> HeadJob:
    said = read_metadata(info)
    job = said.get("job")
    ours = isinstance(job, str) and name.startswith(f"{job}-e") and "epoch" in said
    return HeadJob(
        name=name,
        ours=ours,
        state=str(info.get("status")),
        job=job if ours else None,
        title=str(said.get("name") or info.get("entrypoint") or ""),
        owner=str(said.get("owner") or ""),
        here=find_job(name, info, root) is not None,
        grace_s=read_grace(info),
    )


def _report_job(each: HeadJob) -> str:
    return f"`{each.title}` of {each.owner or 'an unknown owner'} ({each.name})"
