"""Calls that may wait for a network or a disk, made off the worker's loop, with their results handed back to it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")

THREADS: Final = 8


class Offload:
    """`inline` makes the calls at once instead: an embedded queue answers faster than a thread can be woken."""

    def __init__(self, *, inline: bool) -> None:
        self.fd: int | None = None
        """Turns readable when results wait for `collect`; None inline."""
        self._pool: ThreadPoolExecutor | None = None
        self._done: deque[tuple[Callable[[Any, Exception | None], None], Any, Exception | None]] = deque()
        if not inline:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="runtime-io")
            self.fd, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def call(self, work: Callable[[], T], then: Callable[[T | None, Exception | None], None]) -> None:
        """Make the call; `then` gets its result, or None and what it raised, on the loop's thread."""
        if self._pool is None:
            try:
                result = work()
            except Exception as problem:
                then(None, problem)
            else:
                then(result, None)
            return
        self._pool.submit(self._work, work, then)

    def _work(self, work: Callable[[], Any], then: Callable[[Any, Exception | None], None]) -> None:
        outcome: tuple[Callable[[Any, Exception | None], None], Any, Exception | None]
        try:
            outcome = (then, work(), None)
        except Exception as problem:
            outcome = (then, None, problem)
        self._done.append(outcome)
        try:
            os.write(self._wake, b"!")
        except BlockingIOError:
            pass  # The pipe is full of wake-ups already.

    def collect(self) -> None:
        """Hand over the results that wait."""
        assert self.fd is not None
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass
        while self._done:
            then, result, problem = self._done.popleft()
            then(result, problem)

    def close(self) -> None:
        """Wait for calls under way and hand over their results."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self.collect()
            os.close(self.fd)  # type: ignore[arg-type]
            os.close(self._wake)
