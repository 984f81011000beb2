"""Orders from several places at once, and what they cover whatever the clocks say: seen by what workers then run."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from runtime.cancel import cancel_experiment
from runtime.records import open_records
from runtime.submission import submit_tasks
from runtime.tasks import Task, TaskState
from runtime.testing import FakeClock
from tests.unit.worker_bench import Bench as WorkerBench
from tests.unit.worker_bench import bench, open_pair_with_folder
from tests.verbs_support import Bench

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")

CANCELLER = """
import sys, time
from datetime import UTC, datetime
from runtime.cancel import cancel_experiment
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
    assert [canceller.wait(120) for canceller in cancellers] == [0] * 4

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
