"""Why a run waits for a place: its request, against the resources that the cluster has, may have and was refused. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from runtime.end_reasons import Explanation
from runtime.launchers.ray.cluster_state import ClusterView, PoolView, Refusal
from runtime.launchers.ray.placement import head_of
from runtime.units import count_noun


def explain_wait(wants: Mapping[str, Any], nodes: int, view: ClusterView) -> Explanation:
    """Explain why runs that want this wait. `wants` is the order's `ray`, `nodes` the number of nodes of a run.

    The sentence has no subject: it goes on from "it waits for N hosts of TPU v4-16: ".
    """
    needs = find_needs(wants)
    lines = _report_cluster(view)
    return (
        _explain_missing_type(wants, view, lines)
        or _explain_impossible(needs, nodes, view, lines)
        or _explain_busy(needs, view, lines)
    )


def find_needs(wants: Mapping[str, Any]) -> dict[str, float]:
    """Resources of each node of a run, on its first host."""
    needs = {str(name): float(amount) for name, amount in wants.get("bundle", {}).items() if amount}
    if tpu := wants.get("tpu"):
        needs |= {"TPU": float(tpu["chips"]), head_of(tpu["type"]): 1.0}
    return needs


def describe_demand(wants: Mapping[str, Any], nodes: int) -> str:
    """`2 hosts of TPU v4-16`, `3 nodes of 4 CPU, 1 GPU`, `100 CPU`"""
    if tpu := wants.get("tpu"):
        return f"{count_noun(nodes, 'host')} of TPU {tpu['type']}"
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in find_needs(wants).items())
    return amounts if nodes == 1 else f"{count_noun(nodes, 'node')} of {amounts}"


def name_offers(pools: Iterable[PoolView]) -> str:
    """`v4-8 (v4), v5litepod-4 (small)`"""
    return ", ".join(f"{pool.accelerator} ({pool.name})" for pool in pools) or "none"


def find_nearest(type_: str, pools: Iterable[PoolView]) -> str | None:
    """The type of a pool that has the same family and the nearest size; None if there is none of the family."""
    family, _, size = type_.rpartition("-")
    sizes = {int(offered.rpartition("-")[2]) for offered in _types(pools) if offered.rpartition("-")[0] == family}
    return f"{family}-{min(sizes, key=lambda each: abs(each - int(size)))}" if sizes else None


def warn_of_type(type_: str, pools: Sequence[PoolView], target: str) -> str | None:
    """A warning before the launch that no pool has a type. The run may still get its place: people add TPUs by hand,
    and only the cluster knows of those."""
    if type_ in _types(pools):
        return None
    nearest = find_nearest(type_, pools)
    return (
        f"no pool of `{target}` has TPUs of type {type_}; it has {name_offers(pools)}. The job waits until "
        f"`runtime cluster add {type_}` adds one" + (f"; the nearest type of a pool is {nearest}" if nearest else "")
    )


def _types(pools: Iterable[PoolView]) -> set[str]:
    return {pool.accelerator for pool in pools}


def _explain_missing_type(wants: Mapping[str, Any], view: ClusterView, lines: list[str]) -> Explanation | None:
    tpu = wants.get("tpu")
    if tpu is None or any(head_of(tpu["type"]) in node.total for node in view.nodes):
        return None
    if view.pools is None or any(pool.accelerator == tpu["type"] for pool in view.pools):
        return None
    nearest = find_nearest(tpu["type"], view.pools)
    instead = f"resources.tpu.type: {nearest}; or " if nearest else ""
    return Explanation(
        sentence="no node and no pool of the cluster has that type, so it waits until such a TPU is added",
        evidence=(f"the pools offer {name_offers(view.pools)}", *lines),
        hint=f"{instead}`runtime cluster add {tpu['type']}` adds one",
    )


def _explain_impossible(
    needs: Mapping[str, float], nodes: int, view: ClusterView, lines: list[str]
) -> Explanation | None:
    """Explain a demand that no node could hold. Without known pools, an autoscaler at work may make such a node.

    That Ray has an autoscaler's report proves no autoscaler: a head that was started without one has it too.
    """
    hosts = [node.total for node in view.nodes] + [pool.host for pool in view.pools or ()]
    if not hosts or (view.pools is None and (view.coming or view.refusals or view.error)):
        return None
    ever = "no node could ever hold it" if view.pools is not None else "no node that is there could hold it"
    hint = "ask for less, or name another target"
    for name, amount in needs.items():
        # A pool's memory is not in its contract.
        if name == "memory" and any("memory" not in host for host in hosts):
            continue
        largest = max(host.get(name, 0.0) for host in hosts)
        if amount > largest:
            has = f"the largest offers {_amount(name, largest)}" if largest else "none offers any"
            return Explanation(f"{ever}: it asks for {_amount(name, amount)}, and {has}", tuple(lines), hint)
    if not any(fits(needs, host) for host in hosts):
        return Explanation(f"{ever}: each part of it is there, but not all of them on one node", tuple(lines), hint)
    if "TPU" in needs:
        return None
    room = sum(fits(needs, node.total) for node in view.nodes) if view.pools is None else _most(needs, view)
    if room >= nodes:
        return None
    most = "are there" if view.pools is None else "can be there"
    text = f"it asks for {count_noun(nodes, 'node')} at once, and {room} that could hold one of them {most}"
    return Explanation(text, tuple(lines), hint)


def _explain_busy(needs: Mapping[str, float], view: ClusterView, lines: list[str]) -> Explanation:
    able = [node for node in view.nodes if fits(needs, node.total)]
    pools = {pool.name for pool in view.pools or () if fits(needs, pool.host)}
    busy = sum(not fits(needs, node.free) for node in able)
    if view.pools:
        there = f"{len(able)} of at most {_most(needs, view)} nodes are there"
    else:
        there = f"{count_noun(len(able), 'node')} could hold it"
    idle = len(able) - busy
    standing = f"{there}, {'all busy' if able and not idle else f'{busy} busy'}" if able else there
    mine = [each for each in view.refusals if not pools or each.pool in pools]
    dead = sum(count for pool, count in view.dead.items() if not pools or pool in pools)
    coming = sum(count for pool, count in view.coming.items() if not pools or pool in pools)
    if view.error:
        first = view.error.strip().splitlines()[-1]
        return Explanation(
            f"the autoscaler has ended: {first}",
            (standing, *lines),
            "`runtime cluster restart` starts it again; `sudo docker logs --tail 100 ray` on the head has more",
        )
    if mine:
        return Explanation(describe_refusals(mine), (standing, *lines), _step_of(mine[-1], dead))
    if coming:
        return Explanation(
            f"{count_noun(coming, 'node')} that could hold it {_is(coming)} being made", (standing, *lines)
        )
    if dead:
        return Explanation(
            f"{standing}, and {count_noun(dead, 'node')} {_is(dead)} dead and may hold quota",
            tuple(lines),
            "`runtime cluster status`, then `runtime cluster reap`",
        )
    # Ray places it within seconds if all nodes that it needs are free at once.
    return Explanation(standing, tuple(lines), "it starts by itself when there is room")


def describe_refusals(refusals: Sequence[Refusal]) -> str:
    """`the autoscaler could not make nodes: no more capacity in us-central2-b (stock-out), 14 times since 10:02 UTC`"""
    last = refusals[-1]
    kind = f" ({last.kind})" if last.kind and last.kind not in last.text.lower() else ""
    since = datetime.fromtimestamp(refusals[0].at, UTC)
    times = "once, at" if len(refusals) == 1 else f"{len(refusals):,} times since"
    return f"the autoscaler could not make nodes: {last.text.rstrip('.')}{kind}, {times} {since:%H:%M} UTC"


def _step_of(refusal: Refusal, dead: int) -> str:
    if refusal.kind == "quota":
        first = "dead nodes hold quota: `runtime cluster reap`; or " if dead else ""
        return f"{first}ask for more quota, or for another type"
    if refusal.kind == "stock-out":
        return "it starts by itself when the zone has capacity again; another zone or type may have some now"
    return "`sudo docker logs --tail 100 ray` on the head has the autoscaler's own words"


def _report_cluster(view: ClusterView) -> list[str]:
    lines = []
    if view.coming:
        lines.append(f"nodes that are being made: {_counts(view.coming)}")
    if view.dead:
        lines.append(f"nodes that the autoscaler counts as dead: {_counts(view.dead)}")
    return lines


def _most(needs: Mapping[str, float], view: ClusterView) -> int:
    """How many nodes that could hold it the pools allow, and those that are there beyond them, such as added ones."""
    pools = sum(pool.most for pool in view.pools or () if fits(needs, pool.host))
    return max(pools, sum(fits(needs, node.total) for node in view.nodes))


def fits(needs: Mapping[str, float], host: Mapping[str, float]) -> bool:
    """Whether a node with these resources could hold it. Memory counts only if it is known."""
    known = needs if "memory" in host else {name: amount for name, amount in needs.items() if name != "memory"}
    return all(host.get(name, 0.0) >= amount - 1e-6 for name, amount in known.items())


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.4g} GiB of memory" if name == "memory" else f"{amount:g} {name}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of pool `{pool}`" for pool, count in sorted(counts.items()))


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
