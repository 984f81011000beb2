"""Whether the end of an attempt leads to a record or another attempt of its task. Pure; the worker acts on it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import datetime
from typing import TypeAlias

from runtime.errors import explain_briefly
from runtime.reasons import Budget, EndReason
from runtime.tasks.history import EndedNote, History, Record, mark_of
from runtime.tasks.lease import InvalidMessage, Lease, Release, Settlement
from runtime.tasks.model import Task, TaskState, new_token
from runtime.tasks.retry import Again, GiveUp, decide
from runtime.values import dataclass, replace


@dataclass(frozen=True, slots=True)
class Settle:
    """Record how the task ended; no attempt follows."""

    settlement: Settlement


@dataclass(frozen=True, slots=True)
class TryAgain:
    release: Release
    again: Again


@dataclass(frozen=True, slots=True)
class Drop:
    """The lease was lost: nothing is written, another holds the task."""

    why: str


Verdict: TypeAlias = Settle | TryAgain | Drop


def judge_end(
    lease: Lease,
    note: EndedNote,
    history: History,
    *,
    holds: bool,
    now: datetime,
    code: str | None,
    log: str,
    log_url: str | None,
    jitter: Callable[[], float],
) -> Verdict:
    """Decide the step after an unsuccessful attempt. `holds`: its lease is still confirmed."""
    if not holds:
        return Drop(f"its lease had passed on when it ended as {note.reason}")
    ended = (*history.ended, note)
    decision = decide(lease.task, ended, now=now, jitter=jitter)
    if isinstance(decision, Again):
        return TryAgain(Release(lease, decision.not_before, note, decision.alone), decision)
    record = failure(lease, decision, note=note, attempts=len(ended), code=code, log=log, log_url=log_url)
    return Settle(Settlement(lease, record, mark_of(record, lease.task)))


def judge_history(task: Task, history: History, *, now: datetime) -> Again | GiveUp:
    """Decide before a start whether the earlier attempts bury the task, and if not, how and when it may run.

    A worker that vanished could not say when, so the wait after such a loss begins with the note of it. That attempt's
    token spreads the wait, so that every worker computes the same time.
    """
    last = history.ended[-1] if history.ended else None
    if last is None or last.reason is not EndReason.LOST or last.ended_at > now:
        # The note's clock is ahead of ours, so no wait can be computed from it.
        decision = decide(task, history.ended, now=now)
        return replace(decision, not_before=now) if isinstance(decision, Again) else decision
    return decide(task, history.ended, now=last.ended_at, jitter=lambda: zlib.crc32(last.token.encode()) / 2**32)


def failure(
    lease: Lease,
    given_up: GiveUp,
    *,
    note: EndedNote,
    attempts: int,
    code: str | None = None,
    log: str = "",
    log_url: str | None = None,
) -> Record:
    state = TaskState.CANCELLED if given_up.reason is EndReason.CANCELLED else TaskState.FAILED
    return Record(
        task_id=lease.task.id,
        generation=lease.task.generation,
        experiment=lease.task.experiment,
        state=state,
        token=lease.token,
        reason=given_up.reason,
        started_at=note.started_at,
        ended_at=note.ended_at,
        message=given_up.message,
        worker=note.worker,
        attempts=attempts,
        exit_code=note.exit_code,
        log=log,
        log_url=log_url,
        code=code,
    )


def unstarted(
    lease: Lease, reason: EndReason, message: str, *, worker: str | None, now: datetime, attempts: int = 0
) -> Settlement:
    """Make the record of a task that ends without another start: malformed, expired, cancelled or buried."""
    states = {EndReason.EXPIRED: TaskState.EXPIRED, EndReason.CANCELLED: TaskState.CANCELLED}
    record = Record(
        task_id=lease.task.id,
        generation=lease.task.generation,
        experiment=lease.task.experiment,
        state=states.get(reason, TaskState.FAILED),
        token=lease.token,
        reason=reason,
        ended_at=now,
        message=message,
        worker=worker,
        attempts=attempts,
    )
    raw = lease.invalid.raw if lease.invalid else None
    return Settlement(lease, record, mark_of(record, None if lease.invalid else lease.task, raw=raw))


def malformed(task: Task, invalid: InvalidMessage, *, now: datetime) -> Settlement:
    """Make the record of a message that could not be parsed and that nobody has leased; `task` stands for it."""
    lease = Lease(task, new_token(), invalid=invalid)
    return unstarted(lease, EndReason.CONFIG_INVALID, invalid.problem, worker=None, now=now)


def refuse(lease: Lease, *, cancelled: bool, worker: str, now: datetime) -> Settlement | None:
    """Return the record of a task that must not start: malformed, expired or cancelled; None if it may."""
    expires_at = lease.task.expires_at
    if lease.invalid is not None:
        return unstarted(lease, EndReason.CONFIG_INVALID, lease.invalid.problem, worker=worker, now=now)
    if expires_at is not None and expires_at <= now:
        message = f"expired at {expires_at:%Y-%m-%d %H:%M:%S} UTC before it was started"
        return unstarted(lease, EndReason.EXPIRED, message, worker=worker, now=now)
    if cancelled:
        return unstarted(lease, EndReason.CANCELLED, "cancelled before it was started", worker=worker, now=now)
    return None


def failed_instead(
    refused: Settlement | Release, problem: Exception, what: str, *, worker: str, now: datetime
) -> Settlement:
    """Return the failure to record if a task's end, or its return to the queue, was refused; it has the same token."""
    lease = refused.lease
    task = lease.task
    known = refused.record if isinstance(refused, Settlement) else refused.note
    record = Record(
        task_id=task.id,
        generation=task.generation,
        experiment=task.experiment,
        state=TaskState.FAILED,
        token=lease.token,
        reason=EndReason.CONFIG_INVALID,
        ended_at=known.ended_at if known else now,
        started_at=known.started_at if known else None,
        message=f"{what}: {explain_briefly(problem)[:2000]}",
        worker=worker,
        attempts=refused.record.attempts if isinstance(refused, Settlement) else lease.tries + (known is not None),
    )
    raw = lease.invalid.raw if lease.invalid else None
    return Settlement(lease, record, mark_of(record, None if lease.invalid else task, raw=raw))


def counts_against_worker(reason: EndReason) -> bool:
    """Return whether this end counts against the worker; that of a malformed or badly called task does not."""
    return reason.budget is Budget.FAILURES
