"""The wire format of tasks: one JSON object, described in docs/task-format.md. Pure.

The bare `{"project": …, "workflow": …, "args": […]}` of any producer is a task too.
"""

from __future__ import annotations

import functools
import json
import json.encoder
import operator
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from runtime.errors import InvalidTask, InvalidValue
from runtime.tasks.artifacts import NO_ARTIFACTS, artifacts_fields, read_artifacts
from runtime.tasks.canonical_json import plain_json
from runtime.tasks.model import (
    DEFAULT_EXPERIMENT,
    DEFAULT_MAX_FAILURES,
    ENTRY_FIELDS,
    FIELDS,
    FIRST_GENERATION,
    LIMITS,
    NO_OUTPUTS,
    NO_PRIORITY,
    NO_RESOURCES,
    NOTHING,
    SCHEMA,
    CommandEntry,
    Entry,
    FunctionEntry,
    Resources,
    Task,
    Terms,
    WorkflowEntry,
    check_experiment_field,
    check_resources,
    check_text,
    describe_kind,
    entry_fields,
    is_experiment,
    is_id,
    make_task,
    no_seconds,
    show_value,
    task_id,
)
from runtime.tasks.notification_sinks import NO_SINKS, read_sinks, sink_fields
from runtime.units import format_time, parse_size, parse_time


def task_fields(task: Task) -> dict[str, Any]:
    """The wire object of a task, without fields that have their default value."""
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
    if task.environment is not None:
        fields["environment"] = task.environment
    if task.container is not None:
        from runtime.tasks.container import container_fields

        fields |= container_fields(task.container)
    if task.secrets is not None:
        fields["secrets"] = list(task.secrets)
    if task.artifacts is not NO_ARTIFACTS and (artifacts := artifacts_fields(task.artifacts)):
        fields["artifacts"] = artifacts
    if task.notify:
        fields["notify"] = [sink_fields(sink) for sink in task.notify]
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


def encode_task(task: Task) -> str:
    """The JSON of `task_fields(task)`."""
    entry = task.entry
    if not isinstance(entry, FunctionEntry) or _rare_fields(task) != _USUAL:
        return plain_json(task_fields(task))
    # Most tasks, at half the cost: a text that has been spelled for the task before is not spelled again.
    before = spell_head(task.experiment, entry.function)
    args = plain_json(entry.args) if entry.args else ""
    kwargs = plain_json(dict(entry.kwargs)) if entry.kwargs else ""
    behind = spell_code(task.snapshot, task.folder, task.submitted_by)
    return spell_call(task.id, before, args, kwargs, behind, _spell_time(task.submitted_at))


def spell_call(identity: str, before: str, args: str, kwargs: str, behind: str, at: str) -> str:
    """The JSON of a function's task from that of its parts; an empty text stands for none."""
    if args:
        args = f',"args":{args}'
    if kwargs:
        kwargs = f',"kwargs":{kwargs}'
    return f'{{"schema":{SCHEMA},"id":"{identity}",{before}{args}{kwargs}{behind}{at}}}'


@functools.lru_cache(maxsize=256)
def spell_head(experiment: str, function: str) -> str:
    return f'"experiment":{plain_json(experiment)},"function":{plain_json(function)}'


_rare_fields: Final = operator.attrgetter(
    *("max_failures", "key", "generation", "timeout", "resources", "environment", "container", "secrets", "artifacts"),
    *("notify", "not_before", "expires_at", "outputs", "priority", "extra"),
)
"""The fields of a task beside its entry, its code, and its time and author of submission."""
_USUAL: Final = (
    *(DEFAULT_MAX_FAILURES, None, FIRST_GENERATION, None, NO_RESOURCES, None, None, None, NO_ARTIFACTS),
    *(NO_SINKS, None, None, NO_OUTPUTS, NO_PRIORITY, NOTHING),
)


@functools.lru_cache(maxsize=64)
def spell_code(snapshot: str | None, folder: str | None, submitted_by: str | None) -> str:
    fields = {"snapshot": snapshot, "folder": folder, "submitted_by": submitted_by}
    return "".join(f',"{name}":{plain_json(text)}' for name, text in fields.items() if text is not None)


_spelled: tuple[datetime | None, str] = (None, "")
"""The last time that was spelled, and its text: tasks that are submitted together have the same."""


def _spell_time(submitted_at: datetime | None) -> str:
    global _spelled
    last, text = _spelled
    if submitted_at is not last:
        text = "" if submitted_at is None else f',"submitted_at":"{format_time(submitted_at)}"'
        _spelled = submitted_at, text
    return text


# the wire


_DEFAULTS = Terms()


def decode_task(
    data: str | bytes,
    *,
    defaults: Terms = _DEFAULTS,
    fallback_key: str | None = None,
    line: int | None = None,
) -> Task:
    """The task of one JSON text. Raises `InvalidTask` with the field and the problem.

    Everything but the entry may be left out. A task without an id gets one from its key, from `fallback_key`
    (a foreign message's own id), or from its entry.
    """
    try:
        fields = _decode(data) if line is None else json.loads(data, object_pairs_hook=unique_keys)
    except KeyTwice as twice:
        raise InvalidTask(twice.key, "is given twice", line=line) from None
    except (TypeError, ValueError, RecursionError) as problem:
        raise InvalidTask("json", f"cannot be read: {problem}", line=line) from None
    return parse_task(fields, defaults=defaults, fallback_key=fallback_key, line=line)


def decode_stored(body: str) -> Task:
    """The task of a text that `encode_task` wrote, at two thirds of the cost of `decode_task`, which takes other texts.

    Raises `InvalidTask` for an invalid text, such as one written by hand or damaged.
    """
    try:
        fields = _decode(body)
        names = fields.keys()
        entry: Entry
        if names <= _PLAIN_FUNCTION:
            entry = FunctionEntry(fields["function"], _stored(fields.get("args", [])), fields.get("kwargs", {}))
        elif names <= _PLAIN_COMMAND:
            entry = CommandEntry(_stored(fields["command"]))
        elif names <= _PLAIN_WORKFLOW:
            entry = WorkflowEntry(fields["project"], fields["workflow"], _stored(fields["args"]))
        else:
            return decode_task(body)
        if fields["schema"] != SCHEMA:
            return decode_task(body)
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
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return decode_task(body)


def _stored(value: object) -> tuple[Any, ...]:
    if type(value) is not list:
        raise TypeError
    return tuple(value)


def parse_task(
    fields: object, *, defaults: Terms = _DEFAULTS, fallback_key: str | None = None, line: int | None = None
) -> Task:
    """`decode_task` from the decoded object."""
    try:
        return _parse(fields, defaults, fallback_key)
    except InvalidTask as problem:
        raise InvalidTask(problem.field, problem.problem, line=line, hint=problem.hint) from None


def stand_in(identity: Any, experiment: Any, *, generation: Any = 1, submitted_at: datetime | None = None) -> Task:
    """A task in the place of an undecodable one, for its record; it must not be run.

    It gets the given names as far as a task may have them.
    """
    if not isinstance(experiment, str) or not is_experiment(experiment):
        experiment = DEFAULT_EXPERIMENT
    if not is_id(identity):
        identity = task_id(experiment, key=f"malformed:{str(identity).encode(errors='backslashreplace').decode()}")
    least, most = LIMITS["generation"]
    whole = type(generation) is int and least <= generation <= most
    return Task(
        id=identity,
        entry=CommandEntry(("false",)),
        experiment=experiment,
        generation=generation if whole else 1,
        submitted_at=submitted_at,
    )


def read_line(line: str, experiment: str) -> tuple[Task, InvalidTask | None]:
    """The task of a manifest's line, or a stand-in and the reason why the line cannot be decoded."""
    try:
        return decode_task(line), None
    except InvalidTask as problem:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        named = fields if isinstance(fields, dict) else {}
        # Without its own id it gets a unique one.
        identity = named["id"] if is_id(named.get("id")) else line
        return stand_in(identity, experiment, generation=named.get("generation", 1)), problem


def _parse(fields: object, defaults: Terms, fallback_key: str | None) -> Task:
    if type(fields) is not dict:
        raise InvalidTask("json", f"is {describe_kind(fields)}, expected an object such as {_EXAMPLE}")
    schema = fields.get("schema", SCHEMA)
    if schema != SCHEMA or schema is True:
        raise InvalidTask("schema", f"is {schema!r}, this release reads {SCHEMA}", hint="use a newer release")
    entry = _parse_entry(fields)
    values: dict[str, Any] = {}
    extra: dict[str, Any] | None = None
    for name, value in fields.items():
        if name in FIELDS:
            if value is not None:
                reader = _READERS.get(name)
                values[name] = value if reader is None else reader(name, value)
        elif name not in ENTRY_FIELDS:
            extra = {} if extra is None else extra
            extra[name] = value
    if not values and extra is None and fallback_key is None:
        return make_task(defaults, task_id(defaults.experiment, entry=entry), entry)
    environment, container = values.get("environment", defaults.environment), defaults.container
    if "image" in values or "mounts" in values:
        from runtime.tasks.container import take_container

        container, environment = take_container(values, container), values.get("environment")
    elif container is not None and "environment" in values:
        container = None
    experiment = values.get("experiment", defaults.experiment)
    check_experiment_field(experiment)
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
        environment=environment,
        container=container,
        secrets=values.get("secrets", defaults.secrets),
        artifacts=values.get("artifacts", defaults.artifacts),
        notify=values.get("notify", defaults.notify),
        key=key,
        priority=values.get("priority", defaults.priority),
        submitted_by=values.get("submitted_by", defaults.submitted_by),
        submitted_at=values.get("submitted_at", defaults.submitted_at),
        extra=NOTHING if extra is None else extra,
    )


class KeyTwice(ValueError):
    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"`{key}` is given twice")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of a line that a person or their program wrote; `json` would drop all but the last of equal keys."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        raise KeyTwice(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return made


_scan = json.JSONDecoder().raw_decode


def _decode(data: str | bytes) -> Any:
    """`json.loads` at half the cost for a text that is nothing but an object."""
    if isinstance(data, str) and data.startswith("{"):
        value, end = _scan(data)
        if end == len(data):
            return value
    return json.loads(data)


# The fields of most tasks.
_PLAIN: Final = frozenset({"schema", "id", "experiment", "snapshot", "folder", "key", "submitted_by", "submitted_at"})
_PLAIN_FUNCTION: Final = _PLAIN | {"function", "args", "kwargs"}
_PLAIN_COMMAND: Final = _PLAIN | {"command"}
_PLAIN_WORKFLOW: Final = _PLAIN | {"project", "workflow", "args"}
_EXAMPLE = '{"project": "p", "workflow": "w", "args": []}'


_OF_OTHERS: Final = frozenset({"workflow", "command", "project"})
_STRANGERS = {
    "workflow": ("kwargs",),
    "command": ("project", "args", "kwargs"),
    "function": ("project",),
}
"""Fields that belong to another kind of entry."""


def _parse_entry(fields: dict[str, Any]) -> Entry:
    if "function" in fields and _OF_OTHERS.isdisjoint(fields):
        return _parse_function(fields)
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
            args = () if args is None else _read_list("args", args)
            return WorkflowEntry(fields.get("project"), fields["workflow"], args)  # type: ignore[arg-type]
        case "command":
            return CommandEntry(_read_list("command", fields["command"]))
        case _:
            return _parse_function(fields)


def _parse_function(fields: dict[str, Any]) -> FunctionEntry:
    args, kwargs = fields.get("args"), fields.get("kwargs")
    args = () if args is None else _read_list("args", args)
    return FunctionEntry(fields["function"], args, {} if kwargs is None else kwargs)


# reading: from JSON values to fields


def _read_list(name: str, value: object) -> tuple[Any, ...]:
    if type(value) is not list:
        raise InvalidTask(
            name, f"is {describe_kind(value)}, expected an array" + (" of strings" if name != "args" else "")
        )
    return tuple(value)


def _read_seconds(name: str, value: object) -> timedelta:
    least, most = LIMITS[name]
    if type(value) in (int, float) and least < value < most:  # type: ignore[operator]
        return timedelta(seconds=value)  # type: ignore[arg-type]
    raise no_seconds(name, value)


def _read_time(name: str, value: object) -> datetime:
    check_text(name, value)
    try:
        return parse_time(value, field=name)  # type: ignore[arg-type]
    except InvalidValue as problem:
        raise InvalidTask(name, f"is {show_value(value)}, expected {problem.allowed}") from None


def _read_resources(name: str, value: object) -> Resources:
    if type(value) is not dict:
        raise InvalidTask(name, f'is {describe_kind(value)}, expected an object such as {{"gpus": 1}}')
    return parse_resources(value)


def parse_resources(value: Mapping[str, Any]) -> Resources:
    """`{"cpus": 2, "memory": "16GiB", "gpus": 0.25}`; raises `InvalidTask`."""
    unknown = sorted(set(value) - {"cpus", "memory", "gpus"}, key=str)
    if unknown:
        raise InvalidTask(f"resources.{unknown[0]}", "is not known, expected cpus, memory or gpus")
    memory = value.get("memory", 0)
    if type(memory) is str:
        try:
            memory = parse_size(memory)
        except InvalidValue as problem:
            raise InvalidTask("resources.memory", f"is {show_value(memory)}, expected {problem.allowed}") from None
    resources = Resources(cpus=value.get("cpus", 0), memory_bytes=memory, gpus=value.get("gpus", 0))
    check_resources(resources)
    return resources


_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "resources": _read_resources,
    "timeout_s": _read_seconds,
    "not_before": _read_time,
    "expires_at": _read_time,
    "outputs": _read_list,
    "secrets": _read_list,
    "artifacts": read_artifacts,
    "notify": read_sinks,
    "submitted_at": _read_time,
}
