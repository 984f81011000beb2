"""The content of an attempt's output folder: files that can be kept, and the rest with reasons."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from runtime.records.blobs.folder import sync
from runtime.shim.tree_walk import walk

_SAID: Final = 5
"""How many of the left-out files are named."""
_KEY_BYTES: Final = 1024
"""The longest name of an object that Google and Amazon take."""
_NOT_OPENED: Final = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT)


@dataclass(slots=True)
class FoundOutputs:
    """The content of an output folder, or the file in its place. Links to folders are not followed."""

    root: Path
    folders: list[Path] = field(default_factory=list)
    """All of them, the root first."""
    files: dict[str, Path] = field(default_factory=dict)
    """Readable files, and links to such, by their path from the root."""
    others: dict[str, str] = field(default_factory=dict)
    """Why the rest is not an output, by its path from the root."""

    def take(self, path: Path, name: str) -> None:
        if why := _why_no_output(path):
            self.others[name] = why
        else:
            self.files[name] = path

    def sync(self) -> None:
        """Make the files durable where they lie, except files that we may not open."""
        for path in (*self.files.values(), *reversed(self.folders or [self.root]), *self.root.parents[:2]):
            try:
                sync(path, unopened=_NOT_OPENED)
            except OSError as problem:
                if problem.errno != errno.EBADF:  # Some file systems cannot sync a file that was opened for reading.
                    raise

    def remove_empty(self) -> None:
        for folder in (*reversed(self.folders), self.root.parent):
            with suppress(OSError):
                folder.rmdir()


def find_outputs(root: Path) -> FoundOutputs:
    found = FoundOutputs(root)
    if not root.is_dir():
        found.take(root, root.name)
        return found

    def refuse(problem: OSError) -> None:
        found.others[os.path.relpath(problem.filename, root)] = f"cannot be read: {problem.strerror}"

    for name, folders, files in walk(str(root), refuse):
        folder = Path(name)
        found.folders.append(folder)
        links = {each for each in folders if os.path.islink(f"{name}/{each}")}  # noqa: PTH114 (raises for a long path)
        for each in sorted((*files, *links)):
            found.take(folder / each, os.path.relpath(f"{name}/{each}", root))
    return found


def _why_no_output(path: Path) -> str | None:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return "is a link to a folder" if stat.S_ISDIR(mode) else "is no regular file"
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        return "is a link to nothing"
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    return None


def why_no_object(name: str, url: str) -> str | None:
    """Why no object of a bucket can have this name, at this address; None if one can."""
    try:
        key = url.partition("://")[2].partition("/")[2].encode()
    except UnicodeEncodeError:
        return "has a name that is no UTF-8"
    if len(key) > _KEY_BYTES:
        return f"has a name that is too long for a bucket, with its folder more than {_KEY_BYTES:,} bytes"
    return "has a control character in its name" if any(ord(char) < 32 or ord(char) == 127 for char in name) else None


def report_left_out(others: dict[str, str]) -> str | None:
    """One sentence for people; None if there are none."""
    if not others:
        return None
    told = [f"`{_printable(name)}` {why}" for name, why in list(others.items())[:_SAID]]
    more = f", and {len(others) - _SAID:,} more" if len(others) > _SAID else ""
    return f"left out of its outputs: {'; '.join(told)}{more}"


def _printable(name: str) -> str:
    shown = name if name.isprintable() else ascii(name)[1:-1]
    return shown if len(shown) <= 200 else f"{shown[:100]}…{shown[-100:]}"
