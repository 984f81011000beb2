"""A queue in this process's memory, for tests and for trying things out; `Queue` in plain sight.

Nothing survives the process. Leases end by the clock alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from runtime.clock import Clock, SystemClock, machine_id
from runtime.end_reasons import EndReason
from runtime.queues import base
from runtime.queues.base import DEFAULT_QUEUE, SettleAnswer
from runtime.queues.purge import Purge, open_task
from runtime.records.base import RecordStore
from runtime.records.control_commands import pause_order, resume_order
from runtime.system import system
from runtime.tasks.history import EndedNote, Lease, Release, Settlement
from runtime.tasks.model import Task, TaskState, new_token

_ALWAYS = datetime.min.replace(tzinfo=UTC)


@dataclass(slots=True)
class _Wait:
    task: Task
    order: int
    due: datetime = _ALWAYS
    tries: int = 0
    suspect: bool = False
    alone: bool = False


@dataclass(slots=True)
class _Held:
    waiting: _Wait
    token: str
    worker: str
    deadline: float
    leased_at: datetime


class MemoryQueue:
    """`Queue` over dictionaries. Share one object between the threads of a test."""

    traits = base.QueueTraits(kind="memory", tracks_holders=True, remote=False, priorities=True)

    def __init__(self, records: RecordStore, *, name: str = DEFAULT_QUEUE, clock: Clock | None = None) -> None:
        self.name = name
        self.records = records
        self._clock: Clock = clock or SystemClock()
        self._mutex = system.rlock()
        self._waiting: dict[str, _Wait] = {}
        self._held: dict[str, _Held] = {}
        self._known: dict[str, int] = {}
        """The newest generation of each id."""
        self._running: dict[str, base.RunningAttempts] = {}
        self._worker = ""
        self._order = 0

    def put(self, tasks: Sequence[Task]) -> base.PutResult:
        with self._mutex:
            new, before = 0, set()
            for task in tasks:
                if self._known.get(task.id, 0) >= task.generation:
                    before.add(task.id)
                    continue
                self._known[task.id] = task.generation
                self._held.pop(task.id, None)  # The generation before has ended; its worker may not know yet.
                self._order += 1
                self._waiting[task.id] = _Wait(task, self._order, task.not_before or _ALWAYS)
                new += 1
            return base.PutResult(new, len(tasks) - new, frozenset(before))

    def join(self, worker: str) -> tuple[int, ...]:
        self._worker = worker
        return ()

    def mark_running(self, tokens: Sequence[str], apart: str | None = None, proven: Collection[str] = ()) -> None:
        self._running[self._worker] = base.RunningAttempts(frozenset(tokens), apart, frozenset(proven))

    def lease(self, n: int, *, worker: str, ttl: timedelta) -> list[Lease]:
        with self._mutex:
            self._worker = worker
            if self.records.control(self.name).paused:
                return []
            return [self._hold(waiting, worker, ttl) for waiting in self._due()[:n]]

    def _due(self) -> list[_Wait]:
        now = self._clock.now()
        due = [waiting for waiting in self._waiting.values() if waiting.due <= now]
        return sorted(due, key=lambda waiting: (-waiting.task.priority, waiting.order))

    def _hold(self, waiting: _Wait, worker: str, ttl: timedelta) -> Lease:
        task, token = waiting.task, new_token()
        del self._waiting[task.id]
        deadline = self._clock.boottime() + ttl.total_seconds()
        self._held[task.id] = _Held(waiting, token, worker, deadline, self._clock.now())
        return Lease(task, token, tries=waiting.tries, suspect=waiting.suspect, alone=waiting.alone, handle=ttl)

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease]:
        with self._mutex:
            lost = []
            for lease in leases:
                held = self._held_by(lease)
                if held is None:
                    lost.append(lease)
                else:
                    held.deadline = self._clock.boottime() + ttl.total_seconds()
            return lost

    def settle(self, settlements: Sequence[Settlement], *, claim_next: int = 0) -> SettleAnswer:
        settled = SettleAnswer()
        with self._mutex:
            for settlement in settlements:
                self._settle_one(settlement, settled)
            if claim_next and settlements:
                ttl: timedelta = settlements[0].lease.handle
                settled.leases = self.lease(claim_next, worker=self._worker, ttl=ttl)
        return settled

    def _settle_one(self, settlement: Settlement, settled: SettleAnswer) -> None:
        lease, record = settlement.lease, settlement.record
        held = self._held_by(lease)
        if held is None and record.state is not TaskState.SUCCEEDED:
            other = self._held.get(lease.task.id)
            if refused := base.refuse_lost(self.records, settlement, other.worker if other else None):
                settled.refused.append(refused)
            return
        if refused := base.record_settlement(self.records, settlement):
            settled.refused.append(refused)
        if self._known.get(lease.task.id) == record.generation:
            self._held.pop(lease.task.id, None)
            self._waiting.pop(lease.task.id, None)

    def release(self, releases: Sequence[Release]) -> None:
        with self._mutex:
            for release in releases:
                held = self._held_by(release.lease)
                if held is None:
                    continue
                task = release.lease.task
                if release.note is not None:
                    self.records.record_ended(task, release.note)
                del self._held[task.id]
                self._waiting[task.id] = replace(
                    held.waiting,
                    due=release.not_before or _ALWAYS,
                    tries=held.waiting.tries + (release.note is not None),
                    suspect=held.waiting.suspect or release.note is not None,
                    alone=release.alone,
                )

    def tend(self) -> None:
        with self._mutex:
            for task_id, held in list(self._held.items()):
                if self._clock.boottime() <= held.deadline:
                    continue
                del self._held[task_id]
                running = self._running.get(held.worker, base.RunningAttempts())
                began = held.token in running.tokens
                if began:
                    note = EndedNote(
                        token=held.token,
                        reason=EndReason.LOST,
                        ended_at=self._clock.now(),
                        started_at=held.leased_at,
                        worker=held.worker,
                        message=f"worker {held.worker} vanished",
                        alone=running.alone(held.token),
                        machine=machine_id(),
                        progressed=running.is_proven(held.token),
                        unseen=running.proven is not None,
                    )
                    self.records.record_ended(held.waiting.task, note)
                self._waiting[task_id] = replace(
                    held.waiting, due=_ALWAYS, tries=held.waiting.tries + began, suspect=True
                )

    def _held_by(self, lease: Lease) -> _Held | None:
        held = self._held.get(lease.task.id)
        return held if held is not None and held.token == lease.token else None

    def outlook(self) -> base.Outlook:
        with self._mutex:
            if self.records.control(self.name).paused:
                return base.Outlook()
            now = self._clock.now()
            due = min((waiting.due for waiting in self._waiting.values()), default=None)
            late = any(held.deadline < self._clock.boottime() for held in self._held.values())
            return base.Outlook(None if due is None else max(timedelta(), due - now), late)

    def wake_descriptor(self) -> None:
        return None

    def drain_wakes(self) -> bool:
        return False

    def depth(self) -> base.Depth:
        with self._mutex:
            ready = len(self._due())
            return base.Depth(ready, len(self._waiting) - ready, len(self._held))

    def peek(self, n: int) -> list[Task]:
        with self._mutex:
            return [waiting.task for waiting in self._due()[:n]]

    def find_waiting(self, task_id: str) -> base.WaitingTask | None:
        with self._mutex:
            found = self._waiting.get(task_id)
            if found is None:
                return None
            due = [waiting.task.id for waiting in self._due()]
            return base.WaitingTask(due.index(task_id)) if task_id in due else base.WaitingTask(len(due), found.due)

    def pause(self) -> None:
        self.records.put_order(self.name, pause_order(self._clock.now()))

    def resume(self) -> None:
        order = resume_order(self.records.control(self.name), self._clock.now())
        if order is not None:
            self.records.put_order(self.name, order)

    def purge(self, *, progress: Callable[[int], None] = base.ignore_progress) -> int:
        with closing(Purge(self.records, clock=self._clock, progress=progress)) as purge:
            purge.end_submitted(self.name)
            with self._mutex:
                waiting = [*self._waiting.values(), *(held.waiting for held in self._held.values())]
                purge.end(open_task(one.task) for one in waiting)
                self._waiting.clear()
                self._held.clear()
        return purge.count

    def close(self) -> None:
        return None
