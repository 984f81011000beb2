"""The bytes of a store's objects, as older releases wrote them and as people's scripts read them."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.errors import InvalidRecord, StoreUnsafe
from runtime.records import codec
from runtime.records.base import ExperimentSeen, WorkerSeen
from runtime.records.memory import MemoryRecords
from runtime.tasks.history import EndedNote, Mark, Record, StartedMark
from runtime.tasks.model import CommandEntry, TaskState
from runtime.testing import sample_task

NOON, MIDNIGHT = datetime(2026, 1, 1, 12, 0, 0, 500_000, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)

SHORT_RECORD = Record(
    task_id="t-1",
    generation=2,
    experiment="lab",
    state=TaskState.SUCCEEDED,
    reason=EndReason.SUCCEEDED,
    token="ab",
    ended_at=NOON,
)
FULL_RECORD = Record(
    task_id="t-1",
    generation=2,
    experiment="lab",
    state=TaskState.FAILED,
    reason=EndReason.OOM,
    token="ab",
    attempts=3,
    ended_at=NOON,
    started_at=MIDNIGHT,
    message="no",
    worker="w",
    exit_code=0,
    code="git:1",
    value=[1, {"a": None}],
    value_url="u",
    outputs_url="o",
    log_url="l",
    metrics={"loss": 0.5},
    log="x",
)
SHORT_NOTE = EndedNote(token="ab", reason=EndReason.LOST, ended_at=NOON)
FULL_NOTE = EndedNote(
    token="ab",
    reason=EndReason.LOST,
    ended_at=NOON,
    started_at=MIDNIGHT,
    worker="w",
    message="m",
    exit_code=-9,
    machine="h/b",
    evidence="e",
    alone=True,
    progressed=True,
    log="x",
)
SHORT_MARK = Mark(
    task_id="t-1",
    generation=1,
    experiment="lab",
    state=TaskState.EXPIRED,
    marked_at=NOON,
    reason=EndReason.EXPIRED,
    message=None,
    task=None,
)
FULL_MARK = Mark(
    task_id="t-1",
    generation=1,
    experiment="lab",
    state=TaskState.FAILED,
    marked_at=NOON,
    reason=EndReason.CONFIG_INVALID,
    message="m",
    task=sample_task(entry=CommandEntry(("true",))),
    raw="{",
)
SHORT_WORKER = WorkerSeen(worker="w", host="h", queue="q", seen_at=NOON, started_at=MIDNIGHT, slots=2)
FULL_WORKER = WorkerSeen(
    worker="w",
    host="h",
    queue="q",
    seen_at=NOON,
    started_at=MIDNIGHT,
    slots=2,
    running=("t-1",),
    done=3,
    failed=1,
    rate_per_s=0.5,
    left=True,
    labels={"a": "b"},
    declined={"t-2": "no"},
)

RECORDS = [
    # Blanks at the end make the length tell the state: 0 succeeded, 1 failed, 2 cancelled, 3 expired, modulo 4.
    (
        SHORT_RECORD,
        (
            '{"schema":1,"task":"t-1","generation":2,"experiment":"lab","state":"succeeded","reason":"succeeded","token":"ab",'
            '"attempts":1,"ended_at":"2026-01-01T12:00:00.500Z"}   \n'
        ),
    ),
    (
        FULL_RECORD,
        (
            '{"schema":1,"task":"t-1","generation":2,"experiment":"lab","state":"failed","reason":"oom","token":"ab",'
            '"attempts":3,"ended_at":"2026-01-01T12:00:00.500Z","started_at":"2026-01-01T00:00:00.000Z","message":"no",'
            '"worker":"w","exit_code":0,"code":"git:1","value":[1,{"a":null}],"value_url":"u","outputs_url":"o",'
            '"log_url":"l","metrics":{"loss":0.5},"log":"x"}\n'
        ),
    ),
]
OTHERS = [
    (codec.ENDED, SHORT_NOTE, '{"schema":1,"token":"ab","reason":"lost","ended_at":"2026-01-01T12:00:00.500Z"}\n'),
    (
        codec.ENDED,
        FULL_NOTE,
        (
            '{"schema":1,"token":"ab","reason":"lost","ended_at":"2026-01-01T12:00:00.500Z",'
            '"started_at":"2026-01-01T00:00:00.000Z","worker":"w","message":"m","exit_code":-9,"machine":"h/b",'
            '"evidence":"e","alone":true,"progressed":true,"log":"x"}\n'
        ),
    ),
    (
        codec.STARTED,
        StartedMark("ab", "w", NOON, alone=False),
        '{"schema":1,"token":"ab","worker":"w","started_at":"2026-01-01T12:00:00.500Z","alone":false}\n',
    ),
    (
        codec.STARTED,
        StartedMark("ab", "w", NOON, alone=True, machine="h/b"),
        '{"schema":1,"token":"ab","worker":"w","started_at":"2026-01-01T12:00:00.500Z","alone":true,"machine":"h/b"}\n',
    ),
    (
        codec.MARK,
        SHORT_MARK,
        (
            '{"schema":1,"task_id":"t-1","generation":1,"experiment":"lab","state":"expired","reason":"expired",'
            '"marked_at":"2026-01-01T12:00:00.500Z"}\n'
        ),
    ),
    (
        codec.MARK,
        FULL_MARK,
        (
            '{"schema":1,"task_id":"t-1","generation":1,"experiment":"lab","state":"failed","reason":"config_invalid",'
            '"marked_at":"2026-01-01T12:00:00.500Z","message":"m","task":{"schema":1,"id":"t-a0c29eed7fe0ee5daf2bdbe1",'
            '"experiment":"sample","command":["true"],"key":"1"},"raw":"{"}\n'
        ),
    ),
    (
        codec.WORKER,
        SHORT_WORKER,
        (
            '{"schema":1,"worker":"w","host":"h","queue":"q","seen_at":"2026-01-01T12:00:00.500Z",'
            '"started_at":"2026-01-01T00:00:00.000Z","slots":2,"running":[],"done":0,"failed":0,"rate_per_s":0,'
            '"left":false,"labels":{},"declined":{}}\n'
        ),
    ),
    (
        codec.WORKER,
        FULL_WORKER,
        (
            '{"schema":1,"worker":"w","host":"h","queue":"q","seen_at":"2026-01-01T12:00:00.500Z",'
            '"started_at":"2026-01-01T00:00:00.000Z","slots":2,"running":["t-1"],"done":3,"failed":1,"rate_per_s":0.5,'
            '"left":true,"labels":{"a":"b"},"declined":{"t-2":"no"}}\n'
        ),
    ),
    (codec.EXPERIMENT, ExperimentSeen("lab", None), '{"schema":1,"experiment":"lab"}\n'),
    (
        codec.EXPERIMENT,
        ExperimentSeen("lab", NOON, "q"),
        '{"schema":1,"experiment":"lab","created_at":"2026-01-01T12:00:00.500Z","queue":"q"}\n',
    ),
]
LEFT_OUT = [
    # What a writer may leave out.
    (
        codec.RECORD,
        (
            '{"task":"t-1","generation":2,"experiment":"lab","state":"succeeded","reason":"succeeded","token":"ab",'
            '"ended_at":"2026-01-01T12:00:00.500Z"}'
        ),
        SHORT_RECORD,
    ),
    (
        codec.STARTED,
        '{"token":"ab","worker":"w","started_at":"2026-01-01T12:00:00.500Z"}',
        StartedMark("ab", "w", NOON, alone=False),
    ),
    (
        codec.WORKER,
        (
            '{"worker":"w","host":"h","queue":"q","seen_at":"2026-01-01T12:00:00.500Z",'
            '"started_at":"2026-01-01T00:00:00.000Z","slots":2}'
        ),
        SHORT_WORKER,
    ),
]


@pytest.mark.parametrize(("record", "text"), RECORDS)
def test_record_has_the_bytes_that_it_always_had(record: Record, text: str) -> None:
    assert codec.encode_record(record).decode() == text
    assert codec.read_record(text.encode(), "here", "t-1", 2) == record


@pytest.mark.parametrize(("form", "value", "text"), OTHERS)
def test_object_has_the_bytes_that_it_always_had(form: Any, value: object, text: str) -> None:
    assert form.encode(value).decode() == text
    assert form.decode(text.encode(), "here") == value


@pytest.mark.parametrize(("form", "text", "value"), LEFT_OUT)
def test_object_without_what_may_be_left_out_is_read(form: Any, text: str, value: object) -> None:
    assert form.decode(text.encode(), "here") == value


def test_length_of_a_record_says_its_state_by_the_table_that_stores_rely_on() -> None:
    assert [codec.state_of_size(length).value for length in (400, 401, 402, 403)] == [
        "succeeded",
        "failed",
        "cancelled",
        "expired",
    ]


@pytest.mark.parametrize(
    ("length", "state", "reason", "message"),
    [
        (400, TaskState.SUCCEEDED, EndReason.SUCCEEDED, None),
        (401, TaskState.FAILED, EndReason.APP_FAILED, "why"),
        (402, TaskState.CANCELLED, EndReason.CANCELLED, "why"),
        (403, TaskState.EXPIRED, EndReason.EXPIRED, "why"),
    ],
)
def test_record_that_cannot_be_read_has_the_state_of_its_length_and_no_value(
    length: int, state: TaskState, reason: EndReason, message: str | None
) -> None:
    found = codec.read_record(b"x" * length, "here", "t-1", 2)

    assert (found.task_id, found.generation, found.state, found.reason) == ("t-1", 2, state, reason)
    assert found.unreadable
    assert (found.message is None) == (message is None)
    with pytest.raises(StoreUnsafe, match="the value of task t-1"):
        codec.read_value(found, MemoryRecords())


def test_record_with_a_number_that_no_interpreter_reads_keeps_the_rest_and_has_no_value() -> None:
    text = RECORDS[1][1].replace('"value":[1,', f'"value":[{"9" * 5_000},')

    found = codec.read_record(text.encode(), "here", "t-1", 2)

    assert replace(found, unreadable=None) == replace(FULL_RECORD, value=None, metrics={})
    with pytest.raises(StoreUnsafe, match="the value of task t-1"):
        codec.read_value(found, MemoryRecords())


def test_value_nested_however_deep_is_written_or_refused() -> None:
    value: list[object] = []
    refused = written = 0
    for _ in range(sys.getrecursionlimit()):
        value = [value]
        try:
            written += len(codec.encode_json({"value": value})) > 0
        except InvalidRecord:
            refused += 1

    assert written + refused == sys.getrecursionlimit()
    assert min(written, refused) > 0


def test_value_is_read_from_the_record_or_from_where_it_points() -> None:
    records = MemoryRecords()
    url = records.put_blob(b"[1, 2]")

    assert codec.read_value(replace(SHORT_RECORD, value=7), records) == 7
    assert codec.read_value(replace(SHORT_RECORD, value_url=url), records) == [1, 2]
    with pytest.raises(StoreUnsafe):
        codec.read_value(replace(SHORT_RECORD, value_url=records.put_blob(b"[1,")), records)
