"""The board: a file of slots, shared through mmap, in which each task notes when it ran.

Completion is read from here and never from a peer's own bookkeeping, so lost tasks and tasks that ran twice show.
A slot costs about a microsecond, the same for every peer. Times come from `time.perf_counter`, which all processes of
one machine share.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from collections.abc import Iterable

from benchmarks import bodies
from benchmarks.bodies import BEGUN, END, ENDED, FIRST, PARENT, PID, START, WORDS


class Board:
    """The driver's view of a board: slots by task number, written by `bodies` in the process that runs the task."""

    def __init__(self, path: str | os.PathLike[str], slots: int) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.ftruncate(descriptor, slots * WORDS * 8)
            memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        whole = memoryview(memory)
        self._seconds = whole.cast("d")
        self._counts = whole.cast("q")
        self._done_below = 0

    def use_here(self) -> None:
        """Let bodies in this process and its forks write to this board."""
        bodies.attach(self.path)

    @property
    def slots(self) -> int:
        return len(self._counts) // WORDS

    def start(self, index: int) -> float:
        """Start time of the last run."""
        return self._seconds[index * WORDS + START]

    def first_start(self, index: int) -> float:
        return self._seconds[index * WORDS + FIRST]

    def end(self, index: int) -> float:
        return self._seconds[index * WORDS + END]

    def times_begun(self, index: int) -> int:
        return self._counts[index * WORDS + BEGUN]

    def times_ended(self, index: int) -> int:
        return self._counts[index * WORDS + ENDED]

    def pid(self, index: int) -> int:
        return self._counts[index * WORDS + PID]

    def parent(self, index: int) -> int:
        return self._counts[index * WORDS + PARENT]

    def done(self, indices: range) -> bool:
        """Whether each task of a range, asked about in rising order, has ended."""
        at = max(self._done_below, indices.start)
        counts = self._counts
        while at < indices.stop and counts[at * WORDS + ENDED]:
            at += 1
        self._done_below = at
        return at >= indices.stop

    def count_done(self, indices: range) -> int:
        return sum(1 for index in indices if self.times_ended(index))

    def wait(self, indices: range, *, timeout_s: float, every_s: float = 0.01) -> bool:
        """Wait until all of a range have ended; False if time ran out first."""
        deadline = time.perf_counter() + timeout_s
        while not self.done(indices):
            if time.perf_counter() > deadline:
                return False
            time.sleep(every_s)
        return True

    def wait_begun(self, index: int, times: int = 1, *, timeout_s: float, every_s: float = 0.002) -> bool:
        deadline = time.perf_counter() + timeout_s
        while self.times_begun(index) < times:
            if time.perf_counter() > deadline:
                return False
            time.sleep(every_s)
        return True

    def span(self, indices: Iterable[int]) -> float:
        """Seconds from the first start to the last end."""
        chosen = list(indices)
        return max(map(self.end, chosen)) - min(map(self.first_start, chosen))

    def lost(self, indices: Iterable[int]) -> int:
        return sum(1 for index in indices if not self.times_ended(index))

    def repeated(self, indices: Iterable[int]) -> int:
        return sum(1 for index in indices if self.times_begun(index) > 1)

    def shares(self, indices: Iterable[int], *, by_parent: bool) -> list[float]:
        """Share of the tasks that each process ran, the largest first; `by_parent` sums children."""
        read = self.parent if by_parent else self.pid
        counts = Counter(read(index) for index in indices)
        total = sum(counts.values())
        return [count / total for _, count in counts.most_common()]
