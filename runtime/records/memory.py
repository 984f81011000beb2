"""Records in this process's memory, for tests and for trying things out; they are gone with the store."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.clock import Clock
from runtime.records.blobs import BlobInfo
from runtime.records.store import BlobRecords
from runtime.system import system


class MemoryBlobs:
    parallel = 1

    def __init__(self) -> None:
        self.url = "memory:"
        self._blobs: dict[str, tuple[bytes, datetime]] = {}
        self._keys: list[str] = []
        """Sorted."""
        self._lock = system.lock()
        self._files: TemporaryDirectory[str] | None = None

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self._blobs:
                return False
            self._store(key, data)
            return True

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._store(key, data)

    def _store(self, key: str, data: bytes) -> None:
        if key not in self._blobs:
            bisect.insort(self._keys, key)
        self._blobs[key] = (bytes(data), system.now())

    def upload(self, key: str, file: Path) -> None:
        self.put(key, file.read_bytes())

    def get(self, key: str) -> bytes | None:
        found = self._blobs.get(key)
        return None if found is None else found[0]

    def delete(self, key: str) -> None:
        with self._lock:
            if self._blobs.pop(key, None) is not None:
                del self._keys[bisect.bisect_left(self._keys, key)]

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        with self._lock:
            first = bisect.bisect_left(self._keys, prefix)
            if after is not None:
                first = max(first, bisect.bisect_right(self._keys, after))
            last = bisect.bisect_left(self._keys, f"{prefix}\U0010ffff", first)
            return iter(self._keys[first:last])

    def list_blobs(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        for key in self.list_keys(prefix, after=after):
            if found := self._blobs.get(key):
                yield BlobInfo(key, len(found[0]), found[1])

    def append(self, key: str, data: bytes) -> None:
        with self._lock:
            self._store(key, (self.get(key) or b"") + data)

    def stream(self, key: str) -> Iterator[bytes]:
        data = self.get(key)
        return iter(() if data is None else (data,))

    def path(self, key: str) -> Path | None:
        """The path for an attempt's outputs, in a temporary folder that `close` removes; None for all else."""
        if not key.startswith("outputs/"):
            return None
        with self._lock:
            self._files = self._files or TemporaryDirectory(prefix="runtime-memory-")
            return Path(self._files.name) / key

    def close(self) -> None:
        with self._lock:
            files, self._files = self._files, None
        if files is not None:
            files.cleanup()


class MemoryRecords(BlobRecords):
    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__(MemoryBlobs(), clock=clock)

    def skew(self) -> None:
        """The store uses this process's clock."""
