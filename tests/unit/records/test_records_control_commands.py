"""The order log: the combined effect of orders, and compacting them while others give, list and read orders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import StoreUnavailable
from runtime.records.blobs import BlobInfo
from runtime.records.control_commands import CancelledRange, QueueControl, merge, pause_order, resume_order
from runtime.records.memory import MemoryBlobs
from runtime.records.order_scope import Coverage
from runtime.records.store import MOVED_FOR, ORDERS_APART, REMEMBERED_FOR, BlobRecords
from runtime.tasks.model import Task, TaskState
from runtime.tasks.wire import encode_task
from runtime.testing import FakeClock, sample_task
from tests.conformance.records_cases import T0, cancel_order, sample_mark, sample_record

QUEUE = "default"


class WatchedBlobs(MemoryBlobs):
    """Has its own clock, counts its calls, and lets a test act in between."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(T0)
        self.calls: list[str] = []
        self.before: Callable[[str, str], None] = lambda call, key: None
        self.listing: Callable[[int], None] = lambda place: None
        """Called before each name in a listing of orders."""

    def _store(self, key: str, data: bytes) -> None:
        super()._store(key, data)
        self._blobs[key] = (bytes(data), self.clock.now())

    def _call(self, call: str, key: str) -> None:
        if "orders/" in key:
            self.calls.append(call)
            self.before(call, key)

    def create(self, key: str, data: bytes) -> bool:
        self._call("create", key)
        return super().create(key, data)

    def get(self, key: str) -> bytes | None:
        self._call("get", key)
        return super().get(key)

    def delete(self, key: str) -> None:
        self._call("delete", key)
        super().delete(key)

    def list_blobs(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        """One name after the other, as a folder is listed: passed names are not looked at again."""
        self._call("list", prefix)
        last = after
        for place in itertools.count():
            if prefix.startswith("orders/"):
                self.listing(place)
            info = next(super().list_blobs(prefix, after=last), None)
            if info is None:
                return
            yield info
            last = info.key


@pytest.fixture
def blobs() -> WatchedBlobs:
    return WatchedBlobs()


def open_store(blobs: WatchedBlobs) -> BlobRecords:
    """Open the store as another process would; its clock is the machine's, which differs from the store's."""
    return BlobRecords(blobs, clock=FakeClock(T0 + timedelta(hours=3)))


def give_many(store: BlobRecords, count: int = ORDERS_APART) -> None:
    """Give one pause, and cancels that name parts and tasks."""
    store.put_order(QUEUE, pause_order(T0))
    for n in range(count - 1):
        part = frozenset({f"{n:05}-1-0123456789abcdef"})
        store.put_order(QUEUE, cancel_order(experiments={"sweep": part}, tasks=frozenset({(f"t-{n}", 1)})))


def later(blobs: WatchedBlobs, span: timedelta = MOVED_FOR) -> None:
    blobs.clock.advance(seconds=span.total_seconds())


def listed(blobs: WatchedBlobs) -> list[str]:
    return list(blobs.list_keys("orders/"))


# the combined effect


names = st.sampled_from(["a", "b", "c"])
times = st.integers(0, 9).map(lambda hours: T0 + timedelta(hours=hours))
some = st.frozensets(names)
controls = st.builds(
    QueueControl,
    pauses=some,
    ended=some,
    experiments=st.dictionaries(names, st.builds(CancelledRange, parts=some, before=times, ordered_at=times)),
    tasks=st.frozensets(st.tuples(names, st.integers(1, 3))),
    purged_before=st.none() | times,
)


@given(st.lists(controls, max_size=5), st.randoms())
def test_merged_orders_say_the_same_in_any_order_and_number(told: list[QueueControl], random: object) -> None:
    shuffled = told + told[:2]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    half = len(shuffled) // 2

    assert merge(shuffled) == merge(told)
    assert merge([merge(shuffled[:half]), merge(shuffled[half:])]) == merge(told)


def test_pause_that_a_resume_has_not_seen_stays() -> None:
    seen, unseen = QueueControl(pauses=frozenset({"one"})), QueueControl(pauses=frozenset({"two"}))
    resume = resume_order(seen, T0)
    assert resume is not None

    assert not merge([seen, QueueControl(ended=resume.ends)]).paused
    assert merge([unseen, seen, QueueControl(ended=resume.ends)]).paused


# reading


def test_orders_are_listed_once_and_only_new_ones_are_read(blobs: WatchedBlobs) -> None:
    store = open_store(blobs)
    give_many(store, 10)
    reader = open_store(blobs)
    reader.control(QUEUE)
    store.put_order(QUEUE, pause_order(T0))
    blobs.calls.clear()

    reader.control(QUEUE)
    first = list(blobs.calls)
    reader.control(QUEUE)

    assert (first, blobs.calls) == (["list", "get"], ["list", "get", "list"])


def test_orders_that_cannot_be_read_leave_the_last_answer_to_the_caller(blobs: WatchedBlobs) -> None:
    store = open_store(blobs)
    store.put_order(QUEUE, pause_order(T0))
    told = store.control(QUEUE)

    def away(call: str, key: str) -> None:
        raise StoreUnavailable("away")

    blobs.before = away
    with pytest.raises(StoreUnavailable):
        store.control(QUEUE)
    blobs.before = lambda call, key: None

    assert store.control(QUEUE) is told


# compaction


def test_orders_of_years_are_few_objects(blobs: WatchedBlobs) -> None:
    store = open_store(blobs)
    for _ in range(20):
        give_many(store, 50)
        later(blobs, timedelta(days=3))
    control = store.control(QUEUE)

    assert len(listed(blobs)) <= 2 * ORDERS_APART
    assert len(control.pauses) == 20
    assert open_store(blobs).control(QUEUE) == control


def test_order_stands_where_there_is_no_room_to_put_it_together_with_others(blobs: WatchedBlobs) -> None:
    store = open_store(blobs)
    give_many(store, ORDERS_APART)

    def full(call: str, key: str) -> None:
        if "merged-" in key:
            raise StoreUnavailable("no space left")

    blobs.before = full
    last = store.put_order(QUEUE, pause_order(T0))
    blobs.before = lambda call, key: None

    assert last in store.control(QUEUE).pauses
    assert len(listed(blobs)) == ORDERS_APART + 1
    store.put_order(QUEUE, pause_order(T0))
    assert len(listed(blobs)) == ORDERS_APART + 3, "the next takes it up"


# removal


def submit(store: BlobRecords, *tasks: Task, experiment: str = "sample") -> frozenset[str]:
    store.put_part(experiment, len(store.parts(experiment)), [encode_task(task) for task in tasks])
    return frozenset(part.name for part in store.parts(experiment))


@pytest.mark.parametrize(
    ("states", "begun_again", "days", "goes"),
    [
        ((TaskState.SUCCEEDED, TaskState.CANCELLED), False, 1, True),
        ((TaskState.SUCCEEDED, TaskState.CANCELLED), True, 1, False),
        ((TaskState.SUCCEEDED,), False, 1, False),
        ((TaskState.SUCCEEDED, TaskState.CANCELLED), False, -1, False),
    ],
    ids=["ended", "one of it was begun again", "one of it is open", "not long ago"],
)
def test_order_for_an_experiment_goes_when_that_has_ended_long_ago(
    blobs: WatchedBlobs, states: tuple[TaskState, ...], begun_again: bool, days: float, goes: bool
) -> None:
    store = open_store(blobs)
    tasks = [sample_task("1"), sample_task("2")]
    store.put_order(QUEUE, cancel_order(experiments={"sample": submit(store, *tasks)}))
    for task, state in zip(tasks, states, strict=False):
        if state is not TaskState.SUCCEEDED and not begun_again:
            store.mark(sample_mark(task, state))
        store.commit(sample_record(task, state=state))
    # A foreign producer's task has a record too; it is counted, but appears in no manifest.
    store.commit(sample_record(sample_task("foreign")))
    store.put_counters("w-1", {"sample": {TaskState.SUCCEEDED: 2}})
    later(blobs, REMEMBERED_FOR + timedelta(days=days))

    give_many(store, ORDERS_APART)
    later(blobs)
    store.put_order(QUEUE, pause_order(T0))

    assert ("sample" in store.control(QUEUE).experiments) == (not goes)
    assert "sweep" in store.control(QUEUE).experiments


# coverage


def covers(store: BlobRecords, task: Task, published_at: datetime | None = None) -> bool | None:
    control, coverage = store.control(QUEUE), Coverage(store)
    coverage.read(control, task.experiment)
    return coverage.covers(control, task, published_at)


def test_coverage_is_unknown_until_the_parts_are_read_and_each_is_read_once(blobs: WatchedBlobs) -> None:
    store = open_store(blobs)
    first, second = sample_task("first"), sample_task("second")
    store.put_order(QUEUE, cancel_order(experiments={"sample": submit(store, first)}))
    control, coverage = store.control(QUEUE), Coverage(store)

    unknown = coverage.covers(control, first)
    coverage.read(control, "sample")
    known = coverage.covers(control, first), coverage.covers(control, second)
    store.put_order(QUEUE, cancel_order(experiments={"sample": submit(store, second)}))
    control = store.control(QUEUE)
    unknown_again = coverage.covers(control, first)
    blobs.delete(next(blobs.list_keys("manifests/")))
    coverage.read(control, "sample")

    assert (unknown, known, unknown_again) == (None, (True, False), None)
    assert (coverage.covers(control, first), coverage.covers(control, second)) == (True, True)
    assert coverage.covers(control, sample_task(experiment="other")) is False


def test_part_of_a_single_task_is_known_from_its_name(blobs: WatchedBlobs) -> None:
    from runtime.client.tasks.submit import submit_tasks
    from runtime.queues.memory import MemoryQueue

    store = open_store(blobs)
    task = sample_task()
    submit_tasks([task], MemoryQueue(store), experiment="sample")
    [part] = store.parts("sample")
    store.put_order(QUEUE, cancel_order(experiments={"sample": frozenset({part.name})}))
    blobs.delete(f"manifests/{task.id[-8:]}/{part.name}.jsonl")

    assert covers(store, task)
    assert not covers(store, sample_task("2"))


def test_part_that_is_gone_covers_nothing_and_stops_nobody(
    blobs: WatchedBlobs, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(blobs)
    task = sample_task()
    store.put_order(QUEUE, cancel_order(experiments={"sample": submit(store, task)}))
    blobs.delete(next(blobs.list_keys("manifests/")))

    assert covers(store, task) is False
    assert "cannot be read, and its tasks are run" in caplog.text


def test_foreign_task_is_covered_by_the_times_of_service_and_store_alone(blobs: WatchedBlobs) -> None:
    store = open_store(blobs)
    task = sample_task(submitted_at=T0 - timedelta(days=1))
    store.put_order(QUEUE, cancel_order(experiments={"sample": frozenset()}))
    second = timedelta(seconds=1)

    assert covers(store, task, T0)
    assert not covers(store, task, T0 + second)
    assert not covers(store, sample_task(experiment="other", submitted_at=T0 - second), T0 - second)
    assert not covers(store, task), "what was put by a submit is in a manifest, or was put there later"
