"""StackOutputs: the typed, versioned contract between a Pulumi stack and the runtime.

A stack exports one object named `contract`; this module is its only definition and both sides use it. It holds
references, never a secret's value. Keys that this release does not know are ignored, so a stack may add keys
without a new `schema`; another `schema` is refused.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Final, TypeAlias, TypeVar

from runtime.errors import InvalidContract

SCHEMA: Final = 1
OUTPUT_NAME: Final = "contract"
"""The stack output that holds it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsOutput:
    url: str
    """`gs://…`, `s3://…`, `file:/…` or `sqlite:/…`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PubSubQueueOutput:
    topic: str
    """`projects/P/topics/T`"""
    subscription: str
    """`projects/P/subscriptions/S`"""
    ack_deadline_s: int = 60
    dead_letter_topic: str | None = None
    dead_letter_subscription: str | None = None
    max_delivery_attempts: int | None = None
    retention_s: int | None = None
    """How long the service keeps a message that nobody has taken."""
    exactly_once: bool | None = None
    kind: str = "pubsub"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteQueueOutput:
    """A queue in an embedded file, which holds its records too."""

    path: str
    kind: str = "sqlite"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherQueueOutput:
    """A queue of a kind that this release does not know; refused only when it is opened."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)


QueueOutput: TypeAlias = PubSubQueueOutput | SqliteQueueOutput | OtherQueueOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOutput:
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretOutput:
    """Where a secret lies and the variable that carries it; its value is never here."""

    resource: str
    env: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOutput:
    network: str
    subnet: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOutput:
    head: str
    """Name of the head VM."""
    cluster_name: str
    zone: str
    internal_ip: str
    image: str
    ports: Mapping[str, int] = field(default_factory=dict)
    pools: Mapping[str, Any] = field(default_factory=dict)
    worker_identity: str
    config_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOutput:
    claim: str
    size: str
    access_mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceOutput:
    service_account: str
    image_pull_secret: str | None = None
    claims: Mapping[str, ClaimOutput] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOutput:
    context: str
    server: str
    namespaces: Mapping[str, NamespaceOutput] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityOutput:
    email: str
    use: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOutputs:
    stack: str
    project: str | None = None
    region: str | None = None
    zone: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    records: RecordsOutput | None = None
    queues: Mapping[str, QueueOutput] = field(default_factory=dict)
    registries: Mapping[str, Mapping[str, RegistryOutput]] = field(default_factory=dict)
    """By name, then by region."""
    secrets: Mapping[str, SecretOutput] = field(default_factory=dict)
    network: NetworkOutput | None = None
    clusters: Mapping[str, ClusterOutput] = field(default_factory=dict)
    kubernetes: Mapping[str, KubernetesOutput] = field(default_factory=dict)
    identities: Mapping[str, IdentityOutput] = field(default_factory=dict)
    published_url: str | None = None
    """Where the stack keeps a copy of this contract for machines without Pulumi."""


def outputs_fields(outputs: StackOutputs) -> dict[str, Any]:
    """The contract as a JSON object; what is None is left out."""
    return {"schema": SCHEMA, **_plain(outputs)}


def encode_outputs(outputs: StackOutputs) -> str:
    """Canonical JSON: equal outputs have equal text."""
    return json.dumps(outputs_fields(outputs), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def decode_outputs(data: str | bytes, *, source: str | None = None) -> StackOutputs:
    """As `parse_outputs`, from text. `source` says in errors where it came from."""
    try:
        value = json.loads(data)
    except ValueError as problem:
        raise InvalidContract(
            f"the contract {_of(source)}is no JSON: {problem}", hint="`runtime stack show -o json` prints a valid one"
        ) from None
    return parse_outputs(value, source=source)


def parse_outputs(value: object, *, source: str | None = None) -> StackOutputs:
    """Check and type a contract. Raises `InvalidContract` with the path of what is wrong."""
    if not isinstance(value, Mapping):
        raise InvalidContract(
            f"the contract {_of(source)}is {_kind(value)}, expected an object",
            hint="`runtime stack show -o json` prints a valid one",
        )
    name = value.get("stack")
    stack = name if isinstance(name, str) and name else "STACK"
    schema = value.get("schema")
    if type(schema) not in (int, float) or schema != SCHEMA:
        newer = isinstance(schema, int | float) and schema > SCHEMA
        raise InvalidContract(
            f"stack `{stack}` exports a contract that this release cannot read",
            facts=[f"found schema {json.dumps(schema)}, need {SCHEMA}"],
            hint="pip install --upgrade research-runtime" if newer else f"run `pulumi up --stack {stack}`",
        )
    try:
        return typing.cast(StackOutputs, _read_record(StackOutputs, value, ""))
    except _WrongType as problem:
        raise InvalidContract(
            f"stack `{stack}` exports a malformed contract: `{problem.path}` {problem.problem}",
            facts=[f"read from {source}"] if source else [],
            hint=f"run `pulumi up --stack {stack}`",
        ) from None


class _WrongType(Exception):
    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem


def _of(source: str | None) -> str:
    return f"of `{source}` " if source else ""


def _plain(value: Any) -> Any:
    if isinstance(value, OtherQueueOutput):
        return {**_plain(value.values), "kind": value.kind}
    if is_dataclass(value):
        pairs = ((each.name, getattr(value, each.name)) for each in fields(value))
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_record(kind: type, value: object, path: str) -> object:
    if not isinstance(value, Mapping):
        raise _WrongType(path, f"is {_kind(value)}, expected an object")
    hints, values = _hints(kind), {}
    for each in fields(kind):
        found = value.get(each.name)
        inner = f"{path}.{each.name}" if path else each.name
        if found is not None:
            values[each.name] = _read(hints[each.name], found, inner)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise _WrongType(inner, "is missing")
    return kind(**values)


def _read(kind: Any, value: object, path: str) -> object:
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if kind == QueueOutput:
        return _read_queue(value, path)
    if origin in (types.UnionType, typing.Union):
        (only,) = (member for member in typing.get_args(kind) if member is not types.NoneType)
        return _read(only, value, path)
    if origin is not None:
        if not isinstance(value, Mapping):
            raise _WrongType(path, f"is {_kind(value)}, expected an object")
        _, item = typing.get_args(kind)
        return {str(key): _read(item, found, f"{path}.{key}") for key, found in value.items()}
    if is_dataclass(kind):
        return _read_record(typing.cast(type, kind), value, path)
    if kind is int and type(value) is float and value.is_integer():
        # Pulumi carries every number as a double.
        return int(value)
    if type(value) is not kind:
        raise _WrongType(path, f"is {_kind(value)}, expected {_EXPECTED[kind]}")
    return value


def _read_queue(value: object, path: str) -> QueueOutput:
    if not isinstance(value, Mapping):
        raise _WrongType(path, f"is {_kind(value)}, expected an object")
    kind = value.get("kind")
    if not isinstance(kind, str):
        raise _WrongType(f"{path}.kind", "is missing" if kind is None else f"is {_kind(kind)}, expected a string")
    known = {"pubsub": PubSubQueueOutput, "sqlite": SqliteQueueOutput}.get(kind)
    if known is None:
        return OtherQueueOutput(kind=kind, values={key: item for key, item in value.items() if key != "kind"})
    return typing.cast(QueueOutput, _read_record(known, value, path))


_EXPECTED: Final = {str: "a string", int: "a whole number", bool: "true or false"}


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"a boolean ({json.dumps(value)})"
        case int() | float():
            return f"a number ({value})"
        case str():
            return f'a string ("{value[:40]}")'
        case Mapping():
            return "an object"
        case _:
            return "an array"
