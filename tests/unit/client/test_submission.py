"""Submitting: no task is listed twice, none is lost wherever it stops, and it reports each task's outcome."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.client.tasks import publish
from runtime.client.tasks.build import TaskOptions, make_tasks
from runtime.client.tasks.repair import repair
from runtime.client.tasks.submit import Submission, submit, submit_tasks
from runtime.client.tasks.wait import wait
from runtime.end_reasons import EndReason
from runtime.errors import (
    InfrastructureFailure,
    InvalidTask,
    InvalidValue,
    NotPossible,
    PartTaken,
    QueueUnavailable,
    RequestRefused,
    StoreUnavailable,
    UnknownName,
    WorkFailed,
)
from runtime.queues.base import PutResult, Queue, QueueTraits
from runtime.queues.memory import MemoryQueue
from runtime.queues.sqlite.queue import SqliteQueue, open_sqlite
from runtime.records.base import INLINE_BYTES, ManifestPart, WorkerSeen
from runtime.records.blobs.folder import FolderBlobs
from runtime.records.memory import MemoryRecords
from runtime.records.sqlite_file import EmbeddedFile
from runtime.records.store import BlobRecords
from runtime.tasks.history import Record, mark_of
from runtime.tasks.model import CommandEntry, FunctionEntry, Resources, Task, TaskState, WorkflowEntry
from runtime.tasks.wire import decode_task, encode_task
from runtime.testing import FakeClock, sample_task

EXPERIMENT = "sample"
NOW = datetime(2026, 11, 28, tzinfo=UTC)


def tasks_of(*keys: object) -> list[Task]:
    return [sample_task(str(key)) for key in keys]


class Forgetful:
    """A queue that only delivers, like Pub/Sub: it stores tasks, duplicates included, and can fail."""

    traits = QueueTraits(kind="forgetful", tracks_holders=False, remote=True, priorities=False)
    name = "default"

    def __init__(self, records: MemoryRecords) -> None:
        self.records = records
        self.given: list[str] = []
        self.tasks: list[Task] = []
        self.fail_after: int | None = None

    def put(self, tasks: Sequence[Task]) -> PutResult:
        for task in tasks:
            if self.fail_after is not None and len(self.given) >= self.fail_after:
                raise QueueUnavailable("the queue is away")
            self.given.append(task.id)
            self.tasks.append(task)
        return PutResult(len(tasks), 0)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"submit has no business with {name}")


@pytest.fixture
def records() -> MemoryRecords:
    return MemoryRecords()


@pytest.fixture
def queue(records: MemoryRecords) -> Forgetful:
    return Forgetful(records)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish.ThroughManifest, "part_tasks", 4)
    monkeypatch.setattr(publish.Direct, "part_tasks", 4)


def listed(records: MemoryRecords, experiment: str = EXPERIMENT) -> list[str]:
    return [decode_task(line).id for part in records.parts(experiment) for line in records.read_part(part)]


def put(queue: Any, tasks: Any, **options: Any) -> Submission:
    return submit_tasks(tasks, queue, experiment=EXPERIMENT, **options)


# with a manifest


@pytest.mark.usefixtures("small_parts")
def test_parts_are_listed_published_and_marked(queue: Forgetful, records: MemoryRecords) -> None:
    done = put(queue, tasks_of(*range(10)))

    assert (done.new, done.known, done.same, done.resumed) == (10, 0, 0, 0)
    assert [(part.count, part.sent) for part in records.parts(EXPERIMENT)] == [(4, True), (4, True), (2, True)]
    assert listed(records) == queue.given == [task.id for task in tasks_of(*range(10))]
    assert done.ids == tuple(queue.given)
    assert records.experiments()[0].queue == "default"


@pytest.mark.usefixtures("small_parts")
def test_the_same_input_again_is_known_whatever_time_it_is(queue: Forgetful, records: MemoryRecords) -> None:
    put(queue, tasks_of(*range(10)))
    later = [replace(task, submitted_at=datetime.now(UTC)) for task in tasks_of(*range(10))]

    again = put(queue, later)

    assert (again.new, again.known) == (0, 10)
    assert len(queue.given) == len(listed(records)) == 10
    assert again.ids == tuple(queue.given)


@pytest.mark.usefixtures("small_parts")
def test_changed_input_adds_only_what_is_new(queue: Forgetful, records: MemoryRecords) -> None:
    put(queue, tasks_of(*range(10)))

    changed = put(queue, tasks_of(100, *range(3, 12), 101, 102, 103, 104))

    assert (changed.new, changed.known) == (7, 7)
    assert len(set(queue.given)) == len(queue.given) == 17
    assert sorted(listed(records)) == sorted(queue.given)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("compared", [10_000, 2])
def test_identical_tasks_of_one_input_are_one(
    queue: Forgetful, records: MemoryRecords, monkeypatch: pytest.MonkeyPatch, compared: int
) -> None:
    monkeypatch.setattr("runtime.client.tasks.submit.PART_TASKS", compared)

    done = put(queue, tasks_of(1, 2, 1, 1, 3, 2, 4, 5, 5))

    assert (done.new, done.same) == (5, 4)
    assert len(listed(records)) == 5


def test_later_generation_is_refused(queue: Forgetful) -> None:
    (task,) = tasks_of(1)

    with pytest.raises(NotPossible, match="is of generation 2, and a submission begins the first") as refused:
        put(queue, [task, replace(task, generation=2)])

    assert f"runtime retry {task.id}" in str(refused.value.hint)
    assert queue.tasks == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("fail_after", range(10))
def test_submission_that_failed_anywhere_is_complete_after_it_is_run_again(
    queue: Forgetful, records: MemoryRecords, fail_after: int
) -> None:
    queue.fail_after = fail_after
    with pytest.raises(QueueUnavailable):
        put(queue, tasks_of(*range(10)))
    queue.fail_after = None

    done = put(queue, tasks_of(*range(10)))

    wanted = {task.id for task in tasks_of(*range(10))}
    assert set(queue.given) == wanted
    assert sorted(listed(records)) == sorted(wanted)
    assert all(part.sent for part in records.parts(EXPERIMENT))
    # Only the part being published at the failure may be delivered twice.
    assert len(queue.given) - len(wanted) <= 4
    assert done.resumed == (2 if fail_after >= 8 else 4)
    assert done.new + done.known == 10


class Crash(BaseException):
    pass


@pytest.mark.usefixtures("small_parts")
def test_submission_killed_at_any_call_of_the_store_is_complete_after_it_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Die at every write of the store, before or after it takes effect."""
    wanted = [task.id for task in tasks_of(*range(10))]
    died = 0
    for fatal in itertools.count():
        records = MemoryRecords()
        queue = Forgetful(records)
        with monkeypatch.context() as patch:
            left = crash_at_call(patch, records, fatal)
            try:
                put(queue, tasks_of(*range(10)))
            except Crash:
                died += 1
        assert len(listed(records)) == len(set(listed(records)))

        put(queue, tasks_of(*range(10)))

        assert sorted(listed(records)) == sorted(wanted)
        assert set(queue.given) == set(wanted)
        assert all(part.sent for part in records.parts(EXPERIMENT))
        if left() >= 0:
            break
    assert died >= 20


def crash_at_call(patch: pytest.MonkeyPatch, records: MemoryRecords, fatal: int) -> Callable[[], int]:
    """Die at write number `fatal // 2`, after it took effect if `fatal` is odd; return a count of the writes left."""
    countdown = fatal // 2

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal countdown
            countdown -= 1
            if countdown == -1 and fatal % 2 == 0:
                raise Crash
            result = function(*args, **kwargs)
            if countdown == -1:
                raise Crash
            return result

        return call

    for name in ("create", "put"):
        patch.setattr(records.blobs, name, wrap(getattr(records.blobs, name)))
    return lambda: countdown


@pytest.fixture(params=["manifest", "sqlite"])
def either(request: pytest.FixtureRequest, queue: Forgetful, tmp_path: Path) -> Any:
    """Either a queue whose records list submitted tasks, or one whose file holds them."""
    return queue if request.param == "manifest" else open_sqlite(tmp_path / "tasks.db")[0]


def test_same_key_with_other_content_is_counted_and_the_first_stands(either: Any) -> None:
    def keyed(*words: str, **fields: Any) -> list[Task]:
        return [sample_task(str(n), entry=CommandEntry((word,)), **fields) for n, word in enumerate(words)]

    put(either, keyed("a", "b", "c"))
    later = datetime.now(UTC)
    again = put(either, keyed("a", "b", "c", submitted_at=later, not_before=later))
    other = put(either, keyed("a", "other", "another", "new"))
    limits = put(either, keyed("a", timeout=timedelta(hours=1)))
    secrets = put(either, keyed("a", secrets=()))

    assert [(done.new, done.known, done.known_other) for done in (again, other, limits, secrets)] == [
        (0, 3, 0),
        (1, 3, 2),
        (0, 1, 1),
        (0, 1, 1),
    ]


def test_same_key_twice_in_one_input_with_other_content_is_counted(either: Any) -> None:
    one, same, other = (sample_task("k", entry=CommandEntry((word,))) for word in ("a", "a", "b"))

    done = put(either, [one, same, other])

    assert (done.new, done.same, done.same_other) == (1, 2, 1)


def test_content_that_only_its_wire_text_changed_is_the_same(either: Any) -> None:
    task = sample_task("k", entry=FunctionEntry("m:f", ((1, 2), {"a": (3,)})))

    assert [put(either, [task]).known_other for _ in range(2)] == [0, 0]


def test_single_tasks_are_known_by_the_names_of_their_parts(
    queue: Forgetful, records: MemoryRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in range(20):
        put(queue, tasks_of(key))
    read, read_part = [], records.read_part
    monkeypatch.setattr(records, "read_part", lambda part: read.append(part) or read_part(part))

    assert put(queue, tasks_of(7)).known == 1
    assert put(queue, tasks_of(7, 8, 100)).new == 1
    assert len(read) == 3  # The known tasks, to find out whether their content differs.
    assert len(records.parts(EXPERIMENT)) == 21
    assert len(queue.given) == 21


def test_single_task_that_was_claimed_and_never_listed_is_submitted_all_the_same(
    queue: Forgetful, records: MemoryRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = tasks_of(1)
    original = records.put_part

    def taken(experiment: str, index: int, lines: Sequence[str], **named: Any) -> ManifestPart:
        if index >= 1 << 32:
            raise PartTaken(experiment, index)
        return original(experiment, index, lines, **named)

    monkeypatch.setattr(records, "put_part", taken)

    assert put(queue, [task]).new == 1
    assert queue.given == listed(records) == [task.id]


def test_part_that_arrives_after_its_tasks_were_submitted_again_counts_them_once(
    queue: Forgetful, records: MemoryRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, late = records.blobs.create, list[tuple[str, bytes]]()

    def lose(key: str, data: bytes) -> bool:
        if key.endswith(".jsonl") and not late:
            late.append((key, data))
            raise StoreUnavailable("no answer")
        return create(key, data)

    monkeypatch.setattr(records.blobs, "create", lose)
    with pytest.raises(StoreUnavailable):
        put(queue, tasks_of(1, 2))
    put(queue, [replace(task, submitted_at=NOW) for task in tasks_of(1, 2)])
    create(*late[0])
    put(queue, tasks_of(3))

    totals = records.totals(EXPERIMENT, exact=True)

    assert [part.late for part in records.parts(EXPERIMENT)].count(True) == 1
    assert (totals.submitted, len(listed(records))) == (3, 5)


@pytest.mark.usefixtures("small_parts")
def test_two_submissions_of_the_same_tasks_at_once_list_each_task_once(
    records: MemoryRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other submission lists its parts between our look at the manifest and our first part."""
    queue, other = Forgetful(records), Forgetful(records)
    original, interleaved = records.put_part, threading.Event()

    def put_part(experiment: str, index: int, lines: Sequence[str], **named: Any) -> ManifestPart:
        if not interleaved.is_set():
            interleaved.set()
            put(other, tasks_of(*range(2, 8)))
        return original(experiment, index, lines, **named)

    monkeypatch.setattr(records, "put_part", put_part)

    done = put(queue, tasks_of(*range(6)))

    assert (done.new, done.known) == (2, 4)
    assert sorted(listed(records)) == sorted(task.id for task in tasks_of(*range(8)))


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 30), max_size=25), min_size=1, max_size=4), st.lists(st.integers(0, 30)))
def test_any_sequence_of_submissions_lists_each_task_once(inputs: list[list[int]], failures: list[int]) -> None:
    records = MemoryRecords()
    queue = Forgetful(records)
    for keys, fail_after in itertools.zip_longest(inputs, failures[: len(inputs)]):
        queue.fail_after = fail_after
        try:
            done = put(queue, tasks_of(*keys))
        except QueueUnavailable:
            continue
        assert done.new + done.known + done.same == len(keys)
    queue.fail_after = None
    for keys in inputs:
        put(queue, tasks_of(*keys))

    wanted = {task.id for keys in inputs for task in tasks_of(*keys)}
    assert sorted(listed(records)) == sorted(wanted)
    assert set(queue.given) == wanted


@pytest.mark.usefixtures("small_parts")
def test_refused_task_leaves_earlier_parts_and_says_so(queue: Forgetful, records: MemoryRecords) -> None:
    def lines() -> Iterator[Task]:
        yield from tasks_of(*range(6))
        raise InvalidTask("timeout_s", "is -1, expected seconds above 0", line=7)

    with pytest.raises(InvalidTask) as refused:
        put(queue, lines())

    assert refused.value.line == 7
    assert refused.value.facts == ("4 tasks before it are submitted and stand; 2 after those were not submitted",)
    assert len(queue.given) == len(listed(records)) == 4
    assert put(queue, tasks_of(*range(10))).known == 4


def test_priority_is_refused_where_the_queue_keeps_none(queue: Forgetful) -> None:
    with pytest.raises(NotPossible, match="keeps no priorities"):
        put(queue, [sample_task(priority=3)])
    assert queue.given == []


def test_skip_existing_leaves_out_what_is_done(queue: Forgetful, tmp_path: Path) -> None:
    (tmp_path / "a b").touch()
    done, half, todo, silent = (
        sample_task("done", outputs=(f"file:{tmp_path}/a%20b", f"{tmp_path}/a b")),
        sample_task("half", outputs=(f"{tmp_path}/a b", f"{tmp_path}/c")),
        sample_task("todo", outputs=(f"{tmp_path}/c",)),
        sample_task("silent"),
    )

    result = put(queue, [done, half, todo, silent], skip_existing=True)

    assert (result.new, result.skipped) == (3, 1)
    assert result.ids == (half.id, todo.id, silent.id) == tuple(queue.given)


def test_skip_existing_leaves_out_a_single_task_of_an_embedded_queue_too(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    opened, _ = open_sqlite(tmp_path / "tasks.db")
    tasks = [sample_task(name, outputs=(str(tmp_path / name),)) for name in ("there", "missing")]

    done = [submit(task, queue=opened, skip_existing=True, snapshot=False) for task in tasks]

    assert [(one.new, one.skipped) for one in done] == [(0, 1), (1, 0)]
    opened.close()


def test_priority_is_taken_by_a_queue_that_keeps_it(tmp_path: Path) -> None:
    opened, _ = open_sqlite(tmp_path / "tasks.db")

    done = submit(sample_task("1", priority=5), queue=opened, snapshot=False)

    assert done == Submission(experiment=EXPERIMENT, queue="default", new=1, tasks=((opened.peek(1)[0].id, 1),))
    assert (done.known, done.same, done.known_other, done.same_other, done.skipped, done.resumed) == (0,) * 6
    assert opened.peek(1)[0].priority == 5
    opened.close()


def test_skip_existing_looks_into_buckets(queue: Forgetful, moto_server: Any) -> None:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="lab")
    client.put_object(Bucket="lab", Key="out/1.json", Body=b"x")
    names = {"1.json": "1.json", "1": "1", "1.jsonl": "1.jsonl", "folder": "", "2.json": "2.json"}
    tasks = [sample_task(key, outputs=(f"s3://lab/out/{name}",)) for key, name in names.items()]

    result = put(queue, tasks, skip_existing=True)

    assert (result.new, result.skipped) == (3, 2)
    assert result.ids == tuple(task.id for task in tasks if task.key in ("1", "1.jsonl", "2.json"))


def test_output_of_an_unknown_scheme_is_refused(queue: Forgetful) -> None:
    with pytest.raises(RequestRefused):
        put(queue, [sample_task(outputs=("ftp://x/y",))], skip_existing=True)


@pytest.mark.usefixtures("small_parts")
def test_progress_counts_every_task_once(queue: Forgetful) -> None:
    seen: list[int] = []
    put(queue, tasks_of(0, 1))

    put(queue, tasks_of(*range(6), 1, 5, 5), progress=seen.append)

    assert sum(seen) == 9


def test_many_tasks_are_not_named(queue: Forgetful) -> None:
    assert put(queue, tasks_of(*range(publish.NAMED_TASKS))).ids is not None
    assert put(queue, tasks_of(*range(1000, 1001 + publish.NAMED_TASKS))).ids is None


# into the queue's own file


@pytest.mark.usefixtures("small_parts")
def test_embedded_queue_tells_what_it_knows(tmp_path: Path) -> None:
    queue, records = open_sqlite(tmp_path / "q.db")

    first = put(queue, tasks_of(*range(6), 0))
    second = put(queue, tasks_of(*range(4, 10)))

    assert (first.new, first.known, first.same) == (6, 0, 1)
    assert (second.new, second.known, second.same) == (4, 2, 0)
    assert records.totals(EXPERIMENT).counts[TaskState.QUEUED] == 10
    queue.close()
    records.close()


# memory


# the Python API


def importable(x: int, y: int = 2) -> int:
    return x + y


def test_function_is_submitted_by_its_import_path(queue: Any) -> None:
    done = submit(importable, args=[1], kwargs={"y": 3}, queue=queue, timeout="2h", key="k", resources={"gpus": 1})

    (task,) = (decode_task(line) for part in queue.records.parts("default") for line in queue.records.read_part(part))
    assert task.entry == FunctionEntry(f"{__name__}:importable", (1,), {"y": 3})
    assert (task.timeout, task.key, task.resources) == (timedelta(hours=2), "k", Resources(gpus=1))
    assert task.submitted_by
    assert "@" in task.submitted_by
    assert task.submitted_at is not None
    assert abs(datetime.now(UTC) - task.submitted_at) < timedelta(seconds=30)
    assert done.ids == (task.id,)


def local_function() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


def in_main() -> None: ...


in_main.__module__ = "__main__"


@pytest.mark.parametrize("function", [lambda: 1, local_function(), in_main, functools.partial(importable)])
def test_function_that_no_worker_can_import_is_refused_without_a_snapshot(queue: Any, function: Any) -> None:
    with pytest.raises(NotPossible, match="is packed in the snapshot that goes with the task, and `snapshot` is False"):
        submit(function, queue=queue, snapshot=False)


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_arguments_that_json_cannot_hold_are_refused_without_a_snapshot(queue: Any, value: object) -> None:
    with pytest.raises(NotPossible, match="is packed in the snapshot"):
        submit(importable, args=[value], queue=queue, snapshot=False)


def test_arguments_that_cannot_be_packed_are_refused(queue: Any) -> None:
    with pytest.raises(RequestRefused, match="cannot be packed: TypeError"):
        submit(importable, args=[threading.Lock()], queue=queue)


@pytest.mark.parametrize(("given", "kept"), [(None, None), ([], ()), (["hf-token"], ("hf-token",))])
def test_secrets_that_are_left_out_are_the_stacks_and_an_empty_list_is_none(
    queue: Any, given: list[str] | None, kept: tuple[str, ...] | None
) -> None:
    submit(("p", "w"), queue=queue, secrets=given, snapshot=False)

    assert [task.secrets for task in queue.tasks] == [kept]


def test_secret_that_the_stack_lacks_is_refused_and_nothing_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    with pytest.raises(RequestRefused, match="hf-token"):
        submit(("p", "w"), secrets=["hf-token"], snapshot=False)

    assert not (tmp_path / "local.db").exists() or open_sqlite(tmp_path / "local.db")[0].depth().total == 0


def test_every_kind_of_work_makes_its_task(queue: Any) -> None:
    given_task = sample_task("x", experiment="e")
    work = [
        given_task,
        ("proj", "wf", ["--x=1"]),
        ("proj", "wf"),
        importable,
        {"command": ["ls"], "key": "k", "colour": "red"},
        {"project": "p", "workflow": "w", "args": []},
    ]

    submit(iter(work), experiment="e", queue=queue)

    tasks = [decode_task(line) for part in queue.records.parts("e") for line in queue.records.read_part(part)]
    assert [task.entry for task in tasks] == [
        given_task.entry,
        WorkflowEntry("proj", "wf", ("--x=1",)),
        WorkflowEntry("proj", "wf"),
        FunctionEntry(f"{__name__}:importable"),
        CommandEntry(("ls",)),
        WorkflowEntry("p", "w"),
    ]
    assert tasks[0].id == given_task.id
    assert tasks[4].extra == {"colour": "red"}
    assert {task.experiment for task in tasks} == {"e"}
    assert all(task.submitted_by for task in tasks)


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (3, InvalidTask),
        ([3], InvalidTask),
        (("p", "w", [1]), InvalidTask),
        ([{"command": []}], InvalidTask),
        ([{"command": ["ls"], "experiment": "other"}], InvalidTask),
        ({"command": "ls"}, InvalidTask),
    ],
)
def test_work_that_is_none_is_refused(queue: Any, work: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        submit(work, experiment="e", queue=queue)


def test_key_and_arguments_of_a_list_are_refused(queue: Any) -> None:
    with pytest.raises(RequestRefused, match="key"):
        submit([importable], key="k", queue=queue)
    with pytest.raises(RequestRefused, match="args"):
        submit([importable], args=[1], queue=queue)


def test_malformed_item_of_a_list_is_named_by_its_place() -> None:
    with pytest.raises(InvalidTask) as refused:
        list(make_tasks([{"command": ["a"]}, {"command": []}], TaskOptions()))

    assert refused.value.line == 2


def test_task_decides_its_experiment_where_nobody_else_does(queue: Any) -> None:
    assert submit(sample_task(experiment="mine"), queue=queue).experiment == "mine"
    assert submit({"command": ["x"], "experiment": "theirs"}, queue=queue).experiment == "theirs"
    assert submit(("p", "w"), queue=queue).experiment == "default"


def test_expiry_and_delay_count_from_now(queue: Any) -> None:
    submit(("p", "w"), queue=queue, expires=timedelta(days=7), delay=60)

    (task,) = (decode_task(line) for part in queue.records.parts("default") for line in queue.records.read_part(part))
    assert task.expires_at is not None
    assert task.not_before is not None
    assert abs(task.expires_at - datetime.now(UTC) - timedelta(days=7)) < timedelta(seconds=30)
    assert abs(task.not_before - datetime.now(UTC) - timedelta(seconds=60)) < timedelta(seconds=30)


def test_submit_and_wait_open_the_configured_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    done = submit(importable, args=[1])

    assert (done.stack, done.queue, done.new) == ("local", "default", 1)
    waited = wait(done, timeout=0.1)
    assert (waited.complete, waited.totals) == (False, {TaskState.QUEUED: 1})
    queue, records = open_sqlite(tmp_path / "local.db")
    finish(queue, TaskState.SUCCEEDED, value=3)
    queue.close()
    records.close()
    assert wait(done, timeout=240).values() == [3]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "given",
    [
        {"queue": 5}, {"queue": b"x"}, {"queue": Path("/x")}, {"stack": 5}, {"stack": b"x"}, {"experiment": 5},
        {"experiment": b"x"}, {"kwargs": "x"}, {"kwargs": [1]}, {"args": "abc"}, {"args": 5}, {"args": {"a": 1}},
        {"resources": 5}, {"snapshot": 5}, {"snapshot": b"x"}, {"progress": 5}, {"outputs": 5}, {"outputs": None}, {"args": None},
        {"kwargs": nested(2_000)},
    ],
    ids=lambda given: "-".join([*given, type(next(iter(given.values()))).__name__]),
)  # fmt: skip
def test_argument_of_another_kind_is_refused_by_name_and_nothing_is_submitted(
    given: dict[str, Any], tmp_path: Path
) -> None:
    queue, records = open_sqlite(tmp_path / "q.db")

    with pytest.raises(InvalidValue) as refused:
        submit(importable, **{"queue": queue, "snapshot": False, **given})

    assert refused.value.field in given
    assert queue.depth().total == 0
    queue.close()
    records.close()


def test_wait_for_a_queue_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidValue, match="queue"):
        wait("sample", queue=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", range(850, 1_010, 10))
@pytest.mark.parametrize("how", ["args", "kwargs", "wire"])
def test_arguments_nested_however_deep_are_submitted_or_refused(depth: int, how: str, tmp_path: Path) -> None:
    queue, records = open_sqlite(tmp_path / "q.db")
    works: dict[str, tuple[Any, dict[str, Any]]] = {
        "args": (importable, {"args": [nested(depth)]}),
        "kwargs": (importable, {"kwargs": {"number": nested(depth)}}),
        "wire": ({"function": "m:f", "args": [nested(depth)]}, {}),
    }
    work, more = works[how]

    with suppress(RequestRefused):
        submit(work, queue=queue, snapshot=False, **more)
    queue.close()
    records.close()


# waiting


def finish(queue: Queue, state: TaskState, *, count: int = 1, **fields: Any) -> None:
    """Lease tasks and settle each as a worker would."""
    from runtime.tasks.history import Mark, Settlement

    for lease in queue.lease(count, worker="w", ttl=timedelta(minutes=1)):
        now = datetime.now(UTC)
        reason = EndReason.SUCCEEDED if state is TaskState.SUCCEEDED else EndReason.APP_FAILED
        task = lease.task
        record = Record(
            task_id=task.id, generation=1, experiment=task.experiment, state=state, token=lease.token, reason=reason,
            ended_at=now, **fields,
        )  # fmt: skip
        mark = None
        if state is not TaskState.SUCCEEDED:
            mark = Mark(
                task_id=task.id, generation=1, experiment=task.experiment, state=state, marked_at=now, reason=reason,
                message=fields.get("message"), task=task,
            )  # fmt: skip
        queue.settle([Settlement(lease, record, mark)])


def test_wait_returns_when_each_task_has_ended_in_the_order_of_submission(tmp_path: Path) -> None:
    queue, records = open_sqlite(tmp_path / "q.db")
    done = submit([(("p", "w", [str(n)])) for n in range(3)], queue=queue)
    looks: list[dict[TaskState, int]] = []

    def work(totals: Any) -> None:
        looks.append(dict(totals))
        finish(queue, TaskState.SUCCEEDED, value=len(looks))

    waited = wait(done, poll=timedelta(milliseconds=1), progress=work)

    assert waited.complete
    assert waited.failed == 0
    assert waited.values() == [1, 2, 3]
    assert [record.task_id for record in waited.records] == list(done.ids or ())
    assert looks[0] == {TaskState.QUEUED: 3}
    queue.close()
    records.close()


def test_wait_counts_what_did_not_succeed(tmp_path: Path) -> None:
    queue, records = open_sqlite(tmp_path / "q.db")
    done = submit([("p", "w", [str(n)]) for n in range(2)], queue=queue)
    finish(queue, TaskState.FAILED, message="boom")
    finish(queue, TaskState.SUCCEEDED)

    waited = wait(done)

    assert waited.failed == 1
    assert [record.message for record in waited.records] == ["boom", None]
    queue.close()
    records.close()


def test_large_submission_is_waited_for_as_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "NAMED_TASKS", 2)
    queue, records = open_sqlite(tmp_path / "q.db")
    done = submit([("p", "w", [str(n)]) for n in range(5)], queue=queue, experiment="many")
    assert done.ids is None
    finish(queue, TaskState.FAILED, count=2)

    waited = wait(
        done, poll=timedelta(milliseconds=1), progress=lambda totals: finish(queue, TaskState.SUCCEEDED, count=2)
    )

    assert (waited.totals[TaskState.SUCCEEDED], waited.failed, waited.complete) == (3, 2, True)
    with pytest.raises(NotPossible):
        waited.values()
    queue.close()
    records.close()


def test_values_of_what_failed_raise_with_its_reason_unless_asked_not_to(tmp_path: Path) -> None:
    queue, records = open_sqlite(tmp_path / "q.db")
    done = submit([("p", "w", [str(n)]) for n in range(2)], queue=queue)
    finish(queue, TaskState.FAILED, message="Traceback …\nValueError: boom")
    finish(queue, TaskState.SUCCEEDED, value=3)

    waited = wait(done)

    assert done.ids is not None
    with pytest.raises(WorkFailed) as failed:
        waited.values()
    assert failed.value.message == "1 of 2 tasks did not succeed, and have no value"
    assert failed.value.facts == (f"`{done.ids[0]}` failed: ValueError: boom",)
    assert f"runtime explain {done.ids[0]}" in (failed.value.hint or "")
    assert waited.values(none_for_failed=True) == [None, 3]
    queue.close()
    records.close()


LARGE = "x" * (INLINE_BYTES + 1)


def queue_with_folder(path: Path) -> Queue:
    """Open a queue that settles into `records` beside it."""
    (path / "records").mkdir()
    return SqliteQueue(EmbeddedFile(path / "q.db"), BlobRecords(FolderBlobs(path / "records")))


def test_values_too_large_for_a_record_are_read_from_the_store(tmp_path: Path) -> None:
    queue = queue_with_folder(tmp_path)
    done = submit([("p", "w", [str(n)]) for n in range(3)], queue=queue, snapshot=False)
    for value in (LARGE, None, {"rows": [LARGE]}):
        finish(queue, TaskState.SUCCEEDED, value=value)

    waited = wait(done)

    assert waited.values() == [LARGE, None, {"rows": [LARGE]}]
    queue.close()


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_large_value_that_cannot_be_read_is_an_error_and_never_none(tmp_path: Path, how: str) -> None:
    queue = queue_with_folder(tmp_path)
    done = submit(("p", "w"), queue=queue, snapshot=False)
    finish(queue, TaskState.SUCCEEDED, value=LARGE)
    (value,) = (tmp_path / "records" / "values").iterdir()
    if how == "removed":
        value.unlink()
    else:
        value.chmod(0o600)
        value.write_text('"another"')

    waited = wait(done)

    with pytest.raises(InfrastructureFailure) as raised:
        waited.values()
    assert value.name in raised.value.message
    queue.close()


def test_values_before_the_end_are_refused_as_what_they_are(tmp_path: Path) -> None:
    queue, records = open_sqlite(tmp_path / "q.db")
    done = submit([("p", "w", [str(n)]) for n in range(3)], queue=queue)
    finish(queue, TaskState.SUCCEEDED, value=3)

    waited = wait(done, timeout=0)

    for asked in (False, True):
        with pytest.raises(NotPossible, match="2 of 3 tasks have not ended"):
            waited.values(none_for_failed=asked)
    queue.close()
    records.close()


@pytest.mark.parametrize("kind", ["embedded", "manifest"])
def test_wait_for_an_experiment_that_nobody_submitted_to_raises_and_names_the_nearest(
    tmp_path: Path, kind: str
) -> None:
    queue: Queue = open_sqlite(tmp_path / "q.db")[0] if kind == "embedded" else MemoryQueue(MemoryRecords())
    submit(("p", "w"), queue=queue, experiment="sweep")

    with pytest.raises(UnknownName) as unknown:
        wait("sweeep", queue=queue)

    assert unknown.value.known == ["sweep"]
    assert unknown.value.hint == "did you mean `sweep`?"
    assert not wait("sweep", queue=queue, timeout=0).complete
    queue.close()
    queue.records.close()


def test_wait_for_what_only_a_foreign_producer_sent_goes_by_its_records(tmp_path: Path) -> None:
    queue = MemoryQueue(MemoryRecords())
    queue.put([sample_task("1", experiment="foreign")])
    finish(queue, TaskState.SUCCEEDED)

    assert wait("foreign", queue=queue).totals[TaskState.SUCCEEDED] == 1


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> MemoryQueue:
    """A queue of 6 tasks beside its records, all waited for as an experiment."""
    monkeypatch.setattr(publish, "NAMED_TASKS", 2)
    queue = MemoryQueue(MemoryRecords())
    submit([("p", "w", [str(n)]) for n in range(6)], queue=queue, experiment=EXPERIMENT)
    return queue


def test_wait_for_what_has_ended_returns_at_once_whatever_the_counters_say(many: MemoryQueue) -> None:
    finish(many, TaskState.SUCCEEDED, count=6)
    many.records.put_counters("killed", {EXPERIMENT: {TaskState.SUCCEEDED: 2}})

    waited = wait(EXPERIMENT, queue=many)

    assert (waited.complete, waited.totals) == (True, {TaskState.QUEUED: 0, TaskState.SUCCEEDED: 6})


def test_wait_returns_though_the_last_tasks_were_never_counted(
    many: MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.records.totals.STILL_S", 0.0)
    monkeypatch.setattr("runtime.records.totals.EVERY_S", 0.0)
    many.records.put_counters("alive", {EXPERIMENT: {}})

    waited = wait(
        EXPERIMENT,
        queue=many,
        poll=timedelta(milliseconds=1),
        progress=lambda _: finish(many, TaskState.SUCCEEDED, count=2),
    )

    assert (waited.complete, waited.totals[TaskState.SUCCEEDED]) == (True, 6)


def test_wait_whose_time_is_up_tells_what_the_records_say(many: MemoryQueue) -> None:
    finish(many, TaskState.SUCCEEDED, count=3)
    finish(many, TaskState.FAILED, count=1)
    many.records.put_counters("killed", {EXPERIMENT: {TaskState.SUCCEEDED: 1}})

    waited = wait(EXPERIMENT, queue=many, timeout=0)

    assert not waited.complete
    assert waited.totals == {TaskState.QUEUED: 2, TaskState.SUCCEEDED: 3, TaskState.FAILED: 1}


def test_wait_for_what_was_tried_again_does_not_end_with_its_first_generation(many: MemoryQueue) -> None:
    finish(many, TaskState.SUCCEEDED, count=5)
    finish(many, TaskState.FAILED)
    [mark] = many.records.marks(EXPERIMENT)
    assert mark.task is not None
    many.put([replace(mark.task, generation=2)])
    many.records.unmark(mark.task_id, 1, TaskState.FAILED)

    waited = wait(EXPERIMENT, queue=many, timeout=0)

    assert (waited.complete, waited.totals) == (False, {TaskState.QUEUED: 1, TaskState.SUCCEEDED: 5})


# repair


def test_repair_publishes_what_has_neither_record_nor_live_holder() -> None:
    clock = FakeClock(datetime.now(UTC))
    records = MemoryRecords(clock=clock)
    lost, done, held, stale = tasks_of("lost", "done", "held", "stale")
    put(Forgetful(records), [lost, done, held, stale])
    fail(records, done, clock)
    for worker, running, seen in (("alive", held, timedelta(0)), ("dead", stale, timedelta(minutes=10))):
        records.put_worker(
            WorkerSeen(
                worker=worker, host="h", queue="default", seen_at=clock.now() - seen, started_at=clock.now(), slots=1,
                running=(running.id,),
            )
        )  # fmt: skip
    emptied = Forgetful(records)

    found = repair(emptied, records, now=clock.now())

    assert emptied.given == [lost.id, stale.id]
    assert (found.published, found.recorded, found.held, found.experiments) == (2, 1, 1, (EXPERIMENT,))


def fail(records: MemoryRecords, task: Task, clock: FakeClock) -> None:
    record = Record(
        task_id=task.id, generation=task.generation, experiment=EXPERIMENT, state=TaskState.FAILED, token="x",
        reason=EndReason.APP_FAILED, ended_at=clock.now(),
    )  # fmt: skip
    records.mark(mark_of(record, task))
    records.commit(record)


def test_repair_publishes_the_next_generation_of_what_was_tried_again_and_then_lost() -> None:
    clock = FakeClock(datetime.now(UTC))
    records = MemoryRecords(clock=clock)
    again, dead = tasks_of("again", "dead")
    put(Forgetful(records), [again, dead])
    fail(records, again, clock)
    fail(records, dead, clock)
    records.unmark(again.id, 1, TaskState.FAILED)  # A redrive does this last, after publishing generation 2.
    emptied = Forgetful(records)

    found = repair(emptied, records, now=clock.now())

    assert emptied.given == [again.id]
    assert [task.generation for task in emptied.tasks] == [2]
    assert found.published == 1


@pytest.mark.usefixtures("small_parts")
def test_repair_publishes_the_part_that_a_dead_submission_left(records: MemoryRecords) -> None:
    dead = Forgetful(records)
    dead.fail_after = 5
    with pytest.raises(QueueUnavailable):
        put(dead, tasks_of(*range(10)))
    queue = Forgetful(records)

    assert repair(queue, records).published == 8
    assert all(part.sent for part in records.parts(EXPERIMENT))


def test_repair_leaves_experiments_of_other_queues_alone(records: MemoryRecords) -> None:
    other = Forgetful(records)
    other.name = "gpu"
    put(other, tasks_of(1))
    queue = Forgetful(records)

    assert (repair(queue, records).published, queue.given) == (0, [])
    assert repair(other, records, experiment="another").experiments == ()


def test_repair_of_an_embedded_queue_has_nothing_to_do(tmp_path: Path) -> None:
    queue, records = open_sqlite(tmp_path / "q.db")
    put(queue, tasks_of(1))

    assert repair(queue, records).published == 0
    queue.close()
    records.close()


def test_memory_queue_forgets_and_is_repaired() -> None:
    records = MemoryRecords()
    put(MemoryQueue(records), tasks_of(1, 2))
    empty = MemoryQueue(records)

    assert repair(empty, records).published == 2
    assert len(empty.lease(10, worker="w", ttl=timedelta(minutes=1))) == 2


# the wire format


names = st.text(min_size=1, max_size=8)
arguments = st.characters(codec="utf-8", exclude_characters="\0")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
entries = (
    st.builds(WorkflowEntry, names, names, st.lists(st.text(max_size=8), max_size=3).map(tuple))
    | st.builds(CommandEntry, st.lists(st.text(arguments, max_size=8), min_size=1, max_size=3).map(tuple))
    | st.builds(
        FunctionEntry,
        st.just("module:name"),
        st.lists(json_values, max_size=2).map(tuple),
        st.dictionaries(names, json_values, max_size=2),
    )
)
EARLY = datetime(1971, 1, 1, tzinfo=UTC)
times = st.none() | st.integers(0, 7 * 10**12).map(lambda ms: EARLY + timedelta(milliseconds=ms))
tasks = st.builds(
    Task,
    id=st.from_regex(r"t-[a-z0-9]{1,62}", fullmatch=True),
    entry=entries,
    experiment=st.from_regex(r"[a-z][a-z0-9_.+@=-]{0,20}", fullmatch=True),
    generation=st.integers(1, 1_000_000),
    resources=st.builds(
        Resources,
        cpus=st.sampled_from([0, 1, 0.5, 64]),
        memory_bytes=st.integers(0, 2**50),
        gpus=st.sampled_from([0, 0.25, 1, 8]),
    ),
    timeout=st.none() | st.integers(1, 10**9).map(lambda ms: timedelta(milliseconds=ms)),
    not_before=times,
    expires_at=times,
    max_failures=st.integers(1, 1_000_000),
    outputs=st.lists(names, max_size=2).map(tuple),
    snapshot=st.none() | names,
    key=st.none() | names,
    priority=st.integers(-1_000_000, 1_000_000),
    submitted_by=st.none() | names,
    submitted_at=times,
    extra=st.dictionaries(st.sampled_from(["colour", "x-trace", "nested"]), json_values, max_size=2),
)


@given(tasks)
@example(Task(id="t-1", entry=CommandEntry(("\u2028", "\x01", "")), experiment="e"))
@example(
    Task(
        id="t-1",
        entry=FunctionEntry("module:name", ("\n",), {"x": [{"é": None}]}),
        experiment="e",
        extra={"nested": {"a": [-1.5]}},
    )
)
@example(
    Task(id="t-1", entry=WorkflowEntry("p", "w", ("--x",)), experiment="e", key="k", not_before=EARLY, expires_at=EARLY)
)
def test_task_survives_the_wire_with_what_nobody_knows(task: Task) -> None:
    text = encode_task(task)

    assert decode_task(text) == task
    assert json.loads(encode_task(decode_task(text))) == json.loads(text)
    assert "\n" not in text
