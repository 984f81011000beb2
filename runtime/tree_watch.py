"""Tells at once whether anything changed in a tree since it was last looked through, from the kernel's own notices.

The kernel notes a change before the call that makes it returns, so whatever this machine changed before `is_quiet` is
known there. Not noted are writes through a mapping, through a hard link from elsewhere, and by another machine on a
shared file system; nor what appears in a folder that holds ignored files only. Whoever relies on the watch looks again
after a while.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
_SELF, _ONLYDIR = 0x400 | 0x800, 0x01000000
_CONTENT: Final = _MODIFY | _ATTRIB | _CLOSE_WRITE
_WANTED: Final = _CONTENT | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _SELF | _ONLYDIR
_EVENT: Final = struct.Struct("iIII")
MOST_FOLDERS: Final = 4_000
"""A user may have 8,192 watches on older systems."""


class TreeWatch:
    """From `open`; `close` it, or `abandon` it in a forked child."""

    def __init__(self, fd: int, listed: dict[int, set[bytes]]) -> None:
        self._fd = fd
        self._listed = listed
        """By watch: the names of files that are in the tree."""

    @classmethod
    def open(cls, root: Path, names: Iterable[str]) -> TreeWatch | None:
        """Watch the folders of these files of a tree; None where that is not possible.

        A change between the listing of the names and now is missed, so the tree is looked through once more after this.
        """
        folders: dict[str, set[bytes]] = {"": set()}
        for name in names:
            folder, _, file = name.rpartition("/")
            folders.setdefault(folder, set()).add(os.fsencode(file))
            while folder:
                folder = folder.rpartition("/")[0]
                folders.setdefault(folder, set())
        folders |= {folder: set() for folder in _find_empty(root, folders)}
        if not sys.platform.startswith("linux") or len(folders) > MOST_FOLDERS:
            return None
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return None
        listed: dict[int, set[bytes]] = {}
        for folder, files in folders.items():
            watch = libc.inotify_add_watch(fd, os.fsencode(root / folder), _WANTED)
            if watch < 0:
                os.close(fd)
                return None
            listed[watch] = files
        # What git calls tracked may change without any of the files.
        git = libc.inotify_add_watch(fd, os.fsencode(root / ".git"), _MOVED_TO | _ONLYDIR)
        if git >= 0:
            listed[git] = {b"index"}
        return cls(fd, listed)

    def is_quiet(self) -> bool:
        """Whether nothing has changed since the last call, or since `open`."""
        quiet = True
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return quiet
            quiet = quiet and not self._concerns(data)

    def _concerns(self, data: bytes) -> bool:
        at = 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            # A file that is not listed is ignored, and goes on to be while only its content changes.
            if not (mask & _CONTENT and name) or name in self._listed.get(watch, ()):
                return True
        return False

    def close(self) -> None:
        os.close(self._fd)

    abandon = close
    """The watches themselves stay with the parent's descriptor."""


def _find_empty(root: Path, folders: dict[str, set[bytes]]) -> list[str]:
    """Folders of the tree without any file below them: the next file in one is not beside any that is listed."""
    found = []
    for folder in list(folders):
        try:
            with os.scandir(root / folder) as entries:
                inside = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        for name in inside:
            path = f"{folder}/{name}" if folder else name
            if name != ".git" and path not in folders:
                walked = [where for where, _, files in os.walk(root / path)] if _is_empty(root / path) else []
                found += [os.path.relpath(where, root) for where in walked]
    return found


def _is_empty(folder: Path) -> bool:
    return not any(files for _, _, files in os.walk(folder))
