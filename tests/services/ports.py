"""Ports that no other test on this machine uses, in this process or another."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

_FIRST: Final = 20000
_LAST: Final = 32000
"""Below the ephemeral ones."""
_BLOCK: Final = 100


class Ports:
    """At least `count` ports in a row from `first` on, which are ours until `close`, or until this process ends.

    A program may listen at any address of the loopback network: a port that is free at one of them can be taken at another.
    """

    def __init__(self, count: int) -> None:
        blocks = -(-count // _BLOCK)
        starts = list(range(_FIRST, _LAST - blocks * _BLOCK + 1, _BLOCK))
        random.shuffle(starts)
        for first in starts:
            with ExitStack() as held:
                if all(_take(first + _BLOCK * number, held) for number in range(blocks)):
                    self.first, self._held = first, held.pop_all()
                    return
        raise OSError(f"no {count} ports in a row are free")

    def close(self) -> None:
        self._held.close()


def _take(first: int, held: ExitStack) -> bool:
    folder = Path(tempfile.gettempdir(), f"runtime-test-ports-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder / str(first), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Servers of a test that was killed may be left.
        for port in range(first, first + _BLOCK):
            with socket.socket() as probe:
                probe.bind(("", port))
    except OSError:
        return False
    return True
