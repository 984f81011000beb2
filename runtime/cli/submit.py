"""`runtime submit`: put tasks into a queue, from the command line, a grid, a file or standard input."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from runtime.cli.commands import OutputOption, StackOption, new_app
from runtime.cli.main import INTERRUPTED
from runtime.cli.show import Output, note, note_skew, print_json, progress
from runtime.errors import InfrastructureFailure, InvalidTask, InvalidValue, RequestRefused
from runtime.tasks.model import DEFAULT_EXPERIMENT, DEFAULT_MAX_FAILURES, TaskState
from runtime.units import count_noun
from runtime.values import dataclass, replace

if TYPE_CHECKING:
    from runtime.client.tasks.code import SubmittedCode
    from runtime.client.tasks.make import TaskOptions
    from runtime.client.tasks.submit import Submission
    from runtime.client.tasks.workers import Stack
    from runtime.config import Settings
    from runtime.queues.base import Queue
    from runtime.records.base import RecordStore
    from runtime.tasks.grid import Grid
    from runtime.tasks.model import CommandEntry, Resources, Task, WorkflowEntry
from runtime.cli.render.submission import say_ended, say_submitted, submission_fields

SHOW_PROGRESS_FROM = 2_000
"""Shorter inputs are over before a bar is read."""
SAY_AFTER_S = 2.0
SAY_WHY_AFTER_S = 5.0
SAY_WHY_EVERY_S = 30.0
"""How often the reason is looked up while tasks wait."""

# Marks in the words that `--` stood before them; no argument of a process can hold a NUL.
_COMMAND = "\0command"

app = new_app("Put tasks into a queue.")


class SubmitCommand(TyperCommand):
    """Keeps what the parser drops: that the words follow `--` and so are a command, not a workflow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args = [*args[: at + 1], _COMMAND, *args[at + 1 :]]
        return super().parse_args(ctx, args)


@app.command(
    "submit",
    cls=SubmitCommand,
    context_settings={
        "help_option_names": ["--help", "-h"],
        "max_content_width": 110,
        # What follows PROJECT WORKFLOW belongs to the workflow.
        "allow_interspersed_args": False,
    },
)
def submit(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROJECT WORKFLOW [ARGS]... | -- COMMAND...", help="What one task runs.", show_default=False
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="FILE|-", help="Task lines (docs/task-format.md), plain or .gz.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", metavar="NAME=VALUES", help="`lr=1e-3,1e-4`, `seed=0:10`; given again, every combination."
        ),
    ] = None,
    experiment: Annotated[
        str | None,
        typer.Option("--experiment", "-e", metavar="NAME", help="Name over these tasks; of a file, its own name."),
    ] = None,
    queue: Annotated[
        str | None, typer.Option("--queue", envvar="RUNTIME_QUEUE", metavar="NAME|URL", help="Queue of the stack.")
    ] = None,
    stack: StackOption = None,
    key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The task's identity, instead of what it runs.")
    ] = None,
    timeout: Annotated[str | None, typer.Option(metavar="2h", help="End an attempt after that long.")] = None,
    max_failures: Annotated[
        int, typer.Option("--max-failures", metavar="N", help="The N-th failure is final; with 0 or 1 none is retried.")
    ] = DEFAULT_MAX_FAILURES,
    expires: Annotated[str | None, typer.Option(metavar="7d", help="Do not start it later than that from now.")] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="10m", help="Do not start it earlier than that from now.")
    ] = None,
    priority: Annotated[int, typer.Option(metavar="N", help="Higher goes first, where the queue can.")] = 0,
    resources: Annotated[
        str | None, typer.Option(metavar="cpus=2,gpus=0.5", help="What an attempt needs, in one option.")
    ] = None,
    cpus: Annotated[float | None, typer.Option(metavar="N", show_default=False)] = None,
    memory: Annotated[str | None, typer.Option(metavar="16GiB", show_default=False)] = None,
    gpus: Annotated[
        float | None, typer.Option(metavar="N", help="Whole ones, or a part below 1.", show_default=False)
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The code that goes with the tasks, instead of this project's."),
    ] = None,
    no_snapshot: Annotated[
        bool, typer.Option("--no-snapshot", help="No code goes with the tasks: workers run their own.")
    ] = False,
    outputs: Annotated[
        list[str] | None, typer.Option("--outputs", metavar="URL", help="A file that proves a task done; may repeat.")
    ] = None,
    skip_existing: Annotated[
        bool, typer.Option("--skip-existing", help="Leave out tasks whose outputs all exist.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when all have ended; 1 if any failed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the tasks and submit nothing.")] = False,
    output: OutputOption = Output.TEXT,
) -> int:
    """Put tasks into a queue. Once it returns, every task is durable and will be run.

    Options come before PROJECT or `--`; what follows belongs to the workflow or the command. The same tasks submitted
    again are not queued twice, so an interrupted submission is simply run again. Prints the task's id, or the
    experiment's name for more than one.

    The code of this project goes with them as it is now, and is what they run: the nearest folder, going up, that has a
    project file or is the top of a git work tree. Each attempt starts in a copy of it, where this folder lies in it; what
    it writes there goes with the copy, so write results to $RUNTIME_OUTPUT_DIR.

    \b
    Examples:
      runtime submit my.project train --lr=1e-3
      runtime submit --grid lr=1e-3,1e-4 --grid seed=0:10 --experiment sweep my.project train --epochs=3
      runtime submit --from tiles.jsonl                     one task a line, in experiment `tiles`
      generate | runtime submit --from - --experiment tiles
      runtime submit --gpus 1 --timeout 2h -- python train.py --config a.yaml
      runtime submit --grid seed=0:4 -- python train.py --seed '{seed}'
      runtime submit --no-snapshot -- python /srv/job.py    runs what the worker finds there
      runtime submit --wait my.project evaluate && echo ok

    Exit codes: 0 submitted (with --wait: all succeeded), 1 with --wait some failed, 2 refused, 3 infrastructure failed,
    130 interrupted.
    """
    from runtime.tasks.grid import parse_grid

    request = _Request(
        words=tuple(words or ()),
        source=source,
        grid=parse_grid(grid or []),
        outputs=tuple(outputs or ()),
        key=key,
        experiment=experiment,
    )
    request.check()
    options = _read_options(
        request.choose_experiment(),
        key=key,
        timeout=timeout,
        max_failures=max_failures,
        expires=expires,
        delay=delay,
        priority=priority,
        resources=_read_resources(resources, cpus=cpus, memory=memory, gpus=gpus),
        outputs=request.outputs,
    )
    if snapshot is not None and no_snapshot:
        raise RequestRefused("`--snapshot` and `--no-snapshot` contradict each other", hint="leave one of them out")
    wanted = False if no_snapshot else None if snapshot is None else Path(snapshot)
    if dry_run:
        from runtime.config import load_settings

        return _print_tasks(request.make_tasks(_bind(options, _take_code(wanted, None, load_settings()))), output)
    return _submit(request, options, wanted, queue, stack, skip_existing, wait, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Which tasks were asked for."""

    words: tuple[str, ...]
    source: str | None
    grid: Grid
    outputs: tuple[str, ...]
    key: str | None
    experiment: str | None

    def check(self) -> None:
        if self.source is None:
            if not self.words or self.words == (_COMMAND,):
                raise RequestRefused(
                    "`runtime submit` needs to know what to run",
                    facts=["one of: PROJECT WORKFLOW ARGS…, -- COMMAND…, --from FILE"],
                    hint="`runtime submit --help` has an example of each",
                )
            return
        if self.words:
            raise RequestRefused(
                f"`--from {self.source}` and `{' '.join(self.words[:2]).replace(_COMMAND, '--')}` both say what to run",
                hint="leave one of them out; options come before PROJECT",
            )
        for option, given in (("--grid", len(self.grid.axes)), ("--key", self.key), ("--outputs", self.outputs)):
            if given:
                raise RequestRefused(
                    f"`{option}` does not go with `--from`: each line says that itself",
                    hint=f"put `{option.removeprefix('--')}` into the lines"
                    if option != "--grid"
                    else "write every combination as a line",
                )

        from runtime.tasks.sources import check_readable

        check_readable(self.source)

    def choose_experiment(self) -> str:
        from runtime.tasks.model import check_experiment
        from runtime.tasks.sources import name_experiment

        if self.experiment is not None:
            return check_experiment(self.experiment)
        return DEFAULT_EXPERIMENT if self.source is None else name_experiment(self.source)

    def count(self) -> int | None:
        """How many tasks, where that can be told beforehand."""
        from runtime.tasks.sources import count_lines

        return len(self.grid) if self.source is None else count_lines(self.source)

    def make_tasks(self, options: TaskOptions) -> Iterator[Task]:
        if self.source is not None:
            from runtime.tasks.sources import read_lines, read_tasks

            return read_tasks(read_lines(self.source), options)
        entry = self.make_entry()
        return self._expand(entry, options)

    def make_entry(self) -> WorkflowEntry | CommandEntry:
        from runtime.tasks.grid import check_grid
        from runtime.tasks.model import CommandEntry, WorkflowEntry

        entry: WorkflowEntry | CommandEntry
        if self.words[0] == _COMMAND:
            entry = CommandEntry(self.words[1:])
        elif len(self.words) < 2:
            raise RequestRefused(
                f"project `{self.words[0]}` needs the name of a workflow",
                hint=f"runtime submit {self.words[0]} WORKFLOW, or `--` before a command",
            )
        else:
            entry = WorkflowEntry(self.words[0], self.words[1], _without_mark(self.words[2:]))
            _note_misplaced(entry.args)
        check_grid(self.grid, entry, key=self.key)
        return entry

    def _expand(self, entry: WorkflowEntry | CommandEntry, options: TaskOptions) -> Iterator[Task]:
        from runtime.tasks.grid import apply_grid, replace_names

        for values in self.grid:
            yield options.make_task(
                apply_grid(entry, values),
                key=None if self.key is None else replace_names(self.key, values),
                outputs=tuple(replace_names(url, values) for url in self.outputs),
            )


def _without_mark(args: Sequence[str]) -> tuple[str, ...]:
    """A `--` among the workflow's own arguments is theirs."""
    return tuple(arg for arg in args if arg != _COMMAND)


def _note_misplaced(args: Sequence[str]) -> None:
    ours = {
        "--wait",
        "--experiment",
        "--queue",
        "--stack",
        "--grid",
        "--skip-existing",
        "--snapshot",
        "--no-snapshot",
        "--dry-run",
        "--from",
        "--key",
    }
    for arg in args:
        if (name := arg.partition("=")[0]) in ours:
            note(f"note: `{name}` follows PROJECT, so it goes to the workflow; options of `runtime submit` come before")


def _read_options(
    experiment: str,
    *,
    key: str | None,
    timeout: str | None,
    max_failures: int,
    expires: str | None,
    delay: str | None,
    priority: int,
    resources: Resources,
    outputs: tuple[str, ...],
) -> TaskOptions:
    from runtime.client.tasks.make import TaskOptions, moment_after, submitter
    from runtime.units import parse_duration

    now = datetime.now(UTC)
    try:
        return TaskOptions(
            experiment=experiment,
            key=key,
            timeout=parse_duration(timeout, field="timeout") if timeout else None,
            max_failures=max_failures,
            expires_at=moment_after(now, expires, "expires") if expires else None,
            not_before=moment_after(now, delay, "delay") if delay else None,
            priority=priority,
            resources=resources,
            outputs=outputs,
            submitted_by=submitter(),
            submitted_at=now,
        )
    except InvalidTask as problem:
        raise _refuse_option(problem) from None


_OPTIONS = {"timeout_s": "timeout", "expires_at": "expires", "not_before": "delay", "max_failures": "max-failures"}
"""Options whose name differs from the field's."""


def _refuse_option(problem: InvalidTask) -> RequestRefused:
    name, dot, rest = problem.field.partition("[")
    return RequestRefused(f"`--{_OPTIONS.get(name, name)}{dot}{rest}` {problem.problem}", hint=problem.hint)


def _read_resources(text: str | None, *, cpus: float | None, memory: str | None, gpus: float | None) -> Resources:
    from runtime.tasks.wire import parse_resources

    allowed = "cpus=2,memory=16GiB,gpus=0.5"
    values: dict[str, Any] = {}
    for pair in (text or "").split(",") if text else ():
        name, equals, value = pair.partition("=")
        if not equals or name not in ("cpus", "memory", "gpus"):
            raise InvalidValue("resources", text, allowed)
        try:
            values[name] = value if name == "memory" else float(value)
        except ValueError:
            raise InvalidValue("resources", text, allowed) from None
    given = {"cpus": cpus, "memory": memory, "gpus": gpus}
    values |= {name: value for name, value in given.items() if value is not None}
    try:
        return parse_resources(values)
    except InvalidTask as problem:
        raise RequestRefused(f"`{problem.field}` {problem.problem}", hint=f"such as --resources {allowed}") from None


def _print_tasks(tasks: Iterator[Task], output: Output) -> int:
    from runtime.tasks.wire import encode_task, task_fields

    if output is Output.JSON:
        print_json(task_fields(task) for task in tasks)
        return 0
    count = 0
    for task in tasks:
        print(encode_task(task))
        count += 1
    note(f"dry run: {count_noun(count, 'task')}, nothing submitted")
    return 0


def _bind(options: TaskOptions, code: SubmittedCode) -> TaskOptions:
    return replace(options, snapshot=code.snapshot, folder=code.folder)


def _take_code(wanted: Path | bool | None, records: RecordStore | None, settings: Settings) -> SubmittedCode:
    """The code that goes with the tasks; a tree that takes long is not looked through in silence."""
    from threading import Timer

    from runtime.client.tasks.code import take_code

    said = Timer(SAY_AFTER_S, note, ["looking through the files of the code; `--no-snapshot` submits without it"])
    said.daemon = True
    said.start()
    try:
        return take_code(wanted, records, settings)
    finally:
        said.cancel()


def _submit(
    request: _Request,
    options: TaskOptions,
    wanted: Path | bool | None,
    queue: str | None,
    stack: str | None,
    skip_existing: bool,
    wait: bool,
    output: Output,
) -> int:
    from runtime.client.identify import remember_last
    from runtime.client.tasks.submit import check_priority, submit_tasks
    from runtime.stack.open import open_stack

    with open_stack(stack, queue=queue) as opened:
        target = opened.queue()
        check_priority(options.priority, target.name, target.traits)
        code = _take_code(wanted, target.records, opened.settings)
        tasks = request.make_tasks(_bind(options, code))
        dealt_with = 0
        with ExitStack() as shown:
            total = request.count()
            bar = None
            if total is None or total >= SHOW_PROGRESS_FROM:
                bar = shown.enter_context(progress(f"submitting {options.experiment}", total))

            def advance(count: int) -> None:
                nonlocal dealt_with
                dealt_with += count
                if bar is not None:
                    bar.advance(count)

            try:
                done = submit_tasks(
                    tasks, target, experiment=options.experiment, skip_existing=skip_existing, progress=advance
                )
            except KeyboardInterrupt:
                shown.close()
                note(
                    f"interrupted: {count_noun(dealt_with, 'task')} dealt with and safe; run the same command again to go on"
                )
                return INTERRUPTED
        done = replace(done, stack=opened.name, snapshot=code.snapshot)
        remember_last(opened.settings.data_dir, opened.name, done.experiment)
        say_submitted(done, request.source is not None, code)
        if done.new:
            note_skew(target.records)
        if not wait:
            return _finish(done, output)
        return _wait(done, target, opened, output)


def _finish(done: Submission, output: Output) -> int:
    if output is Output.JSON:
        print_json(submission_fields(done))
    elif done.tasks:
        print(done.tasks[0][0] if len(done.tasks) == 1 else done.experiment)
    elif done.count:
        print(done.experiment)
    return 0


def _wait(done: Submission, target: Queue, opened: Stack, output: Output) -> int:
    from runtime.client.tasks.wait import wait

    name = done.tasks[0][0] if done.tasks and len(done.tasks) == 1 else done.experiment
    with ExitStack() as shown:
        bar = shown.enter_context(progress(f"waiting for {name}", done.count))
        reason = Reason(lambda: _why_it_waits(opened, done.experiment))

        def look(totals: Mapping[TaskState, int]) -> None:
            if any(count and not state.terminal for state, count in totals.items()):
                reason.say()
            ended = sum(count for state, count in totals.items() if state.terminal)
            bar.set(done=ended, total=sum(totals.values()))

        try:
            waited = wait(done, queue=target, progress=look)
        except KeyboardInterrupt:
            shown.close()
            note(f"detached, the work goes on; come back with `runtime status {name}`")
            return INTERRUPTED
    if output is Output.JSON:
        print_json(
            {
                **submission_fields(done),
                "totals": {state.value: waited.totals.get(state, 0) for state in TaskState},
                "failed": waited.failed,
            }
        )
    else:
        _finish(done, output)
    say_ended(waited, target)
    return 1 if waited.failed else 0


class Reason:
    """Says why tasks wait: after a while, and again when it is another."""

    def __init__(
        self,
        read: Callable[[], str | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = note,
    ) -> None:
        self._read, self._clock, self._write = read, clock, write
        self._at = clock() + SAY_WHY_AFTER_S
        self._said: str | None = None

    def say(self) -> None:
        now = self._clock()
        if now < self._at:
            return
        self._at = now + SAY_WHY_EVERY_S
        why = self._read()
        if why is not None and why != self._said:
            self._write(f"waiting: {why}")
            self._said = why


def _why_it_waits(opened: Stack, experiment: str) -> str | None:
    from runtime.client.tasks.status import read_experiment

    try:
        seen = read_experiment(opened, experiment, now=datetime.now(UTC), failures=0)
    except InfrastructureFailure as problem:
        return problem.message
    if seen.why is None:
        return None
    return seen.why + (f"; next: `{seen.next_step}`" if seen.next_step else "")
