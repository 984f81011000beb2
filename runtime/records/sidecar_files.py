"""Files beside a task file that decide its content: SQLite's logs and the folders for workers and files.

SQLite believes any log that it finds there (https://www.sqlite.org/walformat.html), so in a folder in which everybody can
make files, another user could put a whole queue into the file of its owner.
"""

# Paths are names here: pathlib would drop the way that the caller wrote them.
# ruff: noqa: PTH100, PTH116, PTH120

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

from runtime.errors import Untrusted
from runtime.file_trust import TRUST, is_named, own_ids, user_name

LOGS: Final = ("-journal", "-wal", "-shm")
FOLDERS: Final = ("-workers", "-files")


def take_names(path: str) -> None:
    """Take the names of missing logs, if the task file is in a folder in which everybody can make files.

    SQLite takes an empty log for none, and in such a folder nobody else can remove it.
    """
    real = os.path.realpath(path)
    if not os.stat(os.path.dirname(real)).st_mode & stat.S_IWOTH:
        return
    status = os.stat(real)
    for end in LOGS:
        with suppress(FileExistsError):
            made = os.open(real + end, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, stat.S_IMODE(status.st_mode))
            if os.geteuid() == 0:
                os.fchown(made, status.st_uid, status.st_gid)
            os.close(made)


def check_beside(path: str) -> None:
    """Raise `Untrusted` if a user who cannot write the task file itself made a log or folder beside it."""
    real = os.path.realpath(path)
    try:
        main = os.stat(real)
    except OSError:
        return
    for place in [real + end for end in LOGS] + [path + end for end in FOLDERS]:
        try:
            status = os.lstat(place)
        except OSError:
            continue
        if not _could_write(status, main) and not is_named(place):
            folder = os.path.dirname(os.path.abspath(place))
            raise Untrusted(
                place,
                why="belongs to another user",
                owner=user_name(status.st_uid),
                mode=stat.filemode(status.st_mode),
                trust=f"{TRUST}={folder}",
                instead=f"keep `{path}` in a folder in which only you can make files",
            )


def _could_write(other: os.stat_result, main: os.stat_result) -> bool:
    """Whether the maker of one file may write the other: its owner, everybody, or a member of its group, who alone can
    give a file that group."""
    if other.st_uid in {*own_ids(), main.st_uid} or main.st_mode & stat.S_IWOTH:
        return True
    return bool(main.st_mode & stat.S_IWGRP) and other.st_gid == main.st_gid
