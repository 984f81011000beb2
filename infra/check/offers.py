"""Notes about what a stack asks of Google and the facts here do not have, and about heads that are small for their nodes.

Google's offer grows, so nothing here stops a deployment; `preflight` asks Google itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from infra.gcp import catalog
from infra.settings.model import HeadSettings, StackSettings, TpuPoolSettings
from infra.settings.rules import LEAST_HEAD_GIB, count_tpu_hosts
from infra.settings.stack_rules import list_regions
from runtime.schema import suggest

_HOSTS_PER_GIB: Final = 36
"""TPU hosts for each GiB above the least, so that the head of a thousand has `_ENOUGH_GIB`."""
_ENOUGH_GIB: Final = 32
"""https://docs.ray.io/en/latest/cluster/vms/user-guides/large-cluster-best-practices.html: "8 CPUs and 32 GB memory"."""


def find_offer_notes(settings: StackSettings) -> Iterator[str]:
    own = {"region": settings.region}
    own |= {f"{path}.location": place and place.lower() for path, place in settings.bucket_locations.items()}
    for path, region in (*own.items(), *list_regions(settings)):
        if region is not None and region not in catalog.REGIONS | catalog.BUCKET_LOCATIONS.keys():
            yield f"`{path}` is {region}, which is not {_known('regions')}{_nearest(region, catalog.REGIONS)}"
    for name, secret in settings.secrets.items() if settings.heads else ():
        if secret.regions and settings.region not in secret.regions:
            yield f"secret `{name}` is not kept in {settings.region}: machines start only while {', '.join(secret.regions)} answers"
    for name, head in settings.heads.items():
        yield from _head_notes(name, head)
        for pool_name, pool in head.pools.items():
            yield from _pool_notes(f"{name}.{pool_name}", pool, head.zone or settings.zone or "")


def _head_notes(name: str, head: HeadSettings) -> Iterator[str]:
    series = head.machine_type.partition("-")[0]
    if series not in catalog.SERIES:
        series = f"its series {series} is not {_known('machines')}{_nearest(series, catalog.SERIES)}"
        yield f"head `{name}` is {head.machine_type}: {series}; it gets a Hyperdisk and stops for maintenance"
    memory_gib, hosts = catalog.find_memory_gib(head.machine_type), count_tpu_hosts(head)
    if memory_gib is not None and memory_gib < min(LEAST_HEAD_GIB + hosts / _HOSTS_PER_GIB, _ENOUGH_GIB):
        yield (
            f"head `{name}` has {memory_gib:g} GiB of memory for up to {hosts:,} hosts: it may run out of it;"
            f" Ray's documentation begins with {_ENOUGH_GIB} GB for large clusters"
        )


def _pool_notes(where: str, pool: TpuPoolSettings, zone: str) -> Iterator[str]:
    name = pool.accelerator.rpartition("-")[0]
    family = catalog.TPU_FAMILIES.get(name)
    if family is None:
        nearest = _nearest(name, catalog.TPU_FAMILIES)
        yield f"pool `{where}` is of {pool.accelerator}, whose family is not {_known('tpus')}{nearest}"
        return
    if catalog.find_tpu_host(pool.accelerator) is None:
        sizes = ", ".join(f"{name}-{each}" for each in family.hosts)
        yield f"pool `{where}` is of {pool.accelerator}, whose size is not {_known('tpus')}; known are {sizes}"
    if zone and zone not in family.zones:
        zones = ", ".join(sorted(family.zones))
        yield f"pool `{where}`: {zone} is not among the zones of {name} that are {_known('tpus')}, {zones}"
    if family.limit is not None:
        yield f"pool `{where}` gets no nodes: {family.limit}"


def _known(part: str) -> str:
    return f"known here as of {catalog.FACTS[part]['as_of']}"


def _nearest(name: str, known: Iterable[str]) -> str:
    nearest = suggest(name, known)
    return f", {nearest}" if nearest else ""
