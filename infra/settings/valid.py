"""Reads plain values into settings, and judges settings from stack files and from other programs by every rule."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final

from infra.settings.model import Settings
from infra.settings.rules import find_own_problems
from infra.settings.stack_rules import find_stack_problems
from runtime import schema
from runtime.errors import RequestRefused
from runtime.schema import UNREADABLE, Problem, join, suggest, type_hints, without_none

_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")
_ENCRYPTED: Final = "is encrypted, and no setting is a secret"


class SettingsReader(schema.Reader):
    """Reads the values of a stack file. Numbers and booleans may be text, as the engine passes them."""

    names: ClassVar[Mapping[Any, str]] = {**schema.Reader.names, str: "a text", Mapping: "an object with keys"}
    keeps_rest = True

    def read(self, kind: Any, value: object, path: str) -> Any:
        if _is_encrypted(value):
            self.report(path, _ENCRYPTED, "see `secrets`")
            return UNREADABLE
        # `default:` without a value is the shortest request for every default.
        return super().read(kind, {} if value is None and is_dataclass(kind) else value, path)

    def read_scalar(self, kind: Any, value: object, path: str) -> Any:
        if kind is bool and value in ("true", "false"):
            return value == "true"
        if kind is int and isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
            return int(value)
        return super().read_scalar(kind, value, path)

    def entries(self, value: Mapping[Any, Any], path: str) -> Mapping[str, Any]:
        for key in value:
            if not isinstance(key, str):
                self.report(path, f"has the key {show(key)}, which is no text", "put it in quotes")
        return {key: item for key, item in value.items() if isinstance(key, str)}

    def is_absent(self, value: object, *, required: bool) -> bool:
        return value is None and not required

    def report(self, path: str, message: str, hint: str | None = None) -> None:
        super().report(path or "the stack file", message, hint)

    def report_unknown(self, value: Mapping[str, Any], known: list[str], path: str) -> None:
        allowed = f"allowed are {', '.join(sorted(known))}"
        for key, item in value.items():
            if key not in known and _is_encrypted(item):
                self.report(join(path, key), _ENCRYPTED, "see `secrets`")
            elif key not in known:
                nearest = suggest(key, known)
                self.report(join(path, key), "is no key here", f"{nearest} ({allowed})" if nearest else allowed)

    def report_missing(self, kind: Any, name: str, path: str) -> None:
        bare = without_none(kind)
        is_choice = isinstance(bare, type) and issubclass(bare, StrEnum)
        self.report(path, f"lacks `{name}`", f"{'' if is_choice else 'it is '}{self.expected(bare)}")

    def wrong(self, kind: Any, value: object, path: str, expected: str | None = None) -> Any:
        seen = "is empty" if value is None or value == "" else f"is {show(value)}"
        self.report(path, f"{seen}, allowed is {expected or self.expected(kind)}", self.hint(kind, value))
        return UNREADABLE

    def hint(self, kind: Any, value: object) -> str | None:
        if kind is str and isinstance(value, int | float):
            text = json.dumps(str(value).lower() if isinstance(value, bool) else str(value))
            return f"put it in quotes: {text}"
        origin = typing.get_origin(kind)
        if origin is tuple:
            return f"write `[{value}]`" if isinstance(value, str) else None
        if origin is not None and is_dataclass(typing.get_args(kind)[1]):
            return _show_as_keys(value)
        return super().hint(kind, value)


class Checker(SettingsReader):
    """Judges the types of values that another program built; converts nothing, and does not enter dataclasses."""

    def read(self, kind: Any, value: object, path: str) -> Any:
        bare = without_none(kind)
        if typing.get_origin(bare) is not None or (value is None and bare is not kind):
            return schema.Reader.read(self, kind, value, path)
        if not isinstance(value, bare) or (bare is int and isinstance(value, bool)):
            named = is_dataclass(bare) or issubclass(bare, StrEnum)
            return self.wrong(bare, value, path, f"a {bare.__name__}" if named else None)
        return value


def decode(kind: Any, value: object) -> object:
    """Decode the value of a top-level key, which the engine passes as text: objects and lists as JSON."""
    if isinstance(value, str) and without_none(kind) not in (str, int, bool):
        try:
            return json.loads(value) if value else None
        except ValueError:
            return value
    # Pulumi.yaml has to give every key a default; the default of a text is the empty text.
    return None if value == "" else value


def show(value: object) -> str:
    """Format a value as in a stack file, short enough for a line."""
    if isinstance(value, str):
        text = f"`{value}`"
    elif isinstance(value, Mapping | list | tuple):
        text = schema.describe(value)
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:76]}…`"


def _is_encrypted(value: object) -> bool:
    """Whether `pulumi config set --secret` wrote the value, as `{secure: …}`."""
    return isinstance(value, Mapping) and set(value) == {"secure"}


def _show_as_keys(value: object) -> str | None:
    """Rewrite a list of names as an object with these keys; None for any other value."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(each, str) for each in names):
        return None
    return f"write `{{{', '.join(f'{name}: {{}}' for name in names)}}}`"


class InvalidSettings(RequestRefused):
    """The settings of `where` (a stack, or a component) cannot be used; nothing was made."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where, self.problems = where, tuple(problems)
        super().__init__(
            f"the settings of {where} cannot be used",
            facts=[str(each) for each in self.problems],
            hint="docs/settings.md has every key and what is allowed",
        )


def find_problems(value: object, path: str = "") -> list[Problem]:
    """Judge one settings value (a `QueueSettings`, `HeadSettings` … or the whole) alone.

    Components call `ensure_valid` with their settings, so that they are as strict in another program.
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
