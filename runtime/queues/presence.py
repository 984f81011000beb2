"""How workers of one host see each other: a locked file says that one lives and what it runs, a bell wakes it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

TOKEN_CHARS: Final = 16


class Presence:
    """A worker's place beside the database: a locked file that says it lives and what it runs, and a bell to wake it.

    The file holds a token per line and ends in an empty one, rewritten in shared memory, which a killed process
    leaves as it was. A pipe serves as the bell because it works at any path length and nobody else can read it.
    """

    _SIZE = 64 * 1024

    def __init__(self, folder: Path, worker: str, lock_fd: int, bell_fd: int, memory: mmap.mmap) -> None:
        self.worker = worker
        self.lock_fd = lock_fd
        self.bell_fd = bell_fd
        self._folder = folder
        self._memory = memory

    @classmethod
    def enter(cls, folder: Path, worker: str) -> Presence:
        folder.mkdir(parents=True, exist_ok=True)
        bell_path = _bell_path(folder, worker)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(bell_path, 0o622)
        # Opened for both ends, so that it never reports end of file; closed in children by exec and by the guardian.
        bell_fd = os.open(bell_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        lock_fd = os.open(_lock_path(folder, worker), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        os.ftruncate(lock_fd, cls._SIZE)
        return cls(folder, worker, lock_fd, bell_fd, mmap.mmap(lock_fd, cls._SIZE))

    def mark(self, tokens: Sequence[str]) -> None:
        # One slice assignment; the terminating newline comes with it, so a reader sees old or new lines, and a torn
        # line names no token.
        text = "".join([f"{token}\n" for token in tokens]).encode() + b"\n"
        self._memory[0 : len(text)] = text

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.bell_fd, 4096)) == 4096:
                pass

    def leave(self) -> None:
        self._memory.close()
        for path in (_bell_path(self._folder, self.worker), _lock_path(self._folder, self.worker)):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        os.close(self.bell_fd)
        os.close(self.lock_fd)

    @staticmethod
    def alive(folder: Path, worker: str) -> bool:
        """Whether the worker, or the guardian that still ends its attempts, holds its lock."""
        try:
            fd = os.open(_lock_path(folder, worker), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    @staticmethod
    def running(folder: Path, worker: str) -> set[str]:
        """Tokens of the attempts that ran when the worker was last heard of."""
        try:
            data = _lock_path(folder, worker).read_bytes()
        except FileNotFoundError:
            return set()
        lines = data.partition(b"\n\n")[0].decode(errors="replace").split("\n")
        return {line for line in lines if len(line) == TOKEN_CHARS}

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
                for path in (_bell_path(folder, worker), _lock_path(folder, worker)):
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()


def _lock_path(folder: Path, worker: str) -> Path:
    return folder / f"{worker}.lock"


def _bell_path(folder: Path, worker: str) -> Path:
    return folder / f"{worker}.bell"


class Bells:
    """Wakes the workers that wait beside this file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen_at = -1
        self._fds: dict[str, int] = {}

    def ring(self) -> None:
        try:
            changed = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed != self._seen_at:
            self._look(changed)
        for name, fd in list(self._fds.items()):
            try:
                os.write(fd, b"!")
            except BlockingIOError:
                pass  # Full: it will wake as it is.
            except BrokenPipeError:
                os.close(self._fds.pop(name))

    def _look(self, changed: int) -> None:
        names = {path.name for path in self._folder.glob("*.bell")}
        for name in self._fds.keys() - names:
            os.close(self._fds.pop(name))
        for name in names - self._fds.keys():
            # Refused where nobody reads: a worker that died without leaving.
            with contextlib.suppress(OSError):
                self._fds[name] = os.open(self._folder / name, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._seen_at = changed

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
