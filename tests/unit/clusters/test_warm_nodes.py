"""The buffer of idle nodes: what each pool needs, and what the autoscaler is asked for."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from runtime.clusters.nodes import TpuNode
from runtime.clusters.pools import Pool
from runtime.clusters.warm_nodes import Wish, count_asked, merge_request, plan_buffers
from tests.cluster_support import labels, member, node

HOUR = timedelta(hours=1)
POOLS = [Pool(name="v4", accelerator="v4-8", max=4, buffer=2), Pool(name="plain", accelerator="v4-8", min=1, max=4)]


def ready(name: str, *addresses: str, **more: object) -> TpuNode:
    return node("READY", name, age=HOUR, addresses=addresses, **{"accelerator": "v4-8", **more})


def wanted(*nodes: TpuNode, busy: tuple[str, ...] = ()) -> dict[str, tuple[int, int]]:
    """Return pool → busy nodes and nodes that it needs."""
    wishes = plan_buffers(POOLS, nodes, "marin-main", busy)
    return {wish.pool: (wish.busy, wish.wanted) for wish in wishes}


# what a pool needs


def test_pool_without_nodes_needs_its_buffer_and_one_without_a_buffer_nothing() -> None:
    assert plan_buffers(POOLS, (), "marin-main", ()) == (Wish(pool="v4", buffer=2, busy=0, max=4, wanted=2),)


def test_pool_needs_its_buffer_beside_the_busy_nodes_within_its_maximum() -> None:
    nodes = [ready(f"n-{number}", f"10.0.0.{number}") for number in range(4)]

    assert wanted(*nodes, busy=("10.0.0.0",)) == {"v4": (1, 3)}
    assert wanted(*nodes, busy=("10.0.0.0", "10.0.0.1")) == {"v4": (2, 4)}
    assert wanted(*nodes, busy=tuple(f"10.0.0.{number}" for number in range(4))) == {"v4": (4, 4)}


def test_slice_is_one_busy_node_however_many_of_its_hosts_are() -> None:
    slice_ = ready("slice", "10.0.0.1", "10.0.0.2", accelerator="v4-16")

    assert wanted(slice_, busy=("10.0.0.2",)) == wanted(slice_, busy=("10.0.0.1", "10.0.0.2")) == {"v4": (1, 3)}


@pytest.mark.parametrize(
    "other",
    [
        node("PREEMPTED", addresses=("10.0.0.1",)),
        node("DELETING", addresses=("10.0.0.1",)),
        ready("n", "10.0.0.1", pool="plain"),
        ready("n", "10.0.0.1", cluster="marin-other"),
        member("READY", "v4", addresses=("10.0.0.1",)),
    ],
    ids=["preempted", "being deleted", "of another pool", "of another cluster", "member"],
)
def test_node_that_the_autoscaler_does_not_count_in_the_pool_is_not_counted(other: TpuNode) -> None:
    assert wanted(other, busy=("10.0.0.1",)) == {"v4": (0, 2)}


def test_node_in_creation_is_not_busy() -> None:
    assert wanted(node("CREATING", labels=labels())) == {"v4": (0, 2)}


def test_nothing_is_wanted_while_nodes_of_a_removed_pool_live() -> None:
    left = ready("n", "10.0.0.1", pool="gone")

    assert wanted(left) == {"v4": (0, 0)}
    assert (
        wanted(replace(left, state="DELETING")) == wanted(replace(left, labels=labels("marin-other"))) == {"v4": (0, 2)}
    )


# what the autoscaler is asked for


def wish(pool: str, count: int) -> Wish:
    return Wish(pool=pool, buffer=1, busy=0, max=9, wanted=count)


def test_request_has_a_part_for_each_node_and_is_the_same_for_the_same_wishes() -> None:
    request = merge_request([], [wish("v4", 2), wish("v5e", 1)])

    assert request == [{"runtime-pool-v4": 1}, {"runtime-pool-v4": 1}, {"runtime-pool-v5e": 1}]
    assert merge_request(request, [wish("v4", 2), wish("v5e", 1)]) == request
    assert (count_asked(request, "v4"), count_asked(request, "v5"), count_asked([], "v4")) == (2, 0, 0)


def test_request_of_other_programs_stays_and_ours_for_pools_without_a_buffer_goes() -> None:
    others = [{"CPU": 1}, {"CPU": 4, "runtime-pool-v4": 1}, {}]
    before = [{"runtime-pool-old": 1}, *others, {"runtime-pool-v4": 1}]

    assert merge_request(before, [wish("v4", 2)]) == [*others, {"runtime-pool-v4": 1}, {"runtime-pool-v4": 1}]
    assert merge_request(before, []) == others
