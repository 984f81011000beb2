"""`runtime doctor`: what works here, what does not, and how to mend it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.show import Output, format_count, is_terminal, note, paint, print_json, print_list
from runtime.config import load_settings
from runtime.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from runtime.client.doctor.lines import Line
    from runtime.client.recovery import Recovered

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    recover: Annotated[bool, Option("--recover", help="Bring back what can be read of a damaged task file.")] = False,
    file: Annotated[
        Path | None, Option(metavar="FILE", help="With `--recover`: a task file that is not the stack's.")
    ] = None,
    stack: StackOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Check this machine and a stack: what is read from where, and what this identity may do.

    Each line is ok, warn or fail, and says the fix. It tries what it can: permissions on each queue, registry and
    secret, a write to the record store. Exit code 1 if a line fails.

    With `--recover`, the damaged task file of a local stack is kept under another name and replaced by what can be read
    of it; what could not be is said. Exit code 1 if something could not.

    \b
    Examples:
      runtime doctor
      runtime doctor --stack marin-us-west4
      runtime doctor --recover
      runtime doctor -o json | jq -r '.[] | select(.verdict == "fail") | .fix'
    """
    from runtime.client.doctor.examine import examine
    from runtime.client.doctor.lines import Verdict

    if recover:
        return _recover(file, stack, output)
    if file is not None:
        raise RequestRefused("`--file` goes with `--recover`", hint=f"runtime doctor --recover --file {file}")
    failed = 0

    def count(lines: Iterable[Line]) -> Iterator[Line]:
        nonlocal failed
        for line in lines:
            failed += line.verdict is Verdict.FAIL
            yield line

    lines = count(examine(stack, load_settings()))
    if output is Output.JSON:
        print_json(lines)
    elif is_terminal():
        _print_lines(lines)
    else:
        columns = {
            "VERDICT": lambda line: line.verdict.value,
            "CHECK": lambda line: line.check,
            "FINDING": lambda line: line.text,
            "FIX": lambda line: line.fix,
        }
        print_list(lines, columns)
    if failed and output is Output.TEXT:
        note(f"{failed} failed")
    return 1 if failed else 0


def _print_lines(lines: Iterable[Line]) -> None:
    """As they come: some take seconds, and a table could be printed only behind the last."""
    for line in lines:
        verdict = paint(f"{line.verdict.value:<4}", _STYLES[line.verdict.value])
        sys.stdout.write(f"{verdict}  {line.check:<24}  {line.text}\n")
        if line.fix:
            sys.stdout.write(f"{'':<32}{paint('fix:', 'bold')} {line.fix}\n")
        sys.stdout.flush()


def _recover(file: Path | None, stack: str | None, output: Output) -> int:
    from runtime.client.doctor.examine import find_task_file
    from runtime.client.recovery import recover

    path = file or find_task_file(stack, load_settings())
    done = recover(path)
    if output is Output.JSON:
        print_json(done)
    elif done is not None:
        sys.stdout.write("".join(f"{line}\n" for line in _recovered_lines(done)))
    if done is None:
        note(f"nothing is wrong with `{path}`; it is as it was")
        return 0
    note(f"the damaged file is kept: {done.kept}")
    return 1 if done.incomplete else 0


def _recovered_lines(done: Recovered) -> Iterator[str]:
    yield f"recovered      {format_count(done.tasks)} tasks, {format_count(done.waiting)} of them to be run"
    yield f"               {format_count(done.records)} results, {format_count(done.notes)} notes on attempts"
    yield f"               {format_count(done.objects)} other entries, such as orders and reports of workers"
    for number, text in (
        (len(done.lost_tasks), "tasks whose content cannot be read; `-o json` has their ids"),
        (done.lost_records, "results that are gone: their tasks are run again"),
        (done.left_out, "results and notes of tasks that are gone"),
    ):
        if number:
            yield f"not recovered  {format_count(number)} {text}"
    if done.unreadable:
        yield f"not whole      {', '.join(done.unreadable)}: rows may be missing that nothing else names"
