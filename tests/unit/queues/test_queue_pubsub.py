"""The Pub/Sub queue against a service that fails on demand, which the emulator cannot do."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from runtime.client.tasks.submit import submit_tasks
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible, QueueUnavailable, StoreUnavailable
from runtime.queues.pubsub import delivery_buffer, subscription
from runtime.queues.pubsub import queue as pubsub
from runtime.queues.pubsub import receiver as pubsub_intake
from runtime.queues.pubsub.client import (
    MAX_ACK_IDS,
    AckReply,
    OutgoingMessage,
    PubSubUnavailable,
    ReceivedMessage,
    insist,
)
from runtime.queues.pubsub.message import COPY, PAYLOAD
from runtime.queues.pubsub.queue import PURGE_MARGIN, PubSubQueue
from runtime.records.base import ManifestPart
from runtime.records.memory import MemoryRecords
from runtime.system import system
from runtime.tasks.history import EndedNote, Mark, Record, Release
from runtime.tasks.model import TaskState
from runtime.testing import FakeClock, sample_task
from tests.services_support import replace_sleep, wait_until
from tests.unit.queues.pubsub_bench import (
    FIRST_RENEWAL_S,
    SETTINGS,
    TTL,
    FakeService,
    FlakyRecords,
    ack_id,
    eventually,
    lease,
    open_queue,
    success,
    unavailable,
)
from tests.unit.queues.pubsub_bench import _soon as _soon  # noqa: PLC0414 (a fixture)
from tests.unit.queues.pubsub_bench import queue as queue  # noqa: PLC0414 (a fixture)
from tests.unit.queues.pubsub_bench import records as records  # noqa: PLC0414 (a fixture)
from tests.unit.queues.pubsub_bench import service as service  # noqa: PLC0414 (a fixture)

# leasing


def test_lease_while_a_pull_waits_at_the_service_does_not_wait_for_it(
    service: FakeService, queue: PubSubQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub_intake, "FIRST_WAIT_S", 0.0)
    assert queue.lease(1, worker="w-1", ttl=TTL) == []
    assert eventually(lambda: service.pulled)
    monkeypatch.setattr(pubsub_intake, "FIRST_WAIT_S", 600.0)

    assert queue.lease(1, worker="w-1", ttl=TTL) == []


def test_worker_pulls_as_many_as_it_is_short_of(service: FakeService, queue: PubSubQueue) -> None:
    queue.put([sample_task(str(number)) for number in range(5)])

    assert len(lease(queue, 3)) == 3
    assert service.pulled[0] == 3


# giving back


def test_copy_that_arrives_before_its_publisher_knows_is_no_second_delivery(
    service: FakeService, queue: PubSubQueue
) -> None:
    queue.put([sample_task("1"), sample_task("2")])
    leases = lease(queue, 2)
    queue.lease(2, worker="w-1", ttl=TTL)  # A pull waits, and takes the copies as soon as they are published.
    service.slow_publish_s = 0.3

    queue.release([Release(one) for one in leases])
    again = lease(queue, 2)

    assert {one.task.id for one in again} == {one.task.id for one in leases}
    assert eventually(lambda: len(service.acked) == 2)
    assert not {ack_id(one) for one in again} & set(service.acked)


def test_release_that_cannot_publish_keeps_the_lease_and_works_later(
    service: FakeService, queue: PubSubQueue, records: FlakyRecords
) -> None:
    queue.put([sample_task()])
    [held] = lease(queue)
    note = EndedNote(token=held.token, reason=EndReason.PREEMPTED, ended_at=datetime(2026, 1, 1, tzinfo=UTC))
    service.failures["publish"] = 1

    with pytest.raises(QueueUnavailable):
        queue.release([Release(held, note=note)])
    time.sleep(0.1)
    acked_after_failure = list(service.acked)
    still_renewed = queue.renew([held], TTL)
    queue.release([Release(held, note=note)])
    queue.release([Release(held, note=note)])
    [again] = lease(queue)

    assert (acked_after_failure, still_renewed) == ([], [])
    assert eventually(lambda: service.acked == [ack_id(held)])
    assert len(service.published) == 2
    assert again.tries == 1
    assert records.history(held.task.id, 1).ended == (note,)


def test_release_in_several_requests_acknowledges_only_what_was_confirmed(
    service: FakeService, queue: PubSubQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.put([sample_task(str(number)) for number in range(4)])
    leases = lease(queue, 4)
    monkeypatch.setattr("runtime.queues.pubsub.message.MAX_PUBLISH_MESSAGES", 2)
    service.failures["publish"] = 1

    with pytest.raises(QueueUnavailable):
        queue.release([Release(one) for one in leases])

    assert eventually(lambda: len(service.acked) == 2)
    assert set(service.acked) == {ack_id(one) for one in leases[2:]}


def test_close_gives_back_what_waits_and_leaves_what_is_leased(service: FakeService, records: FlakyRecords) -> None:
    queue = open_queue(service, records)
    due = datetime.now(UTC) + timedelta(hours=1)
    queue.put([sample_task("leased")])
    [held] = lease(queue)
    queue.lease(1, worker="w-1", ttl=TTL)
    queue.put([sample_task("later", not_before=due), sample_task("ready")])
    assert eventually(lambda: not service.waiting and queue.outlook().next_due == timedelta())
    before = len(service.published)

    queue.close()

    assert len(service.published) - before == 2
    assert all(message.attributes[COPY] == "1" for message in service.published[before:])
    assert len(service.acked) == 2
    assert ack_id(held) not in service.acked


# settling and acknowledging


def test_acknowledgement_follows_the_record_and_only_where_it_stands(
    service: FakeService, queue: PubSubQueue, records: FlakyRecords
) -> None:
    queue.put([sample_task("1"), sample_task("2")])
    leases = lease(queue, 2)
    records.refuse_commit_of = {leases[0].task.id}
    settlements = [success(one) for one in leases]

    with pytest.raises(StoreUnavailable):
        queue.settle(settlements)
    assert eventually(lambda: service.acked == [ack_id(leases[1])])
    time.sleep(0.1)
    first_round = list(service.acked)
    records.refuse_commit_of = set()
    refused = queue.settle(settlements).refused

    assert refused == []
    assert first_round == [ack_id(leases[1])]
    assert eventually(lambda: len(service.acked) == 2)
    assert set(service.acked) == {ack_id(one) for one in leases}


def test_acknowledgement_that_fails_is_sent_again(service: FakeService, queue: PubSubQueue) -> None:
    queue.put([sample_task("1"), sample_task("2")])
    leases = lease(queue, 2)
    ids = {ack_id(one) for one in leases}
    service.failures["acknowledge"] = 2
    service.ack_replies = [AckReply(frozenset(), frozenset([ack_id(leases[0])]))]

    queue.settle([success(one) for one in leases])

    assert eventually(lambda: set(service.acked) == ids)
    assert service.ack_requests == [2, 1]


def test_acknowledgements_are_sent_in_requests_that_the_service_takes(service: FakeService, queue: PubSubQueue) -> None:
    count = 2 * MAX_ACK_IDS + 100
    queue.put([sample_task(str(number)) for number in range(count)])
    leases = lease(queue, count)

    queue.settle([success(one) for one in leases])

    assert eventually(lambda: len(service.acked) == count)
    assert max(service.ack_requests) <= MAX_ACK_IDS


def test_message_of_a_recorded_task_is_acknowledged_and_never_leased(
    service: FakeService, queue: PubSubQueue, records: FlakyRecords
) -> None:
    queue.put([sample_task()])
    [held] = lease(queue)
    queue.settle([success(held)])
    assert eventually(lambda: len(service.acked) == 1)

    queue.put([sample_task()])
    again = lease(queue, timeout_s=0.3)

    assert again == []
    assert eventually(lambda: len(service.acked) == 2)


# leases


def test_lease_that_the_service_calls_lost_may_only_succeed(
    service: FakeService, queue: PubSubQueue, records: FlakyRecords
) -> None:
    queue.put([sample_task("1"), sample_task("2"), sample_task("3")])
    leases = lease(queue, 3)
    service.renew_replies = [AckReply(frozenset([ack_id(leases[0]), ack_id(leases[1])]), frozenset())]

    lost = queue.renew(leases, TTL)
    failed = queue.settle([success(leases[0], TaskState.FAILED)]).refused
    succeeded = queue.settle([success(leases[1])]).refused
    queue.release([Release(leases[0])])

    assert lost == leases[:2]
    assert [one.lease for one in failed] == [leases[0]]
    assert records.find(leases[0].task.id, 1) is None
    assert succeeded == []
    assert records.find(leases[1].task.id, 1) is not None
    assert len(service.published) == 3


def test_renewal_is_clamped_to_what_the_service_takes(service: FakeService, queue: PubSubQueue) -> None:
    queue.put([sample_task()])
    leases = lease(queue)
    service.renewed.clear()

    queue.renew(leases, timedelta(hours=2))
    queue.renew(leases, timedelta(seconds=1))

    assert [seconds for _, seconds in service.renewed] == [600, 10]


def test_renewal_in_an_outage_is_said_to_be_unconfirmed(service: FakeService, queue: PubSubQueue) -> None:
    queue.put([sample_task()])
    leases = lease(queue)
    service.failures["modify_deadline"] = 1_000

    with pytest.raises(QueueUnavailable) as unconfirmed:
        queue.renew(leases, timedelta(seconds=6))

    assert unconfirmed.value.retryable


@pytest.mark.parametrize("holder", ["runs it", "renews it"])
def test_second_delivery_of_what_is_in_use_here_lends_its_ack_id_to_the_first(
    service: FakeService, queue: PubSubQueue, holder: str
) -> None:
    queue.put([sample_task()])
    [held] = lease(queue)
    first = ack_id(held)
    held.handle.since -= 1_000
    if holder == "runs it":
        queue.mark_running([held.token])
    else:
        queue.renew([held], TTL)
    queue.lease(1, worker="w-1", ttl=TTL)
    service.deliver(service.published[0], "m-1")
    assert eventually(lambda: ack_id(held) != first)

    twice = queue.lease(1, worker="w-1", ttl=TTL)
    service.renewed.clear()
    lost = queue.renew([held], TTL)
    queue.settle([success(held)])

    assert (twice, lost) == ([], [])
    [(newest, _)] = service.renewed
    assert eventually(lambda: service.acked == [newest])


def test_lease_of_which_its_holder_speaks_no_more_is_handed_out_again(service: FakeService, queue: PubSubQueue) -> None:
    queue.put([sample_task()])
    [forgotten] = lease(queue)
    forgotten.handle.since -= 1_000
    service.deliver(service.published[0], "m-1")

    [again] = lease(queue)
    lost = queue.renew([forgotten, again], TTL)

    assert again.token != forgotten.token
    assert lost == [forgotten]


def test_what_is_pulled_is_renewed_within_a_second_whatever_the_contract_says(
    service: FakeService, queue: PubSubQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub_intake, "FIRST_RENEWAL_S", FIRST_RENEWAL_S)
    assert FIRST_RENEWAL_S <= 1
    queue.put([sample_task()])
    [held] = lease(queue)

    assert eventually(lambda: service.renewed[:1] == [(ack_id(held), 35)])


# pulling


def test_worker_with_long_tasks_pulls_no_more_than_it_asked_for(service: FakeService, queue: PubSubQueue) -> None:
    queue.put([sample_task(str(number)) for number in range(20)])

    leases = lease(queue, 4)
    queue.settle([success(one) for one in leases], claim_next=0)
    time.sleep(0.2)

    assert len(service.waiting) == 16


def test_worker_with_short_tasks_looks_ahead_in_few_pulls(service: FakeService, records: FlakyRecords) -> None:
    clock = FakeClock(datetime.now(UTC))
    queue = PubSubQueue(SETTINGS, records, client=service, clock=clock)  # type: ignore[arg-type]
    count = 150
    queue.put([sample_task(str(number)) for number in range(count)])
    held = lease(queue)
    done = 0
    while held:
        one = held.pop()
        clock.advance(seconds=0.01)
        done += 1
        held += queue.settle([success(one)], claim_next=1).leases or (lease(queue) if done < count else [])

    assert done == count
    assert len(service.pulled) < count / 2
    queue.close()


def test_tasks_that_are_all_due_later_are_pulled_in_growing_numbers(service: FakeService, queue: PubSubQueue) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    queue.put([sample_task(str(number), not_before=due) for number in range(300)] + [sample_task("now")])

    [ready] = lease(queue)

    assert ready.task.key == "now"
    assert len(service.pulled) < 20
    assert (queue.outlook().next_due or timedelta()) > timedelta(minutes=59)


def test_what_is_due_later_and_too_much_to_hold_is_parked_at_the_service(
    service: FakeService, queue: PubSubQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_buffer, "MAX_LATER", 2)
    soon = datetime.now(UTC) + timedelta(seconds=120)
    late = datetime.now(UTC) + timedelta(days=2)
    queue.put([sample_task("a", not_before=late), sample_task("b", not_before=late)])
    queue.put([sample_task("c", not_before=late), sample_task("d", not_before=soon)])
    queue.lease(4, worker="w-1", ttl=TTL)

    assert eventually(lambda: len(service.renewed) >= 2)
    nearer, farther = sorted(seconds for _, seconds in service.renewed[:2])
    assert (soon - datetime.now(UTC)).total_seconds() - 1 <= nearer <= 120
    assert farther == 600
    assert service.acked == []
    service.deliver(service.published[2], "m-3")
    assert eventually(lambda: len(service.renewed) == 3)


def test_store_that_is_away_leaves_messages_to_come_back(
    service: FakeService, queue: PubSubQueue, records: FlakyRecords
) -> None:
    records.away = {"find"}
    queue.put([sample_task()])
    nothing = lease(queue, timeout_s=0.3)
    assert eventually(lambda: queue.outlook().next_due is None)
    records.away = set()
    service.deliver(service.published[0], "m-1")
    later = lease(queue)

    assert nothing == []
    assert service.acked == []
    assert len(later) == 1


def test_outage_is_survived_for_the_patience_and_then_said(service: FakeService, records: FlakyRecords) -> None:
    queue = open_queue(service, records, patience=timedelta(seconds=0.6))
    queue.put([sample_task()])
    lease(queue)
    service.failures["pull"] = 1_000

    def has_given_up() -> bool:
        try:
            queue.lease(1, worker="w-1", ttl=TTL)
        except QueueUnavailable:
            return True
        return False

    service.deliver(service.published[0], "m-9")
    started = time.monotonic()
    assert eventually(has_given_up)
    took_s = time.monotonic() - started
    service.recover()

    assert took_s >= 0.5
    assert eventually(lambda: not has_given_up())
    queue.close()


def test_worker_whose_first_pull_has_not_been_answered_is_told_that_there_may_be_work(
    service: FakeService, queue: PubSubQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = queue.outlook().suspect_leases

    assert queue.lease(1, worker="w-1", ttl=TTL) == []
    unanswered = queue.outlook().suspect_leases
    assert eventually(lambda: service.pulled)
    monkeypatch.setattr(subscription, "FIRST_ANSWER_S", 0.05)

    assert (before, unanswered) == (False, True)
    assert eventually(lambda: not queue.outlook().suspect_leases)


def test_cut_off_worker_is_told_that_there_may_be_work(service: FakeService, queue: PubSubQueue) -> None:
    queue.put([sample_task()])
    lease(queue)
    before = queue.outlook().suspect_leases
    service.failures["pull"] = 1_000

    queue.lease(1, worker="w-1", ttl=TTL)  # The waiting pull is not cut off; the messages that it brings end it.
    service.deliver(service.published[0], "m-9")

    assert not before
    assert eventually(lambda: queue.outlook().suspect_leases)
    service.recover()
    queue.put([sample_task("2")])
    lease(queue)
    assert eventually(lambda: not queue.outlook().suspect_leases)


def test_delay_beyond_the_retention_is_refused(service: FakeService, records: FlakyRecords) -> None:
    queue = PubSubQueue(replace(SETTINGS, retention_s=86_400), records, client=service)  # type: ignore[arg-type]
    now = datetime.now(UTC)

    queue.put([sample_task("1", not_before=now + timedelta(hours=23))])
    with pytest.raises(NotPossible):
        queue.put([sample_task("2", not_before=now + timedelta(hours=25))])

    assert len(service.published) == 1


def test_put_is_acknowledged_only_when_every_request_was(
    service: FakeService, queue: PubSubQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.queues.pubsub.message.MAX_PUBLISH_MESSAGES", 2)
    service.failures["publish"] = 1_000

    with pytest.raises(QueueUnavailable):
        queue.put([sample_task(str(number)) for number in range(5)])
    monkeypatch.setattr("runtime.queues.pubsub.queue.PUT_PATIENCE_S", 600.0)
    service.failures["publish"] = 2  # Retried within the put's patience.
    result = queue.put([sample_task(str(number)) for number in range(5)])

    assert (result.new, result.known) == (5, 0)
    assert len(service.published) == 5


def test_paused_queue_pulls_nothing(service: FakeService, queue: PubSubQueue) -> None:
    queue.pause()
    queue.put([sample_task()])
    paused = lease(queue, timeout_s=0.2)
    pulled = list(service.pulled)
    queue.resume()

    assert (paused, pulled) == ([], [])
    assert len(lease(queue)) == 1


# purging


def submit(queue: PubSubQueue, *keys: str) -> None:
    submit_tasks([sample_task(key) for key in keys], queue, experiment="sample")


@pytest.mark.parametrize("ahead_s", [-300, 0, 300])
def test_purge_empties_the_subscriptions_by_the_services_own_time(service: FakeService, ahead_s: float) -> None:
    dead = replace(SETTINGS, dead_letter_subscription="projects/p/subscriptions/dead")
    clock = FakeClock(datetime.now(UTC) + timedelta(seconds=ahead_s))
    queue = PubSubQueue(dead, MemoryRecords(), client=service, clock=clock)  # type: ignore[arg-type]
    submit(queue, "1", "2")

    purged = queue.purge()
    queue.close()

    assert service.time is not None
    before = service.time - PURGE_MARGIN
    assert (purged, service.sought) == (2, [(dead.subscription, before), (dead.dead_letter_subscription, before)])


def test_purge_asks_the_service_for_its_time_before_it_looks_what_there_is(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = MemoryRecords()
    queue = PubSubQueue(SETTINGS, records, client=service)  # type: ignore[arg-type]
    submit(queue, "1")
    parts = records.parts

    def list_parts(experiment: str) -> list[ManifestPart]:
        service.time = None
        return parts(experiment)

    monkeypatch.setattr(records, "parts", list_parts)
    queue.purge()
    queue.close()

    assert len(service.sought) == 1


@pytest.mark.parametrize("problem", ["tells no time", "cannot seek"])
def test_purge_that_cannot_empty_the_subscription_has_ended_the_tasks(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    records = MemoryRecords()
    queue = PubSubQueue(SETTINGS, records, client=service)  # type: ignore[arg-type]
    submit(queue, "1", "2")
    monkeypatch.setattr(pubsub, "PUT_PATIENCE_S", 0.0)
    if problem == "tells no time":
        service.time = None
    else:
        service.failures["seek"] = 100

    purged = queue.purge()
    delivered = lease(queue, timeout_s=0.5)
    acked = wait_until(lambda: len(service.acked) == 2)
    queue.close()

    assert (purged, service.sought, delivered, acked) == (2, [], [], True)
    assert ("workers drop what it holds" in caplog.text) == (problem == "cannot seek")


# patience


def test_insist_calls_again_until_it_succeeds() -> None:
    outcomes: list[Exception | str] = [unavailable(), unavailable(), "done"]

    def call() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert insist(call, patience_s=600) == "done"


def test_insist_gives_up_at_once_on_what_will_not_pass_and_on_a_missing_topic_never_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    monkeypatch.setitem(vars(system), "monotonic", clock.boottime)
    replace_sleep(monkeypatch, lambda pause: clock.advance(seconds=pause))
    calls = 0
    refused = PubSubUnavailable("no", retryable=False)
    missing = PubSubUnavailable("no", retryable=False)
    missing.missing = "projects/p/topics/tasks"

    def call(problem: PubSubUnavailable) -> None:
        nonlocal calls
        calls += 1
        raise problem

    for problem, known in ((refused, False), (refused, True), (missing, False)):
        with pytest.raises(PubSubUnavailable):
            insist(lambda problem=problem: call(problem), patience_s=5, known=known)  # type: ignore[misc]
    assert calls == 3
    with pytest.raises(PubSubUnavailable):
        insist(lambda: call(missing), patience_s=0.5, known=True)
    assert calls > 5


def test_insist_ends_when_told_to_stop() -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()

    def call() -> None:
        raise unavailable()

    with pytest.raises(PubSubUnavailable):
        insist(call, patience_s=1e9, stop=stop)


def test_dead_letters_of_the_service_are_filed_or_queued_again(service: FakeService, records: FlakyRecords) -> None:
    settings = replace(SETTINGS, dead_letter_subscription="projects/p/subscriptions/dead")
    queue = PubSubQueue(settings, records, client=service)  # type: ignore[arg-type]
    queue.put([sample_task()])
    [original] = service.published
    service.waiting.clear()
    service.deliver(original, "dead-1")
    service.deliver(OutgoingMessage(b"{", {}), "dead-2")
    pulls = iter([True])

    # The fake keeps one list for all subscriptions: a second pull would find the copy that it just queued.
    real_pull = service.pull
    service.pull = lambda *args, **kwargs: real_pull(*args, **kwargs) if next(pulls, None) else []  # type: ignore[method-assign]
    drained = queue.drain_dead_letters()

    assert drained == 2
    assert [message.attributes[COPY] for message in service.published[1:]] == ["1"]
    assert len(service.acked) == 2
    [mark] = records.marks()
    assert (mark.raw, mark.reason) == ("{", EndReason.CONFIG_INVALID)
    filed = records.find(mark.task_id, 1)
    assert filed is not None
    assert filed.state is TaskState.FAILED
    queue.close()


# poison


@pytest.mark.parametrize(
    "reference", ["a\0b", "", "records/x", "../../etc/passwd", "payloads/" + "0" * 64, "/"], ids=ascii
)
def test_message_whose_payload_cannot_be_had_is_a_dead_letter_and_the_next_one_is_delivered(
    service: FakeService, queue: PubSubQueue, reference: str
) -> None:
    service.deliver(OutgoingMessage(b"{}", {PAYLOAD: reference}), "m-bad")
    queue.put([sample_task()])

    leases = lease(queue, 2)

    by_fate = {one.invalid is None: one for one in leases}
    assert by_fate[True].task.key == "1"
    assert by_fate[False].invalid is not None
    assert "`payload` cannot be read" in by_fate[False].invalid.problem


@pytest.mark.parametrize(
    "body",
    [
        b'{"function": "m:f", "args": [NaN]}',
        b'{"function": "m:f", "args": [1e999], "key": "k"}',
        b'{"command": ["x"], "submitted_at": "0001-01-01T00:00:00+09:00"}',
        b'{"command": ["x"], "resources": {"memory": "' + b"9" * 400 + b'"}}',
        b'{"command": ["\\ud800"]}',
        b'{"command": ["x"], "timeout_s": 1e-9}',
        b"[" * 100_000,
        b"\xff",
    ],
    ids=lambda body: body[:40].decode(errors="replace").encode("ascii", "replace").decode(),
)
def test_message_that_is_no_task_is_a_dead_letter_and_the_next_one_is_delivered(
    service: FakeService, queue: PubSubQueue, body: bytes
) -> None:
    service.deliver(OutgoingMessage(body, {}), "m-bad")
    queue.put([sample_task()])

    leases = lease(queue, 2)
    queue.release([Release(one) for one in leases])
    again = lease(queue, 2)

    assert sorted(one.invalid is None for one in leases) == [False, True]
    assert sorted(one.invalid is None for one in again) == [False, True]


def test_task_whose_record_cannot_be_looked_for_keeps_no_other_from_being_delivered(
    service: FakeService, queue: PubSubQueue, records: FlakyRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, good = sample_task("odd"), sample_task("good")
    real_find = records.find

    def find(task_id: str, generation: int) -> Record | None:
        if task_id == odd.id:
            raise TypeError("not this one")
        return real_find(task_id, generation)

    monkeypatch.setattr(records, "find", find)
    queue.put([odd, good])

    assert {one.task.id for one in lease(queue, 2)} == {odd.id, good.id}


def test_pull_that_fails_in_a_way_nobody_foresaw_is_made_again(
    service: FakeService, queue: PubSubQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, real_pull = True, service.pull

    def pull(*args: Any, **keywords: Any) -> list[ReceivedMessage]:
        if not works:
            raise TypeError("what is this")
        return real_pull(*args, **keywords)

    monkeypatch.setattr(service, "pull", pull)
    queue.put([sample_task("1"), sample_task("2")])
    assert len(lease(queue)) == 1
    works = False

    assert eventually(lambda: not queue.lease(1, worker="w-1", ttl=TTL) and queue.outlook().suspect_leases)
    works = True
    assert len(lease(queue)) == 1


def test_dead_letter_that_cannot_be_filed_keeps_no_other_from_coming_back(
    service: FakeService, records: FlakyRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(mark: Mark) -> None:
        raise TypeError("not this one")

    settings = replace(SETTINGS, dead_letter_subscription="projects/p/subscriptions/dead")
    queue = PubSubQueue(settings, records, client=service)  # type: ignore[arg-type]
    monkeypatch.setattr(records, "mark", refuse)
    queue.put([sample_task()])
    [original] = service.published
    service.waiting.clear()
    service.deliver(OutgoingMessage(b"{", {}), "dead-1")
    service.deliver(original, "dead-2")
    pulls = iter([True])
    real_pull = service.pull
    service.pull = lambda *args, **kwargs: real_pull(*args, **kwargs) if next(pulls, None) else []  # type: ignore[method-assign]

    assert queue.drain_dead_letters() == 1

    assert [message.attributes[COPY] for message in service.published[1:]] == ["1"]
    queue.close()
