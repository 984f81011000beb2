"""The `kubernetes` provider of the engine tests: it creates the program's objects in a real Kubernetes API.

`FAKE_KUBERNETES_CONFIG` names the kubeconfig; the program has to name one of its contexts. The plug-in is deliberately
strict: it checks inputs against the wheel's types, requires a given name, does not take over existing objects, reports
a conflict on fields held by another manager unless told otherwise, and asks the API even in a preview.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc
import yaml
from kubernetes import config, dynamic
from kubernetes.client.exceptions import ApiException

from infra.check.recording import UNKNOWN, SecretValue, UnknownValue
from tests.engine.plugin import Failure, Found, Plugin, Refused, Resource, Values, hide_again, reveal, serve, split_path
from tests.infra.provider_types import find_input_problems

KUBECONFIG_VARIABLE: Final = "FAKE_KUBERNETES_CONFIG"
MANAGER: Final = "pulumi-kubernetes"
PROVIDER: Final = "pulumi:providers:kubernetes"
ENGINES: Final = ("version", "pluginDownloadURL")
"""Values that the engine adds to a provider's inputs."""
DELETION_S: Final = 60

IMMUTABLE: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "PersistentVolumeClaim": (
        ("spec", "accessModes"),
        ("spec", "selector"),
        ("spec", "storageClassName"),
        ("spec", "volumeName"),
        ("spec", "volumeMode"),
    ),
    "RoleBinding": (("roleRef",),),
    "ClusterRoleBinding": (("roleRef",),),
    "Secret": (("type",),),
}
"""Kind → fields that the API never changes in place, besides API version, kind, name and namespace."""
IDENTITY: Final = (("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"))

SERVERS: Final = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")
"""Metadata that the API writes itself."""


class KubernetesPlugin(Plugin):
    version = importlib.metadata.version("pulumi_kubernetes")

    def __init__(self) -> None:
        super().__init__()
        self._lock, self._discovering = threading.Lock(), threading.Lock()
        self._client: dynamic.DynamicClient | None = None
        self._upserts = self._forces = False

    # the provider itself

    def check_provider(self, inputs: Values) -> list[Failure]:
        own = {key: value for key, value in inputs.items() if key not in ENGINES}
        failures = [Failure(each.path, each.message) for each in find_input_problems(PROVIDER, own)]
        if inputs.get("kubeconfig") is not None:
            failures.append(Failure("kubeconfig", "would enter the state; name a context instead"))
        missing = [key for key in ("context", "clusterIdentifier") if not inputs.get(key)]
        return failures + [Failure(key, "is missing: an ambient cluster would be taken silently") for key in missing]

    def replaces_provider(self, old: Values, new: Values) -> list[str]:
        return ["clusterIdentifier"] if old.get("clusterIdentifier") != new.get("clusterIdentifier") else []

    def configure(self, inputs: Values) -> None:
        path, context = os.environ.get(KUBECONFIG_VARIABLE), inputs.get("context")
        if not path:
            raise Refused(f"{KUBECONFIG_VARIABLE} names no kubeconfig")
        try:
            api = config.new_client_from_config(path, context=context)
        except config.ConfigException as problem:
            known = [each["name"] for each in yaml.safe_load(Path(path).read_text())["contexts"]]
            raise Refused(f"the kubeconfig has no context `{context}`; it has {', '.join(known)}") from problem
        api.configuration.proxy = None
        self._client = dynamic.DynamicClient(api, cache_file=f"{path}.discovery-{os.getpid()}")
        self._upserts = inputs.get("upsertExistingObjects") in (True, "true")
        self._forces = inputs.get("enablePatchForce") in (True, "true")

    # objects

    def check(self, wanted: Resource) -> list[Failure]:
        try:
            problems = find_input_problems(wanted.type, wanted.inputs)
        except LookupError as unknown:
            return [Failure("", str(unknown))]
        failures = [Failure(each.path, each.message) for each in problems]
        metadata = wanted.inputs.get("metadata") or {}
        if not metadata.get("name"):
            failures.append(Failure("metadata.name", "is missing: a made-up name would be another one every time"))
        if not wanted.inputs.get("apiVersion") or wanted.inputs.get("kind") != wanted.type.rpartition(":")[2]:
            failures.append(Failure("kind", f"is `{wanted.inputs.get('kind')}`, which is not what {wanted.type} makes"))
        if not failures and self._client and self._is_namespaced(wanted.inputs) is not bool(metadata.get("namespace")):
            failures.append(
                Failure("metadata.namespace", "belongs to objects that live in a namespace, and only to them")
            )
        return failures

    def replaces(self, type_: str, path: str, old: Any, new: Any) -> bool:
        keys = tuple(split_path(path))
        fixed = IDENTITY + IMMUTABLE.get(type_.rpartition(":")[2], ())
        return any(keys[: len(each)] == each for each in fixed)

    def delete_before_replace(self, type_: str, inputs: Values) -> bool:
        return True

    def create(self, wanted: Resource) -> tuple[str, Values]:
        manifest = as_manifest(wanted.inputs)
        if wanted.preview:
            if not has_unknowns(wanted.inputs):
                self._preview(manifest)
            return "", dict(wanted.inputs)
        # Server-side apply has no "only if absent"; the lock serialises the calls of one engine.
        with self._lock:
            if not self._upserts and self._find(manifest) is not None:
                raise Refused(f"409: {describe(manifest)} already exists", grpc.StatusCode.ALREADY_EXISTS)
            stored = self._apply(manifest)
        return id_of(manifest), state_of(stored, wanted.inputs)

    def read(self, known: Resource) -> Found | None:
        last = known.inputs or known.state
        kind = known.type.rpartition(":")[2]
        manifest = as_manifest(last) if last else self._manifest_of(known.type, kind, known.id)
        stored = self._find(manifest)
        if stored is None:
            return None
        inputs = narrowed(stored, last) if last else owned(stored)
        return Found(id=known.id, state=state_of(stored, known.inputs), inputs=hide_again(inputs, known.inputs))

    def update(self, wanted: Resource) -> Values:
        manifest = as_manifest(wanted.inputs)
        if wanted.preview:
            if not has_unknowns(wanted.inputs):
                self._preview(manifest)
            return dict(wanted.inputs)
        with self._lock:
            if self._find(manifest) is None:
                raise Refused(f"404: {describe(manifest)} is gone; refresh first", grpc.StatusCode.NOT_FOUND)
            return state_of(self._apply(manifest), wanted.inputs)

    def delete(self, known: Resource) -> None:
        manifest = as_manifest(known.state)
        metadata = manifest["metadata"]
        uid = metadata["uid"]
        # Another object may have this name by now, which is not ours to delete.
        options = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        try:
            self._resource(manifest).delete(name=metadata["name"], namespace=metadata.get("namespace"), body=options)
        except ApiException as refused:
            if refused.status == 404:
                return
            # A conflict: another object has the name, or this object is already being deleted.
            if refused.status != 409:
                raise _refusal(refused, manifest) from refused
        deadline = time.monotonic() + DELETION_S
        while (there := self._find(manifest)) is not None and there["metadata"]["uid"] == uid:
            if time.monotonic() > deadline or self.stopping.is_set():
                held = ", ".join(there["metadata"].get("finalizers", [])) or "nothing that it says"
                raise Refused(f"{describe(manifest)} is still there, held by {held}", grpc.StatusCode.DEADLINE_EXCEEDED)
            time.sleep(0.1)

    # the API

    def _resource(self, manifest: Mapping[str, Any]) -> Any:
        if self._client is None:
            raise Refused("the provider is not configured")
        try:
            with self._discovering:
                return self._client.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
        except dynamic.exceptions.ResourceNotFoundError as unknown:
            raise Refused(f"the cluster has no {manifest['apiVersion']} {manifest['kind']}") from unknown

    def _is_namespaced(self, inputs: Values) -> bool:
        return bool(self._resource(inputs).namespaced)

    def _find(self, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        metadata = manifest["metadata"]
        try:
            found = self._resource(manifest).get(name=metadata["name"], namespace=metadata.get("namespace"))
        except ApiException as refused:
            if refused.status == 404:
                return None
            raise _refusal(refused, manifest) from refused
        return dict(found.to_dict())

    def _apply(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        metadata = manifest["metadata"]
        try:
            applied = self._resource(manifest).server_side_apply(
                body=manifest,
                name=metadata["name"],
                namespace=metadata.get("namespace"),
                field_manager=MANAGER,
                force_conflicts=self._forces,
                **({"dry_run": "All"} if dry_run else {}),
            )
        except ApiException as refused:
            raise _refusal(refused, manifest) from refused
        return dict(applied.to_dict())

    def _preview(self, manifest: Mapping[str, Any]) -> None:
        namespace = manifest["metadata"].get("namespace")
        home = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        if namespace and self._find(home) is None:
            return  # the same `up` will create the namespace
        self._apply(manifest, dry_run=True)

    def _manifest_of(self, type_: str, kind: str, id_: str) -> dict[str, Any]:
        """Return the identity of an object that is imported by `NAMESPACE/NAME` or `NAME`."""
        namespace, _, name = id_.rpartition("/")
        metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
        return {"apiVersion": api_version(type_), "kind": kind, "metadata": metadata}


def api_version(type_: str) -> str:
    """`kubernetes:rbac.authorization.k8s.io/v1:Role` → `rbac.authorization.k8s.io/v1`, `kubernetes:core/v1:Pod` → `v1`."""
    return type_.split(":")[1].removeprefix("core/")


def id_of(manifest: Mapping[str, Any]) -> str:
    metadata = manifest["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else str(metadata["name"])


def describe(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['kind']} {id_of(manifest)}"


def as_manifest(inputs: Values) -> dict[str, Any]:
    """Convert to an API object: open secrets, and drop Pulumi's own keys and unknown values."""
    opened = {key: value for key, value in reveal(dict(inputs)).items() if not key.startswith("__")}
    manifest: dict[str, Any] = _without_unknowns(opened)
    metadata = manifest.get("metadata") or {}
    manifest["metadata"] = {key: value for key, value in metadata.items() if key != "managedFields"}
    return manifest


def has_unknowns(value: Any) -> bool:
    match value:
        case UnknownValue():
            return True
        case SecretValue(value=inside):
            return has_unknowns(inside)
        case Mapping():
            return any(has_unknowns(each) for each in value.values())
        case list():
            return any(has_unknowns(each) for each in value)
    return False


def state_of(stored: Mapping[str, Any], inputs: Values) -> dict[str, Any]:
    metadata = {key: value for key, value in stored["metadata"].items() if key != "managedFields"}
    state: dict[str, Any] = hide_again({**stored, "metadata": metadata}, inputs)
    return state


def narrowed(stored: Any, wanted: Any) -> Any:
    """Reduce `stored` to the keys of `wanted`: changed values and extra list items show, extra keys do not."""
    stored_, wanted_ = stored, reveal(wanted)
    if isinstance(stored_, Mapping) and isinstance(wanted_, Mapping):
        return {key: narrowed(stored_[key], item) for key, item in wanted_.items() if key in stored_}
    if isinstance(stored_, list) and isinstance(wanted_, list):
        beyond = [None] * (len(stored_) - len(wanted_))
        pairs = zip(stored_, wanted_ + beyond, strict=False)
        return [narrowed(one, other) if other is not None else one for one, other in pairs]
    return stored_


def owned(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the API lists as applied by us, or, if there are none, all that the API did not set."""
    for entry in stored["metadata"].get("managedFields", []):
        if entry.get("manager") == MANAGER and entry.get("operation") == "Apply":
            found: dict[str, Any] = _pick(stored, entry["fieldsV1"])
            break
    else:
        metadata = {key: value for key, value in stored["metadata"].items() if key not in SERVERS}
        return {key: value for key, value in stored.items() if key != "status"} | {"metadata": metadata}
    identity = {key: stored["metadata"][key] for key in ("name", "namespace") if key in stored["metadata"]}
    metadata = {**found.get("metadata", {}), **identity}
    return {**found, "apiVersion": stored["apiVersion"], "kind": stored["kind"], "metadata": metadata}


def _pick(value: Any, fields: Mapping[str, Any]) -> Any:
    """Return the part of `value` that an API field set names: `f:key`, `k:{keys of an item}`, `v:the item itself`."""
    inner = {key: item for key, item in fields.items() if key != "."}
    if not inner:
        return value
    if isinstance(value, Mapping):
        named = {key.removeprefix("f:"): item for key, item in inner.items()}
        return {key: _pick(value[key], item) for key, item in named.items() if key in value}
    found = []
    for key, item in inner.items():
        sort, _, text = key.partition(":")
        pattern = json.loads(text)
        for each in value:
            if sort == "v" and each == pattern:
                found.append(each)
            elif sort == "k" and isinstance(each, Mapping) and all(each.get(k) == v for k, v in pattern.items()):
                found.append(_pick(each, item))
    return found


def _without_unknowns(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_unknowns(item) for key, item in value.items() if item is not UNKNOWN and item is not None}
    if isinstance(value, list):
        return [_without_unknowns(item) for item in value]
    return value


def _refusal(refused: ApiException, manifest: Mapping[str, Any]) -> Refused:
    codes = {
        403: grpc.StatusCode.PERMISSION_DENIED,
        404: grpc.StatusCode.NOT_FOUND,
        409: grpc.StatusCode.ABORTED,
        422: grpc.StatusCode.INVALID_ARGUMENT,
    }
    try:
        said = json.loads(refused.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = refused.reason
    code = codes.get(refused.status, grpc.StatusCode.UNAVAILABLE)
    return Refused(f"{refused.status}: {describe(manifest)}: {said}", code)


if __name__ == "__main__":
    serve(KubernetesPlugin())
