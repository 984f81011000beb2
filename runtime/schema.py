"""Reads what people wrote (YAML, JSON, TOML) into frozen dataclasses, and says everything that is wrong with it.

A dataclass is its own description: its type hints say what each key may be, `field` defaults what may be left out. A
class may read itself: `read(value)` returns an instance or raises `ValueError` with what it expected, and `SCHEMA` is its
part of the JSON Schema. Keys that no field has are refused with the nearest one, at every depth.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar, cast

from runtime.errors import InvalidValue
from runtime.units import format_duration, parse_duration, parse_size
from runtime.values import MISSING, dataclass, fields, is_dataclass

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with what was written."""

    path: str
    """`resources.gpus.count`, `mounts[0].target`"""
    message: str
    """What is wrong, with the value and what is allowed: `is 0, expected at least 1`."""
    hint: str | None = None

    def __str__(self) -> str:
        return f"`{self.path}` {self.message}" + (f"; {self.hint}" if self.hint else "")


class Size(int):
    """Bytes, written `16GiB`."""

    SCHEMA: typing.ClassVar[Mapping[str, Any]] = {"type": ["string", "integer"], "examples": ["16GiB", "500MB"]}

    @classmethod
    def read(cls, value: object) -> Size:
        if isinstance(value, str | int) and not isinstance(value, bool):
            try:
                return cls(parse_size(str(value)))
            except InvalidValue:
                pass
        raise ValueError("a size such as 512MiB, 16GiB or 2TB")


def read_record(kind: type[T], value: object, path: str = "") -> tuple[T | None, list[Problem]]:
    """`value` as a `kind`, and what is wrong with it; None where anything is."""
    problems: list[Problem] = []
    found = _read(kind, value, path, problems)
    return (None if problems else cast(T, found)), problems


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON Schema of a dataclass; what fields say below themselves is its description."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema(kind)}


def describe(value: object) -> str:
    """What was written, short enough for a line."""
    match value:
        case None:
            return "null"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case timedelta():
            return format_duration(value)
        case _:
            text = json.dumps(value, ensure_ascii=False, default=str)
            return text if len(text) <= 60 else f"{text[:57]}…"


def suggest(word: str, known: Sequence[str]) -> str:
    """`did you mean …`, or the known ones where none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@functools.cache
def type_hints(kind: type) -> dict[str, Any]:
    """Of the fields, by name; evaluated once."""
    return typing.get_type_hints(kind)


def _read(kind: Any, value: object, path: str, problems: list[Problem]) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _read_union(typing.get_args(kind), value, path, problems)
    if origin is typing.Literal:
        return _read_choice(typing.get_args(kind), value, path, problems)
    if origin is tuple:
        return _read_list(typing.get_args(kind)[0], value, path, problems)
    if origin is not None and issubclass(origin, Mapping):
        return _read_mapping(typing.get_args(kind)[1], value, path, problems)
    if hasattr(kind, "read"):
        try:
            return kind.read(value)
        except ValueError as problem:
            return _wrong(path, value, str(problem), problems)
    if is_dataclass(kind):
        return _read_dataclass(cast(type, kind), value, path, problems)
    if issubclass(kind, StrEnum):
        chosen = _read_choice(tuple(member.value for member in kind), value, path, problems)
        return kind(chosen) if chosen is not None else None
    return _read_scalar(kind, value, path, problems)


def _read_dataclass(kind: type, value: object, path: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        return _wrong(path, value, "an object", problems)
    known = {each.name: each for each in fields(kind) if each.init}
    hints, values, before = type_hints(kind), {}, len(problems)
    problems += [
        Problem(path=join(path, str(key)), message="is no field here", hint=suggest(str(key), list(known)))
        for key in value
        if key not in known
    ]
    for name, each in known.items():
        if name in value:
            values[name] = _read(hints[name], value[name], join(path, name), problems)
        elif each.default is MISSING and each.default_factory is MISSING:
            problems.append(Problem(path=join(path, name), message="is missing"))
    if len(problems) > before:
        return None
    try:
        return kind(**values)
    except ValueError as problem:
        problems.append(Problem(path=path, message=str(problem)))
        return None


def _read_union(members: tuple[Any, ...], value: object, path: str, problems: list[Problem]) -> Any:
    if value is None and types.NoneType in members:
        return None
    others = [member for member in members if member is not types.NoneType]
    if len(others) == 1:
        return _read(others[0], value, path, problems)
    for member in others:
        tried: list[Problem] = []
        found = _read(member, value, path, tried)
        if not tried:
            return found
    return _wrong(path, value, " or ".join(_expected(member) for member in others), problems)


def _read_choice(allowed: tuple[Any, ...], value: object, path: str, problems: list[Problem]) -> Any:
    if value in allowed and isinstance(value, str):
        return value
    names = [str(each) for each in allowed]
    problems.append(
        Problem(
            path=path,
            message=f"is {describe(value)}, expected one of {', '.join(names)}",
            hint=suggest(value, names) if isinstance(value, str) and difflib.get_close_matches(value, names) else None,
        )
    )
    return None


def _read_list(kind: Any, value: object, path: str, problems: list[Problem]) -> Any:
    if not isinstance(value, list | tuple):
        return _wrong(path, value, "a list", problems)
    return tuple(_read(kind, item, f"{path}[{index}]", problems) for index, item in enumerate(value))


def _read_mapping(kind: Any, value: object, path: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        return _wrong(path, value, "an object", problems)
    return {str(key): _read(kind, item, join(path, str(key)), problems) for key, item in value.items()}


def _read_scalar(kind: type, value: object, path: str, problems: list[Problem]) -> Any:
    if kind is timedelta:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            try:
                return parse_duration(str(value))
            except InvalidValue:
                pass
        return _wrong(path, value, _expected(kind), problems)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (type(value) is float and not math.isfinite(value)):
        quote = "put it in quotes" if kind is str and isinstance(value, int | float | bool) else None
        return _wrong(path, value, _expected(kind), problems, hint=quote)
    return value


def _wrong(path: str, value: object, expected: str, problems: list[Problem], hint: str | None = None) -> None:
    problems.append(Problem(path=path, message=f"is {describe(value)}, expected {expected}", hint=hint))


_EXPECTED: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    timedelta: "a duration such as 90s, 5m, 2h or 1d",
}


def _expected(kind: Any) -> str:
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if hasattr(kind, "read"):
        try:
            kind.read(object())
        except ValueError as problem:
            return str(problem)
    origin = typing.get_origin(kind)
    return "a list" if origin is tuple else "an object"


# schema


def _schema(kind: Any) -> dict[str, Any]:
    origin = typing.get_origin(kind)
    if kind is Any:
        return {}
    if origin in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(kind) if member is not types.NoneType]
        schemas = [_schema(member) for member in members]
        if types.NoneType in typing.get_args(kind):
            schemas.append({"type": "null"})
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if origin is typing.Literal:
        return {"enum": list(typing.get_args(kind))}
    if origin is tuple:
        return {"type": "array", "items": _schema(typing.get_args(kind)[0])}
    if origin is not None:
        return {"type": "object", "additionalProperties": _schema(typing.get_args(kind)[1])}
    if hasattr(kind, "SCHEMA"):
        return dict(kind.SCHEMA)
    if is_dataclass(kind):
        return _record_schema(cast(type, kind))
    if issubclass(kind, StrEnum):
        return {"enum": [member.value for member in kind]}
    return dict(_SCHEMAS[kind])


_SCHEMAS: dict[Any, Mapping[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    timedelta: {"type": ["string", "number"], "examples": ["90s", "2h"]},
}


def _record_schema(kind: type) -> dict[str, Any]:
    hints, notes = type_hints(kind), field_notes(kind)
    properties, required = {}, []
    for each in fields(kind):
        properties[each.name] = _schema(hints[each.name]) | (
            {"description": notes[each.name]} if each.name in notes else {}
        )
        if each.default is MISSING and each.default_factory is MISSING:
            required.append(each.name)
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


@functools.cache
def field_notes(kind: type) -> dict[str, str]:
    """What the source says below each field of a dataclass."""
    import ast
    import inspect
    import textwrap

    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    notes: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            notes[field.target.id] = " ".join(below.value.value.split())
    return notes
