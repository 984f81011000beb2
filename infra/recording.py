"""Runs a Pulumi program without an engine and keeps what it asked for.

The mocks that ship with Pulumi keep names and inputs only. What a review needs to see is in the raw requests: who the
parent is, which provider, protect, retain, aliases, ignored changes, dependencies. `record` keeps all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from google.protobuf import json_format
from pulumi.runtime import mocks, rpc, run_in_stack, set_all_config
from pulumi.runtime import settings as runtime_settings
from pulumi.runtime.settings import set_root_resource

PROJECT: Final = "research-runtime"
"""The Pulumi project, as in Pulumi.yaml."""

STACK_TYPE: Final = "pulumi:pulumi:Stack"


class Unknown:
    """A value that only the cloud can tell."""

    def __repr__(self) -> str:
        return "<known after up>"


@dataclass(frozen=True, slots=True)
class Secret:
    """A value that Pulumi keeps encrypted; `value` is what lies inside."""

    value: Any


UNKNOWN: Final = Unknown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One resource as the program registered it. Keys of `inputs` are the provider's, in camelCase."""

    urn: str
    type: str
    """`gcp:pubsub/topic:Topic`, or `runtime:queue:Queue` of a component."""
    name: str
    inputs: Mapping[str, Any]
    """Plain values; what is not known before `up` is `UNKNOWN`, what is secret is a `Secret`."""
    custom: bool = True
    """False for a component, which is made of others and exists in the state only."""
    parent: str | None = None
    provider: str | None = None
    """URN and id of the explicit provider, joined by `::`; None for the default one."""
    protect: bool = False
    retain_on_delete: bool = False
    delete_before_replace: bool | None = None
    """None where the program did not say."""
    ignore_changes: tuple[str, ...] = ()
    replace_on_changes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    dependencies: frozenset[str] = frozenset()
    """URNs of everything it waits for, by an input or by `depends_on`."""
    property_dependencies: Mapping[str, frozenset[str]] = field(default_factory=dict)
    import_id: str | None = None
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """Of a component what it registered; of a resource what `compute` said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    stack: str
    resources: tuple[Registration, ...]
    """In the order of registration, without the stack itself."""
    outputs: Mapping[str, Any]
    """The stack's exports."""

    def of_type(self, type_: str) -> list[Registration]:
        return [each for each in self.resources if each.type == type_]

    def get(self, urn: str) -> Registration:
        """Raises KeyError."""
        return self._by_urn()[urn]

    def named(self, type_: str, name: str) -> Registration:
        """Raises LookupError with the names that there are."""
        found = self.of_type(type_)
        for each in found:
            if each.name == name:
                return each
        raise LookupError(f"no {type_} named {name}; there are {sorted(each.name for each in found)}")

    def _by_urn(self) -> dict[str, Registration]:
        return {each.urn: each for each in self.resources}


Compute = Callable[[str, str, Mapping[str, Any]], Mapping[str, Any]]
"""(type, name, inputs) → the outputs that the cloud would add; `id` among them is the resource's id.
It may return `UNKNOWN` for any of them."""


def no_outputs(type_: str, name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def record(
    program: Callable[[], None],
    *,
    stack: str = "dev",
    project: str = PROJECT,
    config: Mapping[str, str] | None = None,
    preview: bool = True,
    compute: Compute = no_outputs,
) -> Recording:
    """Run `program` and return all that it registered and exported; what it raises is raised.

    `config` has full keys (`research-runtime:region`) and their values as the engine passes them: text, objects as
    JSON. Can be called any number of times in a process, one after another.
    """
    monitor = _Monitor(_Cloud(compute), project=project, stack=stack)
    set_all_config(dict(config or {}), [])
    set_root_resource(None)  # type: ignore[arg-type]
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        features = set(monitor.GetDeploymentInfo(None).supportedFeatures)  # type: ignore[no-untyped-call]
        runtime_settings.configure(
            mocks.MockSettings(  # type: ignore[no-untyped-call]
                monitor=monitor,
                monitor_features=features,
                engine=mocks.MockEngine(None),
                project=project,
                stack=stack,
                dry_run=preview,
                organization=None,
                callbacks=None,
            )
        )
        loop.run_until_complete(run_in_stack(program))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        set_root_resource(None)  # type: ignore[arg-type]
        set_all_config({}, [])
    return monitor.recording()


class _Cloud(mocks.Mocks):
    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str | None, dict[Any, Any]]:
        raise NotImplementedError  # The monitor answers by itself.

    def call(self, args: mocks.MockCallArgs) -> NoReturn:
        raise RuntimeError(f"the program reads `{args.token}` from the cloud; nothing may be looked up")

    def outputs(self, type_: str, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {**inputs, **self._compute(type_, name, inputs)}


class _Monitor(mocks.MockMonitor):
    def __init__(self, cloud: _Cloud, *, project: str, stack: str) -> None:
        super().__init__(cloud)
        self._cloud, self._project, self._stack = cloud, project, stack
        self._requests: dict[str, Any] = {}
        self._outputs: dict[str, Mapping[str, Any]] = {}

    def RegisterResource(self, request: Any) -> Any:
        from pulumi.runtime.proto import resource_pb2

        urn = self._urn(request)
        if urn in self._requests:
            raise RuntimeError(f"two resources have the same URN: {urn}")
        if request.type == STACK_TYPE:
            return resource_pb2.RegisterResourceResponse(urn=urn)
        self._requests[urn] = request
        if not request.custom:
            return resource_pb2.RegisterResourceResponse(urn=urn)
        inputs = _plain(json_format.MessageToDict(request.object))
        outputs = self._cloud.outputs(request.type, request.name, inputs)
        identity = outputs.pop("id", UNKNOWN)
        self._outputs[urn] = outputs | {"id": identity}
        known = isinstance(identity, str)
        return resource_pb2.RegisterResourceResponse(
            urn=urn, id=identity if known else "", object=json_format.ParseDict(_wire(outputs), _struct())
        )

    def RegisterResourceOutputs(self, request: Any) -> Any:
        self._outputs[request.urn] = _plain(json_format.MessageToDict(request.outputs))
        return super().RegisterResourceOutputs(request)  # type: ignore[no-untyped-call]

    def _urn(self, request: Any) -> str:
        qualified = request.type
        if request.parent and f"::{STACK_TYPE}::" not in request.parent:
            qualified = request.parent.split("::")[2] + "$" + request.type
        return "::".join((f"urn:pulumi:{self._stack}", self._project, qualified, request.name))

    def recording(self) -> Recording:
        stack_outputs: Mapping[str, Any] = {}
        for urn, outputs in self._outputs.items():
            if f"::{STACK_TYPE}::" in urn:
                stack_outputs = outputs
        resources = tuple(self._registration(urn, request) for urn, request in self._requests.items())
        return Recording(stack=self._stack, resources=resources, outputs=stack_outputs)

    def _registration(self, urn: str, request: Any) -> Registration:
        inputs = _plain(json_format.MessageToDict(request.object))
        return Registration(
            urn=urn,
            type=request.type,
            name=request.name,
            custom=request.custom,
            inputs=inputs,
            parent=request.parent or None,
            provider=request.provider or None,
            protect=request.protect,
            retain_on_delete=request.retainOnDelete,
            delete_before_replace=request.deleteBeforeReplace if request.deleteBeforeReplaceDefined else None,
            ignore_changes=tuple(request.ignoreChanges),
            replace_on_changes=tuple(request.replaceOnChanges),
            aliases=tuple(_alias(each) for each in request.aliases),
            dependencies=frozenset(request.dependencies),
            property_dependencies={key: frozenset(value.urns) for key, value in request.propertyDependencies.items()},
            import_id=request.importId or None,
            outputs=self._outputs.get(urn, {}),
        )


def _alias(alias: Any) -> str:
    return str(alias.urn or alias.spec.name)


def _struct() -> Any:
    from google.protobuf import struct_pb2

    return struct_pb2.Struct()


def _plain(value: Any) -> Any:
    """From the wire's markers for secrets and unknowns to ours."""
    if isinstance(value, dict):
        if value.get(rpc._special_sig_key) == rpc._special_secret_sig:
            return Secret(_plain(value["value"]))
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value == rpc.UNKNOWN:
        return UNKNOWN
    if isinstance(value, float) and value.is_integer():
        # The wire carries every number as a double.
        return int(value)
    return value


def _wire(value: Any) -> Any:
    if isinstance(value, Secret):
        return {rpc._special_sig_key: rpc._special_secret_sig, "value": _wire(value.value)}
    if isinstance(value, Unknown):
        return rpc.UNKNOWN
    if isinstance(value, Mapping):
        return {key: _wire(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_wire(item) for item in value]
    return value
