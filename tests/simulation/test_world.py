"""The simulator itself: what is killed is never resumed, a tape is the whole run, what spins is noticed."""

from __future__ import annotations

from collections import Counter

import pytest

from runtime.system import system
from tests.simulation.choices import Chance, Choice, how_often, read_tape, write_tape
from tests.simulation.shrink import shrink
from tests.simulation.threads import stand_ins
from tests.simulation.world import CALL, FATES, World

KILLED = next(number for number, (kind, _, _) in enumerate(FATES) if kind == "kill")
STOPPED = next(number for number, (kind, measure, _) in enumerate(FATES) if (kind, measure) == ("stop", 40.0))
LOST = next(number for number, (kind, _, _) in enumerate(FATES) if kind == "lost")


def refused(status: str) -> Exception:
    return OSError(status)


def run(world: World) -> None:
    try:
        world.run()
    finally:
        world.close()


def test_world_runs_processes_in_virtual_time() -> None:
    world, seen = World(0, {}), []

    def tick(name: str, every_s: float) -> None:
        for _ in range(3):
            system.sleep(every_s)
            seen.append((name, world.now))

    with system.replaced(**stand_ins(world)):
        world.spawn("quick", lambda: tick("quick", 1.0))
        world.spawn("slow", lambda: tick("slow", 3600.0))
        run(world)

    assert seen == [
        ("quick", 1.0),
        ("quick", 2.0),
        ("quick", 3.0),
        ("slow", 3600.0),
        ("slow", 7200.0),
        ("slow", 10800.0),
    ]


def test_who_waits_until_the_same_instant_goes_on_in_turn() -> None:
    world, seen = World(0, {}, until_s=4.0), []

    def work() -> None:
        for pause_s in (1.0, 2.0, 2.0):
            system.sleep(pause_s)
            seen.append((world.me().name, world.now))  # type: ignore[union-attr]

    with system.replaced(**stand_ins(world)):
        for name in ("first", "second"):
            world.spawn(name, work)
        run(world)

    assert seen == [("first", 1.0), ("second", 1.0), ("first", 3.0), ("second", 3.0)]


def test_who_is_alone_takes_the_same_steps() -> None:
    """The world lets it run on without a switch; the time that is over, and the steps that are too many, still end it."""
    world, seen = World(0, {}, until_s=4.0), []

    def work() -> None:
        while True:
            system.sleep(1.5)
            seen.append(world.now)

    with system.replaced(**stand_ins(world)):
        world.spawn("w", work)
        run(world)

    assert (seen, world.now, world.steps) == ([1.5, 3.0], 3.0, 3)


def test_workers_live_until_they_end_or_are_killed() -> None:
    world = World(0, {})

    def work(seconds: float) -> None:
        world.works()
        system.sleep(seconds)

    with system.replaced(**stand_ins(world)):
        victim = world.spawn("w0", lambda: work(50.0), mortal=True)
        world.spawn("w1", lambda: work(7.0), at_s=1.0)
        world.spawn("killer", lambda: (system.sleep(5.0), world.kill(victim), system.sleep(100.0)))
        run(world)

    assert world.worked_s() == 5.0 + 7.0


def test_killed_process_runs_no_finally_while_the_world_lasts() -> None:
    world, seen = World(0, {("w", CALL.name, 0): KILLED}), []

    def work() -> None:
        try:
            world.call("write", lambda: seen.append("written"), write=True, refused=refused)
            seen.append("went on")
        finally:
            if not world.over:
                seen.append("tidied up")

    with system.replaced(**stand_ins(world)):
        world.spawn("w", work, mortal=True)
        run(world)

    assert seen == ["written"]
    assert world.killed == {"w"}


def test_stopped_process_goes_on_late_with_all_its_threads() -> None:
    world, seen = World(0, {("w", CALL.name, 0): STOPPED}), []

    def work() -> None:
        beside = system.thread(lambda: (system.sleep(1.0), seen.append(("beside", world.now))), name="beside")
        beside.start()
        world.call("write", lambda: None, write=True, refused=refused)
        seen.append(("main", world.now))
        beside.join()

    with system.replaced(**stand_ins(world)):
        world.spawn("w", work, mortal=True)
        run(world)

    assert sorted(name for name, at in seen if at >= 40.0) == ["beside", "main"]


def test_lost_answer_has_its_effect() -> None:
    world, seen = World(0, {("w", CALL.name, 0): LOST}), []

    def work() -> None:
        with pytest.raises(OSError, match="504"):
            world.call("write", lambda: seen.append("written"), write=True, refused=refused)

    with system.replaced(**stand_ins(world)):
        world.spawn("w", work)
        run(world)

    assert seen == ["written"]
    assert world.broken is None


def test_process_that_dies_of_an_exception_breaks_a_law() -> None:
    world = World(0, {})
    with system.replaced(**stand_ins(world)):
        world.spawn("w1", lambda: {}["key"])
        run(world)

    assert str(world.broken) == "no process or thread dies of an exception: w died of KeyError: 'key'"


def test_process_that_spins_breaks_a_law() -> None:
    def spin() -> None:
        while True:
            system.sleep(0.0)

    world = World(0, {})
    with system.replaced(**stand_ins(world)):
        world.spawn("w", spin)
        run(world)

    assert str(world.broken) == "nothing spins: w took 5000 steps"


def test_locks_events_and_executors_wait_as_threads_do() -> None:
    world, seen = World(0, {}), []

    def work() -> None:
        lock, event = system.lock(), system.event()

        def hold() -> str:
            with lock:
                system.sleep(2.0)
                seen.append(("held", world.now))
            event.set()
            return "done"

        with system.pool(2, name="some") as pool:
            first, second = pool.submit(hold), pool.submit(hold)
            assert not event.wait(1.0)
            assert event.wait(5.0)
            seen.append(("woken", world.now))
            assert (first.result(), second.result()) == ("done", "done")
        seen.append(("over", world.now))

    with system.replaced(**stand_ins(world)):
        world.spawn("w", work)
        run(world)

    assert seen == [("held", 2.0), ("woken", 2.0), ("held", 4.0), ("over", 4.0)]


def test_selector_wakes_for_a_ring_and_for_its_time() -> None:
    world, seen = World(0, {}), []

    def work() -> None:
        wake_up, selector = system.wake_up(), system.selector()
        selector.register(wake_up.fd, 1, wake_up.drain)
        system.thread(lambda: (system.sleep(1.0), wake_up.ring()), name="ringer").start()
        for _ in range(2):
            for key, _ in selector.select(5.0):
                key.data()
            seen.append(world.now)

    with system.replaced(**stand_ins(world)):
        world.spawn("w", work)
        run(world)

    assert seen == [1.0, 6.0]


def test_tape_holds_what_was_harmful_and_repeats_it() -> None:
    choice = Choice("of-a-test", 1, 1, 1)
    chance = Chance(3, wild=True)
    drawn = [chance.draw(who, choice) for who in "aabbaab" * 5]
    again = Chance(99, read_tape(write_tape(chance.tape)))

    assert [again.draw(who, choice) for who in "aabbaab" * 5] == drawn
    assert again.tape == chance.tape
    assert 0 < len(chance.tape) < len(drawn)


def test_each_seed_has_some_kinds_of_faults_and_many_of_a_few() -> None:
    choice = Choice("of-a-test", 80, 10, 10, kinds=["one", "other"])
    seeds = range(2_000)
    factors = Counter(how_often(seed, kind) for seed in seeds for kind in choice.kinds)
    often = dict(zip(choice.kinds, (0, 8), strict=True))
    tuned = choice.tuned(often.__getitem__)
    chance = Chance(3)
    chance.calm("other")

    assert factors.keys() == {0, 1, 8}
    assert 1_800 < factors[0] < 2_200
    assert 150 < factors[8] < 350
    assert tuned.limits == (90, 90, 170)
    assert {chance.draw("a", choice) for _ in range(200)} == {0, 2}


def test_shrink_leaves_what_breaks_the_law() -> None:
    tape = {("w", "call", number): 3 for number in range(40)} | {("v", "call", 7): 2, ("v", "when", 0): 1}

    def breaks(tried: dict[tuple[str, str, int], int]) -> str | None:
        return "a law" if tried.get(("w", "call", 11), 0) > 1 and ("v", "call", 7) in tried else None

    assert shrink(breaks, tape, "a law") == {("w", "call", 11): 2, ("v", "call", 7): 1}
