"""What Google offers where, and where images may come from.

The facts are in `facts.json`, each part with its date and sources; `scripts/google-facts PROJECT` asks Google for newer
ones. Google's offer grows, so a name that the file lacks is no mistake: `check` notes it, and `preflight` asks Google.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FACTS: Final[Mapping[str, Any]] = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))

REGIONS: Final = frozenset(FACTS["regions"]["names"])
BUCKET_LOCATIONS: Final[Mapping[str, list[str]]] = FACTS["regions"]["bucket_locations"]
"""Location of buckets that is larger than a region, in lower case → its two regions, if it has two."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, or the machine that TPU chips are in."""

    vcpus: int
    memory_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuFamily:
    zones: frozenset[str]
    hosts: Mapping[int, Host]
    """Sizes of one machine → that machine. The size counts cores, but chips for v5litepod and v6e."""
    slices_from: int
    """The smallest size of several machines."""
    slice_host: Host
    """Each of several machines."""
    runtime_version: str | None
    """The software that Google's page names for JAX and PyTorch."""
    limit: str | None
    """The reason why a pool of this family gets no nodes today."""


TPU_FAMILIES: Final[Mapping[str, TpuFamily]] = {
    name: TpuFamily(
        zones=frozenset(each["zones"]),
        hosts={int(size): Host(*host) for size, host in each["hosts"].items()},
        slices_from=each["slices_from"],
        slice_host=Host(*each["slice_host"]),
        runtime_version=each["runtime_version"],
        limit=each.get("limit"),
    )
    for name, each in FACTS["tpus"]["families"].items()
}
FAMILY_ALIASES: Final[Mapping[str, str]] = {
    alias: name for name, each in FACTS["tpus"]["families"].items() for alias in each["aliases"]
}
"""A family's other names → its name in the TPU API."""

HYPERDISK: Final = ("hyperdisk-balanced",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    boot_disks: tuple[str, ...] = HYPERDISK
    """Types that a boot disk can have, the default first."""
    architecture: str = "X86_64"
    """In Google's words."""
    maintenance: str = "MIGRATE"
    """`MIGRATE` if Google can move a running machine to another host, otherwise `TERMINATE`."""
    gib_per_vcpu: Mapping[str, float] = field(default_factory=dict)


SERIES: Final[Mapping[str, Series]] = {
    name: Series(**{**each, "boot_disks": tuple(each.get("boot_disks", HYPERDISK))})
    for name, each in FACTS["machines"]["series"].items()
}
BOOT_DISKS: Final = tuple(sorted({disk for each in SERIES.values() for disk in each.boot_disks}))

_NEW: Final = Series(maintenance="TERMINATE")
"""A series that is not in the file. Google accepts a stop for maintenance from every machine."""

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
_CUSTOM: Final = re.compile(r"custom-([0-9]+)-([0-9]+)(?:-ext)?")
"""In vCPUs and MiB."""
_SIZED: Final = re.compile(r"([a-z]+)-([0-9]+)(?:-[a-z]+)*")


def is_arm_image(image: str) -> bool:
    """Whether a boot image is for Arm machines, as Google's names of such images say; `preflight` asks the image itself."""
    return _ARM_IMAGE.fullmatch(image.rpartition("/")[2]) is not None


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def find_tpu_host(accelerator: str) -> Host | None:
    """Return the host of `v4-8`, or each of the hosts of `v4-32`; None for a family or a size that is not in the file."""
    name, _, size = accelerator.rpartition("-")
    family = TPU_FAMILIES.get(name)
    if family is None or not size.isdecimal():
        return None
    return family.hosts.get(int(size)) or (family.slice_host if int(size) >= family.slices_from else None)


def software_family(runtime_version: str) -> str | None:
    """Return the one TPU family that `runtime_version` is made for; None if it runs on several or is unknown here."""
    made_for = {
        prefix: name for name, each in FACTS["tpus"]["families"].items() for prefix in each["runtime_versions_for_it"]
    }
    # One family's prefix may begin with another's: the longest counts.
    fitting = [prefix for prefix in made_for if runtime_version.startswith(prefix)]
    return made_for[max(fitting, key=len)] if fitting else None


def find_series(machine_type: str) -> Series:
    """Return what machines of this type can have; a series that is not in the file gets what all new ones take."""
    series = SERIES.get(machine_type.partition("-")[0], _NEW)
    if machine_type.endswith("-metal"):
        return Series(architecture=series.architecture, maintenance="TERMINATE", gib_per_vcpu=series.gib_per_vcpu)
    return series


def count_vcpus(machine_type: str) -> int | None:
    """Return the vCPUs that the name of a machine states; None if it states none."""
    kind = machine_type.partition("-")[2]
    if machine_type in FACTS["machines"]["shared"]:
        return int(FACTS["machines"]["shared"][machine_type][0])
    if found := _CUSTOM.fullmatch(kind):
        return int(found[1])
    return int(sized[2]) if (sized := _SIZED.fullmatch(kind)) else None


def find_memory_gib(machine_type: str) -> float | None:
    """Return the memory of a machine; None if neither its name nor the file has it."""
    kind = machine_type.partition("-")[2]
    if machine_type in FACTS["machines"]["shared"]:
        return float(FACTS["machines"]["shared"][machine_type][1])
    if found := _CUSTOM.fullmatch(kind):
        return int(found[2]) / 1024
    sized = _SIZED.fullmatch(kind)
    each = find_series(machine_type).gib_per_vcpu.get(sized[1]) if sized else None
    return int(sized[2]) * each if sized and each is not None else None
