"""The reaper at work: what it reads, deletes and reads back, and the runs that follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from infra.render import units
from runtime.clusters.reap_policy import DeadResource
from runtime.clusters.reaper import Reaper, Removal, reap_once
from runtime.clusters.reaper_state import ReaperState
from runtime.stack.google_api import GoogleApi, GoogleRefused
from tests.cluster_support import NOW, labels, ours
from tests.fakes.google import Refusal
from tests.fakes.tpu import TpuServer, names_of
from tests.infra.render_support import sample_cluster

HEAD_MADE = "2026-11-20T09:00:00.000-00:00"
"""An hour before the nodes of the fake."""
TOO_MANY = Refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric")


@dataclass
class Pauses:
    """Stands in for `time.sleep`, and notes how long it was asked to wait."""

    taken: list[float] = field(default_factory=list)

    def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)


@pytest.fixture
def server() -> Iterator[TpuServer]:
    fake = TpuServer(page=2)
    fake.add_instance({"name": "head", "labels": labels(kind="head")}, created=HEAD_MADE)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
def reaper(server: TpuServer, pauses: Pauses) -> Reaper:
    return Reaper(GoogleApi(server=server.url, again=False), project=server.project, zone=server.zone, sleep=pauses)


def dead(server: TpuServer, name: str, kind: str = "nodes") -> DeadResource:
    return DeadResource(resource=f"{server.parent}/{kind}/{name}", why="w", kind="preempted")


def test_reaper_reads_every_page_and_deletes_only_what_is_dead(server: TpuServer, reaper: Reaper) -> None:
    states = ["PREEMPTED", "READY", "PREEMPTED", "CREATING", "READY", "PREEMPTED", "TERMINATED"]
    for number, state in enumerate(states):
        server.add_node(f"n-{number}", state, labels=labels())
    server.add_node("theirs", "PREEMPTED", labels=labels("other"))

    run, memory = reap_once(reaper, "marin-main", ReaperState(), datetime(2026, 11, 20, 10, 30, tzinfo=UTC))

    assert [(each.dead.name, each.gone, each.error) for each in run.removals] == [
        (name, True, None) for name in ("n-0", "n-2", "n-5", "n-6")
    ]
    assert names_of(server.nodes) == ["n-1", "n-3", "n-4", "theirs"]
    assert run.plan is not None
    assert run.plan.live == {"v4": 3}
    assert memory == ReaperState(
        looked_at=datetime(2026, 11, 20, 10, 30, tzinfo=UTC), removed={"preempted": 3, "terminated": 1}
    )
    assert server.refused == []


def test_reaper_removes_what_an_older_head_and_a_destroyed_stack_left(server: TpuServer, reaper: Reaper) -> None:
    server.add_node("old", "READY", labels=labels(), createTime="2026-11-20T08:59:59Z")
    server.add_node("new", "READY", labels=labels())
    server.add_node("left", "READY", labels=ours("dev-main"))
    server.add_node("somebodys", "READY", labels=labels("their-own"))

    first, memory = reap_once(reaper, "marin-main", ReaperState(), NOW)
    second, memory = reap_once(reaper, "marin-main", memory, NOW + timedelta(minutes=10))

    assert [each.dead.name for each in first.removals] == ["old"]
    assert [each.dead.why for each in second.removals] == ["cluster `dev-main` of stack `gone` has no head for 10m"]
    assert names_of(server.nodes) == ["new", "somebodys"]
    assert memory.seen == {}


def test_reaper_that_cannot_list_heads_reaps_without_looking_for_orphans(server: TpuServer, reaper: Reaper) -> None:
    server.permissions = {"tpu.nodes.list", "tpu.nodes.delete"}
    server.add_node("old", "READY", labels=labels(), createTime="2026-11-20T08:59:59Z")
    server.add_node("n-0", "PREEMPTED", labels=labels())

    run, _ = reap_once(reaper, "marin-main", ReaperState(), NOW)

    assert [each.dead.name for each in run.removals] == ["n-0"]
    assert run.view is not None
    assert "compute.instances.list" in str(run.view.no_heads)


def test_reaper_counts_a_node_that_went_by_itself_as_removed(server: TpuServer, reaper: Reaper) -> None:
    assert reaper.remove([dead(server, "n-0")]) == [Removal(dead=dead(server, "n-0"), gone=True)]


def test_reaper_returns_why_a_deletion_failed_and_removes_the_rest(server: TpuServer, reaper: Reaper) -> None:
    for name in ("n-0", "n-1", "n-2"):
        server.add_node(name, "PREEMPTED", labels=labels())
    server.undeletable.add("n-1")

    run, memory = reap_once(reaper, "marin-main", ReaperState(), NOW)

    assert names_of(server.nodes) == ["n-1"]
    assert [each.error is None for each in run.removals] == [True, False, True]
    assert "unable to queue the operation" in str(run.removals[1].error)
    assert (memory.failed, memory.removed, memory.wait_until) == (1, {"preempted": 2}, None)


def test_reaper_reads_back_that_an_accepted_deletion_did_nothing(
    server: TpuServer, reaper: Reaper, pauses: Pauses
) -> None:
    for name in ("n-0", "n-1"):
        server.add_node(name, "PREEMPTED", labels=labels())
    server.stubborn.add("n-0")

    run, memory = reap_once(reaper, "marin-main", ReaperState(), NOW)

    assert [(each.dead.name, each.error) for each in run.removals] == [
        ("n-0", "still PREEMPTED 17 s after google accepted its deletion"),
        ("n-1", None),
    ]
    assert pauses.taken == [2.0, 5.0, 10.0]
    assert memory.failed == 1


def test_reaper_takes_a_deletion_that_google_began_as_done_and_asks_again_if_it_hangs(
    server: TpuServer, reaper: Reaper, pauses: Pauses
) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())
    server.slow_deletion = True

    first, memory = reap_once(reaper, "marin-main", ReaperState(), NOW)
    runs = []
    for minutes in (1, 15, 16, 17, 31, 32):
        run, memory = reap_once(reaper, "marin-main", memory, NOW + timedelta(minutes=minutes))
        runs.append([each.dead.why for each in run.removals])

    assert [(each.dead.why, each.gone, each.error) for each in first.removals] == [("preempted", False, None)]
    hangs = ["is being deleted for 15m"]
    assert runs == [[], [], hangs, [], [], hangs]
    assert pauses.taken == []


def test_reaper_removes_queued_resources_that_give_no_node_with_their_nodes(server: TpuServer, reaper: Reaper) -> None:
    name = f"{server.parent}/queuedResources/q"
    spec = {"parent": server.parent, "node": {"labels": labels()}}
    server.queued[name] = {"name": name, "state": {"state": "SUSPENDED"}, "tpu": {"nodeSpec": [spec]}}
    server.add_node("n-0", "PREEMPTED", labels=labels(), queuedResource=name)

    run, _ = reap_once(reaper, "marin-main", ReaperState(), NOW)

    assert [(each.dead.why, each.gone) for each in run.removals] == [("queued resource SUSPENDED", True)]
    assert (server.queued, server.nodes) == ({}, {})


def test_reaper_without_the_right_to_list_says_so_and_does_not_wait(server: TpuServer, reaper: Reaper) -> None:
    server.permissions = {"tpu.nodes.delete"}

    run, memory = reap_once(reaper, "marin-main", ReaperState(), NOW)

    assert isinstance(run.error, GoogleRefused)
    assert (run.error.status, run.plan, memory) == (403, None, ReaperState())


# a zone that refuses


def test_reaper_asks_a_zone_that_refuses_less_often_until_it_answers(server: TpuServer, reaper: Reaper) -> None:
    server.refusals["tpu.projects.locations.nodes.list"] = TOO_MANY
    memory, now, waits = ReaperState(), NOW, []
    for _ in range(6):
        run, memory = reap_once(reaper, "marin-main", memory, now)
        assert memory.wait_until is not None
        assert run.waits_until == memory.wait_until
        waits.append((memory.wait_until - now).total_seconds())
        asked = len(server.log)
        between, memory = reap_once(reaper, "marin-main", memory, memory.wait_until - timedelta(seconds=1))
        assert (between.waits_until, between.plan, len(server.log)) == (memory.wait_until, None, asked)
        assert memory.wait_until is not None
        now = memory.wait_until
    server.refusals.clear()
    run, memory = reap_once(reaper, "marin-main", memory, now)

    assert waits == [45, 90, 180, 360, 600, 600]
    assert (run.waits_until, memory) == (None, ReaperState(looked_at=now))


def test_reaper_that_is_refused_in_between_leaves_the_rest_to_the_next_run(server: TpuServer, reaper: Reaper) -> None:
    for number in range(40):
        server.add_node(f"n-{number:02}", "PREEMPTED", labels=labels())
    server.refusals["tpu.projects.locations.nodes.delete"] = TOO_MANY

    run, memory = reap_once(reaper, "marin-main", ReaperState(), NOW)

    assert [each.postponed for each in run.removals] == [False] * 16 + [True] * 24
    assert server.calls().count("tpu.projects.locations.nodes.delete") == 16
    assert memory.wait_until == NOW + timedelta(seconds=45)
    assert (memory.failed, memory.removed) == (16, {})


def test_dry_run_asks_a_zone_that_is_left_alone_and_remembers_nothing(server: TpuServer, reaper: Reaper) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())
    server.add_node("n-1", "DELETING", labels=labels())
    memory = ReaperState(refusals=3, wait_until=NOW + timedelta(minutes=3))

    run, after = reap_once(reaper, "marin-main", memory, NOW, dry_run=True)

    assert run.plan is not None
    assert [each.name for each in run.plan.dead] == ["n-0"]
    assert after == memory
    assert names_of(server.nodes) == ["n-0", "n-1"]


# sizes and times


def test_reaper_reads_a_cluster_of_1024_nodes_in_few_requests(server: TpuServer, reaper: Reaper) -> None:
    server.page = 500
    for number in range(1024):
        server.add_node(
            f"n-{number:04}",
            "PREEMPTED" if number % 256 == 0 else "READY",
            labels=labels(),
            metadata={"startup-script": "x" * 1000},
        )

    run, _ = reap_once(reaper, "marin-main", ReaperState(), NOW)

    calls = server.calls()
    assert run.plan is not None
    assert run.plan.live == {"v4": 1020}
    assert {each: calls.count(each) for each in sorted(set(calls))} == {
        "compute.instances.list": 1,
        "tpu.projects.locations.nodes.delete": 4,
        # Three pages before the deletions, and three to read them back.
        "tpu.projects.locations.nodes.list": 6,
        "tpu.projects.locations.queuedResources.list": 1,
    }
    assert not any("metadata" in request.path for request in server.log)


def read_seconds(timer: str, setting: str) -> float:
    [value] = [line.partition("=")[2] for line in timer.splitlines() if line.startswith(f"{setting}=")]
    assert value.endswith("s")
    return float(value.removesuffix("s"))


def test_dead_node_is_gone_within_two_minutes_at_the_cadence_of_the_heads_timer() -> None:
    _, timer = units.render_reaper(sample_cluster())
    assert "RandomizedDelaySec" not in timer
    between = read_seconds(timer, "OnUnitInactiveSec") + read_seconds(timer, "AccuracySec")
    # Of a run: the container starts, 1,024 nodes are listed (two requests, at most 5 s), the node's deletion is asked
    # for after those of up to 100 others, 16 at a time with 1 s each, and all is read back at once.
    start, lists, deletions, read_back = 5.0, 5.0, 7.0, 5.0

    def removed_after(death: float) -> float:
        clock = 0.0
        while True:
            listed = clock + start  # A node that dies while the lists are read may be missed.
            if death <= listed:
                return listed + lists + deletions - death
            clock = listed + lists + deletions + read_back + between

    worst = max(removed_after(death / 10) for death in range(3000))

    assert worst <= 120
    assert worst == pytest.approx(between + start + lists + deletions + read_back + lists + deletions, abs=0.2)


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
