"""Everything that the parts of a worker share. Nothing here refers back to a part."""

from __future__ import annotations

from runtime.clock import Clock
from runtime.queues.base import Queue
from runtime.records.base import RecordStore
from runtime.snapshots.identity import CodeIdentity
from runtime.values import dataclass
from runtime.worker.attempts.pool import AttemptPool
from runtime.worker.attempts.trees import Trees
from runtime.worker.held import Holdings
from runtime.worker.leaving import Leaving
from runtime.worker.metrics import WorkerMetrics
from runtime.worker.offload import Offload
from runtime.worker.options import WorkerOptions
from runtime.worker.reporter import Reporter
from runtime.worker.slots import Slot


@dataclass(slots=True, kw_only=True)
class Services:
    name: str
    options: WorkerOptions
    machine: str
    slots: tuple[Slot, ...]
    queue: Queue
    queue_fd: int | None
    """The queue's wake-up descriptor; None if the queue does not wake its workers."""
    records: RecordStore
    clock: Clock
    say: Reporter
    metrics: WorkerMetrics
    offload: Offload
    leaving: Leaving
    holdings: Holdings
    pool: AttemptPool
    scratch: str
    trees: Trees
    code: CodeIdentity
    local: bool
    """Whether the queue and the records lie on this machine: calls are made at once, on the loop's thread."""
