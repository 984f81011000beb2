"""The Protocol that a measured peer satisfies, and the parts that most peers share."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from benchmarks.board import Board
from benchmarks.bodies import VARIABLE
from benchmarks.processes import environment, start, stop_tree


@dataclass(frozen=True, slots=True)
class Place:
    """Where one measurement happens: an empty folder, its board, and the services that run."""

    folder: Path
    board: Board
    services: Mapping[str, Any] = field(default_factory=dict)
    """Addresses, and the process ids of brokers."""

    @property
    def variables(self) -> dict[str, str]:
        return {
            VARIABLE: str(self.board.path),
            "BENCHMARK_FOLDER": str(self.folder),
            "BENCHMARK_REDIS": str(self.services.get("redis", "")),
            "BENCHMARK_POSTGRES": str(self.services.get("postgres", "")),
            **({"PUBSUB_EMULATOR_HOST": str(self.services["pubsub"])} if "pubsub" in self.services else {}),
        }


class Peer(Protocol):
    """A queue with workers. Bodies are named as in `benchmarks.bodies`, and tasks by their number on the board."""

    driver_runs_workers: ClassVar[bool]
    """Workers must start before tasks are put, because they belong to the process that puts them."""
    children_run_tasks: ClassVar[bool]
    """A task's process is a child of the worker's, so shares are summed by parent."""

    def prepare(self) -> None:
        """Make an empty queue."""

    def put(self, body: str, index: int) -> None:
        """Put one task, in the way that a single task is put."""

    def put_many(self, body: str, indices: range) -> None:
        """Put many tasks, in the quickest documented way."""

    def start(self, workers: int) -> None:
        """Start workers, each with one task at a time, and return without waiting for them."""

    def wait(self, indices: range, timeout_s: float) -> bool:
        """Wait until all have ended."""

    def alive(self) -> bool:
        """False once no worker can run a task any more."""

    def roots(self) -> list[int]:
        """Root processes of the workers."""

    def brokers(self) -> list[int]:
        """Root processes of the broker."""

    def stop(self) -> None: ...


@dataclass(slots=True)
class ProcessPeer:
    """A peer whose workers are processes of their own; a subclass gives the commands that start them."""

    place: Place
    options: Mapping[str, Any] = field(default_factory=dict)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    driver_runs_workers: ClassVar[bool] = False
    children_run_tasks: ClassVar[bool] = False

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        """Commands of the processes to start."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        return self.place.variables

    def start(self, workers: int) -> None:
        for command in self.command(workers):
            self.workers.append(start(command, log=self.place.folder / "worker.log", extra=self.variables()))

    def wait(self, indices: range, timeout_s: float) -> bool:
        deadline = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline:
            if self.place.board.wait(indices, timeout_s=0.5):
                return True
            if not self.alive():
                return self.place.board.done(indices)
        return False

    def alive(self) -> bool:
        return any(worker.poll() is None for worker in self.workers)

    def roots(self) -> list[int]:
        return [worker.pid for worker in self.workers]

    def brokers(self) -> list[int]:
        return []

    def stop(self) -> None:
        for worker in self.workers:
            stop_tree(worker, grace_s=1.0)
        self.workers.clear()


def in_environment(place: Place, load: Callable[[], Any]) -> Any:
    """Import a peer's application in this process, as its workers do in theirs."""
    import os

    os.environ.update(environment(place.variables))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return load()
