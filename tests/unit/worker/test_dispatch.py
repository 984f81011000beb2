"""Batches: what a slot gets at once, and which tasks go alone."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.records.memory import MemoryRecords
from runtime.tasks.history import Lease
from runtime.testing import FakeClock, sample_task
from runtime.worker.dispatch import Dispatch
from runtime.worker.options import WorkerOptions
from runtime.worker.worker_context import HeldLease, HeldLeases


class Line:
    """A dispatch with slots that only note what they were given."""

    def __init__(self, *, slots: int = 1, reuse: bool = True, mean_s: float = 0.001, room: int = 100) -> None:
        self.held: list[list[str]] = [[] for _ in range(slots)]
        self.batches: list[list[str]] = []
        places = [SimpleNamespace(index=index, environment=dict) for index in range(slots)]
        pool_slots = [
            SimpleNamespace(outstanding=lambda has=has: has, room=lambda has=has: room - len(has)) for has in self.held
        ]
        services: Any = SimpleNamespace(
            pool=SimpleNamespace(slots=pool_slots),
            slots=places,
            holdings=HeldLeases(timedelta(seconds=30), FakeClock()),
            options=WorkerOptions(slots=slots, reuse_process=reuse, look_ahead=16),
            queue=SimpleNamespace(traits=SimpleNamespace(tracks_holders=True)),
            records=MemoryRecords(),
            offload=SimpleNamespace(lane=lambda *_, **__: None),
        )
        self.dispatch = Dispatch(services, None, None, None)  # type: ignore[arg-type]
        self.dispatch.mean_s = mean_s
        self.dispatch._start = self.start  # type: ignore[method-assign]

    def start(self, batch: list[HeldLease], slot: Any) -> None:
        keys = [str(held.lease.task.key) for held in batch]
        self.batches.append(keys)
        self.held[slot.index].extend(keys)

    def add(self, keys: str) -> None:
        """Line up tasks by letters; a capital is a suspect."""
        for key in keys:
            self.dispatch.ready.append(HeldLease(Lease(sample_task(key), f"token-{key}", suspect=key.isupper())))

    def sent(self) -> list[list[str]]:
        """Dispatch, ending what the slots hold each time, until nothing more is sent; return the batches."""
        while True:
            before = len(self.batches)
            self.dispatch.dispatch(0.0)
            if len(self.batches) == before:
                return self.batches
            for has in self.held:
                has.clear()


@pytest.mark.parametrize(
    ("line", "batches"),
    [
        ("abcd", ["abcd"]),
        ("abCd", ["ab", "C", "d"]),
        ("Abc", ["A", "bc"]),
        ("ABc", ["A", "B", "c"]),
        ("abC", ["ab", "C"]),
        ("aBCd", ["a", "B", "C", "d"]),
    ],
)
def test_suspect_goes_in_a_batch_of_its_own(line: str, batches: list[str]) -> None:
    given = Line()
    given.add(line)

    assert ["".join(batch) for batch in given.sent()] == batches


def test_suspect_waits_until_its_slot_has_ended_what_it_was_given() -> None:
    given = Line()
    given.add("aB")

    given.dispatch.dispatch(0.0)
    given.dispatch.dispatch(0.0)
    assert given.batches == [["a"]]

    given.held[0].clear()
    given.dispatch.dispatch(0.0)
    assert given.batches == [["a"], ["B"]]


@pytest.mark.parametrize("how", [{"reuse": False}, {"mean_s": 0.05}, {"mean_s": float("inf")}, {"room": 1}])
def test_tasks_go_one_by_one_unless_they_are_quick_and_their_process_is_warm(how: dict[str, Any]) -> None:
    given = Line(**how)
    given.add("abc")

    assert given.sent() == [["a"], ["b"], ["c"]]


def test_batch_is_bounded_by_the_look_ahead_and_by_the_room_of_the_slot() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    wide, narrow = Line(), Line(room=5)
    wide.add(letters)
    narrow.add(letters)

    assert [len(batch) for batch in wide.sent()] == [17, 9]
    assert [len(batch) for batch in narrow.sent()] == [5, 5, 5, 5, 5, 1]


def test_nothing_starts_during_a_pause() -> None:
    given = Line()
    given.add("ab")
    given.dispatch.pause_until = 10.0

    given.dispatch.dispatch(9.9)
    assert given.batches == []

    given.dispatch.dispatch(10.0)
    assert given.batches == [["a", "b"]]
