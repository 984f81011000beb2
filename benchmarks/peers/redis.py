"""The Redis that three peers share: without persistence, which favours them."""

from __future__ import annotations

from benchmarks.peers.base import Place


def flush(place: Place) -> None:
    import redis

    with redis.Redis.from_url(place.services["redis"]) as client:
        client.flushall()


def redis_pids(place: Place) -> list[int]:
    return [int(place.services["redis_pid"])]
