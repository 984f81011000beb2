"""Compares what a stack wants of a cluster with what Google has, what Ray sees and what runs; names each mismatch with its
next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from runtime.clusters.nodes import ALIVE, DEAD, MANAGED_LABEL, TpuNode, ZoneView, count_hosts
from runtime.clusters.pending_requests import explain_requests, make_offers
from runtime.clusters.reap_policy import Suspicion
from runtime.clusters.warm_nodes import count_wanted
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.clusters.pools import Pool
    from runtime.clusters.ray_view import RayView
    from runtime.clusters.reap_policy import ReapPlan

JOINS_WITHIN: Final = timedelta(minutes=15)
"""A node that is younger may still be starting Ray."""
_NAMED: Final = 3
"""Nodes that a mismatch names; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDrift:
    pool: str
    accelerator: str | None
    capacity: str | None
    min: int
    max: int
    buffer: int = 0
    live: int
    """Nodes that Google makes or runs."""
    states: Mapping[str, int] = field(default_factory=dict)
    """Google's state → nodes."""
    dead: int = 0
    """Nodes that the reaper would remove."""
    ray: int | None = None
    """Nodes all of whose hosts Ray counts on; None if Ray was not asked."""
    busy: int | None = None
    """Nodes on which something runs."""
    member: bool = False
    """Whether this is a member, which `runtime cluster add` made, and no pool of Ray's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    pool: str | None
    what: str
    next: str
    """The next step."""


def compare_pools(
    pools: Sequence[Pool], view: ZoneView, cluster: str, plan: ReapPlan, ray: RayView | None
) -> list[PoolDrift]:
    """Return the contract's pools, then those that only nodes name, then members."""
    nodes = [node for node in view.nodes if node.cluster == cluster]
    known = {pool.name: pool for pool in pools}
    members = {node.pool or "": node for node in nodes if node.member is not None}
    strangers = sorted({node.pool or "" for node in nodes} - set(known) - set(members))
    dead = Counter(each.pool or "" for each in plan.dead if not each.is_queued)
    standings = []
    for name in (*known, *strangers, *sorted(members)):
        mine = [node for node in nodes if (node.pool or "") == name]
        pool, member = known.get(name), members.get(name)
        standings.append(
            PoolDrift(
                pool=name,
                accelerator=pool.accelerator if pool else member.accelerator if member else None,
                capacity=pool.capacity if pool else member.capacity if member else None,
                min=pool.min if pool else 0,
                max=pool.max if pool else 0,
                buffer=pool.buffer if pool else 0,
                live=sum(node.state in ALIVE for node in mine),
                states=dict(sorted(Counter(node.state for node in mine).items())),
                dead=dead[name],
                ray=None if ray is None else sum(_is_whole(node, ray) for node in mine),
                busy=None if ray is None else sum(any(each in ray.busy for each in node.addresses) for node in mine),
                member=member is not None,
            )
        )
    return standings


def find_mismatches(
    key: str,
    pools: Sequence[Pool],
    view: ZoneView,
    cluster: str,
    plan: ReapPlan,
    ray: RayView | None,
    now: datetime,
) -> Iterator[Mismatch]:
    """Yield what does not agree. `key` is the name by which commands know the cluster."""
    known = {pool.name for pool in pools}
    for each in compare_pools(pools, view, cluster, plan, ray):
        yield from _count_mismatches(key, each, known)
    if spent := sum(each.is_queued for each in plan.dead):
        yield Mismatch(
            pool=None, what=f"{count_noun(spent, 'queued resource')} will give no more nodes", next=_reaps(key)
        )
    yield from _suspects(key, plan)
    yield from _changing(key, [node for node in view.nodes if node.cluster == cluster], plan, ray)
    yield from _strays(view)
    if view.heads is not None and cluster not in view.heads:
        yield Mismatch(
            pool=None, what="the cluster has no head", next="`pulumi up --refresh`, or `runtime cluster stop` for good"
        )
    if ray is not None:
        nodes = [node for node in view.nodes if node.cluster == cluster]
        yield from _ray_mismatches(key, nodes, ray, now)
        yield from _requests(key, pools, nodes, plan, ray, now)


def _reaps(key: str) -> str:
    return f"the head's reaper removes them within 2 minutes; now: `runtime cluster reap --cluster {key}`"


def _count_mismatches(key: str, each: PoolDrift, known: set[str]) -> Iterator[Mismatch]:
    logs = f"runtime cluster exec --cluster {key} -- sudo docker logs --tail 100 ray"
    if each.dead:
        yield Mismatch(
            pool=each.pool,
            what=f"{count_noun(each.dead, 'node')} will never work again",
            next=_reaps(key),
        )
    if each.member:
        return
    if each.pool not in known:
        yield Mismatch(
            pool=each.pool,
            what=f"{count_noun(sum(each.states.values()), 'node')} of a pool that the stack does not have",
            next=f"Ray ends them once it reads the new settings (`runtime cluster config --check --cluster {key}`), unless a "
            "request waits: then it makes and ends no node at all until the pool is back in the stack file, with `min: 0` and `max: 0`",
        )
    elif each.live < each.min:
        yield Mismatch(
            pool=each.pool,
            what=f"{each.live} of at least {count_noun(each.min, 'node')} live",
            next=f"the autoscaler says why it makes none: `{logs}`",
        )
    elif each.live > each.max:
        yield Mismatch(
            pool=each.pool,
            what=f"{each.live} of at most {count_noun(each.max, 'node')} live",
            next=f"Ray ends the surplus once it reads the settings: `runtime cluster config --check --cluster {key}`",
        )
    elif each.busy is not None and each.live < (wanted := count_wanted(each.busy, each.buffer, each.max)):
        yield Mismatch(
            pool=each.pool,
            what=f"{each.live} of {count_noun(wanted, 'node')} live: {each.busy} busy, and a buffer of {each.buffer}",
            next="the head asks for the rest within a minute; if that lasts, "
            f"`runtime cluster exec --cluster {key} -- sudo journalctl -u runtime-ray-buffer -n 20` shows whether it does, "
            f"and `{logs}` why no node is made",
        )


def _suspects(key: str, plan: ReapPlan) -> Iterator[Mismatch]:
    groups: dict[tuple[str | None, str], list[str]] = {}
    for each in plan.waiting:
        # Deletions have lines of their own.
        if each.suspect.suspicion is Suspicion.DELETING:
            continue
        groups.setdefault((each.suspect.pool, each.suspect.what), []).append(each.suspect.name)
    for (pool, what), names in groups.items():
        yield Mismatch(
            pool=pool,
            what=f"{_name(names)}: {what}",
            next=f"the reaper removes it if that lasts; `runtime cluster reap --cluster {key} --dry-run` says when",
        )


def _changing(key: str, nodes: Sequence[TpuNode], plan: ReapPlan, ray: RayView | None) -> Iterator[Mismatch]:
    """Yield the nodes that neither run nor are dead. Google does not say since when, so the reader decides whether it lasts."""
    dead = {each.resource for each in plan.dead}
    groups: dict[tuple[str | None, str, bool], list[TpuNode]] = {}
    for node in nodes:
        if node.state not in ALIVE | DEAD and node.resource not in dead:
            busy = ray is not None and any(each in ray.busy for each in node.addresses)
            groups.setdefault((node.pool, node.state, busy), []).append(node)
    for (pool, state, busy), found in groups.items():
        names, several = _name([node.name for node in found]), len(found) > 1
        if state == "DELETING":
            still = f", and Ray counts work on {'them' if several else 'it'}" if busy else ""
            ends = "the work ends with its node and is placed again; " if busy else ""
            yield Mismatch(
                pool=pool,
                what=f"{names}: {'are' if several else 'is'} being deleted, and may hold quota until then{still}",
                next=f"{ends}the head's reaper asks for it again every 15 minutes; now:"
                f" `runtime cluster reap --cluster {key} --longest-deletion 0s`",
            )
        else:
            yield Mismatch(
                pool=pool,
                what=f"{names}: {state}, which Ray counts as no node" + (", and Ray counts work on it" if busy else ""),
                next=f"Google ends that by itself as a rule; if it lasts: {_removes(key, found[0])}",
            )


def _removes(key: str, node: TpuNode) -> str:
    """The command that removes a node, and with it what is wrong with it."""
    if node.member is not None:
        return f"`runtime cluster remove {node.member} --cluster {key}`, then `runtime cluster add` makes it again"
    _, project, _, zone, *_ = node.resource.split("/")
    gcloud = f"gcloud compute tpus tpu-vm delete {node.name} --zone {zone} --project {project}"
    return f"`{gcloud}`, and Ray makes another node"


def _requests(
    key: str, pools: Sequence[Pool], nodes: Sequence[TpuNode], plan: ReapPlan, ray: RayView, now: datetime
) -> Iterator[Mismatch]:
    coming = {node.name for node in nodes if node.state in ALIVE and (node.state != "READY" or _joins(node, ray, now))}
    idle = {
        node.name
        for node in nodes
        if node.state == "READY" and _is_whole(node, ray) and not any(each in ray.busy for each in node.addresses)
    }
    dead = frozenset(each.name for each in plan.dead if not each.is_queued)
    offers = make_offers(pools, nodes, dead, frozenset(coming), frozenset(idle))
    for each in explain_requests(key, ray.wanted, offers):
        yield Mismatch(pool=each.pool, what=each.what, next=each.next)


def _joins(node: TpuNode, ray: RayView, now: datetime) -> bool:
    """Whether a node may still be starting Ray."""
    return node.created_at is not None and now - node.created_at < JOINS_WITHIN and not _is_whole(node, ray)


def _strays(view: ZoneView) -> Iterator[Mismatch]:
    """Yield the nodes of ours that no cluster has, which no command removes: somebody edited their labels."""
    key, maker = MANAGED_LABEL
    ours = [each for each in view.nodes if each.labels.get(key) == maker and each.cluster is None]
    if ours:
        _, project, _, zone, *_ = ours[0].resource.split("/")
        yield Mismatch(
            pool=None,
            what=f"{_name([each.name for each in ours])}: made by a stack of ours, and the labels name no cluster",
            next=f"if nobody uses it: `gcloud compute tpus tpu-vm delete {ours[0].name} --zone {zone} --project {project}`",
        )


def _ray_mismatches(key: str, nodes: list[TpuNode], ray: RayView, now: datetime) -> Iterator[Mismatch]:
    missing: dict[str | None, list[str]] = {}
    for node in nodes:
        joined = sum(each in ray.alive for each in set(node.addresses))
        hosts = count_hosts(node.accelerator) or max(len(set(node.addresses)), 1)
        if node.state != "READY" or joined >= hosts or (node.created_at and now - node.created_at < JOINS_WITHIN):
            continue
        if joined:
            yield Mismatch(
                pool=node.pool,
                what=f"{node.name}: Ray sees {joined} of its {hosts} hosts",
                next=f"runtime cluster exec --cluster {key} --node {node.name}/HOST -- sudo journalctl -u runtime-ray-node -n 50",
            )
        else:
            missing.setdefault(node.pool, []).append(node.name)
    for pool, names in missing.items():
        yield Mismatch(
            pool=pool,
            what=f"{_name(names)}: Google runs what Ray does not see",
            next=f"runtime cluster exec --cluster {key} --node {names[0]} -- sudo journalctl -u runtime-ray-node -n 50",
        )
    known = {address for node in nodes for address in node.addresses}
    if strays := sorted(ray.alive - known):
        yield Mismatch(
            pool=None,
            what=f"{_name(strays)}: Ray sees a host that Google does not list for this cluster",
            next="Ray gives it up within a minute if its machine is gone; look again",
        )
    if ray.error:
        yield Mismatch(
            pool=None,
            what=f"the autoscaler failed: {ray.error.splitlines()[-1]}",
            next=f"runtime cluster exec --cluster {key} -- sudo docker logs --tail 100 ray",
        )


def _is_whole(node: TpuNode, ray: RayView) -> bool:
    hosts = count_hosts(node.accelerator) or max(len(set(node.addresses)), 1)
    return len({each for each in node.addresses if each in ray.alive}) >= hosts


def _name(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
