"""Estimates a stack's monthly costs at list price, in US dollars without discounts, taxes and traffic.

The table covers the resources of this program. Resources paid by use (queues, objects, images, TPU nodes beyond a pool's
minimum) have no amount.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from infra.check.recording import Recording, Registration
from infra.settings.model import StackSettings, TpuCapacity, TpuPoolSettings
from infra.settings.rules import ACCELERATOR

AS_OF: Final = "2025"
"""Year of the price pages below."""

HOURS: Final = 730
"""Hours of a month, as Google's calculator counts them."""

# https://cloud.google.com/compute/vm-instance-pricing: an hour of one vCPU and of one GB of memory, in us-central1.
MACHINE_HOURS: Final[Mapping[str, tuple[float, float]]] = {
    "e2": (0.021811, 0.002923),
    "n1": (0.031611, 0.004237),
    "n2": (0.031611, 0.004237),
    "n2d": (0.027502, 0.003686),
}

MEMORY_GB: Final[Mapping[str, float]] = {"standard": 4, "highmem": 8, "highcpu": 1}
"""Memory for each vCPU; n1 machines have a little less."""

REGION_FACTOR: Final[Mapping[str, float]] = {"us-central1": 1.0, "us-west4": 1.12626, "europe-west4": 1.10106}
"""Price of the same machine elsewhere, relative to us-central1."""

PRICED_AS: Final[Mapping[str, str]] = {"us-central2": "us-central1"}
"""Regions without a public price → the region with the price to use."""

# https://cloud.google.com/compute/disks-image-pricing: a GB for a month.
DISK_MONTHS: Final[Mapping[str, Mapping[str, float]]] = {
    "pd-standard": {"us-central1": 0.04, "us-west4": 0.044, "europe-west4": 0.044},
    "pd-balanced": {"us-central1": 0.10, "us-west4": 0.11, "europe-west4": 0.11},
    "pd-ssd": {"us-central1": 0.17, "us-west4": 0.187, "europe-west4": 0.187},
}

# https://cloud.google.com/nat/pricing: an hour for each machine that uses it, and for 32 of them or more.
NAT_HOUR_PER_MACHINE: Final = 0.0014
NAT_HOUR_AT_MOST: Final = 0.044

# https://cloud.google.com/tpu/pricing: an hour of one chip on demand. Prices of preemptible and spot nodes are a part of it
# and move every month, so there is no table of them.
TPU_CHIP_HOURS: Final[Mapping[str, Mapping[str, float]]] = {
    "v2": {"us": 1.125, "europe": 1.2375, "asia": 1.305},
    "v3": {"us": 2.0, "europe": 2.2},
    "v4": {"us": 3.22},
    "v5litepod": {"us": 1.2, "us-south1": 1.416, "europe-west4": 1.56},
    "v5p": {"us": 4.2, "us-south1": 4.779, "europe-west4": 4.2525},
    "v6e": {"us": 2.7, "europe-west4": 2.97, "asia-northeast1": 3.24, "southamerica-west1": 2.7},
}
"""TPU family → region, or the first word of its name → price."""

CORES_PER_CHIP: Final[Mapping[str, int]] = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2}
"""Families whose accelerators are named by cores; the others are named by chips."""

# https://cloud.google.com/storage/pricing#network-buckets: a GiB that a bucket's location and another region exchange.
TRAFFIC_GIB: Final[Mapping[frozenset[str], float]] = {
    frozenset(["america"]): 0.02,
    frozenset(["europe"]): 0.02,
    frozenset(["asia"]): 0.08,
    frozenset(["america", "europe"]): 0.05,
    frozenset(["america", "asia"]): 0.08,
    frozenset(["europe", "asia"]): 0.08,
}
"""Continents at both ends → price."""

CONTINENTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("us", "northamerica", "nam4"), "america"),
    **dict.fromkeys(("europe", "eu", "eur4", "eur5", "eur7", "eur8"), "europe"),
    **dict.fromkeys(("asia", "asia1"), "asia"),
}
"""First word of a region, or a larger location of buckets → continent."""

# https://cloud.google.com/storage/docs/locations#predefined
DUAL_REGIONS: Final[Mapping[str, tuple[str, str]]] = {
    "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    urn: str
    monthly_usd: float | None
    """None if it is paid by use, or the table has no price."""
    basis: str
    """`n2-standard-8, 730 h, us-west4, prices of 2025`"""


def find_costs(recording: Recording) -> tuple[Cost, ...]:
    """Return the costs of the resources, in the order of the recording."""
    return tuple(cost for each in recording.resources if each.type in PRICED for cost in PRICED[each.type](each))


def find_pool_costs(settings: StackSettings, urns: Mapping[str, str]) -> Iterator[Cost]:
    """Yield the costs of each pool, at its head in `urns`: Ray makes the nodes, and no resource stands for them."""
    for name, head in settings.heads.items():
        for pool, each in head.pools.items():
            urn, of_pool = urns.get(name, name), f"pool {pool}, "
            nodes = f"{each.min:,} to {each.max:,} nodes {each.accelerator}, {each.capacity.value}"
            buffer = f", {each.buffer:,} of them idle beside the busy ones" if each.buffer else ""
            yield Cost(urn=urn, monthly_usd=None, basis=f"by use: {of_pool}{nodes}{buffer}")
            if each.always == 0:
                continue
            always = f"{of_pool}{each.always:,} nodes at all times"
            region, amount = settings.region or "", minimum_month(each, settings.region or "")
            if each.capacity is TpuCapacity.ON_DEMAND or amount is None:
                yield _cost(urn, amount, f"{always}, {HOURS} h", region)
            else:
                basis = f"by use: {always} for a part of the {amount:,.2f} on demand, {region}, prices of {AS_OF}"
                yield Cost(urn=urn, monthly_usd=None, basis=basis)


def minimum_month(pool: TpuPoolSettings, region: str) -> float | None:
    """Return what the nodes that a pool always has cost in a month on demand; None if the table lacks its price."""
    found = ACCELERATOR.fullmatch(pool.accelerator)
    prices = TPU_CHIP_HOURS.get(found["family"], {}) if found else {}
    hour = prices.get(region, prices.get(region.partition("-")[0]))
    if found is None or hour is None:
        return None
    chips = int(found["size"]) / CORES_PER_CHIP.get(found["family"], 1)
    return round(pool.always * chips * hour * HOURS, 2)


def traffic_per_tib(location: str, region: str) -> float | None:
    """Return the price of a TiB between a bucket's location (in lower case) and a region; None if the table lacks it.

    It is 0 in one region and between a pair of regions and each of them. A larger location is never free: reading costs
    as much as between two regions of the continent, and writing is copied to other regions.
    """
    if region == location or region in DUAL_REGIONS.get(location, ()):
        return 0.0
    ends = [CONTINENTS.get(each, CONTINENTS.get(each.partition("-")[0], "")) for each in (location, region)]
    price = TRAFFIC_GIB.get(frozenset(ends))
    return None if price is None else round(price * 1024, 2)


def monthly_total(costs: tuple[Cost, ...]) -> float:
    return round(sum(each.monthly_usd or 0.0 for each in costs), 2)


def _instance(each: Registration) -> Iterator[Cost]:
    machine, region = str(each.inputs.get("machineType")), _region(each.inputs.get("zone"))
    hour = machine_hour(machine, region)
    yield _cost(each.urn, None if hour is None else hour * HOURS, f"{machine}, {HOURS} h", region)
    boot = each.inputs.get("bootDisk")
    parameters = boot.get("initializeParams") if isinstance(boot, Mapping) else None
    if isinstance(parameters, Mapping):
        yield _boot_disk(each, parameters.get("type"), parameters.get("size"), region)


def _boot_disk(each: Registration, kind: Any, size: Any, region: str) -> Cost:
    price = DISK_MONTHS.get(str(kind), {}).get(PRICED_AS.get(region, region))
    return _cost(
        each.urn,
        price * size if price is not None and isinstance(size, int) else None,
        f"boot disk, {size} GB {kind}",
        region,
    )


def _nat(each: Registration) -> Iterator[Cost]:
    most = NAT_HOUR_AT_MOST * HOURS
    basis = f"one machine, {HOURS} h; {most:.2f} from 32 machines on, and what goes through it by use"
    yield _cost(each.urn, NAT_HOUR_PER_MACHINE * HOURS, basis, str(each.inputs.get("region")))


def _by_use(what: str) -> Callable[[Registration], Iterator[Cost]]:
    def make(each: Registration) -> Iterator[Cost]:
        yield Cost(urn=each.urn, monthly_usd=None, basis=f"by use: {what}")

    return make


def _cost(urn: str, amount: float | None, basis: str, region: str) -> Cost:
    if amount is None:
        return Cost(urn=urn, monthly_usd=None, basis=f"{basis}, {region}: no price known")
    priced = f"{region} (priced as {PRICED_AS[region]})" if region in PRICED_AS else region
    return Cost(urn=urn, monthly_usd=round(amount, 2), basis=f"{basis}, {priced}, prices of {AS_OF}")


def machine_hour(machine: str, region: str) -> float | None:
    """Return the hourly price of `n2-standard-8` in a region; None if the table lacks it."""
    family, _, rest = machine.partition("-")
    kind, _, count = rest.partition("-")
    factor = REGION_FACTOR.get(PRICED_AS.get(region, region))
    if family not in MACHINE_HOURS or kind not in MEMORY_GB or not count.isdecimal() or factor is None:
        return None
    cpu, memory = MACHINE_HOURS[family]
    return int(count) * (cpu + MEMORY_GB[kind] * memory) * factor


def _region(zone: Any) -> str:
    return zone.rpartition("-")[0] if isinstance(zone, str) else "unknown region"


PRICED: Final[Mapping[str, Callable[[Registration], Iterator[Cost]]]] = {
    "gcp:artifactregistry/repository:Repository": _by_use("GB stored"),
    "gcp:compute/instance:Instance": _instance,
    "gcp:compute/routerNat:RouterNat": _nat,
    "gcp:pubsub/subscription:Subscription": _by_use("messages, and those kept longer than a day"),
    "gcp:secretmanager/secret:Secret": _by_use("versions and reads"),
    "gcp:storage/bucket:Bucket": _by_use("GB stored and requests"),
    "kubernetes:core/v1:PersistentVolumeClaim": _by_use("what the cluster's owner charges"),
}
