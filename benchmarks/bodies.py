"""The tasks that everyone runs: nothing, or ten milliseconds of a thread's CPU; both note start and end on the board."""

from __future__ import annotations

import os
import time

from benchmarks.board import VARIABLE, Board

_board: Board | None = None


def board() -> Board:
    global _board
    if _board is None:
        _board = Board(os.environ[VARIABLE])
    return _board


def noop(index: int) -> None:
    here = _board or board()
    here.began(index)
    here.ended(index)


def cpu(index: int) -> None:
    """Ten milliseconds of this thread's CPU time, however long that takes."""
    here = _board or board()
    here.began(index)
    until = time.thread_time() + 0.010
    while time.thread_time() < until:
        pass
    here.ended(index)


def heavy(index: int) -> None:
    """Imports a module of 300 MB, as a task that uses a large library does."""
    here = _board or board()
    here.began(index)
    import benchmarks.heavy

    assert benchmarks.heavy.CONTENTS
    here.ended(index)


def stuck_once(index: int) -> None:
    """Hangs at its first run and returns at once from each later one."""
    here = _board or board()
    if here.began(index) == 0:
        time.sleep(600)
    here.ended(index)


def sleep(index: int, seconds: float) -> None:
    here = _board or board()
    here.began(index)
    time.sleep(seconds)
    here.ended(index)
