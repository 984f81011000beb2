"""celery on Redis: prefork, no gossip or mingle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.base import ProcessPeer, in_environment
from benchmarks.peers.redis import flush, redis_pids
from benchmarks.processes import executable


class Celery(ProcessPeer):
    _app: Any = None

    def prepare(self) -> None:
        flush(self.place)

        def load() -> Any:
            from benchmarks.peers import celery_app

            return celery_app

        self._app = in_environment(self.place, load)

    def put(self, body: str, index: int) -> None:
        getattr(self._app, body).delay(index)

    def put_many(self, body: str, indices: range) -> None:
        task = getattr(self._app, body)
        for index in indices:
            task.delay(index)

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        quiet = ["--without-gossip", "--without-mingle", "--loglevel", "WARNING"]
        name = "benchmarks.peers.celery_app"
        return [[executable("celery"), "-A", name, "worker", "--pool", "prefork", "-c", str(workers), *quiet]]

    def brokers(self) -> list[int]:
        return redis_pids(self.place)


PEER = Celery
