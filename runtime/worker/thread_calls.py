"""Calls that may wait for a network or a disk, made off the worker's loop, with their results handed back to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias, TypeVar

from runtime.queues.threads import Lane, Threads
from runtime.system import system

A = TypeVar("A")
T = TypeVar("T")

THREADS: Final = 48
"""Each starts when it is needed. If a store does not answer, all calls of two lanes may hang, and leases still have to be
renewed."""

Outcome: TypeAlias = tuple[A, T | None, Exception | None]
"""The argument of a call, and its result or the exception that it raised."""


class ThreadCalls:
    """`inline` makes the calls at once instead: an embedded queue answers faster than a thread can be woken."""

    def __init__(self, *, inline: bool, threads: int = THREADS) -> None:
        self.fd: int | None = None
        """Turns readable when results wait for `collect`; None inline."""
        self.awaited = 0
        """Calls whose results a worker needs before it leaves and does not have yet."""
        self._threads: Threads | None = None
        self._done: deque[Callable[[], None]] = deque()
        """Steps that hand results over, on the loop's thread."""
        self._lanes: list[Callable[[], None]] = []
        """The same for lanes: a step for each that hands over all results it has gathered."""
        self._rung = False
        """`fd` is readable already."""
        if not inline:
            self._threads = Threads(threads, "runtime-io")
            self._wake_up = system.wake_up()
            self.fd = self._wake_up.fd

    def call(
        self, work: Callable[[], T], then: Callable[[T | None, Exception | None], None], *, awaited: bool = False
    ) -> None:
        """Make the call; `then` gets its result, or None and the exception, on the loop's thread."""
        self.awaited += awaited
        if self._threads is None:
            self._answer(then, awaited, *_try(work))
        else:

            def make() -> None:
                self._done.append(partial(self._answer, then, awaited, *_try(work)))
                self._ring()

            self._threads.start(make)

    def _answer(
        self,
        then: Callable[[T | None, Exception | None], None],
        awaited: bool,
        result: T | None,
        problem: Exception | None,
    ) -> None:
        self.awaited -= awaited
        then(result, problem)

    def lane(
        self, work: Callable[[A], T], then: Callable[[Sequence[Outcome[A, T]]], None], *, at_once: int
    ) -> Callable[[Sequence[A]], None]:
        """Return a function that makes the call for each item it is given; `then` gets the outcomes, several at a time.

        All calls of a lane are awaited.
        """
        if self._threads is None:
            return lambda items: then([(item, *_try(partial(work, item))) for item in items])
        gathered: deque[Outcome[A, T]] = deque()

        def make(item: A) -> None:
            gathered.append((item, *_try(partial(work, item))))

        def hand_over() -> None:
            lane.add(())  # In case the lane hangs; other calls end every second, and lead here.
            if outcomes := [gathered.popleft() for _ in range(len(gathered))]:
                self.awaited -= len(outcomes)
                then(outcomes)

        def add(items: Sequence[A]) -> None:
            self.awaited += len(items)
            lane.add(items)

        lane = Lane(self._threads, make, at_once, self._ring)
        self._lanes.append(hand_over)
        return add

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._wake_up.ring()

    def collect(self) -> None:
        self._wake_up.drain()
        # Before any result is taken: a later result wakes the loop again.
        self._rung = False
        for _ in range(len(self._done)):
            self._done.popleft()()
        for hand_over in self._lanes:
            hand_over()

    def close(self, *, wait: bool = True) -> None:
        """Wait for all calls and hand their results over; `wait=False` drops the results instead."""
        if self._threads is None:
            return
        self._threads.close(wait=wait)
        # A call that hangs rings when it ends, so without `wait` the descriptors stay as long as it knows of this object.
        if wait:
            self.collect()
            self._wake_up.close()


def _try(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as problem:
        return None, problem
