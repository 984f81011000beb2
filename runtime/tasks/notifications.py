"""Messages about the end of a task, or of an experiment whose tasks have all ended, and their recipients. Pure.

Equal ends have equal ids, independent of the sender and the number of tries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from runtime.tasks.canonical_json import canonical_json
from runtime.tasks.history import Record, Settlement
from runtime.tasks.model import Task, TaskState, experiment_digest, hex_digest
from runtime.tasks.notification_sinks import TaskSink, sink_fields
from runtime.units import count_noun, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A message that is to be sent: about one generation of a task, or about an experiment if there is no task."""

    experiment: str
    sinks: tuple[TaskSink, ...]
    queue: str = ""
    owner: str = ""
    task: str | None = None
    generation: int = 1
    token: str = ""
    """For an experiment, the submission that asked for the message."""

    @property
    def name(self) -> str:
        """Its name in a store. Those of one experiment that go to the same sinks begin alike."""
        if self.task is not None:
            return f"{self.task}.g{self.generation}"
        return f"e-{experiment_digest(self.experiment)}{_digest([sink_fields(each) for each in self.sinks])[:8]}.{self.token}"


def find_notification(settlement: Settlement, queue: str) -> Notification | None:
    """Return the message about the end that this settlement records; None if nobody wants to hear of it."""
    # The record of another attempt was told of by the worker that committed it.
    if settlement.record.token != settlement.lease.token:
        return None
    return notification_of(settlement.lease.task, settlement.record, queue)


def notification_of(task: Task, record: Record, queue: str) -> Notification | None:
    """Return the message about the end that a record has; None if nobody wants to hear of it."""
    if not task.notify or not any(_wanted(task.notify, record.state)):
        return None
    return Notification(
        experiment=record.experiment,
        sinks=task.notify,
        queue=queue,
        owner=task.submitted_by or "",
        task=record.task_id,
        generation=record.generation,
    )


def _wanted(sinks: Sequence[TaskSink], state: TaskState) -> list[bool]:
    return [state.value in sink.on for sink in sinks]


def choose_sinks(message: Notification, record: Record | None) -> dict[int, TaskSink]:
    """Return the sinks that hear of it, by their number: those of an experiment all do."""
    if record is None:
        return dict(enumerate(message.sinks))
    wanted = _wanted(message.sinks, record.state)
    return {number: sink for number, sink in enumerate(message.sinks) if wanted[number]}


def describe_end(message: Notification, record: Record) -> dict[str, Any]:
    """Return the message about a task that has ended. It has no argument, value or line of a log."""
    state, reason = record.state.value, record.reason.value
    identity = _digest([record.task_id, record.generation, state, reason, record.token])[:24]
    ended_as = {"cancelled": "was cancelled"}.get(state, state)
    also = f": {reason}" if reason != state else ""
    tries = f" after {count_noun(record.attempts, 'attempt')}" if record.attempts > 1 else ""
    return {
        "id": identity,
        "task": record.task_id,
        "generation": record.generation,
        "experiment": record.experiment,
        "queue": message.queue,
        "owner": message.owner,
        "state": state,
        "reason": reason,
        "attempts": record.attempts,
        "at": format_time(record.ended_at),
        "text": f"task {record.task_id[:14]} of {record.experiment} {ended_as}{tries}{also}",
    }


def describe_complete(message: Notification, counts: Mapping[TaskState, int], *, now: datetime) -> dict[str, Any]:
    """Return the message about an experiment in which nothing is left to do."""
    ended = {state.value: count for state, count in counts.items() if count}
    state = next((each for each in ("failed", "cancelled", "expired") if each in ended), "succeeded")
    said = ", ".join(f"{count:,} {each}" for each, count in sorted(ended.items(), key=lambda one: -one[1]))
    return {
        "id": _digest([message.experiment, message.token, ended])[:24],
        "experiment": message.experiment,
        "queue": message.queue,
        "owner": message.owner,
        "state": state,
        "counts": ended,
        "at": format_time(now),
        "text": f"experiment {message.experiment} is complete: {said}",
    }


def _digest(value: object) -> str:
    return hex_digest(canonical_json(value).encode())
