"""Record stores by URL. A backend is imported on use; others may add schemes through an entry point."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from runtime.errors import InvalidValue, UnknownName

if TYPE_CHECKING:
    from runtime.records.base import RecordStore

ENTRY_POINTS: Final = "research_runtime.records"
"""Group of third parties' stores: the name is the scheme, the object takes the URL and returns the store."""

SCHEMES: Final = ("file", "gs", "memory", "s3", "sqlite")


def open_records(url: str) -> RecordStore:
    """The store at `url`: `file:/folder` or an absolute path, `gs://…`, `s3://…`, `sqlite:/file`, `memory:`.

    Makes no network call, and looks on the disk only for a folder; `check` proves the store's promises.
    """
    if url.startswith("/"):
        url = f"file:{url}"
    scheme, colon, rest = url.partition(":")
    match scheme if colon else "":
        case "file":
            from runtime.records.blobs.folder import FolderBlobs
            from runtime.records.store import BlobRecords

            return BlobRecords(FolderBlobs(_local_path(url, rest)))
        case "gs" | "s3":
            from runtime.records.blobs.bucket import BucketBlobs
            from runtime.records.store import BlobRecords

            return BlobRecords(BucketBlobs(url))
        case "memory":
            from runtime.records.memory import MemoryRecords

            return MemoryRecords()
        case "sqlite":
            from runtime.records.sqlite import SqliteRecords
            from runtime.records.sqlite_file import EmbeddedFile

            return SqliteRecords(EmbeddedFile(_local_path(url, rest)))
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if scheme not in found:
        known = [f"{name}:" for name in (*SCHEMES, *found)]
        raise UnknownName("record store", url, known, hint="for a folder write `file:` and its absolute path")
    store: RecordStore = found[scheme].load()(url)
    return store


def _local_path(url: str, rest: str) -> Path:
    """The path of `file:/a`, `file:///a` and their like; `%20` is read only behind `//`, where URLs are quoted."""
    path = Path(unquote(rest[2:]) if rest.startswith("//") else rest)
    if not path.is_absolute():
        raise InvalidValue("record store", url, "an absolute path behind the colon, such as file:/lab/records")
    return path
