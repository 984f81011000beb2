"""The rules about every resource: its place, labels, protection, provider, component and API, and no secret in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from infra.check.recording import Registration, Secret
from infra.naming import MAKER, MANAGED_BY, STACK_LABEL
from infra.policy.base import (
    ACCOUNT,
    BUCKET,
    CUSTOM_ROLE,
    INSTANCE,
    REPOSITORY,
    SECRET,
    SERVICE,
    SERVICE_IDENTITY,
    SUBSCRIPTION,
    TOPIC,
    Bounds,
    Finding,
    get,
    may_be,
)
from infra.policy.graph import PROVIDER_PREFIX, Graph

HOLD_WORK: Final = (TOPIC, SUBSCRIPTION, SECRET, REPOSITORY, INSTANCE, BUCKET, ACCOUNT)
"""Types whose loss loses tasks, data or grants. A service account made again under its old name has no grants."""

LABELLED: Final = (TOPIC, SUBSCRIPTION, SECRET, REPOSITORY, INSTANCE, BUCKET)

APIS: Final[Mapping[str, str]] = {
    "artifactregistry": "artifactregistry",
    "billing": "billingbudgets",
    "compute": "compute",
    "iam": "iam",
    "logging": "logging",
    "monitoring": "monitoring",
    "projects": "cloudresourcemanager",
    "pubsub": "pubsub",
    "secretmanager": "secretmanager",
    "serviceaccount": "iam",
    "storage": "storage",
    "tpu": "tpu",
}
"""Module of the provider → the API that it calls."""


def find_secret_values(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """No secret value passes through Pulumi. What it is given it keeps in its state."""
    versions = (
        "gcp:secretmanager/secretVersion:SecretVersion",
        "gcp:secretmanager/regionalSecretVersion:RegionalSecretVersion",
        "kubernetes:core/v1:Secret",
    )
    for each in graph.resources:
        if each.type in versions:
            yield each, "holds a secret's value", "make the container only; `runtime secrets put` takes the value"
        elif each.custom and (path := _find_secret(each.inputs)) is not None:
            yield each, f"has a secret value in `{path}`", "refer to the secret by its name"


def find_unlabelled(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Labels say whose a resource is. `gc` and the bill go by them."""
    for each in graph.resources:
        if not each.custom:
            continue
        if each.type in LABELLED:
            labels = each.inputs.get("labels")
        elif each.type.startswith("kubernetes:"):
            labels = get(each.inputs.get("metadata"), "labels")
        else:
            continue
        if not may_be(get(labels, MANAGED_BY), MAKER) or not get(labels, STACK_LABEL):
            yield each, f"lacks the labels `{MANAGED_BY}: {MAKER}` and `{STACK_LABEL}`", "pass `labels(stack, own)`"


def find_unprotected(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """What holds work refuses to be destroyed, in every stack that says so."""
    # A pull-through cache fills itself again.
    holders = [each for each in graph.of_type(*HOLD_WORK) if not may_be(each.inputs.get("mode"), "REMOTE_REPOSITORY")]
    wanted = bounds.protect if bounds.protect is not None else any(each.protect for each in holders)
    for each in holders if wanted else ():
        if not each.protect:
            yield each, "holds work and can be destroyed", "set `protect`, or `protect: false` for the whole stack"


def find_strays(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Everything is in the regions that the stack file names."""
    if bounds.regions is None:
        return
    for each in graph.made("gcp"):
        for key in ("region", "zone", "location"):
            place = each.inputs.get(key)
            if not isinstance(place, str) or place == "global":
                continue
            region = place.rpartition("-")[0] if key == "zone" else place
            if region.lower() not in bounds.regions:
                allowed = ", ".join(sorted(bounds.regions))
                yield each, f"is in `{place}`, allowed are {allowed}", "name the region in the stack file"


def find_default_providers(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A default provider takes whatever project and cluster the shell happens to be in."""
    for each in graph.resources:
        if not each.custom or each.type.startswith(PROVIDER_PREFIX):
            continue
        # `urn:pulumi:STACK::PROJECT::pulumi:providers:gcp::NAME::ID`
        name = each.provider.split("::")[-2] if each.provider and each.provider.count("::") >= 4 else None
        if name is None or re.fullmatch(r"default(_\d+.*)?", name):
            yield (
                each,
                "uses the default provider",
                "pass the stack's provider to the component, and `parent=self` to its children",
            )


def find_orphans(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Every resource belongs to a component and begins with its name. Two of a component would otherwise have children
    of one name."""
    for each in graph.resources:
        if not each.custom or each.type.startswith(PROVIDER_PREFIX):
            continue
        parent = graph.parent(each)
        if parent is None or parent.custom:
            yield each, "belongs to no component", "set `parent=self`"
        elif not each.name.startswith(f"{parent.name}-"):
            yield each, f"is named `{each.name}`, and its component `{parent.name}`", f"begin it with `{parent.name}-`"


def find_hasty(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """An API that is not on yet refuses; only a dependency says what has to be there first."""
    for each in graph.made("gcp"):
        needed = _api(each)
        if needed is None:
            continue
        enabled = [other.inputs.get("service") for other in graph.waited_for(each) if other.type == SERVICE]
        if not any(may_be(service, f"{needed}.googleapis.com") for service in enabled):
            yield each, f"does not wait until {needed}.googleapis.com is on", f'depend on `apis.needs("{needed}")`'


def _find_secret(value: Any, path: str = "") -> str | None:
    """Path of the first value that is marked as secret."""
    if isinstance(value, Secret):
        return path
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        items = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    return next((found for where, item in items if (found := _find_secret(item, where)) is not None), None)


def _api(resource: Registration) -> str | None:
    """The API that makes `resource`; None for a resource that switches an API on."""
    if resource.type == SERVICE:
        return None
    if resource.type == SERVICE_IDENTITY:
        service = resource.inputs.get("service")
        return service.removesuffix(".googleapis.com") if isinstance(service, str) else "serviceusage"
    if resource.type == CUSTOM_ROLE:
        return "iam"
    module = resource.type.split(":")[1].split("/")[0]
    return APIS.get(module, module)
