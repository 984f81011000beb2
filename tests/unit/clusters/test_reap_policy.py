"""The decisions of the reaper: which nodes and queued resources count as dead, from lists and a clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from infra.render.cluster import chips_per_host
from runtime.clusters.nodes import QueuedResource, TpuNode, ZoneView, count_chips, count_hosts, parse_heads, parse_node
from runtime.clusters.reap_policy import (
    DeadResource,
    ReapTimes,
    Suspicion,
    count_live,
    find_billed,
    find_dead,
    find_headless,
    find_incomplete_slices,
    find_orphans,
    find_spent,
    plan_reaping,
    render_add,
)
from tests.cluster_support import NOW, PARENT, labels, member, member_labels, node, ours

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
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
"""Every state in the API."""


def queued(name: str, state: str, *clusters: str, **its: dict[str, str]) -> QueuedResource:
    """Return a queued resource for one node of each cluster, or for one with the `labels`."""
    nodes = (*(labels(each) for each in clusters), *its.values())
    return QueuedResource(resource=f"{PARENT}/queuedResources/{name}", state=state, labels=nodes)


# at first sight


def test_find_dead_takes_exactly_the_states_that_never_come_back() -> None:
    dead = find_dead([node(state, state) for state in STATES], "marin-main", NOW)

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
        node("PREEMPTED", "bare", labels={}),
    ]

    assert find_dead([*others, mine], "marin-main", NOW) == [
        DeadResource(resource=mine.resource, why="preempted", kind="preempted", pool="v4", state="PREEMPTED")
    ]


@pytest.mark.parametrize(("until", "dead"), [(MINUTE, False), (timedelta(), True), (-MINUTE, True), (None, True)])
def test_find_dead_leaves_a_member_in_creation_to_the_call_that_still_waits_for_it(
    until: timedelta | None, dead: bool
) -> None:
    signed = {} if until is None else {"runtime-maker-until": str(int((NOW + until).timestamp()))}
    made = member("CREATING", age=2 * HOUR, labels={**member_labels("eval"), **signed})
    pool = node("CREATING", age=2 * HOUR, labels=labels(**signed))

    assert [each.name for each in find_dead([made, pool], "marin-main", NOW)] == ["eval"] * dead + ["n"]


@pytest.mark.parametrize(
    ("age", "why"),
    [(timedelta(minutes=59), None), (HOUR, None), (HOUR + MINUTE, "creating for 1h1m")],
)
def test_find_dead_takes_a_node_that_is_made_for_too_long(age: timedelta, why: str | None) -> None:
    dead = find_dead([node("CREATING", age=age)], "marin-main", NOW)

    assert [each.why for each in dead] == ([why] if why else [])


def test_find_dead_leaves_a_node_in_creation_whose_age_is_unknown() -> None:
    made = TpuNode(resource=f"{PARENT}/nodes/n", state="CREATING", labels=labels())

    assert find_dead([made], "marin-main", NOW + timedelta(days=9)) == []


def test_count_live_counts_what_ray_counts_by_pool() -> None:
    nodes = [node(state) for state in STATES] + [node("READY", pool="v5e"), node("READY", cluster="other")]

    assert count_live(nodes, "marin-main") == {"v4": 4, "v5e": 1}


def test_find_spent_takes_queued_resources_of_this_cluster_alone() -> None:
    resources = [
        queued("failed", "FAILED", "marin-main"),
        queued("active", "ACTIVE", "marin-main"),
        queued("shared", "SUSPENDED", "marin-main", "other"),
        queued("other", "FAILED", "other"),
        queued("bare", "FAILED"),
    ]

    assert [(each.name, each.why) for each in find_spent(resources, "marin-main")] == [
        ("failed", "queued resource FAILED")
    ]


@pytest.mark.parametrize(
    ("heads", "orphans"),
    [
        (None, []),
        ({}, []),
        ({"marin-main": None}, []),
        ({"marin-main": NOW - 3 * HOUR}, []),
        ({"marin-main": NOW - 2 * HOUR + MINUTE}, ["old"]),
        ({"marin-main": NOW - 2 * HOUR}, []),
        ({"marin-main": NOW - MINUTE}, ["old", "young"]),
        ({"other": NOW}, []),
    ],
)
def test_find_orphans_takes_nodes_that_are_older_than_the_head(
    heads: dict[str, datetime | None] | None, orphans: list[str]
) -> None:
    nodes = (
        node("READY", "old", age=2 * HOUR),
        node("READY", "young", age=30 * MINUTE),
        node("READY", "theirs", age=2 * HOUR, cluster="other-2"),
        node("DELETING", "going", age=2 * HOUR),
    )

    found = find_orphans(ZoneView(nodes=nodes, heads=heads), "marin-main")

    assert [each.name for each in found] == orphans
    assert {each.why for each in found} <= {"made for an older head"}


# suspects


@pytest.mark.parametrize(
    ("accelerator", "hosts"),
    [
        ("v2-8", 1),
        ("v2-32", 4),
        ("v4-8", 1),
        ("v4-16", 2),
        ("v4-128", 16),
        ("v5p-16", 2),
        ("v5litepod-1", 1),
        ("v5litepod-8", 1),
        ("v5litepod-16", 4),
        ("v6e-4", 1),
        ("v6e-256", 64),
        ("v99-8", None),
        ("", None),
    ],
)
def test_count_hosts_knows_the_machines_of_a_slice(accelerator: str, hosts: int | None) -> None:
    assert count_hosts(accelerator) == hosts


@pytest.mark.parametrize(
    "accelerator", ["v2-8", "v3-32", "v4-8", "v4-64", "v5p-128", "v5litepod-8", "v5litepod-64", "v6e-1", "v6e-16"]
)
def test_count_hosts_agrees_with_the_chips_that_a_host_has_in_the_rendered_file(accelerator: str) -> None:
    family, _, size = accelerator.partition("-")
    chips = int(size) if family in ("v5litepod", "v6e") else int(size) // 2

    assert (count_hosts(accelerator) or 0) * chips_per_host(accelerator) == chips
    assert count_chips(accelerator) == chips_per_host(accelerator)


def test_find_incomplete_slices_takes_running_slices_with_fewer_hosts_than_their_type() -> None:
    four, three = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"), ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    nodes = [
        node("READY", "whole", accelerator="v4-32", addresses=four),
        node("READY", "lacks", accelerator="v4-32", addresses=three),
        node("READY", "twice", accelerator="v4-16", addresses=("10.0.0.1", "10.0.0.1")),
        node("CREATING", "new", accelerator="v4-32"),
        node("REPAIRING", "mending", accelerator="v4-32", addresses=three),
        node("READY", "single", accelerator="v4-8"),
        node("READY", "unknown", accelerator="v99-64"),
        node("READY", "theirs", accelerator="v4-32", cluster="other"),
    ]

    assert [(each.name, each.what) for each in find_incomplete_slices(nodes, "marin-main")] == [
        ("lacks", "lacks 1 of 4 hosts"),
        ("twice", "lacks 1 of 2 hosts"),
    ]


@pytest.mark.parametrize(
    ("heads", "found"),
    [
        (None, []),
        ({"marin-main": NOW}, ["destroyed"]),
        ({"marin-main": NOW, "dev-main": NOW}, []),
        ({}, ["mine", "destroyed"]),
    ],
)
def test_find_headless_takes_what_is_ours_alone(heads: dict[str, datetime | None] | None, found: list[str]) -> None:
    nodes = (
        node("READY", "mine"),
        node("READY", "destroyed", labels=ours("dev-main")),
        node("READY", "somebodys", cluster="their-own-cluster"),
        node("READY", "bare", labels={"managed-by": "research-runtime"}),
        node("DELETING", "going", labels=ours("dev-main")),
    )
    asked = (
        queued("destroyed-q", "WAITING_FOR_RESOURCES", labels=ours("dev-main")),
        queued("somebodys-q", "ACTIVE", "their-own-cluster"),
        queued("bare-q", "ACTIVE"),
    )

    suspects = find_headless(ZoneView(nodes=nodes, queued=asked, heads=heads), "marin-main")

    assert [each.name for each in suspects] == [*found, *(["destroyed-q"] if "destroyed" in found else [])]


@pytest.mark.parametrize(
    ("suspect", "suspicion", "bound", "why"),
    [
        (node("DELETING"), Suspicion.DELETING, 15 * MINUTE, "is being deleted for 15m"),
        (node("READY", accelerator="v4-16"), Suspicion.INCOMPLETE, 10 * MINUTE, "lacks 2 of 2 hosts for 10m"),
        (
            node("READY", labels=ours("dev-main")),
            Suspicion.HEADLESS,
            10 * MINUTE,
            "cluster `dev-main` of stack `gone` has no head for 10m",
        ),
    ],
)
def test_plan_removes_a_suspect_after_its_time_and_not_before(
    suspect: TpuNode, suspicion: Suspicion, bound: timedelta, why: str
) -> None:
    view = ZoneView(nodes=(suspect,), heads={"marin-main": NOW - HOUR})

    first = plan_reaping(view, "marin-main", NOW, seen={})
    before = plan_reaping(view, "marin-main", NOW + bound - timedelta(seconds=1), seen=first.seen)
    after = plan_reaping(view, "marin-main", NOW + bound, seen=before.seen)

    assert (first.dead, [each.until for each in first.waiting]) == ((), [NOW + bound])
    assert (before.dead, before.seen) == ((), {f"{suspicion} {suspect.resource}": NOW})
    assert ([each.why for each in after.dead], after.waiting) == ([why], ())


def test_plan_begins_to_wait_again_after_a_slice_was_whole() -> None:
    lacks = ZoneView(nodes=(node("READY", accelerator="v4-16", addresses=("10.0.0.1",)),))
    whole = ZoneView(nodes=(node("READY", accelerator="v4-16", addresses=("10.0.0.1", "10.0.0.2")),))

    seen = plan_reaping(lacks, "marin-main", NOW, seen={}).seen
    seen = plan_reaping(whole, "marin-main", NOW + 9 * MINUTE, seen=seen).seen
    plan = plan_reaping(lacks, "marin-main", NOW + 11 * MINUTE, seen=seen)

    assert (plan.dead, [each.until for each in plan.waiting]) == ((), [NOW + 21 * MINUTE])


def test_plan_after_the_clock_was_set_back_waits_from_now() -> None:
    view = ZoneView(nodes=(node("READY", accelerator="v4-16"),))
    ahead = plan_reaping(view, "marin-main", NOW + timedelta(days=1), seen={}).seen

    plan = plan_reaping(view, "marin-main", NOW, seen=ahead)

    assert [each.until for each in plan.waiting] == [NOW + 10 * MINUTE]


def test_plan_names_each_thing_once_and_leaves_nodes_to_their_queued_resource() -> None:
    failed = queued("q", "FAILED", "marin-main")
    nodes = (
        node("PREEMPTED", "twice", age=2 * HOUR),
        node("PREEMPTED", "asked", queued_resource=failed.resource),
    )

    plan = plan_reaping(
        ZoneView(nodes=nodes, queued=(failed,), heads={"marin-main": NOW - HOUR}), "marin-main", NOW, seen={}
    )

    assert [(each.name, each.why) for each in plan.dead] == [("twice", "preempted"), ("q", "queued resource FAILED")]


def test_plan_with_other_bounds_waits_for_them() -> None:
    view = ZoneView(nodes=(node("CREATING", age=20 * MINUTE), node("READY", "l", accelerator="v4-16")))

    plan = plan_reaping(
        view, "marin-main", NOW, seen={}, bounds=ReapTimes(creation=10 * MINUTE, incomplete=timedelta())
    )

    assert [each.name for each in plan.dead] == ["l", "n"]


def test_find_billed_takes_everything_of_the_cluster_in_any_state() -> None:
    waiting = queued("q", "WAITING_FOR_RESOURCES", "marin-main")
    view = ZoneView(
        nodes=(
            node("READY", "a"),
            node("PREEMPTED", "b"),
            node("READY", "asked", queued_resource=waiting.resource),
            node("READY", "head", kind="head"),
            node("READY", "theirs", cluster="other"),
        ),
        queued=(waiting, queued("other", "ACTIVE", "other")),
    )

    assert [(each.name, each.why) for each in find_billed(view, "marin-main")] == [
        ("q", "queued resource WAITING_FOR_RESOURCES"),
        ("a", "node READY"),
        ("b", "node PREEMPTED"),
    ]


# reading


def test_parse_node_reads_nanoseconds_and_lacks() -> None:
    assert parse_node({"name": "a/b", "createTime": "2026-11-20T10:00:00.123456789Z"}) == TpuNode(
        resource="a/b", state="STATE_UNSPECIFIED", created_at=datetime(2026, 11, 20, 10, 0, 0, 123456, tzinfo=UTC)
    )
    assert parse_node({"name": "a/b", "state": "READY", "labels": {"a": "b"}}).created_at is None
    endpoints = [{"ipAddress": "10.0.0.1", "port": 8470}, {"port": 8470}]
    assert parse_node({"name": "a/b", "networkEndpoints": endpoints}).addresses == ("10.0.0.1",)


def test_parse_heads_takes_the_older_of_two_and_no_other_machine() -> None:
    def instance(cluster: str, made: str | None, kind: str = "head") -> dict[str, object]:
        return {"labels": labels(cluster, kind=kind), **({"creationTimestamp": made} if made else {})}

    heads = parse_heads(
        [
            instance("a", "2026-11-20T02:00:00.000-08:00"),
            instance("a", "2026-11-20T04:00:00.000-08:00"),
            instance("b", None),
            instance("c", "2026-11-20T04:00:00.000-08:00", kind="worker"),
            {"name": "bare"},
        ]
    )

    assert heads == {"a": datetime(2026, 11, 20, 10, tzinfo=UTC), "b": None}


# members


def test_plan_treats_members_like_nodes_but_for_older_heads_and_pools() -> None:
    nodes = (
        member("PREEMPTED", "lost", capacity="spot"),
        member("READY", "old", age=2 * HOUR, addresses=("10.0.0.1", "10.0.0.2")),
        member("CREATING", "stuck", age=2 * HOUR),
        member("READY", "half", addresses=("10.0.0.3",)),
        member("PREEMPTED", "stranger", labels=member_labels("stranger", "dev-main")),
        node("READY", "n"),
    )
    view = ZoneView(nodes=nodes, heads={"marin-main": NOW - HOUR, "dev-main": NOW - HOUR})

    plan = plan_reaping(view, "marin-main", NOW, seen={})

    assert [(each.name, each.pool, each.kind, each.again) for each in plan.dead] == [
        ("lost", "member lost", "preempted", "runtime cluster add v4-16 --name lost --capacity spot"),
        ("stuck", "member stuck", "creating", "runtime cluster add v4-16 --name stuck --capacity on_demand"),
    ]
    assert [(each.suspect.name, each.suspect.what) for each in plan.waiting] == [("half", "lacks 1 of 2 hosts")]
    assert plan.live == {"v4": 1}


def test_member_whose_cluster_has_no_head_is_removed_by_others() -> None:
    nodes = (member("READY", "gone", labels=member_labels("gone", "dev-main"), addresses=("10.0.0.1", "10.0.0.2")),)
    view = ZoneView(nodes=nodes, heads={"marin-main": NOW - HOUR})

    [waiting] = plan_reaping(view, "marin-main", NOW, seen={}).waiting

    assert (waiting.suspect.name, waiting.suspect.suspicion) == ("gone", Suspicion.HEADLESS)


@pytest.mark.parametrize("edited", [{}, {"runtime-member": "other"}])
def test_member_whose_label_was_edited_is_known_by_its_nodes_name(edited: dict[str, str]) -> None:
    left = {key: value for key, value in member_labels("eval").items() if key != "runtime-member"}
    view = ZoneView(nodes=(member("PREEMPTED", labels={**left, **edited}),), heads={})

    [dead] = plan_reaping(view, "marin-main", NOW, seen={}).dead

    assert (dead.name, dead.pool) == ("eval", "member eval")
    assert [each.name for each in find_billed(view, "marin-main")] == ["eval"]


def test_command_that_makes_a_member_again_names_its_reservation() -> None:
    reservation = "projects/p/locations/z/reservations/r"

    assert render_add(member("PREEMPTED", capacity="reserved", reservation=reservation)) == (
        f"runtime cluster add v4-16 --name eval --capacity reserved --reservation {reservation}"
    )


@pytest.mark.parametrize("missing", ["managed-by", "runtime-cluster"])
def test_node_that_lacks_a_label_of_members_belongs_to_no_cluster(missing: str) -> None:
    labels = {key: value for key, value in member_labels("eval").items() if key != missing}
    bare = member("PREEMPTED", labels=labels)

    assert (bare.member, bare.cluster) == (None, None)
    assert plan_reaping(ZoneView(nodes=(bare,), heads={}), "marin-main", NOW, seen={}).dead == ()


def test_everything_that_costs_money_includes_members() -> None:
    view = ZoneView(nodes=(member("READY"), node("READY", "n"), member("READY", "x", labels=member_labels("x", "o"))))

    assert [each.name for each in find_billed(view, "marin-main")] == ["eval", "n"]
