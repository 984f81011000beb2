"""Judges settings by every rule, whether they come from a stack file or another program built them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

from infra.settings.model import Settings
from infra.settings.rules import find_own_problems
from infra.settings.stack_rules import find_stack_problems
from infra.settings.typed import Checker
from runtime.errors import RequestRefused
from runtime.schema import Problem, join, type_hints


class InvalidSettings(RequestRefused):
    """Settings of `where` (a stack, or a component) that cannot be used; nothing was made."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where, self.problems = where, tuple(problems)
        super().__init__(
            f"the settings of {where} cannot be used",
            facts=[str(each) for each in self.problems],
            hint="docs/settings.md has every key and what is allowed",
        )


def find_problems(value: object, path: str = "") -> list[Problem]:
    """Judge one settings value (a `QueueSettings`, `HeadSettings` … or the whole) by itself.

    Components call `ensure_valid` with theirs, so that they are as strict when used from another program.
    """
    if isinstance(value, type) or not is_dataclass(value):
        raise TypeError(f"{value!r} is no settings value")
    checker = Checker()
    type_: type = type(value)
    for name, kind in type_hints(type_).items():
        checker.read(kind, getattr(value, name), join(path, name))
    if checker.problems:
        return checker.problems
    found = find_own_problems(value, path)
    for each in fields(value):
        found += _find_nested(getattr(value, each.name), join(path, each.name))
    if isinstance(value, Settings):
        found += find_stack_problems(value)
    return found


def ensure_valid(value: object, path: str) -> None:
    """Raise `InvalidSettings` unless `find_problems` is empty."""
    problems = find_problems(value, path)
    if problems:
        raise InvalidSettings(f"`{path}`", problems)


def _find_nested(value: object, path: str) -> list[Problem]:
    if isinstance(value, Mapping):
        return [problem for key, item in value.items() for problem in _find_nested(item, join(path, key))]
    if is_dataclass(value):
        return find_problems(value, path)
    return []
