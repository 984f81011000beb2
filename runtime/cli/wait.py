"""`runtime wait`: return when an experiment, a task or a job has ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.console import INTERRUPTED, note
from runtime.cli.jobs import OnOption, detached, is_job, open_jobs, short, stuck_teller
from runtime.cli.output import OutputFormat, describe_state, format_count, print_json, progress
from runtime.client.resolve_id import IdKind, identify, recall_last
from runtime.errors import InfrastructureFailure, RequestRefused
from runtime.stack.open import open_stack
from runtime.tasks.model import TaskState
from runtime.units import format_duration, read_span

if TYPE_CHECKING:
    from runtime.client.tasks.submit import Submission
    from runtime.client.tasks.task_facts import Stack
    from runtime.client.tasks.wait import WaitResult
    from runtime.jobs.ledger import JobStatus
    from runtime.queues.base import Queue
    from runtime.records.base import RecordStore

TIMED_OUT = 124
SAY_WHY_AFTER_S = 5.0
SAY_WHY_EVERY_S = 30.0
"""Pause between two reads of the reason while tasks wait."""


def wait(
    what: Annotated[str, Argument(metavar="EXPERIMENT|TASK|JOB", help="A name, an id or its beginning, or `last`.")],
    timeout: Annotated[str | None, Option(metavar="TIME", help="Give up after this time, such as 2h.")] = None,
    on: OnOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Return when all of an experiment, a task or a job has ended.

    A name stands for its newest job and for all others of that name that have not ended. Ctrl-C and a time-out leave the work alone.

    \b
    Examples:
      runtime wait last && runtime results last
      runtime wait sweep --timeout 2h
      runtime wait t-3f2a
      runtime wait j-91c0 && runtime fetch j-91c0
      runtime wait train-7b

    Exit codes: 0 all succeeded, 1 some did not, 124 not over after `--timeout`, 130 interrupted.
    """
    span = read_span(timeout, "timeout")
    if is_job(what, on=on, stack=stack):
        return _wait_for_jobs(what, span, on, output)
    if on is not None:
        raise RequestRefused(f"`--on` looks at a target's jobs, and `{what}` is no job", hint="runtime wait j-91c0")
    with open_stack(stack) as opened:
        found = identify(what, opened.records, last=recall_last(opened.settings.data_dir, opened.name))
        if found.kind is IdKind.WORKER:
            raise RequestRefused(f"`{what}` is a worker, which ends when it is told to", hint="name what it works on")
        waited = wait_shown(found.name, found.name, opened, timeout=span)
        if waited is None:
            return INTERRUPTED
        totals = {state.value: waited.totals.get(state, 0) for state in TaskState}
        if output is OutputFormat.JSON:
            print_json(
                {str(found.kind): found.name, "complete": waited.complete, "totals": totals, "failed": waited.failed}
            )
        report_ended(waited, opened.records)
    if not waited.complete and span is not None:
        note(f"not over after {format_duration(span)}, the work goes on; `runtime wait {found.name}` waits again")
        return TIMED_OUT
    return 1 if waited.failed else 0


def _wait_for_jobs(text: str, span: timedelta | None, on: str | None, output: OutputFormat) -> int:
    """Wait for a job, or for the newest job of a name and each other one of it that has not ended."""
    from runtime.client.jobs.status import note_status
    from runtime.config import load_settings
    from runtime.jobs.spec import JobState

    until = None if span is None else time.monotonic() + span.total_seconds()
    ends: dict[str, JobStatus] = {}
    with open_jobs(text, on) as jobs:
        for job in [*(job for job in jobs[:-1] if not job.status().state.terminal), jobs[-1]]:
            left = None if until is None else timedelta(seconds=max(0.0, until - time.monotonic()))
            try:
                status = job.wait(timeout=left, tell=stuck_teller(job.id))
            except KeyboardInterrupt:
                detached(job.id)
                return INTERRUPTED
            except TimeoutError:
                status = job.status()
            note_status(job, status, load_settings())
            ends[job.id] = status
    complete = all(status.state.terminal for status in ends.values())
    if output is OutputFormat.JSON:
        rows = [
            {"job": job, "state": status.state, "reason": status.reason, "complete": status.state.terminal}
            for job, status in ends.items()
        ]
        print_json(rows[0] if len(jobs) == 1 else {"name": text, "complete": complete, "jobs": rows})
    for identity, status in ends.items():
        note(f"job {identity} {describe_state(status.state, status.reason)}")
        if status.state.terminal and status.state is not JobState.SUCCEEDED:
            note(f"why: `runtime explain {short(identity)}`")
    if not complete and span is not None:
        again = short(next(iter(ends))) if len(jobs) == 1 else text
        note(f"not over after {format_duration(span)}, the work goes on; `runtime wait {again}` waits again")
        return TIMED_OUT
    return 0 if all(status.state is JobState.SUCCEEDED for status in ends.values()) else 1


def wait_shown(
    what: Submission | str,
    name: str,
    opened: Stack,
    *,
    queue: Queue | None = None,
    total: int | None = None,
    timeout: timedelta | None = None,
) -> WaitResult | None:
    """Wait with progress on stderr, and the reason why tasks wait; None if the user has interrupted it."""
    from runtime.client.tasks.wait import wait as wait_for

    experiment = what if isinstance(what, str) else what.experiment
    with ExitStack() as shown:
        bar = shown.enter_context(progress(f"waiting for {name}", total))
        reason = Reason(lambda: _why_it_waits(opened, experiment))

        def look(totals: Mapping[TaskState, int]) -> None:
            if any(count and not state.terminal for state, count in totals.items()):
                reason.say()
            ended = sum(count for state, count in totals.items() if state.terminal)
            bar.set(done=ended, total=sum(totals.values()))

        try:
            return wait_for(what, queue=queue or opened.queue(), timeout=timeout, progress=look)
        except KeyboardInterrupt:
            shown.close()
            note(f"detached, the work goes on; come back with `runtime wait {name}`")
            return None


class Reason:
    """Notes the reason why tasks wait: after a while, and again after each change."""

    def __init__(
        self,
        read: Callable[[], str | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = note,
    ) -> None:
        self._read, self._clock, self._write = read, clock, write
        self._at = clock() + SAY_WHY_AFTER_S
        self._said: str | None = None

    def say(self) -> None:
        now = self._clock()
        if now < self._at:
            return
        self._at = now + SAY_WHY_EVERY_S
        why = self._read()
        if why is not None and why != self._said:
            self._write(f"waiting: {why}")
            self._said = why


def _why_it_waits(opened: Stack, what: str) -> str | None:
    from runtime.client.tasks.status import read_experiment

    if opened.records.find_experiment(what) is None:
        return None
    try:
        seen = read_experiment(opened, what, now=datetime.now(UTC), failures=0)
    except InfrastructureFailure as problem:
        return problem.message
    if seen.why is None:
        return None
    return seen.why + (f"; next: `{seen.next_step}`" if seen.next_step else "")


def report_ended(waited: WaitResult, records: RecordStore) -> None:
    counts = [f"{format_count(count)} {state.value}" for state, count in waited.totals.items() if count]
    note(", ".join(counts) or "nothing to wait for")
    if not waited.failed:
        return
    if waited.records:
        failed = [
            (record.task_id, record.message) for record in waited.records if record.state is not TaskState.SUCCEEDED
        ]
    else:
        marks = itertools.islice(records.marks(waited.experiment), 5)
        failed = [(mark.task_id, mark.message) for mark in marks]
    for identity, message in failed[:5]:
        last = (message or "").strip().rpartition("\n")[2]
        note(f"  {identity}: {last or 'no message'}")
    note(f"see why with `runtime explain {failed[0][0] if failed else waited.experiment}`")
