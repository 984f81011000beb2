"""Cancels tasks and experiments. A task that has ended counts as success, and its record stays as it is.

A task gets a `cancelled` record at once, and the first commit wins: a worker that leases it finds the record, and a running
attempt stops at its worker's next look. An experiment of any size takes one order, which names the submitted parts; an
embedded file records all of its tasks in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol, runtime_checkable

from runtime.client.resolve_id import FindsTasks, IdKind, ResolvedId
from runtime.client.tasks.status import TaskQueues, queue_of
from runtime.client.tasks.task_facts import Stack, read_standing
from runtime.errors import NotPossible
from runtime.records.base import ManifestPart, RecordExists, settle_record
from runtime.records.control_commands import ControlCommand, OrderKind, person
from runtime.records.notifications import keep_message
from runtime.tasks.history import Record, cancelled_record, mark_of
from runtime.tasks.model import Task, TaskState
from runtime.tasks.notifications import notification_of
from runtime.tasks.wire import stand_in


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelResult:
    name: str
    kind: IdKind
    state: TaskState
    """State afterwards: `cancelled`, or the state in which the task had ended before."""
    already: bool = False
    ended: int | None = None
    """Tasks of an experiment recorded as cancelled now; None if workers record each one when they lease it."""
    running: str | None = None
    """The worker whose attempt will be stopped."""


@runtime_checkable
class CancelsOpen(Protocol):
    """A queue that can record all tasks of an experiment as cancelled in one transaction."""

    def cancel_open(self, experiment: str, *, before: Callable[[Task], None]) -> int:
        """`before` gets the tasks whose ends somebody wants to hear of."""


def cancel(stack: Stack, what: ResolvedId, *, now: datetime) -> CancelResult:
    """Cancel a task or an experiment; safe to call again. Raises `NotPossible` for a worker."""
    check_cancellable(what)
    if what.kind is IdKind.TASK:
        return cancel_task(stack, what.name, now=now, by=person())
    return cancel_experiment(stack, what.name, now=now)


def check_cancellable(what: ResolvedId) -> None:
    """Raise `NotPossible` for a worker."""
    if what.kind is IdKind.WORKER:
        raise NotPossible(
            f"`{what.name}` is a worker, and workers are stopped where they run",
            facts=["it gives its tasks back when it gets SIGTERM, and nothing is lost if it is killed"],
            hint="press Ctrl-C there or send it SIGTERM; `runtime queue pause` stops all of a queue",
        )


def cancel_task(stack: Stack, task_id: str, *, now: datetime, by: str) -> CancelResult:
    """Record the task's current generation as cancelled, unless it has ended."""
    records = stack.records
    standing = read_standing(records, task_id)
    if standing.state.terminal:
        return CancelResult(name=task_id, kind=IdKind.TASK, state=standing.state, already=True)
    task = standing.task
    if task is None and isinstance(records, FindsTasks):
        # The task is stored, but cannot be decoded.
        task = stand_in(task_id, standing.experiment, generation=standing.generation)
    if task is None:
        raise NotPossible(
            f"task `{task_id}` is not known well enough to be cancelled",
            facts=["no record of it and no manifest that lists it were found", f"looked in `{records.url}`"],
            hint="cancel its experiment instead: `runtime cancel EXPERIMENT`",
        )
    if not records.holds_tasks:
        # The order comes first: a running attempt stops by it even if this process ends before it has written the record.
        named = frozenset({(task_id, standing.generation)})
        order, parts = (
            ControlCommand(kind=OrderKind.CANCEL, at=now, by=by, tasks=named),
            records.parts(standing.experiment),
        )
        _report_workers(stack, standing.experiment, parts, order)
    record = cancelled_record(task.id, task.generation, task.experiment, now=now, by=by)
    record = replace(record, attempts=len(standing.history.ended) + (standing.holder is not None))
    _keep_message(stack, task, record)
    try:
        settle_record(records, record, mark_of(record, standing.task))
    except RecordExists as first:
        if first.record.state is not TaskState.CANCELLED:
            return CancelResult(name=task_id, kind=IdKind.TASK, state=first.record.state, already=True)
        # Another user cancelled it at the same moment, or a worker has followed the order already.
    return CancelResult(name=task_id, kind=IdKind.TASK, state=TaskState.CANCELLED, running=standing.holder)


def cancel_experiment(stack: Stack, experiment: str, *, now: datetime) -> CancelResult:
    """Cancel all tasks that were submitted to the experiment; tasks that are submitted afterwards run."""
    records = stack.records
    if records.holds_tasks:
        queue = stack.queue(queue_of(records, experiment, stack.default_queue))

        def before(task: Task) -> None:
            _keep_message(stack, task, cancelled_record(task.id, task.generation, experiment, now=now, by=person()))

        ended = queue.cancel_open(experiment, before=before) if isinstance(queue, CancelsOpen) else None
        return CancelResult(name=experiment, kind=IdKind.EXPERIMENT, state=TaskState.CANCELLED, ended=ended)
    parts = records.parts(experiment)
    listed = frozenset(part.name for part in parts)
    order = ControlCommand(kind=OrderKind.CANCEL, at=now, by=person(), experiments={experiment: listed})
    _report_workers(stack, experiment, parts, order)
    # Tasks that were tried again are in no manifest, so the order names each. Finding them takes a look at every record.
    begun = frozenset((task_id, generation + 1) for task_id, generation in records.tried_again(experiment))
    if begun:
        _report_workers(stack, experiment, parts, replace(order, experiments={}, tasks=begun))
    return CancelResult(name=experiment, kind=IdKind.EXPERIMENT, state=TaskState.CANCELLED)


def _keep_message(stack: Stack, task: Task, record: Record) -> None:
    """Keep the message about a cancel for the workers, which send it once there is a record. Another end may come first."""
    if task.notify:
        queue = TaskQueues(stack).find(task.experiment, task.id)
        if (message := notification_of(task, record, queue)) is not None:
            keep_message(stack.records.open_notifications(), message)


def _report_workers(stack: Stack, experiment: str, parts: Iterable[ManifestPart], order: ControlCommand) -> None:
    """Put the order into every queue that the experiment may have been submitted to."""
    usual = stack.default_queue
    # Workers know a queue that is named by its address under another name.
    usual = stack.queue().name if ":" in usual else usual
    others = {part.queue for part in parts if part.queue is not None}
    for name in sorted({queue_of(stack.records, experiment, usual), usual, *others, *stack.queue_names()}):
        stack.records.put_order(name, order)
