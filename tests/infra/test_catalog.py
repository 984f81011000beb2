"""The facts agree with Ray and with each other."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from ray._private.accelerators.tpu import TPUAcceleratorManager
from ray.autoscaler._private.gcp.config import _is_single_host_tpu

from infra.gcp import catalog
from infra.gcp.catalog import TPU_FAMILIES
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


def test_usual_software_of_every_family_is_not_made_for_another() -> None:
    for name, facts in TPU_FAMILIES.items():
        assert catalog.software_family(facts.runtime_version or "") in (name, None)


def test_boot_image_of_heads_is_a_version_of_a_public_project_that_was_new_when_the_facts_were() -> None:
    project, name = catalog.BOOT_IMAGE.split("/")[1], catalog.BOOT_IMAGE.rpartition("/")[2]
    age = date.fromisoformat(catalog.FACTS["tpus"]["as_of"]) - date.fromisoformat(name.rpartition("-v")[2])

    assert project in catalog.BOOT_IMAGE_PROJECTS
    assert not catalog.is_arm_image(catalog.BOOT_IMAGE)
    # Google takes images off its list some months after a newer one.
    assert timedelta(0) < age < timedelta(days=90)
