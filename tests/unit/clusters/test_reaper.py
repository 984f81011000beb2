"""The reaper: the nodes that count as dead, the resources it removes, and `runtime cluster reap`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.clusters.reaper import (
    Dead,
    Reaper,
    TpuNode,
    count_live,
    find_dead,
    find_spent,
    parse_node,
)
from runtime.outputs import ClusterOutput, StackOutputs, encode_outputs
from runtime.stack.google_api import GoogleApi, GoogleRefused
from tests.fakes.tpu import TpuServer, names_of
from tests.output_support import differences, documented

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
STATES = [
    "STATE_UNSPECIFIED",
    "CREATING",
    "READY",
    "RESTARTING",
    "REIMAGING",
    "DELETING",
    "REPAIRING",
    "STOPPED",
    "STOPPING",
    "STARTING",
    "PREEMPTED",
    "TERMINATED",
    "HIDING",
    "HIDDEN",
    "UNHIDING",
    "UNKNOWN",
]
"""Every resource in the API."""

Run = Callable[..., tuple[int, str, str]]


def labels(cluster: str = "marin-main", pool: str = "v4", kind: str = "worker") -> dict[str, str]:
    return {"ray-cluster-name": cluster, "ray-node-type": kind, "ray-user-node-type": pool}


def node(state: str, name: str = "n", *, age: timedelta = timedelta(), **kind: str) -> TpuNode:
    return TpuNode(
        resource=f"projects/p-1/locations/z/nodes/{name}", state=state, labels=labels(**kind), created_at=NOW - age
    )


# deciding


def test_find_dead_takes_exactly_the_states_that_never_come_back() -> None:
    nodes = [node(state, state) for state in STATES]

    dead = find_dead(nodes, "marin-main", NOW)

    assert {each.name: each.why for each in dead} == {
        "STOPPED": "stopped",
        "PREEMPTED": "preempted",
        "TERMINATED": "terminated",
        "UNKNOWN": "unknown",
    }


def test_find_dead_leaves_the_head_and_other_clusters_and_nodes_without_labels() -> None:
    mine = node("PREEMPTED", "mine")
    others = [
        node("PREEMPTED", "head", kind="head"),
        node("PREEMPTED", "other", cluster="marin-main-2"),
        TpuNode(resource="projects/p-1/locations/z/nodes/bare", state="PREEMPTED"),
    ]

    assert find_dead([*others, mine], "marin-main", NOW) == [Dead(resource=mine.resource, why="preempted", pool="v4")]


@pytest.mark.parametrize(
    ("age", "why"),
    [(timedelta(minutes=59), None), (HOUR, None), (HOUR + timedelta(minutes=1), "creating for 1h1m")],
)
def test_find_dead_takes_a_node_that_is_made_for_too_long(age: timedelta, why: str | None) -> None:
    made = node("CREATING", age=age)

    assert find_dead([made], "marin-main", NOW) == ([Dead(resource=made.resource, why=why, pool="v4")] if why else [])


def test_find_dead_leaves_a_node_in_creation_whose_age_is_unknown() -> None:
    made = TpuNode(resource="projects/p-1/locations/z/nodes/n", state="CREATING", labels=labels())

    assert find_dead([made], "marin-main", NOW + timedelta(days=9)) == []


def test_count_live_counts_what_ray_counts_by_pool() -> None:
    nodes = [node(state) for state in STATES] + [node("READY", pool="v5e"), node("READY", cluster="other")]

    assert count_live(nodes, "marin-main") == {"v4": 4, "v5e": 1}


def test_find_spent_takes_queued_resources_of_this_cluster_alone() -> None:
    def queued(name: str, state: str, *clusters: str) -> dict[str, object]:
        specs = [{"node": {"labels": labels(cluster)}} for cluster in clusters]
        return {
            "name": f"projects/p/locations/z/queuedResources/{name}",
            "state": {"state": state},
            "tpu": {"nodeSpec": specs},
        }

    resources = [
        queued("failed", "FAILED", "marin-main"),
        queued("active", "ACTIVE", "marin-main"),
        queued("shared", "SUSPENDED", "marin-main", "other"),
        queued("other", "FAILED", "other"),
        queued("bare", "FAILED"),
    ]

    spent = find_spent(resources, "marin-main")

    assert spent == [Dead(resource="projects/p/locations/z/queuedResources/failed", why="queued resource FAILED")]


def test_parse_node_reads_nanoseconds_and_lacks() -> None:
    assert parse_node({"name": "a/b", "createTime": "2026-11-20T10:00:00.123456789Z"}) == TpuNode(
        resource="a/b", state="STATE_UNSPECIFIED", created_at=datetime(2026, 11, 20, 10, 0, 0, 123456, tzinfo=UTC)
    )
    assert parse_node({"name": "a/b", "state": "READY", "labels": {"a": "b"}}).created_at is None


# acting


@pytest.fixture
def server() -> Iterator[TpuServer]:
    fake = TpuServer(page=2).start()
    yield fake
    fake.stop()


@pytest.fixture
def reaper(server: TpuServer) -> Reaper:
    return Reaper(GoogleApi(server=server.url), project=server.project, zone=server.zone)


def test_reaper_reads_every_page_and_deletes_only_what_is_dead(server: TpuServer, reaper: Reaper) -> None:
    states = ["PREEMPTED", "READY", "PREEMPTED", "CREATING", "READY", "PREEMPTED", "TERMINATED"]
    for number, state in enumerate(states):
        server.add_node(f"n-{number}", state, labels=labels())
    server.add_node("theirs", "PREEMPTED", labels=labels("other"))

    plan = reaper.plan("marin-main", datetime(2026, 11, 20, 10, 30, tzinfo=UTC))

    assert [each.name for each in plan.dead] == ["n-0", "n-2", "n-5", "n-6"]
    assert [reaper.remove(each) for each in plan.dead] == [None] * 4
    assert names_of(server.nodes) == ["n-1", "n-3", "n-4", "theirs"]
    assert plan.live == {"v4": 3}
    assert server.refused == []


def test_reaper_counts_a_node_that_went_by_itself_as_removed(server: TpuServer, reaper: Reaper) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())
    [dead] = reaper.plan("marin-main", NOW).dead
    server.nodes.clear()

    assert reaper.remove(dead) is None


def test_reaper_returns_why_a_deletion_failed(server: TpuServer, reaper: Reaper) -> None:
    for name in ("n-0", "n-1", "n-2"):
        server.add_node(name, "PREEMPTED", labels=labels())
    server.undeletable.add("n-1")

    errors = [reaper.remove(each) for each in reaper.plan("marin-main", NOW).dead]

    assert names_of(server.nodes) == ["n-1"]
    assert [error is None for error in errors] == [True, False, True]
    assert "unable to queue the operation" in str(errors[1])


def test_reaper_removes_queued_resources_that_give_no_node(server: TpuServer, reaper: Reaper) -> None:
    name = f"{server.parent}/queuedResources/q"
    spec = {"parent": server.parent, "node": {"labels": labels()}}
    server.queued[name] = {"name": name, "state": {"state": "SUSPENDED"}, "tpu": {"nodeSpec": [spec]}}

    [dead] = reaper.plan("marin-main", NOW).dead

    assert dead == Dead(resource=name, why="queued resource SUSPENDED")
    assert reaper.remove(dead) is None
    assert server.queued == {}
    assert server.log[-1].path.endswith("?force=true")


def test_reaper_without_the_right_to_list_says_so(server: TpuServer, reaper: Reaper) -> None:
    server.permissions = {"tpu.nodes.delete"}

    with pytest.raises(GoogleRefused) as refused:
        reaper.plan("marin-main", NOW)
    assert refused.value.status == 403


# the command


CLUSTER = ClusterOutput(
    head="ray-marin-main-head-0123abcd-compute",
    cluster_name="marin-main",
    zone="us-central2-b",
    internal_ip="10.64.0.2",
    image="i@sha256:0",
    pools={"v4": {"accelerator": "v4-8", "min": 4, "max": 8.0}, "v5e": {"max": 2}},
    worker_identity="n@p",
    config_sha256="0",
)
OUTPUTS = StackOutputs(stack="marin", project="p-1", clusters={"main": CLUSTER})


@pytest.fixture
def run(server: TpuServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*args: str, outputs: StackOutputs = OUTPUTS) -> tuple[int, str, str]:
        contract = tmp_path / "contract.json"
        contract.write_text(encode_outputs(outputs))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("RUNTIME_GOOGLE_API", server.url)
        monkeypatch.setenv("RUNTIME_OUTPUTS", str(contract))
        code = main(["cluster", "reap", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_reap_removes_and_says_what_lives(server: TpuServer, run: Run) -> None:
    for name, state in (("n-0", "PREEMPTED"), ("n-1", "READY"), ("n-2", "READY")):
        server.add_node(name, state, labels=labels())

    code, out, err = run()

    assert (code, out) == (0, "main\tn-0\tv4\tpreempted\tremoved\n")
    assert "main: 1 removed; 2 of at most 10 nodes live\n" in err
    assert names_of(server.nodes) == ["n-1", "n-2"]
    assert run()[:2] == (0, "")


def test_reap_dry_run_removes_nothing(server: TpuServer, run: Run) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())

    code, out, err = run("--dry-run")

    assert (code, out) == (0, "main\tn-0\tv4\tpreempted\twould be removed\n")
    assert "main: 1 to remove; 0 of at most 10 nodes live\n" in err
    assert names_of(server.nodes) == ["n-0"]


def test_reap_as_json_is_one_object_for_each_cluster(server: TpuServer, run: Run) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())
    server.add_node("n-1", "READY", labels=labels(pool="v5e"))

    code, out, _ = run("-o", "json")

    row = {"cluster": "main", "name": "n-0", "pool": "v4", "why": "preempted", "removed": True, "error": None}
    assert (code, json.loads(out)) == (
        0,
        [
            {
                "cluster": "main",
                "dry_run": False,
                "removed": [row],
                "failed": [],
                "live": {"v5e": 1},
                "max": {"v4": 8, "v5e": 2},
            }
        ],
    )
    assert differences(documented()["runtime cluster reap -o json"], json.loads(out)) == []


def test_reap_that_cannot_remove_one_removes_the_rest_and_exits_with_3(server: TpuServer, run: Run) -> None:
    for name in ("n-0", "n-1"):
        server.add_node(name, "PREEMPTED", labels=labels())
    server.undeletable.add("n-0")

    code, out, err = run()

    assert code == 3
    assert [line.split("\t")[1] for line in out.splitlines()] == ["n-1", "n-0"]
    assert "1 could not be removed" in err
    assert names_of(server.nodes) == ["n-0"]


def test_reap_says_when_more_live_than_the_pools_allow(server: TpuServer, run: Run) -> None:
    for number in range(11):
        server.add_node(f"n-{number}", "READY", labels=labels())

    assert "11 of at most 10 nodes live: more than the pools allow" in run()[2]


@pytest.mark.parametrize(
    ("args", "outputs", "words"),
    [
        (["--cluster", "mian"], OUTPUTS, "did you mean `main`?"),
        ([], StackOutputs(stack="dev", project="p-1"), "stack `dev` has no Ray cluster"),
        ([], StackOutputs(stack="marin", clusters={"main": CLUSTER}), "names no Google project"),
        (["--longest-creation", "soon"], OUTPUTS, "--longest-creation"),
    ],
)
def test_reap_that_was_asked_wrongly_is_refused(run: Run, args: list[str], outputs: StackOutputs, words: str) -> None:
    code, out, err = run(*args, outputs=outputs)

    assert (code, out) == (2, "")
    assert words in err


def test_reap_without_rights_is_explained(server: TpuServer, run: Run) -> None:
    server.permissions = set()

    code, out, err = run()

    assert (code, out) == (3, "")
    assert "tpu.nodes.list" in err
    assert "Traceback" not in err


# the fake


def test_fake_refuses_unknown_fields_taken_names_and_what_is_not_allowed(server: TpuServer) -> None:
    api = GoogleApi(server=server.url)
    path = f"v2alpha1/{server.parent}/nodes"
    good = {"acceleratorType": "v4-8", "runtimeVersion": "r"}

    def refusal(body: dict[str, object], name: str = "n-1") -> tuple[int, str]:
        with pytest.raises(GoogleRefused) as refused:
            api.post("tpu", path, body, nodeId=name)
        return refused.value.status, refused.value.reason

    assert refusal({**good, "accelerator": "v4-8"}) == (400, "INVALID_ARGUMENT")
    assert refusal({**good, "serviceAccount": {"scopes": []}}) == (400, "INVALID_ARGUMENT")
    assert refusal({**good, "schedulingConfig": {"preemptible": "yes"}}) == (400, "INVALID_ARGUMENT")
    assert refusal({"runtimeVersion": "r"}) == (400, "INVALID_ARGUMENT")
    assert refusal(good, "Upper") == (400, "INVALID_ARGUMENT")
    assert server.nodes == {}

    operation = api.post("tpu", path, good, nodeId="n-1")
    assert server.nodes[f"{server.parent}/nodes/n-1"]["state"] == "CREATING"
    assert refusal(good) == (409, "ALREADY_EXISTS")
    assert api.get("tpu", f"v2alpha1/{operation['name']}")["done"] is True
    assert server.nodes[f"{server.parent}/nodes/n-1"]["state"] == "READY"
    server.permissions = {"tpu.nodes.list"}
    assert refusal(good, "n-2") == (403, "PERMISSION_DENIED")
