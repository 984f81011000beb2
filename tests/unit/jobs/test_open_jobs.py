"""The index of open jobs: its names, who may write them, and the moments at which they come and go."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runtime.client.jobs.gc import find_garbage, remove
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions
from runtime.config import Project, Settings
from runtime.errors import NotPossible
from runtime.jobs import open_jobs
from runtime.jobs.hosts.base import Host
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.lock import Lock
from runtime.jobs.plan import LaunchPlan, NativePart, Target
from runtime.jobs.spec import Array, Code, CodeMode, JobSpec, JobState, parse_spec
from runtime.launchers.local.launcher import LocalLauncher
from runtime.launchers.slurm.launcher import SlurmLauncher
from tests.shim_support import PATIENCE_S, kill_all, processes_with, signal_all, wait_for


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    yield Settings(
        project=Project(
            root=tmp_path,
            targets={"hpc": {"kind": "slurm", "records": str(tmp_path / "records"), "max_array_size": 2}},
        ),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
    )
    signal_all(processes_with(str(tmp_path)))


def start(settings: Settings, *command: str, on: str = "local", array: Array | None = None) -> JobHandle:
    # The salt makes it a job of its own: a shim ends leftovers of its job anywhere on the machine.
    spec = JobSpec(command=command, code=Code(mode=CodeMode.NONE), env={"SALT": os.urandom(8).hex()}, array=array)
    return launch(spec, on, settings=settings, options=LaunchOptions(base=settings.project.root))


def test_names_of_targets_are_names_of_folders_whatever_they_hold() -> None:
    given = ["hpc", "gpu.large", "..", "a/b", "größe", "x y%"]

    assert [open_jobs.open_folder(each) for each in given] == [
        "open/hpc",
        "open/gpu.large",
        "open/%2E.",
        "open/a%2Fb",
        "open/gr%C3%B6%C3%9Fe",
        "open/x%20y%25",
    ]


def test_list_of_open_jobs_passes_over_other_names_and_other_targets(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    for name in ("j-aa.0", "j-aa.12", "j-bb.0", "j-bb.0.77.ab12", "notes"):
        files.create(f"open/hpc/{name}", b"")
    files.create("open/other/j-cc.0", b"")

    assert open_jobs.list_open(files, "hpc") == {"j-aa": [0, 12], "j-bb": [0]}
    assert open_jobs.list_open(files, "nowhere") == {}


def test_folders_of_the_index_are_for_all_who_may_write_to_the_root(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)

    open_jobs.mark_open(LocalFiles(str(tmp_path)), "hpc", "j-aa", 0)

    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("open", "open/hpc")]
    assert modes == [0o1777, 0o1777]


def test_job_is_in_the_index_while_it_runs_and_not_once_its_result_is_there(settings: Settings, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = start(settings, "sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done")

    assert open_jobs.list_open(job.files, "local") == {job.id: [0]}
    go.touch()
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    wait_for(lambda: open_jobs.list_open(job.files, "local") == {}, "the removal of the name")


def test_array_leaves_the_index_with_its_last_result(settings: Settings, tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"[ $RUNTIME_ARRAY_INDEX = 3 ] || exit 0; until [ -e {go} ]; do sleep 0.05; done"
    job = start(settings, "sh", "-c", script, array=Array(count=3, offset=3, max_parallel=1))
    wait_for(lambda: job.attempts(3) == [1], "the first run")

    assert open_jobs.list_open(job.files, "local") == {job.id: [0]}
    go.touch()
    wait_for(lambda: open_jobs.list_open(job.files, "local") == {}, "the removal of the name")
    assert sorted(job.entry().outcomes) == [3, 4, 5]


def test_cancelled_job_leaves_the_index(settings: Settings) -> None:
    job = start(settings, "sleep", "600")
    wait_for(lambda: job.attempts() == [1], "the attempt")

    assert job.cancel() == []
    wait_for(lambda: open_jobs.list_open(job.files, "local") == {}, "the removal of the name")


def test_lost_job_stays_in_the_index_until_it_is_cancelled(settings: Settings) -> None:
    job = start(settings, "sleep", "600")
    wait_for(lambda: job.attempts() == [1], "the attempt")
    kill_all(job.id)
    wait_for(lambda: job.status().state is JobState.FAILED, "the loss")

    assert open_jobs.list_open(job.files, "local") == {job.id: [0]}
    assert job.cancel() == []
    assert open_jobs.list_open(job.files, "local") == {}


def test_name_stays_while_somebody_holds_the_lock_of_the_job(settings: Settings) -> None:
    job = start(settings, "sleep", "600")
    wait_for(lambda: job.attempts() == [1], "the attempt")
    kill_all(job.id)
    wait_for(lambda: job.status().state is JobState.FAILED, "the loss")
    lock = Lock(job.files, job.id, "ada")
    lock.take(patience_s=0)
    try:
        assert job.cancel() == []
        assert open_jobs.list_open(job.files, "local") == {job.id: [0]}
    finally:
        lock.release()


def test_name_is_made_before_the_backend_is_called_and_a_refused_part_has_none(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, list[int]]] = []

    def submit(_: object, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        seen.append(open_jobs.list_open(host.files, "hpc"))
        if len(seen) == 2:
            raise NotPossible("no such partition")
        return "1"

    def find(_: object, target: Target, names: list[str], host: Host) -> dict[str, str]:
        return {}

    monkeypatch.setattr(SlurmLauncher, "submit", submit)
    monkeypatch.setattr(SlurmLauncher, "find", find)
    with pytest.raises(NotPossible):
        start(settings, "true", on="hpc", array=Array(count=6))

    (job,) = seen[0]
    assert seen == [{job: [0, 1, 2]}] * 2
    assert open_jobs.list_open(LocalFiles(str(settings.project.root / "records")), "hpc") == {job: [0]}


def test_order_tells_the_shim_which_runs_each_part_has(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmLauncher, "submit", lambda *given: "1")
    monkeypatch.setattr(SlurmLauncher, "find", lambda *given: {})

    job = start(settings, "true", on="hpc", array=Array(count=5, offset=2))

    order = json.loads(job.files.read(f"jobs/{job.id}/order.json") or b"")
    assert order["open"] == {"name": f"open/hpc/{job.id}", "parts": [[2, 2], [4, 2], [6, 1]]}


def test_job_that_is_collected_leaves_no_name_of_any_target(settings: Settings) -> None:
    job = start(settings, "true")
    job.wait(timeout=PATIENCE_S)
    wait_for(lambda: not processes_with(job.id), "the end of the shim")
    for target in ("local", "bobs"):
        open_jobs.mark_open(job.files, target, job.id, 0)

    (garbage,) = [
        each
        for each in find_garbage(job, owner=None, older_than=timedelta(0), now=datetime.now(UTC))
        if each.kind == "job"
    ]
    assert remove(garbage, job, owner="ada") == []
    assert [open_jobs.list_open(job.files, target) for target in ("local", "bobs")] == [{}, {}]


def test_name_is_back_before_a_job_that_is_gone_starts_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(settings, "sleep", "600")
    wait_for(lambda: job.attempts() == [1], "the attempt")
    kill_all(job.id)
    wait_for(lambda: job.status().state is JobState.FAILED, "the loss")
    open_jobs.drop_open(job.files, job.id)
    seen = []
    submit = LocalLauncher.submit

    def noting(self: LocalLauncher, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        seen.append(open_jobs.list_open(host.files, "local"))
        return submit(self, plan, part, host)

    monkeypatch.setattr(LocalLauncher, "submit", noting)
    spec = parse_spec(json.loads(job.files.read(f"jobs/{job.id}/spec.json") or b""), source="the job")
    again = launch(spec, "local", settings=settings, options=LaunchOptions(base=settings.project.root))

    assert (again.id, seen) == (job.id, [{job.id: [0]}])
