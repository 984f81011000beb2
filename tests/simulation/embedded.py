"""The embedded stack in a world: one real SQLite file with real locks and pipes, and a kernel that ends what a death ends.

All processes of a world are one real process, so a lock that blocks would block them all. None does: nobody else runs
while a transaction is open, and who is stopped in one holds a lock of the world's instead.
"""

from __future__ import annotations

import os
import select
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import greenlet

from runtime.queues.sqlite.queue import SqliteQueue
from runtime.records.filelock import LockBusy
from runtime.records.memory import MemoryBlobs, MemoryRecords
from runtime.records.sqlite import SqliteRecords, find_record
from runtime.records.sqlite_file import EmbeddedFile, explain_sqlite, split_record_id
from runtime.records.store import BlobRecords
from runtime.tasks.history import Record
from tests.simulation.choices import Choice
from tests.simulation.threads import Selector
from tests.simulation.world import Over, Process, Strand, World

STOP_S = (0.0, 5.0, 40.0, 95.0)
JUMP_S = (0.0, 30.0, -30.0)
JUMP = Choice("jump", 300, 1, 1)
LOOK_S = (0.0, 0.0, 0.03, 0.6)
LOOK = Choice("look", 40, 4, 2, 1)
"""Between two statements that read, somebody else may run."""
WRITE_S = (0.001, 0.03, 0.6, 4.0)
WRITE = Choice("commit", 40, 4, 2, 1)
FULL = Choice("no-space", 80, 1)
DIE = Choice("die", 60, 1, 1)
"""Around a transaction: killed before it, or after it."""
HALT = Choice("halt", 90, 1, 2)
HOLD = Choice("hold", 200, 1, 1, 1)
"""Stopped with the file's lock in its hands."""
LINGER_S = (0.0, 0.5, 8.0)
LINGER = Choice("linger", 4, 2, 1)
"""How long the guardian outlives its worker, to end its attempts."""

_WATCH = tuple(
    f"CREATE TEMP TRIGGER saw_{number} AFTER {event} BEGIN SELECT saw({values}); END"
    for number, (event, values) in enumerate(
        (
            ("INSERT ON main.records", "'recorded', new.rid, '', 0"),
            ("UPDATE ON main.records", "'changed', new.rid, '', 0"),
            ("DELETE ON main.records", "'changed', old.rid, '', 0"),
            ("INSERT ON main.leases", "'leased', new.seq, new.token, 0"),
            (
                "DELETE ON main.leases",
                "'freed', old.seq, old.token, (SELECT deadline FROM holders WHERE id=old.holder)",
            ),
        )
    )
)
"""Triggers that tell what a transaction does."""
IN_ORDER = """
SELECT t.id, t.seq>(SELECT seq FROM entered), (SELECT count(*) FROM claimable WHERE seq=t.seq), (SELECT count(*) FROM deferred WHERE seq=t.seq),
  (SELECT count(*) FROM leases WHERE seq=t.seq), (SELECT count(*) FROM records WHERE rid=(t.seq << 20 | t.generation))
FROM tasks t"""
"""Each task's number of places; one is right."""


class Sight:
    """What a scenario's laws see of an embedded file, at the moment when it is committed."""

    def recorded(self, record: Record) -> None: ...
    def settled(self, record: Record, *, held: bool) -> None:
        """`held`: the lease with the record's token ended in the same step."""

    def changed(self, what: str) -> None: ...
    def leased(self, token: str) -> None: ...
    def freed(self, token: str, deadline: float, *, ended: bool) -> None:
        """`ended`: its task has a record now."""


class Descriptor:
    """A real descriptor that a simulated selector waits for."""

    def __init__(self, fd: int) -> None:
        self.watchers: list[Selector] = []
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    @property
    def rung(self) -> bool:
        return bool(self._poll.poll(0))


class Kernel:
    """The machine that all processes of a world run on: its disk, its locks, and what it does when one of them dies."""

    def __init__(self, world: World, sight: Sight) -> None:
        self.world, self.sight = world, sight
        self.path = world.folder() / "tasks.db"
        self.disturbed: set[Process] = set()
        """Processes that were stopped, kept waiting or could not renew, and whose leases may have run out."""
        self.was_full = False
        self._holder: Process | None = None
        self._waiting: list[Strand] = []
        self._queues: dict[Process, list[SqliteQueue]] = {}
        self._watched: dict[int, Descriptor] = {}
        self._epoll = select.epoll()
        self._lingering: set[int] = set()
        world.wake_ups = _Descriptors(self)
        world.after_step = self._ring
        world.at_close.append(self._close)

    def open(self) -> SqliteQueue:
        """Open the file as the running process does; its records are the queue's."""
        process = self.world.me()
        assert process is not None
        file = SimulatedFile(self, process)
        queue = SqliteQueue(file, SqliteRecords(file))
        if process not in self._queues:
            self._queues[process] = []
            process.on_death.insert(0, lambda: self.release(process, dies=True))
        self._queues[process].append(queue)
        return queue

    # descriptors

    def watch(self, fd: int) -> Descriptor:
        descriptor = self._watched[fd] = Descriptor(fd)
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except FileExistsError:
            pass
        return descriptor

    def _ring(self) -> None:
        for fd in sorted(fd for fd, _ in self._epoll.poll(0)):
            for each in self._watched[fd].watchers:
                each.rouse()

    def release(self, process: Process, *, dies: bool = False) -> None:
        """Close what a process has open, as its end does."""
        if self._holder is process:
            self._let_go()
        for queue in self._queues.pop(process, ()):
            presence, file = queue._presence, queue._file
            fds = [file._lock_fd, *queue._wakes._fds.values()]
            queue._wakes._fds.clear()
            if presence is not None:
                queue._presence = None
                fds += [presence._wake_fd, presence.lock_fd, presence.life_fd, *presence._lives.values()]
                if dies:
                    self._keep_alive(process, presence.lock_fd, presence.life_fd)
                if presence._poll is not None:
                    presence._poll.close()
                presence._memory.close()
            for connection in (file._reader, file._writer):
                if connection is not None:
                    connection.close()
            file._reader, file._writer, file._lock_fd = None, None, -1
            for fd in sorted(fd for fd in fds if fd >= 0):
                os.close(fd)

    def _keep_alive(self, process: Process, *fds: int) -> None:
        span_s = LINGER_S[self.world.draw(LINGER, process.name)]
        process.lingers_until = self.world.now + span_s  # type: ignore[attr-defined]
        if not span_s:
            return
        kept = [os.dup(fd) for fd in sorted(fds)]
        self._lingering.update(kept)

        def end() -> None:
            for fd in kept:
                self._lingering.discard(fd)
                os.close(fd)

        self.world.spawn(f"{process.name}-guardian", end, host=process.host.name, at_s=span_s)

    def _close(self) -> None:
        for process in list(self._queues):
            self.release(process)
        for fd in self._lingering:
            os.close(fd)
        self._epoll.close()

    # time that passes around transactions

    def enter(self, file: SimulatedFile, patience_s: float | None) -> None:
        """Take the file's lock, as far as somebody who is stopped may hold it. Raises `LockBusy`."""
        world, me = self.world, file.process
        if world.over or me.dead:
            raise Over
        if world.still or world.me() is None:
            return
        world.pause(WRITE_S[world.draw(WRITE)])
        if me.mortal and world.draw(DIE) == 1:
            world.kill(me)
        since = world.now
        while self._holder is not None:
            self.disturbed.add(me)
            left = None if patience_s is None else since + patience_s - world.now
            if left is not None and left <= 0:
                raise LockBusy(str(file.path), patience_s or 0.0)
            strand = greenlet.getcurrent()
            assert isinstance(strand, Strand)
            self._waiting.append(strand)
            if not world.park(left):
                self._waiting.remove(strand)
        if me.mortal and (span := world.draw(HOLD)):
            self._holder = me
            self.disturbed.add(me)
            world.stop(me, STOP_S[span])
            self._let_go()

    def _let_go(self) -> None:
        self._holder = None
        waking, self._waiting = self._waiting, []
        for strand in waking:
            self.world.wake(strand)

    def leave(self, process: Process) -> None:
        """Go on after a transaction, or not."""
        world = self.world
        if process.mortal:
            if world.draw(DIE) == 2:
                world.kill(process)
            if span := world.draw(HALT):
                self.disturbed.add(process)
                world.stop(process, STOP_S[span])
        if jump := world.draw(JUMP):
            process.host.skew_s += JUMP_S[jump]
            world.note(f"the clock of {process.host.name} jumps by {JUMP_S[jump]:g} s")

    def look(self) -> None:
        world = self.world
        if not world.still and world.me() is not None and (pick := world.draw(LOOK)):
            world.pause(LOOK_S[pick])


class _Descriptors(dict[int, Any]):
    """By descriptor: wake-ups of the world's, and for all others a look at the real one."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __missing__(self, fd: int) -> Descriptor:
        return self._kernel.watch(fd)


class _Reading:
    """A connection on which others may run between two statements."""

    def __init__(self, connection: sqlite3.Connection, kernel: Kernel) -> None:
        self._connection, self._kernel = connection, kernel
        self.close = connection.close

    def execute(self, *args: Any) -> sqlite3.Cursor:
        self._kernel.look()
        return self._connection.execute(*args)


class SimulatedFile(EmbeddedFile):
    """`EmbeddedFile` in which each transaction is one step of the world: it happens wholly, or not at all."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        self.kernel, self.process = kernel, process
        self._seen: list[tuple[str, int, str, float]] = []
        super().__init__(kernel.path)

    def _lock(self, patience_s: float | None) -> None:
        self.kernel.enter(self, patience_s)
        super()._lock(patience_s)

    @contextmanager
    def transaction(self, *, durable: bool | None = None, patient: bool = True) -> Iterator[sqlite3.Connection]:
        world = self.kernel.world
        who = _caller() if world.trace is not None else ""
        with self._mutex:
            self._seen.clear()
            with super().transaction(durable=durable, patient=patient) as connection, self._alone():
                yield connection
                self._fill(who)
            world.note(who)
            self._committed()
        self.kernel.leave(self.process)

    def execute(self, statement: str, values: Sequence[object], *, announce: Callable[[], None]) -> None:
        with self._mutex:
            self._seen.clear()
            try:
                self._fill("put one")
            except sqlite3.OperationalError as problem:
                announce()
                raise explain_sqlite(self.path, problem) from problem
            super().execute(statement, values, announce=announce)
            self.kernel.world.note("put one")
            self._committed()
        self.kernel.leave(self.process)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        if self.kernel.world.over or self.process.dead:
            raise Over
        with super().reading() as connection:
            yield connection

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.kernel.world.still += 1
        try:
            yield
        finally:
            self.kernel.world.still -= 1

    def _fill(self, who: str) -> None:
        if self.kernel.world.draw(FULL):
            self.kernel.was_full = True
            if who.endswith("renew"):
                self.kernel.disturbed.add(self.process)
            self.kernel.world.note(f"{who}: no space")
            problem = sqlite3.OperationalError("database or disk is full")
            problem.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise problem

    def _open_writer(self) -> sqlite3.Connection:
        connection = super()._open_writer()
        connection.create_function("saw", 4, lambda *what: self._seen.append(what))
        for statement in _WATCH:
            connection.execute(statement)
        return connection

    def _open_reader(self) -> sqlite3.Connection:
        self._reader = _Reading(super()._open_reader(), self.kernel)  # type: ignore[assignment]
        return self._reader  # type: ignore[return-value]

    def _committed(self) -> None:
        """Show the laws what the transaction did."""
        seen, sight = self._seen.copy(), self.kernel.sight
        self._seen.clear()
        assert self._writer is not None or not seen
        freed = {token for what, _, token, _ in seen if what == "freed"}
        ended = {split_record_id(number)[0] for what, number, _, _ in seen if what == "recorded"}
        for what, number, token, deadline in seen:
            if what == "recorded":
                record = find_record(self._writer, *split_record_id(number))  # type: ignore[arg-type]
                assert record is not None
                sight.recorded(record)
                sight.settled(record, held=record.token in freed)
            elif what == "changed":
                sight.changed(f"record {split_record_id(number)}")
            elif what == "leased":
                sight.leased(token)
            else:
                sight.freed(token, deadline, ended=number in ended)


def _caller() -> str:
    """Return the names of the functions that began a transaction."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, contextmanager.__code__.co_filename):
        frame = frame.f_back
    return f"{frame.f_back.f_code.co_name if frame.f_back else ''} › {frame.f_code.co_name}"


# memory


class WatchedLeases(dict[str, Any]):
    """The leases of a `MemoryQueue`, by task."""

    def __init__(self, sight: Sight, ended: Callable[[Any], bool]) -> None:
        super().__init__()
        self._sight, self._ended = sight, ended

    def __setitem__(self, task_id: str, held: Any) -> None:
        super().__setitem__(task_id, held)
        self._sight.leased(held.token)

    def __delitem__(self, task_id: str) -> None:
        held = self[task_id]
        super().__delitem__(task_id)
        self._sight.freed(held.token, held.deadline, ended=self._ended(held.waiting.task))

    def pop(self, task_id: str, default: Any = None) -> Any:
        held = self.get(task_id, default)
        if held is not default:
            del self[task_id]
        return held


class SteppingBlobs(MemoryBlobs):
    """`MemoryBlobs` whose callers are slow at times, and watched."""

    def __init__(
        self, step: Callable[[], None], watcher: Callable[[str, bytes | None, bytes], None], folder: Path
    ) -> None:
        super().__init__()
        self._step, self._watcher, self._folder = step, watcher, folder

    def path(self, key: str) -> Path | None:
        return self._folder / key if key.startswith("outputs/") else None

    def _store(self, key: str, data: bytes) -> None:
        before = super().get(key)
        super()._store(key, data)
        self._watcher(key, before, data)

    def get(self, key: str) -> bytes | None:
        self._step()
        return super().get(key)

    def create(self, key: str, data: bytes) -> bool:
        self._step()
        return super().create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._step()
        super().put(key, data)

    def delete(self, key: str) -> None:
        self._step()
        super().delete(key)

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        self._step()
        return super().list_keys(prefix, after=after)

    def close(self) -> None:
        """Keep it: the next person opens the same."""


class SteppingRecords(MemoryRecords):
    def __init__(self, blobs: SteppingBlobs) -> None:
        BlobRecords.__init__(self, blobs)
