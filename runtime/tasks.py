"""Tasks, their states and their wire format: values and pure functions.

A task is immutable once submitted. Its wire format is one JSON object, described in docs/task-format.md; the
bare `{"project": …, "workflow": …, "args": […]}` of any producer is one too. Fields that this release does not
know are kept in `extra` and passed on.
"""

from __future__ import annotations

import functools
import json
import json.encoder
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias

from runtime.errors import InvalidTask, InvalidValue, explain_json
from runtime.units import format_time, parse_size, parse_time
from runtime.values import dataclass, field, replace

SCHEMA: Final = 1
DEFAULT_EXPERIMENT: Final = "default"
DEFAULT_MAX_FAILURES: Final = 3

LIMITS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "generation": (1, 1_000_000),
        "max_failures": (0, 1_000_000),
        "priority": (-1_000_000, 1_000_000),
        "timeout_s": (0, 1_000_000_000),
        "resources.cpus": (0, 1_000_000),
        "resources.memory": (0, 1 << 60),
        "resources.gpus": (0, 1_000_000),
    }
)
"""The least and the most of every number of a task, by its name on the wire, whichever way the task is made.

Whole numbers and `resources.memory` may be either; the others stay below the most, and `timeout_s` above the least.
"""

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

    def __post_init__(self) -> None:
        check_task(self)


def make_task(
    terms: Terms, identity: str, entry: Entry, *, key: str | None = None, outputs: tuple[str, ...] = ()
) -> Task:
    """The first generation of a task that has those terms."""
    return Task(
        id=identity,
        entry=entry,
        experiment=terms.experiment,
        resources=terms.resources,
        timeout=terms.timeout,
        not_before=terms.not_before,
        expires_at=terms.expires_at,
        max_failures=terms.max_failures,
        outputs=outputs,
        snapshot=terms.snapshot,
        folder=terms.folder,
        key=key,
        priority=terms.priority,
        submitted_by=terms.submitted_by,
        submitted_at=terms.submitted_at,
    )


TOKEN_CHARS: Final = 16


def new_token() -> str:
    """The random name of one attempt."""
    return os.urandom(TOKEN_CHARS // 2).hex()


def new_tokens() -> Iterator[str]:
    """As many as are wanted, with one call of the system's generator for many; not to be shared with a forked child."""
    while True:
        pool = os.urandom(TOKEN_CHARS // 2 * 256).hex()
        for start in range(0, len(pool), TOKEN_CHARS):
            yield pool[start : start + TOKEN_CHARS]


def hex_digest(data: bytes) -> str:
    """SHA-256 of `data`."""
    import hashlib  # It loads OpenSSL, a thirtieth of `runtime status`, which has nothing to hash.

    return hashlib.sha256(data).hexdigest()


@functools.lru_cache(maxsize=64)
def experiment_digest(experiment: str) -> str:
    """The eight hex digits that end the id of every task of an experiment."""
    return hex_digest(experiment.encode())[:8]


def task_id(experiment: str, *, key: str | None = None, entry: Entry | None = None) -> str:
    """`t-` and 24 hex digits: sixteen of the key, or of the canonical entry, and eight of the experiment."""
    if key is None and entry is None:
        raise ValueError("a task id needs a key or an entry")
    try:
        if entry is None or key is not None:
            basis = canonical_json({"key": key})
        else:
            basis = f'{{"entry":{_canonical_entry(entry)}}}'
        digest = hex_digest(f"{experiment}\0{basis}".encode())
    except (TypeError, ValueError, RecursionError) as problem:
        # What the check says of it is more exact.
        check_text("key", key) if key is not None else check_entry(entry)
        raise InvalidTask("entry", f"is no JSON: {explain_json(problem)}") from None
    return f"t-{digest[:16]}{experiment_digest(experiment)}"


def _make_encoder(*, sort_keys: bool) -> Callable[[object], str]:
    """`JSONEncoder.encode` at a third of its cost, most of which is that it makes the encoder in C again each time."""
    whole = json.JSONEncoder(sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    make: Any = json.encoder.c_make_encoder  # type: ignore[attr-defined]
    if make is None:
        return whole.encode
    markers, indent, skip_keys, allow_nan = None, None, False, False
    quote = json.encoder.encode_basestring
    spell = make(markers, whole.default, quote, indent, ":", ",", sort_keys, skip_keys, allow_nan)

    def encode(value: object) -> str:
        try:
            return "".join(spell(value, 0))
        except RecursionError:
            return whole.encode(value)  # Says it if the value holds itself, for which markers would be needed above.

    return encode


canonical_json: Final = _make_encoder(sort_keys=True)
"""The one spelling of a JSON value that hashes are taken of."""


_to_json: Final = _make_encoder(sort_keys=False)
_quote: Final = functools.lru_cache(maxsize=256)(_to_json)
"""For text that many tasks have in common."""


def _canonical_entry(entry: Entry) -> str:
    """`canonical_json(entry_fields(entry))`; of a function's fields the order is known."""
    if not isinstance(entry, FunctionEntry):
        return canonical_json(entry_fields(entry))
    args = f'"args":{canonical_json(entry.args)},' if entry.args else ""
    kwargs = f',"kwargs":{canonical_json(dict(entry.kwargs))}' if entry.kwargs else ""
    return f'{{{args}"function":{_quote(entry.function)}{kwargs}}}'


def entry_fields(entry: Entry) -> dict[str, Any]:
    # The commonest first, and without subpatterns, which cost more than what is read here.
    match entry:
        case FunctionEntry():
            fields: dict[str, Any] = {"function": entry.function}
            if entry.args:
                fields["args"] = list(entry.args)
            if entry.kwargs:
                fields["kwargs"] = dict(entry.kwargs)
            return fields
        case CommandEntry():
            return {"command": list(entry.command)}
        case WorkflowEntry():
            return {"project": entry.project, "workflow": entry.workflow, "args": list(entry.args)}


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


def encode_task(task: Task) -> str:
    """The JSON of `task_fields(task)`."""
    entry = task.entry
    if not isinstance(entry, FunctionEntry) or not _is_usual(task):
        return _to_json(task_fields(task))
    # Most tasks, at half the cost: a text that has been spelled for the task before is not spelled again.
    args = f',"args":{_to_json(entry.args)}' if entry.args else ""
    kwargs = f',"kwargs":{_to_json(dict(entry.kwargs))}' if entry.kwargs else ""
    return (
        f'{{"schema":{SCHEMA},"id":"{task.id}","experiment":{_quote(task.experiment)},'
        f'"function":{_quote(entry.function)}{args}{kwargs}'
        f"{_spell_code(task.snapshot, task.folder, task.submitted_by)}{_spell_time(task.submitted_at)}}}"
    )


def _is_usual(task: Task) -> bool:
    """Whether it says no more than what it runs, its code, and when and by whom it was submitted."""
    return (
        task.max_failures == DEFAULT_MAX_FAILURES
        and task.key is None
        and task.generation == 1
        and task.timeout is None
        and task.resources is NO_RESOURCES
        and task.not_before is None
        and task.expires_at is None
        and not task.outputs
        and not task.priority
        and not task.extra
    )


@functools.lru_cache(maxsize=64)
def _spell_code(snapshot: str | None, folder: str | None, submitted_by: str | None) -> str:
    fields = {"snapshot": snapshot, "folder": folder, "submitted_by": submitted_by}
    return "".join(f',"{name}":{_to_json(text)}' for name, text in fields.items() if text is not None)


_spelled: tuple[datetime | None, str] = (None, "")
"""The last time that was, and how: tasks that are submitted together have the same."""


def _spell_time(submitted_at: datetime | None) -> str:
    global _spelled
    last, text = _spelled
    if submitted_at is not last:
        text = "" if submitted_at is None else f',"submitted_at":"{format_time(submitted_at)}"'
        _spelled = submitted_at, text
    return text


# checking: what every task holds to, whichever way it was made


def check_task(task: Task) -> None:
    """Raise `InvalidTask`, with the field's name on the wire, for what no queue, worker or store could take."""
    # Each task passes here several times, so what is usual is told at once and only the rest is looked at.
    if not is_id(task.id):
        raise InvalidTask(
            "id", f"is {_shown(task.id)}, expected `t-` and up to 62 letters and digits; `key` takes any text"
        )
    check_entry(task.entry)
    check_terms(task)
    if task.generation is not _FIRST:
        _check_whole("generation", task.generation)
    if task.key is not None:
        check_text("key", task.key)
    if task.outputs is not _NO_OUTPUTS:
        check_texts("outputs", task.outputs)
    if task.extra is not _NOTHING:
        _check_extra(task.extra)


def check_terms(terms: Terms) -> None:
    """The same for what the tasks of a submission have in common."""
    check_experiment_field(terms.experiment)
    if terms.max_failures is not DEFAULT_MAX_FAILURES:
        _check_whole("max_failures", terms.max_failures)
    if terms.priority is not _NO_PRIORITY:
        _check_whole("priority", terms.priority)
    if terms.resources is not NO_RESOURCES:
        check_resources(terms.resources)
    if terms.timeout is not None:
        _check_timeout(terms.timeout)
    if terms.not_before is not None:
        _check_time("not_before", terms.not_before)
    if terms.expires_at is not None:
        _check_time("expires_at", terms.expires_at)
    if terms.snapshot is not None:
        check_text("snapshot", terms.snapshot)
    if terms.folder is not None:
        _check_folder(terms.folder)
    if terms.submitted_by is not None:
        check_text("submitted_by", terms.submitted_by)
    at = terms.submitted_at
    if at is not None and (type(at) is not datetime or at.tzinfo is not UTC):
        _check_time("submitted_at", at)


class Terms(Protocol):
    """What a task and the defaults of many have in common."""

    @property
    def experiment(self) -> str: ...
    @property
    def resources(self) -> Resources: ...
    @property
    def timeout(self) -> timedelta | None: ...
    @property
    def not_before(self) -> datetime | None: ...
    @property
    def expires_at(self) -> datetime | None: ...
    @property
    def max_failures(self) -> int: ...
    @property
    def snapshot(self) -> str | None: ...
    @property
    def folder(self) -> str | None: ...
    @property
    def priority(self) -> int: ...
    @property
    def submitted_by(self) -> str | None: ...
    @property
    def submitted_at(self) -> datetime | None: ...


def _check_folder(folder: object) -> None:
    check_text("folder", folder)
    assert isinstance(folder, str)
    if folder.startswith("/") or {"", ".", ".."} & set(folder.split("/")) or "\0" in folder:
        problem = f"is {_shown(folder)}, expected a relative path without `.` and `..`, such as experiments/a"
        raise InvalidTask("folder", problem)


def check_entry(entry: Entry | None) -> None:
    if isinstance(entry, FunctionEntry):
        check_text("function", entry.function)
        module, _, name = entry.function.partition(":")
        if not module or not name:
            raise InvalidTask("function", f"is {_shown(entry.function)}, expected module:name")
        if type(entry.args) is not tuple and not isinstance(entry.args, tuple | list):
            raise InvalidTask("args", f"is {_kind(entry.args)}, expected an array")
        if type(entry.kwargs) is not dict and not isinstance(entry.kwargs, Mapping):
            raise InvalidTask("kwargs", f"is {_kind(entry.kwargs)}, expected an object")
        if not all(map(is_plain, entry.args)):
            for index, value in enumerate(entry.args):
                _check_json(f"args[{index}]", value)
        for word, value in entry.kwargs.items():
            check_text("kwargs", word)
            if not is_plain(value):
                _check_json(f"kwargs.{word}", value)
    elif isinstance(entry, CommandEntry):
        check_texts("command", entry.command)
        if not entry.command:
            raise InvalidTask("command", 'is empty, expected an argv such as ["echo", "hi"]')
    elif isinstance(entry, WorkflowEntry):
        check_text("project", entry.project)
        check_text("workflow", entry.workflow)
        check_texts("args", entry.args)
    else:
        raise InvalidTask("entry", f"is {_shown(entry)}, expected a workflow, a command or a function")


_match_id = re.compile(r"t-[A-Za-z0-9]{1,62}").fullmatch


def is_id(value: object) -> bool:
    return isinstance(value, str) and _match_id(value) is not None


_FIRST: Final = 1
_NO_PRIORITY: Final = 0
_NO_OUTPUTS: Final = ()


@functools.lru_cache(maxsize=256)
def _is_experiment(name: str) -> bool:
    return 0 < len(name) <= 128 and name[0] != "." and all(c.isalnum() or c in "-_.+@=" for c in name)


def check_experiment_field(name: object) -> None:
    if not isinstance(name, str) or not _is_experiment(name):
        raise InvalidTask("experiment", f"is {_shown(name)}, expected {_EXPERIMENT}")


_EXPERIMENT: Final = "up to 128 letters, digits and -_.+@= not led by a dot"


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        said = (
            "is missing"
            if value is None
            else f"is {'empty' if value == '' else _kind(value)}, expected a non-empty string"
        )
        raise InvalidTask(name, said)
    if not value.isascii():
        _check_encodable(name, value)


def check_texts(name: str, values: object) -> None:
    if type(values) is not tuple and not isinstance(values, tuple | list):
        raise InvalidTask(name, f"is {_kind(values)}, expected an array of strings")
    try:
        if "".join(values).isascii():
            return
    except TypeError:
        pass
    for index, item in enumerate(values):
        if not isinstance(item, str):
            raise InvalidTask(f"{name}[{index}]", f"is {_kind(item)}, expected a string: quote it")
        _check_encodable(f"{name}[{index}]", item)


def _check_encodable(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise InvalidTask(
            name,
            f"holds bytes that are no UTF-8, near {text[max(0, problem.start - 20) : problem.end]!r}",
            hint="name the file by a path that is UTF-8, such as a link to it",
        ) from None


def is_plain(value: object) -> bool:
    """Whether it surely is JSON, and cheaply so."""
    kind = type(value)
    if kind is str:
        return value.isascii()  # type: ignore[attr-defined,no-any-return]
    if kind is int:
        return -(1 << 63) <= value < 1 << 63  # type: ignore[operator]
    if kind is float:
        return math.isfinite(value)  # type: ignore[arg-type]
    return value is None or kind is bool


def _check_json(name: str, value: object) -> None:
    try:
        text = _to_json(value)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InvalidTask(name, f"is no JSON: {explain_json(problem)}") from None
    _check_encodable(name, text)


def _check_extra(extra: object) -> None:
    if not isinstance(extra, Mapping):
        raise InvalidTask("extra", f"is {_kind(extra)}, expected an object")
    for name, value in extra.items():
        if not isinstance(name, str) or name in _FIELDS or name in _ENTRY_FIELDS:
            raise InvalidTask("extra", f"names {_shown(name)}, expected only fields that this release does not know")
        _check_json(name, value)


def _check_whole(name: str, value: object) -> None:
    least, most = LIMITS[name]
    if type(value) is not int or not least <= value <= most:
        raise InvalidTask(name, f"is {_shown(value)}, expected a whole number from {least:,} to {most:,}")


def _check_number(name: str, value: object) -> None:
    least, most = LIMITS[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < most:
        raise InvalidTask(name, f"is {_shown(value)}, expected a number from {least} to below {most:,}")


def _check_timeout(value: object) -> None:
    least, most = LIMITS["timeout_s"]
    if not isinstance(value, timedelta) or not least < value.total_seconds() < most:
        raise _no_seconds("timeout_s", value.total_seconds() if isinstance(value, timedelta) else value)


def _check_time(name: str, value: object) -> None:
    if isinstance(value, datetime):
        if value.tzinfo is UTC:
            return
        try:
            value.astimezone(UTC)
            if value.utcoffset() is not None:
                return
        except OverflowError:
            pass
    raise InvalidTask(name, f"is {_shown(value)}, expected a time with a zone")


def check_resources(resources: object) -> None:
    if not isinstance(resources, Resources):
        raise InvalidTask("resources", f"is {_kind(resources)}, expected Resources")
    _check_number("resources.cpus", resources.cpus)
    _check_number("resources.gpus", resources.gpus)
    if resources.gpus > 1 and resources.gpus != int(resources.gpus):
        raise InvalidTask("resources.gpus", f"is {resources.gpus}, expected a whole number or a part below 1")
    least, most = LIMITS["resources.memory"]
    memory = resources.memory_bytes
    if type(memory) is not int or not least <= memory <= most:
        expected = "bytes or a size such as 16GiB, up to 1024PiB"
        raise InvalidTask("resources.memory", f"is {_shown(memory)}, expected {expected}")


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "an array",
        tuple: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    """What was given, short enough for a line; a number may be too long to be printed at all."""
    try:
        text = repr(value)
    except ValueError:
        text = _kind(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


# the wire


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

    def __post_init__(self) -> None:
        check_terms(self)


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
        fields = _decode(data)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InvalidTask("json", f"cannot be read: {problem}", line=line) from None
    return parse_task(fields, defaults=defaults, fallback_key=fallback_key, line=line)


def decode_stored(body: str) -> Task:
    """The task of a text that `encode_task` wrote, at two thirds of the cost of `decode_task`, which takes the rest.

    Raises `InvalidTask` for what was written by hand, by another release, or damaged.
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
    fields: object, *, defaults: TaskDefaults = _DEFAULTS, fallback_key: str | None = None, line: int | None = None
) -> Task:
    """As `decode_task`, from the decoded object."""
    try:
        return _parse(fields, defaults, fallback_key)
    except InvalidTask as problem:
        raise InvalidTask(problem.field, problem.problem, line=line, hint=problem.hint) from None


def stand_in(identity: Any, experiment: Any, *, generation: Any = 1, submitted_at: datetime | None = None) -> Task:
    """A task in the place of one that cannot be decoded, for the record of that; it must not be run.

    It has the names that are given as far as a task may have them.
    """
    if not isinstance(experiment, str) or not _is_experiment(experiment):
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
    """The task of a manifest's line, or what stands for it and why it cannot be decoded."""
    try:
        return decode_task(line), None
    except InvalidTask as problem:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        named = fields if isinstance(fields, dict) else {}
        # Without an id of its own it gets one that is no other line's.
        identity = named["id"] if is_id(named.get("id")) else line
        return stand_in(identity, experiment, generation=named.get("generation", 1)), problem


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
        if name in _FIELDS:
            if value is not None:
                reader = _READERS.get(name)
                values[name] = value if reader is None else reader(name, value)
        elif name not in _ENTRY_FIELDS:
            extra = {} if extra is None else extra
            extra[name] = value
    if not values and extra is None and fallback_key is None:
        return make_task(defaults, task_id(defaults.experiment, entry=entry), entry)
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
        key=key,
        priority=values.get("priority", defaults.priority),
        submitted_by=values.get("submitted_by", defaults.submitted_by),
        submitted_at=values.get("submitted_at", defaults.submitted_at),
        extra=_NOTHING if extra is None else extra,
    )


_scan = json.JSONDecoder().raw_decode


def _decode(data: str | bytes) -> Any:
    """As `json.loads`, at half the cost where there is nothing around the JSON."""
    if isinstance(data, str) and data.startswith("{"):
        value, end = _scan(data)
        if end == len(data):
            return value
    return json.loads(data)


_FIELDS: Final = frozenset(
    {"id", "experiment", "generation", "resources", "timeout_s", "not_before", "expires_at", "max_failures", "outputs"}
    | {"snapshot", "folder", "key", "priority", "submitted_by", "submitted_at"}
)
_ENTRY_FIELDS: Final = frozenset({"schema", "project", "workflow", "args", "command", "function", "kwargs"})
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


# reading: from what JSON has to what a field holds


def _read_list(name: str, value: object) -> tuple[Any, ...]:
    if type(value) is not list:
        raise InvalidTask(name, f"is {_kind(value)}, expected an array" + (" of strings" if name != "args" else ""))
    return tuple(value)


def _read_seconds(name: str, value: object) -> timedelta:
    least, most = LIMITS[name]
    if type(value) in (int, float) and least < value < most:  # type: ignore[operator]
        return timedelta(seconds=value)  # type: ignore[arg-type]
    raise _no_seconds(name, value)


def _no_seconds(name: str, value: object) -> InvalidTask:
    least, most = LIMITS[name]
    return InvalidTask(name, f"is {_shown(value)}, expected seconds above {least} and below {most:,}")


def _read_time(name: str, value: object) -> datetime:
    check_text(name, value)
    try:
        return parse_time(value, field=name)  # type: ignore[arg-type]
    except InvalidValue as problem:
        raise InvalidTask(name, f"is {_shown(value)}, expected {problem.allowed}") from None


def _read_resources(name: str, value: object) -> Resources:
    if type(value) is not dict:
        raise InvalidTask(name, f'is {_kind(value)}, expected an object such as {{"gpus": 1}}')
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
            raise InvalidTask("resources.memory", f"is {_shown(memory)}, expected {problem.allowed}") from None
    resources = Resources(cpus=value.get("cpus", 0), memory_bytes=memory, gpus=value.get("gpus", 0))
    check_resources(resources)
    return resources


_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "resources": _read_resources,
    "timeout_s": _read_seconds,
    "not_before": _read_time,
    "expires_at": _read_time,
    "outputs": _read_list,
    "submitted_at": _read_time,
}


def next_generation(task: Task) -> Task:
    """The same work, begun anew: budgets start again and no old delay holds. Raises `InvalidTask` after the last."""
    return replace(task, generation=task.generation + 1, not_before=None)


def check_experiment(name: str) -> str:
    """The name itself, or `InvalidValue`."""
    if not _is_experiment(name):
        raise InvalidValue("experiment", name, _EXPERIMENT)
    return name
