"""What a stack wants of a cluster against what Google has, what Ray sees and what runs."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from datetime import timedelta

import pytest

from runtime.clusters.drift import Mismatch, PoolDrift, compare_pools, find_mismatches
from runtime.clusters.head_config import check_head, parse_attributes
from runtime.clusters.nodes import QueuedResource, TpuNode, ZoneView
from runtime.clusters.pools import Pool, read_pools
from runtime.clusters.ray_view import DashboardUnreachable, RayJob, RayView, parse_jobs, parse_ray, read_jobs, read_ray
from runtime.clusters.reap_policy import plan_reaping
from tests.cluster_support import CLUSTER, NOW, PARENT, labels, member, member_labels, node
from tests.fakes.faults import FaultyServer, Request, Response

HOUR = timedelta(hours=1)
HEADS = {"marin-main": NOW - 9 * HOUR}
POOLS = [Pool(name="v4", accelerator="v4-8", min=1, max=2)]


def ready(name: str, *addresses: str, **more: object) -> TpuNode:
    return node("READY", name, age=HOUR, addresses=addresses, **{"accelerator": "v4-8", **more})


def mismatches(*nodes: TpuNode, ray: RayView | None = None, heads: object = HEADS) -> list[tuple[str | None, str]]:
    view = ZoneView(nodes=nodes, heads=heads)  # type: ignore[arg-type]
    plan = plan_reaping(view, "marin-main", NOW, seen={})
    found = list(find_mismatches("main", POOLS, view, "marin-main", plan, ray, NOW))
    assert all(each.next for each in found)
    return [(each.pool, each.what) for each in found]


def test_compare_counts_what_google_has_what_ray_sees_and_what_runs() -> None:
    view = ZoneView(
        nodes=(
            ready("busy", "10.0.0.1"),
            ready("slice", "10.0.0.2", "10.0.0.3", accelerator="v4-16"),
            ready("half", "10.0.0.4", "10.0.0.5", accelerator="v4-16"),
            node("CREATING", "new", age=HOUR / 2),
            node("PREEMPTED", "lost", age=HOUR),
            ready("stranger", "10.0.0.9", labels={"ray-cluster-name": "marin-main", "ray-user-node-type": "old"}),
        ),
        heads=HEADS,
    )
    ray = RayView(
        alive=frozenset({"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"}), busy=frozenset({"10.0.0.1", "10.0.0.3"})
    )

    standings = compare_pools(POOLS, view, "marin-main", plan_reaping(view, "marin-main", NOW, seen={}), ray)

    assert standings == [
        PoolDrift(
            pool="v4",
            accelerator="v4-8",
            capacity=None,
            min=1,
            max=2,
            live=4,
            states={"CREATING": 1, "PREEMPTED": 1, "READY": 3},
            dead=1,
            ray=2,
            busy=2,
        ),
        PoolDrift(
            pool="old",
            accelerator=None,
            capacity=None,
            min=0,
            max=0,
            live=1,
            states={"READY": 1},
            ray=0,
            busy=0,
        ),
    ]


def test_cluster_in_order_has_no_mismatch() -> None:
    assert mismatches(ready("a", "10.0.0.1"), ray=RayView(alive=frozenset({"10.0.0.1"}))) == []


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], [("v4", "0 of at least 1 node live")]),
        (
            [node("PREEMPTED", "a")],
            [("v4", "1 node will never work again"), ("v4", "0 of at least 1 node live")],
        ),
        ([ready("a"), ready("b"), ready("c")], [("v4", "3 of at most 2 nodes live")]),
        (
            [ready("a"), ready("b", pool="old")],
            [("old", "1 node of a pool that the stack does not have")],
        ),
        ([ready("a", accelerator="v4-16")], [("v4", "a: lacks 2 of 2 hosts")]),
        (
            [ready("a"), node("DELETING", "going"), node("DELETING", "too")],
            [("v4", "going, too: are being deleted, and may hold quota until then")],
        ),
        ([ready("a"), node("REPAIRING", "ill")], [("v4", "ill: REPAIRING, which Ray counts as no node")]),
        (
            [ready("a"), member("REIMAGING", "eval")],
            [("member eval", "eval: REIMAGING, which Ray counts as no node")],
        ),
    ],
)
def test_mismatch_between_stack_and_google_is_named(
    nodes: list[TpuNode], expected: list[tuple[str | None, str]]
) -> None:
    assert mismatches(*nodes) == expected


def test_mismatch_of_a_node_in_deletion_says_that_ray_still_counts_work_on_it() -> None:
    ray = RayView(alive=frozenset({"10.0.0.1", "10.0.0.2"}), busy=frozenset({"10.0.0.2"}))
    going = node("DELETING", "going", addresses=("10.0.0.2",))

    assert mismatches(ready("a", "10.0.0.1"), going, ray=ray) == [
        ("v4", "going: is being deleted, and may hold quota until then, and Ray counts work on it")
    ]


@pytest.mark.parametrize(
    ("changing", "next_step"),
    [
        (node("DELETING", "n"), "`runtime cluster reap --cluster main --longest-deletion 0s`"),
        (node("REPAIRING", "n"), "`gcloud compute tpus tpu-vm delete n --zone us-central2-b --project p-1`"),
        (member("REPAIRING", "eval"), "`runtime cluster remove eval --cluster main`"),
    ],
)
def test_mismatch_of_a_node_that_changes_has_the_command_that_ends_it(changing: TpuNode, next_step: str) -> None:
    view = ZoneView(nodes=(ready("a"), changing), heads=HEADS)  # type: ignore[arg-type]
    plan = plan_reaping(view, "marin-main", NOW, seen={})

    [found] = find_mismatches("main", POOLS, view, "marin-main", plan, None, NOW)

    assert next_step in found.next


ONE = '{"CPU": 1.0, "TPU": 4.0}'


@pytest.mark.parametrize(
    ("nodes", "busy", "wanted", "said", "next_step"),
    [
        (
            [ready("a", "10.0.0.1")],
            True,
            ONE,
            "2 requests for 1 CPU and 4 TPU wait: no node is being made, although 1 more may be",
            "`runtime cluster exec --cluster main -- sudo docker logs --tail 100 ray`",
        ),
        (
            [ready("a", "10.0.0.1"), node("CREATING", "b", age=HOUR / 2)],
            True,
            ONE,
            "2 requests for 1 CPU and 4 TPU wait: 1 node is being made",
            "it starts by itself",
        ),
        (
            [ready("a", "10.0.0.1"), node("READY", "b", age=HOUR / 60, addresses=("10.0.0.2",))],
            True,
            ONE,
            "2 requests for 1 CPU and 4 TPU wait: 1 node is being made",
            "it starts by itself",
        ),
        (
            [ready("a", "10.0.0.1"), ready("b", "10.0.0.1")],
            True,
            ONE,
            "2 requests for 1 CPU and 4 TPU wait: 2 nodes of at most 2 are there, and none is free",
            "a higher `max` of the pool",
        ),
        (
            [ready("a", "10.0.0.1")],
            False,
            '{"CPU": 500.0}',
            "2 requests for 500 CPU wait: 1 of 1 node works on nothing",
            "`runtime explain JOB`",
        ),
        (
            [ready("a", "10.0.0.1")],
            True,
            '{"TPU-v4-16-head": 1.0}',
            "2 requests for a v4-16 wait: no pool and no node has that type, only v4-8",
            "`runtime cluster add v4-16`",
        ),
        (
            [ready("a", "10.0.0.1")],
            True,
            '{"TPU": 8.0}',
            "2 requests for 8 TPU wait: a host has at most 4 chips (types: v4-8)",
            "fewer chips",
        ),
        (
            [ready("a", "10.0.0.1")],
            True,
            '{"CPU": 1.0, "GPU": 1.0}',
            "2 requests for 1 CPU and 1 GPU wait: no pool and no node has `GPU`",
            "end the job",
        ),
        (
            [ready("a", "10.0.0.1"), member("READY", "eval", age=HOUR, addresses=("10.0.0.1", "10.0.0.1"))],
            True,
            '{"TPU-v4-16-head": 1.0}',
            "2 requests for a v4-16 wait: 1 node of at most 1 is there, and none is free",
            "it starts by itself",
        ),
    ],
)
def test_request_that_waits_is_explained_with_its_next_step(
    nodes: list[TpuNode], busy: bool, wanted: str, said: str, next_step: str
) -> None:
    hosts = frozenset({"10.0.0.1"})
    ray = RayView(alive=hosts, busy=hosts if busy else frozenset(), wanted={wanted: 2})
    view = ZoneView(nodes=tuple(nodes), heads=HEADS)  # type: ignore[arg-type]
    plan = plan_reaping(view, "marin-main", NOW, seen={})

    found = [each for each in find_mismatches("main", POOLS, view, "marin-main", plan, ray, NOW) if "wait" in each.what]

    assert [each.what for each in found] == [said]
    assert next_step in found[0].next


def test_request_does_not_count_a_creation_that_hangs_or_a_pool_of_another_type() -> None:
    ray = RayView(alive=frozenset({"10.0.0.1"}), busy=frozenset({"10.0.0.1"}), wanted={'{"TPU-v4-8-head": 1.0}': 1})
    other = node("CREATING", "b", age=HOUR / 2, pool="v5", accelerator="v5litepod-4")
    hangs = node("CREATING", "c", age=2 * HOUR, accelerator="v4-8")
    view = ZoneView(nodes=(ready("a", "10.0.0.1"), other, hangs), heads=HEADS)  # type: ignore[arg-type]
    pools = [*POOLS, Pool(name="v5", accelerator="v5litepod-4", max=4)]
    plan = plan_reaping(view, "marin-main", NOW, seen={})

    [found] = [
        each for each in find_mismatches("main", pools, view, "marin-main", plan, ray, NOW) if "wait" in each.what
    ]

    assert (found.pool, found.what) == (
        "v4",
        "1 request for a v4-8 waits: no node is being made, although 1 more may be",
    )


def test_mismatch_of_a_missing_head_is_named_and_an_unknown_one_is_not() -> None:
    assert (None, "the cluster has no head") in mismatches(ready("a"), heads={})
    assert mismatches(ready("a"), heads=None) == []


@pytest.mark.parametrize(
    ("nodes", "alive", "expected"),
    [
        ([ready("a", "10.0.0.1")], [], [("v4", "a: Google runs what Ray does not see")]),
        (
            [ready("a", "10.0.0.1", "10.0.0.2", accelerator="v4-16")],
            ["10.0.0.2"],
            [("v4", "a: Ray sees 1 of its 2 hosts")],
        ),
        (
            [ready("a", "10.0.0.1")],
            ["10.0.0.1", "10.9.9.9"],
            [(None, "10.9.9.9: Ray sees a host that Google does not list for this cluster")],
        ),
        ([node("READY", "young", age=timedelta(minutes=14), addresses=("10.0.0.1",))], [], []),
        ([node("CREATING", "new", age=HOUR / 2)], [], []),
    ],
)
def test_mismatch_between_google_and_ray_is_named(
    nodes: list[TpuNode], alive: list[str], expected: list[tuple[str | None, str]]
) -> None:
    assert mismatches(*nodes, ray=RayView(alive=frozenset(alive))) == expected


def test_mismatch_of_a_node_of_ours_that_no_cluster_has_says_how_to_remove_it() -> None:
    left = {key: value for key, value in member_labels("eval").items() if key != "runtime-cluster"}
    view = ZoneView(nodes=(member("READY", labels=left),), heads={"marin-main": NOW})

    [found] = find_mismatches("main", [], view, "marin-main", plan_reaping(view, "marin-main", NOW, seen={}), None, NOW)

    assert found == Mismatch(
        pool=None,
        what="eval: made by a stack of ours, and the labels name no cluster",
        next="if nobody uses it: `gcloud compute tpus tpu-vm delete eval --zone us-central2-b --project p-1`",
    )


def test_mismatch_of_queued_resources_that_give_no_more_nodes_has_a_next_step() -> None:
    queued = [
        QueuedResource(resource=f"{PARENT}/queuedResources/{state}", state=state, labels=(labels(),))
        for state in ("FAILED", "SUSPENDED", "ACTIVE")
    ]
    view = ZoneView(queued=tuple(queued), heads=HEADS)  # type: ignore[arg-type]

    [found] = find_mismatches("main", [], view, "marin-main", plan_reaping(view, "marin-main", NOW, seen={}), None, NOW)

    assert found.what == "2 queued resources will give no more nodes"
    assert "`runtime cluster reap --cluster main`" in found.next


def test_mismatch_of_the_autoscaler_shows_the_last_line_of_its_error() -> None:
    ray = RayView(alive=frozenset({"10.0.0.1"}), error="Traceback\n  File\nHttpError: 429 quota\n")

    assert mismatches(ready("a", "10.0.0.1"), ray=ray) == [(None, "the autoscaler failed: HttpError: 429 quota")]


# Ray's answers


class Strange(FaultyServer):
    """Answers every request with the same bytes."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body

    def answer(self, request: Request) -> Response:
        return Response(200, {"Content-Type": "application/json"}, self.body)


@pytest.mark.parametrize("body", [b"[", b"[]", b"[" * 100_000, b"\xff", b"{}", b'{"data": {"summary": 3}}'])
def test_read_ray_of_another_form_is_no_answer(body: bytes) -> None:
    server = Strange(body).start()
    try:
        with pytest.raises(DashboardUnreachable):
            read_ray(server.url)
    finally:
        server.stop()


def test_read_ray_of_a_port_of_ssh_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(DashboardUnreachable):
            read_ray(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("address", ["http://localhost:port", "http://a b/", "http://[::1", "", "localhost:8265"])
def test_read_ray_at_no_address_is_no_answer(address: str) -> None:
    with pytest.raises(DashboardUnreachable):
        read_ray(address)


@pytest.mark.parametrize(("said", "error"), [(" \n", None), ({"a": 1}, "{'a': 1}"), ("one\ntwo\n", "one\ntwo")])
def test_parse_ray_takes_the_autoscalers_error_as_text(said: object, error: str | None) -> None:
    status = {"data": {"clusterStatus": None, "autoscalingError": said}}

    assert parse_ray({"data": {"summary": []}}, status).error == error


def raylet(node_id: str, address: str, state: str = "ALIVE", *, head: bool = False) -> dict[str, object]:
    return {
        "ip": address,
        "raylet": {"nodeId": node_id, "nodeManagerAddress": address, "state": state, "isHeadNode": head},
    }


def test_parse_ray_knows_hosts_by_address_and_usage_by_address_or_id() -> None:
    nodes = {
        "data": {
            "summary": [
                raylet("aa", "10.0.0.2", head=True),
                raylet("bb", "10.0.0.3"),
                raylet("cc", "10.0.0.4"),
                raylet("dd", "10.0.0.5"),
                raylet("ee", "10.0.0.6", "DEAD"),
            ]
        }
    }
    report = {
        "usageByNode": {
            "10.0.0.3": {"CPU": [0.0, 120.0], "TPU": [4.0, 4.0]},
            "cc": {"CPU": [1, 120]},
            "10.0.0.5": {"CPU": [0.0, 120.0], "objectStoreMemory": [7, 9]},
            "10.0.0.6": {"CPU": [1, 120]},
        },
        "resourceDemand": [[{"TPU": 4.0, "CPU": 1.0}, 3]],
        "pgDemand": [[{"bundles": [[{"CPU": 1.0, "TPU": 4.0}, 2], [{"CPU": 1.0}, 1]], "strategy": "STRICT_SPREAD"}, 5]],
    }
    status = {"data": {"clusterStatus": {"loadMetricsReport": report}, "autoscalingError": None}}

    assert parse_ray(nodes, status) == RayView(
        alive=frozenset({"10.0.0.3", "10.0.0.4", "10.0.0.5"}),
        busy=frozenset({"10.0.0.3", "10.0.0.4"}),
        wanted={'{"CPU": 1.0, "TPU": 4.0}': 13, '{"CPU": 1.0}': 5},
    )


def started(job: str, part: int, status: str = "RUNNING", ray_id: str = "01000000") -> dict[str, object]:
    said = {"job": job, "epoch": "1", "name": "train", "owner": "ada", "grace_s": "5"}
    return {"submission_id": f"{job}-e1-p{part}-0", "job_id": ray_id, "status": status, "metadata": said}


def test_parse_jobs_names_living_jobs_once_with_the_hosts_of_their_actors() -> None:
    listed = [
        started("j-b", 0),
        started("j-b", 1, "PENDING", "02000000"),
        started("j-c", 0, "SUCCEEDED", "03000000"),
        started("j-a", 0, ray_id="04000000"),
        {"submission_id": "raysubmit_1", "job_id": "05000000", "status": "RUNNING", "entrypoint": "python x.py"},
        {"submission_id": "mine", "status": "RUNNING", "entrypoint": "e", "metadata": {"job": "j-a"}},
    ]
    nodes = {
        "data": {"summary": [raylet("hh", "10.0.0.2", head=True), raylet("bb", "10.0.0.3"), raylet("cc", "10.0.0.4")]}
    }
    actors = [
        {"job_id": job, "node_id": at}
        for job, at in (("01000000", "bb"), ("01000000", "hh"), ("02000000", "cc"), ("09000000", "cc"))
    ]

    found = parse_jobs(listed, nodes, {"data": {"result": {"result": actors}}})

    assert found == (
        RayJob(job="j-a", name="train", owner="ada", hosts=frozenset()),
        RayJob(job="j-b", name="train", owner="ada", hosts=frozenset({"10.0.0.3", "10.0.0.4"})),
        RayJob(job=None, name="python x.py", hosts=frozenset()),
        RayJob(job=None, name="e", hosts=frozenset()),
    )
    assert parse_jobs([started("j-b", 0)]) == (RayJob(job="j-b", name="train", owner="ada"),)


@pytest.mark.parametrize("body", [b"{}", b"[3]", b"[{}]", b"[[]]"])
def test_read_jobs_of_another_form_changes_nothing(body: bytes) -> None:
    view, server = RayView(alive=frozenset()), Strange(body).start()
    try:
        assert read_jobs(server.url, view) is view
    finally:
        server.stop()


def test_parse_ray_without_an_autoscalers_report_knows_the_hosts() -> None:
    nodes = {"data": {"summary": [raylet("bb", "10.0.0.3")]}}

    assert parse_ray(nodes, {"data": {"clusterStatus": None, "autoscalingError": "e"}}) == RayView(
        alive=frozenset({"10.0.0.3"}), error="e"
    )


# the buffer


@pytest.mark.parametrize(
    ("most", "live", "busy", "said"),
    [
        (4, 1, 1, "1 of 3 nodes live: 1 busy, and a buffer of 2"),
        (4, 3, 1, None),
        (2, 2, 2, None),
        (4, 2, None, None),
    ],
    ids=["lacks", "has", "is at its maximum", "ray was not asked"],
)
def test_pool_that_lacks_nodes_of_its_buffer_is_named_if_ray_was_asked(
    most: int, live: int, busy: int | None, said: str | None
) -> None:
    pools = [Pool(name="v4", accelerator="v4-8", max=most, buffer=2)]
    nodes = tuple(ready(f"n-{number}", f"10.0.0.{number}") for number in range(live))
    hosts = [each.addresses[0] for each in nodes]
    ray = None if busy is None else RayView(alive=frozenset(hosts), busy=frozenset(hosts[:busy]))
    view = ZoneView(nodes=nodes, heads=HEADS)
    plan = plan_reaping(view, "marin-main", NOW, seen={})

    found = [each.what for each in find_mismatches("main", pools, view, "marin-main", plan, ray, NOW)]

    assert found == ([] if said is None else [said])
    assert [each.buffer for each in compare_pools(pools, view, "marin-main", plan, ray)] == [2]


# the contract and the head


def test_read_pools_takes_numbers_of_pulumi_and_lacks() -> None:
    assert read_pools(replace(CLUSTER, pools={"b": {"max": 8.0, "min": "x", "buffer": 2.0}, "a": None})) == [
        Pool(name="a"),
        Pool(name="b", max=8, buffer=2),
    ]


@pytest.mark.parametrize(
    ("attributes", "verdicts"),
    [
        (None, ["fail head"]),
        ({"state": "ready", "config-sha256": "0", "restart-needed": "no"}, ["ok head", "ok file", "ok restart"]),
        ({"state": "ready", "config-sha256": "1"}, ["ok head", "fail file", "ok restart"]),
        ({"state": "waiting", "waiting-for": "image i"}, ["warn head", "fail file", "ok restart"]),
        (
            {"state": "ready", "config-sha256": "0", "restart-needed": "ray-head-service"},
            ["ok head", "ok file", "warn restart"],
        ),
    ],
)
def test_check_head_compares_what_it_says_with_the_contract(
    attributes: dict[str, str] | None, verdicts: list[str]
) -> None:
    findings = list(check_head("main", CLUSTER, attributes, stack="marin"))

    assert [f"{each.verdict} {each.check}" for each in findings] == verdicts
    assert all(bool(each.fix) == (each.verdict != "ok") for each in findings)


def test_parse_attributes_reads_googles_list() -> None:
    items = [{"namespace": "runtime", "key": "state", "value": "ready"}, {"namespace": "runtime", "key": "empty"}]

    assert parse_attributes({"queryValue": {"items": items}}) == {"state": "ready", "empty": ""}
    assert parse_attributes({}) == {}


def test_members_have_rows_of_their_own_and_are_no_mismatch() -> None:
    whole = member("READY", "eval", age=HOUR, addresses=("10.0.0.8", "10.0.0.9"), capacity="reserved")
    view = ZoneView(nodes=(ready("n", "10.0.0.1"), whole), heads=HEADS)
    ray = RayView(alive=frozenset({"10.0.0.1", "10.0.0.8", "10.0.0.9"}), busy=frozenset({"10.0.0.9"}))
    plan = plan_reaping(view, "marin-main", NOW, seen={})

    standings = compare_pools(POOLS, view, "marin-main", plan, ray)

    assert standings[1:] == [
        PoolDrift(
            pool="member eval",
            accelerator="v4-16",
            capacity="reserved",
            min=0,
            max=0,
            live=1,
            states={"READY": 1},
            ray=1,
            busy=1,
            member=True,
        )
    ]
    assert mismatches(ready("n", "10.0.0.1"), whole, ray=ray) == []


def test_member_that_ray_does_not_see_whole_is_a_mismatch() -> None:
    half = member("READY", "eval", age=HOUR, addresses=("10.0.0.8", "10.0.0.9"))
    ray = RayView(alive=frozenset({"10.0.0.1", "10.0.0.8"}))

    assert mismatches(ready("n", "10.0.0.1"), half, ray=ray) == [("member eval", "eval: Ray sees 1 of its 2 hosts")]
