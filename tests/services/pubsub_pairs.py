"""Pub/Sub queues on the emulator for tests and benchmarks: made with their own topics, and polled patiently."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from runtime.outputs import PubSubQueueOutput
from runtime.queues.pubsub.client import PubSubClient, ensure_topics
from runtime.queues.pubsub.queue import PubSubQueue

if TYPE_CHECKING:
    from runtime.queues.base import Queue
    from runtime.records.base import RecordStore
    from runtime.tasks.history import Lease

TTL = timedelta(seconds=30)

_numbers = itertools.count(1)


def make_settings(
    *,
    dead_letters: bool = False,
    max_delivery_attempts: int | None = None,
    exactly_once: bool = False,
    ack_deadline_s: int = 10,
) -> PubSubQueueOutput:
    """Make settings with names that no test has used yet."""
    root, number = "projects/test-project", next(_numbers)
    return PubSubQueueOutput(
        topic=f"{root}/topics/tasks-{number}",
        subscription=f"{root}/subscriptions/tasks-{number}",
        dead_letter_topic=f"{root}/topics/dead-{number}" if dead_letters else None,
        dead_letter_subscription=f"{root}/subscriptions/dead-{number}" if dead_letters else None,
        max_delivery_attempts=max_delivery_attempts,
        exactly_once=exactly_once,
        ack_deadline_s=ack_deadline_s,
    )


def make_pubsub_pair(
    records: RecordStore, settings: PubSubQueueOutput | None = None, *, emulator: str | None = None
) -> PubSubQueue:
    """Open a queue on the emulator of `PUBSUB_EMULATOR_HOST` (or `emulator`), with topics, settling into `records`."""
    settings = settings or make_settings()
    ensure_topics(settings, emulator=emulator)
    return PubSubQueue(settings, records, client=PubSubClient(emulator=emulator))


def lease_soon(queue: Queue, n: int = 1, *, ttl: timedelta = TTL, timeout_s: float = 240) -> list[Lease]:
    """Lease up to `n` tasks, asking until they arrive or time is up, since an empty answer proves nothing."""
    deadline = time.monotonic() + timeout_s
    leases = queue.lease(n, worker="w-1", ttl=ttl)
    while len(leases) < n and time.monotonic() < deadline:
        time.sleep(0.02)
        leases += queue.lease(n - len(leases), worker="w-1", ttl=ttl)
    return leases
