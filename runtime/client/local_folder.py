"""A folder of this machine that takes files under names which another machine chose, and nothing lands elsewhere.

Agents, buckets and pods say how the files are called that are brought home. Their names become local ones here alone, by
the rules that the shim has for snapshots.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

from runtime.errors import NotPossible
from runtime.shim import tree

_PIECE: Final = 1 << 20


class Became(StrEnum):
    """What became of a file."""

    FETCHED = "fetched"
    SAME = "same"
    """It was there."""
    REPLACED = "replaced"
    DIFFERS = "differs"
    """Another is there under its name, and stays."""


class NameRefused(NotPossible):
    """A remote name that leads elsewhere, or that cannot be a file's name here; nothing was written for it."""

    def __init__(self, problem: tree.NameRefused) -> None:
        self.name, self.reason = problem.name, problem.reason
        super().__init__(
            f"the remote side names a file `{ascii(self.name)[1:-1]}`, which is refused: it {self.reason}",
            hint="look at the files where they lie; a link or a long path of this machine is passed by naming another folder",
        )


def check_name(name: str) -> str:
    """`name`, which another machine chose, if it can be the name of one file or folder. Raises `NameRefused`."""
    try:
        parts = tree.local_parts(name)
        if len(parts) > 1:
            raise tree.NameRefused(name, "is a path")
    except tree.NameRefused as problem:
        raise NameRefused(problem) from None
    return name


class LocalFolder:
    """Made where it is missing. The folder itself may be reached through a link: the user named it."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise NotPossible(f"`{path}` is no folder", hint="name another folder, or move it away") from None
        self._below = tree.Below(str(path))

    def put(self, name: str, write: Callable[[BinaryIO], None], *, overwrite: bool = False) -> Became:
        """Place the file that `write` fills under its remote name, whole or not at all.

        A file that differs stays unless `overwrite`; a link under the name counts as one that differs. Raises
        `NameRefused` before anything is written.
        """
        try:
            return self._put(name, write, overwrite)
        except tree.NameRefused as problem:
            raise NameRefused(problem) from None

    def _put(self, name: str, write: Callable[[BinaryIO], None], overwrite: bool) -> Became:
        folder, last = self._below.enter(name)
        part = f".{secrets.token_hex(8)}.part"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o666, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "r+b") as opened:
                write(opened)
                opened.flush()
                became = _compare(opened, folder, name, last, overwrite)
            if became in (Became.FETCHED, Became.REPLACED):
                os.rename(part, last, src_dir_fd=folder, dst_dir_fd=folder)  # replaces a link and does not follow it
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
        return became

    def close(self) -> None:
        self._below.close()

    def __enter__(self) -> LocalFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _compare(new: BinaryIO, folder: int, name: str, last: str, overwrite: bool) -> Became:
    try:
        found = os.stat(last, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return Became.FETCHED
    except OSError as problem:
        raise tree.explain_name(name, problem) from None
    if stat.S_ISREG(found.st_mode) and _is_same(new, folder, last):
        return Became.SAME
    if overwrite and (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        return Became.REPLACED
    return Became.DIFFERS


def _is_same(new: BinaryIO, folder: int, last: str) -> bool:
    try:
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENOENT, errno.EACCES):
            return False
        raise
    with os.fdopen(descriptor, "rb") as old:
        new.seek(0)
        while True:
            ours, theirs = old.read(_PIECE), new.read(_PIECE)
            if ours != theirs:
                return False
            if not ours:
                return True
