"""The one reader of plain values (YAML, JSON, TOML) into frozen dataclasses; it reports every problem at once.

A dataclass describes itself: its type hints are the values that each key may hold, and keys with defaults may be left
out. A class may read itself: `read(value)` returns an instance or raises `ValueError` with the expected form, and
`SCHEMA` is its part of the JSON Schema. Subclasses of `Reader` relax rules and word problems differently.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, ClassVar, Final, TypeVar, cast

from runtime.errors import InvalidValue
from runtime.units import format_duration, parse_duration, parse_size

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a value that a person wrote."""

    path: str
    """`resources.gpus.count`, `mounts[0].target`"""
    message: str
    """The problem, with the value and what is allowed: `is 0, expected at least 1`."""
    hint: str | None = None

    def __str__(self) -> str:
        text = f"`{self.path}` {self.message}" + (f"; {self.hint}" if self.hint else "")
        return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class Size(int):
    """Bytes, written `16GiB`."""

    SCHEMA: ClassVar[Mapping[str, Any]] = {"type": ["string", "integer"], "examples": ["16GiB", "500MB"]}

    @classmethod
    def read(cls, value: object) -> Size:
        if isinstance(value, str | int) and not isinstance(value, bool):
            try:
                return cls(parse_size(str(value)))
            except InvalidValue:
                pass
        raise ValueError("a size such as 512MiB, 16GiB or 2TB")


NO_FIELD: Final = "is no field here"
"""The message about a key that its class does not have."""
RENAME: Final = "name the file by a path that is UTF-8, such as a link to it"
UNREADABLE: Final = object()
"""In the place of a value with a problem that is reported already."""


class Reader:
    """Reads values and collects `problems`, in the order of the fields."""

    names: ClassVar[Mapping[Any, str]] = {
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        timedelta: "a duration such as 90s, 5m, 2h or 1d",
        tuple: "a list",
        Mapping: "an object",
    }
    """Kind → its name in a problem."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def read(self, kind: Any, value: object, path: str) -> Any:
        """`value` as a `kind`, or `UNREADABLE`."""
        if kind is Any:
            return value
        if (bare := without_none(kind)) is not kind:
            return None if value is None else self.read(bare, value, path)
        origin = typing.get_origin(kind)
        if origin is tuple:
            return self._read_list(kind, value, path)
        if origin is not None:
            return self._read_mapping(kind, value, path)
        if hasattr(kind, "read"):
            try:
                return kind.read(value)
            except ValueError as problem:
                return self.wrong(kind, value, path, str(problem))
        if is_dataclass(kind):
            return self.read_record(kind, value, path)
        if issubclass(kind, StrEnum):
            known = isinstance(value, str) and value in [member.value for member in kind]
            return kind(value) if known else self.wrong(kind, value, path)
        return self.read_scalar(kind, value, path)

    def read_record(self, kind: Any, value: object, path: str, given: Mapping[str, Any] | None = None) -> Any:
        """An instance of the dataclass `kind`. `given` are fields that are not keys, with their values."""
        if not isinstance(value, Mapping):
            return self.wrong(kind, value, path)
        entries, values, complete, before = self.entries(value, path), dict(given or {}), True, len(self.problems)
        known = [each for each in fields(kind) if each.init and each.name not in values]
        self.report_unknown(entries, [each.name for each in known], path)
        for each in known:
            required = each.default is MISSING and each.default_factory is MISSING
            hint = type_hints(kind)[each.name]
            if each.name not in entries or self.is_absent(entries[each.name], required=required):
                if required:
                    self.report_missing(hint, each.name, path)
            elif (found := self.read(hint, entries[each.name], join(path, each.name))) is not UNREADABLE:
                values[each.name] = found
            complete = complete and (each.name in values or not required)
        if not complete or (len(self.problems) > before and not self.keeps_rest):
            return UNREADABLE
        try:
            return kind(**values)
        except ValueError as problem:
            self.report(path, str(problem))
            return UNREADABLE

    def read_scalar(self, kind: Any, value: object, path: str) -> Any:
        if kind is timedelta:
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                try:
                    return parse_duration(str(value))
                except InvalidValue:
                    pass
            return self.wrong(kind, value, path)
        if kind is int and type(value) is float and value.is_integer():
            # JSON has one kind of number, and Pulumi carries every number as a double.
            return int(value)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind or (type(value) is float and not math.isfinite(value)):
            return self.wrong(kind, value, path)
        return value

    def _read_list(self, kind: Any, value: object, path: str) -> Any:
        if not isinstance(value, list | tuple):
            return self.wrong(kind, value, path)
        item = typing.get_args(kind)[0]
        read = [self.read(item, each, f"{path}[{index}]") for index, each in enumerate(value)]
        return tuple(each for each in read if each is not UNREADABLE)

    def _read_mapping(self, kind: Any, value: object, path: str) -> Any:
        if not isinstance(value, Mapping):
            return self.wrong(kind, value, path)
        item = typing.get_args(kind)[1]
        read = {key: self.read(item, each, join(path, key)) for key, each in self.entries(value, path).items()}
        return {key: each for key, each in read.items() if each is not UNREADABLE}

    # rules that a subclass may relax

    keeps_rest = False
    """Whether a dataclass is made from its readable fields when an optional one has a problem."""

    def entries(self, value: Mapping[Any, Any], path: str) -> Mapping[str, Any]:
        return {str(key): item for key, item in value.items()}

    def is_absent(self, value: object, *, required: bool) -> bool:
        """Whether a key with this value counts as left out."""
        return False

    # how problems are worded

    def report(self, path: str, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem(path, message, hint))

    def report_unknown(self, value: Mapping[str, Any], known: list[str], path: str) -> None:
        for key in value:
            if key not in known:
                self.report(join(path, key), NO_FIELD, suggest(key, known) or f"known: {', '.join(known)}")

    def report_missing(self, kind: Any, name: str, path: str) -> None:
        self.report(join(path, name), "is missing")

    def wrong(self, kind: Any, value: object, path: str, expected: str | None = None) -> Any:
        """Report a value that is no `kind`; `UNREADABLE`."""
        self.report(path, f"is {describe(value)}, expected {expected or self.expected(kind)}", self.hint(kind, value))
        return UNREADABLE

    def expected(self, kind: Any) -> str:
        bare = without_none(kind)
        if isinstance(bare, type) and issubclass(bare, StrEnum):
            return f"one of {', '.join(member.value for member in bare)}"
        return self.names.get(typing.get_origin(bare) or bare, self.names[Mapping])

    def hint(self, kind: Any, value: object) -> str | None:
        if kind is str and isinstance(value, int | float):
            return "put it in quotes"
        if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str):
            return suggest(value, [member.value for member in kind])
        return None


def read_record(kind: type[T], value: object) -> tuple[T | None, list[Problem]]:
    """`value` as a `kind`, and its problems; None if it has any."""
    reader = Reader()
    found = reader.read(kind, value, "")
    reader.problems += find_unencodable(value)
    return (None if reader.problems else cast(T, found)), reader.problems


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON Schema of a dataclass; the strings below its fields are the descriptions."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema(kind)}


def describe(value: object) -> str:
    """A value as its author wrote it, short enough for a line."""
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


def suggest(word: str, known: Iterable[str]) -> str | None:
    """`did you mean …`; None if no known word is near."""
    import difflib

    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"did you mean `{near[0]}`?" if near else None


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of everything in `value` that is neither an object nor a list."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, join(path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def find_unencodable(value: Any) -> Iterator[Problem]:
    """Yield a problem for each text in `value`, and each name, that no UTF-8 file can hold: bytes of a command line, mostly."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
        return  # as nearly always, and in a fraction of the time
    except (RecursionError, TypeError, ValueError):
        pass
    left, seen = [("", value)], set[int]()
    while left:
        path, each = left.pop()
        if isinstance(each, str):
            if not each.isascii() and (problem := _check_utf8(path, each)):
                yield problem
        elif isinstance(each, Mapping | list | tuple) and id(each) not in seen:
            seen.add(id(each))  # it may contain itself
            if isinstance(each, Mapping):
                inner = [
                    part for key, item in each.items() for part in ((path, str(key)), (join(path, str(key)), item))
                ]
            else:
                inner = [(f"{path}[{index}]", item) for index, item in enumerate(each)]
            left.extend(reversed(inner))


def _check_utf8(path: str, text: str) -> Problem | None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        near = text[max(0, problem.start - 20) : problem.end]
        message = f"holds bytes that are no UTF-8, near {near!r}"
        return Problem(path or "the request", message, RENAME)
    return None


@functools.cache
def type_hints(kind: type) -> dict[str, Any]:
    """Field → its type; evaluated once."""
    return typing.get_type_hints(kind)


def without_none(kind: Any) -> Any:
    """`X` for `X | None`, and everything else as it is."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return kind
    (only,) = (member for member in typing.get_args(kind) if member is not types.NoneType)
    return only


# schema


def _schema(kind: Any) -> dict[str, Any]:
    origin = typing.get_origin(kind)
    if kind is Any:
        return {}
    if (bare := without_none(kind)) is not kind:
        return {"anyOf": [_schema(bare), {"type": "null"}]}
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
    """Field → the string below it in the source of a dataclass."""
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
