"""A bucket, and the library that reaches it: what obstore offers, behind the unmodified `BucketBlobs`.

The service is strict, as the real ones are: a write is there for every reader once it was applied, a listing has every
key that was there when it began, and a create-only write is refused if the key exists. All that fails is the way there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from runtime.records.blobs.bucket import BucketBlobs
from runtime.records.store import BlobRecords
from tests.simulation.choices import Choice
from tests.simulation.world import EPOCH, Process, World

PAGE = 3
"""Keys of a page: small, so that most listings have several."""
SHORT_PAGE = Choice("short-page", 20, 1)
"""A service may send fewer keys than it was asked for, and go on with the next page."""
CONFLICT = Choice("conflict", 60, 1)
"""S3 refuses a create-only write while another of the same key is under way, even if that fails then."""
URL = "gs://sim/records"
REFUSED = '"no store takes this"'
"""JSON of a value that the library refuses, in every object that holds it, for a reason of its own."""


class Bucket:
    """Named bytes with the service's own times. `watchers` see each change at the moment when it is applied."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.listed: dict[str, dict[str, Any]] = {}
        """What a listing says of each object."""
        self.writers: dict[str, Process | None] = {}
        self._keys: list[str] = []
        self.watchers: list[Callable[[str, bytes | None, bytes], None]] = []
        """Called with the key, the bytes before, and the bytes after."""

    def write(self, key: str, data: bytes) -> None:
        before = self.objects.get(key)
        if before is None:
            insort(self._keys, key)
        now = self._world.now
        self.objects[key], self.writers[key] = (bytes(data), now), self._world.me()
        self.listed[key] = {"path": key, "size": len(data), "last_modified": EPOCH + timedelta(seconds=now)}
        for each in self.watchers:
            each(key, None if before is None else before[0], data)

    def create(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        self.write(key, data)
        return True

    def delete(self, key: str) -> bool:
        if self.objects.pop(key, None) is None:
            return False
        del self._keys[bisect_left(self._keys, key)]
        return True

    def keys(self, prefix: str, after: str | None = None) -> list[str]:
        start = bisect_left(self._keys, prefix)
        if after is not None:
            start = max(start, bisect_right(self._keys, after))
        end = bisect_left(self._keys, f"{prefix}\U0010ffff", start) if prefix else len(self._keys)
        return self._keys[start:end]


_REFUSED = REFUSED.encode()


class BaseError(Exception):
    pass


class AlreadyExistsError(BaseError):
    pass


class InvalidPathError(BaseError):
    pass


class PermissionDeniedError(BaseError):
    pass


class UnauthenticatedError(BaseError):
    pass


def _refused(status: str) -> Exception:
    return BaseError(f"Generic GCS error: after 8 retries, HTTP error status code: {status}")


def _denied() -> Exception:
    return PermissionDeniedError("403 Forbidden")


class Obstore:
    """The functions of obstore that `BucketBlobs` calls; the store that they get is not looked at."""

    exceptions = SimpleNamespace(
        BaseError=BaseError,
        AlreadyExistsError=AlreadyExistsError,
        InvalidPathError=InvalidPathError,
        PermissionDeniedError=PermissionDeniedError,
        UnauthenticatedError=UnauthenticatedError,
    )

    def __init__(self, world: World, bucket: Bucket) -> None:
        self._world, self._bucket = world, bucket

    def _call(self, what: str, apply: Callable[[], Any], *, write: bool = False) -> Any:
        return self._world.call(what, apply, write=write, refused=_refused, denied=_denied, to="bucket")

    def put(self, store: object, key: str, data: Any, *, mode: str = "overwrite", use_multipart: bool = False) -> None:
        bucket = self._bucket
        if _REFUSED in data:
            raise ValueError("this value cannot be sent")
        if mode == "create":
            if self._world.me() and self._world.draw(CONFLICT) and key not in bucket.objects:
                self._world.note(f"create {key} -> 409, and it is not there")
                raise AlreadyExistsError(f"Object at location {key} already exists")
            # Both the refusal of another's object and that of this call's own, made twice, look the same.
            if self._call(f"create {key}", lambda: bucket.create(key, data), write=True) is not True:
                raise AlreadyExistsError(f"Object at location {key} already exists")
            return
        self._call(f"put {key}", lambda: bucket.write(key, data), write=True)

    def get(self, store: object, key: str) -> Any:
        found = self._call(f"get {key}", lambda: self._bucket.objects.get(key))
        if found is None:
            raise FileNotFoundError(f"Object at location {key} not found")
        return SimpleNamespace(bytes=lambda: found[0], stream=lambda: iter([found[0]]))

    def head(self, store: object, key: str) -> dict[str, Any]:
        return {"size": len(self.get(store, key).bytes())}

    def get_range(self, store: object, key: str, *, start: int, end: int) -> bytes:
        data: bytes = self.get(store, key).bytes()
        return data[start:end]

    def delete(self, store: object, key: str) -> None:
        if self._call(f"delete {key}", lambda: self._bucket.delete(key), write=True) is False:
            raise FileNotFoundError(f"Object at location {key} not found")

    def list(
        self, store: object, prefix: str | None = None, *, offset: str | None = None, chunk_size: int = PAGE
    ) -> Iterator[list[dict[str, Any]]]:
        """Pages, each asked for by a call of its own. After a failure the iterator is at its end, as obstore's is."""
        return self._pages(f"{prefix}/" if prefix else "", offset)

    def _pages(self, prefix: str, offset: str | None) -> Iterator[list[dict[str, Any]]]:
        bucket, world = self._bucket, self._world
        last = offset
        while True:
            size = 1 if world.me() and world.draw(SHORT_PAGE) else PAGE

            def read(last: str | None = last, size: int = size) -> list[dict[str, Any]]:
                return [bucket.listed[key] for key in bucket.keys(prefix, last)[: size + 1]]

            found = self._call(f"list {prefix} after {last}", read)
            if not found:
                return
            yield found[:size]
            if len(found) <= size:
                return
            last = found[size - 1]["path"]

    def list_with_delimiter(self, store: object, prefix: str | None = None) -> dict[str, Any]:
        whole = f"{prefix}/" if prefix else ""
        keys = self._call(f"list {whole} /", lambda: self._bucket.keys(whole))
        folders = sorted({key[: key.index("/", len(whole))] for key in keys if "/" in key[len(whole) :]})
        objects = [{"path": key} for key in keys if "/" not in key[len(whole) :]]
        return {"objects": objects, "common_prefixes": folders}


class SimulatedBlobs(BucketBlobs):
    """`BucketBlobs` with the library's stand-in, and no credentials to look for."""

    parallel = 4

    def __init__(self, world: World, bucket: Bucket) -> None:
        self.url, self._bucket, self._scheme, self._below = URL, "sim", "gs", "records/"
        self._timeout, self._retry_for = timedelta(seconds=60), timedelta(seconds=90)
        self._credentials, self._store, self._plain = {}, None, None
        self._obstore = Obstore(world, bucket)
        self._next_chunk = {}


def open_records(world: World, bucket: Bucket) -> BlobRecords:
    """The record store as one process opens it."""
    return BlobRecords(SimulatedBlobs(world, bucket))
