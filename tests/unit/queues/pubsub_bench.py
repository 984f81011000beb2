"""A Pub/Sub service in memory that fails on demand, and the fixtures of tests that run a queue on it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from runtime.clock import Clock
from runtime.end_reasons import EndReason
from runtime.errors import StoreUnavailable
from runtime.outputs import PubSubQueueOutput
from runtime.queues.pubsub import receiver as pubsub_intake
from runtime.queues.pubsub import subscription
from runtime.queues.pubsub.client import AckReply, OutgoingMessage, PubSubUnavailable, ReceivedMessage, deadline_seconds
from runtime.queues.pubsub.queue import PubSubQueue
from runtime.records.control_commands import QueueControl
from runtime.records.memory import MemoryRecords
from runtime.tasks.history import Lease, Record, Settlement
from runtime.tasks.model import TaskState
from tests.services_support import PATIENCE_S

TTL = timedelta(seconds=30)
SETTINGS = PubSubQueueOutput(
    topic="projects/p/topics/tasks", subscription="projects/p/subscriptions/tasks", ack_deadline_s=60
)
FIRST_RENEWAL_S = pubsub_intake.FIRST_RENEWAL_S
WELL = AckReply(frozenset(), frozenset())


def unavailable(*, retryable: bool = True) -> PubSubUnavailable:
    return PubSubUnavailable("the service is away", retryable=retryable)


class FakeService:
    """A `PubSubClient` over a list. `failures` maps a method's name to the number of its next calls that fail."""

    emulator = None

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: list[ReceivedMessage] = []
        self.failures: dict[str, int] = {}
        self.hopeless = False
        """Whether a failing call says that trying again cannot help."""
        self.published: list[OutgoingMessage] = []
        self.acked: list[str] = []
        self.ack_requests: list[int] = []
        self.renewed: list[tuple[str, int]] = []
        self.pulled: list[int] = []
        self.ack_replies: list[AckReply] = []
        self.renew_replies: list[AckReply] = []
        self.slow_publish_s = 0.0
        self.closed = False
        self.time: datetime | None = datetime(2026, 5, 1, tzinfo=UTC)
        self.sought: list[tuple[str, datetime]] = []
        self._ids = itertools.count(1)

    def _fail(self, name: str) -> None:
        with self.changed:
            if self.failures.get(name, 0) > 0:
                self.failures[name] -= 1
                raise unavailable(retryable=not self.hopeless)

    def recover(self) -> None:
        with self.changed:
            self.failures.clear()

    def publish(self, topic: str, messages: Sequence[OutgoingMessage]) -> list[str]:
        self._fail("publish")
        ids = [f"m-{next(self._ids)}" for _ in messages]
        with self.changed:
            self.published += messages
            for message_id, message in zip(ids, messages, strict=True):
                self.deliver(message, message_id)
        time.sleep(self.slow_publish_s)
        return ids

    def deliver(self, message: OutgoingMessage, message_id: str, *, attempt: int = 0) -> None:
        ack_id = f"ack-{message_id}-{next(self._ids)}"
        with self.changed:
            self.waiting.append(
                ReceivedMessage(ack_id, message_id, message.data, dict(message.attributes), datetime.now(UTC), attempt)
            )
            self.changed.notify_all()

    def pull(self, subscription: str, most: int, *, wait_s: float) -> list[ReceivedMessage]:
        self.pulled.append(most)
        self._fail("pull")
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.closed, timeout=wait_s)
            taken, self.waiting = self.waiting[:most], self.waiting[most:]
            return taken

    def acknowledge(self, subscription: str, ack_ids: Sequence[str]) -> AckReply:
        self._fail("acknowledge")
        self.ack_requests.append(len(ack_ids))
        reply = self.ack_replies.pop(0) if self.ack_replies else WELL
        self.acked += [ack_id for ack_id in ack_ids if ack_id not in reply.again]
        return reply

    def modify_deadline(self, subscription: str, ack_ids: Sequence[str], deadline: timedelta) -> AckReply:
        self._fail("modify_deadline")
        self.renewed += [(ack_id, deadline_seconds(deadline)) for ack_id in ack_ids]
        return self.renew_replies.pop(0) if self.renew_replies else WELL

    def service_time(self) -> datetime | None:
        return self.time

    def seek(self, subscription: str, at: datetime) -> None:
        self._fail("seek")
        self.sought.append((subscription, at))

    def close_pulls(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def close(self) -> None:
        self.close_pulls()


class FlakyRecords(MemoryRecords):
    """Records that fail the calls named in `away`."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__(clock=clock)
        self.away: set[str] = set()
        self.refuse_commit_of: set[str] = set()

    def find(self, task_id: str, generation: int) -> Record | None:
        if "find" in self.away:
            raise StoreUnavailable("the store is away")
        return super().find(task_id, generation)

    def control(self, queue: str, *, max_age: timedelta = timedelta(0)) -> QueueControl:
        if "control" in self.away:
            raise StoreUnavailable("the store is away")
        return super().control(queue, max_age=max_age)

    def get_blob(self, reference: str) -> bytes:
        if "get_blob" in self.away:
            raise StoreUnavailable("the store is away")
        return super().get_blob(reference)

    def commit(self, record: Record) -> None:
        if record.task_id in self.refuse_commit_of:
            raise StoreUnavailable("the store is away")
        super().commit(record)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def records() -> FlakyRecords:
    return FlakyRecords()


@pytest.fixture
def queue(service: FakeService, records: FlakyRecords) -> Iterator[PubSubQueue]:
    queue = open_queue(service, records)
    yield queue
    queue.close()


def open_queue(service: FakeService, records: MemoryRecords, **options: Any) -> PubSubQueue:
    return PubSubQueue(SETTINGS, records, client=service, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "ACK_DELAY_S", 0.01)
    monkeypatch.setattr(pubsub_intake, "CLOSE_WAIT_S", 0.05)
    # Renewals happen only when a test asks for them, and no answer is late.
    monkeypatch.setattr(pubsub_intake, "FIRST_RENEWAL_S", 600.0)
    monkeypatch.setattr(subscription, "FIRST_ANSWER_S", 600.0)
    monkeypatch.setattr("runtime.queues.pubsub.queue.RELEASE_PATIENCE_S", 0.0)
    monkeypatch.setattr("runtime.queues.pubsub.queue.PUT_PATIENCE_S", 0.3)


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def lease(queue: PubSubQueue, n: int = 1, *, timeout_s: float = 240) -> list[Lease]:
    leases: list[Lease] = []
    deadline = time.monotonic() + timeout_s
    while len(leases) < n and time.monotonic() < deadline:
        leases += queue.lease(n - len(leases), worker="w-1", ttl=TTL)
        time.sleep(0.005)
    return leases


def success(of: Lease, state: TaskState = TaskState.SUCCEEDED) -> Settlement:
    return Settlement(
        of,
        Record(
            task_id=of.task.id,
            generation=of.task.generation,
            experiment=of.task.experiment,
            state=state,
            token=of.token,
            reason=EndReason.SUCCEEDED if state is TaskState.SUCCEEDED else EndReason.APP_FAILED,
            ended_at=datetime.now(UTC),
        ),
    )


def ack_id(of: Lease) -> str:
    [one] = of.handle.ack_ids.values()
    assert isinstance(one, str)
    return one
