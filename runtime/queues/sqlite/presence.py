"""How workers of one host see each other.

A locked file says that one lives and what it runs, a bell wakes it, and a pipe that closes with its last holder tells
the others at once that it died.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from runtime.tasks.model import TOKEN_CHARS
from runtime.values import dataclass

TICK_NS: Final = 100_000_000
"""Two changes of a folder that lie closer together may bear the same time: file systems count it in ticks."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a worker ran when it was last heard of."""

    tokens: frozenset[str] = frozenset()
    apart: str | None = None
    """The one suspect among them."""

    def alone(self, token: str) -> bool:
        return len(self.tokens) == 1 or token == self.apart


class Presence:
    """A worker's place beside the database: a locked file that says it lives and what it runs, and a bell to wake it.

    The file holds a token per line and ends in an empty one, rewritten in shared memory, which a killed process
    leaves as it was. A pipe serves as the bell because it works at any path length and nobody else can read it.
    """

    _SIZE = 64 * 1024

    def __init__(
        self, folder: Path, worker: str, *, lock_fd: int, life_fd: int, bell_fd: int, memory: mmap.mmap
    ) -> None:
        self.worker = worker
        self.lock_fd = lock_fd
        self.life_fd = life_fd
        """Nobody writes to this pipe: its end of file is what the others wait for."""
        self.bell_fd = bell_fd
        self._folder = folder
        self._memory = memory

    @classmethod
    def enter(cls, folder: Path, worker: str) -> Presence:
        folder.mkdir(parents=True, exist_ok=True)
        bell_path = _bell_path(folder, worker)
        life_path = _life_path(folder, worker)
        for path, mode in ((bell_path, 0o622), (life_path, 0o644)):
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, mode)
        # Opened for both ends, so that it never reports end of file; closed in children by exec and by the guardian.
        bell_fd = os.open(bell_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        lock_fd = os.open(_lock_path(folder, worker), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        os.ftruncate(lock_fd, cls._SIZE)
        # After the lock: a process that dies closes in order, and whoever is woken by the pipe finds the lock free.
        life_fd = os.open(life_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        memory = mmap.mmap(lock_fd, cls._SIZE)
        return cls(folder, worker, lock_fd=lock_fd, life_fd=life_fd, bell_fd=bell_fd, memory=memory)

    def mark(self, tokens: Sequence[str], apart: str | None = None) -> None:
        # One slice assignment; the terminating newline comes with it, so a reader sees old or new lines, and a torn
        # line names no token.
        last = f"!{apart}\n\n" if apart else "\n"
        text = ("".join([f"{token}\n" for token in tokens]) + last).encode()
        self._memory[0 : len(text)] = text

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.bell_fd, 4096)) == 4096:
                pass

    def leave(self) -> None:
        self._memory.close()
        _remove(self._folder, self.worker)
        for fd in (self.bell_fd, self.lock_fd, self.life_fd):
            os.close(fd)

    @staticmethod
    def alive(folder: Path, worker: str) -> bool:
        """Whether the worker, or the guardian that still ends its attempts, holds its lock."""
        try:
            fd = os.open(_lock_path(folder, worker), os.O_RDONLY | os.O_CLOEXEC)
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
    def running(folder: Path, worker: str) -> Running:
        try:
            data = _lock_path(folder, worker).read_bytes()
        except FileNotFoundError:
            return Running()
        lines = data.partition(b"\n\n")[0].decode(errors="replace").split("\n")
        apart = next((line[1:] for line in lines if line.startswith("!")), None)
        return Running(frozenset(line for line in lines if len(line) == TOKEN_CHARS), apart)

    @staticmethod
    def sweep(folder: Path, *, keep: Iterable[str]) -> None:
        """Remove the files of dead workers that hold nothing."""
        kept = set(keep)
        try:
            names = [path.name for path in folder.iterdir()]
        except FileNotFoundError:
            return
        for name in names:
            worker = name.removesuffix(".lock")
            if worker != name and worker not in kept and not Presence.alive(folder, worker):
                _remove(folder, worker)


class Vigil:
    """Waits on a worker's own bell and on the deaths of others, behind one descriptor."""

    def __init__(self, folder: Path, presence: Presence) -> None:
        self._folder, self._presence = folder, presence
        self._lives: dict[str, int] = {}
        # Elsewhere than on Linux the others' deaths show at the next look, within a second.
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        if self._poll is not None:
            self._poll.register(presence.bell_fd, select.EPOLLIN)

    @property
    def fd(self) -> int:
        """Readable when the bell rang or one of the watched has died."""
        return self._presence.bell_fd if self._poll is None else self._poll.fileno()

    def watch(self, workers: Iterable[str]) -> None:
        """Wait for the deaths of these, and of no others."""
        wanted = set(workers)
        for worker in self._lives.keys() - wanted:
            self._forget(worker)
        for worker in wanted - self._lives.keys():
            if self._poll is not None:
                with contextlib.suppress(OSError):
                    fd = os.open(_life_path(self._folder, worker), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    self._lives[worker] = fd
                    self._poll.register(fd, 0)  # Its end is reported whatever is asked for.

    def hush(self) -> bool:
        """Empty the bell; True if somebody died."""
        self._presence.hush()
        if self._poll is None or not self._lives:
            return False
        ended = {fd for fd, _ in self._poll.poll(0)}
        gone = [worker for worker, fd in self._lives.items() if fd in ended]
        for worker in gone:
            self._forget(worker)
        return bool(gone)

    def close(self) -> None:
        self.watch(())
        if self._poll is not None:
            self._poll.close()

    def _forget(self, worker: str) -> None:
        fd = self._lives.pop(worker)
        if self._poll is not None:
            self._poll.unregister(fd)
        os.close(fd)


def _remove(folder: Path, worker: str) -> None:
    for path in (_bell_path(folder, worker), _life_path(folder, worker), _lock_path(folder, worker)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _life_path(folder: Path, worker: str) -> Path:
    return folder / f"{worker}.life"


def _lock_path(folder: Path, worker: str) -> Path:
    return folder / f"{worker}.lock"


def _bell_path(folder: Path, worker: str) -> Path:
    return folder / f"{worker}.bell"


class Bells:
    """Wakes the workers that wait beside this file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = str(folder)
        self._seen_at = -1
        self._fds: dict[str, int] = {}

    def ring(self) -> None:
        # Those that are known first: nobody waits for a look that rarely finds another.
        if self._fds:
            self._ring(list(self._fds))
        if self._seen_at < 0 and not os.access(self._name, os.F_OK):
            return  # No worker has been here yet.
        try:
            changed = os.stat(self._name).st_mtime_ns  # noqa: PTH116 - once for each put
        except FileNotFoundError:
            return
        if changed != self._seen_at:
            self._ring(self._look(changed))

    def _ring(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                os.write(self._fds[name], b"!")
            except BlockingIOError:
                pass  # Full: it will wake as it is.
            except BrokenPipeError:
                os.close(self._fds.pop(name))

    def _look(self, changed: int) -> list[str]:
        """Learn which bells there are now; returns the new ones."""
        names = {path.name for path in self._folder.glob("*.bell")}
        for name in self._fds.keys() - names:
            os.close(self._fds.pop(name))
        new = names - self._fds.keys()
        for name in new:
            # Refused where nobody reads: a worker that died without leaving.
            with contextlib.suppress(OSError):
                self._fds[name] = os.open(self._folder / name, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # Of a change that is new, the next one may not be told.
        self._seen_at = changed if abs(time.time_ns() - changed) > TICK_NS else 0
        return [name for name in new if name in self._fds]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
