"""`runtime.run_experiment` and `runtime.map`: a function on this process, on a job's target, or in a queue, by one word."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from runtime.client.functions import name_function
from runtime.errors import RequestRefused
from runtime.experiments.calls import Call, Calls, finish
from runtime.shim.call import Run
from runtime.shim.files import METRICS

HERE: Final = "here"
"""The target that is this process itself."""
QUEUE: Final = "queue:"
"""Before the name of a queue as a target."""
_counter = itertools.count()


def run_experiment(
    function: Callable[..., Any], variant: Any = None, *, name: str | None = None, target: str = HERE, **fields: Any
) -> Any:
    """Call `function(run, variant)`, where `run` has the folders, the name and the reports of this run.

    On the target `here` the call is made in this process, and its value is returned; elsewhere the result is a `Call`, whose
    `result()` is the value. A target is `here`, one of a job (`local`, or one of the project's), or `queue:NAME`. `fields` are
    those of a job file, such as `resources={"gpus": 1}`. Raises what the function raises on `here`, and `RequestRefused`.
    """
    name = name or _plain_name(function)
    if target == HERE:
        _refuse_fields(fields)
        return function(Run(name, variant, _folders_here(name)), variant)
    return _start(function, [variant], name, target, fields, run=True, single=True)[0]


def map(  # noqa: A001  as the builtin, of which it is the form elsewhere
    function: Callable[..., Any], items: Iterable[Any], *, name: str | None = None, target: str = HERE, **fields: Any
) -> Calls:
    """Call `function(item)` for each item, and return the calls as futures in the order of the items.

    On `here` the calls are made in turn before this returns. On a job's target they are one array, and in a queue one
    experiment of tasks. Otherwise as `run_experiment`.
    """
    name = name or _plain_name(function)
    if target != HERE:
        every = list(items)
        return _start(function, every, name, target, fields, run=False) if every else Calls(name, [])
    _refuse_fields(fields)
    calls = []
    for number, item in enumerate(items):
        call = Call(number, f"call {number} of {name}")
        finish(call, lambda item=item: function(item))  # type: ignore[misc]
        calls.append(call)
    return Calls(name, calls)


def _start(
    function: Callable[..., Any],
    items: list[Any],
    name: str,
    target: str,
    fields: dict[str, Any],
    *,
    run: bool,
    single: bool = False,
) -> Calls:
    if target.startswith(QUEUE):
        from runtime.experiments.queues import start_on_queue

        return start_on_queue(function, items, name, target.removeprefix(QUEUE), fields, run=run)
    from runtime.client.jobs.calls import fields_of_call
    from runtime.client.jobs.launch import launch
    from runtime.client.jobs.prepare import LaunchOptions
    from runtime.experiments.jobs import JobCalls

    options = fields.pop("options", None) or LaunchOptions(experiment=name)
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


def _refuse_fields(fields: dict[str, Any]) -> None:
    if fields:
        raise RequestRefused(
            f"`{next(iter(fields))}` is a field of jobs and tasks, and the target is `{HERE}`",
            hint='name a target, such as target="local", or leave the field out',
        )


def _plain_name(function: Callable[..., Any]) -> str:
    """The name of an experiment from that of its function: `train.Sac.fit` is `fit`."""
    last = name_function(function).rpartition(":")[2].rpartition(".")[2].lower()
    return re.sub("[^a-z0-9]+", "-", last).strip("-")[:40] or "call"


def _folders_here(name: str) -> dict[str, str]:
    from runtime.config import load_settings

    place = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_counter)}"
    folder = Path(load_settings().data_dir) / HERE / name / place
    return {
        "output": str(folder / "output"),
        "checkpoint": str(folder / "checkpoint"),
        "metrics": str(folder / METRICS),
    }
