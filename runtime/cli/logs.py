"""`runtime logs`: what a task or a job printed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from runtime.cli.commands import StackOption
from runtime.cli.console import INTERRUPTED, note, write_log
from runtime.cli.jobs import IndexOption, OnOption, detached, is_job, open_job, short, stuck_teller
from runtime.client.resolve_id import IdKind, get_task_id, identify, recall_last
from runtime.client.tasks.logs import AttemptLog, choose_log, find_logs, follow, read_log, read_logs
from runtime.client.tasks.task_facts import read_standing
from runtime.errors import InvalidValue, RequestRefused
from runtime.stack.open import open_stack

if TYPE_CHECKING:
    from runtime.client.jobs.handle import JobHandle
    from runtime.records.base import RecordStore


def logs(
    task: Annotated[str, Argument(metavar="TASK|JOB|EXPERIMENT", help="A name, an id or its beginning, or `last`.")],
    follow_: Annotated[bool, Option("--follow", "-f", help="Go on until it has ended.")] = False,
    attempt: Annotated[
        str | None, Option(metavar="TOKEN|N", help="This attempt: of a task not the newest, of a job not all.")
    ] = None,
    rank: Annotated[int | None, Option(metavar="R", help="This rank of a job.")] = None,
    index: IndexOption = None,
    on: OnOption = None,
    stack: StackOption = None,
) -> int:
    """What a task or a job printed: its standard output and error as they came.

    Of a task that was tried several times it is the newest attempt, of a job all of them in turn; `runtime status`
    lists them. Of an array it is the first run, with `--follow` every run, and with several runs in `--index` those, each
    line with its index. Of an experiment it is every task, each line with the task's key or the beginning of its id.
    Ctrl-C while following leaves the work alone.

    \b
    Examples:
      runtime logs t-3f2a
      runtime logs -f t-3f2a
      runtime logs t-3f2a --attempt 91c0
      runtime logs t-3f2a | grep -i loss
      runtime logs sweep | grep -i warning
      runtime logs train-7b
      runtime logs j-91c0 --index 3 --attempt 2
      runtime logs j-91c0 --index 0-3,7
    """
    if is_job(task, on=on, stack=stack):
        return _job_logs(task, follow=follow_, attempt=attempt, rank=rank, index=index, on=on)
    if rank is not None or index is not None or on is not None:
        raise RequestRefused(
            f"`--rank`, `--index` and `--on` are of jobs, and `{task}` is none", hint="runtime logs j-91c0 --index 3"
        )
    with open_stack(stack) as opened:
        records = opened.records
        found = identify(task, records, last=recall_last(opened.settings.data_dir, opened.name))
        if found.kind is IdKind.EXPERIMENT:
            return _experiment_logs(records, found.name, follow=follow_, attempt=attempt)
        task_id = get_task_id(found.name, records)
        if follow_ and attempt is None:
            try:
                write_log(follow(records, task_id, said=_say))
            except KeyboardInterrupt:
                note(f"detached, the task goes on; `runtime logs -f {task_id}` comes back")
                return INTERRUPTED
            return 0
        attempts = find_logs(records, read_standing(records, task_id, with_task=False))
        chosen = choose_log(task_id, attempts, attempt)
        if len(attempts) > 1:
            _say(chosen)
        write_log(read_log(records, chosen))
    return 0


def _experiment_logs(records: RecordStore, experiment: str, *, follow: bool, attempt: str | None) -> int:
    if follow or attempt is not None:
        raise RequestRefused(
            f"`--follow` and `--attempt` are of one task, and `{experiment}` is an experiment",
            hint=f"`runtime results {experiment}` lists its tasks; `runtime status {experiment} --watch` follows it",
        )
    if not write_log(read_logs(records, experiment)):
        note(f"no task of `{experiment}` has printed anything yet")
    return 0


def _job_logs(
    text: str, *, follow: bool, attempt: str | None, rank: int | None, index: list[str] | None, on: str | None
) -> int:
    from runtime.client.jobs.handle import check_log, follow_all, read_unbegun
    from runtime.jobs.indices import choose_indices

    if attempt is not None and not attempt.isdecimal():
        raise InvalidValue("attempt", attempt, "its number, such as 2: attempts of a job are counted")
    number = int(attempt) if attempt else None
    with open_job(text, on) as job:
        entry = job.entry()
        runs = choose_indices(entry, index)
        chosen = runs[0] if runs else entry.first_index
        for each in runs or (chosen,):
            check_log(job, each, number, rank or 0)
        try:
            if follow and entry.indices > 1 and len(runs) != 1 and not rank and number is None:
                for run, line in follow_all(job, runs, tell=stuck_teller(job.id)):
                    write_log([b"[%d] %s\n" % (run, line)])
                return 0
            if len(runs) > 1:
                return _runs_logs(job, runs, follow=follow, attempt=number, rank=rank or 0)
            if entry.indices > 1 and not runs:
                note(f"-- run {chosen} of {entry.indices}; `--index` shows another")
            printed = write_log(
                job.logs(index=chosen, rank=rank or 0, attempt=number, follow=follow, tell=stuck_teller(job.id))
            )
            beside = read_unbegun(job, chosen) if number is None else []
            if beside:
                note(f"-- {entry.kind}'s own log of what came before the command")
                write_log(f"{line}\n".encode() for line in beside)
            if not printed and not beside:
                note(f"nothing was printed; `runtime explain {short(job.id)}` says how it stands")
        except KeyboardInterrupt:
            detached(job.id)
            return INTERRUPTED
    return 0


def _runs_logs(job: JobHandle, runs: Sequence[int], *, follow: bool, attempt: int | None, rank: int) -> int:
    if follow:
        raise RequestRefused(
            "`--follow` with `--rank` or `--attempt` follows one run", hint=f"runtime logs -f {short(job.id)} --index 3"
        )
    from runtime.client.jobs.handle import read_labelled

    if not write_log(chain.from_iterable(read_labelled(job, run, rank=rank, attempt=attempt) for run in runs)):
        note(f"nothing was printed; `runtime explain {short(job.id)}` says how it stands")
    return 0


def _say(log: AttemptLog) -> None:
    where = f" on worker {log.worker}" if log.worker else ""
    life = f" of generation {log.generation}" if log.generation > 1 else ""
    note(f"-- attempt {log.token}{life}{where}")
