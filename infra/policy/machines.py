"""The rules about machines, firewalls and buckets, which are closed."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final

from infra.check.recording import Registration, Unknown
from infra.policy.base import (
    BUCKET,
    FIREWALL,
    INSTANCE,
    Bounds,
    Finding,
    get,
    items_of,
    may_be,
)
from infra.policy.graph import Graph

IAP_RANGE: Final = "35.235.240.0/20"
"""From here Google's identity-aware proxy connects; https://cloud.google.com/iap/docs/using-tcp-forwarding."""


def find_open_instances(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Machines have no external address, are shielded, and take no SSH keys of the project."""
    for each in graph.of_type(INSTANCE):
        for interface in items_of(each.inputs.get("networkInterfaces")):
            if items_of(get(interface, "accessConfigs")) or items_of(get(interface, "ipv6AccessConfigs")):
                yield each, "has an external address", "leave `access_configs` out"
        shield = each.inputs.get("shieldedInstanceConfig")
        for key in ("enableSecureBoot", "enableVtpm", "enableIntegrityMonitoring"):
            if not may_be(get(shield, key), True):
                yield each, f"is not shielded: `{key}` is not true", "set `shielded_instance_config`"
        metadata = each.inputs.get("metadata")
        blocked = get(metadata, "block-project-ssh-keys")
        if not isinstance(blocked, Unknown) and str(blocked).lower() != "true":
            yield each, "accepts SSH keys of the whole project", "set the metadata `block-project-ssh-keys` to TRUE"


def find_open_firewalls(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Nothing is open to everybody, and SSH comes through the identity-aware proxy or from inside."""
    for each in graph.of_type(FIREWALL):
        if each.inputs.get("direction", "INGRESS") != "INGRESS" or not each.inputs.get("allows"):
            continue
        sources = items_of(each.inputs.get("sourceRanges"))
        tagged = each.inputs.get("sourceTags") or each.inputs.get("sourceServiceAccounts")
        if not sources and not tagged and not isinstance(each.inputs.get("sourceRanges"), Unknown):
            yield each, "names no source, so it lets in everybody", "set `source_ranges`"
        for source in sources:
            if isinstance(source, Unknown):
                continue
            if _is_everybody(source):
                yield each, f"lets in `{source}`, which is everybody", f"SSH comes through {IAP_RANGE}"
            elif _opens_ssh(each) and source != IAP_RANGE and not _is_private(source):
                yield each, f"lets in SSH from `{source}`", f"SSH comes through {IAP_RANGE}, or from inside"


def find_open_buckets(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Buckets are closed, keep versions, and say how long what is deleted stays."""
    for each in graph.of_type(BUCKET):
        if not may_be(each.inputs.get("uniformBucketLevelAccess"), True):
            yield each, "grants by object", "set `uniform_bucket_level_access`"
        if not may_be(each.inputs.get("publicAccessPrevention"), "enforced"):
            yield each, "could be made public", 'set `public_access_prevention="enforced"`'
        if not may_be(get(each.inputs.get("versioning"), "enabled"), True):
            yield each, "keeps no versions", "set `versioning`"
        if not each.inputs.get("softDeletePolicy"):
            yield each, "does not say how long deleted objects stay", "set `soft_delete_policy`"


def _is_everybody(source: str) -> bool:
    try:
        return ipaddress.ip_network(source, strict=False).prefixlen == 0
    except ValueError:
        return True


def _is_private(source: str) -> bool:
    network = ipaddress.ip_network(source, strict=False)
    return network.is_private


def _opens_ssh(firewall: Registration) -> bool:
    for allowed in items_of(firewall.inputs.get("allows")):
        protocol, ports = get(allowed, "protocol"), get(allowed, "ports")
        if protocol not in ("tcp", "all", "6"):
            continue
        if not ports:
            return True
        for port in items_of(ports):
            low, _, high = str(port).partition("-")
            if low.isdigit() and int(low) <= 22 <= int(high or low):
                return True
    return False
