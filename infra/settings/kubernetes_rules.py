"""The rules about single settings of Kubernetes clusters, their namespaces and claims."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from typing import Final

from infra.settings.model import ClaimSettings, KubernetesSettings, NamespaceSettings
from infra.settings.typed import wrong
from runtime.schema import Problem, join, suggest

_DNS_LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_DNS_NAME: Final = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_QUANTITY: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>|m|k|[KMGTPE]i|[MGTPE])")
_ACCESS_MODES: Final = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
_PLAIN_QUOTAS: Final = frozenset(
    [
        "pods",
        "cpu",
        "memory",
        "requests.cpu",
        "requests.memory",
        "requests.storage",
        "requests.ephemeral-storage",
        "limits.cpu",
        "limits.memory",
        "limits.ephemeral-storage",
        "persistentvolumeclaims",
        "services",
        "services.loadbalancers",
        "services.nodeports",
        "secrets",
        "configmaps",
        "replicationcontrollers",
        "resourcequotas",
    ]
)
_QUOTA: Final = re.compile(
    r"requests\.[a-z0-9.-]+/[A-Za-z0-9._-]+|count/[a-z0-9.-]+|[a-z0-9.-]+\.storageclass\.storage\.k8s\.io/\S+"
)
_LAUNCHER: Final = re.compile(r"(?:User|Group):\S+|ServiceAccount:[a-z0-9-]+/[a-z0-9.-]+")


def judge_cluster(cluster: KubernetesSettings, path: str) -> Iterator[Problem]:
    for key in ("context", "cluster_identifier"):
        value = getattr(cluster, key)
        if not value.strip() or re.search(r"\s", value):
            yield wrong(join(path, key), value, "a name without spaces")
    if not re.fullmatch(r"https://[A-Za-z0-9.\[\]:-]+(?:/\S*)?", cluster.server):
        yield wrong(join(path, "server"), cluster.server, "an address that begins with `https://`")
    if cluster.slot_namespace is not None and cluster.slot_namespace not in cluster.namespaces:
        yield wrong(
            join(path, "slot_namespace"),
            cluster.slot_namespace,
            f"one of the cluster's namespaces: {', '.join(sorted(cluster.namespaces)) or 'none'}",
            suggest(cluster.slot_namespace, cluster.namespaces),
        )
    for name, namespace in cluster.namespaces.items():
        where = join(path, f"namespaces.{name}")
        if not _DNS_LABEL.fullmatch(name):
            yield wrong(where, name, "lower case letters, digits and dashes, 63 at most")
        elif namespace.create and (name == "default" or name.startswith("kube-")):
            yield Problem(
                path=where, message="is a namespace that every cluster has", hint="`create: false` uses it as it is"
            )


def judge_namespace(namespace: NamespaceSettings, path: str) -> Iterator[Problem]:
    for key, amount in namespace.quota.items():
        where = join(path, f"quota.{key}")
        if key not in _PLAIN_QUOTAS and not _QUOTA.fullmatch(key):
            extended = re.fullmatch(r"(?:limits\.)?([a-z0-9.-]+/[A-Za-z0-9._-]+)", key)
            nearest = f"did you mean `requests.{extended[1]}`?" if extended else suggest(key, _PLAIN_QUOTAS)
            yield Problem(path=where, message="is nothing that a quota can limit", hint=nearest)
        if not _QUANTITY.fullmatch(amount):
            yield wrong(where, amount, 'a quantity, such as `"64"`, `500m` or `1Ti`')
    if namespace.create and not namespace.quota:
        yield Problem(
            path=join(path, "quota"),
            message="is empty: one runaway launch could take the whole cluster",
            hint='write at least `pods: "200"`',
        )
    for claim in namespace.claims:
        if not _DNS_NAME.fullmatch(claim):
            yield wrong(join(path, f"claims.{claim}"), claim, "lower case letters, digits, dashes and dots")
    if namespace.image_pull_secret is not None and not _DNS_NAME.fullmatch(namespace.image_pull_secret):
        yield wrong(
            join(path, "image_pull_secret"), namespace.image_pull_secret, "the name of a secret in the namespace"
        )
    for index, cidr in enumerate(namespace.egress_cidrs):
        try:
            ipaddress.ip_network(cidr)
        except ValueError:
            yield wrong(f"{join(path, 'egress_cidrs')}[{index}]", cidr, "a range such as `10.0.0.0/8`")
    for index, launcher in enumerate(namespace.launchers):
        if not _LAUNCHER.fullmatch(launcher) or launcher in (
            "Group:system:authenticated",
            "Group:system:unauthenticated",
        ):
            yield wrong(
                f"{join(path, 'launchers')}[{index}]",
                launcher,
                "`User:NAME`, `Group:NAME` or `ServiceAccount:NAMESPACE/NAME`, and no group of everybody",
            )
    yield from _storage_quota_problems(namespace, path)


def _storage_quota_problems(namespace: NamespaceSettings, path: str) -> Iterator[Problem]:
    """A claim over the quota would be refused in the middle of `up`."""
    made = [claim for claim in namespace.claims.values() if not claim.existing]
    limits = {"requests.storage": sum(quantity(claim.size) for claim in made), "persistentvolumeclaims": len(made)}
    for key, needed in limits.items():
        limit = namespace.quota.get(key)
        if limit is not None and _QUANTITY.fullmatch(limit) and quantity(limit) < needed:
            what = "the claims' sizes add up to more" if key == "requests.storage" else f"there are {len(made)} claims"
            yield Problem(path=join(path, f"quota.{key}"), message=f"is `{limit}`, and {what}")


def judge_claim(claim: ClaimSettings, path: str) -> Iterator[Problem]:
    if not _QUANTITY.fullmatch(claim.size) or claim.size.endswith("m") or quantity(claim.size) <= 0:
        yield wrong(join(path, "size"), claim.size, "a size such as `20Gi` or `1Ti`")
    if claim.access_mode not in _ACCESS_MODES:
        yield wrong(
            join(path, "access_mode"),
            claim.access_mode,
            f"one of {', '.join(_ACCESS_MODES)}",
            suggest(claim.access_mode, _ACCESS_MODES),
        )
    for key in ("storage_class", "existing_volume"):
        value = getattr(claim, key)
        # An empty class is Kubernetes' way to ask for no class at all.
        if value is not None and not (_DNS_NAME.fullmatch(value) or (key == "storage_class" and value == "")):
            yield wrong(join(path, key), value, "lower case letters, digits, dashes and dots")
    if claim.existing and claim.existing_volume is not None:
        yield Problem(
            path=join(path, "existing_volume"),
            message="is set beside `existing`, and a claim that is there already has its volume",
            hint="leave one of them out",
        )


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number; 0 if the text is none."""
    found = _QUANTITY.fullmatch(text)
    if not found:
        return 0
    unit = found["unit"]
    if unit == "m":
        return float(found["number"]) / 1000
    powers = "KMGTPE"
    if unit.endswith("i"):
        scale = math.pow(1024, powers.index(unit[0]) + 1)
    elif unit:
        scale = math.pow(1000, powers.index(unit.upper()) + 1)
    else:
        scale = 1
    return float(found["number"]) * scale
