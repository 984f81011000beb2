"""What every part of a worker uses. Nothing here refers back to a part."""

from __future__ import annotations

from runtime.clock import Clock
from runtime.queues.base import Queue
from runtime.records.base import RecordStore
from runtime.values import dataclass
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
    records: RecordStore
    clock: Clock
    say: Reporter
    metrics: WorkerMetrics
    """Counts nothing until the worker runs."""
    offload: Offload
    leaving: Leaving
    local: bool
    """The queue and the records lie on this machine: calls are made at once, on the loop's thread."""
