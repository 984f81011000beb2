"""Drivers that take turns on a Ray that gives a free place to any request that fits, at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from runtime.jobs.spec import Priority
from runtime.launchers.ray.gate import Gate
from runtime.launchers.ray.priority import Claim, Demand

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

    def totals(self) -> list[Mapping[str, float]]:
        return list(self.total.values())

    def go(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            for driver in self.drivers:
                driver.end_runs()
            asks = [(driver, index) for driver in self.drivers for index in driver.asks()]
            self.random.shuffle(asks)
            full: set[int] = set()
            for driver, index in asks:
                if id(driver) in full:
                    continue
                if (place := self._find_room(driver.demand)) is not None:
                    self.move(place, driver.demand.need, -1)
                    driver.receive(index, place)
                else:
                    full.add(id(driver))
            for driver in self.drivers:
                driver.decide()
                if self.now % LOOK_S == 0:
                    driver.gate.poll()
            self.now += STEP_S

    def move(self, place: Sequence[str], need: Mapping[str, float], sign: int) -> None:
        for node in place:
            for name, amount in need.items():
                self.free[node][name] += sign * amount
                assert 0 <= self.free[node][name] <= self.total[node][name]

    def _find_room(self, demand: Demand) -> list[str] | None:
        able = [
            each
            for each in self.free
            if all(self.free[each].get(name, 0) >= need for name, need in demand.need.items())
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
        self.gate = Gate(demand, board, world.totals, lambda text: None, clock=lambda: world.now)
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

    def asks(self) -> Iterator[int]:
        if not self.stuck and not self.gate.behind:
            yield from sorted(self.waiting)

    def receive(self, index: int, place: list[str]) -> None:
        self.waiting.discard(index)
        self.granted[index] = place, self.world.now + START_S

    def decide(self) -> None:
        for index, (place, at) in list(self.granted.items()):
            if at <= self.world.now:
                del self.granted[index]
                if self.gate.decide(index):
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
            **{"job": f"{owner}-{priority}", "kind": "TPU v4-8", "need": {"TPU": 4.0}, **more},
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
def test_big_run_is_not_starved_by_small_ones(seed: int) -> None:
    lab = Lab(seed, tpus(6))
    lab.launch("ada", runs=2000, at_once=50)
    lab.world.go(100)
    big = lab.launch("bob", "high", places=4, lasts=600)
    lab.world.go(200)

    assert len(big.running) == 1


@SEEDS
def test_higher_run_that_fits_nowhere_holds_up_nobody(seed: int) -> None:
    lab = Lab(seed, tpus(4))
    lab.launch("bob", "urgent", places=5)
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
    assert low.running == {}
    assert low.gate.behind is not None
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
def test_runs_that_need_another_kind_of_room_are_not_held_up(seed: int) -> None:
    lab = Lab(seed, {**tpus(1), "g": {"GPU": 4.0}})
    lab.launch("bob", "urgent").stuck = True
    low = lab.launch("ada", "low", runs=4, kind="GPU", need={"GPU": 1.0}, lasts=1e9)
    lab.world.go(10)

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
    gate = Gate(demand, Broken({}), list, said.append)

    gate.ask(0)
    assert gate.decide(0)
    gate.poll()
    gate.leave(0)

    assert said == ["the order of runs is not kept: OSError: [Errno 28] No space left on device"]


def test_board_that_cannot_be_made_is_named_once() -> None:
    said: list[str] = []

    def refuse() -> Memory:
        raise OSError(30, "Read-only file system")

    gate = Gate(Demand(job="j-1", owner="ada", kind="CPU", need={"CPU": 1.0}), None, list, said.append)
    gate.open(refuse)
    gate.ask(0)

    assert gate.decide(0)
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

    gate = Gate(Demand(job="j-1", owner="ada", kind="CPU", need={"CPU": 1.0}), None, list, lambda text: None)
    gate.open(make)
    gate.ask(0)
    gate.poll()
    assert shown == {}
    full = False
    gate.poll()

    assert [claim.waiting for claim in shown.values()] == [1]
    gate.close()
    gate.poll()
    assert shown == {}


def test_ray_that_does_not_tell_its_nodes_stops_nobody() -> None:
    shown: dict[int, Claim] = {}
    rival = Memory(shown)
    demand = Demand(job="j-1", owner="ada", kind="CPU", need={"CPU": 1.0})
    rival.write(
        Claim(demand=Demand(job="j-2", owner="bob", priority=Priority.HIGH, kind="CPU", need={"CPU": 1.0}), waiting=1)
    )

    def refuse() -> list[Mapping[str, float]]:
        raise RuntimeError("no answer")

    said: list[str] = []
    gate = Gate(demand, Memory(shown), refuse, said.append, clock=lambda: 1.0)
    gate.ask(0)

    assert gate.decide(0)
    assert said == ["the order of runs is not kept: RuntimeError: no answer"]


def test_fleet_of_a_thousand_shows_its_counts_alone() -> None:
    shown: dict[int, Claim] = {}
    gate = Gate(
        Demand(job="j-1", owner="ada", kind="CPU", need={"CPU": 1.0}), Memory(shown), list, print, clock=lambda: 7.0
    )
    for index in range(1000):
        gate.ask(index)
    for index in range(3):
        gate.decide(index)
    gate.leave(2)

    assert list(shown.values()) == [Claim(demand=gate.demand, waiting=997, since=7.0)]


def test_driver_reports_whom_its_runs_let_go_first_and_how_many_are_before_them() -> None:
    lab = Lab(0, tpus(2))
    lab.launch("bob", "high", runs=3).stuck = True
    low = lab.launch("ada", runs=2)
    before = ["3 runs of higher priority than normal ask for TPU v4-8 too"]
    assert low.gate.report() == {"before": before}
    lab.world.go(10)

    behind = {"job": "bob-high", "owner": "bob", "priority": "high"}
    assert low.gate.report() == {"before": before, "behind": behind}
