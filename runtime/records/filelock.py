"""An exclusive flock that is waited for in order and with a limit, and whose holder is named if it takes long."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Final

from runtime.clock import Clock
from runtime.errors import StoreUnavailable
from runtime.file_trust import user_name
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.units import format_duration

NOTE_AFTER_S: Final = 5.0
"""How long a lock is waited for in silence."""
PATIENCE_S: Final = 60.0
"""How long a command waits for a lock; a large submission or purge of somebody else holds it for seconds."""
_TICK_S: Final = 0.25
_IDLE_TICKS: Final = 40
_PAUSES_S: Final = (0.0, 0.0001, 0.0001, 0.0002, *[0.0005] * 8, *[0.001] * 40)
"""A few short transactions end within these. A thread to wait for them costs two switches for which the lock is kept."""


class LockBusy(StoreUnavailable):
    """Another process held the lock for as long as we waited for it. The descriptor is spent: open the file again."""

    def __init__(self, path: str, waited_s: float) -> None:
        holder = find_holder(path)
        super().__init__(
            f"another process holds the lock `{path}`",
            facts=[
                f"waited {format_duration(waited_s)}; what needs the lock was not done",
                *([f"holder: {holder[1]}"] if holder else []),
            ],
            hint=f"run the command again when it has ended, or end it: kill {holder[0]}"
            if holder and holder[0]
            else f"find the holder: fuser -v {path}",
        )


def take_lock(fd: int, path: str, *, clock: Clock, patience_s: float | None) -> None:
    """Take the lock of the open file `path`; waits for ever if `patience_s` is None. Raises `LockBusy`.

    If anything is raised, the descriptor is spent: it is closed as soon as the lock is free.
    """
    if patience_s is None:
        _wait_for_ever(fd, path, clock)
        return
    for pause_s in _PAUSES_S:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            system.sleep(pause_s)
        else:
            return
    _Wait(fd).wait(path, clock, patience_s)


def _wait_for_ever(fd: int, path: str, clock: Clock) -> None:
    """Wait in this thread: to be handed a lock that another thread has got takes longer than most transactions do."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _watch.begin(path, clock)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        finally:
            _watch.end()


class _Watch:
    """A thread that names the holder of a lock for which a thread of this process waits in a call without a limit.

    It starts with the first such wait, and ends when there was none for a while.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waits: dict[int, tuple[str, Clock, float]] = {}
        """Thread → the lock that it waits for, and since when; without those that were noted."""
        self._running = False

    def begin(self, path: str, clock: Clock) -> None:
        self._waits[threading.get_ident()] = path, clock, clock.boottime()
        with self._mutex:
            starts, self._running = not self._running, True
        if starts:
            threading.Thread(target=self._look, name="lock", daemon=True).start()

    def end(self) -> None:
        self._waits.pop(threading.get_ident(), None)

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(_TICK_S)
            for thread, (path, clock, since) in list(self._waits.items()):
                if clock.boottime() - since >= NOTE_AFTER_S:
                    self._waits.pop(thread, None)
                    _note(path, None)
            idle = 0 if self._waits else idle + 1
            with self._mutex:
                if idle >= _IDLE_TICKS and not self._waits:
                    self._running = False
                    return


_watch = _Watch()


def _after_fork_in_child() -> None:
    """Forget the parent's thread, which the child does not have."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Wait:
    """A blocking flock in a thread, since none can be given up: asking again and again would starve behind those in line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mutex, self._taken = threading.Lock(), threading.Event()
        self._given_up = False
        threading.Thread(target=self._take, name="lock", daemon=True).start()

    def _take(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        with self._mutex:
            if not self._given_up:
                self._taken.set()
                return
        self._drop()

    def wait(self, path: str, clock: Clock, patience_s: float) -> None:
        since, silent = clock.boottime(), True
        try:
            while not self._taken.wait(_TICK_S):
                waited_s = clock.boottime() - since
                if waited_s >= patience_s:
                    raise LockBusy(path, waited_s)
                if silent and waited_s >= NOTE_AFTER_S:
                    silent = False
                    _note(path, patience_s)
        except BaseException:
            with self._mutex:
                self._given_up = True
                taken = self._taken.is_set()
            if taken:
                self._drop()
            raise

    def _drop(self) -> None:
        # A child may have the descriptor too, so closing it does not suffice.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


def _note(path: str, patience_s: float | None) -> None:
    holder = find_holder(path)
    limit = "" if patience_s is None else f", at most {format_duration(patience_s)}"
    held = f", held by {holder[1]}" if holder else ""
    CleanLogger(__name__).warning("waiting for the lock `%s`%s%s", path, held, limit)


def find_holder(path: str) -> tuple[int, str] | None:
    """Number and description of the process that holds the flock of a file; None if the system does not tell.

    The number is 0 if the process is in a container that we cannot look into.
    """
    try:
        status = os.stat(path)  # noqa: PTH116
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    # https://man7.org/linux/man-pages/man5/proc_locks.5.html; an arrow marks a process that waits.
    held = [words for line in lines if (words := line.split())[1] == "FLOCK" and words[5].endswith(f":{status.st_ino}")]
    # Overlays and some file systems show another device there than stat does.
    held.sort(key=lambda words: not words[5].startswith(f"{device}:"))
    if not held:
        return None
    pid = int(held[0][4])
    return (pid, describe_process(pid)) if pid > 0 else (0, "a process in another container")


def describe_process(pid: int) -> str:
    """Number, user and program of a process. Its arguments may hold anything, so they stay out."""
    from runtime.shim.processes import owner_of  # Imported on demand: it loads subprocess.

    uid = owner_of(pid)
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        name = ""
    shown = "".join(each if each.isprintable() else "?" for each in name)
    return f"process {pid}" + (f" of {user_name(uid)}" if uid is not None else "") + (f", `{shown}`" if shown else "")
