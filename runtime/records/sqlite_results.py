"""How tasks of the embedded file ended: rows of its tables say it, and what did not succeed needs no mark beside them."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from runtime.clock import Clock
from runtime.errors import InvalidTask, NotPossible
from runtime.reasons import EndReason
from runtime.records.blobs.sqlite import SqliteBlobs
from runtime.records.embedded import EmbeddedFile, count, record_id, split_record_id, take_out
from runtime.records.settle import is_unwritten
from runtime.tasks.history import Mark, Record
from runtime.tasks.model import Task, TaskState
from runtime.tasks.wire import decode_stored
from runtime.values import replace

if TYPE_CHECKING:
    pass

from runtime.records.results import BlobResults
from runtime.records.sqlite_rows import insert_record, raw_text, read_records, read_text, read_time

_PURGED: Final = "purged/"

MARKS_AT_ONCE: Final = 500


class SqliteResults(BlobResults):
    """Results in the tables that the queue keeps."""

    def __init__(self, file: EmbeddedFile, blobs: SqliteBlobs, *, clock: Clock | None = None) -> None:
        super().__init__(blobs, clock=clock)
        self.file = file

    def commit(self, record: Record) -> None:
        record = self.fit(record)
        with self.file.transaction(durable=True) as connection:
            row = connection.execute(
                "SELECT seq, experiment, generation FROM tasks WHERE id=?", (record.task_id,)
            ).fetchone()
            if row is None:
                raise NotPossible(f"task `{record.task_id}` was never put into `{self.url}`")
            seq, experiment, generation = row
            if not is_unwritten(record, self.find_in(connection, seq, record.generation)):
                return
            insert_record(connection, seq, record)
            if generation == record.generation:
                was = take_out(connection, seq)
                changes = {record.state.value: 1}
                if was is not None:
                    changes[was.value] = -1
                count(connection, experiment, **changes)

    def find(self, task_id: str, generation: int) -> Record | None:
        with self.file.reading() as connection:
            row = connection.execute("SELECT seq FROM tasks WHERE id=?", (task_id,)).fetchone()
            return None if row is None else self.find_in(connection, row[0], generation)

    def find_all(self, task_id: str) -> list[Record]:
        with self.file.reading() as connection:
            row = connection.execute("SELECT seq FROM tasks WHERE id=?", (task_id,)).fetchone()
            if row is None:
                return []
            return read_records(
                connection, "r.rid BETWEEN ? AND ?", (record_id(row[0], 0), record_id(row[0] + 1, 0) - 1)
            )

    @staticmethod
    def find_in(connection: sqlite3.Connection, seq: int, generation: int) -> Record | None:
        found = read_records(connection, "r.rid=?", (record_id(seq, generation),))
        return found[0] if found else None

    def resolve(self, prefix: str, limit: int = 10) -> list[str]:
        with self.file.reading() as connection:
            rows = connection.execute(
                "SELECT id FROM tasks WHERE id>=? AND id<? ORDER BY id LIMIT ?", (prefix, prefix + "\U0010ffff", limit)
            ).fetchall()
        return [row[0] for row in rows]

    def records(self, experiment: str) -> Iterator[Record]:
        last = -1
        while True:
            with self.file.reading() as connection:
                rows = connection.execute(
                    "SELECT rid FROM records r JOIN tasks t ON t.seq=(r.rid >> 20) JOIN experiments e "
                    "ON e.id=t.experiment WHERE e.name=? AND r.rid>? ORDER BY r.rid LIMIT 1000",
                    (experiment, last),
                ).fetchall()
                if not rows:
                    return
                found = read_records(
                    connection,
                    "r.rid BETWEEN ? AND ? AND e.name=?",
                    (rows[0][0], rows[-1][0], experiment),
                )
            last = rows[-1][0]
            yield from found

    def recorded(self, experiment: str) -> Iterator[tuple[str, int]]:
        return ((record.task_id, record.generation) for record in self.records(experiment))

    def tried_again(self, experiment: str) -> Iterator[tuple[str, int]]:
        """Nothing to find: the next generation is in the file's own queue."""
        return iter(())

    def mark(self, mark: Mark) -> None:
        """The record, in the same transaction, is the mark; only that its dead letter was purged is written down."""
        if mark.task is None and mark.raw is None:
            self.blobs.put(_purged_key(mark.task_id, mark.generation), b"")

    def unmark(self, task_id: str, generation: int, state: TaskState) -> bool:
        """Nothing to remove: a newer generation closes it."""
        return True

    def marks(
        self, experiment: str | None = None, state: TaskState | None = None, *, limit: int | None = None
    ) -> Iterator[Mark]:
        """Newest first."""
        where, values = "", []
        if experiment is not None:
            where += " AND e.name=?"
            values.append(experiment)
        if state is not None:
            where += " AND r.state=?"
            values.append(state.value)
        return self._marks(where, values, limit)

    def find_mark(self, task_id: str, generation: int, state: TaskState) -> Mark | None:
        where = " AND t.id=? AND t.generation=? AND r.state=? AND r.rid=((t.seq << 20) | t.generation)"
        return next(self._marks(where, [task_id, generation, state.value], 1), None)

    def record_url(self, task_id: str, generation: int) -> str:
        """The file that holds them all."""
        return self.url

    def _marks(self, where: str, values: Sequence[object], limit: int | None) -> Iterator[Mark]:
        """A page at a time; what is remembered of all of them is a number each."""
        tables = "records r JOIN tasks t ON t.seq=(r.rid >> 20) JOIN experiments e ON e.id=t.experiment"
        # A task whose next generation was put is in another table now and its mark is closed.
        closed = f"r.state<>'succeeded' AND (r.rid & 1048575)=t.generation{where}"
        with self.file.reading() as connection:
            rows = connection.execute(
                f"SELECT r.rid FROM {tables} WHERE {closed} ORDER BY r.ended DESC LIMIT ?",
                (*values, -1 if limit is None else limit),
            )
            numbers = array("q", (row[0] for row in rows))
        for start in range(0, len(numbers), MARKS_AT_ONCE):
            page = numbers[start : start + MARKS_AT_ONCE]
            with self.file.reading() as connection:
                found = connection.execute(
                    "SELECT r.rid, r.state, r.reason, r.message, r.ended, e.name, t.id, t.body, "
                    f"EXISTS(SELECT 1 FROM objects o WHERE o.key='{_PURGED}' || t.id || '.g' || t.generation) "
                    f"FROM {tables} WHERE {closed} AND r.rid IN ({','.join('?' * len(page))}) ORDER BY r.ended DESC",
                    (*values, *page),
                ).fetchall()
            for row in found:
                yield from self._mark_of(row)

    def _mark_of(self, row: tuple[Any, ...]) -> Iterator[Mark]:
        rid, ended_as, reason, message, ended, name, task_id, body, gone = row
        generation = split_record_id(rid)[1]
        task = self._read_task(task_id, generation, body)
        try:
            yield Mark(
                task_id=task_id,
                generation=generation,
                experiment=name,
                state=TaskState(ended_as),
                marked_at=read_time(ended),
                reason=EndReason(reason),
                message=read_text(message),
                task=None if gone else task,
                raw=raw_text(body) if task is None and not gone else None,
            )
        except (ValueError, TypeError, OverflowError) as problem:
            self._report(f"records/{rid}", f"the record of `{task_id}` cannot be read: {problem}")

    def _read_task(self, task_id: str, generation: int, body: Any) -> Task | None:
        """None for one that cannot be decoded, which is said once."""
        try:
            return replace(decode_stored(body), generation=generation)
        except InvalidTask as problem:
            self._report(f"tasks/{task_id}", f"task `{task_id}` cannot be decoded: `{problem.field}` {problem.problem}")
            return None


def _purged_key(task_id: str, generation: int) -> str:
    """Where it stands that a dead letter was purged."""
    return f"{_PURGED}{task_id}.g{generation}"
