"""The autoscaler file is deterministic, and Google's own API descriptions accept its node configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

from infra.machine.head_agent import PUBLIC_KEY_MARK
from infra.render.autoscaler import render_autoscaler
from infra.render.cluster import HEAD_TYPE, partial_url
from infra.settings.model import TpuCapacity
from runtime.errors import InvalidValue
from tests.fakes.google import Refusal, check_fields, read_document
from tests.infra.render_support import SHAPES, V4, sample_cluster


def fields_of(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load(render_autoscaler(sample_cluster(**changes)))
    return fields


def check(api: str, schema: str, value: Mapping[str, Any]) -> None:
    schemas = read_document(api)["schemas"]
    check_fields(value, schemas[schema], schemas, "")


# Ray asks Google for the API's description at run time and names no existing version, so it may get either.
@pytest.mark.parametrize("api", ["tpu.v2alpha1", "tpu.v2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_node_config_of_every_pool_shape_is_a_node_of_the_tpu_api(api: str, shape: str) -> None:
    config = fields_of(pools={shape: SHAPES[shape]})["available_node_types"][shape]["node_config"]

    check(api, "Node", config)
    described = read_document(api)["schemas"]["Node"]["properties"]
    assert not [key for key in config if described[key].get("readOnly")]


def test_node_config_of_the_head_is_an_instance_of_compute_engine() -> None:
    check("compute.v1", "Instance", fields_of()["available_node_types"][HEAD_TYPE]["node_config"])


def test_pool_with_a_buffer_alone_has_a_resource_of_its_own() -> None:
    pools = {"v4": dataclasses.replace(V4, buffer=2), "plain": V4}

    types = fields_of(pools=pools)["available_node_types"]

    assert types["v4"]["resources"] == {**types["plain"]["resources"], "runtime-pool-v4": 1}
    assert (types["v4"]["min_workers"], types["v4"]["max_workers"]) == (4, 1024)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("accelerator", "v4-8"),
        ("serviceAccounts", [{"email": "x", "scopes": []}]),
        ("schedulingConfig", {"preemptible": "true"}),
        ("networkConfig", {"enableExternalIPs": False}),
        ("labels", {"stack": 1}),
    ],
)
def test_checker_refuses_what_the_tpu_api_does_not_know(key: str, value: object) -> None:
    config = fields_of()["available_node_types"]["v4"]["node_config"]

    with pytest.raises(Refusal):
        check("tpu.v2alpha1", "Node", {**config, key: value})


def test_file_is_the_same_whatever_the_order_of_what_goes_in() -> None:
    forth = sample_cluster(pools=SHAPES, labels={"a": "1", "b": "2"})
    back = sample_cluster(pools=dict(reversed(SHAPES.items())), labels={"b": "2", "a": "1"})

    assert render_autoscaler(forth) == render_autoscaler(back)


def test_file_holds_the_metadata_of_nodes_once() -> None:
    one, all_of_them = (len(render_autoscaler(sample_cluster(pools=pools))) for pools in ({"v4": V4}, SHAPES))

    assert all_of_them - one < 1000 * len(SHAPES)


def test_file_has_the_mark_of_the_key_once_and_no_key() -> None:
    text = render_autoscaler(sample_cluster(pools=SHAPES))

    assert text.count(PUBLIC_KEY_MARK) == 1
    assert f"ssh-keys: ray:{PUBLIC_KEY_MARK}" in text


def test_file_has_room_for_all_pools_together() -> None:
    fields = fields_of(pools=SHAPES)
    types = fields["available_node_types"]

    assert fields["max_workers"] == sum(pool.max for pool in SHAPES.values())
    assert all(fields["max_workers"] >= each["max_workers"] for each in types.values())
    assert types[HEAD_TYPE]["max_workers"] == 0
    assert types[HEAD_TYPE]["resources"] == {"CPU": 0}


@pytest.mark.parametrize(
    ("shape", "cpus", "memory_gib"),
    [
        ("v4", 120, 244),
        ("v4-slice", 120, 244),
        ("v5e", 12, 28),
        ("v5e-eight", 112, 230),
        ("v5p", 104, 268),
        ("v6e", 90, 432),
    ],
)
def test_pool_without_cpus_hands_out_half_of_each_host_and_three_fifths_of_its_memory(
    shape: str, cpus: int, memory_gib: int
) -> None:
    resources = fields_of(pools={shape: SHAPES[shape]})["available_node_types"][shape]["resources"]

    assert (resources["CPU"], resources["memory"]) == (cpus, memory_gib * 1024**3)


def test_pool_with_cpus_hands_out_these() -> None:
    pool = dataclasses.replace(V4, cpus=200)

    assert fields_of(pools={"v4": pool})["available_node_types"]["v4"]["resources"]["CPU"] == 200


@pytest.mark.parametrize(
    ("capacity", "scheduling"),
    [
        (TpuCapacity.PREEMPTIBLE, {"preemptible": True}),
        (TpuCapacity.SPOT, {"spot": True}),
        (TpuCapacity.RESERVED, {"reserved": True}),
        (TpuCapacity.ON_DEMAND, None),
    ],
)
def test_capacity_is_what_google_is_asked_for(capacity: TpuCapacity, scheduling: dict[str, Any] | None) -> None:
    config = fields_of(pools={"v4": dataclasses.replace(V4, capacity=capacity)})["available_node_types"]["v4"][
        "node_config"
    ]

    assert config.get("schedulingConfig") == scheduling


def test_nodes_have_no_external_address_and_admit_only_the_head() -> None:
    fields = fields_of()
    config = fields["available_node_types"]["v4"]["node_config"]

    assert fields["provider"]["use_internal_ips"] is True
    assert config["networkConfig"] == {
        "network": "projects/p-1/global/networks/marin",
        "subnetwork": "projects/p-1/regions/us-central2/subnetworks/marin",
        "enableExternalIps": False,
    }
    assert config["metadata"]["block-project-ssh-keys"] == "TRUE"
    assert config["serviceAccount"]["email"] == "marin-main-node@p-1.iam.gserviceaccount.com"


def test_pool_under_the_heads_own_type_is_refused() -> None:
    with pytest.raises(InvalidValue) as refused:
        render_autoscaler(sample_cluster(pools={HEAD_TYPE: V4}))
    assert refused.value.field == "pool"


@pytest.mark.parametrize(
    "link",
    [
        "https://www.googleapis.com/compute/v1/projects/p/global/networks/n",
        "https://compute.googleapis.com/compute/beta/projects/p/global/networks/n",
        "projects/p/global/networks/n",
    ],
)
def test_partial_url_of_a_self_link(link: str) -> None:
    assert partial_url(link) == "projects/p/global/networks/n"


def test_file_of_all_shapes_matches_its_golden_file(golden: Callable[[str, str], None]) -> None:
    """Leaves out the nodes' programs, which have golden files of their own."""
    fields = fields_of(pools=SHAPES)
    for each in fields["available_node_types"].values():
        metadata = each["node_config"].get("metadata", {})
        each["node_config"]["metadata"] = {key: text for key, text in metadata.items() if "\n" not in text}

    golden("infra/ray/autoscaler-of-all-shapes.yaml", yaml.safe_dump(fields, sort_keys=False, width=200))
