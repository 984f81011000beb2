"""Attempts in place of processes: behind the worker's pool, a strand for each that runs for a drawn time and ends as drawn."""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from runtime.end_reasons import EndReason
from runtime.queues.base import RefusedSettlement
from runtime.worker.attempts import signal_fence
from runtime.worker.attempts.model import AttemptEnd, AttemptOrder
from runtime.worker.host import WorkerHost
from runtime.worker.slots import HostResources
from tests.simulation.bucket import REFUSED
from tests.simulation.choices import Choice
from tests.simulation.threads import Selector, WakeUp
from tests.simulation.world import Strand, World

if TYPE_CHECKING:
    from tests.simulation.laws import Laws

WORK_S: Final = (0.5, 0.02, 8.0, 45.0, 700.0)
LONG_WORK_S: Final = (40.0, 0.5, 900.0, 4_000.0, 9_000.0)
WORK = Choice("work", 40, 20, 20, 10, 1, fault=False)
OUTCOME = Choice("outcome", 60, 4, 2, 1, 1)
"""Success; a failure of its own; its starter dies under it; a value that Python cannot read, or that the store refuses."""
FAILING = Choice("failing", 4, 5, 0, 0, 0)
"""The same of tasks that fail half of the time."""
HUGE = "1" * 5_000
"""JSON of an integer that Python refuses to read."""


@dataclass
class Attempt:
    order: AttemptOrder
    started_at: float = 0.0
    stop: tuple[EndReason, str | None] | None = None
    strand: Strand | None = None


class Slot:
    """`SlotOrders` of the worker's pool: orders in a row, one of which runs."""

    def __init__(self, pool: Pool, index: int) -> None:
        self._pool, self.index = pool, index
        self._orders: deque[Attempt] = deque()

    def outstanding(self) -> list[str]:
        return [each.order.token for each in self._orders]

    def running(self) -> tuple[str, float] | None:
        first = self._orders[0] if self._orders else None
        return None if first is None or first.strand is None else (first.order.token, first.started_at)

    def room(self) -> int:
        return 64 - len(self._orders)

    def take_back(self) -> list[str]:
        waiting = [each for each in self._orders if each.strand is None]
        for each in waiting:
            self._orders.remove(each)
        return [each.order.token for each in waiting]

    def send(self, orders: Sequence[AttemptOrder]) -> None:
        self._orders.extend(map(Attempt, orders))
        self._begin()

    def _begin(self) -> None:
        if self._orders and self._orders[0].strand is None and not self._pool.closed:
            attempt = self._orders[0]
            world, process = self._pool.world, self._pool.process
            attempt.strand = world.strand(process, lambda: self._run(attempt), f"attempt {attempt.order.token[:4]}")
            world.start(attempt.strand, 0.002)

    def _run(self, attempt: Attempt) -> None:
        world, order, laws = self._pool.world, attempt.order, self._pool.laws
        attempt.started_at = world.wall()
        world.note(f"starts {order.task_id[-12:]} g{order.generation}")
        laws.attempt_starts(order, self._pool.process)
        needed = laws.work_s[world.draw(WORK)]
        ends_worker = order.task_id in laws.worker_crashers
        if ends_worker:
            needed = min(needed, 45.0)
        limit = order.timeout_s
        span = needed if limit is None else min(needed, limit)
        if attempt.stop is None:
            world.park(span)
        ended = AttemptEnd(order.token, self.index, EndReason.SUCCEEDED, attempt.started_at, world.wall())
        outcome = 2 if order.task_id in laws.crashers else world.draw(FAILING if laws.failing else OUTCOME)
        if attempt.stop is not None:
            ended.reason, ended.message = attempt.stop
        elif ends_worker and signal_fence.VARIABLE not in order.env:
            laws.attempt_crashes(order)
            world.kill(self._pool.process)
        elif ends_worker:
            ended.reason, ended.message, ended.exit_code = EndReason.APP_FAILED, "exit code 1", 1
        elif limit is not None and needed > limit:
            ended.reason = EndReason.TIMEOUT
        elif outcome == 1:
            ended.reason, ended.message, ended.exit_code = EndReason.APP_FAILED, "exit code 1", 1
        elif outcome == 2:
            ended.reason = EndReason.LOST
        else:
            ended.value = {3: HUGE, 4: REFUSED}.get(outcome) or json.dumps(order.token)
        laws.attempt_ends(order, ended)
        world.note(f"ends {order.task_id[-12:]} g{order.generation}: {ended.reason}")
        self._orders.remove(attempt)
        self._pool.report(ended)
        self._begin()

    def stop(self, token: str, reason: EndReason, message: str | None) -> bool:
        for each in self._orders:
            if each.order.token != token:
                continue
            if each.strand is None:
                self._orders.remove(each)
                self._pool.report(
                    AttemptEnd(
                        token, self.index, reason, 0.0, self._pool.world.wall(), message=message, not_started=True
                    )
                )
            elif each.stop is None:
                each.stop = reason, message
                self._pool.world.wake(each.strand)
            return True
        return False

    def prepare(self) -> None:
        pass


class Pool:
    """`AttemptPool`. Its attempts die with their worker, as the guardian sees to."""

    failure = None

    def __init__(self, world: World, laws: Laws, selector: Selector, slots: int) -> None:
        process = world.me()
        assert process is not None
        self.world, self.laws, self.process = world, laws, process
        self.slots = [Slot(self, index) for index in range(slots)]
        self.closed = False
        self._ended: list[AttemptEnd] = []
        self._wake_up = WakeUp(world)
        selector.register(self._wake_up.fd, 1, self._wake_up.drain)

    def start(self) -> None:
        pass

    def close(self) -> list[AttemptEnd]:
        if self.closed:
            return []
        self.closed = True
        for slot in self.slots:
            for token in slot.outstanding():
                slot.stop(token, EndReason.PREEMPTED, None)
        while any(slot.outstanding() for slot in self.slots):
            self.world.pause(0.05)
        return self.tick()

    def report(self, ended: AttemptEnd) -> None:
        self._ended.append(ended)
        self._wake_up.ring()

    def tick(self) -> list[AttemptEnd]:
        ended, self._ended = self._ended, []
        return ended

    def next_deadline(self) -> float | None:
        return 0.0 if self._ended else None

    def ask_to_stop(self, token: str, reason: EndReason) -> None:
        self.kill(token, reason)

    def kill(self, token: str, reason: EndReason, message: str | None = None) -> None:
        any(slot.stop(token, reason, message) for slot in self.slots)

    def drain_log(self, token: str) -> bytes:
        return b""

    def has_progressed(self, token: str) -> bool:
        return False

    def attempt_of(self, pid: int) -> None:
        return None

    def discard(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)


class SimulatedHost(WorkerHost):
    """What a worker makes on its machine."""

    def __init__(self, world: World, laws: Laws) -> None:
        self._world, self._laws = world, laws

    def read_machine(self) -> HostResources:
        return HostResources(cpus=1, memory_bytes=4 << 30)

    def make_pool(self, selector: Any, slots: int, settings: object) -> Any:
        self._world.works()
        return Pool(self._world, self._laws, selector, slots)

    def open_scratch(self, name: str) -> Any:
        path = self._world.folder() / name
        path.mkdir()
        return SimpleNamespace(path=str(path), fd=-1, close=lambda: None)

    def clear_left(self) -> None:
        pass

    def identify_code(self) -> Any:
        return SimpleNamespace(of=lambda entry: "code", begin=lambda entry: "code")


class Noting:
    """A reporter whose lines go into the trace."""

    def __init__(self, world: World) -> None:
        self._world = world

    def due_in(self) -> None:
        pass

    def tick(self) -> None:
        pass

    def refused(self, refused: RefusedSettlement) -> None:
        self._world.refused.add(refused.lease.token)
        self._world.note(f"says refused {_brief(refused.lease.task)}")

    def __getattr__(self, name: str) -> Any:
        if self._world.trace is None:
            return _nothing
        return lambda *args, **named: self._world.note(f"says {name} {' '.join(map(_brief, args))}")


def _nothing(*args: object, **named: object) -> None:
    pass


def _brief(value: object) -> str:
    return str(getattr(value, "id", value))[:100]
