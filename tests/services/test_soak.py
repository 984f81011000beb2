"""Ten thousand tasks while a worker is killed every second."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from runtime.submission import submit
from runtime.tasks import TaskState, task_id
from tests.services.failure_support import EXPERIMENT, WorkerProcess, Yard, call

pytestmark = [pytest.mark.service, pytest.mark.slow]

TASKS = 10_000
KILL_EVERY_S = 1.0
LONGEST_S = 480.0


@pytest.mark.timeout(600)
def test_ten_thousand_tasks_with_a_worker_killed_every_second_none_is_lost_or_recorded_twice(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    try:
        lines = (call("short", f"s{n}", 0.01, key=f"k{n}") for n in range(TASKS))
        assert submit(lines, queue=yard.queue, experiment=EXPERIMENT, snapshot=False).new == TASKS
        yard.tasks = {task_id(EXPERIMENT, key=f"k{n}"): 1 for n in range(TASKS)}

        kills = kill_until_done(yard)

        assert kills >= 10
        totals = yard.records.totals(EXPERIMENT, exact=True).counts
        assert totals[TaskState.SUCCEEDED] == TASKS, yard.logs()
        check_runs(yard)
        yard.check()
    finally:
        yard.close()


def kill_until_done(yard: Yard) -> int:
    """Keep four workers going, warm and cold ones, and kill one of them each second."""
    chance = random.Random(7)
    options = [("--slots", "2", "--reuse-process"), ("--slots", "2"), ("--reuse-process",), ()]
    living: list[WorkerProcess] = [yard.start(*each) for each in options]
    kills, began, next_kill = 0, time.monotonic(), time.monotonic() + KILL_EVERY_S
    while True:
        counts = yard.records.totals(EXPERIMENT).counts
        if sum(counts[state] for state in TaskState if state.terminal) == TASKS:
            return kills
        assert time.monotonic() - began < LONGEST_S, f"{counts} after {LONGEST_S:.0f} s\n{yard.logs()}"
        if time.monotonic() >= next_kill:
            next_kill += KILL_EVERY_S
            index = chance.randrange(len(living))
            living[index].kill()
            living[index] = yard.start(*options[index])
            kills += 1
        for index, worker in enumerate(living):
            assert worker.alive or worker.expected == {-signal.SIGKILL}, f"worker {index + 1} left:\n{worker.log()}"
        time.sleep(0.05)


def check_runs(yard: Yard) -> None:
    """Each record is of an attempt that ran, and nothing ran again once it was recorded."""
    records = {record.task_id: record for record in yard.records.records(EXPERIMENT)}
    began = Counter(run.token for run in yard.runs())
    assert max(began.values()) == 1
    assert {record.token for record in records.values()} <= began.keys()
    for run in yard.runs():
        record = records[task_id(EXPERIMENT, key=f"k{run.name.removeprefix('s')}")]
        assert run.at <= record.ended_at.timestamp(), f"{run.name} ran again after it was recorded"
