"""Jobs on a cluster, with records that clients reach over a connection: people who launch, repeat, cancel, retry and look."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from runtime.client.jobs.explain import read_facts
from runtime.client.jobs.handle import JobHandle, find_job
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions, prepare
from runtime.client.jobs.retry import retry_job
from runtime.client.jobs.targets import KnownRoot, find_target
from runtime.config import Project, Settings
from runtime.errors import NotPossible, RuntimeFailure, UnknownName
from runtime.jobs.ledger import DamagedFile, JobStatus
from runtime.jobs.spec import Array, Backoff, JobSpec, JobState, Retry
from runtime.snapshots.snapshot import Snapshot
from runtime.system import system
from tests.simulation.backend import KIND, Cluster
from tests.simulation.choices import Choice
from tests.simulation.files import Root, SimulatedHost
from tests.simulation.job_laws import JobLaws
from tests.simulation.scenarios.town import WHEN, WHEN_S
from tests.simulation.shims import Shims
from tests.simulation.world import STEADY_CALL, World

TARGET: Final = "cluster"
HOW: Final = ("requeues", "told", "nothing")
HOW_IT_STARTS = Choice("how", 1, 1, 1, fault=False)
LATE_S: Final = 70.0
LATE = Choice("late", 1, 1, fault=False)
"""Whether a job that is cancelled has had time to end."""
PICKS = Choice("picks", 1, 1, fault=False)
"""Whether somebody cancels one run of an array."""
RUNS = Choice("runs", 2, 1, 1, fault=False)
HEAL_S: Final = 300.0
END_S: Final = 1_500.0
SNAPSHOT: Final = Snapshot(archive=b"a tree")


def draw_runs(world: World, name: str) -> Array | None:
    """How many runs a job has; several are split into native jobs of two."""
    count = 1 + world.draw(RUNS, name)
    return Array(count=count) if count > 1 else None


class Site:
    """The cluster, its records, the laws, and people at machines of their own."""

    def __init__(self, world: World, *, labels: bool = False) -> None:
        self.world = world
        self.laws = JobLaws(world)
        self.root = self.laws.root = Root(world)
        how = HOW[world.draw(HOW_IT_STARTS, "site")]
        world.note(f"the backend starts again what is gone: {how}")
        self.cluster = Cluster(world, self.root, Shims(world, self.root, self.laws), how, labels=labels)
        world.spawn("mount", self.root.weather)
        world.spawn("healer", world.heal, at_s=HEAL_S)
        self.firmly = how == "nothing"
        """Whether a job that was lost goes on with the next equal launch, so that only its result is its end."""
        self.people: set[str] = set()
        self.done: dict[str, Any] = {}

    def settings(self, machine: str) -> Settings:
        folder = self.world.folder() / machine
        made = Settings(
            project=Project(root=folder, targets={TARGET: {"kind": KIND}}),
            data_dir=folder / "data",
            cache_dir=folder / "cache",
            config_dir=folder / "config",
        )
        if not folder.exists():
            folder.mkdir()
            KnownRoot(TARGET, SimulatedHost(self.root).files.address, made.data_dir).saw(self.root.identity)
        return made

    def person(
        self,
        name: str,
        act: Callable[[Settings], object],
        *,
        machine: str = "",
        after_s: float | None = None,
        mortal: bool = False,
    ) -> None:
        """Somebody who runs a command, again while it cannot be done and after it was killed; `after_s` is drawn."""
        world = self.world
        self.people.add(name)

        def insist() -> None:
            while True:
                try:
                    self.done[name] = act(self.settings(machine or name))
                    return
                except DamagedFile:
                    raise
                except RuntimeFailure as problem:
                    world.note(f"told: {problem.message}")
                    system.sleep(5.0)

        def start(number: int, at_s: float) -> None:
            own = f"{name}.{number}" if number else name
            process = world.spawn(own, insist, host=machine or name, at_s=at_s, mortal=mortal and number < 3)
            process.on_death.append(lambda: None if world.over else start(number + 1, 2.0))

        start(0, WHEN_S[world.draw(WHEN, name)] if after_s is None else after_s)

    def launch(self, settings: Settings, spec: JobSpec) -> JobHandle:
        options = LaunchOptions(base=settings.data_dir.parent, assume_yes=True, snapshot=SNAPSHOT)
        job = launch(spec, TARGET, settings=settings, options=options)
        self.laws.launched(str(spec.name), job.id, (spec.retry.failure, spec.retry.preemption))
        return job

    def look(self, job: JobHandle) -> JobStatus:
        asked_at = self.world.now
        status = job.status()
        self.laws.told(status, asked_at, firmly=self.firmly)
        return status

    def wait(self, job: JobHandle) -> tuple[str, JobStatus, float]:
        asked_at = self.world.now
        status = job.wait()
        self.laws.told(status, asked_at, firmly=self.firmly)
        return job.id, status, asked_at

    def find_early(self, settings: Settings, spec: JobSpec) -> JobHandle:
        """Find the job of a launch as soon as the ledger has it."""
        options = LaunchOptions(base=settings.data_dir.parent, snapshot=SNAPSHOT)
        job = prepare(spec, find_target(TARGET, settings), settings, options).plan.job.id
        while True:
            try:
                found = find_job(job, settings=settings, target=TARGET)
                found.entry()
                return found
            except UnknownName:
                system.sleep(0.1)

    def find(self, settings: Settings, name: str) -> JobHandle:
        """Find a job by the name of its launch, once that was acknowledged."""
        while name not in self.laws.names:
            system.sleep(1.0)
        return find_job(self.laws.names[name], settings=settings, target=TARGET)


def jobs(world: World) -> Callable[[], None]:
    """People launch, the same and other jobs, end them, start them again, and look."""
    world.calls = STEADY_CALL
    site = Site(world)
    laws = site.laws
    quick = Backoff(min=timedelta(seconds=2), max=timedelta(seconds=10))
    same = JobSpec(
        command=("train",), name="same", retry=Retry(failure=1, backoff=quick), array=draw_runs(world, "same")
    )
    other = replace(same, name="other", retry=Retry(failure=0, backoff=quick), array=draw_runs(world, "other"))
    doomed = replace(same, name="doomed")

    def launch_and_wait(spec: JobSpec) -> Callable[[Settings], object]:
        return lambda settings: site.wait(site.launch(settings, spec))

    site.person("ann", launch_and_wait(same), after_s=0.0, mortal=True)
    site.person("bob", lambda settings: site.launch(settings, same).id, after_s=0.0, mortal=True)
    site.person("carol", lambda settings: site.launch(settings, other).id, mortal=True)
    site.person("carla", lambda settings: site.launch(settings, other).id, machine="carol", after_s=40.0)
    site.person("dave", lambda settings: site.launch(settings, doomed).id, mortal=True)

    def cancel(settings: Settings) -> None:
        job = site.find_early(settings, doomed)
        laws.jobs[job.id].cancelling = min(world.now, laws.jobs[job.id].cancelling)
        while left := job.cancel():
            world.note(f"left: {left}")
            system.sleep(2.0)
        laws.jobs[job.id].cancelled = world.now

    site.person("canceller", cancel, after_s=LATE_S if world.draw(LATE, "canceller") else None, mortal=True)

    def cancel_one(settings: Settings) -> None:
        job = site.find_early(settings, same)
        known = laws.jobs[job.id]
        known.cancelling = min(world.now, known.cancelling)
        while left := job.cancel(indices=[1]):
            world.note(f"left: {left}")
            system.sleep(2.0)
        known.runs[1].cancelled = world.now

    if same.array is not None and world.draw(PICKS, "picker"):
        site.person("picker", cancel_one, mortal=True)

    def retry(settings: Settings) -> None:
        job = site.find(settings, "other")
        status = job.wait()
        if status.state is not JobState.FAILED:
            return
        laws.reopen(job.id)
        try:
            again = retry_job(job, settings)
        except NotPossible as problem:
            if "nothing of job" in problem.message:
                return
            raise
        laws.reopened(job.id, again.indices, began_again=not again.new)
        if again.new:
            laws.launched("again", again.job, (0, other.retry.preemption))

    site.person("retrier", retry, mortal=True)

    def watch(settings: Settings) -> None:
        """Look at one job after another."""
        for name in itertools.cycle(("same", "other", "doomed")):
            system.sleep(6.0 if world.now < HEAL_S else 100.0)
            if name not in laws.names:
                continue
            try:
                job = find_job(laws.names[name], settings=settings, target=TARGET)
                site.look(job)
                read_facts(job)
            except UnknownName:
                raise
            except RuntimeFailure as problem:
                world.note(f"told: {problem.message}")

    site.person("watcher", watch)

    def check() -> None:
        settings = site.settings("judge")
        natives = list(site.cluster.natives.values())
        laws.check_root()
        found: dict[str, JobStatus] = {}
        for job in [job for job, known in laws.jobs.items() if known.acknowledged is not None]:
            try:
                status = find_job(job, settings=settings, target=TARGET).status()
            except UnknownName:
                laws.check_ended(job, None)
                continue
            found[job] = status
            laws.check_ended(job, status)
            laws.check_held(job, status, natives)
            laws.check_evidence(job)
            laws.check_cancelled(job, status)
        laws.check_waited(site.done.get("ann"), found, firmly=site.firmly)
        laws.check_heard(site.people - {"ann", "watcher"} - site.done.keys())

    world.until_s = END_S
    return check
