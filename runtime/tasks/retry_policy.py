"""Whether the end of an attempt leads to a record or another attempt of its task. Pure; the worker acts on it.

Three kinds of end differ. A *failure* is the task's own doing and spends `max_failures`: with 3 the third is final,
with 1 or 0 no failure is retried. A *preemption* or a lost machine is not: it spends a budget of its own, and only
if the attempt had no time to prove anything. A *crasher* ends the worker it runs on: a task that was lost twice is
suspected, and is buried only if the evidence points at it or if it was lost on machine after machine. An attempt
that proved itself clears both counts. docs/decisions/retry-budgets.md has the reasons and a simulation.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from runtime.end_reasons import Budget, EndReason
from runtime.errors import explain_briefly
from runtime.system import system
from runtime.tasks.history import EndedNote, History, InvalidMessage, Lease, Record, Release, Settlement, mark_of
from runtime.tasks.model import Task, TaskState, new_token


@dataclass(frozen=True, slots=True)
class Settle:
    """Record how the task ended; no attempt follows."""

    settlement: Settlement


@dataclass(frozen=True, slots=True)
class TryAgain:
    release: Release
    again: RetryAt


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
    if isinstance(decision, RetryAt):
        return TryAgain(Release(lease, decision.not_before, note, decision.alone), decision)
    return Settle(
        _settlement(
            lease,
            TaskState.CANCELLED if decision.reason is EndReason.CANCELLED else TaskState.FAILED,
            decision.reason,
            started_at=note.started_at,
            ended_at=note.ended_at,
            message=decision.message,
            worker=note.worker,
            attempts=len(ended),
            exit_code=note.exit_code,
            log=log,
            log_url=log_url,
            code=code,
        )
    )


def judge_history(task: Task, history: History, *, now: datetime) -> RetryAt | GiveUp:
    """Decide before a start whether the earlier attempts bury the task, and if not, how and when it may run.

    A worker that vanished could not say when, so the wait after such a loss begins with the note of it. That attempt's
    token spreads the wait, so that every worker computes the same time.
    """
    last = history.ended[-1] if history.ended else None
    if last is None or last.reason is not EndReason.LOST or last.ended_at > now:
        # The note's clock is ahead of ours, so no wait can be computed from it.
        decision = decide(task, history.ended, now=now)
        return replace(decision, not_before=now) if isinstance(decision, RetryAt) else decision
    return decide(task, history.ended, now=last.ended_at, jitter=lambda: zlib.crc32(last.token.encode()) / 2**32)


def _settlement(lease: Lease, state: TaskState, reason: EndReason, **facts: Any) -> Settlement:
    """The settlement of a lease whose task did not succeed, with its mark; `facts` are fields of the record."""
    task = lease.task
    record = Record(
        task_id=task.id,
        generation=task.generation,
        experiment=task.experiment,
        state=state,
        token=lease.token,
        reason=reason,
        **facts,
    )
    raw = lease.invalid.raw if lease.invalid else None
    return Settlement(lease, record, mark_of(record, None if lease.invalid else task, raw=raw))


def unstarted(
    lease: Lease, reason: EndReason, message: str, *, worker: str | None, now: datetime, attempts: int = 0
) -> Settlement:
    """Make the record of a task that ends without another start: malformed, expired, cancelled or buried."""
    states = {EndReason.EXPIRED: TaskState.EXPIRED, EndReason.CANCELLED: TaskState.CANCELLED}
    state = states.get(reason, TaskState.FAILED)
    return _settlement(lease, state, reason, ended_at=now, message=message, worker=worker, attempts=attempts)


def malformed(task: Task, invalid: InvalidMessage, *, now: datetime) -> Settlement:
    """Make the record of a message that could not be parsed and that nobody has leased; `task` stands for it."""
    lease = Lease(task, new_token(), invalid=invalid)
    return unstarted(lease, EndReason.CONFIG_INVALID, invalid.problem, worker=None, now=now)


def refuse(lease: Lease, *, cancelled: bool, worker: str, now: datetime) -> Settlement | None:
    """Return the record of a task that must not start: malformed, expired or cancelled; None if it may."""
    expires_at, tries = lease.task.expires_at, lease.tries
    if lease.invalid is not None:
        return unstarted(lease, EndReason.CONFIG_INVALID, lease.invalid.problem, worker=worker, now=now)
    if expires_at is not None and expires_at <= now:
        message = f"expired at {expires_at:%Y-%m-%d %H:%M:%S} UTC while it waited"
        return unstarted(lease, EndReason.EXPIRED, message, worker=worker, now=now, attempts=tries)
    if cancelled:
        return unstarted(
            lease, EndReason.CANCELLED, "cancelled while it waited", worker=worker, now=now, attempts=tries
        )
    return None


def failed_instead(
    refused: Settlement | Release, problem: Exception, what: str, *, worker: str, now: datetime
) -> Settlement:
    """Return the failure to record if a task's end, or its return to the queue, was refused; it has the same token."""
    lease = refused.lease
    known = refused.record if isinstance(refused, Settlement) else refused.note
    return _settlement(
        lease,
        TaskState.FAILED,
        EndReason.CONFIG_INVALID,
        ended_at=known.ended_at if known else now,
        started_at=known.started_at if known else None,
        message=f"{what}: {explain_briefly(problem)[:2000]}",
        worker=worker,
        attempts=refused.record.attempts if isinstance(refused, Settlement) else lease.tries + (known is not None),
    )


def counts_against_worker(reason: EndReason) -> bool:
    """Return whether this end counts against the worker; that of a malformed or badly called task does not."""
    return reason.budget is Budget.FAILURES


PREEMPTION_BUDGET: Final = 100
LOSSES_TO_SUSPECT: Final = 2
"""Losses that make a suspect if the task was alone in at least one of them."""
LOSSES_TOGETHER_TO_SUSPECT: Final = 4
"""The same if others were lost with it each time: machines are suspected first."""
LOSSES_TO_FENCE: Final = 3
"""Losses alone on one machine after which the next attempt runs fenced (`fence`): nothing shows what ended the workers."""
CRASHES_TO_BURY: Final = 3
"""Losses with evidence against the task; or machines that a suspect was lost on."""
PROVEN_AFTER: Final = timedelta(minutes=10)
"""An attempt that ran this long, or reported progress, was not a crasher and spends no preemption."""
ALONE_FOR: Final = PROVEN_AFTER
"""How long a suspect keeps other suspects from starting beside it."""

FIRST_DELAY: Final = timedelta(seconds=1)
LONGEST_DELAY: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Run the task once more, not before a time."""

    not_before: datetime
    alone: bool
    """The task is suspected of ending its workers: run it with no other suspect beside it."""
    charged: Budget
    spent: int
    """Spent of that budget, this end included."""
    fenced: bool = False
    """Keep the attempt from signalling its worker, and its memory from costing the worker's."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Record the failure; it goes to the dead letters."""

    reason: EndReason
    message: str


Decision: TypeAlias = RetryAt | GiveUp


def decide(
    task: Task,
    ended: Iterable[EndedNote],
    *,
    now: datetime,
    jitter: Callable[[], float] | None = None,
) -> Decision:
    """Decide the step after the last of `ended`, the unsuccessful attempts of this generation, oldest first.

    `jitter` returns 0 to 1, by chance if it is None, and spreads the delay over half to one and a half times its length.
    """
    notes = list(ended)
    if not notes:
        return RetryAt(now, alone=False, charged=Budget.NONE, spent=0)
    last = notes[-1]
    unproven = _since_proven(notes)
    losses = [note for note in unproven if note.reason in (EndReason.LOST, EndReason.NODE_FAILED)]
    match last.reason.budget:
        case Budget.NEVER:
            return GiveUp(last.reason, last.message or f"ended as {last.reason}")
        case Budget.FAILURES:
            spent = sum(note.reason.budget is Budget.FAILURES for note in notes)
            if spent >= failures_allowed(task):
                return GiveUp(last.reason, last.message or f"ended as {last.reason}")
        case Budget.PREEMPTIONS:
            if crasher := explain_crasher(losses):
                return GiveUp(EndReason.LOST, crasher)
            spent = sum(_charged_preemption(note) for note in unproven)
            if spent >= PREEMPTION_BUDGET:
                return GiveUp(last.reason, f"preempted or lost {spent} times before it could prove anything")
        case _:
            spent = sum(note.reason.budget is last.reason.budget for note in notes)
    not_before = now + backoff(_in_a_row(notes), jitter)
    return RetryAt(not_before, _is_suspect(losses), last.reason.budget, spent, _wants_fence(losses))


def failures_allowed(task: Task) -> int:
    """Return the number of the failure that is final. No task is given up before its first."""
    return max(1, task.max_failures)


def backoff(times: int, jitter: Callable[[], float] | None = None) -> timedelta:
    """Return 1 s, 2 s, 4 s … up to 10 min for the first, second, third … time, spread by jitter; nothing for 0."""
    if times <= 0:
        return timedelta()
    longest = min(LONGEST_DELAY, FIRST_DELAY * (1 << min(times - 1, 30)))
    return longest * (0.5 + (jitter or system.random)())


def _in_a_row(notes: list[EndedNote]) -> int:
    """Count the attempts in a row that ended like the last; a machine that was taken away costs no wait the first time."""
    last = notes[-1].reason.budget
    count = 0
    for note in reversed(notes):
        if note.reason.budget is not last or (last is Budget.PREEMPTIONS and not _charged_preemption(note)):
            break
        count += 1
    return count - 1 if last is Budget.PREEMPTIONS else count


def _since_proven(notes: list[EndedNote]) -> list[EndedNote]:
    """Return the attempts since the last that ran long enough or made progress, which cleared the task of earlier losses.

    Without this, machines that live for hours on average would bury a task of many hours by their few early deaths.
    """
    proven = [index for index, note in enumerate(notes) if not _unproven(note)]
    return notes[proven[-1] + 1 :] if proven else notes


def _unproven(note: EndedNote) -> bool:
    ran_for = note.ran_for
    return not note.progressed and (ran_for is None or ran_for < PROVEN_AFTER)


def _charged_preemption(note: EndedNote) -> bool:
    return note.reason.budget is Budget.PREEMPTIONS and _unproven(note)


def _is_suspect(losses: list[EndedNote]) -> bool:
    """Whether the task, and not a machine that went with all that ran on it, may have ended its workers."""
    if any(note.alone or note.evidence for note in losses):
        return len(losses) >= LOSSES_TO_SUSPECT
    return len(losses) >= LOSSES_TOGETHER_TO_SUSPECT


def explain_crasher(losses: list[EndedNote]) -> str | None:
    """Explain, from the known facts, why a task is buried for these early losses; None if it is not."""
    blamed = [note for note in losses if note.alone and note.evidence]
    within = f"within {PROVEN_AFTER.seconds // 60} minutes and without progress"
    if len(blamed) >= CRASHES_TO_BURY:
        return (
            f"{blamed[-1].evidence} died under it {len(blamed)} times while the worker lived, with no other "
            f"suspect there, {within}; last on {blamed[-1].worker}"
        )
    suspected = [note for index, note in enumerate(losses) if note.alone and _is_suspect(losses[:index])]
    hosts: dict[str, None] = {}
    boots: set[str] = set()
    for note in suspected:
        host, _, boot = (note.machine or "").rpartition("/")
        hosts[host] = None
        boots.add(boot)
    if min(len(hosts), len(boots)) >= CRASHES_TO_BURY:
        return (
            f"its worker was lost on {len(hosts)} hosts one after the other ({', '.join(hosts)}), with no other "
            f"suspect on it, {within}; what ended the workers is not known"
        )
    return None


def _wants_fence(losses: list[EndedNote]) -> bool:
    alone = Counter(note.machine for note in losses if note.alone)
    return max(alone.values(), default=0) >= LOSSES_TO_FENCE
