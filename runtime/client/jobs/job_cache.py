"""This machine's notes on jobs: the launches from here with their terminals, and each target as it was last read.

    launched/JOB                its target and, if it has one of its own, its record root
    known/launches/JOB.NAME     a launch: owner, runs, GPUs, time, terminal and the digest of its target
    known/targets/DIGEST.json   the jobs of a target when it was last read; the digest is of the target's definition

All of it lies in the user's data folder and is a cache: a folder that cannot be written stops no command, a missing or
damaged file counts as nothing known, and what happens to a job is decided by its record root and its backend alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

from runtime.config import Settings
from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue
from runtime.file_trust import make_folders, write_private
from runtime.jobs.plan import JobIdentity, Target, owner_name
from runtime.jobs.spec import JobSpec, JobState
from runtime.system import system
from runtime.units import format_time, parse_time

NEWEST: Final = 10
"""Number of newest jobs that an overview shows in any state."""
RECENT: Final = timedelta(days=1)
KEPT: Final = 500
"""Ended jobs of a target that are remembered, and launches that are shown without a look at their target: the newest."""
_NOTE_BYTES: Final = 8 << 20
_TERMINALS_READ: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    job: str
    name: str
    target: str
    owner: str
    state: JobState
    reason: EndReason | None
    runs: int
    totals: Mapping[JobState, int]
    launched_at: datetime
    ended_at: datetime | None
    """When it ended, if its result has the time; of an array, when its first failed run did."""
    new: bool = False
    gpus: float | None = None
    """GPUs of one run; None if that was not written down."""
    started_at: datetime | None = None
    """When its first run began."""
    elapsed_s: float | None = None
    """Seconds from then to its end, or to `as_of`."""
    as_of: datetime | None = None
    """When this was known; the state may have changed since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTarget:
    """A target as it was last read, and what was launched on it from here since."""

    target: Target
    jobs: tuple[JobLine, ...] = ()
    as_of: datetime | None = None
    """None if it was never read from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs an overview shows. Without a choice: those that have not ended, that failed in the last day, and the newest."""

    all: bool = False
    states: frozenset[JobState] = field(default_factory=frozenset)
    since: datetime | None = None
    """Launched since then."""
    name: str | None = None
    """A pattern such as `train-*`."""
    owner: str | None = None

    @property
    def chooses(self) -> bool:
        """Return whether every job is looked at, and not only recent ones."""
        return self.all or bool(self.states) or self.since is not None or self.name is not None

    def apply(self, jobs: Iterable[JobLine], now: datetime) -> list[JobLine]:
        """Return the chosen jobs, the newest first."""
        ranked = sorted(filter(self._fits, jobs), key=lambda each: each.launched_at, reverse=True)
        return ranked if self.chooses else [each for place, each in enumerate(ranked) if is_recent(each, place, now)]

    def _fits(self, each: JobLine) -> bool:
        from fnmatch import fnmatchcase

        return (
            (not self.states or each.state in self.states)
            and (self.since is None or each.launched_at >= self.since)
            and (self.name is None or fnmatchcase(each.name, self.name))
            and (self.owner is None or each.owner == self.owner)
        )


def is_recent(each: JobLine, place: int, now: datetime) -> bool:
    """Return whether an overview shows the job at this place, counted from the newest, unasked.

    A job of which nothing but its launch is known may have ended long ago.
    """
    living = not each.state.terminal and each.as_of != each.launched_at
    failed = each.state in (JobState.FAILED, JobState.UNKNOWN)
    return place < NEWEST or living or (failed and now - (each.ended_at or each.launched_at) < RECENT)


# launches


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedJob:
    """A job that was launched from this machine, or imported here."""

    job: str
    name: str
    at: datetime


def remember_job(
    job: JobIdentity | str,
    target: Target,
    settings: Settings,
    *,
    records: str | None = None,
    spec: JobSpec | None = None,
    runs: int = 1,
    name: str = "",
) -> None:
    """Note on this machine where a job lies, and the terminal it was launched from.

    The note is a cache, so a folder that cannot be written stops no launch. `records` is a record root other than the
    target's own.
    """
    identity = job if isinstance(job, str) else job.id
    name = name if isinstance(job, str) else job.name
    note = {
        "owner": owner_name() if isinstance(job, str) else job.owner,
        "runs": runs,
        "gpus": count_gpus(spec) if spec else None,
        "at": format_time(system.now()),
        "terminal": name_terminal() if spec else None,
        "definition": _digest(target),
    }
    with contextlib.suppress(OSError):
        write_private(settings.data_dir / "launched" / identity, f"{target.name}\n{records or ''}")
        if name and "/" not in name:
            write_private(_launches(settings) / f"{identity}.{name}", json.dumps(note))


def forget_job(job: str, settings: Settings) -> None:
    """Drop the notes of `remember_job`, when a job is removed."""
    with contextlib.suppress(OSError):
        (settings.data_dir / "launched" / job).unlink()
    for path in _launches(settings).glob(f"{job}.*"):
        with contextlib.suppress(OSError):
            path.unlink()


def count_gpus(spec: JobSpec) -> float:
    """Return the GPUs of one run."""
    return (spec.resources.gpus.count if spec.resources.gpus else 0) * spec.nodes


def name_terminal() -> str:
    """Return a name for the terminal, or rather the session of processes, of this process, unlike any other of this machine.

    A session's number may be used again, so the start of its leader is part of it if the system has it.
    """
    from runtime.clock import machine_id
    from runtime.shim.processes import started_at

    session = os.getsid(0)
    started = started_at(session)
    return f"{machine_id()}/{session}/{started or ''}"


def list_launched(settings: Settings) -> list[LaunchedJob]:
    """Return the jobs launched from here, the newest first."""
    names = {}
    for entry in _scan(_launches(settings)):
        job, _, name = entry.name.partition(".")
        names[job] = name
    found = []
    for entry in _scan(settings.data_dir / "launched"):
        with contextlib.suppress(OSError):
            at = datetime.fromtimestamp(entry.stat().st_mtime, UTC)
            found.append(LaunchedJob(job=entry.name, name=names.get(entry.name, ""), at=at))
    return sorted(found, key=lambda each: each.at, reverse=True)


def list_names(settings: Settings) -> list[tuple[str, str]]:
    """Return the id and name of every job that this machine knows, the newest launch from here first; no target is asked."""
    found = {each.job: each.name for each in list_launched(settings)}
    for entry in _scan(settings.data_dir / "known" / "targets"):
        jobs = _read_json(Path(entry.path)).get("jobs")
        for each in jobs if isinstance(jobs, list) else ():
            job, name = (each.get("job"), each.get("name")) if isinstance(each, dict) else (None, None)
            if isinstance(job, str) and isinstance(name, str):
                found.setdefault(job, name)
    return list(found.items())


def find_from_terminal(settings: Settings) -> LaunchedJob | None:
    """Return the job that was launched last from the terminal of this process."""
    here = name_terminal()
    for each in list_launched(settings)[:_TERMINALS_READ]:
        if each.name and _read_json(_launches(settings) / f"{each.job}.{each.name}").get("terminal") == here:
            return each
    return None


def read_place(job: str, settings: Settings) -> tuple[str, str | None] | None:
    """Return the target and the record root that were noted for a job launched from here."""
    try:
        text = (settings.data_dir / "launched" / job).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    name, _, records = text.strip().partition("\n")
    return name, records or None


def list_out_of_reach(
    targets: Iterable[Target], settings: Settings, fits: Callable[[LaunchedJob], bool]
) -> dict[str, str]:
    """Return the fitting launches whose target is not among `targets`, or was defined otherwise: job → what is known.

    Jobs that are known to have ended are left out.
    """
    here = {target.name: _digest(target) for target in targets}
    found = {}
    for each in filter(fits, list_launched(settings)):
        place = read_place(each.job, settings)
        if place is None or place[1]:
            continue
        note = _read_json(_launches(settings) / f"{each.job}.{each.name}") if each.name else {}
        if place[0] not in here:
            found[each.job] = f"`{each.job}` was launched on target `{place[0]}`, which is not defined here"
        elif note.get("definition", here[place[0]]) != here[place[0]]:
            found[each.job] = f"`{each.job}` was launched on target `{place[0]}`, which was defined otherwise then"
    ended = _list_ended(settings) if found else set()
    return {job: fact for job, fact in found.items() if job not in ended}


def _list_ended(settings: Settings) -> set[str]:
    """Return the jobs that had ended when any definition of any target was last read."""
    over = {state.value for state in JobState if state.terminal}
    ended = set()
    for entry in _scan(settings.data_dir / "known" / "targets"):
        jobs = _read_json(Path(entry.path)).get("jobs")
        for each in jobs if isinstance(jobs, list) else ():
            if isinstance(each, dict) and isinstance(each.get("job"), str) and each.get("state") in over:
                ended.add(each["job"])
    return ended


def _launches(settings: Settings) -> Path:
    return settings.data_dir / "known" / "launches"


def _scan(folder: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from entries


# targets as they were last read


def save_target(target: Target, jobs: Sequence[JobLine], settings: Settings, *, at: datetime) -> None:
    """Remember the jobs of a target: every job that has not ended, and the newest others."""
    ranked = sorted(jobs, key=lambda each: each.launched_at, reverse=True)
    ended = [each for each in ranked if each.state.terminal][:KEPT]
    kept = {each.job for each in ended}
    lines = [replace(each, new=False) for each in ranked if not each.state.terminal or each.job in kept]
    content = {"target": target.name, "at": format_time(at), "jobs": [_encode(each) for each in lines]}
    path = _target_file(target, settings)
    with contextlib.suppress(OSError):
        make_folders(str(path.parent))
        write_private(part := path.with_name(f"{path.name}.{os.getpid()}"), json.dumps(content))
        part.replace(path)


def is_noted(target: Target, settings: Settings) -> bool:
    """Return whether the target was read from here before."""
    return _target_file(target, settings).exists()


def save_job(target: Target, line: JobLine, settings: Settings) -> None:
    """Remember one job of a target that was read before, in place of what was known of it."""
    known = read_target_note(target, settings)
    if known is not None and known.as_of is not None:
        others = [each for each in known.jobs if each.job != line.job]
        save_target(target, [*others, line], settings, at=known.as_of)


def drop_jobs(target: Target, jobs: Iterable[str], settings: Settings) -> None:
    """Forget jobs of a target that were removed."""
    known, gone = read_target_note(target, settings), set(jobs)
    if known is not None and known.as_of is not None and any(each.job in gone for each in known.jobs):
        save_target(target, [each for each in known.jobs if each.job not in gone], settings, at=known.as_of)


def read_target_note(target: Target, settings: Settings) -> KnownTarget | None:
    """Return what `save_target` remembered of this target; None if nothing, or if the target was defined otherwise then."""
    content = _read_json(_target_file(target, settings))
    try:
        at = parse_time(content["at"])
        jobs = tuple(_decode(each, target.name, at) for each in content["jobs"])
    except (KeyError, TypeError, ValueError, AttributeError, InvalidValue):
        return None
    return KnownTarget(target=target, jobs=jobs, as_of=at)


def list_known(
    targets: Sequence[Target],
    settings: Settings,
    *,
    leave_out: Iterable[str] = (),
    fits: Callable[[str, str], bool] = lambda job, name: True,
) -> list[KnownTarget]:
    """Return what is known of targets without asking them, also of other record roots that jobs were imported with.

    Jobs in `leave_out` are left out, and launches whose id and name do not fit.
    """
    places = {target.name: target for target in targets}
    notes = {(target.name, target.records): read_target_note(target, settings) for target in targets}
    read = {each.job for known in notes.values() if known for each in known.jobs} | set(leave_out)
    oldest = min((known.as_of for known in notes.values() if known and known.as_of), default=None)
    since = oldest if all(notes.values()) else None
    launched: dict[tuple[str, str | None], list[JobLine]] = {}
    # Nobody has asked for more launches, and each costs the reading of two files.
    for each in islice(
        (each for each in list_launched(settings) if each.job not in read and fits(each.job, each.name)), KEPT
    ):
        place = read_place(each.job, settings)
        if place is None or place[0] not in places:
            continue
        key = (place[0], place[1] or places[place[0]].records)
        if since is None or each.at > since or place[1]:
            launched.setdefault(key, []).append(_launch_line(each, place[0], settings))
    found = []
    for key in [*notes, *(key for key in launched if key not in notes)]:
        target = places[key[0]]
        target = target if key[1] == target.records else replace(target, records=key[1])
        known = notes.get(key) or read_target_note(target, settings) or KnownTarget(target=target)
        have = {each.job for each in known.jobs} | set(leave_out)
        # A job that was not there any more when the target was read was removed by someone.
        fresh = [
            each
            for each in launched.get(key, ())
            if each.job not in have and (known.as_of is None or each.launched_at > known.as_of)
        ]
        jobs = tuple(each for each in (*fresh, *known.jobs) if each.job not in set(leave_out))
        found.append(replace(known, jobs=jobs))
    return found


def _launch_line(each: LaunchedJob, target: str, settings: Settings) -> JobLine:
    note = _read_json(_launches(settings) / f"{each.job}.{each.name}") if each.name else {}
    runs, gpus, owner = note.get("runs"), note.get("gpus"), note.get("owner")
    return JobLine(
        job=each.job,
        name=each.name,
        target=target,
        owner=owner if isinstance(owner, str) else owner_name(),
        state=JobState.UNKNOWN,
        reason=None,
        runs=runs if isinstance(runs, int) else 1,
        totals=dict.fromkeys(JobState, 0),
        launched_at=each.at,
        ended_at=None,
        gpus=gpus if isinstance(gpus, int | float) else None,
        as_of=each.at,
    )


def _target_file(target: Target, settings: Settings) -> Path:
    return settings.data_dir / "known" / "targets" / f"{_digest(target)}.json"


def _digest(target: Target) -> str:
    definition = json.dumps([target.name, target.kind, target.records, target.settings], sort_keys=True, default=str)
    return hashlib.sha256(definition.encode()).hexdigest()[:24]


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if the file holds none."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return {}
        with path.open("rb") as opened:
            value = json.loads(opened.read(_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_TIMES: Final = ("launched_at", "ended_at", "started_at", "as_of")


def _encode(line: JobLine) -> dict[str, Any]:
    values = {each.name: getattr(line, each.name) for each in fields(line)}
    values |= {name: format_time(values[name]) if values[name] else None for name in _TIMES}
    return values


def _decode(values: Mapping[str, Any], target: str, at: datetime) -> JobLine:
    """Read a job's line. Raises `KeyError`, `TypeError`, `ValueError` or `InvalidValue` for anything else."""
    times = {name: parse_time(values[name]) if values[name] else None for name in _TIMES}
    launched_at = times["launched_at"]
    if launched_at is None or not all(isinstance(values[name], str) for name in ("job", "name", "owner")):
        raise ValueError("no line of a job")
    return JobLine(
        job=values["job"],
        name=values["name"],
        target=target,
        owner=values["owner"],
        state=JobState(values["state"]),
        reason=EndReason(values["reason"]) if values["reason"] else None,
        runs=int(values["runs"]),
        totals={state: int(values["totals"].get(state.value, 0)) for state in JobState},
        launched_at=launched_at,
        ended_at=times["ended_at"],
        gpus=float(values["gpus"]) if values["gpus"] is not None else None,
        started_at=times["started_at"],
        elapsed_s=float(values["elapsed_s"]) if values["elapsed_s"] is not None else None,
        as_of=times["as_of"] or at,
    )
