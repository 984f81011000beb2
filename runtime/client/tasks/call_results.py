"""The value of a task's function, or the error of a task without a value, from its record."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, Final, Protocol

from runtime.client.tasks.build import open_target
from runtime.client.tasks.cancel import cancel_task
from runtime.client.tasks.kept_stacks import KeptStack
from runtime.client.tasks.logs import find_logs, read_log
from runtime.client.tasks.task_facts import read_standing
from runtime.client.values import CallFailed, End
from runtime.errors import NotPossible
from runtime.queues.base import Queue
from runtime.records.base import RecordStore
from runtime.records.codec import read_value
from runtime.records.control_commands import person
from runtime.system import system
from runtime.tasks.calls import PICKLE
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState
from runtime.units import Span, count_noun, format_duration, read_span

FIRST_LOOK_S: Final = 0.02
LAST_LOOK_S: Final = 1.0


def find_ended(records: RecordStore, experiment: str, tasks: Collection[str]) -> list[tuple[str, int]]:
    """Return the newest recorded generation of each of these tasks that has ended, by listings alone."""
    newest: dict[str, int] = {}
    for task, generation in records.recorded(experiment):
        if task in tasks:
            newest[task] = max(generation, newest.get(task, 1))
    if newest:
        # A task that somebody has retried has not ended with its old record.
        for task, generation in records.tried_again(experiment):
            if newest.get(task) == generation:
                del newest[task]
    return list(newest.items())


def read_end(records: RecordStore, task: str, generation: int, *, loads: bool) -> End:
    """Return how the task ended. With `loads` its value may be a pickle, as that of a task that brings a call may.

    Taking such a value runs code that the attempt chose, so it is only for tasks that this user submitted.
    """
    record = records.find(task, generation)
    assert record is not None, "it was listed, and records stay"
    value = read_value(record, records) if record.state is TaskState.SUCCEEDED and not record.unreadable else None

    def take() -> Any:
        if record.state is TaskState.CANCELLED:
            raise CancelledError(f"task {task} was cancelled")
        if record.state is not TaskState.SUCCEEDED or record.unreadable:
            raise _failure(record)
        return _load(value, task) if loads and isinstance(value, dict) and list(value) == [PICKLE] else value

    failed = record.state is not TaskState.SUCCEEDED or record.unreadable
    return End(
        take=take,
        cancelled=record.state is TaskState.CANCELLED,
        failure=_last_line(record) or str(record.reason) if failed else None,
    )


def _load(value: dict[str, str], task: str) -> Any:
    try:
        return pickle.loads(base64.b64decode(value[PICKLE]))
    except Exception as problem:
        raise NotPossible(
            f"the value of task {task} cannot be loaded here: {type(problem).__name__}: {problem}",
            hint="load it where its classes can be imported, or return plain numbers, texts, lists and dictionaries",
        ) from problem


def _last_line(record: Record) -> str:
    return (record.message or record.unreadable or "").strip().rpartition("\n")[2]


def _failure(record: Record) -> CallFailed:
    last = _last_line(record)
    return CallFailed(
        f"task {record.task_id} ended without a value: {record.reason}" + (f": {last}" if last else ""),
        hint=f"runtime explain {record.task_id}",
        traceback=record.log,
    )


# what was submitted


class SubmittedCalls(Protocol):
    """The part of a submission by which its tasks are found."""

    @property
    def experiment(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def stack(self) -> str | None: ...
    @property
    def asked(self) -> Queue | str | None: ...
    @property
    def tasks(self) -> tuple[tuple[str, int], ...] | None: ...
    @property
    def pickles(self) -> bool: ...


def await_ends(made: SubmittedCalls, timeout: Span | None) -> list[End]:
    """Wait until every task has ended; returns `read_end` of each, in the order of submission. Raises `TimeoutError`."""
    span = read_span(timeout, "timeout")
    until = None if span is None else system.monotonic() + span.total_seconds()
    tasks, pause = _named(made), FIRST_LOOK_S
    with open_records(made) as records:
        while True:
            ended = dict(find_ended(records, made.experiment, {task for task, _ in tasks}))
            if len(ended) == len(tasks):
                return [read_end(records, task, ended[task], loads=made.pickles) for task, _ in tasks]
            if span is not None and until is not None and system.monotonic() >= until:
                raise TimeoutError(f"{len(ended)} of {count_noun(len(tasks), 'task')} ended in {format_duration(span)}")
            system.sleep(pause)
            pause = min(LAST_LOOK_S, pause * 1.5)


def read_printed(made: SubmittedCalls) -> str:
    with open_records(made) as records:
        return "".join(read_task_log(records, task) for task, _ in _named(made))


def read_task_log(records: RecordStore, task: str) -> str:
    logs = find_logs(records, read_standing(records, task))
    return b"".join(piece for each in logs for piece in read_log(records, each)).decode(errors="replace")


def cancel_tasks(made: SubmittedCalls) -> None:
    with open_target(made.asked or made.queue, made.stack) as opened:
        stack: Any = opened.stack if isinstance(opened, KeptStack) else opened
        for task, _ in _named(made):
            cancel_task(stack, task, now=system.now(), by=person())


def _named(made: SubmittedCalls) -> tuple[tuple[str, int], ...]:
    if made.tasks is None:
        raise NotPossible(
            "a submission of that many tasks is not followed task by task",
            hint="`runtime.wait(submission)` waits for all of it, and `runtime.map` has a future for each call",
        )
    return made.tasks


@contextmanager
def open_records(made: SubmittedCalls) -> Iterator[RecordStore]:
    with open_target(made.asked or made.queue, made.stack) as opened:
        yield (opened.queue if isinstance(opened, KeptStack) else opened).records
