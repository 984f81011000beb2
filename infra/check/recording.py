"""Runs a Pulumi program without an engine and keeps its requests.

Pulumi's own mocks keep names and inputs only. `record` also keeps the other facts of each request: the parent, the
provider, protect, retain, aliases, ignored changes, dependencies.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from google.protobuf import json_format
from pulumi.runtime import mocks, register_stack_transformation, rpc, run_in_stack, set_all_config
from pulumi.runtime import settings as runtime_settings
from pulumi.runtime.proto import resource_pb2
from pulumi.runtime.settings import set_root_resource

PROJECT: Final = "research-runtime"
"""The Pulumi project, as in Pulumi.yaml."""

STACK_TYPE: Final = "pulumi:pulumi:Stack"

UNKNOWN_MARK: Final = "<known after up>"
"""Mark in JSON for a value that only the cloud knows."""


class UnknownValue:
    """A value that only the cloud knows."""

    def __repr__(self) -> str:
        return UNKNOWN_MARK


@dataclass(frozen=True, slots=True)
class SecretValue:
    """A value that Pulumi keeps encrypted; `value` is its content."""

    value: Any


UNKNOWN: Final = UnknownValue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One resource as the program registered it. Keys of `inputs` are the provider's, in camelCase."""

    urn: str
    type: str
    """`gcp:pubsub/topic:Topic`, or `runtime:queue:Queue` of a component."""
    name: str
    inputs: Mapping[str, Any]
    """Plain values; `UNKNOWN` if not known before `up`, `SecretValue` if secret."""
    custom: bool = True
    """False for a component, which consists of other resources and exists in the state only."""
    parent: str | None = None
    provider: str | None = None
    """URN and id of the explicit provider, joined by `::`; None for the default one."""
    protect: bool = False
    retain_on_delete: bool = False
    delete_before_replace: bool | None = None
    """None if the program does not set it."""
    ignore_changes: tuple[str, ...] = ()
    replace_on_changes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Earlier URNs of the resource."""
    dependencies: frozenset[str] = frozenset()
    """URNs of the resources that this one waits for, by an input or by `depends_on`."""
    property_dependencies: Mapping[str, frozenset[str]] = field(default_factory=dict)
    import_id: str | None = None
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """The outputs that a component registered, or `compute` returned for a resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    stack: str
    resources: tuple[Registration, ...]
    """Resources in the program's order, without the stack itself."""
    outputs: Mapping[str, Any]
    """The stack's exports."""

    def of_type(self, type_: str) -> list[Registration]:
        return [each for each in self.resources if each.type == type_]

    def get(self, urn: str) -> Registration:
        """Raises KeyError."""
        return {each.urn: each for each in self.resources}[urn]

    def named(self, type_: str, name: str) -> Registration:
        """Raises LookupError with the existing names."""
        found = self.of_type(type_)
        for each in found:
            if each.name == name:
                return each
        raise LookupError(f"no {type_} named {name}; there are {sorted(each.name for each in found)}")


Compute = Callable[[str, str, Mapping[str, Any]], Mapping[str, Any]]
"""(type, name, inputs) → the outputs that the cloud would add, with the resource's `id`; each may be `UNKNOWN`."""


def record(
    program: Callable[[], None],
    *,
    stack: str = "dev",
    project: str = PROJECT,
    config: Mapping[str, str] | None = None,
    preview: bool = True,
    compute: Compute = lambda type_, name, inputs: {},
    secrets: Collection[str] = (),
) -> Recording:
    """Run `program` and return all its resources and exports; its exceptions pass through.

    `config` has full keys (`research-runtime:region`) and values as the engine passes them: text, objects as JSON;
    `secrets` names the encrypted keys. A process can call it repeatedly, but not concurrently.
    """
    monitor = _Monitor(compute, project=project, stack=stack)
    with _without_collector_and_stack_traces():
        # Pulumi keeps its settings in context variables, which end with the task of this run.
        asyncio.run(_run(program, monitor, config or {}, secrets, project=project, stack=stack, preview=preview))
    return monitor.recording()


@contextmanager
def _without_collector_and_stack_traces() -> Iterator[None]:
    """Turn off what takes more than half of the time: the collector goes through Pulumi's modules again and again, and
    Pulumi notes the whole stack of calls with each resource."""
    collects, limit = gc.isenabled(), getattr(sys, "tracebacklimit", None)
    gc.disable()
    sys.tracebacklimit = 1
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if limit is None:
            del sys.tracebacklimit
        else:
            sys.tracebacklimit = limit


class _AtOnce(ThreadPoolExecutor):
    """Answers each request where it is made, so that the order is the same each time and no thread is needed."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as problem:
            done.set_exception(problem)
        return done


async def _run(
    program: Callable[[], None],
    monitor: _Monitor,
    config: Mapping[str, str],
    secrets: Collection[str],
    *,
    project: str,
    stack: str,
    preview: bool,
) -> None:
    set_all_config(dict(config), list(secrets))
    set_root_resource(None)  # type: ignore[arg-type]
    runtime_settings.configure(
        mocks.MockSettings(  # type: ignore[no-untyped-call]
            monitor=monitor,
            monitor_features=set(monitor.GetDeploymentInfo(None).supportedFeatures),
            engine=mocks.MockEngine(None),
            project=project,
            stack=stack,
            dry_run=preview,
            organization=None,
            callbacks=None,
            outputs=set(),
            package_refs={},
            base_providers_by_ref={},
        )
    )
    loop = asyncio.get_running_loop()
    loop.set_default_executor(_AtOnce())
    # The caller gets the first failure; later exceptions of the program's tasks are dropped.
    loop.set_exception_handler(lambda loop, context: None)

    def whole() -> None:
        # Pulumi sends requests when their inputs are known, in an order that depends on hashes; `begin` notes the program's.
        register_stack_transformation(lambda resource: monitor.begin(resource.type_, resource.name))
        program()

    await run_in_stack(whole)


class _Monitor(mocks.MockMonitor):
    def __init__(self, compute: Compute, *, project: str, stack: str) -> None:
        # Without mocks: this monitor answers every request itself.
        super().__init__(None)  # type: ignore[arg-type]
        self._compute, self._project, self._stack = compute, project, stack
        self._requests: dict[str, Any] = {}
        self._outputs: dict[str, Mapping[str, Any]] = {}
        self._begun: dict[tuple[str, str], int] = {}

    def begin(self, type_: str, name: str) -> None:
        """Note the program's order of resources."""
        self._begun.setdefault((type_, name), len(self._begun))

    def GetDeploymentInfo(self, request: Any) -> Any:
        found = super().GetDeploymentInfo(request).supportedFeatures  # type: ignore[no-untyped-call]
        # Hooks run in an engine only.
        kept = [each for each in found if not resource_pb2.ResourceMonitorFeature.Name(each).endswith("_HOOKS")]
        return resource_pb2.DeploymentInfo(supportedFeatures=kept)

    def RegisterResource(self, request: Any) -> Any:
        from google.protobuf import struct_pb2

        urn = make_urn(self._stack, self._project, request.parent, request.type, request.name)
        if urn in self._requests:
            raise RuntimeError(f"two resources have the same URN: {urn}")
        if request.type == STACK_TYPE:
            return resource_pb2.RegisterResourceResponse(urn=urn)
        self._requests[urn] = request
        if not request.custom:
            return resource_pb2.RegisterResourceResponse(urn=urn)
        inputs = _plain(json_format.MessageToDict(request.object))
        outputs = {**inputs, **self._compute(request.type, request.name, inputs)}
        identity = outputs.pop("id", UNKNOWN)
        self._outputs[urn] = outputs | {"id": identity}
        known = isinstance(identity, str)
        return resource_pb2.RegisterResourceResponse(
            urn=urn, id=identity if known else "", object=json_format.ParseDict(_wire(outputs), struct_pb2.Struct())
        )

    def Invoke(self, request: Any) -> NoReturn:
        raise RuntimeError(f"the program reads `{request.tok}` from the cloud; nothing may be looked up")

    def ReadResource(self, request: Any) -> NoReturn:
        raise RuntimeError(f"the program reads `{request.id}` from the cloud; nothing may be looked up")

    def RegisterResourceOutputs(self, request: Any) -> Any:
        self._outputs[request.urn] = _plain(json_format.MessageToDict(request.outputs))
        return super().RegisterResourceOutputs(request)  # type: ignore[no-untyped-call]

    def _aliases(self, urn: str) -> tuple[str, ...]:
        """Return the URNs under which the state may have the resource, by its own and its parent's aliases."""
        request = self._requests[urn]
        own = [self._alias(request, each) for each in request.aliases]
        if request.parent not in self._requests:
            return tuple(dict.fromkeys(own))
        parent = self._requests[request.parent].name
        for alias in self._aliases(request.parent):
            # The engine does the same: most children are named after their parent.
            follows = request.name.startswith(parent)
            name = alias.split("::")[-1] + request.name.removeprefix(parent) if follows else request.name
            own.append(make_urn(self._stack, self._project, alias, request.type, name))
        return tuple(dict.fromkeys(own))

    def _alias(self, request: Any, alias: Any) -> str:
        if alias.urn:
            return str(alias.urn)
        spec = alias.spec
        parent = "" if spec.noParent else spec.parentUrn or request.parent
        return make_urn(
            spec.stack or self._stack,
            spec.project or self._project,
            parent,
            spec.type or request.type,
            spec.name or request.name,
        )

    def recording(self) -> Recording:
        outputs = next((each for urn, each in self._outputs.items() if f"::{STACK_TYPE}::" in urn), {})
        requests = sorted(
            self._requests.items(), key=lambda each: self._begun.get((each[1].type, each[1].name), len(self._begun))
        )
        resources = tuple(self._registration(urn, request) for urn, request in requests)
        return Recording(stack=self._stack, resources=resources, outputs=outputs)

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
            aliases=self._aliases(urn),
            dependencies=frozenset(request.dependencies),
            property_dependencies={
                key: frozenset(value.urns) for key, value in sorted(request.propertyDependencies.items()) if value.urns
            },
            import_id=request.importId or None,
            outputs=self._outputs.get(urn, {}),
        )


def make_urn(stack: str, project: str, parent: str, type_: str, name: str) -> str:
    """Return the engine's URN, which has the types of all parents but the stack."""
    if parent and f"::{STACK_TYPE}::" not in parent:
        type_ = parent.split("::")[2] + "$" + type_
    return "::".join((f"urn:pulumi:{stack}", project, type_, name))


def is_grant(type_: str) -> bool:
    """Whether resources of a type add one member to one role, and remove none."""
    return type_.startswith("gcp:") and type_.endswith(("IAMMember", "IamMember"))


def _plain(value: Any) -> Any:
    """Replace the wire's markers for secrets and unknowns by `SecretValue` and `UNKNOWN`."""
    if isinstance(value, dict):
        if value.get(rpc._special_sig_key) == rpc._special_secret_sig:
            return SecretValue(_plain(value["value"]))
        return {key: _plain(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value == rpc.UNKNOWN:
        return UNKNOWN
    if isinstance(value, float) and value.is_integer():
        # The wire carries every number as a double.
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
