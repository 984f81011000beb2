"""Attempts that never began: where their tasks go."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.reasons import EndReason
from runtime.tasks.history import Lease
from runtime.testing import FakeClock, sample_task
from runtime.worker.attempts.model import Ended
from runtime.worker.ending import AttemptLogs, Ending
from runtime.worker.services import HeldLease
from tests.unit.worker.parts_bench import Parts
from tests.unit.worker.parts_bench import clock as clock  # noqa: PLC0414 (a fixture)


class Places(Parts):
    """Finds where an unstarted task goes."""

    def __init__(self, folder: Path, clock: FakeClock, *, leaving: str | None = None) -> None:
        super().__init__(folder, clock)
        logs = AttemptLogs(self.services)
        self.ending = Ending(self.services, self.outbox, self.dispatch, self.preparing, logs)
        if leaving is not None:
            self.leaving.ask(leaving)

    def end(self, *, alone: bool = False, stop_reason: EndReason | None = None) -> str:
        """End an attempt that has not begun; return its task's place."""
        waiting = HeldLease(Lease(sample_task("waiting"), "w"))
        self.dispatch.ready.append(waiting)
        held = self.holdings.take(Lease(sample_task("1"), "t", alone=alone), self.now, self.now)
        held.sent, held.stop_reason = True, stop_reason
        self.ending.conclude(Ended("t", 0, EndReason.PREEMPTED, self.now, self.now, not_started=True), self.now)
        assert not held.sent
        found = {
            "given back": held.lease in [release.lease for release in self.outbox.releases],
            "apart": held in self.dispatch.suspects.waiting,
            "first": self.dispatch.ready[0] is held,
        }
        [place] = [name for name, there in found.items() if there]
        assert ("t" in self.holdings.by_token) is (place != "given back")
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
    leaving: str | None, stop_reason: EndReason | None, alone: bool, place: str, tmp_path: Path, clock: FakeClock
) -> None:
    assert Places(tmp_path, clock, leaving=leaving).end(alone=alone, stop_reason=stop_reason) == place


def test_end_of_an_attempt_that_is_not_held_changes_nothing(tmp_path: Path, clock: FakeClock) -> None:
    places = Places(tmp_path, clock)

    places.ending.conclude(Ended("unknown", 0, EndReason.PREEMPTED, 0.0, 0.0, not_started=True), 0.0)

    assert not places.outbox.pending
    assert not places.dispatch.ready
    assert not places.dispatch.suspects.waiting
