"""Whose turn it is when a run gets a place: the claims of a head's drivers, and which of them is better than ours. Pure.

A driver whose run is given a place by Ray gives it back if a run that waits has the better claim to it: a higher priority, or
the same one and an owner who holds less. docs/decisions/turns-on-ray.md has the reasons.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from runtime.jobs.spec import Priority
from runtime.launchers.ray.decide import list_firsts
from runtime.launchers.ray.view import NodeView
from runtime.launchers.ray.waiting import fits
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
    SHARE = "share"


CHANCE_S: Final = {Cause.PRIORITY: 3600.0, Cause.SHARE: 10.0}
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
        """Whether the claims of a key may still go first.

        `taken` counts the places that they took, `ready` those of one run that have room now. A chance begins again whenever a
        place was taken, and with each further one that has room.
        """
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


def apply_budgets(claims: Sequence[Claim], budgets: Mapping[str, float]) -> list[Claim]:
    """The claims, with those for TPUs of an owner who holds as many chips as the budget as of low priority."""
    held: dict[str, float] = {}
    for each in claims:
        if each.demand.kind.startswith(_TPU):
            held[each.demand.owner] = held.get(each.demand.owner, 0.0) + each.holding * each.demand.units

    def is_spent(demand: Demand) -> bool:
        budget = budgets.get(demand.owner, budgets.get(EVERYONE_ELSE))
        return budget is not None and demand.kind.startswith(_TPU) and held.get(demand.owner, 0.0) >= budget

    return [
        replace(each, demand=replace(each.demand, priority=Priority.LOW)) if is_spent(each.demand) else each
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
        if RANKS[them.priority] > RANKS[us.priority]:
            found.append((each, Cause.PRIORITY))
        elif them.priority == us.priority and them.owner != us.owner:
            more = them.units * min(spare + 1, each.waiting)
            if held.get(them.owner, 0.0) + more <= held.get(us.owner, 0.0) + _EPSILON:
                found.append((each, Cause.SHARE))

    def rank(rival: tuple[Claim, Cause]) -> tuple[object, ...]:
        them = rival[0].demand
        return -RANKS[them.priority], held.get(them.owner, 0.0), rival[0].since, them.job

    return sorted(found, key=rank)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keeper:
    """A better claim that the nodes could serve."""

    claim: Claim
    cause: Cause
    able: Mapping[str, float]
    """Node → how much of what a place needs is free there, of the nodes that could hold one."""
    sorted: Sequence[float]
    """The values of `able`, rising."""
    taken: int
    """Places that the claims like this one have taken."""

    def wants(self, name: str, wanted: int) -> bool:
        """Whether a node is among the best for this claim, after `wanted` nodes for others."""
        if name not in self.able:
            return False
        better = len(self.sorted) - bisect_right(self.sorted, self.able[name])
        return better < wanted + self.count

    @property
    def count(self) -> int:
        return self.claim.waiting * self.claim.demand.places


def _list_keepers(mine: Claim, others: Sequence[Claim], nodes: Mapping[str, NodeView], spare: int) -> list[_Keeper]:
    """The best first."""
    found = []
    for rival, cause in list_rivals(mine, others, spare):
        them = rival.demand
        able = {name: _readiness(them.need, node.free) for name, node in nodes.items() if fits(them.need, node.total)}
        if len(able) >= them.places:
            taken = sum(each.taken for each in others if each.demand.key == them.key)
            found.append(_Keeper(claim=rival, cause=cause, able=able, sorted=sorted(able.values()), taken=taken))
    return found


def _find_keeper(keepers: Sequence[_Keeper], place: Sequence[str], chances: Chances, now: float) -> _Keeper | None:
    wanted = 0
    for each in keepers:
        them = each.claim.demand
        ready = min(them.places, sum(share >= 1 for share in each.sorted[-them.places :]))
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
    lines = []
    if count := before[Cause.PRIORITY]:
        lines.append(f"{count_noun(count, 'run')} of higher priority than {us.priority.value} ask for {us.kind} too")
    if count := before[Cause.SHARE]:
        held = count_held(us.kind, [mine, *others]).get(us.owner, 0.0)
        whose = f"{us.owner} holds" if us.owner else "the owner of this job holds"
        what = name_units(us.kind)
        lines.append(f"{count_noun(count, 'run')} of people who hold fewer {what} ask too; {whose} {held:g}")
    return lines


def _readiness(need: Mapping[str, float], free: Mapping[str, float]) -> float:
    """How much of what is needed is free, 0 to 1, by the resource of which there is least."""
    return min([1.0, *(free.get(name, 0.0) / amount + _EPSILON for name, amount in need.items())])
