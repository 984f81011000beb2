"""What a worker on Pub/Sub holds without having leased it: kept, handed out, withheld by a pause, given back."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from runtime.errors import QueueUnavailable
from runtime.queues.pubsub import delivery_buffer
from runtime.queues.pubsub.message import COPY, PAYLOAD
from runtime.queues.pubsub.queue import PubSubQueue
from runtime.tasks.history import Record, Release
from runtime.tasks.wire import encode_task
from runtime.testing import FakeClock, sample_task
from tests.services_support import wait_readable
from tests.unit.queues.pubsub_bench import (
    SETTINGS,
    TTL,
    FakeService,
    FlakyRecords,
    OutgoingMessage,
    ack_id,
    eventually,
    lease,
    open_queue,
    success,
)
from tests.unit.queues.pubsub_bench import _soon as _soon  # noqa: PLC0414 (a fixture)
from tests.unit.queues.pubsub_bench import queue as queue  # noqa: PLC0414 (a fixture)
from tests.unit.queues.pubsub_bench import records as records  # noqa: PLC0414 (a fixture)
from tests.unit.queues.pubsub_bench import service as service  # noqa: PLC0414 (a fixture)


def is_readable(descriptor: int, *, within_s: float = 0) -> bool:
    return bool(wait_readable(descriptor, within_s))


def hold_one(queue: PubSubQueue, key: str = "1") -> None:
    """Have the queue pull a task for a worker that has stopped asking."""
    queue.lease(1, worker="w-1", ttl=TTL)
    queue.put([sample_task(key)])
    assert eventually(lambda: queue.outlook().next_due == timedelta())


# waking


def test_wake_descriptor_is_readable_from_a_delivery_until_it_is_drained(queue: PubSubQueue) -> None:
    hold_one(queue)
    descriptor = queue.wake_descriptor()
    opened_late = is_readable(descriptor)
    queue.drain_wakes()
    drained = is_readable(descriptor)
    queue.lease(1, worker="w-1", ttl=TTL)

    queue.lease(1, worker="w-1", ttl=TTL)
    queue.put([sample_task("2")])

    assert (opened_late, drained) == (True, False)
    assert is_readable(descriptor, within_s=240)


def test_task_that_falls_due_is_handed_out_without_the_regular_look(
    service: FakeService, queue: PubSubQueue, records: FlakyRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float | None] = []
    next_look_s, find = delivery_buffer.DeliveryBuffer.next_look_s, records.find

    def look(self: delivery_buffer.DeliveryBuffer) -> float | None:
        looks.append(next_look_s(self))
        return looks[-1]

    def find_late(task_id: str, generation: int) -> Record | None:
        assert eventually(lambda: 600.0 in looks)  # Whatever is held is looked at in ten minutes.
        return find(task_id, generation)

    monkeypatch.setattr(delivery_buffer, "LOOK_EVERY_S", 600.0)
    monkeypatch.setattr(delivery_buffer.DeliveryBuffer, "next_look_s", look)
    monkeypatch.setattr(records, "find", find_late)
    queue.lease(1, worker="w-1", ttl=TTL)
    assert eventually(lambda: looks)
    queue.put([sample_task(not_before=datetime.now(UTC) + timedelta(seconds=0.2))])

    assert len(lease(queue)) == 1
    assert len(looks) < 20  # No look follows another without a reason.


# leases


@pytest.mark.parametrize("deadline_s", [10, 60])
def test_lease_longer_than_the_deadline_that_is_left_is_confirmed_when_it_is_handed_out(
    service: FakeService, records: FlakyRecords, deadline_s: int
) -> None:
    queue = PubSubQueue(replace(SETTINGS, ack_deadline_s=deadline_s), records, client=service)  # type: ignore[arg-type]
    hold_one(queue)
    service.renewed.clear()

    [got] = queue.lease(1, worker="w-1", ttl=timedelta(minutes=5))

    assert service.renewed == [(ack_id(got), 305)]
    queue.close()


def test_message_that_cannot_be_read_for_now_keeps_no_other_from_being_delivered_and_comes_back(
    service: FakeService, queue: PubSubQueue, records: FlakyRecords
) -> None:
    large = OutgoingMessage(b"{}", {PAYLOAD: records.put_blob(encode_task(sample_task("large")).encode())})
    records.away = {"get_blob"}
    service.deliver(large, "m-large")
    queue.put([sample_task("small")])

    first = queue.lease(2, worker="w-1", ttl=TTL) or lease(queue)  # One pull brings both.
    assert eventually(lambda: queue.outlook().suspect_leases)
    records.away = set()
    service.deliver(large, "m-large")
    second = lease(queue)

    assert [one.task.key for one in first + second] == ["small", "large"]
    assert service.acked == []


def test_second_delivery_of_a_task_that_could_not_be_given_back_is_no_other_lease(
    service: FakeService, queue: PubSubQueue
) -> None:
    queue.put([sample_task()])
    [kept] = lease(queue)
    first = ack_id(kept)
    service.hopeless, service.failures["publish"] = True, 1
    with pytest.raises(QueueUnavailable):
        queue.release([Release(kept)])

    queue.lease(1, worker="w-1", ttl=TTL)
    service.deliver(service.published[0], "m-1")

    assert eventually(lambda: ack_id(kept) != first)
    assert queue.lease(1, worker="w-1", ttl=TTL) == []


@pytest.fixture
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_buffer, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(delivery_buffer, "LOOK_LATER_EVERY_S", 0.01)


@pytest.mark.usefixtures("_look_often")
def test_task_that_is_due_later_is_renewed_while_it_waits_here(service: FakeService, records: FlakyRecords) -> None:
    clock = FakeClock()
    queue = open_queue(service, records, clock=clock)
    queue.put([sample_task(not_before=clock.now() + timedelta(hours=1))])
    queue.lease(1, worker="w-1", ttl=TTL)
    assert eventually(lambda: queue.outlook().next_due == timedelta(hours=1))

    clock.advance(seconds=SETTINGS.ack_deadline_s - 15)

    assert eventually(lambda: [seconds for _, seconds in service.renewed] == [35])
    queue.close()


@pytest.mark.parametrize("delay", [timedelta(), timedelta(hours=1)])
def test_last_delivery_that_cannot_be_replaced_by_a_copy_is_kept_until_it_is_due(
    service: FakeService, records: FlakyRecords, delay: timedelta
) -> None:
    settings = replace(SETTINGS, max_delivery_attempts=5)
    clock = FakeClock()
    queue = PubSubQueue(settings, records, client=service, clock=clock)  # type: ignore[arg-type]
    queue.put([sample_task(not_before=clock.now() + delay if delay else None)])
    service.waiting.clear()
    service.deliver(service.published[0], "m-1", attempt=4)
    service.hopeless, service.failures["publish"] = True, 1

    taken = queue.lease(1, worker="w-1", ttl=TTL)

    assert eventually(lambda: bool(taken) or queue.outlook().next_due == delay)
    assert len(service.published) == 1
    queue.close()


# pausing


def test_pause_from_elsewhere_withholds_what_is_held_though_the_store_goes_away(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_buffer, "UNCLAIMED_S", 600.0)
    clock = FakeClock(datetime.now(UTC))
    records = FlakyRecords(clock=clock)
    queue, other = (open_queue(to, records, clock=clock) for to in (service, FakeService()))
    hold_one(queue)

    other.pause()
    clock.advance(seconds=10)
    paused = queue.lease(1, worker="w-1", ttl=TTL)
    next_look = queue.outlook().next_due
    records.away = {"control"}
    clock.advance(seconds=10)
    away = queue.lease(1, worker="w-1", ttl=TTL)
    records.away = set()
    other.resume()
    clock.advance(seconds=10)

    assert (paused, next_look, away) == ([], timedelta(seconds=1), [])
    assert len(queue.lease(1, worker="w-1", ttl=TTL)) == 1
    queue.close()
    other.close()


def test_settle_in_a_paused_queue_hands_out_nothing_more(service: FakeService, queue: PubSubQueue) -> None:
    queue.put([sample_task()])
    [running] = lease(queue)
    hold_one(queue, "2")

    queue.pause()
    during = queue.settle([success(running)], claim_next=1).leases
    queue.resume()

    assert during == []
    assert len(lease(queue)) == 1


# giving back


@pytest.mark.usefixtures("_look_often")
@pytest.mark.parametrize("fails", [False, True])
def test_task_that_is_held_and_not_asked_for_is_left_to_others_and_may_come_here_again(
    service: FakeService, records: FlakyRecords, fails: bool
) -> None:
    clock = FakeClock(datetime.now(UTC))
    queue = open_queue(service, records, clock=clock)
    hold_one(queue)
    service.hopeless, service.failures["publish"] = True, int(fails)

    clock.advance(seconds=4)
    assert eventually(lambda: queue.outlook().next_due is None)
    if fails:
        service.deliver(service.published[0], "m-1")  # Its deadline has passed.
    else:
        assert eventually(lambda: len(service.acked) == 1)
        assert [message.attributes.get(COPY) for message in service.published] == [None, "1"]

    assert len(lease(queue)) == 1
    queue.close()
