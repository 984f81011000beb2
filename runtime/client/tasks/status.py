"""The status of queues, experiments and tasks: read from the record store, never with a request per task.

Pure functions of the values decide why tasks wait and how long is left. `runtime.cli.status` prints the values, and
docs/output.md describes them as JSON.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from runtime.client.metric_reports import LatestReport, parse_live
from runtime.client.resolve_id import FindsTasks, age_of
from runtime.client.tasks.task_facts import Stack, TaskFacts, WorkerStatus, read_standing, read_workers
from runtime.end_reasons import EndReason
from runtime.errors import LOST_FOR_GOOD
from runtime.queues.base import DEFAULT_QUEUE, Depth
from runtime.records.base import ExperimentSeen, RecordStore
from runtime.records.control_commands import QueueControl
from runtime.records.totals import FEW, FEW_OF_ONE, Tally
from runtime.tasks.entry_text import describe_entry
from runtime.tasks.history import EndedNote, Mark, Record, StartedMark
from runtime.tasks.model import DEFAULT_EXPERIMENT, TaskState, experiment_digest
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.tasks.id_set import IdSet

FAILURES_SHOWN: Final = 10
EXPERIMENTS_SHOWN: Final = 10
RECENT: Final = timedelta(days=1)
_OUR_ID: Final = re.compile(r"t-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A generation that failed and waits for a person."""

    task: str
    generation: int
    experiment: str
    state: TaskState
    reason: EndReason
    error: str
    at: datetime
    what: str | None
    """The entry in one line; None if it could not be parsed."""
    new: bool = False
    """Whether it failed since this user last asked for the overview."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    name: str
    paused: bool
    waiting: int | None
    """Tasks that have not ended and that no worker reports; None if unknown."""
    delayed: int | None
    leased: int | None
    workers: int
    slots: int
    rate_per_s: float
    why: str | None = None
    next_step: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentStatus:
    experiment: str
    queue: str
    created_at: datetime | None
    as_of: datetime
    exact: bool
    totals: Mapping[TaskState, int]
    """Every state, also those with none."""
    submitted: int
    rate_per_s: float
    """Rate of the live workers of its queue, which may serve other experiments too."""
    eta_s: float | None
    paused: bool = False
    cancelled_before: datetime | None = None
    """When it was last cancelled: all tasks submitted by then are or will be cancelled."""
    why: str | None = None
    next_step: str | None = None
    workers: tuple[WorkerStatus, ...] = ()
    reports: tuple[LatestReport, ...] = ()
    """What its running tasks have reported, as their workers passed on."""
    failures: tuple[Failure, ...] = ()
    failures_left_out: int = 0

    @property
    def remaining(self) -> int:
        return self.totals[TaskState.QUEUED] + self.totals[TaskState.LEASED]

    @property
    def ended(self) -> int:
        return self.submitted - self.remaining


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    stack: str
    as_of: datetime
    totals: Mapping[TaskState, int]
    """Totals of the experiments that are shown."""
    experiments: tuple[ExperimentStatus, ...]
    experiments_left_out: int
    queues: tuple[QueueStatus, ...]
    workers: tuple[WorkerStatus, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    token: str
    generation: int
    worker: str | None
    started_at: datetime | None
    ended_at: datetime | None
    """None while it runs, or if its end is not known."""
    reason: EndReason | None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    task: str
    experiment: str
    state: TaskState
    totals: Mapping[TaskState, int]
    generation: int
    queue: str
    what: str | None
    submitted_at: datetime | None
    submitted_by: str | None
    worker: str | None
    """The worker that holds it, or whose attempt was recorded."""
    ended_at: datetime | None
    reason: EndReason | None
    message: str | None
    attempts: int
    history: tuple[AttemptStatus, ...]
    """All known attempts of every generation, oldest first."""
    record: str | None
    outputs_url: str | None
    log_url: str | None
    value_url: str | None
    value: Any
    """The value that the task returned, if the record holds it."""
    has_value: bool
    exit_code: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last numbers of the recorded attempt, or of the one that runs."""
    metric_ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    step: float | None = None
    """The last step that the running attempt reported, and how many there will be."""
    of: float | None = None
    code: str | None = None


def read_overview(
    stack: Stack, *, now: datetime, exact: bool = False, looked_at: datetime | None = None, tally: Tally | None = None
) -> Overview:
    """Read every queue and worker, the newest experiments, and the failures of the last day.

    A caller that reads repeatedly passes the same `tally`, which remembers when records were counted.
    """
    records = stack.records
    tally = tally or Tally(records)
    workers = read_workers(records, now)
    seen = sorted(records.experiments(), key=age_of, reverse=True)
    controls, depths = functools.cache(records.control), _read_depths(stack)
    shown = [_experiment(stack, one, workers, controls, depths, tally, exact=exact) for one in seen[:EXPERIMENTS_SHOWN]]
    names = {*stack.queue_names(), stack.default_queue, *(one.queue for one in shown), *(w.queue for w in workers)}
    queues = [read_queue(stack, name, shown, workers, controls=controls, depths=depths) for name in sorted(names)]
    return Overview(
        stack=stack.name,
        as_of=min((one.as_of for one in shown), default=now),
        totals={state: sum(one.totals[state] for one in shown) for state in TaskState},
        experiments=tuple(shown),
        experiments_left_out=max(0, len(seen) - EXPERIMENTS_SHOWN),
        queues=tuple(queues),
        workers=tuple(worker for worker in workers if worker.state != "left"),
        failures=tuple(_recent_failures(records, shown, now, looked_at)),
    )


def read_experiment(
    stack: Stack,
    name: str,
    *,
    now: datetime,
    exact: bool = False,
    failures: int | None = FAILURES_SHOWN,
    tally: Tally | None = None,
) -> ExperimentStatus:
    """Read one experiment with its workers and failures; all failures if `failures` is None. See above for `tally`."""
    records = stack.records
    workers = read_workers(records, now)
    seen = records.find_experiment(name) or ExperimentSeen(name, None)
    tally = tally or Tally(records)
    controls, depths = functools.cache(records.control), _read_depths(stack)
    status = _experiment(stack, seen, workers, controls, depths, tally, exact=exact, few=FEW_OF_ONE)
    shown = list(read_failures(records, name, limit=failures)) if status.totals[TaskState.FAILED] else []
    return replace(
        status,
        workers=tuple(worker for worker in workers if worker.queue == status.queue),
        reports=tuple(_reports(workers, name)),
        failures=tuple(shown),
        failures_left_out=max(0, status.totals[TaskState.FAILED] - len(shown)) if failures is not None else 0,
    )


def read_failures(
    records: RecordStore, experiment: str | None = None, *, limit: int | None = None
) -> Iterator[Failure]:
    """Yield failures that were not purged, in the store's order; `limit` bounds the requests too."""
    marks = records.marks(experiment, TaskState.FAILED, limit=limit)
    return (failure_of(mark) for mark in marks if not purged(mark))


def failure_of(mark: Mark) -> Failure:
    return Failure(
        task=mark.task_id,
        generation=mark.generation,
        experiment=mark.experiment,
        state=mark.state,
        reason=mark.reason,
        error=last_line(mark.message) or str(mark.reason),
        at=mark.marked_at,
        what=describe_entry(mark.task.entry) if mark.task else None,
    )


def purged(mark: Mark) -> bool:
    """Whether the dead letter was purged: the task is dropped from it, and the record stays."""
    return mark.task is None and mark.raw is None


def read_queue(
    stack: Stack,
    name: str,
    experiments: Sequence[ExperimentStatus],
    workers: Sequence[WorkerStatus],
    *,
    controls: Callable[[str], QueueControl] | None = None,
    depths: Callable[[str], Depth | None] | None = None,
    depth: Depth | None = None,
) -> QueueStatus:
    """Read a queue in numbers. Without `depth`, the queue is asked only if it lies in the records' own file."""
    live = [worker for worker in workers if worker.queue == name and worker.live]
    paused = (controls or stack.records.control)(name).paused
    if depth is None:
        depth = (depths or _read_depths(stack))(name)
    ours = [one for one in experiments if one.queue == name]
    waiting = sum(one.totals[TaskState.QUEUED] for one in ours) if depth is None else depth.ready + depth.delayed
    why, next_step = explain_waiting(
        name, waiting, paused=paused, live=live, depth=depth, leased=depth.leased if depth else 0
    )
    return QueueStatus(
        name=name,
        paused=paused,
        waiting=waiting,
        delayed=depth.delayed if depth else None,
        leased=depth.leased if depth else sum(len(worker.running) for worker in live),
        workers=len(live),
        slots=sum(worker.slots for worker in live),
        rate_per_s=sum(worker.rate_per_s for worker in live),
        why=why,
        next_step=next_step,
    )


def explain_waiting(
    queue: str,
    waiting: int | None,
    *,
    paused: bool,
    live: Sequence[WorkerStatus],
    depth: Depth | None = None,
    leased: int = 0,
) -> tuple[str | None, str | None]:
    """Explain why tasks wait in a queue, with the next step; a pure function.

    `leased` is the number of held tasks, if it is newer than the workers' reports.
    """
    if not waiting:
        return None, None
    if paused:
        return f"queue `{queue}` is paused", f"runtime queue resume {queue}"
    if not live:
        return f"no live worker serves queue `{queue}`", f"runtime worker --queue {queue}"
    stuck = sorted(set.intersection(*(set(worker.declined) for worker in live)))
    if stuck and not leased and not (depth and depth.ready):
        reason = live[0].declined[stuck[0]]
        return f"no live worker can hold `{stuck[0]}`: {reason}", f"runtime explain {stuck[0]}"
    if depth is not None and not depth.ready:
        return "all that wait are delayed, until they are retried, looked at again or due", None
    slots = sum(worker.slots for worker in live)
    if max(leased, sum(len(worker.running) for worker in live)) >= slots:
        all_slots = "its slot is" if slots == 1 else f"all {slots:,} slots are"
        return f"{count_noun(len(live), 'live worker')} and {all_slots} busy", None
    return f"{count_noun(len(live), 'live worker')} will take them next", None


def estimate_left(remaining: int, rate_per_s: float) -> float | None:
    """Return the seconds until nothing remains; None if no task ends."""
    return remaining / rate_per_s if remaining and rate_per_s > 0 else None


def read_task(stack: Stack, task_id: str) -> TaskStatus:
    records = stack.records
    standing = read_standing(records, task_id)
    record, task = standing.record, standing.task
    live = None if standing.state.terminal else _find_report(records, task_id)
    return TaskStatus(
        task=task_id,
        experiment=standing.experiment,
        state=standing.state,
        totals={**dict.fromkeys(TaskState, 0), standing.state: 1},
        generation=standing.generation,
        queue=TaskQueues(stack).find(standing.experiment, task_id),
        what=describe_entry(task.entry, width=200) if task else None,
        submitted_at=task.submitted_at if task else None,
        submitted_by=task.submitted_by if task else None,
        worker=record.worker if record else standing.holder,
        ended_at=record.ended_at if record else None,
        reason=record.reason if record else None,
        message=record.message or record.unreadable if record else None,
        attempts=record.attempts if record else len(standing.history.ended),
        history=tuple(_attempts(records, standing)),
        record=records.record_url(task_id, record.generation) if record else None,
        outputs_url=record.outputs_url if record else None,
        log_url=record.log_url if record else None,
        value_url=record.value_url if record else None,
        value=record.value if record else None,
        has_value=bool(record and (record.value is not None or record.value_url)),
        exit_code=record.exit_code if record else None,
        metrics=record.metrics if record else live.metrics if live else {},
        metric_ranges=record.metric_ranges if record else {},
        step=live.step if live else None,
        of=live.of if live else None,
        code=record.code if record else None,
    )


def _reports(workers: Iterable[WorkerStatus], experiment: str) -> Iterator[LatestReport]:
    """Yield what the running tasks of an experiment have reported."""
    for worker in workers:
        for task, said in worker.reports.items() if worker.live else ():
            found = parse_live(task, said)
            if found is not None and said.get("experiment") == experiment:
                yield found


def _find_report(records: RecordStore, task_id: str) -> LatestReport | None:
    said = next(
        (seen.reports[task_id] for seen in records.workers() if not seen.left and task_id in seen.reports), None
    )
    return None if said is None else parse_live(task_id, said)


def _attempts(records: RecordStore, standing: TaskFacts) -> Iterator[AttemptStatus]:
    by_generation = {record.generation: record for record in standing.recorded}
    for generation in sorted({*by_generation, standing.generation}):
        current = generation == standing.generation
        history = standing.history if current else records.history(standing.task_id, generation)
        record = by_generation.get(generation)
        noted = {note.token for note in history.ended}
        seen: list[EndedNote | StartedMark | Record] = [*history.ended, *history.open]
        if record is not None and record.token not in noted and record.attempts:
            seen.append(record)
        for each in seen:
            ended = None if isinstance(each, StartedMark) else each
            yield AttemptStatus(
                token=each.token,
                generation=generation,
                worker=each.worker,
                started_at=each.started_at,
                ended_at=ended.ended_at if ended else None,
                reason=ended.reason if ended else None,
                message=ended.message if ended else None,
            )


def queue_of(records: RecordStore, experiment: str, default: str = DEFAULT_QUEUE) -> str:
    """Return the queue that an experiment's first tasks were submitted to."""
    seen = records.find_experiment(experiment or DEFAULT_EXPERIMENT)
    return (seen.queue if seen else None) or default


class TaskQueues:
    """Finds the queue of a task: its experiment's, unless its part names another."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._seen: dict[str, tuple[str, dict[str, IdSet]]] = {}
        """By experiment: its queue, and the first generations that were put into others."""

    def find(self, experiment: str, task_id: str) -> str:
        records = self._stack.records
        stored = records.find_task(task_id) if isinstance(records, FindsTasks) else None
        if stored is not None:
            return stored.queue
        if experiment not in self._seen:
            self._seen[experiment] = self._look(experiment)
        home, others = self._seen[experiment]
        if not others:
            return home
        from runtime.tasks.id_set import task_key  # Few experiments come here.

        key = task_key(task_id, 1)
        return next((queue for queue, keys in others.items() if key in keys), home)

    def _look(self, experiment: str) -> tuple[str, dict[str, IdSet]]:
        records, others = self._stack.records, dict[str, "IdSet"]()
        elsewhere = [part for part in records.parts(experiment) if part.queue is not None]
        if elsewhere:
            from runtime.records.order_scope import read_keys
            from runtime.tasks.id_set import IdSet

            for part in elsewhere:
                assert part.queue is not None
                with suppress(*LOST_FOR_GOOD):
                    for key in read_keys(records, part):
                        others.setdefault(part.queue, IdSet()).add(key)
        return queue_of(records, experiment, self._stack.default_queue), others


def last_line(text: str | None) -> str:
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _read_depths(stack: Stack) -> Callable[[str], Depth | None]:
    """Read the depth of a queue once; None unless queue and records lie in one local file."""
    return functools.cache(lambda name: stack.queue(name).depth() if stack.records.holds_tasks else None)


def _experiment(
    stack: Stack,
    seen: ExperimentSeen,
    workers: Sequence[WorkerStatus],
    controls: Callable[[str], QueueControl],
    depths: Callable[[str], Depth | None],
    tally: Tally,
    *,
    exact: bool,
    few: int = FEW,
) -> ExperimentStatus:
    records = stack.records
    queue = seen.queue or stack.default_queue
    live = [worker for worker in workers if worker.queue == queue and worker.live]
    counted = tally.count(seen.name, active=_count_active(seen.name, live), exact=exact, few=few)
    totals = {**dict.fromkeys(TaskState, 0), **counted.counts}
    if not records.holds_tasks:
        totals = _split_leased(totals, live)
    remaining = totals[TaskState.QUEUED] + totals[TaskState.LEASED]
    rate = sum(worker.rate_per_s for worker in live)
    control = controls(queue)
    covered = control.experiments.get(seen.name)
    why, next_step = explain_waiting(
        queue,
        totals[TaskState.QUEUED],
        paused=control.paused,
        live=live,
        depth=depths(queue) if totals[TaskState.QUEUED] else None,
        leased=totals[TaskState.LEASED],
    )
    return ExperimentStatus(
        experiment=seen.name,
        queue=queue,
        created_at=seen.created_at,
        as_of=counted.as_of,
        exact=counted.exact,
        totals=totals,
        submitted=sum(totals.values()),
        rate_per_s=rate,
        eta_s=estimate_left(remaining, rate),
        paused=control.paused,
        cancelled_before=covered.ordered_at if covered else None,
        why=why,
        next_step=next_step,
    )


def _count_active(experiment: str, live: Sequence[WorkerStatus]) -> int:
    """Count running tasks of the experiment; a task with the id of another producer may belong to any."""
    running = [task for worker in live for task in worker.running]
    digest = experiment_digest(experiment) if running else ""
    return sum(task.endswith(digest) or _OUR_ID.fullmatch(task) is None for task in running)


def _split_leased(totals: dict[TaskState, int], live: Sequence[WorkerStatus]) -> dict[TaskState, int]:
    """Count tasks without a record as leased if workers report them: an upper bound if they serve several experiments."""
    waiting = totals[TaskState.QUEUED]
    leased = min(waiting, sum(len(worker.running) for worker in live))
    return {**totals, TaskState.QUEUED: waiting - leased, TaskState.LEASED: totals[TaskState.LEASED] + leased}


def _recent_failures(
    records: RecordStore, shown: Sequence[ExperimentStatus], now: datetime, looked_at: datetime | None
) -> list[Failure]:
    found: list[Failure] = []
    for one in shown:
        if one.totals[TaskState.FAILED]:
            found += read_failures(records, one.experiment, limit=FAILURES_SHOWN)
    recent = [failure for failure in found if now - failure.at <= RECENT]
    recent.sort(key=lambda failure: failure.at, reverse=True)
    return [replace(failure, new=looked_at is None or failure.at > looked_at) for failure in recent[:FAILURES_SHOWN]]
