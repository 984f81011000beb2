"""A raw Pub/Sub consumer: a streaming pull with a callback that acknowledges, or a loop of pull and acknowledge."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from google.cloud import pubsub_v1

from benchmarks import bodies


def run(data: bytes) -> None:
    fields = json.loads(data)
    getattr(bodies, fields["function"].partition(":")[2])(*fields["args"])


def stream(subscription: str) -> None:
    def called(message: Any) -> None:
        run(message.data)
        message.ack()

    subscriber = pubsub_v1.SubscriberClient()
    future = subscriber.subscribe(subscription, called)
    signal.signal(signal.SIGTERM, lambda *_: future.cancel())
    future.result()


def pull(subscription: str) -> None:
    from google.api_core.exceptions import DeadlineExceeded

    subscriber = pubsub_v1.SubscriberClient()
    while True:
        try:
            answer = subscriber.pull(subscription=subscription, max_messages=1000, timeout=5)
        except DeadlineExceeded:
            continue
        for received in answer.received_messages:
            run(received.message.data)
        if answer.received_messages:
            ids = [received.ack_id for received in answer.received_messages]
            subscriber.acknowledge(subscription=subscription, ack_ids=ids)


if __name__ == "__main__":
    {"stream": stream, "pull": pull}[sys.argv[1]](sys.argv[2])
