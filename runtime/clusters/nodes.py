"""TPU nodes, queued resources and heads as Google lists them, in the parts that operators and the reaper use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from runtime.tpu_shapes import find_shape, is_known

CLUSTER_LABEL: Final = "ray-cluster-name"
KIND_LABEL: Final = "ray-node-type"
POOL_LABEL: Final = "ray-user-node-type"
MANAGED_LABEL: Final = ("managed-by", "research-runtime")
"""The label that every resource of our stacks has, nodes of Ray among them."""
STACK_LABEL: Final = "stack"
JOINS_LABEL: Final = "runtime-cluster"
"""Ray's name of the cluster that a member joins. Ray's autoscaler ends nodes with `CLUSTER_LABEL` that it did not make, so members
have this one instead."""
MEMBER_LABEL: Final = "runtime-member"

MAKER_LABEL: Final = "runtime-maker"
"""The call of `runtime cluster add` that makes a member, by a random word of its own."""
UNTIL_LABEL: Final = "runtime-maker-until"
"""The time until which that call waits for the member, in seconds since 1970 by Google's clock."""

ALIVE: Final = frozenset({"CREATING", "STARTING", "RESTARTING", "READY"})
"""States that Ray counts."""
DEAD: Final = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "UNKNOWN"})
"""States that a node does not leave by itself; Ray stops no node that it means to start again. A node in any other state,
such as DELETING, REPAIRING or REIMAGING, is changing."""
SPENT: Final = frozenset({"FAILED", "SUSPENDED"})
"""States of a queued resource that gives no more nodes."""

_SECONDS: Final = re.compile("[0-9]{1,11}")
_CAPACITIES: Final = ("reserved", "spot", "preemptible")


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuNode:
    resource: str
    """`projects/P/locations/Z/nodes/N`"""
    state: str
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime | None = None
    accelerator: str = ""
    """`v4-16`; empty if Google does not state it."""
    addresses: tuple[str, ...] = ()
    """Internal addresses of the hosts that Google lists, the first host's first."""
    queued_resource: str | None = None
    """The queued resource that asked for this node; Google deletes the node with it."""
    capacity: str = "on_demand"
    """`reserved`, `spot`, `preemptible` or `on_demand`."""
    reservation: str | None = None
    """The reservation that was asked for by name."""
    runtime_version: str | None = None
    """TPU software; None if Google does not state it."""

    @property
    def name(self) -> str:
        return self.resource.rpartition("/")[2]

    @property
    def member(self) -> str | None:
        """The name of a member, which `runtime cluster add` made; None for a node that Ray made.

        It is the node's own name: a label can be edited, and two nodes can have the same one.
        """
        return self.name if is_member(self.labels) else None

    @property
    def maker(self) -> str | None:
        """The call that made a member, if it said so."""
        return self.labels.get(MAKER_LABEL)

    @property
    def maker_until(self) -> datetime | None:
        """The time until which a member's maker waits for it; None if that is not known."""
        text = self.labels.get(UNTIL_LABEL, "")
        return datetime.fromtimestamp(int(text), UTC) if _SECONDS.fullmatch(text) else None

    @property
    def pool(self) -> str | None:
        """Ray's name of the pool, or `member NAME`."""
        member = self.member
        return self.labels.get(POOL_LABEL) if member is None else f"member {member}"

    @property
    def cluster(self) -> str | None:
        """Ray's name of the cluster; None for a head and for a node that is not a cluster's."""
        return find_cluster(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedResource:
    resource: str
    """`projects/P/locations/Z/queuedResources/N`"""
    state: str
    labels: tuple[Mapping[str, str], ...] = ()
    """Labels of each node that it asks for."""

    @property
    def name(self) -> str:
        return self.resource.rpartition("/")[2]

    @property
    def cluster(self) -> str | None:
        """Ray's name of the cluster of all nodes that it asks for; None if they have none, or not all the same."""
        clusters = {find_cluster(labels) for labels in self.labels}
        return clusters.pop() if len(clusters) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneView:
    """Everything that Google lists in a zone, at one time."""

    nodes: tuple[TpuNode, ...] = ()
    queued: tuple[QueuedResource, ...] = ()
    heads: Mapping[str, datetime | None] | None = None
    """Ray's name of each cluster that has a head → when that was made; None if heads cannot be listed."""
    no_heads: str | None = None
    """Why heads cannot be listed."""


def is_member(labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels is a member of a cluster."""
    key, maker = MANAGED_LABEL
    return labels.get(key) == maker and JOINS_LABEL in labels and CLUSTER_LABEL not in labels


def find_cluster(labels: Mapping[str, str]) -> str | None:
    if labels.get(KIND_LABEL) == "head":
        return None
    return labels.get(JOINS_LABEL if is_member(labels) else CLUSTER_LABEL)


def parse_node(item: Mapping[str, Any]) -> TpuNode:
    scheduling = item.get("schedulingConfig", {})
    return TpuNode(
        resource=str(item["name"]),
        state=str(item.get("state", "STATE_UNSPECIFIED")),
        labels=dict(item.get("labels", {})),
        created_at=_parse_time(item.get("createTime")),
        accelerator=str(item.get("acceleratorType", "")),
        addresses=tuple(str(each["ipAddress"]) for each in item.get("networkEndpoints", ()) if each.get("ipAddress")),
        queued_resource=_text(item.get("queuedResource")),
        capacity=next((each for each in _CAPACITIES if scheduling.get(each)), "on_demand"),
        reservation=_text(scheduling.get("reservationName")),
        runtime_version=_text(item.get("runtimeVersion")),
    )


def parse_queued(item: Mapping[str, Any]) -> QueuedResource:
    return QueuedResource(
        resource=str(item["name"]),
        state=str(item.get("state", {}).get("state", "STATE_UNSPECIFIED")),
        labels=tuple(dict(spec.get("node", {}).get("labels", {})) for spec in item.get("tpu", {}).get("nodeSpec", ())),
    )


def parse_heads(instances: Iterable[Mapping[str, Any]]) -> dict[str, datetime | None]:
    """Return cluster → when its head was made. Of two heads of one cluster the older counts."""
    heads: dict[str, datetime | None] = {}
    for instance in instances:
        labels = instance.get("labels", {})
        cluster = labels.get(CLUSTER_LABEL)
        if cluster is None or labels.get(KIND_LABEL) != "head":
            continue
        made = _parse_time(instance.get("creationTimestamp"))
        known = heads.get(cluster, made)
        heads[cluster] = None if made is None or known is None else min(made, known)
    return heads


def count_hosts(accelerator: str) -> int | None:
    """Return the machines of a slice of type `accelerator`: 2 for `v4-16`; None for a type of an unknown family."""
    shape = find_shape(accelerator) if is_known(accelerator) else None
    return shape[0] if shape else None


def count_chips(accelerator: str) -> int | None:
    """Return the chips that each host of a slice sees: 4 for `v4-16`; None for a type of an unknown family."""
    shape = find_shape(accelerator) if is_known(accelerator) else None
    return shape[1] if shape else None


def _text(value: object) -> str | None:
    return str(value) if value else None


def _parse_time(text: object) -> datetime | None:
    """Raises `ValueError` for a text that is not a time, or a time without a zone."""
    at = datetime.fromisoformat(str(text)) if text else None
    if at is not None and at.tzinfo is None:
        raise ValueError(f"`{text}` names no time zone")
    return at
