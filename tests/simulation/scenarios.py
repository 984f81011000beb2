"""The worlds that are tried: who lives in each, and what must hold when all is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from runtime.client.tasks.cancel import cancel_experiment
from runtime.client.tasks.submit import submit_tasks
from runtime.client.tasks.wait import wait
from runtime.errors import InfrastructureFailure
from runtime.platform import system
from runtime.queues.pubsub.queue import PubSubQueue
from runtime.records import store
from runtime.records.store import BlobRecords
from runtime.testing import sample_task
from runtime.worker.options import WorkerOptions
from runtime.worker.worker import Worker
from tests.simulation.attempts import Noting, SimulatedHost
from tests.simulation.bucket import URL, Bucket, open_records
from tests.simulation.choices import Choice, Tape
from tests.simulation.laws import IN_FORCE, RECORDED, Laws
from tests.simulation.service import SETTINGS, Client, Service
from tests.simulation.threads import stand_ins
from tests.simulation.world import Broken, Process, World

WHEN_S = (0.0, 1.0, 5.0, 30.0)
WHEN = Choice("when", 3, 2, 2, 1, fault=False)


@dataclass
class Result:
    broken: Broken | None
    tape: Tape
    steps: int
    seconds: float
    """Virtual."""
    trace: list[str] | None
    cause: Exception | None


class Stack:
    """An open stack as one process has it."""

    default_queue = "default"
    name = "sim"

    def __init__(self, world: World, bucket: Bucket, service: Service) -> None:
        self.records: BlobRecords = open_records(world, bucket)
        self._queue = PubSubQueue(SETTINGS, self.records, client=Client(world, service))  # type: ignore[arg-type]

    def queue(self, name: str | None = None) -> PubSubQueue:
        return self._queue

    def queue_names(self) -> list[str]:
        return ["default"]


class Town:
    """The parts that all scenarios have: a bucket, a service, laws, and people who do things until they are done."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bucket = Bucket(world)
        self.service = Service(world)
        self.laws = Laws(world, self.bucket)
        self.done: dict[str, Any] = {}
        """By name: what people were told."""

    def open(self) -> Stack:
        return Stack(self.world, self.bucket, self.service)

    def person(self, name: str, act: Callable[[Stack], object], *, after_s: float = 0.0, mortal: bool = False) -> None:
        """Somebody who runs a command, again while the services are away and after it was killed."""
        world = self.world

        def insist() -> None:
            while True:
                try:
                    self.done[name] = act(self.open())
                    return
                except InfrastructureFailure as problem:
                    world.note(f"told: {problem.message}")
                    system.sleep(5.0)

        def start(number: int, at_s: float) -> None:
            process = world.spawn(f"{name}.{number}" if number else name, insist, host=name, at_s=at_s, mortal=mortal)
            if number < 3:
                process.on_death.append(lambda: start(number + 1, 2.0))

        start(0, after_s + WHEN_S[world.draw(WHEN, name)])

    def submit(self, stack: Stack, experiment: str, count: int, **fields: Any) -> None:
        tasks = [
            sample_task(str(number), experiment=experiment, submitted_at=system.now(), **fields)
            for number in range(count)
        ]
        submit_tasks(tasks, stack.queue(), experiment=experiment)
        self.laws.acknowledged.update({(task.id, task.generation): (task, self.world.now) for task in tasks})

    def cancel(self, stack: Stack, experiment: str) -> None:
        asked = self.world.now
        cancel_experiment(stack, experiment, now=system.now())
        self.laws.cancelled[experiment] = asked, self.world.now

    def purge(self, stack: Stack) -> None:
        asked = self.world.now
        stack.queue().purge()
        self.laws.purged = asked, self.world.now

    def worker(self, name: str, *, host: str, at_s: float = 0.0, lives: int = 4, **options: Any) -> Process:
        """A worker, and its successors after it is killed."""
        world = self.world

        def work() -> None:
            queue = self.open().queue()
            told = WorkerOptions(name=world.me().name, **options)  # type: ignore[union-attr]
            try:
                left = Worker(queue, told, reporter=Noting(world), host=SimulatedHost(world, self.laws)).run()  # type: ignore[arg-type]
                world.note(f"left: {left.reason}")
                queue.close()
            except InfrastructureFailure as problem:
                world.note(f"gave up: {problem.message}")
                if not world.chance.healed:
                    start(lives - 1, 20.0)

        def start(lives: int, at_s: float) -> Process:
            number = sum(each.startswith(f"{name}.") for each in world.processes)
            process = world.spawn(f"{name}.{number}", work, host=f"{host}{number}", at_s=at_s, mortal=True)
            if lives > 1:
                process.on_death.append(lambda: start(lives - 1, 10.0))
            return process

        return start(lives, at_s)


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


HEAL_S: Final = 240.0
FRESH_S: Final = 420.0


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
    _mend(town)

    def check() -> None:
        laws = town.laws
        laws.check_recorded()
        laws.check_failures()
        laws.check_waited("e1", town.done.get("waiter"))

    world.until_s = 6_000.0
    return check


def _mend(town: Town) -> None:
    """End all faults, and start a worker that is never killed: it must be enough."""
    world = town.world

    def heal() -> None:
        world.heal()

    world.spawn("healer", heal, at_s=HEAL_S)
    fresh = town.worker("fresh", host="f", at_s=FRESH_S, lives=1, idle_timeout=timedelta(seconds=600))
    fresh.mortal = False


SCENARIOS: Final[dict[str, Callable[[World], Callable[[], None]]]] = {"control": control, "workers": workers}


def run(
    scenario: str, seed: int, script: Tape | None = None, *, tracing: bool = False, wild: bool = False
) -> Result:
    """Run one world to its end."""
    world = World(seed, script, tracing=tracing, wild=wild)
    store._proven.add(URL)
    with system.replaced(**stand_ins(world)):
        try:
            check = SCENARIOS[scenario](world)
            world.run()
            seconds = world.now
            if world.broken is None:
                world.judge(check)
        finally:
            world.close()
    return Result(world.broken, world.chance.tape, world.steps, seconds, world.trace, world.cause)
