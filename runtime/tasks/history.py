"""What a task became: its record, its mark as a dead letter, and how each of its attempts started and ended."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from runtime.reasons import EndReason
from runtime.tasks.model import Task, TaskState, new_token
from runtime.values import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """How a generation of a task ended, for good. Whoever creates it first has won."""

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
    """A readable sentence for what did not succeed, or what was left out of its outputs; its last line is what status
    shows."""
    worker: str | None = None
    attempts: int = 1
    """Attempts of this generation that ended, this one included."""
    exit_code: int | None = None
    value: Any = None
    """What the function returned, JSON, or None; larger than `INLINE_BYTES` it lies at `value_url`."""
    value_url: str | None = None
    log: str = ""
    """Standard output and error as they came; of a longer log its end, the whole at `log_url`."""
    log_url: str | None = None
    outputs_url: str | None = None
    """The attempt's folder, where it wrote one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    code: str | None = None
    """Content id of the snapshot, or commit or digest of the code that the worker ran."""
    unreadable: str | None = None
    """Why what lies in the store cannot be decoded. Its value is missing then, and so may be all but what its name and
    length say: task, generation and state."""


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
    """Where it ran, as `clock.machine_id` names it; None in notes of older releases."""
    evidence: str | None = None
    """Of a loss: what died although the worker lived, so that machine and worker are not to blame."""
    progressed: bool = False
    """It reported progress or left a new checkpoint."""
    exit_code: int | None = None
    log: str = ""
    """The end of its log, at most 8 KiB."""

    @property
    def ran_for(self) -> timedelta | None:
        return None if self.started_at is None else self.ended_at - self.started_at


@dataclass(frozen=True, slots=True)
class StartedMark:
    """An attempt began on `worker`; written where the queue itself does not know its holders."""

    token: str
    worker: str
    started_at: datetime
    alone: bool
    machine: str | None = None


@dataclass(frozen=True, slots=True)
class History:
    """What is known of the earlier attempts of one generation."""

    ended: tuple[EndedNote, ...] = ()
    """Oldest first."""
    open: tuple[StartedMark, ...] = ()
    """Began and left no word of their end: running elsewhere, or lost."""


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
    """What redrive publishes again; None for what could not be parsed."""
    raw: str | None = None
    """The message as it came, where it could not be parsed. Neither it nor a task: the dead letter was purged."""


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


def cancelled_record(task: Task, *, now: datetime, by: str) -> Record:
    """What `cancel` commits for a task that it does not hold."""
    return Record(
        task_id=task.id,
        generation=task.generation,
        experiment=task.experiment,
        state=TaskState.CANCELLED,
        token=new_token(),
        reason=EndReason.CANCELLED,
        ended_at=now,
        message=f"cancelled by {by}",
        attempts=0,
    )
