"""The tasks that every peer runs: nothing, or ten milliseconds of a thread's CPU; each notes start and end on the board.

Some peers start a process for each task, and that process imports this module. So it is one file and imports only
modules that the interpreter has loaded already.
"""

import mmap
import os
import time

VARIABLE = "BENCHMARK_BOARD"
"""Environment variable that names the board's file; `benchmarks.board` describes its layout."""
WORDS = 8
START, END, BEGUN, ENDED, PID, PARENT, FIRST = range(7)

_seconds: "memoryview[float] | None" = None
_counts: "memoryview[int] | None" = None


def attach(path: "str | os.PathLike[str] | None" = None) -> None:
    """Open the board; the first task does it, too."""
    global _seconds, _counts
    descriptor = os.open(path or os.environ[VARIABLE], os.O_RDWR)
    whole = memoryview(mmap.mmap(descriptor, 0))
    os.close(descriptor)
    _seconds, _counts = whole.cast("d"), whole.cast("q")


def began(index: int) -> int:
    """Note a start; returns how often the task has started before."""
    now = time.perf_counter()
    if _counts is None:
        attach()
    at = index * WORDS
    before = _counts[at + BEGUN]
    if not before:
        _seconds[at + FIRST] = now
    _seconds[at + START] = now
    _counts[at + PID] = os.getpid()
    _counts[at + PARENT] = os.getppid()
    _counts[at + BEGUN] = before + 1
    return before


def ended(index: int) -> None:
    at = index * WORDS
    _seconds[at + END] = time.perf_counter()
    _counts[at + ENDED] += 1


def noop(index: int) -> None:
    began(index)
    ended(index)


def cpu(index: int) -> None:
    """Ten milliseconds of this thread's CPU time, however long that takes."""
    began(index)
    until = time.thread_time() + 0.010
    while time.thread_time() < until:
        pass
    ended(index)


def heavy(index: int) -> None:
    """Import a module of 300 MB, as a task that uses a large library does."""
    began(index)
    import benchmarks.heavy

    assert benchmarks.heavy.CONTENTS
    ended(index)


def stuck_once(index: int) -> None:
    """Hang in the first run and return at once from each later one."""
    if began(index) == 0:
        time.sleep(600)
    ended(index)


def sleep(index: int, seconds: float) -> None:
    began(index)
    time.sleep(seconds)
    ended(index)
