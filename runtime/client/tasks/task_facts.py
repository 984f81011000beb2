"""How tasks and workers stand, read from the records: a task's record, mark, attempts and holder, a worker's last report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any, Final, Protocol

from runtime.client.resolve_id import FindsTasks, find_home, find_submitted
from runtime.errors import UnknownName
from runtime.queues.base import Queue
from runtime.records.base import RecordStore, WorkerSeen
from runtime.tasks.history import History, Mark, Record
from runtime.tasks.model import Task, TaskState

LIVE_FOR: Final = timedelta(seconds=90)
"""A worker reports every 30 s; after three reports missed it is silent."""


class Stack(Protocol):
    """The part of an open stack that the verbs use."""

    default_queue: str

    @property
    def name(self) -> str: ...
    @property
    def records(self) -> RecordStore: ...
    def queue(self, name: str | None = None) -> Queue: ...
    def queue_names(self) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """The current state of a task, as far as the store knows it."""

    task_id: str
    experiment: str
    generation: int
    state: TaskState
    task: Task | None = None
    recorded: tuple[Record, ...] = ()
    """Records of all generations that ended, oldest first."""
    mark: Mark | None = None
    """The mark of the newest record, if it did not succeed and was not tried again."""
    history: History = field(default_factory=History)
    """Attempts of the current generation."""
    holder: str | None = None
    held_since: datetime | None = None

    @property
    def record(self) -> Record | None:
        last = self.recorded[-1] if self.recorded else None
        return last if last is not None and last.generation == self.generation else None


def read_standing(records: RecordStore, task_id: str, *, with_task: bool = True) -> TaskFacts:
    """Read the state of a task. `with_task` also looks for its definition, which may read manifest parts.

    A record that did not succeed and has no mark was tried again: its next generation is on its way.
    """
    recorded = tuple(records.find_all(task_id))
    last = recorded[-1] if recorded else None
    mark = None
    if isinstance(records, FindsTasks):
        found = records.find_task(task_id)
        if found is None:
            raise UnknownName("task", task_id, [], where=f"in `{records.url}`")
        task, generation, state, experiment = found.task, found.generation, found.state, found.experiment
        if last is not None and state.terminal and state is not TaskState.SUCCEEDED:
            mark = records.find_mark(task_id, last.generation, last.state)
    else:
        task, generation, state, experiment = None, 1, TaskState.QUEUED, ""
        if last is not None:
            mark = (
                None if last.state is TaskState.SUCCEEDED else records.find_mark(task_id, last.generation, last.state)
            )
            ended = last.state is TaskState.SUCCEEDED or mark is not None
            generation, state = (last.generation, last.state) if ended else (last.generation + 1, TaskState.QUEUED)
            task = mark.task if mark else None
        if task is None and with_task:
            task = find_submitted(records, task_id)
            task = replace(task, generation=generation) if task else None
    standing = TaskFacts(
        task_id=task_id,
        experiment=experiment
        or (last.experiment if last else "")
        or (task.experiment if task else find_home(records, task_id) or ""),
        generation=generation,
        state=state,
        task=task,
        recorded=recorded,
        mark=mark,
        history=records.history(task_id, generation),
    )
    return standing if state.terminal else _with_holder(records, standing)


def _with_holder(records: RecordStore, standing: TaskFacts) -> TaskFacts:
    """Add the holder: an attempt on file, or a worker that reported the task and has not left."""
    if standing.history.open:
        newest = standing.history.open[-1]
        return replace(standing, state=TaskState.LEASED, holder=newest.worker, held_since=newest.started_at)
    if records.holds_tasks:
        return standing
    running = [seen for seen in records.workers() if standing.task_id in seen.running and not seen.left]
    if not running:
        return standing
    newest_seen = max(running, key=lambda seen: seen.seen_at)
    return replace(standing, state=TaskState.LEASED, holder=newest_seen.worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    worker: str
    state: str
    """`live`, `silent` (no report for 90 s, and no report that it left) or `left`."""
    host: str
    queue: str
    seen_at: datetime
    started_at: datetime
    slots: int
    running: tuple[str, ...]
    done: int
    failed: int
    rate_per_s: float
    labels: Mapping[str, str]
    declined: Mapping[str, str]
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """As in `WorkerSeen`."""

    @property
    def live(self) -> bool:
        return self.state == "live"


def read_workers(records: RecordStore, now: datetime) -> list[WorkerStatus]:
    """Read the workers of the last day, live ones first."""
    order = ("live", "silent", "left")
    found = [worker_status(seen, now) for seen in records.workers()]
    return sorted(found, key=lambda worker: (order.index(worker.state), worker.worker))


def worker_status(seen: WorkerSeen, now: datetime) -> WorkerStatus:
    state = "left" if seen.left else "silent" if now - seen.seen_at > LIVE_FOR else "live"
    same = {each.name: getattr(seen, each.name) for each in fields(WorkerStatus) if each.name != "state"}
    return WorkerStatus(state=state, **same)


def read_worker(stack: Stack, worker: str, *, now: datetime) -> WorkerStatus:
    workers = read_workers(stack.records, now)
    for seen in workers:
        if seen.worker == worker:
            return seen
    raise UnknownName("worker", worker, [seen.worker for seen in workers])
