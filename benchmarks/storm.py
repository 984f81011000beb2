"""A storm of preemptions: a fleet of workers on a real Ray head, whose TPUs are taken away while it does tasks.

    nice python -m benchmarks.storm --nodes 20 --tasks 500 --seconds 180 --every 2

Ray, its autoscaler, our head, nodes, workers and reaper are real; the TPU API and Pub/Sub are fakes on this machine. Each
node is a whole raylet with its agents, about 350 MB and several seconds of a CPU at its start: on a small machine fewer nodes
are up at a time than the pool allows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.tasks.model import TaskState, task_id
from tests.services.failure_support import EXPERIMENT, MARK, ROOT, Yard, call
from tests.services.head_support import LabHead, pool
from tests.services_support import PubsubEmulator

REAP_S = 5.0
"""Pause between two runs of the reaper; a head's timer waits longer."""
LOOK_S = 0.2
LONGEST_S = 3600.0
ACCELERATOR = "v4-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """What a storm left."""

    tasks: int
    done: int
    runs: int
    """How often a task was begun."""
    recorded_twice: int
    """Tasks that were begun again after their record was there, or whose record is of no run."""
    preemptions: int
    made: int
    """Nodes that became ready."""
    removed: int
    """Nodes that the reaper removed."""
    left_behind: int
    """Nodes at the end that Google lists, and that no machine stands for."""
    most_nodes: int
    """Nodes of which Ray knew at a time."""
    attempts: int
    """Attempts of the fleet's workers."""
    workers_lost: int
    """Workers of the fleet that ended for good."""
    seconds: float


class Field:
    """The head, the queue, the fleet, and the reaper in its thread."""

    def __init__(self, folder: Path, emulator: PubsubEmulator, *, nodes: int) -> None:
        self.yard = Yard(folder / "yard", emulator=emulator)
        self.head = LabHead({"v4": pool(ACCELERATOR, max=nodes, cpus=1)})
        self.project = folder / "project"
        self.project.mkdir()
        self.removed: set[str] = set()
        self.preempted: list[str] = []
        self.most_nodes = 0
        self._ended = threading.Event()
        self._reaper = threading.Thread(target=self._reap_often, daemon=True)

    def __enter__(self) -> Field:
        self.head.__enter__()
        self._reaper.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._ended.set()
        if self._reaper.is_alive():
            self._reaper.join()
        self.head.close()
        self.yard.close()

    def launch_fleet(self, count: int) -> str:
        """Launch the workers; returns their job."""
        (self.project / "runtime.toml").write_text(
            f'[targets.tpu]\nkind = "ray"\naddress = "{self.head.address}"\npython = "{sys.executable}"\n'
            f'records = "{self.project}/records"\n'
        )
        names = ("RUNTIME_OUTPUTS", "PUBSUB_EMULATOR_HOST", "RUNTIME_PREEMPTION_NOTICES", MARK)
        variables = {name: self.yard.environment[name] for name in names}
        variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{self.yard.code}"
        words = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        said = self.call(
            *(
                "worker",
                "--on",
                "tpu",
                "--count",
                str(count),
                "--cpus",
                "1",
                "--set",
                f"resources.tpu.type={ACCELERATOR}",
            ),
            *("--lease", "10s", "--reuse-process", "-o", "json", *words),
        )
        return str(json.loads(said)["job"])

    def call(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "runtime", *words],
            cwd=self.project,
            env=self.yard.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def count_done(self) -> int:
        counts = self.yard.records.totals(EXPERIMENT, exact=True).counts
        return sum(counts.get(state, 0) for state in TaskState if state.terminal)

    def preempt_one(self, chance: random.Random) -> bool:
        """Take away one of the nodes that Ray counts on, if there is one."""
        there = [name for name in self.head.nodes() if all(each.process for each in self.head.hosts(name))]
        there = [name for name in there if self.head.hosts(name)]
        self.most_nodes = max(self.most_nodes, len(there))
        if not there:
            return False
        name = chance.choice(there)
        self.head.preempt(name)
        self.preempted.append(name)
        return True

    def reap(self) -> None:
        done = self.head.reap()
        self.removed |= {line.split("\t")[1] for line in done.stdout.splitlines() if line.count("\t") >= 2}

    def _reap_often(self) -> None:
        while not self._ended.wait(REAP_S):
            self.reap()


def run_storm(
    folder: Path,
    emulator: PubsubEmulator,
    *,
    nodes: int,
    tasks: int,
    task_s: float,
    strikes: Callable[[Field, float], bool],
    tell: Callable[[str], None] = lambda text: None,
) -> Storm:
    """Do `tasks` on a fleet of `nodes` workers; `strikes(field, seconds)` is asked often whether a node goes now."""
    chance, began = random.Random(7), time.monotonic()
    with Field(folder, emulator, nodes=nodes) as field:
        field.yard.submit(call("short", f"s{n}", task_s, key=f"k{n}") for n in range(tasks))
        job = field.launch_fleet(nodes)
        started, said = time.monotonic(), time.monotonic()
        while (done := field.count_done()) < tasks or strikes(field, time.monotonic() - started):
            now = time.monotonic()
            assert now - began < LONGEST_S, f"{done} of {tasks} tasks after {LONGEST_S:.0f} s"
            if strikes(field, now - started):
                field.preempt_one(chance)
            if now - said > 15:
                said = now
                tell(
                    f"{now - began:.0f} s: {done} tasks done, {len(field.preempted)} preemptions, {field.head.nodes()=}"
                )
            time.sleep(LOOK_S)
        seconds = time.monotonic() - began
        status = json.loads(field.call("status", job, "-o", "json"))
        lost = sum(each["state"] in ("failed", "succeeded") for each in status["indices"])
        attempts = sum(len(each.get("attempts") or ()) for each in status["indices"])
        field.call("cancel", job, "--yes")
        field.reap()
        runs = field.yard.runs()
        return Storm(
            tasks=tasks,
            done=done,
            runs=len(runs),
            recorded_twice=_count_twice(field.yard),
            preemptions=len(field.preempted),
            made=len(field.head.made),
            removed=len(field.removed),
            left_behind=len(field.head.list_strays()),
            most_nodes=field.most_nodes,
            attempts=attempts,
            workers_lost=lost,
            seconds=round(seconds, 1),
        )


def _count_twice(yard: Yard) -> int:
    records = Counter(record.task_id for record in yard.records.records(EXPERIMENT))
    ends = {record.task_id: record for record in yard.records.records(EXPERIMENT)}
    tokens = {run.token for run in yard.runs()}
    late = {
        task
        for run in yard.runs()
        if (task := task_id(EXPERIMENT, key=f"k{run.name.removeprefix('s')}")) in ends
        and run.at > ends[task].ended_at.timestamp()
    }
    twice = {task for task, count in records.items() if count > 1}
    unknown = {task for task, record in ends.items() if record.token not in tokens}
    return len(late | twice | unknown)


def strike_every(seconds: float, every: float) -> Callable[[Field, float], bool]:
    """One preemption for each `every` seconds that have passed, until `seconds` have."""
    return lambda field, passed: len(field.preempted) < int(min(passed, seconds) / every)


def strike_by_progress(times: int, tasks: int) -> Callable[[Field, float], bool]:
    """`times` preemptions, each after some more of the tasks are done."""
    return lambda field, passed: (
        len(field.preempted) < times and field.count_done() >= tasks * (len(field.preempted) + 1) // (times + 2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=__doc__)
    parser.add_argument("--nodes", type=int, default=20, help="TPUs of the pool, and workers of the fleet (20)")
    parser.add_argument("--tasks", type=int, default=500, help="(500)")
    parser.add_argument("--task-s", type=float, default=1.0, help="how long a task takes (1)")
    parser.add_argument("--seconds", type=float, default=180, help="how long nodes are preempted (180)")
    parser.add_argument("--every", type=float, default=2, help="seconds between two preemptions (2)")
    given = parser.parse_args()
    emulator = PubsubEmulator().start()
    os.environ |= emulator.environment
    try:
        with tempfile.TemporaryDirectory(prefix="storm-") as folder:
            storm = run_storm(
                Path(folder),
                emulator,
                nodes=given.nodes,
                tasks=given.tasks,
                task_s=given.task_s,
                strikes=strike_every(given.seconds, given.every),
                tell=lambda text: print(text, flush=True),
            )
    finally:
        emulator.kill()
    for name, value in asdict(storm).items():
        print(f"{name.replace('_', ' '):16} {value}")
    sys.exit(0 if storm.done == storm.tasks and not storm.recorded_twice and not storm.left_behind else 1)


if __name__ == "__main__":
    main()
