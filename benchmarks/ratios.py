"""Pure arithmetic: rounds of numbers → medians → ratios → whether each goal holds, and the table that says so."""

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
"""Two figures nearer than this are the same."""


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
    limit: Figure | None = None
    """What the machine can do at best; says whether the goal could be reached on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    check: Check
    ours: float | None
    theirs: float | None
    ratio: float | None
    """Ours through theirs; ours itself where there is only a bound."""
    holds: Holds
    near: bool = False
    """The bound is missed by less than the noise."""
    reachable: bool = True
    """False if the machine's limit itself misses the bound."""


def median(rounds: Rounds, figure: Figure | None) -> float | None:
    """None where no round has it."""
    if figure is None:
        return None
    found = [numbers[figure.number] for numbers in rounds.get(figure.cell, ()) if figure.number in numbers]
    return statistics.median(found) if found else None


def judge(check: Check, rounds: Rounds) -> Verdict:
    ours, theirs = median(rounds, check.ours), median(rounds, check.theirs)
    if ours is None:
        return Verdict(check=check, ours=None, theirs=theirs, ratio=None, holds="not measured")
    if check.theirs is not None and theirs is None:
        return Verdict(check=check, ours=ours, theirs=None, ratio=None, holds="comparator absent")
    ratio = _ratio(ours, theirs)
    best = median(rounds, check.limit)
    return Verdict(
        check=check,
        ours=ours,
        theirs=theirs,
        ratio=ratio,
        holds="yes" if _within(check, ratio) else "no",
        near=not _within(check, ratio) and _within(check, ratio, slack=NOISE),
        reachable=best is None or _within(check, _ratio(best, theirs)),
    )


def _ratio(ours: float, theirs: float | None) -> float:
    if theirs is None:
        return ours
    return ours / theirs if theirs else math.inf if ours else 1.0


def _within(check: Check, ratio: float, *, slack: float = 0.0) -> bool:
    if check.at_least is not None and ratio < check.at_least * (1 - slack):
        return False
    return check.at_most is None or ratio <= check.at_most * (1 + slack)


def render(verdicts: Sequence[Verdict]) -> str:
    header = ("goal", "what", "ours", "comparator", "theirs", "ratio", "goal is", "holds")
    rows = [_row(verdict) for verdict in verdicts]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    numeric = (0, 2, 4, 5, 6)

    def line(row: Sequence[str]) -> str:
        cells = (
            text.rjust(width) if column in numeric else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def render_markdown(verdicts: Sequence[Verdict]) -> str:
    header = ("goal", "what", "ours", "comparator", "theirs", "ratio", "goal is", "holds")
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
        _bound(check),
        holds,
    )


def _bound(check: Check) -> str:
    sign, bound = ("≥", check.at_least) if check.at_least is not None else ("≤", check.at_most)
    return f"{sign} {bound:g}x" if check.theirs else f"{sign} {show(bound, check.unit)}"


def show(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "/s" and value >= 100:
        return f"{value:,.0f}/s"
    number = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{number}{unit}" if unit in ("/s", "") else f"{number} {unit}"
