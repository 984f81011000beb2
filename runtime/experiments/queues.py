"""Calls that are tasks of a queue: one experiment, whose records have their ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from runtime.client.functions import make_call
from runtime.client.params import SHOWN
from runtime.client.tasks.build import check_argument, choose_container
from runtime.client.tasks.call_results import find_ended, read_end, read_task_log
from runtime.client.tasks.cancel import cancel_task
from runtime.client.tasks.environment import take_packages
from runtime.client.tasks.pickled_calls import check_packed, digest, encode_packed, request_of
from runtime.client.tasks.submit import submit
from runtime.client.tasks.task_snapshot import find_code_folder, import_root, take_code
from runtime.client.values import End
from runtime.config import working_folder
from runtime.errors import UnknownName
from runtime.experiments.calls import Call, Calls
from runtime.records.control_commands import person
from runtime.snapshots.provenance import own_argv
from runtime.stack.open import OpenStack, open_stack
from runtime.system import system
from runtime.tasks.calls import CALL_PACKED, CALL_REQUEST, CALLS_FILE
from runtime.tasks.model import task_id

TERMS: Final = (
    *("timeout", "max_failures", "expires", "delay", "priority", "resources", "secrets", "stack", "snapshot"),
    *("environment", "with_packages", "image", "mounts"),
    *("capture", "capture_every", "reuse"),
    *("notify", "notify_on"),
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
    again: bool = False,
) -> Calls:
    """Submit a task for each item. The same call finds the same tasks, unless the code has changed or `again` is true."""
    terms, stack, wanted = read_terms(fields)
    asked = queue or None
    folder = find_code_folder(import_root(function) or working_folder())
    call, every = make_call(function, items=items, run=run, folder=folder)
    request = request_of(call, name)
    in_file = call.packed or call.pickled is not None
    # Items that are JSON stay in the tasks, so that people see them, and all calls of one function share a snapshot.
    kept = encode_packed({**request, "items": list(every)} if call.packed else request)
    more = {CALLS_FILE: kept} if in_file else {}
    environment, extra = terms.pop("environment", None), terms.pop("with_packages", ())
    if environment is not None:
        check_argument("environment", environment)
    image, mounts = terms.get("image"), terms.get("mounts", ())
    if image is not None or mounts:
        _, environment = choose_container(image, mounts, environment, extra)
    # It stays open for the calls, which end wherever the program has gone meanwhile.
    opened = open_stack(stack, queue=asked)
    code = take_code(wanted, opened.records, opened.settings, start=folder, more=more)
    packages = take_packages(environment, opened.records, opened.settings, code, extra=extra)
    if in_file:
        check_packed(call.function, wanted, code)
    salt = system.urandom(8).hex() if again else None
    ids: dict[str, int] = {}
    argv = own_argv()

    def make_lines() -> Iterator[dict[str, Any]]:
        for number, item in enumerate(every):
            entry: dict[str, Any]
            if call.packed:
                entry = {"function": CALL_PACKED, "args": [number, call.function, digest(kept), {SHOWN: item[SHOWN]}]}
            elif in_file:
                said = {"item": item, "number": number}
                entry = {"function": CALL_PACKED, "args": [None, call.function, digest(kept), said]}
            else:
                entry = {"function": CALL_REQUEST, "args": [{**request, "item": item, "number": number}]}
            key = f"{number}-{_key_of([entry, code.snapshot, packages.id, salt, *([image] if image else [])])}"
            ids[task_id(name, key=key)] = number
            # Not part of the key: the same call from another command line is the same task.
            yield {**entry, "kwargs": {"argv": argv}, "key": key, "folder": code.folder}

    submission = submit(
        make_lines(),
        experiment=name,
        queue=asked,
        stack=stack,
        snapshot=code.snapshot or False,
        environment=packages.id or False,
        **terms,
    )
    source = QueueCalls(name, submission.queue, opened, ids)
    return Calls(name, [Call(number, f"task {task} of {name}", source) for task, number in ids.items()], source)


def read_terms(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, Any]:
    """Return the terms of tasks among the fields, and `stack` and `snapshot` beside them. Raises `UnknownName`."""
    terms = {("timeout" if key == "time_limit" else key): value for key, value in fields.items()}
    for key in terms:
        if key not in TERMS:
            raise UnknownName("field", key, TERMS, where="of tasks")
    return terms, terms.pop("stack", None), terms.pop("snapshot", None)


def _key_of(parts: Sequence[Any]) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class QueueCalls:
    """The tasks of one experiment."""

    def __init__(self, name: str, queue: str, stack: OpenStack, ids: Mapping[str, int]) -> None:
        self._name, self._queue, self._stack = name, queue, stack
        self._numbers = dict(ids)
        self._tasks = {number: task for task, number in ids.items()}
        self._alone = system.lock()
        """Held while the stack is in use, since the calls' own thread and the program's share it."""

    def describe(self) -> str:
        return f"experiment {self._name} in queue {self._queue}"

    def look(self, open: Sequence[int]) -> dict[int, End]:
        with self._alone:
            records = self._stack.records
            ended = find_ended(records, self._name, {self._tasks[number] for number in open})
            return {self._numbers[task]: read_end(records, task, generation, loads=True) for task, generation in ended}

    def read_log(self, number: int) -> str:
        with self._alone:
            return read_task_log(self._stack.records, self._tasks[number])

    def cancel(self, numbers: Sequence[int] | None) -> list[str]:
        with self._alone:
            for number in self._tasks if numbers is None else numbers:
                cancel_task(self._stack, self._tasks[number], now=system.now(), by=person())
        return []
