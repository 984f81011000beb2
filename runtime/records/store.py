"""A whole record store over named bytes: the layout, the commit, marks, manifests and totals.

Folder, bucket and memory differ only in their `Blobs`. docs/records.md shows the layout with plain tools. Nothing here
locks: what must happen once is one create-only write, and all else may be written again.
"""

from __future__ import annotations

import os

from runtime.errors import StoreUnsafe
from runtime.records import codec
from runtime.records.base import RecordStore
from runtime.records.files import BlobFiles
from runtime.records.fleet import BlobFleet
from runtime.records.results import BlobAttempts

_proven: set[str] = set()
"""URLs whose create-only this process has seen to hold."""


class BlobRecords(BlobFleet, BlobAttempts, BlobFiles, RecordStore):
    """`RecordStore` over named bytes."""

    holds_tasks = False

    def check(self) -> None:
        """Prove create-only once for each process and URL.

        The probe stays in the store, so one refused write is the proof from the second process on.
        """
        if self.url in _proven:
            return
        key = "probe/create-only.json"
        for _ in range(2):
            data = codec.encode_json({"schema": codec.SCHEMA, "probe": os.urandom(8).hex()})
            created = self.blobs.create(key, data)
            found = self.blobs.get(key)
            if not created and found is not None and found != data:
                _proven.add(self.url)
                return
            if created and found != data:
                break
        raise StoreUnsafe(
            f"record store `{self.url}` does not keep the first of two writes",
            facts=[f"`{key}` was created twice, and the second creation was not refused"],
            hint="use a folder on a file system with hard links, or a bucket of a service with conditional writes",
            retryable=False,
        )
