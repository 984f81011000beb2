"""`runtime retry`: run once more what failed, was cancelled or expired."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from typer import Argument, Option
from typer.core import TyperCommand

from runtime.cli.commands import OutputOption, StackOption, YesOption
from runtime.cli.console import note
from runtime.cli.jobs import IndexOption, OnOption, OthersOption, is_job, may_be_job, open_job, short
from runtime.cli.output import Columns, OutputFormat, confirm, format_count, print_done, print_list
from runtime.client.resolve_id import get_experiment, get_task_id, recall_last
from runtime.client.tasks.redrive import RedriveResult, parse_reasons, read_dead, redrive
from runtime.client.tasks.redrive import retry as retry_task
from runtime.errors import NotPossible, RequestRefused
from runtime.stack.open import open_stack
from runtime.units import count_noun

T = TypeVar("T")

REFUSED = 2
REFUSED_SHOWN = 10

COLUMNS: Columns = {"TASK": "task", "GENERATION": "generation", "QUEUE": "queue", "REFUSED": "refused"}


def retry(
    tasks: Annotated[list[str] | None, Argument(metavar="[TASK...|JOB]", help="Ids or their beginnings.")] = None,
    failed: Annotated[
        str | None,
        Option("--failed", metavar="EXPERIMENT|JOB", help="Every failed task of the experiment, or run of the job."),
    ] = None,
    reason: Annotated[
        list[str] | None, Option(metavar="REASON", help="With `--failed`: only those, such as app_failed or oom.")
    ] = None,
    index: IndexOption = None,
    others: OthersOption = False,
    on: OnOption = None,
    yes: YesOption = False,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Run failed, cancelled or expired tasks, or the failed runs of a job, once more with new budgets.

    Each task begins its next generation: the same id and work, its failures forgotten, its history kept. A task that
    succeeded, or has not ended, is refused. Of a job that has ended, the runs that failed go again and those that
    succeeded stay. Interrupted and run again, nothing runs twice.

    \b
    Examples:
      runtime retry t-3f2a t-91c0
      runtime retry --failed sweep
      runtime retry --failed last --reason oom --reason timeout --yes
      runtime retry j-91c0 --failed
      runtime retry train-7b --index 0-3,7
    """
    job = _find_job(tasks or [], failed, on=on, stack=stack)
    if job:
        return _retry_job(job, index or [], others=others, on=on, yes=yes, output=output)
    if index or others or on:
        raise RequestRefused("`--index`, `--others` and `--on` are of jobs", hint="runtime retry j-91c0 --index 3")
    if bool(tasks) == bool(failed):
        raise RequestRefused(
            "`runtime retry` needs tasks or `--failed EXPERIMENT`, one of the two", hint="runtime retry --failed last"
        )
    reasons = parse_reasons(reason or ())
    if reasons and not failed:
        raise RequestRefused(
            "`--reason` chooses among `--failed EXPERIMENT`", hint="runtime retry --failed last --reason oom"
        )
    with open_stack(stack) as opened:
        last = recall_last(opened.settings.data_dir, opened.name)
        now = datetime.now(UTC)
        if failed:
            experiment = get_experiment(failed, opened.records, last=last)
            marks = confirmed(
                lambda: read_dead(opened.records, experiment, reasons=reasons),
                lambda count: f"run {count_noun(count, 'failed task')} of `{experiment}` again",
                yes=yes,
            )
            results: Iterable[RedriveResult] = redrive(opened, marks, now=now)
        else:
            ids = [get_task_id(text, opened.records, last=last) for text in tasks or ()]
            results = (retry_task(opened, task_id, now=now) for task_id in ids)
        counted = RetryCounter(results)
        print_done(counted, COLUMNS, output)
    return counted.finish(strict=not failed)


def confirmed(read: Callable[[], Iterator[T]], question: Callable[[int], str], *, yes: bool) -> Iterator[T]:
    """Return the items of `read` after the person confirmed their count. They are read twice, so none is kept in memory."""
    if yes:
        return read()
    if count := sum(1 for _ in read()):
        confirm(question(count), yes=False)
    return itertools.islice(read(), count)


class JobCommand(TyperCommand):
    """Takes `--failed` without a value after a job's id; for tasks it has one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--failed" in args and any(may_be_job(word) for word in args):
            place = args.index("--failed")
            follows = args[place + 1 : place + 2]
            if not follows or follows[0].startswith("-"):
                args = [*args[:place], *args[place + 1 :]]
        return super().parse_args(ctx, args)


COMMAND_CLASS = JobCommand

JOB_COLUMNS: Columns = {
    "JOB": "job",
    "RUNS": lambda one: ",".join(map(str, one.indices[:20])) + (",…" if len(one.indices) > 20 else ""),
    "NATIVE": "native_id",
}


def _find_job(tasks: list[str], failed: str | None, *, on: str | None, stack: str | None) -> str | None:
    """Return the job among the arguments, if there is one."""
    named = [text for text in (*tasks, failed) if is_job(text, on=on, stack=stack, acting=True)]
    if named and (len(named) > 1 or len(tasks) > 1):
        raise RequestRefused("jobs are retried one at a time", hint=f"runtime retry {named[0]}")
    return named[0] if named else None


def _retry_job(text: str, index: list[str], *, others: bool, on: str | None, yes: bool, output: OutputFormat) -> int:
    from runtime.client.jobs.handle import check_owner
    from runtime.client.jobs.retry import choose_runs, retry_job
    from runtime.config import load_settings
    from runtime.jobs.indices import choose_indices

    with open_job(text, on) as job:
        status, _ = job.poll_closely(note)
        check_owner(status.entry, others=others, verb="retry")
        chosen = choose_runs(status, choose_indices(status.entry, index))
        if len(chosen) > 1:
            confirm(f"run {count_noun(len(chosen), 'run')} of job `{short(job.id)}` again", yes=yes)
        done = retry_job(job, load_settings(), indices=chosen, progress=note)
    print_list([done], JOB_COLUMNS, output)
    if done.new:
        note(f"this backend starts no job anew: {done.job} is a new job, what succeeded before is in {short(job.id)}")
    note(f"`runtime status {short(done.job)}` shows it")
    return 0


class RetryCounter:
    """Passes results on, and reports their counts at the end."""

    def __init__(self, results: Iterable[RedriveResult]) -> None:
        self._results = results
        self.done = self.already = self.refused = 0
        self._shown: list[RedriveResult] = []

    def __iter__(self) -> Iterator[RedriveResult]:
        for one in self._results:
            if one.done:
                self.done += 1
            elif one.already:
                self.already += 1
            else:
                self.refused += 1
                if len(self._shown) < REFUSED_SHOWN:
                    self._shown.append(one)
            yield one

    def finish(self, *, strict: bool) -> int:
        """Return the exit code; `strict` if each task was named. Raises `NotPossible` if all were refused."""
        if self.already:
            note(f"{format_count(self.already)} had been queued again already, by another or by an interrupted command")
        if self.refused and not self.done and not self.already:
            raise NotPossible(
                "nothing was queued again",
                facts=[f"`{one.task}`: {one.refused}" for one in self._shown],
                hint=f"runtime explain {self._shown[0].task}",
            )
        if not self.done and not self.already:
            note("nothing there waits to be tried again")
            return 0
        refused = f", {format_count(self.refused)} refused" if self.refused else ""
        note(f"{format_count(self.done)} queued again{refused}; `runtime status` shows them")
        return REFUSED if self.refused and strict else 0
