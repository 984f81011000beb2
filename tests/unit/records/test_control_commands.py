"""Orders from several places at once, and the tasks that they cover at any setting of the clocks: seen by the tasks that workers then run."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from runtime.client.tasks.cancel import cancel_experiment
from runtime.client.tasks.submit import submit_tasks
from runtime.clock import SystemClock
from runtime.errors import StoreUnavailable
from runtime.queues.base import Queue
from runtime.records import open_records
from runtime.records.base import ManifestPart, RecordStore
from runtime.tasks.model import Task, TaskState
from runtime.testing import FakeClock
from runtime.worker.options import WorkerOptions
from runtime.worker.run import run_worker
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import Bench as WorkerBench
from tests.unit.worker.worker_bench import bench, open_pair_with_folder
from tests.verbs_support import Bench

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")

CANCELLER = """
import sys, time
from datetime import UTC, datetime
from runtime.client.tasks.cancel import cancel_experiment
from runtime.clock import SystemClock
from runtime.queues.memory import MemoryQueue
from runtime.records import open_records
from tests.verbs_support import Bench
url, start_at, *experiments = sys.argv[1:]
records = open_records(url)
stack = Bench(records, MemoryQueue(records), SystemClock())
time.sleep(max(0, float(start_at) - time.time()))
for experiment in experiments:
    cancel_experiment(stack, experiment, now=datetime.now(UTC))
"""


@pytest.mark.slow
def test_cancels_from_several_processes_at_once_all_hold(bench: WorkerBench) -> None:
    queue, records = open_pair_with_folder(bench)
    experiments = [f"sweep-{number}" for number in range(40)]
    tasks = [bench.function("give", experiment=name, key=name, submitted_at=datetime.now(UTC)) for name in experiments]
    for task in tasks:
        submit_tasks([task], queue, experiment=task.experiment)
    start_at = datetime.now(UTC).timestamp() + 2
    cancellers = [
        subprocess.Popen([sys.executable, "-c", CANCELLER, records.url, str(start_at), *experiments[n::4]])
        for n in range(4)
    ]
    assert [canceller.wait(240) for canceller in cancellers] == [0] * 4

    bench.run(queue)

    assert [bench.record(task, records=records).state for task in tasks] == [TaskState.CANCELLED] * 40


@pytest.mark.parametrize("submitter_ahead_s", [-300, 0, 300])
@pytest.mark.parametrize("canceller_ahead_s", [-300, 0, 300])
def test_cancel_covers_what_was_submitted_before_it_whatever_the_clocks_say(
    bench: WorkerBench, submitter_ahead_s: float, canceller_ahead_s: float
) -> None:
    queue, records = open_pair_with_folder(bench)
    real = datetime.now(UTC)
    submitter, canceller = (FakeClock(real + timedelta(seconds=s)) for s in (submitter_ahead_s, canceller_ahead_s))

    def submit(key: str) -> Task:
        task = bench.function("give", key, key=key, submitted_at=submitter.now())
        submit_tasks([task], queue, experiment=task.experiment)
        submitter.advance(seconds=1)
        canceller.advance(seconds=1)
        return task

    before = [submit("one"), submit("two")]
    cancel_experiment(Bench(open_records(records.url), queue, canceller), "sample", now=canceller.now())
    after = [submit("three"), submit("four")]

    bench.run(queue)

    assert [bench.record(task, records=records).state for task in before] == [TaskState.CANCELLED] * 2
    assert [bench.record(task, records=records).state for task in after] == [TaskState.SUCCEEDED] * 2


def test_purge_with_a_worker_beside_it_stops_what_runs_and_loses_nothing(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.control.CONTROL_EVERY_S", 0.05)
    monkeypatch.setattr(bench, "open_queue", lambda: open_pair_with_folder(bench)[0])
    queue, records = open_pair_with_folder(bench)
    runs, *wait = tasks = [bench.function("wait", "slow"), *(bench.function("give", n) for n in range(5))]
    submit_tasks(tasks, queue, experiment="sample")
    with bench.running():
        bench.began("slow")
        purged = queue.purge()
        assert wait_until(lambda: bool(bench.events("attempt_ended")))
        after = bench.function("give", "after")
        submit_tasks([after], queue, experiment="sample")
        assert wait_until(lambda: records.find(after.id, 1) is not None)
    queue.close()

    assert purged in (5, 6), "the worker counts what runs, if it is the first to record it"
    assert [bench.record(task, records=records).state for task in (runs, *wait)] == [TaskState.CANCELLED] * 6
    counts = open_records(records.url).totals("sample").counts
    assert (counts[TaskState.CANCELLED], counts[TaskState.SUCCEEDED], sum(counts.values())) == (6, 1, 7)
    assert bench.record(after, records=records).state is TaskState.SUCCEEDED


def test_running_task_of_a_cancelled_experiment_stops_at_the_workers_next_look(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.control.CONTROL_EVERY_S", 0.05)
    monkeypatch.setattr(bench, "open_queue", lambda: open_pair_with_folder(bench)[0])
    queue, records = open_pair_with_folder(bench)
    task = bench.function("wait", "slow")
    submit_tasks([task, bench.function("give")], queue, experiment="sample")
    with bench.running():
        bench.began("slow")
        cancel_experiment(stack_of(records, queue), "sample", now=datetime.now(UTC))
        assert wait_until(lambda: records.find(task.id, 1) is not None)
    queue.close()

    record = bench.record(task, records=records)
    assert (record.state, record.attempts) == (TaskState.CANCELLED, 1)


def test_running_task_that_is_cancelled_in_the_file_stops_however_long_its_lease(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.maintenance.RENEW_AT_LEAST_EVERY_S", 0.05)
    task = bench.function("wait", "slow")
    bench.put(task)
    with bench.running(lease=timedelta(hours=1)):
        bench.began("slow")
        assert bench.open_queue().purge() == 1
        assert wait_until(lambda: bool(bench.events("lease_lost")))
        assert wait_until(lambda: bool(bench.events("attempt_ended")))

    assert bench.record(task).state is TaskState.CANCELLED


def test_worker_that_cannot_read_what_is_covered_runs_none_of_it_and_asks_again(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.LONGEST_DELAY", timedelta(seconds=0.02))
    queue, records = open_pair_with_folder(bench)
    covered, free = [bench.function("give", n) for n in range(3)], bench.function("give", "free", experiment="other")
    submit_tasks(covered, queue, experiment="sample")
    submit_tasks([free], queue, experiment="other")
    cancel_experiment(stack_of(records, queue), "sample", now=datetime.now(UTC))
    read_part, failures = records.read_part, iter(range(3))

    def read(part: ManifestPart) -> list[str]:
        if next(failures, None) is not None:
            raise StoreUnavailable("the store is away")
        return read_part(part)

    monkeypatch.setattr(records, "read_part", read)
    bench.run(queue, idle_timeout=timedelta(seconds=1))

    assert (next(failures, None), len(bench.events("trouble"))) == (None, 1)
    assert [bench.record(task, records=records).state for task in covered] == [TaskState.CANCELLED] * 3
    assert bench.record(free, records=records).state is TaskState.SUCCEEDED


def test_worker_with_tasks_of_many_cancelled_experiments_reads_one_after_the_other(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, records = open_pair_with_folder(bench)
    names = [f"sweep-{number}" for number in range(5)]
    covered = [bench.function("give", n, key=f"{n}", experiment=name) for name in names for n in range(2)]
    for name in names:
        submit_tasks([task for task in covered if task.experiment == name], queue, experiment=name)
        cancel_experiment(stack_of(records, queue), name, now=datetime.now(UTC))
    free = bench.function("give", "free")
    submit_tasks([free], queue, experiment="sample")
    read_part, reading, most = records.read_part, [0], [0]

    def read(part: ManifestPart) -> list[str]:
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        time.sleep(0.05)
        try:
            return read_part(part)
        finally:
            reading[0] -= 1

    monkeypatch.setattr(records, "read_part", read)
    bench.run(queue, look_ahead=20, idle_timeout=timedelta(seconds=0.5))

    assert most == [1]
    assert [bench.record(task, records=records).state for task in covered] == [TaskState.CANCELLED] * 10
    assert bench.record(free, records=records).state is TaskState.SUCCEEDED


@pytest.mark.parametrize("worker_ahead_s", [-300, 300])
def test_worker_with_a_clock_of_its_own_runs_what_was_submitted_after_the_cancel(
    bench: WorkerBench, worker_ahead_s: float
) -> None:
    queue, records = open_pair_with_folder(bench)
    before, after = bench.function("give", "before"), bench.function("give", "after")
    submit_tasks([before], queue, experiment="sample")
    cancel_experiment(stack_of(records, queue), "sample", now=datetime.now(UTC))
    submit_tasks([after], queue, experiment="sample")

    clock = ShiftedClock(timedelta(seconds=worker_ahead_s))
    run_worker(queue, WorkerOptions(idle_timeout=timedelta(seconds=0.2)), clock=clock)
    queue.close()

    states = [bench.record(task, records=records).state for task in (before, after)]
    assert states == [TaskState.CANCELLED, TaskState.SUCCEEDED]


class ShiftedClock(SystemClock):
    def __init__(self, ahead: timedelta) -> None:
        self._ahead = ahead

    def now(self) -> datetime:
        return super().now() + self._ahead


def stack_of(records: RecordStore, queue: Queue) -> Bench:
    return Bench(records, queue, FakeClock(datetime.now(UTC)))  # type: ignore[arg-type]
