"""Jobs whose records are removed: people who launch, repeat and retry, and somebody who collects garbage meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Final

from runtime.client.jobs.gc import CUT_OFF, find_garbage, fold, remove_all
from runtime.client.jobs.handle import find_job
from runtime.client.jobs.retry import retry_job
from runtime.client.jobs.targets import find_target, make_context, open_target
from runtime.config import Settings
from runtime.errors import NotPossible, UnknownName
from runtime.jobs.plan import owner_name
from runtime.jobs.spec import Backoff, JobSpec, JobState, Retry
from runtime.system import system
from tests.simulation.choices import Choice
from tests.simulation.scenarios.jobs import END_S, HEAL_S, TARGET, Site, draw_runs
from tests.simulation.world import STEADY_CALL, World

ASKED_S: Final = (0.0, 3.0, 45.0)
ASKED = Choice("asked", 2, 1, 1, fault=False)
"""How long somebody looks at the list of garbage before they agree."""
OLD_S: Final = (0.0, 20.0, 120.0)
OLD = Choice("old", 1, 1, 1, fault=False)
LABELS = Choice("labels", 1, 1, fault=False)


def garbage(world: World) -> Callable[[], None]:
    """People launch the same and other jobs again and again, and retry what failed, while what has ended is removed."""
    world.calls = STEADY_CALL
    site = Site(world, labels=bool(world.draw(LABELS, "site")))
    laws = site.laws
    quick = Backoff(min=timedelta(seconds=2), max=timedelta(seconds=10))
    same = JobSpec(
        command=("train",), name="same", retry=Retry(failure=0, backoff=quick), array=draw_runs(world, "same")
    )
    other = replace(same, name="other")

    def launch(spec: JobSpec, times: int) -> Callable[[Settings], object]:
        def act(settings: Settings) -> None:
            for _ in range(times):
                site.launch(settings, spec)
                system.sleep(40.0)

        return act

    site.person("ann", launch(same, 4), after_s=0.0, mortal=True)
    site.person("bob", launch(same, 2), mortal=True)
    site.person("carol", launch(other, 3), mortal=True)

    def retry(settings: Settings) -> None:
        """Look at one job after the other, and start again what failed."""
        for _ in range(6):
            system.sleep(15.0)
            for job in list(laws.jobs):
                try:
                    handle = find_job(job, settings=settings, target=TARGET)
                    if handle.status().state is not JobState.FAILED:
                        continue
                    laws.reopen(job)
                    again = retry_job(handle, settings)
                except (NotPossible, UnknownName) as problem:
                    world.note(f"told: {problem.message}")
                    continue
                laws.reopened(job, again.indices, began_again=not again.new)

    site.person("retrier", retry, mortal=True)
    older_than = timedelta(seconds=OLD_S[world.draw(OLD, "sweeper")])

    def collect(settings: Settings, older_than: timedelta, later: timedelta = timedelta(0)) -> None:
        with open_target(find_target(TARGET, settings), make_context(settings, settings.data_dir.parent)) as place:
            now = system.now() + later
            found = find_garbage(place, owner=owner_name(), older_than=older_than, now=now, tell=world.note)
            world.note(f"garbage: {' '.join(f'{each.kind} {each.name}' for each in found)}")
            system.sleep(ASKED_S[world.draw(ASKED)])
            laws.removing = world.now
            for each, left in remove_all(found, place, owner=owner_name()):
                world.note(f"removed {each.kind} {each.name[:8]}: {'; '.join(left) or 'wholly'}")
                if each.kind in ("job", "native") and not left:
                    laws.removed(each.name, site.cluster.natives.values())
                laws.removing = world.now
            fold(place, owner=owner_name())

    def sweep(settings: Settings) -> None:
        while world.now < HEAL_S:
            collect(settings, older_than)
            system.sleep(20.0)

    site.person("sweeper", sweep, mortal=True)

    def check() -> None:
        natives = list(site.cluster.natives.values())
        laws.check_root()
        for job, known in laws.jobs.items():
            try:
                handle = find_job(job, settings=site.settings("judge"), target=TARGET)
                status = handle.status()
            except UnknownName:
                laws.check_removed(job)
                continue
            if known.acknowledged is None and not status.state.terminal:
                handle.cancel()  # half of its parts were submitted, and nobody repeated the command
            if known.acknowledged is not None:
                laws.check_ended(job, status)
                laws.check_held(job, status, natives)
            if handle.launcher.resumes and len(status.entry.outcomes) < status.entry.indices:
                handle.cancel()  # it is lost and could go on, and nobody takes it up any more
        laws.check_announced()
        laws.check_heard(site.people - site.done.keys())
        collect(site.settings("judge"), timedelta(0), CUT_OFF)
        if site.cluster.labels:  # Without, a retry that was cut off before it called the backend might have called it.
            laws.check_clean(natives)

    world.until_s = END_S
    return check
