"""Waits until tasks have ended, by their records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, TypeAlias

from runtime.client.tasks.build import open_target
from runtime.client.tasks.kept_stacks import KeptStack
from runtime.client.tasks.publish import NAMED_TASKS
from runtime.client.tasks.submit import Submission
from runtime.client.tasks.task_facts import read_standing
from runtime.errors import NotPossible, UnknownName, WorkFailed
from runtime.queues.base import Queue
from runtime.records.base import RecordStore, calls_at_once
from runtime.records.codec import read_value
from runtime.records.totals import Tally, open_tasks
from runtime.system import system
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState, is_id
from runtime.units import Span, count_noun, read_span

FAILED_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitResult:
    experiment: str
    totals: Mapping[TaskState, int]
    records: tuple[Record, ...] = ()
    """Records in the order of submission, if each task was waited for."""
    complete: bool = True
    """False if the timeout came first."""
    asked: Queue | str | None = field(default=None, repr=False, compare=False)
    """The queue that was named or passed, and its stack: large values are read from its records."""
    stack: str | None = field(default=None, repr=False, compare=False)

    @property
    def failed(self) -> int:
        return sum(self.totals.get(state, 0) for state in TaskState if state.terminal) - self.totals.get(
            TaskState.SUCCEEDED, 0
        )

    def values(self, *, none_for_failed: bool = False) -> list[Any]:
        """Return the values of the tasks, in the order of submission.

        Large values are read from the record store now. Raises `WorkFailed` if a task did not succeed, unless
        `none_for_failed` puts None in its place; `NotPossible` if a task has not ended yet, and beyond `NAMED_TASKS`;
        `StoreUnavailable` if the store has lost a value or does not answer.
        """
        total = sum(self.totals.values())
        if not self.complete:
            left = total - self.failed - self.totals.get(TaskState.SUCCEEDED, 0)
            raise NotPossible(
                f"{left:,} of {count_noun(total, 'task')} {'has' if left == 1 else 'have'} not ended, so there are no values of them",
                hint=f"wait again without `timeout`, or see what they wait for: runtime status {self.experiment}",
            )
        if len(self.records) != total:
            raise NotPossible(
                "only what was waited for task by task has its values at hand",
                facts=[f"{total} tasks, up to {NAMED_TASKS} are waited for that way"],
                hint="read them from the stack's records: open_stack().records.records(experiment), where a value over "
                "64 KiB is `get_blob(record.value_url)`, as JSON",
            )
        failed = [record for record in self.records if record.state is not TaskState.SUCCEEDED]
        if failed and not none_for_failed:
            more = [f"and {len(failed) - FAILED_SHOWN} more"] if len(failed) > FAILED_SHOWN else []
            raise WorkFailed(
                f"{len(failed)} of {count_noun(total, 'task')} did not succeed, and have no value",
                facts=[*(_how_it_ended(record) for record in failed[:FAILED_SHOWN]), *more],
                hint=f"runtime explain {failed[0].task_id}; values(none_for_failed=True) gives None for them",
            )
        for record in self.records:
            if record.unreadable:
                raise NotPossible(
                    f"the value of task `{record.task_id}` cannot be read",
                    facts=[record.unreadable],
                    hint="leave it out: the other values are in `records`",
                )
        if all(record.value_url is None for record in self.records):
            return [record.value for record in self.records]
        with open_target(self.asked, self.stack) as opened:
            store = (opened.queue if isinstance(opened, KeptStack) else opened).records
            with system.pool(calls_at_once(store), name="values") as pool:
                return list(pool.map(lambda record: read_value(record, store), self.records))


def _how_it_ended(record: Record) -> str:
    last = (record.message or "").strip().rpartition("\n")[2]
    return f"`{record.task_id}` {record.state}" + (f": {last}" if last else "")


def wait(
    what: Submission | str,
    *,
    queue: str | Queue | None = None,
    stack: str | None = None,
    timeout: Span | None = None,
    poll: timedelta = timedelta(seconds=0.5),
    progress: Callable[[Mapping[TaskState, int]], None] | None = None,
) -> WaitResult:
    """Wait until every task of a submission, or of the experiment named, has ended, or the task with that whole id.

    Returns also after `timeout`, with `complete` False. A submission of more than `NAMED_TASKS` tasks is waited for with
    all of its experiment. Interrupting it leaves the work alone. Raises `UnknownName` for an experiment without tasks.
    """
    span = read_span(timeout, "timeout")
    deadline = None if span is None else system.monotonic() + span.total_seconds()
    submission = what if isinstance(what, Submission) else None
    if submission is not None:
        queue = queue or submission.asked or submission.queue
        stack = stack or submission.stack
    with open_target(queue, stack) as opened:
        target = opened.queue if isinstance(opened, KeptStack) else opened
        if submission is not None and submission.tasks is not None:
            look: _Look = _ByTask(target.records, submission.experiment, submission.tasks)
        else:
            name = submission.experiment if submission else str(what)
            if submission is None and _is_task(name, target.records):
                look = _ByStanding(target.records, name)
            else:
                if submission is None:
                    _ensure_known(name, target.records)
                look = _ByExperiment(target.records, name)
        return replace(_poll(look, deadline, poll.total_seconds(), progress), asked=queue, stack=stack)


def _is_task(name: str, records: RecordStore) -> bool:
    return is_id(name) and records.find_experiment(name) is None and name in records.resolve(name, 1)


def _ensure_known(experiment: str, records: RecordStore) -> None:
    # An experiment of foreign producers alone has no name here, and records once a task of it ended.
    if records.find_experiment(experiment) is None and not records.totals(experiment, exact=True).submitted:
        raise UnknownName(
            "experiment",
            experiment,
            [seen.name for seen in records.experiments()],
            where=f"in `{records.url}`",
            hint="`runtime status` lists experiments; a task is waited for by what `submit` returned",
        )


class _ByTask:
    def __init__(self, records: RecordStore, experiment: str, tasks: Sequence[tuple[str, int]]) -> None:
        self._records, self._experiment, self._tasks = records, experiment, tasks
        self._found: dict[tuple[str, int], Record] = {}

    def look(self, *, final: bool) -> WaitResult:
        for identity in self._tasks:
            if identity not in self._found and (record := self._records.find(*identity)):
                self._found[identity] = record
        totals = Counter(record.state for record in self._found.values())
        if open_tasks := len(self._tasks) - len(self._found):
            totals[TaskState.QUEUED] = open_tasks
        return WaitResult(
            experiment=self._experiment,
            totals=dict(totals),
            records=tuple(self._found[identity] for identity in self._tasks if identity in self._found),
            complete=not open_tasks,
        )


class _ByExperiment:
    def __init__(self, records: RecordStore, experiment: str) -> None:
        self._tally, self._experiment = Tally(records), experiment

    def look(self, *, final: bool) -> WaitResult:
        totals = self._tally.count(self._experiment, final=final)
        return WaitResult(experiment=self._experiment, totals=dict(totals.counts), complete=not open_tasks(totals))


class _ByStanding:
    """One task, whatever its generation: a retry is waited for, too."""

    def __init__(self, records: RecordStore, task_id: str) -> None:
        self._records, self._task_id = records, task_id

    def look(self, *, final: bool) -> WaitResult:
        standing = read_standing(self._records, self._task_id, with_task=False)
        record = standing.record
        return WaitResult(
            experiment=standing.experiment,
            totals={standing.state: 1},
            records=(record,) if record and standing.state.terminal else (),
            complete=standing.state.terminal,
        )


_Look: TypeAlias = _ByTask | _ByExperiment | _ByStanding


def _poll(
    look: _Look, deadline: float | None, poll_s: float, progress: Callable[[Mapping[TaskState, int]], None] | None
) -> WaitResult:
    pause = min(0.05, poll_s)
    while True:
        left = None if deadline is None else deadline - system.monotonic()
        final = left is not None and left <= 0
        seen = look.look(final=final)
        if progress:
            progress(seen.totals)
        if seen.complete or final:
            return seen
        system.sleep(pause if left is None else min(pause, left))
        pause = min(pause * 1.5, poll_s)
