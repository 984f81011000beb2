"""The embedded stack under faults: workers of one host on one SQLite file, and worker threads on a queue in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from runtime.client.tasks.cancel import cancel_task
from runtime.client.tasks.redrive import read_dead, redrive, retry
from runtime.client.tasks.submit import submit_tasks
from runtime.client.tasks.wait import wait
from runtime.errors import InfrastructureFailure
from runtime.queues.base import Queue
from runtime.queues.memory import MemoryQueue
from runtime.queues.sqlite.queue import SqliteQueue
from runtime.records import store
from runtime.records.base import RecordStore
from runtime.records.sqlite import SqliteRecords
from runtime.system import system
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState
from runtime.testing import sample_task
from runtime.worker.attempts.model import AttemptEnd, AttemptOrder
from runtime.worker.options import WorkerOptions
from runtime.worker.worker import Worker
from tests.simulation.attempts import Noting, SimulatedHost
from tests.simulation.choices import Choice
from tests.simulation.embedded import IN_ORDER, STOP_S, Kernel, SteppingBlobs, SteppingRecords, WatchedLeases
from tests.simulation.knobs import turn_knobs
from tests.simulation.laws import NEVER_CHANGES, OBEYED_WITHIN_S, OBEYS_CANCEL, PURGED, Laws
from tests.simulation.scenarios.town import WHEN, WHEN_S, Town
from tests.simulation.world import Process, World

HOST: Final = "h"
PURGES = Choice("purges", 3, 1, fault=False)
PAUSES = Choice("pauses", 1, 1, fault=False)
SLOW_S = (0.0, 0.0, 0.05, 2.0)
SLOW = Choice("slow", 60, 4, 2, 1)
REAPED_S = (0.0, 0.6, 6.0, 25.0)
REAPED = Choice("reaped", 2, 1, 1, 1)
"""Killed so long after it began, whatever it does."""
STALL = Choice("stall", 400, 1, 1, 1)
PAUSE_S = 40.0
NOTICED_WITHIN_S = 20.0
"""A death is noticed in this time by a worker that nothing holds up; leases run out after 30 s only."""
STOPPED_WITHIN_S = 35.0
"""An attempt whose task was ended by others goes on for this long at most: until a renewal, which may be slow."""

FENCED = "P4: only the holder of a lease ends its task without success"
PAUSED = "an acknowledged pause is in force: no task is leased"
CANCELLED_AT_ONCE = "an acknowledged cancel has ended every task of an embedded file"
LEASE_KEPT = "the lease of a worker that lives and renews is given to no other"
NOTICED = "a worker's death is noticed at once"
STOPPED = "an attempt stops once its task has ended"
IN_ONE_PLACE = "a task is in exactly one place"
COUNTED = "totals are exact"


@dataclass
class Run:
    """An attempt that has started."""

    order: AttemptOrder
    process: Process
    at: float
    ended_at: float | None = None


class EmbeddedLaws(Laws):
    """Laws that hold because queue and records are one file of one host."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.runs: list[Run] = []
        self.paused_at: float | None = None
        """When the pause in force was acknowledged."""
        self.recorded_at: dict[tuple[str, int], float] = {}
        self.disturbed: Callable[[Process], bool] = lambda process: False
        """Whether a process was stopped, kept waiting or could not renew, so that its leases may have run out."""
        self.calm: Callable[[], bool] = lambda: True
        """Whether no process was, and the disk was never full."""
        self.pause_is_strict = True
        self._holders: dict[str, Process] = {}
        self._died_at: dict[Process, float] = {}
        self._serving: dict[Process, float] = {}

    # workers

    def serves(self, process: Process) -> None:
        self._serving[process] = self._world.now
        process.on_death.append(lambda: self._dies(process))

    def leaves(self, process: Process) -> None:
        self._serving.pop(process, None)

    def _dies(self, process: Process) -> None:
        self.leaves(process)
        self._died_at[process] = self._world.now

    # what is committed

    def recorded(self, record: Record) -> None:
        key = record.task_id, record.generation
        if key in self.records:
            self._break(NEVER_CHANGES, f"{record.task_id[-12:]} g{record.generation} was recorded twice")
        self.recorded_at.setdefault(key, self._world.now)
        super().recorded(record)

    def settled(self, record: Record, *, held: bool) -> None:
        if not held and record.state in (TaskState.FAILED, TaskState.EXPIRED):
            self._break(FENCED, f"{record.task_id[-12:]} g{record.generation} is {record.state} by a lost lease")

    def changed(self, what: str) -> None:
        self._break(NEVER_CHANGES, f"{what} was changed")

    def leased(self, token: str) -> None:
        process = self._world.me()
        assert process is not None
        self._holders[token] = process
        if self.paused_at is not None and self.pause_is_strict:
            self._break(PAUSED, f"one is, {self._world.now - self.paused_at:.1f} s after it")

    def freed(self, token: str, deadline: float, *, ended: bool) -> None:
        """See a lease end; `deadline` is the holder's, in boot time."""
        process, me = self._holders.pop(token), self._world.me()
        alive = not process.dead or getattr(process, "lingers_until", 0.0) > self._world.now
        left_s = deadline - self._world.boot_time()
        if me is not process and not ended and alive and left_s > 0:
            self._break(LEASE_KEPT, f"one is given back by another, {left_s:.1f} s before it runs out")
        if process.dead:
            self._check_noticed(process)

    def _check_noticed(self, process: Process) -> None:
        died = max(self._died_at.get(process, 1e9), getattr(process, "lingers_until", 0.0))
        late_s = self._world.now - died
        if late_s > NOTICED_WITHIN_S and self.calm() and any(since < died for since in self._serving.values()):
            self._break(NOTICED, f"it took {late_s:.1f} s")

    # attempts

    def attempt_starts(self, order: AttemptOrder, process: Process) -> None:
        now = self._world.now
        if self.disturbed(process):
            # It may begin late what it leased before it was stopped.
            self.seen[order.task_id, order.generation].starts.append((now, order.token, process.host.name))
        else:
            super().attempt_starts(order, process)
            self._check_start(order)
        self.runs.append(Run(order, process, now))

    def _check_start(self, order: AttemptOrder) -> None:
        now = self._world.now
        for run in self.runs:
            same = (run.order.task_id, run.order.generation) == (order.task_id, order.generation)
            if same and run.ended_at is None and not run.process.dead and not self.disturbed(run.process):
                self._break(LEASE_KEPT, f"{order.task_id[-12:]} runs for {now - run.at:.1f} s already")
        if self.paused_at is not None and now > self.paused_at + OBEYED_WITHIN_S:
            self._break(PAUSED, f"one starts {now - self.paused_at:.0f} s after it")

    def attempt_ends(self, order: AttemptOrder, ended: AttemptEnd) -> None:
        super().attempt_ends(order, ended)
        run = next(run for run in self.runs if run.order.token == order.token)
        run.ended_at = now = self._world.now
        at = self.recorded_at.get((order.task_id, order.generation))
        late_s = 0.0 if at is None else now - max(at, run.at)
        if late_s > STOPPED_WITHIN_S and not self.disturbed(run.process):
            self._break(STOPPED, f"it went on for {late_s:.0f} s")

    # what was acknowledged

    def check_ended(self, law: str, asked: float, experiment: str | None = None) -> None:
        left = [
            key
            for key, (task, at) in self.acknowledged.items()
            if at < asked and experiment in (None, task.experiment) and key not in self.records
        ]
        if left:
            self._break(law, f"{len(left)} have no record")


class EmbeddedStack:
    default_queue = "default"
    name = "sim"

    def __init__(self, queue: Any) -> None:
        self._queue: Queue = queue
        self.records: Any = queue.records

    def queue(self, name: str | None = None) -> Any:
        return self._queue

    def queue_names(self) -> list[str]:
        return ["default"]


class OneHost(Town):
    """A town on one machine, whose people and workers share what `opens` returns."""

    laws: EmbeddedLaws

    def __init__(self, world: World, laws: EmbeddedLaws) -> None:
        self.world, self.laws, self.done = world, laws, {}
        self.people, self._asked = set(), {}
        turn_knobs(world)
        self.strict = True
        """Orders are obeyed in the transaction that gives them."""
        self.opens: Callable[[], Any]
        self.ends: Callable[[Process], None] = lambda process: None
        """What the end of a process closes."""

    def open(self) -> Any:
        return EmbeddedStack(self.opens())

    def person(self, name: str, act: Callable[[Any], object], *, after_s: float = 0.0, mortal: bool = False) -> None:
        world = self.world

        def insist() -> None:
            process = world.me()
            assert process is not None
            while name not in self.done:
                try:
                    self.done[name] = act(self.open())
                except InfrastructureFailure as problem:
                    world.note(f"told: {problem.message}")
                    system.sleep(5.0)
                self.ends(process)

        def start(number: int, at_s: float) -> None:
            process = world.spawn(
                f"{name}.{number}" if number else name, insist, host=HOST, at_s=at_s, mortal=mortal and number < 3
            )
            if number < 3:
                process.on_death.append(lambda: start(number + 1, 2.0))

        start(0, after_s + WHEN_S[world.draw(WHEN, name)])

    def worker(self, name: str, *, host: str = HOST, at_s: float = 0.0, lives: int = 4, **options: Any) -> Process:
        world, laws = self.world, self.laws
        mortal = options.pop("mortal", True)

        def work() -> None:
            process = world.me()
            assert process is not None
            laws.serves(process)
            told = WorkerOptions(name=process.name, **options)
            try:
                queue = self.opens()
                left = Worker(queue, told, reporter=Noting(world), host=SimulatedHost(world, laws)).run()  # type: ignore[arg-type]
                world.note(f"left: {left.reason}")
                laws.leaves(process)
                queue.close()
            except InfrastructureFailure as problem:
                world.note(f"gave up: {problem.message}")
                laws.leaves(process)
                again = True
            else:
                again = False
            self.ends(process)
            if again:
                start(max(1, lives - 1), 20.0)

        def start(lives: int, at_s: float) -> Process:
            number = sum(each.startswith(f"{name}.") and "guardian" not in each for each in world.processes)
            process = world.spawn(f"{name}.{number}", work, host=HOST, at_s=at_s, mortal=mortal)
            if lives > 1:
                process.on_death.append(lambda: start(lives - 1, 10.0))
            if mortal and (pick := world.draw(REAPED, process.name)):
                reap_at_s = at_s + REAPED_S[pick]
                world.spawn(f"reaper-of-{process.name}", lambda: world.kill(process), host=HOST, at_s=reap_at_s)
            return process

        return start(lives, at_s)

    def submit_singly(self, stack: Any, experiment: str, count: int) -> None:
        """Submit tasks one by one; from the third on each is put as its row alone."""
        for number in range(count):
            task = sample_task(f"single-{number}", experiment=experiment, submitted_at=system.now())
            submit_tasks([task], stack.queue(), experiment=experiment)
            self.laws.acknowledged[task.id, task.generation] = task, self.world.now

    def submit_delayed(self, stack: Any, experiment: str) -> None:
        """Submit one task that is due later."""
        due = system.now() + timedelta(seconds=20)
        task = sample_task("later", experiment=experiment, submitted_at=system.now(), not_before=due)
        submit_tasks([task], stack.queue(), experiment=experiment)
        self.laws.acknowledged[task.id, task.generation] = task, self.world.now

    def cancel(self, stack: Any, experiment: str) -> None:
        asked = self.world.now
        super().cancel(stack, experiment)
        if self.strict:
            self.laws.check_ended(CANCELLED_AT_ONCE, asked, experiment)

    def cancel_one(self, stack: Any, experiment: str) -> str:
        """Cancel the first task of an experiment, as `runtime cancel ID` does; returns its id."""
        task_id = next(task.id for task, _ in self.laws.acknowledged.values() if task.experiment == experiment)
        self.laws.ending.add(task_id)
        cancelled = cancel_task(stack, task_id, now=system.now(), by="somebody")
        if not any(key[0] == task_id for key in self.laws.records):
            self.laws._break(OBEYS_CANCEL, f"{cancelled.state} was said of a task without a record")
        return task_id

    def purge(self, stack: Any) -> None:
        asked = self.world.now
        super().purge(stack)
        self.laws.check_ended(PURGED, asked)

    def pause_a_while(self, stack: Any) -> None:
        stack.queue().pause()
        self.laws.paused_at = self.world.now
        system.sleep(PAUSE_S)
        self.laws.paused_at = None
        stack.queue().resume()

    def try_again(self, stack: Any, experiment: str) -> None:
        """Redrive what failed."""
        for one in list(redrive(stack, read_dead(stack.records, experiment), now=system.now())):
            if one.queue is not None:
                self._again(one.task, one.generation)

    def retry_one(self, stack: Any, task_id: str) -> None:
        one = retry(stack, task_id, now=system.now())
        if one.queue is not None:
            self._again(one.task, one.generation)

    def _again(self, task_id: str, generation: int) -> None:
        known = next(task for (known, _), (task, _) in self.laws.acknowledged.items() if known == task_id)
        self.laws.acknowledged.setdefault(
            (task_id, generation), (replace(known, generation=generation), self.world.now)
        )

    def until(self, *names: str) -> None:
        while not all(name in self.done for name in names):
            system.sleep(1.0)

    def live(self, *, mortal: bool, heal_s: float, idle_s: float) -> None:
        """Have people and workers do what both scenarios have. All faults end after `heal_s`."""
        world = self.world
        self.person("submitter", lambda stack: self.submit(stack, "e1", 3, max_failures=2), mortal=mortal)
        self.person("other", lambda stack: self.submit_singly(stack, "e2", 4))
        self.person("planner", lambda stack: self.submit_delayed(stack, "e1"), mortal=mortal)

        def cancel(stack: Any) -> None:
            self.until("other")
            self.cancel(stack, "e2")

        def cancel_one(stack: Any) -> str:
            self.until("submitter")
            return self.cancel_one(stack, "e1")

        def try_again(stack: Any) -> None:
            self.until("submitter")
            system.sleep(40.0)
            self.try_again(stack, "e1")

        def retry_cancelled(stack: Any) -> None:
            self.until("canceller-of-one")
            self.retry_one(stack, self.done["canceller-of-one"])

        self.person("canceller", cancel, after_s=2.0, mortal=mortal)
        self.person("canceller-of-one", cancel_one, mortal=mortal)
        busy = ["submitter", "planner", "canceller"]
        for twin in ("", "-too"):  # Two people who do the same at the same time.
            self.person(f"redriver{twin}", try_again, after_s=10.0, mortal=mortal)
            self.person(f"retrier{twin}", retry_cancelled, after_s=20.0, mortal=mortal)
            busy += [f"redriver{twin}", f"retrier{twin}"]
        if world.draw(PURGES, "purger"):
            self.person("purger", self.purge, after_s=5.0, mortal=mortal)
            busy.append("purger")
        if world.draw(PAUSES, "pauser"):
            self.person("pauser", self.pause_a_while, after_s=2.0, mortal=mortal)
            busy.append("pauser")

        def wait_for(stack: Any) -> Any:
            self.until(*busy)
            return wait("e1", queue=stack.queue())

        self.person("waiter", wait_for)
        for number in range(2):
            self.worker(f"w{number}", at_s=0.3 * number, idle_timeout=timedelta(seconds=idle_s), mortal=mortal)
        world.spawn("healer", world.heal, host=HOST, at_s=heal_s)
        idle = timedelta(seconds=idle_s)
        self.worker("fresh", at_s=heal_s + 120.0, lives=1, idle_timeout=idle, mortal=False)

    def check(self) -> None:
        laws = self.laws
        laws.check_recorded()
        laws.check_failures()
        laws.check_purged()
        laws.check_waited("e1", self.done.get("waiter"), tried_again=True)


def sqlite(world: World) -> Callable[[], None]:
    """Worker processes of one host and the people there, on one file."""
    laws = EmbeddedLaws(world)
    kernel = Kernel(world, laws)  # type: ignore[arg-type]
    town = OneHost(world, laws)
    town.opens, town.ends = kernel.open, kernel.release
    laws.disturbed = kernel.disturbed.__contains__
    laws.calm = lambda: not kernel.disturbed and not kernel.was_full
    town.live(mortal=True, heal_s=200.0, idle_s=60.0)

    def check() -> None:
        town.check()
        check_file(laws, kernel.open())

    world.until_s = 6_000.0
    return check


def check_file(laws: EmbeddedLaws, queue: SqliteQueue) -> None:
    """Each task is in one place, and the totals count what is there."""
    records = queue.records
    assert isinstance(records, SqliteRecords)
    with records.file.reading() as connection:
        places = connection.execute(IN_ORDER).fetchall()
    wrong = [row for row in places if sum(row[1:]) != 1]
    if wrong:
        laws._break(IN_ONE_PLACE, f"{wrong[0]} (ready, delayed, leased, recorded)")
    for experiment in ("e1", "e2"):
        counts: dict[TaskState, int] = dict.fromkeys(TaskState, 0)
        for _, stored in records.list_tasks(experiment):
            counts[stored.state] += 1
        told = records.totals(experiment).counts
        if dict(told) != counts:
            laws._break(COUNTED, f"{dict(told)} of {counts}")


def memory(world: World) -> Callable[[], None]:
    """Threads of one process that share a queue in its memory; one stalls at times, and none dies alone."""
    store._proven.add("memory:")
    laws = EmbeddedLaws(world)
    disturbed: set[Process] = set()

    def step() -> None:
        me = world.me()
        if me is None or me.name == "judge":
            return
        if pick := world.draw(SLOW):
            world.pause(SLOW_S[pick])
        if span := world.draw(STALL):
            # It may hold the queue's mutex, so whoever waits for that is late as well.
            disturbed.update(world.processes.values())
            world.stop(me, STOP_S[span])

    shared: list[MemoryQueue] = []

    def opens() -> MemoryQueue:
        if not shared:
            records: RecordStore = SteppingRecords(SteppingBlobs(step, laws.written, world.folder()))
            shared.append(queue := MemoryQueue(records))
            queue._held = WatchedLeases(laws, lambda task: (task.id, task.generation) in laws.records)  # type: ignore[arg-type]
        return shared[0]

    town = OneHost(world, laws)
    town.opens, town.strict, laws.pause_is_strict = opens, False, False
    laws.disturbed, laws.calm = disturbed.__contains__, lambda: not disturbed
    town.live(mortal=False, heal_s=60.0, idle_s=15.0)
    world.until_s = 6_000.0
    return town.check
