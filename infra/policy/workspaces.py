"""The rules about Kubernetes namespaces and claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infra.check.recording import Registration, Unknown
from infra.policy.base import (
    CLAIM,
    NAMESPACE,
    NETWORK_POLICY,
    QUOTA,
    Bounds,
    Finding,
    get,
    items_of,
    may_be,
)
from infra.policy.graph import Graph
from infra.settings.kubernetes_rules import quantity


def find_wild_claims(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Claims have a size within bounds, and a class that the stack file names."""
    for each in graph.of_type(CLAIM):
        spec = each.inputs.get("spec")
        size = get(get(get(spec, "resources"), "requests"), "storage")
        if isinstance(size, Unknown):
            continue
        if not isinstance(size, str) or quantity(size) <= 0:
            yield each, "asks for no size", "set `size`"
        elif quantity(size) > quantity(bounds.max_claim):
            yield each, f"asks for {size}, allowed is at most {bounds.max_claim}", "ask for what is needed"
        storage_class = get(spec, "storageClassName")
        named = isinstance(storage_class, str) and storage_class
        if named and bounds.storage_classes is not None and storage_class not in bounds.storage_classes:
            allowed = ", ".join(sorted(bounds.storage_classes)) or "the cluster's default"
            yield each, f"has the class `{storage_class}`, allowed are {allowed}", "name it in the stack file"


def find_open_namespaces(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A namespace that we make has a quota, and every one that we put something into denies traffic by default."""
    limits = list(graph.of_type(QUOTA))
    denials = [each for each in graph.of_type(NETWORK_POLICY) if _denies(each.inputs.get("spec"))]
    for each in graph.of_type(NAMESPACE):
        name = get(each.inputs.get("metadata"), "name")
        if not _any_in(limits, each.provider, name):
            yield each, f"makes the namespace `{name}` without a quota", "set `quota`"
        if not _any_in(denials, each.provider, name):
            yield each, f"makes the namespace `{name}` without a network policy that denies by default", None
    for each in graph.of_type(CLAIM):
        name = _namespace(each)
        if not _any_in(denials, each.provider, name):
            yield each, f"is in the namespace `{name}`, which has no network policy that denies by default", None


def _namespace(resource: Registration) -> Any:
    return get(resource.inputs.get("metadata"), "namespace")


def _any_in(resources: Iterable[Registration], provider: str | None, namespace: Any) -> bool:
    """Whether a resource is, or may be, in this namespace of this cluster."""
    return any(
        each.provider == provider and (isinstance(namespace, Unknown) or may_be(_namespace(each), namespace))
        for each in resources
    )


def _denies(spec: Any) -> bool:
    """Whether a network policy closes, or may close, every pod of its namespace both ways and opens nothing."""
    selector, types = get(spec, "podSelector"), get(spec, "policyTypes")
    everyone = isinstance(selector, Unknown) or (
        isinstance(selector, Mapping)
        and not any(value for value in selector.values() if not isinstance(value, Unknown))
    )
    both = isinstance(types, Unknown) or all(
        any(may_be(each, side) for each in items_of(types)) for side in ("Ingress", "Egress")
    )
    return everyone and both and not items_of(get(spec, "ingress")) and not items_of(get(spec, "egress"))
