"""Looks whether a task's declared outputs exist already, so that `--skip-existing` can leave the task out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from runtime.errors import InvalidValue, MissingExtra, StoreUnavailable
from runtime.tasks import Task

PARALLEL: Final = 32
"""Requests to a bucket at once."""


class ExistingOutputs:
    """Answers for paths, `file:` URLs and buckets; a bucket is opened once."""

    def __init__(self) -> None:
        self._buckets: dict[str, Any] = {}
        self._pool: ThreadPoolExecutor | None = None

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
                self._bucket(url)
            self._pool = self._pool or ThreadPoolExecutor(PARALLEL, thread_name_prefix="existing")
            there |= {url for url, found in zip(remote, self._pool.map(self._in_bucket, remote), strict=True) if found}
        return there

    def _in_bucket(self, url: str) -> bool:
        from obstore.exceptions import BaseError

        key = url.split("/", 3)[3:]
        try:
            self._bucket(url).head(key[0] if key else "")
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as problem:
            text = str(problem).strip().partition("\n")[0]
            raise StoreUnavailable(f"cannot look for output `{url}`: {text}", hint="check your login") from problem
        return True

    def _bucket(self, url: str) -> Any:
        name = "/".join(url.split("/", 3)[:3])
        if name not in self._buckets:
            try:
                from obstore.store import from_url
            except ModuleNotFoundError:
                raise MissingExtra(f"looking for `{url}`", "gcp" if url.startswith("gs:") else "ec2") from None
            self._buckets[name] = from_url(name)
        return self._buckets[name]


def _on_disk(url: str) -> bool:
    if "://" in url and not url.startswith("file:"):
        raise InvalidValue("output", url, "a path or a file:, gs:// or s3:// URL")
    return Path(unquote(urlsplit(url).path) if url.startswith("file:") else url).exists()
