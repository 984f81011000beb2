"""How many nodes a cluster's pools need for their buffers, and what the autoscaler is asked for. Pure.

Ray's autoscaler knows a request for a total: resources that the cluster has to be able to hold were it idle. It makes nodes
for that within a pool's `max`, and ends none that it needs for it, however long that is idle. The buffer of a pool is
therefore a total that follows the busy nodes. The request is a list that programs replace as a whole, so what is not ours
in it stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.clusters.nodes import ALIVE
from runtime.outputs import is_pool_resource, pool_resource

if TYPE_CHECKING:
    from runtime.clusters.nodes import TpuNode
    from runtime.clusters.pools import Pool

Request = list[dict[str, Any]]
"""A dict of resources for each part that has to fit on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The nodes that a pool needs for its buffer."""

    pool: str
    buffer: int
    busy: int
    """Nodes on which something holds CPUs or TPUs."""
    max: int
    wanted: int
    """Nodes that the pool should have, idle and busy ones."""


def count_wanted(busy: int, buffer: int, most: int) -> int:
    """Return the nodes that a pool should have for its buffer; 0 if it has none."""
    return min(busy + buffer, most) if buffer > 0 else 0


def plan_buffers(
    pools: Sequence[Pool], nodes: Sequence[TpuNode], cluster: str, busy_hosts: Collection[str]
) -> tuple[Wish, ...]:
    """Return what each pool with a buffer needs. `cluster` is Ray's name, and `busy_hosts` are addresses.

    A node is busy if one of its hosts is. Members are in no pool: the autoscaler does not know them, and they neither fill
    a buffer nor take from it. While nodes of removed pools live, nothing is wanted.
    """
    waits = bool(find_removed_pools(pools, nodes, cluster))
    wishes = []
    for pool in pools:
        if pool.buffer <= 0:
            continue
        mine = [node for node in nodes if node.cluster == cluster and node.pool == pool.name and node.state in ALIVE]
        busy = sum(any(each in busy_hosts for each in node.addresses) for node in mine)
        wanted = 0 if waits else count_wanted(busy, pool.buffer, pool.max)
        wishes.append(Wish(pool=pool.name, buffer=pool.buffer, busy=busy, max=pool.max, wanted=wanted))
    return tuple(wishes)


def find_removed_pools(pools: Sequence[Pool], nodes: Sequence[TpuNode], cluster: str) -> list[str]:
    """Return the pools that have living nodes and that the stack no longer has.

    Beside any request, Ray's autoscaler looks up the type of every node, fails at these, and neither makes nor ends a node. Without a
    request it ends them.
    """
    known = {None, *(pool.name for pool in pools)}
    mine = [node for node in nodes if node.cluster == cluster and node.member is None and node.state in ALIVE]
    return sorted({node.pool or "" for node in mine if node.pool not in known})


def merge_request(current: Request, wishes: Sequence[Wish]) -> Request:
    """Return the request with our part replaced by `wishes`; the parts of other programs stay, before ours."""
    others = [each for each in current if not _is_ours(each)]
    return others + [{pool_resource(wish.pool): 1} for wish in wishes for _ in range(wish.wanted)]


def count_asked(current: Request, pool: str) -> int:
    """Return the nodes of the pool that the request has for its buffer."""
    return current.count({pool_resource(pool): 1})


def _is_ours(part: Mapping[str, Any]) -> bool:
    return bool(part) and all(map(is_pool_resource, part))
