"""Submitting: tasks → manifest parts → queue → acknowledged; takes up what was interrupted.

Where the queue's own file holds the tasks, putting them there is all. Elsewhere each part of at most 10,000 tasks is
written to the experiment's manifest, published, and marked as sent, in that order, and only then acknowledged. So
whatever was in a manifest can be published again (`repair`), and the same submission run again goes on where it
stopped: what a manifest lists is not listed a second time.
"""

from __future__ import annotations

import functools
import getpass
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeAlias

from runtime.client.identify import FindsTasks
from runtime.client.tasks.code import import_root, take_code
from runtime.client.tasks.existing import ExistingOutputs
from runtime.client.tasks.kept_stacks import KeptStack, borrow_stack, look_up_variable
from runtime.clock import describe_skew
from runtime.config import load_settings
from runtime.errors import (
    InfrastructureFailure,
    InvalidTask,
    InvalidValue,
    NotPossible,
    PartTaken,
    RequestRefused,
    RuntimeFailure,
    UnknownName,
    WorkFailed,
    explain_json,
)
from runtime.queues.base import MakesTopics, Queue, QueueTraits
from runtime.records.base import ManifestPart, RecordExists, RecordStore, calls_at_once
from runtime.records.codec import read_value
from runtime.records.coverage import own_key, read_keys
from runtime.records.orders import FIRST_OWN_NUMBER
from runtime.records.settle import settle_record
from runtime.records.totals import Tally, open_tasks
from runtime.tasks.history import Record
from runtime.tasks.idset import IdSet, task_key
from runtime.tasks.lease import InvalidMessage
from runtime.tasks.model import (
    DEFAULT_EXPERIMENT,
    DEFAULT_MAX_FAILURES,
    LIMITS,
    NO_RESOURCES,
    Entry,
    FunctionEntry,
    Resources,
    Task,
    TaskState,
    WorkflowEntry,
    canonical_json,
    check_experiment,
    check_terms,
    check_text,
    check_texts,
    is_plain,
    make_task,
    next_generation,
    task_id,
)
from runtime.tasks.verdict import malformed
from runtime.tasks.wire import TaskDefaults, decode_task, encode_task, parse_resources, parse_task, read_line
from runtime.units import parse_duration
from runtime.values import dataclass, field, replace

log = logging.getLogger(__name__)

PART_TASKS: Final = 10_000
PUT_TASKS: Final = 4_000
"""Put into an embedded file at once; its lock is held for that long."""
NAMED_TASKS: Final = 100
"""A submission of up to this many tasks remembers their ids, and is waited for task by task."""
FAILED_SHOWN: Final = 5
PARTS_LOOKED_AT: Final = 8
"""To tell what code known tasks have."""
OWN_CODE: Final = "worker"
"""Stands for the code that a worker has, in the place of a content id."""
LIVE_WITHIN: Final = timedelta(minutes=2)
"""A worker that has not reported for longer holds nothing; they report every 30 s."""

_READ_AT_ONCE: Final = 4

_compared: set[str] = set()
"""Record stores whose clock this process has compared with its own."""

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of tasks that were dealt with since the last call."""
Work: TypeAlias = Task | Callable[..., Any] | tuple[str, str, Sequence[str]] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a submission came to; every task in it is durable."""

    experiment: str
    queue: str
    stack: str | None = None
    new: int = 0
    """Submitted now."""
    known: int = 0
    """Submitted before, so not again."""
    same: int = 0
    """Of the input, one task with an earlier one: the same key, or nothing else than that runs."""
    known_other: int = 0
    """Of the known, those that were submitted with other content: that stands. Beyond `NAMED_TASKS` known, at least so many."""
    same_other: int = 0
    """Of the same, those with other content than the earlier one, which stands."""
    skipped: int = 0
    """Their declared outputs exist already."""
    resumed: int = 0
    """Of an earlier submission that was interrupted before it had published them."""
    snapshot: str | None = None
    """Content id of the code that new tasks run, unless they name one; None for the workers' own."""
    kept_code: str | None = None
    """What a task that was known runs, where that is another code than was submitted now: a content id, or `OWN_CODE`."""
    tasks: tuple[tuple[str, int], ...] | None = None
    """Id and generation of each distinct task that was not skipped; None beyond `NAMED_TASKS`."""
    asked: Queue | str | None = field(default=None, repr=False, compare=False)
    """The queue as the caller named or passed it, for `wait`."""

    @property
    def ids(self) -> tuple[str, ...] | None:
        return None if self.tasks is None else tuple(identity for identity, _ in self.tasks)

    @property
    def count(self) -> int:
        """Distinct tasks that were not skipped."""
        return self.new + self.known


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """How the tasks of a submission or an experiment ended."""

    experiment: str
    totals: Mapping[TaskState, int]
    records: tuple[Record, ...] = ()
    """In the order of submission; only where they were waited for task by task."""
    complete: bool = True
    """False if the time was up first."""
    asked: Queue | str | None = field(default=None, repr=False, compare=False)
    """The queue that was waited for, as it was named or passed, and its stack: large values are read from its records."""
    stack: str | None = field(default=None, repr=False, compare=False)

    @property
    def failed(self) -> int:
        """Tasks that ended otherwise than by success."""
        return sum(self.totals.get(state, 0) for state in TaskState if state.terminal) - self.totals.get(
            TaskState.SUCCEEDED, 0
        )

    def values(self, *, none_for_failed: bool = False) -> list[Any]:
        """What the tasks returned, in the order of submission.

        Large ones are read from the record store now. Raises `WorkFailed` if one did not succeed, unless
        `none_for_failed` asks for None in its place; `NotPossible` if one has not ended yet, and beyond `NAMED_TASKS`;
        `StoreUnavailable` if the store has one no more or does not answer.
        """
        total = sum(self.totals.values())
        if not self.complete:
            left = total - self.failed - self.totals.get(TaskState.SUCCEEDED, 0)
            raise NotPossible(
                f"{left:,} of {total:,} tasks have not ended, so there are no values of them",
                hint=f"wait again without `timeout`, or see what they wait for: runtime status {self.experiment}",
            )
        if len(self.records) != total:
            raise NotPossible(
                "only what was waited for task by task has its values at hand",
                facts=[f"{total} tasks, up to {NAMED_TASKS} are waited for that way"],
                hint="read them from the stack's records: open_stack().records.records(experiment), where a value over "
                "64 KiB is `get_blob(record.value_url)`, as JSON",
            )
        failed = [record for record in self.records if record.state is not TaskState.SUCCEEDED]
        if failed and not none_for_failed:
            more = [f"and {len(failed) - FAILED_SHOWN} more"] if len(failed) > FAILED_SHOWN else []
            raise WorkFailed(
                f"{len(failed)} of {total} tasks did not succeed, and have no value",
                facts=[*(_how_it_ended(record) for record in failed[:FAILED_SHOWN]), *more],
                hint=f"runtime explain {failed[0].task_id}; values(none_for_failed=True) gives None for them",
            )
        for record in self.records:
            if record.unreadable:
                raise NotPossible(
                    f"the value of task `{record.task_id}` cannot be read",
                    facts=[record.unreadable],
                    hint="leave it out: the other values are in `records`",
                )
        if all(record.value_url is None for record in self.records):
            return [record.value for record in self.records]
        with _open_target(self.asked, self.stack) as opened:
            store = (opened.queue if isinstance(opened, KeptStack) else opened).records
            with ThreadPoolExecutor(calls_at_once(store), thread_name_prefix="values") as pool:
                return list(pool.map(lambda record: read_value(record, store), self.records))


def _how_it_ended(record: Record) -> str:
    last = (record.message or "").strip().rpartition("\n")[2]
    return f"`{record.task_id}` {record.state}" + (f": {last}" if last else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What `repair` published again, and why it left the rest alone."""

    published: int = 0
    recorded: int = 0
    held: int = 0
    """A live worker says that it runs them."""
    malformed: int = 0
    """Listed in a way that cannot be decoded: dead letters now."""
    unreadable: int = 0
    """Manifest parts that were left out, because they are damaged or gone."""
    experiments: tuple[str, ...] = ()


# making tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What one submission says about all of its tasks; a field that a task sets itself goes first."""

    experiment: str = DEFAULT_EXPERIMENT
    key: str | None = None
    timeout: timedelta | None = None
    max_failures: int = DEFAULT_MAX_FAILURES
    expires_at: datetime | None = None
    not_before: datetime | None = None
    priority: int = 0
    resources: Resources = NO_RESOURCES
    outputs: tuple[str, ...] = ()
    snapshot: str | None = None
    folder: str | None = None
    """Where in the snapshot attempts start."""
    submitted_by: str | None = None
    submitted_at: datetime | None = None

    def __post_init__(self) -> None:
        check_terms(self)
        check_texts("outputs", self.outputs)
        if self.key is not None:
            check_text("key", self.key)

    def defaults(self) -> TaskDefaults:
        return TaskDefaults(
            experiment=self.experiment,
            max_failures=self.max_failures,
            timeout=self.timeout,
            not_before=self.not_before,
            expires_at=self.expires_at,
            priority=self.priority,
            resources=self.resources,
            snapshot=self.snapshot,
            folder=self.folder,
            submitted_by=self.submitted_by,
            submitted_at=self.submitted_at,
        )

    def make_task(self, entry: Entry, *, key: str | None = None, outputs: tuple[str, ...] | None = None) -> Task:
        key = self.key if key is None else key
        identity = task_id(self.experiment, key=key, entry=entry)
        return make_task(self, identity, entry, key=key, outputs=self.outputs if outputs is None else outputs)


def submitter() -> str:
    """`user@host` of this process."""
    # The variables that `getpass` takes a name from, in its order.
    find = look_up_variable
    name = find(b"LOGNAME") or find(b"USER") or find(b"LNAME") or find(b"USERNAME")
    return _submitter(name or os.geteuid(), socket.gethostname())


@functools.lru_cache(16)
def _submitter(_: bytes | int, host: str) -> str:
    """Looked up again when what the user's name follows from is another."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # A container's user may have no name.
        user = "unknown"
    # An environment variable may hold any bytes.
    return f"{user}@{host}".encode(errors="replace").decode()


def function_entry(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> FunctionEntry:
    """The entry that names a callable by its import path.

    Raises `RequestRefused` where a worker could not import it, or for arguments that JSON cannot hold.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    shown = f"{module}:{name}" if name else repr(function)
    reason = None
    if not module or not name:
        reason = "it has no name of its own"
    elif "<lambda>" in name:
        reason = "it is a lambda"
    elif "<locals>" in name:
        reason = "it is defined inside another function"
    elif module == "__main__":
        reason = "it is defined in the script that runs, which a worker cannot import"
    if reason:
        raise RequestRefused(
            f"function `{shown}` cannot be submitted: {reason}",
            hint="move it to the top level of a module that workers can import, and submit it from there",
        )
    entry = FunctionEntry(shown, tuple(args), dict(kwargs or {}))
    if kwargs or not all(map(is_plain, args)):
        try:
            canonical_json([entry.args, entry.kwargs])
        except (TypeError, ValueError, RecursionError) as problem:
            raise RequestRefused(
                f"arguments of function `{shown}` cannot be submitted: {explain_json(problem)}",
                facts=["a task is JSON: text, numbers, true, false, null, lists and dictionaries"],
                hint="pass a path or an id, and load the rest in the function",
            ) from None
    return entry


def make_tasks(
    work: Work | Iterable[Work],
    options: TaskOptions,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Task]:
    """The tasks of whatever `submit` takes, as they are needed."""
    if _is_one(work):
        yield _make_task(work, options, args, kwargs)
        return
    if options.key is not None:
        raise RequestRefused("`key` names one task, and this is a list", hint='give each its own: {"key": "…", …}')
    if args or kwargs:
        raise RequestRefused("`args` and `kwargs` belong to one function or workflow, and this is a list")
    if not isinstance(work, Iterable):
        raise InvalidTask(
            "work", f"is {type(work).__name__}, expected a task, a function, a workflow or a list of them"
        )
    defaults = options.defaults()
    for number, each in enumerate(work, start=1):
        try:
            yield _make_task(each, options, (), None, defaults)
        except InvalidTask as problem:
            raise InvalidTask(problem.field, problem.problem, line=number, hint=problem.hint) from None


def _is_one(work: object) -> bool:
    return callable(work) or isinstance(work, Task | Mapping) or _is_triple(work)


def _is_triple(work: object) -> bool:
    return (
        isinstance(work, tuple)
        and len(work) in (2, 3)
        and all(isinstance(part, str) for part in work[:2])
        and (len(work) == 2 or isinstance(work[2], list | tuple))
    )


def _make_task(
    work: Any,
    options: TaskOptions,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    defaults: TaskDefaults | None = None,
) -> Task:
    """`defaults` are those of `options`, where they are at hand."""
    if isinstance(work, Task):
        if work.experiment != options.experiment:
            raise InvalidTask("experiment", f"is {work.experiment!r}, and this submission is of `{options.experiment}`")
        if work.submitted_at and work.submitted_by and work.snapshot:
            return work
        return replace(
            work,
            submitted_at=work.submitted_at or options.submitted_at,
            submitted_by=work.submitted_by or options.submitted_by,
            snapshot=work.snapshot or options.snapshot,
            folder=work.folder if work.snapshot else options.folder,
        )
    if type(work) is dict or isinstance(work, Mapping):
        fields = work if type(work) is dict else dict(work)
        task = parse_task(fields, defaults=defaults or options.defaults())
        if task.experiment != options.experiment:
            raise InvalidTask("experiment", f"is {task.experiment!r}, and this submission is of `{options.experiment}`")
        if options.key is not None and task.key is None and "id" not in work:
            task = replace(task, key=options.key, id=task_id(task.experiment, key=options.key))
        return replace(task, outputs=options.outputs) if options.outputs and not task.outputs else task
    if _is_triple(work):
        words = [*(work[2] if len(work) == 3 else ()), *args]
        for index, word in enumerate(words):
            if not isinstance(word, str):
                raise InvalidTask(f"args[{index}]", f"is {word!r}, expected text as on a command line")
        return options.make_task(WorkflowEntry(work[0], work[1], tuple(words)))
    if callable(work):
        return options.make_task(function_entry(work, args, kwargs))
    raise InvalidTask(
        "work", f"is {work!r:.60}, expected a task, a function, a workflow or an object of the wire format"
    )


# submitting


def submit(
    work: Work | Iterable[Work],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    experiment: str | None = None,
    queue: str | Queue | None = None,
    stack: str | None = None,
    key: str | None = None,
    timeout: timedelta | float | str | None = None,
    max_failures: int = DEFAULT_MAX_FAILURES,
    expires: timedelta | float | str | None = None,
    delay: timedelta | float | str | None = None,
    priority: int = 0,
    resources: Resources | Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    snapshot: str | Path | bool | None = None,
    skip_existing: bool = False,
    progress: Progress | None = None,
) -> Submission:
    """Put work into a queue; on return every task is durable and will be run.

    `work` is a function of an importable module (with `args` and `kwargs` that JSON can hold), a workflow
    `(project, name, args)`, a `Task`, an object of the wire format, or an iterable of these, which is read as it is
    submitted and may be as long as you like. `expires` and `delay` count from now; durations are a `timedelta`,
    seconds, or text such as "2h".

    The code of the folder it is called from goes with the work as it is now, and is what attempts run: that of the
    project around the working directory, or around a function's module if that lies elsewhere. `snapshot` names another
    folder or the content id of a snapshot; False runs whatever code the workers have.

    Calling it again with the same work submits nothing twice; tasks that are known keep the code they were submitted
    with.
    """
    now = datetime.now(UTC)
    if type(args) not in _LISTS:
        _check_argument("args", args)
    if type(outputs) not in _LISTS:
        _check_argument("outputs", outputs)
    if kwargs is not None:
        _check_argument("kwargs", kwargs)
    if experiment is not None:
        _check_argument("experiment", experiment)
    if resources is not None:
        _check_argument("resources", resources)
    if snapshot is not None:
        _check_argument("snapshot", snapshot)
    if progress is not None:
        _check_argument("progress", progress)
    experiment = check_experiment(experiment or _experiment_of(work))
    timeout = _span(timeout, "timeout")
    expires_at = None if expires is None else moment_after(now, expires, "expires")
    not_before = None if delay is None else moment_after(now, delay, "delay")
    resources = _read_resources(resources)
    with _open_target(queue, stack) as opened:
        kept, target = (opened, opened.queue) if isinstance(opened, KeptStack) else (None, opened)
        start = _module_folder(work)
        if kept is not None:
            code = kept.take_code(snapshot, start)
        else:
            code = take_code(snapshot, target.records, load_settings(), start=start)
        terms: dict[str, Any] = {
            "experiment": experiment,
            "key": key,
            "timeout": timeout,
            "max_failures": max_failures,
            "expires_at": expires_at,
            "not_before": not_before,
            "priority": priority,
            "resources": resources,
            # The letters of one text would be a list as well.
            "outputs": outputs if isinstance(outputs, str) else tuple(outputs),
            "snapshot": code.snapshot,
            "folder": code.folder,
            "submitted_by": submitter(),
            "submitted_at": now,
        }
        said: dict[str, Any] = {
            "stack": kept.stack.name if kept else None,
            "snapshot": code.snapshot,
            "asked": queue,
        }
        if target.records.holds_tasks and not skip_existing and _is_one(work):
            done = _submit_one(_make_one(work, terms, args, kwargs), target, said)
            if progress:
                progress(1)
        else:
            tasks = make_tasks(work, TaskOptions(**terms), args=args, kwargs=kwargs)
            sent = submit_tasks(tasks, target, experiment=experiment, skip_existing=skip_existing, progress=progress)
            done = replace(sent, **said)
        if done.new:
            _say_skew(target.records)
        return done


def _make_one(work: Any, terms: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Task:
    """The task of `work` that has these terms, which `TaskOptions` takes too."""
    if not isinstance(work, FunctionType):
        return _make_task(work, TaskOptions(**terms), args, kwargs)
    entry = function_entry(work, args, kwargs)
    return Task(id=task_id(terms["experiment"], key=terms["key"], entry=entry), entry=entry, **terms)


def _submit_one(task: Task, queue: Queue, said: Mapping[str, Any]) -> Submission:
    """As `submit_tasks`, of one task into a queue whose file holds the tasks: what most calls of a program are."""
    if task.priority:
        check_priority(task.priority, queue.name, queue.traits)
    result = queue.put([task])
    kept_code, known_other = _kept(queue.records, task.experiment, {task.id: task}) if result.known else (None, 0)
    return Submission(
        experiment=task.experiment,
        queue=queue.name,
        new=result.new,
        known=result.known,
        known_other=known_other,
        kept_code=kept_code,
        tasks=((task.id, task.generation),),
        **said,
    )


def _say_skew(records: RecordStore) -> None:
    """Log it once in this process if its clock and the record store's differ by much."""
    if records.url in _compared:
        return
    _compared.add(records.url)
    with suppress(RuntimeFailure):
        if said := describe_skew(records.skew(), "the record store's"):
            import logging

            logging.getLogger(__name__).warning("this machine's clock is %s", said)


def submit_tasks(
    tasks: Iterable[Task],
    queue: Queue,
    *,
    experiment: str,
    skip_existing: bool = False,
    progress: Progress | None = None,
) -> Submission:
    """Submit a stream of tasks of one experiment; memory stays at 16 bytes a task.

    Where a task is refused, those of its part before it are not submitted, earlier parts stand, and the error says
    so; run again, it goes on where it stopped. Raised alike: `QueueUnavailable`, `StoreUnavailable`.
    """
    counted = _Counted(progress or (lambda _: None))
    sender: _Sender = _Direct(queue) if queue.records.holds_tasks else _ThroughManifest(queue, experiment)
    existing = ExistingOutputs() if skip_existing else None
    sender.take_up(counted)
    for part in _cut(_admitted(tasks, queue, sender.known, counted), sender.part_tasks, counted):
        wanted = existing.drop_done(part) if existing else part
        if len(wanted) < len(part):
            counted.skip(part, wanted)
        if wanted:
            sender.send(wanted, counted)
        counted.advance(len(part))
    kept_code, known_other = _kept(queue.records, experiment, counted.looked_at)
    return Submission(
        experiment=experiment,
        queue=queue.name,
        new=counted.new,
        known=counted.known,
        same=counted.same,
        known_other=known_other,
        same_other=counted.same_other,
        skipped=counted.skipped,
        resumed=counted.resumed,
        kept_code=kept_code,
        tasks=None if counted.named is None else tuple(counted.named),
    )


class _Counted:
    """What has become of the input so far."""

    def __init__(self, progress: Progress) -> None:
        self.new = self.known = self.same = self.same_other = self.skipped = self.resumed = 0
        self.named: dict[tuple[str, int], None] | None = {}
        """The first distinct tasks in their order; None once there are too many to name."""
        self.looked_at: dict[str, Task] = {}
        """Some of those that may be known, by id, to tell what code and content they have."""
        self.first: dict[int, Task] = {}
        """The first distinct tasks of the input by key, to tell what repeats them."""
        self.advance = progress

    def look_at(self, tasks: Sequence[Task]) -> None:
        """Remember as many as there is room for, evenly from all that carry code."""
        room = NAMED_TASKS - len(self.looked_at)
        for task in tasks[:: -(-len(tasks) // room)] if room else ():
            self.looked_at[task.id] = task

    def name(self, task: Task) -> None:
        if self.named is not None:
            self.named[task.id, task.generation] = None
            if len(self.named) > NAMED_TASKS:
                self.named = None

    def skip(self, part: Sequence[Task], wanted: Sequence[Task]) -> None:
        self.skipped += len(part) - len(wanted)
        kept = {(task.id, task.generation) for task in wanted}
        for task in part if self.named else ():
            if self.named and (task.id, task.generation) not in kept:
                self.named.pop((task.id, task.generation), None)


def _admitted(tasks: Iterable[Task], queue: Queue, known: IdSet, counted: _Counted) -> Iterator[Task]:
    """Each task that is neither known nor an earlier one of the input, checked against what the queue can do."""
    seen, first = IdSet(), counted.first
    for task in tasks:
        if task.priority:
            check_priority(task.priority, queue.name, queue.traits)
        key = task_key(task.id, task.generation)
        if known.count and key in known:
            counted.known += 1
            counted.look_at([task])
        elif key not in first and (len(first) < PART_TASKS or seen.add(key)):
            if len(first) < PART_TASKS:
                first[key] = task
            if counted.named is not None:
                counted.name(task)
            yield task
            continue
        else:
            counted.same += 1
            counted.same_other += key in first and _content(first[key]) != _content(task)
        counted.name(task)
        counted.advance(1)


def check_priority(priority: int, queue: str, traits: QueueTraits) -> None:
    """Raise `NotPossible` where the queue would drop it."""
    if priority and not traits.priorities:
        raise NotPossible(
            f"queue `{queue}` keeps no priorities, and a task asks for {priority}",
            facts=[f"a {traits.kind} queue delivers in an order of its own"],
            hint="leave `priority` out, or use a queue of its own for what is urgent",
        )


def _cut(tasks: Iterator[Task], size: int, counted: _Counted) -> Iterator[list[Task]]:
    """Lists of at most `size`. What refuses a task says what became of those before it."""
    part: list[Task] = []
    try:
        for task in tasks:
            part.append(task)
            if len(part) == size:
                yield part
                part = []
    except RequestRefused as problem:
        stands, not_sent = counted.new + counted.known, len(part)
        fact = f"{stands:,} tasks before it are submitted and stand" if stands else "nothing was submitted"
        if stands and not_sent:
            fact += f"; {not_sent:,} after those were not submitted"
        problem.facts = (*problem.facts, fact)
        raise
    if part:
        yield part


class _Direct:
    """Into a queue whose file holds the tasks: what is known is told there."""

    part_tasks = PUT_TASKS

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.known = IdSet()

    def take_up(self, counted: _Counted) -> None:
        """Nothing can be half done: a put is one transaction."""

    def send(self, tasks: Sequence[Task], counted: _Counted) -> None:
        result = self._queue.put(tasks)
        counted.new += result.new
        counted.known += result.known
        if result.known:
            counted.look_at(tasks)


class _ThroughManifest:
    """Part by part: listed, published, marked as sent."""

    part_tasks = PART_TASKS

    def __init__(self, queue: Queue, experiment: str) -> None:
        self._queue = queue
        self._records = queue.records
        self._experiment = experiment
        self._read: set[str] = set()
        self._next = 0
        self.known = IdSet()
        """What the manifest listed when it was last read, without what this submission adds."""

    def take_up(self, counted: _Counted) -> None:
        """Learn what the manifest lists, and publish what an interrupted submission left in it."""
        self._records.check()
        # Named before its first part, so that a running submission can be seen and cancelled.
        self._records.put_experiment(self._experiment, queue=self._queue.name)
        fresh = [part for part in self._records.parts(self._experiment) if part.name not in self._read]
        self._read.update(part.name for part in fresh)
        in_order = [_number(part) for part in fresh if _number(part) < FIRST_OWN_NUMBER]
        self._next = max([self._next, *(number + 1 for number in in_order)])
        to_read = []
        for part in fresh:
            if not part.sent:
                counted.resumed += self._publish_again(part)
            elif (own := own_key(part.name)) is not None:
                self.known.add(own)
            else:
                to_read.append(part)
        for keys in self._read_keys(to_read):
            for key in keys:
                self.known.add(key)

    def send(self, tasks: Sequence[Task], counted: _Counted) -> None:
        own = task_key(tasks[0].id, tasks[0].generation)
        alone = len(tasks) == 1 and own >= FIRST_OWN_NUMBER
        wanted = list(tasks)
        while wanted:
            try:
                self._send_part(own if alone else self._next, wanted)
            except PartTaken:
                # Listed by a submission beside this one, or claimed by one that died before it wrote the part.
                self._next += not alone
                alone = False
                self.take_up(counted)
                wanted = [task for task in tasks if task_key(task.id, task.generation) not in self.known]
            else:
                break
        counted.new += len(wanted)
        counted.known += len(tasks) - len(wanted)

    def _send_part(self, number: int, tasks: Sequence[Task]) -> None:
        part = self._records.put_part(self._experiment, number, [encode_task(task) for task in tasks])
        self._read.add(part.name)
        if not part.sent:
            self._queue.put(tasks)
            self._records.mark_sent(part)
        if number < FIRST_OWN_NUMBER:
            self._next = number + 1

    def _publish_again(self, part: ManifestPart) -> int:
        tasks, malformed_lines = _decode_part(self._records, part)
        _bury(self._records, malformed_lines, datetime.now(UTC))
        self._queue.put(tasks)
        self._records.mark_sent(part)
        for task in tasks:
            self.known.add(task_key(task.id, task.generation))
        return len(tasks)

    def _read_keys(self, parts: Sequence[ManifestPart]) -> Iterator[Sequence[int]]:
        if not parts:
            return
        with ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="manifest") as pool:
            # A few at a time: what is read waits in memory until it is taken.
            for start in range(0, len(parts), 4 * _READ_AT_ONCE):
                some = parts[start : start + 4 * _READ_AT_ONCE]
                yield from pool.map(lambda part: read_keys(self._records, part), some)


_Sender: TypeAlias = _Direct | _ThroughManifest


def _kept(records: RecordStore, experiment: str, tasks: Mapping[str, Task]) -> tuple[str | None, int]:
    """The code that one of `tasks` was submitted with before, if it is another than now's, and how many had other content."""
    code, others = None, 0
    if not tasks:
        return code, others
    with suppress(RuntimeFailure):  # All is submitted: a store that fails now leaves this unsaid.
        for stored in _stored(records, experiment, tasks):
            now = tasks[stored.id]
            if code is None and now.snapshot is not None and stored.snapshot != now.snapshot:
                code = stored.snapshot or OWN_CODE
            others += _content(stored) != _content(decode_task(encode_task(now)))
    return code, others


def _content(task: Task) -> tuple[object, ...]:
    """What a task asks for, but not its code, and not when and by whom it was submitted."""
    return task.entry, task.resources, task.timeout, task.max_failures, task.outputs, task.priority, task.extra


def _stored(records: RecordStore, experiment: str, tasks: Mapping[str, Task]) -> Iterator[Task]:
    """Those of `tasks` as they were first submitted."""
    if isinstance(records, FindsTasks):
        yield from (found.task for each in tasks if (found := records.find_task(each)) and found.task)
        return
    wanted = {task_key(task.id, task.generation) for task in tasks.values()}
    parts = records.parts(experiment) if tasks else []
    own = [part for part in parts if part.count == 1 and _number(part) in wanted]
    in_order = [part for part in parts if _number(part) < FIRST_OWN_NUMBER]
    for part in [*own[:PARTS_LOOKED_AT], *in_order[:PARTS_LOOKED_AT]]:
        if not wanted:
            return
        for line in records.read_part(part):
            try:
                fields = json.loads(line)
                key = task_key(fields["id"], fields.get("generation", 1))
                if key in wanted and fields["id"] in tasks:
                    wanted.discard(key)
                    yield decode_task(line)
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError, InvalidTask):
                continue  # As above.


def _number(part: ManifestPart) -> int:
    return int(part.name.partition("-")[0])


def _experiment_of(work: object) -> str:
    """A task or an object that names its experiment decides where nobody else does."""
    if isinstance(work, Task):
        return work.experiment
    if isinstance(work, Mapping) and isinstance(work.get("experiment"), str):
        return str(work["experiment"])
    if isinstance(work, list | tuple) and work and not _is_triple(work):
        return _experiment_of(work[0])
    return DEFAULT_EXPERIMENT


def _module_folder(work: object) -> Path | None:
    """Where the code of a function lies, so that it goes with it though it is not the working directory's."""
    if isinstance(work, FunctionType):
        return import_root(work)
    if isinstance(work, list | tuple) and work and not _is_triple(work):
        return _module_folder(work[0])
    return import_root(work) if callable(work) and not isinstance(work, Task | Mapping) else None


def _span(value: timedelta | float | str | None, name: str) -> timedelta | None:
    if value is None or isinstance(value, timedelta):
        return value
    return parse_duration(str(value), field=name)


def moment_after(now: datetime, value: timedelta | float | str, name: str) -> datetime:
    """The time that lies a duration after `now`. Raises `InvalidValue` for one that no calendar has."""
    span = value if isinstance(value, timedelta) else parse_duration(str(value), field=name)
    try:
        return now + span
    except OverflowError:
        raise InvalidValue(name, value, "a time before the year 10000") from None


_LISTS: Final = (tuple, list)
_ARGUMENTS: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "args": ((tuple, list), "a list of arguments"),
    "kwargs": ((dict, Mapping), "a dictionary of arguments by their names"),
    "experiment": ((str,), "a name, which is text"),
    "resources": (
        (Resources, Mapping),
        'a dictionary such as {"cpus": 2, "memory": "16GiB"}, or `Resources`',
    ),
    "outputs": ((tuple, list, str), "a list of paths and URLs"),
    "snapshot": (
        (str, Path, bool),
        "the content id of a snapshot as text, a folder as `Path`, True or False",
    ),
    "progress": ((FunctionType, Callable), "a function of a number of tasks"),
    "queue": ((str,), "the name or URL of a queue, which is text, or an open queue"),
    "stack": ((str,), "the name of a stack, which is text"),
}
"""What each argument may be, and how that is said. What is more exact is checked of the task that comes of them."""


def _check_argument(name: str, value: object) -> None:
    kinds, allowed = _ARGUMENTS[name]
    if isinstance(value, kinds):
        return
    if name in ("args", "outputs") and isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return  # Such as a range; of a text it would be the letters.
    try:
        shown = repr(value)
    except (RecursionError, ValueError):
        shown = type(value).__name__
    raise InvalidValue(name, shown if len(shown) <= 60 else f"{shown[:59]}…", allowed)


def _read_resources(value: Resources | Mapping[str, Any] | None) -> Resources:
    if value is None:
        return NO_RESOURCES
    return value if isinstance(value, Resources) else parse_resources(value)


def _open_target(queue: str | Queue | None, stack: str | None) -> AbstractContextManager[KeptStack | Queue]:
    if stack is not None:
        _check_argument("stack", stack)
    if queue is None or isinstance(queue, str):
        return borrow_stack(stack, queue)
    if not hasattr(queue, "records"):
        _check_argument("queue", queue)
    return nullcontext(queue)


# waiting


def wait(
    what: Submission | str,
    *,
    queue: str | Queue | None = None,
    stack: str | None = None,
    timeout: timedelta | float | str | None = None,
    poll: timedelta = timedelta(seconds=0.5),
    progress: Callable[[Mapping[TaskState, int]], None] | None = None,
) -> Waited:
    """Wait until every task of a submission, or of the experiment named, has ended.

    Returns also when `timeout` is over, with `complete` False. A submission of more than `NAMED_TASKS` tasks is
    waited for with all of its experiment. Interrupting it leaves the work alone. Raises `UnknownName` for an experiment
    that nothing was submitted to.
    """
    span = _span(timeout, "timeout")
    deadline = None if span is None else time.monotonic() + span.total_seconds()
    submission = what if isinstance(what, Submission) else None
    if submission is not None:
        queue = queue or submission.asked or submission.queue
        stack = stack or submission.stack
    with _open_target(queue, stack) as opened:
        target = opened.queue if isinstance(opened, KeptStack) else opened
        if submission is not None and submission.tasks is not None:
            look: _Look = _ByTask(target.records, submission.experiment, submission.tasks)
        else:
            name = submission.experiment if submission else str(what)
            if submission is None:
                _ensure_known(name, target.records)
            look = _ByExperiment(target.records, name)
        return replace(_poll(look, deadline, poll.total_seconds(), progress), asked=queue, stack=stack)


def _ensure_known(experiment: str, records: RecordStore) -> None:
    # What only foreign producers sent to is named by nobody, and has records once a task of it ended.
    if records.find_experiment(experiment) is None and not records.totals(experiment, exact=True).submitted:
        raise UnknownName(
            "experiment",
            experiment,
            [seen.name for seen in records.experiments()],
            where=f"in `{records.url}`",
            hint="`runtime status` lists experiments; a task is waited for by what `submit` returned",
        )


class _ByTask:
    def __init__(self, records: RecordStore, experiment: str, tasks: Sequence[tuple[str, int]]) -> None:
        self._records, self._experiment, self._tasks = records, experiment, tasks
        self._found: dict[tuple[str, int], Record] = {}

    def look(self, *, final: bool) -> Waited:
        for identity in self._tasks:
            if identity not in self._found and (record := self._records.find(*identity)):
                self._found[identity] = record
        totals = dict.fromkeys((record.state for record in self._found.values()), 0)
        for record in self._found.values():
            totals[record.state] += 1
        if open_tasks := len(self._tasks) - len(self._found):
            totals[TaskState.QUEUED] = open_tasks
        return Waited(
            experiment=self._experiment,
            totals=totals,
            records=tuple(self._found[identity] for identity in self._tasks if identity in self._found),
            complete=not open_tasks,
        )


class _ByExperiment:
    def __init__(self, records: RecordStore, experiment: str) -> None:
        self._tally, self._experiment = Tally(records), experiment

    def look(self, *, final: bool) -> Waited:
        totals = self._tally.count(self._experiment, final=final)
        return Waited(experiment=self._experiment, totals=dict(totals.counts), complete=not open_tasks(totals))


_Look: TypeAlias = _ByTask | _ByExperiment


def _poll(
    look: _Look,
    deadline: float | None,
    poll_s: float,
    progress: Callable[[Mapping[TaskState, int]], None] | None,
) -> Waited:
    pause = min(0.05, poll_s)
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        final = left is not None and left <= 0
        seen = look.look(final=final)
        if progress:
            progress(seen.totals)
        if seen.complete or final:
            return seen
        time.sleep(pause if left is None else min(pause, left))
        pause = min(pause * 1.5, poll_s)


# repair


def repair(
    queue: Queue,
    records: RecordStore,
    *,
    experiment: str | None = None,
    now: datetime | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Publish again what a manifest lists, has no terminal record of its newest generation, and no live worker runs.

    For when the queue has forgotten: its retention is over, or it was lost. What still waits in the queue is then
    there twice, which costs a look at its record and no second run. Safe to call again.
    """
    if records.holds_tasks:
        return Repaired()
    if isinstance(queue, MakesTopics):
        queue.ensure_topics()
    names = [seen.name for seen in records.experiments() if seen.queue in (None, queue.name)]
    if experiment is not None:
        names = [name for name in names if name == experiment]
    held = {
        running
        for worker in records.workers(newer_than=LIVE_WITHIN)
        if not worker.left and (now or datetime.now(UTC)) - worker.seen_at < LIVE_WITHIN
        for running in worker.running
    }
    published = recorded_count = held_count = malformed_count = unreadable = 0
    for name in names:
        recorded = IdSet()
        for task_id_, generation in records.recorded(name):
            recorded.add(task_key(task_id_, generation))
        again = dict(records.tried_again(name))
        for part in records.parts(name):
            try:
                tasks, malformed_lines = _decode_part(records, part)
            except InfrastructureFailure as problem:
                if problem.retryable:
                    raise
                log.warning("%s; its tasks are left out", problem.message)
                unreadable += 1
                continue
            unfiled = [
                (task, invalid)
                for task, invalid in malformed_lines
                if task_key(task.id, task.generation) not in recorded and task.id not in held
            ]
            _bury(records, unfiled, now or datetime.now(UTC))
            open_tasks = [task for task in tasks if task_key(task.id, task.generation) not in recorded]
            # A later generation is in no manifest; it is the same task, begun anew.
            most = LIMITS["generation"][1]
            open_tasks += [
                replace(next_generation(task), generation=again[task.id] + 1)
                for task in tasks
                if again.get(task.id, most) < most
            ]
            free = [task for task in open_tasks if task.id not in held]
            if free:
                queue.put(free)
            if not part.sent:
                records.mark_sent(part)
            published += len(free)
            recorded_count += sum(task_key(task.id, task.generation) in recorded for task in tasks)
            held_count += len(open_tasks) - len(free)
            malformed_count += len(unfiled)
            if progress:
                progress(len(tasks))
    return Repaired(
        published=published,
        recorded=recorded_count,
        held=held_count,
        malformed=malformed_count,
        unreadable=unreadable,
        experiments=tuple(names),
    )


def _decode_part(records: RecordStore, part: ManifestPart) -> tuple[list[Task], list[tuple[Task, InvalidMessage]]]:
    """The tasks of a part, and what stands for its lines that cannot be decoded."""
    tasks, malformed_lines = [], []
    for line in records.read_part(part):
        task, problem = read_line(line, part.experiment)
        if problem is None:
            tasks.append(task)
        else:
            malformed_lines.append((task, InvalidMessage(task.id, line, problem.message)))
    return tasks, malformed_lines


def _bury(records: RecordStore, lines: Iterable[tuple[Task, InvalidMessage]], now: datetime) -> None:
    for task, invalid in lines:
        settlement = malformed(task, invalid, now=now)
        with suppress(RecordExists):
            settle_record(records, settlement.record, settlement.mark)
