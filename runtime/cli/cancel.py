"""`runtime cancel`: stop tasks and experiments."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from runtime.cancel import Cancelled
from runtime.cancel import cancel as cancel_one
from runtime.cli.commands import OutputOption, StackOption, YesOption
from runtime.cli.show import Output, confirm, format_count, note, print_list
from runtime.identify import Kind, identify, recall_last
from runtime.stacks import open_stack
from runtime.tasks import TaskState


def cancel(
    what: Annotated[
        list[str], typer.Argument(metavar="TASK|EXPERIMENT...", help="Ids or their beginnings, names, or `last`.")
    ],
    yes: YesOption = False,
    stack: StackOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Stop tasks and experiments.

    A queued task will not run; a running one is stopped within 10 s and what it wrote is not recorded. What has ended
    already stays as it is, and that is success too. An experiment is asked about first: everything submitted to it
    until now is cancelled, however much that is.

    \b
    Examples:
      runtime cancel t-3f2a
      runtime cancel sweep --yes
      runtime cancel last
    """
    with open_stack(stack) as opened:
        records = opened.records
        last = recall_last(opened.settings.data_dir, opened.name)
        chosen = [identify(text, records, last=last) for text in what]
        for one in chosen:
            if one.kind is Kind.EXPERIMENT:
                totals = records.totals(one.name).counts
                left = totals.get(TaskState.QUEUED, 0) + totals.get(TaskState.LEASED, 0)
                confirm(f"cancel experiment `{one.name}` with {format_count(left)} unfinished tasks", yes=yes)
        done = [cancel_one(opened, one, now=datetime.now(UTC)) for one in chosen]
    print_list(done, COLUMNS, output)
    if any(one.kind is Kind.EXPERIMENT for one in done):
        note("`runtime status` shows what is left; `runtime retry` brings a cancelled task back")
    return 0


def describe(done: Cancelled) -> str:
    """What became of it, in words."""
    if done.already:
        return "it had been cancelled before" if done.state is TaskState.CANCELLED else f"it had already {done.state}"
    if done.kind is Kind.EXPERIMENT:
        if done.waiting is None:
            return "workers record each of its tasks as cancelled when they come to it"
        tasks = "1 waiting task" if done.waiting == 1 else f"{format_count(done.waiting)} waiting tasks"
        return f"{tasks} cancelled, running ones stop within 10 s"
    return f"worker {done.running} stops it within 10 s" if done.running else "it will not run"


COLUMNS = {"NAME": lambda one: one.name, "STATE": lambda one: one.state, "WHAT": describe}
