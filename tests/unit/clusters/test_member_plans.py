"""Members of a cluster: what is decided, the request that makes one, and which are removed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest

from infra.machine import head_agent as machine_module
from infra.render.autoscaler import autoscaler_fields
from runtime.clusters import members as members_module
from runtime.clusters import provisioning as joining_module
from runtime.clusters.members import (
    HeadFacts,
    MemberCapacity,
    MemberSpec,
    MemberStep,
    find_busy,
    find_members,
    make_specs,
    plan_members,
    render_member,
)
from runtime.clusters.nodes import TpuNode
from runtime.clusters.ray_view import RayView
from runtime.errors import InvalidValue, NotPossible, UnknownName
from tests.cluster_support import member, member_labels, node
from tests.infra.render_support import V4, V5E, sample_cluster

V4_CLUSTER = sample_cluster()
FACTS = HeadFacts(address="10.64.0.2", config=autoscaler_fields(V4_CLUSTER), ssh_key="ssh-ed25519 AAAA ray-head")
SPEC = MemberSpec(name="eval", accelerator="v4-16")


# what is decided


def test_machine_program_and_members_name_the_same_things() -> None:
    assert members_module.METADATA_KEY == machine_module.MEMBER_KEY
    assert joining_module.AUTOSCALER_KEY == machine_module.AUTOSCALER_KEY
    assert members_module.KEY_MARK == machine_module.PUBLIC_KEY_MARK


def test_specs_of_several_members_are_numbered() -> None:
    assert [each.name for each in make_specs("v4-8", name="eval", count=2)] == ["eval-0", "eval-1"]
    assert [each.name for each in make_specs("v4-8", name="eval")] == ["eval"]


@pytest.mark.parametrize("accelerator", ["v4", "v4-0", "v4-x", "h100-8", "v9-8", "", "v4-016", f"v4-{'9' * 5000}"])
def test_specs_of_what_is_no_tpu_are_refused(accelerator: str) -> None:
    with pytest.raises(InvalidValue, match="is no valid type"):
        make_specs(accelerator, name="eval")


@pytest.mark.parametrize("name", ["Eval", "1", "a_b", "a-", "x" * 64])
def test_specs_with_a_name_that_google_refuses_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="is no valid name"):
        make_specs("v4-8", name=name)


def test_specs_with_a_reservation_that_are_not_reserved_are_refused() -> None:
    with pytest.raises(NotPossible, match="is for reserved TPUs"):
        make_specs(
            "v4-8", name="eval", capacity=MemberCapacity.SPOT, reservation="projects/p/locations/z/reservations/r"
        )


@pytest.mark.parametrize("option", ["reservation", "runtime_version"])
def test_specs_with_an_empty_option_are_refused_and_not_made_without_it(option: str) -> None:
    with pytest.raises(InvalidValue, match="a variable of your shell"):
        make_specs("v4-8", name="eval", **{option: ""})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("node", "step"),
    [
        (None, MemberStep.CREATE),
        (member("CREATING", capacity="reserved"), MemberStep.KEEP),
        (member("READY", capacity="reserved"), MemberStep.KEEP),
        (member("PREEMPTED", capacity="reserved"), MemberStep.REPLACE),
        (member("DELETING", capacity="reserved"), MemberStep.REPLACE),
    ],
)
def test_plan_of_a_name_depends_on_what_has_it(node: TpuNode | None, step: MemberStep) -> None:
    assert plan_members([SPEC], [node] if node else [], "marin-main") == {"eval": step}


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (node("READY", "eval"), "the name `eval` is taken by a node of cluster `marin-main`"),
        (node("READY", "eval", labels={}), "the name `eval` is taken by a node of no cluster"),
        (member("READY", labels=member_labels("eval", "other")), "taken by a member of cluster `other`"),
        (member("READY", accelerator="v4-8", capacity="reserved"), "is a v4-8 (reserved), not a v4-16 (reserved)"),
        (member("READY", capacity="spot"), "is a v4-16 (spot), not a v4-16 (reserved)"),
        (member("READY", capacity="reserved"), "is of any reservation, not of projects/p/locations/z/reservations/r"),
        (
            member(
                "READY", capacity="reserved", reservation="projects/7/locations/z/reservations/r", runtime_version="v1"
            ),
            "is a TPU with the software v1, not v2",
        ),
    ],
)
def test_plan_of_a_taken_name_is_refused(node: TpuNode, words: str) -> None:
    spec = replace(SPEC, reservation="projects/p/locations/z/reservations/r", runtime_version="v2")
    with pytest.raises(NotPossible) as refused:
        plan_members([spec], [node], "marin-main")

    assert words in refused.value.message


# the request


def test_member_of_a_pools_type_is_made_like_a_node_of_the_pool() -> None:
    pool = FACTS.config["available_node_types"]["v4"]

    body = render_member(MemberSpec(name="eval", accelerator="v4-8"), FACTS, "marin-main")

    same = {key: value for key, value in pool["node_config"].items() if key not in ("labels", "metadata")}
    metadata = {**pool["node_config"]["metadata"]}
    metadata["ssh-keys"] = "ray:ssh-ed25519 AAAA ray-head"
    metadata["ray-member"] = json.dumps(
        {
            "head": "10.64.0.2",
            "hosts": 1,
            "labels": {"runtime-member": "eval"},
            "resources": {"CPU": 120, "TPU": 4, "memory": pool["resources"]["memory"]},
            "type": "v4-8",
        },
        sort_keys=True,
    )
    assert body == {
        **same,
        "schedulingConfig": {"reserved": True},
        "labels": member_labels("eval"),
        "metadata": metadata,
    }


def test_member_of_the_type_of_a_pool_with_a_buffer_is_no_part_of_that_buffer() -> None:
    config = autoscaler_fields(sample_cluster(pools={"v4": dataclasses.replace(V4, buffer=2)}))
    assert "runtime-pool-v4" in config["available_node_types"]["v4"]["resources"]

    body = render_member(MemberSpec(name="eval", accelerator="v4-8"), replace(FACTS, config=config), "marin-main")

    assert json.loads(body["metadata"]["ray-member"])["resources"].keys() == {"CPU", "TPU", "memory"}


def test_member_of_another_size_leaves_cpus_and_memory_to_its_hosts() -> None:
    body = render_member(SPEC, FACTS, "marin-main")

    assert (body["acceleratorType"], body["runtimeVersion"]) == ("v4-16", "tpu-ubuntu2204-base")
    known = json.loads(body["metadata"]["ray-member"])
    assert (known["hosts"], known["resources"]) == (2, {"TPU": 4})


def test_member_takes_a_pool_of_its_family_before_others() -> None:
    config = autoscaler_fields(sample_cluster(pools={"a": V4_CLUSTER.pools["v4"], "b": V5E}))
    spec = MemberSpec(name="eval", accelerator="v5litepod-16")

    body = render_member(spec, HeadFacts(address="h", config=config), "marin-main")

    assert body["runtimeVersion"] == "v2-alpha-tpuv5-lite"
    assert "ssh-keys" not in body["metadata"]


@pytest.mark.parametrize(
    ("capacity", "reservation", "scheduling"),
    [
        (MemberCapacity.ON_DEMAND, None, None),
        (MemberCapacity.SPOT, None, {"spot": True}),
        (MemberCapacity.PREEMPTIBLE, None, {"preemptible": True}),
        (MemberCapacity.RESERVED, "projects/p/r", {"reserved": True, "reservationName": "projects/p/r"}),
    ],
)
def test_member_says_how_google_provides_it(
    capacity: MemberCapacity, reservation: str | None, scheduling: dict[str, Any] | None
) -> None:
    spec = MemberSpec(name="eval", accelerator="v4-8", capacity=capacity, reservation=reservation)

    assert render_member(spec, FACTS, "marin-main").get("schedulingConfig") == scheduling


def test_member_of_a_family_without_a_pool_needs_a_runtime_version() -> None:
    spec = MemberSpec(name="eval", accelerator="v6e-4")
    with pytest.raises(NotPossible) as refused:
        render_member(spec, FACTS, "marin-main")
    assert "no pool of this cluster has TPUs of the family `v6e`" in refused.value.message

    named = MemberSpec(name="eval", accelerator="v6e-4", runtime_version="v2-alpha-tpuv6e")
    assert render_member(named, FACTS, "marin-main")["runtimeVersion"] == "v2-alpha-tpuv6e"


def test_member_of_a_cluster_without_pools_is_refused() -> None:
    with pytest.raises(NotPossible, match="no pool of TPUs to take settings from"):
        render_member(SPEC, HeadFacts(address="h", config={"available_node_types": {}}), "marin-main")


# removal


def test_members_are_found_by_name_and_nothing_else_is() -> None:
    nodes = [member("READY"), member("READY", "train"), node("READY", "ray-1"), member("READY", "x", labels={})]

    assert find_members(["train", "eval", "train"], nodes, "marin-main") == [nodes[1], nodes[0]]
    assert find_members(["gone", "eval"], nodes, "marin-main") == [nodes[0]]
    with pytest.raises(NotPossible, match="`ray-1` is no member of this cluster"):
        find_members(["ray-1"], nodes, "marin-main")
    with pytest.raises(UnknownName) as unknown:
        find_members(["evil"], nodes, "marin-main")
    assert unknown.value.hint == "did you mean `eval`?"
    with pytest.raises(NotPossible, match="`eval` is no member of this cluster"):
        find_members(["eval"], nodes, "other")


def test_busy_members_are_those_on_whose_hosts_something_runs() -> None:
    nodes = [member("READY", addresses=("10.0.0.1", "10.0.0.2")), member("READY", "train", addresses=("10.0.0.3",))]
    ray = RayView(alive=frozenset({"10.0.0.2"}), busy=frozenset({"10.0.0.2"}))

    assert find_busy(nodes, ray) == ["eval"]
