"""What the function of a task returned, and how a task ended that has no value, from its record."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from runtime.client.values import CallFailed
from runtime.errors import NotPossible
from runtime.records.base import RecordStore
from runtime.records.codec import read_value
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState
from runtime.worker.attempts.calls import PICKLE


def read_end(records: RecordStore, task: str, generation: int, *, loads: bool) -> Callable[[], Any]:
    """Return a function that returns the task's value, or raises `CallFailed` or `CancelledError` as it ended.

    With `loads` a value that JSON does not hold is loaded, which may run code that the attempt chose: only for what this
    user submitted.
    """
    record = records.find(task, generation)
    assert record is not None, "it was listed, and records stay"
    value = read_value(record, records) if record.state is TaskState.SUCCEEDED and not record.unreadable else None

    def take() -> Any:
        if record.state is TaskState.CANCELLED:
            raise CancelledError
        if record.state is not TaskState.SUCCEEDED or record.unreadable:
            raise _failure(record)
        return _load(value, task) if loads and isinstance(value, dict) and list(value) == [PICKLE] else value

    return take


def _load(value: dict[str, str], task: str) -> Any:
    try:
        return pickle.loads(base64.b64decode(value[PICKLE]))
    except Exception as problem:
        raise NotPossible(
            f"the value of task {task} cannot be loaded here: {type(problem).__name__}: {problem}",
            hint="load it where its classes can be imported, or return plain numbers, texts, lists and dictionaries",
        ) from problem


def _failure(record: Record) -> CallFailed:
    said = (record.message or record.unreadable or "").strip()
    last = said.rpartition("\n")[2]
    return CallFailed(
        f"task {record.task_id} ended without a value: {record.reason}" + (f": {last}" if last else ""),
        hint=f"runtime explain {record.task_id}",
        traceback=record.log,
    )
