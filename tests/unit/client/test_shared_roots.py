"""A job whose processes cannot be seen from here: in another container of this machine, or on a machine that shares the root."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.launchers.processes import base
from runtime.launchers.standing import ELSEWHERE, judge_job
from tests.conformance.test_launchers import kill_job
from tests.services_support import PATIENCE_S, wait_until
from tests.unit.client.test_job_artifacts import Here, here, read_log, settings, tree

__all__ = ["here", "settings", "tree"]

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/ns/pid").exists(), reason="this system has no namespaces of processes"
)

LIST = base._LIST
RUNS = ("sh", "-c", "echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || exec sleep 600")


@pytest.fixture
def started(here: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """A job has begun, and from now on this process is as if in another namespace of processes."""
    job = here.start(*RUNS)
    assert wait_until(lambda: read_log(job) == "attempt 1\n")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    monkeypatch.setattr(base, "_LIST", f"echo {boot.strip()}; echo 'pid:[7]'; true")
    return here


def test_job_that_lives_in_another_container_is_found_and_not_begun_again(
    started: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.runs.STILL_S", PATIENCE_S)
    (job,) = started.jobs
    _, (native,) = judge_job(job.entry(), job.target, job.launcher, job.host)
    assert native.raw == ELSEWHERE

    again = started.start(*RUNS)

    assert (again.id, again.attempts()) == (job.id, [1])
    assert started.said[-1].startswith(f"job `{job.id}` lives where it began")
    assert len(job.entry().natives) == 1


def test_job_of_a_container_that_is_gone_goes_on(started: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = started.jobs
    kill_job(job)
    monkeypatch.setattr("runtime.jobs.runs.STILL_S", 0.0)

    again = started.start(*RUNS)
    monkeypatch.setattr(base, "_LIST", LIST)
    again.wait(timeout=PATIENCE_S)

    assert (again.id, again.attempts()) == (job.id, [1, 2])
