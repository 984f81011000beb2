"""The workers of one host that share the embedded file: how they see and wake each other, and the leases of dead ones.

A worker's locked file proves that it lives and lists what it runs, a pipe wakes it, and another pipe, which closes with
its last holder, shows the others at once that it died.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import sqlite3
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from runtime.clock import Clock, SystemClock, machine_id
from runtime.end_reasons import EndReason
from runtime.queues.base import DEFAULT_LEASE, RunningAttempts
from runtime.queues.sqlite.tables import SUSPECT, read_task, requeue
from runtime.records.base import AttemptStore
from runtime.records.filelock import take_lock
from runtime.records.sqlite import insert_note
from runtime.records.sqlite_file import EmbeddedFile
from runtime.records.transitions import count
from runtime.system import system
from runtime.tasks.history import EndedNote
from runtime.tasks.model import TOKEN_CHARS

TICK_NS: Final = 100_000_000
"""Two changes of a folder that lie closer together may bear the same time: file systems count it in ticks."""
SWEEP_EVERY_S: Final = 30.0
JUST_NOW: Final = 0.9
"""Share of a lease's length: with that much left, another claim does not move the holder's deadline on."""
_WAKE, _LIFE, _LOCK = ".bell", ".life", ".lock"
"""Ends of the names of a worker's files: two pipes, and the locked file."""
_PROVEN: Final = "*"
"""Begins the line of an attempt that has proven itself; alone, it says that this worker notes such attempts."""


class Presence:
    """A worker's place beside the database, and its liveness watch over the other workers.

    Its locked file holds a token per line and ends in an empty one, rewritten in shared memory, which a killed process
    leaves as it was. A pipe wakes it because a pipe works at any path length and nobody else can read it.
    """

    _SIZE = 64 * 1024

    def __init__(self, folder: Path, worker: str, *, private: bool = False) -> None:
        """`private` keeps the files for this user alone; else other users who share the folder can wake and watch it."""
        self.worker = worker
        self._folder = folder
        rights = 0o700 if private else 0o777
        folder.mkdir(mode=rights, parents=True, exist_ok=True)
        self.lock_fd = _take_place(folder / f"{worker}{_LOCK}", 0o644 & rights)
        wake_path, life_path = folder / f"{worker}{_WAKE}", folder / f"{worker}{_LIFE}"
        for path, mode in ((wake_path, 0o622), (life_path, 0o644)):
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, mode & rights)
        # Opened for both ends, so that it never reports end of file; closed in children by exec and by the guardian.
        self._wake_fd = os.open(wake_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        os.ftruncate(self.lock_fd, self._SIZE)
        # After the lock: a process that dies closes in order, and a worker that the pipe wakes finds the lock free.
        self.life_fd = os.open(life_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        """Nobody writes to this pipe: the others wait for its end of file."""
        self._memory = mmap.mmap(self.lock_fd, self._SIZE)
        self._lives: dict[str, int] = {}
        # Without epoll, which only Linux has, the others' deaths show at the next look, within a second.
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        if self._poll is not None:
            self._poll.register(self._wake_fd, select.EPOLLIN)

    @property
    def wake_descriptor(self) -> int:
        """Readable when this worker was woken or a watched one has died."""
        return self._wake_fd if self._poll is None else self._poll.fileno()

    def mark(self, tokens: Iterable[str], apart: str | None = None, proven: Iterable[str] = ()) -> None:
        # One slice assignment; the empty line at the end comes with it, also without tokens, so a reader sees old or new
        # lines, and a torn line names no token.
        lines = [*tokens, *([f"!{apart}"] if apart else ()), _PROVEN, *(f"{_PROVEN}{token}" for token in proven)]
        text = ("\n".join(lines) + "\n\n").encode()
        self._memory[0 : len(text)] = text

    def watch(self, workers: Iterable[str]) -> None:
        """Wait for the deaths of these workers, and of no others."""
        wanted = set(workers)
        for worker in self._lives.keys() - wanted:
            self._forget(worker)
        for worker in wanted - self._lives.keys():
            if self._poll is not None:
                with contextlib.suppress(OSError):
                    fd = os.open(self._folder / f"{worker}{_LIFE}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    self._lives[worker] = fd
                    self._poll.register(fd, 0)  # epoll always reports its end.

    def drain_wakes(self) -> bool:
        """Empty the pipe; True if a watched worker died."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._wake_fd, 4096)) == 4096:
                pass
        if self._poll is None or not self._lives:
            return False
        ended = {fd for fd, _ in self._poll.poll(0)}
        gone = [worker for worker, fd in self._lives.items() if fd in ended]
        for worker in gone:
            self._forget(worker)
        return bool(gone)

    def _forget(self, worker: str) -> None:
        fd = self._lives.pop(worker)
        if self._poll is not None:
            self._poll.unregister(fd)
        os.close(fd)

    def leave(self) -> None:
        self.watch(())
        if self._poll is not None:
            self._poll.close()
        self._memory.close()
        _remove(self._folder, self.worker)
        for fd in (self._wake_fd, self.lock_fd, self.life_fd):
            os.close(fd)

    @staticmethod
    def alive(folder: Path, worker: str) -> bool:
        """Whether the worker, or the guardian that still ends its attempts, holds its lock."""
        try:
            fd = os.open(folder / f"{worker}{_LOCK}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # Shared, so that two who look at the same moment do not take each other for the holder.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    @staticmethod
    def running(folder: Path, worker: str) -> RunningAttempts:
        try:
            data = (folder / f"{worker}{_LOCK}").read_bytes()
        except FileNotFoundError:
            return RunningAttempts()
        lines = data.partition(b"\n\n")[0].decode(errors="replace").split("\n")
        apart = next((line[1:] for line in lines if line.startswith("!")), None)
        noted = [line.removeprefix(_PROVEN) for line in lines if line.startswith(_PROVEN)]
        return RunningAttempts(
            frozenset(line for line in lines if len(line) == TOKEN_CHARS),
            apart,
            proven=frozenset(filter(None, noted)) if noted else None,
        )


def _sweep(folder: Path, *, keep: Iterable[str]) -> None:
    """Remove the files of dead workers that hold nothing."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return
    for name in names:
        worker = name.removesuffix(_LOCK)
        if worker != name and worker not in keep:
            _remove_dead(folder, worker)


def _take_place(path: Path, mode: int) -> int:
    """Open and lock a worker's file. Another worker may remove it before it is locked, and then it is made again."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        take_lock(fd, str(path), clock=SystemClock(), patience_s=None)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)


def _remove_dead(folder: Path, worker: str) -> None:
    """Remove a worker's files under its lock: one that starts at this moment waits for it, and makes them again."""
    try:
        fd = os.open(folder / f"{worker}{_LOCK}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder, worker)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)


def _remove(folder: Path, worker: str) -> None:
    for suffix in (_WAKE, _LIFE, _LOCK):
        (folder / f"{worker}{suffix}").unlink(missing_ok=True)


class WakePipes:
    """Wakes the workers that wait beside this file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = str(folder)
        self._seen_at = -1
        self._fds: dict[str, int] = {}

    def wake(self) -> None:
        # The known ones first: nobody waits for a look that rarely finds another.
        if self._fds:
            self._write(list(self._fds))
        if self._seen_at < 0 and not os.access(self._name, os.F_OK):
            return  # No worker has been here yet.
        try:
            changed = os.stat(self._name).st_mtime_ns  # noqa: PTH116 - once for each put
        except FileNotFoundError:
            return
        if changed != self._seen_at:
            self._write(self._look(changed))

    def _write(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                os.write(self._fds[name], b"!")
            except BlockingIOError:
                pass  # A full pipe wakes its worker anyway.
            except BrokenPipeError:
                os.close(self._fds.pop(name))

    def _look(self, changed: int) -> list[str]:
        """Learn which pipes exist now; returns the new ones."""
        names = {path.name for path in self._folder.glob(f"*{_WAKE}")}
        for name in self._fds.keys() - names:
            os.close(self._fds.pop(name))
        new = names - self._fds.keys()
        for name in new:
            # Refused if nobody reads: a worker that died without leaving.
            with contextlib.suppress(OSError):
                self._fds[name] = os.open(self._folder / name, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # The change after one within the last tick may bear the same time.
        self._seen_at = changed if abs(time.time_ns() - changed) > TICK_NS else 0
        return [name for name in new if name in self._fds]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


class LocalWorkers:
    """Rows of workers that hold leases: this worker's own, whose deadline ends all of its leases, and dead workers'."""

    def __init__(
        self, file: EmbeddedFile, records: AttemptStore, clock: Clock, *, fused: bool, wake: Callable[[], None]
    ) -> None:
        self._file, self._records, self._clock = file, records, clock
        self._boot, self._fused, self._wake = system.boot_id(), fused, wake
        self.number: int | None = None
        """This worker's row."""
        self.lease_s = DEFAULT_LEASE.total_seconds()
        self._seen: set[str] = set()
        """Workers that held leases at the last look."""
        self._sweep_at = 0.0

    def is_fresh(self, connection: sqlite3.Connection, worker: str, ttl: timedelta) -> bool:
        """Whether this worker has a row, with a deadline that has only just been moved on."""
        if self.number is None:
            return False
        row = connection.execute(
            "SELECT deadline FROM holders WHERE id=? AND worker=? AND boot=?", (self.number, worker, self._boot)
        ).fetchone()
        return row is not None and row[0] >= self._clock.boottime() + JUST_NOW * ttl.total_seconds()

    def hold(self, connection: sqlite3.Connection, worker: str, ttl: timedelta) -> int:
        """Move this worker's deadline, in boot time, on; returns its row."""
        deadline = self._clock.boottime() + ttl.total_seconds()
        if self.number is not None:
            updated = connection.execute(
                "UPDATE holders SET deadline=?, boot=? WHERE id=? AND worker=?",
                (deadline, self._boot, self.number, worker),
            ).rowcount
            if updated:
                return self.number
        row = connection.execute(
            "INSERT INTO holders(worker, boot, deadline) VALUES(?, ?, ?) "
            "ON CONFLICT(worker) DO UPDATE SET boot=excluded.boot, deadline=excluded.deadline RETURNING id",
            (worker, self._boot, deadline),
        ).fetchone()
        self.number = int(row[0])
        return self.number

    def give_back(self, *, ours: str | None) -> list[str]:
        """Give back the leases of dead workers, with a note for each attempt that had begun.

        Returns the other workers that live and hold leases.
        """
        with self._file.reading() as connection:
            holders = connection.execute(
                "SELECT DISTINCT h.id, h.worker, h.boot, h.deadline FROM leases l JOIN holders h ON h.id=l.holder"
            ).fetchall()
        self._seen = {row[1] for row in holders}
        others = [row for row in holders if row[1] != ours]
        dead = {
            worker: Presence.running(self._file.workers_folder, worker)
            for _, worker, boot, deadline in others
            if self._is_dead(worker, boot, deadline)
        }
        # Workers that ran something and went together went with their machine, or with what holds them all.
        together = sum(bool(running.tokens) for running in dead.values()) > 1
        for holder, worker, _, _ in others:
            if worker in dead:
                self._release(holder, worker, dead[worker], together=together)
        return [row[1] for row in others if row[1] not in dead]

    def sweep(self) -> bool:
        """Remove dead workers' files beside the database, every 30 s; True if this call did."""
        if self._clock.boottime() < self._sweep_at:
            return False
        self._sweep_at = self._clock.boottime() + SWEEP_EVERY_S
        _sweep(self._file.workers_folder, keep=self._seen)
        return True

    def _is_dead(self, worker: str, boot: str, deadline: float) -> bool:
        if boot != self._boot or self._clock.boottime() > deadline:
            return True
        return not Presence.alive(self._file.workers_folder, worker)

    def _release(self, holder: int, worker: str, running: RunningAttempts, *, together: bool) -> None:
        # Before the leases go back: a worker that takes one of these tasks then knows how its last attempt ended.
        failure = None if self._fused else self._record_elsewhere(holder, worker, running, together=together)
        with self._file.transaction() as connection:
            boot = self._find_dead(connection, holder, worker)
            if boot is None:
                return  # It renewed in between.
            rows = connection.execute(
                "DELETE FROM leases WHERE holder=? RETURNING seq, token, tries, flags, leased", (holder,)
            ).fetchall()
            for seq, token, tries, flags, leased in rows:
                queue, rank, experiment, generation = connection.execute(
                    "SELECT queue, rank, experiment, generation FROM tasks WHERE seq=?", (seq,)
                ).fetchone()
                if token in running.tokens:
                    if self._fused:
                        note = self._make_note(worker, boot, running, token, leased, together=together)
                        insert_note(connection, seq, generation, note)
                    tries += 1
                requeue(connection, seq, queue, rank, None, 0, tries=tries, flags=flags | SUSPECT)
                count(connection, experiment, leased=-1, queued=1)
            connection.execute("DELETE FROM holders WHERE id=?", (holder,))
        if failure is not None:
            raise failure
        if rows:
            self._wake()

    def _find_dead(self, connection: sqlite3.Connection, holder: int, worker: str) -> str | None:
        """Return the boot that the worker ran in if it is dead; None if it lives or holds nothing any more."""
        # By name as well: another worker may have the number of one that was given up meanwhile.
        row = connection.execute(
            "SELECT boot, deadline FROM holders WHERE id=? AND worker=?", (holder, worker)
        ).fetchone()
        return str(row[0]) if row is not None and self._is_dead(worker, *row) else None

    def _record_elsewhere(
        self, holder: int, worker: str, running: RunningAttempts, *, together: bool
    ) -> Exception | None:
        """Note the lost attempts in a store outside the file; returns the failure of a note that cannot be written."""
        with self._file.reading() as connection:
            boot = self._find_dead(connection, holder, worker)
            if boot is None:
                return None
            rows = connection.execute(
                "SELECT l.seq, l.token, l.leased, t.generation, t.body FROM leases l JOIN tasks t ON t.seq=l.seq "
                "WHERE l.holder=?",
                (holder,),
            ).fetchall()
            lost = [
                (
                    read_task(connection, seq, generation, body),
                    self._make_note(worker, boot, running, token, leased, together=together),
                )
                for seq, token, leased, generation, body in rows
                if token in running.tokens
            ]
        failure: Exception | None = None
        for task, note in lost:
            try:
                self._records.record_ended(task, note)
            except Exception as problem:  # The notes after one that cannot be written are still written.
                failure = problem
        return failure

    def _make_note(
        self, worker: str, boot: str, running: RunningAttempts, token: str, leased: float, *, together: bool
    ) -> EndedNote:
        return EndedNote(
            token=token,
            reason=EndReason.LOST,
            ended_at=self._clock.now(),
            started_at=datetime.fromtimestamp(leased, UTC),
            worker=worker,
            message=f"worker {worker} vanished",
            # A new boot means that the machine went, with all that ran on it.
            alone=boot == self._boot and not together and running.alone(token),
            machine=machine_id(boot),
            progressed=running.is_proven(token),
            unseen=running.proven is not None,
        )
