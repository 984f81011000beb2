"""The promises of every record store, and the values that lie in it.

The store is the truth about tasks: one create-only record ends each generation of a task, notes describe earlier
attempts' ends, marks list unsuccessful tasks, and manifests list submitted ones. docs/records.md has the
layout that people read with plain tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from runtime import faults
from runtime.errors import RuntimeFailure
from runtime.records.control_commands import ControlCommand, QueueControl
from runtime.tasks.history import EndedNote, History, Mark, Record, StartedMark
from runtime.tasks.model import Task, TaskState

if TYPE_CHECKING:
    from runtime.records.artifacts import ArtifactStore
    from runtime.records.notifications import NotificationStore

INLINE_BYTES: Final = 64 * 1024
"""Logs and values up to this size lie in the record itself."""


@dataclass(frozen=True, slots=True, order=True)
class ManifestPart:
    """A create-only list of submitted tasks; name and count are all that status needs."""

    experiment: str
    name: str
    """`<index>-<count>-<digest>`"""
    count: int
    sent: bool = False
    """Published to the queue, all of it."""
    late: bool = False
    """Another submission did not wait for it, so others may list its tasks, too."""
    queue: str | None = None
    """Where its tasks were put, if not where the experiment's first ones were."""

    def is_in(self, queue: str, home: str | None) -> bool:
        """Whether its tasks are in `queue`. `home` is its experiment's; None if nobody knows it."""
        return (self.queue or home or queue) == queue

    @classmethod
    def named(cls, experiment: str, name: str) -> ManifestPart:
        return cls(experiment, name, int(name.split("-")[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """A worker's report about itself, every 30 s and once more when it leaves."""

    worker: str
    host: str
    queue: str
    seen_at: datetime
    started_at: datetime
    slots: int
    running: tuple[str, ...] = ()
    """Ids of the tasks it runs now."""
    done: int = 0
    failed: int = 0
    rate_per_s: float = 0
    left: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    declined: Mapping[str, str] = field(default_factory=dict)
    """Task id → why no slot of this worker can hold it; at most 20."""
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Id of a running task → its `experiment`, and what its attempt has reported: `step`, `of`, and `metrics` by name; 64 at
    most."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Tasks of an experiment by state, as of a time."""

    counts: Mapping[TaskState, int]
    as_of: datetime
    exact: bool
    """Counted from records, not from what workers last reported."""

    @property
    def submitted(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class ExperimentSeen:
    name: str
    created_at: datetime | None
    queue: str | None = None


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A task as it stands in a store that holds tasks."""

    task: Task | None
    """None if it cannot be decoded."""
    generation: int
    state: TaskState
    experiment: str
    queue: str


@dataclass(frozen=True, slots=True)
class KeptOutputs:
    url: str | None = None
    """A folder's path or a bucket's URL; None if nothing was kept."""
    left_out: str | None = None
    """The outputs that could not be kept and why, for people to read."""


class ResultStore(Protocol):
    """How tasks ended. Every method here and below may be called again after any failure.

    Failures of the service are `StoreUnavailable`, already retried with backoff.
    """

    url: str

    def commit(self, record: Record) -> None:
        """Make it the one record of its generation; durable on return.

        Raises `RecordExists` if another token's record was first. A record with this one's token is not a conflict:
        a retried conditional write loses to itself.
        """

    def find(self, task_id: str, generation: int) -> Record | None: ...
    def find_all(self, task_id: str) -> list[Record]:
        """The records of all generations, oldest first; a unique prefix of the id will not do."""

    def resolve(self, prefix: str, limit: int = 10) -> list[str]:
        """Task ids that begin with `prefix`, among recorded, marked and (where it holds them) queued ones."""

    def records(self, experiment: str) -> Iterator[Record]:
        """All of them, in no order; a read for each unless it is the queue's own file."""

    def recorded(self, experiment: str) -> Iterator[tuple[str, int]]:
        """Id and generation of each record, in no order, by listing alone."""

    def tried_again(self, experiment: str) -> Iterator[tuple[str, int]]:
        """Tasks with a next generation that has not ended: id and generation of each newest record that is no success and
        has a closed mark."""

    def record_url(self, task_id: str, generation: int) -> str:
        """The place where people find a record that exists."""

    def mark(self, mark: Mark) -> None:
        """Write a mark. Safe to repeat; a closed mark stays closed, however late this comes."""

    def unmark(self, task_id: str, generation: int, state: TaskState) -> bool:
        """Close a mark for good; True if this call did, and always if the queue's own file holds the tasks."""

    def marks(
        self, experiment: str | None = None, state: TaskState | None = None, *, limit: int | None = None
    ) -> Iterator[Mark]:
        """The newest generation's mark of each task, unless its record contradicts it.

        `limit` bounds the marks examined, and so the requests; fewer may come back.
        """

    def find_mark(self, task_id: str, generation: int, state: TaskState) -> Mark | None:
        """The mark, if `marks` would list it."""


class AttemptStore(Protocol):
    """Attempts that began, and the ends of attempts that did not succeed."""

    def record_started(self, task: Task, started: StartedMark) -> None: ...
    def retract_started(self, task: Task, token: str) -> None:
        """Remove the mark of an attempt that did not begin after all."""

    def record_proven(self, task: Task, token: str) -> None:
        """Note that a running attempt has proven itself: if its worker is lost, nobody else knows how long it ran."""

    def record_ended(self, task: Task, note: EndedNote) -> None:
        """Create-only by token; a second one of the same token changes nothing.

        In a store that does not hold the leases, an attempt's own end counts, and not an `unseen` one of the same token:
        the worker that noted that may have been wrong.
        """

    def history(self, task_id: str, generation: int) -> History: ...


class ManifestStore(Protocol):
    """The submitted tasks, and how many of them have ended."""

    def put_experiment(self, experiment: str, *, queue: str | None) -> str | None:
        """Make it with its first task. Returns the queue of all parts that name none; None if it is not certain."""

    def experiments(self) -> list[ExperimentSeen]: ...
    def find_experiment(self, experiment: str) -> ExperimentSeen | None: ...
    def put_part(self, experiment: str, index: int, lines: Sequence[str], *, queue: str | None = None) -> ManifestPart:
        """Create-only by index: the same lines again are the same part, others raise `PartTaken`. It names `queue`."""

    def parts(self, experiment: str) -> list[ManifestPart]: ...
    def read_part(self, part: ManifestPart) -> list[str]: ...
    def mark_sent(self, part: ManifestPart) -> None: ...
    def record_late(self, part: ManifestPart) -> None:
        """Note that others may list the tasks of a part that is not sent."""

    def put_counters(self, worker: str, counters: Mapping[str, Mapping[TaskState, int]]) -> None:
        """Report, by experiment, the records that this worker has committed since it started."""

    def totals(self, experiment: str, *, exact: bool = False) -> Totals:
        """Without `exact` a hint that costs no request per task or worker: see `runtime.records.totals`."""


class FleetStore(Protocol):
    """Orders for workers, and workers' reports."""

    def put_order(self, queue: str, order: ControlCommand) -> str:
        """Give the workers of a queue an order; durable on return, and never lost to another given at the same moment.

        Returns the order's id. Now and then earlier orders are merged into one, which loses none of them.
        """

    def control(self, queue: str, *, max_age: timedelta = timedelta(0)) -> QueueControl:
        """All orders of the queue, by one listing and a read of each new one.

        Returns the same object as before while none is new, and without a request if the last read is younger than
        `max_age`.
        """

    def skew(self) -> timedelta | None:
        """How far this machine's clock is ahead of the store's; None if the store uses this machine's.

        Costs a request the first time, unless an earlier answer contained the store's time.
        """

    def put_worker(self, seen: WorkerSeen) -> None: ...
    def workers(self, *, newer_than: timedelta = timedelta(days=1)) -> list[WorkerSeen]: ...


class FileStore(Protocol):
    """Payloads and values beyond the size of a message or record, and the files of attempts."""

    def put_blob(self, data: bytes, *, prefix: str = "payloads") -> str:
        """Content-addressed; returns a reference that `get_blob` takes and people can read."""

    def get_blob(self, reference: str) -> bytes: ...
    def has_blob(self, reference: str) -> bool: ...

    def put_note(self, reference: str, data: bytes) -> None:
        """Keep a note beside the content of a reference, for people. The first one stays."""

    def get_note(self, reference: str) -> bytes | None: ...

    def log_url(self, task_id: str, token: str) -> str:
        """The URL that `append_log` returns, also before its first call."""

    def outputs_url(self, task_id: str, token: str) -> str:
        """The place for an attempt's outputs: a folder's path, or a bucket's URL."""

    def checkpoints_path(self, task_id: str) -> str | None:
        """The folder that all attempts of a task share; None if the store has no folders."""

    def keep_outputs(self, task_id: str, token: str, folder: Path) -> KeptOutputs:
        """Make the files that an attempt left in `folder` durable; returns their place, and the files left out."""

    def open_artifacts(self) -> ArtifactStore:
        """The artifacts of tasks, and those that people put."""

    def open_notifications(self) -> NotificationStore:
        """The messages about ends that are to be sent, and those that were."""

    def append_log(self, task_id: str, token: str, data: bytes) -> str:
        """Add to an attempt's long log and return its URL."""

    def read_log(self, url: str) -> Iterator[bytes]: ...

    def keep_reports(self, task_id: str, token: str, data: bytes) -> None:
        """Keep the sum of the numbers that an attempt reported; create-only by token."""

    def read_reports(self, task_id: str, token: str) -> bytes | None:
        """The sum that `keep_reports` kept; None if the attempt reported nothing."""


class RecordStore(ResultStore, AttemptStore, ManifestStore, FleetStore, FileStore, Protocol):
    """The truth about tasks, in one place."""

    holds_tasks: bool
    """It is the queue's own file: tasks put there are durable and listed, and need no manifest."""

    def check(self) -> None:
        """Prove once that create-only holds here. Raises `StoreUnsafe`."""

    def close(self) -> None: ...


def calls_at_once(records: RecordStore) -> int:
    """How many calls of one kind to make at a time; calls into this process's memory wait for nothing."""
    return 1 if records.url.startswith("memory:") else 16


class RecordExists(RuntimeFailure):
    """Another attempt's record was first; `record` is that one."""

    def __init__(self, record: Record) -> None:
        self.record = record
        super().__init__(
            f"task `{record.task_id}` already has a record: {record.state}",
            facts=[f"generation {record.generation}, by worker `{record.worker}`", "result discarded, nothing written"],
        )


def settle_record(records: ResultStore, record: Record, mark: Mark | None = None) -> None:
    """Write the mark, then the record; both are durable on return.

    Raises `RecordExists` if another attempt's record was first; if that record contradicts the mark, the mark is closed.
    """
    if mark is not None:
        records.mark(mark)
        faults.reach("queue.marked")
    try:
        records.commit(record)
    except RecordExists as first:
        if mark is not None and first.record.state is not record.state:
            records.unmark(record.task_id, record.generation, record.state)
        raise
    faults.reach("queue.recorded")


def is_unwritten(record: Record, existing: Record | None) -> bool:
    """Whether `record` has yet to be written; False if `existing` is the same record, from a repeated write.

    Raises `RecordExists` if `existing` is another attempt's.
    """
    if existing is not None and existing.token != record.token:
        raise RecordExists(existing)
    return existing is None
