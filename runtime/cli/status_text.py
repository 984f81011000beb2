"""Renders experiments, tasks, workers and jobs for `runtime status`: values in, lines out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Union

from runtime.cli.console import paint
from runtime.cli.jobs import short
from runtime.cli.output import (
    Columns,
    cut_line,
    describe_state,
    format_ago,
    format_count,
    format_value,
    read_columns,
    table_lines,
)
from runtime.client.metric_reports import SHOWN, LatestReport, describe_numbers, describe_progress
from runtime.client.tasks.status import (
    FAILURES_SHOWN,
    ExperimentStatus,
    Overview,
    QueueStatus,
    TaskStatus,
    last_line,
)
from runtime.client.tasks.task_facts import WorkerStatus
from runtime.tasks.model import TaskState
from runtime.units import count_noun, format_duration

if TYPE_CHECKING:
    from runtime.client.jobs.job_cache import JobLine
    from runtime.client.jobs.status import AttemptView, JobView, RunReports, TargetJobs

LISTED = 10
JOBS_LISTED: Final = 20
BAR: Final = 24
EXPENDABLE: Final = ("OWNER", "LAUNCHED", "FAILED")
"""Columns of the table of jobs that a narrow terminal does without."""
FRESH_S: Final = 5.0
"""Age of a fact about a job that needs no mention."""
_STYLES: Final[Mapping[str, str]] = {
    "succeeded": "green",
    "failed": "red",
    "unknown": "yellow",
    **dict.fromkeys(("leased", "running"), "cyan"),
}
"""Styles of the states of tasks and jobs."""


@dataclass(frozen=True, slots=True)
class StatusBoard:
    """The overview: the stack's tasks, and the jobs of all targets."""

    tasks: Overview
    jobs: tuple[TargetJobs, ...]
    """The jobs of each target, as they were read or are known."""


@dataclass(frozen=True, slots=True)
class JobList:
    """The jobs that were asked for, of every target."""

    jobs: tuple[TargetJobs, ...]


Seen = Union[StatusBoard, JobList, Overview, ExperimentStatus, TaskStatus, WorkerStatus, "JobView", "TargetJobs"]


def render(seen: Seen, now: datetime) -> list[str]:
    if isinstance(seen, StatusBoard):
        jobs = _list_lines(seen.jobs, now)
        return [*_overview_lines(seen.tasks, nothing=not jobs), *(["", *jobs] if jobs else [])]
    if isinstance(seen, JobList):
        return _list_lines(seen.jobs, now, every=True) or ["no such jobs are known; `--refresh` asks every target"]
    if isinstance(seen, Overview):
        return _overview_lines(seen)
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
    if isinstance(seen, StatusBoard):
        running = _count_running(seen.jobs)
        return summarise(seen.tasks) + (f", {count_noun(running, 'unfinished job')}" if running else "")
    if isinstance(seen, JobList):
        return count_noun(_count_running(seen.jobs), "unfinished job")
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

        if not isinstance(seen, JobView):
            return "; ".join(target_lines(seen, datetime.now(UTC)))
        counted = f", {_by_state(seen.totals)} of {seen.runs}" if seen.runs > 1 else ""
        return f"{seen.job}: {describe_state(seen.state, seen.reason)}{counted}"
    return f"{seen.stack}: {_by_state(seen.totals)}, {count_noun(sum(worker.live for worker in seen.workers), 'live worker')}"


def _overview_lines(seen: Overview, *, nothing: bool = True) -> list[str]:
    """Render the overview; `nothing` gives an empty stack a line."""
    lines = [f"{paint('stack', 'dim')} {seen.stack}"]
    if not seen.experiments and nothing:
        lines.append("nothing was submitted yet; `runtime submit --help` shows how")
    elif seen.experiments:
        lines += ["", *table_lines(_experiment_rows(seen.experiments))]
        if seen.experiments_left_out:
            lines.append(f"and {count_noun(seen.experiments_left_out, 'older experiment')}: `runtime status NAME`")
    waiting = [line for queue in seen.queues for line in _waiting_lines(queue)]
    if waiting:
        lines += ["", *waiting]
    if seen.workers:
        lines += ["", *_worker_table(seen.workers)]
    if seen.failures:
        new = sum(failure.new for failure in seen.failures)
        many = " or more" if new >= FAILURES_SHOWN else ""
        title = "failed in the last day" + (f", {new}{many} since you last looked" if new else "")
        lines += ["", f"{paint(title, 'red')}", *table_lines(_rows(seen.failures, _FAILURE_TABLE))]
        lines.append(f"why: `runtime explain {seen.failures[0].task}`")
    return lines


def _experiment_lines(seen: ExperimentStatus, now: datetime) -> list[str]:
    created = f" · submitted {format_ago(seen.created_at, now)}" if seen.created_at else ""
    lines = [f"{paint(seen.experiment, 'bold')} · queue {seen.queue}{created}"]
    lines += _totals_lines(seen.totals, always=(TaskState.QUEUED, TaskState.SUCCEEDED))
    lines += ["", *_pairs(_progress_pairs(seen, now))]
    if seen.workers:
        lines += ["", *_worker_table(seen.workers)]
    if seen.reports:
        lines += ["", *table_lines([_report_row("TASK", each.name, each) for each in seen.reports[:LISTED]])]
    if seen.failures:
        lines += ["", *table_lines(_rows(seen.failures, _FAILURE_TABLE))]
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
        ("progress", describe_progress(seen.step, seen.of)),
        ("metrics", describe_numbers(seen.metrics, seen.metric_ranges)),
        ("record", seen.record),
        ("value", seen.value_url or cut_line(format_value(seen.value) or "")),
        ("outputs", seen.outputs_url),
        ("log", seen.log_url or f"`runtime logs {seen.task}`" if seen.history else None),
        ("code", seen.code),
    ]
    lines = [paint(seen.task, "bold"), *_pairs(pairs)]
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
        lines += ["", *table_lines(rows)]
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
    lines = [paint(seen.worker, "bold"), *_pairs(pairs)]
    lines += [f"runs {task}" for task in seen.running]
    return lines + [f"cannot hold {task}: {why}" for task, why in sorted(seen.declined.items())]


def _waiting_lines(queue: QueueStatus) -> list[str]:
    if not queue.waiting or queue.why is None:
        return [f"queue `{queue.name}` is paused: `runtime queue resume {queue.name}`"] if queue.paused else []
    step = f": `{queue.next_step}`" if queue.next_step else ""
    verb = "waits" if queue.waiting == 1 else "wait"
    return (
        [f"{count_noun(queue.waiting, 'task')} {verb} because {queue.why}{step}"]
        if queue.next_step
        else [f"{count_noun(queue.waiting, 'task')} {verb} in queue `{queue.name}`: {queue.why}"]
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


def _worker_table(workers: Sequence[WorkerStatus]) -> list[str]:
    rows = [
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
        for worker in workers[:LISTED]
    ]
    more = len(workers) - LISTED
    return [*table_lines(rows), *([f"and {count_noun(more, 'more worker')}"] if more > 0 else [])]


FAILURE_COLUMNS: Columns = {"TASK": "task", "REASON": "reason", "WHEN": "at", "ERROR": "error", "ENTRY": "what"}
_FAILURE_TABLE: Columns = {name: FAILURE_COLUMNS[name] for name in ("TASK", "REASON", "WHEN", "ENTRY", "ERROR")}
"""The same with the longest text last, where nothing is padded to its length."""


def _rows(items: Sequence[object], columns: Columns) -> list[dict[str, object]]:
    return [{header: cell(item) for header, cell in read_columns(columns).items()} for item in items]


def _pairs(pairs: Sequence[tuple[str, str | None]]) -> list[str]:
    return [f"{paint(f'{label:<11}', 'dim')} {text}" for label, text in pairs if text]


def _by_state(totals: Any) -> str:
    return ", ".join(f"{format_count(count)} {state}" for state, count in totals.items() if count) or "no tasks"


def _rate(per_s: float) -> str:
    if per_s >= 10:
        return f"{format_count(round(per_s))}/s"
    return f"{per_s:.2g}/s" if per_s >= 0.1 else f"{per_s * 60:.2g}/min" if per_s else "0/s"


def _count_running(targets: Sequence[TargetJobs]) -> int:
    return sum(not each.state.terminal for seen in targets for each in seen.jobs)


def _list_lines(targets: Sequence[TargetJobs], now: datetime, *, every: bool = False) -> list[str]:
    """Render the jobs of several targets as one table, and name the targets of which nothing is known."""
    lines = [f"target `{seen.target}` does not answer: {seen.problem}" for seen in targets if seen.problem]
    lines += [line for seen in targets for line in _unreadable_lines(seen)]
    jobs = sorted((each for seen in targets for each in seen.jobs), key=lambda each: each.launched_at, reverse=True)
    lines += _job_table(jobs, sum(seen.left_out for seen in targets), now, every=every)
    if unread := [seen.target for seen in targets if seen.as_of is None and not seen.problem]:
        lines.append(f"jobs on {', '.join(dict.fromkeys(unread))}: not read yet, `runtime status --refresh` asks")
    return lines


def target_lines(seen: TargetJobs, now: datetime, *, every: bool = False) -> list[str]:
    """Render the jobs of a target; `every` one if they were chosen."""
    said = [f"target `{seen.target}` does not answer: {seen.problem}"] if seen.problem else []
    said += _unreadable_lines(seen)
    if not seen.jobs and said:
        return said
    if not seen.jobs:
        return [
            f"no such jobs on `{seen.target}`"
            if every
            else f"no jobs on `{seen.target}`; `runtime launch --help` shows how"
        ]
    counted = count_noun(_count_running([seen]), "unfinished job")
    title = f"{paint('jobs', 'dim')} on {seen.target}: {counted}"
    return [*said, title, *_job_table(seen.jobs, seen.left_out, now, every=every)]


def _unreadable_lines(seen: TargetJobs) -> list[str]:
    """Name the jobs of which nothing can be told, however many there are: each may run."""
    return [
        f"unreadable: job `{each.job}` on {seen.target}, which may run: `{each.file}` is damaged"
        for each in seen.unreadable
    ]


def _job_table(jobs: Sequence[JobLine], left_out: int, now: datetime, *, every: bool) -> list[str]:
    if not jobs:
        return []
    from runtime.jobs.plan import owner_name
    from runtime.jobs.spec import JobState

    shown = jobs if every else jobs[:JOBS_LISTED]
    rows = [_job_row(each, now) for each in shown]
    me = owner_name()
    # A column that is the same for all, or known for none, is left out.
    idle = {"OWNER": all(each.owner == me for each in shown), "AS OF": all(_is_fresh(each, now) for each in shown)}
    idle |= {name: all(row[name] is None for row in rows) for name in ("GPUS", "TIME", "FAILED")}
    kept = [{name: cell for name, cell in row.items() if not idle.get(name)} for row in rows]
    lines = table_lines(kept, expendable=EXPENDABLE)
    if (more := len(jobs) - len(shown) + left_out) > 0:
        lines.append(f"and {count_noun(more, 'older job')}: `runtime status --all`")
    failed = [each for each in jobs if each.state is JobState.FAILED]
    new = sum(each.new for each in failed)
    if failed:
        since = f", {new} since you last looked" if new else ""
        lines.append(f"{count_noun(len(failed), 'failed job')}{since}; why: `runtime explain {short(failed[0].job)}`")
    return lines


def _is_fresh(each: JobLine, now: datetime) -> bool:
    return each.as_of is None or (now - each.as_of).total_seconds() < FRESH_S


def _job_row(each: JobLine, now: datetime) -> dict[str, object]:
    from runtime.jobs.spec import JobState

    done = sum(count for state, count in each.totals.items() if state.terminal)
    return {
        "JOB": short(each.job),
        "NAME": each.name,
        "STATE": describe_state(each.state, each.reason),
        "DONE": f"{done}/{each.runs}",
        "FAILED": each.totals[JobState.FAILED] or None,
        "TARGET": each.target,
        "GPUS": f"{each.gpus:g}" if each.gpus else None,
        "TIME": format_duration(max(1, round(each.elapsed_s))) if each.elapsed_s is not None else None,
        "OWNER": each.owner,
        "LAUNCHED": each.launched_at,
        "AS OF": format_ago(each.as_of, now) if each.as_of and not _is_fresh(each, now) else "now",
    }


def job_lines(seen: JobView, now: datetime) -> list[str]:
    from runtime.client.jobs.status import HELD, describe_after
    from runtime.jobs.spec import JobState

    state = describe_state(seen.state, seen.reason)
    title = f"{paint(seen.job, 'bold')} · {seen.name} · {seen.target} ({seen.kind})"
    lines = [f"{title} · {paint(state, _STYLES[seen.state]) if seen.state in _STYLES else state}"]
    if seen.runs > 1:
        lines += _totals_lines(seen.totals)
    by = f" by {seen.owner}" + (f" from {seen.launched_from}" if seen.launched_from else "")
    commit = f", commit {seen.commit[:10]}" if seen.commit else ""
    branch = f" of {seen.branch}" if seen.commit and seen.branch else ""
    pairs: list[tuple[str, str | None]] = [
        ("done", _bar(seen) if seen.runs > 1 else None),
        ("launched", f"{format_ago(seen.launched_at, now)}{by}"),
        ("code", f"{seen.snapshot[:19]}{commit}{branch}" if seen.snapshot else None),
        ("held", next((each.message for each in seen.indices if each.message == HELD), None)),
        ("cancelled", "asked for" if seen.cancelled and not seen.state.terminal else None),
        *(("after", describe_after(each)) for each in seen.after),
        *_native_pairs(seen),
        *(_report_pairs(seen.reports[0]) if seen.runs == 1 and seen.reports else []),
        ("records", seen.records),
        ("logs", f"`runtime logs {short(seen.job)}`, {seen.logs}"),
        ("outputs", f"`runtime fetch {short(seen.job)}`, {seen.outputs}"),
    ]
    lines += _pairs(pairs)
    if seen.attempts:
        several = len({each.index for each in seen.attempts}) > 1
        lines += ["", *table_lines([_attempt_row(each, now, run=several) for each in seen.attempts])]
    if seen.runs > 1 and seen.reports:
        lines += ["", *table_lines([_report_row("INDEX", each.index, each) for each in seen.reports])]
    if seen.runs > 1 and seen.indices:
        lines += ["", *table_lines(_rows(seen.indices[:JOBS_LISTED], INDEX_COLUMNS))]
        if len(seen.indices) > JOBS_LISTED:
            lines.append(f"and {len(seen.indices) - JOBS_LISTED} more; `--failed` lists those that failed")
    if seen.state is not JobState.SUCCEEDED:
        lines += ["", f"why: `runtime explain {short(seen.job)}`"]
    return lines


def _report_row(title: str, name: object, each: LatestReport | RunReports) -> dict[str, object]:
    """Render the last numbers of an attempt that runs."""
    shown = dict(itertools.islice(each.metrics.items(), SHOWN))
    return {title: name, "STEP": describe_progress(each.step, each.of), "METRICS": describe_numbers(shown)}


def _report_pairs(each: RunReports) -> list[tuple[str, str | None]]:
    shown = dict(itertools.islice(each.metrics.items(), SHOWN))
    numbers = describe_numbers(shown, each.metric_ranges)
    return [("progress", describe_progress(each.step, each.of)), ("metrics", numbers)]


def _totals_lines(totals: Mapping[Any, int], always: Sequence[TaskState] = ()) -> list[str]:
    """Render the states with their counts, without those at 0 that are not in `always`."""
    width = max(len(format_count(count)) for count in totals.values())
    lines = []
    for state, count in totals.items():
        if count or state in always:
            text = f"  {state:<10} {format_count(count):>{width}}"
            lines.append(paint(text, _STYLES[state]) if count and state in _STYLES else text)
    return lines


def _bar(seen: JobView) -> str:
    done = sum(count for state, count in seen.totals.items() if state.terminal)
    full = BAR * done // seen.runs
    return f"[{'#' * full}{'.' * (BAR - full)}] {format_count(done)} of {format_count(seen.runs)}, {100 * done // seen.runs} %"


def _native_pairs(seen: JobView) -> list[tuple[str, str | None]]:
    pairs: list[tuple[str, str | None]] = []
    for native in seen.natives[:5]:
        said = ", ".join(part for part in (native.raw, native.message) if part)
        where = f" on {native.where}" if native.where else ""
        later = f", epoch {native.epoch}" if native.epoch > 1 else ""
        pairs.append(("native", f"{native.native_id}{later}{where}" + (f": {said}" if said else "")))
    if len(seen.natives) > 5:
        pairs.append(("", f"and {count_noun(len(seen.natives) - 5, 'more native job')}"))
    return pairs


def _attempt_row(each: AttemptView, now: datetime, *, run: bool = False) -> dict[str, object]:
    return {
        **({"RUN": each.index} if run else {}),
        "ATTEMPT": each.attempt,
        "HOST": each.host,
        "STARTED": format_ago(each.started_at, now) if each.started_at else None,
        "ENDED": format_ago(each.ended_at, now) if each.ended_at else None if each.reason else "no word yet",
        "REASON": each.reason,
        "EXIT": _code(each.exit_code),
        "MESSAGE": each.message,
    }


def _code(code: int | None) -> str | int | None:
    from runtime.jobs.death_cause import name_signal

    name = name_signal(code)
    return f"{code} {name}" if name else code


INDEX_COLUMNS: Columns = {
    "INDEX": "index",
    "STATE": "state",
    "REASON": "reason",
    "EXIT": "exit_code",
    "ATTEMPT": "attempt",
    "MESSAGE": "message",
}
