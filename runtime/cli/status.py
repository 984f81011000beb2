"""`runtime status`: what runs, what waits and why, what failed."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

import typer

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.render.jobs import (
    INDEX_COLUMNS,
    IndexOption,
    OnOption,
    is_job,
    job_lines,
    summarise_job,
    target_lines,
)
from runtime.cli.show import (
    Output,
    format_ago,
    format_cell,
    format_count,
    format_duration,
    is_terminal,
    note,
    paint,
    print_json,
    print_list,
    render_table,
)
from runtime.client.identify import Identity, Kind, identify, recall_last
from runtime.client.tasks.status import (
    FAILURES_SHOWN,
    ExperimentStatus,
    Failure,
    Overview,
    QueueStatus,
    TaskStatus,
    WorkerStatus,
    last_line,
    read_experiment,
    read_overview,
    read_task,
    read_worker,
)
from runtime.errors import InfrastructureFailure, RequestRefused
from runtime.records.totals import Tally
from runtime.stack.find import open_stack
from runtime.tasks.model import TaskState
from runtime.values import dataclass, fields, replace

if TYPE_CHECKING:
    from runtime.client.jobs.status import JobView, TargetJobs
    from runtime.config import Settings
    from runtime.stack.find import OpenStack

LOCAL_EVERY_S = 1.0
REMOTE_EVERY_S = 10.0
RATE_OVER_S = 60.0
"""`--watch` tells the rate from what it saw in the last so many seconds."""
LISTED = 10

_STYLES = {TaskState.SUCCEEDED: "green", TaskState.FAILED: "red", TaskState.LEASED: "cyan"}


@dataclass(frozen=True, slots=True)
class Board:
    """The overview: the stack's tasks, and the jobs of this machine."""

    tasks: Overview
    jobs: TargetJobs | None
    elsewhere: tuple[str, ...] = ()
    """Further targets of the project, which are not asked: that takes as long as they do."""


Seen = Union[Board, Overview, ExperimentStatus, TaskStatus, WorkerStatus, "JobView", "TargetJobs"]
T = TypeVar("T")


def status(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[EXPERIMENT|TASK|WORKER|JOB]",
            help="A name, an id or its beginning, or `last`.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again until all is done.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Count records instead of believing the workers.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="List every failed task, or run of the job.")] = False,
    queue: Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="Queue to look at.")] = None,
    on: OnOption = None,
    index: IndexOption = None,
    stack: StackOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """What runs, what waits and why, what failed.

    Alone it is the overview of the stack and of this machine's jobs; with `--on` that of a target's jobs. Of an
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
      runtime status --on hpc
      runtime status sweep -o json | jq .totals.failed
    """
    if watch and (failed or output is Output.JSON):
        raise RequestRefused(
            "`--watch` is for people to look at",
            facts=["it goes with neither `--failed` nor `-o json`"],
            hint="leave it out, and ask again when you want to know",
        )
    if is_job(what) or on:
        return _job_status(what, on, index=index, watch=watch, failed=failed, output=output)
    if index is not None:
        raise RequestRefused("`--index` is a run of a job", hint="runtime status j-91c0 --index 3")
    with open_stack(stack, queue=queue) as opened:
        last = recall_last(opened.settings.data_dir, opened.name)
        found = identify(what, opened.records, last=last) if what else None
        if failed and (found is None or found.kind is not Kind.EXPERIMENT):
            raise RequestRefused("`--failed` lists the failures of an experiment", hint="runtime status last --failed")

        tally = Tally(opened.records)

        def read() -> Seen:
            return _read(opened, found, tally, exact=exact, all_failures=failed)

        if watch:
            return _watch(read, remote=not opened.records.holds_tasks)
        seen = read()
    if isinstance(seen, Board) and seen.jobs and seen.jobs.problem:
        note(_silence(seen.jobs.target, seen.jobs.problem))
        seen = replace(seen, jobs=replace(seen.jobs, problem=None))
    if output is Output.JSON:
        print_json(_fields(seen))
    elif failed and isinstance(seen, ExperimentStatus):
        print_list(seen.failures, FAILURE_COLUMNS)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in render(seen, datetime.now(UTC))))
    if isinstance(seen, Board) and output is Output.TEXT:
        _remember_look(opened)
    return 0


def _fields(seen: Seen) -> object:
    if not isinstance(seen, Board):
        return seen
    jobs = seen.jobs.jobs if seen.jobs else ()
    return {**{each.name: getattr(seen.tasks, each.name) for each in fields(seen.tasks)}, "jobs": jobs}


# jobs


def _job_status(
    what: str | None, on: str | None, *, index: int | None, watch: bool, failed: bool, output: Output
) -> int:
    if what is not None and not is_job(what):
        raise RequestRefused(
            f"`--on` looks at a target's jobs, and `{what}` is no job", hint="runtime status --on hpc, or … j-91c0"
        )
    if what is None:
        return _target_status(str(on), watch=watch, failed=failed, output=output)
    from runtime.cli.render.jobs import open_job
    from runtime.client.jobs.find import TargetSilent
    from runtime.client.jobs.status import SilentJob, read_job

    try:
        opened = open_job(what, on)
    except TargetSilent as silent:
        place, problem = silent.target, silent.problem.message
        known = SilentJob(job=silent.job, target=place.name, kind=place.kind, problem=problem)
        if output is Output.JSON:
            print_json(known)
        elif not failed:
            sys.stdout.write(f"{known.job} · {known.target} ({known.kind}) · {known.state}\n")
        raise
    with opened as job:

        def read() -> Seen:
            return read_job(job, index=index, failed_only=failed)

        if watch:
            return _watch(read, remote=job.target.kind != "local")
        seen = read_job(job, index=index, failed_only=failed)
    if output is Output.JSON:
        print_json(seen)
    elif failed:
        print_list(seen.indices, INDEX_COLUMNS)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in job_lines(seen, datetime.now(UTC))))
    _ensure_answered(seen.target, seen.problem)
    return 0


def _target_status(on: str, *, watch: bool, failed: bool, output: Output) -> int:
    from runtime.config import load_settings
    from runtime.jobs.spec import JobState

    settings = load_settings()

    def read() -> TargetJobs:
        return _read_jobs(on, settings, looked_at=None)

    if watch:
        return _watch(read, remote=True)
    seen = read()
    if failed:
        seen = replace(seen, jobs=tuple(each for each in seen.jobs if each.state is JobState.FAILED))
    if output is Output.JSON:
        print_json(seen)
    elif seen.jobs or not seen.problem:
        sys.stdout.write("".join(f"{line}\n" for line in target_lines(replace(seen, problem=None), datetime.now(UTC))))
    _ensure_answered(seen.target, seen.problem)
    return 0


def _ensure_answered(target: str, problem: str | None) -> None:
    """Raise `InfrastructureFailure` where what was asked for by name is known in part only; that has been printed."""
    if problem is not None:
        raise InfrastructureFailure(_silence(target, problem), hint=f"runtime targets check {target}")


def _silence(target: str, problem: str) -> str:
    return f"target `{target}` does not answer: {problem}"


def _read_jobs(name: str, settings: Settings, *, looked_at: datetime | None) -> TargetJobs:
    """The jobs of a target; one that does not answer is said in a line."""
    from runtime.client.jobs.prepare import make_context
    from runtime.client.jobs.roots import open_target
    from runtime.client.jobs.status import TargetJobs, read_target
    from runtime.client.jobs.targets import find_target
    from runtime.launchers.registry import get_launcher

    target = find_target(name, settings)
    launcher = get_launcher(target.kind)
    try:
        host = open_target(target, launcher, make_context(settings))
        try:
            return read_target(target, launcher, host, now=datetime.now(UTC), looked_at=looked_at)
        finally:
            host.close()
    except InfrastructureFailure as problem:
        return TargetJobs(target=name, records="", problem=problem.message)


def _local_jobs(opened: OpenStack) -> TargetJobs | None:
    """Those of this machine's own record root; whoever launched none loads nothing for them."""
    data = opened.settings.data_dir
    if not (data / "jobs" / "jobs").is_dir() and not (data / "roots").is_dir():
        return None
    return _read_jobs("local", opened.settings, looked_at=_looked_at(opened))


def _other_targets(opened: OpenStack) -> tuple[str, ...]:
    if not (opened.settings.data_dir / "launched").is_dir():
        return ()
    return tuple(name for name in opened.settings.project.targets if name != "local")


def _read(opened: OpenStack, found: Identity | None, tally: Tally, *, exact: bool, all_failures: bool) -> Seen:
    now = datetime.now(UTC)
    if found is None:
        overview = read_overview(opened, now=now, exact=exact, looked_at=_looked_at(opened), tally=tally)
        return Board(overview, _local_jobs(opened), _other_targets(opened))
    if found.kind is Kind.TASK:
        return read_task(opened, found.name)
    if found.kind is Kind.WORKER:
        return read_worker(opened, found.name, now=now)
    shown = None if all_failures else FAILURES_SHOWN
    return read_experiment(opened, found.name, now=now, exact=exact, failures=shown, tally=tally)


# what failed since you last looked


def _look_path(opened: OpenStack) -> Path:
    return opened.settings.data_dir / "looked" / opened.name.replace("/", "%2F")


def _looked_at(opened: OpenStack) -> datetime | None:
    try:
        return datetime.fromtimestamp(_look_path(opened).stat().st_mtime, UTC)
    except OSError:
        return None


def _remember_look(opened: OpenStack) -> None:
    path = _look_path(opened)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        pass  # Then everything stays new.


# watching


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
    """Nothing more will change by itself."""
    if isinstance(seen, ExperimentStatus):
        return seen.submitted > 0 and seen.remaining == 0
    if isinstance(seen, TaskStatus):
        return seen.state.terminal
    if isinstance(seen, Board | Overview | WorkerStatus):
        return False
    from runtime.client.jobs.status import JobView

    return isinstance(seen, JobView) and seen.state.terminal


class RateMeter:
    """The rate at which tasks end, as seen here; it knows better than the workers' reports after five seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def measure(self, seen: T, at_s: float) -> T:
        """`seen` with the measured rate and time left, if it is an experiment and was seen for long enough."""
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
    """Draws in place on a terminal; elsewhere prints a line when something has changed."""
    if not is_terminal():
        said = [""]

        def say(seen: Seen) -> None:
            line = summarise(seen)
            if line != said[0]:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
            said[0] = line

        yield say
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:

        def draw(seen: Seen) -> None:
            live.update(Text.from_ansi("\n".join(render(seen, datetime.now(UTC)))), refresh=True)

        yield draw


# rendering


def render(seen: Seen, now: datetime) -> list[str]:
    """The lines for people."""
    if isinstance(seen, Board):
        jobs = target_lines(seen.jobs, now, whole=False) if seen.jobs else []
        if seen.elsewhere:
            more = ", ".join(seen.elsewhere)
            jobs = [*jobs, f"jobs on {more}: `runtime status --on {seen.elsewhere[0]}`"]
        tasks = _overview_lines(seen.tasks, now, nothing=not jobs)
        return [*tasks, *(["", *jobs] if jobs else [])]
    if isinstance(seen, Overview):
        return _overview_lines(seen, now)
    if isinstance(seen, ExperimentStatus):
        return _experiment_lines(seen, now)
    if isinstance(seen, TaskStatus):
        return _task_lines(seen, now)
    if isinstance(seen, WorkerStatus):
        return _worker_lines(seen, now)
    from runtime.client.jobs.status import JobView

    return job_lines(seen, now) if isinstance(seen, JobView) else target_lines(seen, now)


def summarise(seen: Seen) -> str:
    """One line for logs."""
    if isinstance(seen, Board):
        running = sum(not each.state.terminal for each in seen.jobs.jobs) if seen.jobs else 0
        return summarise(seen.tasks) + (f", {_count(running, 'unfinished job')}" if running else "")
    if isinstance(seen, ExperimentStatus):
        left = f", {format_duration(seen.eta_s)} left" if seen.eta_s else ""
        rate = f", {_rate(seen.rate_per_s)}" if seen.rate_per_s else ""
        return f"{seen.experiment}: {_by_state(seen.totals)} of {format_count(seen.submitted)}{rate}{left}"
    if isinstance(seen, TaskStatus):
        return f"{seen.task}: {seen.state}" + (f" on {seen.worker}" if seen.worker else "")
    if isinstance(seen, WorkerStatus):
        return f"{seen.worker}: {seen.state}, {len(seen.running)} running, {seen.done} succeeded, {seen.failed} failed"
    if not isinstance(seen, Overview):
        from runtime.client.jobs.status import JobView

        return summarise_job(seen) if isinstance(seen, JobView) else "; ".join(target_lines(seen, datetime.now(UTC)))
    return f"{seen.stack}: {_by_state(seen.totals)}, {sum(worker.live for worker in seen.workers)} live workers"


def _overview_lines(seen: Overview, now: datetime, *, nothing: bool = True) -> list[str]:
    """`nothing`: whether an empty stack is worth a line."""
    lines = [f"{paint('stack', 'dim')} {seen.stack}"]
    if not seen.experiments and nothing:
        lines.append("nothing was submitted yet; `runtime submit --help` shows how")
    elif seen.experiments:
        lines += ["", *_table(_experiment_rows(seen.experiments))]
        if seen.experiments_left_out:
            lines.append(f"and {_count(seen.experiments_left_out, 'older experiment')}: `runtime status NAME`")
    waiting = [line for queue in seen.queues for line in _waiting_lines(queue)]
    if waiting:
        lines += ["", *waiting]
    if seen.workers:
        lines += ["", *_table(_worker_rows(seen.workers[:LISTED]))]
        if len(seen.workers) > LISTED:
            lines.append(f"and {_count(len(seen.workers) - LISTED, 'more worker')}")
    if seen.failures:
        new = sum(failure.new for failure in seen.failures)
        many = " or more" if new >= FAILURES_SHOWN else ""
        title = "failed in the last day" + (f", {new}{many} since you last looked" if new else "")
        lines += ["", f"{paint(title, 'red')}", *_table(_failure_rows(seen.failures))]
        lines.append(f"why: `runtime explain {seen.failures[0].task}`")
    return lines


def _experiment_lines(seen: ExperimentStatus, now: datetime) -> list[str]:
    created = f" · submitted {format_ago(seen.created_at, now)}" if seen.created_at else ""
    lines = [f"{paint(seen.experiment, 'bold')} · queue {seen.queue}{created}"]
    width = max(len(format_count(count)) for count in seen.totals.values())
    for state, count in seen.totals.items():
        if count or state in (TaskState.QUEUED, TaskState.SUCCEEDED):
            text = f"  {state:<10} {format_count(count):>{width}}"
            lines.append(paint(text, _STYLES[state]) if count and state in _STYLES else text)
    lines += ["", *_pairs(_progress_pairs(seen, now))]
    if seen.workers:
        lines += ["", *_table(_worker_rows(seen.workers[:LISTED]))]
        if len(seen.workers) > LISTED:
            lines.append(f"and {_count(len(seen.workers) - LISTED, 'more worker')}")
    if seen.failures:
        lines += ["", *_table(_failure_rows(seen.failures))]
        if seen.failures_left_out:
            lines.append(
                f"and {format_count(seen.failures_left_out)} more: `runtime status {seen.experiment} --failed`"
            )
        else:
            lines.append(f"why: `runtime explain {seen.failures[0].task}`")
    return lines


def _progress_pairs(seen: ExperimentStatus, now: datetime) -> list[tuple[str, str]]:
    percent = f"{100 * seen.ended // seen.submitted} %" if seen.submitted else "nothing submitted"
    parts = [f"{percent} of {format_count(seen.submitted)}" if seen.submitted else percent]
    if seen.remaining:
        parts += [_rate(seen.rate_per_s)] if seen.rate_per_s else []
        parts += [f"about {format_duration(seen.eta_s)} left"] if seen.eta_s else []
    pairs = [("done", ", ".join(parts))]
    if seen.cancelled_before is not None and seen.remaining:
        pairs.append(("cancelled", f"what was submitted before {format_ago(seen.cancelled_before, now)}"))
    if seen.why:
        pairs.append(("waits", seen.why + (f": `{seen.next_step}`" if seen.next_step else "")))
    age = format_ago(seen.as_of, now)
    pairs.append(("as of", f"{age}, counted" if seen.exact else f"{age}, as workers report; `--exact` counts"))
    return pairs


def _task_lines(seen: TaskStatus, now: datetime) -> list[str]:
    state = paint(str(seen.state), _STYLES[seen.state]) if seen.state in _STYLES else str(seen.state)
    by = f" by {seen.submitted_by}" if seen.submitted_by else ""
    pairs: list[tuple[str, str | None]] = [
        ("state", f"{state}, generation {seen.generation}"),
        ("experiment", f"{seen.experiment} · queue {seen.queue}"),
        ("entry", seen.what),
        ("submitted", f"{format_ago(seen.submitted_at, now)}{by}" if seen.submitted_at else None),
        ("worker", seen.worker),
        ("ended", f"{format_ago(seen.ended_at, now)}: {seen.reason}" if seen.ended_at else None),
        ("note" if seen.state is TaskState.SUCCEEDED else "error", last_line(seen.message)),
        ("exit code", str(seen.exit_code) if seen.exit_code else None),
        ("attempts", f"{seen.attempts} ended" if seen.attempts else None),
        ("metrics", ", ".join(f"{name} {value:g}" for name, value in seen.metrics.items())),
        ("record", seen.record),
        ("value", seen.value_url or ("in the record" if seen.has_value else None)),
        ("outputs", seen.outputs_url),
        ("log", seen.log_url or f"`runtime logs {seen.task}`" if seen.history else None),
        ("code", seen.code),
    ]
    lines = [paint(seen.task, "bold"), *_pairs([(label, text) for label, text in pairs if text])]
    if seen.history:
        rows = [
            {
                "ATTEMPT": attempt.token,
                "GENERATION": attempt.generation,
                "WORKER": attempt.worker,
                "STARTED": format_ago(attempt.started_at, now) if attempt.started_at else None,
                "ENDED": format_ago(attempt.ended_at, now) if attempt.ended_at else "runs",
                "REASON": attempt.reason,
                "MESSAGE": last_line(attempt.message),
            }
            for attempt in seen.history
        ]
        lines += ["", *_table(rows)]
    if not seen.state.terminal or seen.state is TaskState.FAILED:
        lines += ["", f"why: `runtime explain {seen.task}`"]
    return lines


def _worker_lines(seen: WorkerStatus, now: datetime) -> list[str]:
    pairs: list[tuple[str, str | None]] = [
        ("state", f"{seen.state}, seen {format_ago(seen.seen_at, now)}"),
        ("host", seen.host),
        ("queue", seen.queue),
        ("started", format_ago(seen.started_at, now)),
        ("slots", f"{len(seen.running)} of {seen.slots} busy"),
        ("ended", f"{format_count(seen.done)} succeeded, {format_count(seen.failed)} failed, {_rate(seen.rate_per_s)}"),
        ("labels", ", ".join(f"{name}={value}" for name, value in sorted(seen.labels.items()))),
    ]
    lines = [paint(seen.worker, "bold"), *_pairs([(label, text) for label, text in pairs if text])]
    lines += [f"runs {task}" for task in seen.running]
    return lines + [f"cannot hold {task}: {why}" for task, why in sorted(seen.declined.items())]


def _waiting_lines(queue: QueueStatus) -> list[str]:
    if not queue.waiting or queue.why is None:
        return [f"queue `{queue.name}` is paused: `runtime queue resume {queue.name}`"] if queue.paused else []
    step = f": `{queue.next_step}`" if queue.next_step else ""
    verb = "waits" if queue.waiting == 1 else "wait"
    return (
        [f"{_count(queue.waiting, 'task')} {verb} because {queue.why}{step}"]
        if queue.next_step
        else [f"{_count(queue.waiting, 'task')} {verb} in queue `{queue.name}`: {queue.why}"]
    )


def _experiment_rows(experiments: Sequence[ExperimentStatus]) -> list[dict[str, object]]:
    shown = [state for state in TaskState if any(one.totals[state] for one in experiments)]
    return [
        {
            "EXPERIMENT": one.experiment,
            **{str(state).upper(): format_count(one.totals[state]) if one.totals[state] else None for state in shown},
            "LEFT": f"about {format_duration(one.eta_s)}" if one.eta_s else "" if one.remaining else "done",
            "SUBMITTED": one.created_at,
        }
        for one in experiments
    ]


def _worker_rows(workers: Sequence[WorkerStatus]) -> list[dict[str, object]]:
    return [
        {
            "WORKER": worker.worker,
            "STATE": worker.state,
            "HOST": worker.host,
            "QUEUE": worker.queue,
            "BUSY": f"{len(worker.running)}/{worker.slots}",
            "SUCCEEDED": format_count(worker.done),
            "FAILED": format_count(worker.failed),
            "RATE": _rate(worker.rate_per_s),
            "SEEN": worker.seen_at,
        }
        for worker in workers
    ]


FAILURE_COLUMNS: dict[str, Callable[[Failure], object]] = {
    "TASK": lambda failure: failure.task,
    "REASON": lambda failure: failure.reason,
    "WHEN": lambda failure: failure.at,
    "ERROR": lambda failure: failure.error,
    "ENTRY": lambda failure: failure.what,
}


def _failure_rows(failures: Sequence[Failure]) -> list[dict[str, object]]:
    return [{header: cell(failure) for header, cell in FAILURE_COLUMNS.items()} for failure in failures]


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    import shutil

    cells = [[_cell(value) for value in row.values()] for row in rows]
    width = shutil.get_terminal_size((120, 24)).columns if is_terminal() else 10_000
    return render_table(list(rows[0]), cells, width).splitlines()


def _cell(value: object) -> str:
    return format_ago(value) if isinstance(value, datetime) else format_cell(value)


def _pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{paint(f'{label:<11}', 'dim')} {text}" for label, text in pairs]


def _by_state(totals: Any) -> str:
    return ", ".join(f"{format_count(count)} {state}" for state, count in totals.items() if count) or "no tasks"


def _rate(per_s: float) -> str:
    if per_s >= 10:
        return f"{format_count(round(per_s))}/s"
    return f"{per_s:.2g}/s" if per_s >= 0.1 else f"{per_s * 60:.2g}/min" if per_s else "0/s"


def _count(number: int, noun: str) -> str:
    return f"{format_count(number)} {noun}" + ("" if number == 1 else "s")
