"""Makes tasks from a caller's arguments: functions, triples, entries, and the terms that all of them share."""

from __future__ import annotations

import functools
import getpass
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from runtime.client.tasks.kept_stacks import KeptStack, borrow_stack, look_up_variable
from runtime.client.tasks.task_snapshot import import_root
from runtime.errors import InvalidTask, InvalidValue, RequestRefused, explain_json
from runtime.queues.base import Queue
from runtime.system import system
from runtime.tasks.canonical_json import canonical_json
from runtime.tasks.literal_secrets import refuse_secrets
from runtime.tasks.model import (
    DEFAULT_EXPERIMENT,
    NO_RESOURCES,
    Entry,
    FunctionEntry,
    Resources,
    Task,
    Terms,
    WorkflowEntry,
    check_terms,
    check_text,
    check_texts,
    is_plain,
    make_task,
    task_id,
)
from runtime.tasks.wire import parse_resources, parse_task
from runtime.units import Span, to_span

if TYPE_CHECKING:
    from runtime.tasks.container import ContainerSpec

OWN_CODE: Final = "worker"
"""Stands for the worker's own code in place of a content id."""


Work: TypeAlias = Task | Callable[..., Any] | tuple[str, str, Sequence[str]] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(Terms):
    """The terms of all tasks of a submission; a field that a task sets itself comes first."""

    key: str | None = None
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_terms(self)
        check_texts("outputs", self.outputs)
        for place in self.outputs:
            _check_output(place)
        if self.key is not None:
            check_text("key", self.key)

    def make_task(self, entry: Entry, *, key: str | None = None, outputs: tuple[str, ...] | None = None) -> Task:
        key = self.key if key is None else key
        identity = task_id(self.experiment, key=key, entry=entry)
        return make_task(self, identity, entry, key=key, outputs=self.outputs if outputs is None else outputs)


def _check_output(place: str) -> None:
    scheme, separator, rest = place.partition("://")
    if not place or (separator and (scheme not in ("file", "gs", "s3") or not rest.strip("/"))):
        raise InvalidValue("output", place, "a path or a file:, gs:// or s3:// URL")


def submitter() -> str:
    # The variables that `getpass` takes a name from, in its order.
    find = look_up_variable
    name = find(b"LOGNAME") or find(b"USER") or find(b"LNAME") or find(b"USERNAME")
    return _submitter(name or os.geteuid(), system.node())


@functools.lru_cache(16)
def _submitter(_: bytes | int, host: str) -> str:
    """Cache the name by the values that it depends on."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # A container's user may have no name.
        user = "unknown"
    # An environment variable may hold any bytes.
    return f"{user}@{host}".encode(errors="replace").decode()


def is_importable(function: Callable[..., Any]) -> bool:
    """Whether another process can import this callable."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__":
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


def function_entry(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> FunctionEntry:
    """Make the entry that names a callable by its import path.

    Raises `RequestRefused` if a worker cannot import it, or for arguments that JSON cannot hold.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    shown = f"{module}:{name}" if name else repr(function)
    reason = None
    if not module or not name:
        reason = "it has no name of its own"
    elif "<lambda>" in name:
        reason = "it is a lambda"
    elif "<locals>" in name:
        reason = "it is defined inside another function"
    elif module == "__main__":
        reason = "it is defined in the script that runs, which a worker cannot import"
    elif not is_importable(function):
        reason = "its module has something else under that name, as for a method of an object and a function that is wrapped later"
    if reason:
        raise RequestRefused(
            f"function `{shown}` cannot be submitted: {reason}",
            hint="move it to the top level of a module that workers can import, and submit it from there",
        )
    entry = FunctionEntry(shown, tuple(args), dict(kwargs or {}))
    if kwargs or not all(map(is_plain, args)):
        try:
            canonical_json([entry.args, entry.kwargs])
        except (TypeError, ValueError, RecursionError) as problem:
            raise RequestRefused(
                f"arguments of function `{shown}` cannot be submitted: {explain_json(problem)}",
                facts=["a task is JSON: text, numbers, true, false, null, lists and dictionaries"],
                hint="pass a path or an id, and load the rest in the function",
            ) from None
    refuse_secrets(entry)
    return entry


def make_tasks(
    work: Work | Iterable[Work],
    options: TaskOptions,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Task]:
    """Make the tasks of any argument of `submit`, as they are needed."""
    if is_one(work):
        yield make_task_of(work, options, args, kwargs)
        return
    if options.key is not None:
        raise RequestRefused("`key` names one task, and this is a list", hint='give each its own: {"key": "…", …}')
    if args or kwargs:
        raise RequestRefused("`args` and `kwargs` belong to one function or workflow, and this is a list")
    if not isinstance(work, Iterable):
        raise InvalidTask(
            "work", f"is {type(work).__name__}, expected a task, a function, a workflow or a list of them"
        )
    for number, each in enumerate(work, start=1):
        try:
            yield make_task_of(each, options, (), None)
        except InvalidTask as problem:
            raise InvalidTask(problem.field, problem.problem, line=number, hint=problem.hint) from None


def is_one(work: object) -> bool:
    return callable(work) or isinstance(work, Task | Mapping) or _is_triple(work)


def _is_triple(work: object) -> bool:
    return (
        isinstance(work, tuple)
        and len(work) in (2, 3)
        and all(isinstance(part, str) for part in work[:2])
        and (len(work) == 2 or isinstance(work[2], list | tuple))
    )


def make_task_of(work: Any, options: TaskOptions, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Task:
    task = _make_task_of(work, options, args, kwargs)
    refuse_secrets(task.entry)
    return task


def _make_task_of(work: Any, options: TaskOptions, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Task:
    if isinstance(work, Task):
        if work.experiment != options.experiment:
            raise InvalidTask("experiment", f"is {work.experiment!r}, and this submission is of `{options.experiment}`")
        place: dict[str, Any] = {}
        if work.environment is None and work.container is None:
            place = {"environment": options.environment, "container": options.container}
        complete = work.submitted_at and work.submitted_by and work.snapshot and not any(place.values())
        if complete and (work.notify or not options.notify):
            return work
        return replace(
            work,
            submitted_at=work.submitted_at or options.submitted_at,
            submitted_by=work.submitted_by or options.submitted_by,
            snapshot=work.snapshot or options.snapshot,
            folder=work.folder if work.snapshot else options.folder,
            notify=work.notify or options.notify,
            **place,
        )
    if type(work) is dict or isinstance(work, Mapping):
        task = parse_task(work if type(work) is dict else dict(work), defaults=options)
        if task.experiment != options.experiment:
            raise InvalidTask("experiment", f"is {task.experiment!r}, and this submission is of `{options.experiment}`")
        if options.key is not None and task.key is None and "id" not in work:
            task = replace(task, key=options.key, id=task_id(task.experiment, key=options.key))
        return replace(task, outputs=options.outputs) if options.outputs and not task.outputs else task
    if _is_triple(work):
        words = [*(work[2] if len(work) == 3 else ()), *args]
        for index, word in enumerate(words):
            if not isinstance(word, str):
                raise InvalidTask(f"args[{index}]", f"is {word!r}, expected text as on a command line")
        return options.make_task(WorkflowEntry(work[0], work[1], tuple(words)))
    if callable(work):
        return options.make_task(function_entry(work, args, kwargs))
    raise InvalidTask(
        "work", f"is {work!r:.60}, expected a task, a function, a workflow or an object of the wire format"
    )


def make_one(work: Any, terms: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Task:
    """Make the task of `work` with these terms, the arguments of `TaskOptions`."""
    if not isinstance(work, FunctionType):
        return make_task_of(work, TaskOptions(**terms), args, kwargs)
    entry = function_entry(work, args, kwargs)
    return Task(id=task_id(terms["experiment"], key=terms["key"], entry=entry), entry=entry, **terms)


def experiment_of(work: object) -> str:
    """Return the experiment that a task or an object names, or the default."""
    if isinstance(work, Task):
        return work.experiment
    if isinstance(work, Mapping) and isinstance(work.get("experiment"), str):
        return str(work["experiment"])
    if isinstance(work, list | tuple) and work and not _is_triple(work):
        return experiment_of(work[0])
    return DEFAULT_EXPERIMENT


def module_folder(work: object) -> Path | None:
    """Find the folder of a function's code, which is submitted even outside the working directory."""
    if isinstance(work, FunctionType):
        return import_root(work)
    if isinstance(work, list | tuple) and work and not _is_triple(work):
        return module_folder(work[0])
    return import_root(work) if callable(work) and not isinstance(work, Task | Mapping) else None


def moment_after(now: datetime, value: Span, name: str) -> datetime:
    """Return the time a duration after `now`. Raises `InvalidValue` beyond the calendar."""
    span = to_span(value, name)
    try:
        return now + span
    except OverflowError:
        raise InvalidValue(name, value, "a time before the year 10000") from None


LISTS: Final = (tuple, list)
_ARGUMENTS: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "args": ((tuple, list), "a list of arguments"),
    "kwargs": ((dict, Mapping), "a dictionary of arguments by their names"),
    "experiment": ((str,), "a name, which is text"),
    "resources": ((Resources, Mapping), 'a dictionary such as {"cpus": 2, "memory": "16GiB"}, or `Resources`'),
    "outputs": ((tuple, list, str), "a list of paths and URLs"),
    "secrets": ((tuple, list), "a list of names of the stack's secrets"),
    "environment": ((str, Path, bool), 'a lock file, "frozen", "none" or a content id'),
    "image": ((str,), "the name of an image, such as ghcr.io/lab/train:1.4"),
    "mounts": ((tuple, list), "a list of mounts, such as /data/imagenet:/data"),
    "with_packages": ((tuple, list), "a list of packages with versions, such as numpy==2.1"),
    "capture": ((dict, Mapping), 'a dictionary of paths by tag, such as {"model": "out/model"}'),
    "reuse": ((dict, Mapping), 'a dictionary of artifacts by tag, such as {"base": "sweep/model"}'),
    "snapshot": ((str, Path, bool), "the content id of a snapshot as text, a folder as `Path`, True or False"),
    "progress": ((FunctionType, Callable), "a function of a number of tasks"),
    "queue": ((str,), "the name or URL of a queue, which is text, or an open queue"),
    "stack": ((str,), "the name of a stack, which is text"),
}
"""Types of each argument, and their description in errors. The task made from them checks the details."""


def check_argument(name: str, value: object) -> None:
    kinds, allowed = _ARGUMENTS[name]
    if isinstance(value, kinds):
        return
    if name in ("args", "outputs") and isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return  # Such as a range; a text would give its letters.
    try:
        # The value of a secret may have been passed in the place of its name.
        shown = repr(value) if name != "secrets" else type(value).__name__
    except (RecursionError, ValueError):
        shown = type(value).__name__
    raise InvalidValue(name, shown if len(shown) <= 60 else f"{shown[:59]}…", allowed)


def choose_container(
    image: object, mounts: object, environment: Any, extra: Sequence[str] = ()
) -> tuple[ContainerSpec | None, Any]:
    """Return the container of tasks, and the environment to submit: in a container a project's own one does not hold."""
    from runtime.tasks.container import make_container

    if image is not None:
        check_argument("image", image)
    check_argument("mounts", mounts)
    container = make_container(image, mounts)
    return container, False if container and environment is None and not extra else environment


def read_resources(value: Resources | Mapping[str, Any] | None) -> Resources:
    if value is None:
        return NO_RESOURCES
    return value if isinstance(value, Resources) else parse_resources(value)


def open_target(queue: str | Queue | None, stack: str | None) -> AbstractContextManager[KeptStack | Queue]:
    if stack is not None:
        check_argument("stack", stack)
    if queue is None or isinstance(queue, str):
        return borrow_stack(stack, queue)
    if not hasattr(queue, "records"):
        check_argument("queue", queue)
    return nullcontext(queue)
