"""What attempts have reported: the numbers of those that run, and the sum that each leaves (`runtime.shim.metrics`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from runtime.shim.metrics import SUM_SCHEMA

SHOWN: Final = 8
"""Names of which people see the last number while an attempt runs."""

Point: TypeAlias = tuple[float, float | None, float]
"""Time in seconds since 1970, step, and number."""


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """The numbers of one metric in an attempt."""

    last: float
    min: float | None
    """None if all of them were NaN."""
    max: float | None
    count: int
    every: int
    """Every how many-th number is a point."""
    points: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """The sum of an attempt's reports."""

    step: float | None = None
    of: float | None = None
    courses: Mapping[str, MetricSeries] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: course.last for name, course in self.courses.items()}

    @property
    def ranges(self) -> dict[str, list[float]]:
        found = self.courses.items()
        return {name: [each.min, each.max] for name, each in found if each.min is not None and each.max is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestReport:
    """The last numbers of an attempt that runs."""

    name: str
    """A task's id, or the index of a job's run."""
    step: float | None = None
    of: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def parse_sum(content: bytes) -> ReportSummary | None:
    """Read a sum; None for one that is damaged, or that a newer release wrote."""
    try:
        said = json.loads(content)
        if said["schema"] != SUM_SCHEMA:
            return None
        courses = {name: _course(each) for name, each in said["names"].items()}
        return ReportSummary(_number(said.get("step")), _number(said.get("of")), courses)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return None


def _course(said: Mapping[str, Any]) -> MetricSeries:
    points = tuple((float(at), _number(step), float(number)) for at, step, number in said["points"])
    least, most = _number(said["min"]), _number(said["max"])
    return MetricSeries(float(said["last"]), least, most, int(said["count"]), int(said["every"]), points)


def parse_live(name: str, said: object) -> LatestReport | None:
    """Read an entry of a worker's report; None if it has another shape."""
    try:
        metrics = {str(each): float(number) for each, number in said["metrics"].items()}  # type: ignore[index]
        return LatestReport(name=name, step=_number(said["step"]), of=_number(said["of"]), metrics=metrics)  # type: ignore[index]
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def describe_progress(step: float | None, of: float | None) -> str | None:
    """`30 of 100, 30 %`; `30` if it is not known how many there will be."""
    if step is None or not math.isfinite(step):
        return None
    if not of or not math.isfinite(of):
        return f"{step:g}"
    return f"{step:g} of {of:g}, {math.floor(100 * step / of)} %"


def describe_numbers(metrics: Mapping[str, float], ranges: Mapping[str, Iterable[float]] | None = None) -> str:
    """`loss=0.25 (0.25 to 3), accuracy=0.9`, with the range where it is one."""
    parts = []
    for name, value in metrics.items():
        least, most = (ranges or {}).get(name, (value, value))
        parts.append(f"{name}={value:g}" + (f" ({least:g} to {most:g})" if least != most else ""))
    return ", ".join(parts)
