"""The order of runs that wait on one head: a run of higher priority goes first. Pure; docs/ray.md describes the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runtime.jobs.spec import Priority
from runtime.launchers.ray.pending_reason import fits
from runtime.launchers.ray.placement import list_firsts
from runtime.units import count_noun

RANKS: Final = {priority: rank for rank, priority in enumerate(Priority)}
"""Higher goes first."""
PATIENCE_S: Final = 3600.0
"""How long a claim holds others back without taking a place, so that one that Ray cannot serve does not stop them for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The resources that each run of a driver requests, and its owner."""

    job: str
    owner: str
    priority: Priority = Priority.NORMAL
    kind: str
    """Runs of one kind compete: `TPU v4-8`, `GPU` or `CPU`."""
    need: Mapping[str, float]
    """Resources of each place that a run asks for; for a TPU with several hosts, those of its first host."""
    places: int = 1
    """Places of a run, each on a node of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The runs of a driver that wait."""

    demand: Demand
    waiting: int = 0
    """Runs that ask Ray for a place, or let another run go first."""
    since: float = 0.0
    """When the first of them asked, or when the driver's last run took a place; seconds of the machine's monotonic clock."""


def make_demand(order: Mapping[str, Any], job: str) -> Demand:
    """Read the demand of a job's runs from its order."""
    turn, wants = order["turn"], order["ray"]
    firsts = list_firsts(wants, int(order["nodes"]))
    need = {name: float(amount) for name, amount in firsts[0][0].items() if amount}
    tpu = wants.get("tpu")
    kind = f"TPU {tpu['type']}" if tpu else "GPU" if "GPU" in need else "CPU"
    return Demand(
        job=job,
        owner=str(turn["owner"]),
        priority=Priority(turn["priority"]),
        kind=kind,
        need=need,
        places=len(firsts),
    )


def find_ahead(
    mine: Demand, others: Sequence[Claim], totals: Sequence[Mapping[str, float]], *, now: float
) -> Claim | None:
    """Return the claim that our runs let go first: the highest, then the oldest; None if there is none.

    `totals` are the resources of the living nodes: a claim that they could not serve even if all were free holds nobody back.
    """
    ahead = [
        each
        for each in list_ahead(mine, others)
        if 0 <= now - each.since < PATIENCE_S
        and sum(fits(each.demand.need, total) for total in totals) >= each.demand.places
    ]
    return max(ahead, key=lambda each: (RANKS[each.demand.priority], -each.since), default=None)


def list_ahead(mine: Demand, others: Sequence[Claim]) -> list[Claim]:
    """Return the claims of higher priority to the same kind of room."""
    return [
        each
        for each in others
        if each.waiting and each.demand.kind == mine.kind and RANKS[each.demand.priority] > RANKS[mine.priority]
    ]


def describe_ahead(mine: Demand, others: Sequence[Claim]) -> list[str]:
    """Return a line on the runs that wait before ours, for `explain`; none without such runs."""
    count = sum(each.waiting for each in list_ahead(mine, others))
    ask = "asks" if count == 1 else "ask"
    return (
        [f"{count_noun(count, 'run')} of higher priority than {mine.priority.value} {ask} for {mine.kind} too"]
        if count
        else []
    )
