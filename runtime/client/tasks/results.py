"""What the tasks of an experiment returned: a row for each task, in the order of submission."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from runtime.client.params import params_of_entry
from runtime.client.resolve_id import FindsTasks
from runtime.client.tasks.status import last_line
from runtime.client.tasks.task_facts import read_standing
from runtime.end_reasons import EndReason
from runtime.errors import LOST_FOR_GOOD, InvalidTask
from runtime.records.base import RecordStore, calls_at_once
from runtime.records.codec import read_value
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.tasks.calls import PICKLE
from runtime.tasks.entry_text import describe_entry
from runtime.tasks.id_set import IdSet, task_key
from runtime.tasks.model import Task, TaskState
from runtime.tasks.wire import decode_task

BATCH: Final = 500
"""Tasks whose records are read together."""
_WIDTH: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """A task with the record of its newest generation, if that has ended."""

    task: str
    key: str | None
    arguments: str | None
    """The call or command on one line; None if only a foreign producer knows it."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters by name, as far as the entry shows them."""
    state: TaskState
    """`queued` also while it runs, if the store does not hold the queue."""
    reason: EndReason | None = None
    message: str | None = None
    value: Any = None
    value_url: str | None = None
    """The place of a value over 64 KiB, which is in `value` only if it was asked for."""
    value_type: str | None = None
    """`pickle` for a value that only the call's `result()` loads; None for one that is in `value`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    exit_code: int | None = None
    attempts: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    duration_s: float | None = None
    outputs_url: str | None = None


@dataclass(frozen=True, slots=True)
class ListedTask:
    task_id: str
    task: Task | None
    generation: int
    state: TaskState | None
    """None if its record has the state, if there is one."""

    @property
    def label(self) -> str:
        """The name of the task among those of its experiment: its key, or the beginning of its id."""
        return self.task.key if self.task and self.task.key else self.task_id[:14]


def list_tasks(records: RecordStore, experiment: str) -> Iterator[ListedTask]:
    """Yield the tasks of an experiment in the order of submission, then those of foreign producers."""
    return _held(records, experiment) if isinstance(records, FindsTasks) else _submitted(records, experiment)


def read_results(records: RecordStore, experiment: str, *, large_values: bool = False) -> Iterator[TaskResult]:
    """Yield the results of all tasks of an experiment; with `large_values` values over 64 KiB, too.

    Reads the records of `BATCH` tasks at a time, so memory is bounded by those, and 16 bytes for each task.
    """
    listed = list_tasks(records, experiment)
    with system.pool(calls_at_once(records), name="results") as pool:
        while batch := list(itertools.islice(listed, BATCH)):
            yield from pool.map(lambda each: _read(records, each, large_values=large_values), batch)


def read_result(records: RecordStore, task_id: str, *, large_values: bool = False) -> TaskResult:
    """Read the result of one task. Raises `UnknownName` if an embedded file has no such task."""
    standing = read_standing(records, task_id)
    listed = ListedTask(task_id, standing.task, standing.generation, standing.state)
    return _read(records, listed, large_values=large_values)


def _held(records: FindsTasks, experiment: str) -> Iterator[ListedTask]:
    for task_id, stored in records.list_tasks(experiment):
        yield ListedTask(task_id, stored.task, stored.generation, stored.state)


def _submitted(records: RecordStore, experiment: str) -> Iterator[ListedTask]:
    """Yield the tasks of the manifest, then tasks with a record alone, which a foreign producer put."""
    newest: dict[str, int] = {}
    recorded, listed = IdSet(), IdSet()
    for task_id, generation in records.recorded(experiment):
        recorded.add(task_key(task_id, 1))
        if generation > 1:
            newest[task_id] = max(generation, newest.get(task_id, 1))
    again = {task_id for task_id, _ in records.tried_again(experiment)}

    def place(task_id: str, task: Task | None) -> ListedTask:
        waits = task_id in again or task_key(task_id, 1) not in recorded
        return ListedTask(task_id, task, newest.get(task_id, 1), TaskState.QUEUED if waits else None)

    for task in _manifest(records, experiment):
        if listed.add(task_key(task.id, 1)):
            yield place(task.id, task)
    for task_id, _ in records.recorded(experiment):
        if listed.add(task_key(task_id, 1)):
            yield place(task_id, None)


def _manifest(records: RecordStore, experiment: str) -> Iterator[Task]:
    for part in records.parts(experiment):
        try:
            lines = records.read_part(part)
        except LOST_FOR_GOOD as problem:
            CleanLogger(__name__).warning("%s; its tasks without a record are left out", problem.message)
            continue
        for line in lines:
            try:
                yield decode_task(line)
            except InvalidTask:
                continue  # `repair` makes it a dead letter, whose record is listed.


def _read(records: RecordStore, listed: ListedTask, *, large_values: bool) -> TaskResult:
    task = listed.task
    record = None
    if listed.state is None or listed.state.terminal:
        record = records.find(listed.task_id, listed.generation)
    named: dict[str, Any] = {
        "task": listed.task_id,
        "key": task.key if task else None,
        "arguments": describe_entry(task.entry, width=_WIDTH) if task else None,
        "params": params_of_entry(task.entry) if task else {},
    }
    if record is None:
        return TaskResult(**named, state=listed.state or TaskState.QUEUED)
    value, problem = record.value, record.unreadable
    if large_values and record.value_url is not None and problem is None:
        value = read_value(record, records)
    packed = isinstance(value, dict) and list(value) == [PICKLE]
    started, ended = record.started_at, record.ended_at
    return TaskResult(
        **named,
        state=record.state,
        reason=record.reason,
        message=last_line(record.message or problem) or None,
        value=None if packed else value,
        value_url=record.value_url,
        value_type="pickle" if packed else None,
        metrics=record.metrics,
        metric_ranges=record.metric_ranges,
        exit_code=record.exit_code,
        attempts=record.attempts,
        started_at=started,
        ended_at=ended,
        duration_s=(ended - started).total_seconds() if started else None,
        outputs_url=record.outputs_url,
    )
