"""The lock of a run folder: an exclusive create with its owner and a counter that moves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import NotPossible
from runtime.jobs.hosts.base import Files, LockLost
from runtime.jobs.ledger import job_folder
from runtime.shim import processes
from runtime.system import system

if TYPE_CHECKING:
    import threading

BEAT_S: Final = 1.0
STILL_S: Final = 10.0
"""A launcher whose counter stands still for this long counts as dead."""


class LockHeld(NotPossible):
    """Another launcher, or a shim that folds the job, is at work on it."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(
            "this job is being launched by another",
            facts=[f"holder: {holder}"],
            hint="`runtime status` shows it once it is there",
        )


class Lock:
    """The right to launch a job: an exclusive create with an owner, a token and a counter that others watch.

    A holder that dies leaves a counter that stands still, and on this machine no process; the next launcher makes a lock of
    the next number. A holder that was only slow finds it and gives up.
    """

    def __init__(self, files: Files, job: str, owner: str, *, folder: str | None = None) -> None:
        """`folder` has the lock, by default that of the job."""
        self._files, self._folder, self._owner = files, folder or job_folder(job), owner
        self._token = system.urandom(8).hex()
        self._process = _this_process()
        self._number = 0
        self._count = 0
        self._stop = system.event()
        self._thread: threading.Thread | None = None

    def take(self, *, patience_s: float, wait: bool = True, tell: Callable[[str], None] = lambda text: None) -> bool:
        """Take the lock, waiting for a living holder; True if it was taken over from a dead one.

        Raises `LockHeld` if a living holder did not release it in time; unless it is to `wait`, as soon as the holder is
        known to live.
        """
        until, seen, still = system.monotonic() + patience_s, b"", system.monotonic()
        lives = told = False
        dead: tuple[int, object] | None = None
        while True:
            held = self._newest()
            content = b"" if held is None else self._files.read(self._name(held)) or b""
            holder = _read_holder(content)
            # Not its number alone: once all locks are released, the next one has it again.
            if held is None or (held, holder.get("token")) == dead:
                self._number = (held or 0) + 1
                # A power failure ends its holder, too.
                if self._files.create(self._name(self._number), self._content(), lasting=False):
                    self._keep()
                    return held is not None
                continue
            if content != seen:
                lives, seen, still = bool(seen and content), content, system.monotonic()
                if _has_ended(holder):
                    dead = held, holder.get("token")
                    continue
            elif system.monotonic() - still >= STILL_S:
                # Not simply the newest: another that watched it may have been first.
                dead = held, holder.get("token")
                continue
            if system.monotonic() >= until or (lives and not wait):
                raise LockHeld(str(holder.get("owner", "unknown")))
            if not told:
                told = True
                tell("another launcher is at work on this job; waiting for it")
            system.sleep(BEAT_S / 4)

    def ensure_held(self) -> None:
        """Raise `LockLost` if another launcher took the lock over."""
        if not self.is_held():
            raise LockLost

    def files(self) -> Files:
        """The record root, where nothing is changed any more once another has taken the lock over."""
        return self._files.while_held(self._name(self._number), self._token)

    def stop(self) -> None:
        """Write no more, so that the lock's folder can be removed, and the lock with it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def release(self) -> None:
        self.stop()
        # Otherwise it is another's, under this number too once all locks had been removed.
        for number in range(1, self._number + 1) if self.is_held() else ():
            self._files.remove(self._name(number))

    def is_held(self) -> bool:
        if self._newest() != self._number:
            return False
        return bool(_read_holder(self._files.read(self._name(self._number)) or b"").get("token") == self._token)

    def _newest(self) -> int | None:
        numbers = [
            int(name.removeprefix("lock.")) for name in self._files.names(self._folder, "lock.") if name[5:].isdecimal()
        ]
        return max(numbers, default=None)

    def _name(self, number: int) -> str:
        return f"{self._folder}/lock.{number}"

    def _content(self) -> bytes:
        said = {"owner": self._owner, "token": self._token, "count": self._count, "process": self._process}
        return json.dumps(said, sort_keys=True).encode()

    def _keep(self) -> None:
        def beat() -> None:
            while not self._stop.wait(BEAT_S):
                self._count += 1
                try:
                    if self.is_held():
                        # If this thread stands still here, another may take the lock over, release it, and remove the job.
                        self.files().write(self._name(self._number), self._content())
                except Exception:
                    continue

        self._thread = system.thread(target=beat, name="launch-lock")
        self._thread.start()


def _this_process() -> dict[str, Any]:
    """This process, by which others of the same machine see whether it still runs; empty where they could not."""
    boot, namespace = processes.boot_id(), _namespace()
    me = os.getpid()
    return (
        {"boot": boot, "namespace": namespace, "pid": me, "start": processes.started_at(me)}
        if boot and namespace
        else {}
    )


def _namespace() -> str | None:
    """The namespace in which the numbers of processes are this process's; None on a system without such."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it is not a path
    except OSError:
        return None


def _read_holder(content: bytes) -> dict[str, Any]:
    """Return the holder that a lock names; nothing if a power failure or the disk has damaged the file."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_ended(holder: Mapping[str, Any]) -> bool:
    """Whether the holder ran on this machine and runs no more; False if that cannot be seen from here."""
    who, here = holder.get("process"), _this_process()
    if not isinstance(who, dict) or not isinstance(who.get("pid"), int) or not here:
        return False
    return all(who.get(key) == here[key] for key in ("boot", "namespace")) and not processes.is_alive(who)
