"""`runtime queue`: look after queues and their dead letters. Nothing here leases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Final

from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption, YesOption, new_app
from runtime.cli.console import INTERRUPTED, note, say, say_block, write_text
from runtime.cli.output import (
    Columns,
    OutputFormat,
    confirm,
    format_count,
    note_skew,
    print_done,
    print_json,
    print_list,
    progress,
)
from runtime.cli.retry import COLUMNS, RetryCounter, confirmed
from runtime.client.resolve_id import IdKind, get_experiment, identify, recall_last
from runtime.client.tasks.redrive import DeadLetter, dead_letter, find_dead, parse_reasons, purge_dead, read_dead
from runtime.client.tasks.redrive import redrive as redrive_marks
from runtime.client.tasks.status import read_queue
from runtime.client.tasks.task_facts import read_workers
from runtime.errors import NotPossible, RequestRefused
from runtime.stack.open import open_stack
from runtime.tasks.entry_text import describe_entry
from runtime.tasks.wire import task_fields
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.end_reasons import EndReason
    from runtime.stack.open import OpenStack
    from runtime.tasks.history import Mark

app = new_app("Look after queues: pause, purge and repair them, and redrive dead letters.")
dead = new_app("Dead letters: tasks that failed for good and wait for a person.")
app.add_typer(dead, name="dead")

QueueArgument = Annotated[str | None, Argument(metavar="[QUEUE]", help="By default the queue in use.")]
DeadArgument = Annotated[
    list[str] | None, Argument(metavar="[TASK|EXPERIMENT...]", help="Ids or their beginnings, names, or `last`.")
]
AllOption = Annotated[bool, Option("--all", help="Every dead letter of the stack.")]
ReasonOption = Annotated[
    list[str] | None, Option("--reason", metavar="REASON", help="Only those that ended so, such as app_failed.")
]
ExperimentOption = Annotated[list[str] | None, Option("--experiment", metavar="NAME", help="Only of this experiment.")]
MOST_SHOWN: Final = 1_000_000
LimitOption = Annotated[int, Option("--limit", "-n", metavar="N", min=1, max=MOST_SHOWN, help="At most so many.")]


MALFORMED_SHOWN: Final = 10


@app.command("list")
def list_(stack: StackOption = None, output: OutputOption = OutputFormat.TEXT) -> None:
    """List the stack's queues and whether they are paused.

    \b
    Examples:
      runtime queue list
      runtime queue list -o json | jq -r '.[] | select(.paused) | .queue'
    """
    columns: Columns = {name.upper(): itemgetter(name) for name in ("queue", "kind", "paused", "workers")}
    with open_stack(stack) as opened:
        print_list(_rows(opened, _names(opened)), columns, output)


@app.command()
def stats(queue: QueueArgument = None, stack: StackOption = None, output: OutputOption = OutputFormat.TEXT) -> None:
    """Show what waits in each queue, who serves it, and why anything waits.

    \b
    Examples:
      runtime queue stats
      runtime queue stats training -o json | jq '.[0].ready'
    """
    columns: Columns = {
        **{name.upper(): itemgetter(name) for name in ("queue", "ready", "delayed", "leased", "workers", "slots")},
        "RATE/S": lambda row: round(row["rate_per_s"], 3),
        "WHY": itemgetter("why"),
    }
    with open_stack(stack, queue=queue) as opened:
        names = [opened.existing_queue().name] if queue else _names(opened)
        print_list(_rows(opened, names), columns, output)


def _names(opened: OpenStack) -> list[str]:
    known = {*opened.queue_names(), opened.default_queue}
    return sorted(known | {seen.queue for seen in opened.records.experiments() if seen.queue})


def _rows(opened: OpenStack, names: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield the queues as `list` and `stats` print them; a depth is None if the service does not count it."""
    now = datetime.now(UTC)
    workers = read_workers(opened.records, now)
    for name in names:
        queue = opened.queue(name)
        depth = queue.depth()
        seen = read_queue(opened, queue.name, [], workers, depth=depth)
        yield {
            "queue": queue.name,
            "kind": queue.traits.kind,
            "paused": seen.paused,
            **{name: getattr(depth, name) if depth else None for name in ("ready", "delayed", "leased")},
            **{name: getattr(seen, name) for name in ("workers", "slots", "rate_per_s", "why", "next_step")},
        }


@app.command()
def peek(
    queue: QueueArgument = None,
    limit: LimitOption = 10,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show the tasks that will be leased next, without leasing them.

    \b
    Examples:
      runtime queue peek
      runtime queue peek training -n 100 -o json | jq -r '.[].id'
    """
    with open_stack(stack, queue=queue) as opened:
        tasks = opened.existing_queue().peek(limit)
    if output is OutputFormat.JSON:
        print_json([task_fields(task) for task in tasks])
        return
    columns: Columns = {
        "TASK": "id",
        "EXPERIMENT": "experiment",
        "GENERATION": "generation",
        "PRIORITY": "priority",
        "SUBMITTED": "submitted_at",
        "ENTRY": lambda task: describe_entry(task.entry),
    }
    print_list(tasks, columns, output)


@app.command()
def pause(queue: QueueArgument = None, stack: StackOption = None) -> None:
    """Stop handing out tasks. What runs goes on, and submitting is still possible.

    \b
    Examples:
      runtime queue pause
      runtime queue pause training
    """
    with open_stack(stack, queue=queue) as opened:
        target = opened.existing_queue()
        target.pause()
        note(
            f"queue `{target.name}` is paused, workers see it within 10 s; `runtime queue resume {target.name}` ends it"
        )


@app.command()
def resume(queue: QueueArgument = None, stack: StackOption = None) -> None:
    """Hand out tasks again.

    \b
    Examples:
      runtime queue resume
      runtime queue resume training
    """
    with open_stack(stack, queue=queue) as opened:
        target = opened.existing_queue()
        target.resume()
        if target.records.control(target.name).paused:
            note(f"queue `{target.name}` was paused in the same moment, and stays so; resume it again if that is wrong")
        else:
            note(f"queue `{target.name}` hands out tasks again")


@app.command()
def purge(queue: QueueArgument = None, yes: YesOption = False, stack: StackOption = None) -> int:
    """Cancel everything in a queue: what waits will not run, and what runs is stopped within 10 s.

    Every task gets its record before the queue is emptied. Interrupted and run again, it goes on where it stopped; what
    is submitted meanwhile is run.

    \b
    Examples:
      runtime queue purge
      runtime queue purge training --yes
    """
    with open_stack(stack, queue=queue) as opened:
        target = opened.existing_queue()
        depth = target.depth()
        everything = "everything" if depth is None else count_noun(depth.total, "task")
        confirm(f"cancel {everything} in queue `{target.name}` of stack `{opened.name}`", yes=yes)
        try:
            with progress("purging") as bar:
                cancelled = target.purge(progress=bar.advance)
        except KeyboardInterrupt:
            note("interrupted: what was cancelled stays cancelled; run the same command again to go on")
            return INTERRUPTED
        note_skew(opened.records)
    note(f"{count_noun(cancelled, 'task')} cancelled; `runtime retry` brings one back")
    return 0


@app.command()
def repair(
    queue: QueueArgument = None,
    experiment: Annotated[str | None, Option(metavar="NAME", help="Only this one.")] = None,
    yes: YesOption = False,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Publish again what was submitted, has not ended, and that no live worker runs.

    For when a queue has forgotten its tasks: its retention is over, or it was lost. What still waits there is then
    there twice, which costs a look at its record and no second run.

    \b
    Examples:
      runtime queue repair
      runtime queue repair training --experiment sweep --yes
    """
    from runtime.client.tasks.repair import repair as repair_queue

    with open_stack(stack, queue=queue) as opened:
        target = opened.existing_queue()
        if experiment is not None:
            last = recall_last(opened.settings.data_dir, opened.name)
            experiment = get_experiment(experiment, opened.records, last=last)
        confirm(f"publish again what queue `{target.name}` of stack `{opened.name}` may have forgotten", yes=yes)
        with progress("repairing") as bar:
            repaired = repair_queue(target, opened.records, experiment=experiment, progress=bar.advance)
    if output is OutputFormat.JSON:
        print_json(repaired)
        return
    note(
        f"{format_count(repaired.published)} published again, {format_count(repaired.recorded)} had ended, "
        f"{format_count(repaired.held)} run on live workers"
    )
    if repaired.malformed:
        note(f"{format_count(repaired.malformed)} cannot be decoded: `runtime queue dead list` has them")
    if repaired.unreadable:
        note(f"{count_noun(repaired.unreadable, 'unreadable manifest part')} left out")


@dead.command("list")
def dead_list(
    experiment: ExperimentOption = None,
    reason: ReasonOption = None,
    limit: LimitOption = 100,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """List dead letters. They are read from the record store; nothing is leased.

    \b
    Examples:
      runtime queue dead list
      runtime queue dead list --experiment sweep --reason oom
      runtime queue dead list -n 100000 -o json | jq -r '.[].error' | sort | uniq -c
    """
    columns: Columns = {"TASK": "task", "EXPERIMENT": "experiment", "REASON": "reason", "WHEN": "at", "ERROR": "error"}
    with open_stack(stack) as opened:
        last = recall_last(opened.settings.data_dir, opened.name)
        names = [get_experiment(name, opened.records, last=last) for name in experiment or ()]
        found = _read_dead(opened, names, parse_reasons(reason or ()))
        letters = [dead_letter(mark) for mark in itertools.islice(found, limit + 1)]
    if output is OutputFormat.JSON:
        print_json([_fields(letter) for letter in letters[:limit]])
    else:
        print_list(letters[:limit], columns)
    if len(letters) > limit:
        note(f"there are more than {format_count(limit)}; `--limit` shows more")


@dead.command("show")
def dead_show(
    task: Annotated[str, Argument(metavar="TASK", help="A task's id or its beginning.")],
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show one dead letter: its whole message, and the task or the text that could not be parsed.

    \b
    Examples:
      runtime queue dead show t-3f2a
      runtime queue dead show t-3f2a -o json | jq .entry > task.json
    """
    with open_stack(stack) as opened:
        [mark] = _chosen(opened, [task], frozenset())
    letter = dead_letter(mark)
    if output is OutputFormat.JSON:
        print_json(_fields(letter))
        return
    lines = [
        ("task", f"{letter.task}, generation {letter.generation}"),
        ("experiment", letter.experiment),
        ("reason", str(letter.reason)),
        ("since", f"{letter.at:%Y-%m-%d %H:%M:%S} UTC"),
        ("entry", describe_entry(letter.entry.entry, width=2_000) if letter.entry else "could not be parsed"),
    ]
    say(*(f"{label:<11} {text}" for label, text in lines))
    if letter.raw is not None:
        say("")
        write_text(f"{letter.raw.rstrip()}\n")
    if letter.message:
        say_block(f"\n{letter.message.rstrip()}\n")
    if not letter.redrivable:
        note(f"correct it and submit it again; `runtime queue dead purge {letter.task}` drops this one")


@dead.command("redrive")
def dead_redrive(
    what: DeadArgument = None,
    all_: AllOption = False,
    reason: ReasonOption = None,
    yes: YesOption = False,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Run dead letters once more, with new budgets. Those that could not be parsed are refused.

    Each begins its next generation, published first and then taken off the list: interrupted and run again, nothing
    runs twice. Refused once any generation of a task has succeeded.

    \b
    Examples:
      runtime queue dead redrive t-3f2a
      runtime queue dead redrive sweep --reason app_failed
      runtime queue dead redrive --all --yes
    """
    with open_stack(stack) as opened:
        select = _selector(opened, what or [], all_, parse_reasons(reason or ()))
        marks = confirmed(select, lambda count: f"run {count_noun(count, 'dead letter')} again", yes=yes)
        counted = RetryCounter(redrive_marks(opened, _note_malformed(marks), now=datetime.now(UTC)))
        print_done(counted, COLUMNS, output)
    return counted.finish(strict=False)


@dead.command("purge")
def dead_purge(
    what: DeadArgument = None,
    all_: AllOption = False,
    reason: ReasonOption = None,
    yes: YesOption = False,
    stack: StackOption = None,
) -> None:
    """Throw dead letters away. Their records stay, so totals and history do too; they can no longer be redriven.

    \b
    Examples:
      runtime queue dead purge t-3f2a
      runtime queue dead purge sweep --reason config_invalid --yes
      runtime queue dead purge --all
    """
    with open_stack(stack) as opened:
        select = _selector(opened, what or [], all_, parse_reasons(reason or ()))
        stack_name = opened.name
        marks = confirmed(
            select, lambda count: f"throw away {count_noun(count, 'dead letter')} of stack `{stack_name}`", yes=yes
        )
        purged = purge_dead(opened.records, marks)
    note(f"{format_count(purged)} thrown away" if purged else "no dead letters there")


def _note_malformed(marks: Iterable[Mark]) -> Iterator[Mark]:
    """Pass the marks on, and note the text of the first few that could not be parsed."""
    shown = 0
    for mark in marks:
        if mark.task is None and shown < MALFORMED_SHOWN:
            shown += 1
            note(f"cannot run `{mark.task_id}`, which could not be parsed: {(mark.raw or '').strip()[:300]}")
        yield mark


def _selector(
    opened: OpenStack, what: list[str], all_: bool, reasons: frozenset[EndReason]
) -> Callable[[], Iterator[Mark]]:
    """Make a function that reads the chosen dead letters at each call."""
    if bool(what) == all_:
        raise RequestRefused(
            "which dead letters: tasks, experiments, or `--all`, one of the two",
            hint="`runtime queue dead list` shows them",
        )
    return lambda: _read_dead(opened, [], reasons) if all_ else _chosen(opened, what, reasons)


def _chosen(opened: OpenStack, what: list[str], reasons: frozenset[EndReason]) -> Iterator[Mark]:
    last = recall_last(opened.settings.data_dir, opened.name)
    found = [identify(text, opened.records, last=last) for text in what]
    marks = {each.name: find_dead(opened.records, each.name) for each in found if each.kind is IdKind.TASK}
    for each in found:
        if each.kind is not IdKind.EXPERIMENT and marks.get(each.name) is None:
            raise NotPossible(f"{each.kind} `{each.name}` is no dead letter", hint=f"runtime explain {each.name}")
    for each in found:
        if each.kind is IdKind.EXPERIMENT:
            yield from read_dead(opened.records, each.name, reasons=reasons)
        elif (mark := marks[each.name]) is not None and (not reasons or mark.reason in reasons):
            yield mark


def _read_dead(opened: OpenStack, experiments: Iterable[str], reasons: frozenset[EndReason]) -> Iterator[Mark]:
    names: list[str | None] = [*experiments] or [None]
    for name in names:
        yield from read_dead(opened.records, name, reasons=reasons)


def _fields(letter: DeadLetter) -> dict[str, object]:
    values = {field.name: getattr(letter, field.name) for field in fields(letter)}
    return {**values, "entry": task_fields(letter.entry) if letter.entry else None}
