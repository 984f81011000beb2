"""Records in a folder, such as a lab's shared disk: every write is whole, create-only where it must be, and durable.

A commit is a temporary file in the folder of its name, fsync, a hard link to the name (which refuses an existing one),
fsync of the folder. A power cut leaves the whole file or none.
"""

# Building a Path costs more than the system calls that are made with it here.
# ruff: noqa: PTH101, PTH102, PTH105, PTH108, PTH112, PTH123

from __future__ import annotations

import bisect
import errno
import functools
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

from runtime.errors import StoreUnavailable, StoreUnsafe
from runtime.records.blobs import PAUSES_S, BlobInfo
from runtime.records.free_space import describe_free
from runtime.system import system

TEMPORARY: Final = ".tmp-"
"""Begins the name of a file that is being written; a listing leaves it out."""
STALE_AFTER_S: Final = 24 * 3600
"""A temporary file this old was left by a process that died, and the next listing removes it."""

_GONE: Final = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_SYNC: Final = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED: Final = {errno.EACCES, errno.EPERM, errno.EROFS}

T = TypeVar("T")

_serial = itertools.count()


class FolderBlobs:
    parallel = 1

    def __init__(self, root: Path) -> None:
        """Raises `StoreUnavailable` without such a folder: it is never made, for it may be a disk not mounted."""
        self.root = root.absolute()
        self._base = f"{self.root}/"
        self._mark = system.urandom(4).hex()
        """Two workers in containers, or on two machines, may have the same numbers of process and thread."""
        self.url = f"file:{self.root}"
        if not self.root.is_dir():
            raise _no_folder(self.root)
        mode = stat.S_IMODE(self.root.stat().st_mode)
        self._shared_mode = mode if mode & 0o022 else None
        """The mode of a root that others may write to: everything below gets it, independent of its creator's umask."""

    def create(self, key: str, data: bytes) -> bool:
        return self._write(key, lambda descriptor: _write_all(descriptor, data), _link)

    def put(self, key: str, data: bytes) -> None:
        self._write(key, lambda descriptor: _write_all(descriptor, data), _replace)

    def _write(self, key: str, fill: Callable[[int], None], publish: Callable[[str, str], bool]) -> bool:
        path = self._base + key
        folder = path[: path.rindex("/")]
        temporary = f"{folder}/{TEMPORARY}{self._mark}-{os.getpid()}-{threading.get_native_id()}-{next(_serial)}"
        try:
            descriptor = self._open_new(temporary, folder)
            try:
                try:
                    if self._shared_mode is not None:
                        os.fchmod(descriptor, self._shared_mode & 0o666)
                    fill(descriptor)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                published = publish(temporary, path)
            finally:
                # After a rename it no longer exists; after a failure nothing may stay.
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            # Also if another write was first: its readers act on it, so it must last, and a retry may have met its own.
            sync(folder)
        except OSError as problem:
            raise self._explain(problem, path) from problem
        return published

    def _open_new(self, path: str, folder: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            self._make_folders(folder)
            return os.open(path, flags, 0o666)

    def _make_folders(self, folder: str) -> None:
        """Make missing folders below the root, and never the root itself; each is durable before it is used."""
        parent = str(self.root)
        if not os.path.isdir(self.root):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), parent)
        for part in folder[len(self._base) :].split("/"):
            path = f"{parent}/{part}"
            with suppress(FileExistsError):
                os.mkdir(path)
                if self._shared_mode is not None:
                    os.chmod(path, self._shared_mode)
            sync(parent)
            parent = path

    def upload(self, key: str, file: Path) -> None:
        def fill(descriptor: int) -> None:
            with file.open("rb") as opened:
                while piece := opened.read(1 << 20):
                    _write_all(descriptor, piece)

        self._write(key, fill, _replace)

    def get(self, key: str) -> bytes | None:
        found = self._ask(_read_file, self._base + key)
        if found is None:
            self._identify_root()
        return found

    def delete(self, key: str) -> None:
        path = self._base + key
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as problem:
            raise self._explain(problem, path) from problem

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        for key, _ in self._list(prefix, after, with_status=False):
            yield key

    def list_blobs(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        for key, found in self._list(prefix, after, with_status=True):
            if found is not None:
                yield BlobInfo(key, found.st_size, datetime.fromtimestamp(found.st_mtime, UTC))

    def _list(
        self, prefix: str, after: str | None, *, with_status: bool
    ) -> Iterator[tuple[str, os.stat_result | None]]:
        """Every key or an error: below a disk that vanishes meanwhile everything seems empty."""
        folder, _, start = prefix.rpartition("/")
        root = self._identify_root()
        for key in self._walk(f"{folder}/" if folder else "", start, after):
            yield key, self._ask(os.stat, self._base + key) if with_status else None
        if self._identify_root() != root:
            raise StoreUnavailable(
                f"record folder `{self.root}` was replaced while it was listed",
                facts=["another disk is mounted there now, or none is any more"],
                hint="is the disk or its server well? `dmesg` may say",
            )

    def _identify_root(self) -> tuple[int, int]:
        found = self._ask(os.stat, str(self.root))
        if found is None or not stat.S_ISDIR(found.st_mode):
            raise _no_folder(self.root)
        return found.st_dev, found.st_ino

    def _walk(self, folder: str, start: str, after: str | None) -> Iterator[str]:
        """Keys under `folder` (with its slash) with a first name that begins with `start`, sorted."""
        path = self._base + folder
        names = sorted(self._ask(_scan, path) or ())
        first = bisect.bisect_left(names, ".")
        if first < len(names) and names[first][0] == ".":
            for name in names[first : bisect.bisect_left(names, "/")]:
                _sweep(path + name)
            names = [name for name in names if name[0] != "."]
        if start:
            names = [name for name in names if name.startswith(start)]
        for name in names:
            key = folder + name
            if name[-1] == "/":
                if after is None or key > after or after.startswith(key):
                    yield from self._walk(key, "", after)
            elif after is None or key > after:
                yield key

    def _ask(self, look: Callable[[str], T], path: str) -> T | None:
        """The result of `look` for a path, None if it does not exist; a server that does not answer is asked again."""
        for pause in (*PAUSES_S, None):
            try:
                return look(path)
            except OSError as problem:
                if problem.errno in _GONE:
                    return None
                if problem.errno in _NOT_ALLOWED or pause is None:
                    raise self._explain(problem, path) from problem
                system.sleep(pause)
        raise AssertionError(path)

    def append(self, key: str, data: bytes) -> None:
        path = self._base + key
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(path, flags, 0o666)
            except FileNotFoundError:
                self._make_folders(path[: path.rindex("/")])
                descriptor = os.open(path, flags, 0o666)
            try:
                _write_all(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as problem:
            raise self._explain(problem, path) from problem

    def stream(self, key: str) -> Iterator[bytes]:
        try:
            with open(self._base + key, "rb") as file:
                while piece := file.read(1 << 20):
                    yield piece
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as problem:
            raise self._explain(problem, self._base + key) from problem

    def path(self, key: str) -> Path | None:
        return self.root / key

    def close(self) -> None:
        pass

    def _explain(self, problem: OSError, path: str) -> StoreUnavailable:
        said = os.strerror(problem.errno) if problem.errno else str(problem)
        message = f"record folder `{self.root}` failed: {said}"
        facts = [f"at `{path}`, which was left as it was"]
        if problem.errno in _FULL:
            facts.append(f"free: {describe_free(self.root)}")
            return StoreUnavailable(
                message, facts=facts, hint="make room there; workers go on by themselves, and a command is run again"
            )
        if problem.errno in _NOT_ALLOWED:
            hint = f"give user {os.getuid()} write access to `{self.root}`"
            return StoreUnavailable(message, facts=facts, hint=hint, denied=True)
        if isinstance(problem, FileNotFoundError) and not os.path.isdir(self.root):
            return _no_folder(self.root)
        return StoreUnavailable(message, facts=facts, hint="is the disk or its server well? `dmesg` may say")


def _no_folder(root: Path) -> StoreUnavailable:
    return StoreUnavailable(
        f"there is no record folder `{root}`",
        facts=["it is not made by itself, for a disk that is not mounted looks the same"],
        hint=f"mount it, or `mkdir -p {root}`",
        retryable=False,
    )


def _link(temporary: str, path: str) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as problem:
        if problem.errno not in _NO_LINKS:
            raise
        return _rename_new(temporary, path, problem)
    return True


def _rename_new(temporary: str, path: str, no_link: OSError) -> bool:
    """Rename without replacing, on a file system without hard links; some have neither."""
    import ctypes

    rename = _renameat2()
    number = errno.ENOSYS
    if rename is not None:
        at_cwd, no_replace = -100, 1
        if rename(at_cwd, os.fsencode(temporary), at_cwd, os.fsencode(path), no_replace) == 0:
            return True
        number = ctypes.get_errno()
        if number == errno.EEXIST:
            return False
        if number not in _NO_LINKS | {errno.EINVAL}:
            raise OSError(number, os.strerror(number), path)
    raise StoreUnsafe(
        f"the file system of `{path}` has no create-only write",
        facts=[f"hard link: {os.strerror(no_link.errno or 0)}", f"rename without replacing: {os.strerror(number)}"],
        hint="keep records on a local disk, NFS or a bucket",
        retryable=False,
    )


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _replace(temporary: str, path: str) -> bool:
    os.replace(temporary, path)
    return True


def _write_all(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, data[written:])


def _read_file(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(descriptor, 1 << 17):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


def sync(path: str | Path, *, unopened: Container[int] = ()) -> None:
    """Make a file's content, or a folder's names, durable. A file that cannot be opened by an error in `unopened` is left."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno in unopened:
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as problem:
        # Some network file systems cannot; there the link itself reached the server.
        if problem.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _scan(path: str) -> list[str]:
    """The names in a folder; those of folders end with a slash, so that they sort to where their keys belong."""
    with os.scandir(path) as entries:
        return [f"{entry.name}/" if _is_folder(entry) else entry.name for entry in entries]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        return False  # A link to itself is not ours.


def _sweep(path: str) -> None:
    if not path.rpartition("/")[2].startswith(TEMPORARY):
        return
    with suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > STALE_AFTER_S:
            os.unlink(path)
