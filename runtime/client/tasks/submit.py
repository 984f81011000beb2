"""Submitting: tasks → manifest parts → queue → acknowledged; continues interrupted submissions.

If the queue's own file holds the tasks, one put is enough. Otherwise each part of at most 10,000 tasks is written to the
experiment's manifest, published, and marked as sent, in that order, and only then acknowledged. So every task of a
manifest can be published again (`repair`), and the same submission run again continues where it stopped: a task that a
manifest lists is not listed a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from runtime.client.tasks.build import (
    LISTS,
    TaskOptions,
    Work,
    check_argument,
    choose_container,
    experiment_of,
    is_one,
    make_one,
    make_tasks,
    module_folder,
    moment_after,
    open_target,
    read_resources,
    submitter,
)
from runtime.client.tasks.environment import take_packages
from runtime.client.tasks.kept_stacks import KeptStack
from runtime.client.tasks.pickled_calls import check_packed, pack_work
from runtime.client.tasks.publish import (
    PART_TASKS,
    Direct,
    Progress,
    SubmissionCounts,
    ThroughManifest,
    content_of,
    find_kept_code,
)
from runtime.client.tasks.task_snapshot import take_code
from runtime.clock import describe_skew
from runtime.config import load_settings
from runtime.errors import InvalidValue, NotPossible, RequestRefused, RuntimeFailure
from runtime.queues.base import Queue, QueueTraits
from runtime.records.base import RecordStore
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.tasks.id_set import IdSet, task_key
from runtime.tasks.model import (
    DEFAULT_MAX_FAILURES,
    Resources,
    Task,
    check_new_experiment,
)
from runtime.units import Span, count_noun, read_span

if TYPE_CHECKING:
    from runtime.client.values import End
    from runtime.records.blobs.bucket import BucketBlobs
    from runtime.tasks.container import GivenMount

PARALLEL: Final = 32
"""Requests to a bucket at once, to look for outputs that exist."""

_CheckSecrets: TypeAlias = Callable[[Sequence[str]], None]
_compared: set[str] = set()
"""Record stores whose clock this process has compared with its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The result of a submission; every task in it is durable."""

    experiment: str
    queue: str
    stack: str | None = None
    new: int = 0
    known: int = 0
    same: int = 0
    """Inputs that are one task with an earlier input: the same key, or the same work without a key."""
    known_other: int = 0
    """Known tasks that were submitted with other content, which stays. A lower bound beyond `NAMED_TASKS` known ones."""
    same_other: int = 0
    """Repeated inputs with other content than the first, which stays."""
    skipped: int = 0
    resumed: int = 0
    """Tasks that an earlier, interrupted submission had not published."""
    snapshot: str | None = None
    """Content id of the code that new tasks run, unless they name one; None for the workers' own."""
    environment: str | None = None
    """Content id of the packages that new tasks run with, unless they name one; None for the workers' own."""
    kept_code: str | None = None
    """The code of a known task, if it differs from the code submitted now: a content id, or `OWN_CODE`."""
    tasks: tuple[tuple[str, int], ...] | None = None
    """Id and generation of each distinct task that was not skipped; None beyond `NAMED_TASKS`."""
    asked: Queue | str | None = field(default=None, repr=False, compare=False)
    """The queue that the caller named or passed, for `wait`."""

    single: bool = field(default=False, repr=False, compare=False)
    """Whether one task was submitted, and no list."""
    pickles: bool = field(default=False, repr=False, compare=False)
    """Whether the task is a packed call, whose value may be a pickle."""

    def result(self, timeout: Span | None = None) -> Any:
        """Wait for the end and return what the function returned; of a list the values, in the order of submission.

        Raises `CallFailed` for a task that did not succeed, `CancelledError`, and `TimeoutError`.
        """
        values = [end.take() for end in self._await_ends(timeout)]
        return values[0] if self.single else values

    def exception(self, timeout: Span | None = None) -> BaseException | None:
        """Wait for the end and return what `result` would raise; None if there is a value."""
        from concurrent.futures import CancelledError

        from runtime.client.values import CallFailed

        try:
            for end in self._await_ends(timeout):
                end.take()
        except (CallFailed, CancelledError) as problem:
            return problem
        return None

    def _await_ends(self, timeout: Span | None) -> list[End]:
        from runtime.client.tasks import (
            call_results,  # here as below, since few programs that submit wait for their tasks
        )

        if self.kept_code is not None:
            CleanLogger(__name__).warning(
                "experiment `%s` has tasks that were submitted before with other code, %s, and these are their ends; for new ones,"
                " give them another `key` or `experiment`",
                self.experiment,
                self.kept_code,
            )
        return call_results.await_ends(self, timeout)

    def logs(self) -> str:
        """Return what the tasks have printed so far, every attempt in turn."""
        from runtime.client.tasks import call_results

        return call_results.read_printed(self)

    def cancel(self) -> None:
        """Cancel the tasks that have not ended, wherever they run."""
        from runtime.client.tasks import call_results

        call_results.cancel_tasks(self)

    @property
    def ids(self) -> tuple[str, ...] | None:
        return None if self.tasks is None else tuple(identity for identity, _ in self.tasks)

    @property
    def count(self) -> int:
        return self.new + self.known


def submit(
    work: Work | Iterable[Work],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    experiment: str | None = None,
    queue: str | Queue | None = None,
    stack: str | None = None,
    key: str | None = None,
    timeout: Span | None = None,
    max_failures: int = DEFAULT_MAX_FAILURES,
    expires: Span | None = None,
    delay: Span | None = None,
    priority: int = 0,
    resources: Resources | Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    secrets: Sequence[str] | None = None,
    capture: Mapping[str, str | Path] | None = None,
    capture_every: Span | None = None,
    reuse: Mapping[str, str | Path] | None = None,
    notify: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    notify_on: str | Sequence[str] | None = None,
    snapshot: str | Path | bool | None = None,
    environment: str | Path | bool | None = None,
    with_packages: Sequence[str] = (),
    image: str | None = None,
    mounts: Sequence[GivenMount] = (),
    skip_existing: bool = False,
    progress: Progress | None = None,
) -> Submission:
    """Put work into a queue; on return every task is durable and will be run.

    `work` is a function with its `args` and `kwargs`, a workflow `(project, name, args)`, a `Task`, an object of the wire format, or an iterable of these, which is read as it is
    submitted and may be as long as you like. `expires` and `delay` count from now; durations are a `timedelta`,
    seconds, or text such as "2h". `secrets` are names of the stack's secrets that attempts get: by default those that the
    stack gives to each attempt, with an empty list none. `capture` names files and folders by tag that attempts save while
    they run, each `capture_every`, and `reuse` artifacts that they find in `artifacts/<tag>` (docs/artifacts.md).
    `notify` names who hears of the end of each task, or with `notify_on="complete"` of all of them (docs/notifications.md).

    The code of the folder it is called from goes with the work as it is now, and attempts run it: that of the
    project around the working directory, or around a function's module if that lies elsewhere. `snapshot` names another
    folder or the content id of a snapshot; False runs whatever code the workers have.

    `environment` is what attempts run with: the path of a lock file, "frozen" for the packages of this Python, or "none" for
    the workers' own, the default; `with_packages` are pins beside those. Workers make it once on each machine. `image` is
    a container image that attempts run in instead, and `mounts` what they find of the worker's machine there, such as
    "/data/imagenet:/data" or "/out:/out:rw".

    Calling it again with the same work submits nothing twice; tasks that are known keep the code they were submitted
    with.
    """
    now = system.now()
    if type(args) not in LISTS:
        check_argument("args", args)
    if type(outputs) not in LISTS:
        check_argument("outputs", outputs)
    if kwargs is not None:
        check_argument("kwargs", kwargs)
    if experiment is not None:
        check_argument("experiment", experiment)
    if resources is not None:
        check_argument("resources", resources)
    if secrets is not None:
        check_argument("secrets", secrets)
    if capture is not None:
        check_argument("capture", capture)
    if reuse is not None:
        check_argument("reuse", reuse)
    if snapshot is not None:
        check_argument("snapshot", snapshot)
    if environment is not None:
        check_argument("environment", environment)
    if with_packages != ():
        check_argument("with_packages", with_packages)
    container = None
    if image is not None or mounts:
        container, environment = choose_container(image, mounts, environment, with_packages)
    if progress is not None:
        check_argument("progress", progress)
    experiment = check_new_experiment(experiment or experiment_of(work))
    timeout = read_span(timeout, "timeout")
    expires_at = None if expires is None else moment_after(now, expires, "expires")
    not_before = None if delay is None else moment_after(now, delay, "delay")
    resources = read_resources(resources)
    with open_target(queue, stack) as opened:
        kept, target = (opened, opened.queue) if isinstance(opened, KeptStack) else (None, opened)
        start = module_folder(work)
        packed = pack_work(work, args, kwargs)
        if kept is not None and packed is None:
            code = kept.take_code(snapshot, start)
        else:
            more = packed.more if packed else {}
            code = take_code(snapshot, target.records, load_settings(), start=start, more=more)
        if packed is not None:
            check_packed(packed.function, snapshot, code)
            work, args, kwargs = {"function": packed.entry.function, "args": list(packed.entry.args)}, (), None
        settings = kept.stack.settings if kept is not None else load_settings()
        packages = take_packages(environment, target.records, settings, code, extra=with_packages)
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
            "environment": packages.id,
            "container": container,
            "secrets": None if secrets is None else tuple(secrets),
            "submitted_by": submitter(),
            "submitted_at": now,
        }
        if capture or reuse:
            from runtime.client.artifacts import make_artifacts

            terms["artifacts"] = make_artifacts(capture, capture_every, reuse, target.records, experiment)
        check_secrets = kept.stack.check_secrets if kept else None
        hearers = None
        if notify is not None or notify_on is not None:
            from runtime.client.tasks.notify import read_hearers

            hearers = read_hearers(notify, notify_on, settings.project.notify)
            hearers.check(check_secrets)
            terms["notify"] = hearers.of_tasks
        said: dict[str, Any] = {
            "stack": kept.stack.name if kept else None,
            "snapshot": code.snapshot,
            "environment": packages.id,
            "asked": queue,
            "single": is_one(work),
            "pickles": packed is not None,
        }
        if target.records.holds_tasks and not skip_existing and said["single"]:
            done = _submit_one(make_one(work, terms, args, kwargs), target, check_secrets, said)
            if progress:
                progress(1)
        else:
            tasks = make_tasks(work, TaskOptions(**terms), args=args, kwargs=kwargs)
            sent = submit_tasks(
                tasks,
                target,
                experiment=experiment,
                skip_existing=skip_existing,
                progress=progress,
                check_secrets=check_secrets,
            )
            done = replace(sent, **said)
        if hearers is not None and done.count:
            hearers.watch(target, experiment, new=bool(done.new or done.resumed))
        if done.new:
            _report_skew(target.records)
        return done


def _submit_one(task: Task, queue: Queue, check_secrets: _CheckSecrets | None, said: Mapping[str, Any]) -> Submission:
    """Submit one task into a queue whose file holds the tasks, as most calls of a program do."""
    _check_task(task, queue, check_secrets)
    result = queue.put([task])
    kept_code, known_other = (
        find_kept_code(queue.records, task.experiment, {task.id: task}) if result.known else (None, 0)
    )
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


def _report_skew(records: RecordStore) -> None:
    """Log once in this process if its clock and the record store's differ by much."""
    if records.url in _compared:
        return
    _compared.add(records.url)
    with suppress(RuntimeFailure):
        if said := describe_skew(records.skew(), "the record store's"):
            CleanLogger(__name__).warning("this machine's clock is %s", said)


def submit_tasks(
    tasks: Iterable[Task],
    queue: Queue,
    *,
    experiment: str,
    skip_existing: bool = False,
    progress: Progress | None = None,
    check_secrets: _CheckSecrets | None = None,
) -> Submission:
    """Submit a stream of tasks of one experiment; memory stays at 16 bytes a task.

    `check_secrets` refuses names of secrets that no attempt can get; only the queue's stack knows them.

    If a task is refused, its part is not submitted, earlier parts stay, and the error has both counts; run again, the
    submission continues where it stopped. Also raises `QueueUnavailable` and `StoreUnavailable`.
    """
    counted = SubmissionCounts(progress or (lambda _: None))
    sender: _Sender = Direct(queue) if queue.records.holds_tasks else ThroughManifest(queue, experiment)
    existing = _ExistingOutputs() if skip_existing else None
    sender.resume(counted)
    for part in _cut(_admitted(tasks, queue, sender.known, counted, check_secrets), sender.part_tasks, counted):
        wanted = existing.drop_done(part) if existing else part
        if len(wanted) < len(part):
            counted.skip(part, wanted)
        if wanted:
            sender.send(wanted, counted)
        counted.advance(len(part))
    kept_code, known_other = find_kept_code(queue.records, experiment, counted.looked_at)
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


class _ExistingOutputs:
    """Looks for declared outputs, for `--skip-existing`: paths, `file:` URLs and buckets, each opened once."""

    def __init__(self) -> None:
        self._buckets: dict[str, BucketBlobs] = {}

    def drop_done(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks that declare no outputs, or miss one of them."""
        urls = {url for task in tasks for url in task.outputs}
        there = self._find(sorted(urls))
        return [task for task in tasks if not task.outputs or not all(url in there for url in task.outputs)]

    def _find(self, urls: Sequence[str]) -> set[str]:
        remote = [url for url in urls if url.startswith(("gs://", "s3://"))]
        there = {url for url in urls if not url.startswith(("gs://", "s3://")) and _on_disk(url)}
        if remote:
            for url in remote:
                self._open_bucket(url)

            with system.pool(PARALLEL, name="existing") as pool:
                there |= {url for url, found in zip(remote, pool.map(self._in_bucket, remote), strict=True) if found}
        return there

    def _in_bucket(self, url: str) -> bool:
        """Whether an object of that name exists, or any object below a URL that ends in a slash."""
        key = url.split("/", 3)[3] if url.count("/") > 2 else ""
        first = next(iter(self._open_bucket(url).list_keys(key)), None)
        return first is not None and (first == key or key.endswith("/"))

    def _open_bucket(self, url: str) -> BucketBlobs:
        from runtime.records.blobs.bucket import BucketBlobs

        name = "/".join(url.split("/", 3)[:3])
        if name not in self._buckets:
            self._buckets[name] = BucketBlobs(name)
        return self._buckets[name]


def _on_disk(url: str) -> bool:
    if "://" in url and not url.startswith("file:"):
        raise InvalidValue("output", url, "a path or a file:, gs:// or s3:// URL")
    return Path(unquote(urlsplit(url).path) if url.startswith("file:") else url).exists()


def _admitted(
    tasks: Iterable[Task], queue: Queue, known: IdSet, counted: SubmissionCounts, check_secrets: _CheckSecrets | None
) -> Iterator[Task]:
    """Yield each new task of the input, after checking it."""
    seen, first = IdSet(), counted.first
    for task in tasks:
        _check_task(task, queue, check_secrets)
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
            counted.same_other += key in first and content_of(first[key]) != content_of(task)
        counted.name(task)
        counted.advance(1)


def _check_task(task: Task, queue: Queue, check_secrets: _CheckSecrets | None) -> None:
    """Check that a submission may begin this task, that the queue keeps its priority and the stack has its secrets."""
    if task.generation != 1:
        raise NotPossible(
            f"task `{task.id}` is of generation {task.generation}, and a submission begins the first",
            hint=f"run it again with `runtime retry {task.id}`, or leave `generation` out",
        )
    if task.priority:
        check_priority(task.priority, queue.name, queue.traits)
    if task.secrets and check_secrets is not None:
        check_secrets(task.secrets)


def check_priority(priority: int, queue: str, traits: QueueTraits) -> None:
    """Raise `NotPossible` if the queue would drop the priority."""
    if priority and not traits.priorities:
        raise NotPossible(
            f"queue `{queue}` keeps no priorities, and a task asks for {priority}",
            facts=[f"a {traits.kind} queue delivers in an order of its own"],
            hint="leave `priority` out, or use a queue of its own for what is urgent",
        )


def _cut(tasks: Iterator[Task], size: int, counted: SubmissionCounts) -> Iterator[list[Task]]:
    """Yield lists of at most `size`. The error of a refused task gets the counts of tasks before it."""
    part: list[Task] = []
    try:
        for task in tasks:
            part.append(task)
            if len(part) == size:
                yield part
                part = []
    except RequestRefused as problem:
        stands, not_sent = counted.new + counted.known, len(part)
        fact = (
            f"{count_noun(stands, 'task')} before it {'is' if stands == 1 else 'are'} submitted and {'stands' if stands == 1 else 'stand'}"
            if stands
            else "nothing was submitted"
        )
        if stands and not_sent:
            fact += f"; {not_sent:,} after those were not submitted"
        problem.facts = (*problem.facts, fact)
        raise
    if part:
        yield part


_Sender: TypeAlias = Direct | ThroughManifest
