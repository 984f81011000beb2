"""Tasks, their states and their wire format: values and pure functions.

A task is immutable once submitted. Its wire format is one JSON object, described in docs/task-format.md; the
bare `{"project": …, "workflow": …, "args": […]}` of any producer is one too. Fields that this release does not
know are kept in `extra` and passed on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from runtime.errors import InvalidTask, InvalidValue
from runtime.units import format_time, parse_size, parse_time

SCHEMA: Final = 1
DEFAULT_EXPERIMENT: Final = "default"
DEFAULT_MAX_FAILURES: Final = 3

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class TaskState(StrEnum):
    """`queued → leased → succeeded | failed | cancelled | expired`; a retry goes back to `queued`."""

    QUEUED = "queued"
    LEASED = "leased"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self not in (TaskState.QUEUED, TaskState.LEASED)


TERMINAL_STATES: Final = tuple(state for state in TaskState if state.terminal)


@dataclass(frozen=True, slots=True)
class WorkflowEntry:
    """A function of a project's registry, called with command-line arguments."""

    project: str
    workflow: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """An argv, run without a shell."""

    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FunctionEntry:
    """An importable callable, `module:qualname`, with JSON arguments."""

    function: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Entry: TypeAlias = WorkflowEntry | CommandEntry | FunctionEntry


@dataclass(frozen=True, slots=True)
class Resources:
    """What one attempt needs of a slot. Zero means no claim beyond the slot's own share."""

    cpus: float = 0
    memory_bytes: int = 0
    gpus: float = 0
    """Whole GPUs, or a part of one below 1."""


NO_RESOURCES: Final = Resources()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    id: str
    entry: Entry
    experiment: str = DEFAULT_EXPERIMENT
    generation: int = 1
    """One life of the task; redrive and retry begin the next."""
    resources: Resources = NO_RESOURCES
    timeout: timedelta | None = None
    not_before: datetime | None = None
    expires_at: datetime | None = None
    max_failures: int = DEFAULT_MAX_FAILURES
    outputs: tuple[str, ...] = ()
    """URLs that prove it done; `--skip-existing` looks at them."""
    snapshot: str | None = None
    """Content id of the code it is bound to; None runs the worker's own."""
    folder: str | None = None
    """Where in the snapshot's tree its attempts start; None is the tree itself."""
    key: str | None = None
    priority: int = 0
    submitted_by: str | None = None
    submitted_at: datetime | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """Fields this release does not know."""


def new_token() -> str:
    """The random name of one attempt."""
    return os.urandom(8).hex()


@functools.lru_cache(maxsize=64)
def experiment_digest(experiment: str) -> str:
    """The eight hex digits that end the id of every task of an experiment."""
    return hashlib.sha256(experiment.encode()).hexdigest()[:8]


def task_id(experiment: str, *, key: str | None = None, entry: Entry | None = None) -> str:
    """`t-` and 24 hex digits: sixteen of the key, or of the canonical entry, and eight of the experiment."""
    basis = {"key": key} if key is not None else {"entry": entry_fields(entry)} if entry else None
    if basis is None:
        raise ValueError("a task id needs a key or an entry")
    text = f"{experiment}\0{canonical_json(basis)}"
    try:
        digest = hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError as problem:
        raise InvalidTask(
            next(iter(basis)),
            f"holds bytes that are no UTF-8, near {text[max(0, problem.start - 20) : problem.end]!r}",
            hint="name the file by a path that is UTF-8, such as a link to it",
        ) from None
    return f"t-{digest[:16]}{experiment_digest(experiment)}"


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: object) -> str:
    """The one spelling of a JSON value that hashes are taken of."""
    return _CANONICAL.encode(value)


def entry_fields(entry: Entry) -> dict[str, Any]:
    match entry:
        case WorkflowEntry(project, workflow, args):
            return {"project": project, "workflow": workflow, "args": list(args)}
        case CommandEntry(command):
            return {"command": list(command)}
        case FunctionEntry(function, args, kwargs):
            fields: dict[str, Any] = {"function": function}
            if args:
                fields["args"] = list(args)
            if kwargs:
                fields["kwargs"] = dict(kwargs)
            return fields


def describe_entry(entry: Entry, *, width: int = 72) -> str:
    """One line for people, cut to `width`."""
    match entry:
        case WorkflowEntry(project, workflow, args):
            text = " ".join((project, workflow, *args))
        case CommandEntry(command):
            text = " ".join(command)
        case FunctionEntry(function, _, _):
            text = f"{function}()"
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def task_fields(task: Task) -> dict[str, Any]:
    """The wire object of a task; what has its default value is left out."""
    fields: dict[str, Any] = {"schema": SCHEMA, "id": task.id, "experiment": task.experiment}
    fields |= entry_fields(task.entry)
    if task.generation != 1:
        fields["generation"] = task.generation
    if task.resources is not NO_RESOURCES and task.resources != NO_RESOURCES:
        fields["resources"] = {
            name: value
            for name, value in (
                ("cpus", task.resources.cpus),
                ("memory", task.resources.memory_bytes),
                ("gpus", task.resources.gpus),
            )
            if value
        }
    if task.timeout is not None:
        fields["timeout_s"] = task.timeout.total_seconds()
    if task.not_before is not None:
        fields["not_before"] = format_time(task.not_before)
    if task.expires_at is not None:
        fields["expires_at"] = format_time(task.expires_at)
    if task.max_failures != DEFAULT_MAX_FAILURES:
        fields["max_failures"] = task.max_failures
    if task.outputs:
        fields["outputs"] = list(task.outputs)
    if task.snapshot is not None:
        fields["snapshot"] = task.snapshot
    if task.folder is not None:
        fields["folder"] = task.folder
    if task.key is not None:
        fields["key"] = task.key
    if task.priority:
        fields["priority"] = task.priority
    if task.submitted_by is not None:
        fields["submitted_by"] = task.submitted_by
    if task.submitted_at is not None:
        fields["submitted_at"] = format_time(task.submitted_at)
    if task.extra:
        fields |= task.extra
    return fields


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def encode_task(task: Task) -> str:
    return _ENCODER.encode(task_fields(task))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefaults:
    """What a line or message that leaves a field out gets instead."""

    experiment: str = DEFAULT_EXPERIMENT
    max_failures: int = DEFAULT_MAX_FAILURES
    timeout: timedelta | None = None
    not_before: datetime | None = None
    expires_at: datetime | None = None
    priority: int = 0
    resources: Resources = NO_RESOURCES
    snapshot: str | None = None
    folder: str | None = None
    """Of `snapshot`; a line that names another one has its own."""
    submitted_by: str | None = None
    submitted_at: datetime | None = None


_DEFAULTS = TaskDefaults()


def decode_task(
    data: str | bytes,
    *,
    defaults: TaskDefaults = _DEFAULTS,
    fallback_key: str | None = None,
    line: int | None = None,
) -> Task:
    """The task of one JSON text. Raises `InvalidTask` with the field and the problem.

    Everything but the entry may be left out. A task without an id gets one from its key, from `fallback_key`
    (a foreign message's own id), or from its entry.
    """
    try:
        fields = json.loads(data)
        if (b"\\ud" if isinstance(data, bytes) else "\\ud") in data.lower():  # type: ignore[operator]
            # Half of a surrogate pair can be escaped in JSON, but nothing that stores text takes it.
            _ENCODER.encode(fields).encode()
    except (ValueError, RecursionError) as problem:
        raise InvalidTask("json", f"cannot be read: {problem}", line=line) from None
    return parse_task(fields, defaults=defaults, fallback_key=fallback_key, line=line)


def decode_stored(body: str) -> Task:
    """The task of a text that `encode_task` wrote: what was checked once is not checked again, which takes a third."""
    fields = _DECODE(body)
    if not fields.keys() <= _PLAIN:
        return parse_task(fields)
    entry: Entry
    if "function" in fields:
        entry = FunctionEntry(fields["function"], tuple(fields.get("args", ())), fields.get("kwargs", {}))
    elif "workflow" in fields:
        entry = WorkflowEntry(fields["project"], fields["workflow"], tuple(fields["args"]))
    else:
        entry = CommandEntry(tuple(fields["command"]))
    at = fields.get("submitted_at")
    return Task(
        id=fields["id"],
        entry=entry,
        experiment=fields["experiment"],
        snapshot=fields.get("snapshot"),
        folder=fields.get("folder"),
        key=fields.get("key"),
        submitted_by=fields.get("submitted_by"),
        submitted_at=None if at is None else datetime.fromisoformat(at),
    )


def parse_task(
    fields: object, *, defaults: TaskDefaults = _DEFAULTS, fallback_key: str | None = None, line: int | None = None
) -> Task:
    """As `decode_task`, from the decoded object."""
    try:
        return _parse(fields, defaults, fallback_key)
    except InvalidTask as problem:
        raise InvalidTask(problem.field, problem.problem, line=line, hint=problem.hint) from None


def _parse(fields: object, defaults: TaskDefaults, fallback_key: str | None) -> Task:
    if type(fields) is not dict:
        raise InvalidTask("json", f"is {_kind(fields)}, expected an object such as {_EXAMPLE}")
    schema = fields.get("schema", SCHEMA)
    if schema != SCHEMA or schema is True:
        raise InvalidTask("schema", f"is {schema!r}, this release reads {SCHEMA}", hint="use a newer release")
    entry = _parse_entry(fields)
    values: dict[str, Any] = {}
    extra: dict[str, Any] | None = None
    for name, value in fields.items():
        parser = _PARSERS.get(name)
        if parser is not None:
            if value is not None:
                values[name] = parser(name, value)
        elif name not in _ENTRY_FIELDS:
            extra = {} if extra is None else extra
            extra[name] = value
    experiment = values.get("experiment", defaults.experiment)
    key = values.get("key")
    if "id" in values:
        identity = values["id"]
    elif key is None and fallback_key is not None:
        identity = task_id(experiment, key=f"message:{fallback_key}")
    else:
        identity = task_id(experiment, key=key, entry=entry)
    return Task(
        id=identity,
        entry=entry,
        experiment=experiment,
        generation=values.get("generation", 1),
        resources=values.get("resources", defaults.resources),
        timeout=values.get("timeout_s", defaults.timeout),
        not_before=values.get("not_before", defaults.not_before),
        expires_at=values.get("expires_at", defaults.expires_at),
        max_failures=values.get("max_failures", defaults.max_failures),
        outputs=values.get("outputs", ()),
        snapshot=values.get("snapshot", defaults.snapshot),
        folder=values.get("folder", None if "snapshot" in values else defaults.folder),
        key=key,
        priority=values.get("priority", defaults.priority),
        submitted_by=values.get("submitted_by", defaults.submitted_by),
        submitted_at=values.get("submitted_at", defaults.submitted_at),
        extra=_NOTHING if extra is None else extra,
    )


_DECODE = json.JSONDecoder().decode
_PLAIN = frozenset(
    {"schema", "id", "experiment", "snapshot", "folder", "key", "submitted_by", "submitted_at"}
    | {"project", "workflow", "args", "command", "function", "kwargs"}
)
"""The fields of most tasks."""
_EXAMPLE = '{"project": "p", "workflow": "w", "args": []}'
_ENTRY_FIELDS = frozenset({"schema", "project", "workflow", "args", "command", "function", "kwargs"})


_STRANGERS = {
    "workflow": ("kwargs",),
    "command": ("project", "args", "kwargs"),
    "function": ("project",),
}
"""Fields that belong to another kind of entry."""


def _parse_entry(fields: dict[str, Any]) -> Entry:
    kinds = [name for name in ("workflow", "command", "function") if name in fields]
    if len(kinds) != 1:
        found = " and ".join(f"`{kind}`" for kind in kinds) or "none of them"
        raise InvalidTask("entry", f"needs one of `workflow`, `command` or `function`, found {found}", hint=None)
    for name in _STRANGERS[kinds[0]]:
        if fields.get(name) is not None:
            raise InvalidTask(name, f"does not go with `{kinds[0]}`")
    args = fields.get("args")
    match kinds[0]:
        case "workflow":
            return WorkflowEntry(
                _text("project", fields.get("project")),
                _text("workflow", fields["workflow"]),
                () if args is None else _texts("args", args),
            )
        case "command":
            command = _texts("command", fields["command"])
            if not command:
                raise InvalidTask("command", 'is empty, expected an argv such as ["echo", "hi"]')
            return CommandEntry(command)
        case _:
            function = _text("function", fields["function"])
            module, _, name = function.partition(":")
            if not module or not name:
                raise InvalidTask("function", f"is {function!r}, expected module:name")
            args, kwargs = [] if args is None else args, fields.get("kwargs")
            kwargs = {} if kwargs is None else kwargs
            if type(args) is not list:
                raise InvalidTask("args", f"is {_kind(args)}, expected an array")
            if type(kwargs) is not dict:
                raise InvalidTask("kwargs", f"is {_kind(kwargs)}, expected an object")
            return FunctionEntry(function, tuple(args), kwargs)


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _text(name: str, value: object) -> str:
    if type(value) is str and value:
        return value if value.isascii() else _encodable(name, value)
    raise InvalidTask(name, "is missing" if value is None else f"is {_kind(value)}, expected a non-empty string")


def _texts(name: str, value: object) -> tuple[str, ...]:
    if type(value) is not list:
        raise InvalidTask(name, f"is {_kind(value)}, expected an array of strings")
    for index, item in enumerate(value):
        if type(item) is not str:
            raise InvalidTask(f"{name}[{index}]", f"is {_kind(item)}, expected a string: quote it")
        if not item.isascii():
            _encodable(f"{name}[{index}]", item)
    return tuple(value)


def _encodable(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidTask(name, f"is {text!r}, which holds bytes that are no UTF-8") from None
    return text


def _whole(least: int, most: int) -> Callable[[str, object], int]:
    def parse(name: str, value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise InvalidTask(name, f"is {value!r}, expected a whole number from {least} to {most}")
        return value

    return parse


def _seconds(name: str, value: object) -> timedelta:
    if type(value) in (int, float) and 0 < value < 1e9:  # type: ignore[operator]
        return timedelta(seconds=value)  # type: ignore[arg-type]
    raise InvalidTask(name, f"is {value!r}, expected seconds above 0")


def _folder(name: str, value: object) -> str:
    text = _text(name, value)
    if text.startswith("/") or {"", ".", ".."} & set(text.split("/")) or "\0" in text:
        raise InvalidTask(name, f"is {text!r}, expected a relative path without `.` and `..`, such as experiments/a")
    return text


def _time(name: str, value: object) -> datetime:
    try:
        return parse_time(_text(name, value), field=name)
    except InvalidValue as problem:
        raise InvalidTask(name, f"is {value!r}, expected {problem.allowed}") from None


def _identity(name: str, value: object) -> str:
    text = _text(name, value)
    if not text.startswith("t-") or len(text) > 64 or not text[2:].isalnum() or not text.isascii():
        raise InvalidTask(name, f"is {text!r}, expected `t-` and up to 62 letters and digits; `key` takes any text")
    return text


def _experiment(name: str, value: object) -> str:
    text = _text(name, value)
    if len(text) > 128 or any(not (c.isalnum() or c in "-_.+@=") for c in text) or text[0] == ".":
        raise InvalidTask(name, f"is {text!r}, expected up to 128 letters, digits and -_.+@= not led by a dot")
    return text


def _resources(name: str, value: object) -> Resources:
    if type(value) is not dict:
        raise InvalidTask(name, f'is {_kind(value)}, expected an object such as {{"gpus": 1}}')
    return parse_resources(value, field=name)


def parse_resources(value: Mapping[str, Any], *, field: str = "resources") -> Resources:
    """`{"cpus": 2, "memory": "16GiB", "gpus": 0.25}`; raises `InvalidTask`."""
    unknown = sorted(set(value) - {"cpus", "memory", "gpus"})
    if unknown:
        raise InvalidTask(f"{field}.{unknown[0]}", "is not known, expected cpus, memory or gpus")
    amounts = {}
    for name in ("cpus", "gpus"):
        amount = value.get(name, 0)
        if type(amount) not in (int, float) or not 0 <= amount < 1e6:
            raise InvalidTask(f"{field}.{name}", f"is {amount!r}, expected a number")
        amounts[name] = amount
    if amounts["gpus"] > 1 and amounts["gpus"] != int(amounts["gpus"]):
        raise InvalidTask(f"{field}.gpus", f"is {amounts['gpus']}, expected a whole number or a part below 1")
    memory = value.get("memory", 0)
    if type(memory) is str:
        try:
            memory = parse_size(memory)
        except InvalidValue as problem:
            raise InvalidTask(f"{field}.memory", f"is {memory!r}, expected {problem.allowed}") from None
    if type(memory) is not int or memory < 0:
        raise InvalidTask(f"{field}.memory", f"is {memory!r}, expected bytes or a size such as 16GiB")
    return Resources(cpus=amounts["cpus"], memory_bytes=memory, gpus=amounts["gpus"])


_PARSERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "id": _identity,
    "experiment": _experiment,
    "generation": _whole(1, 1_000_000),
    "resources": _resources,
    "timeout_s": _seconds,
    "not_before": _time,
    "expires_at": _time,
    "max_failures": _whole(1, 1_000_000),
    "outputs": _texts,
    "snapshot": _text,
    "folder": _folder,
    "key": _text,
    "priority": _whole(-1_000_000, 1_000_000),
    "submitted_by": _text,
    "submitted_at": _time,
}


def next_generation(task: Task) -> Task:
    """The same work, begun anew: budgets start again and no old delay holds."""
    return replace(task, generation=task.generation + 1, not_before=None)


def check_experiment(name: str) -> str:
    """The name itself, or `InvalidValue`."""
    try:
        return _experiment("experiment", name)
    except InvalidTask as problem:
        raise InvalidValue("experiment", name, problem.problem.partition("expected ")[2]) from None
