"""The one order in which an ending is written, and the decision about an existing record."""

from __future__ import annotations

import pytest

from runtime import faults
from runtime.records.base import RecordExists, is_unwritten, settle_record
from runtime.records.memory import MemoryRecords
from runtime.tasks.history import Mark, Record, mark_of
from runtime.tasks.model import TaskState
from runtime.testing import sample_task
from tests.conformance.records_cases import sample_record

TASK = sample_task()
FAILED = sample_record(TASK, token="ours", state=TaskState.FAILED)


class Watched(MemoryRecords):
    """Notes the sequence of writes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def mark(self, mark: Mark) -> None:
        self.calls.append("mark")
        super().mark(mark)

    def commit(self, record: Record) -> None:
        self.calls.append("record")
        super().commit(record)

    def unmark(self, task_id: str, generation: int, state: TaskState) -> bool:
        self.calls.append("unmark")
        return super().unmark(task_id, generation, state)


def test_mark_goes_first_and_the_record_second() -> None:
    store = Watched()

    settle_record(store, FAILED, mark_of(FAILED, TASK))
    settle_record(store, FAILED, mark_of(FAILED, TASK))

    assert store.calls == ["mark", "record"] * 2
    assert [mark.task_id for mark in store.marks()] == [TASK.id]


def test_success_needs_no_mark() -> None:
    store = Watched()

    settle_record(store, sample_record(TASK))

    assert store.calls == ["record"]


def test_mark_that_the_first_record_contradicts_is_closed() -> None:
    store = Watched()
    store.commit(sample_record(TASK, token="theirs"))

    with pytest.raises(RecordExists) as first:
        settle_record(store, FAILED, mark_of(FAILED, TASK))

    assert first.value.record.token == "theirs"
    assert store.calls[-1] == "unmark"
    assert not list(store.blobs.list_keys("marks/"))


def test_mark_that_the_first_record_agrees_with_stays() -> None:
    store = Watched()
    theirs = sample_record(TASK, token="theirs", state=TaskState.FAILED)
    settle_record(store, theirs, mark_of(theirs, TASK))

    with pytest.raises(RecordExists):
        settle_record(store, FAILED, mark_of(FAILED, TASK))

    assert len(list(store.marks())) == 1


@pytest.mark.parametrize(("point", "written"), [("queue.marked", ["mark"]), ("queue.recorded", ["mark", "record"])])
def test_fault_points_lie_between_the_steps(point: str, written: list[str]) -> None:
    store = Watched()
    faults.arm({"RUNTIME_FAULTS": f"{point}=raise"})
    try:
        with pytest.raises(faults.FaultReached):
            settle_record(store, FAILED, mark_of(FAILED, TASK))
    finally:
        faults.arm({})

    assert store.calls == written


def test_record_of_the_same_token_is_written_once_and_another_is_refused() -> None:
    assert is_unwritten(FAILED, None)
    assert not is_unwritten(FAILED, FAILED)
    with pytest.raises(RecordExists):
        is_unwritten(FAILED, sample_record(TASK, token="theirs"))
