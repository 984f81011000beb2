"""What all commands print alike: data on stdout (a table, plain lines, or JSON), questions and progress on stderr.

On a terminal a list is an aligned table with a header. Elsewhere it is one line a row, with tabs between fields and
no header, for `cut`, `awk` and `while read`. With `-o json` it is one array.
"""

from __future__ import annotations

import itertools
import operator
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from runtime.cli.console import (
    ask,
    draw_bar,
    errors_on_terminal,
    flush,
    is_terminal,
    note,
    paint,
    say,
    say_block,
    write_json,
)
from runtime.json_values import encode
from runtime.sanitize import clean_line
from runtime.units import format_duration, format_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from runtime.records.base import RecordStore

TABLE_ROWS = 500
NARROWEST = 12
"""Columns of a terminal that a cell of a table is never cut below."""
UNCHANGED_EVERY_S = 60.0
"""Pause between two lines of progress with the same count."""


Columns: TypeAlias = "Mapping[str, str | Callable[[Any], object]]"
"""Header → the name of a row's field, or a function that makes a cell of a row."""


class OutputFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def note_skew(records: RecordStore) -> None:
    """Note a large difference between this machine's clock and the record store's, if the store's is known."""
    from runtime.clock import describe_skew
    from runtime.errors import RuntimeFailure

    try:
        said = describe_skew(records.skew(), "the record store's")
    except RuntimeFailure:
        return
    if said is not None:
        note(f"note: this machine's clock is {said}, and so are the times that it writes; `runtime doctor` has more")


def print_json(value: object) -> None:
    """Print one JSON document. Iterators become arrays and are written as they come."""
    if hasattr(value, "__next__"):
        _write_array(value)  # type: ignore[arg-type]
    elif isinstance(value, list | tuple):
        _write_array(iter(value))
    else:
        write_json(_json(value, indent=2) + "\n")


def read_columns(columns: Columns) -> dict[str, Callable[[Any], object]]:
    return {name: operator.attrgetter(cell) if isinstance(cell, str) else cell for name, cell in columns.items()}


def print_list(rows: Iterable[object], columns: Columns, output: OutputFormat = OutputFormat.TEXT) -> None:
    """Print `rows`: all they hold as a JSON array, or the `columns` for people and for pipes."""
    cells = read_columns(columns).values()
    if output is OutputFormat.JSON:
        print_json(iter(rows))
    elif is_terminal():
        import shutil

        # Rows are aligned in groups; the rest of a long list comes as it is read.
        waiting = iter(rows)
        header = True
        while part := [[format_cell(cell(row)) for cell in cells] for row in itertools.islice(waiting, TABLE_ROWS)]:
            table = render_table(list(columns), part, shutil.get_terminal_size().columns)
            say_block(table if header else table.partition("\n")[2])
            header = False
    else:
        for row in rows:
            say("\t".join(format_cell(cell(row)) for cell in cells))


def print_done(rows: Iterable[object], columns: Columns, output: OutputFormat = OutputFormat.TEXT) -> None:
    """Print the rows of what a command does, one after another. What ends it halfway is raised once the rows before it are
    printed, with the array of `-o json` whole."""
    ended: list[BaseException] = []

    def until_it_ends() -> Iterator[object]:
        try:
            yield from rows
        except (Exception, KeyboardInterrupt) as problem:
            ended.append(problem)

    print_list(until_it_ends(), columns, output)
    if ended:
        raise ended[0]


def print_checks(checks: Iterable[Any], output: OutputFormat, *, name: str, remedy: str, width: int) -> int:
    """Print checks with their verdicts as they come, for some take seconds, and return the exit code: 1 if one fails.

    `name` and `remedy` are the fields of a check besides `verdict` and `text`; on a terminal names are `width` wide.
    """
    failed = 0

    def count() -> Iterator[Any]:
        nonlocal failed
        for each in checks:
            failed += each.verdict == "fail"
            yield each

    if output is OutputFormat.JSON:
        print_json(count())
    elif is_terminal():
        styles = {"ok": "green", "warn": "yellow", "fail": "red"}
        for each in count():
            verdict = paint(f"{each.verdict:<4}", styles[each.verdict])
            say(f"{verdict}  {getattr(each, name):<{width}}  {each.text}")
            if getattr(each, remedy):
                say(f"{'':<{width + 8}}{paint(f'{remedy}:', 'bold')} {getattr(each, remedy)}")
            flush()
    else:
        print_list(count(), {"VERDICT": "verdict", name.upper(): name, "FINDING": "text", remedy.upper(): remedy})
    if failed and output is OutputFormat.TEXT:
        note(f"{failed} failed")
    return 1 if failed else 0


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Render an aligned table, numbers to the right, cut to `width` columns at the widest cells.

    The last column is not padded, so a text without bounds belongs there.
    """
    if not rows:
        return ""
    widths = [min(width, max(_width(line[column]) for line in (header, *rows))) for column in range(len(header))]
    numeric = [all(_is_number(row[column]) for row in rows) for column in range(len(header))]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    title, *lines = [_line(row, widths, numeric).rstrip() for row in (header, *rows)]
    return "".join(f"{line}\n" for line in (paint(title, "bold"), *lines))


def format_cell(value: object) -> str:
    """Format `value` on one line: `-` for nothing, a duration, an age, a number with its thousands, or its text."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and not isinstance(value, Enum):
        return format_count(value) if is_terminal() else str(value)
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, datetime):
        return format_ago(value) if is_terminal() else format_time(value)
    return clean_line(str(value))


def format_count(number: float) -> str:
    """`1,234,567`."""
    return f"{number:,}"


def describe_state(state: object, reason: object) -> str:
    """`failed (oom)`; the state alone if the reason repeats it."""
    return f"{state} ({reason})" if reason and str(reason) != str(state) else str(state)


def format_ago(at: datetime, now: datetime | None = None) -> str:
    """`4m10s ago`, or `in 30s` for a time in the future."""
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{format_duration(seconds)} ago" if seconds > 0 else f"in {format_duration(-seconds)}"


def confirm(question: str, *, yes: bool) -> None:
    """Return if the person agrees or `yes` was passed. Raises `NotPossible` otherwise."""
    from runtime.errors import NotPossible

    if yes:
        return
    if not sys.stdin.isatty():
        raise NotPossible(f"{question}: nobody is there to answer", hint="pass `--yes` to go on")
    if ask(f"{question}? [y/N] ").strip().lower() not in {"y", "yes"}:
        raise NotPossible("not confirmed, nothing was done", hint="answer `y`, or pass `--yes`")


class Progress(Protocol):
    """A bar, or lines now and then, for work of a known or unknown amount."""

    def advance(self, steps: int = 1) -> None: ...

    def set(self, *, done: int | None = None, total: int | None = None) -> None:
        """Set the count, for work that another process does."""


@contextmanager
def progress(label: str, total: int | None = None, unit: str = "tasks", *, every: float = 5.0) -> Iterator[Progress]:
    """Show the progress of work on stderr: a bar on a terminal, elsewhere a line every `every` seconds.

    The last line always has the final count, also after an interruption.
    """
    if errors_on_terminal():
        with draw_bar(label, total, unit) as (drawn, task):
            yield _RichBar(drawn, task)
        return
    lines = ProgressLines(label, total, unit, every=every)
    try:
        yield lines
    finally:
        lines.finish()


class ProgressLines:
    """Progress as plain lines for logs: `submitting: 120,000 of 1,000,000 tasks, 12 %, 35,000/s, 25s left`."""

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str,
        *,
        every: float,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = note,
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._every, self._clock, self._write = every, clock, write
        self._done, self._said = 0, -1
        self._started = self._last = clock()

    def advance(self, steps: int = 1) -> None:
        self.set(done=self._done + steps)

    def set(self, *, done: int | None = None, total: int | None = None) -> None:
        self._done = self._done if done is None else done
        self._total = self._total if total is None else total
        now = self._clock()
        # A count that stands still is not worth a line every few seconds of a night.
        if now - self._last >= (self._every if self._said != self._done else UNCHANGED_EVERY_S):
            self._last = now
            self._say(now)

    def finish(self) -> None:
        if self._said != self._done:
            self._say(self._clock())

    def _name(self, count: int) -> str:
        return self._unit.removesuffix("s") if count == 1 else self._unit

    def _say(self, now: float) -> None:
        self._said = self._done
        parts = [f"{format_count(self._done)} {self._name(self._done)}"]
        rate = self._done / (now - self._started) if now > self._started else 0.0
        if self._total:
            parts = [
                f"{format_count(self._done)} of {format_count(self._total)} {self._name(self._total)}",
                f"{100 * self._done // self._total} %",
            ]
        if rate:
            parts.append(f"{format_count(round(rate))}/s" if rate >= 10 else f"{rate:.2g}/s")
        if rate and self._total and self._total > self._done:
            parts.append(f"{format_duration((self._total - self._done) / rate)} left")
        self._write(f"{self._label}: {', '.join(parts)}")


class _RichBar:
    def __init__(self, rich_progress: Any, task: Any) -> None:
        self._progress, self._task = rich_progress, task

    def advance(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)

    def set(self, *, done: int | None = None, total: int | None = None) -> None:
        # rich takes None as "unchanged" for both.
        self._progress.update(self._task, completed=done, total=total)


def _write_array(items: Iterator[object]) -> None:
    before = "[\n"
    for item in items:
        write_json(before + "  " + _json(item))
        before = ",\n"
    write_json("[]\n" if before == "[\n" else "\n]\n")


def _json(value: object, indent: int | None = None) -> str:
    """Encode standard JSON: NaN and Infinity become null."""
    import json

    try:
        return json.dumps(value, default=encode, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        value = json.loads(json.dumps(value, default=encode), parse_constant=lambda _: None)
        return json.dumps(value, indent=indent, ensure_ascii=False)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    fitted = (_fit(cell, width, right) for cell, width, right in zip(cells, widths, numeric, strict=True))
    return "  ".join(fitted)


def _fit(cell: str, width: int, right: bool) -> str:
    if _width(cell) > width:
        cell = cell[: width - 1]
        while cell and _width(cell) > width - 1:
            cell = cell[:-1]
        cell += "…"
    padding = " " * (width - _width(cell))
    return padding + cell if right else cell + padding


def fit_text(text: str, width: int) -> str:
    """Cut `text` to `width` columns of a terminal, on one line."""
    text = clean_line(text)
    return text if _width(text) <= width else _fit(text, width, right=False)


def _width(text: str) -> int:
    """Count the terminal columns of `text`: two for East Asian wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    import unicodedata  # a thirtieth of a command's start, and most say nothing beyond ASCII

    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(",", "").replace(".", "", 1).removesuffix("%").strip().isdecimal()


def cut_line(line: str, limit: int = 500) -> str:
    return line if len(line) <= limit else f"{line[:limit]} [{len(line) - limit} more letters of this line]"


def format_value(value: object, *, strict: bool = False) -> str | None:
    """Return a task's value on one line: a text as it is, anything else as JSON; None for None.

    For people a NaN is `NaN`; with `strict` it is null, as JSON requires.
    """
    import json

    if value is None or isinstance(value, str):
        return value
    return _json(value) if strict else json.dumps(value, default=encode, ensure_ascii=False)


def table_lines(rows: Sequence[Mapping[str, object]], *, expendable: Sequence[str] = ()) -> list[str]:
    """Render rows as the lines of a table, as wide as the terminal, with the age of times.

    Of columns that are `expendable`, the first go as long as the table would not fit with its widest cells cut.
    """
    import shutil

    cells = [
        [format_ago(value) if isinstance(value, datetime) else format_cell(value) for value in row.values()]
        for row in rows
    ]
    width = shutil.get_terminal_size((120, 24)).columns if is_terminal() else 10_000
    header = list(rows[0])
    for name in expendable:
        least = [min(NARROWEST, max(_width(line[place]) for line in (header, *cells))) for place in range(len(header))]
        if sum(least) + 2 * (len(least) - 1) <= width:
            break
        if name in header:
            place = header.index(name)
            for line in (header, *cells):
                del line[place]
    return render_table(header, cells, width).splitlines()
