"""The facts that status reads about experiments, tasks, workers and queues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.client.tasks.status import (
    estimate_left,
    explain_waiting,
    last_line,
    read_experiment,
    read_failures,
    read_overview,
    read_task,
)
from runtime.client.tasks.task_facts import read_standing, read_worker, worker_status
from runtime.end_reasons import EndReason
from runtime.errors import UnknownName
from runtime.queues.base import Depth
from runtime.queues.memory import MemoryQueue
from runtime.records.memory import MemoryBlobs
from runtime.records.store import BlobRecords
from runtime.tasks.history import Record, mark_of
from runtime.tasks.model import TaskState, experiment_digest, new_token, next_generation
from runtime.testing import FakeClock, sample_task
from tests.conformance.records_cases import sample_record
from tests.verbs_support import Bench


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench.memory() if request.param == "memory" else Bench.sqlite(tmp_path)
    yield bench
    bench.close()


def totals(**counts: int) -> dict[TaskState, int]:
    return {state: counts.get(state.value, 0) for state in TaskState}


# experiments


def test_experiment_counts_every_state(bench: Bench) -> None:
    bench.put(*(sample_task(str(number)) for number in range(6)))
    bench.succeed()
    bench.succeed()
    bench.fail(message="Traceback\nValueError: nan\n")
    bench.clock.advance(seconds=40)

    seen = read_experiment(bench, "sample", now=bench.now)

    assert seen.totals == totals(queued=3, succeeded=2, failed=1)
    assert (seen.submitted, seen.ended, seen.remaining, seen.exact) == (6, 3, 3, True)
    assert [(failure.error, failure.reason) for failure in seen.failures] == [("ValueError: nan", EndReason.APP_FAILED)]
    assert seen.failures[0].what == "true"


def test_experiment_shows_what_workers_run_as_leased(bench: Bench) -> None:
    tasks = [sample_task(str(number)) for number in range(3)]
    bench.put(*tasks)
    lease = bench.lease()
    bench.report(running=(lease.task.id,))

    seen = read_experiment(bench, "sample", now=bench.now)

    assert seen.totals == totals(queued=2, leased=1)


def test_experiment_rate_and_time_left_come_from_live_workers_of_its_queue(bench: Bench) -> None:
    bench.put(*(sample_task(str(number)) for number in range(10)))
    bench.report("w-one", rate_per_s=1.5)
    bench.report("w-two", rate_per_s=0.5)
    bench.report("w-left", rate_per_s=50, left=True)
    bench.report("w-elsewhere", rate_per_s=50, queue="other")

    seen = read_experiment(bench, "sample", now=bench.now)

    assert (seen.rate_per_s, seen.eta_s) == (2.0, 5.0)
    assert [worker.worker for worker in seen.workers] == ["w-one", "w-two", "w-left"]


def test_experiment_of_delayed_tasks_says_so(tmp_path: Path) -> None:
    bench = Bench.sqlite(tmp_path)
    bench.put(sample_task(not_before=bench.now + timedelta(hours=1)))
    bench.report()

    seen = read_experiment(bench, "sample", now=bench.now)

    assert seen.why == "all that wait are delayed, until they are retried, looked at again or due"
    bench.close()


def test_experiment_counts_records_unless_live_workers_run_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    task, *_ = tasks = [sample_task(str(number)) for number in range(1_001)]
    bench.put(*tasks)
    asked: list[bool] = []
    real = bench.records.totals

    def totals_of(experiment: str, *, exact: bool = False) -> Any:
        asked.append(exact)
        return real(experiment, exact=exact)

    monkeypatch.setattr(bench.records, "totals", totals_of)
    monkeypatch.setattr("runtime.client.tasks.status.FEW_OF_ONE", 1_000)
    read_experiment(bench, "sample", now=bench.now)
    bench.report(running=(sample_task(experiment="other").id,))
    read_experiment(bench, "sample", now=bench.now)
    bench.report(running=(task.id,))
    read_experiment(bench, "sample", now=bench.now)
    read_experiment(bench, "sample", now=bench.now, exact=True)

    assert asked == [False, True, False, True, False, True]


def test_experiment_asked_for_by_name_is_counted_though_a_dead_worker_seems_to_run_its_tasks() -> None:
    bench = Bench.memory()
    task, *others = tasks = [sample_task(str(number)) for number in range(1_001)]
    bench.put(*tasks)
    bench.report(running=(task.id,))
    for each in tasks:
        bench.records.commit(sample_record(each))

    seen = read_experiment(bench, "sample", now=bench.now)

    assert (seen.totals[TaskState.SUCCEEDED], seen.exact) == (len(others) + 1, True)
    assert not read_overview(bench, now=bench.now).experiments[0].exact


def test_experiment_failures_beyond_the_limit_are_counted(bench: Bench) -> None:
    bench.put(*(sample_task(str(number)) for number in range(4)))
    for _ in range(4):
        bench.fail()

    some = read_experiment(bench, "sample", now=bench.now, failures=3)
    every = read_experiment(bench, "sample", now=bench.now, failures=None)

    assert (len(some.failures), some.failures_left_out) == (3, 1)
    assert (len(every.failures), every.failures_left_out) == (4, 0)


def test_experiment_asks_the_store_for_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    bench.put(*(sample_task(str(number)) for number in range(200)))
    for _ in range(100):
        bench.succeed()
    bench.report()
    read: list[str] = []
    real = bench.records.blobs.get  # type: ignore[attr-defined]
    monkeypatch.setattr(bench.records.blobs, "get", lambda key: read.append(key) or real(key))  # type: ignore[attr-defined]

    read_experiment(bench, "sample", now=bench.now)

    assert len(read) <= 5
    assert not [key for key in read if key.startswith("records/")]


# why tasks wait


def live_worker(bench: Bench, **fields: Any) -> Any:
    return worker_status(bench.report(**fields), bench.now)


def test_nothing_waits_needs_no_reason() -> None:
    assert explain_waiting("q", 0, paused=True, live=[]) == (None, None)


def test_paused_queue_is_the_reason_before_missing_workers() -> None:
    assert explain_waiting("q", 1, paused=True, live=[]) == ("queue `q` is paused", "runtime queue resume q")


def test_no_live_worker_names_the_command_that_starts_one() -> None:
    assert explain_waiting("q", 1, paused=False, live=[]) == (
        "no live worker serves queue `q`",
        "runtime worker --queue q",
    )


def test_only_delayed_tasks_are_said_to_be_delayed() -> None:
    worker = live_worker(Bench.memory())

    why, _ = explain_waiting("q", 2, paused=False, live=[worker], depth=Depth(0, 2, 0))

    assert why is not None
    assert "delayed" in why


def test_task_that_nobody_can_hold_is_named() -> None:
    bench = Bench.memory()
    small = live_worker(bench, worker="w-a", declined={"t-1": "wants 4 GPUs", "t-2": "wants 1 GPU"})
    smaller = live_worker(bench, worker="w-b", declined={"t-1": "wants 4 GPUs"})

    why = explain_waiting("q", 1, paused=False, live=[small, smaller], depth=Depth(0, 1, 0))

    assert why == ("no live worker can hold `t-1`: wants 4 GPUs", "runtime explain t-1")


def test_busy_slots_are_counted() -> None:
    worker = live_worker(Bench.memory(), slots=2, running=("t-1", "t-2"))

    assert explain_waiting("q", 5, paused=False, live=[worker])[0] == "1 live worker and all 2 slots are busy"


def test_leases_newer_than_the_workers_reports_count() -> None:
    worker = live_worker(Bench.memory(), slots=1)

    assert explain_waiting("q", 5, paused=False, live=[worker], leased=1)[0] == "1 live worker and its slot is busy"


def test_time_left_is_unknown_while_nothing_moves() -> None:
    assert (estimate_left(10, 0), estimate_left(0, 2), estimate_left(10, 2)) == (None, None, 5)


@pytest.mark.parametrize(("text", "expected"), [(None, ""), ("", ""), ("a\n b \n\n", "b"), ("one", "one")])
def test_last_line_is_the_last_that_says_something(text: str | None, expected: str) -> None:
    assert last_line(text) == expected


# workers


@pytest.mark.parametrize(
    ("silent_s", "left", "state"), [(30, False, "live"), (91, False, "silent"), (5, True, "left"), (200, True, "left")]
)
def test_worker_state_follows_its_last_report(silent_s: int, left: bool, state: str) -> None:
    bench = Bench.memory()
    seen = bench.report(seen_at=bench.now - timedelta(seconds=silent_s), left=left)

    assert worker_status(seen, bench.now).state == state


def test_worker_that_nobody_saw_is_unknown(bench: Bench) -> None:
    bench.report("w-one")

    with pytest.raises(UnknownName) as unknown:
        read_worker(bench, "w-onn", now=bench.now)

    assert unknown.value.known == ["w-one"]


# the overview


def test_overview_of_an_empty_stack_has_its_queue_and_nothing_else(bench: Bench) -> None:
    seen = read_overview(bench, now=bench.now)

    assert (seen.experiments, seen.workers, seen.failures) == ((), (), ())
    assert [queue.name for queue in seen.queues] == ["default"]
    assert seen.totals == totals()


def test_overview_has_newest_experiments_first_and_sums_them(bench: Bench) -> None:
    bench.put(sample_task(experiment="old"))
    bench.clock.advance(seconds=5)
    bench.put(sample_task("1", experiment="new"), sample_task("2", experiment="new"))

    seen = read_overview(bench, now=bench.now)

    assert [one.experiment for one in seen.experiments] == ["new", "old"]
    assert seen.totals == totals(queued=3)
    assert seen.queues[0].waiting == 3
    assert seen.queues[0].why == "no live worker serves queue `default`"


def test_overview_leaves_out_old_experiments_and_counts_them(bench: Bench) -> None:
    for number in range(12):
        bench.put(sample_task(experiment=f"e{number}"))
        bench.clock.advance(seconds=1)

    seen = read_overview(bench, now=bench.now)

    assert (len(seen.experiments), seen.experiments_left_out) == (10, 2)
    assert seen.experiments[0].experiment == "e11"


def test_overview_marks_failures_since_the_last_look_as_new(bench: Bench) -> None:
    bench.put(sample_task("1"), sample_task("2"), sample_task("3"))
    bench.fail(message="ancient")
    bench.clock.advance(hours=30)
    bench.fail(message="seen")
    looked_at = bench.now
    bench.clock.advance(minutes=5)
    bench.fail(message="fresh")

    seen = read_overview(bench, now=bench.now, looked_at=looked_at)

    assert [(failure.error, failure.new) for failure in seen.failures] == [("fresh", True), ("seen", False)]


def test_overview_says_which_queue_is_paused(bench: Bench) -> None:
    bench.put(sample_task())
    bench.queue().pause()

    queue = read_overview(bench, now=bench.now).queues[0]

    assert (queue.paused, queue.why) == (True, "queue `default` is paused")


def test_overview_leaves_out_workers_that_left(bench: Bench) -> None:
    bench.report("w-here")
    bench.report("w-gone", left=True)

    assert [worker.worker for worker in read_overview(bench, now=bench.now).workers] == ["w-here"]


# tasks


def test_task_that_waits_is_queued(bench: Bench) -> None:
    task = sample_task(submitted_by="ada")
    bench.put(task)

    seen = read_task(bench, task.id)

    assert (seen.state, seen.generation, seen.experiment, seen.queue) == ("queued", 1, "sample", "default")
    assert (seen.what, seen.submitted_by, seen.attempts, seen.history) == ("true", "ada", 0, ())
    assert seen.totals == totals(queued=1)


def test_task_that_runs_names_its_worker(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    lease = bench.lease("w-seven")

    seen = read_task(bench, task.id)

    assert (seen.state, seen.worker) == ("leased", "w-seven")
    assert [(attempt.token, attempt.ended_at) for attempt in seen.history] == [(lease.token, None)]


def test_task_held_by_a_worker_that_only_reports_it_is_leased() -> None:
    bench = Bench.memory()
    task = sample_task()
    bench.put(task)
    bench.queue().lease(1, worker="w-one", ttl=timedelta(seconds=30))
    bench.report("w-one", running=(task.id,))

    assert (read_task(bench, task.id).state, read_task(bench, task.id).worker) == ("leased", "w-one")


def test_task_that_succeeded_shows_attempts_and_where_things_lie(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    note = bench.try_again()
    record = bench.succeed(attempts=2, outputs_url="file:/outputs", log_url="file:/log", value=3, code="abc")

    seen = read_task(bench, task.id)

    assert (seen.state, seen.attempts, seen.outputs_url, seen.log_url) == ("succeeded", 2, "file:/outputs", "file:/log")
    assert (seen.has_value, seen.code) == (True, "abc")
    assert seen.record
    assert [(attempt.token, attempt.reason) for attempt in seen.history] == [
        (note.token, EndReason.APP_FAILED),
        (record.token, EndReason.SUCCEEDED),
    ]


def test_task_that_was_cancelled_before_a_start_has_no_attempt(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.queue().purge()

    seen = read_task(bench, task.id)

    assert (seen.state, seen.attempts, seen.history) == ("cancelled", 0, ())


def test_standing_of_a_failed_task_has_its_open_mark(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.fail()

    standing = read_standing(bench.records, task.id)

    assert standing.state is TaskState.FAILED
    assert standing.mark is not None
    assert standing.mark.task == task


def test_standing_after_a_redrive_is_queued_in_the_next_generation(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.fail()
    bench.queue().put([next_generation(task)])
    bench.records.unmark(task.id, 1, TaskState.FAILED)

    standing = read_standing(bench.records, task.id)

    assert (standing.state, standing.generation, standing.mark) == (TaskState.QUEUED, 2, None)
    assert standing.task == next_generation(task)
    assert [record.generation for record in standing.recorded] == [1]


def test_failures_that_were_purged_are_not_listed(bench: Bench) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    first, second = bench.fail(), bench.fail()
    mark = bench.records.find_mark(first.task_id, 1, TaskState.FAILED)
    assert mark is not None
    bench.records.mark(replace(mark, task=None, raw=None))

    listed = [failure.task for failure in read_failures(bench.records, "sample")]

    assert listed == [second.task_id]
    assert read_experiment(bench, "sample", now=bench.now).totals[TaskState.FAILED] == 2


def test_record_without_an_attempt_is_no_attempt() -> None:
    bench = Bench.memory()
    task = sample_task()
    bench.put(task)
    bench.records.commit(
        Record(
            task_id=task.id,
            generation=1,
            experiment="sample",
            state=TaskState.SUCCEEDED,
            token=new_token(),
            reason=EndReason.SUCCEEDED,
            ended_at=bench.now,
            attempts=0,
        )
    )

    assert read_task(bench, task.id).history == ()


# requests


class BucketOfMemory(MemoryBlobs):
    """Counts requests as a bucket bills them: each read, each write, and each thousand names of a listing."""

    parallel = 16

    def __init__(self) -> None:
        super().__init__()
        self.url = "gs://counted"
        self.requests = 0

    def get(self, key: str) -> bytes | None:
        self.requests += 1
        return super().get(key)

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        for number, key in enumerate(super().list_keys(prefix, after=after)):
            self.requests += number % 1000 == 0
            yield key


def test_status_of_600_000_tasks_on_a_bucket_takes_at_most_100_requests() -> None:
    blobs = BucketOfMemory()
    records = BlobRecords(blobs)
    bench = Bench(records, MemoryQueue(records), FakeClock(datetime.now(UTC)))
    records.put_experiment("sample", queue="default")
    for part in range(60):
        name = f"manifests/{experiment_digest('sample')}/{part:05}-10000-{part:016x}"
        blobs.create(f"{name}.jsonl", b"")
        blobs.create(f"{name}.sent", b"")
    for number in range(20):
        bench.report(f"w-{number}", rate_per_s=10, running=(sample_task(f"running {number}").id,))
        records.put_counters(f"w-{number}", {"sample": {TaskState.SUCCEEDED: 20_000, TaskState.FAILED: 150}})
    for number in range(3_000):
        task = sample_task(str(number))
        buried = Record(
            task_id=task.id,
            generation=1,
            experiment="sample",
            state=TaskState.FAILED,
            token=new_token(),
            reason=EndReason.APP_FAILED,
            ended_at=bench.now,
        )
        records.mark(mark_of(buried, task))
        records.commit(buried)
    blobs.requests = 0

    seen = read_experiment(bench, "sample", now=bench.now)

    assert seen.totals == totals(queued=196_980, leased=20, succeeded=400_000, failed=3_000)
    assert (len(seen.failures), seen.failures_left_out) == (10, 2_990)
    assert seen.eta_s == 985
    assert blobs.requests <= 100
    records.close()
