"""The place that a target names: context, namespace, images, claims and slots, by its settings and its stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from runtime.errors import InvalidValue, NotPossible, UnknownName
from runtime.jobs.hosts.bucket import check_bucket, is_bucket
from runtime.jobs.plan import PlanContext, Target
from runtime.launchers.settings import read_target_settings
from runtime.outputs import KubernetesOutput, NamespaceOutput, StackOutputs
from runtime.secret_detection import looks_secret

MOUNT: Final = "/runtime-records"
"""Where pods see the claim of the record root, or their own files of a root in a bucket."""
SHIM_MOUNT: Final = "/runtime-shim"
"""Where pods with a root in a bucket see the shim, which their Job brings."""
SECRETS_MOUNT: Final = "/runtime-secrets"
"""Where pods with a root in a bucket see the secrets, which their Job brings."""
RECORDS_VARIABLES: Final = "RUNTIME_RECORDS_"
"""Prefix of variables for the shim that commands do not see (`OWN` of runtime/shim/cloud.py)."""
CLAIM_SCHEME: Final = "claim://"
REGISTRY_SCHEME: Final = "registry://"

_GPU: Final = "nvidia.com/gpu"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_EXPECTED: Final = {
    "gpus": "how many GPUs the node has",
    "gpu_types": "LABEL=VALUE of its nodes",
    "setup": "a list",
    "tolerations": "a list",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesTargetSettings:
    """The settings of a target, as a project's file has them."""

    cluster: str | None = None
    context: str | None = None
    namespace: str | None = None
    image: str | None = None
    python: str = "python3"
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    records_secret: str | None = None
    """Secret of the namespace whose keys are variables by which pods reach the bucket."""
    records_env: Mapping[str, str] = field(default_factory=dict)
    """More such variables, which are no secret."""
    gpu_resource: str = _GPU
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Node → how many GPUs it has that are shared in slots."""
    gpu_types: Mapping[str, str] = field(default_factory=dict)
    """Name of a GPU in specs → label and value of its nodes."""
    slot_namespace: str | None = None
    node_selector: Mapping[str, Any] = field(default_factory=dict)
    tolerations: tuple[Any, ...] = ()
    priority_classes: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    run_as_user: Any = None
    check_gpus: bool | None = None
    """Whether the shim looks at its GPUs with nvidia-smi before it starts the command."""
    setup: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesTarget(KubernetesTargetSettings):
    """A target, resolved."""

    target: str
    namespace: str
    claim: str
    """Claim of the record root; empty if that is a bucket."""
    path: str
    """Path of the record root in the claim."""
    bucket: str | None = None
    """URL of the record root if that is not a claim."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Name in specs → name of the claim."""
    registries: Mapping[str, str] = field(default_factory=dict)
    """Name of a registry of the stack → its address."""
    slot_namespace: str

    def find_image(self, image: str) -> str:
        """The image by its full name; `registry://NAME/REST` is one in a registry of the stack."""
        if not image.startswith(REGISTRY_SCHEME):
            return image
        name, _, rest = image.removeprefix(REGISTRY_SCHEME).partition("/")
        if name not in self.registries:
            raise UnknownName("registry", name, list(self.registries), where=f"in the stack of target `{self.target}`")
        return f"{self.registries[name]}/{rest}"

    @property
    def root(self) -> str:
        """The record root: a path as the pods see it, or a bucket's URL."""
        return self.bucket or f"{MOUNT}/{self.path}".rstrip("/")

    @property
    def records(self) -> str:
        """The record root by a name that is unique in the namespace."""
        return self.bucket or f"{self.claim}/{self.path}"


def check_settings(target: Target) -> None:
    """Raise `UnknownName` or `InvalidValue` for a setting that cannot be used; nothing is asked."""
    where, settings = f"targets.{target.name}", _read(target)
    if settings.run_as_user is not None and (type(settings.run_as_user) is not int or settings.run_as_user < 0):
        raise InvalidValue(f"{where}.run_as_user", settings.run_as_user, "the number of a user")
    for gpu, label in settings.gpu_types.items():
        if not label:
            raise InvalidValue(f"{where}.gpu_types.{gpu}", label, _EXPECTED["gpu_types"])
    if secret := next(filter(looks_secret, settings.records_env), None):
        raise InvalidValue(
            f"{where}.records_env",
            secret,
            "variables that are no secret",
            hint="keep it in a Secret of the namespace, under this name, and name that: records_secret",
        )
    if not is_bucket(target.records) and (given := {"records_secret", "records_env"} & target.settings.keys()):
        raise InvalidValue(
            f"{where}.{min(given)}", target.settings[min(given)], "nothing: only pods that reach a bucket read it"
        )
    if settings.image_pull_policy not in (None, "Always", "IfNotPresent", "Never"):
        raise InvalidValue(f"{where}.image_pull_policy", settings.image_pull_policy, "Always, IfNotPresent or Never")
    if is_bucket(target.records):
        check_bucket(target)
    elif target.records is not None:
        split_records(target)


def _read(target: Target) -> KubernetesTargetSettings:
    return read_target_settings(KubernetesTargetSettings, target, _EXPECTED, where=f"for target `{target.name}`")


def split_records(target: Target) -> tuple[str, str]:
    """Claim and path of `records = "claim://NAME/PATH"`."""
    records = target.records or ""
    claim, _, path = records.removeprefix(CLAIM_SCHEME).partition("/")
    path = path.strip("/")
    if not records.startswith(CLAIM_SCHEME) or not _NAME.fullmatch(claim) or ".." in path.split("/"):
        raise InvalidValue(
            f"targets.{target.name}.records",
            records,
            "claim://NAME/PATH, a claim of the namespace that pods can write to, or gs://… or s3://…, a bucket",
        )
    return claim, path


def read_place(target: Target, context: PlanContext) -> KubernetesTarget:
    """Resolve a target by its settings first, then by its stack. Raises `NotPossible` for a value that neither has.

    The settings are not checked, so that a wrong one hides none of the target's jobs.
    """
    known = [each.name for each in fields(KubernetesTargetSettings) if each.name in target.settings]
    settings = KubernetesTargetSettings(**{name: target.settings[name] for name in known})
    outputs, cluster, namespace, exported = _contract(target, context)
    claims = {name: each.claim for name, each in exported.claims.items()} if exported else {}
    claim = path = ""
    if is_bucket(target.records):
        pass
    elif target.records is not None:
        claim, path = split_records(target)
        claim = claims.get(claim, claim)
    elif len(claims) == 1:
        claim, path = next(iter(claims.values())), "runtime"
    else:
        raise NotPossible(
            f"target `{target.name}` has no record root: a claim or a bucket that its pods write to and that is read from here",
            facts=[f"claims of the stack: {', '.join(sorted(claims)) or 'none'}"],
            hint='set records = "claim://NAME/PATH" or "gs://BUCKET/PATH" for the target; docs/kubernetes.md',
        )
    resolved = {
        "context": settings.context or (cluster.context if cluster else None),
        "image_pull_secrets": settings.image_pull_secrets or (exported.image_pull_secrets if exported else ()),
        "service_account": settings.service_account or (exported.service_account if exported else None),
        "slot_namespace": settings.slot_namespace or (cluster and cluster.slot_namespace) or namespace,
        "check_gpus": settings.gpu_resource == _GPU if settings.check_gpus is None else settings.check_gpus,
        "namespace": namespace,
    }
    return KubernetesTarget(
        target=target.name,
        claim=claim,
        path=path,
        bucket=(target.records or "").rstrip("/") if is_bucket(target.records) else None,
        claims=claims,
        registries=_registries(outputs) if outputs else {},
        **{each.name: getattr(settings, each.name) for each in fields(settings)} | resolved,
    )


def _registries(outputs: StackOutputs) -> dict[str, str]:
    """The registries with one region, or with one in the stack's own region."""
    found = {}
    for name, regions in outputs.registries.items():
        near = regions.get(outputs.region or "") or (next(iter(regions.values())) if len(regions) == 1 else None)
        if near is not None:
            found[name] = near.url
    return found


def _contract(
    target: Target, context: PlanContext
) -> tuple[StackOutputs | None, KubernetesOutput | None, str, NamespaceOutput | None]:
    """The stack's contract, its cluster, the namespace and its part of the contract; the settings' namespace without a
    stack."""
    named = target.settings.get("namespace")
    if target.stack is None:
        if named is None:
            raise NotPossible(
                f"target `{target.name}` names no namespace",
                hint=f'set namespace = "…" in [tool.runtime.targets.{target.name}], or a `stack` that has one',
            )
        return None, None, named, None
    from runtime.outputs import need_output
    from runtime.stack.find import find_stack

    outputs = find_stack(target.stack, settings=context.settings).outputs
    clusters = need_output(outputs, "kubernetes", f"target `{target.name}`")
    cluster = clusters[_choose("cluster", target, list(clusters))]
    namespace = _choose("namespace", target, list(cluster.namespaces))
    return outputs, cluster, namespace, cluster.namespaces[namespace]


def _choose(what: str, target: Target, known: list[str]) -> str:
    named = target.settings.get(what)
    if named is None and len(known) == 1:
        return known[0]
    if named is None:
        raise NotPossible(
            f"stack `{target.stack}` has more than one {what}" if known else f"stack `{target.stack}` has no {what}",
            facts=[f"it has: {', '.join(known)}"] if known else [],
            hint=f'set {what} = "…" in [tool.runtime.targets.{target.name}]',
        )
    if named not in known:
        raise UnknownName(what, named, known, where=f"in stack `{target.stack}`")
    return str(named)
