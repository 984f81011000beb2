"""Task lines of a file or of standard input: one JSON object a line, plain or gzipped, read as they are needed."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final, cast

from runtime.errors import InvalidTask, NotPossible, RequestRefused
from runtime.tasks.literal_secrets import refuse_secrets
from runtime.tasks.model import Task, Terms, check_new_experiment
from runtime.tasks.wire import decode_task

STDIN: Final = "-"
_SUFFIXES: Final = (".gz", ".jsonl", ".ndjson", ".json", ".txt")


def name_experiment(source: str) -> str:
    """The experiment that a file's tasks belong to unless another is named: `tiles` of `data/tiles.jsonl.gz`."""
    if source == STDIN:
        raise RequestRefused(
            "tasks from standard input need an experiment",
            facts=["a file's name would give them one; run again, the same name goes on where it stopped"],
            hint="runtime submit --from - --experiment NAME",
        )
    name = Path(source).name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    name = "".join(char if char.isalnum() or char in "-_.+@=" else "-" for char in name)[:128].lstrip(".")
    return check_new_experiment(name or "tasks")


def check_readable(source: str) -> None:
    """Raise `NotPossible` without such a file, before any other work."""
    if source != STDIN:
        _open(source, None).close()


def read_lines(source: str, *, stdin: IO[bytes] | None = None) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of each line that is not blank. Raises `NotPossible` if `source` cannot be read."""
    with _open(source, stdin) as stream:
        try:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if stripped := line.strip():
                    yield number, stripped
        except (OSError, EOFError) as problem:
            raise NotPossible(
                f"cannot read on in `{source}`: {problem}",
                facts=["what came before it was taken"],
                hint="mend the file and run the same command again: it goes on where it stopped",
            ) from problem


def read_tasks(lines: Iterable[tuple[int, bytes]], defaults: Terms) -> Iterator[Task]:
    """The task of each line. Raises `InvalidTask` with the line's number and the field."""
    for number, line in lines:
        try:
            text = line.decode()
        except UnicodeDecodeError as problem:
            raise InvalidTask("json", f"is no UTF-8: {problem.reason} at byte {problem.start}", line=number) from None
        task = decode_task(text, defaults=defaults, line=number)
        if task.experiment != defaults.experiment:
            raise InvalidTask(
                "experiment",
                f"is {task.experiment!r}, and this submission is of `{defaults.experiment}`",
                line=number,
                hint=f"leave the field out, or submit these lines with `--experiment {task.experiment}`",
            )
        refuse_secrets(task.entry, line=number)
        yield task


def count_lines(source: str) -> int | None:
    """Lines of a plain file, for a progress bar; None if counting would consume them."""
    path = Path(source)
    if source == STDIN or path.suffix == ".gz" or not path.is_file():
        return None
    with path.open("rb", buffering=0) as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))


def _open(source: str, stdin: IO[bytes] | None) -> IO[bytes]:
    if source == STDIN:
        return stdin or sys.stdin.buffer
    try:
        if source.endswith(".gz"):
            return cast(IO[bytes], gzip.open(source, "rb"))
        return Path(source).open("rb")
    except OSError as problem:
        raise NotPossible(
            f"cannot read `{source}`: {(problem.strerror or str(problem)).lower()}",
            hint="name a file with a task on each line, or `--from -` for standard input",
        ) from problem
