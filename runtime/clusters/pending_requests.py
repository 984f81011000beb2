"""Why requests in Ray wait for a place, each with its next step. Pure.

A request is known by what it asks of one host. The driver of a job of ours knows more of it, which `runtime explain` shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from runtime.clusters.nodes import ALIVE, TpuNode, count_chips
from runtime.clusters.pools import Pool
from runtime.units import count_noun

_HEAD: Final = re.compile(r"TPU-(?P<type>.+)-head")
"""The resource that only the first host of a slice has."""
_ANY: Final = re.compile(r"CPU|memory|object_store_memory|(?:accelerator_type|node):.*")
"""Resources of which a pool's type does not say how many a host has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A place that may hold a request: a pool, or nodes beside the pools, such as members."""

    pool: str | None
    accelerator: str | None
    names: frozenset[str]
    """Names of its nodes, each of which is a resource of that slice's hosts."""
    most: int
    live: int
    coming: int
    """Nodes that are being made."""
    idle: int
    """Nodes that Ray sees whole, and on which nothing runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    pool: str | None
    """The only pool that could hold it."""
    what: str
    next: str


def make_offers(
    pools: Sequence[Pool], nodes: Sequence[TpuNode], dead: frozenset[str], coming: frozenset[str], idle: frozenset[str]
) -> list[Offer]:
    """`dead`, `coming` and `idle` are names of nodes."""
    known = {pool.name: pool for pool in pools}
    offers = []
    for name in dict.fromkeys((*known, *(node.pool or "" for node in nodes))):
        mine = [node for node in nodes if (node.pool or "") == name and node.state in ALIVE and node.name not in dead]
        pool = known.get(name)
        if pool is None and not mine:
            continue
        offers.append(
            Offer(
                pool=name or None,
                accelerator=pool.accelerator if pool else mine[0].accelerator or None,
                names=frozenset(node.name for node in mine),
                most=pool.max if pool else len(mine),
                live=len(mine),
                coming=sum(node.name in coming for node in mine),
                idle=sum(node.name in idle for node in mine),
            )
        )
    return offers


def explain_requests(key: str, wanted: Mapping[str, int], offers: Sequence[Offer]) -> Iterator[Waits]:
    """Yield why each of `wanted` waits. `key` is the name by which commands know the cluster."""
    for text, count in wanted.items():
        needs = {str(name): float(amount) for name, amount in json.loads(text).items() if amount}
        able = [offer for offer in offers if _holds(offer, needs)]
        wait = f"{count_noun(count, 'request')} for {_describe(needs)} {'waits' if count == 1 else 'wait'}"
        why, step = _explain(key, able) if able else _explain_none(needs, offers)
        yield Waits(pool=able[0].pool if len(able) == 1 else None, what=f"{wait}: {why}", next=step)


def _explain(key: str, able: Sequence[Offer]) -> tuple[str, str]:
    live, most = sum(offer.live for offer in able), sum(max(offer.most, offer.live) for offer in able)
    if coming := sum(offer.coming for offer in able):
        made = "is being made" if coming == 1 else "are being made"
        return f"{count_noun(coming, 'node')} {made}", "it starts by itself when a node has joined; look again"
    if idle := sum(offer.idle for offer in able):
        works = "works" if idle == 1 else "work"
        return (
            f"{idle:,} of {count_noun(live, 'node')} {works} on nothing",
            "it starts within seconds, unless it asks for more CPUs, memory or hosts at once: `runtime explain JOB`",
        )
    if live >= most:
        there = f"{count_noun(live, 'node')} of at most {most:,} {'is' if live == 1 else 'are'} there, and none is free"
        return (
            there if most else "the pools that could hold it allow no node",
            "it starts by itself when there is room; a higher `max` of the pool, then `pulumi up`, allows more nodes",
        )
    return (
        f"no node is being made, although {most - live:,} more may be",
        f"the autoscaler says why: `runtime cluster exec --cluster {key} -- sudo docker logs --tail 100 ray`",
    )


def _explain_none(needs: Mapping[str, float], offers: Sequence[Offer]) -> tuple[str, str]:
    types = ", ".join(sorted({offer.accelerator for offer in offers if offer.accelerator})) or "none"
    for name in needs:
        if found := _HEAD.fullmatch(name):
            return (
                f"no pool and no node has that type, only {types}",
                f"`runtime cluster add {found['type']}` adds one, or a pool of that type in the stack file; else end the job",
            )
    for name in needs:
        if name != "TPU" and not _ANY.fullmatch(name):
            return f"no pool and no node has `{name}`", "end the job, and ask for what the cluster has"
    most = max((count_chips(offer.accelerator or "") or 0 for offer in offers), default=0)
    return (
        f"a host has at most {count_noun(most, 'chip')} (types: {types})",
        "end the job, and ask for fewer chips of a host, or for a slice by `resources.tpu.type`",
    )


def _holds(offer: Offer, needs: Mapping[str, float]) -> bool:
    """Whether a node of `offer` may hold it, as far as its type says. One of a type that is not known may hold anything."""
    chips = count_chips(offer.accelerator or "")
    for name, amount in needs.items():
        if found := _HEAD.fullmatch(name):
            if found["type"] != offer.accelerator:
                return False
        elif name == "TPU":
            if chips is not None and amount > chips:
                return False
        elif not _ANY.fullmatch(name) and name not in offer.names:
            return False
    return True


def _describe(needs: Mapping[str, float]) -> str:
    """`4 TPU and 1 CPU`; a slice's first host is `a v4-16`"""
    words = []
    for name, amount in needs.items():
        found = _HEAD.fullmatch(name)
        if found:
            words.append(f"a {found['type']}")
        elif name in ("memory", "object_store_memory"):
            words.append(f"{amount / 2**30:.4g} GiB of memory")
        else:
            words.append(f"{amount:g} {name}")
    return " and ".join(words) or "nothing"
