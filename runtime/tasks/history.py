"""The life of a task: leases, how each of its attempts started and ended, its record, and its mark as a dead letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from runtime.end_reasons import EndReason
from runtime.tasks.model import Task, TaskState, new_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """How a generation of a task ended, for good. The first record wins."""

    task_id: str
    generation: int
    experiment: str
    state: TaskState
    """Terminal."""
    token: str
    """The attempt that committed it, or a random token of the command that did (cancel, expire)."""
    reason: EndReason
    ended_at: datetime
    started_at: datetime | None = None
    message: str | None = None
    """A readable sentence about a failure, or about left-out outputs; status shows its last line."""
    worker: str | None = None
    attempts: int = 1
    """Attempts of this generation that ended, this one included."""
    exit_code: int | None = None
    value: Any = None
    """The function's result, JSON, or None; a value larger than `INLINE_BYTES` lies at `value_url`."""
    value_url: str | None = None
    log: str = ""
    """Standard output and error as they came; the end of a longer log, which lies at `log_url`."""
    log_url: str | None = None
    outputs_url: str | None = None
    """The attempt's folder, if it wrote one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last number of each name that the attempt reported."""
    metric_ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Its least and its greatest, of the names that have one; their course is in the store's `read_reports`."""
    code: str | None = None
    """Content id of the snapshot, or commit or digest of the code that the worker ran."""
    unreadable: str | None = None
    """Why the stored record cannot be decoded. Its value is missing then; perhaps everything but task, generation and
    state, which follow from its name and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedNote:
    """How an attempt ended that settled nothing; create-only by its token."""

    token: str
    reason: EndReason
    ended_at: datetime
    started_at: datetime | None = None
    """None if it is not known to have started."""
    worker: str | None = None
    message: str | None = None
    alone: bool = False
    """No other attempt ran on that worker; of a suspect, no other suspect. False if the whole machine went."""
    machine: str | None = None
    """The machine that it ran on, as named by `clock.machine_id`; None in notes of older releases."""
    evidence: str | None = None
    """For a loss: the process that died although the worker lived, so that machine and worker are not to blame."""
    progressed: bool = False
    """It reported progress or left a new checkpoint, or the worker that was lost with it had noted that it is proven."""
    unseen: bool = False
    """Nobody saw it end: `ended_at` is when that was noticed, which may be much later."""
    exit_code: int | None = None
    log: str = ""
    """The end of its log, at most 8 KiB."""

    @property
    def ran_for(self) -> timedelta | None:
        """None if it is not known."""
        return None if self.started_at is None or self.unseen else self.ended_at - self.started_at


@dataclass(frozen=True, slots=True)
class StartedMark:
    """An attempt began on `worker`; written where the queue itself does not know its holders."""

    token: str
    worker: str
    started_at: datetime
    alone: bool
    machine: str | None = None
    proven: bool | None = None
    """Whether it ran long enough or made progress, so that it is not a crasher; None if its worker's release does not note that."""


@dataclass(frozen=True, slots=True)
class History:
    """The known attempts of one generation before this one."""

    ended: tuple[EndedNote, ...] = ()
    """Oldest first."""
    open: tuple[StartedMark, ...] = ()
    """Attempts without a recorded end: running elsewhere, or lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A generation that ended otherwise than by success; failed ones are the dead letters."""

    task_id: str
    generation: int
    experiment: str
    state: TaskState
    marked_at: datetime
    reason: EndReason
    message: str | None
    task: Task | None
    """The task that redrive publishes again; None for a message that could not be parsed."""
    raw: str | None = None
    """A message that could not be parsed, as it came. Without both this and a task, the dead letter was purged."""


def mark_of(record: Record, task: Task | None, *, raw: str | None = None) -> Mark:
    return Mark(
        task_id=record.task_id,
        generation=record.generation,
        experiment=record.experiment,
        state=record.state,
        marked_at=record.ended_at,
        reason=record.reason,
        message=record.message,
        task=task,
        raw=raw,
    )


def cancelled_record(task_id: str, generation: int, experiment: str, *, now: datetime, by: str) -> Record:
    """The record that a command commits for a task that it does not hold."""
    return Record(
        task_id=task_id,
        generation=generation,
        experiment=experiment,
        state=TaskState.CANCELLED,
        token=new_token(),
        reason=EndReason.CANCELLED,
        ended_at=now,
        message=f"cancelled by {by}",
        attempts=0,
    )


@dataclass(frozen=True, slots=True)
class InvalidMessage:
    """A delivered message that cannot be parsed; its lease is settled as a dead letter."""

    task_id: str
    raw: str
    problem: str


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
