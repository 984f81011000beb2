"""Records in the queue's own SQLite file: settling a task, recording it and claiming the next are one commit.

Orders, payloads and workers' reports are rows of one table, laid out like the files of a folder; records, notes, totals
and submitted tasks come from the tables that the queue keeps anyway. Outputs and long logs are files beside the database.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.clock import Clock, SystemClock
from runtime.end_reasons import EndReason
from runtime.errors import InvalidTask, NotPossible, StoreUnavailable, explain_json
from runtime.records.base import ExperimentSeen, ManifestPart, StoredTask, Totals, is_unwritten
from runtime.records.blobs import BlobInfo
from runtime.records.codec import ENDED, encode_order, encode_text, unreadable_record
from runtime.records.control_commands import ControlCommand, QueueControl, control_of, merge
from runtime.records.layout import order_key
from runtime.records.results import BlobResults
from runtime.records.sidecar_files import check_beside
from runtime.records.sqlite_file import EmbeddedFile, record_id, split_record_id
from runtime.records.store import BlobRecords
from runtime.records.transitions import count, take_out
from runtime.tasks.history import EndedNote, History, Mark, Record, StartedMark
from runtime.tasks.model import TERMINAL_STATES, Task, TaskState, new_token
from runtime.tasks.wire import decode_stored

if TYPE_CHECKING:
    from runtime.records.blobs.folder import FolderBlobs

_COLUMNS: Final = "rid, state, token, reason, worker, started, ended, attempts, message, code, value, log, rest"
_INSERT: Final = f"INSERT INTO records({_COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_REST: Final = ("exit_code", "value_url", "log_url", "outputs_url")
_READ: Final = (*_REST, "metrics", "metric_ranges")
_PURGED: Final = "purged/"
"""Begins the key of the object that marks a dead letter as purged."""
MARKS_AT_ONCE: Final = 500


# rows


def insert_record(connection: sqlite3.Connection, seq: int, record: Record) -> None:
    """Add the record of task number `seq`; the caller knows that there is none yet."""
    started = record.started_at
    rest: dict[str, Any] | None = None
    for name in _REST:
        value = getattr(record, name)
        if value is not None:
            rest = {} if rest is None else rest
            rest[name] = value
    if record.metrics:
        rest = {} if rest is None else rest
        rest["metrics"] = dict(record.metrics)
    if record.metric_ranges:
        rest = {} if rest is None else rest
        rest["metric_ranges"] = {name: list(both) for name, both in record.metric_ranges.items()}
    connection.execute(
        _INSERT,
        (
            record_id(seq, record.generation),
            record.state.value,
            record.token,
            record.reason.value,
            _text(record.worker),
            None if started is None else started.timestamp(),
            record.ended_at.timestamp(),
            record.attempts,
            _text(record.message),
            _text(record.code),
            None if record.value is None else encode_text(record.value),
            _log(record.log) if record.log else None,
            None if rest is None else encode_text(rest, "metrics"),
        ),
    )


def insert_note(connection: sqlite3.Connection, seq: int, generation: int, note: EndedNote) -> None:
    connection.execute(
        "INSERT OR IGNORE INTO notes(token, seq, generation, ended, note) VALUES(?, ?, ?, ?, ?)",
        (note.token, seq, generation, note.ended_at.timestamp(), ENDED.encode(note).decode()),
    )


def find_record(connection: sqlite3.Connection, seq: int, generation: int) -> Record | None:
    found = _read_records(connection, "r.rid=?", (record_id(seq, generation),))
    return found[0] if found else None


def raw_text(body: Any) -> str:
    """A stored text, or any other stored value, for people to read."""
    return body.decode(errors="replace") if isinstance(body, bytes) else str(body)


def _text(text: str | None) -> str | bytes | None:
    """A text as a column holds it: as bytes if it is no UTF-8, which `_read_text` knows by their type."""
    if text is None or text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")
    return text


def _read_text(stored: Any) -> str | None:
    if isinstance(stored, bytes):
        return stored.decode(errors="surrogatepass")
    return None if stored is None else str(stored)


def _log(log: str) -> bytes | str:
    """The bytes that were printed; JSON for a text that no bytes decode to."""
    try:
        return log.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return encode_text(log)


def _read_log(stored: Any) -> str:
    if stored is None:
        return ""
    return stored.decode(errors="surrogateescape") if isinstance(stored, bytes) else str(json.loads(stored))


def _read_records(connection: sqlite3.Connection, where: str, values: Sequence[object]) -> list[Record]:
    rows = connection.execute(
        f"SELECT {_COLUMNS}, t.id, e.name FROM records r JOIN tasks t ON t.seq=(r.rid >> 20) "
        f"JOIN experiments e ON e.id=t.experiment WHERE {where} ORDER BY r.rid",
        values,
    ).fetchall()
    return [_record(row) for row in rows]


def _record(row: tuple[Any, ...]) -> Record:
    rid, state, token, reason, worker, started, ended, *others = row
    attempts, message, code, value, log, rest, task_id, experiment = others
    generation = split_record_id(rid)[1]
    unreadable = None
    try:
        found = None if value is None else json.loads(value)
    except (TypeError, ValueError, RecursionError) as problem:
        found, unreadable = None, f"the value of `{task_id}` cannot be read: {explain_json(problem)}"
    try:
        return Record(
            task_id=task_id,
            generation=generation,
            experiment=experiment,
            state=TaskState(state),
            token=token,
            reason=EndReason(reason),
            worker=_read_text(worker),
            started_at=None if started is None else _read_time(started),
            ended_at=_read_time(ended),
            attempts=int(attempts),
            message=_read_text(message),
            code=_read_text(code),
            value=found,
            log=_read_log(log),
            unreadable=unreadable,
            **({} if rest is None else {name: each for name, each in json.loads(rest).items() if name in _READ}),
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        known = TaskState(state) if state in TERMINAL_STATES else TaskState.FAILED
        why = f"the record of `{task_id}` cannot be read: {explain_json(problem)}"
        return unreadable_record(task_id, generation, experiment, known, why)


def _read_time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


_FILES: Final = ("snapshots/", "artifacts/", "metrics/")
"""Keys of objects that are files beside the database."""


class SqliteBlobs:
    """`Blobs` as rows; snapshots, logs and other files lie beside the database."""

    parallel = 1

    def __init__(self, file: EmbeddedFile, clock: Clock) -> None:
        self.url = f"sqlite:{file.path}"
        self._file = file
        self._clock = clock
        self._folder = file.path.with_name(file.path.name + "-files").absolute()
        self._is_made = False

    def _make_private(self) -> None:
        """Make the folder before an attempt does, which would make it by the umask."""
        if self._file.private and not self._is_made:
            self._is_made = True
            self._files()
            check_beside(str(self._file.path))

    def _files(self) -> FolderBlobs:
        from runtime.records.blobs.folder import FolderBlobs

        try:
            self._folder.mkdir(mode=0o700 if self._file.private else 0o777, parents=True, exist_ok=True)
        except OSError as problem:
            said = (problem.strerror or str(problem)).lower()
            raise StoreUnavailable(f"cannot make `{self._folder}`: {said}") from problem
        return FolderBlobs(self._folder)

    def _beside(self, key: str) -> FolderBlobs | None:
        """The folder for large files: a row of their size would keep every worker waiting while it is written."""
        return self._files() if key.startswith(_FILES) else None

    def create(self, key: str, data: bytes) -> bool:
        if beside := self._beside(key):
            return beside.create(key, data)
        with self._file.transaction(durable=True) as connection:
            row = (key, data, self._clock.now().timestamp())
            return bool(connection.execute("INSERT OR IGNORE INTO objects VALUES(?, ?, ?)", row).rowcount)

    def put(self, key: str, data: bytes) -> None:
        if beside := self._beside(key):
            beside.put(key, data)
            return
        with self._file.transaction() as connection:
            connection.execute("REPLACE INTO objects VALUES(?, ?, ?)", (key, data, self._clock.now().timestamp()))

    def upload(self, key: str, file: Path) -> None:
        if beside := self._beside(key):
            beside.upload(key, file)
        else:
            self.put(key, file.read_bytes())

    def get(self, key: str) -> bytes | None:
        if beside := self._beside(key):
            return beside.get(key)
        with self._file.reading() as connection:
            row = connection.execute("SELECT value FROM objects WHERE key=?", (key,)).fetchone()
        if row is None:
            return None
        return row[0].encode() if isinstance(row[0], str) else bytes(row[0])

    def delete(self, key: str) -> None:
        if beside := self._beside(key):
            beside.delete(key)
            return
        with self._file.transaction() as connection:
            connection.execute("DELETE FROM objects WHERE key=?", (key,))

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        return (info.key for info in self.list_blobs(prefix, after=after))

    def list_blobs(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        if beside := self._beside(prefix):
            return beside.list_blobs(prefix, after=after)
        with self._file.reading() as connection:
            rows = connection.execute(
                "SELECT key, length(CAST(value AS BLOB)), modified FROM objects WHERE key>=? AND key<? AND key>? ORDER BY key",
                (prefix, prefix + "\U0010ffff", after or ""),
            ).fetchall()
        return iter([BlobInfo(key, size, _read_time(modified)) for key, size, modified in rows])

    def append(self, key: str, data: bytes) -> None:
        path = self._folder / key
        try:
            self._make_private()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(data)
        except OSError as problem:
            raise StoreUnavailable(f"cannot write `{path}`: {(problem.strerror or str(problem)).lower()}") from problem

    def stream(self, key: str) -> Iterator[bytes]:
        return self._files().stream(key) if self._folder.is_dir() else iter(())

    def path(self, key: str) -> Path | None:
        """Only files have a path; callers ask for an attempt's folder or log."""
        self._make_private()
        return self._folder / key

    def close(self) -> None:
        self._file.close()


class SqliteResults(BlobResults):
    """Records in the tables that the queue keeps; these also answer for the marks of other stores."""

    def __init__(self, file: EmbeddedFile, *, clock: Clock | None = None) -> None:
        super().__init__(SqliteBlobs(file, clock or SystemClock()), clock=clock)
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
            if not is_unwritten(record, find_record(connection, seq, record.generation)):
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
            return None if row is None else find_record(connection, row[0], generation)

    def find_all(self, task_id: str) -> list[Record]:
        with self.file.reading() as connection:
            row = connection.execute("SELECT seq FROM tasks WHERE id=?", (task_id,)).fetchone()
            if row is None:
                return []
            first, last = record_id(row[0], 0), record_id(row[0] + 1, 0) - 1
            return _read_records(connection, "r.rid BETWEEN ? AND ?", (first, last))

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
                page = (rows[0][0], rows[-1][0], experiment)
                found = _read_records(connection, "r.rid BETWEEN ? AND ? AND e.name=?", page)
            last = rows[-1][0]
            yield from found

    def recorded(self, experiment: str) -> Iterator[tuple[str, int]]:
        return ((record.task_id, record.generation) for record in self.records(experiment))

    def tried_again(self, experiment: str) -> Iterator[tuple[str, int]]:
        """Nothing to find: the next generation is in the file's own queue."""
        return iter(())

    def mark(self, mark: Mark) -> None:
        """Note a purged dead letter, and nothing else: the record, in the same transaction, is the mark."""
        if mark.task is None and mark.raw is None:
            self.blobs.put(f"{_PURGED}{mark.task_id}.g{mark.generation}", b"")

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
        """Read a page at a time; between pages only a number of each is kept."""
        tables = "records r JOIN tasks t ON t.seq=(r.rid >> 20) JOIN experiments e ON e.id=t.experiment"
        # A task with a next generation is in another table now and its mark is closed.
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
                marked_at=_read_time(ended),
                reason=EndReason(reason),
                message=_read_text(message),
                task=None if gone else task,
                raw=raw_text(body) if task is None and not gone else None,
            )
        except (ValueError, TypeError, OverflowError) as problem:
            self._report(f"records/{rid}", f"the record of `{task_id}` cannot be read: {problem}")

    def _read_task(self, task_id: str, generation: int, body: Any) -> Task | None:
        """The task of a row; None if it cannot be decoded, which is reported once."""
        try:
            return replace(decode_stored(body), generation=generation)
        except InvalidTask as problem:
            self._report(f"tasks/{task_id}", f"task `{task_id}` cannot be decoded: `{problem.field}` {problem.problem}")
            return None


class SqliteRecords(SqliteResults, BlobRecords):
    """`RecordStore` in an embedded file."""

    holds_tasks = True

    def check(self) -> None:
        """Open the file; the primary key makes writes create-only."""
        with self.file.reading() as connection:
            connection.execute("SELECT count(*) FROM queues").fetchone()

    def record_started(self, task: Task, started: StartedMark) -> None:
        """Nothing to write: the lease is the mark."""

    def retract_started(self, task: Task, token: str) -> None:
        """Nothing was written."""

    def record_proven(self, task: Task, token: str) -> None:
        """Nothing to write: the worker's file says it."""

    def record_ended(self, task: Task, note: EndedNote) -> None:
        with self.file.transaction(durable=True) as connection:
            row = connection.execute("SELECT seq FROM tasks WHERE id=?", (task.id,)).fetchone()
            if row is not None:
                insert_note(connection, row[0], task.generation, note)

    def history(self, task_id: str, generation: int) -> History:
        with self.file.reading() as connection:
            ended = connection.execute(
                "SELECT n.token, n.note FROM notes n JOIN tasks t USING(seq) WHERE t.id=? AND n.generation=? ORDER BY n.ended",
                (task_id, generation),
            ).fetchall()
            held = connection.execute(
                "SELECT l.token, h.worker, l.leased FROM leases l JOIN tasks t USING(seq) JOIN holders h "
                "ON h.id=l.holder WHERE t.id=? AND t.generation=?",
                (task_id, generation),
            ).fetchall()
        notes: list[EndedNote] = []
        for token, note in ended:
            data = note if isinstance(note, bytes) else note.encode()
            notes += self._decoded(f"notes/{token}", data, ENDED.decode)
        return History(
            tuple(notes),
            tuple(StartedMark(token, worker, _read_time(leased), alone=False) for token, worker, leased in held),
        )

    def put_experiment(self, experiment: str, *, queue: str | None) -> str | None:
        """Nothing to write: its first task makes it."""
        return queue

    def experiments(self) -> list[ExperimentSeen]:
        with self.file.reading() as connection:
            rows = connection.execute(
                "SELECT e.name, e.created, q.name FROM experiments e JOIN queues q ON q.id=e.queue ORDER BY e.created"
            ).fetchall()
        return [ExperimentSeen(name, _read_time(created), queue) for name, created, queue in rows]

    def find_experiment(self, experiment: str) -> ExperimentSeen | None:
        with self.file.reading() as connection:
            row = connection.execute(
                "SELECT e.created, q.name FROM experiments e JOIN queues q ON q.id=e.queue WHERE e.name=?",
                (experiment,),
            ).fetchone()
        return None if row is None else ExperimentSeen(experiment, _read_time(row[0]), row[1])

    def put_part(self, experiment: str, index: int, lines: Sequence[str], *, queue: str | None = None) -> ManifestPart:
        raise NotPossible("the embedded file keeps no manifest: what is put there is listed there")

    def parts(self, experiment: str) -> list[ManifestPart]:
        return []

    def totals(self, experiment: str, *, exact: bool = False) -> Totals:
        """Always exact: the counters change in the transaction that moves a task."""
        with self.file.reading() as connection:
            row = connection.execute(
                "SELECT queued, leased, succeeded, failed, cancelled, expired FROM experiments WHERE name=?",
                (experiment,),
            ).fetchone()
        counts = dict(zip(TaskState, row or (0,) * len(TaskState), strict=True))
        return Totals(counts, self._clock.now(), exact=True)

    def add_order(self, connection: sqlite3.Connection, queue: str, order: ControlCommand) -> QueueControl:
        """Like `put_order`, in the caller's transaction; returns the queue's orders with this one."""
        identity, now = new_token(), self._clock.now()
        row = (order_key(queue, f"{identity}.json"), encode_order(order), now.timestamp())
        connection.execute("INSERT INTO objects VALUES(?, ?, ?)", row)
        return merge([self.control(queue), control_of(identity, order, now)])

    def skew(self) -> None:
        """The file lies on this machine."""

    def put_counters(self, worker: str, counters: Mapping[str, Mapping[TaskState, int]]) -> None:
        """Nothing to write: totals are exact."""

    def find_task(self, task_id: str) -> StoredTask | None:
        """A task as it stands now; None if it was never put."""
        with self.file.reading() as connection:
            row = connection.execute(
                "SELECT t.seq, t.generation, t.body, e.name, q.name FROM tasks t "
                "JOIN experiments e ON e.id=t.experiment JOIN queues q ON q.id=t.queue WHERE t.id=?",
                (task_id,),
            ).fetchone()
            if row is None:
                return None
            seq, generation, body, experiment, queue = row
            leased = connection.execute("SELECT 1 FROM leases WHERE seq=?", (seq,)).fetchone()
            record = None if leased else find_record(connection, seq, generation)
        state = TaskState.LEASED if leased else TaskState.QUEUED if record is None else record.state
        return StoredTask(self._read_task(task_id, generation, body), generation, state, experiment, queue)

    def list_tasks(self, experiment: str) -> Iterator[tuple[str, StoredTask]]:
        """Yield every task of an experiment as it stands, with its id, in the order of submission."""
        last = -1
        while True:
            with self.file.reading() as connection:
                rows = connection.execute(
                    "SELECT t.seq, t.id, t.generation, t.body, l.seq IS NOT NULL, r.state, q.name FROM tasks t "
                    "JOIN experiments e ON e.id=t.experiment JOIN queues q ON q.id=t.queue LEFT JOIN leases l ON l.seq=t.seq "
                    "LEFT JOIN records r ON r.rid=(t.seq << 20 | t.generation) "
                    "WHERE e.name=? AND t.seq>? ORDER BY t.seq LIMIT 1000",
                    (experiment, last),
                ).fetchall()
            if not rows:
                return
            for last, task_id, generation, body, leased, ended, queue in rows:  # noqa: B007 (`last` begins the next page)
                state = TaskState.LEASED if leased else TaskState(ended or TaskState.QUEUED)
                task = self._read_task(task_id, generation, body)
                yield task_id, StoredTask(task, generation, state, experiment, queue)

    def close(self) -> None:
        self.file.close()
