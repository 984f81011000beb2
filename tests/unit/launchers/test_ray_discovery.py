"""Ray: our jobs by the head's list alone, and what somebody else put there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.client.jobs.cluster_jobs import keep_cluster, open_place
from runtime.client.jobs.gc import find_garbage, remove
from runtime.client.jobs.launch import launch
from runtime.client.jobs.targets import OpenTarget
from runtime.config import Project, Settings
from runtime.jobs import ledger, open_jobs
from runtime.jobs.plan import JobIdentity, OwnedResource, owner_name
from runtime.jobs.spec import Code, CodeMode, JobSpec, JobState
from runtime.launchers.base import ListsOwned
from runtime.launchers.ray import client, launcher
from runtime.launchers.ray.client import RayJobs
from runtime.launchers.ray.launcher import RayLauncher, render_submission
from runtime.launchers.ray.settings import RayTarget
from tests.fakes.ray_head import RayHead

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
JOB, OTHER = f"j-{'0' * 24}", f"j-{'1' * 24}"


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHead]:
    monkeypatch.setattr(client, "WATCH_S", 0.0)
    with RayHead() as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path, head: RayHead) -> Settings:
    where = {"kind": "ray", "address": head.address, "records": str(tmp_path / "records")}
    return Settings(
        project=Project(root=tmp_path, targets={"main": where}),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
    )


@pytest.fixture
def place(head: RayHead, settings: Settings, tmp_path: Path) -> Iterator[OpenTarget]:
    where = RayTarget(target="main", root=str(tmp_path / "records"), python="python3", address=head.address)
    with open_place(where, settings) as opened:
        yield opened


def render(
    head: RayHead, root: str, job: str = JOB, owner: str = "ada", epoch: int = 1, grace_s: float = 0
) -> dict[str, Any]:
    where = RayTarget(target="main", root=root, python="/opt/x/python", address=head.address)
    identity = JobIdentity(id=job, name="fit", owner=owner, snapshot=None)
    body = render_submission(where, identity, epoch=epoch, part=0, grace_s=grace_s)
    return {**body, "status": "RUNNING", "start_time": round(START.timestamp() * 1000)}


def put(head: RayHead, *bodies: dict[str, Any]) -> list[str]:
    head.jobs |= {body["submission_id"]: body for body in bodies}
    return [body["submission_id"] for body in bodies]


def owned_of(place: OpenTarget, **which: str) -> list[OwnedResource]:
    return RayLauncher().owned(place.target, place.host, **which)


def test_jobs_of_a_record_root_are_found_by_the_head_s_list_whether_or_not_they_live(
    head: RayHead, place: OpenTarget
) -> None:
    root = place.files.root
    ended = {**render(head, root, OTHER, owner="kim"), "status": "FAILED"}
    live, gone = put(head, render(head, root, epoch=12), ended)

    mine = OwnedResource(job=JOB, native_id=live, what="ray job", live=True, since=START)
    kims = OwnedResource(job=OTHER, native_id=gone, what="ray job", live=False, since=START)
    assert owned_of(place) == [mine, kims]
    assert (owned_of(place, owner="ada"), owned_of(place, job=OTHER)) == ([mine], [kims])
    assert owned_of(place, owner="ada", job=OTHER) == []
    assert isinstance(RayLauncher(), ListsOwned)


STRANGERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no id of ours": lambda body: {"submission_id": "raysubmit_1"},
    "an id of ours with more": lambda body: {"submission_id": f"{body['submission_id']}0"},
    "the id of another root": lambda body: {"submission_id": f"{body['submission_id'][:-6]}abcdef"},
    "no metadata": lambda body: {"metadata": None},
    "a text as metadata": lambda body: {"metadata": "job"},
    "a list as metadata": lambda body: {"metadata": ["job", JOB]},
    "another job in its metadata": lambda body: {"metadata": {**body["metadata"], "job": OTHER}},
    "a job of an odd type": lambda body: {"metadata": {**body["metadata"], "job": [JOB]}},
    "another epoch": lambda body: {"metadata": {**body["metadata"], "epoch": "2"}},
    "a command of its own": lambda body: {"entrypoint": "sleep 600"},
    "our driver and more": lambda body: {"entrypoint": f"{body['entrypoint']} && sleep 600"},
    "our driver for another root": lambda body: {"entrypoint": body["entrypoint"].replace(f" {JOB}", f"2 {JOB}")},
    "a command that is no shell's": lambda body: {"entrypoint": "exec 'python"},
    "no command": lambda body: {"entrypoint": None},
    "a command of an odd type": lambda body: {"entrypoint": 7},
    "no start": lambda body: {"start_time": None},
    "a start of an odd type": lambda body: {"start_time": "yesterday"},
    "a start that is true": lambda body: {"start_time": True},
    "a start in no year": lambda body: {"start_time": 10**30},
}
"""What makes a job of ours one that is not ours, of another record root, or of an unknown age."""


@pytest.mark.parametrize("which", STRANGERS)
@pytest.mark.daily(7)
def test_job_that_is_not_surely_ours_is_never_found(head: RayHead, place: OpenTarget, which: str) -> None:
    body = render(head, place.files.root)
    put(head, {**body, **STRANGERS[which](body)}, render(head, f"{place.files.root}2"))

    assert owned_of(place) == []


def test_job_is_asked_to_end_by_its_mark_waited_for_and_forgotten_with_all_its_epochs(
    head: RayHead, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, grace = place.files.root, 600.0
    first = {**render(head, root), "status": "FAILED"}
    second = render(head, root, epoch=2, owner="kim", grace_s=grace)
    others = put(head, render(head, root, OTHER), render(head, f"{root}2"))
    put(head, first, second)
    looked: list[float] = []

    def pass_time(seconds: float) -> None:
        looked.append(seconds)
        # A driver ends when the shims have found the mark.
        if len(looked) == 3 and place.files.names(ledger.job_folder(JOB), "cancel"):
            second["status"] = "SUCCEEDED"

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pass_time))

    left = RayLauncher().remove(place.target, owned_of(place, owner="kim"), place.host)

    assert (left, sorted(head.jobs), len(looked)) == ([], sorted(others), 3)
    assert second["status"] == "SUCCEEDED", "its driver ended by itself"
    assert not place.files.names(ledger.job_folder(OTHER), "cancel")


@pytest.mark.parametrize("obeys", [True, False])
def test_job_that_does_not_end_within_its_grace_is_stopped_or_named(
    head: RayHead, place: OpenTarget, monkeypatch: pytest.MonkeyPatch, obeys: bool
) -> None:
    monkeypatch.setattr(launcher, "END_S", 0.0)
    if not obeys:
        monkeypatch.setattr(RayJobs, "stop", lambda self, name: None)
    body = render(head, place.files.root)
    body["metadata"]["grace_s"] = "soon"
    (name,) = put(head, body)

    left = RayLauncher().remove(place.target, owned_of(place), place.host)

    assert (left, list(head.jobs)) == ([], []) if obeys else ([f"the job `{name}` of the head is still there"], [name])


@pytest.mark.parametrize("metadata", [None, "text", [1], {"grace_s": "inf"}, {"grace_s": None}])
def test_job_with_odd_metadata_is_cancelled_all_the_same(
    head: RayHead, place: OpenTarget, monkeypatch: pytest.MonkeyPatch, metadata: object
) -> None:
    monkeypatch.setattr(launcher, "END_S", 0.0)
    (name,) = put(head, {**render(head, place.files.root), "metadata": metadata})

    assert RayLauncher().cancel(place.target, [name], None, place.host) == []
    assert head.jobs[name]["status"] == "STOPPED"


def test_jobs_whose_records_were_deleted_are_left_by_a_keeper_and_ended_by_gc(
    head: RayHead, place: OpenTarget, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "END_S", 0.0)
    spec = JobSpec(command=("true",), code=Code(mode=CodeMode.IMAGE), grace_period=timedelta(0))
    jobs = [launch(replace(spec, name=name), "main", settings=settings).id for name in ("a", "b", "c")]
    for body in head.jobs.values():
        body["start_time"] = round(START.timestamp() * 1000)
    bare = {"submission_id": "raysubmit_1", "status": "RUNNING", "metadata": None}
    put(head, bare)
    kept, *strays = sorted(jobs)
    for job in strays:
        shutil.rmtree(Path(place.files.root, ledger.job_folder(job)))

    lines = {each.job: each.done for each in keep_cluster(place, settings).jobs}
    garbage = find_garbage(place, owner=owner_name(), older_than=timedelta(0), now=datetime.now(UTC))
    left = [remove(each, place, owner=owner_name()) for each in garbage]

    assert lines == dict.fromkeys(jobs, "left")
    assert [(each.kind, each.name, each.state) for each in garbage] == [
        ("native", job, JobState.RUNNING) for job in strays
    ]
    assert left == [[], []]
    assert [body["metadata"] and body["metadata"]["job"] for body in head.jobs.values()] == [kept, None]
    assert list(open_jobs.list_open(place.files, "main")) == [kept]
    assert ledger.list_jobs(place.files) == [kept]
