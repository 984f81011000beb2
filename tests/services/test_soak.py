"""Tasks, under SOAK=1 thousands of them, while something is killed or stopped after every few of them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.client.tasks.submit import submit
from runtime.tasks.model import TaskState, task_id
from runtime.worker.attempts import processes
from tests.fakes.faults import Fault
from tests.fakes.gcs import GcsServer
from tests.services.failure_support import EXPERIMENT, WorkerProcess, Yard, call
from tests.services_support import PubsubEmulator
from tests.shim_support import signal_all

pytestmark = [pytest.mark.slow, pytest.mark.soak]

FULL = os.environ.get("SOAK") == "1"
TASKS = 10_000 if FULL else 120
REMOTE_TASKS = int(os.environ.get("SOAK_TASKS", "2000" if FULL else "80"))
"""Tasks of the soak with remote parts, whose fakes and emulator are slow."""
SEED = int(os.environ.get("SOAK_SEED", "7"))
LONGEST_S = 1500.0
KILLS = 60 if FULL else 6


def test_tasks_with_a_worker_killed_again_and_again_none_is_lost_or_recorded_twice(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    try:
        lines = (call("short", f"s{n}", 0.01, key=f"k{n}") for n in range(TASKS))
        assert submit(lines, queue=yard.queue, experiment=EXPERIMENT, snapshot=False).new == TASKS
        yard.tasks = {task_id(EXPERIMENT, key=f"k{n}"): 1 for n in range(TASKS)}

        kills = kill_until_done(yard)

        assert kills >= KILLS // 6
        totals = yard.records.totals(EXPERIMENT, exact=True).counts
        assert totals[TaskState.SUCCEEDED] == TASKS, yard.logs()
        check_runs(yard)
        yard.check()
    finally:
        yard.close()


def kill_until_done(yard: Yard) -> int:
    """Keep four workers going, warm and cold ones, and kill one each time that some more tasks are done: by a clock, slow starts
    would prevent all progress, and a fast machine would be done before many kills."""
    chance = random.Random(7)
    options = [("--slots", "2", "--reuse-process"), ("--slots", "2"), ("--reuse-process",), ()]
    living: list[WorkerProcess] = [yard.start(*each) for each in options]
    kills, done_before, began = 0, 0, time.monotonic()
    while True:
        counts = yard.records.totals(EXPERIMENT).counts
        done = sum(counts[state] for state in TaskState if state.terminal)
        if done == TASKS:
            return kills
        assert time.monotonic() - began < LONGEST_S, f"{counts} after {LONGEST_S:.0f} s\n{yard.logs()}"
        if done >= done_before + TASKS // KILLS:
            done_before = done
            index = chance.randrange(len(living))
            living[index].kill()
            living[index] = yard.start(*options[index])
            kills += 1
        for index, worker in enumerate(living):
            assert worker.alive or worker.expected == {-signal.SIGKILL}, f"worker {index + 1} left:\n{worker.log()}"
        time.sleep(0.05)


def check_runs(yard: Yard) -> None:
    """Check that each record is of an attempt that ran, and that nothing ran again after its record."""
    records = {record.task_id: record for record in yard.records.records(EXPERIMENT)}
    began = Counter(run.token for run in yard.runs())
    assert max(began.values()) == 1
    assert {record.token for record in records.values()} <= began.keys()
    for run in yard.runs():
        record = records[task_id(EXPERIMENT, key=f"k{run.name.removeprefix('s')}")]
        assert run.at <= record.ended_at.timestamp(), f"{run.name} ran again after it was recorded"


PAGE_FAULTS = (Fault.REFUSE_503, Fault.REFUSE_429, Fault.CUT_OFF, Fault.RESET, Fault.EMPTY_PAGE)
PAGE_SIZE = 50


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """A bucket that fails one page of a listing in ten."""
    server = GcsServer().start()
    server.make_bucket("lab")
    server.page_size = PAGE_SIZE
    server.fail_some("LIST", 0.1, PAGE_FAULTS, seed=SEED)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.mark.timeout(1800 + REMOTE_TASKS // 4)
def test_tasks_survive_workers_guardians_and_submitters_that_die_or_stall_over_a_bucket_that_fails_pages(
    tmp_path: Path, pubsub_emulator: PubsubEmulator, bucket: GcsServer
) -> None:
    yard = Yard(tmp_path, emulator=pubsub_emulator, records="gs://lab/soak")
    try:
        lines = tmp_path / "tasks.jsonl"
        lines.write_text(
            "".join(json.dumps(call("short", f"s{n}", 0.01, key=f"k{n}")) + "\n" for n in range(REMOTE_TASKS))
        )
        yard.tasks = {task_id(EXPERIMENT, key=f"k{n}"): 1 for n in range(REMOTE_TASKS)}
        yard.experiments.add(EXPERIMENT)
        chaos = Chaos(yard, lines)

        chaos.run_until_waited()

        assert chaos.done >= REMOTE_TASKS // chaos.BETWEEN // 4
        shown = yard.cli("status", EXPERIMENT, "-o", "json")
        assert shown.returncode == 0, shown.stderr
        totals = json.loads(shown.stdout)["totals"]
        assert {state: n for state, n in totals.items() if n} == {"succeeded": REMOTE_TASKS}, shown.stdout
        bucket.forget_faults()
        yard.check()
    finally:
        yard.close()


class Chaos:
    """Keeps four workers and `submit --wait` running; kills one of them or stops it for a while after every few tasks.

    It goes by tasks that began and not by a clock, since processes that are killed faster than they start make no progress, and
    a fast machine would be done before anything is killed. It leaves `submit --wait` alone once all tasks have begun.
    """

    OPTIONS = tuple(
        (*each, "--lease", "2s")
        for each in (("--slots", "2", "--reuse-process"), ("--slots", "2"), ("--reuse-process",), ())
    )
    LONGEST_STALL_S = 8.0 if FULL else 3.0
    BETWEEN = 20

    def __init__(self, yard: Yard, lines: Path) -> None:
        self.yard = yard
        self.lines = lines
        self.done = 0
        self._chance = random.Random(SEED)
        self._workers = [yard.start(*each) for each in self.OPTIONS]
        self._submitters: list[subprocess.Popen[bytes]] = []
        self._submitter = self._submit()
        self._stalled: list[tuple[float, int]] = []

    def run_until_waited(self) -> None:
        """Continue until `submit --wait` returns, which means that all tasks have succeeded."""
        wanted = self.BETWEEN
        while (code := self._submitter.poll()) is None:
            if (begun := len(self.yard.runs())) >= wanted:
                wanted = begun + self.BETWEEN
                self._hit()
                self.done += 1
            self._wake(time.monotonic())
            time.sleep(0.05)
        self._wake(float("inf"))
        assert code == 0, (self.yard.folder / "submit.log").read_text()

    def _submit(self) -> subprocess.Popen[bytes]:
        with (self.yard.folder / "submit.log").open("ab") as log:
            arguments = ["submit", "--wait", "--no-snapshot", "--from", str(self.lines), "-e", EXPERIMENT]
            return subprocess.Popen(
                [sys.executable, "-m", "runtime", *arguments],
                cwd=self.yard.code,
                env=self.yard.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _hit(self) -> None:
        index = self._chance.randrange(len(self._workers))
        worker = self._workers[index]
        match self._chance.choice(("kill worker", "kill guardian", "kill submitter", "stop worker", "stop guardian")):
            case "kill worker":
                worker.kill()
                self._workers[index] = self.yard.start(*self.OPTIONS[index])
            case "kill guardian":
                signal_all(guardians(worker.pid))
            case "kill submitter":
                self._submitter.kill()
                self._submitter.wait()
                self._submitter = self._submit()
            case "stop worker":
                self._stall(worker.pid)
            case "stop guardian":
                for pid in guardians(worker.pid):
                    self._stall(pid)

    def _stall(self, pid: int) -> None:
        signal_all([pid], signal.SIGSTOP)
        self._stalled.append((time.monotonic() + self._chance.uniform(0, self.LONGEST_STALL_S), pid))

    def _wake(self, now: float) -> None:
        for until, pid in [each for each in self._stalled if each[0] <= now]:
            self._stalled.remove((until, pid))
            signal_all([pid], signal.SIGCONT)


def guardians(worker: int) -> list[int]:
    """List the processes that a worker has started; a starting worker may have none yet."""
    return [pid for pid, process in processes.read_table().items() if process.ppid == worker and not process.dead]
