"""`runtime cancel`: stop tasks, experiments and jobs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption, YesOption
from runtime.cli.jobs import IndexOption, OnOption, OthersOption, is_job, open_job, short
from runtime.cli.printing import note
from runtime.cli.show import Columns, Output, confirm, note_skew, print_list
from runtime.client.identify import Kind, identify, recall_last
from runtime.client.tasks.cancel import Cancelled
from runtime.client.tasks.cancel import cancel as cancel_one
from runtime.errors import RequestRefused
from runtime.records.totals import Tally, open_tasks
from runtime.stack.open import open_stack
from runtime.tasks.model import TaskState
from runtime.units import count_noun
from runtime.values import dataclass

if TYPE_CHECKING:
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
    output: OutputOption = Output.TEXT,
) -> int:
    """Stop tasks, experiments and jobs.

    A queued task will not run; a running one is stopped within 10 s and what it wrote is not recorded. What has ended
    already stays as it is, and that is success too. An experiment is asked about first: everything submitted to it
    until now is cancelled, however much that is. Of a job it is verified that nothing is left; what is left over is
    said, with exit code 3. `last` is the job that was launched last from this terminal, and a name has to fit one job
    that has not ended.

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
        ended = [_cancel_job(text, index or [], release=release, others=others, on=on, yes=yes) for text in jobs]
        print_list(ended, JOB_COLUMNS, output)
        left_over = [line for one in ended for line in one.left_over]
        for line in left_over:
            note(f"left over: {line}")
        return LEFT_OVER if left_over else 0
    with open_stack(stack) as opened:
        records = opened.records
        last = recall_last(opened.settings.data_dir, opened.name)
        chosen = [identify(text, records, last=last) for text in what]
        for one in chosen:
            asks = one.kind is Kind.EXPERIMENT and not yes
            if asks and (left := open_tasks(Tally(records).count(one.name))):
                confirm(f"cancel experiment `{one.name}` with {count_noun(left, 'unfinished task')}", yes=yes)
        done = [cancel_one(opened, one, now=datetime.now(UTC)) for one in chosen]
        note_skew(records)
    print_list(done, COLUMNS, output)
    if any(one.kind is Kind.EXPERIMENT for one in done):
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


def _cancel_job(
    text: str, index: Sequence[str], *, release: bool, others: bool, on: str | None, yes: bool
) -> CancelledJob:
    from runtime.client.jobs.handle import check_owner
    from runtime.jobs.indices import choose_indices
    from runtime.jobs.spec import JobState
    from runtime.launchers.base import find_keeper
    from runtime.launchers.standing import GONE
    from runtime.reasons import EndReason

    with open_job(text, on, acting=True) as job:
        status, _ = job.look()
        check_owner(status.entry, others=others, verb="cancel")
        indices = choose_indices(status.entry, index)
        # A run that was lost may have left processes, and `runtime keep` takes it up if it is not cancelled.
        reasons = GONE if job.launcher.takes_up else (EndReason.LOST,)
        gone = {each.index for each in status.indices if each.reason in reasons} - set(status.entry.outcomes)
        gone = set() if find_keeper(job.launcher) else gone  # there its labels find it
        left_runs = [each for each in status.indices if not each.state.terminal or each.index in gone]
        ended = not [each for each in left_runs if each.index in indices or not indices]
        made = functools.partial(CancelledJob, name=job.id, kind="job", indices=indices)
        if ended and not release:
            strays = () if indices else tuple(job.end_strays())
            return made(state=status.state, already=True, left_over=strays)
        if len(left_runs) > 1 and not indices:
            confirm(f"cancel job `{short(job.id)}` with {count_noun(len(left_runs), 'unfinished run')}", yes=yes)
        if release and not indices:
            raise RequestRefused("`--release` gives up one run", hint=f"runtime cancel {text} --index I --release")
        left = job.cancel(indices=list(indices) or None)
        left += [line for each in indices if release for line in job.release(each)]
        return made(state=JobState.CANCELLED, already=False, left_over=tuple(left))


def _describe_job(done: CancelledJob) -> str:
    if done.already:
        return "it had been cancelled before" if done.state == "cancelled" else f"it had already {done.state}"
    if done.left_over:
        return f"{len(done.left_over)} left over"
    if done.indices:
        return f"{'runs' if len(done.indices) > 1 else 'run'} {', '.join(map(str, done.indices))} will end"
    return "nothing of it is left"


JOB_COLUMNS: Columns = {"NAME": "name", "STATE": "state", "WHAT": _describe_job}


def describe(done: Cancelled) -> str:
    if done.already:
        return "it had been cancelled before" if done.state is TaskState.CANCELLED else f"it had already {done.state}"
    if done.kind is Kind.EXPERIMENT:
        if done.ended is None:
            return "workers record each of its tasks as cancelled when they come to it"
        tasks = count_noun(done.ended, "task")
        return f"{tasks} cancelled, running ones stop within 10 s"
    return f"worker {done.running} stops it within 10 s" if done.running else "it will not run"


COLUMNS: Columns = {"NAME": "name", "STATE": "state", "WHAT": describe}
