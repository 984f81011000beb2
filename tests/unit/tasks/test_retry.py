"""Retry decisions, and a simulation of their effect over many machines."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from runtime.end_reasons import Budget, EndReason
from runtime.tasks.history import EndedNote
from runtime.tasks.retry_policy import (
    CRASHES_TO_BURY,
    PREEMPTION_BUDGET,
    PROVEN_AFTER,
    GiveUp,
    RetryAt,
    backoff,
    decide,
)
from runtime.testing import sample_task

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SOON = timedelta(minutes=1)
LATE = PROVEN_AFTER + SOON


def note(
    reason: EndReason,
    *,
    ran: timedelta | None = SOON,
    alone: bool = False,
    progressed: bool = False,
    token: str = "a",
    machine: str | None = None,
    evidence: str | None = None,
) -> EndedNote:
    started = None if ran is None else NOW - ran
    return EndedNote(
        token=token,
        reason=reason,
        ended_at=NOW,
        started_at=started,
        worker="w-1",
        message=f"ended as {reason}",
        alone=alone,
        progressed=progressed,
        machine=machine,
        evidence=evidence,
    )


def decided(*notes: EndedNote, max_failures: int = 3) -> RetryAt | GiveUp:
    return decide(sample_task(max_failures=max_failures), notes, now=NOW, jitter=lambda: 0.5)


def test_decide_first_failure_is_tried_again_after_a_second() -> None:
    assert decided(note(EndReason.APP_FAILED)) == RetryAt(NOW + timedelta(seconds=1), False, Budget.FAILURES, 1)


def test_decide_delay_doubles_with_each_failure_in_a_row() -> None:
    second = decided(note(EndReason.APP_FAILED), note(EndReason.OOM))
    assert isinstance(second, RetryAt)
    assert second.not_before == NOW + timedelta(seconds=2)


def test_decide_last_failure_of_the_budget_gives_up_with_its_message() -> None:
    ended = [note(EndReason.APP_FAILED), note(EndReason.TIMEOUT), note(EndReason.OOM)]
    assert decided(*ended) == GiveUp(EndReason.OOM, "ended as oom")


@pytest.mark.parametrize("max_failures", [0, 1])
def test_decide_first_failure_is_the_last_where_none_is_to_be_retried(max_failures: int) -> None:
    assert decided(note(EndReason.APP_FAILED), max_failures=max_failures) == GiveUp(
        EndReason.APP_FAILED, "ended as app_failed"
    )
    assert isinstance(decided(note(EndReason.PREEMPTED), max_failures=max_failures), RetryAt)


def test_decide_preemptions_spend_no_failure_and_the_first_costs_no_wait() -> None:
    assert decided(note(EndReason.APP_FAILED), note(EndReason.PREEMPTED), max_failures=2) == RetryAt(
        NOW, False, Budget.PREEMPTIONS, 1
    )
    again = decided(note(EndReason.PREEMPTED), note(EndReason.APP_FAILED), max_failures=2)
    assert isinstance(again, RetryAt)
    assert again.spent == 1


@pytest.mark.parametrize(
    ("ended", "wait_s"),
    [
        ([SOON], 0),
        ([SOON] * 2, 1),
        ([SOON] * 3, 2),
        ([SOON] * 5, 8),
        ([LATE, SOON, SOON], 1),
        ([SOON, SOON, LATE], 0),
        ([SOON, LATE, SOON], 0),
        ([PROVEN_AFTER, SOON], 0),
        ([None, None], 1),
    ],
)
@pytest.mark.parametrize("reason", [EndReason.PREEMPTED, EndReason.NODE_FAILED, EndReason.LOST])
def test_decide_preemptions_in_a_row_that_proved_nothing_wait_longer_each_time(
    reason: EndReason, ended: list[timedelta | None], wait_s: int
) -> None:
    again = decided(*(note(reason, ran=ran) for ran in ended))
    assert isinstance(again, RetryAt)
    assert again.not_before == NOW + timedelta(seconds=wait_s)


def test_decide_preemption_after_a_failure_begins_a_row_of_its_own() -> None:
    again = decided(note(EndReason.PREEMPTED), note(EndReason.APP_FAILED), note(EndReason.PREEMPTED))
    assert isinstance(again, RetryAt)
    assert again.not_before == NOW


@pytest.mark.parametrize("reason", [EndReason.CONFIG_INVALID, EndReason.IMAGE_FAILED])
def test_decide_what_again_would_not_help_gives_up_at_once(reason: EndReason) -> None:
    assert isinstance(decided(note(reason)), GiveUp)


def lost(*, alone: bool = True, on: str = "a", evidence: str | None = None, ran: timedelta = SOON) -> EndedNote:
    """Make a loss; `on` names host and boot."""
    host, _, boot = on.partition("/")
    return note(EndReason.LOST, ran=ran, alone=alone, machine=f"{host}/{boot or host}", evidence=evidence)


def test_decide_first_loss_suspects_nobody() -> None:
    again = decided(lost())
    assert isinstance(again, RetryAt)
    assert not again.alone


@pytest.mark.parametrize(
    ("losses", "suspect"),
    [
        ([lost(), lost()], True),
        ([lost(alone=False), lost()], True),
        ([lost(alone=False)] * 3, False),
        ([lost(alone=False)] * 4, True),
        ([lost(alone=False, evidence="the guardian")] * 2, True),
        ([lost(), lost(ran=LATE)], False),
    ],
    ids=["alone", "once alone", "together", "together again and again", "while the worker lived", "proven"],
)
def test_decide_task_is_suspected_after_two_losses_that_were_no_machines(
    losses: list[EndedNote], suspect: bool
) -> None:
    again = decided(*losses)
    assert isinstance(again, RetryAt)
    assert again.alone is suspect


def test_decide_loss_after_ten_minutes_or_with_progress_is_no_suspicion() -> None:
    for proven in (note(EndReason.LOST, ran=LATE), note(EndReason.LOST, progressed=True)):
        again = decided(proven, proven)
        assert isinstance(again, RetryAt)
        assert (again.alone, again.spent) == (False, 0)


def test_decide_loss_that_was_noticed_late_may_have_been_early() -> None:
    late = replace(note(EndReason.LOST, ran=LATE, alone=True), unseen=True)
    again = decided(late, late)
    assert isinstance(again, RetryAt)
    assert (again.alone, again.spent) == (True, 2)
    assert (late.ran_for, replace(late, unseen=False).ran_for) == (None, LATE)


def test_decide_losses_on_one_host_never_bury_whatever_their_number() -> None:
    assert isinstance(decided(*[lost()] * (PREEMPTION_BUDGET - 1)), RetryAt)


@pytest.mark.parametrize("machines", [("pod-1/x", "pod-2/x", "pod-3/x"), ("a/1", "a/2", "a/3")], ids=["pods", "boots"])
def test_decide_containers_of_one_machine_and_boots_of_one_host_are_one_host(machines: tuple[str, ...]) -> None:
    losses = [lost(on=machine) for machine in machines] * 10
    assert isinstance(decided(*losses), RetryAt)


def test_decide_suspect_lost_on_three_hosts_is_buried_and_the_message_says_what_is_known() -> None:
    losses = [lost(on=host) for host in "abcde"]
    assert isinstance(decided(*losses[:-1]), RetryAt)
    buried = decided(*losses)
    assert buried == GiveUp(
        EndReason.LOST,
        "its worker was lost on 3 hosts one after the other (c, d, e), with no other suspect on it, within 10 minutes "
        "and without progress; what ended the workers is not known",
    )


def test_decide_losses_whose_notes_name_no_machine_bury_nobody() -> None:
    assert isinstance(decided(*[note(EndReason.LOST, alone=True)] * 9), RetryAt)


def test_decide_three_deaths_of_the_starter_under_a_living_worker_bury() -> None:
    deaths = [lost(evidence=name) for name in ("its guardian", "its guardian", "the process that starts attempts")]
    assert isinstance(decided(*deaths[1:]), RetryAt)
    assert decided(*deaths) == GiveUp(
        EndReason.LOST,
        "the process that starts attempts died under it 3 times while the worker lived, with no other suspect there, "
        "within 10 minutes and without progress; last on w-1",
    )


def test_decide_deaths_of_the_starter_beside_other_suspects_bury_nobody() -> None:
    beside = [lost(alone=False, evidence="the process that starts attempts")] * 20
    alone = [lost(evidence="the process that starts attempts")] * (CRASHES_TO_BURY - 1)
    assert isinstance(decided(*beside, *alone), RetryAt)


def test_decide_suspect_whose_workers_vanish_on_one_host_runs_fenced() -> None:
    for losses in ([lost()] * 3, [*[lost()] * 3, lost(on="b")]):
        fenced = decided(*losses)
        assert isinstance(fenced, RetryAt)
        assert fenced.fenced
    for losses in ([lost()] * 2, [lost(on=host) for host in "abc"], [lost(alone=False)] * 9):
        again = decided(*losses)
        assert isinstance(again, RetryAt)
        assert not again.fenced


def test_decide_losses_in_company_never_bury_as_a_crasher() -> None:
    assert isinstance(decided(*[lost(alone=False, on=str(n)) for n in range(50)]), RetryAt)


def test_decide_attempt_that_proved_itself_clears_earlier_crashes() -> None:
    again = decided(*[lost(on=host) for host in "abcd"], lost(ran=LATE), lost(), lost(on="e"))
    assert isinstance(again, RetryAt)
    assert again.spent == 2


def test_decide_a_hundred_preemptions_without_a_chance_give_up() -> None:
    assert isinstance(decided(*[note(EndReason.PREEMPTED)] * (PREEMPTION_BUDGET - 1)), RetryAt)
    assert isinstance(decided(*[note(EndReason.PREEMPTED)] * PREEMPTION_BUDGET), GiveUp)


def test_backoff_grows_to_ten_minutes_and_is_spread() -> None:
    assert backoff(0) == timedelta()
    assert [backoff(n, lambda: 0.5).total_seconds() for n in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert backoff(10_000, lambda: 1.0) == timedelta(minutes=15)
    assert backoff(1, lambda: 0.0) == timedelta(seconds=0.5)


def run_fleet(*, needs_h: float, lives_h: float, checkpoints: bool, slots: int, seed: int) -> int | None:
    """Count a task's attempts until success, on machines with a mean life of `lives_h`; None if it is buried.

    With one slot it has each machine to itself, with more only when it is a suspect.
    """
    rng = random.Random(seed)
    notes: list[EndedNote] = []
    done_h, suspect = 0.0, False
    while True:
        life = rng.expovariate(1 / lives_h)
        if life >= needs_h - done_h:
            return len(notes) + 1
        if checkpoints:
            done_h += life
        notes.append(lost(ran=timedelta(hours=life), alone=slots == 1 or suspect, on=f"m{len(notes)}"))
        decision = decide(sample_task(), notes, now=NOW, jitter=rng.random)
        if isinstance(decision, GiveUp):
            return None
        suspect = decision.alone


@pytest.mark.parametrize("slots", [1, 8])
def test_simulation_20_h_tasks_on_machines_that_live_5_h_are_never_buried(slots: int) -> None:
    with_checkpoints = [
        run_fleet(needs_h=20, lives_h=5, checkpoints=True, slots=slots, seed=seed) for seed in range(1000)
    ]
    assert None not in with_checkpoints
    # Without a checkpoint a run of 20 h is one machine in 55: the mean of many attempts proves that it was simulated.
    without = [run_fleet(needs_h=20, lives_h=5, checkpoints=False, slots=slots, seed=seed) for seed in range(100)]
    assert None not in without
    finished = [attempts for attempts in without if attempts is not None]
    assert 40 < sum(finished) / len(finished) < 70


@pytest.mark.parametrize(("slots", "losses"), [(1, 5), (8, 7)])
def test_simulation_a_task_that_ends_every_worker_at_once_is_buried_after_three_hosts_that_count(
    slots: int, losses: int
) -> None:
    notes: list[EndedNote] = []
    suspect = False
    while True:
        notes.append(lost(ran=timedelta(seconds=1), alone=slots == 1 or suspect, on=f"m{len(notes)}"))
        decision = decide(sample_task(), notes, now=NOW)
        if isinstance(decision, GiveUp):
            break
        suspect = decision.alone
    assert len(notes) == losses


def test_simulation_short_task_on_one_slot_workers_of_one_host_that_are_killed_outlives_them_all() -> None:
    notes: list[EndedNote] = []
    for _ in range(20):
        notes.append(lost(ran=timedelta(seconds=15)))
        assert isinstance(decide(sample_task(), notes, now=NOW), RetryAt)
