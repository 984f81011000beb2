"""The allowed pairs of queue and record store, each opened as the product opens it.

A promise that a queue cannot make is named here, once, as a `Limit`; each test states which limits make it meaningless.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.client.tasks.submit import submit_tasks
from runtime.end_reasons import EndReason
from runtime.queues.base import Queue
from runtime.queues.memory import MemoryQueue
from runtime.queues.sqlite.queue import SqliteQueue, open_sqlite
from runtime.records import open_records
from runtime.records.base import RecordStore
from runtime.tasks.history import EndedNote, Lease, Record, Release, Settlement, mark_of
from runtime.tasks.model import Task, TaskState
from runtime.testing import sample_task

if TYPE_CHECKING:
    from tests.services_support import PubsubEmulator

TTL = timedelta(seconds=30)


class Limit(Enum):
    """A promise that a kind of queue cannot make, and the reason."""

    FORGETS_WHAT_WAS_PUT = (
        "a topic keeps no ids: a task put twice is delivered twice, and the record makes that harmless"
    )
    ANY_ORDER = "messages come in any order"
    NO_DEPTH = "the service has no call for it; its metrics are minutes old"
    NO_PEEK = "reading a message leases it"


LIMITS: dict[str, frozenset[Limit]] = {
    "memory": frozenset(),
    "sqlite": frozenset(),
    "pubsub": frozenset(Limit),
}


@dataclass
class Pair:
    """A queue and its store, as seen by several workers."""

    open_queue: Callable[[], Queue]
    records: RecordStore
    patience_s: float = 0.0
    """The longest time until a task is delivered."""
    opened: list[Queue] = field(default_factory=list)

    def worker(self) -> Queue:
        queue = self.open_queue()
        self.opened.append(queue)
        return queue

    def submit(self, queue: Queue, some: Sequence[Task]) -> None:
        """Put tasks like `runtime submit`: listed first if the store holds no tasks."""
        submit_tasks(some, queue, experiment="sample")

    def lacks(self, limit: Limit, queue: Queue) -> bool:
        return limit in LIMITS[queue.traits.kind]

    def lease(self, queue: Queue, n: int = 1, *, worker: str = "w-a", ttl: timedelta = TTL) -> list[Lease]:
        """Lease `n` tasks, or as many as arrive within the queue's patience."""
        deadline = time.monotonic() + self.patience_s
        leases: list[Lease] = []
        while True:
            leases += queue.lease(n - len(leases), worker=worker, ttl=ttl)
            if len(leases) >= n or time.monotonic() >= deadline:
                return leases
            time.sleep(0.05)

    def one(self, queue: Queue, *, worker: str = "w-a", ttl: timedelta = TTL) -> Lease:
        leases = self.lease(queue, 1, worker=worker, ttl=ttl)
        assert len(leases) == 1, "no task was delivered"
        return leases[0]

    def nothing(self, queue: Queue, *, worker: str = "w-b") -> bool:
        """Return whether nothing is delivered; wait a while if delivery takes time."""
        deadline = time.monotonic() + min(self.patience_s, 2.0)
        while True:
            leases = queue.lease(5, worker=worker, ttl=TTL)
            if leases or time.monotonic() >= deadline:
                return not leases
            time.sleep(0.1)

    def close(self) -> None:
        for queue in self.opened:
            with contextlib.suppress(Exception):
                queue.close()


def succeeded(lease: Lease, *, worker: str = "w-a", value: object = None) -> Settlement:
    return Settlement(lease, record_for(lease, worker=worker, value=value))


def failed(lease: Lease, *, worker: str = "w-a", message: str = "it broke") -> Settlement:
    record = record_for(lease, state=TaskState.FAILED, reason=EndReason.APP_FAILED, worker=worker, message=message)
    return Settlement(lease, record, mark_of(record, lease.task))


def record_for(
    lease: Lease,
    *,
    state: TaskState = TaskState.SUCCEEDED,
    reason: EndReason = EndReason.SUCCEEDED,
    worker: str = "w-a",
    message: str | None = None,
    value: object = None,
) -> Record:
    now = datetime.now(UTC).replace(microsecond=0)
    return Record(
        task_id=lease.task.id,
        generation=lease.task.generation,
        experiment=lease.task.experiment,
        state=state,
        token=lease.token,
        reason=reason,
        started_at=now,
        ended_at=now,
        worker=worker,
        message=message,
        value=value,
    )


def ended_note(lease: Lease, reason: EndReason = EndReason.APP_FAILED) -> EndedNote:
    now = datetime.now(UTC).replace(microsecond=0)
    return EndedNote(
        token=lease.token, reason=reason, started_at=now, ended_at=now, worker="w-a", message="it broke", alone=True
    )


def give_back(lease: Lease, *, delay_s: float = 0.0, note: EndedNote | None = None, alone: bool = False) -> Release:
    due = datetime.now(UTC) + timedelta(seconds=delay_s) if delay_s else None
    return Release(lease, due, note, alone)


def sample(key: str, **fields: object) -> Task:
    """`sample_task` with a time of submission, which a queue might otherwise fill in with the time of publication."""
    return sample_task(key, submitted_at=datetime(2026, 1, 1, tzinfo=UTC), **fields)


def tasks(n: int, **fields: object) -> list[Task]:
    return [sample(str(i), **fields) for i in range(n)]


PAIRS = [
    pytest.param("memory+memory", id="memory+memory"),
    pytest.param("memory+folder", id="memory+folder"),
    pytest.param("sqlite+sqlite", id="sqlite+sqlite"),
    pytest.param("sqlite+folder", id="sqlite+folder"),
    pytest.param("sqlite+s3", id="sqlite+s3", marks=pytest.mark.service),
    pytest.param("pubsub+folder", id="pubsub+folder", marks=pytest.mark.service),
    pytest.param("pubsub+s3", id="pubsub+s3", marks=pytest.mark.service),
]


@contextlib.contextmanager
def open_pair(name: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    queue, _, store = name.partition("+")
    records = _open_store(store, folder, request)
    pair = _open(queue, records, folder, request)
    try:
        yield pair
    finally:
        pair.close()
        pair.records.close()


def _open_store(store: str, folder: Path, request: pytest.FixtureRequest) -> RecordStore | None:
    match store:
        case "sqlite":
            return None
        case "memory":
            return open_records("memory:")
        case "folder":
            (folder / "records").mkdir()
            return open_records(f"file:{folder / 'records'}")
        case _:
            import boto3

            moto = request.getfixturevalue("moto_server")
            bucket = f"records-{abs(hash(folder)) % 10**9}"
            boto3.client("s3", endpoint_url=moto.url, region_name="us-east-1").create_bucket(Bucket=bucket)
            return open_records(f"s3://{bucket}/lab")


def _open(queue: str, records: RecordStore | None, folder: Path, request: pytest.FixtureRequest) -> Pair:
    match queue:
        case "memory":
            assert records is not None
            shared = MemoryQueue(records)
            return Pair(lambda: shared, records)
        case "sqlite":
            path = folder / "tasks.db"
            if records is None:
                return Pair(lambda: open_sqlite(path)[0], open_sqlite(path)[1])
            from runtime.records.sqlite_file import EmbeddedFile

            return Pair(lambda: SqliteQueue(EmbeddedFile(path), records), records)
        case _:
            from runtime.queues.pubsub.client import PubSubClient, ensure_topics
            from runtime.queues.pubsub.queue import PubSubQueue
            from tests.services.pubsub_pairs import make_settings

            assert records is not None
            emulator: PubsubEmulator = request.getfixturevalue("pubsub_emulator")
            settings = make_settings()
            ensure_topics(settings, emulator=emulator.address)
            store = records
            return Pair(
                lambda: PubSubQueue(settings, store, client=PubSubClient(emulator=emulator.address)),
                records,
                patience_s=240.0,
            )
