"""`runtime status`: what runs, what waits and why, what failed."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.console import draw_screen, flush, is_terminal, note, say
from runtime.cli.jobs import IndexOption, OnOption, is_job
from runtime.cli.output import OutputFormat, print_json, print_list
from runtime.client.resolve_id import IdKind, ResolvedId, identify, recall_last
from runtime.client.tasks.status import (
    FAILURES_SHOWN,
    ExperimentStatus,
    Overview,
    TaskStatus,
    read_experiment,
    read_overview,
    read_task,
)
from runtime.client.tasks.task_facts import WorkerStatus, read_worker
from runtime.errors import InfrastructureFailure, InvalidValue, RequestRefused, UnknownName
from runtime.file_trust import write_private
from runtime.records.totals import Tally
from runtime.stack.open import open_stack
from runtime.units import parse_duration

if TYPE_CHECKING:
    from runtime.client.jobs.job_cache import JobFilter
    from runtime.client.jobs.status import TargetJobs
    from runtime.config import Settings
    from runtime.stack.open import OpenStack
from runtime.cli.status_text import (
    FAILURE_COLUMNS,
    INDEX_COLUMNS,
    JobList,
    Seen,
    StatusBoard,
    job_lines,
    render,
    summarise,
    target_lines,
)

LOCAL_EVERY_S = 1.0
REMOTE_EVERY_S = 10.0
RATE_OVER_S = 60.0
"""Seconds over which `--watch` measures the rate."""
T = TypeVar("T")


def status(
    what: Annotated[
        str | None, Argument(metavar="[EXPERIMENT|TASK|WORKER|JOB]", help="A name, an id or its beginning, or `last`.")
    ] = None,
    watch: Annotated[bool, Option("--watch", "-w", help="Look again and again until all is done.")] = False,
    exact: Annotated[bool, Option("--exact", help="Count records instead of believing the workers.")] = False,
    failed: Annotated[bool, Option("--failed", help="List every failed task, or run of the job.")] = False,
    queue: Annotated[str | None, Option(metavar="QUEUE", help="Queue to look at.")] = None,
    on: OnOption = None,
    index: IndexOption = None,
    refresh: Annotated[bool, Option("--refresh", help="Ask every target for its jobs, not only this machine.")] = False,
    all_: Annotated[bool, Option("--all", help="Every job, however long ago it ended.")] = False,
    state: Annotated[list[str] | None, Option(metavar="STATE", help="Only jobs in it: running, failed …")] = None,
    since: Annotated[str | None, Option(metavar="TIME", help="Only jobs launched since: 2d, or 2026-11-01.")] = None,
    name: Annotated[str | None, Option(metavar="PATTERN", help="Only jobs with such a name: `train-*`.")] = None,
    mine: Annotated[bool, Option("--mine", help="Only your own jobs.")] = False,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """What runs, what waits and why, what failed.

    Alone it is the overview of the stack and of the jobs of every target: this machine's as they are, the others as they
    were last seen, with the age of that; `--refresh` asks them, and a target that does not answer hides no other. It
    shows jobs that have not ended, that failed in the last day, and the newest ten of each target. With `--all`,
    `--state`, `--since` or `--name` it is a list of jobs alone, out of all of them; with `--on` that of one target. Of an
    experiment it shows the tasks by state, the rate, the time left, its workers and its failures; of a task its
    attempts and where record, outputs and log lie; of a worker what it runs; of a job its runs, attempts and places.

    \b
    Examples:
      runtime status
      runtime status sweep
      runtime status last --watch
      runtime status sweep --failed | cut -f1 | xargs runtime retry
      runtime status t-3f2a
      runtime status j-91c0 --watch
      runtime status --refresh --mine
      runtime status --state running,pending
      runtime status --since 2d --name 'train-*'
      runtime status --on hpc --all
      runtime status j-91c0 --index 0-3,7
      runtime status sweep -o json | jq .totals.failed
    """
    if watch and (failed or output is OutputFormat.JSON):
        raise RequestRefused(
            "`--watch` is for people to look at",
            facts=["it goes with neither `--failed` nor `-o json`"],
            hint="leave it out, and ask again when you want to know",
        )
    wanted = _read_filter(all_=all_, states=state, since=since, name=name, mine=mine)
    if what is not None and (wanted is not None or refresh):
        raise RequestRefused(
            "`--refresh`, `--all`, `--state`, `--since`, `--name` and `--mine` choose among all jobs",
            facts=[f"`{what}` is named already"],
            hint="runtime status --state running",
        )
    if on is not None and what is None:
        return _target_status(on, wanted, watch=watch, failed=failed, output=output)
    if is_job(what, on=on, stack=stack):
        return _job_status(str(what), on, index=index, watch=watch, failed=failed, output=output)
    if on is not None:
        raise RequestRefused(
            f"`--on` looks at a target's jobs, and `{what}` is no job", hint="runtime status --on hpc, or … j-91c0"
        )
    if index is not None:
        raise RequestRefused("`--index` is a run of a job", hint="runtime status j-91c0 --index 3")
    if wanted is not None and wanted.chooses:
        if failed or queue:
            raise RequestRefused(
                "a list of jobs goes with neither `--failed` nor `--queue`", hint="runtime status --state failed"
            )
        return _list_status(wanted, refresh=refresh, watch=watch, output=output)
    with open_stack(stack, queue=queue) as opened:
        if queue is not None:
            opened.existing_queue()
        last = recall_last(opened.settings.data_dir, opened.name)
        found = identify(what, opened.records, last=last) if what is not None else None
        if failed and (found is None or found.kind is not IdKind.EXPERIMENT):
            raise RequestRefused("`--failed` lists the failures of an experiment", hint="runtime status last --failed")
        read = partial(
            _read,
            opened,
            found,
            Tally(opened.records),
            exact=exact,
            all_failures=failed,
            wanted=wanted,
            refresh=refresh,
        )
        if watch:
            return _watch(read, remote=not opened.records.holds_tasks)
        seen = read()
    if isinstance(seen, StatusBoard):
        seen = replace(seen, jobs=_record_silent(seen.jobs))
    if output is OutputFormat.JSON:
        if isinstance(seen, StatusBoard):
            tasks = {each.name: getattr(seen.tasks, each.name) for each in fields(seen.tasks)}
            print_json({**tasks, **_jobs_fields(seen.jobs)})
        else:
            print_json(seen)
    elif failed and isinstance(seen, ExperimentStatus):
        print_list(seen.failures, FAILURE_COLUMNS)
    else:
        say(*render(seen, datetime.now(UTC)))
    if isinstance(seen, StatusBoard) and output is OutputFormat.TEXT:
        _remember_look(opened)
    return 0


def _read_filter(
    *, all_: bool, states: list[str] | None, since: str | None, name: str | None, mine: bool
) -> JobFilter | None:
    """Return the choice of jobs in the options; None if there is none."""
    if not (all_ or states or since is not None or name is not None or mine):
        return None
    from runtime.client.jobs.job_cache import JobFilter
    from runtime.jobs.plan import owner_name
    from runtime.jobs.spec import JobState

    named = [part.strip() for text in states or () for part in text.split(",")]
    known = [state.value for state in JobState]
    if unknown := [each for each in named if each not in known]:
        raise UnknownName("state", unknown[0], known, where="of jobs")
    if name == "":
        raise InvalidValue("name", name, "a name or a pattern, such as train-*")
    return JobFilter(
        all=all_,
        states=frozenset(map(JobState, named)),
        since=_read_since(since) if since is not None else None,
        name=name,
        owner=owner_name() if mine else None,
    )


def _read_since(text: str) -> datetime:
    """Read a time ago, a day of this machine's calendar, or a time."""
    try:
        if not text.strip().isdecimal():  # seconds elsewhere, but here as likely a day without its dashes
            with suppress(InvalidValue):
                return datetime.now(UTC) - parse_duration(text, field="since")
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        allowed = "a time ago such as 90m or 2d, a day such as 2026-11-01, or a time such as 2026-11-01T12:00:00Z"
        raise InvalidValue("since", text, allowed) from None


def _list_status(wanted: JobFilter, *, refresh: bool, watch: bool, output: OutputFormat) -> int:
    from runtime.config import load_settings

    read = partial(_read_all_jobs, load_settings(), wanted=wanted, refresh=refresh)
    if watch:
        return _watch(lambda: JobList(read()), remote=refresh)
    seen = _record_silent(read())
    if output is OutputFormat.JSON:
        print_json(_jobs_fields(seen))
    else:
        say(*render(JobList(seen), datetime.now(UTC)))
    return 0


def _read_all_jobs(
    settings: Settings, *, wanted: JobFilter | None = None, refresh: bool = False, looked_at: datetime | None = None
) -> tuple[TargetJobs, ...]:
    from runtime.client.jobs.job_cache import JobFilter
    from runtime.client.jobs.overview import read_overview

    return tuple(
        read_overview(settings, wanted=wanted or JobFilter(), looked_at=looked_at, refresh=refresh, tell=_note_once)
    )


def _record_silent(targets: tuple[TargetJobs, ...]) -> tuple[TargetJobs, ...]:
    """Note the targets that did not answer; the rest is shown without it."""
    for seen in targets:
        if seen.problem:
            note(_silence(seen.target, seen.problem))
    return tuple(replace(seen, problem=None) for seen in targets)


@functools.cache
def _note_once(text: str) -> None:
    note(text)


def _jobs_fields(targets: tuple[TargetJobs, ...]) -> dict[str, object]:
    jobs = sorted((each for seen in targets for each in seen.jobs), key=lambda each: each.launched_at, reverse=True)
    return {"jobs": jobs, "targets": [_target_fields(seen) for seen in targets]}


def _target_fields(seen: TargetJobs) -> dict[str, object]:
    return {"target": seen.target, "as_of": seen.as_of, "unreadable": seen.unreadable}


def _job_status(
    what: str, on: str | None, *, index: list[str] | None, watch: bool, failed: bool, output: OutputFormat
) -> int:
    from runtime.cli.jobs import open_job
    from runtime.client.jobs.handle import TargetSilent
    from runtime.client.jobs.status import read_job
    from runtime.config import load_settings

    try:
        opened = open_job(what, on)
    except TargetSilent as silent:
        place, problem = silent.target, silent.problem.message
        if output is OutputFormat.JSON:
            known = {"job": silent.job, "target": place.name, "kind": place.kind, "problem": problem}
            print_json({**known, "state": "unknown"})
        elif not failed:
            say(f"{silent.job} · {place.name} ({place.kind}) · unknown")
        raise
    with opened as job:
        read = partial(read_job, job, index=index, failed_only=failed, settings=load_settings())
        if watch:
            return _watch(read, remote=job.target.kind != "local")
        seen = read()
    if output is OutputFormat.JSON:
        print_json(seen)
    elif failed:
        print_list(seen.indices, INDEX_COLUMNS)
    else:
        say(*job_lines(seen, datetime.now(UTC)))
    _ensure_answered(seen.target, seen.problem)
    return 0


def _target_status(on: str, wanted: JobFilter | None, *, watch: bool, failed: bool, output: OutputFormat) -> int:
    from runtime.config import load_settings
    from runtime.jobs.spec import JobState

    read = partial(_read_jobs, on, load_settings(), wanted=wanted)
    if watch:
        return _watch(read, remote=True)
    seen = read()
    if failed:
        seen = replace(seen, jobs=tuple(each for each in seen.jobs if each.state is JobState.FAILED))
    if output is OutputFormat.JSON:
        print_json(seen)
    elif seen.jobs or not seen.problem:
        every = wanted is not None and wanted.chooses
        say(*target_lines(replace(seen, problem=None), datetime.now(UTC), every=every))
    _ensure_answered(seen.target, seen.problem)
    return 0


def _ensure_answered(target: str, problem: str | None) -> None:
    """Raise `InfrastructureFailure` if a named target or job is known only in part; that part has been printed."""
    if problem is not None:
        raise InfrastructureFailure(_silence(target, problem), hint=f"runtime targets check {target}")


def _silence(target: str, problem: str) -> str:
    return f"target `{target}` does not answer: {problem}"


def _read_jobs(name: str, settings: Settings, *, wanted: JobFilter | None) -> TargetJobs:
    """Read the jobs of a target; a target that does not answer becomes a line."""
    from runtime.client.jobs.overview import read_one
    from runtime.client.jobs.status import TargetJobs
    from runtime.client.jobs.targets import find_target

    target = find_target(name, settings)
    try:
        return read_one(target, settings, wanted=wanted)
    except InfrastructureFailure as problem:
        return TargetJobs(target=name, records="", problem=problem.message)


def _has_jobs(data_dir: Path) -> bool:
    """Return whether jobs were ever launched on this machine or from it, without loading modules to find out."""
    return (data_dir / "jobs" / "jobs").is_dir() or any((data_dir / name).is_dir() for name in ("roots", "launched"))


def _read(
    opened: OpenStack,
    found: ResolvedId | None,
    tally: Tally,
    *,
    exact: bool,
    all_failures: bool,
    wanted: JobFilter | None,
    refresh: bool,
) -> Seen:
    now = datetime.now(UTC)
    if found is None:
        looked = _looked_at(opened)
        overview = read_overview(opened, now=now, exact=exact, looked_at=looked, tally=tally)
        if not refresh and not _has_jobs(opened.settings.data_dir):
            return StatusBoard(overview, ())
        return StatusBoard(overview, _read_all_jobs(opened.settings, wanted=wanted, refresh=refresh, looked_at=looked))
    if found.kind is IdKind.TASK:
        return read_task(opened, found.name)
    if found.kind is IdKind.WORKER:
        return read_worker(opened, found.name, now=now)
    shown = None if all_failures else FAILURES_SHOWN
    return read_experiment(opened, found.name, now=now, exact=exact, failures=shown, tally=tally)


def _last_look_path(opened: OpenStack) -> Path:
    return opened.settings.data_dir / "looked" / opened.name.replace("/", "%2F")


def _looked_at(opened: OpenStack) -> datetime | None:
    try:
        return datetime.fromtimestamp(_last_look_path(opened).stat().st_mtime, UTC)
    except OSError:
        return None


def _remember_look(opened: OpenStack) -> None:
    path = _last_look_path(opened)
    with suppress(OSError):  # Then every failure stays new.
        write_private(path, "")


def _watch(read: Callable[[], Seen], *, remote: bool) -> int:
    meter = RateMeter()
    every = REMOTE_EVERY_S if remote else LOCAL_EVERY_S
    with _screen() as draw:
        while True:
            seen = meter.measure(read(), time.monotonic())
            draw(seen)
            if is_over(seen):
                return 0
            time.sleep(every)


def is_over(seen: Seen) -> bool:
    """Return whether the state is final."""
    if isinstance(seen, ExperimentStatus):
        return seen.submitted > 0 and seen.remaining == 0
    if isinstance(seen, TaskStatus):
        return seen.state.terminal
    if isinstance(seen, StatusBoard | JobList | Overview | WorkerStatus):
        return False
    from runtime.client.jobs.status import JobView

    return isinstance(seen, JobView) and seen.state.terminal


class RateMeter:
    """The rate at which tasks end, measured here; after five seconds it is better than the workers' reports."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def measure(self, seen: T, at_s: float) -> T:
        """Add the measured rate and time left to an experiment that was watched for long enough."""
        if not isinstance(seen, ExperimentStatus):
            return seen
        self._samples.append((at_s, seen.ended))
        while self._samples[0][0] < at_s - RATE_OVER_S:
            self._samples.popleft()
        first_at, first_ended = self._samples[0]
        if at_s - first_at < 5:
            return seen
        rate = max(0.0, (seen.ended - first_ended) / (at_s - first_at))
        left = seen.remaining / rate if rate and seen.remaining else None
        return replace(seen, rate_per_s=rate, eta_s=left)


@contextmanager
def _screen() -> Iterator[Callable[[Seen], None]]:
    """Draw in place on a terminal; elsewhere print a line after each change."""
    if not is_terminal():
        said = [""]

        def tell(seen: Seen) -> None:
            line = summarise(seen)
            if line != said[0]:
                say(line)
                flush()
            said[0] = line

        yield tell
        return
    with draw_screen() as draw:
        yield lambda seen: draw(render(seen, datetime.now(UTC)))
