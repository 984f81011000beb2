"""The courses of a metric in the tasks of an experiment or the runs of a job: which ones are shown, and their points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.results import RunResult, read_run_results
from runtime.client.jobs.status import read_sums
from runtime.client.metric_reports import MetricSeries, parse_sum
from runtime.client.result_table import sort_key
from runtime.client.tasks.results import TaskResult
from runtime.client.tasks.task_facts import read_standing
from runtime.errors import NotPossible, UnknownName
from runtime.records.base import RecordStore
from runtime.shim.call import to_number

MOST_SHOWN: Final = 8
"""Curves that are drawn in one picture."""
LABEL: Final = 28
"""Letters of a label."""


@dataclass(frozen=True, slots=True)
class SeriesSource:
    """A task or run that reported or returned the metric, with the function that reads its course."""

    label: str
    last: float
    params: Mapping[str, Any]
    read: Callable[[], MetricSeries | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a picture: its points in the order in which they were reported."""

    label: str
    points: tuple[tuple[float, float], ...]
    last: float
    """The last number that was reported, also if it is not finite and so no point."""


def sources_of_tasks(records: RecordStore, rows: Iterable[TaskResult], metric: str) -> Iterator[SeriesSource]:
    """Yield the tasks that reported the metric; courses of others are read when they are asked for."""
    found = _Names()
    for row in rows:
        numbers = {**_returned(row.value), **row.metrics}
        found.see(numbers)
        if metric in numbers:
            label = row.key or row.task[:14]

            def read(task: str = row.task) -> MetricSeries | None:
                record = read_standing(records, task, with_task=False).record
                data = records.read_reports(task, record.token) if record else None
                summed = parse_sum(data) if data is not None else None
                return summed.courses.get(metric) if summed else None

            yield SeriesSource(_label(label, row.params), numbers[metric], row.params, read)
    found.check(metric)


def sources_of_runs(jobs: Sequence[JobHandle], metric: str) -> Iterator[SeriesSource]:
    """Yield the runs of jobs that reported the metric, also those that go on."""
    found = _Names()
    for job in jobs:
        for row in read_run_results(job):
            numbers = {**_returned(row.value), **row.metrics}
            found.see(numbers)
            if metric in numbers:
                yield _source_of_run(job, row, metric, numbers[metric], several=len(jobs) > 1)
    found.check(metric)


def _source_of_run(job: JobHandle, row: RunResult, metric: str, last: float, *, several: bool) -> SeriesSource:
    def read() -> MetricSeries | None:
        _, summed = read_sums(job.files, job.id, {row.index: row.attempts}).get(row.index, (row.attempts, None))
        return summed.courses.get(metric) if summed else None

    name = f"{job.id[:10]} {row.index}" if several else str(row.index)
    return SeriesSource(_label(name, row.params), last, row.params, read)


def _returned(value: object) -> dict[str, float]:
    """The numbers of a returned value, by the names of their columns in results. They have no course."""
    parts = {
        "value": value,
        **({f"value.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {}),
    }
    return {name: to_number(name, each) for name, each in parts.items() if type(each) in (int, float)}


class _Names:
    """The metrics that were seen, for the refusal of one that nobody reported."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def see(self, metrics: Iterable[str]) -> None:
        if len(self._seen) < 1000:
            self._seen.update(dict.fromkeys(metrics))

    def check(self, metric: str) -> None:
        if not self._seen:
            raise NotPossible(
                "nothing was reported yet, so there is nothing to draw",
                hint="report numbers with `run.report(step=3, loss=0.3)`, or add lines to the file $RUNTIME_METRICS",
            )
        if metric not in self._seen:
            raise UnknownName("metric", metric, self._seen)


def _label(name: str, params: Mapping[str, Any]) -> str:
    shown = " ".join(
        f"{each}={value:g}" if isinstance(value, float) else f"{each}={value}" for each, value in params.items()
    )
    text = shown if 0 < len(shown) <= LABEL else name
    return text if len(text) <= LABEL else f"{text[: LABEL - 1]}…"


def choose(sources: Sequence[SeriesSource], most: int = MOST_SHOWN) -> tuple[list[SeriesSource], str | None]:
    """Return the sources to draw, and a note if that is not all: the least, the median and the greatest by their last
    numbers, of those whose last number is one."""
    if len(sources) <= most:
        return list(sources), None
    finite = sorted((each for each in sources if math.isfinite(each.last)), key=lambda each: each.last)
    if not finite:
        return list(sources[:most]), f"the first {most} of {len(sources):,}; none has a finite last number"
    places = dict.fromkeys((0, len(finite) // 2, len(finite) - 1))
    chosen = [finite[place] for place in places]
    return chosen, f"least, median and greatest of {len(sources):,} by their last number"


def make_curve(source: SeriesSource, course: MetricSeries, x: str | None) -> Curve:
    """Return the curve over `step` or `time` in seconds since its first point; points that are not finite are left out.

    Without `x` it is over steps if there are any. Raises `NotPossible` for steps of a course that has none.
    """
    stepped = any(step is not None for _, step, _ in course.points)
    if x == "step" and not stepped:
        raise NotPossible(
            f"`{source.label}` was reported without steps", hint="leave `--x` out, or draw it with `--x time`"
        )
    began = course.points[0][0] if course.points else 0.0
    over_steps = stepped and x != "time"
    pairs = [(step if over_steps else at - began, number) for at, step, number in course.points]
    kept = tuple((x, y) for x, y in pairs if x is not None and math.isfinite(x) and math.isfinite(y))
    return Curve(source.label, kept, source.last)


def name_axis(courses: Iterable[MetricSeries], x: str | None) -> str:
    """Return what the curves are drawn over: `step`, or `time` if no point has a step."""
    if x is not None:
        return x
    return "step" if any(step is not None for each in courses for _, step, _ in each.points) else "time"


def pair_with(sources: Iterable[SeriesSource], param: str) -> list[tuple[Any, float, str]]:
    """Return (parameter, last number, label) of the sources that have the parameter and a finite number, in the parameter's
    order. Raises `UnknownName` if none has it."""
    every = list(sources)
    found = [(each.params[param], each.last, each.label) for each in every if param in each.params]
    if not found:
        raise UnknownName("parameter", param, {name for each in every for name in each.params})
    return sorted((each for each in found if math.isfinite(each[1])), key=lambda each: sort_key(each[0]))
