"""A function as the job that calls it: the fields of its spec, and the folder whose code goes along."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from runtime.client.functions import make_call
from runtime.client.jobs.prepare import LaunchOptions
from runtime.client.tasks.task_snapshot import find_code_folder, import_root
from runtime.config import working_folder
from runtime.errors import InvalidValue, RequestRefused
from runtime.jobs.spec_fields import plain_value


def fields_of_call(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fields: Mapping[str, Any],
    options: LaunchOptions,
    items: Iterable[Any] | None = None,
    run: bool = False,
) -> tuple[dict[str, Any], LaunchOptions]:
    """Return the fields of a job file for a call, with `fields` beside it, and the options with the folder of its code.

    That folder is the project around the function's module, or around the working directory for one without a file.
    """
    for name, value, kind in (("args", args, Sequence), ("kwargs", kwargs or {}, Mapping)):
        if not isinstance(value, kind) or isinstance(value, str | bytes):
            raise InvalidValue(name, value, "a list" if kind is Sequence else "a dictionary")
    for name in ("command", "call"):
        if name in fields:
            raise RequestRefused(
                f"`{name}` has no place beside a function", hint="leave it out: the function is what runs"
            )
    base = options.base or find_code_folder(import_root(function) or working_folder())
    call, every = make_call(function, args, kwargs, items=items, run=run, folder=base)
    made = {**fields, "call": plain_value(call)}
    if items is not None:
        made["array"] = {**(fields.get("array") or {}), "items": every}
    return made, replace(options, base=base)
