"""The Pulumi resource provider protocol in Python, so that a test plug-in only defines its cloud.

The engine starts a plug-in's executable, reads a port from its standard output and calls it over gRPC, several calls at
once. `Plugin` converts requests to plain values (with `UNKNOWN` and `SecretValue` of `infra.check.recording`) and converts
the answers back. It compares inputs by path, so that tests can expect exact preview steps. A plug-in ends with the
engine that started it, even if the engine was killed.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import grpc
from google.protobuf import empty_pb2, json_format, struct_pb2
from pulumi.runtime import rpc
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc

from infra.check.recording import UNKNOWN, SecretValue, UnknownValue

Values = Mapping[str, Any]


class Refused(Exception):
    """A refusal by the cloud; the engine prints `message`."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class PartlyMade(Exception):
    """The resource was created but is incomplete: the engine keeps it, fails, and updates it next time."""

    def __init__(self, id: str, state: Values, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.id, self.state, self.reasons = id, state, tuple(reasons)


@dataclass(frozen=True, slots=True)
class Failure:
    """An input refused before anything is created."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """The resource that a call concerns."""

    urn: str
    type: str
    inputs: Values = field(default_factory=dict)
    """The inputs that the program wants; for a deletion, those it wanted last."""
    id: str = ""
    state: Values = field(default_factory=dict)
    """The outputs that the engine remembers."""
    old_inputs: Values = field(default_factory=dict)
    preview: bool = False

    @property
    def name(self) -> str:
        return self.urn.rpartition("::")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The actual resource."""

    id: str
    state: Values
    inputs: Values


@dataclass(frozen=True, slots=True)
class Difference:
    path: str
    """The path, such as `labels.team` or `rules[0].action`; a key with a dot is written `labels["a.b"]`."""
    kind: str
    """One of `add`, `delete` and `update`."""
    replaces: bool = False


class Plugin(provider_pb2_grpc.ResourceProviderServicer):
    """Override the lower-case methods; the CamelCase methods are the protocol."""

    version: ClassVar[str] = "0.0.0"
    """Not below the SDK's, or the engine warns on every operation."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        """Set when the engine wants to end; long operations then stop."""

    # implemented by a plug-in

    def check_provider(self, inputs: Values) -> list[Failure]:
        return []

    def replaces_provider(self, old: Values, new: Values) -> list[str]:
        """Keys of the provider's inputs whose change means another cloud, so every resource in it is replaced."""
        return []

    def configure(self, inputs: Values) -> None:
        """Configure the plug-in, before any other call. May raise `Refused`."""

    def check(self, wanted: Resource) -> list[Failure]:
        return []

    def replaces(self, type_: str, path: str, old: Any, new: Any) -> bool:
        """Return whether a changed input at `path` cannot be changed in place."""
        return False

    def delete_before_replace(self, type_: str, inputs: Values) -> bool:
        return False

    def create(self, wanted: Resource) -> tuple[str, Values]:
        """Create it; return id and state. In a preview the id is ignored and unknown values are left out."""
        raise NotImplementedError

    def read(self, known: Resource) -> Found | None:
        """Read the actual resource, whatever the engine remembers. `inputs` are empty on import."""
        raise NotImplementedError

    def update(self, wanted: Resource) -> Values:
        raise NotImplementedError

    def delete(self, known: Resource) -> None:
        """Delete it; an already deleted resource is success."""
        raise NotImplementedError

    # the protocol

    def Handshake(self, request: Any, context: grpc.ServicerContext) -> Any:
        return provider_pb2.ProviderHandshakeResponse(accept_secrets=True)

    def GetPluginInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        return plugin_pb2.PluginInfo(version=self.version)

    def Attach(self, request: Any, context: grpc.ServicerContext) -> Any:
        return empty_pb2.Empty()

    def CheckConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        failures = self.check_provider(plain(request.news))
        return provider_pb2.CheckResponse(inputs=request.news, failures=_failures(failures))

    def DiffConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        old, new = plain(request.old_inputs), plain(request.news)
        replaces = self.replaces_provider(old, new)
        return _diff_response(
            [
                Difference(each.path, each.kind, replaces=_first_key(each.path) in replaces)
                for each in find_differences(old, new)
            ]
        )

    def Configure(self, request: Any, context: grpc.ServicerContext) -> Any:
        with _refusing(context):
            self.configure(plain(request.args))
        return provider_pb2.ConfigureResponse(acceptSecrets=True, supportsPreview=True)

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:
        wanted = Resource(
            urn=request.urn, type=_type(request), inputs=plain(request.news), old_inputs=plain(request.olds)
        )
        with _refusing(context):
            failures = self.check(wanted)
        return provider_pb2.CheckResponse(inputs=request.news, failures=_failures(failures))

    def Diff(self, request: Any, context: grpc.ServicerContext) -> Any:
        type_, old, new = _type(request), plain(request.old_inputs), plain(request.news)
        differences = [
            Difference(
                each.path,
                each.kind,
                replaces=self.replaces(type_, each.path, value_at(old, each.path), value_at(new, each.path)),
            )
            for each in find_differences(old, new)
            if not is_covered(each.path, request.ignoreChanges)
        ]
        return _diff_response(differences, delete_before_replace=self.delete_before_replace(type_, new))

    def Create(self, request: Any, context: grpc.ServicerContext) -> Any:
        wanted = Resource(
            urn=request.urn, type=_type(request), inputs=plain(request.properties), preview=request.preview
        )
        with _refusing(context):
            id_, state = self.create(wanted)
        return provider_pb2.CreateResponse(id="" if request.preview else id_, properties=struct(state))

    def Read(self, request: Any, context: grpc.ServicerContext) -> Any:
        known = Resource(
            urn=request.urn,
            type=_type(request),
            id=request.id,
            inputs=plain(request.inputs),
            state=plain(request.properties),
        )
        with _refusing(context):
            found = self.read(known)
        if found is None:
            return provider_pb2.ReadResponse()
        return provider_pb2.ReadResponse(id=found.id, properties=struct(found.state), inputs=struct(found.inputs))

    def Update(self, request: Any, context: grpc.ServicerContext) -> Any:
        wanted = Resource(
            urn=request.urn,
            type=_type(request),
            id=request.id,
            inputs=plain(request.news),
            state=plain(request.olds),
            old_inputs=plain(request.old_inputs),
            preview=request.preview,
        )
        with _refusing(context):
            return provider_pb2.UpdateResponse(properties=struct(self.update(wanted)))

    def Delete(self, request: Any, context: grpc.ServicerContext) -> Any:
        known = Resource(
            urn=request.urn,
            type=_type(request),
            id=request.id,
            state=plain(request.properties),
            inputs=plain(request.old_inputs),
        )
        with _refusing(context):
            self.delete(known)
        return empty_pb2.Empty()

    def Invoke(self, request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"`{request.tok}`: the program must look nothing up")

    def Cancel(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.stopping.set()
        return empty_pb2.Empty()


def serve(plugin: Plugin) -> NoReturn:
    """Print the port on standard output and serve until the engine exits."""
    server = grpc.server(futures.ThreadPoolExecutor(32))
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(plugin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    # Before the port is printed, because the engine may exit right after reading it.
    engine = os.getppid()
    print(port, flush=True)
    while os.getppid() == engine:
        server.wait_for_termination(0.2)
    sys.stdout.flush()
    # Hanging calls would keep the process alive after the engine's exit.
    os._exit(0)


# values


def plain(message: Any) -> dict[str, Any]:
    """Convert a protocol struct to plain values."""
    values: dict[str, Any] = _plain(json_format.MessageToDict(message))
    return values


def struct(values: Values) -> Any:
    return json_format.ParseDict(_wire(values), struct_pb2.Struct())


def reveal(value: Any) -> Any:
    """Open every `SecretValue` in the value, since a cloud sees plain text."""
    match value:
        case SecretValue(value=inside):
            return reveal(inside)
        case Mapping():
            return {key: reveal(item) for key, item in value.items()}
        case list():
            return [reveal(item) for item in value]
    return value


def hide_again(value: Any, pattern: Any) -> Any:
    """Wrap parts of `value` in `SecretValue` wherever `pattern` has one, since a cloud returns secrets as plain text."""
    if isinstance(pattern, SecretValue):
        return value if isinstance(value, SecretValue) else SecretValue(value)
    if isinstance(pattern, Mapping) and isinstance(value, Mapping):
        return {key: hide_again(item, pattern.get(key)) for key, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        signature = value.get(rpc._special_sig_key)
        if signature == rpc._special_secret_sig:
            return SecretValue(_plain(value.get("value")))
        if signature is not None:
            raise Refused(f"a value of a kind that this plug-in does not take: {signature}")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value == rpc.UNKNOWN:
        return UNKNOWN
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _wire(value: Any) -> Any:
    if isinstance(value, SecretValue):
        return {rpc._special_sig_key: rpc._special_secret_sig, "value": _wire(value.value)}
    if isinstance(value, UnknownValue):
        return rpc.UNKNOWN
    if isinstance(value, Mapping):
        return {key: _wire(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_wire(item) for item in value]
    return value


# differences


def find_differences(old: Values, new: Values) -> list[Difference]:
    """List every leaf that differs, in path order, except keys that begin with `__`, which are Pulumi's own."""
    return sorted(_differences(reveal(old), reveal(new), ""), key=lambda each: each.path)


def _differences(old: Any, new: Any, path: str) -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in old.keys() | new.keys():
            if not key.startswith("__"):
                yield from _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), _join(path, key))
    elif isinstance(old, list) and isinstance(new, list):
        for index in range(max(len(old), len(new))):
            yield from _differences(_item(old, index), _item(new, index), f"{path}[{index}]")
    elif old is _ABSENT or new is _ABSENT:
        if old is not new:
            yield Difference(path, "add" if old is _ABSENT else "delete")
    elif isinstance(new, UnknownValue) or old != new or isinstance(old, bool) is not isinstance(new, bool):
        yield Difference(path, "update")


def value_at(values: Values, path: str) -> Any:
    """Return the value at a path, or None."""
    found: Any = reveal(values)
    for key in split_path(path):
        if isinstance(key, int):
            found = _item(found, key) if isinstance(found, list) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None or found is _ABSENT:
            return None
    return found


def split_path(path: str) -> list[str | int]:
    keys: list[str | int] = []
    for quoted, index, word in _STEP.findall(path):
        keys.append(int(index) if index else quoted or word)
    return keys


def is_covered(path: str, patterns: Sequence[str]) -> bool:
    """Return whether `path` equals one of the patterns or lies below one; `*` stands for any key."""
    keys = split_path(path)
    for pattern in patterns:
        wanted = split_path(pattern)
        if len(wanted) <= len(keys) and all(want in ("*", key) for want, key in zip(wanted, keys, strict=False)):
            return True
    return False


_ABSENT = object()
_STEP = re.compile(r'\["([^"]+)"\]|\[(\d+)\]|([^.\[\]]+)')


def _item(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else _ABSENT


def _join(path: str, key: str) -> str:
    if re.fullmatch(r"[\w*-]+", key):
        return f"{path}.{key}" if path else key
    return f'{path}["{key}"]'


def _first_key(path: str) -> str:
    return str(split_path(path)[0])


def _diff_response(differences: Sequence[Difference], *, delete_before_replace: bool = False) -> Any:
    if not differences:
        return provider_pb2.DiffResponse(changes=provider_pb2.DiffResponse.DIFF_NONE)
    detailed = {}
    for each in differences:
        kind = each.kind.upper() + ("_REPLACE" if each.replaces else "")
        detailed[each.path] = provider_pb2.PropertyDiff(kind=provider_pb2.PropertyDiff.Kind.Value(kind), inputDiff=True)
    replacing = sorted({_first_key(each.path) for each in differences if each.replaces})
    return provider_pb2.DiffResponse(
        changes=provider_pb2.DiffResponse.DIFF_SOME,
        diffs=sorted({_first_key(each.path) for each in differences}),
        replaces=replacing,
        deleteBeforeReplace=bool(replacing) and delete_before_replace,
        detailedDiff=detailed,
        hasDetailedDiff=True,
    )


def _failures(failures: Sequence[Failure]) -> list[Any]:
    return [provider_pb2.CheckFailure(property=each.path, reason=each.reason) for each in failures]


def _type(request: Any) -> str:
    """Return the resource type; older engines send none, but the URN ends with it, after the parents' types."""
    return str(request.type or request.urn.split("::")[2].rpartition("$")[2])


@contextmanager
def _refusing(context: grpc.ServicerContext) -> Iterator[None]:
    """Convert `Refused` and `PartlyMade` to the engine's errors."""
    try:
        yield
    except Refused as problem:
        context.abort(problem.code, problem.message)
    except PartlyMade as problem:
        _abort_partly_made(context, problem)


def _abort_partly_made(context: grpc.ServicerContext, problem: PartlyMade) -> None:
    from google.protobuf import any_pb2
    from google.rpc import status_pb2

    detail = any_pb2.Any()
    detail.Pack(
        provider_pb2.ErrorResourceInitFailed(
            id=problem.id, properties=struct(problem.state), reasons=list(problem.reasons)
        )
    )
    message = str(problem)
    status = status_pb2.Status(code=grpc.StatusCode.UNKNOWN.value[0], message=message, details=[detail])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(grpc.StatusCode.UNKNOWN, message)
