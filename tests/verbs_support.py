"""A stack for tests of the verbs, and a helper that acts as its workers: over memory, and over one embedded file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from runtime.end_reasons import EndReason
from runtime.queues.base import Queue
from runtime.queues.memory import MemoryQueue
from runtime.queues.sqlite.queue import SqliteQueue, open_sqlite
from runtime.records.base import RecordStore, WorkerSeen
from runtime.records.memory import MemoryRecords
from runtime.tasks.history import EndedNote, Lease, Record, Release, Settlement, StartedMark, mark_of
from runtime.tasks.model import Task, TaskState
from runtime.tasks.wire import encode_task
from runtime.testing import FakeClock

TTL = timedelta(seconds=30)


class Bench:
    """Satisfies `runtime.client.tasks.task_facts.Stack`."""

    name = "bench"
    default_queue = "default"

    def __init__(self, records: RecordStore, queue: MemoryQueue | SqliteQueue, clock: FakeClock) -> None:
        self._records = records
        self._queues: dict[str, Queue] = {queue.name: queue}
        self.clock = clock
        self.parts = 0

    @classmethod
    def memory(cls) -> Bench:
        clock = _today()
        records = MemoryRecords(clock=clock)
        return cls(records, MemoryQueue(records, clock=clock), clock)

    @classmethod
    def sqlite(cls, folder: Path, name: str = "bench.db") -> Bench:
        """Open a stack on an embedded file; `local.db` in the data folder is the file of the stack `local`."""
        clock = _today()
        queue, records = open_sqlite(folder / name, clock=clock)
        return cls(records, queue, clock)

    @property
    def records(self) -> RecordStore:
        return self._records

    @property
    def now(self) -> datetime:
        return self.clock.now()

    def queue(self, name: str | None = None) -> Queue:
        return self._queues[name or self.default_queue]

    def queue_names(self) -> list[str]:
        return sorted(self._queues)

    def add_queue(self, name: str) -> None:
        self._queues[name] = MemoryQueue(self._records, name=name, clock=self.clock)

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
        self._records.close()

    # users

    def put(self, *tasks: Task) -> None:
        """Put tasks as submit does: list them if the store does not hold them, then queue them."""
        if not self.records.holds_tasks:
            for experiment in dict.fromkeys(task.experiment for task in tasks):
                self.records.put_experiment(experiment, queue=self.default_queue)
                lines = [encode_task(task) for task in tasks if task.experiment == experiment]
                self.records.mark_sent(self.records.put_part(experiment, self.parts, lines))
                self.parts += 1
        self.queue().put(tasks)

    # workers

    def lease(self, worker: str = "w-one") -> Lease:
        [lease] = self.queue().lease(1, worker=worker, ttl=TTL)
        if not self.records.holds_tasks:
            self.records.record_started(lease.task, StartedMark(lease.token, worker, self.now, alone=False))
        return lease

    def succeed(self, lease: Lease | None = None, **fields: Any) -> Record:
        return self._settle(lease or self.lease(), TaskState.SUCCEEDED, EndReason.SUCCEEDED, **fields)

    def fail(
        self, lease: Lease | None = None, message: str = "boom", reason: EndReason = EndReason.APP_FAILED, **fields: Any
    ) -> Record:
        return self._settle(lease or self.lease(), TaskState.FAILED, reason, message=message, **fields)

    def _settle(self, lease: Lease, state: TaskState, reason: EndReason, **fields: Any) -> Record:
        defaults: dict[str, Any] = {"started_at": self.now - timedelta(seconds=5), "worker": "w-one"}
        record = Record(
            task_id=lease.task.id,
            generation=lease.task.generation,
            experiment=lease.task.experiment,
            state=state,
            token=lease.token,
            reason=reason,
            ended_at=self.now,
            **(defaults | fields),
        )
        mark = None if state is TaskState.SUCCEEDED else mark_of(record, lease.task)
        self.queue().settle([Settlement(lease, record, mark)])
        return record

    def cancel(self, lease: Lease | None = None) -> Record:
        return self._settle(lease or self.lease(), TaskState.CANCELLED, EndReason.CANCELLED)

    def try_again(
        self,
        lease: Lease | None = None,
        reason: EndReason = EndReason.APP_FAILED,
        *,
        after: timedelta = timedelta(0),
        **fields: Any,
    ) -> EndedNote:
        """End an attempt whose task goes back to the queue."""
        lease = lease or self.lease()
        defaults: dict[str, Any] = {
            "started_at": self.now - timedelta(seconds=5),
            "worker": "w-one",
            "message": "Traceback\nValueError: nan",
        }
        note = EndedNote(token=lease.token, reason=reason, ended_at=self.now, **(defaults | fields))
        not_before = self.now + after if after else None
        self.queue().release([Release(lease, not_before, note)])
        return note

    def bury_malformed(self, task_id: str, raw: str, problem: str, *, experiment: str = "sample") -> None:
        """Settle a message that could not be parsed, as a worker does."""
        record = Record(
            task_id=task_id,
            generation=1,
            experiment=experiment,
            state=TaskState.FAILED,
            token="feed" * 4,
            reason=EndReason.CONFIG_INVALID,
            ended_at=self.now,
            message=problem,
            worker="w-one",
            attempts=0,
        )
        self.records.mark(mark_of(record, None, raw=raw))
        self.records.commit(record)

    def report(self, worker: str = "w-one", **fields: Any) -> WorkerSeen:
        defaults: dict[str, Any] = {
            "host": "node1",
            "queue": self.default_queue,
            "seen_at": self.now,
            "started_at": self.now - timedelta(hours=1),
            "slots": 2,
        }
        seen = WorkerSeen(worker=worker, **(defaults | fields))
        self.records.put_worker(seen)
        return seen


def _today() -> FakeClock:
    """Return a clock stopped at now, since the embedded file compares workers' times with the machine's own clock."""
    return FakeClock(datetime.now(UTC).replace(microsecond=0))
