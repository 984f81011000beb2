"""Task lines: the tasks read, and that an error names line and field."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from runtime.errors import InvalidTask, NotPossible, RequestRefused
from runtime.tasks.model import Terms, WorkflowEntry
from runtime.tasks.sources import count_lines, name_experiment, read_lines, read_tasks

DEFAULTS = Terms(experiment="tiles")
LINE = b'{"project": "p", "workflow": "w", "args": ["--x=1"]}'


def test_bare_message_of_another_producer_is_a_task(tmp_path: Path) -> None:
    file = tmp_path / "tiles.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + LINE + b"\n\n  \n" + LINE.replace(b"1", b"2") + b"\r\n")

    tasks = list(read_tasks(read_lines(str(file)), DEFAULTS))

    assert [task.entry for task in tasks] == [WorkflowEntry("p", "w", ("--x=1",)), WorkflowEntry("p", "w", ("--x=2",))]
    assert {task.experiment for task in tasks} == {"tiles"}


def test_gzipped_file_and_standard_input_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "tiles.jsonl.gz"
    file.write_bytes(gzip.compress(LINE + b"\n"))

    assert list(read_lines(str(file))) == [(1, LINE)] == list(read_lines("-", stdin=io.BytesIO(LINE)))


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (b"{", "json"),
        (b"[]", "json"),
        (b"\xff{}", "json"),
        (b'{"project": "p"}', "entry"),
        (b'{"command": "ls"}', "command"),
        (b'{"command": ["ls"], "timeout_s": -1}', "timeout_s"),
        (b'{"command": ["ls"], "resources": {"gpu": 1}}', "resources.gpu"),
        (b'{"command": ["ls"], "experiment": "other"}', "experiment"),
    ],
)
def test_bad_line_is_named_with_its_field(line: bytes, field: str) -> None:
    lines = enumerate([LINE, LINE, line], start=1)

    with pytest.raises(InvalidTask) as refused:
        list(read_tasks(lines, DEFAULTS))

    assert (refused.value.line, refused.value.field) == (3, field)
    assert "on line 3" in refused.value.message


def test_lines_are_read_as_they_are_needed() -> None:
    lines = read_tasks(enumerate([LINE, b"{"], start=1), DEFAULTS)

    assert next(lines).experiment == "tiles"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/tiles.jsonl", "tiles"),
        ("a b.ndjson.gz", "a-b"),
        ("/x/sweep-3.txt", "sweep-3"),
        ("t", "t"),
        (".gz", "tasks"),
    ],
)
def test_experiment_is_named_after_the_file(source: str, name: str) -> None:
    assert name_experiment(source) == name


def test_standard_input_names_no_experiment() -> None:
    with pytest.raises(RequestRefused, match="need an experiment"):
        name_experiment("-")


def test_file_that_is_not_there_is_explained() -> None:
    with pytest.raises(NotPossible, match="no such file"):
        next(read_lines("/nowhere/tiles.jsonl"))


def test_truncated_gzip_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "tiles.jsonl.gz"
    file.write_bytes(gzip.compress(b"\n".join([LINE] * 1000))[:60])

    with pytest.raises(NotPossible, match="cannot read on"):
        list(read_lines(str(file)))


def test_lines_are_counted_only_where_that_takes_nothing_away(tmp_path: Path) -> None:
    file = tmp_path / "tiles.jsonl"
    file.write_bytes(b"a\nb\n")

    assert count_lines(str(file)) == 2
    assert count_lines("-") is None
    assert count_lines(str(file) + ".gz") is None
