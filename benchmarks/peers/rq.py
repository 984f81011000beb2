"""RQ on Redis: its default worker, which forks for each job; bulk enqueue in pipelines of 500."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import bodies
from benchmarks.peers.base import ProcessPeer
from benchmarks.peers.redis import flush, redis_pids
from benchmarks.processes import executable


class Rq(ProcessPeer):
    _queue: Any = None
    children_run_tasks = True

    def prepare(self) -> None:
        flush(self.place)
        import redis
        import rq

        self._queue = rq.Queue("benchmark", connection=redis.Redis.from_url(self.place.services["redis"]))

    def put(self, body: str, index: int) -> None:
        self._queue.enqueue(getattr(bodies, body), index)

    def put_many(self, body: str, indices: range) -> None:
        function = getattr(bodies, body)
        for begin in range(indices.start, indices.stop, 500):
            part = range(begin, min(begin + 500, indices.stop))
            self._queue.enqueue_many([self._queue.prepare_data(function, (index,)) for index in part])

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        worker_class = self.options.get("worker_class", "rq.worker.Worker")
        command = [executable("rq"), "worker", "benchmark", "--url", self.place.services["redis"], "--quiet"]
        return [[*command, "--worker-class", worker_class] for _ in range(workers)]

    def brokers(self) -> list[int]:
        return redis_pids(self.place)


PEER = Rq
