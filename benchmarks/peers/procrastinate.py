"""procrastinate on PostgreSQL, for redelivery: its default heartbeat, or the best setting that still works."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.base import ProcessPeer, in_environment


class Procrastinate(ProcessPeer):
    """Options: `best`, the shortest heartbeat instead of the default one."""

    _app: Any = None

    def variables(self) -> dict[str, str]:
        return {**self.place.variables, **({"BENCHMARK_BEST": "1"} if self.options.get("best") else {})}

    def prepare(self) -> None:
        import psycopg

        with psycopg.connect(self.place.services["postgres"], autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")

        def load() -> Any:
            from benchmarks.peers import procrastinate_app

            return procrastinate_app

        self._app = in_environment(self.place, load)
        asyncio.run(self._apply_schema())

    async def _apply_schema(self) -> None:
        async with self._app.app.open_async() as app:
            await app.schema_manager.apply_schema_async()

    def put(self, body: str, index: int) -> None:
        asyncio.run(self._defer(body, [index]))

    def put_many(self, body: str, indices: range) -> None:
        asyncio.run(self._defer(body, list(indices)))

    async def _defer(self, body: str, indices: Sequence[int]) -> None:
        async with self._app.app.open_async():
            task = getattr(self._app, body)
            await task.batch_defer_async(*[{"index": index} for index in indices])

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        return [[sys.executable, "-m", "benchmarks.peers.procrastinate_app"] for _ in range(workers)]


PEER = Procrastinate
