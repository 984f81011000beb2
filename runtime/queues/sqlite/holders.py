"""Workers that hold leases of the embedded file: this one's row, and what is done for those that died."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from runtime.clock import Clock, machine_id
from runtime.queues.base import (
    DEFAULT_LEASE,
)
from runtime.queues.sqlite.presence import Presence, Running
from runtime.queues.sqlite.rows import SUSPECT, read_task, requeue
from runtime.reasons import EndReason
from runtime.records.base import AttemptStore
from runtime.records.embedded import (
    EmbeddedFile,
    count,
)
from runtime.records.sqlite import insert_note
from runtime.tasks.history import EndedNote
from runtime.tasks.model import Task

SWEEP_EVERY_S: Final = 30.0
JUST_NOW: Final = 0.9
"""Share of a lease's length: with so much left, another claim does not move the holder's deadline on."""


class Holder:
    """This worker's row, whose deadline in boot time ends all of its leases."""

    def __init__(self, clock: Clock, boot: str) -> None:
        self._clock, self._boot = clock, boot
        self.number: int | None = None
        self.lease_s = DEFAULT_LEASE.total_seconds()

    def is_fresh(self, connection: sqlite3.Connection, worker: str, ttl: timedelta) -> bool:
        """Whether this worker's row is there, with a deadline that has only just been moved on."""
        if self.number is None:
            return False
        row = connection.execute(
            "SELECT deadline FROM holders WHERE id=? AND worker=? AND boot=?", (self.number, worker, self._boot)
        ).fetchone()
        return row is not None and row[0] >= self._clock.boottime() + JUST_NOW * ttl.total_seconds()

    def hold(self, connection: sqlite3.Connection, worker: str, ttl: timedelta) -> int:
        """This worker's row, its deadline moved on."""
        deadline = self._clock.boottime() + ttl.total_seconds()
        if self.number is not None:
            updated = connection.execute(
                "UPDATE holders SET deadline=?, boot=? WHERE id=? AND worker=?",
                (deadline, self._boot, self.number, worker),
            ).rowcount
            if updated:
                return self.number
        self.number = int(
            connection.execute(
                "INSERT INTO holders(worker, boot, deadline) VALUES(?, ?, ?) "
                "ON CONFLICT(worker) DO UPDATE SET boot=excluded.boot, deadline=excluded.deadline RETURNING id",
                (worker, self._boot, deadline),
            ).fetchone()[0]
        )
        return self.number


class DeadHolders:
    """Gives back what dead workers held, with a note for each attempt that had begun."""

    def __init__(
        self,
        file: EmbeddedFile,
        records: AttemptStore,
        clock: Clock,
        *,
        boot: str,
        fused: bool,
        ring: Callable[[], None],
    ) -> None:
        self._file, self._records, self._clock = file, records, clock
        self._boot, self._fused, self._ring = boot, fused, ring
        self._seen: set[str] = set()
        """Workers that held leases at the last look."""
        self._sweep_at = 0.0

    def give_back(self, *, ours: str | None) -> list[str]:
        """Give back what the dead held; returns the other workers that live and hold leases."""
        with self._file.reading() as connection:
            holders = connection.execute(
                "SELECT DISTINCT h.id, h.worker, h.boot, h.deadline FROM leases l JOIN holders h ON h.id=l.holder"
            ).fetchall()
        self._seen = {row[1] for row in holders}
        others = [row for row in holders if row[1] != ours]
        dead = {
            worker: Presence.running(self._file.workers_folder, worker)
            for _, worker, boot, deadline in others
            if self._is_dead(worker, boot, deadline)
        }
        # Workers that ran something and went together went with their machine, or with what holds them all.
        together = sum(bool(running.tokens) for running in dead.values()) > 1
        for holder, worker, _, _ in others:
            if worker in dead:
                self._give_back(holder, worker, dead[worker], together=together)
        return [row[1] for row in others if row[1] not in dead]

    def sweep(self) -> bool:
        """Remove what dead workers left beside the file, every 30 s; True if this call did."""
        if self._clock.boottime() < self._sweep_at:
            return False
        self._sweep_at = self._clock.boottime() + SWEEP_EVERY_S
        Presence.sweep(self._file.workers_folder, keep=self._seen)
        return True

    def _is_dead(self, worker: str, boot: str, deadline: float) -> bool:
        return (
            boot != self._boot
            or self._clock.boottime() > deadline
            or not Presence.alive(self._file.workers_folder, worker)
        )

    def _give_back(self, holder: int, worker: str, running: Running, *, together: bool) -> None:
        now = self._clock.now()
        orphans: list[tuple[Task, EndedNote]] = []
        with self._file.transaction() as connection:
            row = connection.execute("SELECT boot, deadline FROM holders WHERE id=?", (holder,)).fetchone()
            if row is None or not self._is_dead(worker, *row):
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
                        insert_note(connection, seq, generation, note)
                    else:
                        orphans.append((read_task(connection, seq, generation, body), note))
                    tries += 1
                requeue(connection, seq, queue, rank, None, 0, tries=tries, flags=flags | SUSPECT)
                count(connection, experiment, leased=-1, queued=1)
            connection.execute("DELETE FROM holders WHERE id=?", (holder,))
        self._note(orphans)
        if rows:
            self._ring()

    def _note(self, orphans: Sequence[tuple[Task, EndedNote]]) -> None:
        """What became of the attempts of a dead worker; that one cannot be written is no reason to leave out the rest."""
        failure: Exception | None = None
        for task, note in orphans:
            try:
                self._records.note_ended(task, note)
            except Exception as problem:
                failure = problem
        if failure is not None:
            raise failure
