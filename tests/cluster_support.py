"""A Ray cluster of the tests: its nodes' labels, its contract."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from runtime.clusters.nodes import TpuNode
from runtime.outputs import ClusterOutput, StackOutputs
from tests.fakes.tpu import TpuServer

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
PARENT = "projects/p-1/locations/us-central2-b"
CLUSTER = ClusterOutput(
    head="ray-marin-main-head-0123abcd-compute",
    cluster_name="marin-main",
    zone="us-central2-b",
    internal_ip="10.64.0.2",
    image="i@sha256:0",
    ports={"dashboard": 8265},
    pools={"v4": {"accelerator": "v4-8", "min": 4, "max": 8.0}, "v5e": {"max": 2}},
    worker_identity="n@p",
    config_sha256="0",
)
OUTPUTS = StackOutputs(stack="marin", project="p-1", clusters={"main": CLUSTER})


def labels(cluster: str = "marin-main", pool: str = "v4", kind: str = "worker", **more: str) -> dict[str, str]:
    return {"ray-cluster-name": cluster, "ray-node-type": kind, "ray-user-node-type": pool, **more}


def ours(cluster: str) -> dict[str, str]:
    """Return the labels of a node that a stack of ours made."""
    return labels(cluster, **{"managed-by": "research-runtime", "stack": "gone"})


def member_labels(name: str, cluster: str = "marin-main") -> dict[str, str]:
    return {"managed-by": "research-runtime", "runtime-cluster": cluster, "runtime-member": name, "stack": "marin"}


def member(state: str, name: str = "eval", **more: Any) -> TpuNode:
    return node(state, name, **{"accelerator": "v4-16", "labels": member_labels(name), **more})


def node(state: str, name: str = "n", *, age: timedelta = timedelta(), **more: Any) -> TpuNode:
    kind = {key: more.pop(key) for key in ("cluster", "pool", "kind") if key in more}
    return TpuNode(
        resource=f"{PARENT}/nodes/{name}",
        state=state,
        created_at=NOW - age,
        **{"labels": labels(**kind), **more},
    )


def add_hosts(server: TpuServer, *states: str) -> None:
    for number, state in enumerate(states, 1):
        endpoints = [{"ipAddress": f"10.0.0.{number}"}]
        server.add_node(f"n-{number}", state, labels=labels(), acceleratorType="v4-8", networkEndpoints=endpoints)
