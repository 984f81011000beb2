"""The embedded queue: many processes of one host on one SQLite file, fair, and quick to notice a dead worker.

A worker that holds leases keeps a file beside the database locked for as long as it, or the guardian that ends its
attempts, lives. Whoever finds that lock free, or the holder's deadline in boot time passed, or another boot, gives
the leases back. Which of them had really begun stands in the same file, in memory that outlives a killed process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from runtime import faults
from runtime.clock import Clock, SystemClock, boot_id, machine_id
from runtime.errors import InvalidTask
from runtime.queues.base import (
    DEFAULT_LEASE,
    DEFAULT_QUEUE,
    Depth,
    Outlook,
    PutResult,
    QueueTraits,
    Refused,
    Settled,
    Waiting,
    ignore_progress,
)
from runtime.queues.settling import record_settlement, refuse_lost
from runtime.queues.sqlite.presence import Bells, Presence, Running, Vigil
from runtime.reasons import EndReason
from runtime.records.base import RecordExists, RecordStore
from runtime.records.embedded import (
    Durability,
    EmbeddedFile,
    count,
    experiment_number,
    queue_number,
    record_id,
    take_out,
)
from runtime.records.orders import Control, Order, pause_order, person, resume_order
from runtime.records.settle import is_unwritten
from runtime.records.sqlite import SqliteRecords
from runtime.records.sqlite_rows import encode_note, insert_record, raw_text
from runtime.tasks.history import EndedNote, Record
from runtime.tasks.lease import InvalidMessage, Lease, Release, Settlement
from runtime.tasks.model import Task, TaskState, new_tokens
from runtime.tasks.wire import decode_stored, encode_task, stand_in
from runtime.values import replace

_SUSPECT, _ALONE = 1, 2

_ADD = "INSERT OR IGNORE INTO tasks(id, experiment, generation, queue, rank, due, body) VALUES(?, ?, ?, ?, ?, ?, ?)"
# One statement that puts one task, and so a transaction of its own. Both belong to a connection and are in no file.
_PUT_VIEW = (
    "CREATE TEMP VIEW IF NOT EXISTS put_one AS SELECT id, experiment, queue, rank, body FROM tasks",
    """CREATE TEMP TRIGGER IF NOT EXISTS put_one_everywhere INSTEAD OF INSERT ON put_one BEGIN
    INSERT INTO tasks(id, experiment, generation, queue, rank, body)
      VALUES(new.id, new.experiment, 1, new.queue, new.rank, new.body);
    INSERT INTO ready VALUES(new.queue, new.rank, last_insert_rowid(), 0, 0);
    UPDATE experiments SET queued=queued+1 WHERE id=new.experiment; END""",
)
_PUT_ONE = "INSERT INTO put_one VALUES(?, ?, ?, ?, ?)"
_NEXT = (
    "SELECT r.rank, r.seq, r.tries, r.flags, t.experiment, t.generation, t.body FROM queues q "
    "JOIN ready r ON r.queue=q.id JOIN tasks t USING(seq) "
    "WHERE q.id=? AND NOT q.paused ORDER BY r.rank, r.seq LIMIT ?"
)
_TAKE = "DELETE FROM ready WHERE queue=? AND rank=? AND seq=?"
_HOLD = "INSERT INTO leases(seq, holder, token, tries, flags, leased) VALUES(?, ?, ?, ?, ?, ?)"
_END = "DELETE FROM leases WHERE seq=? AND token=?"


_NEW, _KNOWN = PutResult(1, 0, frozenset()), PutResult(0, 1, frozenset())


class _Held(NamedTuple):
    """What a lease's `handle` is here."""

    seq: int
    experiment: int


class SqliteQueue:
    """One named queue of an embedded file; `Queue`."""

    traits = QueueTraits(kind="sqlite", tracks_holders=True, remote=False, priorities=True, knows_depth=True)

    def __init__(
        self,
        file: EmbeddedFile,
        records: RecordStore,
        *,
        name: str = DEFAULT_QUEUE,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.records = records
        self._file = file
        self._clock: Clock = clock or SystemClock()
        self._boot = boot_id()
        self._fused = isinstance(records, SqliteRecords) and records.file is file
        self._number: int | None = None
        self._rung = False
        self._experiments: dict[str, int] = {}
        self._has_view = False
        self._bells = Bells(file.workers_folder)
        self._presence: Presence | None = None
        self._vigil: Vigil | None = None
        self._sweep_at = 0.0
        self._holder: int | None = None
        self._tokens = new_tokens()
        self._look_for_due_at = 0.0
        self._lease_s = DEFAULT_LEASE.total_seconds()

    # put

    def put(self, tasks: Sequence[Task]) -> PutResult:
        if not tasks:
            return PutResult(0, 0)
        if len(tasks) == 1 and (result := self._put_plain(tasks[0])) is not None:
            return result
        now = self._clock.now().timestamp()
        found: dict[str, int] = {}
        with self._file.transaction(durable=True) as connection:
            queue = self._queue(connection)
            rows, later = [], []
            for task in tasks:
                name = task.experiment
                experiment = self._experiments.get(name) or found.get(name)
                if experiment is None:
                    experiment = found[name] = experiment_number(connection, name, queue, now)
                if task.generation > 1:
                    later.append((task, experiment))
                    continue
                due = task.not_before.timestamp() if task.not_before else None
                rows.append((task.id, experiment, 1, queue, -task.priority, due, encode_task(task)))
            new = self._add(connection, rows, now) if rows else 0
            before = set()
            for task, experiment in later:
                if self._begin_generation(connection, task, experiment, queue, now):
                    new += 1
                else:
                    before.add(task.id)
        # Kept only now: a transaction that is rolled back takes the rows it numbered with it.
        self._experiments |= found
        if new:
            self._bells.ring()
        return PutResult(new, len(tasks) - new, frozenset(before))

    def _put_plain(self, task: Task) -> PutResult | None:
        """Put what most calls of a program put, at half the cost; None if it is not that."""
        experiment, queue = self._experiments.get(task.experiment), self._number
        if (
            experiment is None
            or queue is None
            or task.generation > 1
            or task.not_before
            or self._file.durability != "full"
        ):
            return None
        if not self._has_view:
            self._file.add_temporary(_PUT_VIEW)
            self._has_view = True
        row = (task.id, experiment, queue, -task.priority, encode_task(task))
        try:
            self._file.execute(_PUT_ONE, row)
        except sqlite3.IntegrityError as problem:
            if problem.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_UNIQUE:
                raise
            return _KNOWN
        self._bells.ring()
        return _NEW

    def _add(self, connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]], now: float) -> int:
        last = connection.execute("SELECT coalesce(max(seq), 0) FROM tasks").fetchone()[0]
        new = connection.executemany(_ADD, rows).rowcount
        added: Iterable[tuple[int, int]] = [(rows[0][1], new)]
        if len({row[1] for row in rows}) > 1:
            added = connection.execute(
                "SELECT experiment, count(*) FROM tasks WHERE seq>? GROUP BY experiment", (last,)
            ).fetchall()
        for experiment, tasks in added:
            count(connection, experiment, queued=tasks)
        if {row[5] for row in rows} != {None}:
            connection.execute(
                "INSERT INTO delayed SELECT due, seq, 0, 0 FROM tasks WHERE seq>? AND due>?", (last, now)
            )
        connection.execute(
            "INSERT INTO ready SELECT queue, rank, seq, 0, 0 FROM tasks WHERE seq>? AND (due IS NULL OR due<=?)",
            (last, now),
        )
        return new

    def _begin_generation(
        self, connection: sqlite3.Connection, task: Task, experiment: int, queue: int, now: float
    ) -> bool:
        """Put a later life of a task that may be known; False if that generation is known too."""
        row = connection.execute("SELECT seq, generation FROM tasks WHERE id=?", (task.id,)).fetchone()
        due = task.not_before.timestamp() if task.not_before else None
        values = (experiment, task.generation, queue, -task.priority, due, encode_task(task))
        if row is None:
            seq = connection.execute(
                "INSERT INTO tasks(id, experiment, generation, queue, rank, due, body) VALUES(?, ?, ?, ?, ?, ?, ?) "
                "RETURNING seq",
                (task.id, *values),
            ).fetchone()[0]
        else:
            seq, known = row
            if known >= task.generation:
                return False
            if take_out(connection, seq) is None:
                state = connection.execute("SELECT state FROM records WHERE rid=?", (record_id(seq, known),)).fetchone()
                if state is not None:
                    count(connection, experiment, **{state[0]: -1})
            else:
                count(connection, experiment, queued=-1)
            connection.execute(
                "UPDATE tasks SET experiment=?, generation=?, queue=?, rank=?, due=?, body=? WHERE seq=?",
                (*values, seq),
            )
        self._requeue(connection, seq, queue, -task.priority, due, now, tries=0, flags=0)
        count(connection, experiment, queued=1)
        return True

    def _requeue(
        self,
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
            connection.execute("INSERT INTO delayed VALUES(?, ?, ?, ?)", (due, seq, tries, flags))
        else:
            connection.execute("INSERT INTO ready VALUES(?, ?, ?, ?, ?)", (queue, rank, seq, tries, flags))

    # lease, renew, settle, release

    def join(self, worker: str) -> tuple[int, ...]:
        """Begin to hold leases as `worker`; returns the descriptors that say that it lives.

        The guardian inherits them, so that they outlive the worker until its attempts are gone.
        """
        if self._presence is None:
            self._presence = Presence.enter(self._file.workers_folder, worker)
            self._vigil = Vigil(self._file.workers_folder, self._presence)
        return self._presence.lock_fd, self._presence.life_fd

    def mark_running(self, tokens: Sequence[str], apart: str | None = None) -> None:
        """Say which attempts run now; costs a write to memory."""
        if self._presence is not None:
            self._presence.mark(tokens, apart)

    def lease(self, n: int, *, worker: str, ttl: timedelta) -> list[Lease]:
        self.join(worker)
        self._lease_s = ttl.total_seconds()
        # A look by itself keeps an idle worker from the lock; rung for, there mostly is something, and it would cost as
        # much as the claim.
        if not self._rung or self._number is None:
            with self._file.reading() as connection:
                if not self._any_ready(connection):
                    self._file.expect(durable=False)
                    return []
        self._rung = False
        self._look_for_due_at = 0.0
        # Without an fsync: a power cut ends every lease anyway, and the tasks are where they were.
        with self._file.transaction(durable=False) as connection:
            if not self._is_holding(connection, worker, ttl):
                if not self._any_ready(connection):
                    return []
                self._hold(connection, worker, ttl)
            changes: dict[int, dict[str, int]] = {}
            leases = self._claim(connection, n, changes)
            for experiment, change in changes.items():
                count(connection, experiment, **change)
            return leases

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease]:
        if not leases or self._presence is None:
            return []
        with self._file.transaction(durable=False) as connection:
            holder = self._hold(connection, self._presence.worker, ttl)
            held = {
                row[0] for row in connection.execute("SELECT token FROM leases WHERE holder=?", (holder,)).fetchall()
            }
        return [lease for lease in leases if lease.token not in held]

    def settle(self, settlements: Sequence[Settlement], *, claim_next: int = 0) -> Settled:
        settled = Settled()
        if self._fused:
            recorded: Sequence[Settlement] = [self._fit(settlement) for settlement in settlements]
        else:
            recorded = self._record_elsewhere(settlements, settled)
        with self._file.transaction() as connection:
            changes: dict[int, dict[str, int]] = {}
            for settlement in recorded:
                self._settle_one(connection, settlement, changes, settled)
            if claim_next and self._holder is not None:
                settled.leases = self._claim(connection, claim_next, changes)
            for experiment, change in changes.items():
                count(connection, experiment, **change)
            faults.reach("queue.mid_commit")
        return settled

    def _fit(self, settlement: Settlement) -> Settlement:
        """With a large value beside the record; numbers and short answers are passed on as they are."""
        record = settlement.record
        if not isinstance(record.value, str | list | dict) or not isinstance(self.records, SqliteRecords):
            return settlement
        fitted = self.records.fit(record)
        return settlement if fitted is record else replace(settlement, record=fitted)

    def _record_elsewhere(self, settlements: Sequence[Settlement], settled: Settled) -> list[Settlement]:
        """Mark and commit in the store first; what came second is refused and its lease left alone."""
        won = []
        for settlement in settlements:
            lease = settlement.lease
            if settlement.record.state is not TaskState.SUCCEEDED and not self._holds(lease):
                refused = refuse_lost(self.records, settlement, lambda lease=lease: self._holder_now(lease))  # type: ignore[misc]
            else:
                refused = record_settlement(self.records, settlement)
                stands = settlement.record if refused is None or refused.record is None else refused.record
                won.append(replace(settlement, record=stands, mark=None))
            if refused is not None:
                settled.refused.append(refused)
        return won

    def _settle_one(
        self,
        connection: sqlite3.Connection,
        settlement: Settlement,
        changes: dict[int, dict[str, int]],
        settled: Settled,
    ) -> None:
        lease, record = settlement.lease, settlement.record
        held: _Held = lease.handle
        was = "leased"
        if not connection.execute(_END, (held.seq, lease.token)).rowcount:
            # Lost. A success may still be the first record; anything else has no say any more.
            holder = self._holder_of(connection, held.seq)
            if self._fused:
                existing = SqliteRecords.find_in(connection, held.seq, record.generation)
                try:
                    if not is_unwritten(record, existing):
                        return
                except RecordExists as first:
                    settled.refused.append(Refused(lease, first.record.worker, first.record))
                    return
                if record.state is not TaskState.SUCCEEDED:
                    settled.refused.append(Refused(lease, holder))
                    return
            if not self._still(connection, held.seq, record.generation):
                settled.refused.append(Refused(lease, holder))
                return
            state = take_out(connection, held.seq)
            if state is None:
                return
            was = state.value
        if self._fused:
            insert_record(connection, held.seq, record)
        change = changes.get(held.experiment)
        if change is None:
            change = changes[held.experiment] = {}
        change[was] = change.get(was, 0) - 1
        change[record.state.value] = change.get(record.state.value, 0) + 1

    def _holds(self, lease: Lease) -> bool:
        with self._file.reading() as connection:
            return bool(
                connection.execute(
                    "SELECT 1 FROM leases WHERE seq=? AND token=?", (lease.handle.seq, lease.token)
                ).fetchone()
            )

    def _holder_now(self, lease: Lease) -> str | None:
        with self._file.reading() as connection:
            return self._holder_of(connection, lease.handle.seq)

    def _still(self, connection: sqlite3.Connection, seq: int, generation: int) -> bool:
        row = connection.execute("SELECT generation FROM tasks WHERE seq=?", (seq,)).fetchone()
        return row is not None and row[0] == generation

    def _holder_of(self, connection: sqlite3.Connection, seq: int) -> str | None:
        row = connection.execute(
            "SELECT h.worker FROM leases l JOIN holders h ON h.id=l.holder WHERE l.seq=?", (seq,)
        ).fetchone()
        return row[0] if row else None

    def release(self, releases: Sequence[Release]) -> None:
        if not releases:
            return
        if not self._fused:
            for release in releases:
                if release.note is not None:
                    self.records.note_ended(release.lease.task, release.note)
        now = self._clock.now().timestamp()
        with self._file.transaction() as connection:
            for release in releases:
                self._release_one(connection, release, now)
        self._bells.ring()

    def _release_one(self, connection: sqlite3.Connection, release: Release, now: float) -> None:
        lease = release.lease
        held: _Held = lease.handle
        if not connection.execute(_END, (held.seq, lease.token)).rowcount:
            return
        if release.note is not None and self._fused:
            _insert_note(connection, held.seq, lease.task.generation, release.note)
        queue, rank = connection.execute("SELECT queue, rank FROM tasks WHERE seq=?", (held.seq,)).fetchone()
        due = release.not_before.timestamp() if release.not_before else None
        flags = (_ALONE if release.alone else 0) | (_SUSPECT if release.note or lease.suspect else 0)
        tries = lease.tries + (release.note is not None)
        self._requeue(connection, held.seq, queue, rank, due, now, tries=tries, flags=flags)
        count(connection, held.experiment, leased=-1, queued=1)

    def _is_holding(self, connection: sqlite3.Connection, worker: str, ttl: timedelta) -> bool:
        """Whether this worker's row is there, with a deadline that has only just been moved on."""
        if self._holder is None:
            return False
        row = connection.execute(
            "SELECT deadline FROM holders WHERE id=? AND worker=? AND boot=?", (self._holder, worker, self._boot)
        ).fetchone()
        return row is not None and row[0] >= self._clock.boottime() + JUST_NOW * ttl.total_seconds()

    def _hold(self, connection: sqlite3.Connection, worker: str, ttl: timedelta) -> int:
        """This worker's row, its deadline moved on."""
        deadline = self._clock.boottime() + ttl.total_seconds()
        if self._holder is not None:
            updated = connection.execute(
                "UPDATE holders SET deadline=?, boot=? WHERE id=? AND worker=?",
                (deadline, self._boot, self._holder, worker),
            ).rowcount
            if updated:
                return self._holder
        self._holder = int(
            connection.execute(
                "INSERT INTO holders(worker, boot, deadline) VALUES(?, ?, ?) "
                "ON CONFLICT(worker) DO UPDATE SET boot=excluded.boot, deadline=excluded.deadline RETURNING id",
                (worker, self._boot, deadline),
            ).fetchone()[0]
        )
        return self._holder

    def _any_ready(self, connection: sqlite3.Connection) -> bool:
        row = connection.execute(
            "SELECT EXISTS(SELECT 1 FROM ready r WHERE r.queue=q.id), q.paused, "
            "(SELECT min(due) FROM delayed) FROM queues q WHERE q.name=?",
            (self.name,),
        ).fetchone()
        if row is None or row[1]:
            return False
        return bool(row[0]) or (row[2] is not None and row[2] <= self._clock.now().timestamp())

    def _claim(self, connection: sqlite3.Connection, n: int, changes: dict[int, dict[str, int]]) -> list[Lease]:
        """Lease what comes next; what that does to the counters is added to `changes`."""
        queue = self._queue(connection)
        now = self._clock.now().timestamp()
        if now >= self._look_for_due_at:
            self._look_for_due_at = now + LOOK_FOR_DUE_S
            self._bring_up(connection, now)
        leases: list[Lease] = []
        taken, holds = [], []
        for rank, seq, tries, flags, experiment, generation, body in connection.execute(_NEXT, (queue, n)).fetchall():
            token = next(self._tokens)
            invalid = None
            try:
                task = decode_stored(body)
                if task.generation != generation:
                    task = replace(task, generation=generation)
            except InvalidTask as problem:
                task, invalid = self._malformed(connection, seq, body, problem)
            held = _Held(seq, experiment)
            text = body if isinstance(body, str) else ""
            leases.append(Lease(task, token, text, tries, bool(flags & _SUSPECT), bool(flags & _ALONE), invalid, held))
            taken.append((queue, rank, seq))
            holds.append((seq, self._holder, token, tries, flags, now))
            change = changes.get(experiment)
            if change is None:
                change = changes[experiment] = {}
            change["queued"] = change.get("queued", 0) - 1
            change["leased"] = change.get("leased", 0) + 1
        if leases:
            connection.executemany(_TAKE, taken)
            connection.executemany(_HOLD, holds)
        return leases

    def _malformed(
        self, connection: sqlite3.Connection, seq: int, body: Any, problem: InvalidTask
    ) -> tuple[Task, InvalidMessage]:
        """What stands for a row that cannot be decoded: written by hand, by another release, or damaged."""
        identity, generation, experiment = connection.execute(
            "SELECT t.id, t.generation, e.name FROM tasks t LEFT JOIN experiments e ON e.id=t.experiment WHERE t.seq=?",
            (seq,),
        ).fetchone()
        task = stand_in(identity, experiment, generation=generation)
        return task, InvalidMessage(task.id, raw_text(body), problem.message)

    def _bring_up(self, connection: sqlite3.Connection, now: float) -> None:
        """Delayed tasks that are due become claimable."""
        due = connection.execute(
            "SELECT d.due, d.seq, d.tries, d.flags, t.queue, t.rank FROM delayed d JOIN tasks t USING(seq) "
            "WHERE d.due<=? LIMIT 1000",
            (now,),
        ).fetchall()
        if due:
            connection.executemany("DELETE FROM delayed WHERE due=? AND seq=?", [row[:2] for row in due])
            connection.executemany(
                "INSERT INTO ready VALUES(?, ?, ?, ?, ?)",
                [(queue, rank, seq, tries, flags) for _, seq, tries, flags, queue, rank in due],
            )

    # upkeep

    def tend(self) -> None:
        """Give back what dead workers held."""
        with self._file.reading() as connection:
            holders = connection.execute(
                "SELECT DISTINCT h.id, h.worker, h.boot, h.deadline FROM leases l JOIN holders h ON h.id=l.holder"
            ).fetchall()
        ours = None if self._presence is None else self._presence.worker
        others = [row for row in holders if row[1] != ours]
        dead = {
            worker: self._running_of(worker)
            for _, worker, boot, deadline in others
            if self._dead(worker, boot, deadline)
        }
        # Workers that ran something and went together went with their machine, or with what holds them all.
        together = sum(bool(running.tokens) for running in dead.values()) > 1
        for holder, worker, _, _ in others:
            if worker in dead:
                self._give_back(holder, worker, dead[worker], together=together)
        alive = [row[1] for row in others if row[1] not in dead]
        if self._vigil is not None:
            self._vigil.watch(alive)
        if self._clock.boottime() >= self._sweep_at:
            self._sweep_at = self._clock.boottime() + SWEEP_EVERY_S
            Presence.sweep(self._file.workers_folder, keep={row[1] for row in holders})
            if not self._fused and self._is_paused() is not self.records.control(self.name, max_age=_SWEPT).paused:
                # Whoever gave the last order was killed before it was written down here.
                self._follow_orders()

    def _dead(self, worker: str, boot: str, deadline: float) -> bool:
        return (
            boot != self._boot
            or self._clock.boottime() > deadline
            or not Presence.alive(self._file.workers_folder, worker)
        )

    def _running_of(self, worker: str) -> Running:
        return Presence.running(self._file.workers_folder, worker)

    def _give_back(self, holder: int, worker: str, running: Running, *, together: bool) -> None:
        now = self._clock.now()
        orphans: list[tuple[Task, EndedNote]] = []
        with self._file.transaction() as connection:
            row = connection.execute("SELECT boot, deadline FROM holders WHERE id=?", (holder,)).fetchone()
            if row is None or not self._dead(worker, *row):
                return  # It renewed in between.
            rows = connection.execute(
                "DELETE FROM leases WHERE holder=? RETURNING seq, token, tries, flags, leased", (holder,)
            ).fetchall()
            for seq, token, tries, flags, leased in rows:
                queue, rank, experiment, generation, body = connection.execute(
                    "SELECT queue, rank, experiment, generation, body FROM tasks WHERE seq=?", (seq,)
                ).fetchone()
                if token in running.tokens:
                    note = EndedNote(
                        token=token,
                        reason=EndReason.LOST,
                        ended_at=now,
                        started_at=datetime.fromtimestamp(leased, UTC),
                        worker=worker,
                        message=f"worker {worker} vanished",
                        # After another boot it is the machine that went, with all that ran on it.
                        alone=row[0] == self._boot and not together and running.alone(token),
                        machine=machine_id(row[0]),
                    )
                    if self._fused:
                        _insert_note(connection, seq, generation, note)
                    else:
                        orphans.append((self._read(connection, seq, generation, body), note))
                    tries += 1
                self._requeue(connection, seq, queue, rank, None, 0, tries=tries, flags=flags | _SUSPECT)
                count(connection, experiment, leased=-1, queued=1)
            connection.execute("DELETE FROM holders WHERE id=?", (holder,))
        self._note(orphans)
        if rows:
            self._bells.ring()

    def _read(self, connection: sqlite3.Connection, seq: int, generation: int, body: Any) -> Task:
        """The task of a row, or what stands for it."""
        try:
            return replace(decode_stored(body), generation=generation)
        except InvalidTask as problem:
            return self._malformed(connection, seq, body, problem)[0]

    def _note(self, orphans: Sequence[tuple[Task, EndedNote]]) -> None:
        """What became of the attempts of a dead worker; that one cannot be written is no reason to leave out the rest."""
        failure: Exception | None = None
        for task, note in orphans:
            try:
                self.records.note_ended(task, note)
            except Exception as problem:
                failure = problem
        if failure is not None:
            raise failure

    def outlook(self) -> Outlook:
        with self._file.reading() as connection:
            due = connection.execute("SELECT min(due) FROM delayed").fetchone()[0]
            oldest = connection.execute(
                "SELECT min(h.deadline) FROM leases l JOIN holders h ON h.id=l.holder"
            ).fetchone()[0]
        wait = None if due is None else timedelta(seconds=max(0.0, due - self._clock.now().timestamp()))
        # Renewed each third of its length, a deadline this near means that a renewal was missed.
        missed = oldest is not None and oldest - self._clock.boottime() < self._lease_s / 2
        return Outlook(next_due=wait, suspect_leases=missed)

    def doorbell(self) -> int | None:
        return None if self._vigil is None else self._vigil.fd

    def hush(self) -> bool:
        self._rung = True
        return self._vigil is not None and self._vigil.hush()

    # what people ask

    def depth(self) -> Depth:
        with self._file.reading() as connection:
            ready, delayed, leased = connection.execute(
                "SELECT (SELECT count(*) FROM ready WHERE queue=q.id), "
                "(SELECT count(*) FROM delayed d JOIN tasks t USING(seq) WHERE t.queue=q.id), "
                "(SELECT count(*) FROM leases l JOIN tasks t USING(seq) WHERE t.queue=q.id) "
                "FROM (SELECT coalesce((SELECT id FROM queues WHERE name=?), -1) AS id) q",
                (self.name,),
            ).fetchone()
        return Depth(ready, delayed, leased)

    def peek(self, n: int) -> list[Task]:
        with self._file.reading() as connection:
            rows = connection.execute(
                "SELECT t.id, t.body, t.generation FROM ready r JOIN tasks t USING(seq) JOIN queues q ON q.id=r.queue "
                "WHERE q.name=? ORDER BY r.rank, r.seq LIMIT ?",
                (self.name, n),
            ).fetchall()
        tasks = []
        for identity, body, generation in rows:
            try:
                tasks.append(replace(decode_stored(body), generation=generation))
            except InvalidTask as problem:
                import logging  # only when there is something to say: loading it takes as long as all of this module

                logging.getLogger(__name__).warning(
                    "`%s` is passed over, and goes to the dead letters when it is leased: %s", identity, problem
                )
        return tasks

    def find_waiting(self, task_id: str) -> Waiting | None:
        with self._file.reading() as connection:
            row = connection.execute(
                "SELECT t.queue, t.rank, t.seq, d.due, r.seq FROM tasks t LEFT JOIN delayed d USING(seq) "
                "LEFT JOIN ready r ON r.queue=t.queue AND r.rank=t.rank AND r.seq=t.seq WHERE t.id=?",
                (task_id,),
            ).fetchone()
            if row is None or (row[3] is None and row[4] is None):
                return None
            queue, rank, seq, due, _ = row
            where = "queue=?" if due is not None else "queue=? AND (rank<? OR rank=? AND seq<?)"
            values = (queue,) if due is not None else (queue, rank, rank, seq)
            ahead = connection.execute(f"SELECT count(*) FROM ready WHERE {where}", values).fetchone()[0]
        return Waiting(ahead, None if due is None else datetime.fromtimestamp(due, UTC))

    def pause(self) -> None:
        self._give(lambda control: pause_order(self._clock.now()))

    def resume(self) -> None:
        self._give(lambda control: resume_order(control, self._clock.now()))
        self._bells.ring()

    def _give(self, decide: Callable[[Control], Order | None]) -> None:
        """Give an order and go by it; one transaction where the records lie in this file."""
        if not self._fused:
            order = decide(self.records.control(self.name))
            if order is not None:
                self.records.put_order(self.name, order)
            self._follow_orders()
            return
        assert isinstance(self.records, SqliteRecords)
        with self._file.transaction(durable=True) as connection:
            control = self.records.control(self.name)
            order = decide(control)
            if order is not None:
                control = self.records.add_order(connection, self.name, order)
            self._set_paused(connection, control.paused)
        self.records.look_after_orders(self.name)

    def _follow_orders(self) -> None:
        """Pause or not, as the store says. Whoever writes that here looks once more, so the last to write knows all."""
        while self._is_paused() is not (told := self.records.control(self.name).paused):
            with self._file.transaction(durable=True) as connection:
                self._set_paused(connection, told)

    def _is_paused(self) -> bool:
        with self._file.reading() as connection:
            row = connection.execute("SELECT paused FROM queues WHERE name=?", (self.name,)).fetchone()
        return bool(row and row[0])

    def _set_paused(self, connection: sqlite3.Connection, paused: bool) -> None:
        connection.execute("UPDATE queues SET paused=? WHERE id=?", (paused, self._queue(connection)))

    def purge(self, *, progress: Callable[[int], None] = ignore_progress) -> int:
        if self._fused:
            with self._file.transaction(durable=True) as connection:
                ended = self._cancel(connection, "t.queue=?", self._queue(connection))
            progress(ended)
            return ended
        from runtime.queues.purge import open_task, purging

        with purging(self.records, clock=self._clock, progress=progress) as purge:
            purge.end_submitted(self.name)
            last = 0
            while rows := self._open_rows(last):
                stand = purge.end(open_task(task) for _, _, task in rows)
                with self._file.transaction() as connection:
                    for (seq, experiment, _), record in zip(rows, stand, strict=True):
                        self._follow_record(connection, seq, experiment, record)
                last = rows[-1][0]
        return purge.count

    def cancel_open(self, experiment: str) -> int:
        """Record every task of the experiment that has not ended as cancelled, in one transaction; returns how many.

        Only where the records lie in this file. A worker that runs one learns it when it renews its lease.
        """
        with self._file.transaction(durable=True) as connection:
            return self._cancel(connection, "t.experiment=(SELECT id FROM experiments WHERE name=?)", experiment)

    def _cancel(self, connection: sqlite3.Connection, where: str, value: object) -> int:
        """Move what waits or is held to the records."""
        connection.execute(
            "CREATE TEMP TABLE IF NOT EXISTS cancelling(seq INTEGER PRIMARY KEY, experiment INTEGER, leased INTEGER)"
        )
        connection.execute("DELETE FROM cancelling")
        connection.execute(
            "INSERT INTO cancelling SELECT t.seq, t.experiment, w.leased FROM "
            "(SELECT seq, 0 AS leased FROM ready UNION ALL SELECT seq, 0 FROM delayed UNION ALL SELECT seq, 1 FROM leases) "
            f"w JOIN tasks t USING(seq) WHERE {where}",
            (value,),
        )
        connection.execute(
            "INSERT INTO records(rid, state, token, reason, ended, attempts, message) "
            "SELECT (seq << 20) | t.generation, 'cancelled', lower(hex(randomblob(8))), 'cancelled', ?, "
            "(SELECT count(*) FROM notes n WHERE n.seq=t.seq AND n.generation=t.generation), ? "
            "FROM cancelling JOIN tasks t USING(seq)",
            (self._clock.now().timestamp(), f"cancelled by {person()}"),
        )
        connection.execute(
            "DELETE FROM ready WHERE (queue, rank, seq) IN (SELECT queue, rank, seq FROM cancelling JOIN tasks USING(seq))"
        )
        connection.execute("DELETE FROM delayed WHERE seq IN (SELECT seq FROM cancelling)")
        connection.execute("DELETE FROM leases WHERE seq IN (SELECT seq FROM cancelling)")
        changes = connection.execute("SELECT experiment, count(*), sum(leased) FROM cancelling GROUP BY experiment")
        ended = 0
        for experiment, tasks, leased in changes.fetchall():
            count(connection, experiment, cancelled=tasks, leased=-leased, queued=leased - tasks)
            ended += tasks
        return ended

    def _open_rows(self, after: int) -> list[tuple[int, int, Task]]:
        """What waits or is held, by number: that, the experiment's number and the task."""
        with self._file.reading() as connection:
            rows = connection.execute(
                "SELECT t.seq, t.generation, t.experiment, t.body FROM (SELECT seq FROM ready UNION ALL "
                "SELECT seq FROM delayed UNION ALL SELECT seq FROM leases) w JOIN tasks t USING(seq) "
                "JOIN queues q ON q.id=t.queue WHERE q.name=? AND t.seq>? ORDER BY t.seq LIMIT 500",
                (self.name, after),
            ).fetchall()
            return [
                (seq, experiment, self._read(connection, seq, generation, body))
                for seq, generation, experiment, body in rows
            ]

    def _follow_record(self, connection: sqlite3.Connection, seq: int, experiment: int, record: Record) -> None:
        """Take a task out whose record was committed elsewhere, unless its next generation was put meanwhile."""
        if self._still(connection, seq, record.generation) and (was := take_out(connection, seq)):
            count(connection, experiment, **{was.value: -1, record.state.value: 1})

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def is_same(self) -> bool:
        """Whether its file is still the one at its path."""
        return self._file.is_same

    def abandon(self) -> None:
        """Let go of it in a forked child."""
        self._bells.close()
        self._file.abandon()

    def close(self) -> None:
        if self._vigil is not None:
            self._vigil.close()
            self._vigil = None
        if self._presence is not None:
            self._presence.leave()
            self._presence = None
        self._bells.close()
        self._file.close()

    def _queue(self, connection: sqlite3.Connection) -> int:
        if self._number is not None:
            return self._number
        row = connection.execute("SELECT id FROM queues WHERE name=?", (self.name,)).fetchone()
        if row is None:
            # Not kept: the transaction that makes it may yet be rolled back, and the number go to another queue.
            return queue_number(connection, self.name)
        self._number = int(row[0])
        return self._number


SWEEP_EVERY_S: Final = 30.0
_SWEPT: Final = timedelta(seconds=SWEEP_EVERY_S)
JUST_NOW: Final = 0.9
"""Of a lease's length: with so much left, another claim does not move the holder's deadline on."""
LOOK_FOR_DUE_S: Final = 0.05
"""A busy worker looks for delayed tasks that are due this often; an idle one each time it looks for any."""


def open_sqlite(
    path: Path | str, *, queue: str = DEFAULT_QUEUE, durability: Durability = "full", clock: Clock | None = None
) -> tuple[SqliteQueue, SqliteRecords]:
    """A queue and its records in one file, made if absent. Raises `NotPossible` on a network file system."""
    file = EmbeddedFile(Path(path), durability=durability)
    records = SqliteRecords(file, clock=clock)
    return SqliteQueue(file, records, name=queue, clock=clock), records


def _insert_note(connection: sqlite3.Connection, seq: int, generation: int, note: EndedNote) -> None:
    connection.execute(
        "INSERT OR IGNORE INTO notes(token, seq, generation, ended, note) VALUES(?, ?, ?, ?, ?)",
        (note.token, seq, generation, note.ended_at.timestamp(), encode_note(note)),
    )
