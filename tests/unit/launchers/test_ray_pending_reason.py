"""Why a run on Ray waits: demand against what the cluster has, may have and was refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from runtime.jobs.plan import NativeState
from runtime.jobs.spec import JobState
from runtime.launchers.ray.cluster_state import (
    ClusterView,
    NodeView,
    PoolView,
    Refusal,
    read_log,
    read_pools,
    read_view,
)
from runtime.launchers.ray.pending_reason import describe_demand, explain_wait, find_nearest, warn_of_type
from runtime.launchers.ray.states import explain_waiting, read_states

TEN = datetime(2026, 11, 25, 10, 2, tzinfo=UTC).timestamp()
V4 = PoolView(name="v4", accelerator="v4-8", most=40, host={"TPU": 4.0, "TPU-v4-8-head": 1.0, "CPU": 120.0})
SMALL = PoolView(name="small", accelerator="v5litepod-1", most=8, host={"TPU": 1.0, "CPU": 12.0})
HOST = {**V4.host, "memory": 200.0 * 2**30}
STOCK = Refusal(pool="v4", at=TEN, text='There is no more capacity in the zone "us-central2-b"')
QUOTA = Refusal(
    pool="v4", at=TEN, text="Quota limit 'TPUS_PER_PROJECT' has been exceeded. Limit: 32 in zone us-central2-b."
)

REFUSED = "the autoscaler could not make nodes: "


def wants(tpu: str | None = None, chips: int = 4, **bundle: float) -> dict[str, Any]:
    return {"bundle": bundle or {"CPU": 1.0}, **({"tpu": {"type": tpu, "chips": chips}} if tpu else {})}


def busy(count: int, **free: float) -> tuple[NodeView, ...]:
    return (NodeView(total=HOST, free={**HOST, "TPU": 0.0, **free}),) * count


CASES: list[tuple[str, dict[str, Any], int, ClusterView, str]] = [
    (
        "a type of no pool",
        wants("v4-16"),
        2,
        ClusterView(pools=(SMALL, V4)),
        "no node and no pool of the cluster has that type, so it waits until such a TPU is added",
    ),
    (
        "all nodes are busy",
        wants("v4-8"),
        1,
        ClusterView(nodes=busy(37), pools=(SMALL, V4)),
        "37 of at most 40 nodes are there, all busy",
    ),
    (
        "a stock-out",
        wants("v4-8"),
        1,
        ClusterView(nodes=busy(37), pools=(V4,), refusals=(STOCK,) * 14),
        REFUSED + STOCK.text + " (stock-out), 14 times since 10:02 UTC",
    ),
    (
        "a quota",
        wants("v4-8"),
        1,
        ClusterView(pools=(V4,), refusals=(QUOTA,), dead={"v4": 3}),
        REFUSED + QUOTA.text[:-1] + ", once, at 10:02 UTC",
    ),
    (
        "a stock-out of another pool",
        wants("v5litepod-1", chips=1),
        1,
        ClusterView(
            nodes=(NodeView(total={**SMALL.host, "TPU-v5litepod-1-head": 1.0}, free={}),),
            pools=(
                PoolView(
                    name="small", accelerator="v5litepod-1", most=8, host={**SMALL.host, "TPU-v5litepod-1-head": 1.0}
                ),
                V4,
            ),
            refusals=(STOCK,),
        ),
        "1 of at most 8 nodes are there, all busy",
    ),
    (
        "more CPUs than any node has",
        wants(CPU=300.0),
        1,
        ClusterView(nodes=busy(2), pools=(SMALL, V4)),
        "no node could ever hold it: it asks for 300 CPU, and the largest offers 120 CPU",
    ),
    (
        "a GPU where there is none, and nodes may join",
        wants(GPU=1.0),
        1,
        ClusterView(nodes=busy(2)),
        "no node that is there could hold it: it asks for 1 GPU, and none offers any",
    ),
    (
        "more memory than any node has",
        wants(CPU=1.0, memory=300.0 * 2**30),
        1,
        ClusterView(nodes=busy(2)),
        "no node that is there could hold it: it asks for 300 GiB of memory, and the largest offers 200 GiB of memory",
    ),
    (
        "nothing is said of a pool's memory",
        wants(CPU=1.0, memory=300.0 * 2**30),
        1,
        ClusterView(pools=(V4,)),
        "0 of at most 40 nodes are there",
    ),
    (
        "parts that are on different nodes",
        wants(CPU=1.0, GPU=1.0),
        1,
        ClusterView(nodes=(NodeView(total={"CPU": 4.0}, free={}), NodeView(total={"GPU": 1.0}, free={}))),
        "no node that is there could hold it: each part of it is there, but not all of them on one node",
    ),
    (
        "more nodes at once than there can be",
        wants(CPU=100.0),
        41,
        ClusterView(nodes=busy(2), pools=(V4,)),
        "it asks for 41 nodes at once, and 40 that could hold one of them can be there",
    ),
    (
        "an added node beyond the pools",
        wants("v4-32"),
        4,
        ClusterView(nodes=(NodeView(total={"TPU": 4.0, "CPU": 1.0, "TPU-v4-32-head": 1.0}, free={}),), pools=(V4,)),
        "1 of at most 1 nodes are there, all busy",
    ),
    (
        "nodes on their way",
        wants("v4-8"),
        1,
        ClusterView(pools=(V4,), coming={"v4": 2}),
        "2 nodes that could hold it are being made",
    ),
    (
        "dead nodes",
        wants("v4-8"),
        1,
        ClusterView(nodes=busy(1), pools=(V4,), dead={"v4": 3}),
        "1 of at most 40 nodes are there, all busy, and 3 nodes are dead and may hold quota",
    ),
    (
        "an autoscaler that has ended",
        wants("v4-8"),
        1,
        ClusterView(pools=(V4,), error="The autoscaler failed with the following error:\nKeyError: 'v4'\n"),
        "the autoscaler has ended: KeyError: 'v4'",
    ),
    (
        "pools that nobody knows, of which an autoscaler makes some",
        wants(CPU=300.0),
        1,
        ClusterView(nodes=busy(2), coming={"large": 1}),
        "1 node that could hold it is being made",
    ),
]


@pytest.mark.parametrize(("what", "demand", "nodes", "view", "sentence"), CASES, ids=[each[0] for each in CASES])
def test_wait_is_explained_by(what: str, demand: dict[str, Any], nodes: int, view: ClusterView, sentence: str) -> None:
    assert explain_wait(demand, nodes, view).sentence == sentence


def test_explanations_name_the_next_step_and_what_else_is_known() -> None:
    missing = explain_wait(wants("v4-16"), 2, ClusterView(pools=(SMALL, V4), dead={"v4": 1}))
    quota = explain_wait(wants("v4-8"), 1, ClusterView(pools=(V4,), refusals=(QUOTA,), dead={"v4": 3}))

    assert missing.evidence == (
        "the pools offer v5litepod-1 (small), v4-8 (v4)",
        "nodes that the autoscaler counts as dead: 1 of pool `v4`",
    )
    assert missing.hint == "resources.tpu.type: v4-8; or `runtime cluster add v4-16` adds one"
    assert quota.evidence == (
        "0 of at most 40 nodes are there",
        "nodes that the autoscaler counts as dead: 3 of pool `v4`",
    )
    assert quota.hint == "dead nodes hold quota: `runtime cluster reap`; or ask for more quota, or for another type"


@pytest.mark.parametrize(
    ("type_", "nearest"), [("v4-16", "v4-8"), ("v5litepod-4", "v5litepod-1"), ("v5p-8", None), ("v6e-1", None)]
)
def test_nearest_type_is_of_the_same_family(type_: str, nearest: str | None) -> None:
    assert find_nearest(type_, (SMALL, V4)) == nearest


def test_launch_for_a_type_of_no_pool_is_warned_about_with_the_nearest_one() -> None:
    said = "no pool of `tpu` has TPUs of type {0}; it has v5litepod-1 (small), v4-8 (v4). "
    said += "The job waits until `runtime cluster add {0}` adds one"

    assert [warn_of_type(each, (SMALL, V4), "tpu") for each in ("v4-8", "v4-16", "v6e-1")] == [
        None,
        said.format("v4-16") + "; the nearest type of a pool is v4-8",
        said.format("v6e-1"),
    ]


def test_demand_is_described() -> None:
    said = [describe_demand(*each) for each in ((wants("v4-16"), 2), (wants(CPU=4.0, GPU=1.0), 3), (wants(CPU=0.5), 1))]

    assert said == ["2 hosts of TPU v4-16", "3 nodes of 4 CPU, 1 GPU", "0.5 CPU"]


# what Ray says

LOG = """\
2026-11-25 09:10:00,001\tINFO node_launcher.py:180 -- NodeLauncher0: Failed to launch {} node(s) of type v4.
2026-11-25 09:10:00,001\tINFO node_launcher.py:180 -- NodeLauncher1: Got 4 nodes to launch.
2026-11-25 09:10:00,002\tINFO node_launcher.py:180 -- NodeLauncher0: Traceback (most recent call last):
  File "node.py", line 665, in wait_for_operation
    raise Exception(result["error"])
Exception: {'code': 8, 'message': 'There is no more capacity in the zone "us-central2-b"'}

2026-11-25 09:10:05,002\tINFO autoscaler.py:146 -- The autoscaler took 0.1 seconds to fetch the list of non-terminated nodes.
2026-11-25 09:11:00,001\tINFO node_launcher.py:180 -- NodeLauncher1: Failed to launch 4 node(s) of type small.
2026-11-25 09:11:00,002\tINFO node_launcher.py:180 -- NodeLauncher1: Traceback (most recent call last):
  File "http.py", line 938, in execute
    raise HttpError(resp, content, uri=self.uri)
googleapiclient.errors.HttpError: <HttpError 429 when requesting https://tpu/v2?alt=json returned "Quota limit 'T' has been exceeded. Limit: 32 in zone b.". Details: "x">

2026-11-25 09:12:00,001\tINFO node_launcher.py:180 -- NodeLauncher1: Launching 1 nodes, type v4.
"""


def test_log_of_the_autoscaler_has_the_cloud_s_own_words() -> None:
    found = read_log(LOG)

    assert [(each.pool, each.kind, each.text) for each in found] == [
        ("v4", "stock-out", 'There is no more capacity in the zone "us-central2-b"'),
        ("small", "quota", "Quota limit 'T' has been exceeded. Limit: 32 in zone b."),
    ]
    assert found[1].at - found[0].at == 60


def test_view_is_made_of_what_ray_and_the_contract_say() -> None:
    pools = {"v4": {"accelerator": "v4-8", "max": 40, "cpus": 120}, "odd": {"accelerator": "big"}}
    contract = {"clusters": {"a": {"head": "h-a", "pools": {}}, "b": {"head": "h-b", "pools": pools}}}
    now = read_log(LOG)[1].at + 60
    record = {"node_type": "v5", "is_available": False, "last_checked_timestamp": now - 30}
    report = {
        "pending_nodes": [["10.0.0.9", "v4", "setting-up"]],
        "pending_launches": {"v4": 2},
        "failed_nodes": [["10.0.0.5", "v4"], ["10.0.0.6", "v4"]],
        "node_availability_summary": {
            "node_availabilities": {
                "v5": {**record, "unavailable_node_information": {"category": "Stockout", "description": "none left"}},
                "v6": {**record, "is_available": True, "unavailable_node_information": None},
            }
        },
    }
    nodes: list[dict[str, Any]] = [
        {"NodeID": "a", "Alive": True, "Resources": {"CPU": 4.0}},
        {"NodeID": "b", "Alive": False, "Resources": {}},
    ]

    view = read_view(
        nodes,
        {"a": {"CPU": 1.0}},
        contract=json.dumps(contract),
        head="h-b",
        status=json.dumps({"autoscaler_report": report}).encode(),
        error=b"",
        log=LOG,
        now=now,
    )

    assert view == ClusterView(
        nodes=(NodeView(total={"CPU": 4.0}, free={"CPU": 1.0}),),
        pools=(V4,),
        coming={"v4": 3},
        dead={"v4": 2},
        refusals=(*read_log(LOG), Refusal(pool="v5", at=now - 30, text="Stockout: none left")),
    )
    assert view.refusals[-1].kind == "stock-out"
    assert read_view([], {}, log=LOG, now=now + 7200) == ClusterView()


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"clusters": {"a": {"head": "h"}}}', '{"clusters": []}'])
def test_contract_that_cannot_be_read_leaves_pools_unknown(broken: str) -> None:
    assert read_view([], {}, contract=broken, status=broken, now=0.0) == ClusterView()
    assert read_pools({"v4": None}) == ()


# for people


def test_waiting_run_says_since_when_for_what_and_why() -> None:
    note = {
        "runs": {"0": {"state": "waiting", "since": TEN}},
        "wants": wants("v4-8"),
        "why": {"for": "1 host of TPU v4-8", "sentence": "all busy", "evidence": ["more"], "hint": "wait"},
    }
    states: list[NativeState] = read_states("j-1-e1-p0-abc", {"status": "RUNNING"}, note)

    said = explain_waiting(states[1], note, now=datetime.fromtimestamp(TEN, UTC) + timedelta(minutes=12))

    assert (states[1].state, states[1].index, states[1].message) == (
        JobState.PENDING,
        0,
        "1 host of TPU v4-8: all busy",
    )
    assert said is not None
    assert (said.sentence, said.hint) == ("it has waited 12m for 1 host of TPU v4-8: all busy", "wait")
    assert said.evidence == ("each node asks for 1 CPU, 4 chips of a TPU v4-8", "more")


def test_run_that_lets_another_go_first_says_which_and_why() -> None:
    why: dict[str, Any] = {
        "for": "1 host of TPU v4-8",
        "sentence": "1 busy",
        "evidence": ["more"],
        "hint": "wait",
        "before": ["2 runs"],
    }
    why["behind"] = {"job": "j-2", "owner": "ada", "priority": "high"}
    note = {"runs": {"0": {"state": "waiting", "since": TEN}}, "wants": wants("v4-8"), "why": why}

    states = read_states("j-1-e1-p0-abc", {"status": "RUNNING"}, note)
    said = explain_waiting(states[1], note)

    assert said is not None
    assert states[1].message == said.sentence == "it lets j-2 of ada (priority high) go first"
    assert said.evidence == ("each node asks for 1 CPU, 4 chips of a TPU v4-8", "more", "2 runs")
    assert said.hint is not None
    assert "a launch with a higher `priority`" in said.hint
