"""Fakes and builders for tests of this package and of code that uses it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from runtime.tasks.model import CommandEntry, Task, task_id


class FakeClock:
    """Wall and boot time that move only on request."""

    def __init__(self, now: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = now
        self._boot = 1_000.0

    def now(self) -> datetime:
        return self._now

    def boottime(self) -> float:
        return self._boot

    def advance(self, **span: float) -> None:
        """Both clocks; keywords are those of `timedelta`."""
        self._now += timedelta(**span)
        self._boot += timedelta(**span).total_seconds()

    def jump_wall(self, **span: float) -> None:
        """The wall clock alone, as a clock step does."""
        self._now += timedelta(**span)


def sample_task(key: str = "1", *, experiment: str = "sample", **fields: Any) -> Task:
    """A command task; keywords are `Task`'s."""
    return Task(
        id=fields.pop("id", None) or task_id(experiment, key=key),
        entry=fields.pop("entry", CommandEntry(("true",))),
        experiment=experiment,
        key=key,
        **fields,
    )
