"""How `runtime status` shows experiments, tasks and workers: values in, lines out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Union

from runtime.cli.render.jobs import job_lines, summarise_job, target_lines
from runtime.cli.show import format_ago, format_count, format_duration, paint, table_lines
from runtime.client.tasks.status import (
    FAILURES_SHOWN,
    ExperimentStatus,
    Failure,
    Overview,
    QueueStatus,
    TaskStatus,
    last_line,
)
from runtime.client.tasks.workers import WorkerStatus
from runtime.tasks.model import TaskState
from runtime.units import count_noun
from runtime.values import dataclass

if TYPE_CHECKING:
    from runtime.client.jobs.status import JobView, TargetJobs
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
        return summarise(seen.tasks) + (f", {count_noun(running, 'unfinished job')}" if running else "")
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
        lines += ["", *table_lines(_experiment_rows(seen.experiments))]
        if seen.experiments_left_out:
            lines.append(f"and {count_noun(seen.experiments_left_out, 'older experiment')}: `runtime status NAME`")
    waiting = [line for queue in seen.queues for line in _waiting_lines(queue)]
    if waiting:
        lines += ["", *waiting]
    if seen.workers:
        lines += ["", *table_lines(_worker_rows(seen.workers[:LISTED]))]
        if len(seen.workers) > LISTED:
            lines.append(f"and {count_noun(len(seen.workers) - LISTED, 'more worker')}")
    if seen.failures:
        new = sum(failure.new for failure in seen.failures)
        many = " or more" if new >= FAILURES_SHOWN else ""
        title = "failed in the last day" + (f", {new}{many} since you last looked" if new else "")
        lines += ["", f"{paint(title, 'red')}", *table_lines(_failure_rows(seen.failures))]
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
        lines += ["", *table_lines(_worker_rows(seen.workers[:LISTED]))]
        if len(seen.workers) > LISTED:
            lines.append(f"and {count_noun(len(seen.workers) - LISTED, 'more worker')}")
    if seen.failures:
        lines += ["", *table_lines(_failure_rows(seen.failures))]
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
    lines = [paint(seen.worker, "bold"), *_pairs([(label, text) for label, text in pairs if text])]
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


def _pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{paint(f'{label:<11}', 'dim')} {text}" for label, text in pairs]


def _by_state(totals: Any) -> str:
    return ", ".join(f"{format_count(count)} {state}" for state, count in totals.items() if count) or "no tasks"


def _rate(per_s: float) -> str:
    if per_s >= 10:
        return f"{format_count(round(per_s))}/s"
    return f"{per_s:.2g}/s" if per_s >= 0.1 else f"{per_s * 60:.2g}/min" if per_s else "0/s"
