"""The parts of a worker over a queue in memory, by a clock that moves only on request. Its slots start no process."""

from __future__ import annotations

import io
import json
import selectors
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.queues.memory import MemoryQueue
from runtime.records.memory import MemoryRecords
from runtime.snapshots.worker_code import CodeIdentity
from runtime.system import system
from runtime.testing import FakeClock, sample_task
from runtime.worker.admission import Admission
from runtime.worker.artifact_saver import ArtifactSaver
from runtime.worker.attempts.pool import AttemptPool
from runtime.worker.attempts.work_trees import WorkTrees
from runtime.worker.control import ControlReader
from runtime.worker.dispatch import Dispatch
from runtime.worker.leasing import Leasing
from runtime.worker.metrics import WorkerMetrics
from runtime.worker.options import WorkerOptions
from runtime.worker.pending_settlements import PendingSettlements
from runtime.worker.slots import Slot
from runtime.worker.thread_calls import ThreadCalls
from runtime.worker.worker_context import HeldLease, HeldLeases, LeaveDecision, WorkerContext
from runtime.worker.worker_log import WorkerLog


class Parts:
    """Calls are made inline, so each step has its answer when it returns."""

    def __init__(
        self, folder: Path, clock: FakeClock, *, selector: selectors.BaseSelector | None = None, **options: Any
    ) -> None:
        self.clock = clock
        self.log = io.StringIO()
        self.records = MemoryRecords(clock=clock)
        self.queue = MemoryQueue(self.records, clock=clock)
        self.options = WorkerOptions(**{"look_ahead": 0, **options})
        say = WorkerLog(self.log, json_lines=True)
        self.leaving = LeaveDecision(say)
        self.offload = ThreadCalls(inline=True)
        self.selector = selector or selectors.DefaultSelector()
        count = self.options.slots
        assert isinstance(count, int)
        pool = AttemptPool(selector=self.selector, slots=count)
        self.holdings = HeldLeases(self.options.lease, clock)
        self.services = WorkerContext(
            name="w-1",
            options=self.options,
            machine="m-1",
            slots=tuple(Slot(index, 1, 1 << 30) for index in range(count)),
            queue=self.queue,
            queue_fd=None,
            records=self.records,
            clock=clock,
            say=say,
            metrics=WorkerMetrics(),
            offload=self.offload,
            leaving=self.leaving,
            holdings=self.holdings,
            pool=pool,
            scratch=str(folder),
            trees=WorkTrees(str(folder), pool.discard),
            code=CodeIdentity(folder),
            secrets=None,
            local=True,
        )
        self.outbox = PendingSettlements(self.services)
        self.orders = ControlReader(self.services)
        self.captures = ArtifactSaver(self.services, selectors.DefaultSelector())
        self.dispatch = Dispatch(self.services, self.outbox, self.orders, self.captures)
        self.preparing = Admission(
            self.services, self.outbox, self.orders, self.dispatch, self.captures, conclude=lambda _: None
        )
        self.leasing = Leasing(self.services, self.outbox, self.orders, self.dispatch, self.preparing)

    @property
    def now(self) -> float:
        return self.clock.boottime()

    def put(self, *keys: str, **fields: Any) -> None:
        self.queue.put([sample_task(key, **fields) for key in keys])

    def read_orders(self) -> None:
        self.orders.due = 0.0
        self.orders.read_when_due(self.now)

    def fetch(self) -> list[str]:
        """Let the worker lease if it wants to; return the keys of all tasks that it holds."""
        self.leasing.fetch(self.now)
        return self.held()

    def held(self) -> list[str]:
        return [str(held.lease.task.key) for held in self.holdings.by_token.values()]

    def first(self) -> HeldLease:
        return next(iter(self.holdings.by_token.values()))

    def wait_s(self) -> float | None:
        """Return the time until the worker leases next; None if it will not."""
        at = self.leasing.next_at()
        return None if at is None else round(at - self.now, 6)

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [event for event in events if event["event"] == kind]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    """One clock for everything; monotonic time is its boot time."""
    fake = FakeClock()
    with monkeypatch.context() as patch:
        patch.setitem(vars(system), "monotonic", fake.boottime)
        patch.setattr(time, "monotonic", fake.boottime)  # for the attempts' pool
        yield fake
