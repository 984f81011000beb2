"""Whether a worker leaves, and why; and the signals that ask for it, with their senders."""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections.abc import Collection
from typing import Final

from runtime.errors import StoreBroken
from runtime.worker.reporter import Reporter

_SIGINFO_BYTES: Final = 128
_SIGINFO: Final = struct.Struct("<IiiI")
"""The beginning of `struct signalfd_siginfo`: number, errno, code, pid of the sender (0 from outside a container)."""


class Leaving:
    """The decision to leave: the first reason counts, with its exit code."""

    def __init__(self, say: Reporter) -> None:
        self._say = say
        self.reason: str | None = None
        """Why the worker leaves; None while it serves."""
        self.exit_code = 0
        self.asked = 0
        """How often somebody asked the worker to stop."""
        self.wake_fd, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """`wake_fd` turns readable when somebody asks."""

    def ask(self, reason: str, exit_code: int = 0) -> None:
        """Ask the worker to leave, and wake it; safe from a signal handler and from any thread."""
        self.asked += 1
        self.decide(reason, exit_code)
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            pass  # It is full of wake-ups already.

    def decide(self, reason: str, exit_code: int = 0) -> None:
        if self.reason is None:
            self.exit_code = exit_code
            self.reason = reason

    def trouble(self, what: str, problem: Exception | None) -> None:
        """Report a failed call that the worker will repeat; leave if repeating cannot help."""
        self._say.trouble(what, problem)
        if isinstance(problem, StoreBroken):
            self.decide(problem.message, problem.exit_code)


class SignalReader:
    """Holds signals back in this thread, and in threads that it starts later, until they are read from a descriptor.

    A handler in Python does not learn the sender. A signal that another thread gets still goes to its handler. On a
    system without signalfd all signals do; `fd` is None then.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self.numbers = numbers
        self.fd: int | None = None
        if sys.platform == "linux":
            import ctypes

            mask = sum(1 << (number - 1) for number in numbers).to_bytes(_SIGINFO_BYTES, sys.byteorder)
            fd = ctypes.CDLL(None).signalfd(-1, mask, os.O_NONBLOCK | os.O_CLOEXEC)
            if fd >= 0:
                self.fd = fd
                signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def read(self) -> list[tuple[int, int]]:
        """Return number and sender of each signal since the last call; the same signal twice may count once."""
        heard: list[tuple[int, int]] = []
        while self.fd is not None:
            try:
                data = os.read(self.fd, 16 * _SIGINFO_BYTES)
            except BlockingIOError:
                break
            for at in range(0, len(data), _SIGINFO_BYTES):
                number, _, _, sender = _SIGINFO.unpack_from(data, at)
                heard.append((number, sender))
        return heard

    def close(self) -> None:
        """Forget signals that were not read, and let signals through again."""
        if self.fd is not None:
            self.read()
            os.close(self.fd)
            self.fd = None
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)
