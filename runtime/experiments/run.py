"""`runtime.run_experiment` and `runtime.map`: a function on this process, on a job's target, or in a queue, by one word."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, Final

from runtime.client.functions import check_returns_value, name_function
from runtime.client.values import End
from runtime.errors import InvalidValue, RequestRefused
from runtime.experiments.calls import Call, Calls
from runtime.shim.call import Run
from runtime.shim.files import METRICS
from runtime.tasks.model import check_new_experiment

HERE: Final = "here"
"""The target that is this process itself."""
QUEUE: Final = "queue:"
"""Before the name of a queue as a target."""
ANY_ARGUMENTS: Final = 0x4
"""Flag of the code of functions with `*args`, which decorators return; `inspect`, which names it, takes long to import."""
_counter = itertools.count()


def run_experiment(
    function: Callable[..., Any],
    variant: Any = None,
    *,
    name: str | None = None,
    target: str = HERE,
    again: bool = False,
    **fields: Any,
) -> Any:
    """Call `function(run, variant)`, where `run` has the folders, the name and the reports of this run.

    On the target `here` the call is made in this process, and its value is returned; elsewhere the result is a `Call`, whose
    `result()` is the value. A target is `here`, one of a job (`local`, or one of the project's), or `queue:NAME`. `fields` are
    those of a job file, such as `resources={"gpus": 1}`. The same call made before is found again, unless `again` is true.
    Raises the function's exception on `here`, and `RequestRefused`.
    """
    name = check_call(function, name, target)
    if target == HERE:
        refuse_fields(fields)
        return function(LocalRun(name, variant, function), variant)
    return _start(function, [variant], name, target, fields, run=True, single=True, again=again)[0]


def map(  # noqa: A001  as the builtin, of which it is the form elsewhere
    function: Callable[..., Any],
    items: Iterable[Any],
    *,
    name: str | None = None,
    target: str = HERE,
    again: bool = False,
    **fields: Any,
) -> Calls:
    """Call `function(item)` for each item, or `function(run, item)` if that is what it takes, and return the calls as futures
    in the order of the items.

    On `here` the calls are made in turn before this returns. On a job's target they are one array, and in a queue one
    experiment of tasks. Otherwise as `run_experiment`.
    """
    name, run = check_call(function, name, target), takes_run(function)
    if target != HERE:
        every = list(items)
        return _start(function, every, name, target, fields, run=run, again=again) if every else Calls(name, [])
    refuse_fields(fields)
    calls = []
    for number, item in enumerate(items):
        call = Call(number, f"call {number} of {name}")
        try:
            value = function(LocalRun(name, item, function, number), item) if run else function(item)
            call.finish(End(take=lambda value=value: value))  # type: ignore[misc]
        except Exception as problem:
            call.set_exception(problem)
        calls.append(call)
    return Calls(name, calls)


def takes_run(function: Callable[..., Any]) -> bool:
    """Whether a function has to be called with its run before the item: two arguments are needed, and the first is `run`."""
    given: set[str] = set()
    while isinstance(function, partial):
        if function.args:
            return False
        given.update(function.keywords)
        function = function.func
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return False
    if code.co_flags & ANY_ARGUMENTS and hasattr(function, "__wrapped__"):
        return takes_run(function.__wrapped__)
    bound = getattr(function, "__self__", None) is not None
    needed = code.co_varnames[bound : code.co_argcount - len(getattr(function, "__defaults__", None) or ())]
    needed = tuple(name for name in needed if name not in given)
    return len(needed) == 2 and needed[0] == "run"


def _start(
    function: Callable[..., Any],
    items: list[Any],
    name: str,
    target: str,
    fields: dict[str, Any],
    *,
    run: bool,
    single: bool = False,
    again: bool = False,
) -> Calls:
    if target.startswith(QUEUE):
        from runtime.experiments.queues import start_on_queue

        return start_on_queue(function, items, name, target.removeprefix(QUEUE), fields, run=run, again=again)
    from runtime.client.jobs.calls import fields_of_call
    from runtime.client.jobs.launch import launch
    from runtime.client.jobs.prepare import LaunchOptions
    from runtime.experiments.jobs import JobCalls

    options = fields.pop("options", None) or LaunchOptions(experiment=name)
    options = replace(options, again=options.again or again)
    made, options = fields_of_call(
        function,
        items if single else (),
        fields={"name": name, **fields},
        options=options,
        items=None if single else items,
        run=run,
    )
    source = JobCalls(launch(made, target, options=options))
    what = f"{name} ({source.job.id[:10]})"
    calls = [Call(n, what if single else f"run {n} of {what}", source) for n in range(len(items))]
    return Calls(name, calls, source)


def check_call(function: Callable[..., Any], name: str | None, target: str) -> str:
    """Return the name of the experiment. Raises `RequestRefused` for anything that names no call."""
    if not callable(function):
        raise InvalidValue("function", function, "a function", hint="`runtime.launch` takes commands")
    check_returns_value(function)
    if type(target) is not str or not target:
        raise InvalidValue("target", target, 'a text: "here", "queue:NAME" or the name of a target')
    return plain_name(function) if name is None else check_new_experiment(name)


def refuse_fields(fields: Mapping[str, Any]) -> None:
    """Raise `RequestRefused` for any field of a job or task, on the target `here`."""
    if fields:
        raise RequestRefused(
            f"`{next(iter(fields))}` is a field of jobs and tasks, and the target is `{HERE}`",
            hint='name a target, such as target="local", or leave the field out',
        )


def plain_name(function: Callable[..., Any]) -> str:
    """The name of an experiment from that of its function: `train.Sac.fit` is `fit`."""
    last = name_function(function).rpartition(":")[2].rpartition(".")[2].lower()
    return re.sub("[^a-z0-9]+", "-", last).strip("-")[:40] or "call"


class LocalFolders(dict[str, str]):
    """The folders of a run in this process. They get their names on first use, since most calls here are short."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __missing__(self, which: str) -> str:
        from runtime.config import load_settings

        place = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_counter)}"
        folder = Path(load_settings().data_dir) / HERE / self._name / place
        self.update(output=str(folder / "output"), checkpoint=str(folder / "checkpoint"), metrics=str(folder / METRICS))
        return self[which]


class LocalRun(Run):
    """A run in this process. Where it comes from is read when the function asks."""

    def __init__(self, name: str, variant: Any, function: Callable[..., Any], index: int = 0) -> None:
        super().__init__(name, variant, LocalFolders(name), index=index)
        self._function = function

    def _read_origin(self) -> dict[str, Any]:
        from runtime.client.tasks.task_snapshot import read_code_git
        from runtime.snapshots.provenance import own_argv

        return {"argv": own_argv(), "git": read_code_git(self._function)[1]}
