"""Publishes tasks of manifests again that no record, worker or queue has: `runtime queue repair`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from runtime.client.tasks.publish import Progress, bury_lines, decode_part
from runtime.errors import LOST_FOR_GOOD
from runtime.queues.base import MakesTopics, Queue
from runtime.records.base import RecordStore
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.tasks.id_set import IdSet, task_key
from runtime.tasks.model import LIMITS, next_generation

log = CleanLogger(__name__)

LIVE_WITHIN: Final = timedelta(minutes=2)
"""A worker without a report for longer holds nothing; workers report every 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """Counts of the tasks that `repair` published again, and of the others by cause."""

    published: int = 0
    recorded: int = 0
    held: int = 0
    malformed: int = 0
    """Entries that cannot be decoded, and are dead letters now."""
    unreadable: int = 0
    """Manifest parts that were left out because they are damaged or missing."""
    experiments: tuple[str, ...] = ()


def repair(
    queue: Queue,
    records: RecordStore,
    *,
    experiment: str | None = None,
    now: datetime | None = None,
    progress: Progress | None = None,
) -> RepairResult:
    """Publish every task of a manifest again that has no terminal record of its newest generation and runs on no live worker.

    For a queue that lost its tasks or dropped them after its retention. A task that still waits there is then queued
    twice, which costs a look at its record and no second run. Safe to call again.
    """
    if records.holds_tasks:
        return RepairResult()
    if isinstance(queue, MakesTopics):
        queue.ensure_topics()
    homes = {seen.name: seen.queue for seen in records.experiments() if experiment in (None, seen.name)}
    listed = {
        name: [part for part in records.parts(name) if part.is_in(queue.name, home)] for name, home in homes.items()
    }
    names = [name for name, home in homes.items() if listed[name] or home in (None, queue.name)]
    held = {
        running
        for worker in records.workers(newer_than=LIVE_WITHIN)
        if not worker.left and (now or system.now()) - worker.seen_at < LIVE_WITHIN
        for running in worker.running
    }
    counts = Counter[str]()
    for name in names:
        recorded = IdSet()
        for task_id_, generation in records.recorded(name):
            recorded.add(task_key(task_id_, generation))
        again = dict(records.tried_again(name))
        for part in listed[name]:
            try:
                tasks, malformed_lines = decode_part(records, part)
            except LOST_FOR_GOOD as problem:
                log.warning("%s; its tasks are left out", problem.message)
                counts["unreadable"] += 1
                continue
            unfiled = [
                (task, invalid)
                for task, invalid in malformed_lines
                if task_key(task.id, task.generation) not in recorded and task.id not in held
            ]
            bury_lines(records, unfiled, now or system.now())
            open_tasks = [task for task in tasks if task_key(task.id, task.generation) not in recorded]
            # A later generation is in no manifest; it is the same task, started again.
            most = LIMITS["generation"][1]
            open_tasks += [
                replace(next_generation(task), generation=again[task.id] + 1)
                for task in tasks
                if again.get(task.id, most) < most
            ]
            free = [task for task in open_tasks if task.id not in held]
            if free:
                queue.put(free)
            if not part.sent:
                records.mark_sent(part)
            ended = sum(task_key(task.id, task.generation) in recorded for task in tasks)
            counts.update(published=len(free), recorded=ended, held=len(open_tasks) - len(free), malformed=len(unfiled))
            if progress:
                progress(len(tasks))
    return RepairResult(**counts, experiments=tuple(names))
