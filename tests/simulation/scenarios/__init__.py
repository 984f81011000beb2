"""The worlds that are tried: who lives in each, and what must hold when all is over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from runtime.records import store
from runtime.sanitize import CleanLogger
from runtime.system import system
from tests.simulation.bucket import URL
from tests.simulation.choices import Tape
from tests.simulation.scenarios.embedded import memory, sqlite
from tests.simulation.scenarios.garbage import garbage
from tests.simulation.scenarios.jobs import jobs
from tests.simulation.scenarios.tasks import calm, control, day, failures, orders, rush, storm, workers
from tests.simulation.threads import stand_ins
from tests.simulation.world import Broken, World

SCENARIOS: Final[dict[str, Callable[[World], Callable[[], None]]]] = {
    "control": control,
    "orders": orders,
    "calm": calm,
    "workers": workers,
    "failures": failures,
    "storm": storm,
    "day": day,
    "rush": rush,
    "sqlite": sqlite,
    "memory": memory,
    "jobs": jobs,
    "garbage": garbage,
}


@dataclass
class Result:
    broken: Broken | None
    tape: Tape
    steps: int
    seconds: float
    """Virtual."""
    worked_s: float
    """How long workers lived, all of them together."""
    trace: list[str] | None
    cause: Exception | None


def run(scenario: str, seed: int, script: Tape | None = None, *, tracing: bool = False, wild: bool = False) -> Result:
    """Run one world to its end."""
    world = World(seed, script, tracing=tracing, wild=wild)
    store._proven.add(URL)
    before = logging.root.manager.disable
    seconds = worked_s = 0.0
    world.replace(CleanLogger, "exception", lambda log, message, *args: world.swallowed(message))
    with system.replaced(**stand_ins(world)):
        logging.disable(logging.CRITICAL)
        try:
            check = SCENARIOS[scenario](world)
            world.run()
            seconds, worked_s = world.now, world.worked_s()
            if world.broken is None:
                world.judge(check)
        finally:
            world.close()
            logging.disable(before)
    return Result(world.broken, world.chance.tape, world.steps, seconds, worked_s, world.trace, world.cause)
