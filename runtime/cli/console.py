"""The one place that writes to stdout and stderr: whatever a command prints passes through it.

Text for people is cleaned (`runtime.sanitize`), on a terminal and elsewhere, and gets its style afterwards. Data in a
pipe or a file is left as it is: logs and documents byte for byte, JSON with the same values. A test finds other modules
that write.
"""

from __future__ import annotations

import os
import sys

from runtime.sanitize import LogCleaner, clean, clean_json, cut_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from typing import IO, Any

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_MARK = "\ufdd0" + os.urandom(8).hex()
"""Begins the mark of a style. No text of others can hold it, because it is another in each process."""


def is_terminal(stream: IO[str] | None = None) -> bool:
    """Whether a person watches `stream` (stdout by default) in a terminal that can move its cursor."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"


def errors_on_terminal() -> bool:
    return is_terminal(sys.stderr)


def can_draw_unicode() -> bool:
    """Whether standard output takes Braille."""
    try:
        "⣿█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def paint(text: str, style: str, stream: IO[str] | None = None) -> str:
    """Mark `text` for a colour or for bold if `stream` is a terminal and `NO_COLOR` is unset; `dress` applies it."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"{_MARK}{_STYLES[style]};{text}{_MARK}0;"


def dress(text: str) -> str:
    """Return `text` as a terminal gets it: cleaned, and then with the styles of `paint`."""
    first, *marked = clean(text).split(_MARK)
    return first + "".join(f"\x1b[{style}m{rest}" for style, _, rest in (part.partition(";") for part in marked))


def say(*lines: str) -> None:
    """Print lines for people on stdout. What follows a newline inside a line is indented, so that it passes for no other."""
    sys.stdout.write("".join(map(_dress_line, lines)))


def say_block(text: str) -> None:
    """Print text of several lines for people on stdout."""
    sys.stdout.write(dress(text))


def note(line: str) -> None:
    """Print a message on stderr, apart from data. What follows a newline in it is indented."""
    sys.stderr.write(_dress_line(line))
    sys.stderr.flush()


def note_block(text: str) -> None:
    """Print a message of several lines on stderr."""
    sys.stderr.write(dress(text) + "\n")
    sys.stderr.flush()


def _dress_line(line: str) -> str:
    return dress(line).replace("\n", "\n    ") + "\n"


def write_text(text: str) -> None:
    """Write a document on stdout: as it is, and cleaned on a terminal."""
    sys.stdout.write(dress(text) if sys.stdout.isatty() else text)


def write_json(text: str) -> None:
    """Write JSON, or a part of it, on stdout, with the same values."""
    sys.stdout.write(clean_json(text))


def write_log(pieces: Iterable[bytes]) -> int:
    """Write a log on stdout and return its bytes: as it is, and cleaned and with long lines cut on a terminal."""
    count = 0
    if not sys.stdout.isatty():
        for piece in pieces:
            count += sys.stdout.buffer.write(piece)
            sys.stdout.flush()
        return count
    cleaner = LogCleaner()
    try:
        for piece in cut_lines(iter(pieces)):
            count += len(piece)
            sys.stdout.write(cleaner.feed(piece))
            sys.stdout.flush()
    finally:
        sys.stdout.write(cleaner.end())
        sys.stdout.flush()
    return count


def ask(question: str) -> str:
    """Ask on stderr and return the answer."""
    sys.stderr.write(dress(question))
    sys.stderr.flush()
    return sys.stdin.readline()


def ask_secret(question: str) -> str:
    """Ask on the terminal, which does not show the answer."""
    import getpass

    return getpass.getpass(dress(question), stream=sys.stderr)


def flush() -> None:
    sys.stdout.flush()


def draw_bar(label: str, total: int | None, unit: str) -> AbstractContextManager[tuple[Any, Any]]:
    """Draw a bar on stderr while the context is open; gives rich's progress and its task."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    # Without markup: a label may hold square brackets.
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit, markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]

    @contextmanager
    def draw() -> Iterator[tuple[Any, Any]]:
        with Progress(*columns, console=Console(stderr=True), refresh_per_second=8) as progress:
            yield progress, progress.add_task(dress(label), total=total)

    return draw()


def draw_screen() -> AbstractContextManager[Callable[[Iterable[str]], None]]:
    """Open a part of the terminal that each call draws again, with other lines."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    @contextmanager
    def draw() -> Iterator[Callable[[Iterable[str]], None]]:
        with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda lines: live.update(Text.from_ansi("".join(map(_dress_line, lines)).rstrip("\n")), refresh=True)

    return draw()


# the streams themselves


def prepare_streams() -> None:
    """Replace a missing stream (`>&-`), and print letters that the terminal's encoding lacks as escapes."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    # A file name that is not UTF-8 becomes `\\udcff`, which is a legal escape in JSON too.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def write_error(text: str) -> None:
    """Print the text of an error after what stdout has been given; a reader that left is no further error."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_unwritten()
    try:
        note_block(text)
    except OSError:
        pass


def drop_unwritten() -> None:
    """Discard unwritten output, which would fail again, with noise, when the interpreter closes."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass


def reader_left() -> bool:
    """Whether the reader of our stdout closed it, as opposed to a broken pipe elsewhere."""
    import select

    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False
