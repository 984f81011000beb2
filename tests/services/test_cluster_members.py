"""A member of a real Ray head: it joins by itself, works, outlives the head, and is the operator's alone to remove."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.components.ray_head import REAPER_PERMISSIONS
from infra.render.autoscaler import render_autoscaler
from runtime.jobs.spec import JobResources, JobState, Tpu
from runtime.testing.launcher_bench import Bench, read_log
from tests.fakes.tpu import names_of
from tests.services.head_support import LabHead, pool, require_ray
from tests.services_support import PATIENCE_S, wait_until

pytestmark = pytest.mark.service

SLICE = JobResources(cpus=1, tpu=Tpu(type="v4-16"))
HOSTS = 2


@pytest.fixture
def head() -> Iterator[LabHead]:
    require_ray()
    # Ray makes no node of this pool: what there is are members.
    with LabHead({"v4": pool("v4-8", max=0, cpus=1)}) as running:
        instance = running.server.instances[running.cluster.head]
        instance["metadata"] = {"items": [{"key": "ray-autoscaler", "value": render_autoscaler(running.cluster)}]}
        yield running


@pytest.fixture
def bench(head: LabHead, tmp_path: Path) -> Iterator[Bench]:
    with head.bench(tmp_path) as made:
        yield made


def count_rounds(head: LabHead) -> int:
    """Return how often the autoscaler has looked at its nodes."""
    return head.server.calls().count("tpu.projects.locations.nodes.list")


def status(head: LabHead) -> subprocess.CompletedProcess[str]:
    return head.run("status", "--address", head.address)


def test_member_joins_works_survives_the_autoscaler_and_the_head_and_is_removed(
    head: LabHead, bench: Bench, tmp_path: Path
) -> None:
    added = head.run(
        *("add", "v4-16", "--name", "eval", "--capacity", "on_demand", "--within", f"{PATIENCE_S:.0f}s"),
        *("--address", head.address),
    )
    assert (added.returncode, added.stdout) == (0, "eval\tv4-16\ton_demand\tREADY\tadded\n"), added.stderr + head.log()
    assert "2 in Ray" in added.stderr

    rounds = count_rounds(head)
    assert wait_until(lambda: count_rounds(head) >= rounds + 5)
    assert (head.nodes(), head.count_hosts()) == (["eval"], HOSTS)

    command = (
        f"echo node $RUNTIME_NODE_RANK on $TPU_WORKER_ID of $TPU_NAME; until test -e {tmp_path}/go; do sleep 0.2; done"
    )
    job = bench.start("sh", "-c", command, resources=SLICE)
    logs = ["node 0 on 0 of eval\n", "node 1 on 1 of eval\n"]
    assert wait_until(lambda: [read_log(job, rank=rank) for rank in (0, 1)] == logs)
    assert wait_until(lambda: "\tmember eval\t-\t-\t1\t0\t1\t1\t1 READY\n" in status(head).stdout), status(head)
    busy = head.run("remove", "eval", "--yes", "--address", head.address)
    assert (busy.returncode, "something runs on 1 member: eval" in busy.stderr) == (2, True), busy
    (tmp_path / "go").touch()
    assert bench.end(job).state is JobState.SUCCEEDED

    head.kill_head()
    head.start_head()
    assert wait_until(lambda: head.count_hosts() == HOSTS), head.log()
    reaped = head.reap()
    assert (reaped.returncode, reaped.stdout, head.nodes()) == (0, "", ["eval"]), reaped.stderr

    again = head.run("add", "v4-16", "--name", "eval", "--capacity", "on_demand", "--address", head.address)
    assert again.stdout == "eval\tv4-16\ton_demand\tREADY\twas there\n", again.stderr
    head.server.permissions = set(REAPER_PERMISSIONS)
    assert wait_until(lambda: "\t1\t0\t1\t0\t1 READY" in status(head).stdout), status(head)
    removed = head.run("remove", "eval", "--yes", "--address", head.address)
    assert (removed.returncode, names_of(head.server.nodes)) == (0, []), removed.stderr
    assert wait_until(lambda: head.count_hosts() == 0)
    assert [body["acceleratorType"] for body in head.server.created] == ["v4-16"]
    assert head.server.refused == []
