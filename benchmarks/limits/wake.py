"""Waking a process that waits: a commit in one process to the first line in another, by inotify on the WAL."""

from __future__ import annotations

import ctypes
import os
import sqlite3
import statistics
import struct
import time
from pathlib import Path

from benchmarks import bodies
from benchmarks.board import Board

_IN_MODIFY = 0x2


def inotify(folder: Path, *, n: int = 200) -> dict[str, float]:
    path = folder / "wake.db"
    board = Board(folder / "board", n)
    board.use_here()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE t(x)")
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_CLOEXEC)
    libc.inotify_add_watch(watch, os.fsencode(f"{path}-wal"), _IN_MODIFY)
    turn, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        while number := os.read(turn, 4):
            os.read(watch, 4096)
            bodies.began(struct.unpack("i", number)[0])
            while _readable(watch):
                os.read(watch, 4096)
        os._exit(0)
    os.close(turn)
    times = []
    try:
        for index in range(n):
            os.write(told, struct.pack("i", index))
            time.sleep(0.02 + (index * 7 % 20) / 1000)
            before = time.perf_counter()
            connection.execute("INSERT INTO t VALUES(1)")
            board.wait_begun(index, timeout_s=5, every_s=0.004)
            times.append(board.first_start(index) - before)
    finally:
        os.close(told)
        os.waitpid(pid, 0)
        os.close(watch)
        connection.close()
    return {"p50_ms": statistics.median(times) * 1000, "p99_ms": sorted(times)[int(0.99 * n)] * 1000}


def _readable(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0.005)[0])
