"""Dead letters, and trying again: the next generation is published first, then the mark is closed.

Dead letters are the marks of failed records, so they are listed from the store and never by leasing. A redrive that
is killed between its two steps is run again: queue and records take the same generation for the same task, and nothing
is doubled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeVar

from runtime.client.resolve_id import find_submitted
from runtime.client.tasks.status import TaskQueues, last_line, purged
from runtime.client.tasks.task_facts import Stack, TaskFacts, read_standing
from runtime.end_reasons import EndReason
from runtime.errors import InvalidTask, InvalidValue
from runtime.records.base import RecordStore
from runtime.system import system
from runtime.tasks.history import Mark, Record
from runtime.tasks.model import Task, TaskState, next_generation

BATCH: Final = 500
"""Tasks that are published together before their marks are closed."""
AT_ONCE: Final = 16

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveResult:
    """A task with a new generation in its queue, or the reason against it."""

    task: str
    experiment: str
    generation: int
    """The new generation, or the ended one of a refused task."""
    queue: str | None
    """The queue in which it waits now, if it does."""
    refused: str | None = None

    @property
    def done(self) -> bool:
        return self.refused is None

    @property
    def already(self) -> bool:
        """Whether another call queued it, or this one before it was interrupted."""
        return self.refused is not None and self.queue is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A failed generation that waits for a person."""

    task: str
    generation: int
    experiment: str
    reason: EndReason
    error: str
    message: str | None
    at: datetime
    redrivable: bool
    entry: Task | None
    raw: str | None
    """The original message, if it could not be parsed."""


def read_dead(
    records: RecordStore, experiment: str | None = None, *, reasons: Iterable[EndReason] = ()
) -> Iterator[Mark]:
    """Yield the open failed marks in the store's order; leases nothing.

    A task comes once, though it may fail again while its mark is processed.
    """
    wanted = frozenset(reasons)
    last = None
    for mark in records.marks(experiment, TaskState.FAILED):
        again, last = mark.task_id == last, mark.task_id
        if not again and not purged(mark) and (not wanted or mark.reason in wanted):
            yield mark


def find_dead(records: RecordStore, task_id: str) -> Mark | None:
    mark = read_standing(records, task_id, with_task=False).mark
    return mark if mark is not None and mark.state is TaskState.FAILED and not purged(mark) else None


def dead_letter(mark: Mark) -> DeadLetter:
    return DeadLetter(
        task=mark.task_id,
        generation=mark.generation,
        experiment=mark.experiment,
        reason=mark.reason,
        error=last_line(mark.message) or str(mark.reason),
        message=mark.message,
        at=mark.marked_at,
        redrivable=mark.task is not None,
        entry=mark.task,
        raw=mark.raw,
    )


def parse_reasons(texts: Iterable[str]) -> frozenset[EndReason]:
    """Read names of end reasons. Raises `InvalidValue` with the known ones."""
    try:
        return frozenset(EndReason(text) for text in texts)
    except ValueError:
        known = {reason.value for reason in EndReason}
        wrong = next(text for text in texts if text not in known)
        raise InvalidValue("end reason", wrong, ", ".join(sorted(known))) from None


def redrive(stack: Stack, marks: Iterable[Mark], *, now: datetime) -> Iterator[RedriveResult]:
    """Try the tasks of the marks again, in batches as they come, with new budgets."""
    records = stack.records
    marks = iter(marks)
    while batch := list(itertools.islice(marks, BATCH)):
        recorded = _each(records, lambda mark: records.find_all(mark.task_id), batch)
        plans = [plan_redrive(mark, found, now=now) for mark, found in zip(batch, recorded, strict=True)]
        yield from _publish(stack, plans)


def retry(stack: Stack, task_id: str, *, now: datetime) -> RedriveResult:
    """Try one task again that failed, was cancelled or expired; its dead letter may be purged."""
    records = stack.records
    standing = read_standing(records, task_id, with_task=False)
    return next(_publish(stack, [_plan_retry(records, standing, now=now)]))


@dataclass(frozen=True, slots=True)
class RedrivePlan:
    """The next generation of a task with the marks it closes, or the reason against it with the stale marks."""

    task_id: str
    experiment: str
    generation: int
    task: Task | None
    closes: tuple[tuple[int, TaskState], ...] = ()
    refused: str | None = None


def plan_redrive(mark: Mark, recorded: Sequence[Record], *, now: datetime) -> RedrivePlan:
    """Plan the redrive of one mark from all records of its task; a pure function."""

    def refuse(why: str, *, close: bool = False) -> RedrivePlan:
        closes = ((mark.generation, mark.state),) if close else ()
        return RedrivePlan(mark.task_id, mark.experiment, mark.generation, None, closes, why)

    done = next((record for record in recorded if record.state is TaskState.SUCCEEDED), None)
    if done is not None:
        return refuse(f"generation {done.generation} succeeded", close=True)
    if all(record.generation != mark.generation for record in recorded):
        # The mark comes before the record: a worker that died between the two left the task in its queue.
        return refuse("it has not ended: it is still in its queue")
    newest = max(record.generation for record in recorded)
    if newest > mark.generation:
        return refuse(f"it was tried again already, as generation {newest}", close=True)
    if mark.task is None:
        why = "its dead letter was purged" if purged(mark) else "it could not be parsed: correct it and submit it again"
        return refuse(why)
    return _plan_next(refuse(""), mark.task, recorded, now=now)


def _plan_next(plan: RedrivePlan, task: Task, recorded: Sequence[Record], *, now: datetime) -> RedrivePlan:
    """Complete the plan with the next generation of `task`, or with the reason against it."""
    try:
        again = begin_again(replace(task, generation=plan.generation), now=now)
    except InvalidTask as problem:
        return replace(plan, refused=f"its next generation cannot be made: `{problem.field}` {problem.problem}")
    closes = tuple((record.generation, record.state) for record in recorded)
    return replace(plan, task=again, closes=closes, refused=None)


def begin_again(task: Task, *, now: datetime) -> Task:
    """Make the next generation, submitted now: no earlier order covers it, and an expiry in the past is dropped.

    Raises `InvalidTask` after the last generation.
    """
    task = next_generation(task)
    expired = task.expires_at is not None and task.expires_at <= now
    return replace(task, submitted_at=now, expires_at=None if expired else task.expires_at)


def _plan_retry(records: RecordStore, standing: TaskFacts, *, now: datetime) -> RedrivePlan:
    def refuse(why: str) -> RedrivePlan:
        return RedrivePlan(standing.task_id, standing.experiment, standing.generation, None, (), why)

    done = next((record for record in standing.recorded if record.state is TaskState.SUCCEEDED), None)
    if done is not None:
        return refuse(
            "it succeeded" if done.generation == standing.generation else f"generation {done.generation} succeeded"
        )
    if not standing.state.terminal:
        running = f" by worker `{standing.holder}`" if standing.holder else ""
        return refuse(f"it has not ended: it is {standing.state}{running}")
    mark = standing.mark
    task = (mark.task if mark else None) or standing.task or find_submitted(records, standing.task_id)
    if task is None:
        if mark is not None and not purged(mark):
            return plan_redrive(mark, standing.recorded, now=now)
        return refuse("nothing here describes it any more: submit it again")
    return _plan_next(refuse(""), task, standing.recorded, now=now)


def _publish(stack: Stack, plans: Sequence[RedrivePlan]) -> Iterator[RedriveResult]:
    """Put the next generations into the queues of the earlier ones, then close the marks."""
    records, known_queues = stack.records, TaskQueues(stack)
    queues: dict[str, str] = {}
    by_queue: dict[str, list[Task]] = {}
    for plan in plans:
        if plan.task is not None:
            queues[plan.task_id] = known_queues.find(plan.experiment, plan.task_id)
            by_queue.setdefault(queues[plan.task_id], []).append(plan.task)
    before: dict[str, frozenset[str] | None] = {}
    for name, tasks in by_queue.items():
        before[name] = stack.queue(name).put(tasks).begun_before
    closing = [
        (plan.task_id, generation, state)
        for plan in plans
        for generation, state in plan.closes
        if state is not TaskState.SUCCEEDED
    ]
    by_us = _each(records, lambda mark: records.unmark(*mark), closing)
    closed = {each[:2] for each, first in zip(closing, by_us, strict=True) if first}
    for plan in plans:
        refused = plan.refused
        if plan.task is not None:
            known = before[queues[plan.task_id]]
            # If the queue does not know who began a generation, the call that closed the mark did.
            ours = plan.task_id not in known if known is not None else (plan.task_id, plan.generation) in closed
            if not ours:
                refused = f"it is queued already, as generation {plan.task.generation}"
        yield RedriveResult(
            task=plan.task_id,
            experiment=plan.experiment,
            generation=plan.task.generation if plan.task else plan.generation,
            queue=queues[plan.task_id] if plan.task else None,
            refused=refused,
        )


def purge_dead(records: RecordStore, marks: Iterable[Mark]) -> int:
    """Remove dead letters from the list, so that none is redriven by mistake. Records and totals stay."""
    purged_now = 0
    for mark in marks:
        records.mark(replace(mark, task=None, raw=None))
        purged_now += 1
    return purged_now


def _each(records: RecordStore, call: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Map `call` over the items, with several calls at once if each is a request."""
    if records.holds_tasks or len(items) < 2:
        return [call(item) for item in items]
    with system.pool(AT_ONCE, name="redrive") as pool:
        return list(pool.map(call, items))
