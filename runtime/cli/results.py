"""`runtime results`: what the tasks of an experiment, or the runs of a job, returned and reported."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Argument, Option

from runtime.cli.commands import StackOption
from runtime.cli.console import is_terminal, note, write_text
from runtime.cli.jobs import OnOption, is_job, short
from runtime.cli.output import Columns, OutputFormat, Progress, format_value, print_json, print_list, progress
from runtime.client.metric_reports import SHOWN
from runtime.client.resolve_id import IdKind, identify, recall_last
from runtime.client.result_table import RowSelection, find_cell, parse_condition
from runtime.client.tasks.results import TaskResult, read_result, read_results
from runtime.errors import RequestRefused
from runtime.stack.open import open_stack
from runtime.units import count_noun, format_duration, format_time

if TYPE_CHECKING:
    from runtime.client.jobs.results import RunResult

SHOW_PROGRESS_FROM = 2_000
"""Fewer tasks are read before a person reads a bar."""
SUCCEEDED: Final = "succeeded"


class TableFormat(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def results(
    what: Annotated[str, Argument(metavar="EXPERIMENT|TASK|JOB", help="A name, an id or its beginning, or `last`.")],
    columns: Annotated[
        str | None, Option(metavar="A,B,…", help="These columns: fields, parameters, metrics such as loss or loss.min.")
    ] = None,
    where: Annotated[
        list[str] | None,
        Option(metavar="CONDITION", help="Only rows such as `loss<0.3` or `state=failed`; given again, all must hold."),
    ] = None,
    sort: Annotated[
        str | None, Option(metavar="[-]COLUMN", help="Order by this column; with `-` the greatest come first.")
    ] = None,
    limit: Annotated[int | None, Option(metavar="N", min=1, help="The first N rows only.")] = None,
    on: OnOption = None,
    stack: StackOption = None,
    output: Annotated[
        TableFormat,
        Option("--output", "-o", help="`table` for people, `csv` and `json` with whole values.", show_default=False),
    ] = TableFormat.TABLE,
) -> int:
    """What the tasks of an experiment, or the runs of a job, returned and reported.

    Tasks come in the order of submission, runs in that of their indices, and those that have not ended without a value.
    A column is a field (`state`, `duration_s`), a parameter, a metric (`loss`, `loss.min`, `loss.max`) or a key of the
    value (`value.accuracy`). A name that several jobs have means all of them. CSV has a column for each parameter and metric, and values that are no plain number or text
    as JSON. Values that are pickles are shown by their type: only `result()` in Python loads them.

    \b
    Examples:
      runtime results last
      runtime results sweep --sort loss --limit 10
      runtime results sweep --columns lr,loss.min,duration_s --where 'loss<0.3' --where state=succeeded
      runtime results sweep -o csv > sweep.csv
      runtime results j-91c0 --sort=-accuracy
      runtime results sweep -o json | jq '.[] | select(.state == "succeeded") | .value'
    """
    choice = RowSelection(
        where=tuple(map(parse_condition, where or ())),
        sort=sort,
        limit=limit,
        columns=tuple(name for each in (columns or "").split(",") if (name := each.strip())),
    )
    if columns is not None and not choice.columns:
        raise RequestRefused("`--columns` names no column", hint="runtime results last --columns key,state,loss")
    if is_job(what, on=on, stack=stack):
        return _job_results(what, on, choice, output)
    if on is not None:
        raise RequestRefused(f"`--on` is for the jobs of a target, and `{what}` is no job", hint="leave `--on` out")
    with open_stack(stack) as opened:
        records = opened.records
        found = identify(what, records, last=recall_last(opened.settings.data_dir, opened.name))
        whole = output is not TableFormat.TABLE
        if found.kind is IdKind.WORKER:
            raise RequestRefused(f"`{what}` is a worker, which returns nothing", hint="name an experiment or a task")
        if found.kind is IdKind.TASK:
            read: Iterable[TaskResult] = [read_result(records, found.name, large_values=whole)]
        else:
            read = read_results(records, found.name, large_values=whole)
        with ExitStack() as shown:
            rows = _Rows(read)
            total = records.totals(found.name).submitted if found.kind is IdKind.EXPERIMENT else 1
            if total >= SHOW_PROGRESS_FROM and not is_terminal():
                rows.bar = shown.enter_context(progress(f"reading {found.name}", total))
            _print(choice.apply(rows), choice, output, COLUMNS, _FIELDS)
    if rows.open:
        verb = "has" if rows.open == 1 else "have"
        note(f"{count_noun(rows.open, 'task')} {verb} not ended; `runtime wait {found.name}` returns when all have")
    return 0


def _job_results(what: str, on: str | None, choice: RowSelection, output: TableFormat) -> int:
    from runtime.cli.jobs import open_jobs
    from runtime.client.jobs.results import read_run_results

    with open_jobs(what, on) as jobs:
        rows = _Rows(itertools.chain.from_iterable(map(read_run_results, jobs)))
        columns = JOB_COLUMNS if len(jobs) == 1 else {"JOB": lambda row: short(row.job), **JOB_COLUMNS}
        _print(choice.apply(rows), choice, output, columns, _JOB_FIELDS)
        if rows.open:
            verb = "has" if rows.open == 1 else "have"
            hint = f"; `runtime wait {short(jobs[0].id)}` returns when all have" if len(jobs) == 1 else ""
            note(f"{count_noun(rows.open, 'run')} {verb} not ended{hint}")
    return 0


class _Rows:
    """The rows as they are read, with progress; counts those that have not ended."""

    def __init__(self, read: Iterable[Any]) -> None:
        self._read = read
        self.open = 0
        self.bar: Progress | None = None

    def __iter__(self) -> Iterator[Any]:
        for row in self._read:
            self.open += not row.state.terminal
            if self.bar is not None:
                self.bar.advance()
            yield row


def _print(
    rows: Iterable[Any], choice: RowSelection, output: TableFormat, columns: Columns, fields: Sequence[str]
) -> None:
    names = choice.columns
    if output is TableFormat.CSV:
        _write_csv(rows, names or None, fields)
    elif not names:
        print_list(rows, columns, OutputFormat.JSON if output is TableFormat.JSON else OutputFormat.TEXT)
    elif output is TableFormat.JSON:
        print_json({name: find_cell(row, name) for name in names} for row in rows)
    else:
        print_list(rows, {name.upper(): _column(name) for name in names})


def _column(name: str) -> Any:
    def cell(row: Any) -> object:
        if name == "value":
            return _cell(row)
        found = find_cell(row, name)
        if isinstance(found, float):
            return f"{found:g}"
        return found if found is None or isinstance(found, int | datetime | StrEnum) else format_value(found)

    return cell


def _cell(row: TaskResult | RunResult) -> str | None:
    if row.value_type is not None:
        return f"<{row.value_type}>"
    url = getattr(row, "value_url", None)
    return format_value(row.value) or url or (row.message if row.state.value != SUCCEEDED else None)


def _metrics(row: TaskResult | RunResult) -> str:
    shown = list(row.metrics.items())[:SHOWN]
    more = ["…"] if len(row.metrics) > SHOWN else []
    return " ".join([*(f"{name}={value:g}" for name, value in shown), *more])


def _params(row: RunResult) -> str:
    return " ".join(f"{name}={format_value(value)}" for name, value in row.params.items())


def _time(row: TaskResult | RunResult) -> str | None:
    return None if row.duration_s is None else format_duration(row.duration_s)


COLUMNS: Columns = {
    "TASK": "task",
    "KEY": "key",
    "ARGUMENTS": "arguments",
    "STATE": "state",
    "VALUE": _cell,
    "METRICS": _metrics,
    "TIME": _time,
}
JOB_COLUMNS: Columns = {
    "INDEX": "index",
    "PARAMS": _params,
    "STATE": "state",
    "VALUE": _cell,
    "METRICS": _metrics,
    "TIME": _time,
}

_FIELDS = (
    *("task", "key", "arguments", "state", "reason", "message", "value", "exit_code", "attempts"),
    *("started_at", "ended_at", "duration_s", "outputs_url"),
)
_JOB_FIELDS = (
    *("job", "index", "state", "reason", "message", "value", "value_type", "exit_code", "attempts"),
    *("started_at", "ended_at", "duration_s", "outputs"),
)


def _write_csv(rows: Iterable[Any], names: Sequence[str] | None, fields: Sequence[str]) -> None:
    """Write a line for each row. Without `names` all are read first, because the parameters and metrics of all are columns."""
    import csv
    from types import SimpleNamespace

    if names is None:
        rows = list(rows)
        params = dict.fromkeys(f"params.{name}" for row in rows for name in row.params)
        names = [*fields, *params, *dict.fromkeys(f"metrics.{name}" for row in rows for name in row.metrics)]
    # With another end of line than RFC 4180's, `csv` does not quote a carriage return, at which readers end the row.
    writer = csv.writer(SimpleNamespace(write=lambda line: write_text(line.removesuffix("\r\n") + "\n")))
    writer.writerow(names)
    for row in rows:
        writer.writerow([_csv_cell(find_cell(row, name)) for name in names])


def _csv_cell(value: object) -> object:
    if isinstance(value, datetime):
        return format_time(value)
    if value is None or type(value) in (int, float):
        return value
    return format_value(value.value if isinstance(value, StrEnum) else value, strict=True)
