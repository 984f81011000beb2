"""A spec as fields: a mapping, the canonical text that a job's id is a hash of, and the dotted names of its fields."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from runtime.jobs import spec as spec_module
from runtime.jobs.call import FunctionCall
from runtime.jobs.size_ranges import Range
from runtime.jobs.spec import Array, JobSpec
from runtime.schema import Size

SPEC_SCHEMA: Final = 1
ID_LETTERS: Final = 24


def spec_fields(spec: JobSpec) -> dict[str, Any]:
    """The spec as JSON, without fields at their defaults; `parse_spec` reads it back as an equal value."""
    return dict(_set_fields(spec))


def encode_spec(spec: JobSpec) -> str:
    """Canonical JSON: equal specs have equal text."""
    return json.dumps(spec_fields(spec), separators=(",", ":"), ensure_ascii=False)


def job_id(*, owner: str, target: str, spec: JobSpec, snapshot: str | None, again: int = 0) -> str:
    """`j-…`, the same for the same launch: it is a hash of owner, target, spec, snapshot and key."""
    return _hash_id(owner, target, encode_spec(spec), snapshot or "", again)


def held_ids(*, owner: str, target: str, spec: JobSpec, hold: str) -> Iterator[str]:
    """The ids of jobs that hold their machine, one after the other: the same for every command and state of the folder
    `hold`."""
    text = encode_spec(replace(spec, command=("dev",)))
    for again in itertools.count():
        yield _hash_id(owner, target, text, hold, again)


def _hash_id(owner: str, target: str, spec: str, snapshot: str, again: int) -> str:
    parts = [str(SPEC_SCHEMA), owner, target, spec, snapshot, str(again)]
    return f"j-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:ID_LETTERS]}"


def plain_value(value: Any) -> Any:
    """A part of a spec as JSON."""
    if isinstance(value, Range):
        return str(value)
    if isinstance(value, Size):
        return int(value)
    if is_dataclass(value):
        return dict(_set_fields(value))
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain_value(value[key]) for key in sorted(value)}
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value]
    return value


def _set_fields(value: Any) -> Iterator[tuple[str, Any]]:
    for each in fields(value):
        found = getattr(value, each.name)
        default = each.default if each.default is not MISSING else None
        if each.default_factory is not MISSING:
            default = each.default_factory()
        required = each.default is MISSING and each.default_factory is MISSING
        if not required and found == default:
            continue
        if each.type in ("float", "float | None"):
            # 8 and 8.0 are one amount, and must be one text.
            yield each.name, float(found)
        elif isinstance(value, Array) and each.name == "params":
            # Their order assigns them to indices.
            yield each.name, {key: plain_value(item) for key, item in found.items()}
        else:
            yield each.name, plain_value(found)


def set_fields(spec: JobSpec) -> list[str]:
    """Dotted names of every field that differs from its default, which a fidelity report must cover."""
    return sorted(_dotted(spec_fields(spec), JobSpec, ""))


def _dotted(values: Mapping[str, Any], kind: type, prefix: str) -> Iterator[str]:
    known = {each.name: each for each in fields(kind)}
    for name, value in values.items():
        inner = _inner_kind(known[name])
        if isinstance(value, Mapping) and value and inner is not None:
            yield from _dotted(value, inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def leaf_fields(kind: type = JobSpec, prefix: str = "") -> list[str]:
    """Dotted names of all fields of a spec, which a launcher's table must cover."""
    found: list[str] = []
    for each in fields(kind):
        inner = _inner_kind(each)
        found += leaf_fields(inner, f"{prefix}{each.name}.") if inner else [prefix + each.name]
    return found


def _inner_kind(field: Any) -> type | None:
    """The class of a field's own fields. Types are looked up as text, since evaluating all of them takes 2 ms."""
    inner = vars(spec_module).get(field.type.removesuffix(" | None"))
    return inner if isinstance(inner, type) and is_dataclass(inner) and inner not in (Range, FunctionCall) else None
