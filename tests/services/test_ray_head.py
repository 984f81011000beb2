"""Jobs on a real Ray head that our own script starts, and whose autoscaler makes TPUs through the fake API as they ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.client.jobs.status import read_attempts
from runtime.end_reasons import EndReason
from runtime.jobs.spec import JobResources, JobState, Tpu
from runtime.testing.launcher_bench import Bench, read_log
from tests.services.head_support import LabHead, pool, require_ray
from tests.services_support import PATIENCE_S, wait_until

pytestmark = pytest.mark.service

START_TIMEOUT_S = 60
"""How long a driver may take to start, as the tests' head has it; a job may wait longer for its nodes."""
ONE = JobResources(cpus=1, tpu=Tpu(type="v4-8"))
TWO = JobResources(cpus=1, tpu=Tpu(type="v4-16"))


@pytest.fixture(scope="module")
def head() -> Iterator[LabHead]:
    require_ray()
    pools = {"one": pool("v4-8", max=2, cpus=1), "two": pool("v4-16", max=1, cpus=1)}
    with LabHead(pools, environ={"RAY_JOB_START_TIMEOUT_SECONDS": str(START_TIMEOUT_S)}) as running:
        yield running


@pytest.fixture
def bench(head: LabHead, tmp_path: Path) -> Iterator[Bench]:
    with head.bench(tmp_path) as made:
        yield made


# a launch by the command line


JOB = """\
name: fit
command: [sh, -c, "echo seed $SEED; echo $SEED >$RUNTIME_OUTPUT_DIR/seed"]
array: {seeds: 2}
resources: {cpus: 1, memory: 512MiB}
time_limit: 10m
retry: {failure: 1}
"""


@dataclass
class Project:
    folder: Path

    def call(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "runtime", *words],
            cwd=self.folder,
            env={
                **os.environ,
                "XDG_DATA_HOME": str(self.folder / "data"),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def carry_out(self, target: str, *words: str) -> dict[str, Any]:
        """Launch the job file there; returns what a user sees of it at the end."""
        job = json.loads(self.call("launch", "--on", target, "-f", "job.yaml", "-o", "json", *words))["job"]
        self.call("wait", job)
        status = json.loads(self.call("status", job, "-o", "json"))
        self.call("fetch", job, target)
        return {
            "state": status["state"],
            "runs": [(each["index"], each["state"], each.get("reason")) for each in status["indices"]],
            "logs": [self.call("logs", job, "--index", str(index)) for index in (0, 1)],
            "files": {
                str(path.relative_to(self.folder / target)): path.read_text()
                for path in sorted((self.folder / target).rglob("*"))
                if path.is_file()
            },
        }


@pytest.fixture
def project(head: LabHead, tmp_path: Path) -> Project:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    (folder / "runtime.toml").write_text(
        f'[targets.tpu]\nkind = "ray"\naddress = "{head.address}"\npython = "{sys.executable}"\n'
        f'records = "{tmp_path}/records"\n'
    )
    return Project(folder)


def test_job_file_on_a_head_makes_tpus_and_looks_like_the_same_file_on_this_machine(
    head: LabHead, project: Project
) -> None:
    here = project.carry_out("local")

    there = project.carry_out("tpu", "--set", "resources.tpu.type=v4-8")

    assert there == here
    assert there["logs"] == ["seed 0\n", "seed 1\n"]
    assert [body["acceleratorType"] for body in head.server.created] == ["v4-8"] * 2
    assert head.server.refused == []


# what is lost


def test_run_whose_tpu_is_preempted_goes_on_on_one_that_is_made_instead(head: LabHead, bench: Bench) -> None:
    command = "echo on $TPU_NAME >&2; echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600"
    job = bench.start("sh", "-c", command, resources=ONE)
    assert wait_until(lambda: "attempt 1\n" in read_log(job))
    name = read_log(job).split()[1]

    for each in head.nodes():
        head.preempt(each)
    reaped = head.reap()

    assert (reaped.returncode, name in reaped.stdout) == (0, True), reaped
    assert bench.end(job).state is JobState.SUCCEEDED
    reasons = [each.reason for each in read_attempts(job.files, job.id, 0)]
    assert reasons == [EndReason.NODE_FAILED, EndReason.SUCCEEDED]
    assert name not in head.nodes()


def test_slice_that_loses_a_host_ends_whole_and_its_run_begins_again_whole(head: LabHead, bench: Bench) -> None:
    command = (
        "trap 'echo ended; exit 1' TERM; echo node $RUNTIME_NODE_RANK in attempt $RUNTIME_ATTEMPT on $TPU_WORKER_ID; "
        "[ $RUNTIME_ATTEMPT = 2 ] || while :; do sleep 0.2; done"
    )
    job = bench.start("sh", "-c", command, resources=TWO, grace_period=timedelta(seconds=20))
    assert wait_until(lambda: all("attempt 1" in read_log(job, rank=rank) for rank in (0, 1)))
    (name,) = [each for each in head.nodes() if len(head.hosts(each)) == 2]

    head.kill_host(name, 1)
    assert wait_until(lambda: "ended" in read_log(job, rank=0))
    # Google lists a host less, and the reaper does not wait as long as on a head.
    head.server.nodes[f"{head.server.parent}/nodes/{name}"]["networkEndpoints"].pop()
    reaps = [head.reap("--longest-wait", "0s") for _ in range(2)]

    assert any(name in each.stdout for each in reaps), reaps
    assert bench.end(job).state is JobState.SUCCEEDED
    assert job.attempts() == [1, 2]
    logs = [read_log(job, rank=rank, attempt=2) for rank in (0, 1)]
    assert logs == ["node 0 in attempt 2 on 0\n", "node 1 in attempt 2 on 1\n"]


def test_job_of_a_head_that_was_killed_is_taken_up_once_by_keepers(head: LabHead, bench: Bench) -> None:
    from runtime.client.jobs.reconcile import keep_target
    from runtime.client.jobs.targets import make_context, open_target

    command = "echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600"
    job = bench.start("sh", "-c", command, resources=ONE, grace_period=timedelta(seconds=2))
    assert wait_until(lambda: read_log(job) == "attempt 1\n")

    head.kill_head()
    head.start_head()
    with open_target(bench.target, make_context(bench.settings)) as place:
        done = [[each.done for each in keep_target(place, bench.settings).jobs] for _ in range(2)]

    assert done == [["taken_up"], ["left"]]
    assert bench.end(job).state is JobState.SUCCEEDED
    assert read_log(job) == "attempt 1\nattempt 2\n"
    assert [each.epoch for each in job.entry().natives] == [1, 2]


# waiting


@pytest.mark.nightly
def test_job_waits_for_its_tpu_longer_than_a_driver_may_take_to_start(head: LabHead, bench: Bench) -> None:
    head.hold_creation()
    for each in head.nodes():
        head.preempt(each)
    head.reap()
    try:
        job = bench.start("true", resources=ONE)
        native = job.entry().natives[0].native_id
        started = time.monotonic()
        assert wait_until(lambda: time.monotonic() > started + START_TIMEOUT_S + 5, every_s=1)
        status, natives = job.look()
        driver = head.read(f"/api/jobs/{native}")
    finally:
        head.finish_creation()

    assert (status.state, [each.raw for each in natives]) == (JobState.PENDING, ["RUNNING", "waiting"])
    assert driver["status"] == "RUNNING"
    assert bench.end(job).state is JobState.SUCCEEDED
