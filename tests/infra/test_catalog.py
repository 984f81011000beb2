"""The tables of Google's offers by place agree with each other."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from ray._private.accelerators.tpu import TPUAcceleratorManager
from ray.autoscaler._private.gcp.config import _is_single_host_tpu

from infra.gcp import catalog


@pytest.mark.parametrize("family", catalog.TPU_FAMILIES)
def test_zones_of_every_family_lie_in_known_regions(family: str) -> None:
    zones = catalog.TPU_FAMILIES[family].zones

    assert zones
    assert {catalog.region_of(zone) for zone in zones} <= catalog.REGIONS


def test_families_of_the_seed_clusters_are_where_those_run() -> None:
    assert "us-central2-b" in catalog.TPU_FAMILIES["v4"].zones
    assert {"us-west4-a", "europe-west4-b"} <= catalog.TPU_FAMILIES["v5litepod"].zones


@pytest.mark.parametrize("family", catalog.TPU_FAMILIES)
def test_ray_agrees_which_sizes_are_one_machine(family: str) -> None:
    entry = catalog.TPU_FAMILIES[family]
    single = [f"{family}-{size}" for size in entry.hosts]
    several = f"{family}-{entry.pod_sizes_from}"

    assert all(TPUAcceleratorManager.is_valid_tpu_accelerator_type(name) for name in [*single, several])
    assert all(_is_single_host_tpu({"acceleratorType": name}) for name in single)
    assert not _is_single_host_tpu({"acceleratorType": several})


@pytest.mark.parametrize("family", catalog.TPU_FAMILIES)
def test_every_size_that_ray_knows_has_a_host_with_cpus_and_memory(family: str) -> None:
    entry = catalog.TPU_FAMILIES[family]
    sizes = [
        size
        for size in range(1, 4 * entry.pod_sizes_from + 1)
        if TPUAcceleratorManager.is_valid_tpu_accelerator_type(f"{family}-{size}")
        and (size >= entry.pod_sizes_from or _is_single_host_tpu({"acceleratorType": f"{family}-{size}"}))
    ]
    known = {
        size: catalog.find_tpu_host(f"{family}-{size}") for size in {*entry.hosts, *sizes} if size >= min(entry.hosts)
    }

    assert set(entry.hosts) < set(known)
    assert {size: known[size] for size in entry.hosts} == dict(entry.hosts)
    several = {host for size, host in known.items() if size >= entry.pod_sizes_from}
    assert several == {entry.pod_host}
    assert all(host.vcpus >= 24 and host.memory_gib >= 48 for host in (*entry.hosts.values(), entry.pod_host))


@pytest.mark.parametrize(
    ("accelerator", "vcpus"),
    [
        *(("v2-8", 96), ("v3-32", 96), ("v4-8", 240), ("v4-4096", 240), ("v5p-8", 208)),
        *(("v5litepod-1", 24), ("v5litepod-4", 112), ("v5litepod-8", 224), ("v5litepod-16", 112)),
        *(("v6e-1", 44), ("v6e-4", 180), ("v6e-8", 180), ("v6e-256", 180)),
    ],
)
def test_host_of_an_accelerator_has_the_cpus_of_googles_table(accelerator: str, vcpus: int) -> None:
    host = catalog.find_tpu_host(accelerator)

    assert host is not None
    assert host.vcpus == vcpus


@pytest.mark.parametrize("accelerator", ["v9-8", "v5litepod-2", "v4-", "v4", ""])
def test_accelerator_that_does_not_exist_has_no_host(accelerator: str) -> None:
    assert catalog.find_tpu_host(accelerator) is None


@pytest.mark.parametrize("family", catalog.TPU_FAMILIES)
def test_software_of_every_family_is_not_made_for_another(family: str) -> None:
    assert catalog.software_family(catalog.TPU_FAMILIES[family].runtime_version) in (family, None)


@pytest.mark.parametrize(
    ("version", "family"),
    [
        ("v2-alpha-tpuv5-lite", "v5litepod"),
        ("v2-alpha-tpuv5", "v5p"),
        ("v2-alpha-tpuv6e", "v6e"),
        ("tpu-vm-v4-base", "v4"),
        ("tpu-ubuntu2204-base", None),
    ],
)
def test_software_that_is_for_one_family_says_which(version: str, family: str | None) -> None:
    assert catalog.software_family(version) == family


def test_aliases_name_families_that_exist_and_are_none_themselves() -> None:
    assert set(catalog.FAMILY_ALIASES.values()) <= set(catalog.TPU_FAMILIES)
    assert not set(catalog.FAMILY_ALIASES) & set(catalog.TPU_FAMILIES)


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


def test_tables_have_a_date_that_has_been() -> None:
    assert date(2026, 1, 1) < catalog.AS_OF <= date.today()  # noqa: DTZ011


def test_boot_image_of_heads_is_a_version_that_is_older_than_the_catalog() -> None:
    project, name = catalog.BOOT_IMAGE.split("/")[1], catalog.BOOT_IMAGE.rpartition("/")[2]
    made = date.fromisoformat(name.rpartition("-v")[2])

    assert project in catalog.BOOT_IMAGE_PROJECTS
    assert not catalog.is_arm_image(catalog.BOOT_IMAGE)
    # Google takes images off its list some months after a newer one.
    assert timedelta(0) < catalog.AS_OF - made < timedelta(days=90)
