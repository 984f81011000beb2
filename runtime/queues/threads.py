"""A few threads for calls that may wait, at little cost for calls that do not.

The standard library's pool makes a future, a condition and two locks for each call, which costs more than a read from
memory or a small file. Here a call is one entry in a queue, and many calls of one kind share their threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from runtime.system import system

if TYPE_CHECKING:
    import threading
    from queue import SimpleQueue

A = TypeVar("A")
B = TypeVar("B")

SLOW_S: Final = 0.0003
"""Calls that take longer are worth a thread each: a few times the cost of waking one."""
HANGING_S: Final = 0.1
PAUSE_EVERY_S: Final = 0.001


class Threads:
    """At most `most` threads, each started when there is a call that no other is free for."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: SimpleQueue[Callable[[], object] | None] = system.queue()
        self._threads: list[threading.Thread] = []
        self._free = 0
        """Threads that wait for a call. Too high while all of them work and calls wait, when none can be started anyway."""
        self._lock = system.lock()
        self.mean_s = 0.0
        """Mean duration of recent calls. Single calls wait for the interpreter's lock, and prove nothing."""

    def start(self, call: Callable[[], object]) -> None:
        """Have a thread make the call, which must not raise."""
        with self._lock:
            if self._free > 0:
                self._free -= 1
            elif len(self._threads) < self._most:
                # The process may end while a call hangs for good.
                thread = system.thread(target=self._serve, name=f"{self._name}-{len(self._threads)}")
                self._threads.append(thread)
                thread.start()
        self._calls.put(call)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or its references would live until the next one
            with self._lock:
                self._free += 1

    def each(self, call: Callable[[A], B], items: Sequence[A], *, at_once: int) -> list[B]:
        """`map`, in this thread and others; raises the first item's exception once all calls have returned."""
        if len(items) == 1:
            return [call(items[0])]
        results: list[B | None] = [None] * len(items)
        problems: list[Exception | None] = [None] * len(items)
        over = system.event()
        left = list(items)

        def make(index: int) -> None:
            try:
                results[index] = call(items[index])
            except Exception as problem:
                problems[index] = problem
            left.pop()
            if not left:
                over.set()

        if items:
            Lane(self, make, at_once).work(range(len(items)))
            over.wait()
        for problem in problems:
            if problem is not None:
                raise problem
        return cast("list[B]", results)

    def close(self, *, wait: bool = True) -> None:
        """Let the threads end when they have made the calls that were started before."""
        with self._lock:
            threads, self._threads, self._most = self._threads, [], 0
        for _ in threads:
            self._calls.put(None)
        for thread in threads if wait else ():
            thread.join()


class Lane(Generic[A]):
    """Calls of one kind: two at a time, so that one that hangs does not keep the others; up to `at_once` while they are slow."""

    def __init__(
        self, threads: Threads, call: Callable[[A], Any], at_once: int, pause: Callable[[], Any] = lambda: None
    ) -> None:
        """`call` must not raise. `pause` is called when a thread finds nothing left, and about each millisecond before."""
        self._threads, self._call, self._most, self._pause = threads, call, at_once, pause
        self._paused_at = 0.0
        self._left: deque[A] = deque()
        self._taken_at = 0.0
        self._working = 0
        self._lock = system.lock()

    def add(self, items: Collection[A]) -> None:
        """Have them called. With no items it has another thread help where all that work seem to hang."""
        if not items and not self._left:
            return
        with self._lock:
            hanging = bool(self._left) and system.perf_counter() - self._taken_at > HANGING_S
            self._left.extend(items)
            if not self._left or self._working == self._most or (self._working and not hanging):
                return
            self._working += 1
        self._threads.start(self._work)

    def work(self, items: Iterable[A]) -> None:
        """`add`, with this thread as the first; others may still make their last call when it returns."""
        with self._lock:
            self._left.extend(items)
            self._working += 1
        self._work()

    def _work(self) -> None:
        threads, left, call = self._threads, self._left, self._call
        while True:
            began = system.perf_counter()
            with self._lock:
                if not left:
                    self._working -= 1
                    break
                item = left.popleft()
                self._taken_at = began
                wanted = self._most if threads.mean_s > SLOW_S else min(2, self._most)
                another = bool(left) and self._working < wanted
                self._working += another
            if another:
                threads.start(self._work)
            call(item)
            now = system.perf_counter()
            threads.mean_s += (now - began - threads.mean_s) / 16
            if now - self._paused_at > PAUSE_EVERY_S:
                self._paused_at = now
                self._pause()
        self._pause()
