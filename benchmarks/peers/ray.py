"""Ray on this machine: `ray.init(num_cpus=W)`, submitted in bulk, gathered. The tree of the driver is all of Ray."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import bodies
from benchmarks.peers.base import Place
from benchmarks.processes import end_descendants, environment


class Ray:
    driver_runs_workers = True
    children_run_tasks = False

    def __init__(self, place: Place, options: Any = None) -> None:
        self.place = place
        self._refs: list[Any] = []

    def prepare(self) -> None:
        os.environ.update(environment(self.place.variables))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

    def start(self, workers: int) -> None:
        import ray

        # A short path: Ray makes Unix sockets some 70 characters below it, and those have at most 107.
        folder = self.place.folder if len(str(self.place.folder)) < 32 else Path("/tmp")
        self._temporary = tempfile.TemporaryDirectory(prefix="r", dir=folder, ignore_cleanup_errors=True)
        ray.init(
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 * 1024 * 1024,
            _temp_dir=self._temporary.name,
        )
        names = ("noop", "cpu", "stuck_once")
        self._tasks = {name: ray.remote(max_retries=-1)(getattr(bodies, name)) for name in names}
        # A first task for each worker process, long enough for all of them to start, so that no start is part of a drain.
        last = self.place.board.slots - 1
        settle = ray.remote(bodies.sleep)
        ray.get([settle.remote(last, 0.3) for _ in range(workers)])
        ray.get([self._tasks["noop"].remote(last) for _ in range(workers)])

    def put(self, body: str, index: int) -> None:
        self._refs.append(self._tasks[body].remote(index))

    def put_many(self, body: str, indices: range) -> None:
        task = self._tasks[body]
        self._refs += [task.remote(index) for index in indices]

    def wait(self, indices: range, timeout_s: float) -> bool:
        import ray

        ray.get(self._refs, timeout=timeout_s)
        self._refs.clear()
        return self.place.board.done(indices)

    def alive(self) -> bool:
        return True

    def roots(self) -> list[int]:
        return [os.getpid()]

    def brokers(self) -> list[int]:
        return []

    def stop(self) -> None:
        import ray

        ray.shutdown()
        end_descendants()
        self._temporary.cleanup()


PEER = Ray
