"""When a worker looks for messages, and when it takes an experiment for complete, by a clock that moves only on request."""

from __future__ import annotations

import pytest

from runtime.end_reasons import EndReason
from runtime.records.base import Totals
from runtime.records.memory import MemoryRecords
from runtime.records.totals import FEW_OF_ONE
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState
from runtime.tasks.wire import encode_task
from runtime.testing import FakeClock, sample_task
from runtime.worker.notifying import STILL_S, CompletionWatch
from tests.unit.worker.parts_bench import clock as clock  # noqa: PLC0414 (a fixture)

TASK = sample_task()


def recorded(clock: FakeClock) -> MemoryRecords:
    """A store in which the only task of the experiment has its record, and the worker that wrote it never reported."""
    records = MemoryRecords(clock=clock)
    records.put_part(TASK.experiment, 0, [encode_task(TASK)])
    record = Record(
        task_id=TASK.id,
        generation=1,
        experiment=TASK.experiment,
        state=TaskState.SUCCEEDED,
        token="a" * 16,
        reason=EndReason.SUCCEEDED,
        ended_at=clock.now(),
    )
    records.commit(record)
    return records


def test_experiment_whose_counters_stand_still_is_counted_less_and_less_often(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = recorded(clock)
    other = sample_task("other")
    records.put_part(TASK.experiment, 1, [encode_task(other)])
    watching = CompletionWatch(records)
    counted: list[float] = []
    began = clock.boottime()
    look = records.totals

    def totals(experiment: str, *, exact: bool = False) -> Totals:
        if exact:
            counted.append(clock.boottime() - began)
        return look(experiment, exact=exact)

    monkeypatch.setattr(records, "totals", totals)
    for _ in range(100):
        assert watching.find_complete(TASK.experiment) is None
        clock.advance(seconds=10)

    assert counted == [STILL_S, 3 * STILL_S, 7 * STILL_S]


def test_experiment_whose_worker_never_reported_is_complete_once_its_records_are_counted(clock: FakeClock) -> None:
    watching = CompletionWatch(recorded(clock))

    assert watching.find_complete(TASK.experiment) is None
    clock.advance(seconds=STILL_S)
    found = watching.find_complete(TASK.experiment)

    assert found is not None
    assert found.counts[TaskState.SUCCEEDED] == 1


def test_worker_that_leaves_counts_an_experiment_of_few_tasks_at_once(clock: FakeClock) -> None:
    assert FEW_OF_ONE > 1
    assert CompletionWatch(recorded(clock)).find_complete(TASK.experiment, last=True) is not None


def test_counters_that_say_that_all_is_done_are_checked_at_once(clock: FakeClock) -> None:
    records = recorded(clock)
    records.put_counters("w-1", {TASK.experiment: {TaskState.SUCCEEDED: 1}})
    assert CompletionWatch(records).find_complete(TASK.experiment) is not None

    records.put_part(TASK.experiment, 1, [encode_task(sample_task("other"))])
    records.put_counters("w-2", {TASK.experiment: {TaskState.SUCCEEDED: 1}})
    assert CompletionWatch(records).find_complete(TASK.experiment) is None


def test_experiment_without_tasks_is_not_complete(clock: FakeClock) -> None:
    assert CompletionWatch(MemoryRecords(clock=clock)).find_complete("none", last=True) is None
