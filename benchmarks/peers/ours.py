"""Ourselves, through the commands and calls a user has: `runtime worker` on the local stack, and the queue's `put`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.base import ProcessPeer
from benchmarks.processes import executable

EXPERIMENT: Final = "benchmark"
BULK: Final = 1000
"""Tasks per call where many are put."""


class Ours(ProcessPeer):
    """Options: `reuse` (warm children, the default), `look_ahead`, `durability`, `lease`, `max_tasks`."""

    _queue: Any = None
    salt = ""
    """Tells tasks apart that differ in nothing else."""
    children_run_tasks = True

    @property
    def file(self) -> Path:
        return self.place.folder / "local.db"

    def prepare(self) -> None:
        from runtime.queues.base import DEFAULT_QUEUE
        from runtime.queues.sqlite import open_sqlite

        self._queue, _ = open_sqlite(self.file, queue=self.options.get("queue", DEFAULT_QUEUE))

    def put(self, body: str, index: int) -> None:
        self._queue.put([make_task(body, index, salt=self.salt)])

    def put_many(self, body: str, indices: range) -> None:
        for begin in range(indices.start, indices.stop, BULK):
            part = range(begin, min(begin + BULK, indices.stop))
            self._queue.put([make_task(body, index, salt=self.salt) for index in part])

    def put_alone(self, tasks: Sequence[Any]) -> None:
        """Tasks that are made already, in calls of `BULK`."""
        for begin in range(0, len(tasks), BULK):
            self._queue.put(tasks[begin : begin + BULK])

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        return [[executable("runtime"), "worker", *worker_options(self.options)] for _ in range(workers)]

    def variables(self) -> dict[str, str]:
        return {
            **self.place.variables,
            "RUNTIME_DATA_DIR": str(self.place.folder),
            "XDG_CONFIG_HOME": str(self.place.folder),
            "XDG_CACHE_HOME": str(self.place.folder),
        }

    def stop(self) -> None:
        ProcessPeer.stop(self)
        if self._queue is not None:
            self._queue.close()
            self._queue = None


def worker_options(options: Any) -> list[str]:
    words = ["--slots", str(options.get("slots", 1))]
    if options.get("reuse", True):
        words.append("--reuse-process")
    for name in ("look_ahead", "durability", "lease", "max_tasks", "queue"):
        if options.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", str(options[name])]
    return words


def make_task(body: str, index: int, *arguments: Any, salt: str = "") -> Any:
    """As `runtime.submit` makes it: identified by its experiment and its entry, or by a key that is salted."""
    from runtime.tasks import FunctionEntry, Task, task_id

    entry = FunctionEntry(f"benchmarks.bodies:{body}", (index, *arguments))
    key = f"{salt}{index}" if salt else None
    return Task(id=task_id(EXPERIMENT, key=key, entry=entry), entry=entry, experiment=EXPERIMENT, key=key)


PEER = Ours
