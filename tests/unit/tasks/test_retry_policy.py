"""Tasks that must not start, and what the ends of attempts mean for their tasks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from runtime.end_reasons import Budget, EndReason
from runtime.tasks.history import EndedNote, History, InvalidMessage, Lease, Release
from runtime.tasks.model import TaskState
from runtime.tasks.retry_policy import (
    Drop,
    GiveUp,
    RetryAt,
    Settle,
    TryAgain,
    counts_against_worker,
    decide,
    failed_instead,
    judge_end,
    judge_history,
    malformed,
    refuse,
    unstarted,
)
from runtime.testing import sample_task

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
PAST = NOW - timedelta(seconds=1)
LEASE = Lease(sample_task(max_failures=2), "t")


@pytest.mark.parametrize(
    ("lease", "cancelled", "expected"),
    [
        (Lease(sample_task(), "t"), True, (TaskState.CANCELLED, EndReason.CANCELLED)),
        (Lease(sample_task(expires_at=NOW), "t"), True, (TaskState.EXPIRED, EndReason.EXPIRED)),
        (
            Lease(sample_task(expires_at=PAST), "t", invalid=InvalidMessage("i", "{", "no JSON")),
            True,
            (TaskState.FAILED, EndReason.CONFIG_INVALID),
        ),
    ],
    ids=["cancelled", "expired", "malformed"],
)
def test_task_that_must_not_start_is_recorded_with_its_first_reason(
    lease: Lease, cancelled: bool, expected: tuple[TaskState, EndReason]
) -> None:
    settlement = refuse(lease, cancelled=cancelled, worker="w-1", now=NOW)

    assert settlement is not None
    assert (settlement.record.state, settlement.record.reason) == expected
    assert (settlement.record.token, settlement.record.attempts, settlement.record.worker) == ("t", 0, "w-1")


def test_task_that_may_start_has_no_record() -> None:
    lease = Lease(sample_task(expires_at=NOW + timedelta(seconds=1)), "t")

    assert refuse(lease, cancelled=False, worker="w-1", now=NOW) is None


def ended(reason: EndReason, *, at: datetime = NOW, token: str = "a", message: str | None = None) -> EndedNote:
    return EndedNote(
        token=token, reason=reason, ended_at=at, started_at=at - timedelta(minutes=1), worker="w-1", message=message
    )


def judged(note: EndedNote, *earlier: EndedNote, holds: bool = True) -> Settle | TryAgain | Drop:
    return judge_end(
        LEASE,
        note,
        History(ended=earlier),
        holds=holds,
        now=NOW,
        code="sha256:1",
        log="its log",
        log_url="file:/log",
        jitter=lambda: 0.5,
    )


def test_end_of_an_attempt_whose_lease_has_passed_on_writes_nothing() -> None:
    assert judged(ended(EndReason.APP_FAILED), holds=False) == Drop(
        "its lease had passed on when it ended as app_failed"
    )


def test_end_that_leaves_budget_releases_the_task_with_its_note_and_the_time_of_the_next() -> None:
    note = ended(EndReason.APP_FAILED)

    verdict = judged(note)

    later = NOW + timedelta(seconds=1)
    assert verdict == TryAgain(Release(LEASE, later, note, False), RetryAt(later, False, Budget.FAILURES, 1))


@pytest.mark.parametrize(
    ("reason", "earlier", "state", "message"),
    [
        (EndReason.APP_FAILED, [EndReason.APP_FAILED], TaskState.FAILED, "ValueError: no"),
        (EndReason.CONFIG_INVALID, [], TaskState.FAILED, "ValueError: no"),
        (EndReason.CANCELLED, [], TaskState.CANCELLED, "ValueError: no"),
        (EndReason.CANCELLED, [], TaskState.CANCELLED, None),
        (EndReason.APP_FAILED, [EndReason.OOM], TaskState.FAILED, None),
    ],
)
def test_end_that_is_final_is_recorded_with_all_that_is_known(
    reason: EndReason, earlier: list[EndReason], state: TaskState, message: str | None
) -> None:
    note = ended(reason, message=message)

    verdict = judged(note, *(ended(each, at=PAST) for each in earlier))

    assert isinstance(verdict, Settle)
    record = verdict.settlement.record
    assert (record.state, record.reason, record.message) == (state, reason, message or f"ended as {reason}")
    assert (record.token, record.attempts, record.worker) == ("t", len(earlier) + 1, "w-1")
    assert (record.started_at, record.ended_at) == (note.started_at, note.ended_at)
    assert (record.code, record.log, record.log_url) == ("sha256:1", "its log", "file:/log")


def test_task_without_a_past_may_run_at_once() -> None:
    assert judge_history(sample_task(), History(), now=NOW) == RetryAt(NOW, False, Budget.NONE, 0)


def test_task_that_failed_before_may_run_at_once_since_its_release_has_waited() -> None:
    past = History(ended=(ended(EndReason.APP_FAILED, at=PAST),))

    assert judge_history(sample_task(), past, now=NOW) == RetryAt(NOW, False, Budget.FAILURES, 1)


def test_task_whose_budget_is_spent_is_buried_by_its_past() -> None:
    past = History(ended=(ended(EndReason.APP_FAILED, at=PAST, message="no"),))

    assert judge_history(sample_task(max_failures=1), past, now=NOW) == GiveUp(EndReason.APP_FAILED, "no")


def test_task_that_was_lost_waits_from_the_note_and_every_worker_computes_the_same_time() -> None:
    lost = [ended(EndReason.LOST, at=PAST - timedelta(hours=1), token="a"), ended(EndReason.LOST, at=PAST, token="b")]

    found = {judge_history(sample_task(), History(ended=tuple(lost)), now=NOW) for _ in range(5)}
    [again] = found

    assert isinstance(again, RetryAt)
    # CRC-32 of `b` is 0x71beeff9, so the wait of one second is spread by 0.5 + 0.4443.
    wait = timedelta(seconds=1) * (0.5 + 0x71BEEFF9 / 2**32)
    assert again.not_before == PAST + wait
    # Also at the moment of the note itself.
    assert judge_history(sample_task(), History(ended=tuple(lost)), now=PAST) == again


def test_loss_by_a_clock_ahead_of_ours_costs_no_wait() -> None:
    lost = [ended(EndReason.LOST, at=PAST), ended(EndReason.LOST, at=NOW + timedelta(seconds=1))]

    again = judge_history(sample_task(), History(ended=tuple(lost)), now=NOW)

    assert isinstance(again, RetryAt)
    assert again.not_before == NOW


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (EndReason.EXPIRED, TaskState.EXPIRED),
        (EndReason.CANCELLED, TaskState.CANCELLED),
        (EndReason.CONFIG_INVALID, TaskState.FAILED),
        (EndReason.LOST, TaskState.FAILED),
    ],
)
def test_task_that_ends_unstarted_has_the_state_of_its_reason_and_a_mark(reason: EndReason, state: TaskState) -> None:
    made = unstarted(Lease(sample_task(), "t"), reason, "because", worker="w-1", now=NOW, attempts=2)

    assert (made.record.state, made.record.reason, made.record.message) == (state, reason, "because")
    assert (made.record.ended_at, made.record.attempts) == (NOW, 2)
    assert made.mark is not None
    assert (made.mark.task_id, made.mark.raw) == (sample_task().id, None)


def test_malformed_message_is_recorded_as_failed_with_its_text() -> None:
    made = malformed(sample_task(), InvalidMessage("i", "{", "no JSON"), now=NOW)

    assert (made.record.state, made.record.reason) == (TaskState.FAILED, EndReason.CONFIG_INVALID)
    assert (made.record.message, made.record.worker, made.record.attempts) == ("no JSON", None, 0)
    assert made.mark is not None
    assert (made.mark.raw, made.mark.task) == ("{", None)


def test_end_that_the_store_refuses_is_recorded_as_failed_with_the_reason_and_its_attempts() -> None:
    lease = Lease(sample_task(), "t", tries=4)
    settled = unstarted(lease, EndReason.LOST, "lost", worker="w-1", now=PAST, attempts=3)
    note = ended(EndReason.PREEMPTED, at=PAST)

    def made(refused: object) -> tuple[object, ...]:
        record = failed_instead(refused, ValueError("too long"), "not kept", worker="w-2", now=NOW).record  # type: ignore[arg-type]
        assert (record.state, record.reason, record.token) == (TaskState.FAILED, EndReason.CONFIG_INVALID, "t")
        assert (record.message or "").startswith("not kept: ")
        assert "too long" in (record.message or "")
        return record.ended_at, record.started_at, record.attempts, record.worker

    assert made(settled) == (PAST, None, 3, "w-2")
    assert made(Release(lease, None, note)) == (PAST, note.started_at, 5, "w-2")
    assert made(Release(lease)) == (NOW, None, 4, "w-2")


@pytest.mark.parametrize("reason", list(EndReason))
def test_end_counts_against_the_worker_only_if_the_code_of_the_task_failed(reason: EndReason) -> None:
    blamed = {"app_failed", "oom", "disk", "timeout", "idle", "setup_failed"}

    assert counts_against_worker(reason) is (reason.value in blamed)


def test_capacity_that_was_missing_is_counted_apart() -> None:
    again = decide(
        sample_task(max_failures=1),
        [ended(EndReason.APP_FAILED), ended(EndReason.NO_CAPACITY), ended(EndReason.NO_CAPACITY)],
        now=NOW,
        jitter=lambda: 0.5,
    )

    assert again == RetryAt(NOW + timedelta(seconds=2), False, Budget.CAPACITY, 2)


def test_budget_of_every_reason_is_as_the_documents_say() -> None:
    assert {reason.value: reason.budget.value for reason in EndReason} == {
        "succeeded": "never",
        "app_failed": "failures",
        "oom": "failures",
        "disk": "failures",
        "preempted": "preemptions",
        "node_failed": "preemptions",
        "timeout": "failures",
        "idle": "failures",
        "no_capacity": "capacity",
        "quota": "capacity",
        "setup_failed": "failures",
        "image_failed": "never",
        "config_invalid": "never",
        "sibling_failed": "none",
        "cancelled": "never",
        "expired": "never",
        "lost": "preemptions",
        "duplicate": "never",
    }
