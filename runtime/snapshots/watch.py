"""Whether a tree, or some files, changed since the last look, from the kernel's own notices.

The kernel notes a change before the call that makes it returns, so `is_quiet` knows every earlier change by this machine.
The kernel does not note writes through a mapping, through a hard link from elsewhere, or by another machine on a shared
file system; nor new files in a folder that holds ignored files only. So a caller also looks at the files after a while.
"""

from __future__ import annotations

import os
import select
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from runtime.shim.tree_walk import walk

_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
_SELF, _ONLYDIR, _ADD = 0x400 | 0x800, 0x01000000, 0x20000000
_CONTENT: Final = _MODIFY | _ATTRIB | _CLOSE_WRITE
_WANTED: Final = _CONTENT | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _SELF | _ONLYDIR
_PLACES: Final = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ATTRIB | _SELF | _ONLYDIR
_EVENT: Final = struct.Struct("iIII")
MOST_FOLDERS: Final = 4_000
"""A user may have 8,192 watches on older systems."""


class TreeWatch:
    """From `open` or `of_files`. To `close` it in a forked child leaves the parent's watch alone."""

    def __init__(self, fd: int, listed: dict[int, set[bytes]], *, only_listed: bool) -> None:
        self.fd = fd
        """Readable after a change; -1 once it is closed."""
        self._listed = listed
        """By watch: the names of files that are in the tree."""
        self._only_listed = only_listed
        """Whether other names may come and go as well; otherwise only their content may change."""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    @classmethod
    def open(cls, root: Path, names: Iterable[str]) -> TreeWatch | None:
        """Watch the folders of these files of a tree; None if that is not possible.

        A change between the listing of the names and this call is missed, so the caller looks through the tree afterwards.
        """
        folders: dict[str, set[bytes]] = {"": set()}
        for name in names:
            folder, _, file = name.rpartition("/")
            folders.setdefault(folder, set()).add(os.fsencode(file))
            while folder:
                folder = folder.rpartition("/")[0]
                folders.setdefault(folder, set())
        folders |= {folder: set() for folder in _find_empty(root, folders)}
        watches = {f"{root}/{folder}": (_WANTED, files) for folder, files in folders.items()}
        if (root / ".git").is_dir():
            # What git calls tracked may change without any of the files.
            watches[f"{root}/.git"] = _MOVED_TO | _ONLYDIR, {b"index"}
        return cls._open(watches, only_listed=False)

    @classmethod
    def of_files(cls, paths: Iterable[str], places: Iterable[str] = ()) -> TreeWatch | None:
        """Watch files, present or not, with or without their folder; None if that is not possible. Look at them afterwards.

        For `places` only a replaced file is a change, not its content. The replacement of a folder further up is missed.
        """
        watches: dict[str, tuple[int, set[bytes]]] = {}
        for path, content in [*((path, _WANTED) for path in paths), *((path, 0) for path in places)]:
            for folder, name in {os.path.split(path), os.path.split(os.path.realpath(path))}:
                while not os.path.isdir(folder):  # noqa: PTH112 - text is split
                    folder, name = os.path.split(folder)
                mask, names = watches.get(folder, (_PLACES, set()))
                mask |= content if os.path.lexists(f"{folder}/{name}") else 0
                watches[folder] = mask, names | {os.fsencode(name)}
        return cls._open(watches, only_listed=True)

    @classmethod
    def _open(cls, watches: Mapping[str, tuple[int, set[bytes]]], *, only_listed: bool) -> TreeWatch | None:
        if not sys.platform.startswith("linux") or len(watches) > MOST_FOLDERS:
            return None
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return None
        listed: dict[int, set[bytes]] = {}
        for folder, (mask, files) in watches.items():
            watch = libc.inotify_add_watch(fd, os.fsencode(folder), mask | _ADD)
            if watch < 0:
                os.close(fd)
                return None
            listed[watch] = listed.get(watch, set()) | files  # One folder may have two names.
        return cls(fd, listed, only_listed=only_listed)

    def is_quiet(self) -> bool:
        """Whether nothing has changed since the last call, or since `open`."""
        quiet = True
        # The poll comes first: a read of nothing raises an exception, which takes four times as long.
        while self._poll.poll(0):
            quiet = not self._concerns(os.read(self.fd, 65536)) and quiet
        return quiet

    def _concerns(self, data: bytes) -> bool:
        at = 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            # An unlisted file is ignored as long as only its content changes.
            ignorable = name and (self._only_listed or mask & _CONTENT)
            if not ignorable or name in self._listed.get(watch, ()):
                return True
        return False

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)


def _find_empty(root: Path, folders: dict[str, set[bytes]]) -> list[str]:
    """Return folders of the tree without any file below them: the next file in one is beside no listed file."""
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
                walked = []
                for where, _, files in walk(str(root / path)):
                    if files:  # The first file ends the walk: an ignored folder may be large.
                        break
                    walked.append(os.path.relpath(where, root))
                else:
                    found += walked
    return found
