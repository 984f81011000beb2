"""Moves of tasks between the tables of the embedded file, each within a transaction of the caller's."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from runtime.errors import InvalidTask
from runtime.records.base import RecordStore
from runtime.records.control_commands import ControlCommand, QueueControl, person
from runtime.records.sqlite import SqliteRecords, raw_text
from runtime.records.sqlite_file import EmbeddedFile, record_id
from runtime.records.transitions import count, enter_new, queue_number, take_out
from runtime.tasks.history import InvalidMessage, Record
from runtime.tasks.model import Task
from runtime.tasks.wire import decode_stored, encode_task, stand_in

SUSPECT, ALONE = 1, 2
"""Flags of a task that waits or is held."""

SWEPT: Final = timedelta(seconds=30)
"""How old the orders may be that upkeep compares the flag with."""

_ADD = "INSERT OR IGNORE INTO tasks(id, experiment, generation, queue, rank, due, body) VALUES(?, ?, ?, ?, ?, ?, ?)"


def add_tasks(connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]], now: float) -> int:
    new = connection.executemany(_ADD, rows).rowcount
    enter_new(connection, now)
    return new


def begin_generation(connection: sqlite3.Connection, task: Task, experiment: int, queue: int, now: float) -> bool:
    """Put a later generation of a task that may be known; False if that generation is known too."""
    row = connection.execute("SELECT seq, generation, experiment FROM tasks WHERE id=?", (task.id,)).fetchone()
    due = task.not_before.timestamp() if task.not_before else None
    values = (experiment, task.generation, queue, -task.priority, due, encode_task(task))
    if row is None:
        add_tasks(connection, [(task.id, *values)], now)
        return True
    seq, known, before = row
    if known >= task.generation:
        return False
    state = take_out(connection, seq)
    if state is None:
        ended = connection.execute("SELECT state FROM records WHERE rid=?", (record_id(seq, known),)).fetchone()
        state = ended and ended[0]
    if state is not None:
        count(connection, before, **{state: -1})
    connection.execute(
        "UPDATE tasks SET experiment=?, generation=?, queue=?, rank=?, due=?, body=? WHERE seq=?", (*values, seq)
    )
    requeue(connection, seq, queue, -task.priority, due, now, tries=0, flags=0)
    count(connection, experiment, queued=1)
    return True


def requeue(
    connection: sqlite3.Connection,
    seq: int,
    queue: int,
    rank: int,
    due: float | None,
    now: float,
    *,
    tries: int,
    flags: int,
) -> None:
    if due is not None and due > now:
        connection.execute("INSERT INTO deferred VALUES(?, ?, ?, ?)", (due, seq, tries, flags))
    else:
        connection.execute("INSERT INTO claimable VALUES(?, ?, ?, ?, ?)", (queue, rank, seq, tries, flags))


def is_generation(connection: sqlite3.Connection, seq: int, generation: int) -> bool:
    row = connection.execute("SELECT generation FROM tasks WHERE seq=?", (seq,)).fetchone()
    return row is not None and row[0] == generation


def find_holder(connection: sqlite3.Connection, seq: int) -> str | None:
    row = connection.execute(
        "SELECT h.worker FROM leases l JOIN holders h ON h.id=l.holder WHERE l.seq=?", (seq,)
    ).fetchone()
    return row[0] if row else None


def is_any_ready(connection: sqlite3.Connection, queue: str, now: float) -> bool:
    row = connection.execute(
        "SELECT EXISTS(SELECT 1 FROM claimable r WHERE r.queue=q.id), q.paused, "
        "(SELECT min(due) FROM deferred) FROM queues q WHERE q.name=?",
        (queue,),
    ).fetchone()
    if row is None or row[1]:
        return False
    return bool(row[0]) or (row[2] is not None and row[2] <= now)


def next_due(connection: sqlite3.Connection, queue: str) -> float | None:
    """When the next delayed task of this queue is due. Those of others in the file are no reason to stay."""
    row = connection.execute(
        "SELECT d.due FROM deferred d CROSS JOIN tasks t ON t.seq=d.seq "
        "WHERE t.queue=(SELECT id FROM queues WHERE name=?) ORDER BY d.due LIMIT 1",
        (queue,),
    ).fetchone()
    return None if row is None else row[0]


def read_malformed(
    connection: sqlite3.Connection, seq: int, body: Any, problem: InvalidTask
) -> tuple[Task, InvalidMessage]:
    """A task in the place of a row that cannot be decoded (written by hand, by another release, or damaged), and why."""
    identity, generation, experiment = connection.execute(
        "SELECT t.id, t.generation, e.name FROM tasks t LEFT JOIN experiments e ON e.id=t.experiment WHERE t.seq=?",
        (seq,),
    ).fetchone()
    task = stand_in(identity, experiment, generation=generation)
    return task, InvalidMessage(task.id, raw_text(body), problem.message)


def read_task(connection: sqlite3.Connection, seq: int, generation: int, body: Any) -> Task:
    """The task of a row, or the one in its place."""
    try:
        return replace(decode_stored(body), generation=generation)
    except InvalidTask as problem:
        return read_malformed(connection, seq, body, problem)[0]


def promote_due(connection: sqlite3.Connection, now: float) -> None:
    """Make delayed tasks that are due claimable."""
    due = connection.execute(
        "SELECT d.due, d.seq, d.tries, d.flags, t.queue, t.rank FROM deferred d JOIN tasks t USING(seq) "
        "WHERE d.due<=? LIMIT 1000",
        (now,),
    ).fetchall()
    if due:
        connection.executemany("DELETE FROM deferred WHERE due=? AND seq=?", [row[:2] for row in due])
        connection.executemany(
            "INSERT INTO claimable VALUES(?, ?, ?, ?, ?)",
            [(queue, rank, seq, tries, flags) for _, seq, tries, flags, queue, rank in due],
        )


def cancel_rows(connection: sqlite3.Connection, where: str, value: object, *, now: float) -> int:
    """Record queued and leased tasks as cancelled; returns their number."""
    connection.execute(
        "CREATE TEMP TABLE IF NOT EXISTS cancelling(seq INTEGER PRIMARY KEY, experiment INTEGER, leased INTEGER)"
    )
    connection.execute("DELETE FROM cancelling")
    connection.execute(
        "INSERT INTO cancelling SELECT t.seq, t.experiment, w.leased FROM "
        "(SELECT seq, 0 AS leased FROM claimable UNION ALL SELECT seq, 0 FROM deferred UNION ALL SELECT seq, 1 FROM leases) "
        f"w JOIN tasks t USING(seq) WHERE {where}",
        (value,),
    )
    connection.execute(
        "INSERT INTO records(rid, state, token, reason, ended, attempts, message) "
        "SELECT (seq << 20) | t.generation, 'cancelled', lower(hex(randomblob(8))), 'cancelled', ?, "
        "leased + (SELECT count(*) FROM notes n WHERE n.seq=t.seq AND n.generation=t.generation), ? "
        "FROM cancelling JOIN tasks t USING(seq)",
        (now, f"cancelled by {person()}"),
    )
    connection.execute(
        "DELETE FROM claimable WHERE (queue, rank, seq) IN (SELECT queue, rank, seq FROM cancelling JOIN tasks USING(seq))"
    )
    connection.execute("DELETE FROM deferred WHERE seq IN (SELECT seq FROM cancelling)")
    connection.execute("DELETE FROM leases WHERE seq IN (SELECT seq FROM cancelling)")
    changes = connection.execute("SELECT experiment, count(*), sum(leased) FROM cancelling GROUP BY experiment")
    ended = 0
    for experiment, tasks, leased in changes.fetchall():
        count(connection, experiment, cancelled=tasks, leased=-leased, queued=leased - tasks)
        ended += tasks
    return ended


def list_open(connection: sqlite3.Connection, queue: str, after: int) -> list[tuple[int, int, Task]]:
    """Queued and leased tasks in the order of their numbers: number, experiment's number and task."""
    rows = connection.execute(
        "SELECT t.seq, t.generation, t.experiment, t.body FROM (SELECT seq FROM claimable UNION ALL "
        "SELECT seq FROM deferred UNION ALL SELECT seq FROM leases) w JOIN tasks t USING(seq) "
        "JOIN queues q ON q.id=t.queue WHERE q.name=? AND t.seq>? ORDER BY t.seq LIMIT 500",
        (queue, after),
    ).fetchall()
    return [
        (seq, experiment, read_task(connection, seq, generation, body)) for seq, generation, experiment, body in rows
    ]


def list_notifying(connection: sqlite3.Connection, experiment: str, after: int) -> list[tuple[int, Task]]:
    """Queued and leased tasks of an experiment that may have sinks, in the order of their numbers."""
    rows = connection.execute(
        "SELECT t.seq, t.generation, t.body FROM (SELECT seq FROM claimable UNION ALL SELECT seq FROM deferred UNION ALL "
        "SELECT seq FROM leases) w JOIN tasks t USING(seq) WHERE t.experiment=(SELECT id FROM experiments WHERE name=?) "
        "AND t.seq>? AND instr(t.body, 'notify') ORDER BY t.seq LIMIT 500",
        (experiment, after),
    ).fetchall()
    return [(seq, read_task(connection, seq, generation, body)) for seq, generation, body in rows]


def follow_record(connection: sqlite3.Connection, seq: int, experiment: int, record: Record) -> None:
    """Take out a task that another store has a record of, unless its next generation was put meanwhile."""
    if is_generation(connection, seq, record.generation) and (was := take_out(connection, seq)):
        count(connection, experiment, **{was.value: -1, record.state.value: 1})


class QueueRow:
    """A queue's row: its number, looked up once, and the flag that pauses it, so that claims read no orders."""

    def __init__(self, name: str, file: EmbeddedFile, records: RecordStore) -> None:
        self._name, self._file, self._records = name, file, records
        self.fused = isinstance(records, SqliteRecords) and records.file is file
        """The records lie in this file."""
        self.known: int | None = None

    def number(self, connection: sqlite3.Connection) -> int:
        if self.known is not None:
            return self.known
        row = connection.execute("SELECT id FROM queues WHERE name=?", (self._name,)).fetchone()
        if row is None:
            # Not kept: a transaction that is rolled back leaves the number to another queue.
            return queue_number(connection, self._name)
        self.known = int(row[0])
        return self.known

    def order(self, decide: Callable[[QueueControl], ControlCommand | None]) -> None:
        """Give a pause or resume order and set the flag; in one transaction if the records lie in this file."""
        records = self._records
        if not (isinstance(records, SqliteRecords) and self.fused):
            order = decide(records.control(self._name))
            if order is not None:
                records.put_order(self._name, order)
            self._follow()
            return
        with self._file.transaction(durable=True) as connection:
            control = records.control(self._name)
            order = decide(control)
            if order is not None:
                control = records.add_order(connection, self._name, order)
            self._set_paused(connection, control.paused)
        records.poll_orders(self._name)

    def catch_up(self) -> None:
        """Follow an order from a command that was killed before it set the flag."""
        if not self.fused and self.is_paused() is not self._records.control(self._name, max_age=SWEPT).paused:
            self._follow()

    def _follow(self) -> None:
        """Set the flag as the store's orders demand. A process that sets it looks once more, so the last one knows all."""
        while self.is_paused() is not (paused := self._records.control(self._name).paused):
            with self._file.transaction(durable=True) as connection:
                self._set_paused(connection, paused)

    def is_paused(self) -> bool:
        with self._file.reading() as connection:
            row = connection.execute("SELECT paused FROM queues WHERE name=?", (self._name,)).fetchone()
        return bool(row and row[0])

    def _set_paused(self, connection: sqlite3.Connection, paused: bool) -> None:
        connection.execute("UPDATE queues SET paused=? WHERE id=?", (paused, self.number(connection)))
