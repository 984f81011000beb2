"""New values of a stack's secrets, which a node's own timer fetches into a file while Ray's processes keep the old ones."""

from __future__ import annotations

import os
import re
import shlex
import stat
from typing import Final

FILE: Final = "/run/runtime-ray/environment"
"""Lines of `export NAME='value'`, written by the machine's own program."""
MOST_BYTES: Final = 1 << 20
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def read_rotated(path: str = FILE, *, owner: int = 0) -> dict[str, str]:
    """Return the variables of the file; none if it is missing, unreadable, of another form, or could be another user's.

    Nothing is said about a file that is not used: its text may hold a value.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        found = os.fstat(opened)
        writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner or writable or found.st_size > MOST_BYTES:
            return {}
        return parse_environment(os.read(opened, MOST_BYTES).decode())
    except (OSError, ValueError):
        return {}
    finally:
        os.close(opened)


def parse_environment(text: str) -> dict[str, str]:
    """Read `export NAME=value` lines, quoted for a shell. Nothing is expanded. Raises `ValueError` for anything else."""
    words = shlex.split(text, posix=True)
    found = {}
    for export, assignment in zip(words[::2], words[1::2], strict=True):
        match = _ASSIGNMENT.fullmatch(assignment)
        if export != "export" or match is None:
            raise ValueError("it has something other than exports")
        found[match[1]] = match[2]
    return found
