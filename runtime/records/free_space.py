"""How much room the disk of a folder has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from runtime.units import count_noun, format_size

FULL_BYTES: Final = 1 << 20
"""A disk with less room is full for a database, which needs room for its log and an index of it."""


def is_full(folder: Path) -> bool:
    """Whether nothing more can be written there; False if the machine does not say."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < FULL_BYTES or (found.f_files > 0 and not found.f_favail)


def describe_free(folder: Path) -> str:
    """The free space for people: `1.5GiB and 81,002 files`."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return "unknown"
    return f"{format_size(found.f_bavail * found.f_frsize)} and {count_noun(found.f_favail, 'file')}"
