"""huey on SQLite: `-k process`, its default polling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.base import ProcessPeer, in_environment
from benchmarks.processes import executable


class Huey(ProcessPeer):
    _app: Any = None

    def prepare(self) -> None:
        def load() -> Any:
            from benchmarks.peers import huey_app

            return huey_app

        self._app = in_environment(self.place, load)

    def put(self, body: str, index: int) -> None:
        getattr(self._app, body)(index)

    def put_many(self, body: str, indices: range) -> None:
        task = getattr(self._app, body)
        for index in indices:
            task(index)

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        name = "benchmarks.peers.huey_app.huey"
        return [[executable("huey_consumer"), name, "-k", "process", "-w", str(workers), "--quiet"]]


PEER = Huey
