"""The moves of tasks within the embedded file that queue and records share, each within a transaction of the caller's."""

from __future__ import annotations

import sqlite3

from runtime.tasks.model import TaskState

_IS_NEW = "SELECT EXISTS(SELECT 1 FROM tasks WHERE seq>(SELECT seq FROM entered))"
# Names without a schema find these before the tables.
_CLAIMABLE = """CREATE TEMP VIEW IF NOT EXISTS claimable AS SELECT * FROM main.claimable UNION ALL
SELECT queue, rank, seq, 0, 0 FROM main.tasks WHERE seq>(SELECT seq FROM main.entered)"""
_COUNTED = """CREATE TEMP VIEW IF NOT EXISTS experiments AS SELECT id, name, queue, created,
queued+(SELECT count(*) FROM main.tasks t WHERE t.seq>(SELECT seq FROM main.entered) AND t.experiment=e.id) AS queued,
leased, succeeded, failed, cancelled, expired FROM main.experiments e"""


def has_new(connection: sqlite3.Connection) -> bool:
    """Whether tasks were put that `enter_new` has not seen."""
    return bool(connection.execute(_IS_NEW).fetchone()[0])


def show_new(connection: sqlite3.Connection) -> None:
    """Have a connection that only reads see new tasks where they will enter. Slower, and needs no lock and no space."""
    for statement in ("PRAGMA temp_store=MEMORY", _CLAIMABLE, _COUNTED):
        connection.execute(statement)


def enter_new(connection: sqlite3.Connection, now: float) -> None:
    """Give a place and a count to the tasks that were put since it was called last.

    A put of a single task writes its row and nothing else, half of what all of this takes.
    """
    last = connection.execute("SELECT seq FROM entered").fetchone()[0]
    added = connection.execute("SELECT experiment, count(*) FROM tasks WHERE seq>? GROUP BY 1", (last,)).fetchall()
    for experiment, tasks in added:
        count(connection, experiment, queued=tasks)
    connection.execute("INSERT INTO deferred SELECT due, seq, 0, 0 FROM tasks WHERE seq>? AND due>?", (last, now))
    connection.execute(
        "INSERT INTO claimable SELECT queue, rank, seq, 0, 0 FROM tasks WHERE seq>? AND (due IS NULL OR due<=?)",
        (last, now),
    )
    connection.execute("UPDATE entered SET seq=(SELECT max(seq) FROM tasks)")


def list_queues(connection: sqlite3.Connection) -> list[str]:
    """List the queues of a file that were ever put into or paused."""
    return [name for (name,) in connection.execute("SELECT name FROM queues")]


def queue_number(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT id FROM queues WHERE name=?", (name,)).fetchone()
    if row is None:
        row = connection.execute("INSERT INTO queues(name) VALUES(?) RETURNING id", (name,)).fetchone()
    return int(row[0])


def experiment_number(connection: sqlite3.Connection, name: str, queue: int, created: float) -> int:
    row = connection.execute("SELECT id FROM experiments WHERE name=?", (name,)).fetchone()
    if row is None:
        row = connection.execute(
            "INSERT INTO experiments(name, queue, created) VALUES(?, ?, ?) RETURNING id", (name, queue, created)
        ).fetchone()
    return int(row[0])


def take_out(connection: sqlite3.Connection, seq: int) -> TaskState | None:
    """Remove a task from the queued or leased ones; returns its state before, None for a terminal one."""
    if connection.execute("DELETE FROM leases WHERE seq=?", (seq,)).rowcount:
        return TaskState.LEASED
    row = connection.execute("SELECT queue, rank FROM tasks WHERE seq=?", (seq,)).fetchone()
    if row is None:
        return None
    if connection.execute("DELETE FROM claimable WHERE queue=? AND rank=? AND seq=?", (*row, seq)).rowcount:
        return TaskState.QUEUED
    if connection.execute("DELETE FROM deferred WHERE seq=?", (seq,)).rowcount:
        return TaskState.QUEUED
    return None


def count(connection: sqlite3.Connection, experiment: int, **changes: int) -> None:
    """Add to an experiment's counters, which change in the transaction that moves the tasks."""
    parts = [f"{name}={name}+{change}" for name, change in changes.items() if change]
    if parts:
        connection.execute(f"UPDATE experiments SET {','.join(parts)} WHERE id=?", (experiment,))
