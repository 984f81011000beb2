"""Stand-ins for the machine's threads and for what they wait for: locks, conditions, executors, descriptors, selectors."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import greenlet

from tests.simulation.choices import Choice
from tests.simulation.world import Over, Process, Strand, World

SWITCH_S = (0.0, 0.0, 0.02)
SWITCH = Choice("switch", 12, 2, 1)
"""Before a lock is taken another thread may run."""


class Lock:
    """Of one process. Only a strand may wait for it."""

    def __init__(self, world: World, *, reentrant: bool = False) -> None:
        self._world, self._reentrant = world, reentrant
        self._holder: Any = None
        self._depth = 0
        self._waiting: deque[Strand] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me, world = greenlet.getcurrent(), self._world
        if self._holder is me and self._reentrant:
            self._depth += 1
            return True
        if isinstance(me, Strand) and not world.over and (pick := world.draw(SWITCH)):
            world.pause(SWITCH_S[pick])
        if self._holder is None:
            self._holder, self._depth = me, 1
            return True
        if not blocking:
            return False
        if world.over:
            raise Over
        assert isinstance(me, Strand), "nobody could ever release it"
        self._waiting.append(me)
        if not world.park(None if timeout < 0 else timeout):
            self._waiting.remove(me)
            return False
        return True  # It was handed over.

    def release(self) -> None:
        if self._holder is not greenlet.getcurrent() and not self._world.over and self._reentrant:
            raise RuntimeError("cannot release a lock of another thread")
        self._depth -= 1
        if self._depth > 0:
            return
        self._holder = None
        while self._waiting and not self._world.over:
            strand = self._waiting.popleft()
            if not strand.process.dead:
                self._holder, self._depth = strand, 1
                self._world.wake(strand)
                return

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def let_go(self) -> int:
        """Release it wholly, however often it was taken; returns how often that was."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def resume(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class Condition:
    def __init__(self, world: World) -> None:
        self._world, self._lock = world, Lock(world, reentrant=True)
        self._waiting: list[Strand] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = greenlet.getcurrent()
        assert isinstance(me, Strand)
        self._waiting.append(me)
        depth = self._lock.let_go()
        woken = self._world.park(timeout)
        if not woken:
            self._waiting.remove(me)
        self._lock.resume(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._world.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        waking, self._waiting = self._waiting[:n], self._waiting[n:]
        for strand in waking:
            self._world.wake(strand)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self, world: World) -> None:
        self._world, self._set = world, False
        self._waiting: list[Strand] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waking, self._waiting = self._waiting, []
        for strand in waking:
            self._world.wake(strand)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        me = greenlet.getcurrent()
        assert isinstance(me, Strand)
        self._waiting.append(me)
        if not self._world.park(timeout):
            self._waiting.remove(me)
        return self._set


class Queue:
    """`queue.SimpleQueue`."""

    def __init__(self, world: World) -> None:
        self._items: deque[Any] = deque()
        self._world = world
        self._waiting: deque[Strand] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._world.wake(self._waiting.popleft())

    def get(self) -> Any:
        while not self._items:
            me = greenlet.getcurrent()
            assert isinstance(me, Strand)
            self._waiting.append(me)
            self._world.park()
        return self._items.popleft()


class Thread:
    def __init__(self, world: World, target: Callable[[], object], name: str) -> None:
        self._world, self._target, self.name = world, target, name
        self.daemon = True
        self._strand: Strand | None = None

    def start(self) -> None:
        process = self._world.me()
        assert process is not None
        self._strand = self._world.strand(process, self._target, self.name)
        self._world.start(self._strand)

    def join(self, timeout: float | None = None) -> None:
        strand, me = self._strand, greenlet.getcurrent()
        if strand is None or strand.ended or not isinstance(me, Strand):
            return
        strand.joined.append(me)
        if not self._world.park(timeout):
            strand.joined.remove(me)

    def is_alive(self) -> bool:
        return self._strand is not None and not self._strand.ended


class Future:
    def __init__(self, world: World) -> None:
        self._done = Event(world)
        self._result: Any = None
        self._problem: BaseException | None = None
        self._cancelled = False
        self._callbacks: list[Callable[[Any], object]] = []

    def run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except Exception as problem:
            self._problem = problem
        self._end()

    def cancel(self) -> bool:
        if self._done.is_set():
            return self._cancelled
        self._cancelled, self._problem = True, CancelledError()
        self._end()
        return True

    def _end(self) -> None:
        self._done.set()
        for each in self._callbacks:
            each(self)

    def cancelled(self) -> bool:
        return self._cancelled

    def done(self) -> bool:
        return self._done.is_set()

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        if self.done():
            call(self)
        else:
            self._callbacks.append(call)

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._problem is not None:
            raise self._problem
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._done.wait(timeout):
            raise TimeoutError
        return self._problem


class Executor:
    """`ThreadPoolExecutor`."""

    def __init__(self, world: World, most: int, name: str) -> None:
        self._world, self._most, self._name = world, most, name
        self._calls: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._threads: list[Thread] = []
        self._working = 0
        self._idle = Event(world)

    def submit(self, call: Callable[..., Any], *args: Any, **named: Any) -> Future:
        future = Future(self._world)
        self._calls.append((future, lambda: call(*args, **named)))
        if self._working < self._most:
            self._working += 1
            Thread(self._world, self._work, f"{self._name}-{self._working}").start()
        return future

    def _work(self) -> None:
        while self._calls:
            future, call = self._calls.popleft()
            if not future.done():
                future.run(call)
        self._working -= 1
        if not self._working:
            self._idle.set()
            self._idle.clear()

    def map(self, call: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        futures = deque(self.submit(call, *items) for items in zip(*iterables, strict=False))
        return self._results(futures)

    def _results(self, futures: deque[Future]) -> Iterator[Any]:
        while futures:
            yield futures.popleft().result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            while self._calls:
                self._calls.popleft()[0].cancel()
        while wait and self._working and not self._world.over:
            self._idle.wait()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class WakeUp:
    def __init__(self, world: World) -> None:
        self._world = world
        self.fd = next(world.descriptors)
        world.wake_ups[self.fd] = self
        self.rung = False
        self.watchers: list[Selector] = []

    def ring(self) -> None:
        self.rung = True
        for each in self.watchers:
            each.rouse()

    def drain(self) -> None:
        self.rung = False

    def close(self) -> None:
        self._world.wake_ups.pop(self.fd, None)


class Selector:
    def __init__(self, world: World) -> None:
        self._world = world
        self._keys: dict[int, Any] = {}
        self._wake_ups: dict[int, WakeUp] = {}
        self._waiting: Strand | None = None

    def register(self, fd: int, events: int, data: Any = None) -> None:
        wake_up = self._world.wake_ups[fd]
        self._keys[fd], self._wake_ups[fd] = SimpleNamespace(fileobj=fd, fd=fd, events=events, data=data), wake_up
        wake_up.watchers.append(self)

    def unregister(self, fd: int) -> None:
        self._wake_ups.pop(fd).watchers.remove(self)
        del self._keys[fd]

    def rouse(self) -> None:
        if self._waiting is not None:
            self._world.wake(self._waiting)

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        ready = self._ready()
        if not ready and (timeout is None or timeout > 0):
            me = greenlet.getcurrent()
            assert isinstance(me, Strand)
            self._waiting = me
            self._world.park(timeout if timeout is None or timeout < 1e8 else None)
            self._waiting = None
            ready = self._ready()
        elif not ready or timeout is None:
            self._world.pause(0.0)
        return ready

    def _ready(self) -> list[tuple[Any, int]]:
        ready = []
        for fd, each in self._wake_ups.items():
            if each.rung:
                ready.append((self._keys[fd], selectors.EVENT_READ))
        return ready

    def close(self) -> None:
        for fd in list(self._keys):
            self.unregister(fd)


def stand_ins(world: World) -> dict[str, Any]:
    """What stands in for the attributes of `runtime.system.system` while a world runs."""

    def mine() -> Process:
        process = world.me()
        assert process is not None
        return process

    return {
        "now": world.wall_time,
        "time": world.wall,
        "monotonic": world.boot_time,
        "perf_counter": world.boot_time,
        "boottime": world.boot_time,
        "sleep": world.pause,
        # Looked up at each call, because each process has chance of its own.
        "urandom": lambda count: mine().random.randbytes(count),  # noqa: PLW0108
        "random": lambda: mine().random.random(),  # noqa: PLW0108
        "sample": lambda items, most: mine().random.sample(items, most),  # noqa: PLW0108
        "node": lambda: mine().host.name,
        "boot_id": lambda: f"boot-of-{mine().host.name}",
        "thread": lambda target, *, name: Thread(world, target, name),
        "lock": lambda: Lock(world),
        "rlock": lambda: Lock(world, reentrant=True),
        "condition": lambda: Condition(world),
        "event": lambda: Event(world),
        "queue": lambda: Queue(world),
        "pool": lambda most, *, name: Executor(world, most, name),
        "wake_up": lambda: WakeUp(world),
        "selector": lambda: Selector(world),
    }
