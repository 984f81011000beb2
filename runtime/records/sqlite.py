"""Records in the queue's own SQLite file: settling a task, recording it and claiming the next are one commit.

Orders, payloads and what workers report are rows of one table, laid out like the files of a folder; records, notes,
totals and what was submitted come from the tables that the queue keeps anyway. Outputs and long logs are files
beside the database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from runtime.clock import Clock, SystemClock
from runtime.errors import NotPossible
from runtime.records.base import ExperimentSeen, ManifestPart, StoredTask, Totals
from runtime.records.codec import decode_ended, encode_order
from runtime.records.embedded import EmbeddedFile
from runtime.records.layout import order_key
from runtime.records.orders import Control, Order, control_of, merge
from runtime.records.store import BlobRecords
from runtime.tasks.history import EndedNote, History, StartedMark
from runtime.tasks.model import Task, TaskState, new_token

if TYPE_CHECKING:
    pass

from runtime.records.blobs.sqlite import SqliteBlobs
from runtime.records.sqlite_results import SqliteResults
from runtime.records.sqlite_rows import encode_note, read_time


class SqliteRecords(SqliteResults, BlobRecords):
    """`RecordStore` in an embedded file."""

    holds_tasks = True

    def __init__(self, file: EmbeddedFile, *, clock: Clock | None = None) -> None:
        blobs = SqliteBlobs(file, clock or SystemClock())
        super().__init__(file, blobs, clock=clock)
        self._outputs, self._checkpoints = str(blobs.path("outputs")), str(blobs.path("checkpoints"))

    def check(self) -> None:
        """That the file can be opened; create-only is the primary key's."""
        with self.file.reading() as connection:
            connection.execute("SELECT count(*) FROM queues").fetchone()

    def note_started(self, task: Task, started: StartedMark) -> None:
        """Nothing to write: the lease says it."""

    def retract_started(self, task: Task, token: str) -> None:
        """Nothing was written."""

    def note_ended(self, task: Task, note: EndedNote) -> None:
        with self.file.transaction(durable=True) as connection:
            connection.execute(
                "INSERT OR IGNORE INTO notes(token, seq, generation, ended, note) "
                "SELECT ?, seq, ?, ?, ? FROM tasks WHERE id=?",
                (note.token, task.generation, note.ended_at.timestamp(), encode_note(note), task.id),
            )

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
            notes += self._decoded(f"notes/{token}", data, decode_ended)
        return History(
            tuple(notes),
            tuple(StartedMark(token, worker, read_time(leased), alone=False) for token, worker, leased in held),
        )

    def put_experiment(self, experiment: str, *, queue: str | None) -> None:
        """Comes into being with its first task."""

    def experiments(self) -> list[ExperimentSeen]:
        with self.file.reading() as connection:
            rows = connection.execute(
                "SELECT e.name, e.created, q.name FROM experiments e JOIN queues q ON q.id=e.queue ORDER BY e.created"
            ).fetchall()
        return [ExperimentSeen(name, read_time(created), queue) for name, created, queue in rows]

    def find_experiment(self, experiment: str) -> ExperimentSeen | None:
        with self.file.reading() as connection:
            row = connection.execute(
                "SELECT e.created, q.name FROM experiments e JOIN queues q ON q.id=e.queue WHERE e.name=?",
                (experiment,),
            ).fetchone()
        return None if row is None else ExperimentSeen(experiment, read_time(row[0]), row[1])

    def put_part(self, experiment: str, index: int, lines: Sequence[str]) -> ManifestPart:
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

    def add_order(self, connection: sqlite3.Connection, queue: str, order: Order) -> Control:
        """As `put_order`, in the caller's transaction; returns what the queue's workers are told with it."""
        identity, now = new_token(), self._clock.now()
        connection.execute(
            "INSERT INTO objects VALUES(?, ?, ?)",
            (order_key(queue, f"{identity}.json"), encode_order(order), now.timestamp()),
        )
        return merge([self.control(queue), control_of(identity, order, now)])

    def skew(self) -> None:
        """The file lies on this machine."""

    def put_counters(self, worker: str, counters: Mapping[str, Mapping[TaskState, int]]) -> None:
        """Nothing to write: totals are exact."""

    def outputs_url(self, task_id: str, token: str) -> str:
        return f"{self._outputs}/{task_id}/{token}"

    def checkpoints_path(self, task_id: str) -> str:
        return f"{self._checkpoints}/{task_id}"

    def find_task(self, task_id: str) -> StoredTask | None:
        """A task as it stands now; None if it was never put."""
        with self.file.reading() as connection:
            row = connection.execute(
                "SELECT t.seq, t.generation, t.body, e.name FROM tasks t JOIN experiments e ON e.id=t.experiment "
                "WHERE t.id=?",
                (task_id,),
            ).fetchone()
            if row is None:
                return None
            seq, generation, body, experiment = row
            leased = connection.execute("SELECT 1 FROM leases WHERE seq=?", (seq,)).fetchone()
            record = None if leased else self.find_in(connection, seq, generation)
        state = TaskState.LEASED if leased else TaskState.QUEUED if record is None else record.state
        return StoredTask(self._read_task(task_id, generation, body), generation, state, experiment)

    def close(self) -> None:
        self.file.close()
