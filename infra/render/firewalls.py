"""The firewall rules of a Ray cluster, which the stack makes, or the owner of a network in another project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from infra.render.cluster import PORTS

IAP_RANGE: Final = "35.235.240.0/20"
"""The range of Google's identity-aware proxy. https://cloud.google.com/iap/docs/using-tcp-forwarding"""

_Range = TypeVar("_Range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening(Generic[_Range]):
    purpose: str
    title: str
    sources: tuple[str | _Range, ...]
    allowed: tuple[tuple[str, tuple[str, ...]], ...]
    """Protocol and ports; no ports are all of them."""


def list_openings(cidr: _Range, ssh_cidrs: Sequence[str] = ()) -> list[Opening[_Range]]:
    """Admit people through Google's proxy and from `ssh_cidrs`, and machines of the range `cidr`."""
    # Who reaches the dashboard runs code as the head, so it listens to the head alone; people come by a tunnel.
    closed = ("dashboard", "worker_min", "worker_max")
    ports = [str(port) for name, port in sorted(PORTS.items()) if name not in closed]
    workers = f"{PORTS['worker_min']}-{PORTS['worker_max']}"
    return [
        Opening(
            purpose="ssh",
            title="SSH through the identity-aware proxy",
            sources=(IAP_RANGE, *ssh_cidrs),
            allowed=(("tcp", ("22",)),),
        ),
        Opening(
            purpose="cluster",
            title="Ray between its machines",
            sources=(cidr,),
            allowed=(("tcp", ("22", *ports, workers)), ("icmp", ())),
        ),
    ]
