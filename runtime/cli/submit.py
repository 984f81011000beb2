"""`runtime submit`: put tasks into a queue, from the command line, a grid, a file or standard input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand

from runtime.cli.commands import CaptureEveryOption, CaptureOption, OutputOption, StackOption
from runtime.cli.console import INTERRUPTED, note, say, write_json
from runtime.cli.output import OutputFormat, format_count, note_skew, print_json, progress
from runtime.cli.submit_options import ArtifactOptions, PackageOptions
from runtime.errors import InvalidTask, InvalidValue, RequestRefused
from runtime.tasks.model import DEFAULT_EXPERIMENT, DEFAULT_MAX_FAILURES, TaskState
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.client.tasks.build import TaskOptions
    from runtime.client.tasks.environment import SubmittedPackages
    from runtime.client.tasks.submit import Submission
    from runtime.client.tasks.task_facts import Stack
    from runtime.client.tasks.task_snapshot import SubmittedCode
    from runtime.config import Project, Settings
    from runtime.queues.base import Queue
    from runtime.records.base import RecordStore
    from runtime.tasks.grid import Grid
    from runtime.tasks.model import CommandEntry, Resources, Task, WorkflowEntry

SHOW_PROGRESS_FROM = 2_000
"""Shorter inputs end before a person reads a bar."""
SAY_AFTER_S = 2.0

# Marks in the words that `--` came before them; no argument of a process can contain a NUL.
_COMMAND = "\0command"


class SubmitCommand(TyperCommand):
    """Keeps a fact that the parser drops: words after `--` are a command, not a workflow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args = [*args[: at + 1], _COMMAND, *args[at + 1 :]]
        return super().parse_args(ctx, args)


COMMAND_CLASS = SubmitCommand
# Words after PROJECT WORKFLOW belong to the workflow.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def submit(
    words: Annotated[
        list[str] | None, Argument(metavar="PROJECT WORKFLOW [ARGS]... | -- COMMAND...", help="What one task runs.")
    ] = None,
    source: Annotated[
        str | None, Option("--from", metavar="FILE|-", help="Task lines (docs/task-format.md), plain or .gz.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        Option(
            "--grid",
            metavar="NAME=VALUES",
            help="`lr=1e-3,1e-4`, `seed=0:10`, `lr=log:1e-5:1e-1:5`; given again, every combination.",
        ),
    ] = None,
    grid_seed: Annotated[
        int | None, Option(metavar="N", help="Seed of the random values in --grid; 0 by default.")
    ] = None,
    experiment: Annotated[
        str | None, Option("--experiment", "-e", metavar="NAME", help="Name over these tasks; of a file, its own name.")
    ] = None,
    queue: Annotated[str | None, Option(envvar="RUNTIME_QUEUE", metavar="NAME|URL", help="Queue of the stack.")] = None,
    stack: StackOption = None,
    key: Annotated[str | None, Option(metavar="TEXT", help="The task's identity, instead of what it runs.")] = None,
    timeout: Annotated[str | None, Option(metavar="2h", help="End an attempt after that long.")] = None,
    max_failures: Annotated[
        int, Option(metavar="N", help="The N-th failure is final; with 0 or 1 none is retried.")
    ] = DEFAULT_MAX_FAILURES,
    expires: Annotated[str | None, Option(metavar="7d", help="Do not start it later than that from now.")] = None,
    delay: Annotated[str | None, Option(metavar="10m", help="Do not start it earlier than that from now.")] = None,
    priority: Annotated[int, Option(metavar="N", help="Higher goes first, where the queue can.")] = 0,
    resources: Annotated[
        str | None, Option(metavar="cpus=2,gpus=0.5", help="What an attempt needs, in one option.")
    ] = None,
    cpus: Annotated[float | None, Option(metavar="N")] = None,
    memory: Annotated[str | None, Option(metavar="16GiB")] = None,
    gpus: Annotated[float | None, Option(metavar="N", help="Whole ones, or a part below 1.")] = None,
    snapshot: Annotated[
        str | None, Option(metavar="FOLDER", help="The code that goes with the tasks, instead of this project's.")
    ] = None,
    no_snapshot: Annotated[
        bool, Option("--no-snapshot", help="No code goes with the tasks: workers run their own.")
    ] = False,
    environment: Annotated[
        str | None,
        Option(
            metavar="LOCK|frozen|none", help="Packages that go with the tasks: a lock file, or those installed here."
        ),
    ] = None,
    with_packages: Annotated[
        list[str] | None, Option("--with", metavar="NAME==VERSION", help="A package beside those; may repeat.")
    ] = None,
    image: Annotated[
        str | None, Option(metavar="REF", help="Container image that attempts run in, by podman or docker.")
    ] = None,
    mount: Annotated[
        list[str] | None,
        Option(metavar="SOURCE:TARGET[:rw]", help="Of the worker's machine, inside the container; may repeat."),
    ] = None,
    secret: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="A secret of the stack for attempts, instead of its default ones; may repeat."),
    ] = None,
    no_secrets: Annotated[bool, Option("--no-secrets", help="Attempts get no secrets of the stack.")] = False,
    capture: CaptureOption = None,
    capture_every: CaptureEveryOption = None,
    reuse: Annotated[
        list[str] | None,
        Option(metavar="EXPERIMENT/TAG:TAG", help="An artifact that attempts find in artifacts/TAG; may repeat."),
    ] = None,
    notify: Annotated[
        list[str] | None,
        Option(
            metavar="NAME|REFERENCE|TOPIC",
            help="Who hears of the tasks' ends: a sink of the project, a webhook's secret, a topic; may repeat.",
        ),
    ] = None,
    notify_on: Annotated[
        str | None,
        Option("--notify-on", metavar="failed,…", help="Which ends; `complete` is one message when all have ended."),
    ] = None,
    outputs: Annotated[
        list[str] | None, Option(metavar="URL", help="A file that proves a task done; may repeat.")
    ] = None,
    skip_existing: Annotated[bool, Option("--skip-existing", help="Leave out tasks whose outputs all exist.")] = False,
    wait: Annotated[bool, Option("--wait", help="Return when all have ended; 1 if any failed.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the tasks and submit nothing.")] = False,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Put tasks into a queue. Once it returns, every task is durable and will be run.

    Options come before PROJECT or `--`; what follows belongs to the workflow or the command. The same tasks submitted
    again are not queued twice, so an interrupted submission is simply run again. Prints the task's id, or the
    experiment's name for more than one.

    The code of this project goes with them as it is now, and is what they run: the nearest folder, going up, that has a
    project file or is the top of a git work tree. Each attempt starts in a copy of it, where this folder lies in it; what
    it writes there goes with the copy, so write results to $RUNTIME_OUTPUT_DIR.

    They run with the packages of their worker, unless `--environment` names others: each machine installs those once.
    With `--image` they run in a container, which podman or docker of the worker's machine starts.

    \b
    Examples:
      runtime submit my.project train --lr=1e-3
      runtime submit --grid lr=1e-3,1e-4 --grid seed=0:10 --experiment sweep my.project train --epochs=3
      runtime submit --from tiles.jsonl                     one task a line, in experiment `tiles`
      generate | runtime submit --from - --experiment tiles
      runtime submit --gpus 1 --timeout 2h -- python train.py --config a.yaml
      runtime submit --grid seed=0:4 -- python train.py --seed '{seed}'
      runtime submit --capture out/model:model -- python train.py      saved each minute, and found by the next attempt
      runtime submit --reuse sweep/model:base -- python eval.py artifacts/base
      runtime submit --no-snapshot -- python /srv/job.py    runs what the worker finds there
      runtime submit --notify oncall --notify-on failed,complete -- python train.py
      runtime submit --environment uv.lock -- python train.py
      runtime submit --environment frozen --with numpy==2.1 my.project train
      runtime submit --image ghcr.io/lab/train:1.4 --mount /data/imagenet:/data -- python train.py
      runtime submit --wait my.project evaluate && echo ok

    Exit codes: 0 submitted (with --wait: all succeeded), 1 with --wait some failed, 2 refused, 3 infrastructure failed,
    130 interrupted.
    """
    from runtime.client.tasks.build import TaskOptions, moment_after, submitter
    from runtime.tasks.grid import read_options
    from runtime.units import parse_duration

    request = _Request(
        words=tuple(words or ()),
        source=source,
        grid=read_options(grid or [], grid_seed),
        outputs=tuple(outputs or ()),
        key=key,
        experiment=experiment,
    )
    request.check()
    now = datetime.now(UTC)
    experiment = request.choose_experiment()
    if secret and no_secrets:
        raise RequestRefused("`--secret` and `--no-secrets` contradict each other", hint="leave one of them out")
    needed = _read_resources(resources, cpus=cpus, memory=memory, gpus=gpus)
    asked = PackageOptions(environment, tuple(with_packages or ()))
    try:
        container, asked = asked.choose_container(image, mount)
        options = TaskOptions(
            experiment=experiment,
            container=container,
            key=key,
            timeout=parse_duration(timeout, field="timeout") if timeout else None,
            max_failures=max_failures,
            expires_at=moment_after(now, expires, "expires") if expires else None,
            not_before=moment_after(now, delay, "delay") if delay else None,
            priority=priority,
            resources=needed,
            secrets=tuple(secret) if secret else () if no_secrets else None,
            outputs=request.outputs,
            submitted_by=submitter(),
            submitted_at=now,
        )
    except InvalidTask as problem:
        name, dot, rest = problem.field.partition("[")
        option = f"--{_OPTIONS.get(name, name)}{dot}{rest}"
        raise RequestRefused(f"`{option}` {problem.problem}", hint=problem.hint) from None
    if snapshot is not None and no_snapshot:
        raise RequestRefused("`--snapshot` and `--no-snapshot` contradict each other", hint="leave one of them out")
    wanted = False if no_snapshot else None if snapshot is None else Path(snapshot)
    wants = ArtifactOptions.read(capture, capture_every, reuse)
    if no_snapshot and (wants.capture or wants.reuse):
        raise RequestRefused(
            "`--no-snapshot` does not go with `--capture` and `--reuse`",
            facts=["without a snapshot, attempts share the folder of their worker"],
            hint="leave one of them out",
        )
    if dry_run:
        if wants.reuse:
            raise RequestRefused("`--dry-run` cannot say which version `--reuse` finds", hint="leave one of them out")
        from runtime.client.tasks.notify import read_hearers
        from runtime.config import load_settings
        from runtime.records.memory import MemoryRecords

        settings = load_settings()
        code = _take_code(wanted, None, settings)
        hearers = read_hearers(notify or None, notify_on, settings.project.notify)
        options = replace(options, notify=hearers.of_tasks)
        options = wants.add_to(options, MemoryRecords(), None)
        options = asked.add_to(options, asked.take(None, settings, code))
        return _print_tasks(request.make_tasks(options, code), output)
    told = notify or None, notify_on
    return _submit(request, options, wants, wanted, asked, told, queue, stack, skip_existing, wait, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
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
        from runtime.tasks.model import check_new_experiment
        from runtime.tasks.sources import name_experiment

        if self.experiment is not None:
            return check_new_experiment(self.experiment)
        return DEFAULT_EXPERIMENT if self.source is None else name_experiment(self.source)

    def count(self) -> int | None:
        """Count the tasks, if possible before they are read."""
        from runtime.tasks.sources import count_lines

        return len(self.grid) if self.source is None else count_lines(self.source)

    def make_tasks(self, options: TaskOptions, code: SubmittedCode) -> Iterator[Task]:
        options = replace(options, snapshot=code.snapshot, folder=code.folder)
        if self.source is not None:
            from runtime.tasks.sources import read_lines, read_tasks

            return read_tasks(read_lines(self.source), options)
        return self._expand(self._make_entry(), options)

    def _make_entry(self) -> WorkflowEntry | CommandEntry:
        from runtime.tasks.grid import check_grid
        from runtime.tasks.literal_secrets import refuse_secret_axes
        from runtime.tasks.model import CommandEntry, WorkflowEntry

        entry: WorkflowEntry | CommandEntry
        if self.words[:2] == (_COMMAND, ""):
            raise RequestRefused("the command's first word is empty", hint="runtime submit -- PROGRAM ARGUMENT…")
        if self.words[0] == _COMMAND:
            entry = CommandEntry(self.words[1:])
        elif len(self.words) < 2:
            raise RequestRefused(
                f"project `{self.words[0]}` needs the name of a workflow",
                hint=f"runtime submit {self.words[0]} WORKFLOW, or `--` before a command",
            )
        else:
            # A `--` among the workflow's own arguments is theirs.
            args = tuple(arg for arg in self.words[2:] if arg != _COMMAND)
            entry = WorkflowEntry(self.words[0], self.words[1], args)
            _note_misplaced(entry.args)
        check_grid(self.grid, entry, key=self.key)
        refuse_secret_axes(self.grid)
        return entry

    def note_missing(self, code: SubmittedCode, project: Project) -> None:
        """Note a workflow that tasks would not find in the code that they carry."""
        if code.taken_from is None or len(self.words) < 2 or self.words[0] == _COMMAND:
            return
        from runtime.tasks.model import WorkflowEntry
        from runtime.tasks.workflow_check import describe_missing

        folders = [code.taken_from / code.folder] if code.folder else []
        entry = WorkflowEntry(self.words[0], self.words[1])
        if missing := describe_missing(entry, project, [*folders, code.taken_from]):
            note(f"note: {missing}; `runtime run {' '.join(self.words[:2])} --help` says what it finds")

    def _expand(self, entry: WorkflowEntry | CommandEntry, options: TaskOptions) -> Iterator[Task]:
        from runtime.tasks.grid import apply_grid, replace_names
        from runtime.tasks.literal_secrets import may_become_secret, refuse_secrets

        look = may_become_secret(entry, self.grid)
        for values in self.grid:
            applied = apply_grid(entry, values)
            if look:
                refuse_secrets(applied)
            yield options.make_task(
                applied,
                key=None if self.key is None else replace_names(self.key, values),
                outputs=tuple(replace_names(url, values) for url in self.outputs),
            )


def _note_misplaced(args: Sequence[str]) -> None:
    ours = {
        *("--wait", "--experiment", "--queue", "--stack", "--grid", "--skip-existing", "--snapshot", "--no-snapshot"),
        *("--dry-run", "--from", "--key", "--secret", "--no-secrets", "--grid-seed", "--environment", "--with"),
        *("--image", "--mount"),
        *("--capture", "--capture-every", "--reuse", "--notify", "--notify-on"),
    }
    for arg in args:
        if (name := arg.partition("=")[0]) in ours:
            note(f"note: `{name}` follows PROJECT, so it goes to the workflow; options of `runtime submit` come before")


_OPTIONS = {
    "secrets": "secret",
    "mounts": "mount",
    "timeout_s": "timeout",
    "expires_at": "expires",
    "not_before": "delay",
    "max_failures": "max-failures",
}
"""Field → option, if their names differ."""


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


def _print_tasks(tasks: Iterator[Task], output: OutputFormat) -> int:
    from runtime.tasks.wire import encode_task, task_fields

    if output is OutputFormat.JSON:
        print_json(task_fields(task) for task in tasks)
        return 0
    count = 0
    for task in tasks:
        write_json(encode_task(task) + "\n")
        count += 1
    note(f"dry run: {count_noun(count, 'task')}, nothing submitted")
    return 0


def _take_code(wanted: Path | bool | None, records: RecordStore | None, settings: Settings) -> SubmittedCode:
    """Take the code of the tasks, with a note if the search of the tree takes long."""
    from threading import Timer

    from runtime.client.tasks.task_snapshot import take_code

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
    wants: ArtifactOptions,
    wanted: Path | bool | None,
    asked: PackageOptions,
    told: tuple[list[str] | None, str | None],
    queue: str | None,
    stack: str | None,
    skip_existing: bool,
    wait: bool,
    output: OutputFormat,
) -> int:
    from runtime.client.resolve_id import recall_last, remember_last
    from runtime.client.tasks.notify import read_hearers
    from runtime.client.tasks.submit import check_priority, submit_tasks
    from runtime.stack.open import open_stack

    with open_stack(stack, queue=queue) as opened:
        target = opened.queue()
        if new := opened.describe_new(target):
            note(f"note: {new}")
        check_priority(options.priority, target.name, target.traits)
        hearers = read_hearers(*told, opened.settings.project.notify)
        hearers.check(opened.check_secrets)
        options = replace(options, notify=hearers.of_tasks)
        options = wants.add_to(options, target.records, recall_last(opened.settings.data_dir, opened.name))
        code = _take_code(wanted, target.records, opened.settings)
        packages = asked.take(target.records, opened.settings, code)
        options = asked.add_to(options, packages)
        tasks = request.make_tasks(options, code)
        request.note_missing(code, opened.settings.project)
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
                    tasks,
                    target,
                    experiment=options.experiment,
                    skip_existing=skip_existing,
                    progress=advance,
                    check_secrets=opened.check_secrets,
                )
            except KeyboardInterrupt:
                shown.close()
                note(
                    f"interrupted: {count_noun(dealt_with, 'task')} dealt with and safe; run the same command again to go on"
                )
                return INTERRUPTED
        if done.count:
            hearers.watch(target, options.experiment, new=bool(done.new or done.resumed))
        done = replace(done, stack=opened.name, snapshot=code.snapshot, environment=packages.id)
        remember_last(opened.settings.data_dir, opened.name, done.experiment)
        _report_submitted(done, request.source is not None, code, packages)
        if done.new:
            note_skew(target.records)
        if not wait:
            return _finish(done, output)
        return _wait(done, target, opened, output)


def _finish(done: Submission, output: OutputFormat) -> int:
    if output is OutputFormat.JSON:
        print_json(_submission_fields(done))
    elif done.tasks or done.count:
        say(done.tasks[0][0] if done.tasks and len(done.tasks) == 1 else done.experiment)
    return 0


def _wait(done: Submission, target: Queue, opened: Stack, output: OutputFormat) -> int:
    from runtime.cli.wait import report_ended, wait_shown

    name = done.tasks[0][0] if done.tasks and len(done.tasks) == 1 else done.experiment
    waited = wait_shown(done, name, opened, queue=target, total=done.count)
    if waited is None:
        return INTERRUPTED
    if output is OutputFormat.JSON:
        print_json(
            {
                **_submission_fields(done),
                "totals": {state.value: waited.totals.get(state, 0) for state in TaskState},
                "failed": waited.failed,
            }
        )
    else:
        _finish(done, output)
    report_ended(waited, target.records)
    return 1 if waited.failed else 0


def _submission_fields(done: Submission) -> dict[str, Any]:
    """Return the fields of `-o json`."""
    shown = {
        each.name: getattr(done, each.name)
        for each in fields(done)
        if each.name not in ("tasks", "asked", "single", "pickles")
    }
    return {**shown, "ids": None if done.ids is None else list(done.ids)}


def _report_submitted(done: Submission, from_file: bool, code: SubmittedCode, packages: SubmittedPackages) -> None:
    total = done.new + done.known + done.same + done.skipped
    lines = "lines" if from_file else "tasks"
    where = f"queue `{done.queue}` of stack `{done.stack}`, experiment `{done.experiment}`"
    note(f"{count_noun(done.new, 'task')} submitted to {where}")
    if done.new and code.taken_from:
        note(f"with the code of `{code.taken_from}` as it is now, {_short(code.snapshot)}")
    if done.new and packages.id:
        note(f"with the packages of {packages.described}")
    if done.known:
        note("it was already submitted" if total == 1 else f"{_of(done.known, total)} were already submitted")
    if done.known_other:
        from runtime.client.tasks.publish import NAMED_TASKS

        those = (
            "it" if total == 1 else f"{'at least ' if done.known > NAMED_TASKS else ''}{_of(done.known_other, total)}"
        )
        note(
            f"{those} had other content when it was submitted before, and that stands; for what is new, name another"
            " `--experiment` or `--key`"
        )
    if done.kept_code:
        note(
            f"what was submitted before runs, or ran, {_short(done.kept_code)} and not {_short(done.snapshot)}; for"
            " that, name another `--experiment` or `--key` (`runtime retry` runs the earlier code again)"
        )
    if done.same:
        note(
            f"{_of(done.same, total)} {lines} repeat an earlier one: without a `key` of its own, what runs the same is"
            " one task"
        )
    if done.same_other:
        note(f"{_of(done.same_other, total)} {lines} have other content than the earlier one: the first stands")
    if done.skipped:
        note(f"{_of(done.skipped, total)} skipped: their outputs exist")
    if done.resumed:
        note(f"{count_noun(done.resumed, 'task')} of an interrupted submission published")
    name = done.tasks[0][0] if done.tasks and len(done.tasks) == 1 else done.experiment
    if done.count:
        note(f"follow with `runtime status {name}`")


def _short(code: str | None) -> str:
    """Shorten a content id for people."""
    return f"`{code[:19]}`" if code and code.startswith("sha256:") else "the code that workers have"


def _of(part: int, total: int) -> str:
    return f"{format_count(part)} of {format_count(total)}"
