"""Tasks on Pub/Sub with records in a bucket: orders without workers, and workers under every fault."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from runtime.client.tasks.wait import wait
from runtime.platform import system
from tests.simulation.bucket import open_records
from tests.simulation.laws import IN_FORCE, RECORDED
from tests.simulation.scenarios.town import Stack, Town
from tests.simulation.world import World


def control(world: World) -> Callable[[], None]:
    """People give orders to a queue without workers, and submit to it, all at once."""
    town = Town(world)
    town.person("submitter", lambda stack: town.submit(stack, "e1", 3), mortal=True)
    town.person("pauser", lambda stack: stack.queue().pause(), mortal=True)
    town.person("canceller", lambda stack: town.cancel(stack, "e0"), mortal=True)
    town.person("purger", town.purge, after_s=1.0, mortal=True)

    def check() -> None:
        laws = town.laws
        control = open_records(world, town.bucket).control("default")
        if "pauser" in town.done and not control.paused:
            laws._break(IN_FORCE, "a pause is not")
        if "canceller" in town.done and "e0" not in control.experiments:
            laws._break(IN_FORCE, "a cancel is not")
        if "purger" in town.done and control.purged_before is None:
            laws._break(IN_FORCE, "a purge is not")
        laws.check_purged()
        waiting = {one.attributes["runtime_task"] for one in town.service.messages.values()}
        stranded = [key for key in laws.acknowledged if key not in laws.records and key[0] not in waiting]
        if stranded:
            laws._break(RECORDED, f"{len(stranded)} have neither a record nor a message")

    world.until_s = 3_600.0
    return check


def workers(world: World) -> Callable[[], None]:
    """Two workers of one slot, with successors, work on two experiments, one of which is cancelled."""
    town = Town(world)
    town.person("submitter", lambda stack: town.submit(stack, "e1", 3, max_failures=2), mortal=True)
    town.person("other", lambda stack: town.submit(stack, "e2", 2))

    def cancel(stack: Stack) -> None:
        while "other" not in town.done:
            system.sleep(1.0)
        town.cancel(stack, "e2")

    town.person("canceller", cancel, after_s=2.0)

    def wait_for(stack: Stack) -> Any:
        while "submitter" not in town.done:
            system.sleep(1.0)
        return wait("e1", queue=stack.queue())

    town.person("waiter", wait_for)
    for number in range(2):
        town.worker(f"w{number}", host=f"h{number}-", at_s=0.3 * number, idle_timeout=timedelta(seconds=150))
    town.mend()

    def check() -> None:
        laws = town.laws
        laws.check_recorded()
        laws.check_failures()
        laws.check_waited("e1", town.done.get("waiter"))

    world.until_s = 6_000.0
    return check
