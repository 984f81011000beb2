"""A lease, and the two ways to end it: settled with a record, or released for another attempt."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from runtime.tasks.history import EndedNote, Mark, Record
from runtime.tasks.model import Task
from runtime.values import dataclass


class InvalidMessage:
    """A delivered message that cannot be parsed; its lease is settled as a dead letter."""

    __slots__ = ("problem", "raw", "task_id")

    def __init__(self, task_id: str, raw: str, problem: str) -> None:
        self.task_id, self.raw, self.problem = task_id, raw, problem


@dataclass(slots=True, eq=False)
class Lease:
    """The right to run one task until it is no longer renewed."""

    task: Task
    token: str
    """Names the attempt: its record, its notes and its folder bear it."""
    body: str = ""
    """The task's wire text as delivered; empty if it must be encoded again."""
    tries: int = 0
    """Attempts of this generation that are known to have ended before; 0 proves nothing on a remote queue."""
    suspect: bool = False
    """It was held before and came back unstarted or unexplained: start it only where that start is on file."""
    alone: bool = False
    """Suspected of ending its workers: to be run with no other suspect beside it."""
    invalid: InvalidMessage | None = None
    handle: Any = None
    """The queue's own key."""
    published_at: datetime | None = None
    """When the queue's service took in a foreign producer's message, by the service's clock; None for other tasks."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """A lease and the record that ends its task; `mark` goes first if the task did not succeed."""

    lease: Lease
    record: Record
    mark: Mark | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """A lease given back, for another attempt not before a time.

    `note` records how the attempt ended; None if it never started, which counts in no budget.
    """

    lease: Lease
    not_before: datetime | None = None
    note: EndedNote | None = None
    alone: bool = False
    """Run the next attempt with no other suspect beside it."""
