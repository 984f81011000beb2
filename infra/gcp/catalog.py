"""Google's regions, TPU families and their zones, machine families. Data with a date, no look-ups.

A stack file adds newer zones and regions under `overrides`. `python -m infra preflight` asks the project itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Final

AS_OF: Final = date(2026, 11, 21)

# https://cloud.google.com/compute/docs/regions-zones, and us-central2, which has TPU v4 and little else.
REGIONS: Final = frozenset(
    [
        "africa-south1",
        "asia-east1",
        "asia-east2",
        "asia-northeast1",
        "asia-northeast2",
        "asia-northeast3",
        "asia-south1",
        "asia-south2",
        "asia-southeast1",
        "asia-southeast2",
        "asia-southeast3",
        "australia-southeast1",
        "australia-southeast2",
        "europe-central2",
        "europe-north1",
        "europe-north2",
        "europe-southwest1",
        "europe-west1",
        "europe-west2",
        "europe-west3",
        "europe-west4",
        "europe-west6",
        "europe-west8",
        "europe-west9",
        "europe-west10",
        "europe-west12",
        "me-central1",
        "me-central2",
        "me-west1",
        "northamerica-northeast1",
        "northamerica-northeast2",
        "northamerica-south1",
        "southamerica-east1",
        "southamerica-west1",
        "us-central1",
        "us-central2",
        "us-east1",
        "us-east4",
        "us-east5",
        "us-south1",
        "us-west1",
        "us-west2",
        "us-west3",
        "us-west4",
    ]
)

# https://cloud.google.com/storage/docs/locations
BUCKET_LOCATIONS: Final = frozenset({"us", "eu", "asia", "nam4", "eur4", "eur5", "eur7", "eur8", "asia1"})
"""Locations of buckets that are larger than a region, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuFamily:
    zones: frozenset[str]
    single_host: tuple[int, ...]
    """Sizes that are one machine. The number counts cores up to v5p, chips from v5litepod on."""
    pod_sizes_from: int
    """The smallest size that is several machines."""
    runtime_version: str
    """The software that Google's page names for JAX and PyTorch."""


# Zones: https://cloud.google.com/tpu/docs/regions-zones, without those for a single tenant.
# Software: https://cloud.google.com/tpu/docs/runtimes
TPU_FAMILIES: Final[Mapping[str, TpuFamily]] = {
    "v2": TpuFamily(
        zones=frozenset({"us-central1-a", "us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c"}),
        single_host=(8,),
        pod_sizes_from=32,
        runtime_version="tpu-ubuntu2204-base",
    ),
    "v3": TpuFamily(
        zones=frozenset({"us-central1-a", "us-central1-b", "europe-west4-a"}),
        single_host=(8,),
        pod_sizes_from=32,
        runtime_version="tpu-ubuntu2204-base",
    ),
    "v4": TpuFamily(
        zones=frozenset({"us-central2-b"}),
        single_host=(8,),
        pod_sizes_from=16,
        runtime_version="tpu-ubuntu2204-base",
    ),
    "v5litepod": TpuFamily(
        zones=frozenset(
            {
                "us-central1-a",
                "us-south1-a",
                "us-west1-c",
                "us-west4-a",
                "europe-west4-b",
            }
        ),
        single_host=(1, 4, 8),
        pod_sizes_from=16,
        runtime_version="v2-alpha-tpuv5-lite",
    ),
    "v5p": TpuFamily(
        zones=frozenset({"us-central1-a", "us-east5-a", "europe-west4-b"}),
        single_host=(8,),
        pod_sizes_from=16,
        runtime_version="v2-alpha-tpuv5",
    ),
    "v6e": TpuFamily(
        zones=frozenset(
            {
                "us-central1-b",
                "us-east1-d",
                "us-east5-a",
                "us-east5-b",
                "europe-west4-a",
                "asia-northeast1-b",
                "southamerica-west1-a",
            }
        ),
        single_host=(1, 4, 8),
        pod_sizes_from=16,
        runtime_version="v2-alpha-tpuv6e",
    ),
}

FAMILY_ALIASES: Final[Mapping[str, str]] = {
    "v5e": "v5litepod",
    "v5lite": "v5litepod",
    "v5-lite": "v5litepod",
    "v5": "v5p",
    "v6": "v6e",
    "trillium": "v6e",
}
"""A family's name among people and on other pages → its name in the TPU API."""

_SOFTWARE_FOR: Final = (
    # Software that is for one family and refuses to start on another. The order matters: the first match counts.
    (re.compile(r"v2-alpha-tpuv5-lite"), "v5litepod"),
    (re.compile(r"v2-alpha-tpuv5"), "v5p"),
    (re.compile(r"v2-alpha-tpuv6e"), "v6e"),
    (re.compile(r"tpu-vm-v4-"), "v4"),
)

# https://cloud.google.com/compute/docs/machine-resource
X86_FAMILIES: Final = frozenset(
    [
        "c2",
        "c2d",
        "c3",
        "c3d",
        "c4",
        "c4d",
        "e2",
        "g2",
        "h3",
        "m1",
        "m2",
        "m3",
        "m4",
        "n1",
        "n2",
        "n2d",
        "n4",
        "n4d",
        "t2d",
        "x4",
        "z3",
        "a2",
        "a3",
        "a4",
    ]
)
ARM_FAMILIES: Final = frozenset(["c4a", "n4a", "t2a"])

PULL_THROUGH_HOSTS: Final = frozenset(
    {"docker.io", "ghcr.io", "nvcr.io", "public.ecr.aws", "quay.io", "registry.k8s.io"}
)
"""Public registries that Artifact Registry can stand in front of."""


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def software_family(runtime_version: str) -> str | None:
    """The one TPU family that `runtime_version` is made for; None if it runs on several or is not known here."""
    for pattern, family in _SOFTWARE_FOR:
        if pattern.match(runtime_version):
            return family
    return None
