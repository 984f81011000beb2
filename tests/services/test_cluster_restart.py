"""`runtime cluster restart` of a real head with two jobs and a member, killed at each of its steps and run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from infra.render.autoscaler import render_autoscaler
from runtime.client.jobs.handle import JobHandle
from runtime.clusters.restart import RestartStep
from runtime.end_reasons import EndReason
from runtime.jobs.spec import JobResources, JobState, Tpu
from runtime.outputs import RecordsOutput, encode_outputs, parse_outputs
from runtime.testing.launcher_bench import Bench, LauncherCase, read_log
from tests.services.head_support import LabHead, pool, require_ray
from tests.services_support import PATIENCE_S, MotoServer, wait_until

pytestmark = pytest.mark.service

COMMAND = (
    "trap 'echo saved; exit 0' TERM; echo attempt $RUNTIME_ATTEMPT; "
    "while [ ! -e {folder}/go ]; do sleep 0.2; done; echo end"
)
BEFORE = [RestartStep.HOLD, RestartStep.ASK, RestartStep.AWAIT_ENDS, RestartStep.FORGET]
AFTER = [RestartStep.REAP, RestartStep.AWAIT_MEMBERS, RestartStep.TAKE_UP, RestartStep.RELEASE]


@pytest.fixture(scope="module")
def shared_head(moto_process: MotoServer) -> Iterator[LabHead]:
    require_ray()
    pools = {"one": pool("v4-8", max=1, cpus=1), "two": pool("v4-16", max=1, cpus=1)}
    environ = {**moto_process.environment, "RAY_JOB_STOP_WAIT_TIME_S": "150"}
    with LabHead(pools, environ=environ) as running:
        instance = running.server.instances[running.cluster.head]
        instance["metadata"] = {"items": [{"key": "ray-autoscaler", "value": render_autoscaler(running.cluster)}]}
        yield running


@pytest.fixture
def head(shared_head: LabHead) -> Iterator[LabHead]:
    yield shared_head
    shared_head.clear()


@pytest.fixture
def environment(head: LabHead, moto_server: MotoServer, tmp_path: Path) -> dict[str, str]:
    """Variables of an operator's commands; the contract names a bucket for records."""
    import boto3

    outputs = parse_outputs(json.loads(head.contract.read_text()))
    name = f"lab-{uuid.uuid4().hex[:8]}"
    boto3.client("s3", endpoint_url=moto_server.url, region_name="us-east-1").create_bucket(Bucket=name)
    records = RecordsOutput(url=f"s3://{name}")
    head.contract.write_text(encode_outputs(replace(outputs, records=records)))
    return {**head.environment, **moto_server.environment, "XDG_DATA_HOME": str(tmp_path / "data")}


@pytest.fixture
def bench(
    head: LabHead, environment: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    url = parse_outputs(json.loads(head.contract.read_text())).records
    assert url is not None
    case = LauncherCase(
        kind="ray",
        settings={"address": head.address, "python": sys.executable},
        records=f"{url.url}/jobs-of-ray/{head.cluster.key}",
        environ=environment,
        patience_s=PATIENCE_S,
    )
    made = Bench(case, tmp_path / "bench")
    yield made
    made.close()


def restart(
    head: LabHead,
    environment: Mapping[str, str],
    *words: str,
    faults: str = "",
    until: Callable[[], bool] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, or kill it at once when `until` holds."""
    with subprocess.Popen(
        [sys.executable, "-m", "runtime", "cluster", "restart", "--yes", "-o", "json", *head.ssh_words, *words],
        env={**environment, "RUNTIME_FAULTS": faults},
        cwd=head.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            if until is not None:
                assert wait_until(until)
                running.kill()
            out, err = running.communicate()
        finally:
            running.kill()
    return subprocess.CompletedProcess([], running.returncode, out, err)


def start(bench: Bench, folder: Path) -> list[JobHandle]:
    command = COMMAND.format(folder=folder)
    made = [
        bench.start(
            "sh",
            "-c",
            command,
            name=name,
            resources=JobResources(cpus=1, tpu=Tpu(type=type_)),
            grace_period=timedelta(seconds=20),
        )
        for name, type_ in (("one", "v4-8"), ("two", "v4-16"))
    ]
    assert wait_until(lambda: all("attempt 1\n" in read_log(job) for job in made))
    return made


def check_end(bench: Bench, jobs: list[JobHandle], folder: Path, *, attempts: int = 2) -> None:
    """Both jobs end once, in their last attempt, and the mark is gone."""
    (folder / "go").touch()
    ends = [bench.end(job) for job in jobs]
    said = [read_log(job) for job in jobs]
    assert [(each.state, each.reason) for each in ends] == [(JobState.SUCCEEDED, EndReason.SUCCEEDED)] * 2, said
    assert [job.attempts() for job in jobs] == [[*range(1, attempts + 1)]] * 2
    assert [max(each.epoch for each in job.entry().natives) for job in jobs] == [attempts] * 2
    assert jobs[0].files.read("restart/hold") is None


def test_restart_that_is_killed_at_each_step_and_run_again_takes_up_each_job_once_and_has_its_member_back(
    head: LabHead, environment: dict[str, str], bench: Bench, tmp_path: Path
) -> None:
    added = head.run("add", "v4-8", "--name", "eval", "--capacity", "on_demand", "--address", head.address)
    assert added.returncode == 0, added.stderr
    jobs = start(bench, tmp_path)
    session = head.read("/api/version")["session_name"]

    def waits_for_head() -> bool:
        return '"commanded": true' in (jobs[0].files.read("restart/hold") or b"").decode()

    killed = [restart(head, environment, faults=f"restart.{step}=kill") for step in BEFORE]
    killed.append(restart(head, environment, until=waits_for_head))
    killed += [restart(head, environment, faults=f"restart.{step}=kill") for step in AFTER]

    # The last one had removed the mark, and so it was done.
    assert [each.returncode for each in killed] == [-signal.SIGKILL] * len(killed), killed[-1].stderr
    assert head.read("/api/version")["session_name"] != session
    assert [each.stderr.count("restarting Ray on the head") for each in killed].count(1) == 1
    check_end(bench, jobs, tmp_path)
    # The job on a TPU of the member's type ran there both times.
    assert (len(head.made), head.nodes()[0], head.count_hosts()) == (2, "eval", 3)


@pytest.mark.nightly
def test_restart_that_was_given_up_and_then_done_says_what_became_of_each_job(
    head: LabHead, environment: dict[str, str], bench: Bench, tmp_path: Path
) -> None:
    jobs = start(bench, tmp_path)
    elsewhere = Bench(replace(bench.case, records=str(tmp_path / "elsewhere")), tmp_path / "other")
    waits = JobResources(cpus=1000)
    stray = elsewhere.start("true", resources=waits, grace_period=timedelta(seconds=20))
    assert wait_until(lambda: stray.state() is JobState.PENDING)
    session = head.read("/api/version")["session_name"]
    taken_up = {job.id: "taken_up" for job in jobs}

    killed = restart(head, environment, faults="restart.ask=kill")
    assert wait_until(lambda: stray.state().terminal)
    reason = stray.status().reason
    given_up = restart(head, environment, "--give-up")

    assert (killed.returncode, reason) == (-signal.SIGKILL, EndReason.LOST)
    assert given_up.returncode == 0, given_up.stderr
    assert ": 3 jobs asked to end, Ray not restarted\n" in given_up.stderr
    assert f"({stray.id}-e1-p0-" in given_up.stderr
    assert {each["job"]: each["done"] for each in json.loads(given_up.stdout)} == taken_up
    assert head.read("/api/version")["session_name"] == session
    assert wait_until(lambda: all("attempt 2\n" in read_log(job) for job in jobs))
    assert elsewhere.start("true", resources=waits, grace_period=timedelta(seconds=20)).id == stray.id
    assert [each.epoch for each in stray.entry().natives] == [1, 2]

    done = restart(head, environment)

    assert done.returncode == 0, done.stderr
    assert {each["job"]: each["done"] for each in json.loads(done.stdout)} == taken_up
    assert stray.status().reason is EndReason.LOST
    check_end(bench, jobs, tmp_path, attempts=3)
    elsewhere.close()


def test_restart_refuses_while_a_job_of_others_runs_and_changes_nothing(
    head: LabHead, environment: dict[str, str], bench: Bench, tmp_path: Path
) -> None:
    ray = Path(sys.executable).with_name("ray")
    submit: list[str] = [
        str(ray),
        "job",
        "submit",
        "--address",
        head.address,
        "--submission-id",
        "theirs",
        "--no-wait",
        "--",
        "sleep",
        "600",
    ]
    subprocess.run(submit, env={**os.environ}, check=True, capture_output=True)
    assert wait_until(lambda: (head.read("/api/jobs/theirs") or {}).get("status") == "RUNNING")
    session = head.read("/api/version")["session_name"]

    refused = restart(head, environment)

    assert refused.returncode == 2
    assert (
        "error: 1 job would be lost that the runtime did not start\n  `theirs`, RUNNING: sleep 600\n" in refused.stderr
    )
    assert head.read("/api/version")["session_name"] == session

    done = restart(head, environment, "--drop-foreign")

    assert done.returncode == 0, done.stderr
    assert head.read("/api/version")["session_name"] != session
