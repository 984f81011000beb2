"""The output format of lists, values and progress."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from runtime.cli import output
from runtime.cli.console import dress, paint
from runtime.cli.output import (
    OutputFormat,
    ProgressLines,
    format_ago,
    format_cell,
    print_done,
    print_json,
    print_list,
    render_table,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(monkeypatch: pytest.MonkeyPatch, stream: str) -> Terminal:
    """Put a terminal in the place of `stream`. Not a fixture: pytest sets its own capture between fixtures and test."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    monkeypatch.setattr(sys, stream, screen)
    return screen


class State(StrEnum):
    QUEUED = "queued"


@dataclass(frozen=True)
class Row:
    id: str
    state: State
    attempts: int
    waited: timedelta
    at: datetime = datetime(2026, 1, 1, 12, tzinfo=UTC)


ROWS = [
    Row("t-1", State.QUEUED, 12345, timedelta(minutes=4, seconds=10)),
    Row("t-22", State.QUEUED, 1, timedelta(0)),
]
COLUMNS: dict[str, Any] = {
    "ID": lambda row: row.id,
    "STATE": lambda row: row.state,
    "ATTEMPTS": lambda row: row.attempts,
    "WAITED": lambda row: row.waited,
}


def test_long_list_on_a_terminal_is_printed_as_it_comes_under_one_header(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watch(monkeypatch, "stdout")
    monkeypatch.setattr(output, "TABLE_ROWS", 2)
    printed = []

    def rows() -> Iterator[Row]:
        for number in range(5):
            printed.append(len(screen.getvalue().splitlines()))
            yield Row(f"t-{number}", State.QUEUED, 1, timedelta(0))

    print_list(rows(), COLUMNS)

    lines = screen.getvalue().splitlines()
    assert printed == [0, 0, 3, 3, 5]
    assert [line.split()[0] for line in lines[1:]] == [f"t-{number}" for number in range(5)]


def test_list_on_a_terminal_is_an_aligned_table(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch, "stdout")

    print_list(ROWS, COLUMNS)

    assert terminal.getvalue().splitlines() == [
        "\x1b[1mID    STATE   ATTEMPTS  WAITED\x1b[0m",
        "t-1   queued    12,345  4m10s",
        "t-22  queued         1  0ms",
    ]


def test_list_in_a_pipe_is_tabs_without_header(capsys: pytest.CaptureFixture[str]) -> None:
    print_list(ROWS, COLUMNS)

    assert capsys.readouterr().out == "t-1\tqueued\t12345\t4m10s\nt-22\tqueued\t1\t0ms\n"


def test_list_as_json_is_one_array_of_whole_rows(capsys: pytest.CaptureFixture[str]) -> None:
    print_list(iter(ROWS), COLUMNS, OutputFormat.JSON)

    assert json.loads(capsys.readouterr().out) == [
        {"id": "t-1", "state": "queued", "attempts": 12345, "waited": 250.0, "at": "2026-01-01T12:00:00.000Z"},
        {"id": "t-22", "state": "queued", "attempts": 1, "waited": 0.0, "at": "2026-01-01T12:00:00.000Z"},
    ]


@pytest.mark.parametrize("ends", [RuntimeError, KeyboardInterrupt])
def test_what_was_done_before_an_error_is_printed_first_and_whole(
    ends: type[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> Iterator[Row]:
        yield ROWS[0]
        raise ends

    for form, expected in ((OutputFormat.TEXT, "t-1\tqueued\t12345\t4m10s\n"), (OutputFormat.JSON, None)):
        with pytest.raises(ends):
            print_done(rows(), COLUMNS, form)
        said = capsys.readouterr().out
        assert said == expected if expected else [row["id"] for row in json.loads(said)] == ["t-1"]
    screen = watch(monkeypatch, "stdout")
    with pytest.raises(ends):
        print_done(rows(), COLUMNS)
    assert [line.split()[0] for line in screen.getvalue().splitlines()][1:] == ["t-1"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [([], []), ([None], [None]), (iter([]), []), ({"path": Path("/a")}, {"path": "/a"}), ((1, "ä"), [1, "ä"])],
)
def test_json_round_trips(capsys: pytest.CaptureFixture[str], value: object, expected: object) -> None:
    print_json(value)

    assert json.loads(capsys.readouterr().out) == expected


def test_json_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON for object"):
        print_json({"a": object()})


def test_table_wider_than_the_terminal_cuts_its_widest_cells() -> None:
    table = render_table(["ID", "ERROR"], [["t-1", "x" * 100]], width=40)

    assert [len(line) for line in table.splitlines()] == [10, 40]
    assert table.endswith("x…\n")


def test_table_of_a_very_long_cell_is_cut_at_once() -> None:
    steps = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal steps
        steps += event == "call"

    sys.setprofile(count)
    try:
        table = render_table(["ID", "ERROR"], [["t-1", "é" * 20_000]], width=40)
    finally:
        sys.setprofile(None)

    assert [len(line) for line in table.splitlines()] == [10, 40]
    assert steps < 200_000


def test_progress_of_one_has_a_noun_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("submitting", total=1) as bar:
        bar.advance()

    assert capsys.readouterr().err.startswith("submitting: 1 of 1 task, 100 %")


def test_table_counts_wide_characters_as_two_columns() -> None:
    header, wide, narrow = render_table(["NAME", "N"], [["実験", "1"], ["ab", "2"]], width=80).splitlines()

    assert (header, wide, narrow) == ("NAME  N", "実験  1", "ab    2")


def test_table_without_rows_prints_nothing() -> None:
    assert render_table(["ID"], [], width=80) == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        ("", "-"),
        (True, "yes"),
        (1234567, "1234567"),
        ("two\n lines", "two lines"),
        (State.QUEUED, "queued"),
    ],
)
def test_cell_is_one_line(value: object, expected: str) -> None:
    assert format_cell(value) == expected


def test_ago_says_past_now_and_future() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    said = [format_ago(now - timedelta(seconds=seconds), now) for seconds in (250, 0.5, -30)]

    assert said == ["4m10s ago", "now", "in 30s"]


def test_paint_leaves_text_alone_without_terminal_or_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    watch(monkeypatch, "stdout")

    assert dress(paint("failed", "red")) == "\x1b[31mfailed\x1b[0m"
    assert paint("failed", "red", io.StringIO()) == "failed"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("failed", "red") == "failed"


def test_progress_lines_come_now_and_then_and_at_the_end() -> None:
    now, lines = [0.0], []
    bar = ProgressLines("submitting", 1_000, "tasks", every=5, clock=lambda: now[0], write=lines.append)

    for second in range(1, 9):
        now[0] = second
        bar.advance(100)
    bar.finish()
    bar.finish()

    assert lines == [
        "submitting: 500 of 1,000 tasks, 50 %, 100/s, 5s left",
        "submitting: 800 of 1,000 tasks, 80 %, 100/s, 2s left",
    ]


def test_progress_without_a_total_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("reading", unit="lines") as bar:
        bar.set(done=7)

    assert capsys.readouterr().err.startswith("reading: 7 lines, ")


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watch(monkeypatch, "stderr")

    with output.progress("submitting", total=10) as bar:
        bar.advance(4)
        bar.set(done=10)

    assert "10/10" in screen.getvalue()
