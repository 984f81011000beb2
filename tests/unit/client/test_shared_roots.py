"""A job whose processes cannot be seen from here: in another container of this machine, or on a machine that shares the root."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.client.jobs.explain import read_facts
from runtime.client.jobs.gc import find_garbage, remove_all
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.reconcile import keep_target
from runtime.client.jobs.retry import retry_job
from runtime.client.jobs.status import read_job, read_target
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible
from runtime.jobs.ledger import job_folder
from runtime.jobs.plan import owner_name
from runtime.jobs.spec import JobState
from runtime.launchers.job_status import ELSEWHERE, LIVES, judge_job
from runtime.launchers.processes import base
from runtime.system import system
from tests.conformance.test_launchers import kill_job
from tests.services_support import PATIENCE_S, wait_until
from tests.shim_support import shims_with, wait_for
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
    monkeypatch.setattr(base, "list_shims", lambda *_: [])
    monkeypatch.setattr(base.ProcessLauncher, "clear", lambda *_: [])
    return here


@pytest.fixture
def alive(started: Here) -> Iterator[JobHandle]:
    """The same job, whose counter moves much faster than it would, for as long as it has no result."""
    (job,) = started.jobs
    beat = Path(job.files.root, job_folder(job.id), "runs/0/a0001/beat")
    over = threading.Event()

    def live() -> None:
        count = 100
        while not over.wait(0.1) and beat.exists():
            count += 1
            beat.write_text(str(count))

    thread = threading.Thread(target=live)
    thread.start()
    yield job
    over.set()
    thread.join()


@pytest.fixture
def dead(started: Here, monkeypatch: pytest.MonkeyPatch) -> JobHandle:
    """The same job, of which nothing lives."""
    (job,) = started.jobs
    kill_job(job)
    monkeypatch.setattr("runtime.jobs.log_follower.STILL_S", 0.0)
    return job


def collect(job: JobHandle) -> list[tuple[str, list[str]]]:
    found = find_garbage(job, owner=owner_name(), older_than=timedelta(0), now=system.now())
    left = remove_all(found, job, owner=owner_name())
    return [(each.kind, said) for each, said in left if each.kind not in ("tree", "code")]


def test_job_that_lives_in_another_container_is_found_and_not_begun_again(
    started: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.log_follower.STILL_S", PATIENCE_S)
    (job,) = started.jobs
    _, (native,) = judge_job(job.entry(), job.target, job.launcher, job.host)
    assert native.raw == ELSEWHERE

    again = started.start(*RUNS)

    assert (again.id, again.attempts()) == (job.id, [1])
    assert started.said[-1] == f"job `{job.id}`: {LIVES}, and goes on there"
    assert len(job.entry().natives) == 1


def test_job_of_a_container_that_is_gone_goes_on(started: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = started.jobs
    kill_job(job)
    monkeypatch.setattr("runtime.jobs.log_follower.STILL_S", 0.0)

    again = started.start(*RUNS)
    monkeypatch.setattr(base, "_LIST", LIST)
    again.wait(timeout=PATIENCE_S)

    assert (again.id, again.attempts()) == (job.id, [1, 2])


def test_job_that_lives_in_another_container_is_no_garbage(alive: JobHandle) -> None:
    assert collect(alive) == []
    assert alive.attempts() == [1]


def test_retry_of_a_job_that_lives_in_another_container_is_refused(started: Here, alive: JobHandle) -> None:
    with pytest.raises(NotPossible, match="is running: it is retried when all of it has ended"):
        retry_job(alive, started.settings, indices=[0])

    assert len(alive.entry().natives) == 1


def test_retry_of_a_job_of_a_container_that_is_gone_goes_on(
    started: Here, dead: JobHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    retry_job(dead, started.settings)
    monkeypatch.setattr(base, "_LIST", LIST)

    assert dead.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED


def test_cancel_of_a_job_in_another_container_waits_until_it_has_ended(alive: JobHandle) -> None:
    left = alive.cancel()

    assert (left, alive.entry().outcomes[0].reason) == ([], EndReason.CANCELLED)
    wait_for(lambda: not shims_with(alive.id), "the end of its shim")


def test_cancel_of_a_job_in_another_container_that_does_not_heed_it_says_so(
    alive: JobHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.client.jobs.handle.UNSEEN_S", 0.0)
    monkeypatch.setattr(JobHandle, "_mark_cancelled", lambda *_: None)

    (left,) = alive.cancel()

    assert left == f"job `{alive.id}`: {LIVES}, and does not heed its cancel mark; run `runtime cancel` there"


def test_cancel_of_a_job_of_a_container_that_is_gone_is_an_end(dead: JobHandle) -> None:
    left = dead.cancel()

    assert (left, dead.entry().outcomes[0].reason) == ([], EndReason.CANCELLED)
    assert collect(dead) == [("job", [])]


def test_keeper_leaves_a_job_that_lives_in_another_container(started: Here, alive: JobHandle) -> None:
    (kept,) = keep_target(alive, started.settings).jobs

    assert (kept.done, kept.seen) == ("left", LIVES)
    assert len(alive.entry().natives) == 1


def test_status_of_a_job_that_cannot_be_seen_is_unknown_until_it_was_watched(alive: JobHandle) -> None:
    view = read_job(alive)
    (line,) = read_target(alive, now=system.now()).jobs

    said = "it began on another machine, or in another container of `localhost`, and cannot be seen from here"
    assert (view.state, view.indices[0].message, view.natives[0].state, line.state) == (
        JobState.UNKNOWN,
        said,
        JobState.UNKNOWN,
        JobState.UNKNOWN,
    )
    assert wait_until(lambda: alive.state() is JobState.RUNNING)
    assert read_facts(alive, watch=lambda text: None).status.state is JobState.RUNNING
    with pytest.raises(TimeoutError):
        alive.wait(timeout="1s")


def test_status_of_a_job_of_a_container_that_is_gone_is_lost_once_it_was_watched(dead: JobHandle) -> None:
    assert dead.wait(timeout=PATIENCE_S).reason is EndReason.LOST


def test_commands_of_a_job_of_a_container_that_is_gone_watch_it_first(
    dead: JobHandle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.log_follower.STILL_S", 1.0)

    assert main(["retry", dead.id]) == 0
    assert capsys.readouterr().err.startswith(f"waiting for a sign of life of job `{dead.id}`")
