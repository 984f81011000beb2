"""Trials that are tasks of a queue. A task is never changed, so the task under a trial's number is what was asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runtime.client.functions import make_call
from runtime.client.resolve_id import FindsTasks, find_submitted
from runtime.client.tasks.build import open_target, submitter
from runtime.client.tasks.call_results import find_ended, read_end
from runtime.client.tasks.kept_stacks import KeptStack
from runtime.client.tasks.pickled_calls import check_packed, digest, encode_packed, request_of
from runtime.client.tasks.publish import decode_part
from runtime.client.tasks.submit import submit
from runtime.client.tasks.task_snapshot import find_code_folder, import_root, take_code
from runtime.client.values import End
from runtime.config import load_settings, working_folder
from runtime.errors import NotPossible
from runtime.experiments.queues import read_terms
from runtime.experiments.tune import OtherStudy, check_same, warn_of_code
from runtime.queues.base import Queue
from runtime.records.base import RecordStore
from runtime.tasks.calls import CALL_PACKED, CALL_REQUEST, CALLS_FILE
from runtime.tasks.model import FunctionEntry, Task, task_id

STUDY: Final = "study"
"""Field of a call's request that says which study it is a trial of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """The code that every trial of a study runs: that of the program that began it."""

    entry: Mapping[str, Any]
    """Fields of a task, without those that differ from trial to trial."""
    snapshot: str | None
    folder: str | None


class QueuePlace:
    """The tasks of one experiment, with the trial's number as key."""

    at_once = True

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        queue: str | Queue,
        told: Mapping[str, Any],
        fields: Mapping[str, Any],
    ) -> None:
        self._function, self._name, self._told = function, name, told
        self._asked = queue or None
        self._terms, self._stack, self._wanted = read_terms(fields)
        self._code: _Code | None = None

    def read(self) -> Sequence[Mapping[str, Any]]:
        with open_target(self._asked, self._stack) as opened:
            records = _records(opened)
            ours = self._take_code(records)
            found = {task.id: task for task in _list_tasks(records, self._name)}
        variants: list[Mapping[str, Any]] = []
        while (task := found.get(self._id(len(variants)))) is not None:
            variants.append(self._read_variant(task))
        if variants:
            self._code = _code_of(found[self._id(0)])
            if self._code.snapshot != ours.snapshot:
                warn_of_code(self._name, self._code.snapshot)
        else:
            self._code = ours
        return variants

    def start(self, number: int, variant: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._code is not None
        entry = _with_trial(self._code.entry, {"item": dict(variant), "number": number, STUDY: dict(self._told)})
        line = {**entry, "key": str(number), "folder": self._code.folder}
        done = submit(
            [line],
            experiment=self._name,
            queue=self._asked,
            stack=self._stack,
            snapshot=self._code.snapshot or False,
            **self._terms,
        )
        if done.new:
            return variant
        # Another program was first, now or when it was this one's turn before.
        with open_target(self._asked, self._stack) as opened:
            task = find_submitted(_records(opened), self._id(number))
        if task is None:
            raise NotPossible(
                f"task {self._id(number)} of study `{self._name}` cannot be read", hint="give the study another `name`"
            )
        stands = self._read_variant(task)
        if number == 0:
            self._code = _code_of(task)
        return stands

    def look(self, open: Sequence[int]) -> dict[int, End]:
        numbers = {self._id(number): number for number in open}
        with open_target(self._asked, self._stack) as opened:
            records = _records(opened)
            ended = find_ended(records, self._name, numbers.keys())
            return {numbers[task]: read_end(records, task, generation, loads=True) for task, generation in ended}

    def close(self) -> None:
        pass

    def _id(self, number: int) -> str:
        return task_id(self._name, key=str(number))

    def _read_variant(self, task: Task) -> Mapping[str, Any]:
        """Raises `OtherStudy` for a task that is not a trial of this study."""
        mine, theirs = submitter().rpartition("@")[0], (task.submitted_by or "").rpartition("@")[0]
        if mine != theirs:
            # Values of theirs could be pickles, and loading those runs code.
            raise OtherStudy(self._name, "owner", theirs, mine)
        trial = _trial_of(task)
        check_same(self._name, trial.get(STUDY), self._told)
        variant: Mapping[str, Any] = trial["item"]
        return variant

    def _take_code(self, records: RecordStore) -> _Code:
        folder = find_code_folder(import_root(self._function) or working_folder())
        call, _ = make_call(self._function, items=(), run=True, folder=folder)
        request = request_of(call, self._name)
        packed = encode_packed(request) if call.pickled is not None else None
        more = {CALLS_FILE: packed} if packed else {}
        code = take_code(self._wanted, records, load_settings(), start=folder, more=more)
        if packed is None:
            entry: dict[str, Any] = {"function": CALL_REQUEST, "args": [request]}
        else:
            check_packed(call.function, self._wanted, code)
            entry = {"function": CALL_PACKED, "args": [None, call.function, digest(packed), {}]}
        return _Code(entry=entry, snapshot=code.snapshot, folder=code.folder)


def _records(opened: Any) -> RecordStore:
    records: RecordStore = (opened.queue if isinstance(opened, KeptStack) else opened).records
    return records


def _list_tasks(records: RecordStore, name: str) -> Iterable[Task]:
    if isinstance(records, FindsTasks):
        return [stored.task for _, stored in records.list_tasks(name) if stored.task is not None]
    return [task for part in records.parts(name) for task in decode_part(records, part)[0]]


def _trial_of(task: Task) -> Mapping[str, Any]:
    """The part of a task's arguments that says which trial of which study it is; empty for another task."""
    entry = task.entry
    if isinstance(entry, FunctionEntry) and entry.function in (CALL_REQUEST, CALL_PACKED) and entry.args:
        last = entry.args[-1]
        if isinstance(last, Mapping) and isinstance(last.get("item"), Mapping):
            return last
    return {}


def _with_trial(entry: Mapping[str, Any], trial: Mapping[str, Any]) -> dict[str, Any]:
    *first, last = entry["args"]
    return {"function": entry["function"], "args": [*first, {**last, **trial}]}


def _code_of(task: Task) -> _Code:
    assert isinstance(task.entry, FunctionEntry)
    *first, last = task.entry.args
    plain = {name: each for name, each in last.items() if name not in ("item", "number", STUDY)}
    entry = {"function": task.entry.function, "args": [*first, plain]}
    return _Code(entry=entry, snapshot=task.snapshot, folder=task.folder)
