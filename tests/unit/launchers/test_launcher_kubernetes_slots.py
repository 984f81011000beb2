"""GPU slots against an in-process API: the share of each job, with concurrent launches."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.client.jobs.targets import make_context
from runtime.config import Project, Settings
from runtime.errors import InfrastructureFailure, NotPossible
from runtime.jobs.hosts.base import Host
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.ledger import now
from runtime.jobs.plan import JobIdentity, LaunchPlan, Target
from runtime.jobs.spec import Array, Code, CodeMode, Gpus, JobResources, JobSpec
from runtime.launchers.kubernetes.client import KubernetesCluster
from runtime.launchers.kubernetes.gpu_leases import PATIENCE, Gpu, Holder, lease_name, living, take_slots
from runtime.launchers.kubernetes.launcher import KubernetesLauncher
from runtime.launchers.kubernetes.settings import read_place
from runtime.units import format_time
from tests.fakes.kubernetes import Api
from tests.services_support import replace_sleep


@pytest.fixture
def api() -> Api:
    return Api()


def take(api: Api, job: str, uid: str, *, wanted: int = 4, share: float = 0.25, number: int = 0) -> int:
    cluster = cast(KubernetesCluster, api)
    got, _ = take_slots(cluster, "lab", Gpu("n1", number), uid=uid, job=f"lab/{job}", wanted=wanted, share=share)
    return got


def test_slots_taken_by_another_between_read_and_write_are_counted(api: Api) -> None:
    mine, other = api.job("mine"), api.job("other")
    assert take(api, "mine", mine, wanted=1) == 1
    late, fast = api.job("late"), iter([True])

    def interfere() -> None:
        if next(fast, False):
            assert take(api, "other", other, wanted=2) == 2

    api.before_write = interfere

    assert take(api, "late", late) == 1
    assert api.table(0) == [("lab/mine", 1, 0.25), ("lab/other", 2, 0.25), ("lab/late", 1, 0.25)]


def test_table_that_is_written_all_the_time_is_given_up_on(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_sleep(monkeypatch, lambda seconds: None)
    take(api, "one", api.job("one"), wanted=1)

    def interfere() -> None:
        api.objects[("leases", "lab", lease_name(Gpu("n1", 0)))]["metadata"]["resourceVersion"] = api._number()

    api.before_write = interfere

    with pytest.raises(InfrastructureFailure):
        take(api, "two", api.job("two"))


def test_entry_counts_while_its_own_job_is_there_and_unfinished() -> None:
    def holder(uid: str, job: str) -> Holder:
        return Holder(uid=uid, job=job, slots=1, share=0.5)

    def waiting(uid: str, age: timedelta) -> dict[str, Any]:
        metadata = {"uid": uid, "creationTimestamp": format_time(now() - age)}
        return {"metadata": {**metadata, "annotations": {"research-runtime/slots": "waiting"}}, "status": {}}

    jobs: dict[str, Any] = {
        "lab/runs": {"metadata": {"uid": "u1"}, "status": {}},
        "lab/done": {"metadata": {"uid": "u2"}, "status": {"conditions": [{"type": "Complete", "status": "True"}]}},
        "lab/again": {"metadata": {"uid": "new"}, "status": {}},
        "lab/waits": waiting("u5", timedelta(minutes=1)),
        "lab/killed": waiting("u6", PATIENCE),
    }
    table = [
        holder("u1", "lab/runs"),
        holder("u2", "lab/done"),
        holder("u3", "lab/again"),
        holder("u4", "lab/gone"),
        holder("u5", "lab/waits"),
        holder("u6", "lab/killed"),
    ]

    assert living(table, jobs.get, now()) == [holder("u1", "lab/runs"), holder("u5", "lab/waits")]


# whole jobs


@pytest.fixture
def planned(tmp_path: Path) -> LaunchPlan:
    """A job of eight runs, four to a GPU, on a node of three GPUs."""
    settings = Settings(project=Project(root=tmp_path), data_dir=tmp_path, cache_dir=tmp_path, config_dir=tmp_path)
    target = Target(
        name="lab",
        kind="kubernetes",
        records="claim://data",
        settings={"namespace": "lab", "image": "i", "gpus": {"n1": 3}},
    )
    spec = JobSpec(
        command=("true",),
        code=Code(mode=CodeMode.IMAGE),
        array=Array(seeds=8),
        resources=JobResources(gpus=Gpus(count=0.25)),
    )
    job = JobIdentity(id="j-0123456789abcdef01234567", name="train", owner="ada", snapshot=None)
    return KubernetesLauncher().plan(spec, target, job, make_context(settings, tmp_path))


def submit(api: Api, plan: LaunchPlan, number: int, tmp_path: Path) -> str:
    settings = Settings(project=Project(root=tmp_path), data_dir=tmp_path, cache_dir=tmp_path, config_dir=tmp_path)
    place = read_place(plan.target, make_context(settings, tmp_path))
    host = SimpleNamespace(cluster=api, place=place, files=LocalFiles(str(tmp_path)))
    return KubernetesLauncher().submit(plan, plan.parts[number], cast(Host, host))


def jobs_of(api: Api, plan: LaunchPlan) -> list[tuple[bool, int, str]]:
    """Return suspension, parallelism and GPU of each of the plan's Jobs."""
    found = []
    for part in plan.parts:
        job = api.get("jobs", "lab", part.name)
        if job is not None:
            variables = {
                each["name"]: each.get("value") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]
            }
            assert variables["CUDA_VISIBLE_DEVICES"] == variables["NVIDIA_VISIBLE_DEVICES"]
            found.append((job["spec"]["suspend"], job["spec"]["parallelism"], variables["CUDA_VISIBLE_DEVICES"]))
    return found


def test_parts_are_let_go_one_by_one_after_all_have_their_slots(api: Api, planned: LaunchPlan, tmp_path: Path) -> None:
    take(api, "other", api.job("other"), wanted=4, number=1)

    submit(api, planned, 0, tmp_path)
    assert jobs_of(api, planned) == [(False, 4, "0"), (True, 4, "2")]
    submit(api, planned, 1, tmp_path)

    assert jobs_of(api, planned) == [(False, 4, "0"), (False, 4, "2")]
    assert [each[1:] for number in (0, 2) for each in api.table(number)] == [(4, 0.25), (4, 0.25)]
    assert submit(api, planned, 0, tmp_path) == f"lab/{planned.parts[0].name}"
    assert jobs_of(api, planned) == [(False, 4, "0"), (False, 4, "2")]


def test_job_of_which_one_part_finds_no_gpu_is_refused_as_a_whole(
    api: Api, planned: LaunchPlan, tmp_path: Path
) -> None:
    for number in (1, 2):
        take(api, f"other-{number}", api.job(f"other-{number}"), number=number)

    with pytest.raises(NotPossible) as refused:
        submit(api, planned, 0, tmp_path)

    assert refused.value.facts == (
        "n1/1: lab/other-1 has 4 of 0.25",
        "n1/2: lab/other-2 has 4 of 0.25",
    )
    assert jobs_of(api, planned) == []


def test_launch_that_was_killed_before_it_let_go_goes_on_with_what_it_has(
    api: Api, planned: LaunchPlan, tmp_path: Path
) -> None:
    submit(api, planned, 0, tmp_path)
    first = api.get("jobs", "lab", planned.parts[1].name)

    submit(api, planned, 1, tmp_path)

    second = api.get("jobs", "lab", planned.parts[1].name)
    assert first is not None
    assert second is not None
    assert first["metadata"]["uid"] == second["metadata"]["uid"]


def test_job_that_gets_fewer_slots_than_it_could_use_runs_fewer_at_a_time(
    api: Api, planned: LaunchPlan, tmp_path: Path
) -> None:
    take(api, "other", api.job("other"), wanted=3, number=0)
    one = replace(planned, parts=planned.parts[:1])

    submit(api, one, 0, tmp_path)

    assert jobs_of(api, one) == [(False, 1, "0")]
