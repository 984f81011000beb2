"""Objects in the embedded file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.clock import Clock
from runtime.errors import StoreUnavailable
from runtime.records.blobs.base import BlobInfo
from runtime.records.embedded import EmbeddedFile

if TYPE_CHECKING:
    from runtime.records.blobs.folder import FolderBlobs

from runtime.records.sqlite_rows import read_time


class SqliteBlobs:
    """`Blobs` as rows; logs and other files beside the database."""

    parallel = 1

    def __init__(self, file: EmbeddedFile, clock: Clock) -> None:
        self.url = f"sqlite:{file.path}"
        self._file = file
        self._clock = clock
        self._folder = file.path.with_name(file.path.name + "-files")

    def _beside(self, key: str) -> FolderBlobs | None:
        """Where snapshots lie: a row of their size would keep every worker waiting while it is written."""
        if not key.startswith("snapshots/"):
            return None
        from runtime.records.blobs.folder import FolderBlobs

        self._folder.mkdir(parents=True, exist_ok=True)
        return FolderBlobs(self._folder)

    def create(self, key: str, data: bytes) -> bool:
        if beside := self._beside(key):
            return beside.create(key, data)
        with self._file.transaction(durable=True) as connection:
            return bool(
                connection.execute(
                    "INSERT OR IGNORE INTO objects VALUES(?, ?, ?)", (key, data, self._clock.now().timestamp())
                ).rowcount
            )

    def put(self, key: str, data: bytes) -> None:
        with self._file.transaction() as connection:
            connection.execute("REPLACE INTO objects VALUES(?, ?, ?)", (key, data, self._clock.now().timestamp()))

    def upload(self, key: str, file: Path) -> None:
        self.put(key, file.read_bytes())

    def get(self, key: str) -> bytes | None:
        if beside := self._beside(key):
            return beside.get(key)
        with self._file.reading() as connection:
            row = connection.execute("SELECT value FROM objects WHERE key=?", (key,)).fetchone()
        if row is None:
            return None
        return row[0].encode() if isinstance(row[0], str) else bytes(row[0])

    def delete(self, key: str) -> None:
        with self._file.transaction() as connection:
            connection.execute("DELETE FROM objects WHERE key=?", (key,))

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        return (info.key for info in self.list_blobs(prefix, after=after))

    def list_blobs(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        if beside := self._beside(prefix):
            return beside.list_blobs(prefix, after=after)
        with self._file.reading() as connection:
            rows = connection.execute(
                "SELECT key, length(CAST(value AS BLOB)), modified FROM objects WHERE key>=? AND key<? AND key>? ORDER BY key",
                (prefix, prefix + "\U0010ffff", after or ""),
            ).fetchall()
        return iter([BlobInfo(key, size, read_time(modified)) for key, size, modified in rows])

    def append(self, key: str, data: bytes) -> None:
        path = self._folder / key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(data)
        except OSError as problem:
            raise StoreUnavailable(f"cannot write `{path}`: {(problem.strerror or str(problem)).lower()}") from problem

    def stream(self, key: str) -> Iterator[bytes]:
        try:
            with (self._folder / key).open("rb") as file:
                while chunk := file.read(1 << 20):
                    yield chunk
        except FileNotFoundError:
            return

    def path(self, key: str) -> Path | None:
        """Only files have a path; what is looked for here is an attempt's folder or log."""
        return self._folder.absolute() / key

    def close(self) -> None:
        self._file.close()
