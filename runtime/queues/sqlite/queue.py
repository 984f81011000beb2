"""The embedded queue: many processes of one host on one SQLite file, fair, and quick to notice a dead worker.

A worker that holds leases keeps a file beside the database locked while it, or the guardian that ends its attempts,
lives. A worker that finds this lock free, or the holder's deadline in boot time passed, or another boot, gives the
leases back. The same file, in memory that outlives a killed process, lists the attempts that had really begun.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from runtime import faults
from runtime.clock import Clock, SystemClock
from runtime.errors import InvalidTask
from runtime.queues import base
from runtime.queues.base import DEFAULT_QUEUE, RefusedSettlement, SettleAnswer
from runtime.queues.sqlite import tables
from runtime.queues.sqlite.local_workers import LocalWorkers, Presence, WakePipes
from runtime.queues.sqlite.tables import ALONE, SUSPECT
from runtime.records.base import RecordExists, RecordStore, is_unwritten
from runtime.records.control_commands import pause_order, resume_order
from runtime.records.sqlite import SqliteRecords, find_record, insert_note, insert_record
from runtime.records.sqlite_file import Durability, EmbeddedFile
from runtime.records.transitions import count, experiment_number, take_out
from runtime.sanitize import CleanLogger
from runtime.tasks.history import Lease, Release, Settlement
from runtime.tasks.model import Task, TaskState, new_tokens
from runtime.tasks.wire import decode_stored, encode_task

# One statement, and so a transaction of its own: all else that a task needs is done when it enters.
_PUT_ONE = "INSERT INTO tasks(id, experiment, generation, queue, rank, body) VALUES(?, ?, 1, ?, ?, ?)"
_NEXT = (
    "SELECT r.rank, r.seq, r.tries, r.flags, t.experiment, t.generation, t.body FROM queues q "
    "JOIN claimable r ON r.queue=q.id JOIN tasks t USING(seq) "
    "WHERE q.id=? AND NOT q.paused ORDER BY r.rank, r.seq LIMIT ?"
)
_TAKE = "DELETE FROM claimable WHERE queue=? AND rank=? AND seq=?"
_HOLD = "INSERT INTO leases(seq, holder, token, tries, flags, leased) VALUES(?, ?, ?, ?, ?, ?)"
_END = "DELETE FROM leases WHERE seq=? AND token=?"


_NEW, _KNOWN = base.PutResult(1, 0, frozenset()), base.PutResult(0, 1, frozenset())


class _Held(NamedTuple):
    """The `handle` of a lease."""

    seq: int
    experiment: int


class SqliteQueue:
    """One named queue of an embedded file; `Queue`."""

    traits = base.QueueTraits(kind="sqlite", tracks_holders=True, remote=False, priorities=True)

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
        self._row = tables.QueueRow(name, file, records)
        self._fused = self._row.fused
        self._is_woken = False
        self._experiments: dict[str, int] = {}
        self._wakes = WakePipes(file.workers_folder)
        self._presence: Presence | None = None
        self._holders = LocalWorkers(file, records, self._clock, fused=self._fused, wake=self._wakes.wake)
        self._tokens = new_tokens()
        self._look_for_due_at = 0.0

    # put

    def put(self, tasks: Sequence[Task]) -> base.PutResult:
        if not tasks:
            return base.PutResult(0, 0)
        if len(tasks) == 1 and (one := tasks[0]).generation == 1 and not one.not_before:
            is_new = self._put_one(one)
            if is_new is not None:
                return _NEW if is_new else _KNOWN
        now = self._clock.now().timestamp()
        found: dict[str, int] = {}
        with self._file.transaction(durable=True) as connection:
            queue = self._row.number(connection)
            fresh, later = [], []
            for task in tasks:
                name = task.experiment
                experiment = self._experiments.get(name) or found.get(name)
                if experiment is None:
                    experiment = found[name] = experiment_number(connection, name, queue, now)
                if task.generation > 1:
                    later.append((task, experiment))
                    continue
                due = task.not_before.timestamp() if task.not_before else None
                fresh.append((task.id, experiment, 1, queue, -task.priority, due, encode_task(task)))
            new = tables.add_tasks(connection, fresh, now) if fresh else 0
            before = set()
            for task, experiment in later:
                if tables.begin_generation(connection, task, experiment, queue, now):
                    new += 1
                else:
                    before.add(task.id)
        # Kept only now: a transaction that is rolled back removes the rows that it numbered.
        self._experiments |= found
        if new:
            self._wakes.wake()
        return base.PutResult(new, len(tasks) - new, frozenset(before))

    def _put_one(self, task: Task) -> bool | None:
        """Put the first generation of a task that may run at once; returns whether it is new.

        None, with nothing done, for the first task of its experiment or queue from this process.
        """
        number, queue = self._experiments.get(task.experiment), self._row.known
        if number is None or queue is None or self._file.durability != "full":
            return None
        try:
            self._file.execute(
                _PUT_ONE, (task.id, number, queue, -task.priority, encode_task(task)), announce=self._wakes.wake
            )
        except sqlite3.IntegrityError as problem:
            if problem.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_UNIQUE:
                raise
            return False
        return True

    # lease, renew, settle, release

    def join(self, worker: str) -> tuple[int, ...]:
        """Begin to hold leases as `worker`; returns the descriptors that prove that it lives.

        The guardian inherits them, so that they outlive the worker until its attempts are gone.
        """
        if self._presence is None:
            self._presence = Presence(self._file.workers_folder, worker, private=self._file.private)
            self._file.patience_s = None
        return self._presence.lock_fd, self._presence.life_fd

    def mark_running(self, tokens: Sequence[str], apart: str | None = None, proven: Collection[str] = ()) -> None:
        """Note which attempts run now; costs a write to memory."""
        if self._presence is not None:
            self._presence.mark(tokens, apart, proven)

    def lease(self, n: int, *, worker: str, ttl: timedelta) -> list[Lease]:
        self.join(worker)
        self._holders.lease_s = ttl.total_seconds()
        # A look without the lock is cheap for an idle worker. A woken worker mostly finds tasks, and the look would cost
        # as much as the claim.
        if not self._is_woken:
            with self._file.reading() as connection:
                if not tables.is_any_ready(connection, self.name, self._clock.now().timestamp()):
                    self._file.expect(durable=False)
                    return []
        self._is_woken = False
        self._look_for_due_at = 0.0
        # Without an fsync: a power cut ends every lease anyway, and the tasks are where they were.
        with self._file.transaction(durable=False) as connection:
            if not self._holders.is_fresh(connection, worker, ttl):
                if not tables.is_any_ready(connection, self.name, self._clock.now().timestamp()):
                    return []
                self._holders.hold(connection, worker, ttl)
            changes: dict[int, dict[str, int]] = {}
            leases = self._claim(connection, n, changes)
            for experiment, change in changes.items():
                count(connection, experiment, **change)
            return leases

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease]:
        if not leases or self._presence is None:
            return []
        with self._file.transaction(durable=False) as connection:
            holder = self._holders.hold(connection, self._presence.worker, ttl)
            held = {
                row[0] for row in connection.execute("SELECT token FROM leases WHERE holder=?", (holder,)).fetchall()
            }
        return [lease for lease in leases if lease.token not in held]

    def settle(self, settlements: Sequence[Settlement], *, claim_next: int = 0) -> SettleAnswer:
        settled = SettleAnswer()
        if self._fused:
            recorded: Sequence[Settlement] = [_fit(self.records, settlement) for settlement in settlements]
        else:
            recorded = self._record_elsewhere(settlements, settled)
        with self._file.transaction() as connection:
            changes: dict[int, dict[str, int]] = {}
            held = False
            for settlement in recorded:
                held |= self._settle_one(connection, settlement, changes, settled)
            # With its last leases, a worker that was taken for dead lost its row, and nobody finds a lease without one.
            if claim_next and held:
                settled.leases = self._claim(connection, claim_next, changes)
            for experiment, change in changes.items():
                count(connection, experiment, **change)
            faults.reach("queue.mid_commit")
        return settled

    def _record_elsewhere(self, settlements: Sequence[Settlement], settled: SettleAnswer) -> list[Settlement]:
        """Mark and commit in the store first; a settlement that came second is refused and its lease left alone."""
        won = []
        for settlement in settlements:
            held, holder = (
                (True, None) if settlement.record.state is TaskState.SUCCEEDED else self._read_lease(settlement.lease)
            )
            if not held:
                refused = base.refuse_lost(self.records, settlement, holder)
            else:
                refused = base.record_settlement(self.records, settlement)
                first = refused and refused.record
                won.append(replace(settlement, record=first, mark=None) if first else settlement)
            if refused is not None:
                settled.refused.append(refused)
        return won

    def _settle_one(
        self,
        connection: sqlite3.Connection,
        settlement: Settlement,
        changes: dict[int, dict[str, int]],
        settled: SettleAnswer,
    ) -> bool:
        """Return whether the lease was held until now."""
        lease, record = settlement.lease, settlement.record
        held: _Held = lease.handle
        was = "leased"
        is_held = bool(connection.execute(_END, (held.seq, lease.token)).rowcount)
        if not is_held:
            # Lost. A success may still be the first record; any other settlement is refused.
            holder = tables.find_holder(connection, held.seq)
            if self._fused:
                existing = find_record(connection, held.seq, record.generation)
                try:
                    if not is_unwritten(record, existing):
                        return False
                except RecordExists as first:
                    settled.refused.append(RefusedSettlement(lease, first.record.worker, first.record))
                    return False
                if record.state is not TaskState.SUCCEEDED:
                    settled.refused.append(RefusedSettlement(lease, holder))
                    return False
            if not tables.is_generation(connection, held.seq, record.generation):
                settled.refused.append(RefusedSettlement(lease, holder))
                return False
            state = take_out(connection, held.seq)
            if state is None:
                return False
            was = state.value
        if self._fused:
            insert_record(connection, held.seq, record)
        change = changes.get(held.experiment)
        if change is None:
            change = changes[held.experiment] = {}
        change[was] = change.get(was, 0) - 1
        change[record.state.value] = change.get(record.state.value, 0) + 1
        return is_held

    def _read_lease(self, lease: Lease) -> tuple[bool, str | None]:
        """Whether the lease holds still, and the worker that holds the task now."""
        with self._file.reading() as connection:
            row = connection.execute(
                "SELECT l.token, h.worker FROM leases l JOIN holders h ON h.id=l.holder WHERE l.seq=?",
                (lease.handle.seq,),
            ).fetchone()
        return (False, None) if row is None else (row[0] == lease.token, row[1])

    def release(self, releases: Sequence[Release]) -> None:
        if not releases:
            return
        if not self._fused:
            for release in releases:
                if release.note is not None:
                    self.records.record_ended(release.lease.task, release.note)
        now = self._clock.now().timestamp()
        with self._file.transaction() as connection:
            for release in releases:
                self._release_one(connection, release, now)
        self._wakes.wake()

    def _release_one(self, connection: sqlite3.Connection, release: Release, now: float) -> None:
        lease = release.lease
        held: _Held = lease.handle
        if not connection.execute(_END, (held.seq, lease.token)).rowcount:
            return
        if release.note is not None and self._fused:
            insert_note(connection, held.seq, lease.task.generation, release.note)
        queue, rank = connection.execute("SELECT queue, rank FROM tasks WHERE seq=?", (held.seq,)).fetchone()
        due = release.not_before.timestamp() if release.not_before else None
        flags = (ALONE if release.alone else 0) | (SUSPECT if release.note or lease.suspect else 0)
        tries = lease.tries + (release.note is not None)
        tables.requeue(connection, held.seq, queue, rank, due, now, tries=tries, flags=flags)
        count(connection, held.experiment, leased=-1, queued=1)

    def _claim(self, connection: sqlite3.Connection, n: int, changes: dict[int, dict[str, int]]) -> list[Lease]:
        """Lease the next tasks; adds the counters' changes to `changes`."""
        queue = self._row.number(connection)
        now = self._clock.now().timestamp()
        if now >= self._look_for_due_at:
            self._look_for_due_at = now + LOOK_FOR_DUE_S
            tables.promote_due(connection, now)
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
                task, invalid = tables.read_malformed(connection, seq, body, problem)
            held = _Held(seq, experiment)
            text = body if isinstance(body, str) else ""
            leases.append(Lease(task, token, text, tries, bool(flags & SUSPECT), bool(flags & ALONE), invalid, held))
            taken.append((queue, rank, seq))
            holds.append((seq, self._holders.number, token, tries, flags, now))
            change = changes.get(experiment)
            if change is None:
                change = changes[experiment] = {}
            change["queued"] = change.get("queued", 0) - 1
            change["leased"] = change.get("leased", 0) + 1
        if leases:
            connection.executemany(_TAKE, taken)
            connection.executemany(_HOLD, holds)
        return leases

    # upkeep

    def tend(self) -> None:
        """Give back dead workers' leases."""
        alive = self._holders.give_back(ours=None if self._presence is None else self._presence.worker)
        if self._presence is not None:
            self._presence.watch(alive)
        if self._holders.sweep():
            self._row.catch_up()

    def outlook(self) -> base.Outlook:
        with self._file.reading() as connection:
            due = tables.next_due(connection, self.name)
            oldest = connection.execute(
                "SELECT min(h.deadline) FROM leases l JOIN holders h ON h.id=l.holder"
            ).fetchone()[0]
        wait = None if due is None else timedelta(seconds=max(0.0, due - self._clock.now().timestamp()))
        # Renewed each third of its length, a deadline this near means that a renewal was missed.
        missed = oldest is not None and oldest - self._clock.boottime() < self._holders.lease_s / 2
        return base.Outlook(next_due=wait, suspect_leases=missed)

    def wake_descriptor(self) -> int | None:
        return None if self._presence is None else self._presence.wake_descriptor

    def drain_wakes(self) -> bool:
        self._is_woken = True
        return self._presence is not None and self._presence.drain_wakes()

    # what people ask

    def depth(self) -> base.Depth:
        with self._file.reading() as connection:
            ready, delayed, leased = connection.execute(
                "SELECT (SELECT count(*) FROM claimable WHERE queue=q.id), "
                "(SELECT count(*) FROM deferred d JOIN tasks t USING(seq) WHERE t.queue=q.id), "
                "(SELECT count(*) FROM leases l JOIN tasks t USING(seq) WHERE t.queue=q.id) "
                "FROM (SELECT coalesce((SELECT id FROM queues WHERE name=?), -1) AS id) q",
                (self.name,),
            ).fetchone()
        return base.Depth(ready, delayed, leased)

    def peek(self, n: int) -> list[Task]:
        with self._file.reading() as connection:
            found = connection.execute(
                "SELECT t.id, t.body, t.generation FROM claimable r JOIN tasks t USING(seq) JOIN queues q ON q.id=r.queue "
                "WHERE q.name=? ORDER BY r.rank, r.seq LIMIT ?",
                (self.name, n),
            ).fetchall()
        tasks = []
        for identity, body, generation in found:
            try:
                tasks.append(replace(decode_stored(body), generation=generation))
            except InvalidTask as problem:
                CleanLogger(__name__).warning(
                    "`%s` is passed over, and goes to the dead letters when it is leased: %s", identity, problem
                )
        return tasks

    def find_waiting(self, task_id: str) -> base.WaitingTask | None:
        with self._file.reading() as connection:
            row = connection.execute(
                "SELECT t.queue, t.rank, t.seq, d.due, r.seq FROM tasks t LEFT JOIN deferred d USING(seq) "
                "LEFT JOIN claimable r ON r.queue=t.queue AND r.rank=t.rank AND r.seq=t.seq WHERE t.id=?",
                (task_id,),
            ).fetchone()
            if row is None or (row[3] is None and row[4] is None):
                return None
            queue, rank, seq, due, _ = row
            where = "queue=?" if due is not None else "queue=? AND (rank<? OR rank=? AND seq<?)"
            values = (queue,) if due is not None else (queue, rank, rank, seq)
            ahead = connection.execute(f"SELECT count(*) FROM claimable WHERE {where}", values).fetchone()[0]
        return base.WaitingTask(ahead, None if due is None else datetime.fromtimestamp(due, UTC))

    def pause(self) -> None:
        self._row.order(lambda control: pause_order(self._clock.now()))

    def resume(self) -> None:
        self._row.order(lambda control: resume_order(control, self._clock.now()))
        self._wakes.wake()

    def purge(self, *, progress: Callable[[int], None] = base.ignore_progress) -> int:
        if self._fused:
            with self._file.transaction(durable=True) as connection:
                ended = tables.cancel_rows(
                    connection, "t.queue=?", self._row.number(connection), now=self._clock.now().timestamp()
                )
            progress(ended)
            return ended
        from runtime.queues.purge import Purge, open_task

        with closing(Purge(self.records, clock=self._clock, progress=progress)) as purge:
            purge.end_submitted(self.name)
            last = 0
            while listed := self._list_open(last):
                stand = purge.end(open_task(task) for _, _, task in listed)
                with self._file.transaction() as connection:
                    for (seq, experiment, _), record in zip(listed, stand, strict=True):
                        tables.follow_record(connection, seq, experiment, record)
                last = listed[-1][0]
        return purge.count

    def _list_open(self, after: int) -> list[tuple[int, int, Task]]:
        with self._file.reading() as connection:
            return tables.list_open(connection, self.name, after)

    def cancel_open(self, experiment: str, *, before: Callable[[Task], None] = lambda task: None) -> int:
        """Record every task of the experiment that has not ended as cancelled, in one transaction; returns how many.

        Only where the records lie in this file. A worker that runs one learns it when it renews its lease. `before` gets
        the tasks whose ends somebody wants to hear of.
        """
        last: int | None = 0
        while last is not None:
            with self._file.reading() as connection:
                listed = tables.list_notifying(connection, experiment, last)
            for _, task in listed:
                before(task)
            last = listed[-1][0] if listed else None
        with self._file.transaction(durable=True) as connection:
            return tables.cancel_rows(
                connection,
                "t.experiment=(SELECT id FROM experiments WHERE name=?)",
                experiment,
                now=self._clock.now().timestamp(),
            )

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def is_same(self) -> bool:
        """Whether its file is still the one at its path."""
        return self._file.is_same

    def abandon(self) -> None:
        """Let go of it in a forked child."""
        self._wakes.close()
        self._file.abandon()

    def close(self) -> None:
        if self._presence is not None:
            self._presence.leave()
            self._presence = None
        self._wakes.close()
        self._file.close()


LOOK_FOR_DUE_S: Final = 0.05
"""A busy worker looks for delayed tasks that are due this often; an idle one each time it looks for any."""


def open_sqlite(
    path: Path | str,
    *,
    queue: str = DEFAULT_QUEUE,
    durability: Durability = "full",
    private: bool = False,
    clock: Clock | None = None,
) -> tuple[SqliteQueue, SqliteRecords]:
    """A queue and its records in one file, made if absent. Raises `NotPossible` on a network file system."""
    file = EmbeddedFile(Path(path), durability=durability, private=private, clock=clock)
    records = SqliteRecords(file, clock=clock)
    return SqliteQueue(file, records, name=queue, clock=clock), records


def _fit(records: RecordStore, settlement: Settlement) -> Settlement:
    """The settlement with a large value beside its record; numbers and short values stay as they are."""
    record = settlement.record
    if not isinstance(record.value, str | list | dict) or not isinstance(records, SqliteRecords):
        return settlement
    fitted = records.fit(record)
    return settlement if fitted is record else replace(settlement, record=fitted)
