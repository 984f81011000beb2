"""Refuses a launch with a secret among its values: the plan, the order and the ledger would show it to everyone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from runtime.errors import InvalidValue
from runtime.jobs.array import fill_command
from runtime.jobs.plan import LaunchPlan, Target
from runtime.jobs.spec import InvalidSpec, JobSpec
from runtime.schema import Problem
from runtime.secret_detection import (
    ANY_VALUE,
    find_secret,
    find_secret_anywhere,
    find_secret_argument,
    find_secret_in_shell,
    has_known_form,
    may_hold_secret,
)

_HINT: Final = "bring it with `--secret NAME=SOURCE` and let the command read the variable; if it is no secret, give it another name"


def refuse_secrets(plan: LaunchPlan, *, source: str) -> None:
    """Raise `InvalidSpec` or `InvalidValue` for a name that is given a secret, by its name; the value is not repeated.

    `JobSpec` itself refuses such values in `env`, and nothing here, since it also reads jobs of earlier versions.
    """
    found = [
        Problem(path, f"has a value for `{name}`, which looks like a secret: name it in `secrets` instead", _HINT)
        for path, name in _find_in_spec(plan)
        if name
    ]
    if found:
        raise InvalidSpec(source, found)
    _check_settings(plan.target)


def _find_in_spec(plan: LaunchPlan) -> Iterator[tuple[str, str | None]]:
    spec = plan.spec
    yield "env", next((name for name, value in spec.env.items() if has_known_form(value)), None)
    yield "command", _find_in_command(spec, plan)
    if spec.call:
        given: Sequence[Any] = (*spec.call.args, spec.call.kwargs, *(spec.array.items if spec.array else ()))
        if spec.call.packed:
            from runtime.client.params import params_of_packed

            given = [params_of_packed(each) for each in given]
        yield "call", find_secret_anywhere(given)
    yield "environment.setup", find_secret_anywhere(spec.environment.setup)
    yield "notify", next(filter(None, (find_secret_argument(each.command) for each in spec.notify)), None)
    yield "placement.selector", find_secret(spec.placement.selector)
    if spec.array:
        # The values of a grid are fewer than its combinations.
        tables = [spec.array.params] if spec.array.params else plan.indices if spec.array.file is not None else []
        yield "array", next(filter(None, map(find_secret_anywhere, tables)), None)


def _find_in_command(spec: JobSpec, plan: LaunchPlan) -> str | None:
    find = (lambda words: find_secret_in_shell(words[0])) if spec.shell else find_secret_argument
    if not may_hold_secret(spec.command):
        return None
    if not spec.array or not find(fill_command(spec.command, dict.fromkeys(plan.indices[0], ANY_VALUE), 0)):
        return find(spec.command)
    runs = (fill_command(spec.command, params, index) for index, params in enumerate(plan.indices))
    return next(filter(None, map(find, runs)), None)


def _check_settings(target: Target) -> None:
    for setting, value in target.settings.items():
        if found := find_secret_anywhere(value):
            raise InvalidValue(
                f"targets.{target.name}.{setting}",
                found,
                "names and values that are no secret",
                hint="everyone who reads the records reads it: jobs get secrets with `--secret NAME=SOURCE`",
            )
