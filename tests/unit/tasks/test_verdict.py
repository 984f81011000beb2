"""Tasks that must not start, and their records."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from runtime.reasons import EndReason
from runtime.tasks.history import InvalidMessage, Lease
from runtime.tasks.model import TaskState
from runtime.tasks.verdict import refuse
from runtime.testing import sample_task

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
PAST = NOW - timedelta(seconds=1)


@pytest.mark.parametrize(
    ("lease", "cancelled", "expected"),
    [
        (Lease(sample_task(), "t"), True, (TaskState.CANCELLED, EndReason.CANCELLED)),
        (Lease(sample_task(expires_at=NOW), "t"), True, (TaskState.EXPIRED, EndReason.EXPIRED)),
        (
            Lease(sample_task(expires_at=PAST), "t", invalid=InvalidMessage("i", "{", "no JSON")),
            True,
            (TaskState.FAILED, EndReason.CONFIG_INVALID),
        ),
    ],
    ids=["cancelled", "expired", "malformed"],
)
def test_task_that_must_not_start_is_recorded_with_its_first_reason(
    lease: Lease, cancelled: bool, expected: tuple[TaskState, EndReason]
) -> None:
    settlement = refuse(lease, cancelled=cancelled, worker="w-1", now=NOW)

    assert settlement is not None
    assert (settlement.record.state, settlement.record.reason) == expected
    assert (settlement.record.token, settlement.record.attempts, settlement.record.worker) == ("t", 0, "w-1")


def test_task_that_may_start_has_no_record() -> None:
    lease = Lease(sample_task(expires_at=NOW + timedelta(seconds=1)), "t")

    assert refuse(lease, cancelled=False, worker="w-1", now=NOW) is None
