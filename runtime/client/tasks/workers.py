"""What workers say of themselves: their last report, and whether they live."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, Protocol

from runtime.errors import UnknownName
from runtime.queues.base import Queue
from runtime.records.base import RecordStore, WorkerSeen
from runtime.values import dataclass

LIVE_FOR: Final = timedelta(seconds=90)
"""A worker reports every 30 s; after three reports missed it is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    worker: str
    state: str
    """`live`, `silent` (no report for 90 s, and it did not say that it leaves) or `left`."""
    host: str
    queue: str
    seen_at: datetime
    started_at: datetime
    slots: int
    running: tuple[str, ...]
    done: int
    failed: int
    rate_per_s: float
    labels: Mapping[str, str]
    declined: Mapping[str, str]

    @property
    def live(self) -> bool:
        return self.state == "live"


def read_workers(records: RecordStore, now: datetime) -> list[WorkerStatus]:
    """Of the last day, live ones first."""
    order = ("live", "silent", "left")
    found = [worker_status(seen, now) for seen in records.workers()]
    return sorted(found, key=lambda worker: (order.index(worker.state), worker.worker))


def worker_status(seen: WorkerSeen, now: datetime) -> WorkerStatus:
    silent = now - seen.seen_at > LIVE_FOR
    return WorkerStatus(
        worker=seen.worker,
        state="left" if seen.left else "silent" if silent else "live",
        host=seen.host,
        queue=seen.queue,
        seen_at=seen.seen_at,
        started_at=seen.started_at,
        slots=seen.slots,
        running=seen.running,
        done=seen.done,
        failed=seen.failed,
        rate_per_s=seen.rate_per_s,
        labels=seen.labels,
        declined=seen.declined,
    )


def read_worker(stack: Stack, worker: str, *, now: datetime) -> WorkerStatus:
    workers = read_workers(stack.records, now)
    for seen in workers:
        if seen.worker == worker:
            return seen
    raise UnknownName("worker", worker, [seen.worker for seen in workers])


class Stack(Protocol):
    """What the verbs need of an open stack."""

    default_queue: str

    @property
    def name(self) -> str: ...
    @property
    def records(self) -> RecordStore: ...
    def queue(self, name: str | None = None) -> Queue: ...
    def queue_names(self) -> list[str]: ...
