"""The rules about a Kubernetes cluster: its address, its namespaces with their quotas, claims and openings."""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from infra.settings.forms import DNS_NAME, is_within, parse_range
from infra.settings.machine_rules import find_label_problems
from infra.settings.model import ClaimSettings, KubernetesAccess, NamespaceSettings
from infra.settings.problems import wrong
from runtime.schema import Problem, join, suggest

OWN_ADDRESSES: Final = tuple(ipaddress.ip_network(each) for each in ("169.254.0.0/16", "fe80::/10", "fd20:ce::/32"))
"""Addresses at which a machine is served what is about itself, its credentials among it."""
_DNS_LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_QUANTITY: Final = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>|m|k|[KMGTPE]i|[MGTPE])")
_POWERS: Final = {"m": -1, "": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_PLAIN_QUOTAS: Final = frozenset(
    {
        *("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory"),
        *("requests.storage", "requests.ephemeral-storage", "limits.ephemeral-storage", "persistentvolumeclaims"),
        *("pods", "services", "services.loadbalancers", "services.nodeports"),
        *("secrets", "configmaps", "replicationcontrollers", "resourcequotas"),
    }
)
_IN_PARTS: Final = re.compile(r"(?:(?:requests|limits)\.)?(?:cpu|memory|ephemeral-storage)|(?:.*/)?requests\.storage")
"""Keys of a quota whose amounts can have fractions. Kubernetes counts the others, and refuses `1.5` of them."""
_QUOTA: Final = re.compile(
    r"requests\.[a-z0-9.-]+/[A-Za-z0-9._-]+|count/[a-z0-9.-]+|[a-z0-9.-]+\.storageclass\.storage\.k8s\.io/\S+"
)


def find_cluster_problems(cluster: KubernetesAccess, path: str) -> Iterator[Problem]:
    if cluster.slot_namespace is not None and cluster.slot_namespace not in cluster.namespaces:
        yield wrong(
            join(path, "slot_namespace"),
            cluster.slot_namespace,
            f"one of the cluster's namespaces: {', '.join(sorted(cluster.namespaces)) or 'none'}",
            suggest(cluster.slot_namespace, cluster.namespaces),
        )
    claims = {
        join(path, f"namespaces.{name}.claims.{key}.existing_volume"): claim.existing_volume
        for name, namespace in cluster.namespaces.items()
        for key, claim in namespace.claims.items()
        if claim.existing_volume and not claim.existing
    }
    counts = Counter(claims.values())
    for where, volume in claims.items():
        if counts[volume] > 1:
            yield Problem(where, f"is `{volume}`, which another claim has too: a volume is bound to one")
    for name in cluster.namespaces:
        where = join(path, f"namespaces.{name}")
        if not _DNS_LABEL.fullmatch(name):
            yield wrong(where, name, "lower case letters, digits and dashes, 63 at most")
        elif is_clusters_own(name):
            yield Problem(
                where,
                "is a namespace of the cluster's own: launchers would act for its programs,"
                " and what denies traffic by default would cut them off",
                "choose another name, or one that the administrators made for you",
            )


def find_namespace_problems(namespace: NamespaceSettings, path: str) -> Iterator[Problem]:
    for key, amount in namespace.quota.items():
        where = join(path, f"quota.{key}")
        if key not in _PLAIN_QUOTAS and not _QUOTA.fullmatch(key):
            extended = re.fullmatch(r"(?:limits\.)?([a-z0-9.-]+/[A-Za-z0-9._-]+)", key)
            nearest = f"did you mean `requests.{extended[1]}`?" if extended else suggest(key, _PLAIN_QUOTAS)
            yield Problem(where, "is nothing that a quota can limit", nearest)
        if not _QUANTITY.fullmatch(amount):
            yield wrong(where, amount, 'a quantity, such as `"64"`, `500m` or `1Ti`')
        elif amount.endswith("m") and ("memory" in key or "storage" in key):
            yield wrong(where, amount, "a size such as `64Mi`: `m` is a thousandth", f"write `{amount[:-1]}Mi`")
        elif key == "pods" and quantity(amount) == 0:
            yield wrong(where, amount, "at least 1: nobody could launch anything")
        elif not _IN_PARTS.fullmatch(key) and not quantity(amount).is_integer():
            yield wrong(where, amount, "a whole number: these are counted")
    if namespace.create and not namespace.quota:
        yield Problem(
            join(path, "quota"),
            "is empty: one runaway launch could take the whole cluster",
            'write at least `pods: "200"`',
        )
    for claim in namespace.claims:
        if not DNS_NAME.fullmatch(claim):
            yield wrong(join(path, f"claims.{claim}"), claim, "lower case letters, digits, dashes and dots")
    if namespace.labels and not namespace.create:
        message = "is set beside `create: false`, and whoever made the namespace labels it"
        yield Problem(join(path, "labels"), message, "leave it out")
    for label in namespace.labels:
        if re.match(r"(?:[a-z0-9.-]+\.)?(?:kubernetes|k8s)\.io/", label):
            yield Problem(join(path, f"labels.{label}"), "is a label of Kubernetes' own", "leave it out")
    yield from find_label_problems(namespace.labels, join(path, "labels"))
    for index, cidr in enumerate(namespace.egress_cidrs):
        parsed = parse_range(cidr)
        if parsed is not None and is_within(parsed, OWN_ADDRESSES):
            where = f"{join(path, 'egress_cidrs')}[{index}]"
            yield wrong(where, cidr, "a range of other machines: there a machine's own credentials are served")
    yield from _storage_quota_problems(namespace, path)


def _storage_quota_problems(namespace: NamespaceSettings, path: str) -> Iterator[Problem]:
    """Find claims over the quota, which Kubernetes would refuse in the middle of `up`."""
    made = [claim for claim in namespace.claims.values() if not claim.existing]
    limits = {"requests.storage": sum(quantity(claim.size) for claim in made), "persistentvolumeclaims": len(made)}
    for key, needed in limits.items():
        limit = namespace.quota.get(key)
        if limit is not None and _QUANTITY.fullmatch(limit) and quantity(limit) < needed:
            what = "the claims' sizes add up to more" if key == "requests.storage" else f"there are {len(made)} claims"
            yield Problem(join(path, f"quota.{key}"), f"is `{limit}`, and {what}")


def find_claim_problems(claim: ClaimSettings, path: str) -> Iterator[Problem]:
    if not _QUANTITY.fullmatch(claim.size) or claim.size.endswith("m") or quantity(claim.size) <= 0:
        yield wrong(join(path, "size"), claim.size, "a size such as `20Gi` or `1Ti`")
    if claim.existing and claim.existing_volume is not None:
        yield Problem(
            join(path, "existing_volume"),
            "is set beside `existing`, and a claim that is there already has its volume",
            "leave one of them out",
        )


def is_clusters_own(namespace: str) -> bool:
    """Whether every cluster has this namespace, with programs of its own in it."""
    return namespace == "default" or namespace.startswith("kube-")


def quantity(text: str) -> float:
    """Return a Kubernetes quantity as a number; 0 for any other text."""
    found = _QUANTITY.fullmatch(text)
    if not found:
        return 0
    unit, base = found["unit"].removesuffix("i"), 1024 if found["unit"].endswith("i") else 1000
    return float(found["number"]) * math.pow(base, _POWERS[unit])
