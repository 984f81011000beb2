"""Calls that are tasks of a queue: one experiment, whose records have their ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from runtime.client.functions import make_call
from runtime.client.tasks.cancel import cancel_task
from runtime.client.tasks.code import find_code_folder, import_root, take_code
from runtime.client.tasks.kept_stacks import KeptStack
from runtime.client.tasks.make import check_argument, open_target
from runtime.client.tasks.packages import take_packages
from runtime.client.tasks.packed import check_packed, digest, encode_packed, request_of
from runtime.client.tasks.returned import find_ended, read_end, read_task_log
from runtime.client.tasks.submit import submit
from runtime.config import load_settings, working_folder
from runtime.errors import UnknownName
from runtime.experiments.calls import Call, Calls
from runtime.records.orders import person
from runtime.tasks.model import CALL_PACKED, CALL_REQUEST, task_id
from runtime.worker.attempts.calls import FILE

TERMS: Final = (
    *("timeout", "max_failures", "expires", "delay", "priority", "resources", "secrets", "stack", "snapshot"),
    *("environment", "with_packages"),
)
"""Fields of tasks; `time_limit` is the job file's word for `timeout`."""


def start_on_queue(
    function: Callable[..., Any],
    items: Sequence[Any],
    name: str,
    queue: str,
    fields: Mapping[str, Any],
    *,
    run: bool,
) -> Calls:
    """Submit a task for each item. The same call again finds the same tasks, as long as the code is the same."""
    terms = {("timeout" if key == "time_limit" else key): value for key, value in fields.items()}
    for key in terms:
        if key not in TERMS:
            raise UnknownName("field", key, TERMS, where="of tasks")
    stack = terms.pop("stack", None)
    asked = queue or None
    folder = find_code_folder(import_root(function) or working_folder())
    call, every = make_call(function, items=items, run=run, folder=folder)
    request = request_of(call, name)
    in_file = call.packed or call.pickled is not None
    more = {FILE: encode_packed({**request, "items": list(every)})} if in_file else {}
    wanted, environment = terms.pop("snapshot", None), terms.pop("environment", None)
    if environment is not None:
        check_argument("environment", environment)
    with open_target(asked, stack) as opened:
        records = (opened.queue if isinstance(opened, KeptStack) else opened).records
        settings = load_settings()
        code = take_code(wanted, records, settings, start=folder, more=more)
        packages = take_packages(environment, records, settings, code, extra=terms.pop("with_packages", ()))
    if in_file:
        check_packed(call.function, wanted, code)
    ids: dict[str, int] = {}

    def make_lines() -> Iterator[dict[str, Any]]:
        for number, item in enumerate(every):
            if in_file:
                entry: dict[str, Any] = {
                    "function": CALL_PACKED,
                    "args": [number, call.function, digest(more[FILE])],
                }
            elif run:
                entry = {"function": CALL_REQUEST, "args": [{**request, "item": item, "number": number}]}
            else:
                entry = {"function": call.function, "args": [item]}
            key = f"{number}-{_key_of(entry, code.snapshot, packages.id)}"
            ids[task_id(name, key=key)] = number
            yield {**entry, "key": key, "folder": code.folder}

    submission = submit(
        make_lines(),
        experiment=name,
        queue=asked,
        stack=stack,
        snapshot=code.snapshot or False,
        environment=packages.id or False,
        **terms,
    )
    source = QueueCalls(name, submission.queue, asked, stack, ids)
    return Calls(name, [Call(number, f"task {task} of {name}", source) for task, number in ids.items()], source)


def _key_of(entry: Mapping[str, Any], snapshot: str | None, environment: str | None) -> str:
    text = json.dumps([entry, snapshot, *filter(None, [environment])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class QueueCalls:
    """The tasks of one experiment."""

    def __init__(self, name: str, queue: str, asked: str | None, stack: str | None, ids: Mapping[str, int]) -> None:
        self._name, self._queue, self._asked, self._stack = name, queue, asked, stack
        self._numbers = dict(ids)
        self._tasks = {number: task for task, number in ids.items()}

    def describe(self) -> str:
        return f"experiment {self._name} in queue {self._queue}"

    def look(self, open: Sequence[int]) -> dict[int, Callable[[], Any]]:
        with open_target(self._asked, self._stack) as opened:
            records = (opened.queue if isinstance(opened, KeptStack) else opened).records
            ended = find_ended(records, self._name, {self._tasks[number] for number in open})
            return {self._numbers[task]: read_end(records, task, generation, loads=True) for task, generation in ended}

    def read_log(self, number: int) -> str:
        with open_target(self._asked, self._stack) as opened:
            records = (opened.queue if isinstance(opened, KeptStack) else opened).records
            return read_task_log(records, self._tasks[number])

    def cancel(self, numbers: Sequence[int] | None) -> list[str]:
        with open_target(self._asked, self._stack) as opened:
            stack: Any = opened.stack if isinstance(opened, KeptStack) else opened
            for number in self._tasks if numbers is None else numbers:
                cancel_task(stack, self._tasks[number], now=datetime.now(UTC), by=person())
        return []
