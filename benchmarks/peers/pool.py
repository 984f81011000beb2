"""The standard library's ProcessPoolExecutor, one submit per task."""

from __future__ import annotations

import os
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from benchmarks import bodies
from benchmarks.peers.base import Place
from benchmarks.processes import environment


class Pool:
    driver_runs_workers = True
    children_run_tasks = False

    def __init__(self, place: Place, options: Any = None) -> None:
        self.place = place
        self._futures: list[Future[None]] = []

    def prepare(self) -> None:
        os.environ.update(environment(self.place.variables))

    def start(self, workers: int) -> None:
        self._pool = ProcessPoolExecutor(workers)
        for future in [self._pool.submit(bodies.noop, self.place.board.slots - 1) for _ in range(workers)]:
            future.result()

    def put(self, body: str, index: int) -> None:
        self._futures.append(self._pool.submit(getattr(bodies, body), index))

    def put_many(self, body: str, indices: range) -> None:
        function, submit = getattr(bodies, body), self._pool.submit
        self._futures += [submit(function, index) for index in indices]

    def wait(self, indices: range, timeout_s: float) -> bool:
        for future in self._futures:
            future.result(timeout_s)
        self._futures.clear()
        return self.place.board.done(indices)

    def alive(self) -> bool:
        return True

    def roots(self) -> list[int]:
        return [os.getpid()]

    def brokers(self) -> list[int]:
        return []

    def stop(self) -> None:
        self._pool.shutdown()


PEER = Pool
