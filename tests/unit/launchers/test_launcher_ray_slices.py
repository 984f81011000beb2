"""Several TPU slices in one run on Ray: plans, the order of nodes, and what is said of them, without Ray."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtime.config import Project, Settings
from runtime.errors import NotPossible
from runtime.jobs.plan import JobIdentity, LaunchPlan, PlanContext, Target
from runtime.jobs.spec import InvalidSpec, JobResources, JobSpec, Tpu, parse_spec
from runtime.launchers.ray import placement
from runtime.launchers.ray.launcher import RayLauncher
from runtime.launchers.ray.states import read_states
from runtime.shim.ranks import slice_variables


def plan(folder: Path, **fields: Any) -> LaunchPlan:
    settings = Settings(
        project=Project(root=folder), data_dir=folder / "d", cache_dir=folder / "c", config_dir=folder / "f"
    )
    context = PlanContext(settings=settings, now=datetime(2026, 1, 1, tzinfo=UTC), base=folder, environ={}, records="")
    where = Target(name="tpu", kind="ray", records="/r", settings={"address": "http://head:8265"})
    job = JobIdentity(id=f"j-{'0' * 24}", name="train", owner="ada", snapshot=None)
    return RayLauncher().plan(JobSpec(command=("true",), **fields), where, job, context)


def test_plan_for_several_slices_has_a_node_for_each_host_of_each(tmp_path: Path) -> None:
    one, two = (plan(tmp_path, resources=JobResources(tpu=Tpu(type="v4-16", slices=count))) for count in (1, 2))

    assert (two.order["nodes"], two.order["slices"], two.order["meet"]) == (4, 2, {"start_s": 300.0})
    assert two.order["ray"]["tpu"] == {"type": "v4-16", "chips": 4, "hosts": 2, "slices": 2}
    assert (one.order["nodes"], "slices" in one.order) == (2, False)
    assert two.fidelity["resources.tpu.slices"].fidelity == "native"


def test_count_of_nodes_that_the_slices_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotPossible, match="2 TPUs of type `v4-16` have 4 hosts, and `nodes` is 2") as refused:
        plan(tmp_path, resources=JobResources(tpu=Tpu(type="v4-16", slices=2)), nodes=2)
    with pytest.raises(NotPossible, match="at most 100000 ranks"):
        plan(tmp_path, resources=JobResources(tpu=Tpu(type="v4-4096", slices=200)))

    assert refused.value.hint == "nodes: 4, or leave it out"


@pytest.mark.parametrize(
    ("tpu", "said"), [({"slices": 2}, "type"), ({"type": "v4-8", "slices": 0}, "has `slices` 0, expected 1 to 100000")]
)
def test_slices_without_a_type_and_none_are_no_spec(tpu: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec({"command": ["true"], "resources": {"tpu": tpu}}, source="job.toml")

    assert said in refused.value.render()


def test_first_hosts_are_asked_for_together_and_the_rest_by_the_names_of_their_slices() -> None:
    wants = {"bundle": {"CPU": 2}, "options": {"num_cpus": 2}, "tpu": {"chips": 4}}

    rooms = placement.list_rooms(wants, 4, ["a", "b"])

    assert rooms == [
        ({"CPU": 2, name: 1, "TPU": 4}, {"num_cpus": 2, "resources": {name: 1, "TPU": 4}}) for name in "aabb"
    ]


def test_slices_of_one_host_and_plain_nodes_need_no_names() -> None:
    resources = {"TPU": 4, "TPU-v4-8-head": 1}

    slices = placement.list_rooms({"bundle": {"CPU": 1}, "options": {"num_cpus": 1, "resources": resources}}, 2)
    plain = placement.list_rooms({"bundle": {"CPU": 1}, "options": {"num_cpus": 1}}, 2)

    assert slices == [({"CPU": 1, **resources}, {"num_cpus": 1, "resources": resources})] * 2
    assert plain == [({"CPU": 1}, {"num_cpus": 1})] * 2


def test_first_request_is_for_all_nodes_or_for_the_first_host_of_each_slice() -> None:
    wants = {"bundle": {"CPU": 2}, "options": {"num_cpus": 2}}
    first = {"TPU-v4-16-head": 1.0}

    assert placement.list_firsts(wants, 2) == placement.list_rooms(wants, 2)
    one = {**wants, "tpu": {"type": "v4-8", "chips": 4, "hosts": 1, "slices": 2}}
    assert placement.list_firsts(one, 2) == placement.list_rooms(one, 2)
    several = {**wants, "tpu": {"type": "v4-16", "chips": 4, "hosts": 2, "slices": 2}}
    assert placement.list_firsts(several, 4) == [(first, {"num_cpus": 0, "resources": first})] * 2


def test_nodes_are_numbered_slice_by_slice() -> None:
    workers = ["1", "0", "1", "0", None, "0"]

    assert placement.sort_nodes([{"worker": each} for each in workers], 3) == [1, 0, 3, 2, 4, 5]


def test_numbers_of_hosts_come_from_ray_where_no_variable_has_them() -> None:
    places = [{"node": "a", "worker": None}, {"node": "b", "worker": None}, {"node": "c", "worker": "0"}]
    nodes = [{"NodeID": "a", "Labels": {"ray.io/tpu-worker-id": "2"}}, {"NodeID": "b", "Labels": None}, {"NodeID": "c"}]

    numbered = placement.add_numbers(places, nodes)

    assert [each["worker"] for each in numbered] == ["2", None, "0"]
    nodes[1]["Labels"] = {"ray.io/tpu-worker-id": "1"}
    assert placement.sort_nodes(placement.add_numbers(places, nodes)) == [2, 1, 0]


def test_variables_name_the_slice_of_each_node() -> None:
    found = [slice_variables("10.0.0.1", 2, 4, node) for node in range(4)]

    assert found[3] == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_PORT": "8081",
    }
    assert [each["MEGASCALE_SLICE_ID"] for each in found] == ["0", "0", "1", "1"]


def test_run_that_waits_for_slices_says_how_many() -> None:
    wants = {"bundle": {"CPU": 1}, "tpu": {"type": "v4-16", "chips": 4, "hosts": 2, "slices": 2}}
    note = {"runs": {"0": {"state": "waiting"}}, "wants": wants}

    states = read_states(f"j-{'0' * 24}-e1-p0-4b8e25", {"status": "RUNNING"}, note)

    assert states[1].message == "1 CPU, 4 chips of a TPU v4-16, in 2 slices at once"
