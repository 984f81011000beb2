"""A record root in a bucket, which a reader sees as files of a folder; its logs are numbered chunks."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

from runtime.errors import InvalidValue
from runtime.jobs.hosts.agent import MARKER, new_marker, read_marker
from runtime.jobs.hosts.base import FreeSpace, LockLost
from runtime.jobs.plan import Target
from runtime.system import system

if TYPE_CHECKING:
    from concurrent.futures import Future

    from runtime.jobs.hosts.base import Files, FileToWrite, RootWatch
    from runtime.records.blobs.bucket import BucketBlobs

T = TypeVar("T")
K = TypeVar("K")
P = ParamSpec("P")

_CHUNK: Final = re.compile(r"(jobs/[^/]+/runs/\d+/a\d+/rank\d+)\.\d{5,}\.log")
_LOG: Final = re.compile(r"(jobs/[^/]+/runs/\d+/a\d+/rank\d+)\.log")
_URL: Final = re.compile(r"(gs|s3)://[^/\s]+(/[^/\s]+)*/?")


def is_bucket(records: str | None) -> bool:
    return records is not None and records.startswith(("gs://", "s3://"))


def poll_again_s(files: Files) -> float:
    """Seconds between two looks at a log that is followed: looks at a bucket cost money."""
    return 2.0 if is_bucket(files.root) else 0.3


def check_bucket(target: Target) -> None:
    """Raise `InvalidValue` for a record root that names no bucket."""
    if not _URL.fullmatch(target.records or ""):
        raise InvalidValue(f"targets.{target.name}.records", target.records, "gs://BUCKET/PREFIX or s3://BUCKET/PREFIX")


Method: TypeAlias = Callable[Concatenate["BucketFiles", P], T]


def _reading(method: Method[P, T]) -> Method[P, T]:
    """Ask for the root's marker beside the call's own request, so that the first call takes no longer."""

    @functools.wraps(method)
    def call(self: BucketFiles, /, *args: P.args, **more: P.kwargs) -> T:
        self._ask_for_marker()
        found = method(self, *args, **more)
        self._ensure_known(making=False)
        return found

    return call


def _making(method: Method[P, T]) -> Method[P, T]:
    @functools.wraps(method)
    def call(self: BucketFiles, /, *args: P.args, **more: P.kwargs) -> T:
        self._ask_for_marker()
        self._ensure_known(making=True)
        self._ensure_held()
        return method(self, *args, **more)

    return call


class BucketFiles:
    """Objects below `gs://BUCKET/PREFIX` or `s3://BUCKET/PREFIX`; the first use opens the bucket.

    A folder exists while an object lies in it, so making one does not show who was first.
    """

    def __init__(self, url: str) -> None:
        self.root = self.address = url.rstrip("/")
        self._opened: BucketBlobs | None = None
        self._watch: RootWatch | None = None
        self._looking: Future[bytes | None] | None = None
        self._is_known = False
        self._held: tuple[str, str] | None = None
        """A lock and its token; without them nothing is changed."""

    def keep_to(self, watch: RootWatch) -> None:
        self._watch = watch

    @property
    def _blobs(self) -> BucketBlobs:
        if self._opened is None:
            from runtime.records.blobs.bucket import BucketBlobs

            self._opened = BucketBlobs(self.root)
        return self._opened

    @_reading
    def read(self, name: str) -> bytes | None:
        if _LOG.fullmatch(name):
            chunks = self._chunks(name)
            return b"".join(data or b"" for data in self._each(self._blobs.get, chunks)) if chunks else None
        return self._blobs.get(name)

    @_reading
    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted = list(names)
        read = zip(wanted, self._each(self.read, wanted), strict=True)
        return {name: data for name, data in read if data is not None}

    @_reading
    def read_from(self, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        if not _LOG.fullmatch(name):
            return self._blobs.get_range(name, offset, limit)
        first, found = 0, b""
        for chunk, size in self._sizes(name):
            if offset < first + size and len(found) < limit:
                at = offset + len(found) - first
                found += self._blobs.get_range(chunk, at, limit - len(found))
            first += size
        return found

    @_making
    def create(self, name: str, data: bytes, *, mode: int = 0o600, lasting: bool = True) -> bool:
        if self._blobs.create(name, data):
            return True
        # A repeated write has the answer of its second try: an equal object that is not empty is our own.
        return bool(data) and self._blobs.get(name) == data

    @_making
    def link(self, there: str, name: str) -> bool:
        """Make a copy within the service, over an existing object: the same code lies under both names."""
        return self._blobs.copy(there, name)

    @_making
    def write(self, name: str, data: bytes, *, mode: int = 0o600) -> None:
        self._blobs.put(name, data)

    @_making
    def write_many(self, files: Sequence[FileToWrite]) -> None:
        self._each(self._write_one, files[:-1])
        self._each(self._write_one, files[-1:])

    @_making
    def make_folder(self, name: str, *, mode: int = 0o700) -> bool:
        return not self._blobs.list_folder(f"{name}/")

    @_reading
    def names(self, folder: str, prefix: str = "") -> list[str]:
        above = f"{folder}/" if folder else ""
        if prefix and (folder == "done" or folder.startswith("open/")):
            # The service filters the names of a flat folder, which has those of every user.
            return [key[len(above) :] for key in self._blobs.list_keys(above + prefix)]
        found = (_CHUNK.sub(r"\1.log", above + name)[len(above) :] for name in self._blobs.list_folder(above))
        return sorted({name for name in found if name.startswith(prefix)})

    @_reading
    def tree(self, folder: str) -> list[tuple[str, int]]:
        sizes: dict[str, int] = {}
        above = f"{folder}/" if folder else ""
        for blob in self._blobs.list_blobs(above):
            name = _CHUNK.sub(r"\1.log", blob.key)[len(above) :]
            sizes[name] = sizes.get(name, 0) + blob.size
        return sorted(sizes.items())

    @_reading
    def download(self, name: str, to: BinaryIO) -> None:
        if _LOG.fullmatch(name):
            to.write(self.read(name) or b"")
        else:
            self._blobs.download(name, to)

    @_making
    def upload(self, name: str, file: Path) -> None:
        self._blobs.upload(name, file)

    def remove(self, name: str) -> None:
        self._ask_for_marker()
        self._ensure_known(making=False)
        self._ensure_held()
        if not name or {"", ".", ".."} & set(name.split("/")):
            raise ValueError(f"`{name}` lies outside of `{self.root}`, or is the root itself")
        self._each(self._blobs.delete, [name, *self._blobs.list_keys(f"{name}/"), *self._chunks(name)])

    def room(self) -> FreeSpace:
        """A bucket has no limit of its own."""
        return FreeSpace()

    def while_held(self, lock: str, token: str) -> Files:
        """The look at the lock is a request of its own, so another may take it over between the two."""
        view = copy.copy(self)
        view._held = lock, token
        return view

    def _ensure_held(self) -> None:
        if self._held is None:
            return
        lock, token = self._held
        stem, _, number = lock.rpartition(".")
        if token.encode() not in (self.read(lock) or b"") or self.read(f"{stem}.{int(number) + 1}") is not None:
            raise LockLost

    def _ask_for_marker(self) -> None:
        if self._watch is None or self._looking is not None:
            return
        pool = system.pool(1, name="marker")
        self._looking = pool.submit(self._blobs.get, MARKER)
        pool.shutdown(wait=False)

    def _ensure_known(self, *, making: bool) -> None:
        """Raise the watch's refusal for an unknown root; mark a new one before its use."""
        if self._watch is None or self._looking is None or self._is_known:
            return
        content = self._looking.result()
        if content is None and not self._watch.known:
            if not making:
                return
            content = new_marker()
            if not self._blobs.create(MARKER, content):
                content = self._blobs.get(MARKER)
        found = None if content is None else read_marker(content)
        if found is None or (self._watch.known and found not in self._watch.known):
            raise self._watch.refusal(found, there=True)
        self._watch.saw(found)
        self._is_known = True

    def _write_one(self, file: FileToWrite) -> None:
        if file.once:
            self.create(file.name, file.data, mode=file.mode)
        else:
            self.write(file.name, file.data, mode=file.mode)

    def _chunks(self, name: str) -> list[str]:
        return [chunk for chunk, _ in self._sizes(name)] if _LOG.fullmatch(name) else []

    def _sizes(self, name: str) -> list[tuple[str, int]]:
        """Chunks of a log in order, with their sizes in bytes."""
        stem = name.removesuffix("log")
        found = [(blob.key, blob.size) for blob in self._blobs.list_blobs(stem) if _CHUNK.fullmatch(blob.key)]
        return sorted(found, key=lambda each: int(each[0].rsplit(".", 2)[1]))

    def _each(self, do: Callable[[K], T], keys: Iterable[K]) -> list[T]:
        wanted: list[Any] = list(keys)
        if len(wanted) < 2:
            return [do(key) for key in wanted]
        with system.pool(min(len(wanted), self._blobs.parallel), name="run-files") as pool:
            return list(pool.map(do, wanted))
