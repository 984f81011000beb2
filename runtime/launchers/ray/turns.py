"""Whose turn it is when a run gets a place: the claims of a head's drivers, and which of them is better than ours. Pure.

A driver whose run is given a place by Ray gives it back if a run that waits has the better claim to it: an owner within the
budget, then a higher priority, then an owner who holds less. docs/decisions/turns-on-ray.md has the reasons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from runtime.jobs.spec import Priority
from runtime.launchers.ray.cluster_state import NodeView
from runtime.launchers.ray.pending_reason import fits
from runtime.launchers.ray.placement import list_firsts
from runtime.units import count_noun
from runtime.values import dataclass, field, replace

RANKS: Final = {priority: rank for rank, priority in enumerate(Priority)}
"""Higher goes first."""
EVERYONE_ELSE: Final = "default"
"""Whose budget people have who are not named."""
_TPU: Final = "TPU "
_EPSILON: Final = 1e-6


class Cause(StrEnum):
    PRIORITY = "priority"
    BUDGET = "budget"
    """Its owner is within the budget, ours is not, and its priority is not higher."""
    SHARE = "share"


CHANCE_S: Final = {Cause.PRIORITY: 3600.0, Cause.BUDGET: 30.0, Cause.SHARE: 30.0}
"""How long places are kept for a run that does not take one, since the last one became free for it."""
REST: Final = 12.0
"""After how many times this it has another chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What each run of a driver asks for, and for whom."""

    job: str
    owner: str
    priority: Priority = Priority.NORMAL
    kind: str
    """Runs of one kind take turns: `TPU v4-8`, `GPU` or `CPU`."""
    need: Mapping[str, float]
    """Resources of each place that a run asks for; of a TPU with several hosts, what its first host has."""
    places: int = 1
    """Places of a run, each on a node of its own."""
    units: float = 1.0
    """What a run holds, for shares: chips, GPUs or CPUs."""

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for demands between which it makes no difference who is served."""
        return self.owner, self.priority, self.kind, tuple(sorted(self.need.items())), self.places


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a driver's runs wait for and hold."""

    demand: Demand
    waiting: int = 0
    """Runs that ask Ray for a place, or let another run go first."""
    since: float = 0.0
    """When the first of them began to wait, in seconds of the machine's monotonic clock: nobody sets it."""
    holding: int = 0
    taken: int = 0
    """Places that its runs have taken so far."""
    spent: bool = False
    """Whether its owner holds as many TPU chips as the budget, or more."""

    @property
    def rank(self) -> tuple[bool, int]:
        """Greater goes first, whatever is held."""
        return not self.spent, RANKS[self.demand.priority]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A budget that is used up."""

    owner: str
    held: float
    """TPU chips, of all types together."""
    budget: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A claim that goes first, with the reason."""

    job: str
    owner: str
    priority: str
    cause: Cause
    theirs: float
    """What its owner holds of the kind, in units of `what`."""
    ours: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """Since when places are kept for the claims of a key, and how it stood then."""

    since: float
    taken: int
    ready: int


@dataclass(slots=True, kw_only=True)
class Chances:
    """What a driver remembers of the claims that it lets go first, so that none that cannot be served holds others up."""

    known: dict[tuple[object, ...], Chance] = field(default_factory=dict)

    def has(self, key: tuple[object, ...], cause: Cause, *, taken: int, ready: int, now: float) -> bool:
        """Whether the claims of a key may still go first, for this cause: near a budget it changes from moment to moment.

        `taken` counts the places that they took, `ready` those of one run that have room now. A chance begins again whenever a
        place was taken, and with each further one that has room.
        """
        key = (cause, *key)
        span, before = CHANCE_S[cause], self.known.get(key)
        rested = before is not None and not 0 <= now - before.since < span * (1 + REST)
        if before is None or rested or before.taken != taken or ready > before.ready:
            before = self.known[key] = Chance(since=now, taken=taken, ready=ready)
        return now - before.since < span


def make_demand(order: Mapping[str, Any], job: str) -> Demand:
    """Read the demand of a job's runs from its order; an order of an earlier version names neither priority nor owner."""
    turn, wants, nodes = order.get("turn") or {}, order["ray"], int(order["nodes"])
    named = turn.get("priority")
    firsts = list_firsts(wants, nodes)
    need = {name: float(amount) for name, amount in firsts[0][0].items() if amount}
    if tpu := wants.get("tpu"):
        kind, units = f"{_TPU}{tpu['type']}", float(tpu["chips"])
    elif "GPU" in need:
        kind, units = "GPU", need["GPU"]
    else:
        kind, units = "CPU", need.get("CPU", 0.0)
    return Demand(
        job=job,
        owner=str(turn.get("owner") or ""),
        priority=Priority(named) if named in list(Priority) else Priority.NORMAL,
        kind=kind,
        need=need,
        places=len(firsts),
        units=max(units, 0.001) * nodes,
    )


def find_spent(claims: Sequence[Claim], budgets: Mapping[str, float]) -> dict[str, Spent]:
    """Owner → the budget that is used up. Who has no name has no budget."""
    held: dict[str, float] = {}
    for each in claims:
        if (owner := each.demand.owner) and each.demand.kind.startswith(_TPU):
            held[owner] = held.get(owner, 0.0) + each.holding * each.demand.units
    limits = {owner: budgets.get(owner, budgets.get(EVERYONE_ELSE)) for owner in held}
    return {
        owner: Spent(owner=owner, held=held[owner], budget=limit)
        for owner, limit in limits.items()
        if limit is not None and held[owner] >= limit
    }


def mark_spent(claims: Sequence[Claim], spent: Mapping[str, Spent]) -> list[Claim]:
    """The claims; those for TPUs whose owner's budget is used up say so."""
    return [
        replace(each, spent=True) if each.demand.owner in spent and each.demand.kind.startswith(_TPU) else each
        for each in claims
    ]


def list_rivals(mine: Claim, others: Sequence[Claim], spare: int = 0) -> list[tuple[Claim, Cause]]:
    """The claims that are better than ours if a place suits them, the best first.

    `spare` counts further places that our runs were given and that are undecided: were they given back too, a rival of the same
    priority would hold that much more. So nobody gives back what leaves both with unequal shares the other way round, and no
    two claims are each better than the other.
    """
    us, held = mine.demand, count_held(mine.demand.kind, [mine, *others])
    found = []
    for each in others:
        them = each.demand
        if not each.waiting or them.kind != us.kind:
            continue
        if each.rank > mine.rank:
            higher = RANKS[them.priority] > RANKS[us.priority]
            found.append((each, Cause.PRIORITY if higher else Cause.BUDGET))
        elif each.rank == mine.rank and them.owner != us.owner:
            more = them.units * min(spare + 1, each.waiting)
            if held.get(them.owner, 0.0) + more <= held.get(us.owner, 0.0) + _EPSILON:
                found.append((each, Cause.SHARE))

    def order(rival: tuple[Claim, Cause]) -> tuple[object, ...]:
        claim, them = rival[0], rival[0].demand
        return claim.spent, -RANKS[them.priority], held.get(them.owner, 0.0), claim.since, them.job

    return sorted(found, key=order)


def find_better(
    mine: Claim,
    others: Sequence[Claim],
    place: Sequence[str],
    nodes: Mapping[str, NodeView],
    chances: Chances,
    *,
    now: float,
    spare: int = 0,
) -> Better | None:
    """The best claim that a place is kept for; None if it is ours to take.

    `place` names the nodes of the place, which counts as free in `nodes`. A claim that the living nodes could not serve, even
    if all were free, keeps no place, nor does one that enough better nodes are becoming free for.
    """
    found = _find_keeper(_list_keepers(mine, others, nodes, spare), place, chances, now)
    if found is None:
        return None
    them, held = found.claim.demand, count_held(mine.demand.kind, [mine, *others])
    return Better(
        job=them.job,
        owner=them.owner,
        priority=them.priority.value,
        cause=found.cause,
        theirs=held.get(them.owner, 0.0),
        ours=held.get(mine.demand.owner, 0.0),
        what=name_units(them.kind),
    )


class _Able:
    """The nodes that could hold a place, by how much of what it needs is free there; of equal ones the last by name is best."""

    def __init__(self, need: Mapping[str, float], nodes: Mapping[str, NodeView]) -> None:
        self._shares = {name: _readiness(need, node.free) for name, node in nodes.items() if fits(need, node.total)}
        self._sorted = sorted((share, name) for name, share in self._shares.items())

    def __len__(self) -> int:
        return len(self._sorted)

    def count_better(self, name: str) -> int | None:
        share = self._shares.get(name)
        return None if share is None else len(self._sorted) - 1 - bisect_left(self._sorted, (share, name))

    def count_ready(self, places: int) -> int:
        """How many of so many places have room now."""
        return sum(share >= 1 for share, _ in self._sorted[-places:])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keeper:
    """A better claim that the nodes could serve."""

    claim: Claim
    cause: Cause
    able: _Able
    taken: int
    """Places that the claims like this one have taken."""

    def wants(self, name: str, wanted: int) -> bool:
        """Whether a node is among the best for this claim, after `wanted` nodes for others."""
        better = self.able.count_better(name)
        return better is not None and better < wanted + self.count

    @property
    def count(self) -> int:
        return self.claim.waiting * self.claim.demand.places


def _list_keepers(mine: Claim, others: Sequence[Claim], nodes: Mapping[str, NodeView], spare: int) -> list[_Keeper]:
    """The best first."""
    found: list[_Keeper] = []
    known: dict[tuple[tuple[str, float], ...], _Able] = {}
    taken: dict[tuple[object, ...], int] = {}
    for each in others:
        taken[each.demand.key] = taken.get(each.demand.key, 0) + each.taken
    for rival, cause in list_rivals(mine, others, spare):
        them = rival.demand
        need = tuple(them.need.items())
        if need not in known:
            known[need] = _Able(them.need, nodes)
        able = known[need]
        if len(able) >= them.places:
            found.append(_Keeper(claim=rival, cause=cause, able=able, taken=taken[them.key]))
    return found


def _find_keeper(keepers: Sequence[_Keeper], place: Sequence[str], chances: Chances, now: float) -> _Keeper | None:
    wanted = 0
    for each in keepers:
        them = each.claim.demand
        ready = each.able.count_ready(them.places)
        if not any(each.wants(name, wanted) for name in place):
            wanted += each.count
        elif chances.has(them.key, each.cause, taken=each.taken, ready=ready, now=now):
            return each
    return None


def give_back(nodes: Mapping[str, NodeView], place: Sequence[str], need: Mapping[str, float]) -> dict[str, NodeView]:
    """The nodes as they are once a place is given back."""
    found = dict(nodes)
    for name in place:
        if (node := found.get(name)) is not None:
            more = {each: node.free.get(each, 0.0) + amount for each, amount in need.items()}
            found[name] = replace(node, free={**node.free, **more})
    return found


def find_spots(
    mine: Claim, others: Sequence[Claim], nodes: Mapping[str, NodeView], chances: Chances, *, now: float
) -> list[str]:
    """Nodes that have room for one of our runs and are kept for nobody, each as often as it has room."""
    need, found = mine.demand.need, []
    keepers = _list_keepers(mine, others, nodes, spare=0)
    for name, node in nodes.items():
        room = min(int(node.free.get(each, 0.0) / amount + _EPSILON) for each, amount in need.items())
        if room and _find_keeper(keepers, [name], chances, now) is None:
            found += [name] * min(room, mine.waiting)
    return found


def count_held(kind: str, claims: Sequence[Claim]) -> dict[str, float]:
    """Owner → units of the kind that their runs hold."""
    found: dict[str, float] = {}
    for each in claims:
        if each.demand.kind == kind:
            found[each.demand.owner] = found.get(each.demand.owner, 0.0) + each.holding * each.demand.units
    return found


def name_units(kind: str) -> str:
    """What the shares of a kind are counted in."""
    return f"chips of {kind}" if kind.startswith(_TPU) else f"{kind}s"


def tell_order(mine: Claim, others: Sequence[Claim]) -> list[str]:
    """Lines on who waits before our runs, for `explain`."""
    us = mine.demand
    before = {cause: sum(each.waiting for each, why in list_rivals(mine, others) if why is cause) for cause in Cause}
    held = count_held(us.kind, [mine, *others]).get(us.owner, 0.0)
    holds = f"{us.owner} holds" if us.owner else "the owner of this job holds"
    whose = {
        Cause.PRIORITY: (f"of higher priority than {us.priority.value}", f"for {us.kind} too"),
        Cause.BUDGET: ("of people within their budgets", f"for {us.kind} too"),
        Cause.SHARE: (f"of people who hold fewer {name_units(us.kind)}", f"too; {holds} {held:g}"),
    }
    return [
        f"{count_noun(before[cause], 'run')} {of} {'asks' if before[cause] == 1 else 'ask'} {rest}"
        for cause, (of, rest) in whose.items()
        if before[cause]
    ]


def _readiness(need: Mapping[str, float], free: Mapping[str, float]) -> float:
    """How much of what is needed is free, 0 to 1, by the resource of which there is least."""
    return min([1.0, *(free.get(name, 0.0) / amount + _EPSILON for name, amount in need.items())])
