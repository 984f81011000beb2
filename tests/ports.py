"""Rows of ports that no other test on this machine uses, in this process or another."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
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
    # A name that lives as long as this process, in the same network namespace as the ports.
    name = held.enter_context(socket.socket(socket.AF_UNIX))
    try:
        name.bind(f"\0research-runtime-ports-{first}")
        # Servers of a test that was killed may be left.
        for port in range(first, first + _BLOCK):
            with socket.socket() as probe:
                probe.bind(("", port))
    except OSError:
        return False
    return True
