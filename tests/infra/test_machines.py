"""The table of machine types: which exist, and what a machine of each type can have."""

from __future__ import annotations

import re

import pytest

from infra.gcp import machines
from infra.gcp.machines import FAMILIES, describe_allowed, disk_types, is_offered, list_types, maintenance

EVERY = [name for series in FAMILIES for name in list_types(series)]


@pytest.mark.parametrize(
    "machine_type",
    [
        *("n2-standard-8", "n2-highmem-128", "c3d-standard-30", "c4-standard-16", "n4-standard-80", "t2d-standard-60"),
        *("c3-standard-22-lssd", "c3-highcpu-192-metal", "x4-megamem-960-metal", "z3-highmem-14-standardlssd"),
        *("a2-highgpu-1g", "a2-megagpu-16g", "a3-ultragpu-8g", "g2-standard-12", "h3-standard-88", "m3-ultramem-32"),
        *("n2-custom-8-32768", "n2-custom-8-131072-ext", "n1-custom-1-1024", "e2-custom-4-8192", "n4-custom-2-4096"),
    ],
)
def test_type_that_google_has_is_offered(machine_type: str) -> None:
    assert is_offered(machine_type)


@pytest.mark.parametrize(
    "machine_type",
    [
        *("n2-standard-7", "n2-highcpu-128", "e2-highmem-32", "c3-standard-16", "h3-standard-44", "t2d-highmem-8"),
        *("n2-standard-8-lssd", "c4d-standard-2-lssd", "a2-highgpu-3g", "q7-standard-8", "x4-megamem-960", "n2"),
        # odd, too many, too little or too much memory for each, no multiple of 256 MiB, no custom types in the family
        *("n2-custom-3-8192", "n2-custom-1-2048", "n2-custom-256-262144", "n2-custom-8-1024", "n2-custom-8-131072"),
        *("n2-custom-8-32767", "e2-custom-4-131072-ext", "c4-custom-8-32768", "n2-custom-0-0"),
    ],
)
def test_type_that_google_does_not_have_is_not_offered(machine_type: str) -> None:
    assert not is_offered(machine_type)


@pytest.mark.parametrize(
    ("machine_type", "disks"),
    [
        ("n2-standard-8", ("pd-balanced", "pd-ssd", "pd-standard")),
        ("c3-standard-8", ("pd-balanced", "pd-ssd", "hyperdisk-balanced")),
        ("c3-standard-192-metal", ("hyperdisk-balanced",)),
        *((f"{each}-standard-8", ("hyperdisk-balanced",)) for each in ("c4", "c4a", "c4d", "n4", "n4a", "n4d")),
        ("x4-megamem-480-metal", ("hyperdisk-balanced",)),
        ("a3-highgpu-8g", ("pd-balanced", "pd-ssd", "hyperdisk-balanced")),
        ("a3-ultragpu-8g", ("hyperdisk-balanced",)),
        ("g2-standard-4", ("pd-balanced", "pd-ssd")),
        ("m4-megamem-28", ("hyperdisk-balanced",)),
        ("q9-standard-8", ("hyperdisk-balanced",)),
    ],
)
def test_boot_disk_types_follow_from_the_machine(machine_type: str, disks: tuple[str, ...]) -> None:
    assert disk_types(machine_type) == disks


@pytest.mark.parametrize(
    ("machine_type", "behaviour"),
    [
        *((each, "MIGRATE") for each in ("n2-standard-8", "c4-standard-8", "e2-standard-2", "m3-ultramem-32")),
        *((each, "TERMINATE") for each in ("a2-highgpu-1g", "a3-highgpu-8g", "a4-highgpu-8g", "g2-standard-4")),
        *((each, "TERMINATE") for each in ("g4-standard-48", "h3-standard-88", "x4-megamem-480-metal")),
        *((each, "TERMINATE") for each in ("c3-standard-192-metal", "z3-highmem-176-standardlssd")),
        ("z3-highmem-88-highlssd", "TERMINATE"),
        ("z3-highmem-14-standardlssd", "MIGRATE"),
        ("q9-standard-8", "TERMINATE"),
    ],
)
def test_maintenance_follows_from_the_machine(machine_type: str, behaviour: str) -> None:
    assert maintenance(machine_type) == behaviour


def test_every_type_has_a_disk_to_boot_from_a_known_architecture_and_a_name_that_settings_take() -> None:
    form = re.compile(r"[a-z]\d+[a-z]*-[a-z]+-\d+[a-z-]*")

    assert len(EVERY) == len(set(EVERY))
    assert [name for name in EVERY if not form.fullmatch(name)] == []
    assert all(disk_types(name) and is_offered(name) for name in EVERY)
    assert {each.architecture for each in FAMILIES.values()} == {machines.X86, machines.ARM}


def test_allowed_types_are_those_of_the_same_kind() -> None:
    assert describe_allowed("e2-highmem-7") == "one of e2-highmem-2, e2-highmem-4, e2-highmem-8, e2-highmem-16"
    assert "n2-custom-VCPUS-MIB" in describe_allowed("n2-custom-3-8192")
    assert "h3-standard-88" in describe_allowed("h3-custom-3-8192")
    assert "n2" in describe_allowed("q7-standard-8")
    assert "t2a" not in describe_allowed("q7-standard-8")
