"""Ending every task that a queue's manifests list: the order first, then a record for each task that has none.

Once the order is durable no worker starts a covered task, and running ones stop; once a task has its record, a late
delivery of it does not run. So a purge may be interrupted anywhere and run again, and a task submitted beside it is
either covered and ended, or not covered and run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from runtime.clock import Clock
from runtime.errors import LOST_FOR_GOOD, RuntimeFailure
from runtime.records.base import ManifestPart, RecordExists, RecordStore, settle_record
from runtime.records.control_commands import ControlCommand, OrderKind, person
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.tasks.history import Record, cancelled_record, mark_of
from runtime.tasks.id_set import IdSet, task_key
from runtime.tasks.model import Task, TaskState, new_token
from runtime.tasks.wire import read_line

log = CleanLogger(__name__)

ENDED_AT_ONCE: Final = 32
"""Each costs two requests to a bucket, or two files that are synced."""


@dataclass(frozen=True, slots=True)
class Open:
    """A generation that has not ended, as its manifest or queue describes it."""

    task_id: str
    generation: int
    experiment: str
    task: Task | None
    """None if it cannot be read, or is no longer stored."""
    raw: str | None = None


class Purge:
    """Records tasks as cancelled, many at once, and counts them."""

    def __init__(self, records: RecordStore, *, clock: Clock, progress: Callable[[int], None]) -> None:
        self._records, self._clock, self._progress = records, clock, progress
        self._by = person()
        self.ended: dict[str, int] = {}
        """By experiment: tasks that this purge has ended."""
        self._pool = system.pool(ENDED_AT_ONCE, name="purge")

    @property
    def count(self) -> int:
        return sum(self.ended.values())

    def close(self) -> None:
        """Begin no more, and count the tasks that were ended."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        # Like a worker: beyond a number of marks, `status` adds up the counters.
        counters = {name: {TaskState.CANCELLED: ended} for name, ended in self.ended.items()}
        with suppress(RuntimeFailure):
            self._records.put_counters(f"purge-{new_token()}", counters)

    def end_submitted(self, queue: str) -> None:
        """End all tasks in the manifests of the queue's experiments, and later generations of them."""
        records = self._records
        homes = {seen.name: seen.queue for seen in records.experiments()}
        listed = {name: records.parts(name) for name in homes}
        parts = {name: [part for part in listed[name] if part.is_in(queue, home)] for name, home in homes.items()}
        names = [name for name, home in homes.items() if parts[name] or home in (None, queue)]
        order = ControlCommand(
            kind=OrderKind.PURGE,
            at=self._clock.now(),
            by=self._by,
            experiments={name: frozenset(part.name for part in ours) for name, ours in parts.items() if ours},
        )
        records.put_order(queue, order)
        for name in names:
            again = dict(records.tried_again(name))
            for part in listed[name] if again else ():
                if part not in parts[name]:
                    for each in self._read_part(part):
                        again.pop(each.task_id, None)
            if again:
                # No manifest lists them, so the order names each.
                begun = frozenset((task_id, generation + 1) for task_id, generation in again.items())
                records.put_order(queue, replace(order, kind=OrderKind.CANCEL, experiments={}, tasks=begun))
            recorded = IdSet()
            for task_id, generation in records.recorded(name):
                recorded.add(task_key(task_id, generation))
            for part in parts[name]:
                tasks = self._read_part(part)
                self.end(
                    [
                        *(each for each in tasks if task_key(each.task_id, each.generation) not in recorded),
                        *(_next_life(each, again.pop(each.task_id)) for each in tasks if each.task_id in again),
                    ]
                )
                if not part.sent:
                    # All its tasks have ended.
                    records.mark_sent(part)
                self._progress(len(tasks))
            self.end([Open(task_id, generation + 1, name, None) for task_id, generation in again.items()])

    def _read_part(self, part: ManifestPart) -> list[Open]:
        """The tasks of a part. One that is damaged for good is left out: the order covers it, and its tasks are unknown."""
        try:
            return [_read_line(line, part.experiment) for line in self._records.read_part(part)]
        except LOST_FOR_GOOD as problem:
            log.warning("%s; its tasks are left out", problem.message)
            return []

    def end(self, tasks: Iterable[Open]) -> list[Record]:
        """Record each as cancelled unless it has ended; returns the records that stand, in the same order."""
        now = self._clock.now()
        stand = []
        for record, by_us in self._pool.map(lambda one: self._end_one(one, now), tasks):
            if by_us:
                self.ended[record.experiment] = self.ended.get(record.experiment, 0) + 1
            stand.append(record)
        return stand

    def _end_one(self, one: Open, now: datetime) -> tuple[Record, bool]:
        by = f"{self._by}, who purged its queue"
        record = cancelled_record(one.task_id, one.generation, one.experiment, now=now, by=by)
        try:
            settle_record(self._records, record, mark_of(record, one.task, raw=one.raw))
        except RecordExists as first:
            return first.record, False
        return record, True


def open_task(task: Task) -> Open:
    """A task that the queue itself lists."""
    return Open(task.id, task.generation, task.experiment, task)


def _next_life(one: Open, ended: int) -> Open:
    task = None if one.task is None else replace(one.task, generation=ended + 1)
    return replace(one, generation=ended + 1, task=task)


def _read_line(line: str, experiment: str) -> Open:
    """The task of a manifest's line; an undecodable one is ended by its id."""
    task, problem = read_line(line, experiment)
    return open_task(task) if problem is None else Open(task.id, task.generation, task.experiment, None, line)
