"""Which refusals before a start are the task's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import StoreUnavailable
from runtime.testing import FakeClock
from tests.unit.worker.parts_bench import Parts
from tests.unit.worker.parts_bench import clock as clock  # noqa: PLC0414 (a fixture)

DENIED = StoreUnavailable("403 Forbidden", denied=True)


def refuse(parts: Parts, clock: FakeClock, *after_s: float) -> list[bool]:
    """Refuse the held task once after each of these times, and let the service take others in between."""
    held, found = parts.first(), []
    for seconds in after_s:
        clock.advance(seconds=seconds)
        found.append(parts.outbox.fail_unstarted(held, DENIED))
        parts.outbox.handed += 1
    return found


@pytest.mark.parametrize(
    ("after_s", "blamed"),
    [
        ((0, 30, 30, 30), [False, False, False, False]),
        ((0, 60, 30, 31), [False, False, False, True]),
        # Two times without a permission, and long ones with it in between.
        ((0, 10, 130, 10), [False, False, False, False]),
        ((0, 130, 60, 70), [False, False, False, True]),
    ],
)
def test_missing_permission_is_a_tasks_own_fault_only_if_it_lasts_in_a_row(
    tmp_path: Path, clock: FakeClock, after_s: tuple[float, ...], blamed: list[bool]
) -> None:
    parts = Parts(tmp_path, clock)
    parts.read_orders()
    parts.put("a")
    parts.fetch()

    assert refuse(parts, clock, *after_s) == blamed
