"""Named bytes with a create-only write: the few operations that a folder, a bucket or a table must support.

`BlobRecords` is a whole record store over them, so a new backend is one class of short methods. Keys are relative,
their parts joined by `/`, of letters, digits and `-_.+@=%`; no part begins with a dot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class BlobInfo:
    key: str
    size: int
    """Bytes."""
    modified: datetime
    """By the backend's clock."""


PAUSES_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Pauses before a call that a backend refused for a moment is repeated."""


class Blobs(Protocol):
    """Every call may come from any thread. Failures are `StoreUnavailable`, already retried with backoff."""

    url: str
    """Its name for people and for `open_records`; no slash at its end."""
    parallel: int
    """How many calls at once pay off; 1 if a call never waits for a network."""

    def create(self, key: str, data: bytes) -> bool:
        """Whole and durable on True. False if the key exists: another's, or this call's own that was retried."""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace, at once for every reader, and durable."""

    def upload(self, key: str, file: Path) -> None:
        """`put` from a file of any size; only if `path` is None."""

    def get(self, key: str) -> bytes | None: ...
    def delete(self, key: str) -> None:
        """Already gone is success."""

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        """Keys that begin with `prefix` (which may end inside a name) and follow `after`, in key order, lazily.

        All of them, or `StoreUnavailable`. Objects of others come too, unless the backend cannot address them.
        """

    def list_blobs(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        """`list_keys` with sizes and times; in a folder that costs a call for each."""

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of a log that only one process writes; not synced to disk. A bucket keeps it in chunks."""

    def stream(self, key: str) -> Iterator[bytes]:
        """The pieces of a log written with `append`, in order; nothing if there is none."""

    def path(self, key: str) -> Path | None:
        """Its path, if the backend keeps files that other programs can open."""

    def close(self) -> None: ...
