"""Google's Pub/Sub client against the emulator, with no framework and no results: batches of 1000 or 10 ms."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.base import Place, ProcessPeer


def make_names(place: Place) -> tuple[str, str]:
    """A topic and a subscription in a project of their own."""
    from google.cloud import pubsub_v1

    os.environ["PUBSUB_EMULATOR_HOST"] = str(place.services["pubsub"])
    project = f"benchmark-{time.time_ns()}"
    topic, subscription = f"projects/{project}/topics/tasks", f"projects/{project}/subscriptions/tasks"
    with pubsub_v1.PublisherClient() as publisher:
        publisher.create_topic(name=topic)
    with pubsub_v1.SubscriberClient() as subscriber:
        subscriber.create_subscription(name=subscription, topic=topic, ack_deadline_seconds=60)
    return topic, subscription


def encode(body: str, index: int) -> bytes:
    """The same bytes that our queue publishes."""
    from benchmarks.peers.ours import make_task
    from runtime.tasks.wire import encode_task

    return encode_task(make_task(body, index)).encode()


class Pubsub(ProcessPeer):
    """Options: `mode`, which is `stream` or `pull`."""

    _publisher: Any = None

    def prepare(self) -> None:
        from google.cloud import pubsub_v1

        self.topic, self.subscription = make_names(self.place)
        settings = pubsub_v1.types.BatchSettings(max_messages=1000, max_latency=0.01, max_bytes=9_000_000)
        self._publisher = pubsub_v1.PublisherClient(batch_settings=settings)

    def put(self, body: str, index: int) -> None:
        self._publisher.publish(self.topic, encode(body, index)).result()

    def put_many(self, body: str, indices: range) -> None:
        self.publish([encode(body, index) for index in indices])

    def publish(self, messages: Sequence[bytes]) -> None:
        publish, topic = self._publisher.publish, self.topic
        for future in [publish(topic, message) for message in messages]:
            future.result()

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        mode = self.options.get("mode", "stream")
        command = [sys.executable, "-m", "benchmarks.peers.pubsub_worker", mode, self.subscription]
        return [command for _ in range(workers)]

    def brokers(self) -> list[int]:
        return [int(self.place.services["pubsub_pid"])]


PEER = Pubsub
