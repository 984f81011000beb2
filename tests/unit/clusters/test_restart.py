"""Restarting a cluster: which step follows from what is there, and a command that is killed and run again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from runtime import faults
from runtime.clusters.restart import (
    ForeignJobs,
    HeadJob,
    HeadSilent,
    RestartStep,
    RestartTakenOver,
    RestartView,
    decide_give_up,
    decide_step,
    describe_state,
    foresee,
    foresee_give_up,
    restart,
)
from runtime.faults import FaultReached
from runtime.jobs.maintenance_lock import MaintenanceLock

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOLD = MaintenanceLock(token="t", by="ada@desk", since=NOW, renewed=NOW, session="old")
OURS = HeadJob(name="j-a-e1-p0-0", ours=True, state="RUNNING", job="j-a", title="fit", owner="ada", here=True)
THEIRS = HeadJob(name="raysubmit_1", ours=False, state="RUNNING", title="python x.py")
ASKED = replace(HOLD, asked=(OURS.name,))


def view(hold: MaintenanceLock | None = HOLD, session: str | None = "old", *jobs: HeadJob) -> RestartView:
    return RestartView(hold=hold, session=session, jobs=jobs)


@pytest.mark.parametrize(
    ("seen", "done", "step"),
    [
        # the mark comes first, and is taken over
        (view(None), (), RestartStep.HOLD),
        (view(None, "old", OURS), (), RestartStep.HOLD),
        (view(replace(HOLD, token="other")), (), RestartStep.HOLD),
        # jobs are asked, and end
        (view(HOLD, "old", OURS), (), RestartStep.ASK),
        (view(ASKED, "old", OURS), (), RestartStep.ASK),
        (view(HOLD, "old", OURS), (RestartStep.ASK,), RestartStep.ASK),
        (view(ASKED, "old", OURS), (RestartStep.ASK,), RestartStep.AWAIT_ENDS),
        (view(ASKED, "old", OURS), (RestartStep.ASK, RestartStep.AWAIT_ENDS), RestartStep.RESTART),
        (view(ASKED, "old", replace(OURS, state="STOPPED")), (), RestartStep.AWAIT_ENDS),
        (view(ASKED, "old", replace(OURS, state="STOPPED")), (RestartStep.AWAIT_ENDS,), RestartStep.FORGET),
        (
            view(ASKED, "old", replace(OURS, state="STOPPED")),
            (RestartStep.AWAIT_ENDS, RestartStep.FORGET),
            RestartStep.RESTART,
        ),
        # a job that had ended before is none of it
        (view(HOLD, "old", replace(OURS, state="SUCCEEDED")), (), RestartStep.RESTART),
        (view(replace(HOLD, drops_others=True), "old", THEIRS), (), RestartStep.RESTART),
        # the head
        (view(HOLD), (), RestartStep.RESTART),
        (view(HOLD, None), (), RestartStep.RESTART),
        (view(replace(HOLD, commanded=True)), (), RestartStep.AWAIT_HEAD),
        (view(replace(HOLD, commanded=True), None), (), RestartStep.AWAIT_HEAD),
        (view(replace(HOLD, session=None), "new"), (), RestartStep.RESTART),
        # it is another one, whoever restarted it
        (view(replace(HOLD, session=None, commanded=True), "new"), (), RestartStep.REAP),
        (view(HOLD, "new"), (), RestartStep.REAP),
        (view(ASKED, "new", OURS), (), RestartStep.REAP),
        (view(HOLD, "new"), (RestartStep.REAP,), RestartStep.AWAIT_MEMBERS),
        (view(HOLD, "new"), (RestartStep.REAP, RestartStep.AWAIT_MEMBERS), RestartStep.TAKE_UP),
        (view(HOLD, "new"), (RestartStep.REAP, RestartStep.AWAIT_MEMBERS, RestartStep.TAKE_UP), RestartStep.RELEASE),
        (view(None, "new"), tuple(RestartStep), RestartStep.DONE),
    ],
)
def test_next_step_follows_from_what_is_there(
    seen: RestartView, done: tuple[RestartStep, ...], step: RestartStep
) -> None:
    assert decide_step(seen, token="t", done=done) is step


def test_jobs_of_others_are_refused_before_anything_is_marked() -> None:
    with pytest.raises(ForeignJobs) as refused:
        decide_step(view(None, "old", OURS, THEIRS, replace(THEIRS, state="FAILED")), token="t")
    with pytest.raises(ForeignJobs) as silent:
        decide_step(view(None, None), token="t")

    assert (refused.value.jobs, refused.value.exit_code) == ([THEIRS], 2)
    assert silent.value.jobs is None
    assert decide_step(view(None, "old", THEIRS), token="t", drop_foreign=True) is RestartStep.HOLD
    assert decide_step(view(None, None), token="t", drop_foreign=True) is RestartStep.HOLD
    # One that goes on has been allowed to.
    assert (
        decide_step(view(replace(HOLD, token="other", drops_others=True), "old", THEIRS), token="t") is RestartStep.HOLD
    )


@pytest.mark.parametrize("token", ["t", "other"])
def test_jobs_of_others_that_began_after_the_mark_are_refused_until_ray_is_restarted(token: str) -> None:
    held = replace(HOLD, token=token, by="bob@lab")
    with pytest.raises(ForeignJobs) as refused:
        decide_step(view(held, "old", THEIRS), token="t")

    assert refused.value.facts[-1] == (
        "Ray was not restarted; the mark that bob@lab made stays, and what was asked to end waits"
    )
    assert decide_step(view(held, "old", THEIRS), token=token, drop_foreign=True) is RestartStep.RESTART
    assert decide_step(view(replace(held, commanded=True), "old", THEIRS), token=token) is RestartStep.AWAIT_HEAD
    assert decide_step(view(held, "new", THEIRS), token=token) is RestartStep.REAP


def test_leave_to_drop_jobs_of_others_ends_with_its_mark() -> None:
    old = replace(view(replace(HOLD, drops_others=True), "old", THEIRS), stale=True)

    for seen in (old, replace(old, session=None, jobs=())):
        with pytest.raises(ForeignJobs):
            decide_step(seen, token="t")
    assert decide_step(old, token="new", drop_foreign=True) is RestartStep.HOLD


@pytest.mark.parametrize("hold", [None, replace(HOLD, token="other")])
def test_command_whose_mark_is_gone_does_nothing_more(hold: MaintenanceLock | None) -> None:
    with pytest.raises(RestartTakenOver) as ended:
        decide_step(view(hold, "old", OURS), token="t", done=(RestartStep.HOLD, RestartStep.ASK))

    assert (ended.value.holder, ended.value.exit_code) == ("ada@desk" if hold else None, 3)


STOPPED = replace(OURS, state="STOPPED")


@pytest.mark.parametrize(
    ("seen", "done", "step"),
    [
        (view(None, "old", OURS), (), RestartStep.DONE),
        (view(None, None), (), RestartStep.DONE),
        (view(replace(ASKED, token="other"), "old", OURS), (), RestartStep.HOLD),
        (view(ASKED, "old", OURS), (RestartStep.HOLD,), RestartStep.AWAIT_ENDS),
        (view(ASKED, "old", OURS), (RestartStep.HOLD, RestartStep.AWAIT_ENDS), RestartStep.TAKE_UP),
        (view(ASKED, "old", STOPPED), (RestartStep.HOLD, RestartStep.AWAIT_ENDS), RestartStep.FORGET),
        # what the head refuses to delete does not keep it from ending
        (
            view(ASKED, "old", STOPPED),
            (RestartStep.HOLD, RestartStep.AWAIT_ENDS, RestartStep.FORGET),
            RestartStep.TAKE_UP,
        ),
        (view(HOLD, "old", OURS), (RestartStep.HOLD,), RestartStep.TAKE_UP),
        (view(ASKED, "new", OURS), (RestartStep.HOLD,), RestartStep.TAKE_UP),
        (view(HOLD, "old"), (RestartStep.HOLD, RestartStep.TAKE_UP), RestartStep.RELEASE),
        # a silent head that was told to restart forgets what was stopped
        (view(replace(ASKED, commanded=True), None), (RestartStep.HOLD,), RestartStep.RELEASE),
        (view(HOLD, None), (RestartStep.HOLD,), RestartStep.RELEASE),
        (view(None, "old"), (RestartStep.HOLD, RestartStep.TAKE_UP, RestartStep.RELEASE), RestartStep.DONE),
    ],
)
def test_next_step_of_giving_up_follows_from_what_is_there(
    seen: RestartView, done: tuple[RestartStep, ...], step: RestartStep
) -> None:
    assert decide_give_up(seen, token="t", done=done) is step


def test_restart_of_a_silent_head_that_may_know_jobs_as_stopped_is_not_given_up() -> None:
    with pytest.raises(HeadSilent) as silent:
        decide_give_up(view(ASKED, None), token="t", done=(RestartStep.HOLD,))

    assert (silent.value.hold, silent.value.exit_code) == (ASKED, 3)


@pytest.mark.parametrize("hold", [None, replace(HOLD, token="other")])
def test_giving_up_ends_when_the_mark_is_gone(hold: MaintenanceLock | None) -> None:
    with pytest.raises(RestartTakenOver):
        decide_give_up(view(hold, "old", OURS), token="t", done=(RestartStep.HOLD,))


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (view(HOLD, "old"), "no job asked to end, Ray not restarted"),
        (view(ASKED, "old"), "1 job asked to end, Ray not restarted"),
        (
            view(replace(ASKED, commanded=True), None),
            "1 job asked to end, the head told to restart Ray, which it may still do",
        ),
        (view(replace(ASKED, commanded=True), "new"), "1 job asked to end, Ray restarted"),
    ],
)
def test_what_a_restart_has_done_is_told(seen: RestartView, said: str) -> None:
    assert describe_state(seen).rpartition("Z: ")[2] == said


class Lab:
    """A cluster in memory; what it does is written down."""

    def __init__(self) -> None:
        self.seen = view(None, "old", OURS)
        self.did: list[RestartStep] = []
        self.token = ""

    def look(self) -> RestartView:
        return self.seen

    def answers_again(self) -> bool:
        return False

    def act(self, step: RestartStep, view: RestartView) -> None:
        self.did.append(step)
        hold = self.seen.hold
        if step is RestartStep.HOLD:
            self.seen = replace(self.seen, hold=replace(hold or HOLD, token=self.token))
        elif step is RestartStep.RELEASE:
            self.seen = replace(self.seen, hold=None)
        assert hold is not None or step in (RestartStep.HOLD, RestartStep.RELEASE)
        if step is RestartStep.ASK:
            assert hold is not None
            self.seen = replace(self.seen, hold=replace(hold, asked=tuple(each.name for each in self.seen.jobs)))
        elif step is RestartStep.AWAIT_ENDS:
            self.seen = replace(self.seen, jobs=tuple(replace(each, state="STOPPED") for each in self.seen.jobs))
        elif step is RestartStep.FORGET:
            self.seen = replace(self.seen, jobs=())
        elif step is RestartStep.RESTART:
            assert hold is not None
            self.seen = replace(self.seen, session="new", jobs=(), hold=replace(hold, commanded=True))

    def go(self, token: str) -> None:
        self.token = token
        restart(self, token=token)


ALL = [
    RestartStep.HOLD,
    RestartStep.ASK,
    RestartStep.AWAIT_ENDS,
    RestartStep.FORGET,
    RestartStep.RESTART,
    RestartStep.REAP,
    RestartStep.AWAIT_MEMBERS,
    RestartStep.TAKE_UP,
]


def test_restart_does_each_step_once() -> None:
    lab = Lab()

    lab.go("one")

    assert lab.did == [*ALL, RestartStep.RELEASE]
    assert lab.seen.hold is None


def test_job_that_was_submitted_just_before_the_mark_and_seen_late_is_given_its_time_too() -> None:
    late = replace(OURS, name="j-b-e1-p0-0")

    class LateLab(Lab):
        def act(self, step: RestartStep, view: RestartView) -> None:
            super().act(step, view)
            if step is RestartStep.FORGET and self.did.count(step) == 1:
                self.seen = replace(self.seen, jobs=(late,))

    lab = LateLab()

    lab.go("one")

    asks = [RestartStep.ASK, RestartStep.AWAIT_ENDS, RestartStep.FORGET]
    assert lab.did[: lab.did.index(RestartStep.RESTART)] == [RestartStep.HOLD, *asks, *asks]


@pytest.mark.parametrize("killed", ALL)
def test_restart_that_dies_after_a_step_goes_on_and_restarts_the_head_once(
    killed: RestartStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab()
    monkeypatch.setenv("RUNTIME_FAULTS", f"restart.{killed}=raise")
    faults.arm()
    with pytest.raises(FaultReached):
        lab.go("one")
    monkeypatch.delenv("RUNTIME_FAULTS")
    faults.arm()

    lab.go("two")

    assert lab.did.count(RestartStep.RESTART) == 1
    assert lab.did[-2:] == [RestartStep.TAKE_UP, RestartStep.RELEASE]
    assert lab.seen.hold is None


def test_mark_counts_for_an_hour_after_it_was_renewed_and_not_if_it_is_of_a_far_future() -> None:
    ages = [timedelta(), timedelta(minutes=59), timedelta(minutes=61), timedelta(minutes=-30), timedelta(hours=-2)]

    assert [HOLD.blocks(NOW + age) for age in ages] == [True, True, False, True, False]


def test_plan_says_what_each_step_would_do_now() -> None:
    lines = list(foresee(view(None, "old", OURS, THEIRS), boot={"restart-needed": "ray-start"}, open_jobs=3))

    assert lines == [
        (RestartStep.HOLD, "mark the cluster: launches and keepers wait"),
        (RestartStep.ASK, "ask 1 job to end with a checkpoint"),
        (RestartStep.ASK, "1 job of others would be lost: `--drop-foreign`"),
        (RestartStep.RESTART, "run the boot script on the head and restart Ray, which applies ray-start"),
        (RestartStep.AWAIT_HEAD, "wait for another session of the head"),
        (RestartStep.REAP, "remove nodes that will never work again"),
        (RestartStep.AWAIT_MEMBERS, "wait for the members that Google runs"),
        (RestartStep.TAKE_UP, "take up 3 open jobs"),
        (RestartStep.RELEASE, "remove the mark"),
    ]


def test_plan_of_giving_up_says_what_each_step_would_do_now() -> None:
    before = f"take the mark over, unless its maker is at work; {describe_state(view(ASKED))}"

    assert list(foresee_give_up(view(ASKED, "old", OURS), open_jobs=2)) == [
        (RestartStep.HOLD, before),
        (RestartStep.AWAIT_ENDS, "wait for 1 job asked to end"),
        (RestartStep.FORGET, "delete 1 job on the head, so that none counts as cancelled"),
        (RestartStep.TAKE_UP, "take up 2 open jobs"),
        (RestartStep.RELEASE, "remove the mark"),
    ]
    assert [step for step, _ in foresee_give_up(view(HOLD, None), open_jobs=2)] == [
        RestartStep.HOLD,
        RestartStep.RELEASE,
    ]
    assert list(foresee_give_up(view(ASKED, None), open_jobs=2))[1:] == [
        (RestartStep.RELEASE, "refused, and the mark stays: the head does not answer, and may know 1 job as stopped"),
    ]
    assert list(foresee_give_up(view(None), open_jobs=2)) == []


def test_plan_beside_a_mark_that_counts_no_more_begins_anew() -> None:
    seen = replace(view(replace(HOLD, commanded=True), "new"), stale=True)

    steps = dict(foresee(seen, boot=None, open_jobs=0))

    assert steps[RestartStep.HOLD].endswith(", and gave no sign for an hour: begin anew")
    assert RestartStep.RESTART in steps
