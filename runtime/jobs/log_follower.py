"""Follows a run: the logs of its ranks as they grow, even if the shim keeps only beginning and end, and its heartbeat."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import job_folder, list_attempts, read_object
from runtime.shim.common import BEAT_S
from runtime.shim.logs import GAP, LOG_BYTES, render_gap, split_log
from runtime.system import system
from runtime.units import count_noun, format_duration

STILL_S: Final = 1.3 * BEAT_S
"""Seconds without a change after which a counter counts as standing still."""
LOOK_S: Final = 1.0
RUNS_WATCHED: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The counter at the first and at the last look."""

    attempt: int
    before: str
    after: str
    watched_s: float

    @property
    def moved(self) -> bool:
        return self.before != self.after


class HeartbeatWatch:
    """Reads the counter first on construction, so that time before `wait` counts as waiting."""

    def __init__(self, files: Files, run: str, attempt: int) -> None:
        self._files, self._attempt = files, attempt
        self._name = f"{run}/a{attempt:04d}/beat"
        self._before = files.read(self._name)
        self._began = system.monotonic()

    def wait(self, tell: Callable[[str], None]) -> Heartbeat | None:
        """Wait for a change for at most `STILL_S`, and report the wait to `tell`. None if there is no counter yet."""
        if not self._before:
            return None
        told = False
        while True:
            watched = system.monotonic() - self._began
            now = self._files.read(self._name) or self._before
            if now != self._before or watched >= STILL_S:
                return Heartbeat(
                    attempt=self._attempt, before=self._before.decode(), after=now.decode(), watched_s=watched
                )
            if not told:
                told = True
                tell(f"waiting for a sign of life of attempt {self._attempt}, at most {format_duration(STILL_S)}")
            system.sleep(min(1.0, max(0.05, STILL_S - watched)))


class LifeWatch:
    """Looks for signs of life of a job whose processes nobody can see from here."""

    def __init__(self, files: Files, job: str) -> None:
        self._files, self._job = files, job
        self._seen: list[tuple[int, int, bytes | None]] | None = None
        self._since = 0.0
        self._moved = False

    def look(self, indices: Sequence[int]) -> bool | None:
        """Whether one of these runs has begun an attempt, moved the counter of its last one, or ended, during the last
        `STILL_S`; None if it was not watched for that long."""
        seen, now = self._read(indices), system.monotonic()
        if self._seen is None or seen != self._seen:
            self._moved = self._seen is not None
            self._seen, self._since = seen, now
        elif now - self._since >= STILL_S:
            return False
        return True if self._moved else None

    def _read(self, indices: Sequence[int]) -> list[tuple[int, int, bytes | None]]:
        runs = f"{job_folder(self._job)}/runs"
        newest = [
            (index, max(list_attempts(self._files, self._job, index), default=0)) for index in indices[:RUNS_WATCHED]
        ]
        return [(index, number, self._files.read(f"{runs}/{index}/a{number:04d}/beat")) for index, number in newest]


def find_living(files: Files, runs: Mapping[str, Sequence[int]], tell: Callable[[str], None]) -> set[str]:
    """Watch the open runs of jobs for at most `STILL_S`, all at once, and return the jobs that show a sign of life."""
    left = {job: LifeWatch(files, job) for job in runs}
    if not left:
        return set()
    for job, watch in left.items():
        watch.look(runs[job])
    until, living = system.monotonic() + STILL_S, set[str]()
    which = f"job `{min(left)}`" if len(left) == 1 else count_noun(len(left), "job")
    tell(describe_watch(which))
    while left and system.monotonic() < until:
        system.sleep(LOOK_S)
        living |= {job for job, watch in left.items() if watch.look(runs[job])}
        left = {job: watch for job, watch in left.items() if job not in living}
    return living


def describe_watch(which: str) -> str:
    return f"waiting for a sign of life of {which}, at most {format_duration(STILL_S)}: it may run where nobody can look from here"


def shows_life(files: Files, job: str, indices: Sequence[int], tell: Callable[[str], None]) -> bool:
    """Whether any of these runs begins an attempt or moves the counter of its last one within `STILL_S`."""
    return bool(find_living(files, {job: indices}, tell))


def describe_heartbeat(heartbeat: Heartbeat) -> list[str]:
    if heartbeat.moved:
        return [
            f"the shim of attempt {heartbeat.attempt} lives: its counter went from {heartbeat.before} to {heartbeat.after}"
        ]
    stood = f"its counter stood at {heartbeat.before} for {format_duration(round(heartbeat.watched_s))}"
    return [
        f"no sign of life of attempt {heartbeat.attempt}: {stood}; a shim that lives moves it every {format_duration(BEAT_S)}",
        "that alone proves nothing: a shim that stands still, a folder that hangs and one that shows changes late look alike",
    ]


def read_limit(files: Files, job: str) -> int:
    """The limit of a log of this job, in bytes; the usual one if its order cannot be read."""
    limit = read_object(files, f"{job_folder(job)}/order.json").get("log_bytes")
    return limit if type(limit) is int else LOG_BYTES


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
        found = re.fullmatch(GAP, self._files.read_from(self._name, self._head, len(render_gap(0))))
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
