"""Compute Engine's machine types, as of the catalog's date: sizes, boot disks, live migration, architecture.

A type of a later date is named under `overrides` in the stack file, and gets what Google gives its newest families.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PERSISTENT: Final = ("pd-balanced", "pd-ssd", "pd-standard")
HYPERDISK: Final = ("hyperdisk-balanced",)
"""Other Hyperdisk types are for data alone. https://cloud.google.com/compute/docs/disks/hyperdisks"""
BOTH: Final = ("pd-balanced", "pd-ssd", *HYPERDISK)

X86: Final = "X86_64"
ARM: Final = "ARM64"
"""Architectures, in Google's words."""

_MEMORY_STEP_MIB: Final = 256
_EXTENDED_MIB: Final = 640 * 1024
_CUSTOM: Final = re.compile(r"custom-([1-9][0-9]*)-([1-9][0-9]*)(-ext)?")
_METAL: Final = re.compile(r".*-metal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """The custom types of a family: `n2-custom-8-32768`, in vCPUs and MiB; `-ext` has more memory than `most_mib`.

    https://cloud.google.com/compute/docs/instances/creating-instance-with-custom-machine-type
    """

    vcpus: tuple[range, ...]
    """The counts above one that Google offers."""
    least_mib: int
    most_mib: int
    """Both for each vCPU."""
    extended: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    types: tuple[str, ...]
    """Names without the family's: `standard-8`."""
    disks: tuple[str, ...] = PERSISTENT
    """Types that a boot disk can have, the default first."""
    architecture: str = X86
    gpus: bool = False
    custom: Custom | None = None
    newer: re.Pattern[str] = _METAL
    """Types of this name take no disks but Hyperdisk."""
    stays: re.Pattern[str] = _METAL
    """Types of this name are not moved to another host, and stop for maintenance."""


def _types(kinds: str, *sizes: int, end: str = "") -> tuple[str, ...]:
    return tuple(f"{kind}-{size}{end}" for kind in kinds.split() for size in sizes)


_ALL: Final = "standard highmem highcpu"
_N2: Final = Custom(vcpus=(range(2, 33, 2), range(36, 129, 4)), least_mib=512, most_mib=8192)

# https://cloud.google.com/compute/docs/general-purpose-machines, and the pages beside it for each of Google's groups.
# Disks: https://cloud.google.com/compute/docs/disks/hyperdisks and https://cloud.google.com/compute/docs/disks/persistent-disks
# Maintenance: https://cloud.google.com/compute/docs/instances/live-migration-process#limitations
FAMILIES: Final[Mapping[str, Family]] = {
    "a2": Family(
        types=(*(f"{kind}-{n}g" for kind in ("highgpu", "ultragpu") for n in (1, 2, 4, 8)), "megagpu-16g"), gpus=True
    ),
    "a3": Family(
        types=(
            *(f"highgpu-{n}g" for n in (1, 2, 4, 8)),
            *("megagpu-8g", "edgegpu-8g", "edgegpu-8g-nolssd", "ultragpu-8g", "ultragpu-8g-nolssd"),
        ),
        disks=BOTH,
        gpus=True,
        newer=re.compile(r"ultragpu-.*"),
    ),
    "a4": Family(types=("highgpu-8g", "highgpu-8g-nolssd"), disks=HYPERDISK, gpus=True),
    "a4x": Family(types=("highgpu-4g",), disks=HYPERDISK, gpus=True, architecture=ARM),
    "c2": Family(types=_types("standard", 4, 8, 16, 30, 60)),
    "c2d": Family(types=_types(_ALL, 2, 4, 8, 16, 32, 56, 112)),
    "c3": Family(
        types=(
            *_types(_ALL, 4, 8, 22, 44, 88, 176),
            *_types("standard", 4, 8, 22, 44, 88, 176, end="-lssd"),
            *_types(_ALL, 192, end="-metal"),
        ),
        disks=BOTH,
    ),
    "c3d": Family(
        types=(
            *_types(_ALL, 4, 8, 16, 30, 60, 90, 180, 360),
            *_types("standard highmem", 8, 16, 30, 60, 90, 180, 360, end="-lssd"),
        ),
        disks=BOTH,
    ),
    "c4": Family(
        types=(
            *_types(_ALL, 2, 4, 8, 16, 24, 32, 48, 96, 144, 192, 288),
            *_types("standard highmem", 4, 8, 16, 24, 32, 48, 96, 144, 192, 288, end="-lssd"),
            *_types("standard highmem", 288, end="-metal"),
            *_types("standard highmem", 288, end="-lssd-metal"),
        ),
        disks=HYPERDISK,
    ),
    "c4a": Family(
        types=(
            *_types(_ALL, 1, 2, 4, 8, 16, 32, 48, 64, 72),
            *_types("standard highmem", 4, 8, 16, 32, 48, 64, 72, end="-lssd"),
            "highmem-96-metal",
        ),
        disks=HYPERDISK,
        architecture=ARM,
    ),
    "c4d": Family(
        types=(
            *_types(_ALL, 2, 4, 8, 16, 32, 48, 64, 96, 192, 384),
            *_types("standard highmem", 8, 16, 32, 48, 64, 96, 192, 384, end="-lssd"),
            *_types(_ALL, 384, end="-metal"),
        ),
        disks=HYPERDISK,
    ),
    "e2": Family(
        types=(*_types("standard highcpu", 2, 4, 8, 16, 32), *_types("highmem", 2, 4, 8, 16)),
        custom=Custom(vcpus=(range(2, 33, 2),), least_mib=512, most_mib=8192, extended=False),
    ),
    "g2": Family(types=_types("standard", 4, 8, 12, 16, 24, 32, 48, 96), disks=("pd-balanced", "pd-ssd"), gpus=True),
    "g4": Family(types=_types("standard", 6, 12, 24, 48, 96, 192, 384), disks=HYPERDISK, gpus=True),
    "h3": Family(types=("standard-88",), disks=("pd-balanced", *HYPERDISK), stays=re.compile(".*")),
    "h4d": Family(types=("standard-192", "highmem-192", "highmem-192-lssd"), disks=HYPERDISK, stays=re.compile(".*")),
    "m1": Family(types=(*_types("ultramem", 40, 80, 160), "megamem-96"), disks=(*PERSISTENT, *HYPERDISK)),
    "m2": Family(types=(*_types("ultramem", 208, 416), "megamem-416", "hypermem-416"), disks=(*PERSISTENT, *HYPERDISK)),
    "m3": Family(types=(*_types("ultramem", 32, 64, 128), *_types("megamem", 64, 128)), disks=BOTH),
    "m4": Family(
        types=(*_types("hypermem", 16, 32, 64), *_types("megamem", 28, 56, 112), *_types("ultramem", 56, 112, 224)),
        disks=HYPERDISK,
    ),
    "n1": Family(
        types=(*_types("standard", 1, 2, 4, 8, 16, 32, 64, 96), *_types("highmem highcpu", 2, 4, 8, 16, 32, 64, 96)),
        custom=Custom(vcpus=(range(2, 97, 2),), least_mib=922, most_mib=6656),
    ),
    "n2": Family(
        types=(
            *_types("standard highmem", 2, 4, 8, 16, 32, 48, 64, 80, 96, 128),
            *_types("highcpu", 2, 4, 8, 16, 32, 48, 64, 80, 96),
        ),
        custom=_N2,
    ),
    "n2d": Family(
        types=(
            *_types("standard highcpu", 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 224),
            *_types("highmem", 2, 4, 8, 16, 32, 48, 64, 80, 96),
        ),
        custom=Custom(vcpus=(range(2, 3), range(4, 9, 4), range(16, 97, 16)), least_mib=512, most_mib=8192),
    ),
    "n4": Family(
        types=_types(_ALL, 2, 4, 8, 16, 32, 48, 64, 80),
        disks=HYPERDISK,
        custom=Custom(vcpus=(range(2, 81, 2),), least_mib=2048, most_mib=8192),
    ),
    "n4a": Family(
        types=_types(_ALL, 1, 2, 4, 8, 16, 32, 48, 64),
        disks=HYPERDISK,
        architecture=ARM,
        custom=Custom(vcpus=(range(2, 65, 2),), least_mib=2048, most_mib=8192),
    ),
    "n4d": Family(
        types=_types(_ALL, 2, 4, 8, 16, 32, 48, 64, 80, 96),
        disks=HYPERDISK,
        custom=Custom(vcpus=(range(2, 97, 2),), least_mib=2048, most_mib=8192),
    ),
    "t2a": Family(types=_types("standard", 1, 2, 4, 8, 16, 32, 48), architecture=ARM),
    "t2d": Family(types=_types("standard", 1, 2, 4, 8, 16, 32, 48, 60)),
    "x4": Family(types=_types("megamem", 480, 960, 1440, 1920, end="-metal"), disks=HYPERDISK),
    "z3": Family(
        types=(
            *("highmem-88", "highmem-176"),
            *_types("highmem", 14, 22, 44, 88, 176, end="-standardlssd"),
            *_types("highmem", 8, 16, 22, 32, 36, 44, 88, end="-highlssd"),
            "highmem-192-highlssd-metal",
        ),
        disks=BOTH,
        # Machines with more than 18 TiB of their own disks.
        stays=re.compile(r"highmem-(?:88|176|88-highlssd|176-standardlssd|.*-metal)"),
    ),
}
"""A machine series → its types and what they can do."""

NEWER: Final = Family(types=(), disks=HYPERDISK, stays=re.compile(".*"))
"""A family that is not in the table. Google accepts a stop for maintenance from every type."""


def family_of(machine_type: str) -> Family:
    return FAMILIES.get(machine_type.partition("-")[0], NEWER)


def is_offered(machine_type: str) -> bool:
    """Whether the table has this type, or allows it as a custom one."""
    series, _, rest = machine_type.partition("-")
    family = family_of(machine_type)
    numbers = _CUSTOM.fullmatch(rest)
    if not numbers:
        return rest in family.types
    vcpus, memory_mib, custom = int(numbers[1]), int(numbers[2]), family.custom
    if custom is None or memory_mib % _MEMORY_STEP_MIB:
        return False
    is_one = vcpus == 1 and f"{series}-standard-1" in list_types(series)
    if not is_one and not any(vcpus in each for each in custom.vcpus):
        return False
    most_mib = _EXTENDED_MIB if numbers[3] and custom.extended else vcpus * custom.most_mib
    return vcpus * custom.least_mib <= memory_mib <= most_mib


def list_types(series: str) -> list[str]:
    """List the types of a series, without custom ones: `n2-standard-2`, `n2-standard-4` …"""
    return [f"{series}-{each}" for each in FAMILIES[series].types]


def describe_allowed(machine_type: str) -> str:
    """Describe what the table has instead of a type that is not offered."""
    series, _, rest = machine_type.partition("-")
    if series not in FAMILIES:
        return f"a machine of the families {', '.join(sorted(each for each in FAMILIES if _is_x86(each)))}"
    custom, kind = FAMILIES[series].custom, rest.partition("-")[0]
    if kind == "custom" and custom is not None:
        return (
            f"`{series}-custom-VCPUS-MIB` with {' or '.join(map(_describe_counts, custom.vcpus))} vCPUs and"
            f" {custom.least_mib:,} to {custom.most_mib:,} MiB for each, a multiple of {_MEMORY_STEP_MIB} in all"
        )
    types = list_types(series)
    alike = [each for each in types if each.startswith(f"{series}-{kind}-")]
    return f"one of {', '.join(alike or types)}"


def _describe_counts(counts: range) -> str:
    return f"{counts[0]} to {counts[-1]} in steps of {counts.step}" if len(counts) > 2 else ", ".join(map(str, counts))


def count_vcpus(machine_type: str) -> int | None:
    """Return the vCPUs that the name of a machine states; None if it states none."""
    rest = machine_type.partition("-")[2]
    found = _CUSTOM.fullmatch(rest) or re.fullmatch(r"[a-z]+-([0-9]+)(?:-[a-z]+)*", rest)
    return int(found[1]) if found else None


def _is_x86(series: str) -> bool:
    return FAMILIES[series].architecture == X86


def disk_types(machine_type: str) -> tuple[str, ...]:
    """Return the types that a boot disk of this machine can have, the default first."""
    family = family_of(machine_type)
    return HYPERDISK if family.newer.fullmatch(machine_type.partition("-")[2]) else family.disks


def maintenance(machine_type: str) -> str:
    """Return `MIGRATE` if Google can move a running machine of this type to another host, otherwise `TERMINATE`."""
    family = family_of(machine_type)
    stays = family.gpus or family.stays.fullmatch(machine_type.partition("-")[2])
    return "TERMINATE" if stays else "MIGRATE"
