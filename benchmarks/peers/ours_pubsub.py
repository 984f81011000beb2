"""Ourselves on Pub/Sub: `runtime worker` with records in a folder, or, to leave results out, with records in memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.base import ProcessPeer
from benchmarks.peers.ours import make_task, worker_options
from benchmarks.peers.pubsub import make_names
from benchmarks.processes import executable


class OursPubsub(ProcessPeer):
    """Options: `records`, which is `folder`, `memory` (our worker), or `none` (our queue alone, without a worker)."""

    _queue: Any = None

    @property
    def children_run_tasks(self) -> bool:  # type: ignore[override]
        return self.options.get("records") != "none"

    def prepare(self) -> None:
        self.topic, self.subscription = make_names(self.place)
        self._queue = open_queue(self.topic, self.subscription)
        self._records.mkdir(exist_ok=True)

    @property
    def _records(self) -> Path:
        return Path(self.options.get("folder") or self.place.folder) / "records"

    def put(self, body: str, index: int) -> None:
        self._queue.put([make_task(body, index)])

    def put_many(self, body: str, indices: range) -> None:
        self._queue.put([make_task(body, index) for index in indices])

    def put_alone(self, tasks: Sequence[Any]) -> None:
        self._queue.put(tasks)

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        kind = self.options.get("records", "folder")
        if kind == "folder":
            url = f"pubsub:{self.subscription}?topic={self.topic}&records=file:{self._records}"
            command = [executable("runtime"), "worker", *worker_options({**self.options, "queue": url})]
        else:
            module = "benchmarks.peers.ours_pubsub_worker"
            command = [sys.executable, "-m", module, kind, self.topic, self.subscription]
        return [command for _ in range(workers)]

    def variables(self) -> dict[str, str]:
        here = str(self.place.folder)
        return {**self.place.variables, "RUNTIME_DATA_DIR": here, "XDG_CONFIG_HOME": here, "XDG_CACHE_HOME": here}

    def brokers(self) -> list[int]:
        return [int(self.place.services["pubsub_pid"])]

    def stop(self) -> None:
        ProcessPeer.stop(self)
        if self._queue is not None:
            self._queue.close()
            self._queue = None


def open_queue(topic: str, subscription: str) -> Any:
    """With records in this process's memory."""
    from runtime.outputs import PubSubQueueOutput
    from runtime.queues.pubsub.queue import PubSubQueue
    from runtime.records.memory import MemoryRecords

    return PubSubQueue(PubSubQueueOutput(topic=topic, subscription=subscription), MemoryRecords())


PEER = OursPubsub
