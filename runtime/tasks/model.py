"""Tasks and their states, how a task's id is made, and the one check that every task passes. Pure.

A task is immutable once submitted. Fields that this release does not know are kept in `extra` and passed on.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from runtime.errors import InvalidTask, InvalidValue, explain_json
from runtime.system import system
from runtime.tasks.artifacts import NO_ARTIFACTS, ArtifactSpec, check_artifacts
from runtime.tasks.canonical_json import canonical_json, plain_json, quote_json
from runtime.tasks.notification_sinks import NO_SINKS, TaskSink, check_sinks

if TYPE_CHECKING:
    from runtime.tasks.container import ContainerSpec

SCHEMA: Final = 1
DEFAULT_EXPERIMENT: Final = "default"
DEFAULT_MAX_FAILURES: Final = 3
FIRST_GENERATION: Final = 1
NO_PRIORITY: Final = 0
NO_OUTPUTS: Final = ()

FIELDS: Final = frozenset(
    {"id", "experiment", "generation", "resources", "timeout_s", "not_before", "expires_at", "max_failures", "outputs"}
    | {"snapshot", "folder", "environment", "image", "mounts", "secrets", "artifacts", "notify", "key", "priority"}
    | {"submitted_by", "submitted_at"}
)
ENTRY_FIELDS: Final = frozenset({"schema", "project", "workflow", "args", "command", "function", "kwargs"})

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
"""The least and the most of every number of a task, by its name on the wire.

Whole numbers and `resources.memory` may be either; the others stay below the most, and `timeout_s` above the least.
"""

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


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
    """Resources that one attempt needs of a slot. Zero means no claim beyond the slot's own share."""

    cpus: float = 0
    memory_bytes: int = 0
    gpus: float = 0
    """Whole GPUs, or a part of one below 1."""


NO_RESOURCES: Final = Resources()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Fields that the tasks of a submission have in common; also the defaults of a line or message without them."""

    experiment: str = DEFAULT_EXPERIMENT
    resources: Resources = NO_RESOURCES
    timeout: timedelta | None = None
    not_before: datetime | None = None
    expires_at: datetime | None = None
    max_failures: int = DEFAULT_MAX_FAILURES
    snapshot: str | None = None
    """Content id of the code that attempts run; None runs the worker's own."""
    folder: str | None = None
    """The folder of the snapshot's tree that attempts start in; None is the tree itself."""
    environment: str | None = None
    """Content id of the packages and the Python that attempts run with; None stands for the worker's own."""
    container: ContainerSpec | None = None
    """The container that attempts run in; None runs them as processes of the worker's machine. On the wire `image` and `mounts`."""
    secrets: tuple[str, ...] | None = None
    """Names of the stack's secrets that attempts get; None stands for those that the stack gives to each attempt."""
    artifacts: ArtifactSpec = NO_ARTIFACTS
    notify: tuple[TaskSink, ...] = NO_SINKS
    """Who hears of the task's end."""
    priority: int = 0
    submitted_by: str | None = None
    submitted_at: datetime | None = None

    def __post_init__(self) -> None:
        check_terms(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Terms):
    id: str
    entry: Entry
    generation: int = 1
    """One life of the task; redrive and retry begin the next."""
    outputs: tuple[str, ...] = ()
    """URLs that prove it done; `--skip-existing` looks at them."""
    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """Fields that this release does not know."""

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
        environment=terms.environment,
        container=terms.container,
        secrets=terms.secrets,
        artifacts=terms.artifacts,
        notify=terms.notify,
        key=key,
        priority=terms.priority,
        submitted_by=terms.submitted_by,
        submitted_at=terms.submitted_at,
    )


TOKEN_CHARS: Final = 16


def new_token() -> str:
    """The random name of one attempt."""
    return system.urandom(TOKEN_CHARS // 2).hex()


def new_tokens() -> Iterator[str]:
    """As many as are wanted, with one call of the system's generator for many; not to be shared with a forked child."""
    while True:
        pool = system.urandom(TOKEN_CHARS // 2 * 256).hex()
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
        return _hashed_id(experiment, basis)
    except (TypeError, ValueError, RecursionError) as problem:
        # The check's own error is more exact.
        check_text("key", key) if key is not None else check_entry(entry)
        raise InvalidTask("entry", f"is no JSON: {explain_json(problem)}") from None


def _hashed_id(experiment: str, basis: str) -> str:
    digest = hex_digest(f"{experiment}\0{basis}".encode())
    return f"t-{digest[:16]}{experiment_digest(experiment)}"


def _canonical_entry(entry: Entry) -> str:
    """`canonical_json(entry_fields(entry))`; of a function's fields the order is known."""
    if not isinstance(entry, FunctionEntry):
        return canonical_json(entry_fields(entry))
    args = canonical_json(entry.args) if entry.args else ""
    kwargs = canonical_json(dict(entry.kwargs)) if entry.kwargs else ""
    first, last = f'"args":{args},' if args else "", f',"kwargs":{kwargs}' if kwargs else ""
    return f'{{{first}"function":{quote_json(entry.function)}{last}}}'


def entry_fields(entry: Entry) -> dict[str, Any]:
    # The commonest first, and without subpatterns, which cost more than the rest of this function.
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


# checking: the rules for every task, however it was made


def check_task(task: Task) -> None:
    """Raise `InvalidTask`, with the field's name on the wire, for a task that no queue, worker or store could take."""
    # Each task passes here several times, so the usual values are recognized at once and only others examined.
    if not is_id(task.id):
        raise InvalidTask(
            "id", f"is {show_value(task.id)}, expected `t-` and up to 62 letters and digits; `key` takes any text"
        )
    check_entry(task.entry)
    check_terms(task)
    if task.generation is not FIRST_GENERATION:
        _check_whole("generation", task.generation)
    if task.key is not None:
        check_text("key", task.key)
    if task.outputs is not NO_OUTPUTS:
        check_texts("outputs", task.outputs)
    if task.extra is not NOTHING:
        _check_extra(task.extra)
    if task.snapshot is None and task.artifacts.named:
        raise InvalidTask("artifacts", "needs a `snapshot`: without one, attempts share the folder of their worker")


def check_terms(terms: Terms) -> None:
    """The same for the terms of a submission."""
    check_experiment_field(terms.experiment)
    if terms.max_failures is not DEFAULT_MAX_FAILURES:
        _check_whole("max_failures", terms.max_failures)
    if terms.priority is not NO_PRIORITY:
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
    if terms.environment is not None and not is_content_id(terms.environment):
        raise InvalidTask(
            "environment",
            f"is {show_value(terms.environment)}, expected sha256: and 64 hex digits",
            hint="`runtime submit --environment` takes a lock file, and `--dry-run` prints its id",
        )
    if terms.container is not None:
        from runtime.tasks.container import check_container  # few tasks have one

        check_container(terms.container, terms.environment)
    if terms.secrets is not None:
        _check_secrets(terms.secrets)
    if terms.artifacts is not NO_ARTIFACTS:
        check_artifacts(terms.artifacts)
    if terms.notify is not NO_SINKS:
        check_sinks(terms.notify)
    if terms.submitted_by is not None:
        check_text("submitted_by", terms.submitted_by)
    at = terms.submitted_at
    if at is not None and (type(at) is not datetime or at.tzinfo is not UTC):
        _check_time("submitted_at", at)


def _check_folder(folder: object) -> None:
    check_text("folder", folder)
    assert isinstance(folder, str)
    if folder.startswith("/") or {"", ".", ".."} & set(folder.split("/")) or "\0" in folder:
        problem = f"is {show_value(folder)}, expected a relative path without `.` and `..`, such as experiments/a"
        raise InvalidTask("folder", problem)


_SECRET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")


def _check_secrets(names: object) -> None:
    if not isinstance(names, tuple | list):
        raise InvalidTask("secrets", f"is {describe_kind(names)}, expected an array of names of the stack's secrets")
    for index, name in enumerate(names):
        if not isinstance(name, str) or _SECRET_NAME.fullmatch(name) is None:
            # It may be a value that somebody put here, so it is not repeated.
            raise InvalidTask(f"secrets[{index}]", "is no name of a secret, expected one such as hf-token")


def check_entry(entry: Entry | None) -> None:
    if isinstance(entry, FunctionEntry):
        check_text("function", entry.function)
        module, _, name = entry.function.partition(":")
        if not module or not name:
            raise InvalidTask("function", f"is {show_value(entry.function)}, expected module:name")
        if type(entry.args) is not tuple and not isinstance(entry.args, tuple | list):
            raise InvalidTask("args", f"is {describe_kind(entry.args)}, expected an array")
        if type(entry.kwargs) is not dict and not isinstance(entry.kwargs, Mapping):
            raise InvalidTask("kwargs", f"is {describe_kind(entry.kwargs)}, expected an object")
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
        if any("\0" in word for word in entry.command):
            raise InvalidTask("command", "holds a NUL character, and no program takes one in its arguments")
    elif isinstance(entry, WorkflowEntry):
        check_text("project", entry.project)
        check_text("workflow", entry.workflow)
        check_texts("args", entry.args)
    else:
        raise InvalidTask("entry", f"is {show_value(entry)}, expected a workflow, a command or a function")


_match_id = re.compile(r"t-[A-Za-z0-9]{1,62}").fullmatch
_match_content_id = re.compile(r"sha256:[0-9a-f]{64}").fullmatch


def is_content_id(value: object) -> bool:
    return isinstance(value, str) and _match_content_id(value) is not None


def is_id(value: object) -> bool:
    return isinstance(value, str) and _match_id(value) is not None


@functools.lru_cache(maxsize=256)
def is_experiment(name: str) -> bool:
    return 0 < len(name) <= 128 and name[0] != "." and all(c.isalnum() or c in "-_.+@=" for c in name)


def check_experiment_field(name: object) -> None:
    if not isinstance(name, str) or not is_experiment(name):
        raise InvalidTask("experiment", f"is {show_value(name)}, expected {_EXPERIMENT}")


_EXPERIMENT: Final = "up to 128 letters, digits and -_.+@= not led by a dot"


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        said = (
            "is missing"
            if value is None
            else f"is {'empty' if value == '' else describe_kind(value)}, expected a non-empty string"
        )
        raise InvalidTask(name, said)
    if not value.isascii():
        _check_encodable(name, value)


def check_texts(name: str, values: object) -> None:
    if type(values) is not tuple and not isinstance(values, tuple | list):
        raise InvalidTask(name, f"is {describe_kind(values)}, expected an array of strings")
    try:
        if "".join(values).isascii():
            return
    except TypeError:
        pass
    for index, item in enumerate(values):
        if not isinstance(item, str):
            raise InvalidTask(f"{name}[{index}]", f"is {describe_kind(item)}, expected a string: quote it")
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
        text = plain_json(value)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InvalidTask(name, f"is no JSON: {explain_json(problem)}") from None
    _check_encodable(name, text)


def _check_extra(extra: object) -> None:
    if not isinstance(extra, Mapping):
        raise InvalidTask("extra", f"is {describe_kind(extra)}, expected an object")
    for name, value in extra.items():
        if not isinstance(name, str) or name in FIELDS or name in ENTRY_FIELDS:
            raise InvalidTask(
                "extra", f"names {show_value(name)}, expected only fields that this release does not know"
            )
        _check_json(name, value)


def _check_whole(name: str, value: object) -> None:
    least, most = LIMITS[name]
    if type(value) is not int or not least <= value <= most:
        raise InvalidTask(name, f"is {show_value(value)}, expected a whole number from {least:,} to {most:,}")


def _check_number(name: str, value: object) -> None:
    least, most = LIMITS[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < most:
        raise InvalidTask(name, f"is {show_value(value)}, expected a number from {least} to below {most:,}")


def _check_timeout(value: object) -> None:
    least, most = LIMITS["timeout_s"]
    if not isinstance(value, timedelta) or not least < value.total_seconds() < most:
        raise no_seconds("timeout_s", value.total_seconds() if isinstance(value, timedelta) else value)


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
    raise InvalidTask(name, f"is {show_value(value)}, expected a time with a zone")


def check_resources(resources: object) -> None:
    if not isinstance(resources, Resources):
        raise InvalidTask("resources", f"is {describe_kind(resources)}, expected Resources")
    _check_number("resources.cpus", resources.cpus)
    _check_number("resources.gpus", resources.gpus)
    if resources.gpus > 1 and resources.gpus != int(resources.gpus):
        raise InvalidTask("resources.gpus", f"is {resources.gpus}, expected a whole number or a part below 1")
    least, most = LIMITS["resources.memory"]
    memory = resources.memory_bytes
    if type(memory) is not int or not least <= memory <= most:
        expected = "bytes or a size such as 16GiB, up to 1024PiB"
        raise InvalidTask("resources.memory", f"is {show_value(memory)}, expected {expected}")


def describe_kind(value: object) -> str:
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


def show_value(value: object) -> str:
    """The given value, short enough for a line; a number may be too long to be printed at all."""
    try:
        text = repr(value)
    except ValueError:
        text = describe_kind(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def next_generation(task: Task) -> Task:
    """The same work once more: budgets start again and no old delay holds. Raises `InvalidTask` after the last."""
    return replace(task, generation=task.generation + 1, not_before=None)


def check_experiment(name: str) -> str:
    """The name itself, or `InvalidValue`."""
    if not is_experiment(name):
        raise InvalidValue("experiment", name, _EXPERIMENT)
    return name


def check_new_experiment(name: str) -> str:
    """The name itself, or `InvalidValue`; also where commands would take the name for the id of something else.

    For new submissions alone: experiments of other producers and of earlier releases have the names that they have.
    """
    check_experiment(name)
    if name == "last" or name.startswith("w-") or is_id(name) or re.fullmatch("j-[0-9a-f]*", name):
        allowed = "a name that is neither `last` nor the id of a task, a worker or a job"
        raise InvalidValue("experiment", name, allowed, hint=f"name another, such as `--experiment of-{name}`")
    return name


def no_seconds(name: str, value: object) -> InvalidTask:
    least, most = LIMITS[name]
    return InvalidTask(name, f"is {show_value(value)}, expected seconds above {least} and below {most:,}")
