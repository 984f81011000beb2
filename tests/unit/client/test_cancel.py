"""Cancelling tasks and experiments: the immediate record, and the order to the workers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from runtime.client.resolve_id import IdKind, ResolvedId
from runtime.client.tasks.cancel import CancelResult, cancel, cancel_experiment, cancel_task
from runtime.client.tasks.redrive import retry
from runtime.client.tasks.task_facts import read_standing
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible, StoreUnavailable
from runtime.records.order_scope import Coverage
from runtime.tasks.model import Task, TaskState, next_generation
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
    assert done == CancelResult(name=task.id, kind=IdKind.TASK, state=TaskState.CANCELLED)
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

    assert again == CancelResult(name=task.id, kind=IdKind.TASK, state=TaskState.CANCELLED, already=True)
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
    monkeypatch.setattr("runtime.client.tasks.cancel.read_standing", lambda *_: standing)

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
        assert bench.records.control("default").tasks == {(task.id, 1)}


def test_cancel_counts_the_attempts_that_had_ended(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.try_again()
    bench.try_again()

    cancel_task(bench, task.id, now=bench.now, by="ada")

    record = bench.records.find(task.id, 1)
    assert record is not None
    assert record.attempts == 2


def test_cancel_that_ends_before_the_record_is_written_has_told_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    task = sample_task()
    bench.put(task)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bench.records, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            cancel_task(bench, task.id, now=bench.now, by="ada")
    told = bench.records.control("default").tasks
    again = cancel_task(bench, task.id, now=bench.now, by="ada")

    assert told == {(task.id, 1)}
    assert (again.state, again.already) == (TaskState.CANCELLED, False)


def test_cancel_that_meets_a_workers_record_of_it_is_done() -> None:
    bench = Bench.memory()
    task = sample_task()
    bench.put(task)
    standing = read_standing(bench.records, task.id)
    bench.cancel()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("runtime.client.tasks.cancel.read_standing", lambda *_: standing)
        done = cancel_task(bench, task.id, now=bench.now, by="ada")

    assert (done.state, done.already) == (TaskState.CANCELLED, False)
    assert [mark.state for mark in bench.records.marks("sample")] == [TaskState.CANCELLED]


def test_cancel_task_that_nothing_describes_says_so() -> None:
    bench = Bench.memory()
    bench.report()

    with pytest.raises(NotPossible, match="not known well enough"):
        cancel_task(bench, "t-" + "0" * 24, now=bench.now, by="ada")


def test_cancel_experiment_in_the_embedded_file_records_all_of_it_at_once(tmp_path: Path) -> None:
    bench = Bench.sqlite(tmp_path)
    bench.put(*(sample_task(str(number)) for number in range(4)), sample_task(experiment="other"))
    bench.put(sample_task("later", not_before=bench.now + timedelta(hours=1)))
    bench.try_again(bench.lease())
    running = bench.lease()

    done = cancel_experiment(bench, "sample", now=bench.now)

    counts = bench.records.totals("sample").counts
    record = bench.records.find(running.task.id, 1)
    assert done == CancelResult(name="sample", kind=IdKind.EXPERIMENT, state=TaskState.CANCELLED, ended=5)
    assert {state: number for state, number in counts.items() if number} == {TaskState.CANCELLED: 5}
    assert record is not None
    assert (record.state, record.reason, record.attempts) == (TaskState.CANCELLED, EndReason.CANCELLED, 2)
    assert len({record.token for record in bench.records.records("sample")}) == 5
    assert bench.queue().renew([running], TTL) == [running]
    assert [task.experiment for task in bench.queue().peek(10)] == ["other"]
    assert (bench.queue().depth().total, cancel_experiment(bench, "sample", now=bench.now).ended) == (1, 0)  # type: ignore[union-attr]
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

    assert done.ended is None
    assert [key.rpartition("/")[0] for key in writes] == ["orders/default"]
    assert covered(bench, sample_task("7"))


def test_cancel_experiment_covers_what_was_begun_again_and_not_what_is_begun_later() -> None:
    bench = Bench.memory()
    again, later, ended = (sample_task(key) for key in ("again", "later", "ended"))
    bench.put(again, later, ended)
    for _ in range(3):
        bench.fail()
    retry(bench, again.id, now=bench.now)

    cancel_experiment(bench, "sample", now=bench.now)
    retry(bench, later.id, now=bench.now)

    assert [covered(bench, task) for task in (again, later, ended)] == [True, True, True]
    assert [covered(bench, next_generation(task)) for task in (again, later, ended)] == [True, False, False]


def test_cancel_experiment_reaches_every_queue_of_the_stack() -> None:
    bench = Bench.memory()
    bench.add_queue("gpu")
    bench.put(sample_task())
    bench.records.put_experiment("sample", queue="gpu")

    cancel_experiment(bench, "sample", now=bench.now)

    assert [covered(bench, sample_task(), queue) for queue in ("default", "gpu")] == [True, True]


def test_cancelled_experiment_is_submitted_to_again_and_that_runs() -> None:
    bench = Bench.memory()
    bench.put(sample_task("before"))

    cancel_experiment(bench, "sample", now=bench.now)
    bench.put(sample_task("after"))

    assert (covered(bench, sample_task("before")), covered(bench, sample_task("after"))) == (True, False)


def test_cancel_that_could_not_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    bench.put(sample_task())

    def full(*_: object) -> bool:
        raise StoreUnavailable("no space left")

    monkeypatch.setattr(bench.records.blobs, "create", full)  # type: ignore[attr-defined]

    with pytest.raises(StoreUnavailable):
        cancel_experiment(bench, "sample", now=bench.now)


def covered(bench: Bench, task: Task, queue: str = "default") -> bool:
    """Return the worker's decision."""
    control, coverage = bench.records.control(queue), Coverage(bench.records)
    coverage.read(control, task.experiment)
    return bool(coverage.covers(control, task))


def test_cancel_worker_says_how_to_stop_one(bench: Bench) -> None:
    with pytest.raises(NotPossible) as refused:
        cancel(bench, ResolvedId(IdKind.WORKER, "w-one"), now=bench.now)

    assert "SIGTERM" in (refused.value.hint or "")
