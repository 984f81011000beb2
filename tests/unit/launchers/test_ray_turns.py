"""Whose turn it is on Ray: the better claim to a place."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from runtime.jobs.spec import Priority
from runtime.launchers.ray import turns
from runtime.launchers.ray.cluster_state import NodeView
from runtime.launchers.ray.turns import (
    CHANCE_S,
    REST,
    Cause,
    Chances,
    Claim,
    Demand,
    find_better,
    find_spent,
    find_spots,
    give_back,
    list_rivals,
    make_demand,
    mark_spent,
    tell_order,
)
from runtime.values import replace

HOST = {"TPU": 4.0, "TPU-v4-8-head": 1.0, "CPU": 120.0}
NEED = {"TPU": 4.0, "TPU-v4-8-head": 1.0, "CPU": 1.0}
NONE = dict.fromkeys(HOST, 0.0)


def claim(
    owner: str = "ada", priority: str = "normal", waiting: int = 1, holding: int = 0, since: float = 0, **demand: Any
) -> Claim:
    fields = {"job": f"j-{owner}", "kind": "TPU v4-8", "need": NEED, "units": 4.0, **demand}
    return Claim(
        demand=Demand(owner=owner, priority=Priority(priority), **fields),
        waiting=waiting,
        holding=holding,
        since=since,
    )


def hosts(free: int, busy: int = 0) -> dict[str, NodeView]:
    made = [NodeView(total=HOST, free=HOST)] * free + [NodeView(total=HOST, free=NONE)] * busy
    return {f"n{number}": node for number, node in enumerate(made)}


def better(
    mine: Claim, *others: Claim, nodes: dict[str, NodeView] | None = None, place: str = "n0", spare: int = 0
) -> tuple[str, Cause] | None:
    """The job and cause of the better claim to a place of our run."""
    found = find_better(mine, others, [place], nodes or hosts(1, 3), Chances(), now=0, spare=spare)
    return None if found is None else (found.job, found.cause)


# budgets


@pytest.mark.parametrize(
    ("budgets", "spent"),
    [
        ({}, []),
        ({"ada": 12}, []),
        ({"ada": 11}, ["ada"]),
        ({"default": 8}, ["ada"]),
        ({"ada": 100, "default": 0}, ["bob"]),
    ],
)
def test_budgets_count_the_tpu_chips_of_all_types_and_concern_no_other_runs(
    budgets: dict[str, float], spent: list[str]
) -> None:
    mine = claim("ada", "urgent", holding=1)
    of_mine = claim("ada", holding=1, waiting=0, kind="TPU v5litepod-8", units=7.0)
    on_cpus = claim("ada", kind="CPU", need={"CPU": 1.0}, units=1.0, holding=50)
    claims = [mine, claim("bob"), claim(""), on_cpus, of_mine]

    found = find_spent(claims, budgets)

    assert list(found) == spent
    assert {each.held for each in found.values()} <= {11.0, 0.0}
    marked = [each.demand.owner for each in mark_spent(claims, found) if each.spent]
    assert marked == [each.demand.owner for each in (mine, claims[1], of_mine) if each.demand.owner in spent]


def spend(claim: Claim) -> Claim:
    return replace(claim, spent=True)


BUDGETS: list[tuple[str, Claim, Claim, tuple[str, Cause] | None]] = [
    ("within before over", spend(claim("ada")), claim("bob", holding=8), ("j-bob", Cause.BUDGET)),
    ("a lower priority within", spend(claim("ada", "urgent")), claim("bob", "low", holding=8), ("j-bob", Cause.BUDGET)),
    ("a higher priority within", spend(claim("ada")), claim("bob", "high", holding=8), ("j-bob", Cause.PRIORITY)),
    ("over behind within", claim("ada", "low", holding=8), spend(claim("bob", "urgent")), None),
    ("the higher one of two over", spend(claim("ada")), spend(claim("bob", "high")), ("j-bob", Cause.PRIORITY)),
    ("the lower one of two over", spend(claim("ada", "high", holding=2)), spend(claim("bob")), None),
    ("the smaller share of two over", spend(claim("ada", holding=3)), spend(claim("bob")), ("j-bob", Cause.SHARE)),
    (
        "one's own higher one",
        spend(claim("ada", "low")),
        spend(claim("ada", "high", job="j-x")),
        ("j-x", Cause.PRIORITY),
    ),
]


@pytest.mark.parametrize(
    ("mine", "other", "expected"), [case[1:] for case in BUDGETS], ids=[case[0] for case in BUDGETS]
)
def test_place_goes_to_who_is_within_the_budget_first(
    mine: Claim, other: Claim, expected: tuple[str, Cause] | None
) -> None:
    assert better(mine, other) == expected


def test_budget_that_is_used_up_from_time_to_time_gives_a_stuck_claim_no_new_hour() -> None:
    chances, stuck = Chances(), claim("bob", "high")
    ours = claim("ada", "normal"), claim("ada", "urgent", job="j-ada")

    def is_kept(now: float, mine: Claim) -> bool:
        return find_better(mine, [stuck], ["n0"], hosts(1), chances, now=now) is not None

    # For an urgent run it goes first by the budget alone, and for half a minute; for a normal one by its priority.
    assert is_kept(0, ours[0])
    assert is_kept(3500, spend(ours[1]))
    assert not is_kept(3531, spend(ours[1]))
    assert is_kept(3540, ours[0])
    assert not is_kept(3601, ours[0])
    assert is_kept(3900, spend(ours[1]))
    assert not is_kept(3931, ours[0])


# priority and shares

CASES: list[tuple[str, Claim, list[Claim], tuple[str, Cause] | None]] = [
    ("nobody else", claim(), [], None),
    ("a higher priority", claim(), [claim("bob", "high")], ("j-bob", Cause.PRIORITY)),
    ("a lower priority", claim(), [claim("bob", "low")], None),
    ("one's own higher run", claim(), [claim("ada", "urgent", job="j-x")], ("j-x", Cause.PRIORITY)),
    ("a higher one that holds more", claim(), [claim("bob", "high", holding=9)], ("j-bob", Cause.PRIORITY)),
    ("a higher one that does not wait", claim(), [claim("bob", "high", waiting=0, holding=3)], None),
    ("a higher one of another kind", claim(), [claim("bob", "high", kind="CPU", need={"CPU": 1.0})], None),
    ("the highest of several", claim(), [claim("bob", "high"), claim("eve", "urgent")], ("j-eve", Cause.PRIORITY)),
    ("equal shares", claim(holding=1), [claim("bob", holding=1)], None),
    ("equal shares of nothing", claim(), [claim("bob")], None),
    ("a smaller share", claim(holding=1), [claim("bob")], ("j-bob", Cause.SHARE)),
    ("a larger share", claim(), [claim("bob", holding=1)], None),
    ("a share that would then be larger", claim(holding=1), [claim("bob", units=8.0)], None),
    ("the smallest share", claim(holding=3), [claim("bob", holding=1), claim("eve")], ("j-eve", Cause.SHARE)),
    ("the same owner", claim(holding=5), [claim("ada", job="j-x")], None),
    (
        "a share with another job of its owner",
        claim(holding=2),
        [claim("bob"), claim("bob", "low", waiting=0, holding=2, job="j-x")],
        None,
    ),
    (
        "the older of two",
        claim(),
        [claim("bob", "high", since=2), claim("eve", "high", since=1)],
        ("j-eve", Cause.PRIORITY),
    ),
    ("priority before share", claim(holding=1), [claim("bob"), claim("eve", "high")], ("j-eve", Cause.PRIORITY)),
]


@pytest.mark.parametrize(("mine", "others", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_place_goes_to_the_better_claim(mine: Claim, others: list[Claim], expected: tuple[str, Cause] | None) -> None:
    assert better(mine, *others) == expected


def test_no_claims_are_better_than_each_other_in_a_circle() -> None:
    grades = list(itertools.product(range(3), (1.0, 2.0, 3.0)))
    for chosen in itertools.product(grades, repeat=3):
        three = [
            claim(owner, holding=holding, units=units) for owner, (holding, units) in zip("abc", chosen, strict=True)
        ]
        beats = {
            mine.demand.job: {each.demand.job for each, _ in list_rivals(mine, [one for one in three if one != mine])}
            for mine in three
        }
        # One of them gives way to nobody, and so on among the rest: there is an order.
        while beats:
            free = [job for job, over in beats.items() if not over & beats.keys()]
            assert free, three
            del beats[free[0]]


def test_places_that_became_free_together_are_shared_out_together() -> None:
    """Of ten, the first driver keeps five and gives back five, one after another."""
    kept = 0
    for spare in reversed(range(10)):
        kept += better(claim(holding=kept), claim("bob", waiting=10), spare=spare) is None

    assert kept == 5
    assert better(claim(), claim("bob", waiting=2), spare=9) is None  # there is enough for all that it waits for


# what can be served


def test_request_that_the_living_nodes_could_not_hold_keeps_no_place() -> None:
    assert better(claim(), claim("bob", "high", places=4)) == ("j-bob", Cause.PRIORITY)
    assert better(claim(), claim("bob", "high", places=5)) is None
    assert better(claim(), claim("bob", "high", need={"CPU": 121.0})) is None
    assert better(claim(), claim("bob", "high", places=5), claim("eve", "high")) == ("j-eve", Cause.PRIORITY)


def test_place_on_a_node_that_does_not_suit_the_other_is_ours() -> None:
    nodes = {**hosts(1), "other": NodeView(total={"TPU": 4.0, "CPU": 1.0}, free={"TPU": 4.0, "CPU": 1.0})}

    assert better(claim(), claim("bob", "high"), nodes=nodes, place="other") is None
    assert better(claim(), claim("bob", "high"), nodes=nodes, place="gone") is None


def gpus(**free: float) -> dict[str, NodeView]:
    total = {"GPU": 8.0, "CPU": 64.0}
    return {name: NodeView(total=total, free={"GPU": count, "CPU": 64.0}) for name, count in free.items()}


def test_only_the_nodes_that_are_becoming_free_first_are_kept() -> None:
    one, eight = {"GPU": 1.0, "CPU": 1.0}, {"GPU": 8.0, "CPU": 8.0}
    mine = claim(kind="GPU", need=one, units=1.0)

    def kept(*rivals: Claim) -> list[str]:
        return [name for name in "abcd" if better(mine, *rivals, nodes=gpus(a=1, b=5, c=3, d=3), place=name)]

    high = claim("bob", "high", kind="GPU", need=eight, units=8.0)
    assert kept(high) == ["b"]
    assert kept(claim("bob", "high", kind="GPU", need=eight, places=2)) == ["b", "d"]  # one of the two equal ones
    assert kept(high, claim("eve", "urgent", kind="GPU", need=eight)) == ["b", "d"]
    assert kept(claim("bob", "high", waiting=9, kind="GPU", need=eight)) == ["a", "b", "c", "d"]


def test_place_that_was_given_back_is_free_for_others() -> None:
    nodes = give_back(gpus(a=0, b=2), ["a", "gone"], {"GPU": 3.0})

    assert {name: node.free["GPU"] for name, node in nodes.items()} == {"a": 3.0, "b": 2.0}


def test_room_that_is_kept_for_nobody_is_found_while_places_are_kept() -> None:
    mine = claim(kind="GPU", need={"GPU": 1.0}, units=1.0, waiting=3)
    high = claim("bob", "high", kind="GPU", need={"GPU": 8.0}, units=8.0)

    spots = find_spots(mine, [high], gpus(a=5, b=2, c=0, d=4), Chances(), now=0)

    assert spots == ["b", "b", "d", "d", "d"]


def test_nodes_are_looked_at_once_for_all_claims_of_one_size_while_spots_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drivers look every two seconds: each node once more for each node, or each claim, would take minutes with a thousand."""
    looks, fits = [], turns.fits
    monkeypatch.setattr(turns, "fits", lambda need, total: looks.append(need) or fits(need, total))
    rivals = [claim(f"u{number}", "high", kind="GPU", need={"GPU": 8.0}) for number in range(5)]
    mine = claim(kind="GPU", need={"GPU": 1.0}, units=1.0, waiting=3)

    spots = find_spots(mine, rivals, gpus(**{f"n{free}": free % 8 for free in range(40)}), Chances(), now=0)

    assert len(set(spots)) == 30
    assert len(looks) == 40


# chances


def has_chance(chances: Chances, now: float, *, cause: Cause = Cause.SHARE, taken: int = 0, ready: int = 1) -> bool:
    return chances.has(("bob",), cause, taken=taken, ready=ready, now=now)


@pytest.mark.parametrize("cause", list(Cause))
def test_run_that_does_not_take_what_is_kept_for_it_has_its_next_chance_much_later(cause: Cause) -> None:
    chances, span = Chances(), CHANCE_S[cause]

    found = [
        has_chance(chances, at * span, cause=cause) for at in (0, 0.9, 1.1, REST, REST + 1.1, REST + 2, REST + 2.2)
    ]

    assert found == [True, True, False, False, True, True, False]


def test_chance_begins_again_with_each_place_that_is_taken_and_each_that_becomes_free() -> None:
    chances = Chances()
    assert has_chance(chances, 0)
    assert not has_chance(chances, 31)

    assert has_chance(chances, 32, taken=1)
    assert not has_chance(chances, 63, taken=1)
    assert has_chance(chances, 64, taken=1, ready=2)
    assert not has_chance(chances, 95, taken=1, ready=1)


def test_clock_that_goes_back_keeps_no_place_for_long() -> None:
    chances = Chances()
    assert has_chance(chances, 1000)

    assert has_chance(chances, 10)
    assert not has_chance(chances, 41)


def test_claims_that_do_not_take_their_places_hold_up_nobody_after_them() -> None:
    chances, nodes = Chances(), hosts(1, 3)
    others = [claim("bob", "urgent"), claim("eve", "high")]

    found = [find_better(claim(), others, ["n0"], nodes, chances, now=now) for now in (0, 3700, 7400)]

    assert [each and each.owner for each in found] == ["bob", "eve", None]


# of an order, and in words


def order(nodes: int = 1, turn: dict[str, str] | None = None, **wants: Any) -> dict[str, Any]:
    return {"nodes": nodes, "ray": {"bundle": {"CPU": 2}, "options": {"num_cpus": 2}, **wants}} | (
        {"turn": turn} if turn else {}
    )


def test_demand_of_an_order_without_a_turn_is_normal_and_nobody_s() -> None:
    assert make_demand(order(nodes=3), "j-1") == Demand(
        job="j-1", owner="", priority=Priority.NORMAL, kind="CPU", need={"CPU": 2.0}, places=3, units=6.0
    )


def test_demand_has_the_owner_the_priority_and_the_kind_of_room() -> None:
    turn = {"owner": "ada", "priority": "high"}
    one = {"num_cpus": 2, "resources": {"TPU": 4, "TPU-v4-8-head": 1}}

    host = make_demand(order(turn=turn, options=one, tpu={"type": "v4-8", "chips": 4, "hosts": 1, "slices": 1}), "j-1")
    slices = make_demand(order(nodes=4, turn=turn, tpu={"type": "v4-16", "chips": 4, "hosts": 2, "slices": 2}), "j-1")
    gpu = make_demand(order(turn={"priority": "soon"}, bundle={"CPU": 1, "GPU": 0.5}), "j-1")

    assert (host.owner, host.priority, host.kind, host.need) == (
        "ada",
        Priority.HIGH,
        "TPU v4-8",
        {"CPU": 2.0, "TPU": 4.0, "TPU-v4-8-head": 1.0},
    )
    # A slice of several hosts is found by its first.
    assert (slices.need, slices.places, slices.units) == ({"TPU-v4-16-head": 1.0}, 2, 16.0)
    assert (gpu.kind, gpu.units, gpu.priority) == ("GPU", 0.5, Priority.NORMAL)


def test_runs_that_wait_before_ours_are_counted() -> None:
    others = [claim("bob", "high", waiting=1200), claim("eve", waiting=1), claim("bob", "low")]

    assert tell_order(claim(holding=2), others) == [
        "1,200 runs of higher priority than normal ask for TPU v4-8 too",
        "1 run of people who hold fewer chips of TPU v4-8 asks too; ada holds 8",
    ]
    assert tell_order(claim(), []) == []
