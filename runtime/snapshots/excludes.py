"""Files that commands of this package put into a folder of code. They are not code, and no snapshot takes them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from runtime.config import Settings

MARKER: Final = ".gitignore"
_CONTENT: Final = b"# Made by runtime: git and snapshots leave this folder out. Delete this file to keep the folder with the code.\n*\n"


def make_output_folder(path: Path, *, marked: bool) -> None:
    """Make a folder that holds output, with the ones above it; a new one is left out of snapshots and of git if `marked`.

    An existing folder stays as it is: the user decided what it is. As tools for builds and tests do, the
    marker is a `.gitignore` that names everything, itself included.
    """
    new = not os.path.lexists(path)
    path.mkdir(parents=True, exist_ok=True)
    if new and marked:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(OSError), open(os.open(path / MARKER, flags, 0o666), "wb") as opened:  # noqa: PTH123
            opened.write(_CONTENT)


def list_own_places(settings: Settings, *more: str) -> tuple[Path, ...]:
    """Return the folders of this package's own files, and `more` of them, for `SnapshotRules.left_out`."""
    places = (*map(str, (settings.data_dir, settings.cache_dir, settings.config_dir)), *more)
    return tuple(Path(os.path.realpath(place)) for place in places)
