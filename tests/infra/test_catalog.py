"""The facts agree with Ray and with each other, and say what a head's machine can have."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from ray._private.accelerators.tpu import TPUAcceleratorManager
from ray.autoscaler._private.gcp.config import _is_single_host_tpu

from infra.gcp import catalog
from infra.gcp.catalog import TPU_FAMILIES, count_vcpus, find_memory_gib, find_series
from runtime.tpu_shapes import find_shape

RAYS = [name for name, each in TPU_FAMILIES.items() if each.limit is None]
"""Families that Ray knows."""


@pytest.mark.parametrize("family", TPU_FAMILIES)
def test_every_size_is_of_one_machine_or_of_several_as_jobs_count_them(family: str) -> None:
    facts = TPU_FAMILIES[family]

    hosts = {size: find_shape(f"{family}-{size}") for size in (*facts.hosts, facts.slices_from)}

    assert [shape is not None and shape[0] > 1 for shape in hosts.values()] == [*(False for _ in facts.hosts), True]
    assert {catalog.region_of(zone) for zone in facts.zones} <= catalog.REGIONS
    assert TPUAcceleratorManager.is_valid_tpu_accelerator_type(f"{family}-{facts.slices_from}")


@pytest.mark.parametrize("family", RAYS)
def test_ray_agrees_which_sizes_are_one_machine(family: str) -> None:
    facts = TPU_FAMILIES[family]

    assert all(_is_single_host_tpu({"acceleratorType": f"{family}-{size}"}) for size in facts.hosts)
    assert not _is_single_host_tpu({"acceleratorType": f"{family}-{facts.slices_from}"})


def test_ray_refuses_the_families_that_say_so() -> None:
    for name in TPU_FAMILIES.keys() - set(RAYS):
        with pytest.raises(ValueError, match="Invalid accelerator type"):
            _is_single_host_tpu({"acceleratorType": f"{name}-8"})


@pytest.mark.parametrize(
    ("accelerator", "vcpus"),
    [("v4-8", 240), ("v4-4096", 240), ("v5litepod-8", 224), ("v5litepod-16", 112), ("tpu7x-8", 224),
     ("v9-8", None), ("v5litepod-2", None), ("v4-", None), ("", None)],
)  # fmt: skip
def test_host_of_an_accelerator_is_that_of_its_size(accelerator: str, vcpus: int | None) -> None:
    host = catalog.find_tpu_host(accelerator)

    assert (host.vcpus if host else None) == vcpus


@pytest.mark.parametrize(
    ("version", "family"),
    [("v2-alpha-tpuv5-lite", "v5litepod"), ("v2-alpha-tpuv5", "v5p"), ("tpu-vm-v4-base", "v4"), ("tpu-ubuntu2204-base", None)],
)  # fmt: skip
def test_software_that_is_for_one_family_says_which(version: str, family: str | None) -> None:
    assert catalog.software_family(version) == family


def test_usual_software_of_every_family_is_not_made_for_another() -> None:
    for name, facts in TPU_FAMILIES.items():
        assert catalog.software_family(facts.runtime_version or "") in (name, None)


@pytest.mark.parametrize(
    ("machine_type", "vcpus", "memory_gib"),
    [("n2-standard-8", 8, 32), ("n1-highcpu-2", 2, 1.8), ("n2-custom-8-32768", 8, 32), ("e2-small", 2, 2),
     ("c3-standard-22-lssd", 22, 88), ("a2-highgpu-1g", None, None), ("c9-standard-8", 8, None), ("n2", None, None)],
)  # fmt: skip
def test_size_of_a_machine_is_read_from_its_name(
    machine_type: str, vcpus: int | None, memory_gib: float | None
) -> None:
    assert (count_vcpus(machine_type), find_memory_gib(machine_type)) == (vcpus, pytest.approx(memory_gib))


@pytest.mark.parametrize(
    ("machine_type", "disk", "maintenance"),
    [("n2-standard-8", "pd-balanced", "MIGRATE"), ("c4-standard-8", "hyperdisk-balanced", "MIGRATE"),
     ("g2-standard-8", "pd-balanced", "TERMINATE"), ("c3-standard-192-metal", "hyperdisk-balanced", "TERMINATE"),
     ("q9-standard-8", "hyperdisk-balanced", "TERMINATE")],
)  # fmt: skip
def test_boot_disk_and_maintenance_follow_from_the_series(machine_type: str, disk: str, maintenance: str) -> None:
    series = find_series(machine_type)

    assert (series.boot_disks[0], series.maintenance) == (disk, maintenance)


@pytest.mark.parametrize(
    ("image", "is_arm"),
    [
        ("projects/debian-cloud/global/images/debian-12-bookworm-arm64-v20260915", True),
        ("projects/lab/global/images/aarch64-head", True),
        ("projects/debian-cloud/global/images/debian-12-bookworm-v20261006", False),
        ("projects/arm64-lab/global/images/charm64x", False),
    ],
)
def test_boot_image_for_arm_is_known_by_its_name(image: str, is_arm: bool) -> None:
    assert catalog.is_arm_image(image) is is_arm


def test_boot_image_of_heads_is_a_version_of_a_public_project_that_was_new_when_the_facts_were() -> None:
    project, name = catalog.BOOT_IMAGE.split("/")[1], catalog.BOOT_IMAGE.rpartition("/")[2]
    age = date.fromisoformat(catalog.FACTS["tpus"]["as_of"]) - date.fromisoformat(name.rpartition("-v")[2])

    assert project in catalog.BOOT_IMAGE_PROJECTS
    assert not catalog.is_arm_image(catalog.BOOT_IMAGE)
    # Google takes images off its list some months after a newer one.
    assert timedelta(0) < age < timedelta(days=90)
