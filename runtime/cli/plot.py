"""`runtime plot`: how a metric went, in the terminal or as a picture."""

from __future__ import annotations

import csv
import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Final

from typer import Argument, Option

from runtime.cli.commands import StackOption
from runtime.cli.console import can_draw_unicode, is_terminal, note, paint, say, write_text
from runtime.cli.jobs import OnOption, is_job
from runtime.cli.output import print_json
from runtime.cli.text_plot import Canvas, draw_bars, draw_curves
from runtime.client.metric_series import (
    Curve,
    SeriesSource,
    choose,
    make_curve,
    name_axis,
    pair_with,
    sources_of_runs,
    sources_of_tasks,
)
from runtime.errors import MissingExtra, NotPossible, RequestRefused

HEIGHT: Final = 20
"""Rows of a picture where there is no terminal."""
AROUND: Final = 4
"""Lines of a picture beside its rows and one for each curve."""


class PlotAxis(StrEnum):
    STEP = "step"
    TIME = "time"


class PlotFormat(StrEnum):
    TEXT = "text"
    CSV = "csv"
    JSON = "json"


def plot(
    what: Annotated[str, Argument(metavar="EXPERIMENT|TASK|JOB", help="A name, an id or its beginning, or `last`.")],
    metric: Annotated[str, Argument(metavar="METRIC", help="A number that was reported, such as loss.")],
    x: Annotated[PlotAxis | None, Option("--x", help="Over steps, or over seconds since each began.")] = None,
    vs: Annotated[str | None, Option("--vs", metavar="PARAM", help="Its last number over this parameter.")] = None,
    png: Annotated[Path | None, Option("--png", metavar="FILE", help="Write a picture, with matplotlib.")] = None,
    on: OnOption = None,
    stack: StackOption = None,
    output: Annotated[
        PlotFormat,
        Option("--output", "-o", help="`csv` and `json` have the points of all tasks or runs.", show_default=False),
    ] = PlotFormat.TEXT,
) -> int:
    """How a metric went in the tasks of an experiment, or in the runs of a job.

    Up to eight of them have a curve each; of more, those whose last number is the least, the median and the greatest. With
    `--vs` it is the last number of every one, over a parameter: points for numbers, and the median for each text.
    Runs of a job that go on are shown too, tasks once they have ended. `value.loss` is the number in what they returned,
    which only `--vs` draws.

    \b
    Examples:
      runtime plot sweep loss
      runtime plot j-91c0 accuracy --x time
      runtime plot sweep loss --vs lr
      runtime plot fit-search value.loss --vs lr
      runtime plot sweep loss --png loss.png
      runtime plot sweep loss -o csv > loss.csv
    """
    if vs is not None and x is not None:
        raise RequestRefused(
            "`--vs` draws over a parameter, and `--x` over steps or time", hint="leave one of them out"
        )
    if png is not None and output is not PlotFormat.TEXT:
        raise RequestRefused("`--png` writes a picture, and `-o` prints points", hint="leave one of them out")
    with ExitStack() as opened:
        title, found = _find(what, metric, on, stack, opened)
        sources = list(found)
        if vs is not None:
            _show_pairs(pair_with(sources, vs), metric, vs, title, png, output)
        elif output is PlotFormat.TEXT:
            _show_curves(sources, metric, x, title, png)
        else:
            _print_points(sources, output)
    return 0


def _find(
    what: str, metric: str, on: str | None, stack: str | None, opened: ExitStack
) -> tuple[str, Iterator[SeriesSource]]:
    """Return the name of what is drawn, and the tasks or runs that reported the metric."""
    if is_job(what, on=on, stack=stack):
        from runtime.cli.jobs import open_jobs

        jobs = opened.enter_context(open_jobs(what, on))
        return jobs[0].entry().name, sources_of_runs(jobs, metric)
    if on is not None:
        raise RequestRefused(f"`--on` is for the jobs of a target, and `{what}` is no job", hint="leave `--on` out")
    from runtime.client.resolve_id import IdKind, identify, recall_last
    from runtime.client.tasks.results import read_result, read_results
    from runtime.stack.open import open_stack

    found_stack = opened.enter_context(open_stack(stack))
    records = found_stack.records
    found = identify(what, records, last=recall_last(found_stack.settings.data_dir, found_stack.name))
    if found.kind is IdKind.WORKER:
        raise RequestRefused(f"`{what}` is a worker, which reports nothing", hint="name an experiment, a task or a job")
    rows = [read_result(records, found.name)] if found.kind is IdKind.TASK else read_results(records, found.name)
    return found.name, sources_of_tasks(records, rows, metric)


# curves


def _show_curves(
    sources: Sequence[SeriesSource], metric: str, x: PlotAxis | None, title: str, png: Path | None
) -> None:
    chosen, left_out = choose(sources)
    courses = [(source, course) for source in chosen if (course := source.read()) is not None]
    if not courses:
        raise NotPossible(
            f"the course of `{metric}` was not kept, only its last number",
            hint=f"`--vs PARAM` draws it over a parameter, and `runtime results {title} --columns {metric}` lists it",
        )
    axis = name_axis([course for _, course in courses], x)
    curves = [make_curve(source, course, axis) for source, course in courses]
    over = "step" if axis == PlotAxis.STEP else "seconds"
    if png is not None:
        _write_png(png, curves, x_label=over, y_label=metric, title=title)
    else:
        say(paint(f"{metric} of {title}", "bold"))
        if all(len(curve.points) == 1 for curve in curves):
            say(*draw_bars([(curve.label, curve.last) for curve in curves], canvas=_canvas(0)))
        else:
            say(*draw_curves(curves, over=over, canvas=_canvas(len(curves))))
    if left_out is not None:
        note(left_out)


def _canvas(lines: int) -> Canvas:
    size = os.terminal_size((81, HEIGHT + AROUND + lines))
    if is_terminal():
        size = shutil.get_terminal_size((size.columns, size.lines))
    colours = is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    height = min(HEIGHT, size.lines - AROUND - lines)
    unicode = can_draw_unicode() and os.environ.get("TERM") != "dumb"
    return Canvas(width=size.columns - 1, height=height, unicode=unicode, paint=paint if colours else None)


def _print_points(sources: Sequence[SeriesSource], output: PlotFormat) -> None:
    read = ((source.label, course) for source in sources if (course := source.read()) is not None)
    rows = (
        {"name": name, "time": at, "step": step, "value": value}
        for name, course in read
        for at, step, value in course.points
    )
    _print_rows(rows, ("name", "time", "step", "value"), output)


def _print_rows(rows: Iterator[dict[str, Any]], names: Sequence[str], output: PlotFormat) -> None:
    if output is PlotFormat.JSON:
        print_json(rows)
        return
    writer = csv.writer(SimpleNamespace(write=write_text), lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([row[name] for name in names])


# over a parameter


def _show_pairs(
    pairs: Sequence[tuple[Any, float, str]], metric: str, param: str, title: str, png: Path | None, output: PlotFormat
) -> None:
    if output is not PlotFormat.TEXT:
        rows = ({"name": label, param: value, "value": number} for value, number, label in pairs)
        _print_rows(rows, ("name", param, "value"), output)
        return
    numbers = [(float(value), number) for value, number, _ in pairs if type(value) in (int, float)]
    if len(numbers) < len(pairs):
        groups: dict[str, list[float]] = {}
        for value, number, _ in pairs:
            groups.setdefault(str(value), []).append(number)
        medians = [(name, statistics.median(each)) for name, each in groups.items()]
        if png is not None:
            _write_png(png, [], x_label=param, y_label=metric, title=title, bars=medians)
            return
        say(paint(f"{metric} of {title} for each {param}, the median of the last numbers", "bold"))
        say(*draw_bars(medians, canvas=_canvas(0)))
        return
    last = statistics.median([number for _, number in numbers]) if numbers else float("nan")
    curve = Curve(f"{len(numbers):,} last numbers", tuple(numbers), last)
    if png is not None:
        _write_png(png, [curve], x_label=param, y_label=metric, title=title, joined=False)
        return
    say(paint(f"{metric} of {title}, the last number over {param}", "bold"))
    lines = list(draw_curves([curve], over=param, canvas=_canvas(1), lines=False))
    say(*(line.replace(": last ", ": median ") for line in lines))


# pictures


def _write_png(
    path: Path,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    title: str,
    bars: Sequence[tuple[str, float]] = (),
    joined: bool = True,
) -> None:
    """Write a picture. Raises `MissingExtra` without matplotlib, and `NotPossible` if the file cannot be written."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("`--png`", "plot") from None
    matplotlib.use("Agg")
    import warnings

    from matplotlib import pyplot

    # A `$` in a name is no formula, and a letter without a glyph is no reason for lines on stderr.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120, layout="constrained")
        try:
            for curve in curves:
                xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
                few = "o" if len(xs) < 3 or not joined else None
                axes.plot(xs, ys, label=curve.label, marker=few, markersize=4, linestyle="-" if joined else "none")
            if bars:
                axes.bar([name for name, _ in bars], [number for _, number in bars])
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label)
            axes.set_title(title)
            axes.grid(alpha=0.3)
            if len(curves) > 1:
                axes.legend()
            figure.savefig(path, format="png")
        except (ArithmeticError, ValueError) as problem:  # matplotlib's ticks, beyond what a float spans
            raise NotPossible(
                f"`{y_label}` cannot be drawn as a picture: its numbers are too large or too far apart",
                hint="`-o csv` prints them, and without `--png` they are drawn here",
            ) from problem
        except OSError as problem:
            said = (problem.strerror or str(problem)).lower()
            raise NotPossible(f"cannot write `{path}`: {said}", hint="name another file") from problem
        finally:
            pyplot.close(figure)
    note(f"wrote {path}")
