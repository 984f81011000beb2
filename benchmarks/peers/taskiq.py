"""taskiq on Redis streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.base import ProcessPeer, in_environment
from benchmarks.peers.redis import flush, redis_pids
from benchmarks.processes import executable


class Taskiq(ProcessPeer):
    _app: Any = None
    _loop: Any = None

    def prepare(self) -> None:
        flush(self.place)

        def load() -> Any:
            from benchmarks.peers import taskiq_app

            return taskiq_app

        self._app = in_environment(self.place, load)
        import uvloop

        self._loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._app.broker.startup())

    def put(self, body: str, index: int) -> None:
        self._loop.run_until_complete(getattr(self._app, body).kiq(index))

    def put_many(self, body: str, indices: range) -> None:
        task = getattr(self._app, body)

        async def put() -> None:
            for index in indices:
                await task.kiq(index)

        self._loop.run_until_complete(put())

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        name = "benchmarks.peers.taskiq_app:broker"
        return [[executable("taskiq"), "worker", name, "--workers", str(workers), "--log-level", "WARNING"]]

    def brokers(self) -> list[int]:
        return redis_pids(self.place)

    def stop(self) -> None:
        ProcessPeer.stop(self)
        if self._loop is not None:
            self._loop.run_until_complete(self._app.broker.shutdown())
            self._loop.close()
            self._loop = None


PEER = Taskiq
