"""The board: a file of slots, shared through mmap, in which each task notes when it ran.

Completion is read from here and from no peer's own bookkeeping, so that a task which was lost or ran twice shows.
A slot costs about a microsecond, the same for everyone. Times are of `time.perf_counter`, which all processes of
one machine share.
"""

from __future__ import annotations

# Nothing else is imported here: where each task has a process of its own, that process imports this module, and the
# task would cost more than what is measured.
import mmap
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

VARIABLE = "BENCHMARK_BOARD"
"""Environment variable that tells bodies where the board is."""

_WORDS = 8
_START, _END, _BEGUN, _ENDED, _PID, _PARENT, _FIRST = range(7)


class Board:
    """Slots by task number. Two processes may write different slots at once, and one slot one after the other."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        whole = memoryview(self._memory)
        self._seconds = whole.cast("d")
        self._counts = whole.cast("q")
        self._done_below = 0

    @classmethod
    def create(cls, path: str | os.PathLike[str], slots: int) -> Board:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.ftruncate(descriptor, slots * _WORDS * 8)
        finally:
            os.close(descriptor)
        return cls(path)

    @property
    def slots(self) -> int:
        return len(self._counts) // _WORDS

    # what a body does

    def began(self, index: int) -> int:
        """Note a start; returns how often the task has started before."""
        now = time.perf_counter()
        at = index * _WORDS
        counts = self._counts
        before = counts[at + _BEGUN]
        if not before:
            self._seconds[at + _FIRST] = now
        self._seconds[at + _START] = now
        counts[at + _PID] = os.getpid()
        counts[at + _PARENT] = os.getppid()
        counts[at + _BEGUN] = before + 1
        return before

    def ended(self, index: int) -> None:
        at = index * _WORDS
        self._seconds[at + _END] = time.perf_counter()
        self._counts[at + _ENDED] += 1

    # what the driver reads

    def start(self, index: int) -> float:
        """Of the last run."""
        return self._seconds[index * _WORDS + _START]

    def first_start(self, index: int) -> float:
        return self._seconds[index * _WORDS + _FIRST]

    def end(self, index: int) -> float:
        return self._seconds[index * _WORDS + _END]

    def times_begun(self, index: int) -> int:
        return self._counts[index * _WORDS + _BEGUN]

    def times_ended(self, index: int) -> int:
        return self._counts[index * _WORDS + _ENDED]

    def pid(self, index: int) -> int:
        return self._counts[index * _WORDS + _PID]

    def parent(self, index: int) -> int:
        return self._counts[index * _WORDS + _PARENT]

    def done(self, indices: range) -> bool:
        """Whether each task of a range, asked about in rising order, has ended."""
        at = max(self._done_below, indices.start)
        counts = self._counts
        while at < indices.stop and counts[at * _WORDS + _ENDED]:
            at += 1
        self._done_below = at
        return at >= indices.stop

    def count_done(self, indices: range) -> int:
        return sum(1 for index in indices if self.times_ended(index))

    def wait(self, indices: range, *, timeout_s: float, every_s: float = 0.01) -> bool:
        """Until all of a range have ended; False if the time was over first."""
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
        """Part of the tasks that each process ran, the largest first; `by_parent` sums children."""
        from collections import Counter

        read = self.parent if by_parent else self.pid
        counts = Counter(read(index) for index in indices)
        total = sum(counts.values())
        return [count / total for _, count in counts.most_common()]
