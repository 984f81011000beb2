"""Numbers that an attempt reports while it runs: it appends lines of JSON to a file, and the process that runs it sums them up.

A line is an object: `step`, `of` (how many steps there will be) and `at` (seconds since 1970) are about the line, and every
other number is a metric. The sum has each metric's last, least and greatest number exactly, and its course in points. It
stays small however much is reported: a metric with too many points keeps every second one, and from then on every second
line counts.
"""

import json
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

SUM_SCHEMA = 1
RESERVED = ("at", "step", "of")
MOST_NAMES = 256
MOST_NAME = 200
"""Letters of a metric's name."""
MOST_LINE = 1 << 16
"""Bytes of a line; a longer one is passed over."""
MOST_POINTS = 4096
"""Points of all metrics together, and a quarter of it those of one; each keeps 16 at least."""
LOOK_BYTES = 1 << 22
"""How much of the file one look reads while the attempt runs."""
TAIL_BYTES = 1 << 20
"""How much of its end is read in any case when the attempt has ended."""


class Series(object):
    """The numbers of one metric."""

    def __init__(self) -> None:
        self.count, self.every = 0, 1
        self.least: "Optional[float]" = None
        self.most: "Optional[float]" = None
        self.points: "List[List[Optional[float]]]" = []
        """[time, step, number] of every `every`th line that has the metric."""
        self.last: "List[Optional[float]]" = []

    def add(self, at: float, step: "Optional[float]", number: float, room: int) -> None:
        self.last = [at, step, number]
        if self.count % self.every == 0:
            self.points.append(self.last)
            self.thin(room)
        self.count += 1
        if number == number:  # NaN is neither small nor great
            self.least = number if self.least is None else min(self.least, number)
            self.most = number if self.most is None else max(self.most, number)

    def thin(self, room: int) -> None:
        while len(self.points) > room:
            self.points, self.every = self.points[::2], 2 * self.every

    def describe(self) -> "Dict[str, Any]":
        points = self.points if self.points[-1:] == [self.last] else self.points + [self.last]
        about = {"last": self.last[2], "min": self.least, "max": self.most, "count": self.count}
        return dict(about, every=self.every, points=points)


class Reports(object):
    """Sums up the file at `path` as it grows, in bounded memory. Lines that are no report are counted and passed over."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.series: "Dict[str, Series]" = {}
        self.step: "Optional[float]" = None
        self.of: "Optional[float]" = None
        self.lines = self.skipped = self.unread = 0
        """Reports; other lines, and names for which there was no room; bytes that were never read."""
        self._offset = 0
        self._torn = b""
        self._passes = False
        """Whether the rest of a line that is too long comes next."""

    def look(self, limit: int = LOOK_BYTES) -> bool:
        """Read at most `limit` new bytes; returns whether there were any. A file that cannot be read has none."""
        data = self._read(limit)
        if data:
            self._take(data)
        return bool(data)

    def finish(self, seconds: float) -> None:
        """Read the rest. If that takes longer than `seconds`, only the end of it."""
        until = time.time() + seconds
        while self.look() and time.time() < until:
            pass
        left = self._size() - self._offset
        if left > TAIL_BYTES:
            self.unread += left - TAIL_BYTES
            self._offset += left - TAIL_BYTES
            self._torn, self._passes = b"", True
        while left > 0 and self.look():
            left -= LOOK_BYTES
        torn, self._torn = self._torn, b""
        if torn and not self._passes:
            self._take_line(torn)

    def _size(self) -> int:
        try:
            return os.lstat(self.path).st_size
        except OSError:
            return 0

    def _read(self, limit: int) -> bytes:
        # What it names may have become a pipe, which would never end, or a link to somebody's file.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            opened = os.open(self.path, flags)
        except OSError:
            return b""
        try:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode):
                return b""
            if status.st_size < self._offset:  # it was begun again
                self._offset, self._torn, self._passes = 0, b"", False
            os.lseek(opened, self._offset, os.SEEK_SET)
            data = os.read(opened, limit)
        except OSError:
            return b""
        finally:
            os.close(opened)
        self._offset += len(data)
        return data

    def _take(self, data: bytes) -> None:
        lines = (self._torn + data).split(b"\n")
        self._torn = lines.pop()
        for line in lines:
            if self._passes:
                self._passes = False
            elif line.strip():
                self._take_line(line)
        if len(self._torn) > MOST_LINE:
            self.skipped += not self._passes
            self._torn, self._passes = b"", True
        elif self._passes:
            self._torn = b""

    def _take_line(self, line: bytes) -> None:
        try:
            said = json.loads(line.decode("utf-8")) if len(line) <= MOST_LINE else None
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            self.skipped += 1
            return
        self.lines += 1
        at, step, of = (_number(said.get(name)) for name in RESERVED)
        self.step = self.step if step is None else step
        self.of = self.of if of is None else of
        at = round(time.time() if at is None else at, 3)
        for name, value in said.items():
            number = None if name in RESERVED else _number(value)
            if number is None:
                continue
            series = self.series.get(name)
            if series is None:
                if len(self.series) >= MOST_NAMES or len(name) > MOST_NAME:
                    self.skipped += 1
                    continue
                series = self.series[name] = Series()
            series.add(at, step, number, self._room())

    def _room(self) -> int:
        return max(16, MOST_POINTS // max(4, len(self.series)))

    @property
    def last(self) -> "Dict[str, float]":
        """Name → its last number."""
        return {name: each.last[2] for name, each in self.series.items()}  # type: ignore[misc]

    @property
    def ranges(self) -> "Dict[str, List[float]]":
        """Name → its least and its greatest number, of those that are not NaN alone."""
        found = {}
        for name, each in self.series.items():
            if each.least is not None and each.most is not None:
                found[name] = [each.least, each.most]
        return found

    def encode(self) -> str:
        """The sum as JSON, with NaN and infinities as Python spells them."""
        for each in self.series.values():
            each.thin(self._room())
        said = {"schema": SUM_SCHEMA, "lines": self.lines, "skipped": self.skipped, "unread": self.unread}
        names = {name: each.describe() for name, each in self.series.items()}
        return json.dumps(dict(said, step=self.step, of=self.of, names=names), separators=(",", ":"))


def _number(value: "Any") -> "Optional[float]":
    """The number as a float; None for anything else, and for one that no float holds."""
    if type(value) not in (int, float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
