"""Removes TPU nodes that Ray no longer sees.

Ray's Google node provider counts nodes that are being created or run. It neither counts nor deletes a node that Google
has preempted: the node stays, holds its share of the quota, and nothing takes its place. The reaper finds such nodes by
the cluster's label and deletes them; the autoscaler then creates new ones. The reaper reads every page of the list, which
Ray does not, so its count is the true one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import InfrastructureFailure
from runtime.stack.google_api import GoogleRefused
from runtime.units import format_duration
from runtime.values import dataclass, field

if TYPE_CHECKING:
    from runtime.stack.google_api import GoogleApi

API: Final = "v2alpha1"
CLUSTER_LABEL: Final = "ray-cluster-name"
KIND_LABEL: Final = "ray-node-type"
POOL_LABEL: Final = "ray-user-node-type"

ALIVE: Final = frozenset({"CREATING", "STARTING", "RESTARTING", "READY"})
"""States that Ray counts."""
DEAD: Final = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "UNKNOWN"})
"""States that a node does not leave by itself; Ray stops no node that it means to start again. A node in any other state,
such as DELETING, REPAIRING or REIMAGING, is changing."""
SPENT: Final = frozenset({"FAILED", "SUSPENDED"})
"""States of a queued resource that gives no more nodes."""

LONGEST_CREATION: Final = timedelta(hours=1)
"""A node that has been in creation for longer will never run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuNode:
    resource: str
    """`projects/P/locations/Z/nodes/N`"""
    state: str
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """A node that will never run again, or a queued resource that gives no more nodes and whose nodes were all one
    cluster's."""

    resource: str
    why: str
    pool: str | None = None

    @property
    def name(self) -> str:
        return self.resource.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapPlan:
    dead: tuple[Dead, ...]
    """Nodes, then queued resources, to remove from one cluster."""
    live: Mapping[str, int]
    """Pool → nodes that Ray counts or should."""


def find_dead(
    nodes: Iterable[TpuNode], cluster: str, now: datetime, *, longest_creation: timedelta = LONGEST_CREATION
) -> list[Dead]:
    """Return the nodes that belong to `cluster`, are no head, and will never run again."""
    return [
        Dead(resource=node.resource, why=why, pool=node.labels.get(POOL_LABEL))
        for node in nodes
        if _is_worker_of(node, cluster) and (why := _why_dead(node, now, longest_creation))
    ]


def count_live(nodes: Iterable[TpuNode], cluster: str) -> dict[str, int]:
    """Return pool → nodes of `cluster` in creation or running. A node without a pool's label counts under the empty name."""
    mine = (node for node in nodes if _is_worker_of(node, cluster) and node.state in ALIVE)
    return dict(Counter(node.labels.get(POOL_LABEL, "") for node in mine))


def find_spent(resources: Iterable[Mapping[str, Any]], cluster: str) -> list[Dead]:
    """Return queued resources of the API's shape that failed or were suspended and asked for nodes of `cluster` alone."""
    found = []
    for each in resources:
        state = str(each.get("state", {}).get("state", ""))
        specs = each.get("tpu", {}).get("nodeSpec", [])
        clusters = {spec.get("node", {}).get("labels", {}).get(CLUSTER_LABEL) for spec in specs}
        if state in SPENT and clusters == {cluster}:
            found.append(Dead(resource=str(each["name"]), why=f"queued resource {state}"))
    return found


def parse_node(item: Mapping[str, Any]) -> TpuNode:
    created = item.get("createTime")
    return TpuNode(
        resource=str(item["name"]),
        state=str(item.get("state", "STATE_UNSPECIFIED")),
        labels=dict(item.get("labels", {})),
        created_at=datetime.fromisoformat(created) if created else None,
    )


class Reaper:
    """Reads and deletes in one project and zone; the only place that does."""

    def __init__(self, api: GoogleApi, *, project: str, zone: str) -> None:
        self._api = api
        self._parent = f"{API}/projects/{project}/locations/{zone}"

    def plan(self, cluster: str, now: datetime, *, longest_creation: timedelta = LONGEST_CREATION) -> ReapPlan:
        """Decide what to remove. Raises `GoogleRefused` or `GoogleUnreachable` if the lists cannot be read."""
        nodes = [parse_node(item) for item in self._api.pages("tpu", f"{self._parent}/nodes", "nodes")]
        queued = self._api.pages("tpu", f"{self._parent}/queuedResources", "queuedResources")
        dead = find_dead(nodes, cluster, now, longest_creation=longest_creation)
        return ReapPlan(dead=(*dead, *find_spent(queued, cluster)), live=count_live(nodes, cluster))

    def remove(self, dead: Dead) -> str | None:
        """Delete one; returns why that failed. A resource that is gone already counts as removed."""
        query = {"force": "true"} if "/queuedResources/" in dead.resource else {}
        try:
            self._api.delete("tpu", f"{API}/{dead.resource}", **query)
        except InfrastructureFailure as problem:
            if not (isinstance(problem, GoogleRefused) and problem.status == 404):
                return problem.message
        return None


def _is_worker_of(node: TpuNode, cluster: str) -> bool:
    return node.labels.get(CLUSTER_LABEL) == cluster and node.labels.get(KIND_LABEL) != "head"


def _why_dead(node: TpuNode, now: datetime, longest_creation: timedelta) -> str | None:
    if node.state in DEAD:
        return node.state.lower()
    if node.state == "CREATING" and node.created_at is not None:
        age = now - node.created_at
        if age > longest_creation:
            return f"creating for {format_duration(age)}"
    return None
