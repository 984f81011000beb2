"""The cause of a command's death from its log or exit code: the exception and its place, the signal's name. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Final

CLOSE: Final = 10
"""Lines that may follow an exception which ended the command: what its exit handlers print."""

_FRAME: Final = re.compile(r'\s*File "(.+)", line (\d+)(?:, in (.+))?$')
_EXCEPTION: Final = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?:: .*)?$")
_RANK: Final = re.compile(r"^\[rank\d+\]:\s?")
_LIBRARIES: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<frozen ")
_TREE: Final = re.compile(r"^.*/job-[^/]+/tree/")
_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class UncaughtException:
    """An exception that nobody caught."""

    exception: str
    """`ValueError: no such column`"""
    place: str
    """`train.py:12, in main`: the deepest frame outside libraries, else the deepest."""

    def __str__(self) -> str:
        text = self.exception if len(self.exception) <= _SHOWN else f"{self.exception[: _SHOWN - 1]}…"
        return f"{text}, at {self.place}"


def find_raised(text: str) -> UncaughtException | None:
    """The last exception in the output of a Python program, if hardly anything follows it."""
    lines = [line for line in (_RANK.sub("", each.rstrip()) for each in text.splitlines()) if line]
    frames: list[tuple[str, str, str]] = []
    found: tuple[int, UncaughtException] | None = None
    for number, line in enumerate(lines):
        if match := _FRAME.match(line):
            frames.append((match[1], match[2], match[3] or ""))
        elif line.startswith("Traceback (most recent call last)"):
            frames = []
        elif frames and _EXCEPTION.match(line):
            found = number, UncaughtException(line, _place(frames))
            frames = []
    return found[1] if found and len(lines) - found[0] <= CLOSE else None


def _place(frames: list[tuple[str, str, str]]) -> str:
    own = [each for each in frames if not _LIBRARIES.search(each[0])]
    path, line, function = (own or frames)[-1]
    inside = f", in {function}" if function and function != "<module>" else ""
    return f"{_TREE.sub('', path)}:{line}{inside}"


def name_signal(code: int | None) -> str | None:
    """The signal of a command's exit code, by the convention of shells: 139 is SIGSEGV."""
    if code is None or code <= 128:
        return None
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return None


def describe_code(code: int) -> str:
    """`3`, `139 (SIGSEGV)`"""
    name = name_signal(code)
    return f"{code} ({name})" if name else str(code)
