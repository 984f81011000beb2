"""Cancelling tasks and experiments, and changing a queue's control object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.cancel import CANCELLED_TASKS_KEPT, Cancelled, cancel, cancel_experiment, cancel_task, update_control
from runtime.errors import NotPossible, StoreUnavailable
from runtime.identify import Identity, Kind
from runtime.reasons import EndReason
from runtime.records.base import Control
from runtime.status import read_standing
from runtime.tasks import TaskState
from runtime.testing import sample_task
from tests.verbs_support import TTL, Bench


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench.memory() if request.param == "memory" else Bench.sqlite(tmp_path)
    yield bench
    bench.close()


def test_cancel_queued_task_records_it_and_it_is_not_run(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)

    done = cancel_task(bench, task.id, now=bench.now, by="ada")

    record = bench.records.find(task.id, 1)
    assert done == Cancelled(name=task.id, kind=Kind.TASK, state=TaskState.CANCELLED)
    assert record is not None
    assert (record.state, record.reason, record.message) == (
        TaskState.CANCELLED,
        EndReason.CANCELLED,
        "cancelled by ada",
    )
    assert bench.records.totals("sample", exact=True).counts[TaskState.CANCELLED] == 1
    if bench.records.holds_tasks:
        assert bench.queue().lease(1, worker="w-one", ttl=TTL) == []


def test_cancel_task_twice_is_success_both_times(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    cancel_task(bench, task.id, now=bench.now, by="ada")

    again = cancel_task(bench, task.id, now=bench.now, by="bob")

    assert again == Cancelled(name=task.id, kind=Kind.TASK, state=TaskState.CANCELLED, already=True)
    record = bench.records.find(task.id, 1)
    assert record is not None
    assert record.message == "cancelled by ada"


@pytest.mark.parametrize("state", [TaskState.SUCCEEDED, TaskState.FAILED])
def test_cancel_task_that_ended_leaves_its_record_and_mark_alone(bench: Bench, state: TaskState) -> None:
    task = sample_task()
    bench.put(task)
    ended = bench.succeed() if state is TaskState.SUCCEEDED else bench.fail()

    done = cancel_task(bench, task.id, now=bench.now, by="ada")

    assert (done.state, done.already) == (state, True)
    assert bench.records.find(task.id, 1) == ended
    assert [mark.state for mark in bench.records.marks("sample")] == ([] if state is TaskState.SUCCEEDED else [state])


def test_cancel_that_loses_to_a_success_takes_its_mark_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    task = sample_task()
    bench.put(task)
    lease = bench.lease()
    standing = read_standing(bench.records, task.id)
    bench.succeed(lease)
    monkeypatch.setattr("runtime.cancel.read_standing", lambda *_: standing)

    done = cancel_task(bench, task.id, now=bench.now, by="ada")

    assert (done.state, done.already) == (TaskState.SUCCEEDED, True)
    assert not list(bench.records.blobs.list_keys("marks/"))  # type: ignore[attr-defined]


def test_cancel_running_task_takes_its_lease_or_tells_the_workers(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    lease = bench.lease("w-seven")

    done = cancel_task(bench, task.id, now=bench.now, by="ada")

    assert (done.state, done.running) == (TaskState.CANCELLED, "w-seven")
    if bench.records.holds_tasks:
        assert bench.queue().renew([lease], TTL) == [lease]
    else:
        assert bench.records.control("default").cancelled_tasks == {task.id}


def test_cancel_counts_the_attempts_that_had_ended(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.try_again()
    bench.try_again()

    cancel_task(bench, task.id, now=bench.now, by="ada")

    record = bench.records.find(task.id, 1)
    assert record is not None
    assert record.attempts == 2


def test_cancel_keeps_the_list_of_named_tasks_short() -> None:
    bench = Bench.memory()
    task = sample_task()
    bench.put(task)
    named = frozenset(f"t-{number}" for number in range(CANCELLED_TASKS_KEPT))
    bench.records.set_control("default", Control(cancelled_tasks=named))
    bench.report(running=("t-5",))

    cancel_task(bench, task.id, now=bench.now, by="ada")

    assert bench.records.control("default").cancelled_tasks == {"t-5", task.id}


def test_cancel_task_that_nothing_describes_says_so() -> None:
    bench = Bench.memory()
    bench.report()

    with pytest.raises(NotPossible, match="not known well enough"):
        cancel_task(bench, "t-" + "0" * 24, now=bench.now, by="ada")


def test_cancel_experiment_records_what_waits_and_orders_the_rest(tmp_path: Path) -> None:
    bench = Bench.sqlite(tmp_path)
    bench.put(*(sample_task(str(number)) for number in range(4)), sample_task(experiment="other"))
    running = bench.lease()

    done = cancel_experiment(bench, "sample", now=bench.now)

    counts = bench.records.totals("sample").counts
    assert done.waiting == 3
    assert (counts[TaskState.CANCELLED], counts[TaskState.LEASED], counts[TaskState.QUEUED]) == (3, 1, 0)
    assert bench.records.control("default").cancelled_before == {"sample": bench.now}
    assert bench.queue().renew([running], TTL) == []
    assert [task.experiment for task in bench.queue().peek(10)] == ["other"]
    bench.close()


def test_cancel_experiment_is_one_write_however_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    bench.put(*(sample_task(str(number)) for number in range(500)))
    writes: list[str] = []
    blobs = bench.records.blobs  # type: ignore[attr-defined]
    put, create = blobs.put, blobs.create
    monkeypatch.setattr(blobs, "put", lambda key, data: writes.append(key) or put(key, data))
    monkeypatch.setattr(blobs, "create", lambda key, data: writes.append(key) or create(key, data))

    done = cancel_experiment(bench, "sample", now=bench.now)

    assert done.waiting is None
    assert writes == ["control/default.json"]
    assert bench.records.control("default").cancelled_before == {"sample": bench.now}


def test_cancel_experiment_at_a_time_between_two_milliseconds_is_known_again(bench: Bench) -> None:
    now = bench.now.replace(microsecond=123_456)
    bench.put(sample_task())

    cancel_experiment(bench, "sample", now=now)

    assert bench.records.control("default").cancelled_before == {"sample": now.replace(microsecond=123_000)}


def test_cancel_experiment_again_moves_the_time_forward_only(bench: Bench) -> None:
    bench.put(sample_task())
    later = bench.now + timedelta(minutes=1)
    cancel_experiment(bench, "sample", now=later)

    cancel_experiment(bench, "sample", now=bench.now)

    assert bench.records.control("default").cancelled_before == {"sample": later}


def test_cancel_worker_says_how_to_stop_one(bench: Bench) -> None:
    with pytest.raises(NotPossible) as refused:
        cancel(bench, Identity(Kind.WORKER, "w-one"), now=bench.now)

    assert "SIGTERM" in (refused.value.hint or "")


def test_control_change_survives_another_that_overwrites_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    store: Any = bench.records
    real = store.set_control
    raced = []

    def set_control(queue: str, control: Control) -> None:
        real(queue, control)
        if not raced:
            raced.append(queue)
            real(queue, Control(paused=True))

    monkeypatch.setattr(store, "set_control", set_control)

    changed = update_control(store, "default", lambda control: replace(control, cancelled_before={"e": bench.now}))

    assert changed == store.control("default") == Control(paused=True, cancelled_before={"e": bench.now})


def test_control_that_never_takes_the_change_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    monkeypatch.setattr(bench.records, "set_control", lambda *_: None)

    with pytest.raises(StoreUnavailable):
        update_control(bench.records, "default", lambda control: replace(control, paused=True))
