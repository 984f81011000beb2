"""The buffer of a pool on a real head: Ray's autoscaler makes and ends TPUs on the fake API as `runtime cluster buffer` asks."""

from __future__ import annotations

import json
import shlex
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.clusters.autoscaler_request import RayRequest
from runtime.jobs.spec import JobResources, Tpu
from runtime.testing.launcher_bench import Bench, read_log
from tests.services.head_support import LabHead, pool, require_ray
from tests.services_support import PATIENCE_S, wait_until

pytestmark = pytest.mark.service

ONE = JobResources(cpus=1, tpu=Tpu(type="v4-8"))


@pytest.fixture
def head() -> Iterator[LabHead]:
    require_ray()
    # Of two pools of one type, one has a buffer.
    pools = {"one": pool("v4-8", max=3, cpus=1, buffer=1), "plain": pool("v4-8", max=3, cpus=1)}
    with LabHead(pools, idle_minutes=0.5) as running:
        yield running


@pytest.fixture
def bench(head: LabHead, tmp_path: Path) -> Iterator[Bench]:
    with head.bench(tmp_path) as made:
        yield made


@pytest.mark.nightly
def test_pool_keeps_an_idle_node_beside_the_busy_ones_and_gives_the_others_back(head: LabHead, bench: Bench) -> None:
    assert await_buffer(head, [("one", 0, 1)], nodes=1), head.tell()

    job = bench.start("sh", "-c", "echo runs; sleep 600", resources=ONE)
    assert await_buffer(head, [("one", 1, 2)], nodes=2), head.tell()
    assert wait_until(lambda: read_log(job) == "runs\n"), head.tell()

    # What a program asks for stays beside ours. The nodes that are there hold it.
    call_sdk(head, [{"CPU": 1}])
    assert await_buffer(head, [("one", 1, 2)], nodes=2), head.tell()
    assert request_of(head).read() == [{"CPU": 1}, {"runtime-pool-one": 1}, {"runtime-pool-one": 1}]

    job.cancel()
    assert await_buffer(head, [("one", 0, 1)], nodes=1), head.tell()

    head.kill_head()
    head.start_head()
    assert request_of(head).read() == []
    assert await_buffer(head, [("one", 0, 1)], nodes=1), head.tell()
    assert request_of(head).read() == [{"runtime-pool-one": 1}]
    assert pools_of(head) == {"one"}


def ask(head: LabHead) -> list[tuple[str, int, int]] | None:
    """Run the command as the head's timer does; returns pool, busy nodes and nodes that were asked for, or None if Ray does
    not answer at that moment."""
    done = head.run("buffer", "--address", head.address, "-o", "json")
    assert done.returncode in (0, 3), done.stderr
    if done.returncode == 3:
        return None
    return [(row["pool"], row["busy"], row["wanted"]) for row in json.loads(done.stdout)]


def request_of(head: LabHead) -> RayRequest:
    return RayRequest(f"127.0.0.1:{head.head.ports['gcs']}")


def call_sdk(head: LabHead, bundles: list[dict[str, float]]) -> None:
    """Let a job of Ray's own replace what the autoscaler was asked for, by Ray's SDK."""
    program = f"import ray; from ray.autoscaler.sdk import request_resources as r; ray.init(); r(bundles={bundles!r})"
    body = json.dumps({"entrypoint": f"{sys.executable} -c {shlex.quote(program)}", "submission_id": "sdk"}).encode()
    asked = urllib.request.Request(f"{head.address}/api/jobs/", data=body, headers={"Content-Type": "application/json"})
    urllib.request.urlopen(asked, timeout=PATIENCE_S).close()
    assert wait_until(lambda: (head.read("/api/jobs/sdk") or {}).get("status") == "SUCCEEDED", every_s=1), head.tell()
    assert request_of(head).read() == bundles


def await_buffer(head: LabHead, asked: list[tuple[str, int, int]], *, nodes: int) -> bool:
    """Ask again and again, until that is asked for and Google and Ray have so many nodes."""
    return wait_until(
        lambda: ask(head) == asked and len(head.nodes()) == nodes and head.count_hosts() == nodes, every_s=1
    )


def pools_of(head: LabHead) -> set[str]:
    """Pools of all nodes that were ever asked for."""
    return {str(body["labels"]["ray-user-node-type"]) for body in head.server.created}
