"""Checks a resource's inputs against the provider's own types, without the provider.

The wheels of pulumi-gcp and pulumi-kubernetes have a typed class for every resource and nested object, with the names and
types of its fields and the required ones. Mocks accept a misspelt key in a dictionary, a number instead of text or a missing
nested field; this module finds them. Names and ranges are judged where they are written, by the rules of the settings.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import importlib
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import pulumi
from pulumi import _types
from pulumi.runtime import rpc

from infra.check.recording import SecretValue, UnknownValue
from runtime.schema import Problem, join

WHEELS: Final = {"gcp": "pulumi_gcp", "kubernetes": "pulumi_kubernetes"}
PROVIDERS: Final = "pulumi:providers:"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputField:
    """One input of a resource, or of an object inside it."""

    type: Any
    required: bool


def find_input_problems(type_: str, inputs: Mapping[str, Any]) -> list[Problem]:
    """Find problems of `inputs` (camelCase, `UNKNOWN` allowed anywhere) of a resource of `type_`.

    Paths have the provider's camelCase: `cleanupPolicies[0].condition.olderThan`. Raises `LookupError` for a type that the
    installed wheels do not have.
    """
    kind = find_args_class(type_)
    if type_.startswith(PROVIDERS):
        inputs = _decoded(kind, inputs)
    return list(_object_problems(kind, inputs, ""))


@functools.cache
def find_args_class(type_: str) -> type:
    """Return the wheel's class of the inputs of `type_`: `gcp:pubsub/topic:Topic`, `pulumi:providers:gcp` …"""
    if type_.startswith(PROVIDERS):
        package = type_.removeprefix(PROVIDERS)
        provider = importlib.import_module(f"{_wheel(package, type_)}.provider")
        return typing.cast(type, provider.ProviderArgs)
    package, _, rest = type_.partition(":")
    module, _, name = rest.rpartition(":")
    importlib.import_module(_wheel(package, type_))
    entry: Any = rpc.get_resource_module(package, module, "")
    known = entry.mod_info["classes"] if entry is not None else {}
    if type_ not in known:
        near = difflib.get_close_matches(type_, _known_types(package), n=1, cutoff=0.75)
        raise LookupError(f"{WHEELS[package]} has no resource type {type_}" + (f"; near is {near[0]}" if near else ""))
    resource = getattr(importlib.import_module(entry.mod_info["fqn"]), known[type_])
    home = sys.modules[resource.__module__]
    # If a nested object has the plain name, the resource's inputs are in `…InitArgs`.
    return typing.cast(type, getattr(home, f"{name}InitArgs", None) or getattr(home, f"{name}Args"))


@functools.cache
def fields_of(kind: type) -> Mapping[str, InputField]:
    """Return the inputs of one of the wheels' classes by the provider's camelCase names."""
    hints = _types.input_type_types(kind)
    optional = kind.__init__.__kwdefaults__ or {}  # type: ignore[misc]
    python_names = _types.input_type_py_to_pulumi_names(kind)
    required = {name for python, name in python_names.items() if python not in optional}
    return {name: InputField(type=hint, required=name in required) for name, hint in hints.items()}


def _wheel(package: str, type_: str) -> str:
    if package not in WHEELS:
        raise LookupError(f"no installed wheel has the resource type {type_}; known packages: {', '.join(WHEELS)}")
    return WHEELS[package]


def _known_types(package: str) -> list[str]:
    registered: Mapping[str, Any] = rpc._RESOURCE_MODULES
    tables = [tables[0].mod_info for key, tables in registered.items() if key.startswith(f"{package}:")]
    return [type_ for table in tables for type_ in table["classes"]]


def _decoded(kind: type, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Decode a provider's inputs, which travel as text: everything but strings as JSON inside."""
    fields = fields_of(kind)
    decoded = dict(inputs)
    for name, value in inputs.items():
        bare = value.value if isinstance(value, SecretValue) else value
        if name in fields and fields[name].type is not str and isinstance(bare, str):
            try:
                decoded[name] = json.loads(bare)
            except ValueError:
                continue
    return decoded


def _object_problems(kind: type, value: Mapping[str, Any], path: str) -> Iterator[Problem]:
    fields = fields_of(kind)
    for name, item in value.items():
        inner = join(path, name)
        if name not in fields:
            # The SDK sends its own marks with a provider, which are not inputs.
            if not name.startswith("__"):
                yield Problem(inner, _unknown_key(name, fields))
        elif item is not None:
            yield from _problems(fields[name].type, item, inner)
    for name, each in fields.items():
        if each.required and value.get(name) is None:
            yield Problem(join(path, name), "is missing and required")


def _unknown_key(name: str, fields: Mapping[str, InputField]) -> str:
    near = difflib.get_close_matches(name, fields, n=1)
    if near:
        return f"is no input here; did you mean `{near[0]}`?"
    return f"is no input here; known are {', '.join(sorted(fields)[:12])}{' …' if len(fields) > 12 else ''}"


def _problems(kind: Any, value: Any, path: str) -> Iterator[Problem]:
    if isinstance(value, UnknownValue):
        return
    if isinstance(value, SecretValue):
        yield from _problems(kind, value.value, path)
        return
    members = _members(kind)
    if not members:
        return
    attempts = [list(_member_problems(each, value, path)) for each in members]
    if all(attempts):
        # The alternative with the deepest problems explains most.
        yield from min(attempts, key=lambda found: (any(each.path == path for each in found), len(found)))


@functools.cache
def _members(kind: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type hint without the wrappers of inputs; empty if every value fits."""
    if kind is Any or kind is object or isinstance(kind, typing.TypeVar):
        return ()
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        found: list[Any] = []
        for each in typing.get_args(kind):
            if _is_wrapper(each):
                continue
            inner = _members(each)
            if not inner:
                return ()
            found += inner
        return tuple(dict.fromkeys(found))
    return (kind,)


def _is_wrapper(kind: Any) -> bool:
    """Whether an alternative is only another form of a value, such as the TypedDict beside a class of inputs."""
    origin = typing.get_origin(kind) or kind
    return origin in (collections.abc.Awaitable, pulumi.Output, types.NoneType) or typing.is_typeddict(kind)


def _member_problems(kind: Any, value: Any, path: str) -> Iterator[Problem]:
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            allowed = ", ".join(json.dumps(each) for each in typing.get_args(kind))
            yield Problem(path, f"is {show(value)}, allowed: {allowed}")
    elif origin is not None and issubclass(origin, collections.abc.Sequence):
        if not isinstance(value, list | tuple):
            yield Problem(path, f"is {show(value)}, expected a list")
            return
        (item,) = typing.get_args(kind)
        for index, each in enumerate(value):
            yield from _problems(item, each, f"{path}[{index}]")
    elif origin is None and not _types.is_input_type(kind):
        yield from _scalar_problems(kind, value, path)
    elif not isinstance(value, Mapping):
        yield Problem(path, f"is {show(value)}, expected an object")
    elif origin is None:
        yield from _object_problems(kind, value, path)
    else:
        _, item = typing.get_args(kind)
        for key, each in value.items():
            yield from _problems(item, each, f"{path}.{key}")


def _scalar_problems(kind: Any, value: Any, path: str) -> Iterator[Problem]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        allowed = [each.value for each in kind]
        if value not in allowed:
            yield Problem(path, f"is {show(value)}, allowed: {', '.join(map(str, allowed))}")
        return
    if kind is float and type(value) is int:
        return
    if kind in EXPECTED and type(value) is not kind:
        yield Problem(path, f"is {show(value)}, expected {EXPECTED[kind]}")


EXPECTED: Final[Mapping[Any, str]] = {str: "a string", int: "a whole number", bool: "true or false", float: "a number"}


def show(value: Any) -> str:
    """Format a value for an error, cut if it is long."""
    match value:
        case UnknownValue() | SecretValue():
            return "a value that is not shown"
        case bool():
            return f"{json.dumps(value)} (a boolean)"
        case int() | float():
            return f"{value} (a number)"
        case str():
            return f"`{value[:60]}`{' …' if len(value) > 60 else ''}"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
    return type(value).__name__
