"""Estimates a stack's monthly costs at list price, in US dollars without discounts, taxes and traffic.

The prices are in `facts.json`. Resources paid by use (queues, objects, images, TPU nodes beyond a pool's minimum) have no
amount.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from infra.check.recording import Recording, Registration
from infra.gcp import catalog
from infra.settings.model import StackSettings, TpuCapacity, TpuPoolSettings
from runtime.tpu_shapes import find_shape

_PRICES: Final[Mapping[str, Any]] = catalog.FACTS["prices"]
AS_OF: Final[str] = _PRICES["as_of"]

HOURS: Final = 730
"""Hours of a month, as Google's calculator counts them."""

_BY_USE: Final[Mapping[str, str]] = {
    "gcp:artifactregistry/repository:Repository": "GB stored",
    "gcp:pubsub/subscription:Subscription": "messages, and those kept longer than a day",
    "gcp:secretmanager/secret:Secret": "versions and reads",
    "gcp:storage/bucket:Bucket": "GB stored and requests",
    "kubernetes:core/v1:PersistentVolumeClaim": "what the cluster's owner charges",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    urn: str
    monthly_usd: float | None
    """None if it is paid by use, or no price is known."""
    basis: str
    """`n2-standard-8, 730 h, us-west4, prices of 2025`"""


def find_costs(recording: Recording) -> tuple[Cost, ...]:
    """Return the costs of the resources, in the order of the recording."""
    return tuple(cost for each in recording.resources for cost in _costs_of(each))


def _costs_of(each: Registration) -> Iterator[Cost]:
    if each.type in _BY_USE:
        yield Cost(urn=each.urn, monthly_usd=None, basis=f"by use: {_BY_USE[each.type]}")
    elif each.type == "gcp:compute/routerNat:RouterNat":
        basis = f"one machine, {HOURS} h; up to 32 times as much with 32, and what goes through it by use"
        yield _cost(each.urn, _PRICES["nat_hour"] * HOURS, basis, str(each.inputs.get("region")))
    elif each.type == "gcp:compute/instance:Instance":
        machine, region = str(each.inputs.get("machineType")), catalog.region_of(str(each.inputs.get("zone")))
        yield _cost(each.urn, _machine_month(machine, region), f"{machine}, {HOURS} h", region)
        disk = each.inputs["bootDisk"]["initializeParams"]
        month = _PRICES["disk_months"].get(disk["type"], {}).get(_priced_as(region))
        amount = None if month is None else month * disk["size"]
        yield _cost(each.urn, amount, f"boot disk, {disk['size']} GB {disk['type']}", region)


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
                # Prices of preemptible and spot nodes move every month, and a reservation has its own.
                basis = f"by use: {always} for a part of the {amount:,.2f} on demand, {region}, prices of {AS_OF}"
                yield Cost(urn=urn, monthly_usd=None, basis=basis)


def minimum_month(pool: TpuPoolSettings, region: str) -> float | None:
    """Return what the nodes that a pool always has cost in a month on demand; None if no price is known."""
    prices = _PRICES["tpu_chip_hours"].get(pool.accelerator.rpartition("-")[0], {})
    hour, shape = prices.get(region, prices.get(region.partition("-")[0])), find_shape(pool.accelerator)
    return None if shape is None or hour is None else round(pool.always * shape[0] * shape[1] * hour * HOURS, 2)


def monthly_total(costs: tuple[Cost, ...]) -> float:
    return round(sum(each.monthly_usd or 0.0 for each in costs), 2)


def _machine_month(machine: str, region: str) -> float | None:
    hours, factor = _PRICES["machine_hours"].get(machine.partition("-")[0]), _PRICES["regions"].get(_priced_as(region))
    vcpus, memory_gib = catalog.count_vcpus(machine), catalog.find_memory_gib(machine)
    if hours is None or factor is None or vcpus is None or memory_gib is None:
        return None
    return float((vcpus * hours[0] + memory_gib * hours[1]) * factor * HOURS)


def _priced_as(region: str) -> str:
    return str(_PRICES["priced_as"].get(region, region))


def _cost(urn: str, amount: float | None, basis: str, region: str) -> Cost:
    if amount is None:
        return Cost(urn=urn, monthly_usd=None, basis=f"{basis}, {region}: no price known")
    priced = region if _priced_as(region) == region else f"{region} (priced as {_priced_as(region)})"
    return Cost(urn=urn, monthly_usd=round(amount, 2), basis=f"{basis}, {priced}, prices of {AS_OF}")
