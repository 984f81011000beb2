"""`runtime doctor`: what works here, what does not, and how to mend it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.console import note, say
from runtime.cli.output import OutputFormat, format_count, print_checks, print_json
from runtime.config import load_settings
from runtime.errors import RequestRefused
from runtime.units import count_noun

if TYPE_CHECKING:
    pass


def doctor(
    recover: Annotated[bool, Option("--recover", help="Bring back what can be read of a damaged task file.")] = False,
    file: Annotated[
        Path | None, Option(metavar="FILE", help="With `--recover`: a task file that is not the stack's.")
    ] = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Check this machine and a stack: what is read from where, and what this identity may do.

    Each line is ok, warn or fail, and says the fix. It tries what it can: permissions on each queue, registry and
    secret, a write to the record store. Exit code 1 if a line fails.

    With `--recover`, the damaged task file of a local stack is kept under another name and replaced by the rows that can be read
    of it. Exit code 1 if tasks or results are lost.

    \b
    Examples:
      runtime doctor
      runtime doctor --stack marin-us-west4
      runtime doctor --recover
      runtime doctor -o json | jq -r '.[] | select(.verdict == "fail") | .fix'
    """
    if recover:
        return _recover(file, stack, output)
    if file is not None:
        raise RequestRefused("`--file` goes with `--recover`", hint=f"runtime doctor --recover --file {file}")
    from runtime.client.doctor import examine

    return print_checks(examine(stack, load_settings()), output, name="check", remedy="fix", width=24)


def _recover(file: Path | None, stack: str | None, output: OutputFormat) -> int:
    from runtime.client.doctor import find_task_file
    from runtime.client.sqlite_recovery import recover

    path = file or find_task_file(stack, load_settings())
    done = recover(path)
    if output is OutputFormat.JSON:
        print_json(done)
    elif done is not None:
        say(
            f"recovered  {count_noun(done.tasks, 'task')}, {format_count(done.waiting)} of them to be run",
            f"           {count_noun(done.records, 'result')}, {count_noun(done.notes, 'note')} on attempts",
            f"           {count_noun(done.objects, 'other object')}, such as orders and reports of workers",
            f"lost       {count_noun(done.lost_tasks, 'task')} and {count_noun(done.lost_results, 'result')}, by the file's own counters",
        )
    if done is None:
        note(f"nothing is wrong with `{path}`; it is as it was")
        return 0
    note(f"the damaged file is kept: {done.kept}")
    if done.lost_tasks:
        note("the same `runtime submit` again adds the tasks that are lost, and runs those again that had ended")
    return 1 if done.lost_tasks or done.lost_results else 0
