"""Reports between child and worker, without either."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.worker.attempts import wire
from runtime.worker.attempts.child_handle import AttemptNotes
from runtime.worker.attempts.exit_classification import read_report, record_progress
from runtime.worker.attempts.model import AttemptEnd


def read(payload: bytes) -> tuple[AttemptEnd, Any]:
    result = AttemptEnd("t-1", 0, EndReason.SUCCEEDED, 1.0, 2.0)
    return result, read_report(result, payload)


def test_report_is_read_as_it_was_written() -> None:
    details = {"outcome": "app_failed", "message": "no", "exit_code": 3, "signal": 9, "metrics": {"n": 1}}
    result, imported = read(wire.encode_report({**details, "progressed": True, "imported": ["json"]}, '"\ud800é"'))

    assert (result.reason, result.message, result.exit_code, result.signal) == (EndReason.APP_FAILED, "no", 3, 9)
    assert (result.metrics, result.progressed, result.value) == ({"n": 1.0}, True, '"\ud800é"')
    assert imported == ["json"]


def test_report_that_no_json_can_hold_is_a_failure_that_says_so() -> None:
    result, imported = read(wire.encode_report({"outcome": "succeeded", "metrics": {"n": object()}}, "1"))

    assert (result.reason, result.value, imported) == (EndReason.APP_FAILED, "", [])
    assert (result.message or "").startswith("its metrics cannot be recorded: Object of type object")


def test_report_over_the_most_a_frame_may_have_is_a_failure_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_FRAME_BYTES", 1 << 20)
    result, _ = read(wire.encode_report({"outcome": "succeeded"}, "x" * (3 << 20)))

    assert (result.reason, result.value) == (EndReason.APP_FAILED, "")
    assert result.message == "it reported 3 MiB; the most is 1 MiB"


@pytest.mark.parametrize("payload", [b"", b"\1\0\0\0", b"\2\0\0\0[]", b"\2\0\0\0{}", b'\x0f\0\0\0{"outcome":"no"}'])
def test_report_that_cannot_be_read_is_the_attempts_failure(payload: bytes) -> None:
    result, imported = read(payload)

    assert (result.reason, result.value, imported) == (EndReason.APP_FAILED, "", None)
    assert (result.message or "").startswith("what it reported cannot be read: ")


def test_progress_that_cannot_be_read_changes_nothing() -> None:
    noted = AttemptNotes()
    record_progress(noted, b'{"progressed": true, "metrics": {"loss": 1}}')
    for payload in (b"", b"[]", b'{"metrics": 3}', b'{"metrics": {"loss": []}}'):
        record_progress(noted, payload)

    assert (noted.progressed, noted.metrics) == (True, {"loss": 1.0})
