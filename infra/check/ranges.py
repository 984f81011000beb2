"""Compares the address ranges of several stacks' machines.

Within a network, ranges that overlap cannot exist. Across networks they work, and rule out that the two are ever peered.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, TypeAlias

from infra.components.network import find_network
from infra.naming import Names
from infra.settings.model import StackSettings
from infra.settings.rules import GOOGLES_ADDRESSES, count_machines
from runtime.schema import Problem

_API: Final = "https://www.googleapis.com/compute/v1/"

Range: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSubnet:
    """The subnet of one stack's machines."""

    stack: str
    project: str
    network: str
    """`projects/P/global/networks/N`"""
    subnet: str
    """`projects/P/regions/R/subnetworks/N`"""
    cidr: Range
    machines: int
    """The pools' maxima and the heads."""

    def overlaps(self, other: StackSubnet) -> bool:
        return self.cidr.version == other.cidr.version and self.cidr.overlaps(other.cidr)


def find_place(settings: StackSettings) -> StackSubnet | None:
    """Return where a stack's machines are; None if it has no network."""
    network, project = settings.network, settings.project
    if network is None or project is None:
        return None
    own = Names(stack=settings.stack, project=project).network()
    subnet = network.subnet or f"projects/{project}/regions/{settings.region}/subnetworks/{own}"
    return StackSubnet(
        stack=settings.stack,
        project=project,
        network=(network.network or find_network(subnet)).removeprefix(_API),
        subnet=subnet.removeprefix(_API),
        cidr=ipaddress.ip_network(network.cidr),
        machines=count_machines(settings),
    )


def find_range_problems(places: Sequence[StackSubnet]) -> Iterator[Problem]:
    """Yield what cannot be: a subnet has one range, and the subnets of a network have ranges apart."""
    for one, other in combinations(places, 2):
        both = f"{one.stack} and {other.stack}"
        if one.subnet == other.subnet and one.cidr != other.cidr:
            yield Problem(
                both,
                f"name the subnet `{one.subnet}` with two ranges, {one.cidr} and {other.cidr}",
                "set `network.cidr` in both to the range that the subnet has, or nodes outside of it reach no head",
            )
        elif one.network == other.network and one.subnet != other.subnet and one.overlaps(other):
            # https://cloud.google.com/vpc/docs/subnets: ranges of the subnets of a network cannot overlap.
            yield Problem(
                both,
                f"have the overlapping ranges {one.cidr} and {other.cidr} in two subnets of `{one.network}`",
                "set `network.cidr` to the range that each subnet has",
            )


def find_range_notes(places: Sequence[StackSubnet]) -> Iterator[str]:
    """Yield what works and stands in the way later: networks that cannot be peered, and a shared subnet that is too small."""
    for one, other in combinations(places, 2):
        if one.project == other.project and one.network != other.network and one.overlaps(other):
            # "Subnets IP ranges across peered VPC networks cannot overlap."
            # https://www.pulumi.com/registry/packages/gcp/api-docs/compute/networkpeering/
            yield (
                f"{one.stack} and {other.stack} have the overlapping ranges {one.cidr} and {other.cidr}: each works in its"
                " own network, and the two networks can never be peered; a range cannot change once machines run in it"
            )
    shared: dict[str, list[StackSubnet]] = defaultdict(list)
    for each in places:
        shared[each.subnet].append(each)
    for subnet, sharing in shared.items():
        room, needed = sharing[0].cidr.num_addresses - GOOGLES_ADDRESSES, sum(each.machines for each in sharing)
        if len(sharing) > 1 and needed > room:
            yield (
                f"{', '.join(each.stack for each in sharing)} share the subnet `{subnet}` with room for {room:,} machines,"
                f" and their pools' maxima with the heads are {needed:,}"
            )
