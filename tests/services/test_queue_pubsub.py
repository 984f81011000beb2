"""The Pub/Sub queue against Google's emulator, beyond the promises of every queue.

If the emulator is known to differ from the service, the test says so.
"""

from __future__ import annotations

import json
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from runtime.client.tasks.cancel import cancel_experiment
from runtime.client.tasks.submit import submit_tasks
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible, QueueUnavailable
from runtime.queues.base import RefusedSettlement
from runtime.queues.pubsub.client import OutgoingMessage, PubSubClient, ensure_topics
from runtime.queues.pubsub.message import COPY, INLINE_BYTES, PAYLOAD, TRIES
from runtime.queues.pubsub.queue import PubSubQueue
from runtime.records.memory import MemoryRecords
from runtime.records.order_scope import Coverage
from runtime.tasks.history import EndedNote, Lease, Mark, Record, Release, Settlement
from runtime.tasks.model import CommandEntry, TaskState, WorkflowEntry, new_token
from runtime.testing import FakeClock, sample_task
from tests.services.pubsub_pairs import TTL, lease_soon, make_pubsub_pair, make_settings
from tests.services_support import PubsubEmulator, find_free_port, relayed, wait_until
from tests.verbs_support import Bench

if TYPE_CHECKING:
    from runtime.outputs import PubSubQueueOutput

Opener = Callable[..., PubSubQueue]


@pytest.fixture
def records() -> MemoryRecords:
    return MemoryRecords()


@pytest.fixture
def open_queue(pubsub_emulator: PubsubEmulator, records: MemoryRecords) -> Iterator[Opener]:
    """Open queues with `open_queue(settings)`, by default on their own topics; they are closed after the test."""
    opened: list[PubSubQueue] = []

    def make(settings: PubSubQueueOutput | None = None, **options: Any) -> PubSubQueue:
        settings = settings or make_settings()
        ensure_topics(settings)
        queue = PubSubQueue(settings, options.pop("records", records), **options)
        opened.append(queue)
        return queue

    yield make
    for queue in opened:
        queue.close()


@pytest.fixture
def client(pubsub_emulator: PubsubEmulator) -> Iterator[PubSubClient]:
    client = PubSubClient()
    yield client
    client.close()


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All messages that the queues of the test received."""
    pull: Callable[..., list[Any]] = PubSubClient.pull
    came: list[Any] = []

    def noted(*args: Any, **options: Any) -> list[Any]:
        received = pull(*args, **options)
        came.extend(received)
        return received

    monkeypatch.setattr(PubSubClient, "pull", noted)
    return came


def lease_all(queue: PubSubQueue, pulled: list[Any], messages: int) -> list[Lease]:
    """Lease until this many messages arrived, and for a second more; return the leases."""
    leases: list[Lease] = []

    def all_came() -> bool:
        leases.extend(queue.lease(9, worker="w-1", ttl=TTL))
        return len(pulled) >= messages

    assert wait_until(all_came), f"{len(pulled)} of {messages} messages came"
    return leases + lease_soon(queue, timeout_s=1)


def record_of(lease: Lease, state: TaskState = TaskState.SUCCEEDED) -> Record:
    return Record(
        task_id=lease.task.id,
        generation=lease.task.generation,
        experiment=lease.task.experiment,
        state=state,
        token=lease.token,
        reason=EndReason.SUCCEEDED if state is TaskState.SUCCEEDED else EndReason.APP_FAILED,
        ended_at=datetime.now(UTC),
    )


def note_of(lease: Lease) -> EndedNote:
    return EndedNote(token=lease.token, reason=EndReason.PREEMPTED, ended_at=datetime.now(UTC).replace(microsecond=0))


def settle(queue: PubSubQueue, leases: list[Lease]) -> list[RefusedSettlement]:
    return queue.settle([Settlement(lease, record_of(lease)) for lease in leases]).refused


def pull_raw(client: PubSubClient, subscription: str, *, wait_s: float = 1.5) -> list[Any]:
    """Pull the messages of a subscription as a plain consumer."""
    return client.pull(subscription, 100, wait_s=wait_s)


# delivery


def test_put_and_settle_leaves_nothing_at_the_service(
    open_queue: Opener, records: MemoryRecords, client: PubSubClient
) -> None:
    settings = make_settings()
    queue = open_queue(settings)
    tasks = [sample_task(str(number), submitted_at=datetime(2026, 1, 1, tzinfo=UTC)) for number in range(25)]

    queue.put(tasks)
    leases = lease_soon(queue, 25)
    refused = settle(queue, leases)
    queue.close()

    assert {lease.task.id: lease.task for lease in leases} == {task.id: task for task in tasks}
    assert refused == []
    assert {record.task_id for record in records.records("sample")} == {task.id for task in tasks}
    assert pull_raw(client, settings.subscription) == []


def test_wire_text_and_unknown_fields_arrive_as_submitted(open_queue: Opener, client: PubSubClient) -> None:
    settings = make_settings()
    queue = open_queue(settings)
    task = sample_task("1", extra={"lab_note": {"a": [1, "ü"]}}, max_failures=7, timeout=timedelta(hours=1))

    queue.put([task])
    [lease] = lease_soon(queue)
    queue.release([Release(lease)])
    [again] = lease_soon(queue)

    assert lease.task == replace(task, submitted_at=lease.task.submitted_at)
    assert json.loads(again.body)["lab_note"] == {"a": [1, "ü"]}
    assert again.body == lease.body
    assert again.task.extra == task.extra


def test_bare_message_of_a_plain_client_runs_and_keeps_its_id_through_a_release(open_queue: Opener) -> None:
    from google.cloud import pubsub_v1

    settings = make_settings()
    queue = open_queue(settings)
    publisher = pubsub_v1.PublisherClient()
    body = {"project": "p", "workflow": "w", "args": ["--a b", '"quoted" {braces}\n']}
    publisher.publish(settings.topic, json.dumps(body).encode(), origin="lab").result()
    publisher.stop()

    [first] = lease_soon(queue)
    queue.release([Release(first, note=note_of(first))])
    [second] = lease_soon(queue)

    assert first.task.entry == WorkflowEntry("p", "w", ("--a b", '"quoted" {braces}\n'))
    assert first.task.submitted_at is not None
    assert first.body == ""
    assert second.task == first.task
    assert second.tries == 1
    assert second.handle.attributes["origin"] == "lab"


def test_two_bare_messages_of_equal_text_are_two_tasks(open_queue: Opener, client: PubSubClient) -> None:
    settings = make_settings()
    queue = open_queue(settings)
    client.publish(settings.topic, [OutgoingMessage(b'{"project": "p", "workflow": "w", "args": []}', {})] * 2)

    leases = lease_soon(queue, 2)

    assert len({lease.task.id for lease in leases}) == 2


@pytest.mark.parametrize("data", [b"{not json", b"[1, 2]", b'{"project": "p"}', b"\xff\xfe", b'{"schema": 99}'])
def test_malformed_message_becomes_a_dead_letter_and_is_gone(
    open_queue: Opener, records: MemoryRecords, client: PubSubClient, data: bytes
) -> None:
    settings = make_settings()
    queue = open_queue(settings)
    client.publish(settings.topic, [OutgoingMessage(data, {})])

    [lease] = lease_soon(queue)
    assert lease.invalid is not None
    mark = Mark(
        task_id=lease.invalid.task_id,
        generation=1,
        experiment=lease.task.experiment,
        state=TaskState.FAILED,
        marked_at=datetime.now(UTC),
        reason=EndReason.CONFIG_INVALID,
        message=lease.invalid.problem,
        task=None,
        raw=lease.invalid.raw,
    )
    queue.settle([Settlement(lease, record_of(lease, TaskState.FAILED), mark)])
    queue.close()

    assert [(one.task_id, one.raw, one.message) for one in records.marks()] == [
        (lease.task.id, data.decode(errors="replace"), lease.invalid.problem)
    ]
    assert pull_raw(client, settings.subscription) == []


def test_priority_is_refused_with_the_reason_and_nothing_is_published(open_queue: Opener, client: PubSubClient) -> None:
    settings = make_settings()
    queue = open_queue(settings)

    with pytest.raises(NotPossible) as refused:
        queue.put([sample_task("1"), sample_task("2", priority=3)])

    assert "priority 3" in refused.value.message
    assert pull_raw(client, settings.subscription) == []


def test_wake_descriptor_turns_readable_for_an_idle_worker(open_queue: Opener) -> None:
    settings = make_settings()
    queue, submitter = open_queue(settings), open_queue(settings)
    wake_fd = queue.wake_descriptor()
    assert queue.lease(1, worker="w-1", ttl=TTL) == []

    queue.drain_wakes()
    assert select.select([wake_fd], [], [], 0)[0] == []
    submitter.put([sample_task()])
    woken = select.select([wake_fd], [], [], 240)[0]
    leases = queue.lease(1, worker="w-1", ttl=TTL)
    queue.drain_wakes()

    assert woken == [wake_fd]
    assert len(leases) == 1
    assert select.select([wake_fd], [], [], 0)[0] == []


def test_two_workers_with_one_slot_each_share_fairly(open_queue: Opener) -> None:
    # A message kept by one of them would reach the other long after this test.
    settings = make_settings(ack_deadline_s=600)
    queues = [open_queue(settings), open_queue(settings)]
    queues[0].put([sample_task(str(number)) for number in range(10)])

    had = []
    for _ in range(5):
        for queue in queues:
            leases = lease_soon(queue)
            had += [lease.task.id for lease in leases]
            settle(queue, leases)

    assert len(set(had)) == len(had) == 10


def test_a_task_that_is_recorded_is_not_handed_out_again(
    open_queue: Opener, records: MemoryRecords, client: PubSubClient, pulled: list[Any]
) -> None:
    settings = make_settings()
    queue = open_queue(settings)
    done, fresh = sample_task("done"), sample_task("fresh")
    queue.put([done])
    settle(queue, lease_soon(queue))

    queue.put([done, fresh])
    leases = lease_all(queue, pulled, 3)
    settle(queue, leases)
    queue.close()

    assert [lease.task.id for lease in leases] == [fresh.id]
    assert pull_raw(client, settings.subscription) == []


def test_a_task_published_twice_runs_once_here_and_both_messages_go(
    open_queue: Opener, client: PubSubClient, pulled: list[Any]
) -> None:
    settings = make_settings()
    queue = open_queue(settings)
    queue.put([sample_task()])
    queue.put([sample_task()])

    leases = lease_all(queue, pulled, 2)
    settle(queue, leases)
    queue.close()

    assert len(leases) == 1
    assert pull_raw(client, settings.subscription) == []


def test_a_new_generation_is_another_task(open_queue: Opener) -> None:
    queue = open_queue()
    queue.put([sample_task()])
    settle(queue, lease_soon(queue))

    queue.put([sample_task(generation=2)])
    [lease] = lease_soon(queue)

    assert lease.task.generation == 2


# size


def test_arguments_of_200_kb_travel_in_the_message_and_requests_stay_under_the_limit(
    open_queue: Opener, records: MemoryRecords
) -> None:
    queue = open_queue()
    tasks = [sample_task(str(n), entry=CommandEntry(("run", f"{n}" + "x" * 200_000))) for n in range(120)]

    queue.put(tasks)  # 24 MB; a single request may carry 10.
    leases = lease_soon(queue, 120)

    assert {lease.task.id: lease.task.entry for lease in leases} == {task.id: task.entry for task in tasks}
    assert all(PAYLOAD not in lease.handle.attributes for lease in leases)


def test_more_than_a_request_holds_is_published_in_several(open_queue: Opener) -> None:
    queue = open_queue()
    queue.put([sample_task(str(number)) for number in range(2_345)])

    leases = lease_soon(queue, 2_345)

    assert len({lease.task.id for lease in leases}) == 2_345


def test_payload_of_12_mb_goes_by_reference_and_through_a_release(open_queue: Opener, records: MemoryRecords) -> None:
    queue = open_queue()
    task = sample_task(entry=CommandEntry(("run", "y" * 12_000_000)))

    queue.put([task])
    [lease] = lease_soon(queue)
    queue.release([Release(lease)])
    [again] = lease_soon(queue)

    assert len(again.handle.body) < 1_000 < INLINE_BYTES
    assert again.task.entry == lease.task.entry == task.entry


def test_payload_that_is_gone_becomes_an_invalid_lease(open_queue: Opener, client: PubSubClient) -> None:
    settings = make_settings()
    queue = open_queue(settings)
    missing = "payloads/" + "0" * 64
    client.publish(settings.topic, [OutgoingMessage(b"{}", {PAYLOAD: missing})])

    [lease] = lease_soon(queue)

    assert lease.invalid is not None
    assert "payload" in lease.invalid.problem


# leases


@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [False, True])
def test_task_of_35_s_on_a_10_s_deadline_is_delivered_once(open_queue: Opener, exactly_once: bool) -> None:
    settings = make_settings(ack_deadline_s=10, exactly_once=exactly_once)
    worker, other = open_queue(settings), open_queue(settings)
    ttl = timedelta(seconds=30)
    worker.put([sample_task()])
    [lease] = lease_soon(worker, ttl=ttl)

    stolen: list[Lease] = []
    lost: list[Lease] = []
    end = time.monotonic() + 35
    while time.monotonic() < end:
        lost += worker.renew([lease], ttl)
        for _ in range(8):
            stolen += other.lease(1, worker="w-2", ttl=ttl)
            time.sleep(0.5)
    refused = settle(worker, [lease])

    assert (lost, stolen, refused) == ([], [], [])


@pytest.mark.slow
def test_what_is_held_and_not_yet_due_is_renewed_by_the_queue_itself(open_queue: Opener) -> None:
    # On a 10 s deadline, another worker would get it long before it is due unless it is renewed.
    settings = make_settings(ack_deadline_s=10, dead_letters=True, max_delivery_attempts=5)
    worker, other = open_queue(settings), open_queue(settings)
    ttl = timedelta(seconds=10)
    due = datetime.now(UTC) + timedelta(seconds=45)
    worker.put([sample_task(not_before=due)])
    assert worker.lease(1, worker="w-1", ttl=ttl) == []
    assert wait_until(lambda: worker.outlook().next_due is not None)

    early = lease_soon(other, timeout_s=20, ttl=ttl)
    looked, left = datetime.now(UTC), worker.outlook().next_due
    [lease] = lease_soon(worker, ttl=ttl)

    assert early == []
    assert left is not None
    assert timedelta() < left <= due - looked
    assert datetime.now(UTC) >= due
    assert lease.handle.attempt == 1


@pytest.mark.slow
def test_lease_that_is_not_renewed_comes_back_and_the_stale_one_cannot_commit(open_queue: Opener) -> None:
    settings = make_settings(ack_deadline_s=10)
    slow, fast = open_queue(settings), open_queue(settings)
    ttl = timedelta(seconds=10)
    slow.put([sample_task()])
    [stale] = lease_soon(slow, ttl=ttl)

    [fresh] = lease_soon(fast, ttl=ttl)
    won = settle(fast, [fresh])
    lost = settle(slow, [stale])

    assert won == []
    assert [(one.lease, one.record and one.record.token) for one in lost] == [(stale, fresh.token)]


@pytest.mark.slow
def test_exactly_once_service_says_that_a_lease_is_lost_and_its_failure_is_not_recorded(
    open_queue: Opener, records: MemoryRecords
) -> None:
    settings = make_settings(ack_deadline_s=10, exactly_once=True)
    slow, fast = open_queue(settings), open_queue(settings)
    ttl = timedelta(seconds=10)
    slow.put([sample_task()])
    [stale] = lease_soon(slow, ttl=ttl)
    [fresh] = lease_soon(fast)

    lost = slow.renew([stale], TTL)
    refused = slow.settle([Settlement(stale, record_of(stale, TaskState.FAILED))]).refused
    slow.release([Release(stale, note=note_of(stale))])

    assert lost == [stale]
    assert [one.lease for one in refused] == [stale]
    assert records.find(stale.task.id, 1) is None
    assert fast.renew([fresh], TTL) == []
    assert settle(fast, [fresh]) == []
    assert lease_soon(fast, timeout_s=1) == []


@pytest.mark.slow
def test_message_that_comes_again_while_its_attempt_runs_here_is_not_started_twice(open_queue: Opener) -> None:
    settings = make_settings(ack_deadline_s=10)
    queue = open_queue(settings)
    queue.put([sample_task()])
    [lease] = lease_soon(queue, ttl=timedelta(seconds=10))
    queue.mark_running([lease.token])

    twice = lease_soon(queue, ttl=timedelta(seconds=10), timeout_s=20)  # Not renewed, so it is delivered again.
    refused = settle(queue, [lease])
    queue.close()
    after = lease_soon(open_queue(settings), timeout_s=2)

    assert twice == []
    assert refused == []
    assert after == []


def test_settling_again_changes_nothing_and_the_second_of_two_attempts_is_refused(open_queue: Opener) -> None:
    queue = open_queue()
    queue.put([sample_task()])
    [lease] = lease_soon(queue)
    settlement = Settlement(lease, record_of(lease))

    first = queue.settle([settlement]).refused
    second = queue.settle([settlement]).refused
    other = queue.settle([Settlement(lease, replace(settlement.record, token=new_token()))]).refused

    assert (first, second) == ([], [])
    assert [one.record and one.record.token for one in other] == [lease.token]


def test_settle_claims_what_was_looked_ahead(open_queue: Opener) -> None:
    queue = open_queue()
    queue.put([sample_task(str(number)) for number in range(60)])
    leases = lease_soon(queue, 20)
    settled = queue.settle([Settlement(lease, record_of(lease)) for lease in leases], claim_next=20)
    done = len(leases)
    while done < 60:
        leases = settled.leases or lease_soon(queue, 1)
        assert leases
        done += len(leases)
        settled = queue.settle([Settlement(lease, record_of(lease)) for lease in leases], claim_next=20)

    assert done == 60


# giving back


def test_released_task_goes_to_another_worker_with_its_note(open_queue: Opener, records: MemoryRecords) -> None:
    settings = make_settings()
    first, second = open_queue(settings), open_queue(settings)
    first.put([sample_task()])
    [lease] = lease_soon(first)
    note = note_of(lease)

    first.release([Release(lease, note=note, alone=True)])
    [again] = lease_soon(second)

    assert records.history(lease.task.id, 1).ended == (note,)
    assert (again.task, again.tries, again.alone) == (lease.task, 1, True)
    assert again.token != lease.token


def test_released_with_a_delay_is_held_until_it_is_due(open_queue: Opener) -> None:
    queue = open_queue()
    queue.put([sample_task()])
    [lease] = lease_soon(queue)
    due = datetime.now(UTC) + timedelta(seconds=4)

    queue.release([Release(lease, not_before=due, note=note_of(lease))])
    came: list[Lease] = []

    def is_known() -> bool:
        came.extend(queue.lease(1, worker="w-1", ttl=TTL))
        return bool(came) or queue.outlook().next_due is not None

    assert wait_until(is_known)
    left = queue.outlook().next_due
    [again] = came or lease_soon(queue)

    assert datetime.now(UTC) >= due
    assert came or (left is not None and left < timedelta(seconds=4))
    assert again.tries == 1


@pytest.mark.slow
def test_200_releases_of_one_task_spend_no_delivery_attempts(open_queue: Opener, client: PubSubClient) -> None:
    settings = make_settings(dead_letters=True, max_delivery_attempts=5)
    queue = open_queue(settings)
    queue.put([sample_task()])

    attempts = set()
    for number in range(200):
        [lease] = lease_soon(queue)
        attempts.add(lease.handle.attempt)
        assert lease.handle.attributes.get(COPY, "0") == str(number)
        queue.release([Release(lease)])
    [lease] = lease_soon(queue)
    settle(queue, [lease])
    queue.close()

    assert attempts == {1}
    assert lease.tries == 0
    assert settings.dead_letter_subscription is not None
    assert pull_raw(client, settings.dead_letter_subscription) == []
    assert pull_raw(client, settings.subscription) == []


def test_a_crowd_is_released_in_few_requests_and_all_come_back(
    open_queue: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    for name in ("publish", "acknowledge", "modify_deadline"):
        monkeypatch.setattr(PubSubClient, name, _counted(getattr(PubSubClient, name), requests))
    settings = make_settings()
    queue, other = open_queue(settings), open_queue(settings)
    queue.put([sample_task(str(number)) for number in range(300)])
    leases = lease_soon(queue, 300)

    requests.clear()
    queue.release([Release(lease, note=note_of(lease)) for lease in leases])
    asked = list(requests)
    again = lease_soon(other, 300)

    assert {lease.task.id for lease in again} == {lease.task.id for lease in leases}
    assert all(lease.tries == 1 for lease in again)
    assert len(asked) < 10, asked


def _counted(method: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls.append(method.__name__)
        return method(*args, **options)

    return call


def test_what_a_closing_worker_has_not_started_goes_back_at_once(open_queue: Opener) -> None:
    settings = make_settings(dead_letters=True, max_delivery_attempts=5)
    leaving, staying = open_queue(settings), open_queue(settings)
    delayed = sample_task("delayed", not_before=datetime.now(UTC) + timedelta(minutes=5))
    leaving.put([delayed])
    assert leaving.lease(1, worker="w-1", ttl=TTL) == []
    assert wait_until(lambda: leaving.outlook().next_due is not None)
    leaving.put([sample_task("ready")])
    assert wait_until(lambda: leaving.outlook().next_due == timedelta())

    leaving.close()
    [lease] = lease_soon(staying)
    staying.lease(1, worker="w-2", ttl=TTL)

    assert lease.task.key == "ready"
    assert (lease.handle.attempt, lease.handle.attributes[COPY]) == (1, "1")
    assert wait_until(lambda: (staying.outlook().next_due or timedelta()) > timedelta(minutes=1))


@pytest.mark.slow
def test_what_was_looked_ahead_and_not_taken_goes_back(open_queue: Opener) -> None:
    settings = make_settings()
    busy, free = open_queue(settings), open_queue(settings)
    assert busy.lease(1, worker="w-1", ttl=TTL) == []
    free.put([sample_task()])
    assert wait_until(lambda: busy.outlook().next_due == timedelta())

    [lease] = lease_soon(free)  # `busy` had asked for it and never came back.

    assert lease.handle.attributes[COPY] == "1"
    assert TRIES not in lease.handle.attributes


# the service's own dead letters


def expire_for_good(client: PubSubClient, settings: PubSubQueueOutput) -> None:
    """Deliver waiting messages until the service has moved them to its dead letters."""
    assert settings.dead_letter_subscription is not None
    for _ in range(40):
        for message in client.pull(settings.subscription, 10, wait_s=1):
            client._subscriber.modify_ack_deadline(
                subscription=settings.subscription, ack_ids=[message.ack_id], ack_deadline_seconds=0
            )
        if received := client.pull(settings.dead_letter_subscription, 10, wait_s=1):
            # Peek only: return it at once, for the queue to find.
            client._subscriber.modify_ack_deadline(
                subscription=settings.dead_letter_subscription,
                ack_ids=[message.ack_id for message in received],
                ack_deadline_seconds=0,
            )
            return
    raise AssertionError("nothing was dead-lettered")


@pytest.mark.slow
def test_what_the_service_gave_up_is_queued_again_and_judged_by_our_history(
    open_queue: Opener, client: PubSubClient
) -> None:
    settings = make_settings(dead_letters=True, max_delivery_attempts=5)
    queue = open_queue(settings)
    queue.put([sample_task()])
    expire_for_good(client, settings)

    queue.tend()
    [lease] = lease_soon(queue)
    settle(queue, [lease])

    assert lease.suspect
    assert lease.handle.attempt == 1
    assert settings.dead_letter_subscription is not None
    assert pull_raw(client, settings.dead_letter_subscription) == []


@pytest.mark.slow
def test_dead_letter_that_is_recorded_is_dropped_and_a_malformed_one_is_filed(
    open_queue: Opener, records: MemoryRecords, client: PubSubClient
) -> None:
    settings = make_settings(dead_letters=True, max_delivery_attempts=5)
    queue = open_queue(settings)
    done = sample_task("done")
    records.commit(
        Record(
            task_id=done.id,
            generation=1,
            experiment="sample",
            state=TaskState.SUCCEEDED,
            token="t",
            reason=EndReason.SUCCEEDED,
            ended_at=datetime.now(UTC),
        )
    )
    queue.put([done])
    assert settings.dead_letter_topic is not None
    assert settings.dead_letter_subscription is not None
    client.publish(settings.dead_letter_topic, [OutgoingMessage(b"{broken", {})])
    expire_for_good(client, settings)
    assert wait_until(lambda: queue.drain_dead_letters() > 0)

    marks = list(records.marks())
    [filed] = [mark for mark in marks if mark.raw == "{broken"]
    assert records.find(filed.task_id, 1) is not None
    assert lease_soon(queue, timeout_s=1) == []
    assert pull_raw(client, settings.dead_letter_subscription) == []


@pytest.mark.slow
def test_last_delivery_before_the_dead_letters_is_replaced_by_a_copy(open_queue: Opener, client: PubSubClient) -> None:
    # Nothing drains the dead-letter subscription here: without the copy, the next loss of a worker would lose the task.
    settings = replace(make_settings(dead_letters=True, max_delivery_attempts=5), dead_letter_subscription=None)
    queue = open_queue(settings)
    queue.put([sample_task()])
    for _ in range(3):
        [message] = client.pull(settings.subscription, 1, wait_s=30)
        client._subscriber.modify_ack_deadline(
            subscription=settings.subscription, ack_ids=[message.ack_id], ack_deadline_seconds=0
        )

    [lease] = lease_soon(queue)

    assert lease.handle.attempt == 1
    assert lease.handle.attributes[COPY] == "1"
    assert lease.suspect


# outages


@pytest.fixture
def own_emulator() -> Iterator[PubsubEmulator]:
    """An emulator that the test may kill."""
    from tests.services_support import find_emulator_jar, require

    jar = find_emulator_jar()
    require("the Pub/Sub emulator", jar, "make services")
    emulator = PubsubEmulator(jar).start()
    yield emulator
    emulator.kill()


@pytest.mark.service
@pytest.mark.slow
def test_worker_survives_a_restart_of_the_emulator_and_what_is_published_again_runs(
    own_emulator: PubsubEmulator, records: MemoryRecords
) -> None:
    settings = make_settings()
    queue = make_pubsub_pair(records, settings, emulator=own_emulator.address)
    tasks = [sample_task(str(number)) for number in range(6)]
    queue.put(tasks)
    running = lease_soon(queue, 2)
    assert len(running) == 2

    own_emulator.kill()
    assert queue.lease(1, worker="w-1", ttl=TTL) == []
    with pytest.raises(QueueUnavailable) as unconfirmed:
        queue.renew(running, timedelta(seconds=6))
    assert unconfirmed.value.retryable
    assert settle(queue, running) == []  # The record is written; only its acknowledgement waits.
    time.sleep(1)
    own_emulator.start()
    assert queue.lease(1, worker="w-1", ttl=TTL) == []  # The subscription is forgotten: an outage too.
    time.sleep(1)
    assert sorted(queue.ensure_topics()) == [settings.subscription, settings.topic]
    queue.put(tasks)
    leases = lease_soon(queue, 4)
    settle(queue, leases)
    queue.close()

    assert {record.task_id for record in records.records("sample")} == {task.id for task in tasks}
    assert len(leases) == 4


@pytest.mark.service
@pytest.mark.slow
def test_put_waits_for_a_service_that_comes_back(
    pubsub_emulator: PubsubEmulator, records: MemoryRecords, caplog: pytest.LogCaptureFixture
) -> None:
    settings, port = make_settings(), find_free_port()
    ensure_topics(settings)
    queue = PubSubQueue(settings, records, client=PubSubClient(emulator=f"127.0.0.1:{port}"))

    thread = threading.Thread(target=queue.put, args=([sample_task("during")],))
    thread.start()
    assert wait_until(lambda: "trying again" in caplog.text)
    with relayed(pubsub_emulator.address, port=port):
        thread.join()
        [lease] = lease_soon(queue)
        queue.close()

    assert lease.task.key == "during"


def test_missing_topic_and_subscription_are_named_with_what_makes_them(
    pubsub_emulator: PubsubEmulator, records: MemoryRecords
) -> None:
    settings = make_settings()
    queue = PubSubQueue(settings, records)

    with pytest.raises(QueueUnavailable) as put:
        queue.put([sample_task()])
    with pytest.raises(QueueUnavailable) as lease:
        # The first lease does not wait long for the service's answer.
        wait_until(lambda: bool(queue.lease(1, worker="w-1", ttl=TTL)))
    queue.close()

    assert settings.topic in put.value.message
    assert settings.subscription in lease.value.message
    assert "runtime queue repair" in (put.value.hint or "")
    assert not put.value.retryable


def test_ensure_topics_says_what_is_new_and_changes_nothing_the_second_time(pubsub_emulator: PubsubEmulator) -> None:
    settings = make_settings(dead_letters=True, max_delivery_attempts=7, exactly_once=True)

    first, second = ensure_topics(settings), ensure_topics(settings)

    assert sorted(first) == sorted(
        name
        for name in (
            settings.topic,
            settings.subscription,
            settings.dead_letter_topic,
            settings.dead_letter_subscription,
        )
        if name
    )
    assert second == []


# control


def test_paused_queue_hands_out_nothing_until_it_is_resumed(open_queue: Opener) -> None:
    queue = open_queue()
    queue.put([sample_task()])

    queue.pause()
    assert lease_soon(queue, timeout_s=1) == []
    queue.resume()
    leases = lease_soon(queue)

    assert len(leases) == 1


def test_purge_ends_every_task_that_was_submitted_and_what_comes_afterwards_runs(
    open_queue: Opener, records: MemoryRecords
) -> None:
    settings = make_settings()
    queue = open_queue(settings)
    delayed = sample_task("delayed", not_before=datetime.now(UTC) + timedelta(seconds=1.5))
    submit_tasks([*(sample_task(str(number)) for number in range(20)), delayed], queue, experiment="sample")
    [running] = lease_soon(queue)
    succeeded = lease_soon(queue)
    assert settle(queue, succeeded) == []

    count = queue.purge()
    elsewhere = open_queue(settings)
    left = lease_soon(elsewhere, timeout_s=3)
    [refused] = settle(queue, [running])
    submit_tasks([sample_task("after")], queue, experiment="sample")
    after = lease_soon(elsewhere)

    totals = records.totals("sample", exact=True).counts
    assert (count, left, [lease.task.key for lease in after]) == (20, [], ["after"])
    assert refused.record is not None
    assert refused.record.state is TaskState.CANCELLED
    assert totals == {TaskState.QUEUED: 1, TaskState.SUCCEEDED: 1, TaskState.CANCELLED: 20}
    assert records.totals("sample").counts[TaskState.CANCELLED] == 20


@pytest.mark.parametrize("order", ["cancel", "purge"])
def test_order_covers_what_foreign_producers_published_before_it_and_nothing_later(
    open_queue: Opener, client: PubSubClient, records: MemoryRecords, order: str
) -> None:
    settings = make_settings()
    queue = open_queue(settings)
    # The message's own submission time comes from an unsynchronised clock.
    lines = [{"project": "p", "workflow": "w", "args": [n], "submitted_at": "2099-01-01T00:00:00Z"} for n in "123"]
    bodies = [OutgoingMessage(json.dumps(line).encode(), {}) for line in lines]
    client.publish(settings.topic, bodies[:2])
    first = lease_soon(queue, 2)
    queue.release([Release(first[0])])  # It comes back as a copy, which is published later.
    if order == "cancel":
        stack = Bench(records, queue, FakeClock())  # type: ignore[arg-type]
        cancel_experiment(stack, "default", now=datetime(2020, 1, 1, tzinfo=UTC))
    else:
        assert queue.purge() == 0
    time.sleep(0.002)  # The service's times are whole milliseconds; a message received within the same one is covered.
    client.publish(settings.topic, bodies[2:])

    control, coverage, elsewhere = records.control("default"), Coverage(records), open_queue(settings)
    covered: dict[object, bool | None] = {}

    def look(leases: list[Lease]) -> bool:
        for lease in leases:
            args = lease.task.entry.args  # type: ignore[union-attr]
            covered[args] = coverage.covers(control, lease.task, lease.published_at)
        return len(covered) == 3

    look([first[1]])
    # After a seek, the emulator also redelivers messages acknowledged in the last minute.
    assert wait_until(lambda: look(elsewhere.lease(3, worker="w-1", ttl=TTL)))
    assert covered == {("1",): True, ("2",): True, ("3",): False}


def test_depth_is_unknown_and_peek_says_where_to_look(open_queue: Opener) -> None:
    queue = open_queue()

    assert queue.depth() is None
    with pytest.raises(NotPossible) as refused:
        queue.peek(3)
    assert "runtime status" in (refused.value.hint or "")


# idleness


def test_task_that_comes_as_an_idle_worker_leaves_is_not_held_up(open_queue: Opener) -> None:
    late = []
    for number in range(8):
        # A message it took along would come back long after this test.
        settings = make_settings(ack_deadline_s=600)
        leaving, staying = open_queue(settings), open_queue(settings)
        assert leaving.lease(1, worker="w-1", ttl=TTL) == []
        closing = threading.Thread(target=leaving.close)
        closing.start()
        time.sleep(0.05 * number)
        staying.put([sample_task()])
        closing.join()
        late += [] if lease_soon(staying) else [number]

    assert late == []


def test_idle_queue_costs_next_to_nothing(open_queue: Opener) -> None:
    calls: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    # For threads that the queue starts.
    threading.setprofile(note)
    try:
        queue = open_queue()
        assert queue.lease(4, worker="w-1", ttl=TTL) == []
    finally:
        threading.setprofile(None)
    assert wait_until(lambda: bool(calls))
    time.sleep(0.3)

    before = len(calls)
    time.sleep(2)
    made = calls[before:]
    queue.close()

    # Each pull is some hundred calls, so a queue that polls in a loop would make hundreds of pulls.
    assert len(made) < 5_000, Counter(made).most_common(5)
