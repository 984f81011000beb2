"""Who hears of a task's end: what people write, what goes over the wire, and what the message says."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from runtime.end_reasons import EndReason
from runtime.errors import InvalidTask, InvalidValue, RequestRefused, UnknownName
from runtime.tasks.history import Lease, Record, Settlement
from runtime.tasks.model import Task, TaskState
from runtime.tasks.notification_sinks import ENDS, TaskSink, find_named, make_sinks, put_named
from runtime.tasks.notifications import Notification, choose_sinks, describe_complete, describe_end, find_notification
from runtime.tasks.wire import decode_stored, decode_task, encode_task
from runtime.testing import sample_task

CANARY = "canary-4711"
TOPIC = "projects/our-lab/topics/ends"
SETTINGS: dict[str, Any] = {
    "oncall": {"webhook": "secret-manager://hook", "on": "failed"},
    "log": {"topic": TOPIC},
    "tell": {"command": ["/opt/tell", "#runs"]},
    "wrong": {"webhook": "env://A", "command": ["a"], "colour": "blue"},
}
AT = datetime(2026, 11, 27, 8, 40, 4, tzinfo=UTC)
SCHEMA = json.loads((files("runtime") / "tasks" / "task.schema.json").read_text(encoding="utf-8"))
LOG = TaskSink(topic=TOPIC)


@pytest.mark.parametrize(
    ("notify", "on", "of_tasks", "of_all"),
    [
        ("oncall", None, [TaskSink(webhook="secret-manager://hook", on=("failed",))], []),
        ("oncall", "succeeded", [TaskSink(webhook="secret-manager://hook", on=("succeeded",))], []),
        ("log", None, [LOG], []),
        (TOPIC, "ended", [LOG], []),
        (["log", TOPIC], None, [LOG], []),
        ("tell", "complete", [], [TaskSink(command=("/opt/tell", "#runs"), on=())]),
        ("env://HOOK", "expired, failed,complete", [TaskSink(webhook="env://HOOK", on=("failed", "expired"))],
         [TaskSink(webhook="env://HOOK", on=())]),
        ({"command": ["a"], "on": ["cancelled"]}, "failed", [TaskSink(command=("a",), on=("cancelled",))], []),
        ([{"topic": TOPIC}, "oncall"], ("failed",), [TaskSink(topic=TOPIC, on=("failed",)),
         TaskSink(webhook="secret-manager://hook", on=("failed",))], []),
        ([], None, [], []),
    ],
)  # fmt: skip
def test_sinks_are_names_references_topics_and_objects(
    notify: Any, on: Any, of_tasks: list[TaskSink], of_all: list[TaskSink]
) -> None:
    assert make_sinks(notify, on, SETTINGS) == (tuple(of_tasks), tuple(of_all))


@pytest.mark.parametrize(
    ("notify", "on", "said"),
    [
        ("oncal", None, "no sink named `oncal` in the project's settings"),
        (f"https://hooks/{CANARY}", None, "`notify` has a `webhook` that is no reference"),
        (f"hooks.slack.com/services/{CANARY}", None, "`notify` is neither the name of a sink"),
        ("kubernetes://hook/url", None, "`notify` has a `webhook` from a source that workers do not know"),
        ({"webhook": f"https://{CANARY}"}, None, "`notify` has a `webhook` that is no reference"),
        ({"command": ["tell", f"--token={CANARY}"]}, None, "looks like a secret"),
        ({"topic": "projects/p"}, None, "`notify` has the topic `projects/p`"),
        ({"hook": "a"}, None, "no field named `notify.hook`"),
        ({"command": f"tell {CANARY}"}, None, "`notify` has a `command` that is no list of texts"),
        ({"command": []}, None, "`notify` has none or several"),
        (7, None, "`int` is no valid notify"),
        ("log", "fail", "`fail` is no valid notify_on"),
        ("log", [], "`` is no valid notify_on"),
        ("wrong", None, "sink `wrong` in the project's settings cannot be used"),
        (["log"] * 11, None, "`11 sinks` is no valid notify"),
    ],
)
def test_sink_that_nothing_can_be_sent_to_is_refused_without_its_secret(notify: Any, on: Any, said: str) -> None:
    with pytest.raises(RequestRefused) as found:
        make_sinks(notify, on, SETTINGS)

    assert said in found.value.message
    assert CANARY not in "".join((found.value.message, *found.value.facts, found.value.hint or ""))


def test_unknown_name_lists_the_known_sinks_and_a_wrong_one_says_what_is_wrong() -> None:
    with pytest.raises(UnknownName) as unknown:
        find_named("oncal", SETTINGS)
    with pytest.raises(RequestRefused) as wrong:
        find_named("wrong", SETTINGS)

    assert (unknown.value.facts, unknown.value.hint) == (
        ("known sinks: log, oncall, tell, wrong",),
        "did you mean `oncall`?",
    )
    assert [fact.partition(";")[0] for fact in wrong.value.facts] == ["`colour` is no field here"]


def test_names_among_the_sinks_of_a_job_are_replaced() -> None:
    assert put_named("oncall", SETTINGS) == [{"webhook": "secret-manager://hook", "on": "failed"}]
    assert put_named([{"sink": "tell", "on": "succeeded"}, {"topic": TOPIC}], SETTINGS) == [
        {"command": ("/opt/tell", "#runs"), "on": "succeeded"},
        {"topic": TOPIC},
    ]
    assert put_named(3, SETTINGS) == 3


# the wire

SINKS = (TaskSink(webhook="env://HOOK", on=("failed",)), LOG, TaskSink(command=("tell", "#runs")))


def test_sinks_of_a_task_survive_the_wire_and_fit_the_schema() -> None:
    task = sample_task(notify=SINKS)
    body = encode_task(task)

    assert json.loads(body)["notify"] == [
        {"webhook": "env://HOOK", "on": ["failed"]},
        {"topic": TOPIC},
        {"command": ["tell", "#runs"]},
    ]
    assert decode_task(body) == decode_stored(body) == task
    jsonschema.validate(json.loads(body), SCHEMA)


@pytest.mark.parametrize(
    ("notify", "field"),
    [
        ("oncall", "notify"),
        (["oncall"], "notify[0]"),
        ([{"webhook": f"https://{CANARY}"}], "notify[0]"),
        ([{"webhook": "kubernetes://a/b"}], "notify[0]"),
        ([{"topic": TOPIC, "command": ["a"]}], "notify[0]"),
        ([{"topic": TOPIC}, {"topic": 3}], "notify[1]"),
        ([{"command": "tell"}], "notify[0]"),
        ([{"command": ["a\0"]}], "notify[0]"),
        ([{"topic": TOPIC, "on": ["complete"]}], "notify[0].on"),
        ([{"topic": TOPIC, "on": []}], "notify[0].on"),
        ([{"topic": TOPIC, "on": "failed"}], "notify[0]"),
        ([{"topic": TOPIC, "colour": 1}], "notify[0].colour"),
        ([{"topic": TOPIC}] * 11, "notify"),
    ],
)
def test_sink_that_no_worker_can_send_to_is_refused_by_parser_and_schema(notify: Any, field: str) -> None:
    fields = {"command": ["true"], "notify": notify}

    with pytest.raises(InvalidTask) as found:
        decode_task(json.dumps(fields))

    assert (found.value.field, CANARY in found.value.message) == (field, False)
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(fields)


def test_words_of_notify_on_are_checked_by_name() -> None:
    with pytest.raises(InvalidValue) as found:
        make_sinks("log", "failed,done", SETTINGS)

    assert (found.value.field, found.value.value) == ("notify_on", "done")


# the message


def record_of(task: Task, state: TaskState = TaskState.FAILED, **changes: Any) -> Record:
    reason = EndReason.OOM if state is TaskState.FAILED else EndReason(state.value)
    fields = {"token": "a" * 16, "reason": reason, "ended_at": AT, "message": CANARY, "log": CANARY, "value": CANARY}
    return Record(
        task_id=task.id, generation=task.generation, experiment=task.experiment, state=state, **{**fields, **changes}
    )


def settlement_of(task: Task, record: Record, token: str = "a" * 16) -> Settlement:
    return Settlement(Lease(task, token), record)


def test_message_says_how_a_task_ended_and_nothing_of_what_it_printed() -> None:
    task = sample_task(notify=SINKS, submitted_by="ada@laptop")
    record = record_of(task, attempts=3)

    message = find_notification(settlement_of(task, record), "gpu")
    assert message is not None
    event = describe_end(message, record)

    assert {name: value for name, value in event.items() if name != "id"} == {
        "task": task.id,
        "generation": 1,
        "experiment": task.experiment,
        "queue": "gpu",
        "owner": "ada@laptop",
        "state": "failed",
        "reason": "oom",
        "attempts": 3,
        "at": "2026-11-27T08:40:04.000Z",
        "text": f"task {task.id[:14]} of {task.experiment} failed after 3 attempts: oom",
    }
    assert list(choose_sinks(message, record)) == [0, 1, 2]
    assert CANARY not in json.dumps(event)


def test_message_id_is_of_the_task_the_generation_and_the_result() -> None:
    task = sample_task(notify=SINKS)
    message = Notification(experiment=task.experiment, sinks=SINKS, task=task.id)
    records = [
        record_of(task),
        record_of(replace(task, generation=2)),
        record_of(task, TaskState.SUCCEEDED),
        record_of(sample_task("other")),
    ]

    ids = [describe_end(message, each)["id"] for each in records]

    assert len(set(ids)) == 4
    assert describe_end(replace(message, queue="other"), record_of(task, worker="w-2", attempts=2))["id"] == ids[0]


@pytest.mark.parametrize(
    ("state", "heard"),
    [(TaskState.FAILED, [0, 1, 2]), (TaskState.SUCCEEDED, [1, 2]), (TaskState.EXPIRED, [1, 2])],
)
def test_sinks_hear_of_the_ends_that_they_want(state: TaskState, heard: list[int]) -> None:
    task = sample_task(notify=SINKS)
    record = record_of(task, state)

    message = find_notification(settlement_of(task, record), "default")

    assert message is not None
    assert list(choose_sinks(message, record)) == heard


def test_end_that_nobody_wants_or_that_another_attempt_recorded_is_no_message() -> None:
    silent, failing = sample_task(), sample_task(notify=(SINKS[0],))
    other = record_of(failing, token="b" * 16)

    assert find_notification(settlement_of(silent, record_of(silent)), "q") is None
    assert find_notification(settlement_of(failing, record_of(failing, TaskState.SUCCEEDED)), "q") is None
    assert find_notification(settlement_of(failing, other), "q") is None


@pytest.mark.parametrize(
    ("counts", "state", "text"),
    [
        ({TaskState.SUCCEEDED: 1200, TaskState.FAILED: 0}, "succeeded", "1,200 succeeded"),
        ({TaskState.SUCCEEDED: 7, TaskState.FAILED: 1, TaskState.EXPIRED: 1}, "failed", "7 succeeded, 1 failed, 1 expired"),
        ({TaskState.SUCCEEDED: 1, TaskState.CANCELLED: 2}, "cancelled", "2 cancelled, 1 succeeded"),
    ],
)  # fmt: skip
def test_message_about_an_experiment_has_its_totals(counts: dict[TaskState, int], state: str, text: str) -> None:
    message = Notification(experiment="sweep", sinks=(replace(LOG, on=()),), queue="q", owner="ada", token="c" * 16)

    event = describe_complete(message, counts, now=AT)

    assert (event["state"], event["text"]) == (state, f"experiment sweep is complete: {text}")
    assert event["counts"] == {each.value: count for each, count in counts.items() if count}


def test_messages_of_one_experiment_to_the_same_sinks_have_names_that_begin_alike() -> None:
    first = Notification(experiment="sweep", sinks=(LOG,), token="c" * 16)

    beginnings = [
        each.name.partition(".")[0]
        for each in (first, replace(first, token="d" * 16), replace(first, sinks=SINKS), replace(first, experiment="b"))
    ]

    assert beginnings[0] == beginnings[1]
    assert len(set(beginnings)) == 3
    assert LOG.on == ENDS
