"""The log of one rank of an attempt, read on as it grows, even if its shim keeps only the beginning and the end."""

from __future__ import annotations

import json
from collections.abc import Iterator

from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import job_folder, list_attempts
from runtime.shim.logs import GAP, LOG_BYTES, render_gap, split_log


def read_limit(files: Files, job: str) -> int:
    """The limit of a log of this job, in bytes."""
    order = json.loads(files.read(f"{job_folder(job)}/order.json") or b"{}")
    return int(order.get("log_bytes", LOG_BYTES))


class LogReader:
    """Reads the new bytes of a log. A line stands for bytes that were left out."""

    def __init__(self, files: Files, name: str, limit: int) -> None:
        self._files, self._name = files, name
        self._head, self._tail = split_log(limit)
        self._at = 0
        """How many bytes of the output have been read or skipped."""

    def read(self) -> Iterator[bytes]:
        while True:
            offset, limit = self._at, 1 << 20
            if offset < self._head:
                limit = min(limit, self._head - offset)
            elif (left_out := self._find_gap()) is not None:
                if missed := max(0, self._head + left_out - self._at):
                    self._at += missed
                    yield render_gap(missed)
                offset = self._at - left_out + len(render_gap(0))
            chunk = self._files.read_from(self._name, offset, limit)
            if not chunk:
                return
            self._at += len(chunk)
            yield chunk

    def _find_gap(self) -> int | None:
        """How many bytes are left out after the beginning; None for a whole log."""
        found = GAP.fullmatch(self._files.read_from(self._name, self._head, len(render_gap(0))))
        return int(found[1]) if found else None


class RunLog:
    """Reads the new output of one rank of a run, attempt after attempt."""

    def __init__(self, files: Files, job: str, index: int, limit: int, *, rank: int = 0) -> None:
        self._files, self._job, self._index, self._rank, self._limit = files, job, index, rank, limit
        self._readers: dict[int, LogReader] = {}

    def read(self, attempt: int | None = None) -> Iterator[bytes]:
        """The new bytes of `attempt`, or of the newest attempt that was read and those after it."""
        newest = max(self._readers, default=1)
        numbers = [each for each in list_attempts(self._files, self._job, self._index) if each >= newest]
        for number in numbers if attempt is None else [attempt]:
            name = f"{job_folder(self._job)}/runs/{self._index}/a{number:04d}/rank{self._rank}.log"
            yield from self._readers.setdefault(number, LogReader(self._files, name, self._limit)).read()
