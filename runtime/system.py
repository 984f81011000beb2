"""The machine as the code sees it: time, chance, threads and ways to wait. A simulation stands in for all of it.

Code that decides when something happens asks `system` and no library, so that the same code runs in a simulated world
(tests/simulation). A call through `system` costs what a call of the library costs.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    import threading
    from concurrent.futures import ThreadPoolExecutor
    from queue import SimpleQueue
    from selectors import BaseSelector

T = TypeVar("T")

# CLOCK_BOOTTIME is Linux's; elsewhere the monotonic clock stands in, which may stop in a suspend: leases then
# only live longer.
_BOOT_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class WakeUp:
    """A descriptor that turns readable when somebody rings; from any thread, and from a signal handler."""

    def __init__(self) -> None:
        self.fd, self._write = fds = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Somebody who is late may still ring, so the descriptors stay as long as anybody knows of this object.
        self.close = weakref.finalize(self, _close, fds)

    def ring(self) -> None:
        try:
            os.write(self._write, b"!")
        except BlockingIOError:
            pass  # It is full of wake-ups already.

    def drain(self) -> None:
        """Make it unreadable until somebody rings again."""
        try:
            while len(os.read(self.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass


def _close(fds: tuple[int, int]) -> None:
    for fd in fds:
        os.close(fd)


class Platform:
    """The real machine. Each attribute can be replaced for a while, so callers look it up at each call."""

    def __init__(self) -> None:
        self.now: Callable[[], datetime] = partial(datetime.now, UTC)
        """Wall time; aware, in UTC."""
        self.time: Callable[[], float] = time.time
        """Wall time in seconds since 1970."""
        self.monotonic: Callable[[], float] = time.monotonic
        self.perf_counter: Callable[[], float] = time.perf_counter
        self.boottime: Callable[[], float] = partial(time.clock_gettime, _BOOT_CLOCK)
        """Seconds since this boot, suspends included."""
        self.sleep: Callable[[float], None] = time.sleep
        self.urandom: Callable[[int], bytes] = os.urandom

    def random(self) -> float:
        """Return a number from 0 up to 1."""
        import random

        return random.random()

    def sample(self, items: Sequence[T], most: int) -> list[T]:
        """Return `most` of the items, chosen by chance."""
        import random

        return random.sample(items, most)

    def node(self) -> str:
        """Return the name of this host."""
        return os.uname().nodename

    def boot_id(self) -> str:
        """Return the id of this boot of this kernel."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return f"booted-{round(self.time() - self.boottime())}"

    # threads, and what they wait for

    def thread(self, target: Callable[[], object], *, name: str) -> threading.Thread:
        """Return a thread, not started, that the end of the process does not wait for."""
        import threading

        return threading.Thread(target=target, name=name, daemon=True)

    def lock(self) -> threading.Lock:
        import threading

        return threading.Lock()

    def rlock(self) -> threading.RLock:
        import threading

        return threading.RLock()

    def condition(self) -> threading.Condition:
        import threading

        return threading.Condition()

    def event(self) -> threading.Event:
        import threading

        return threading.Event()

    def queue(self) -> SimpleQueue[Any]:
        from queue import SimpleQueue

        return SimpleQueue()

    def pool(self, most: int, *, name: str) -> ThreadPoolExecutor:
        """Return an executor of at most `most` threads."""
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(most, thread_name_prefix=name)

    def wake_up(self) -> WakeUp:
        return WakeUp()

    def selector(self) -> BaseSelector:
        from selectors import DefaultSelector

        return DefaultSelector()

    @contextmanager
    def replaced(self, **stand_ins: Any) -> Iterator[None]:
        """Have these attributes stand in for the machine's own inside."""
        before = vars(self).copy()
        vars(self).update(stand_ins)
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(before)


system: Final = Platform()
