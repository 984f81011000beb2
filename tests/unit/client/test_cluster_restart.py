"""The steps of a restart on a record root and a head's API: what they do to jobs of any target, and that none starts twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

from runtime import faults
from runtime.client.jobs.cluster_jobs import keep_cluster, list_places, open_place
from runtime.client.jobs.cluster_restart import ClusterRestart, HeadNotBack, Means, describe_strays, goes_on
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import launch
from runtime.client.jobs.targets import OpenTarget
from runtime.clusters.restart import Step, restart
from runtime.config import Project, Settings
from runtime.errors import InfrastructureFailure
from runtime.faults import FaultReached
from runtime.jobs import hold, ledger, open_index
from runtime.jobs.hold import Hold, RootHeld
from runtime.jobs.spec import Code, CodeMode, JobSpec, JobState
from runtime.launchers.ray.settings import Place
from runtime.values import replace
from tests.fakes.ray_head import RayHead

STEPS = [step for step in Step if step not in (Step.DONE, Step.AWAIT_HEAD)]


@pytest.fixture
def head() -> Iterator[RayHead]:
    with RayHead() as running:
        yield running


@pytest.fixture
def settings(head: RayHead, tmp_path: Path) -> Settings:
    where = {"kind": "ray", "address": head.address, "records": str(tmp_path / "records")}
    return Settings(
        project=Project(root=tmp_path, targets={"tpu": {**where, "python": "/opt/x/python"}, "my tpu": where}),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
    )


@pytest.fixture
def place(head: RayHead, settings: Settings, tmp_path: Path) -> Iterator[OpenTarget]:
    where = Place(target="main", root=str(tmp_path / "records"), python="python3", address=head.address)
    with open_place(where, settings) as opened:
        yield opened


def start(settings: Settings, target: str, name: str = "fit") -> JobHandle:
    spec = JobSpec(name=name, command=("true",), code=Code(mode=CodeMode.IMAGE), grace_period=timedelta(seconds=1))
    return launch(spec, target, settings=settings)


def unknown(*_: object) -> NoReturn:
    raise InfrastructureFailure("no credentials")


def make(
    place: OpenTarget,
    settings: Settings,
    restart_head: Callable[[], None],
    *,
    token: str = "one",
    said: list[str] | None = None,
    boot: Mapping[str, str] | None = None,
    head_s: float = 60,
) -> ClusterRestart:
    means = Means(ray_name="marin-main", reaper=unknown, restart_head=restart_head, read_boot=lambda: boot)
    tell = (said if said is not None else []).append
    return ClusterRestart(place, settings, means, token=token, by=f"{token}@desk", progress=tell, head_s=head_s)


def epochs(job: JobHandle) -> list[int]:
    return [each.epoch for each in job.entry().natives]


def cut_off(world: ClusterRestart, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_FAULTS", f"restart.{after}=raise")
    faults.arm()
    with pytest.raises(FaultReached):
        restart(world, token="one")
    monkeypatch.delenv("RUNTIME_FAULTS")
    faults.arm()


def test_restart_takes_up_the_jobs_of_all_targets_and_keeps_their_interpreters(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    jobs = [start(settings, "tpu"), start(settings, "my tpu")]
    world = make(place, settings, head.restart)

    restart(world, token="one")

    assert {(each.job, each.target, each.done) for each in world.kept} == {
        (jobs[0].id, "tpu", "taken_up"),
        (jobs[1].id, "my tpu", "taken_up"),
    }
    assert [epochs(job) for job in jobs] == [[1, 2], [1, 2]]
    assert len(head.submitted) == 4
    pythons = {info["metadata"]["job"]: info["entrypoint"].split()[1] for info in head.jobs.values()}
    assert pythons == {jobs[0].id: "/opt/x/python", jobs[1].id: "python3"}
    assert hold.read_hold(place.files) is None
    assert all(goes_on(each) for each in world.kept)


@pytest.mark.parametrize("killed", STEPS)
def test_restart_that_dies_after_a_step_is_finished_by_another_and_starts_no_job_twice(
    killed: Step, head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(settings, "tpu")
    restarts: list[int] = []

    def restart_head() -> None:
        restarts.append(1)
        head.restart()

    cut_off(make(place, settings, restart_head), killed, monkeypatch)
    if killed is not Step.RELEASE:
        assert hold.read_hold(place.files) is not None
        restart(make(place, settings, restart_head, token="two"), token="two")

    assert restarts == [1]
    assert (epochs(job), len(head.submitted)) == ([1, 2], 2)
    assert job.state() is JobState.RUNNING
    assert hold.read_hold(place.files) is None


def test_job_that_was_stopped_for_a_restart_is_lost_and_not_cancelled_until_it_is_taken_up(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(settings, "tpu")

    cut_off(make(place, settings, head.restart), "ask", monkeypatch)

    (info,) = head.jobs.values()
    assert (info["status"], job.status().reason) == ("STOPPED", "lost")
    assert [each.done for each in keep_cluster(place, settings).jobs] == ["left"]


def test_while_the_cluster_is_held_keepers_and_launches_wait_and_after_an_hour_they_do_not(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    job = start(settings, "tpu")
    head.restart()
    now = ledger.now()
    held = Hold(token="other", by="ada@desk", since=now, renewed=now, session="session_1")
    hold.write_hold(place.files, held)

    (left,) = keep_cluster(place, settings).jobs
    with pytest.raises(RootHeld) as refused:
        start(settings, "tpu", "second")

    assert (left.done, left.seen.partition(" since ")[0]) == ("left", "the cluster is being restarted by ada@desk")
    assert (refused.value.exit_code, refused.value.retryable) == (3, True)
    assert (len(head.submitted), len(open_index.list_open(place.files, "tpu"))) == (1, 1)

    hold.write_hold(place.files, replace(held, renewed=now - timedelta(minutes=61)))
    said: list[str] = []
    (kept,) = keep_cluster(place, settings, progress=said.append).jobs

    assert (kept.done, epochs(job)) == ("taken_up", [1, 2])
    assert "it is ignored" in said[0]
    assert start(settings, "tpu", "second").state() is JobState.RUNNING


def test_mark_that_is_old_is_begun_anew_with_the_session_of_today(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    start(settings, "tpu")
    head.restart()
    old = ledger.now() - timedelta(hours=3)
    hold.write_hold(place.files, Hold(token="x", by="bob@lab", since=old, renewed=old, session="session_1"))
    said: list[str] = []

    restart(make(place, settings, head.restart, said=said), token="one")

    assert head.session == 3
    assert said[0] == "the mark of bob@lab is older than an hour: beginning anew"


def test_head_that_does_not_come_back_is_said_in_its_own_words_and_restarted_by_the_next_command(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    job = start(settings, "tpu")

    def break_head() -> None:
        head.broken = 503

    boot = {"state": "waiting", "waiting-for": "image i@sha256:0"}
    with pytest.raises(HeadNotBack) as late:
        restart(make(place, settings, break_head, boot=boot, head_s=0), token="one")
    assert "it says `waiting-for`: image i@sha256:0" in late.value.facts
    assert hold.read_hold(place.files) is not None

    restart(make(place, settings, head.restart, token="two"), token="two")

    assert (head.session, epochs(job), hold.read_hold(place.files)) == (2, [1, 2], None)


def test_cancelled_job_is_ended_and_not_taken_up(head: RayHead, settings: Settings, place: OpenTarget) -> None:
    job = start(settings, "tpu")
    place.files.write(f"jobs/{job.id}/cancel", b"{}")
    world = make(place, settings, head.restart)

    restart(world, token="one")

    assert ([each.done for each in world.kept], epochs(job)) == (["ended"], [1])


def test_job_that_waits_through_many_restarts_is_not_given_up(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    job = start(settings, "tpu")

    for token in ("one", "two", "three", "four", "five"):
        restart(make(place, settings, head.restart, token=token), token=token)

    assert epochs(job) == [1, 2, 3, 4, 5, 6]
    assert job.state() is JobState.RUNNING


def test_job_of_another_record_root_is_named_with_its_owner(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    body: dict[str, Any] = {
        "submission_id": "j-0a-e1-p0-0",
        "entrypoint": "exec python3 -m runtime.launchers.ray.driver /else j-0a --epoch 1 --part 0",
        "metadata": {"job": "j-0a", "epoch": "1", "name": "fit", "owner": "bob", "grace_s": "1"},
        "status": "RUNNING",
    }
    head.jobs["j-0a-e1-p0-0"] = body
    start(settings, "tpu")

    lines = describe_strays(make(place, settings, head.restart).look())

    assert lines == ["`fit` of bob (j-0a-e1-p0-0): kept by nobody: the same launch takes it up"]


@pytest.mark.parametrize("metadata", ["text", ["job"], {"job": ["j-0a"], "epoch": 1}, {"job": 7}, {"grace_s": None}])
def test_job_with_odd_metadata_is_one_of_others(
    head: RayHead, settings: Settings, place: OpenTarget, metadata: object
) -> None:
    start(settings, "tpu")
    (ours,) = head.jobs.values()
    head.jobs["j-0a-e1-p0-0"] = {**ours, "submission_id": "j-0a-e1-p0-0", "metadata": metadata}

    seen = make(place, settings, head.restart).look().jobs

    assert {each.name: (each.ours, each.here) for each in seen} == {
        ours["submission_id"]: (True, True),
        "j-0a-e1-p0-0": (False, False),
    }


def test_shims_that_outlive_their_driver_are_waited_for(head: RayHead, settings: Settings, place: OpenTarget) -> None:
    job = start(settings, "tpu")
    world = make(place, settings, head.restart)
    (name,) = head.jobs
    folder = f"jobs/{job.id}"
    place.files.write(f"{folder}/ray/1.0", json.dumps({"runs": {"0": {"state": "running"}}}).encode())
    place.files.write(f"{folder}/runs/0/a0001/start.json", b"{}")
    (seen,) = world.look().jobs
    head.jobs[name]["status"] = "STOPPED"

    before = world.list_unended({name: seen})
    place.files.write(f"{folder}/runs/0/a0001/end.stopped.143", b"{}")

    assert (before, world.list_unended({name: seen})) == ([name], [])
    assert [each.target.name for each in list_places(place)] == ["tpu"]
