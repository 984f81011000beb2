"""`runtime retry`: run once more what failed, was cancelled or expired."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from runtime.cli.commands import OutputOption, StackOption, YesOption
from runtime.cli.show import Output, confirm, format_count, note, print_list
from runtime.errors import NotPossible, RequestRefused
from runtime.identify import get_experiment, get_task_id, recall_last
from runtime.redrive import Redriven, parse_reasons, read_dead, redrive
from runtime.redrive import retry as retry_task
from runtime.stacks import open_stack

REFUSED = 2

COLUMNS = {
    "TASK": lambda one: one.task,
    "GENERATION": lambda one: one.generation,
    "QUEUE": lambda one: one.queue,
    "REFUSED": lambda one: one.refused,
}


def retry(
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK...]", help="Ids or their beginnings.", show_default=False)
    ] = None,
    failed: Annotated[
        str | None,
        typer.Option("--failed", metavar="EXPERIMENT", help="Every failed task of the experiment.", show_default=False),
    ] = None,
    reason: Annotated[
        list[str] | None,
        typer.Option(
            "--reason",
            metavar="REASON",
            help="With `--failed`: only those, such as app_failed or oom.",
            show_default=False,
        ),
    ] = None,
    yes: YesOption = False,
    stack: StackOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Run failed, cancelled or expired tasks once more, with new budgets.

    Each begins its next generation: the same id and work, its failures forgotten, its history kept. A task that
    succeeded, or has not ended, is refused. Interrupted and run again, nothing runs twice.

    \b
    Examples:
      runtime retry t-3f2a t-91c0
      runtime retry --failed sweep
      runtime retry --failed last --reason oom --reason timeout --yes
    """
    if bool(tasks) == bool(failed):
        raise RequestRefused(
            "`runtime retry` needs tasks or `--failed EXPERIMENT`, one of the two",
            hint="runtime retry --failed last",
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
            marks = list(read_dead(opened.records, experiment, reasons=reasons))
            if marks:
                confirm(f"run {format_count(len(marks))} failed tasks of `{experiment}` again", yes=yes)
            results: Iterable[Redriven] = redrive(opened, marks, now=now)
        else:
            ids = [get_task_id(text, opened.records, last=last) for text in tasks or ()]
            results = (retry_task(opened, task_id, now=now) for task_id in ids)
        counted = Counted(results)
        print_list(counted, COLUMNS, output)
    return counted.finish(strict=not failed)


class Counted:
    """Passes results on and says at the end what they came to."""

    def __init__(self, results: Iterable[Redriven]) -> None:
        self._results = results
        self.done = 0
        self.refused: list[Redriven] = []

    def __iter__(self) -> Iterator[Redriven]:
        for one in self._results:
            if one.done:
                self.done += 1
            else:
                self.refused.append(one)
            yield one

    def finish(self, *, strict: bool) -> int:
        """The exit code; `strict` where each task was named. Raises `NotPossible` if all were refused."""
        if self.refused and not self.done:
            raise NotPossible(
                "nothing was queued again",
                facts=[f"`{one.task}`: {one.refused}" for one in self.refused[:10]],
                hint=f"runtime explain {self.refused[0].task}",
            )
        if not self.done:
            note("nothing there waits to be tried again")
            return 0
        refused = f", {format_count(len(self.refused))} refused" if self.refused else ""
        note(f"{format_count(self.done)} queued again{refused}; `runtime status` shows them")
        return REFUSED if self.refused and strict else 0
