"""An embedded queue with nothing but SQLite: WAL, one file, a lease with token and expiry, one result row."""

from __future__ import annotations

import os
import secrets
import sqlite3
import statistics
import time
from pathlib import Path
from typing import Any

_SCHEMA = """
CREATE TABLE tasks(id INTEGER PRIMARY KEY, state INTEGER NOT NULL, token TEXT, expires REAL, body TEXT NOT NULL);
CREATE INDEX ready ON tasks(id) WHERE state=0;
CREATE TABLE results(task INTEGER PRIMARY KEY, token TEXT NOT NULL, value TEXT NOT NULL);
"""
_PUT = "INSERT INTO tasks(state, body) VALUES(0, ?)"
_CLAIM = (
    "UPDATE tasks SET state=1, token=?, expires=? WHERE id IN (SELECT id FROM tasks WHERE state=0 ORDER BY id LIMIT ?) "
    "RETURNING id, body"
)
_SETTLE = "UPDATE tasks SET state=2 WHERE id=? AND token=?"
_RESULT = "INSERT INTO results VALUES(?, ?, ?)"
_BODY = '{"schema":1,"id":"t-%024d","experiment":"benchmark","function":"benchmarks.bodies:noop","args":[%d]}'
_VALUE = '{"state":"succeeded","started_at":1767225600.123456,"ended_at":1767225600.123499,"attempts":1,"value":null}'


def _connect(path: Path, synchronous: str, *, timeout_s: float = 60) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=timeout_s)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={synchronous}")
    return connection


def _fill(path: Path, synchronous: str, n: int) -> sqlite3.Connection:
    connection = _connect(path, synchronous)
    connection.executescript(_SCHEMA)
    connection.execute("BEGIN")
    connection.executemany(_PUT, ((_BODY % (i, i),) for i in range(n)))
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return connection


def drain(folder: Path, *, n: int, synchronous: str, claim: int = 1) -> dict[str, float]:
    """Settle and record the claimed task and claim the next one, in one commit."""
    connection = _fill(folder / "limit.db", synchronous, n)
    began, cpu = time.perf_counter(), time.process_time()
    held: list[Any] = []
    token = ""
    done = 0
    while True:
        connection.execute("BEGIN IMMEDIATE")
        if held:
            connection.executemany(_SETTLE, [(row[0], token) for row in held])
            connection.executemany(_RESULT, [(row[0], token, _VALUE) for row in held])
            done += len(held)
        token = secrets.token_hex(8)
        held = connection.execute(_CLAIM, (token, time.time() + 30, claim)).fetchall()
        connection.execute("COMMIT")
        if not held:
            break
    span = time.perf_counter() - began
    cpu = time.process_time() - cpu
    connection.close()
    return {"rate": n / span, "cpu_s": cpu / n * 1000, "lost": float(n - done)}


def enqueue(folder: Path, *, n: int, per_commit: int) -> dict[str, float]:
    """FULL: insert `per_commit` rows, commit, repeat."""
    connection = _fill(folder / "limit.db", "FULL", 1)
    bodies = [(_BODY % (i, i),) for i in range(n)]
    began = time.perf_counter()
    for start in range(0, n, per_commit):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(_PUT, bodies[start : start + per_commit])
        connection.execute("COMMIT")
    span = time.perf_counter() - began
    connection.close()
    return {"rate": n / span}


def contention(folder: Path, *, n: int) -> dict[str, float]:
    """Two processes drain one file at FULL, one claim to a commit, SQLite's own busy handler between them."""
    path = folder / "limit.db"
    _fill(path, "FULL", n).close()

    def work() -> list[float]:
        connection = _connect(path, "FULL")
        times, held, token = [], None, ""
        while True:
            began = time.perf_counter()
            connection.execute("BEGIN IMMEDIATE")
            if held:
                connection.execute(_SETTLE, (held[0], token))
                connection.execute(_RESULT, (held[0], token, _VALUE))
            token = secrets.token_hex(8)
            held = connection.execute(_CLAIM, (token, time.time() + 30, 1)).fetchone()
            connection.execute("COMMIT")
            times.append(time.perf_counter() - began)
            if held is None:
                return times

    return two_processes(work)


def two_processes(work: Any) -> dict[str, float]:
    """Run `work` in two at once: the worse p99 of a claim, and the lesser share. `work` returns the seconds of each claim."""
    pipes = []
    for _ in range(2):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                times = sorted(work())
                p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
                with os.fdopen(write, "w") as out:
                    out.write(f"{len(times)} {p99} {times[-1]}")
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        pipes.append((pid, read))
    rows = []
    for pid, read in pipes:
        with os.fdopen(read) as answer:
            rows.append([float(word) for word in answer.read().split()])
        os.waitpid(pid, 0)
    counts = [row[0] for row in rows]
    return {
        "p99_ms": max(row[1] for row in rows) * 1000,
        "max_ms": max(row[2] for row in rows) * 1000,
        "lesser_share": min(counts) / sum(counts),
    }


def contention_ours(folder: Path, *, n: int) -> dict[str, float]:
    """The same through our queue: settle with the record and claim the next, two processes at once."""
    from benchmarks.peers.ours import make_task
    from runtime.queues.sqlite.queue import open_sqlite

    path = folder / "local.db"
    queue, _ = open_sqlite(path)
    queue.put([make_task("noop", index) for index in range(n)])
    queue.close()

    def work() -> list[float]:
        return _claims(path)

    return two_processes(work)


def _claims(path: Path) -> list[float]:
    from datetime import UTC, datetime, timedelta

    from runtime.end_reasons import EndReason
    from runtime.queues.sqlite.queue import open_sqlite
    from runtime.tasks.history import Record, Settlement
    from runtime.tasks.model import TaskState

    queue, _ = open_sqlite(path)
    worker = f"w-{os.getpid()}"
    queue.join(worker)
    times = []
    now = datetime.now(UTC)
    leases = queue.lease(1, worker=worker, ttl=timedelta(seconds=30))
    while leases:
        task = leases[0].task
        record = Record(
            task_id=task.id,
            generation=task.generation,
            experiment=task.experiment,
            state=TaskState.SUCCEEDED,
            token=leases[0].token,
            reason=EndReason.SUCCEEDED,
            ended_at=now,
            worker=worker,
            attempts=1,
        )
        began = time.perf_counter()
        leases = queue.settle([Settlement(leases[0], record)], claim_next=1).leases
        times.append(time.perf_counter() - began)
    queue.close()
    return times


def drain_ours(folder: Path, *, n: int, claim: int = 1, durability: str = "full") -> dict[str, float]:
    """Our queue alone, in one process and without a worker; the difference to a drain is the worker's."""
    from datetime import UTC, datetime, timedelta

    from benchmarks.peers.ours import make_task
    from runtime.end_reasons import EndReason
    from runtime.queues.sqlite.queue import open_sqlite
    from runtime.tasks.history import Record, Settlement
    from runtime.tasks.model import TaskState

    queue, _ = open_sqlite(folder / "local.db", durability=durability)  # type: ignore[arg-type]
    for begin in range(0, n, 1000):
        queue.put([make_task("noop", index) for index in range(begin, min(n, begin + 1000))])
    queue.join("w-1")
    now = datetime.now(UTC)
    began, cpu, done = time.perf_counter(), time.process_time(), 0
    leases = queue.lease(claim, worker="w-1", ttl=timedelta(seconds=30))
    while leases:
        settlements = [
            Settlement(
                lease,
                Record(
                    task_id=lease.task.id,
                    generation=lease.task.generation,
                    experiment=lease.task.experiment,
                    state=TaskState.SUCCEEDED,
                    token=lease.token,
                    reason=EndReason.SUCCEEDED,
                    ended_at=now,
                    started_at=now,
                    worker="w-1",
                    attempts=1,
                ),
            )
            for lease in leases
        ]
        done += len(leases)
        leases = queue.settle(settlements, claim_next=claim).leases
    span, cpu = time.perf_counter() - began, time.process_time() - cpu
    queue.close()
    return {"rate": n / span, "cpu_s": cpu / n * 1000, "lost": float(n - done)}


def finish_many(folder: Path, *, n: int) -> dict[str, float]:
    """Make a file with `n` finished tasks by our queue's own calls; returns how fast that went."""
    return drain_ours(folder, n=n, claim=1000, durability="normal")


def fsync(folder: Path, *, n: int = 200) -> dict[str, float]:
    """Write one page and fdatasync it, as each durable commit does."""
    descriptor = os.open(folder / "page", os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(descriptor, bytes(4096 * 64), 0)
        os.fsync(descriptor)
        times = []
        for index in range(n):
            began = time.perf_counter()
            os.pwrite(descriptor, bytes(4096), 4096 * (index % 64))
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
    return {"rate": 1 / statistics.mean(times), "p50_ms": statistics.median(times) * 1000}
