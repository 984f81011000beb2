"""Cancels tasks and experiments. What has ended already is success, and its record stays as it is.

A task gets a `cancelled` record at once, and the first commit wins: whoever leases it finds the record, and a running
attempt stops at its worker's next look. An experiment is one write however many tasks it has; the embedded file
records what waits there in the same breath.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Protocol, runtime_checkable

from runtime.errors import NotPossible, RecordExists, StoreUnavailable
from runtime.identify import FindsTasks, Identity, Kind
from runtime.records.base import Control, RecordStore
from runtime.status import Stack, Standing, queue_of, read_standing
from runtime.tasks import TaskState, stand_in
from runtime.units import format_time, parse_time
from runtime.verdict import cancelled_record, mark_of

CANCELLED_TASKS_KEPT: Final = 1_000
"""Task ids that a control object names; beyond, only those that a worker reports as running stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """What cancelling one task or experiment came to."""

    name: str
    kind: Kind
    state: TaskState
    """Of a task, afterwards: `cancelled`, or what it had ended as before."""
    already: bool = False
    """It had ended before."""
    waiting: int | None = None
    """Of an experiment: tasks recorded as cancelled now; None where workers record each as they come to it."""
    running: str | None = None
    """The worker whose attempt will be stopped."""


@runtime_checkable
class CancelsWaiting(Protocol):
    """A queue that can record everything that waits as cancelled in one go."""

    def cancel_waiting(self, experiment: str | None = None) -> int: ...


def cancel(stack: Stack, what: Identity, *, now: datetime, by: str | None = None) -> Cancelled:
    """Cancel a task or an experiment; safe to call again. Raises `NotPossible` for a worker."""
    match what.kind:
        case Kind.TASK:
            return cancel_task(stack, what.name, now=now, by=by or person())
        case Kind.EXPERIMENT:
            return cancel_experiment(stack, what.name, now=now)
        case Kind.WORKER:
            raise NotPossible(
                f"`{what.name}` is a worker, and workers are stopped where they run",
                facts=["it gives its tasks back when it gets SIGTERM, and nothing is lost if it is killed"],
                hint="press Ctrl-C there or send it SIGTERM; `runtime queue pause` stops all of a queue",
            )


def cancel_task(stack: Stack, task_id: str, *, now: datetime, by: str) -> Cancelled:
    """Record the task's current generation as cancelled, unless it has ended."""
    records = stack.records
    standing = read_standing(records, task_id)
    if standing.state.terminal:
        return Cancelled(name=task_id, kind=Kind.TASK, state=standing.state, already=True)
    task = standing.task
    if task is None and isinstance(records, FindsTasks):
        # It is there, and cannot be decoded.
        task = stand_in(task_id, standing.experiment, generation=standing.generation)
    if task is None:
        raise NotPossible(
            f"task `{task_id}` is not known well enough to be cancelled",
            facts=["no record of it and no manifest that lists it were found", f"looked in `{records.url}`"],
            hint="cancel its experiment instead: `runtime cancel EXPERIMENT`",
        )
    record = cancelled_record(task, now=now, by=by)
    record = replace(record, attempts=len(standing.history.ended))
    # The mark goes first, so that a record that did not succeed always has one until it is tried again.
    records.mark(mark_of(record, standing.task))
    try:
        records.commit(record)
    except RecordExists as first:
        if first.record.state is not TaskState.CANCELLED:
            records.unmark(task_id, record.generation, TaskState.CANCELLED)
        return Cancelled(name=task_id, kind=Kind.TASK, state=first.record.state, already=True)
    if not records.holds_tasks:
        _tell_workers(stack, standing)
    return Cancelled(name=task_id, kind=Kind.TASK, state=TaskState.CANCELLED, running=standing.holder)


def _tell_workers(stack: Stack, standing: Standing) -> None:
    """Name the task in the control object. The record stands already: this only ends a running attempt sooner."""
    records = stack.records
    queue = queue_of(records, standing.experiment, stack.default_queue)

    def name_task(control: Control) -> Control:
        known = control.cancelled_tasks
        if len(known) >= CANCELLED_TASKS_KEPT:
            known &= {running for seen in records.workers() for running in seen.running}
        return replace(control, cancelled_tasks=known | {standing.task_id})

    update_control(records, queue, name_task)


def cancel_experiment(stack: Stack, experiment: str, *, now: datetime) -> Cancelled:
    """Cancel everything that was submitted to the experiment before now, with one write."""
    records = stack.records
    queue_name = queue_of(records, experiment, stack.default_queue)
    # As the control object will say it, so that it is known again when it is read back.
    now = parse_time(format_time(now))

    def name_experiment(control: Control) -> Control:
        before = control.cancelled_before.get(experiment)
        at = now if before is None else max(before, now)
        return replace(control, cancelled_before={**control.cancelled_before, experiment: at})

    # First the order, which also reaches what is leased now, then what waits.
    update_control(records, queue_name, name_experiment)
    waiting = None
    if records.holds_tasks:
        queue = stack.queue(queue_name)
        waiting = queue.cancel_waiting(experiment) if isinstance(queue, CancelsWaiting) else None
    return Cancelled(name=experiment, kind=Kind.EXPERIMENT, state=TaskState.CANCELLED, waiting=waiting)


def update_control(records: RecordStore, queue: str, change: Callable[[Control], Control]) -> Control:
    """Change a queue's control object and see that the change is there.

    Stores have no compare-and-set for it, so two people who change it at once may undo each other; whoever does not
    find the change writes it again. `change` is called again on what was found and has to leave its own work alone.
    """
    for _ in range(5):
        found = records.control(queue)
        wanted = change(found)
        if wanted == found:
            return found
        records.set_control(queue, wanted)
    found = records.control(queue)
    if change(found) != found:
        raise StoreUnavailable(
            f"the control object of queue `{queue}` could not be changed",
            facts=["somebody else changes it all the time"],
            hint="try again",
        )
    return found


def person() -> str:
    """Who gives the order, for the record's message."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
