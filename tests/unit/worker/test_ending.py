"""Attempts that never began: where their tasks go."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.reasons import EndReason
from runtime.tasks.history import Lease
from runtime.testing import FakeClock, sample_task
from runtime.worker.attempts.model import Ended
from runtime.worker.ending import Ending
from runtime.worker.services import HeldLease, Holdings


class Places:
    """Notes where an unstarted task goes."""

    def __init__(self, *, leaving: str | None = None) -> None:
        self.given_back: list[HeldLease] = []
        self.apart: list[HeldLease] = []
        self.ready: deque[HeldLease] = deque()
        self.holdings = Holdings(timedelta(seconds=30), FakeClock())
        dispatch: Any = SimpleNamespace(ready=self.ready, line_up=self.apart.append)
        outbox: Any = SimpleNamespace(give_back=self.given_back.append)
        services: Any = SimpleNamespace(holdings=self.holdings, leaving=SimpleNamespace(reason=leaving))
        preparing: Any = None
        logs: Any = None
        self.ending = Ending(services, outbox, dispatch, preparing, logs)

    def end(self, *, alone: bool = False, stop_reason: EndReason | None = None) -> str:
        """End an attempt that has not begun; return its task's place."""
        waiting = HeldLease(Lease(sample_task("waiting"), "w"))
        self.ready.append(waiting)
        held = self.holdings.take(Lease(sample_task("1"), "t", alone=alone), 0.0, 0.0)
        held.sent, held.stop_reason = True, stop_reason
        now = 5.0
        self.ending.conclude(Ended("t", 0, EndReason.PREEMPTED, now, now, not_started=True), now)
        assert not held.sent
        found = {"given back": held in self.given_back, "apart": held in self.apart, "first": self.ready[0] is held}
        [place] = [name for name, there in found.items() if there]
        return place


@pytest.mark.parametrize(
    ("leaving", "stop_reason", "alone", "place"),
    [
        (None, None, False, "first"),
        (None, None, True, "apart"),
        ("told to", None, False, "given back"),
        ("told to", None, True, "given back"),
        (None, EndReason.CANCELLED, False, "given back"),
        ("told to", EndReason.PREEMPTED, False, "given back"),
    ],
)
def test_task_whose_attempt_never_began_runs_next_unless_it_is_not_to_run_here(
    leaving: str | None, stop_reason: EndReason | None, alone: bool, place: str
) -> None:
    assert Places(leaving=leaving).end(alone=alone, stop_reason=stop_reason) == place


def test_end_of_an_attempt_that_is_not_held_changes_nothing() -> None:
    places = Places()

    places.ending.conclude(Ended("unknown", 0, EndReason.PREEMPTED, 0.0, 0.0, not_started=True), 0.0)

    assert (places.given_back, places.apart, list(places.ready)) == ([], [], [])
