"""`runtime logs`: what a task printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from runtime.cli.commands import StackOption
from runtime.cli.show import note
from runtime.identify import get_task_id, recall_last
from runtime.logs import AttemptLog, choose_log, find_logs, follow, read_log
from runtime.stacks import open_stack
from runtime.status import read_standing

INTERRUPTED = 130


def logs(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task's id or its beginning.")],
    follow_: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the task has ended.")] = False,
    attempt: Annotated[
        str | None, typer.Option("--attempt", metavar="TOKEN", help="This attempt, not the newest.", show_default=False)
    ] = None,
    stack: StackOption = None,
) -> int:
    """What a task printed: its standard output and error as they came.

    Of a task that was tried several times it is the newest attempt; `runtime status TASK` lists them all. Ctrl-C while
    following leaves the task alone.

    \b
    Examples:
      runtime logs t-3f2a
      runtime logs -f t-3f2a
      runtime logs t-3f2a --attempt 91c0
      runtime logs t-3f2a | grep -i loss
    """
    with open_stack(stack) as opened:
        records = opened.records
        task_id = get_task_id(task, records, last=recall_last(opened.settings.data_dir, opened.name))
        if follow_ and attempt is None:
            return _follow(task_id, follow(records, task_id, said=_say))
        standing = read_standing(records, task_id, with_task=False)
        found = find_logs(records, standing)
        chosen = choose_log(task_id, found, attempt)
        if len(found) > 1:
            _say(chosen)
        _write(read_log(records, chosen))
    return 0


def _follow(task_id: str, pieces: Iterable[bytes]) -> int:
    try:
        _write(pieces)
    except KeyboardInterrupt:
        note(f"detached, the task goes on; `runtime logs -f {task_id}` comes back")
        return INTERRUPTED
    return 0


def _say(log: AttemptLog) -> None:
    where = f" on worker {log.worker}" if log.worker else ""
    life = f" of generation {log.generation}" if log.generation > 1 else ""
    note(f"-- attempt {log.token}{life}{where}")


def _write(pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
