"""Removes TPU nodes that Ray no longer sees.

Ray's Google node provider counts nodes that are being made or run, and neither counts nor deletes one that Google has
preempted: it stays, holds its share of the quota, and nothing takes its place. The reaper finds such nodes by the
cluster's label and deletes them; the autoscaler then makes new ones by itself. It reads every page of the list, which
Ray does not, so its count is the true one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
"""What Ray counts."""
DEAD: Final = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "UNKNOWN"})
"""What never comes back by itself; Ray stops no node that it means to start again. The rest is on its way somewhere:
DELETING, REPAIRING, REIMAGING …"""
SPENT: Final = frozenset({"FAILED", "SUSPENDED"})
"""States of a queued resource that gives no node any more."""

LONGEST_CREATION: Final = timedelta(hours=1)
"""A node that is still being made after that long is not going to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuNode:
    """A TPU VM as the API lists it."""

    resource: str
    """`projects/P/locations/Z/nodes/N`"""
    state: str
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime | None = None

    @property
    def name(self) -> str:
        return self.resource.rpartition("/")[2]

    @property
    def pool(self) -> str | None:
        return self.labels.get(POOL_LABEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadNode:
    node: TpuNode
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentResource:
    """A queued resource whose nodes were all this cluster's, and that gives none any more."""

    resource: str
    state: str

    @property
    def name(self) -> str:
        return self.resource.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapPlan:
    """What is to be removed from one cluster, and what of it lives."""

    dead: tuple[DeadNode, ...]
    spent: tuple[SpentResource, ...]
    live: Mapping[str, int]
    """Pool → nodes that Ray counts or should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What became of one deletion. `error` is None where the thing is gone, by us or by another."""

    resource: str
    why: str
    error: str | None = None


def find_dead(
    nodes: Iterable[TpuNode], cluster: str, now: datetime, *, longest_creation: timedelta = LONGEST_CREATION
) -> list[DeadNode]:
    """Those of `nodes` that belong to `cluster`, are no head, and will never run again."""
    found = []
    for node in nodes:
        why = _why_dead(node, now, longest_creation) if _is_worker_of(node, cluster) else None
        if why is not None:
            found.append(DeadNode(node=node, why=why))
    return found


def count_live(nodes: Iterable[TpuNode], cluster: str) -> dict[str, int]:
    """Pool → nodes of `cluster` that are made or run. A node without a pool's label counts under the empty name."""
    return dict(
        Counter(
            node.labels.get(POOL_LABEL, "") for node in nodes if _is_worker_of(node, cluster) and node.state in ALIVE
        )
    )


def find_spent(resources: Iterable[Mapping[str, Any]], cluster: str) -> list[SpentResource]:
    """Queued resources of the API's shape that failed or were suspended and asked for nodes of `cluster` alone."""
    found = []
    for each in resources:
        state = str(each.get("state", {}).get("state", ""))
        specs = each.get("tpu", {}).get("nodeSpec", [])
        clusters = {spec.get("node", {}).get("labels", {}).get(CLUSTER_LABEL) for spec in specs}
        if state in SPENT and clusters == {cluster}:
            found.append(SpentResource(resource=str(each["name"]), state=state))
    return found


def parse_node(item: Mapping[str, Any]) -> TpuNode:
    """A node of the API's answer."""
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
        """Decide what to remove. Raises `GoogleRefused` or `GoogleUnreachable` where the lists cannot be read."""
        nodes = [parse_node(item) for item in self._api.pages("tpu", f"{self._parent}/nodes", "nodes")]
        queued = self._api.pages("tpu", f"{self._parent}/queuedResources", "queuedResources")
        return ReapPlan(
            dead=tuple(find_dead(nodes, cluster, now, longest_creation=longest_creation)),
            spent=tuple(find_spent(queued, cluster)),
            live=count_live(nodes, cluster),
        )

    def remove(self, plan: ReapPlan, *, told: Callable[[Removal], None] = lambda _: None) -> list[Removal]:
        """Delete what `plan` says; one that fails does not keep the others. What is gone already counts as removed."""
        wanted: list[tuple[str, str, dict[str, str]]] = [(each.node.resource, each.why, {}) for each in plan.dead]
        wanted += [(each.resource, f"queued resource {each.state}", {"force": "true"}) for each in plan.spent]
        done = []
        for resource, why, query in wanted:
            removal = self._delete(resource, why, query)
            told(removal)
            done.append(removal)
        return done

    def _delete(self, resource: str, why: str, query: Mapping[str, str]) -> Removal:
        try:
            self._api.delete("tpu", f"{API}/{resource}", **query)
        except GoogleRefused as problem:
            if problem.status != 404:
                return Removal(resource=resource, why=why, error=problem.message)
        except InfrastructureFailure as problem:
            return Removal(resource=resource, why=why, error=problem.message)
        return Removal(resource=resource, why=why)


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
