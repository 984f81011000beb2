"""Launches that were cut off before their backend got the job: what keepers say, and what gc clears."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runtime import faults
from runtime.client.jobs.gc import Garbage, find_garbage, remove
from runtime.client.jobs.launch import launch
from runtime.client.jobs.reconcile import KeptJob, keep_target
from runtime.client.jobs.targets import OpenTarget, find_target, make_context, open_target
from runtime.config import Project, Settings
from runtime.faults import FaultReached
from runtime.jobs import ledger, open_jobs
from runtime.jobs.lock import Lock
from runtime.jobs.spec import Code, CodeMode, JobSpec, JobState
from tests.fakes.ray_head import RayHead

MONTH = timedelta(days=30)
SPEC = JobSpec(name="fit", command=("true",), code=Code(mode=CodeMode.IMAGE), grace_period=timedelta(seconds=1))


@pytest.fixture
def head() -> Iterator[RayHead]:
    with RayHead() as running:
        yield running


@pytest.fixture
def settings(head: RayHead, tmp_path: Path) -> Settings:
    where = {"kind": "ray", "address": head.address, "records": str(tmp_path / "records")}
    return Settings(
        project=Project(root=tmp_path, targets={"tpu": where}),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
    )


@pytest.fixture
def place(settings: Settings) -> Iterator[OpenTarget]:
    with open_target(find_target("tpu", settings), make_context(settings)) as opened:
        yield opened


def cut_off(settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch, *, at: str) -> str:
    """Launch a job, and die at a step; returns its id. The launch's lock counts as that of a dead process."""
    monkeypatch.setenv("RUNTIME_FAULTS", f"{at}=raise")
    faults.arm()
    with pytest.raises(FaultReached):
        launch(SPEC, "tpu", settings=settings)
    monkeypatch.delenv("RUNTIME_FAULTS")
    faults.arm()
    (job,) = ledger.list_jobs(place.files)
    return job


def keep(place: OpenTarget, settings: Settings) -> KeptJob:
    (kept,) = keep_target(place, settings).jobs
    return kept


def garbage(place: OpenTarget, *, age: timedelta, older_than: timedelta = MONTH) -> list[Garbage]:
    return find_garbage(place, owner=None, older_than=older_than, now=datetime.now(UTC) + age)


def test_launch_that_was_cut_off_is_no_lost_job_and_the_same_launch_submits_it(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cut_off(settings, place, monkeypatch, at="launch.written")

    young = keep(place, settings)
    later = ledger.now() + timedelta(minutes=3)
    monkeypatch.setattr(ledger, "now", lambda: later)
    old = keep(place, settings)

    # A launch that is at work right now looks the same for a moment.
    assert (young.done, young.seen, young.submitted, young.next) == ("left", "it was never submitted", False, None)
    assert (old.submitted, old.next) == (False, f"the same launch by `{old.owner}`")
    assert launch(SPEC, "tpu", settings=settings).id == job
    assert (keep(place, settings).submitted, len(head.submitted)) == (True, 1)


def test_job_that_began_before_its_launch_noted_it_is_no_cut_off_launch(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cut_off(settings, place, monkeypatch, at="launch.submitted")
    place.files.write(f"jobs/{job}/runs/0/a0001/start.json", b"{}")
    head.restart()

    kept = keep(place, settings)

    assert (kept.seen, kept.submitted) == ("its launch did not come to an end", True)
    assert garbage(place, age=2 * MONTH) == []


def test_launch_that_was_cut_off_is_garbage_after_its_time(
    settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cut_off(settings, place, monkeypatch, at="launch.written")

    young = garbage(place, age=timedelta(days=29))
    at_work = garbage(place, age=timedelta(minutes=50), older_than=timedelta(0))
    (old,) = garbage(place, age=timedelta(hours=1), older_than=timedelta(0))
    left = remove(old, place, owner="ada")

    assert (young, at_work) == ([], [])
    assert (old.kind, old.name, old.state) == ("job", job, JobState.PENDING)
    assert (left, ledger.list_jobs(place.files), open_jobs.list_open(place.files, "tpu")) == ([], [], {})


def test_job_that_the_backend_has_is_no_garbage_though_its_launch_was_cut_off(
    settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(settings, place, monkeypatch, at="launch.submitted")

    assert garbage(place, age=2 * MONTH) == []


@pytest.mark.parametrize("comes", ["locked", "submitted"])
def test_launch_that_comes_back_while_its_garbage_is_removed_keeps_its_job(
    comes: str, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cut_off(settings, place, monkeypatch, at="launch.written")
    (old,) = garbage(place, age=MONTH)
    if comes == "locked":
        held = Lock(place.files, job, "ada@desk")
        held.take(patience_s=0)
        try:
            left = remove(old, place, owner="ada")
        finally:
            held.release()
    else:
        launch(SPEC, "tpu", settings=settings)
        left = remove(old, place, owner="ada")

    assert left == [f"job `{job}`: it {'is being launched' if comes == 'locked' else 'was submitted just now'}"]
    assert ledger.list_jobs(place.files) == [job]
