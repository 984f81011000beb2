"""Drivers that take turns on a Ray that gives a free place to any request that fits, at random."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from runtime.jobs.spec import Priority
from runtime.launchers.ray.cluster_state import NodeView
from runtime.launchers.ray.gate import SETTLE_S, Gate
from runtime.launchers.ray.turns import Cause, Claim, Demand

STEP_S = 0.5
START_S = 1.0
"""How long Ray takes to start an actor."""
LOOK_S = 2.0


class World:
    """A cluster, its drivers, and a Ray without an order."""

    def __init__(self, seed: int, nodes: Mapping[str, Mapping[str, float]]) -> None:
        self.random, self.now = random.Random(seed), 0.0
        self.total = {name: dict(total) for name, total in nodes.items()}
        self.free = {name: dict(total) for name, total in nodes.items()}
        self.drivers: list[Driver] = []
        self.began: list[str] = []
        """Jobs of the runs that began, in order."""

    def view(self) -> dict[str, NodeView]:
        return {name: NodeView(total=self.total[name], free=dict(self.free[name])) for name in self.total}

    def go(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            for driver in self.drivers:
                driver.end_runs()
            asks = [(driver, *ask) for driver in self.drivers for ask in driver.asks()]
            self.random.shuffle(asks)
            full: set[int] = set()
            for driver, index, spot in asks:
                if id(driver) in full:
                    continue
                if (place := self._find_room(driver.demand, spot)) is not None:
                    self.move(place, driver.demand.need, -1)
                    driver.receive(index, place)
                elif spot is None:
                    full.add(id(driver))
            for driver in self.drivers:
                driver.decide()
                if self.now % LOOK_S == 0:
                    driver.gate.look()
            self.now += STEP_S

    def move(self, place: Sequence[str], need: Mapping[str, float], sign: int) -> None:
        for node in place:
            for name, amount in need.items():
                self.free[node][name] += sign * amount
                assert 0 <= self.free[node][name] <= self.total[node][name]

    def _find_room(self, demand: Demand, spot: str | None) -> list[str] | None:
        names = [spot] if spot else list(self.free)
        able = [
            each for each in names if all(self.free[each].get(name, 0) >= need for name, need in demand.need.items())
        ]
        return self.random.sample(able, demand.places) if len(able) >= demand.places else None


class Memory:
    """The board of one driver."""

    def __init__(self, shown: dict[int, Claim]) -> None:
        self.shown = shown

    def write(self, claim: Claim) -> None:
        self.shown[id(self)] = claim

    def read(self) -> list[Claim]:
        return [claim for who, claim in self.shown.items() if who != id(self)]

    def close(self) -> None:
        self.shown.pop(id(self), None)


class Driver:
    """`runs` runs that take `lasts` seconds each; `at_once` of them ask at a time."""

    def __init__(
        self, world: World, board: Any, demand: Demand, runs: int, lasts: float, at_once: int | None = None
    ) -> None:
        self.world, self.demand, self.lasts, self.left = world, demand, lasts, runs
        self.gate = Gate(demand, board, world.view, lambda text: None, clock=lambda: world.now)
        self.waiting: set[int] = set()
        self.granted: dict[int, tuple[list[str], float]] = {}
        self.running: dict[int, tuple[list[str], float]] = {}
        self.started: list[float] = []
        self.numbers = iter(range(runs))
        self.at_once = at_once or runs
        self.stuck = False
        """A driver that takes no place although it asks."""
        world.drivers.append(self)
        for _ in range(self.at_once):
            self._next()

    def _next(self) -> None:
        if (index := next(self.numbers, None)) is not None:
            self.gate.ask(index)
            self.waiting.add(index)

    def asks(self) -> Iterator[tuple[int, str | None]]:
        for index in sorted(self.waiting):
            spot = self.gate.take_spot() if self.gate.behind else None
            if not self.stuck and (spot or not self.gate.behind):
                yield index, spot

    def receive(self, index: int, place: list[str]) -> None:
        self.waiting.discard(index)
        settle = SETTLE_S if self.gate.receive(index) else 0.0
        self.granted[index] = place, self.world.now + START_S + settle

    def decide(self) -> None:
        for index, (place, at) in list(self.granted.items()):
            if at <= self.world.now:
                del self.granted[index]
                if self.gate.decide(index, place):
                    self.running[index] = place, self.world.now + self.lasts * self.world.random.uniform(0.5, 1.5)
                    self.started.append(self.world.now)
                    self.world.began.append(self.demand.job)
                else:
                    self.world.move(place, self.demand.need, +1)
                    self.waiting.add(index)

    def end_runs(self) -> None:
        for index in [index for index, (_, at) in self.running.items() if at <= self.world.now]:
            place, _ = self.running.pop(index)
            self.gate.leave(index)
            self.world.move(place, self.demand.need, +1)
            self._next()

    def die(self) -> None:
        """End as a driver that is killed: Ray ends its actors, and its file is nobody's."""
        self.gate.close()
        for place, _ in [*self.running.values(), *self.granted.values()]:
            self.world.move(place, self.demand.need, +1)
        self.running, self.granted, self.waiting = {}, {}, set()
        self.world.drivers.remove(self)


class Lab:
    def __init__(self, seed: int, nodes: Mapping[str, Mapping[str, float]]) -> None:
        self.world = World(seed, nodes)
        self.shown: dict[int, Claim] = {}

    def launch(
        self,
        owner: str,
        priority: str = "normal",
        runs: int = 1,
        lasts: float = 60,
        at_once: int | None = None,
        **more: Any,
    ) -> Driver:
        demand = Demand(
            owner=owner,
            priority=Priority(priority),
            **{"job": f"{owner}-{priority}", "kind": "TPU v4-8", "need": {"TPU": 4.0}, "units": 4.0, **more},
        )
        return Driver(self.world, Memory(self.shown), demand, runs, lasts, at_once)


def tpus(count: int) -> dict[str, dict[str, float]]:
    return {f"n{number}": {"TPU": 4.0} for number in range(count)}


SEEDS = pytest.mark.parametrize("seed", range(3))


@SEEDS
def test_higher_runs_begin_first(seed: int) -> None:
    lab = Lab(seed, tpus(3))
    lab.launch("eve", runs=3)
    lab.world.go(10)
    for priority in ("low", "normal", "urgent", "high"):
        lab.launch("ada", priority, runs=5)
    lab.world.go(1200)

    ranks = [["urgent", "high", "normal", "low"].index(job.partition("-")[2]) for job in lab.world.began[3:]]
    assert len(ranks) == 20
    assert ranks == sorted(ranks)


@SEEDS
@pytest.mark.parametrize("people", [2, 3])
def test_people_who_always_have_runs_waiting_hold_equal_shares(seed: int, people: int) -> None:
    lab = Lab(seed, tpus(12))
    # The first has all places before the others come, with ten times the runs.
    first = lab.launch("ada", runs=2000, at_once=60)
    lab.world.go(60)
    drivers = [first, *(lab.launch(owner, runs=400, at_once=15) for owner in ("bob", "eve")[: people - 1])]
    assert len(first.running) == 12
    lab.world.go(300)
    held: Counter[str] = Counter()
    for _ in range(150):
        lab.world.go(4)
        held.update({each.demand.owner: len(each.running) for each in drivers})

    shares = [held[each.demand.owner] / held.total() for each in drivers]
    assert shares == pytest.approx([1 / people] * people, rel=0.1)
    assert held.total() / 150 > 12 * 0.85  # a place is empty between two runs for seconds at most


@SEEDS
def test_two_fleets_that_begin_together_are_soon_placed_with_equal_shares(seed: int) -> None:
    """Workers that never end: nothing evens their shares out later."""
    lab = Lab(seed, tpus(40))
    fleets = [lab.launch(owner, runs=runs, lasts=1e9) for owner, runs in (("ada", 100), ("bob", 30))]
    lab.world.go(90)

    held = [len(each.running) for each in fleets]
    assert sum(held) == 40
    assert abs(held[0] - held[1]) <= 2


@SEEDS
def test_small_demand_is_served_whole_and_the_rest_is_for_the_other(seed: int) -> None:
    lab = Lab(seed, tpus(20))
    big, small = lab.launch("ada", runs=100, lasts=1e9), lab.launch("bob", runs=4, lasts=1e9)
    lab.world.go(60)

    assert (len(big.running), len(small.running)) == (16, 4)


@SEEDS
def test_big_run_is_not_starved_by_small_ones(seed: int) -> None:
    lab = Lab(seed, tpus(6))
    lab.launch("ada", runs=2000, at_once=50)
    lab.world.go(100)
    big = lab.launch("bob", "high", places=4, units=16.0, lasts=600)
    lab.world.go(200)

    assert len(big.running) == 1


@SEEDS
def test_small_runs_of_the_same_priority_are_not_held_up_long_by_a_big_one(seed: int) -> None:
    lab = Lab(seed, tpus(6))
    small = lab.launch("ada", runs=2000, at_once=50)
    lab.world.go(100)
    lab.launch("bob", places=6, units=24.0)
    before = len(small.started)
    lab.world.go(1000)

    # Six places for 1000 s, and a minute for each run: at most a hundred.
    assert len(small.started) - before > 65


@SEEDS
def test_higher_run_that_fits_nowhere_holds_up_nobody(seed: int) -> None:
    lab = Lab(seed, tpus(4))
    lab.launch("bob", "urgent", places=5, units=20.0)
    lab.launch("bob", "urgent", need={"TPU": 8.0}, job="large")
    low = lab.launch("ada", "low", runs=4, lasts=1e9)
    lab.world.go(10)

    assert len(low.running) == 4


@SEEDS
def test_driver_that_asks_and_takes_nothing_holds_up_others_for_an_hour_at_most(seed: int) -> None:
    lab = Lab(seed, tpus(4))
    lab.launch("bob", "high").stuck = True
    low = lab.launch("ada", "low", runs=4, lasts=1e9)
    lab.world.go(60)
    # Of four places that are free, only as many are kept as it asks for.
    assert (len(low.running), low.gate.behind and low.gate.behind.cause) == (3, Cause.PRIORITY)
    lab.world.go(3600)

    assert (len(low.running), low.gate.behind) == (4, None)


@SEEDS
def test_claims_of_a_driver_that_died_count_no_more(seed: int) -> None:
    lab = Lab(seed, tpus(2))
    dead = lab.launch("bob", "urgent", runs=9)
    low = lab.launch("ada", "low", runs=2, lasts=1e9)
    lab.world.go(10)
    assert low.running == {}
    dead.die()
    lab.world.go(10)

    assert len(low.running) == 2


@SEEDS
def test_runs_go_where_nothing_is_kept_while_a_higher_one_waits_for_another_node(seed: int) -> None:
    lab = Lab(seed, {**{f"a{n}": {"GPU": 8.0, "big": 1.0} for n in range(2)}, "t": {"GPU": 4.0}})
    busy = lab.launch("eve", kind="GPU", need={"GPU": 8.0, "big": 1.0}, units=8.0, lasts=1e9)
    lab.world.go(5)
    lab.launch("bob", "high", kind="GPU", need={"GPU": 8.0, "big": 1.0}, places=2, units=16.0)
    low = lab.launch("ada", runs=9, kind="GPU", need={"GPU": 1.0}, units=1.0, lasts=1e9)
    lab.world.go(120)

    assert len(busy.running) == 1
    assert {place for places, _ in low.running.values() for place in places} == {"t"}
    assert len(low.running) == 4


@SEEDS
def test_no_place_stays_empty_whatever_is_launched(seed: int) -> None:
    """Everything ends at last, and no place is lost."""
    lab = Lab(seed, tpus(5))
    for number in range(12):
        places = lab.world.random.choice((1, 1, 1, 2, 4))
        lab.launch(
            lab.world.random.choice(("ada", "bob", "eve")),
            lab.world.random.choice(list(Priority)),
            runs=lab.world.random.randint(1, 12),
            places=places,
            units=4.0 * places,
            lasts=20,
            job=f"j-{number}",
        )
        lab.world.go(lab.world.random.uniform(0, 40))
    lab.world.go(6000)

    assert [each.demand.job for each in lab.world.drivers if each.waiting or each.running or each.granted] == []
    assert lab.world.free == lab.world.total


# what fails


class Broken(Memory):
    def read(self) -> list[Claim]:
        raise OSError(5, "Input/output error")

    def write(self, claim: Claim) -> None:
        raise OSError(28, "No space left on device")


def test_board_that_fails_orders_nothing_stops_nobody_and_is_named_once() -> None:
    said: list[str] = []
    demand = Demand(job="j-1", owner="ada", kind="CPU", need={"CPU": 1.0})
    gate = Gate(demand, Broken({}), dict, said.append)

    gate.ask(0)
    assert not gate.receive(0)
    assert gate.decide(0, ["n0"])
    gate.look()
    gate.leave(0)

    assert said == ["the order of runs is not kept: OSError: [Errno 28] No space left on device"]


def test_board_that_cannot_be_made_is_named_once() -> None:
    said: list[str] = []

    def refuse() -> Memory:
        raise OSError(30, "Read-only file system")

    gate = Gate(Demand(job="j-1", owner="ada", kind="CPU", need={"CPU": 1.0}), None, dict, said.append)
    gate.open(refuse)
    gate.ask(0)

    assert gate.decide(0, ["n0"])
    assert len(said) == 1


@pytest.mark.parametrize("refuses", ["to make a file", "to write"])
def test_claim_that_the_disk_refused_is_shown_once_the_disk_has_room(refuses: str) -> None:
    shown: dict[int, Claim] = {}
    full = True

    class Disk(Memory):
        def write(self, claim: Claim) -> None:
            if full:
                raise OSError(28, "No space left on device")
            super().write(claim)

    def make() -> Memory:
        if full and refuses == "to make a file":
            raise OSError(28, "No space left on device")
        return Disk(shown)

    gate = Gate(Demand(job="j-1", owner="ada", kind="CPU", need={"CPU": 1.0}), None, dict, lambda text: None)
    gate.open(make)
    gate.ask(0)
    gate.look()
    assert shown == {}
    full = False
    gate.look()

    assert [claim.waiting for claim in shown.values()] == [1]
    gate.close()
    gate.look()
    assert shown == {}


def test_ray_that_does_not_tell_its_nodes_stops_nobody() -> None:
    shown: dict[int, Claim] = {}
    rival = Memory(shown)
    demand = Demand(job="j-1", owner="ada", kind="CPU", need={"CPU": 1.0})
    rival.write(
        Claim(demand=Demand(job="j-2", owner="bob", priority=Priority.HIGH, kind="CPU", need={"CPU": 1.0}), waiting=1)
    )

    def view() -> dict[str, NodeView]:
        raise RuntimeError("no answer")

    said: list[str] = []
    gate = Gate(demand, Memory(shown), view, said.append)
    gate.ask(0)

    assert gate.decide(0, ["n0"])
    assert said == ["the order of runs is not kept: RuntimeError: no answer"]


def test_fleet_of_a_thousand_shows_its_counts_alone() -> None:
    shown: dict[int, Claim] = {}
    gate = Gate(
        Demand(job="j-1", owner="ada", kind="CPU", need={"CPU": 1.0}), Memory(shown), dict, print, clock=lambda: 7.0
    )
    for index in range(1000):
        gate.ask(index)
    for index in range(3):
        gate.receive(index)
        gate.decide(index, ["n0"])
    gate.leave(2)

    assert list(shown.values()) == [Claim(demand=gate.demand, waiting=997, since=7.0, holding=2, taken=3)]


def test_driver_tells_whom_its_runs_let_go_first_and_how_many_are_before_them() -> None:
    lab = Lab(0, tpus(2))
    lab.launch("bob", "high", runs=3).stuck = True
    low = lab.launch("ada", runs=2)
    assert low.gate.tell() == {"before": ["3 runs of higher priority than normal ask for TPU v4-8 too"]}
    lab.world.go(10)

    told = low.gate.tell()
    assert (told["behind"]["job"], told["behind"]["cause"], len(told["before"])) == ("bob-high", "priority", 1)


def test_run_of_a_person_over_budget_lets_one_of_equal_priority_go_first_and_says_why() -> None:
    shown: dict[int, Claim] = {}
    need, units = {"TPU": 4.0}, 4.0
    demand = Demand(job="j-1", owner="ada", kind="TPU v4-8", need=need, units=units)
    spent: dict[str, float] = {"ada": 4.0}
    node = NodeView(total=need, free={"TPU": 0.0})
    gate = Gate(demand, Memory(shown), lambda: {"n0": node, "n1": node}, print, lambda: spent)
    other = Demand(job="j-2", owner="bob", kind="TPU v4-8", need=need, units=units)
    Memory(shown).write(Claim(demand=other, waiting=1, holding=1))

    gate.ask(0)
    assert gate.decide(0, ["n0"])
    gate.ask(1)
    assert not gate.decide(1, ["n1"])
    assert gate.behind is not None
    assert (gate.behind.job, gate.behind.cause) == ("j-2", Cause.BUDGET)
    told = gate.tell()
    assert told["before"][:2] == [
        "ada holds 4 TPU chips, and the budget is 4",
        "1 run of people within their budgets asks for TPU v4-8 too",
    ]
    assert told["spent"] == {"owner": "ada", "held": 4.0, "budget": 4.0}

    spent.clear()
    gate.look()
    assert gate.behind is None
    assert "spent" not in gate.tell()
