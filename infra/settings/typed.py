"""Reads plain values (from YAML or JSON) into frozen dataclasses, strictly, and says all that is wrong at once.

The types are those of the fields: text, whole numbers, true and false, enums, tuples, mappings, other dataclasses, and
any of them or None. A key that no field has is a problem at every depth.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a stack file."""

    path: str
    """`heads.main.pools.v5e.max`"""
    message: str
    """What is wrong, with the value: `is 2048, allowed are 0 to 1024`."""
    hint: str | None = None

    def line(self) -> str:
        text = f"`{self.path}` {self.message}" + (f"; {self.hint}" if self.hint else "")
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class _Unreadable:
    """Stands for a value that was reported already."""


UNREADABLE: Final = _Unreadable()


@functools.lru_cache(maxsize=64)
def hints_of(type_: type) -> Mapping[str, Any]:
    """Field → type of a dataclass."""
    return typing.get_type_hints(type_)


def decode(hint: Any, value: object) -> object:
    """The value of a top-level key. The engine passes every one as text, objects and lists as JSON."""
    if isinstance(value, str) and not _is_scalar(hint):
        try:
            return json.loads(value) if value else None
        except ValueError:
            return value
    # A text that is not set has to have a default in Pulumi.yaml, and the empty one is what it has.
    return None if value == "" else value


class Reader:
    """`problems` grows while values are read."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def read_dataclass(self, type_: type, value: Mapping[str, object], path: str, given: Mapping[str, object]) -> Any:
        """An instance of `type_`, or `UNREADABLE`. `given` are fields that are no keys."""
        hints = hints_of(type_)
        known = [each for each in fields(type_) if each.name not in given]
        self._report_unknown(value, [each.name for each in known], path)
        read: dict[str, Any] = dict(given)
        complete = True
        for each in known:
            required = each.default is MISSING and each.default_factory is MISSING
            if each.name not in value or (value[each.name] is None and not required):
                if required:
                    self._report(path, f"lacks `{each.name}`", hint=_describe(hints[each.name]))
                    complete = False
                continue
            item = self.read(hints[each.name], value[each.name], join(path, each.name))
            if not isinstance(item, _Unreadable):
                read[each.name] = item
            elif required:
                complete = False
        return type_(**read) if complete else UNREADABLE

    def read(self, hint: Any, value: object, path: str) -> Any:
        if _is_encrypted(value):
            self._report(path, "is encrypted, and no setting is a secret", hint="see `secrets`")
            return UNREADABLE
        hint = _without_none(hint)
        origin = typing.get_origin(hint)
        if is_dataclass(hint) and isinstance(hint, type):
            # `default:` with nothing behind it is the shortest way to ask for every default.
            return self._of_mapping(value if value is not None else {}, path, lambda m: self._dataclass(hint, m, path))
        if origin is tuple:
            return self._read_tuple(typing.get_args(hint)[0], value, path)
        if origin is not None and issubclass(origin, Mapping):
            item_hint = typing.get_args(hint)[1]
            example = _as_names(value) if is_dataclass(item_hint) else None
            return self._of_mapping(value, path, lambda mapping: self._read_items(item_hint, mapping, path), example)
        return self._read_scalar(hint, value, path)

    def _dataclass(self, type_: type, value: Mapping[str, object], path: str) -> Any:
        return self.read_dataclass(type_, value, path, {})

    def _of_mapping(self, value: object, path: str, then: Any, example: str | None = None) -> Any:
        if not isinstance(value, Mapping):
            return self._wrong(path, value, "an object with keys", hint=f"write `{example}`" if example else None)
        wrong = [key for key in value if not isinstance(key, str)]
        for key in wrong:
            self._report(path, f"has the key {show(key)}, which is no text", hint="put it in quotes")
        return then({key: item for key, item in value.items() if isinstance(key, str)})

    def _read_items(self, hint: Any, value: Mapping[str, object], path: str) -> dict[str, Any]:
        read = {key: self.read(hint, item, join(path, key)) for key, item in value.items()}
        return {key: item for key, item in read.items() if not isinstance(item, _Unreadable)}

    def _read_tuple(self, hint: Any, value: object, path: str) -> Any:
        if not isinstance(value, list | tuple):
            return self._wrong(path, value, "a list", hint=f"write `[{value}]`" if isinstance(value, str) else None)
        read = [self.read(hint, item, f"{path}[{index}]") for index, item in enumerate(value)]
        return tuple(item for item in read if not isinstance(item, _Unreadable))

    def _read_scalar(self, hint: Any, value: object, path: str) -> Any:
        if hint is bool:
            if isinstance(value, bool):
                return value
            return (
                {"true": True, "false": False}.get(str(value))
                if value in ("true", "false")
                else self._wrong(path, value, "true or false")
            )
        if hint is int:
            number = _as_int(value)
            return self._wrong(path, value, "a whole number") if number is None else number
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            allowed = [member.value for member in hint]
            if isinstance(value, str) and value in allowed:
                return hint(value)
            return self._wrong(path, value, f"one of {', '.join(allowed)}", hint=suggest(str(value), allowed))
        if isinstance(value, str):
            return value
        quoted = json.dumps(str(value).lower() if isinstance(value, bool) else str(value))
        is_plain = isinstance(value, int | float)
        return self._wrong(path, value, "a text", hint=f"put it in quotes: {quoted}" if is_plain else None)

    def _report_unknown(self, value: Mapping[str, object], known: list[str], path: str) -> None:
        for key, item in value.items():
            if key in known:
                continue
            if _is_encrypted(item):
                self._report(join(path, key), "is encrypted, and no setting is a secret", hint="see `secrets`")
                continue
            nearest = suggest(key, known)
            allowed = f"allowed are {', '.join(sorted(known))}"
            self._report(join(path, key), "is no key here", hint=f"{nearest} ({allowed})" if nearest else allowed)

    def _wrong(self, path: str, value: object, allowed: str, hint: str | None = None) -> _Unreadable:
        seen = "is empty" if value is None or value == "" else f"is {show(value)}"
        self._report(path, f"{seen}, allowed is {allowed}", hint=hint)
        return UNREADABLE

    def _report(self, path: str, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem(path=path or "the stack file", message=message, hint=hint))


def find_mistyped(hint: Any, value: object, path: str) -> list[Problem]:
    """What is wrong with the type of a value that another program built by itself; nested dataclasses are not entered."""
    if _allows_none(hint) and value is None:
        return []
    bare = _without_none(hint)
    origin = typing.get_origin(bare)
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return [_mistyped(path, value, "a tuple")]
        item = typing.get_args(bare)[0]
        return [each for at, entry in enumerate(value) for each in find_mistyped(item, entry, f"{path}[{at}]")]
    if origin is not None:
        if not isinstance(value, Mapping):
            return [_mistyped(path, value, "a mapping")]
        item = typing.get_args(bare)[1]
        return [each for key, entry in value.items() for each in find_mistyped(item, entry, join(path, str(key)))]
    if bare is int and isinstance(value, bool):
        return [_mistyped(path, value, "a whole number")]
    if not isinstance(value, bare):
        return [_mistyped(path, value, _TYPE_NAMES.get(bare, f"a {bare.__name__}"))]
    return []


def suggest(name: str, known: Iterable[str]) -> str | None:
    nearest = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"did you mean `{nearest[0]}`?" if nearest else None


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def show(value: object) -> str:
    """A value as a stack file would have it, short enough for a line."""
    if isinstance(value, str):
        text = f"`{value}`"
    elif isinstance(value, Mapping):
        text = "an object"
    elif isinstance(value, list | tuple):
        text = "a list"
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:76]}…`"


_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")
_TYPE_NAMES: Final = {int: "a whole number", str: "a text", bool: "true or false"}


def _mistyped(path: str, value: object, allowed: str) -> Problem:
    return Problem(path=path, message=f"is {show(value)}, allowed is {allowed}")


def _describe(hint: Any) -> str:
    bare = _without_none(hint)
    if isinstance(bare, type) and issubclass(bare, StrEnum):
        return f"one of {', '.join(member.value for member in bare)}"
    return f"it is {_TYPE_NAMES.get(bare, 'an object with keys')}"


def _is_encrypted(value: object) -> bool:
    """`pulumi config set --secret` writes `{secure: …}`."""
    return isinstance(value, Mapping) and set(value) == {"secure"}


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        # JSON has one kind of number.
        return int(value)
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
        return int(value)
    return None


def _as_names(value: object) -> str | None:
    """A list of names, as an object has them."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(each, str) for each in names):
        return None
    return f"{{{', '.join(f'{name}: {{}}' for name in names)}}}"


def _allows_none(hint: Any) -> bool:
    return types.NoneType in typing.get_args(hint)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(each for each in typing.get_args(hint) if each is not types.NoneType)
    return hint


def _is_scalar(hint: Any) -> bool:
    bare = _without_none(hint)
    return isinstance(bare, type) and issubclass(bare, str | int | bool)
