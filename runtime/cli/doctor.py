"""`runtime doctor`: what works here, what does not, and how to mend it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.show import Output, is_terminal, note, paint, print_json, print_list
from runtime.config import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from runtime.doctor import Line

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(stack: StackOption = None, output: OutputOption = Output.TEXT) -> int:
    """Check this machine and a stack: what is read from where, and what this identity may do.

    Each line is ok, warn or fail, and says the fix. It tries what it can: permissions on each queue, registry and
    secret, a write to the record store. Exit code 1 if a line fails.

    \b
    Examples:
      runtime doctor
      runtime doctor --stack marin-us-west4
      runtime doctor -o json | jq -r '.[] | select(.verdict == "fail") | .fix'
    """
    from runtime.doctor import Verdict, examine

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
