"""Sends tasks: straight into the file of an embedded queue, or as parts of a manifest that are published and marked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, TypeAlias

from runtime.client.resolve_id import FindsTasks
from runtime.client.tasks.build import OWN_CODE
from runtime.errors import InvalidTask, PartTaken, RuntimeFailure
from runtime.queues.base import Queue
from runtime.records.base import ManifestPart, RecordExists, RecordStore, settle_record
from runtime.records.control_commands import FIRST_OWN_NUMBER
from runtime.records.order_scope import own_key, read_keys
from runtime.system import system
from runtime.tasks.entry_text import without_argv
from runtime.tasks.history import InvalidMessage
from runtime.tasks.id_set import IdSet, task_key
from runtime.tasks.model import Task
from runtime.tasks.wire import decode_task, encode_task, read_line

PART_TASKS: Final = 10_000
PUT_TASKS: Final = 4_000
"""Tasks put into an embedded file at once, while its lock is held."""
NAMED_TASKS: Final = 100
"""Most tasks of a submission whose ids are kept, so that each task is waited for."""
PARTS_LOOKED_AT: Final = 8
"""Parts read to find the code of known tasks."""

_READ_AT_ONCE: Final = 4

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of tasks processed since the last call."""


class SubmissionCounts:
    def __init__(self, progress: Progress) -> None:
        self.new = self.known = self.same = self.same_other = self.skipped = self.resumed = 0
        self.named: dict[tuple[str, int], None] | None = {}
        """The first distinct tasks in their order; None once they are too many to name."""
        self.looked_at: dict[str, Task] = {}
        """Some tasks that may be known, by id, to compare their code and content."""
        self.first: dict[int, Task] = {}
        """The first distinct tasks of the input by key, to find repetitions."""
        self.advance = progress

    def look_at(self, tasks: Sequence[Task]) -> None:
        """Keep as many tasks as fit, evenly from the given ones."""
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


class Direct:
    """Sends into a queue that holds the tasks in its own file and knows which ones are new."""

    part_tasks = PUT_TASKS

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.known = IdSet()

    def resume(self, counted: SubmissionCounts) -> None:
        """Do nothing: a put is one transaction, so none can be half done."""

    def send(self, tasks: Sequence[Task], counted: SubmissionCounts) -> None:
        result = self._queue.put(tasks)
        counted.new += result.new
        counted.known += result.known
        if result.known:
            counted.look_at(tasks)


class ThroughManifest:
    """Sends part by part: listed, published, marked as sent."""

    part_tasks = PART_TASKS

    def __init__(self, queue: Queue, experiment: str) -> None:
        self._queue = queue
        self._records = queue.records
        self._experiment = experiment
        self._read: set[str] = set()
        self._next = 0
        self._elsewhere: str | None = None
        """This queue, if the experiment's first tasks are in another."""
        self.known = IdSet()
        """Tasks that the manifest listed when it was last read, without those of this submission."""

    def resume(self, counted: SubmissionCounts) -> None:
        """Read the manifest, and publish parts that an interrupted submission left in it."""
        self._records.check()
        # The experiment is named before its first part, so that a running submission can be seen and cancelled.
        ours = self._queue.name
        home = self._records.put_experiment(self._experiment, queue=ours)
        self._elsewhere = None if home == ours else ours
        fresh = [part for part in self._records.parts(self._experiment) if part.name not in self._read]
        self._read.update(part.name for part in fresh)
        in_order = [_number(part) for part in fresh if _number(part) < FIRST_OWN_NUMBER]
        self._next = max([self._next, *(number + 1 for number in in_order)])
        to_read = []
        for part in fresh:
            if not part.sent and not part.is_in(ours, home):
                # The same submission puts it into its own queue. Until then its tasks are not known to be in any.
                self._records.record_late(part)
            elif not part.sent:
                counted.resumed += self._publish_again(part)
            elif (own := own_key(part.name)) is not None:
                self.known.add(own)
            else:
                to_read.append(part)
        for keys in self._read_keys(to_read):
            for key in keys:
                self.known.add(key)

    def send(self, tasks: Sequence[Task], counted: SubmissionCounts) -> None:
        own = task_key(tasks[0].id, tasks[0].generation)
        alone = len(tasks) == 1 and own >= FIRST_OWN_NUMBER
        wanted = list(tasks)
        while wanted:
            try:
                self._send_part(own if alone else self._next, wanted)
            except PartTaken:
                # Another submission lists this part, or claimed it and died before it wrote it.
                self._next += not alone
                alone = False
                self.resume(counted)
                wanted = [task for task in tasks if task_key(task.id, task.generation) not in self.known]
            else:
                break
        counted.new += len(wanted)
        counted.known += len(tasks) - len(wanted)

    def _send_part(self, number: int, tasks: Sequence[Task]) -> None:
        lines = [encode_task(task) for task in tasks]
        part = self._records.put_part(self._experiment, number, lines, queue=self._elsewhere)
        self._read.add(part.name)
        if not part.sent:
            self._queue.put(tasks)
            self._records.mark_sent(part)
        if number < FIRST_OWN_NUMBER:
            self._next = number + 1

    def _publish_again(self, part: ManifestPart) -> int:
        tasks, malformed_lines = decode_part(self._records, part)
        bury_lines(self._records, malformed_lines, system.now())
        self._queue.put(tasks)
        self._records.mark_sent(part)
        for task in tasks:
            self.known.add(task_key(task.id, task.generation))
        return len(tasks)

    def _read_keys(self, parts: Sequence[ManifestPart]) -> Iterator[Sequence[int]]:
        if not parts:
            return

        with system.pool(_READ_AT_ONCE, name="manifest") as pool:
            # A few at a time: keys wait in memory until they are taken.
            for start in range(0, len(parts), 4 * _READ_AT_ONCE):
                some = parts[start : start + 4 * _READ_AT_ONCE]
                yield from pool.map(lambda part: read_keys(self._records, part), some)


def find_kept_code(records: RecordStore, experiment: str, tasks: Mapping[str, Task]) -> tuple[str | None, int]:
    """Return the earlier code of one of `tasks` if it differs from now's, and how many tasks had other content."""
    code, others = None, 0
    if not tasks:
        return code, others
    with suppress(RuntimeFailure):  # All tasks are submitted: if the store fails now, only this report is missing.
        for stored in _stored(records, experiment, tasks):
            now = tasks[stored.id]
            if code is None and now.snapshot is not None and stored.snapshot != now.snapshot:
                code = stored.snapshot or OWN_CODE
            others += content_of(stored) != content_of(decode_task(encode_task(now)))
    return code, others


def content_of(task: Task) -> tuple[object, ...]:
    """Return the parts of a task that define its work, without its code, submitter and time."""
    return (
        without_argv(task.entry),
        task.resources,
        task.timeout,
        task.max_failures,
        task.outputs,
        task.priority,
        task.environment,
        task.container,
        task.secrets,
        task.artifacts,
        task.notify,
        task.extra,
    )


def _stored(records: RecordStore, experiment: str, tasks: Mapping[str, Task]) -> Iterator[Task]:
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


def decode_part(records: RecordStore, part: ManifestPart) -> tuple[list[Task], list[tuple[Task, InvalidMessage]]]:
    """Return the tasks of a part, and stand-ins for its lines that cannot be decoded."""
    tasks, malformed_lines = [], []
    for line in records.read_part(part):
        task, problem = read_line(line, part.experiment)
        if problem is None:
            tasks.append(task)
        else:
            malformed_lines.append((task, InvalidMessage(task.id, line, problem.message)))
    return tasks, malformed_lines


def bury_lines(records: RecordStore, lines: Iterable[tuple[Task, InvalidMessage]], now: datetime) -> None:
    from runtime.tasks.retry_policy import malformed  # It loads `random`, and few submissions have such lines.

    for task, invalid in lines:
        settlement = malformed(task, invalid, now=now)
        with suppress(RecordExists):
            settle_record(records, settlement.record, settlement.mark)
