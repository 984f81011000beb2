"""The components behind the service tests behave as those tests assume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.services_support import wait_until

if TYPE_CHECKING:
    from tests.services_support import MotoServer, PubsubEmulator, RedisServer


def test_emulator_delivers_and_a_restart_forgets(pubsub_emulator: PubsubEmulator) -> None:
    from google.api_core.exceptions import NotFound
    from google.cloud import pubsub_v1

    assert os.environ["PUBSUB_EMULATOR_HOST"] == pubsub_emulator.address
    project = pubsub_emulator.new_project()
    topic, subscription = f"projects/{project}/topics/tasks", f"projects/{project}/subscriptions/tasks"
    with pubsub_v1.PublisherClient() as publisher, pubsub_v1.SubscriberClient() as subscriber:
        publisher.create_topic(name=topic)
        subscriber.create_subscription(name=subscription, topic=topic)
        publisher.publish(topic, b"hello").result(timeout=240)

        pulled = subscriber.pull(subscription=subscription, max_messages=1, timeout=240)
        pubsub_emulator.restart()

        assert [received.message.data for received in pulled.received_messages] == [b"hello"]
        with pytest.raises(NotFound):
            publisher.get_topic(topic=topic, timeout=240)


def test_emulator_is_gone_after_stop(pubsub_emulator: PubsubEmulator) -> None:
    pid = pubsub_emulator.pid

    pubsub_emulator.stop()

    assert wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_moto_refuses_to_create_an_object_twice(moto_server: MotoServer) -> None:
    import boto3
    from botocore.exceptions import ClientError

    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="records")
    s3.put_object(Bucket="records", Key="t-1", Body=b"first", IfNoneMatch="*")

    with pytest.raises(ClientError) as refused:
        s3.put_object(Bucket="records", Key="t-1", Body=b"second", IfNoneMatch="*")

    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert s3.get_object(Bucket="records", Key="t-1")["Body"].read() == b"first"


def test_redis_answers(redis_server: RedisServer) -> None:
    redis_server.restart()

    assert redis_server.pid is not None
