"""Pools of a cluster as a stack's contract describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.outputs import ClusterOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    name: str
    accelerator: str | None = None
    capacity: str | None = None
    """`spot`, `preemptible`, `reserved` or `on_demand`."""
    min: int = 0
    max: int = 0
    buffer: int = 0
    """Idle nodes that the cluster keeps ready beside the busy ones, within `max`."""


def read_pools(cluster: ClusterOutput) -> list[Pool]:
    """Return the pools by name. A value that is missing or of another kind is unknown, or 0."""
    return [
        _read(name, values if isinstance(values, Mapping) else {}) for name, values in sorted(cluster.pools.items())
    ]


def _read(name: str, values: Mapping[str, Any]) -> Pool:
    def text(key: str) -> str | None:
        return str(values[key]) if values.get(key) is not None else None

    def number(key: str) -> int:
        value = values.get(key)
        return int(value) if isinstance(value, int | float) else 0

    return Pool(
        name=name,
        accelerator=text("accelerator"),
        capacity=text("capacity"),
        min=number("min"),
        max=number("max"),
        buffer=number("buffer"),
    )
