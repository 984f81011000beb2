"""Looks whether a task's declared outputs exist already, so that `--skip-existing` can leave the task out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from runtime.errors import InvalidValue
from runtime.tasks.model import Task

if TYPE_CHECKING:
    from runtime.records.blobs.bucket import BucketBlobs

PARALLEL: Final = 32
"""Requests to a bucket at once."""


class ExistingOutputs:
    """Answers for paths, `file:` URLs and buckets; a bucket is opened once."""

    def __init__(self) -> None:
        self._buckets: dict[str, BucketBlobs] = {}

    def drop_done(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks that still have something to do: they declare no outputs, or one of them is missing."""
        urls = {url for task in tasks for url in task.outputs}
        there = self._find(sorted(urls))
        return [task for task in tasks if not task.outputs or not all(url in there for url in task.outputs)]

    def _find(self, urls: Sequence[str]) -> set[str]:
        remote = [url for url in urls if url.startswith(("gs://", "s3://"))]
        there = {url for url in urls if not url.startswith(("gs://", "s3://")) and _on_disk(url)}
        if remote:
            for url in remote:
                self._open_bucket(url)
            with ThreadPoolExecutor(PARALLEL, thread_name_prefix="existing") as pool:
                there |= {url for url, found in zip(remote, pool.map(self._in_bucket, remote), strict=True) if found}
        return there

    def _in_bucket(self, url: str) -> bool:
        """An object of that name; of a URL that ends in a slash, any object below it."""
        key = url.split("/", 3)[3] if url.count("/") > 2 else ""
        first = next(iter(self._open_bucket(url).list_keys(key)), None)
        return first is not None and (first == key or key.endswith("/"))

    def _open_bucket(self, url: str) -> BucketBlobs:
        from runtime.records.blobs.bucket import BucketBlobs

        name = "/".join(url.split("/", 3)[:3])
        if name not in self._buckets:
            self._buckets[name] = BucketBlobs(name)
        return self._buckets[name]


def _on_disk(url: str) -> bool:
    if "://" in url and not url.startswith("file:"):
        raise InvalidValue("output", url, "a path or a file:, gs:// or s3:// URL")
    return Path(unquote(urlsplit(url).path) if url.startswith("file:") else url).exists()
