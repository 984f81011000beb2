"""Pure arithmetic: rounds of numbers → medians → ratios → whether each goal holds, and the table of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Rounds: TypeAlias = Mapping[str, Sequence[Mapping[str, float]]]
"""Cell → the numbers of each round in which it could be measured."""
Holds = Literal["yes", "no", "comparator absent", "not measured"]
NOISE = 0.03
"""Relative difference below which two figures count as equal."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of a cell."""

    cell: str
    number: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison of a goal: ours against one comparator's, or against a bound where `theirs` is None."""

    goal: int
    what: str
    ours: Figure
    theirs: Figure | None = None
    against: str = ""
    """The comparator's name."""
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "/s"
    plus: float = 0.0
    """Allowed on top of the bound's multiple of theirs, in the same unit."""
    limit: Figure | None = None
    """Cell that measures the limit of the machine, to see whether it could reach the goal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    check: Check
    ours: float | None
    theirs: float | None
    ratio: float | None
    """Ours divided by theirs; ours itself if the goal has a bound only."""
    spread: tuple[float, float] | None = None
    """The least and the greatest ratio of a round."""
    holds: Holds
    near: bool = False
    """The bound is missed by less than the noise."""
    reachable: bool = True
    """False if the machine's limit itself misses the bound."""


def median(rounds: Rounds, figure: Figure | None) -> float | None:
    """Median of all rounds; None if no round has it."""
    if figure is None:
        return None
    found = _each(rounds, figure)
    return statistics.median(found) if found else None


def judge(check: Check, rounds: Rounds) -> Verdict:
    ours, theirs = median(rounds, check.ours), median(rounds, check.theirs)
    if ours is None:
        return Verdict(check=check, ours=None, theirs=theirs, ratio=None, holds="not measured")
    if check.theirs is not None and theirs is None:
        return Verdict(check=check, ours=ours, theirs=None, ratio=None, holds="comparator absent")
    ratio = _ratio(ours, theirs)
    bounded = _ratio(ours - check.plus, theirs)
    best = median(rounds, check.limit)
    return Verdict(
        check=check,
        ours=ours,
        theirs=theirs,
        ratio=ratio,
        spread=_spread(check, rounds),
        holds="yes" if _within(check, bounded) else "no",
        near=not _within(check, bounded) and _within(check, bounded, slack=NOISE),
        reachable=best is None or _within(check, _ratio(best, theirs)),
    )


def _spread(check: Check, rounds: Rounds) -> tuple[float, float] | None:
    """Spread of the ratio; None if fewer than two rounds have both figures."""
    ours = _each(rounds, check.ours)
    theirs: Sequence[float | None] = _each(rounds, check.theirs) if check.theirs else [None] * len(ours)
    found = [_ratio(mine, other) for mine, other in zip(ours, theirs, strict=False)]
    return (min(found), max(found)) if len(found) > 1 else None


def _each(rounds: Rounds, figure: Figure) -> list[float]:
    return [numbers[figure.number] for numbers in rounds.get(figure.cell, ()) if figure.number in numbers]


def _ratio(ours: float, theirs: float | None) -> float:
    if theirs is None:
        return ours
    return ours / theirs if theirs else math.inf if ours else 1.0


def _within(check: Check, ratio: float, *, slack: float = 0.0) -> bool:
    if check.at_least is not None and ratio < check.at_least * (1 - slack):
        return False
    return check.at_most is None or ratio <= check.at_most * (1 + slack)


def render(verdicts: Sequence[Verdict]) -> str:
    header = ("goal", "what", "ours", "comparator", "theirs", "ratio", "spread", "goal is", "holds")
    rows = [_row(verdict) for verdict in verdicts]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    numeric = (0, 2, 4, 5, 6, 7)

    def line(row: Sequence[str]) -> str:
        cells = (
            text.rjust(width) if column in numeric else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def render_markdown(verdicts: Sequence[Verdict]) -> str:
    header = ("goal", "what", "ours", "comparator", "theirs", "ratio", "spread", "goal is", "holds")
    lines = [header, ("---",) * len(header), *(_row(verdict) for verdict in verdicts)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(verdict: Verdict) -> tuple[str, ...]:
    check = verdict.check
    holds: str = verdict.holds
    if verdict.near:
        holds += " (within 3 %)"
    elif holds == "no" and not verdict.reachable:
        holds += " (the limit misses it too)"
    return (
        str(check.goal),
        check.what,
        show(verdict.ours, check.unit),
        check.against,
        show(verdict.theirs, check.unit) if check.theirs else "",
        "" if verdict.ratio is None or check.theirs is None else f"{verdict.ratio:.3g}x",
        _show_spread(verdict),
        _bound(check),
        holds,
    )


def _show_spread(verdict: Verdict) -> str:
    if verdict.spread is None:
        return ""
    low, high = verdict.spread
    if verdict.check.theirs is not None:
        return f"{low:.3g}–{high:.3g}x"
    return f"{show(low, '').removesuffix('/s')}–{show(high, verdict.check.unit)}"


def _bound(check: Check) -> str:
    sign, bound = ("≥", check.at_least) if check.at_least is not None else ("≤", check.at_most)
    more = f" + {show(check.plus, check.unit)}" if check.plus else ""
    return f"{sign} {bound:g}x{more}" if check.theirs else f"{sign} {show(bound, check.unit)}"


def show(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "/s" and value >= 100:
        return f"{value:,.0f}/s"
    number = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{number}{unit}" if unit in ("/s", "") else f"{number} {unit}"
