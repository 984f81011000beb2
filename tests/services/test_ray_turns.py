"""Runs that take turns on a real Ray, which gives a free place to the request that was there first."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.client.jobs.explain import explain, read_facts
from runtime.client.jobs.handle import JobHandle
from runtime.jobs.spec import Array, JobResources, JobState, Priority, Tpu
from runtime.testing.launcher_bench import Bench, LauncherCase
from tests.services.ray_cluster import RayCluster

pytestmark = pytest.mark.service

OWN_NODE = 6
PLACES = 4
ONE = JobResources(tpu=Tpu(type="v4-8"))


@pytest.fixture(scope="module")
def ray_cluster(shared_ray: RayCluster) -> Iterator[RayCluster]:
    # A node that has room for several runs at once.
    shared_ray.start_node(OWN_NODE, PLACES, **{"TPU": 4 * PLACES, "TPU-v4-8-head": PLACES, "one-host": 1})
    yield shared_ray
    shared_ray.kill(OWN_NODE)


@pytest.fixture
def bench(ray_cluster: RayCluster, tmp_path: Path) -> Iterator[Bench]:
    settings = {"address": ray_cluster.address, "python": sys.executable}
    case = LauncherCase(
        kind="ray", settings=settings, records=str(tmp_path / "records"), patience_s=400, tell=ray_cluster.tell
    )
    made = Bench(case, tmp_path / "bench")
    yield made
    made.close()


class Lab:
    """Jobs whose runs note their begin, and end once they are told to."""

    def __init__(self, bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench, self.folder, self.monkeypatch = bench, folder, monkeypatch

    def launch(
        self, name: str, runs: int, priority: Priority = Priority.NORMAL, *, owner: str = "ada", slices: int = 1
    ) -> JobHandle:
        self.monkeypatch.setenv("LOGNAME", owner)
        own = f"{self.folder}/{name}"
        script = f"echo {name} >> {self.folder}/begun; until [ -e {own} ] || [ -e {own}.$RUNTIME_ARRAY_INDEX ]; do sleep 0.1; done"
        return self.bench.start(
            "sh",
            "-c",
            script,
            array=Array(count=runs),
            priority=priority,
            resources=JobResources(tpu=Tpu(type="v4-8", slices=slices)),
        )

    def end(self, name: str) -> None:
        (self.folder / name).touch()

    def begun(self) -> list[str]:
        path = self.folder / "begun"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def lab(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(bench, tmp_path, monkeypatch)


def running(job: JobHandle) -> list[int]:
    return [each.index for each in job.look()[0].indices if each.state is JobState.RUNNING]


def waits(job: JobHandle, runs: int) -> bool:
    """Whether so many runs of a job have asked Ray for their places."""
    return (
        sum(each.state is JobState.PENDING and "of TPU v4-8: " in each.message for each in job.look()[0].indices)
        == runs
    )


def test_higher_runs_that_came_last_begin_first(lab: Lab) -> None:
    busy = lab.launch("busy", PLACES)
    lab.bench.wait_for(lambda: lab.begun().count("busy") == PLACES)
    low = lab.launch("low", 5, Priority.LOW)
    lab.bench.wait_for(lambda: waits(low, 5))
    high = lab.launch("high", 3, Priority.HIGH)
    lab.bench.wait_for(lambda: waits(high, 3))
    lab.end("high")
    lab.end("low")

    lab.end("busy.0")

    assert lab.bench.end(high).state is JobState.SUCCEEDED
    assert lab.bench.end(low).state is JobState.SUCCEEDED
    lab.end("busy")
    assert lab.bench.end(busy).state is JobState.SUCCEEDED
    assert lab.begun() == ["busy"] * PLACES + ["high"] * 3 + ["low"] * 5
    assert [job.attempts() for job in (low, high)] == [[1], [1]]


def test_job_that_lets_another_go_first_can_be_cancelled_and_goes_on_once_the_other_s_driver_is_killed(
    ray_cluster: RayCluster, lab: Lab
) -> None:
    busy = lab.launch("busy", PLACES)
    lab.bench.wait_for(lambda: lab.begun().count("busy") == PLACES)
    ray_cluster.start_node(2, 1, **{"TPU": 4, "TPU-v4-8-head": 1, "other-host": 1})
    other = lab.launch("other", 1)
    lab.bench.wait_for(lambda: lab.begun().count("other") == 1)
    high = lab.launch("high", 1, Priority.HIGH, owner="bob", slices=2)
    lab.bench.wait_for(lambda: waits(high, 1))
    jobs = [lab.launch(name, 1) for name in ("cancelled", "low")]
    lab.bench.wait_for(lambda: all(waits(job, 1) for job in jobs))
    lab.end("busy.0")
    said = f"it lets {high.id} of bob (priority high) go first"
    # Ray gives the place to one of both, again and again, until both know that it is kept.
    lab.bench.wait_for(lambda: any(said in explain(read_facts(job)).sentence for job in jobs))

    jobs[0].cancel()
    assert lab.bench.end(jobs[0]).state is JobState.CANCELLED
    lab.bench.wait_for(lambda: said in explain(read_facts(jobs[1])).sentence)
    assert lab.begun().count("low") == 0
    (driver,) = find_drivers(high.id)
    os.kill(driver, signal.SIGKILL)

    lab.bench.wait_for(lambda: lab.begun().count("low") == 1)
    for name in ("busy", "other", "low"):
        lab.end(name)
    assert [lab.bench.end(job).state for job in (jobs[1], other, busy)] == [JobState.SUCCEEDED] * 3
    assert "cancelled" not in lab.begun()
    ray_cluster.kill(2)


def find_drivers(job: str) -> list[int]:
    """The processes that are drivers of a job."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = place.read_bytes().decode().split("\0")
            if words[1:3] == ["-m", "runtime.launchers.ray.driver"] and job in words:
                found.append(int(place.parent.name))
    return found
