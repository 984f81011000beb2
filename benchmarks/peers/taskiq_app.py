"""taskiq's fastest: Redis streams, results kept, orjson, coroutines; taskiq uses uvloop if it is installed."""

from __future__ import annotations

import os

from taskiq.serializers import ORJSONSerializer
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from benchmarks import bodies

_url = os.environ["BENCHMARK_REDIS"]
_results: RedisAsyncResultBackend[None] = RedisAsyncResultBackend(_url, result_ex_time=600)
broker = RedisStreamBroker(_url, consumer_id="0").with_result_backend(_results).with_serializer(ORJSONSerializer())


@broker.task
async def noop(index: int) -> None:
    bodies.noop(index)


@broker.task
async def cpu(index: int) -> None:
    bodies.cpu(index)
