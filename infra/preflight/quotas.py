"""Whether the project's zone, TPU hardware and quotas suffice for a stack."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from infra.gcp.catalog import find_series
from infra.preflight.findings import Look, PreflightFinding, fail, guard_all, name_nearest, ok, warn
from infra.settings.model import HeadSettings, StackSettings, TpuCapacity, TpuPoolSettings
from runtime.stack.google_api import GoogleApi

ACCOUNTS_LIMIT: Final = 100
"""https://cloud.google.com/iam/quotas: service accounts of a project, unless it was raised."""

_FAMILY_WORDS: Final = {"v5litepod": ("v5s", "litepod")}
"""Words in the names of a family's quotas, if they are not the family's name: `TPUV5sLitepodPerProject…`."""


_DISKS: Final = {
    "pd": ("disks", ("SSD_TOTAL_GB", "DISKS_TOTAL_GB")),
    "hyperdisk": ("disks Hyperdisk", ("HDB_TOTAL_GB",)),
}
"""First word of a disk type → check and metrics."""


def check_quotas(settings: StackSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    needs = list(_compute_needs(settings))
    if not needs:
        return
    project = api.get("compute", f"compute/v1/projects/{settings.project}")
    region = api.get("compute", f"compute/v1/projects/{settings.project}/regions/{settings.region}")
    limits = _limits(project) | _limits(region)
    for check, metrics, amount, unit in needs:
        metric = next((each for each in metrics if each in limits), None)
        if metric is None:
            yield warn(f"quota {check}", f"the project tells no quota {' or '.join(metrics)}", "look it up by hand")
            continue
        limit, used = limits[metric]
        left = limit - used
        text = f"{metric}: {amount:g} {unit} wanted, {left:g} of {limit:g} free"
        if left < amount:
            where = f"https://console.cloud.google.com/iam-admin/quotas?project={settings.project}"
            # After a first `up`, `used` includes the stack's own use.
            yield warn(f"quota {check}", f"{text}; fine if this stack has them already", f"ask for more at {where}")
        else:
            yield ok(f"quota {check}", text)


def _compute_needs(settings: StackSettings) -> Iterator[tuple[str, tuple[str, ...], float, str]]:
    heads = settings.heads.values()
    by_family: dict[str, int] = {}
    for head in heads:
        family, cpus = _machine(head)
        by_family[family] = by_family.get(family, 0) + cpus
    for family, cpus in by_family.items():
        yield f"CPUs {family}", (f"{family.upper()}_CPUS", "CPUS"), cpus, "CPUs"
    disks: dict[str, int] = {}
    for head in heads:
        kind = (head.disk_type or find_series(head.machine_type).boot_disks[0]).partition("-")[0]
        disks[kind] = disks.get(kind, 0) + head.disk_gb
    for kind, size_gb in disks.items():
        name, metrics = _DISKS[kind]
        yield name, metrics, size_gb, "GB"
    if settings.network is not None and settings.network.subnet is None:
        yield "addresses", ("IN_USE_ADDRESSES",), 1, "address of the NAT"
        yield "networks", ("NETWORKS",), 1, "network"


def _machine(head: HeadSettings) -> tuple[str, int]:
    """Return family and CPUs of `n2-standard-8`, `n2-custom-8-32768`, `e2-medium` …"""
    parts = head.machine_type.split("-")
    numbers = [int(part) for part in parts[1:] if part.isdecimal()]
    return parts[0], numbers[0] if numbers else 2


def _limits(answer: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return metric → (limit, used)."""
    return {each["metric"]: (each.get("limit", 0.0), each.get("usage", 0.0)) for each in answer.get("quotas", ())}


def check_accounts(settings: StackSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    from infra.program import find_roles

    wanted = len(find_roles(settings)) + 2 * len(settings.heads) + 2 * (settings.ci is not None)
    path = f"v1/projects/{settings.project}/serviceAccounts"
    have = sum(1 for _ in api.pages("iam", path, "accounts", pageSize=100))
    text = f"{have} are there, the stack has {wanted}; a project has {ACCOUNTS_LIMIT} unless that was raised"
    if have + wanted > ACCOUNTS_LIMIT:
        yield warn("quota service accounts", text, "ask for more at the project's quota page")
    else:
        yield ok("quota service accounts", text)


def check_zone(settings: StackSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    if not settings.zone or not settings.heads:
        return
    zone = api.find("compute", f"compute/v1/projects/{settings.project}/zones/{settings.zone}")
    if zone is None:
        known = [
            each["name"] for each in api.pages("compute", f"compute/v1/projects/{settings.project}/zones", "items")
        ]
        fix = f"the project sees {name_nearest(settings.zone, known)}; some zones are open to chosen projects only"
        yield fail("zone", f"the project does not see zone `{settings.zone}`", fix)
    elif zone.get("status", "UP") != "UP":
        yield warn("zone", f"{settings.zone} is {str(zone['status']).lower()}", "wait: Google works on it")
    else:
        yield ok("zone", f"{settings.zone} is up")


def list_pool_looks(settings: StackSettings, api: GoogleApi) -> Iterator[tuple[str, Look]]:
    """Yield `pool HEAD.POOL` and the check of its hardware and quota."""
    for label, pool in settings.pools.items():
        yield f"pool {label}", partial(_check_pool, settings, label, pool, api)


def _check_pool(
    settings: StackSettings, label: str, pool: TpuPoolSettings, api: GoogleApi
) -> Iterator[PreflightFinding]:
    where = f"v2/projects/{settings.project}/locations/{settings.zone}"
    types = [each.get("type", "") for each in api.pages("tpu", f"{where}/acceleratorTypes", "acceleratorTypes")]
    check = f"pool {label}"
    if pool.accelerator in types:
        yield ok(check, f"{settings.zone} has {pool.accelerator}")
    else:
        fix = f"it has {name_nearest(pool.accelerator, types)}"
        yield fail(check, f"the project sees no {pool.accelerator} in {settings.zone}", fix)
    versions = [each.get("version", "") for each in api.pages("tpu", f"{where}/runtimeVersions", "runtimeVersions")]
    if pool.runtime_version in versions:
        yield ok(check, f"{settings.zone} has software {pool.runtime_version}")
    else:
        fix = f"it has {name_nearest(pool.runtime_version, versions)}"
        yield fail(check, f"there is no TPU software `{pool.runtime_version}` in {settings.zone}", fix)
    yield from guard_all(f"quota {label}", partial(_tpu_quota, settings, label, pool, api))


def _tpu_quota(
    settings: StackSettings, label: str, pool: TpuPoolSettings, api: GoogleApi
) -> Iterator[PreflightFinding]:
    family, _, size_text = pool.accelerator.rpartition("-")
    size = int(size_text)
    kind = "preemptible" if pool.capacity in (TpuCapacity.PREEMPTIBLE, TpuCapacity.SPOT) else pool.capacity.value
    path = f"v1beta1/projects/{settings.project}/services/tpu.googleapis.com/consumerQuotaMetrics"
    found = [
        limit
        for metric in api.pages("serviceusage", path, "metrics", view="FULL")
        if _is_quota_of(metric, family, kind)
        for each in metric.get("consumerQuotaLimits", ())
        if (limit := _limit_in(each, settings)) is not None
    ]
    check = f"quota {label}"
    where = f"https://console.cloud.google.com/iam-admin/quotas?project={settings.project}&service=tpu.googleapis.com"
    if not found:
        text = f"the project tells no {kind.replace('_', ' ')} quota of {family} in {settings.zone}"
        yield warn(check, text, f"look at {where}")
        return
    # Small sizes have a quota of their own, and Google does not state which quota counts: take the largest.
    limit = max(found)
    text = f"{limit:,} of {family}, {kind.replace('_', ' ')}, in {settings.zone}"
    if limit < size:
        yield fail(check, f"{text}: not one {pool.accelerator} fits", f"ask for more at {where}")
    elif limit < pool.max * size:
        fits = f"{limit // size:,} nodes of at least {pool.always:,} and at most {pool.max:,}"
        yield warn(check, f"{text}: {fits}", f"ask for more at {where}, or lower `max`")
    else:
        yield ok(check, f"{text}: all {pool.max:,} nodes fit")


def _is_quota_of(metric: Mapping[str, Any], family: str, kind: str) -> bool:
    names = [str(metric.get("metric", ""))] + [
        str(each.get("name", "")) for each in metric.get("consumerQuotaLimits", ())
    ]
    text = re.sub(r"[^a-z0-9]", "", " ".join(names).lower())
    words = _FAMILY_WORDS.get(family, (family,))
    if not all(word in text for word in words):
        return False
    marks = {"preemptible": "preemptible" in text, "reserved": "reserved" in text}
    return marks.get(kind, not any(marks.values()))


def _limit_in(limit: Mapping[str, Any], settings: StackSettings) -> int | None:
    """Return the project's limit in the stack's zone, for which the API has -1 if there is none."""
    own, general = None, None
    for bucket in limit.get("quotaBuckets", ()):
        dimensions = bucket.get("dimensions", {})
        value = int(bucket.get("effectiveLimit", 0))
        if dimensions.get("zone") == settings.zone or dimensions.get("region") == settings.region:
            own = value
        elif not dimensions:
            general = value
    found = own if own is not None else general
    return sys.maxsize if found == -1 else found
