"""Google's regions, TPU families and their zones, and boot images, as of a date; `machines` has the machine types.

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
_REGIONS: Final[Mapping[str, tuple[int, ...]]] = {
    "africa-south": (1,),
    "asia-east": (1, 2),
    "asia-northeast": (1, 2, 3),
    "asia-south": (1, 2),
    "asia-southeast": (1, 2, 3),
    "australia-southeast": (1, 2),
    "europe-central": (2,),
    "europe-north": (1, 2),
    "europe-southwest": (1,),
    "europe-west": (1, 2, 3, 4, 6, 8, 9, 10, 12),
    "me-central": (1, 2),
    "me-west": (1,),
    "northamerica-northeast": (1, 2),
    "northamerica-south": (1,),
    "southamerica-east": (1,),
    "southamerica-west": (1,),
    "us-central": (1, 2),
    "us-east": (1, 4, 5),
    "us-south": (1,),
    "us-west": (1, 2, 3, 4),
}
REGIONS: Final = frozenset(f"{area}{number}" for area, numbers in _REGIONS.items() for number in numbers)

# https://cloud.google.com/storage/docs/locations
BUCKET_LOCATIONS: Final = frozenset({"us", "eu", "asia", "nam4", "eur4", "eur5", "eur7", "eur8", "asia1"})
"""Locations of buckets that are larger than a region, in lower case."""


@dataclass(frozen=True, slots=True)
class TpuHost:
    """The machine that its TPU chips are in."""

    vcpus: int
    memory_gib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuFamily:
    zones: frozenset[str]
    hosts: Mapping[int, TpuHost]
    """Sizes of one machine → that machine. The size counts cores up to v5p, chips from v5litepod on."""
    pod_sizes_from: int
    """The smallest size of several machines."""
    pod_host: TpuHost
    """Each of several machines."""
    runtime_version: str
    """The software that Google's page names for JAX and PyTorch."""


# Zones: https://cloud.google.com/tpu/docs/regions-zones, without those for a single tenant.
# Software: https://cloud.google.com/tpu/docs/runtimes
# Hosts: the tables of machines in https://cloud.google.com/tpu/docs/v5e and its siblings v4, v5p, v6e; for all
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
TPU_FAMILIES: Final[Mapping[str, TpuFamily]] = {
    "v2": TpuFamily(
        zones=frozenset({"us-central1-a", "us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c"}),
        hosts={8: TpuHost(96, 334)},
        pod_sizes_from=32,
        pod_host=TpuHost(96, 334),
        runtime_version="tpu-ubuntu2204-base",
    ),
    "v3": TpuFamily(
        zones=frozenset({"us-central1-a", "us-central1-b", "europe-west4-a"}),
        hosts={8: TpuHost(96, 340)},
        pod_sizes_from=32,
        pod_host=TpuHost(96, 340),
        runtime_version="tpu-ubuntu2204-base",
    ),
    "v4": TpuFamily(
        zones=frozenset({"us-central2-b"}),
        hosts={8: TpuHost(240, 407)},
        pod_sizes_from=16,
        pod_host=TpuHost(240, 407),
        runtime_version="tpu-ubuntu2204-base",
    ),
    "v5litepod": TpuFamily(
        zones=frozenset({"us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a", "europe-west4-b"}),
        hosts={1: TpuHost(24, 48), 4: TpuHost(112, 192), 8: TpuHost(224, 384)},
        pod_sizes_from=16,
        pod_host=TpuHost(112, 192),
        runtime_version="v2-alpha-tpuv5-lite",
    ),
    "v5p": TpuFamily(
        zones=frozenset({"us-central1-a", "us-east5-a", "europe-west4-b"}),
        hosts={8: TpuHost(208, 448)},
        pod_sizes_from=16,
        pod_host=TpuHost(208, 448),
        runtime_version="v2-alpha-tpuv5",
    ),
    "v6e": TpuFamily(
        zones=frozenset(
            [
                "us-central1-b",
                "us-east1-d",
                "us-east5-a",
                "us-east5-b",
                "europe-west4-a",
                "asia-northeast1-b",
                "southamerica-west1-a",
            ]
        ),
        hosts={1: TpuHost(44, 176), 4: TpuHost(180, 720), 8: TpuHost(180, 1440)},
        pod_sizes_from=16,
        pod_host=TpuHost(180, 720),
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
"""A family's other names → its name in the TPU API."""

_SOFTWARE_FOR: Final = (
    # Software that is for one family and refuses to start on another. The order matters: the first match counts.
    ("v2-alpha-tpuv5-lite", "v5litepod"),
    ("v2-alpha-tpuv5", "v5p"),
    ("v2-alpha-tpuv6e", "v6e"),
    ("tpu-vm-v4-", "v4"),
)

PULL_THROUGH_HOSTS: Final = frozenset(
    {"docker.io", "ghcr.io", "nvcr.io", "public.ecr.aws", "quay.io", "registry.k8s.io"}
)
"""Public registries that Artifact Registry can cache."""

IMAGE_SOURCES: Final = ("docker.io/rayproject", "rayproject")
"""Where a head's image may come from besides the stack's registries: the images that Ray publishes."""

BOOT_IMAGE_PROJECTS: Final = frozenset(
    {"cos-cloud", "debian-cloud", "deeplearning-platform-release", "ml-images", "rocky-linux-cloud", "ubuntu-os-cloud"}
)
"""Projects of Google's public images. https://cloud.google.com/compute/docs/images/os-details"""

BOOT_IMAGE: Final = "projects/debian-cloud/global/images/debian-12-bookworm-v20261006"
"""The boot image of heads that name none, by its version. It was found in public traces of machines that ran with it in October
2026, and was not compared with Google's own list; `preflight` asks Google whether it is still offered. Another one here replaces every head that names
none, so it changes with a release and a line in the changelog."""


_ARM_IMAGE: Final = re.compile(r"(?:.*-)?(?:arm64|aarch64)(?:-.*)?")


def is_arm_image(image: str) -> bool:
    """Whether a boot image is for Arm machines, as Google's names of such images say; `preflight` asks the image itself."""
    return _ARM_IMAGE.fullmatch(image.rpartition("/")[2]) is not None


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def find_tpu_host(accelerator: str) -> TpuHost | None:
    """Return the host of `v4-8`, or each of the hosts of `v4-32`; None for a family or a size that is not in the table."""
    name, _, size = accelerator.rpartition("-")
    family = TPU_FAMILIES.get(name)
    if family is None or not size.isdecimal():
        return None
    return family.hosts.get(int(size)) or (family.pod_host if int(size) >= family.pod_sizes_from else None)


def software_family(runtime_version: str) -> str | None:
    """Return the one TPU family that `runtime_version` is made for; None if it runs on several or is unknown here."""
    return next((family for prefix, family in _SOFTWARE_FOR if runtime_version.startswith(prefix)), None)
