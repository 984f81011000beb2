"""Records as JSON: readable by others, tolerant of newer fields, strict about damage."""

from __future__ import annotations

import json
import math

import pytest

from runtime.errors import NotPossible, StoreUnsafe
from runtime.records.codec import MARK, RECORD, encode_record, state_of_size
from runtime.tasks.model import TERMINAL_STATES, TaskState
from runtime.testing import sample_task
from tests.conformance.records_cases import sample_mark, sample_record


def test_record_is_one_readable_line_of_json() -> None:
    data = encode_record(sample_record(sample_task(), log="ünïcode\n", metrics={"loss": 0.5}))

    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    assert "ünïcode".encode() in data
    fields = json.loads(data)
    assert fields["schema"] == 1
    assert fields["state"] == "succeeded"
    assert fields["ended_at"] == "2026-11-21T08:00:00.000Z"
    assert "message" not in fields


@pytest.mark.parametrize("state", TERMINAL_STATES)
@pytest.mark.parametrize("log", ["", "1", "12", "123", "1234", "ü", "\udc80"])
def test_record_of_any_length_says_its_state_by_its_size(state: TaskState, log: str) -> None:
    assert state_of_size(len(encode_record(sample_record(sample_task(), state=state, log=log)))) is state


def test_record_with_bytes_that_are_no_utf8_in_its_log_comes_back_unchanged() -> None:
    record = sample_record(sample_task(), log=b"ok \xff\xfe".decode(errors="surrogateescape"))

    assert RECORD.decode(encode_record(record), "record") == record


def test_record_with_nan_comes_back_unchanged() -> None:
    record = sample_record(sample_task(), metrics={"loss": math.inf}, value=[math.nan])

    found = RECORD.decode(encode_record(record), "record")
    assert found.metrics == {"loss": math.inf}
    assert math.isnan(found.value[0])


def test_record_with_fields_of_a_later_release_is_read_without_them() -> None:
    record = sample_record(sample_task())
    fields = json.loads(encode_record(record)) | {"carbon_g": 12, "nested": {"a": 1}}

    assert RECORD.decode(json.dumps(fields).encode(), "record") == record


def test_record_of_a_newer_schema_is_refused_with_the_remedy() -> None:
    fields = json.loads(encode_record(sample_record(sample_task()))) | {"schema": 2}

    with pytest.raises(NotPossible) as refused:
        RECORD.decode(json.dumps(fields).encode(), "gs://lab/x.json")

    assert refused.value.render() == (
        "error: `gs://lab/x.json` was written by a newer release\n"
        "  found schema 2, this release reads 1\n"
        "hint: pip install --upgrade research-runtime"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"schema": 1}',
        encode_record(sample_record(sample_task()))[:-20],
        encode_record(sample_record(sample_task())).replace(b'"succeeded"', b'"done"'),
        encode_record(sample_record(sample_task())).replace(b"2026-11-21T08", b"yesterday"),
        encode_record(sample_record(sample_task())).replace(b'"2026-11-21T08:00:00.000Z"', b"12"),
    ],
)
def test_record_that_was_damaged_is_named_and_not_guessed_at(data: bytes) -> None:
    with pytest.raises(StoreUnsafe) as unsafe:
        RECORD.decode(data, "/lab/records/x.json")

    assert "/lab/records/x.json" in unsafe.value.message
    assert not unsafe.value.retryable


def test_mark_whose_task_is_damaged_is_named() -> None:
    data = MARK.encode(sample_mark(sample_task())).replace(b'"command":["true"]', b'"command":[]')

    with pytest.raises(StoreUnsafe):
        MARK.decode(data, "/lab/marks/x.json")
