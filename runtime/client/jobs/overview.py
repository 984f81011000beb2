"""The jobs of every target that can be named here: this machine's are read, the others as they are known.

With `refresh` the others are asked too, at once; one that does not answer keeps what was known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from runtime.client.jobs.job_cache import JobFilter, KnownTarget, list_known
from runtime.client.jobs.status import TargetJobs, read_target
from runtime.client.jobs.targets import LOCAL, list_usable_targets, make_context, open_target
from runtime.config import Settings
from runtime.errors import RequestRefused, RuntimeFailure
from runtime.jobs.plan import Target
from runtime.launchers.registry import get_launcher
from runtime.system import system

AT_ONCE: Final = 8


def read_overview(
    settings: Settings,
    *,
    wanted: JobFilter,
    looked_at: datetime | None = None,
    refresh: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> list[TargetJobs]:
    """Read the jobs of all targets, those of `local` first. `tell` gets a line for each that cannot be used here."""
    now = system.now()
    targets = list_usable_targets(settings, tell=tell)
    local = [target for target in targets if target.name == LOCAL]
    look = partial(_look, settings=settings, wanted=wanted, looked_at=looked_at, now=now, tell=tell)
    found = [seen for target in local for seen in [look(KnownTarget(target=target))]]
    here = {each.job for seen in found for each in seen.jobs} | _names(settings.data_dir / "jobs" / "jobs")
    known = [
        each
        for each in list_known(targets, settings, leave_out=here)
        if each.target not in local and (refresh or each.target.name != LOCAL or each.jobs)
    ]
    if not refresh:
        return [*found, *(show_known(each, wanted, now) for each in known)]
    with system.pool(AT_ONCE, name="targets") as pool:
        return [*found, *pool.map(look, known)]


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def read_one(
    target: Target,
    settings: Settings,
    *,
    wanted: JobFilter | None = None,
    looked_at: datetime | None = None,
    now: datetime | None = None,
) -> TargetJobs:
    """Ask one target for its jobs. Raises the failure of a target that does not answer."""
    with open_target(target, make_context(settings)) as place:
        return read_target(place, now=now or system.now(), looked_at=looked_at, wanted=wanted, settings=settings)


def _look(
    known: KnownTarget,
    *,
    settings: Settings,
    wanted: JobFilter,
    looked_at: datetime | None,
    now: datetime,
    tell: Callable[[str], None],
) -> TargetJobs:
    try:
        get_launcher(known.target.kind).check_settings(known.target)
        return read_one(known.target, settings, wanted=wanted, looked_at=looked_at, now=now)
    except RequestRefused as problem:
        tell(f"target `{known.target.name}` cannot be used here: {problem.message}")
        return show_known(known, wanted, now)
    except RuntimeFailure as problem:
        return replace(show_known(known, wanted, now), problem=problem.message)


def show_known(known: KnownTarget, wanted: JobFilter, now: datetime) -> TargetJobs:
    """Return what is known of a target without asking it."""
    shown = wanted.apply(known.jobs, now)
    return TargetJobs(
        target=known.target.name,
        records=known.target.records or "",
        jobs=tuple(shown),
        left_out=0 if wanted.chooses else len(known.jobs) - len(shown),
        as_of=known.as_of,
    )
