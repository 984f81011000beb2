"""Signals with their senders, read from a descriptor. A handler in Python does not learn the sender."""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections.abc import Collection
from typing import Final, NamedTuple

_SFD_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_SIGINFO_BYTES: Final = 128
_SIGINFO: Final = struct.Struct("<IiiI")
"""The beginning of `struct signalfd_siginfo`: number, errno, code, pid of the sender (0 from outside a container)."""


class Heard(NamedTuple):
    number: int
    sender: int


class SignalReader:
    """Holds signals back in this thread, and in those that it starts from now on, until they are read.

    A signal that another thread gets still goes to its handler. If the system lacks signalfd all do; `fd` is None then.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self.numbers = numbers
        self.fd: int | None = None
        if sys.platform == "linux":
            import ctypes

            mask = sum(1 << (number - 1) for number in numbers).to_bytes(_SIGINFO_BYTES, sys.byteorder)
            fd = ctypes.CDLL(None).signalfd(-1, mask, _SFD_FLAGS)
            if fd >= 0:
                self.fd = fd
                signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def read(self) -> list[Heard]:
        """Return the signals since the last call; the same signal twice may count once."""
        heard: list[Heard] = []
        while self.fd is not None:
            try:
                data = os.read(self.fd, 16 * _SIGINFO_BYTES)
            except BlockingIOError:
                break
            for at in range(0, len(data), _SIGINFO_BYTES):
                number, _, _, sender = _SIGINFO.unpack_from(data, at)
                heard.append(Heard(number, sender))
        return heard

    def close(self) -> None:
        """Forget signals that were not read, and let signals through again."""
        if self.fd is not None:
            self.read()
            os.close(self.fd)
            self.fd = None
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)
