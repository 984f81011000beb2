"""Tasks on Pub/Sub with records in a bucket: orders without workers, and workers under every fault."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from runtime.client.tasks.cancel import cancel_task
from runtime.client.tasks.repair import repair
from runtime.client.tasks.wait import wait
from runtime.records import store
from runtime.system import system
from runtime.tasks.model import task_id
from tests.simulation import bucket
from tests.simulation.attempts import LONG_WORK_S, WORK_S
from tests.simulation.bucket import open_records
from tests.simulation.calm import CalmLaws
from tests.simulation.choices import Choice
from tests.simulation.laws import Laws
from tests.simulation.scenarios.town import HEAL_S, LONG_TERMS, Stack, Town
from tests.simulation.world import HARSH_CALL, SELDOM_CALL, SLOW_CALL, World

COMES = Choice("comes", 1, 1, fault=False)
"""Whether somebody lives in this world."""
ORDERS = 8
"""How many orders somebody gives, where many are given."""
READINGS = 60
LOOK_EVERY = timedelta(seconds=5)
ENDS = Choice("ends", 2, 1, 1, fault=False)
"""Whether somebody purges, or cancels, what was tried again."""
LOOKS = ((3, 20.0), (30, 5.0))
"""How often a redriver looks, and after how many seconds each: an eager one still does after the lease of one that stood still."""
EAGER = Choice("eager", 1, 1, fault=False)
HOUR_S = 3_600.0
DAY_S = 4 * HOUR_S
"""How long the workers of a day have faults."""
STORM_EVERY_S = (20.0, 9.0, 60.0)
STORM = Choice("storm", 1, 1, 1, fault=False)
ASKS = Choice("asks", 1, 1, fault=False)
"""Whether a machine that is taken away asks its worker to leave, or is just gone."""


def control(world: World) -> Callable[[], None]:
    """People give orders to a queue without workers, and submit to it, all at once."""
    town = Town(world)
    world.calls = HARSH_CALL
    town.person("submitter", lambda stack: town.submit(stack, "e1", 3), mortal=True)
    town.person("pauser", lambda stack: stack.queue().pause(), mortal=True)
    town.person("canceller", lambda stack: town.cancel(stack, "e0"), mortal=True)
    town.person("purger", town.purge, after_s=1.0, mortal=True)

    def check() -> None:
        town.laws.check_orders(open_records(world, town.bucket).control("default"), town.done)
        town.laws.check_purged()
        town.laws.check_delivered(town.service.tasks())

    world.until_s = 3_600.0
    return check


def orders(world: World) -> Callable[[], None]:
    """People give one order after another, so that these are merged again and again, while others read them."""
    town = Town(world)
    world.calls = SLOW_CALL
    world.replace(store, "ORDERS_APART", 1)
    world.replace(bucket, "PAGE", 1)
    laws = town.laws

    def cancel(stack: Stack) -> None:
        for number in range(ORDERS):
            town.cancel(stack, f"{world.me().name.partition('.')[0]}-{number}")  # type: ignore[union-attr]
            system.sleep(1.0)

    def pause_and_resume(stack: Stack) -> None:
        for number in range(ORDERS):
            laws.paused = None
            if number % 2:
                stack.queue().resume()
            else:
                stack.queue().pause()
            laws.paused = world.now, not number % 2
            system.sleep(1.0)

    def read(stack: Stack) -> None:
        for _ in range(READINGS):
            laws.check_read(lambda: stack.records.control("default"))
            system.sleep(0.5)

    town.person("pauser", pause_and_resume, mortal=True)
    for number in range(2):
        town.person(f"canceller{number}", cancel, mortal=True)
    town.person("purger", town.purge, after_s=5.0, mortal=True)
    for name in ("reader", "other-reader"):
        town.person(name, read, mortal=True)
    world.until_s = 3_600.0
    return lambda: laws.check_read(lambda: open_records(world, town.bucket).control("default"))


def calm(world: World) -> Callable[[], None]:
    """The same town without a fault, where all that is promised of time, order and number holds to the letter."""
    world.chance.calm("outcome")
    return workers(world, calm=True)


def workers(world: World, *, calm: bool = False) -> Callable[[], None]:
    """Two workers of one slot, with successors, work on two experiments, while people give orders."""
    town = Town(world, CalmLaws if calm else Laws)
    town.person("submitter", lambda stack: town.submit(stack, "e1", 3, max_failures=2), mortal=True)
    town.person("other", lambda stack: town.submit(stack, "e2", 2))

    def comes(name: str) -> bool:
        return bool(world.draw(COMES, name))

    def cancel(stack: Stack) -> None:
        town.until("other")
        town.cancel(stack, "e2")

    def pause(stack: Stack) -> None:
        stack.queue().pause()
        if isinstance(town.laws, CalmLaws):
            town.laws.paused_at = world.now
        system.sleep(60.0 if calm else 30.0)
        if isinstance(town.laws, CalmLaws):
            town.laws.paused_at = None
        stack.queue().resume()

    def wait_again(stack: Stack) -> Any:
        town.until("waiter")
        for name in town.people & {"redriver", "other-redriver"}:
            town.until(name)
        return wait_told(stack)

    def redrive(stack: Stack) -> None:
        town.until("waiter")
        town.redrive(stack, "e1")

    def wait_told(stack: Stack) -> Any:
        known = [key for key, (task, _) in town.laws.acknowledged.items() if task.experiment == "e1"]
        found = wait("e1", queue=stack.queue(), poll=LOOK_EVERY)
        town.laws.check_wait_ended(known)
        return found

    def wait_first(stack: Stack) -> Any:
        town.until("submitter")
        return wait_told(stack)

    def mend(stack: Stack) -> None:
        # One whose worker died lately, or had a clock that was ahead, is held for some minutes.
        while repair(stack.queue(), stack.records).held:
            system.sleep(60.0)

    def submit_later(stack: Stack) -> None:
        town.until("canceller")
        town.submit(stack, "e2", 1, first=7)

    def cancel_one(stack: Stack) -> Any:
        town.until("submitter")
        one = task_id("e1", key="0")
        town.laws.ending.add(one)
        return cancel_task(stack, one, now=system.now(), by="somebody")

    if comes("canceller-of-one"):
        town.person("canceller-of-one", cancel_one, after_s=4.0)
    if comes("canceller"):
        town.person("canceller", cancel, after_s=2.0)
        town.person("latecomer", submit_later)
    if comes("pauser"):
        town.person("pauser", pause, after_s=5.0)
    if comes("purger"):
        town.person("purger", town.purge, after_s=10.0, mortal=True)
    if comes("repairer"):
        town.service.loses = True
        world.spawn("repair", lambda: town.person("repairer", mend), at_s=HEAL_S + 60.0)
    town.person("waiter", wait_first)
    town.person("second-waiter", wait_again)
    # Two at once publish a generation twice, and it may run twice.
    for name in ("redriver",) if calm else ("redriver", "other-redriver"):
        if comes(name):
            town.person(name, redrive, mortal=True)
    _work(town)
    return lambda: _check_with_wait(town)


def _work(town: Town) -> None:
    """Have two workers of one slot, each with successors, and one more once the faults are over."""
    for number in range(2):
        town.worker(f"w{number}", host=f"h{number}-", at_s=0.3 * number, idle_timeout=timedelta(seconds=150))
    town.mend()
    town.world.until_s = 3_000.0


def _check_with_wait(town: Town) -> None:
    town.check_tasks()
    town.laws.check_waited("e1", town.done.get("waiter"))


def failures(world: World) -> Callable[[], None]:
    """Tasks that fail at once and half of the time, and two people who have them tried again whenever one is a dead letter."""
    town = Town(world)
    town.laws.failing, world.calls = True, HARSH_CALL
    most = 3 if world.draw(COMES, "retries") else 1
    eager = world.draw(EAGER, "redriver")
    town.person("submitter", lambda stack: town.submit(stack, "e1", 3, max_failures=most), mortal=True)

    def redrive(stack: Stack) -> None:
        town.until("submitter")
        looks, every_s = LOOKS[eager]
        for _ in range(looks):
            system.sleep(every_s)
            town.redrive(stack, "e1")
            if eager:
                town.retry_the_others(stack, "e1")

    ends = world.draw(ENDS, "ender")
    if ends == 1:
        town.person("purger", town.purge, after_s=45.0, mortal=True)
    elif ends == 2:
        town.person("canceller", lambda stack: town.cancel(stack, "e1"), after_s=45.0, mortal=True)
    for name in ("redriver", "other-redriver"):
        town.person(name, redrive, mortal=True)
    _work(town)
    return town.check_tasks


def rush(world: World) -> Callable[[], None]:
    """Tasks so quick that workers hold many ahead, and settle many together."""
    town = Town(world)
    town.laws.work_s = (0.02,) * len(WORK_S)
    town.person("submitter", lambda stack: town.submit(stack, "e1", 25), mortal=True)
    town.person("waiter", lambda stack: (town.until("submitter"), wait("e1", queue=stack.queue(), poll=LOOK_EVERY))[1])
    _work(town)
    return lambda: _check_with_wait(town)


def day(world: World) -> Callable[[], None]:
    """Two workers live for hours, with tasks of minutes and hours, and what holds them up may take as long."""
    town = Town(world)
    town.terms, town.laws.work_s, world.calls, world.most_steps = LONG_TERMS, LONG_WORK_S, SELDOM_CALL, 3_000_000
    hours = [number * HOUR_S for number in range(4)]

    def submit(experiment: str) -> Callable[[Stack], object]:
        return lambda stack: town.submit(stack, experiment, 6, max_failures=2)

    def wait_told(experiment: str) -> Callable[[Stack], object]:
        def look(stack: Stack) -> Any:
            town.until(f"submitter-{experiment}")
            return wait(experiment, queue=stack.queue(), poll=timedelta(minutes=1))

        return look

    def redrive(stack: Stack) -> None:
        for experiment in ("e0", "e1"):
            town.until(f"waiter-{experiment}")
            town.redrive(stack, experiment)

    def pause(stack: Stack) -> None:
        stack.queue().pause()
        system.sleep(HOUR_S)
        stack.queue().resume()

    for number, at_s in enumerate(hours):
        name = f"e{number}"
        town.person(f"submitter-{name}", submit(name), after_s=at_s, mortal=True)
        town.person(f"waiter-{name}", wait_told(name), after_s=at_s + 60.0)
    for number, at_s in enumerate(hours[1:]):
        if world.draw(COMES, "redriver"):
            town.person(f"redriver-{number}", redrive, after_s=at_s + 1_000.0, mortal=True)
    if world.draw(COMES, "canceller"):
        town.person("canceller", lambda stack: town.cancel(stack, "e2"), after_s=hours[2] + 1_200.0, mortal=True)
    if world.draw(COMES, "pauser"):
        town.person("pauser", pause, after_s=hours[1] + 1_200.0)
    if world.draw(COMES, "purger"):
        town.person("purger", town.purge, after_s=hours[3] + 600.0, mortal=True)
    for number in range(2):
        town.worker(f"w{number}", host=f"h{number}-", at_s=0.3 * number, lives=9, idle_timeout=timedelta(hours=7))
    town.mend(after_s=DAY_S)
    world.until_s = 30 * HOUR_S

    def check() -> None:
        town.check_tasks()
        for number in range(len(hours)):
            town.laws.check_waited(f"e{number}", town.done.get(f"waiter-e{number}"))

    return check


def storm(world: World) -> Callable[[], None]:
    """Workers of one slot are killed or asked to leave again and again, and one of their tasks may crash what starts it."""
    town = Town(world)
    town.person("submitter", lambda stack: town.submit(stack, "e1", 2))
    ends_worker = False
    if world.draw(COMES, "crasher"):
        ends_worker = bool(world.draw(COMES, "crasher-of-workers"))
        (town.laws.worker_crashers if ends_worker else town.laws.crashers).add(task_id("e1", key="0"))
    one_host = not world.draw(COMES, "hosts")
    every_s = STORM_EVERY_S[world.draw(STORM, "killer")]
    asks = world.draw(ASKS, "killer")

    def kill() -> None:
        for _ in range(12):
            system.sleep(every_s)
            living = [each for each in world.processes.values() if each.name.startswith("w") and not each.dead]
            if living and asks:
                town.ask_to_leave(living[0])
            elif living:
                world.kill(living[0])

    world.spawn("killer", kill, at_s=10.0)
    for number in range(2):
        town.worker(f"w{number}", host=f"h{number}", one_host=one_host, lives=12, idle_timeout=timedelta(seconds=150))
    town.mend(lives=10 if ends_worker else 1)
    world.until_s = 4_000.0

    def check() -> None:
        town.check_tasks()
        town.laws.check_crashers()

    return check
