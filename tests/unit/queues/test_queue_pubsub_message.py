"""The facts about a task in its Pub/Sub message, and its verdict: pure functions."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from runtime.errors import InvalidContract, ObjectGone, StoreUnavailable
from runtime.outputs import PubSubQueueOutput
from runtime.queues.pubsub.client import (
    MAX_REQUEST_BYTES,
    OutgoingMessage,
    ReceivedMessage,
    check_names,
    deadline_seconds,
    explain_problem,
)
from runtime.queues.pubsub.message import (
    ALONE,
    COPY,
    EXPERIMENT,
    GENERATION,
    INLINE_BYTES,
    NOT_BEFORE,
    PAYLOAD,
    PUBLISHED,
    SUSPECT,
    TASK,
    TRIES,
    Delivery,
    read_message,
    split_requests,
    write_copy,
    write_message,
)
from runtime.tasks.model import CommandEntry, Task, WorkflowEntry
from runtime.tasks.wire import encode_task
from runtime.testing import sample_task
from runtime.units import format_time

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SUBMITTED = datetime(2026, 2, 1, tzinfo=UTC)
BARE = b'{"project": "p", "workflow": "w", "args": ["a"]}'


def no_blob(reference: str) -> bytes:
    raise AssertionError(f"asked for {reference}")


def no_put(data: bytes) -> str:
    raise AssertionError(f"put {len(data)} bytes")


def received(
    data: bytes, attributes: dict[str, str] | None = None, *, message_id: str = "m-1", attempt: int = 0
) -> ReceivedMessage:
    return ReceivedMessage("ack-1", message_id, data, attributes or {}, NOW, attempt)


def deliver(message: OutgoingMessage, *, message_id: str = "m-1", attempt: int = 0) -> Delivery:
    return read_message(
        received(message.data, dict(message.attributes), message_id=message_id, attempt=attempt), no_blob
    )


def delivery(task: Task | None = None, *, attempt: int = 0) -> Delivery:
    return deliver(write_message(task or sample_task(submitted_at=SUBMITTED), no_put), attempt=attempt)


def test_message_carries_the_wire_text_verbatim_and_few_attributes() -> None:
    task = sample_task("k", experiment="ü" * 128, generation=3, submitted_at=SUBMITTED)

    message = write_message(task, no_put)

    assert message.data == encode_task(task).encode()
    assert message.attributes == {TASK: task.id, GENERATION: "3", EXPERIMENT: "ü" * 128}
    assert all(len(value.encode()) <= 1_024 for value in message.attributes.values())


def test_message_and_back_is_the_task() -> None:
    task = sample_task(extra={"new": [1]}, timeout=timedelta(hours=2), submitted_at=SUBMITTED)

    got = delivery(task)

    assert got.task == task
    assert got.text == encode_task(task)
    assert (got.tries, got.copies, got.suspect, got.alone, got.invalid) == (0, 0, False, False, None)


def test_large_body_goes_by_reference_and_comes_back_whole() -> None:
    blobs: dict[str, bytes] = {}

    def put_blob(data: bytes) -> str:
        blobs["payloads/1"] = data
        return "payloads/1"

    task = sample_task(entry=CommandEntry(("x" * INLINE_BYTES,)), submitted_at=SUBMITTED)
    message = write_message(task, put_blob)
    got = read_message(received(message.data, dict(message.attributes)), blobs.__getitem__)
    copy = write_copy(got, not_before=None)

    assert len(message.data) < 200
    assert json.loads(message.data) == {"schema": 1, "id": task.id, "payload": "payloads/1"}
    assert got.task == task
    assert (copy.data, copy.attributes[PAYLOAD]) == (message.data, "payloads/1")


def test_200_kb_of_arguments_stay_in_the_message() -> None:
    message = write_message(sample_task(entry=CommandEntry(("x" * 200_000,))), no_put)

    assert PAYLOAD not in message.attributes


def test_payload_of_an_unreachable_store_is_no_malformed_task() -> None:
    def get_blob(reference: str) -> bytes:
        raise StoreUnavailable("the store is away")

    with pytest.raises(StoreUnavailable):
        read_message(received(b"{}", {PAYLOAD: "payloads/1"}), get_blob)


def test_payload_that_is_gone_is_a_malformed_task() -> None:
    def get_blob(reference: str) -> bytes:
        raise ObjectGone(reference)

    got = read_message(received(b"{}", {PAYLOAD: "payloads/1"}), get_blob)

    assert got.invalid is not None
    assert "`payloads/1` is gone" in got.invalid.problem


def test_payload_that_we_may_not_read_says_nothing_about_the_task() -> None:
    def get_blob(reference: str) -> bytes:
        raise StoreUnavailable("403 Forbidden", denied=True)

    with pytest.raises(StoreUnavailable, match="403"):
        read_message(received(b"{}", {PAYLOAD: "payloads/1"}), get_blob)


def test_bare_message_gets_its_id_from_the_message_and_its_copy_bears_it() -> None:
    first = read_message(received(BARE, {"origin": "lab"}), no_blob)
    copy = write_copy(first, not_before=None)
    second = deliver(copy, message_id="m-2")

    assert first.bare
    assert first.text == ""
    assert first.task.entry == WorkflowEntry("p", "w", ("a",))
    assert first.task.submitted_at == NOW
    assert second.task == first.task
    assert not second.bare
    assert copy.attributes["origin"] == "lab"


def test_bare_message_with_a_key_is_one_task_however_often_it_is_published() -> None:
    body = b'{"command": ["true"], "key": "k"}'

    one, other = read_message(received(body), no_blob), read_message(received(body, message_id="m-2"), no_blob)

    assert one.key == other.key


def test_copy_carries_tries_delay_and_solitude() -> None:
    due = NOW + timedelta(seconds=90)

    got = deliver(write_copy(delivery(), not_before=due, tries=4, alone=True, suspect=True))

    assert (got.tries, got.copies, got.alone, got.suspect, got.task.not_before) == (4, 1, True, True, due)


def test_copy_without_a_delay_takes_an_older_one_away() -> None:
    first = deliver(write_copy(delivery(), not_before=NOW, tries=1))
    second = write_copy(first, not_before=None)

    assert NOT_BEFORE not in second.attributes
    assert (second.attributes[TRIES], second.attributes[COPY]) == ("1", "2")
    assert ALONE not in second.attributes
    assert SUSPECT not in second.attributes


def test_copy_is_not_younger_than_its_task() -> None:
    first = deliver(write_message(sample_task(), no_put))
    copy = write_copy(first, not_before=None)
    later = ReceivedMessage("ack-2", "m-2", copy.data, dict(copy.attributes), NOW + timedelta(days=1), 0)

    assert first.task.submitted_at == NOW
    assert read_message(later, no_blob).task.submitted_at == NOW


def test_foreign_message_and_its_copies_bear_when_the_service_took_it_in() -> None:
    """The producer's own submission time does not count, since its clock is unsynchronised."""
    line = {"project": "p", "workflow": "w", "args": [], "submitted_at": "2020-01-01T00:00:00Z"}
    first = read_message(received(json.dumps(line).encode(), {"theirs": "1"}), no_blob)
    copy = write_copy(first, not_before=None)
    later = ReceivedMessage("ack-2", "m-2", copy.data, dict(copy.attributes), NOW + timedelta(days=1), 0)
    second = read_message(later, no_blob)
    copy_of_copy = write_copy(second, not_before=None)

    assert first.task.submitted_at == datetime(2020, 1, 1, tzinfo=UTC)
    assert (first.published_at, second.published_at) == (NOW, NOW)
    assert copy_of_copy.attributes[PUBLISHED] == copy.attributes[PUBLISHED] == format_time(NOW)


def test_message_that_was_put_is_in_a_manifest_and_bears_no_time_of_the_service() -> None:
    first = delivery()
    copy = write_copy(first, not_before=None)

    assert (first.published_at, deliver(copy).published_at) == (None, None)
    assert PUBLISHED not in copy.attributes


def test_copy_drops_the_services_own_attributes_and_fits_the_limit_of_100() -> None:
    attributes = {f"lab-{number}": "x" for number in range(100)}
    attributes |= {"googclient_schemaencoding": "JSON", "CloudPubSubDeadLetterSourceDeliveryCount": "5"}

    copy = write_copy(read_message(received(BARE, attributes), no_blob), not_before=NOW, tries=1, alone=True)

    assert len(copy.attributes) <= 100
    assert not any(name.startswith(("goog", "Cloud")) for name in copy.attributes)


@pytest.mark.parametrize(
    ("data", "field"),
    [(b"", "json"), (b"\xff", "json"), (b"null", "json"), (b'{"workflow": "w"}', "project"), (b"{}", "entry")],
)
def test_malformed_message_stands_under_an_id_of_its_own(data: bytes, field: str) -> None:
    claimed = sample_task().id

    got = read_message(received(data, {TASK: claimed, EXPERIMENT: "sweep"}), no_blob)

    assert got.invalid is not None
    assert f"`{field}`" in got.invalid.problem
    assert got.task.id == got.invalid.task_id != claimed
    assert got.task.experiment == "sweep"


def test_unreadable_attributes_of_a_stranger_do_no_harm() -> None:
    attributes = {TRIES: "many", COPY: "-1", NOT_BEFORE: "tomorrow", EXPERIMENT: "../etc"}

    got = read_message(received(BARE, attributes), no_blob)
    broken = read_message(received(b"{", attributes), no_blob)

    assert (got.tries, got.copies, got.task.not_before) == (0, 0, None)
    assert broken.task.experiment == "default"


def test_second_delivery_is_suspect() -> None:
    assert not delivery(attempt=1).suspect
    assert delivery(attempt=2).suspect


# requests


def test_one_message_above_the_limit_travels_alone() -> None:
    small, huge = OutgoingMessage(b"x", {}), OutgoingMessage(bytes(MAX_REQUEST_BYTES), {})

    assert list(split_requests([small, huge, small])) == [[small], [huge], [small]]


# decisions about a delivery


# errors


@pytest.mark.parametrize(
    ("name", "retryable"),
    [
        ("ServiceUnavailable", True),
        ("DeadlineExceeded", True),
        ("InternalServerError", True),
        ("ResourceExhausted", True),
        ("Aborted", True),
        ("Unknown", True),
        ("Cancelled", True),
        ("InvalidArgument", False),
        ("PermissionDenied", False),
        ("Unauthenticated", False),
        ("FailedPrecondition", False),
        ("NotFound", False),
    ],
)
def test_each_error_of_the_service_says_whether_again_may_help(name: str, retryable: bool) -> None:
    from google.api_core import exceptions

    error = explain_problem(getattr(exceptions, name)("said"), "pull from", "projects/p/subscriptions/tasks", None)

    assert error.retryable is retryable
    assert "`projects/p/subscriptions/tasks`" in error.message
    assert "said" in error.facts[0]


def test_missing_subscription_names_the_command_that_makes_it() -> None:
    from google.api_core import exceptions

    name = "projects/p/subscriptions/tasks"
    real = explain_problem(exceptions.NotFound("x"), "pull from", name, None)
    emulated = explain_problem(exceptions.NotFound("x"), "pull from", name, "127.0.0.1:1")

    assert (real.missing, emulated.missing) == (name, name)
    assert "gcloud pubsub subscriptions create tasks --topic TOPIC --project p" in (real.hint or "")
    assert "pulumi up" in (real.hint or "")
    assert "runtime queue repair" in (emulated.hint or "")


@pytest.mark.parametrize("field", ["topic", "subscription", "dead_letter_topic", "dead_letter_subscription"])
def test_name_that_cannot_be_one_is_refused(field: str) -> None:
    names = {
        "topic": "projects/p/topics/tasks",
        "subscription": "projects/p/subscriptions/tasks",
        field: "projects/p/x/t",
    }

    with pytest.raises(InvalidContract) as refused:
        check_names(PubSubQueueOutput(**names))

    assert f"`{field}`" in refused.value.message


@pytest.mark.parametrize(
    "name", ["ab", "1ab", "-ab", "a b c", "googol", "a" * 256, "abc?x", "abc\n", "abc/d", "tâche", "abc#d", ""]
)
def test_name_that_the_service_would_refuse_is_refused_before_it_is_asked(name: str) -> None:
    with pytest.raises(InvalidContract) as refused:
        check_names(PubSubQueueOutput(topic="projects/p/topics/tasks", subscription=f"projects/p/subscriptions/{name}"))

    assert "3 to 255 letters" in refused.value.facts[1]


@pytest.mark.parametrize("name", ["abc", "a" * 255, "a.b_c-d~e+f%25", "Tasks9"])
def test_name_that_the_service_takes_is_taken(name: str) -> None:
    check_names(
        PubSubQueueOutput(topic=f"projects/my.org:lab-1/topics/{name}", subscription=f"projects/p/subscriptions/{name}")
    )


def test_deadlines_keep_to_what_the_service_takes() -> None:
    spans = [timedelta(), timedelta(seconds=30), timedelta(hours=1), timedelta(seconds=-5)]

    assert [deadline_seconds(span) for span in spans] == [10, 30, 600, 10]
