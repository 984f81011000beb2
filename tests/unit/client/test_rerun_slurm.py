"""`runtime retry` of jobs on Slurm: it resubmits the same job, and only the failed runs of its arrays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions
from runtime.client.jobs.retry import retry_job
from runtime.config import load_settings
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible
from runtime.jobs.spec import Array, JobSpec, JobState
from tests.copies_support import Copies
from tests.fakes.slurm import SlurmCommands
from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import wait_for


class Lab:
    """A work tree whose target `hpc` is a Slurm of stand-in commands."""

    def __init__(self, run: Terminal, slurm: SlurmCommands) -> None:
        self.run, self.slurm = run, slurm
        self.ran, self.mended = run.tree / "ran", run.tree / "mended"
        self.target()

    def target(self, *lines: str) -> None:
        settings = ['kind = "slurm"', f'records = "{self.run.tree}/records"', f'bin = "{self.slurm.bin}"', *lines]
        (self.run.tree / "runtime.toml").write_text("\n".join(["[targets.hpc]", *settings, ""]))

    def launch(self, failing: str, array: Array | None) -> JobHandle:
        """Launch a job; runs whose index is in `failing` fail until they are mended."""
        script = f"echo $RUNTIME_ARRAY_INDEX >> {self.ran}; case $RUNTIME_ARRAY_INDEX in {failing}) [ -e {self.mended} ] ;; esac"
        spec = JobSpec(command=("sh", "-c", script), array=array)
        job = launch(spec, "hpc", settings=load_settings(), options=LaunchOptions(base=self.run.tree))
        self.slurm.wait()
        return job

    def retry(self, job: JobHandle, **chosen: Any) -> int:
        epoch: int = retry_job(job, load_settings(), **chosen).epoch
        self.slurm.wait()
        return epoch

    def runs(self) -> list[int]:
        return sorted(map(int, self.ran.read_text().split()))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Lab]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield Lab(terminal, SlurmCommands(tmp_path / "slurm"))


def test_retry_queues_only_what_failed_with_the_words_of_the_launch_and_the_id_stays(lab: Lab) -> None:
    lab.target("max_array_size = 3")
    job = lab.launch("6|13", Array(count=9, offset=5, max_parallel=6))
    assert dict(job.status().counts) == {JobState.SUCCEEDED: 7, JobState.FAILED: 2}
    lab.target('partition = "another"')
    lab.mended.touch()

    said = lab.run("retry", job.id, "--failed", "--yes", "-o", "json")

    lab.slurm.wait()
    assert said.code == 0, said.err
    assert [each["job"] for each in said.json] == [job.id]
    assert dict(job.status().counts) == {JobState.SUCCEEDED: 9}
    assert lab.runs() == sorted([*range(5, 14), 6, 13])
    first, later = lab.slurm.submitted()[:3], lab.slurm.submitted()[3:]
    assert [each["array"] for each in later] == ["1%2", "2%2"]
    assert [each | {"array": "", "job-name": ""} for each in later] == [
        each | {"array": "", "job-name": ""} for each in (first[0], first[2])
    ]
    assert [each["job-name"] for each in later] == [f"{each['job-name']}.e2" for each in (first[0], first[2])]
    with pytest.raises(NotPossible, match="nothing of job"):
        retry_job(job, load_settings())


def test_retry_of_one_run_that_shares_a_task_with_others_runs_it_alone(lab: Lab) -> None:
    lab.target("max_submit = 2")
    job = lab.launch("1|2", Array(count=4))
    lab.mended.touch()

    lab.retry(job, indices=[1])

    assert [each.state for each in job.status(indices=True).indices] == [
        JobState.SUCCEEDED,
        JobState.SUCCEEDED,
        JobState.FAILED,
        JobState.SUCCEEDED,
    ]
    assert lab.runs() == [0, 1, 1, 2, 3]
    assert lab.slurm.submitted()[-1]["array"] == "0"


def test_retry_of_a_job_that_is_no_array_and_again_is_the_same_job(lab: Lab) -> None:
    job = lab.launch("*", None)
    for epoch in (2, 3):
        assert (job.state(), lab.retry(job)) == (JobState.FAILED, epoch)
    lab.mended.touch()
    lab.retry(job)

    assert (job.state(), job.attempts()) == (JobState.SUCCEEDED, [1, 2, 3, 4])
    assert [each["job-name"].rpartition(".")[2] for each in lab.slurm.submitted()] == ["0", "e2", "e3", "e4"]


def test_retry_keeps_how_a_run_ended_of_which_only_slurm_could_tell(lab: Lab) -> None:
    lab.target(f'setup = ["[ $SLURM_ARRAY_TASK_ID = 0 ] || [ -e {lab.mended} ]"]')
    job = lab.launch("0", Array(count=3))
    assert [each.reason for each in job.status(indices=True).indices] == [
        EndReason.APP_FAILED, EndReason.SETUP_FAILED, EndReason.SETUP_FAILED
    ]  # fmt: skip
    lab.mended.touch()

    lab.retry(job, indices=[1])

    assert [each.reason for each in job.status(indices=True).indices] == [
        EndReason.APP_FAILED, EndReason.SUCCEEDED, EndReason.SETUP_FAILED
    ]  # fmt: skip


RETRY = """
import sys
from runtime.jobs import lock
from runtime.config import load_settings
from runtime.client.jobs.handle import find_job
from runtime.client.jobs.retry import retry_job
lock.STILL_S = 1.0
retry_job(find_job(sys.argv[1]), load_settings())
"""


@pytest.mark.daily(2)
@pytest.mark.parametrize("point", ["reordered", "forgiven", "submitting", "resubmitted"])
def test_retry_killed_at_any_point_and_repeated_runs_each_failed_run_once(lab: Lab, copies: Copies, point: str) -> None:
    lab.target("max_array_size = 2")
    job = lab.launch("*", Array(count=3))
    assert dict(job.status().counts) == {JobState.FAILED: 3}
    lab.mended.touch()

    killed = copies.run(RETRY, [job.id], {**os.environ, "RUNTIME_FAULTS": f"launch.{point}=kill"})
    again = copies.run(RETRY, [job.id])

    assert (killed.returncode, again.returncode) == (-signal.SIGKILL, 0), again.stderr
    wait_for(lambda: dict(job.status().counts) == {JobState.SUCCEEDED: 3}, "the end of all runs")
    assert lab.runs() == sorted([*range(3), *range(3)])
