"""`runtime cancel`: stop tasks, experiments and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption, YesOption
from runtime.cli.console import note
from runtime.cli.jobs import IndexOption, OnOption, OthersOption, is_job, open_job, short
from runtime.cli.output import Columns, OutputFormat, confirm, note_skew, print_done
from runtime.client.resolve_id import IdKind, identify, recall_last
from runtime.client.tasks.cancel import CancelResult, check_cancellable
from runtime.client.tasks.cancel import cancel as cancel_one
from runtime.errors import NotPossible, RequestRefused
from runtime.records.totals import Tally, open_tasks
from runtime.stack.open import open_stack
from runtime.tasks.model import TaskState
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.client.jobs.handle import JobHandle
    from runtime.jobs.ledger import JobStatus
    from runtime.jobs.spec import JobState

LEFT_OVER: Final = 3


def cancel(
    what: Annotated[
        list[str], Argument(metavar="TASK|EXPERIMENT|JOB...", help="Ids or their beginnings, names, or `last`.")
    ],
    yes: YesOption = False,
    index: IndexOption = None,
    release: Annotated[bool, Option("--release", help="With `--index`: give up a run on a node that is gone.")] = False,
    others: OthersOption = False,
    on: OnOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Stop tasks, experiments and jobs.

    A queued task will not run; a running one is stopped within 10 s and what it wrote is not recorded. What has ended
    already stays as it is, and that is success too. An experiment is asked about first: everything submitted to it
    until now is cancelled, however much that is. Of a job it is verified that nothing is left; what is left over is
    said, with exit code 3. Of several, none is stopped before all are found and checked. `last` is the job that was
    launched last from this terminal, and a name has to fit one job that has not ended.

    \b
    Examples:
      runtime cancel t-3f2a
      runtime cancel sweep --yes
      runtime cancel last
      runtime cancel train-7b
      runtime cancel j-91c0 --index 0-3,7
    """
    jobs = [text for text in what if is_job(text, on=on, stack=stack, acting=True)]
    if not jobs and (index or release or others or on):
        raise RequestRefused(
            "`--index`, `--release`, `--others` and `--on` are of jobs", hint="runtime cancel j-91c0 --index 3"
        )
    if jobs:
        if len(jobs) < len(what):
            raise RequestRefused("jobs are cancelled by themselves", hint=f"runtime cancel {' '.join(jobs)}")
        return _cancel_jobs(jobs, index or [], release=release, others=others, on=on, yes=yes, output=output)
    with open_stack(stack) as opened:
        records = opened.records
        last = recall_last(opened.settings.data_dir, opened.name)
        chosen = [identify(text, records, last=last) for text in what]
        for one in chosen:
            check_cancellable(one)
        for one in chosen:
            asks = one.kind is IdKind.EXPERIMENT and not yes
            if asks and (left := open_tasks(Tally(records).count(one.name))):
                confirm(f"cancel experiment `{one.name}` with {count_noun(left, 'unfinished task')}", yes=yes)
        print_done((cancel_one(opened, one, now=datetime.now(UTC)) for one in chosen), COLUMNS, output)
        note_skew(records)
    if any(one.kind is IdKind.EXPERIMENT for one in chosen):
        note("`runtime status` shows what is left; `runtime retry` brings a cancelled task back")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledJob:
    name: str
    kind: str
    state: JobState
    already: bool
    indices: tuple[int, ...]
    """The named runs; empty means all."""
    left_over: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """A job that was found and may be cancelled."""

    job: JobHandle
    status: JobStatus
    indices: tuple[int, ...]
    left: int
    """Its runs that have not ended, or may have left processes."""
    ended: bool
    """Nothing of what is meant is left."""


def _cancel_jobs(
    texts: Sequence[str],
    index: Sequence[str],
    *,
    release: bool,
    others: bool,
    on: str | None,
    yes: bool,
    output: OutputFormat,
) -> int:
    """Cancel jobs once all of them are found, checked and confirmed."""
    with ExitStack() as opened:
        jobs: dict[str, JobHandle] = {}
        for text in texts:
            job = opened.enter_context(open_job(text, on, acting=True))
            jobs.setdefault(job.id, job)
        chosen = [_choose(job, index, release=release, others=others) for job in jobs.values()]
        for one in chosen:
            if one.left > 1 and not one.indices and not one.ended:
                question = f"cancel job `{short(one.job.id)}` with {count_noun(one.left, 'unfinished run')}"
                confirm(question, yes=yes)
        left_over: list[str] = []
        try:
            print_done((_cancel_job(one, left_over, release=release) for one in chosen), JOB_COLUMNS, output)
        finally:
            for line in left_over:
                note(f"left over: {line}")
    return LEFT_OVER if left_over else 0


def _choose(job: JobHandle, index: Sequence[str], *, release: bool, others: bool) -> _Chosen:
    """Look at a job, and raise whatever forbids to cancel it."""
    from runtime.client.jobs.handle import check_owner
    from runtime.end_reasons import EndReason
    from runtime.jobs.indices import choose_indices
    from runtime.launchers.base import Releases, find_keeper
    from runtime.launchers.job_status import GONE

    status, _ = job.look()
    check_owner(status.entry, others=others, verb="cancel")
    indices = choose_indices(status.entry, index)
    if release and not indices:
        raise RequestRefused("`--release` gives up one run", hint=f"runtime cancel {short(job.id)} --index I --release")
    if release and not isinstance(job.launcher, Releases):
        raise NotPossible(
            f"target `{job.target.name}` ({job.target.kind}) holds no run for a machine that is gone",
            hint=f"runtime cancel {short(job.id)} --index {','.join(map(str, indices))}",
        )
    # A run that was lost may have left processes, and `runtime keep` takes it up if it is not cancelled.
    reasons = GONE if job.launcher.resumes else (EndReason.LOST,)
    gone = {each.index for each in status.indices if each.reason in reasons} - set(status.entry.outcomes)
    gone = set() if find_keeper(job.launcher) else gone  # there its labels find it
    left = [each for each in status.indices if not each.state.terminal or each.index in gone]
    ended = not release and not [each for each in left if each.index in indices or not indices]
    return _Chosen(job=job, status=status, indices=indices, left=len(left), ended=ended)


def _cancel_job(one: _Chosen, left_over: list[str], *, release: bool) -> CancelledJob:
    """Cancel what was chosen; what is left of it is added to `left_over`."""
    from runtime.jobs.spec import JobState

    if one.ended:
        left, state = [] if one.indices else one.job.end_strays(), one.status.state
    else:
        left, state = one.job.cancel(indices=list(one.indices) or None), JobState.CANCELLED
        left += [line for each in one.indices if release for line in one.job.release(each)]
    left_over += left
    return CancelledJob(
        name=one.job.id, kind="job", state=state, already=one.ended, indices=one.indices, left_over=tuple(left)
    )


def _describe_job(done: CancelledJob) -> str:
    if done.already:
        return "it had been cancelled before" if done.state == "cancelled" else f"it had already {done.state}"
    if done.left_over:
        return f"{len(done.left_over)} left over"
    if done.indices:
        return f"{'runs' if len(done.indices) > 1 else 'run'} {', '.join(map(str, done.indices))} will end"
    return "nothing of it is left"


JOB_COLUMNS: Columns = {"NAME": "name", "STATE": "state", "WHAT": _describe_job}


def describe(done: CancelResult) -> str:
    if done.already:
        return "it had been cancelled before" if done.state is TaskState.CANCELLED else f"it had already {done.state}"
    if done.kind is IdKind.EXPERIMENT:
        if done.ended is None:
            return "workers record each of its tasks as cancelled when they come to it"
        tasks = count_noun(done.ended, "task")
        return f"{tasks} cancelled, running ones stop within 10 s"
    return f"worker {done.running} stops it within 10 s" if done.running else "it will not run"


COLUMNS: Columns = {"NAME": "name", "STATE": "state", "WHAT": describe}
