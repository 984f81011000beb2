"""`runtime results`: what the tasks of an experiment returned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from typer import Argument, Option

from runtime.cli.commands import StackOption
from runtime.cli.jobs import is_job
from runtime.cli.printing import is_terminal, note, write_text
from runtime.cli.show import Columns, Output, Progress, format_value, print_list, progress
from runtime.client.identify import Kind, identify, recall_last
from runtime.client.tasks.results import TaskResult, read_result, read_results
from runtime.errors import RequestRefused
from runtime.stack.open import open_stack
from runtime.tasks.model import TaskState
from runtime.units import count_noun, format_duration, format_time

SHOW_PROGRESS_FROM = 2_000
"""Fewer tasks are read before a person reads a bar."""


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def results(
    what: Annotated[str, Argument(metavar="EXPERIMENT|TASK", help="A name, an id or its beginning, or `last`.")],
    stack: StackOption = None,
    output: Annotated[
        Format,
        Option("--output", "-o", help="`table` for people, `csv` and `json` with whole values.", show_default=False),
    ] = Format.TABLE,
) -> int:
    """What the tasks of an experiment returned: key, arguments, state, value, metrics and duration of each.

    The tasks come in the order of submission, those that have not ended without a value. CSV has a column for each
    metric, and values that are no plain number or text as JSON.

    \b
    Examples:
      runtime results last
      runtime results sweep -o csv > sweep.csv
      runtime results sweep -o json | jq '.[] | select(.state == "succeeded") | .value'
    """
    if is_job(what, stack=stack):
        raise RequestRefused(
            f"`{what}` is a job, whose command returns no value", hint=f"runtime fetch {what} brings home what it wrote"
        )
    with open_stack(stack) as opened:
        records = opened.records
        found = identify(what, records, last=recall_last(opened.settings.data_dir, opened.name))
        whole = output is not Format.TABLE
        if found.kind is Kind.WORKER:
            raise RequestRefused(f"`{what}` is a worker, which returns nothing", hint="name an experiment or a task")
        if found.kind is Kind.TASK:
            read: Iterable[TaskResult] = [read_result(records, found.name, large_values=whole)]
        else:
            read = read_results(records, found.name, large_values=whole)
        with ExitStack() as shown:
            rows = _Rows(read)
            total = records.totals(found.name).submitted if found.kind is Kind.EXPERIMENT else 1
            if total >= SHOW_PROGRESS_FROM and not is_terminal():
                rows.bar = shown.enter_context(progress(f"reading {found.name}", total))
            if output is Format.CSV:
                _write_csv(rows)
            else:
                print_list(rows, COLUMNS, Output.JSON if output is Format.JSON else Output.TEXT)
    if rows.open:
        verb = "has" if rows.open == 1 else "have"
        note(f"{count_noun(rows.open, 'task')} {verb} not ended; `runtime wait {found.name}` returns when all have")
    return 0


class _Rows:
    """The rows as they are read, with progress; counts the tasks that have not ended."""

    def __init__(self, read: Iterable[TaskResult]) -> None:
        self._read = read
        self.open = 0
        self.bar: Progress | None = None

    def __iter__(self) -> Iterator[TaskResult]:
        for row in self._read:
            self.open += not row.state.terminal
            if self.bar is not None:
                self.bar.advance()
            yield row


def _cell(row: TaskResult) -> str | None:
    return format_value(row.value) or row.value_url or (row.message if row.state is not TaskState.SUCCEEDED else None)


COLUMNS: Columns = {
    "TASK": "task",
    "KEY": "key",
    "ARGUMENTS": "arguments",
    "STATE": "state",
    "VALUE": _cell,
    "METRICS": lambda row: " ".join(f"{name}={value:g}" for name, value in row.metrics.items()),
    "TIME": lambda row: None if row.duration_s is None else format_duration(row.duration_s),
}

_FIELDS = (
    *("task", "key", "arguments", "state", "reason", "message", "value", "exit_code", "attempts"),
    *("started_at", "ended_at", "duration_s", "outputs_url"),
)


def _write_csv(rows: Iterable[TaskResult]) -> None:
    """Write a line for each task. All are read first, because the metrics of all are the columns."""
    import csv
    from types import SimpleNamespace

    read = list(rows)
    metrics = list(dict.fromkeys(name for row in read for name in row.metrics))
    lines: list[str] = []
    # With another end of line than RFC 4180's, `csv` does not quote a carriage return, at which readers end the row.
    writer = csv.writer(SimpleNamespace(write=lambda line: lines.append(line.removesuffix("\r\n") + "\n")))
    writer.writerow([*_FIELDS, *(f"metrics.{name}" for name in metrics)])
    for row in read:
        fields = [_csv_cell(getattr(row, name)) for name in _FIELDS]
        writer.writerow([*fields, *(row.metrics.get(name) for name in metrics)])
    write_text("".join(lines))


def _csv_cell(value: object) -> object:
    if isinstance(value, datetime):
        return format_time(value)
    if value is None or type(value) in (int, float):
        return value
    return format_value(value.value if isinstance(value, StrEnum) else value, strict=True)
