"""What the scenarios of tasks share: a bucket, the queue's service, laws, and people and workers who use them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from runtime.client.tasks.cancel import cancel_experiment
from runtime.client.tasks.redrive import read_dead, redrive, retry
from runtime.client.tasks.submit import submit_tasks
from runtime.errors import InfrastructureFailure
from runtime.queues.pubsub.queue import PubSubQueue
from runtime.records.base import RecordStore
from runtime.records.control_commands import QueueControl
from runtime.records.store import BlobRecords
from runtime.system import system
from runtime.tasks.model import TaskState
from runtime.testing import sample_task
from runtime.worker.options import WorkerOptions
from runtime.worker.worker import Worker
from tests.simulation.attempts import Noting, SimulatedHost
from tests.simulation.bucket import Bucket, open_records
from tests.simulation.choices import Choice
from tests.simulation.knobs import turn_knobs
from tests.simulation.laws import Laws
from tests.simulation.service import POLICY, Client, Service
from tests.simulation.world import Process, World

WHEN_S = (0.0, 1.0, 5.0, 30.0)
WHEN = Choice("when", 3, 2, 2, 1, fault=False)
TERMS: Final[tuple[dict[str, float], ...]] = ({}, {"not_before": 40.0}, {"expires_at": 25.0}, {"timeout": 6.0})
"""What is asked for a task, in seconds."""
TERM = Choice("term", 6, 1, 1, 1, fault=False)
TERM_S: Final = (0.0, 3.0, 20.0, 90.0)
SIGTERM = Choice("sigterm", 5, 1, 1, 1)
"""When the machine of a worker asks it to leave."""
LONG_TERMS: Final[tuple[dict[str, float], ...]] = (
    {},
    {"not_before": 5_400.0},
    {"expires_at": 3_000.0},
    {"timeout": 1_000.0},
)
"""The same in worlds that last for hours."""
HEAL_S: Final = 240.0
FRESH_S: Final = 180.0
"""How long after all faults are over another worker comes."""
LASTS: Final = timedelta(seconds=1_500)
"""How long the last worker waits for tasks: one that was put off by a clock ten minutes ahead comes back within it."""


class Stack:
    """An open stack as one process has it."""

    default_queue = "default"
    name = "sim"

    def __init__(self, world: World, bucket: Bucket, service: Service) -> None:
        self.records: BlobRecords = open_records(world, bucket)
        self._queue = PubSubQueue(service.settings, self.records, client=Client(world, service))  # type: ignore[arg-type]

    def queue(self, name: str | None = None) -> PubSubQueue:
        return self._queue

    def queue_names(self) -> list[str]:
        return ["default"]


class Town:
    """The parts that all scenarios have: a bucket, a service, laws, and people who do things until they are done."""

    terms = TERMS

    def __init__(self, world: World, laws: type[Laws] = Laws) -> None:
        self.world = world
        turn_knobs(world)
        self.bucket = Bucket(world)
        self.service = Service(world, world.draw(POLICY))
        self.laws = laws(world, self.bucket)
        self.done: dict[str, Any] = {}
        """By name: what people were told."""
        self.people: set[str] = set()
        self._asked: dict[tuple[str, int], int] = {}
        self._at_work: dict[str, Worker] = {}
        """By process."""

    def open(self) -> Stack:
        return Stack(self.world, self.bucket, self.service)

    def person(self, name: str, act: Callable[[Stack], object], *, after_s: float = 0.0, mortal: bool = False) -> None:
        """Somebody who runs a command, again while the services are away and after it was killed."""
        world = self.world
        self.people.add(name)

        def insist() -> None:
            while True:
                try:
                    self.done[name] = act(self.open())
                    return
                except InfrastructureFailure as problem:
                    world.note(f"told: {problem.message}")
                    system.sleep(5.0)

        def start(number: int, at_s: float) -> None:
            process = world.spawn(
                f"{name}.{number}" if number else name, insist, host=name, at_s=at_s, mortal=mortal and number < 3
            )
            if number < 3:
                process.on_death.append(lambda: start(number + 1, 2.0))

        start(0, after_s + WHEN_S[world.draw(WHEN, name)])

    def until(self, name: str) -> None:
        """Wait until that person is done."""
        while name not in self.done:
            system.sleep(1.0)

    def submit(self, stack: Stack, experiment: str, count: int, first: int = 0, **fields: Any) -> None:
        now = system.now()
        tasks = []
        for number in range(first, first + count):
            terms: dict[str, Any] = {
                name: timedelta(seconds=after) for name, after in self.terms[self._terms(experiment, number)].items()
            }
            terms.update((name, now + terms[name]) for name in ("not_before", "expires_at") if name in terms)
            tasks.append(sample_task(str(number), experiment=experiment, submitted_at=now, **terms, **fields))
        for task in tasks:
            self.laws.tasks.setdefault((task.id, 1), (task, self.world.now))
        submit_tasks(tasks, stack.queue(), experiment=experiment)
        self.laws.acknowledged.update({(task.id, task.generation): (task, self.world.now) for task in tasks})

    def _terms(self, experiment: str, number: int) -> int:
        """Draw what is asked for a task; the same when it is submitted again."""
        return self._asked.setdefault((experiment, number), self.world.draw(TERM))

    def cancel(self, stack: Stack, experiment: str) -> None:
        asked = self.world.now
        self.laws.ending.add(experiment)
        cancel_experiment(stack, experiment, now=system.now())
        self.laws.cancelled[experiment] = asked, self.world.now
        self.laws.ending.discard(experiment)

    def purge(self, stack: Stack) -> None:
        asked = self.world.now
        self.laws.ending.add("purge")
        stack.queue().purge()
        self.laws.purged = asked, self.world.now
        self.laws.ending.discard("purge")
        self.laws.check_purged()

    def _watch_orders(self, records: RecordStore) -> None:
        """Note when the running worker has its orders."""
        world, laws, process, control = self.world, self.laws, self.world.me(), records.control
        assert process is not None

        def read(queue: str, **named: Any) -> QueueControl:
            began = world.now
            found = control(queue, **named)
            if not named.get("max_age"):
                laws.read[process.name] = began, world.now
            return found

        vars(records)["control"] = read

    def redrive(self, stack: Stack, experiment: str) -> None:
        self.laws.redriven(list(redrive(stack, read_dead(stack.records, experiment), now=system.now())))

    def retry_the_others(self, stack: Stack, experiment: str) -> None:
        """Have tasks tried again that no redrive takes, since they were cancelled or have expired."""
        for state in (TaskState.CANCELLED, TaskState.EXPIRED):
            for mark in stack.records.marks(experiment, state):
                self.laws.redriven([retry(stack, mark.task_id, now=system.now())])

    def check_tasks(self) -> None:
        """The laws that hold wherever a worker was left in peace."""
        laws = self.laws
        laws.check_recorded()
        laws.check_failures()
        laws.check_settled()
        laws.check_purged()
        laws.check_marks()

    def worker(
        self, name: str, *, host: str, at_s: float = 0.0, lives: int = 4, one_host: bool = False, **options: Any
    ) -> Process:
        """A worker, and its successors after it is killed, each on a host of its own unless `one_host`."""
        world = self.world

        def work() -> None:
            queue = self.open().queue()
            self._watch_orders(queue.records)
            told = WorkerOptions(name=world.me().name, **options)  # type: ignore[union-attr]
            worker = Worker(queue, told, reporter=Noting(world), host=SimulatedHost(world, self.laws))  # type: ignore[arg-type]
            self._may_be_asked_to_leave(worker)
            try:
                left = worker.run()
                world.note(f"left: {left.reason}")
                if left.reason == "SIGTERM":
                    start(max(1, lives - 1), 10.0)
                self.laws.left(told.name or "", left)
                queue.close()
            except InfrastructureFailure as problem:
                world.note(f"gave up: {problem.message}")
                if not world.chance.healed:
                    start(lives - 1, 20.0)

        def start(lives: int, at_s: float) -> Process:
            number = sum(each.startswith(f"{name}.") for each in world.processes)
            process = world.spawn(
                f"{name}.{number}", work, host=host if one_host else f"{host}{number}", at_s=at_s, mortal=True
            )
            if lives > 1:
                process.on_death.append(lambda: start(lives - 1, 10.0))
            return process

        return start(lives, at_s)

    def _may_be_asked_to_leave(self, worker: Worker) -> None:
        me = self.world.me()
        assert me is not None
        self._at_work[me.name] = worker
        if me.mortal and (pick := self.world.draw(SIGTERM)):
            self.ask_to_leave(me, TERM_S[pick])

    def ask_to_leave(self, process: Process, after_s: float = 0.0) -> None:
        """SIGTERM for a worker."""
        worker = self._at_work.get(process.name)
        if worker is not None:
            self.world.spawn(
                f"term-of-{process.name}",
                lambda: None if process.dead else worker.stop("SIGTERM"),
                host=process.host.name,
                at_s=after_s,
            )

    def mend(self, *, lives: int = 1, after_s: float = HEAL_S) -> None:
        """End all faults after a while, and start a worker that is not killed any more: it must be enough."""
        world, laws = self.world, self.laws

        def end() -> None:
            """Nothing is left to wait for once everybody has what they came for."""

            def is_open() -> bool:
                return bool(
                    self.people - self.done.keys()
                    or laws.acknowledged.keys() - laws.records.keys()
                    or self.service.tasks()
                )

            while is_open():
                system.sleep(10.0)
            world.until_s = world.now

        world.spawn("healer", world.heal, at_s=after_s)
        world.spawn("ender", end, at_s=after_s + FRESH_S)
        self.worker("fresh", host="f0", at_s=after_s + FRESH_S, lives=lives, one_host=True, idle_timeout=LASTS)
