"""Digests of a folder's files as they were last read, so that a snapshot reads only files that have changed.

The user's cache folder has one file for each folder that code was submitted from. A file of the tree counts as unchanged
while type, mode, size, both times and inode are the same, as in git's index. A file that was written shortly before it was
read may change again within the same tick of the file system's clock and look the same; such files are not kept.

The cache only saves reading: without a valid cache every file is read. Any number of processes may use it at once; the
last one that saves wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from runtime.file_trust import write_private

VERSION: Final = 1
SETTLED_NS: Final = 2_000_000_000
"""Least time between writing and reading a file: the coarsest clock of a file system is FAT's."""
KEPT_TREES: Final = 16
KEPT_FOLDERS: Final = 200


class CachedFile(NamedTuple):
    """A file as it was read."""

    name: str
    status: os.stat_result
    digest: str
    """SHA-256 of its bytes, or of a link's text."""

    @classmethod
    def of(cls, name: str, status: os.stat_result, content: bytes) -> CachedFile:
        return cls(name, status, hashlib.sha256(content).hexdigest())


class SnapshotCache:
    """From `open`; `save` writes it if anything changed."""

    def __init__(self, path: Path | None, files: dict[str, list[Any]], trees: dict[str, str]) -> None:
        self._path = path
        self._files, self._trees = files, trees
        self._opened_ns = time.time_ns()
        self._seen: Sequence[CachedFile] = ()
        self._changed = False

    @classmethod
    def open(cls, cache_dir: Path | None, folder: Path) -> SnapshotCache:
        """Read the cache of `folder`; an empty one if none exists, it cannot be read, or no `cache_dir` is given."""
        if cache_dir is None:
            return cls(None, {}, {})
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
        path = cache_dir / "snapshots" / f"{name}.json"
        try:
            digest, _, body = path.read_bytes().partition(b"\n")
            if digest.decode() != hashlib.sha256(body).hexdigest():
                raise ValueError(digest)
            said = json.loads(body)
            files, trees = said["files"], said["trees"]
            if said["version"] != VERSION or type(trees) is not dict:
                raise ValueError(said["version"])
            if not all(type(each) is list and len(each) == 6 for each in files.values()):
                raise ValueError(files)
            return cls(path, files, trees)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(path, {}, {})

    @property
    def is_empty(self) -> bool:
        return not self._files

    def find_digest(self, name: str, status: os.stat_result) -> str | None:
        """Return the digest of the file's content if the file is unchanged."""
        known = self._files.get(name)
        if known is None or tuple(known[:-1]) != _fields(status):
            return None
        digest: str = known[-1]
        return digest

    def find_id(self, seen: Sequence[CachedFile]) -> str | None:
        """Return the content id of a tree that holds exactly this, if it was packed before."""
        return self._trees.get(self._keep(seen))

    def learn(self, seen: Sequence[CachedFile], identity: str) -> None:
        """Remember the content id of a tree that was packed."""
        key = self._keep(seen)
        self._trees = {**{each: known for each, known in self._trees.items() if each != key}, key: identity}
        self._changed = True

    def save(self) -> None:
        """Write the cache, if its folder can be written."""
        if self._path is None:
            return
        settled = self._opened_ns - SETTLED_NS
        files = {
            each.name: [*_fields(each.status), each.digest]
            for each in self._seen
            if max(each.status.st_mtime_ns, each.status.st_ctime_ns) < settled
        }
        if files == self._files and not self._changed:
            return
        trees = dict(list(self._trees.items())[-KEPT_TREES:])
        body = json.dumps({"version": VERSION, "files": files, "trees": trees}, separators=(",", ":")).encode()
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        with suppress(OSError):
            try:
                write_private(temporary, f"{hashlib.sha256(body).hexdigest()}\n{body.decode()}")
                temporary.replace(self._path)
            finally:
                temporary.unlink(missing_ok=True)
            _drop_oldest(self._path.parent)

    def _keep(self, seen: Sequence[CachedFile]) -> str:
        self._seen = seen
        lines = (
            f"{stat.S_IFMT(each.status.st_mode)} {each.status.st_mode & 0o100} {each.digest} {each.name}"
            for each in seen
        )
        return hashlib.sha256("\0".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _fields(status: os.stat_result) -> tuple[int, int, int, int, int]:
    return status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _drop_oldest(folder: Path) -> None:
    """Remove the oldest caches: those of deleted folders would stay for ever."""
    with os.scandir(folder) as entries:
        found = [entry.path for entry in entries]
    if len(found) <= KEPT_FOLDERS:
        return
    ages = []
    for path in found:
        with suppress(OSError):
            ages.append((os.stat(path).st_mtime_ns, path))  # noqa: PTH116
    for _, path in sorted(ages)[:-KEPT_FOLDERS]:
        with suppress(OSError):
            os.unlink(path)  # noqa: PTH108
