"""The promises of every record store, tested on each store.

A store in the queue's own file (`holds_tasks`) has no manifest and no marks; the queue's tables hold both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.clock import SystemClock
from runtime.end_reasons import EndReason
from runtime.errors import InvalidRecord, PartTaken, StoreUnavailable
from runtime.records.base import INLINE_BYTES, RecordExists, RecordStore, WorkerSeen, settle_record
from runtime.records.blobs import Blobs
from runtime.records.control_commands import ControlCommand, OrderKind, QueueControl, pause_order, resume_order
from runtime.records.store import ORDERS_APART
from runtime.tasks.history import History, Record, StartedMark
from runtime.tasks.model import Task, TaskState, next_generation, task_id
from runtime.tasks.wire import encode_task
from runtime.testing import FakeClock, sample_task
from tests.conformance.records_cases import (
    REAL_SERVICES,
    REFUSED,
    STORES,
    T0,
    TEXTS,
    VALUES,
    Place,
    cancel_order,
    opened_place,
    sample_mark,
    sample_note,
    sample_record,
)


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.service] if name in REAL_SERVICES else []) for name in STORES]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with opened_place(request.param, request, tmp_path) as place:
        yield place


@pytest.fixture
def store(place: Place) -> RecordStore:
    return place.store()


def submitted(place: Place, store: RecordStore, *tasks: Task) -> None:
    place.submit(store, tasks)


def needs_manifest(store: RecordStore) -> None:
    if store.holds_tasks:
        pytest.skip("the queue's own tables are its manifest")


def bury(store: RecordStore, task: Task, state: TaskState = TaskState.FAILED, **fields: str) -> Record:
    """Mark and record the task, in the same order as a queue's settle."""
    store.mark(sample_mark(task, state))
    record = sample_record(task, state=state, message="it broke", **fields)
    store.commit(record)
    return record


def worker_seen(worker: str, **fields: Any) -> WorkerSeen:
    now = SystemClock().now().replace(microsecond=0)
    values: dict[str, Any] = {"host": "node", "queue": "default", "seen_at": now, "started_at": T0, "slots": 1} | fields
    return WorkerSeen(worker=worker, **values)


# the store itself


def test_check_of_a_good_store_passes_and_may_be_repeated(place: Place) -> None:
    place.store().check()
    place.store().check()


def test_store_opened_by_its_url_again_sees_what_was_recorded(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    record = sample_record(task)
    store.commit(record)

    assert place.store().find(task.id, 1) == record


# records


def test_find_of_an_unrecorded_task_returns_none(store: RecordStore) -> None:
    task = sample_task()

    assert store.find(task.id, 1) is None
    assert store.find_all(task.id) == []
    assert store.find_all("t-foreign") == []


def test_commit_with_every_field_is_found_unchanged(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    record = sample_record(
        task,
        token="0123456789abcdef",
        state=TaskState.FAILED,
        started_at=T0 - timedelta(seconds=90),
        message='ValueError: "quoted" {brace}\nsecond line — ünïcode',
        worker="w-node 3/812",
        attempts=3,
        exit_code=-9,
        value={"loss": [0.5, None, True], "name": "ü"},
        log="first\nsecond\n\udcff\udc80 not utf-8\n",
        log_url="gs://lab/logs/x",
        outputs_url="gs://lab/outputs/x",
        metrics={"loss": 0.25, "steps": 100.0},
        code="git:abc",
    )
    store.commit(record)

    assert store.find(task.id, 1) == record
    assert list(store.records(task.experiment)) == [record]


def test_commit_twice_with_its_own_token_has_won(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    record = sample_record(task, token="a1")

    store.commit(record)
    store.commit(record)

    assert store.find_all(task.id) == [record]


def test_commit_of_another_token_is_refused_and_shown_the_first(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    first = sample_record(task, token="a1")
    store.commit(first)

    with pytest.raises(RecordExists) as refused:
        store.commit(sample_record(task, token="b2", state=TaskState.FAILED))

    assert refused.value.record == first
    assert store.find(task.id, 1) == first


def test_records_of_two_generations_are_both_kept_oldest_first(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    first = bury(store, task)
    again = next_generation(task)
    submitted(place, store, again)
    second = sample_record(again, token="b2")
    store.commit(second)

    assert store.find_all(task.id) == [first, second]
    assert sorted(store.recorded(task.experiment)) == [(task.id, 1), (task.id, 2)]


def test_find_all_of_an_id_that_begins_another_id_returns_only_its_own(place: Place, store: RecordStore) -> None:
    short, long = sample_task(id="t-1"), sample_task(id="t-10", key="2")
    submitted(place, store, short, long)
    store.commit(sample_record(short))
    store.commit(sample_record(long, token="b2"))

    assert [record.task_id for record in store.find_all("t-1")] == ["t-1"]


def test_records_lists_only_its_experiment(place: Place, store: RecordStore) -> None:
    ours = [sample_task(str(n)) for n in range(40)]
    other = sample_task(experiment="other")
    submitted(place, store, *ours, other)
    for task in (*ours, other):
        store.commit(sample_record(task))

    assert {record.task_id for record in store.records("sample")} == {task.id for task in ours}
    assert set(store.recorded("sample")) == {(task.id, 1) for task in ours}
    assert [record.task_id for record in store.records("other")] == [other.id]
    assert list(store.records("unknown")) == []


def test_commit_from_many_threads_has_one_winner_that_all_losers_see(place: Place, store: RecordStore) -> None:
    tasks = [sample_task(str(n)) for n in range(5)]
    submitted(place, store, *tasks)
    stores = [place.store() for _ in range(8)]
    barrier = threading.Barrier(len(stores))
    outcomes: list[tuple[str, str, bool]] = []

    def race(number: int) -> None:
        for task in tasks:
            token = f"token-{number}"
            barrier.wait()
            try:
                stores[number].commit(sample_record(task, token=token))
                outcomes.append((task.id, token, True))
            except RecordExists as refused:
                outcomes.append((task.id, refused.record.token, False))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(outcomes) == len(tasks) * len(stores)
    for task in tasks:
        winners = {token for task_id, token, won in outcomes if task_id == task.id and won}
        seen = {token for task_id, token, _ in outcomes if task_id == task.id}
        assert len(winners) == 1
        assert seen == winners
        assert [record.token for record in store.find_all(task.id)] == list(winners)


# These scripts import nothing of the tests, whose imports take longer than all that the scripts do.
RACER = """
import sys, time
from datetime import UTC, datetime
from functools import partial
from runtime.end_reasons import EndReason
from runtime.records import open_records
from runtime.records.base import RecordExists
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState
url, token, start_at, experiment, *tasks = sys.argv[1:]
store = open_records(url)
store.find("t-none", 1)
time.sleep(max(0, float(start_at) - time.time()))
end = {"state": TaskState.SUCCEEDED, "reason": EndReason.SUCCEEDED, "ended_at": datetime.now(UTC)}
done = partial(Record, generation=1, experiment=experiment, **end)
for n, task in enumerate(tasks):
    try:
        store.commit(done(task_id=task, token=token))
        print("won", n)
    except RecordExists as refused:
        print("lost", n, refused.record.token)
store.close()
"""


@pytest.mark.slow
@pytest.mark.daily(2)
def test_commit_from_many_processes_has_one_winner(place: Place, store: RecordStore) -> None:
    if not place.processes:
        pytest.skip("memory is one process's own")
    tasks = [sample_task(str(n)) for n in range(20)]
    submitted(place, store, *tasks)
    start_at = SystemClock().now().timestamp() + 1.5
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, store.url, f"p{n}", str(start_at), "sample", *(task.id for task in tasks)],
            env=os.environ | place.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(3)
    ]
    printed = [racer.communicate(timeout=500)[0].split("\n") for racer in racers]

    assert [racer.returncode for racer in racers] == [0, 0, 0]
    for number, task in enumerate(tasks):
        winners = [f"p{n}" for n, lines in enumerate(printed) if f"won {number}" in lines]
        assert len(winners) == 1
        assert [record.token for record in store.find_all(task.id)] == winners
        assert sum(f"lost {number} {winners[0]}" in lines for lines in printed) == 2


def test_commit_of_a_large_value_puts_it_beside_the_record(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    value = {"text": "x" * (INLINE_BYTES + 1)}
    store.commit(sample_record(task, value=value))

    found = store.find(task.id, 1)
    assert found is not None
    assert found.value is None
    assert found.value_url is not None
    assert json.loads(store.get_blob(found.value_url)) == value


def test_commit_of_a_large_log_keeps_its_end(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    store.commit(sample_record(task, log="é" * INLINE_BYTES + "the end"))

    found = store.find(task.id, 1)
    assert found is not None
    assert found.log.endswith("éé" + "the end")
    assert len(found.log.encode()) <= INLINE_BYTES + 2


def test_resolve_of_a_prefix_returns_the_recorded_ids_that_begin_so(place: Place, store: RecordStore) -> None:
    tasks = [sample_task(key, id=key) for key in ("t-ab1", "t-ab2", "t-ac3", "t-Zed", "t-g9")]
    submitted(place, store, *tasks)
    for task in tasks:
        store.commit(sample_record(task))

    assert store.resolve("t-ab") == ["t-ab1", "t-ab2"]
    assert store.resolve("t-ab2") == ["t-ab2"]
    assert store.resolve("t-Z") == ["t-Zed"]
    assert store.resolve("t-x") == []
    assert len(store.resolve("t-", limit=3)) == 3
    assert set(store.resolve("t-")) == {task.id for task in tasks}


def test_resolve_of_a_whole_id_returns_it(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    store.commit(sample_record(task))

    assert store.resolve(task.id) == [task.id]


def test_commit_of_one_foreign_id_in_two_experiments_has_one_winner(store: RecordStore) -> None:
    needs_manifest(store)
    here, there = sample_task(id="t-mine", experiment="here"), sample_task(id="t-mine", experiment="there")
    first = sample_record(here, token="a1")
    store.commit(first)

    with pytest.raises(RecordExists) as refused:
        store.commit(sample_record(there, token="b2"))

    assert refused.value.record == first
    assert store.find("t-mine", 1) == first
    assert list(store.records("here")) == [first]


# texts from programs


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_commit_of_any_text_gives_it_back_as_it_was(place: Place, store: RecordStore, text: str) -> None:
    task = sample_task()
    submitted(place, store, task)
    record = sample_record(
        task,
        state=TaskState.FAILED,
        message=text,
        worker=text,
        value=[text[:100], {text[:100]: text[:100]}],
        metrics={text[:100]: 0.5},
        log=text[:20_000],
        code=text,
        outputs_url=text,
    )
    store.mark(sample_mark(task))
    store.commit(record)
    store.commit(record)

    assert store.find(task.id, 1) == record
    assert list(store.records("sample")) == [record]
    assert store.totals("sample", exact=True).counts[TaskState.FAILED] == 1


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_text_may_stand_in_a_mark_a_note_and_a_report(place: Place, store: RecordStore, text: str) -> None:
    task = sample_task()
    submitted(place, store, task)
    note = sample_note("a1", message=text, worker=text, log=text[:2_000])
    store.record_ended(task, note)
    store.mark(sample_mark(task, message=text, task=None, raw=text or "raw"))
    store.commit(sample_record(task, state=TaskState.FAILED, message=text))
    seen = worker_seen("w-1", host=text, labels={text[:100]: text}, declined={"t-1": text})
    store.put_worker(seen)
    named = worker_seen(text[:30] or "w-2")
    store.put_worker(named)

    assert store.history(task.id, 1).ended == (note,)
    assert [mark.message for mark in store.marks("sample")] == [text]
    assert {one.worker: one for one in store.workers()} == {"w-1": seen, named.worker: named}


@pytest.mark.parametrize("text", list(TEXTS.values())[2:], ids=list(TEXTS)[2:])
def test_long_log_of_any_text_keeps_its_end_whole(place: Place, store: RecordStore, text: str) -> None:
    task = sample_task()
    submitted(place, store, task)
    whole = text * (2 * INLINE_BYTES // len(text) + 1)
    store.commit(sample_record(task, log=whole))

    found = store.find(task.id, 1)
    assert found is not None
    assert whole.endswith(found.log)
    assert INLINE_BYTES - 4 < len(found.log.encode(errors="surrogatepass")) <= INLINE_BYTES


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_commit_of_any_value_gives_it_back_as_it_was(place: Place, store: RecordStore, value: object) -> None:
    task = sample_task()
    submitted(place, store, task)
    store.commit(sample_record(task, value=value))

    found = store.find(task.id, 1)
    assert found is not None
    # NaN equals nothing, itself included.
    assert repr(found.value) == repr(value)
    assert repr([one.value for one in store.records("sample")]) == repr([value])


def test_keys_of_a_value_that_are_no_text_are_spelled_as_json_does(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    store.commit(sample_record(task, value={1: ("a", "b"), None: 0, False: 1, 2.5: 2}))

    found = store.find(task.id, 1)
    assert found is not None
    assert found.value == {"1": ["a", "b"], "null": 0, "false": 1, "2.5": 2}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_commit_of_what_no_record_can_hold_is_refused_alike_and_writes_nothing(
    place: Place, store: RecordStore, value: Any
) -> None:
    task, other = sample_task("1"), sample_task("2")
    submitted(place, store, task, other)

    with pytest.raises(InvalidRecord) as refused:
        store.commit(sample_record(task, value=value))
    store.commit(sample_record(other))

    assert refused.value.field == "value"
    assert "max_str_digits" not in refused.value.message
    assert store.find(task.id, 1) is None
    assert store.find(other.id, 1) is not None
    store.mark(sample_mark(task))
    store.commit(sample_record(task, token="b2", state=TaskState.FAILED, message=refused.value.message))
    assert store.totals("sample", exact=True).counts[TaskState.FAILED] == 1


def test_metrics_and_reports_that_no_store_can_hold_are_refused_by_their_field(
    place: Place, store: RecordStore
) -> None:
    task = sample_task()
    submitted(place, store, task)

    with pytest.raises(InvalidRecord) as metrics:
        store.commit(sample_record(task, metrics={"n": 10**5000}))
    with pytest.raises(InvalidRecord) as labels:
        store.put_worker(worker_seen("w-1", labels={"gpu": object()}))

    assert (metrics.value.field, labels.value.field) == ("metrics", "labels")
    assert store.find(task.id, 1) is None
    assert store.workers() == []


# attempts


def test_history_of_a_new_task_is_empty(store: RecordStore) -> None:
    history = store.history(sample_task().id, 1)

    assert (history.ended, history.open) == ((), ())


def test_history_lists_ended_notes_oldest_first_each_token_once(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    late = sample_note("late", ended_at=T0 + timedelta(minutes=5), reason=EndReason.OOM, message="out of memory")
    early = sample_note(
        "early", started_at=T0 - timedelta(seconds=3), alone=True, progressed=True, exit_code=1, log="x"
    )
    store.record_ended(task, late)
    store.record_ended(task, early)
    store.record_ended(task, sample_note("early", reason=EndReason.LOST))

    assert store.history(task.id, 1).ended == (early, late)
    assert store.history(task.id, 2).ended == ()


def test_history_shows_started_attempts_without_an_end_as_open(place: Place, store: RecordStore) -> None:
    needs_manifest(store)
    task = sample_task()
    submitted(place, store, task)
    running = StartedMark("running", "w-1", T0, alone=True)
    store.record_started(task, StartedMark("gone", "w-1", T0, alone=False))
    store.record_started(task, running)
    store.record_ended(task, sample_note("gone", reason=EndReason.PREEMPTED))

    assert store.history(task.id, 1).open == (running,)

    store.commit(sample_record(task, token="running"))
    assert store.history(task.id, 1).open == ()


def test_history_tells_which_open_attempts_have_proven_themselves(place: Place, store: RecordStore) -> None:
    needs_manifest(store)
    task = sample_task()
    submitted(place, store, task)
    marks = [StartedMark(token, "w-1", T0, alone=True, proven=False) for token in ("long", "short")]
    for mark in [*marks, StartedMark("older", "w-1", T0, alone=True)]:
        store.record_started(task, mark)
    store.record_proven(task, "long")
    store.record_proven(task, "long")

    assert {mark.token: mark.proven for mark in store.history(task.id, 1).open} == {
        "long": True,
        "short": False,
        "older": None,
    }


@pytest.mark.parametrize("guess_first", [True, False])
def test_history_has_an_attempts_own_end_and_not_what_others_took_for_it(
    guess_first: bool, place: Place, store: RecordStore
) -> None:
    needs_manifest(store)
    task = sample_task()
    submitted(place, store, task)
    own = sample_note("a", reason=EndReason.PREEMPTED)
    guess = replace(sample_note("a", reason=EndReason.LOST), unseen=True)

    store.record_ended(task, guess if guess_first else own)
    assert store.history(task.id, 1).ended == ((guess,) if guess_first else (own,))
    store.record_ended(task, own if guess_first else guess)
    assert store.history(task.id, 1).ended == (own,)


def test_history_of_an_attempt_whose_start_was_retracted_is_empty(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    store.record_started(task, StartedMark("ahead", "w-1", T0, alone=True))

    store.retract_started(task, "ahead")
    store.retract_started(task, "ahead")

    assert store.history(task.id, 1) == History()


def test_note_with_a_long_log_keeps_its_last_8_kib(place: Place, store: RecordStore) -> None:
    needs_manifest(store)
    task = sample_task()
    submitted(place, store, task)
    store.record_ended(task, sample_note("a", log="x" * 20_000 + "end"))

    [note] = store.history(task.id, 1).ended
    assert len(note.log) == 8 * 1024
    assert note.log.endswith("xend")


# unsuccessful tasks


def test_marks_lists_what_failed_with_the_task_to_run_again(place: Place, store: RecordStore) -> None:
    task = sample_task(timeout=timedelta(seconds=5), max_failures=7)
    submitted(place, store, task)
    bury(store, task)

    [mark] = store.marks("sample", TaskState.FAILED)
    assert (mark.task_id, mark.generation, mark.state) == (task.id, 1, TaskState.FAILED)
    assert (mark.reason, mark.message) == (EndReason.APP_FAILED, "it broke")
    assert mark.task == task
    assert store.find_mark(task.id, 1, TaskState.FAILED) == mark


def test_marks_of_an_experiment_or_state_leave_out_the_others(place: Place, store: RecordStore) -> None:
    failed, cancelled, other = sample_task("1"), sample_task("2"), sample_task("1", experiment="other")
    submitted(place, store, failed, cancelled, other)
    bury(store, failed)
    bury(store, cancelled, TaskState.CANCELLED)
    bury(store, other)

    assert {mark.task_id for mark in store.marks()} == {failed.id, cancelled.id, other.id}
    assert {mark.task_id for mark in store.marks("sample")} == {failed.id, cancelled.id}
    assert {mark.task_id for mark in store.marks("sample", TaskState.FAILED)} == {failed.id}
    assert {mark.task_id for mark in store.marks(state=TaskState.FAILED)} == {failed.id, other.id}
    assert list(store.marks("sample", TaskState.EXPIRED)) == []
    assert len(list(store.marks(limit=2))) == 2


def test_marks_without_a_record_yet_are_passed_over(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    store.mark(sample_mark(task))

    assert list(store.marks("sample")) == []
    assert store.find_mark(task.id, 1, TaskState.FAILED) is None


def test_marks_that_their_record_contradicts_are_passed_over(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    store.mark(sample_mark(task))
    store.commit(sample_record(task, token="b2"))

    assert list(store.marks("sample")) == []
    assert store.totals("sample", exact=True).counts[TaskState.SUCCEEDED] == 1


def test_settling_that_lost_takes_its_own_mark_back(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    store.commit(sample_record(task, token="a1"))

    with pytest.raises(RecordExists):
        settle_record(store, sample_record(task, token="b2", state=TaskState.FAILED), sample_mark(task))

    assert list(store.marks()) == []
    assert TaskState.FAILED not in {state for state, n in store.totals("sample").counts.items() if n}


def test_marks_show_the_newest_generation_only(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    bury(store, task)
    again = next_generation(task)
    submitted(place, store, again)
    bury(store, again, token="b2")

    assert [mark.generation for mark in store.marks("sample")] == [2]


def test_mark_of_a_generation_whose_next_one_ended_is_passed_over(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    bury(store, task)
    again = next_generation(task)
    submitted(place, store, again)
    store.commit(sample_record(again, token="b2"))

    assert list(store.marks("sample")) == []


def test_unmark_takes_the_dead_letter_off_the_list(place: Place, store: RecordStore) -> None:
    needs_manifest(store)
    task = sample_task()
    submitted(place, store, task)
    bury(store, task)

    store.unmark(task.id, 1, TaskState.FAILED)
    store.unmark(task.id, 1, TaskState.FAILED)

    assert list(store.marks("sample")) == []


def test_mark_that_was_closed_is_not_put_back_by_whoever_comes_late(place: Place, store: RecordStore) -> None:
    needs_manifest(store)
    task = sample_task()
    submitted(place, store, task)
    bury(store, task)
    assert store.unmark(task.id, 1, TaskState.FAILED)

    store.mark(sample_mark(task))  # From a slow holder's failure, or from a purge that listed the task earlier.
    store.mark(replace(sample_mark(task), task=None))

    assert list(store.marks("sample")) == []
    assert set(store.tried_again("sample")) == {(task.id, 1)}
    again = next_generation(task)
    submitted(place, store, again)
    bury(store, again, token="b2")
    assert [mark.generation for mark in store.marks("sample")] == [2]


def test_unmark_says_who_closed_it(place: Place, store: RecordStore) -> None:
    needs_manifest(store)
    task = sample_task()
    submitted(place, store, task)
    bury(store, task)

    assert [store.unmark(task.id, 1, TaskState.FAILED) for _ in range(3)] == [True, False, False]


def test_mark_of_a_message_that_cannot_be_parsed_keeps_it_as_it_came(store: RecordStore) -> None:
    needs_manifest(store)
    task = sample_task()
    raw = '{"project": "p", \udcff\n'
    store.mark(sample_mark(task, task=None, raw=raw))
    store.commit(sample_record(task, state=TaskState.FAILED))

    [mark] = store.marks()
    assert mark == dataclasses.replace(mark, task=None, raw=raw)


# submitted tasks


def test_experiments_lists_each_once_with_its_queue(store: RecordStore) -> None:
    needs_manifest(store)
    store.put_experiment("b=2+@.x", queue=None)
    store.put_experiment("añb", queue="fast")
    store.put_experiment("b=2+@.x", queue="default")
    store.put_experiment("b=2+@.x", queue=None)

    found = store.experiments()
    assert {seen.name: seen.queue for seen in found} == {"añb": "fast", "b=2+@.x": "default"}
    assert all(seen.created_at is not None for seen in found)
    assert store.find_experiment("añb") == next(seen for seen in found if seen.name == "añb")
    assert store.find_experiment("unknown") is None


def test_experiment_keeps_its_first_queue_and_parts_in_others_name_theirs(store: RecordStore) -> None:
    needs_manifest(store)
    assert store.put_experiment("sample", queue="default") == "default"
    assert store.put_experiment("sample", queue="ü/b.c") == "default"
    assert store.put_experiment("foreign", queue=None) is None
    assert store.put_experiment("foreign", queue="gpu") is None  # Somebody else may have said another.
    assert store.put_experiment("foreign", queue="default") == "gpu"
    put = [store.put_part("sample", 0, ["a"]), store.put_part("sample", 1, ["b"], queue="ü/b.c")]

    found = store.parts("sample")

    assert found == put
    assert [part.queue for part in found] == [None, "ü/b.c"]
    assert [[part.is_in(name, "default") for part in found] for name in ("default", "ü/b.c")] == [
        [True, False],
        [False, True],
    ]
    assert all(part.is_in("any", None) is (part.queue is None) for part in found)


def test_commit_makes_its_experiment_known(place: Place, store: RecordStore) -> None:
    task = sample_task(experiment="from-elsewhere")
    submitted(place, store, task)
    store.commit(sample_record(task))

    assert [seen.name for seen in store.experiments()] == ["from-elsewhere"]


def test_parts_come_back_in_order_with_their_lines(store: RecordStore) -> None:
    needs_manifest(store)
    lines = [[encode_task(sample_task(f"{part}-{n} ü\u2028")) for n in range(3)] for part in range(12)]
    for index in reversed(range(12)):
        store.put_part("sample", index, lines[index])

    parts = store.parts("sample")
    assert [part.name.split("-")[0] for part in parts] == [f"{index:05}" for index in range(12)]
    assert [part.count for part in parts] == [3] * 12
    assert [store.read_part(part) for part in parts] == lines
    assert store.parts("unknown") == []


def test_put_part_again_is_the_same_part_and_knows_that_it_was_sent(store: RecordStore) -> None:
    needs_manifest(store)
    first = store.put_part("sample", 0, ["a", "b"])
    assert not first.sent
    store.mark_sent(first)
    store.mark_sent(first)

    again = store.put_part("sample", 0, ["a", "b"])

    assert again.sent
    assert store.parts("sample") == [again]


def test_put_part_of_other_tasks_at_a_taken_place_is_refused(store: RecordStore) -> None:
    needs_manifest(store)
    kept = store.put_part("sample", 3, ["a", "b"])

    with pytest.raises(PartTaken) as refused:
        store.put_part("sample", 3, ["a", "c"])

    assert (refused.value.experiment, refused.value.index) == ("sample", 3)
    assert store.parts("sample") == [kept]


def test_put_part_by_many_at_one_place_keeps_one(place: Place, store: RecordStore) -> None:
    needs_manifest(store)
    stores = [place.store() for _ in range(6)]
    barrier = threading.Barrier(len(stores))
    kept: list[int] = []

    def submit(number: int) -> None:
        barrier.wait()
        try:
            stores[number].put_part("sample", 0, [f"task of {number}"])
            kept.append(number)
        except PartTaken:
            pass

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    [part] = store.parts("sample")
    assert store.read_part(part) == [f"task of {kept[0]}"]
    assert len(kept) == 1


# payloads


def test_put_blob_twice_is_one_reference_that_reads_back(store: RecordStore) -> None:
    data = bytes(range(256)) * 1000
    reference = store.put_blob(data)

    assert store.put_blob(data) == reference
    assert store.get_blob(reference) == data
    assert store.get_blob("/mnt/elsewhere/" + "/".join(reference.split("/")[-2:])) == data
    assert store.get_blob(store.put_blob(b"", prefix="values")) == b""


@pytest.mark.parametrize("prefix", ["payloads", "snapshots"])
def test_has_blob_says_of_exactly_one_whether_it_is_there(store: RecordStore, prefix: str) -> None:
    reference = store.put_blob(b"here", prefix=prefix)

    assert store.has_blob(reference)
    assert not store.has_blob(reference[:-1])
    assert not store.has_blob(reference[:-4] + "beef")
    assert store.get_blob("/".join(reference.split("/")[-2:])) == b"here"


@pytest.mark.parametrize("prefix", ["payloads", "snapshots"])
def test_first_note_of_a_reference_stays_and_is_no_content(store: RecordStore, prefix: str) -> None:
    reference = f"{prefix}/{hashlib.sha256(b'here').hexdigest()}"
    assert store.get_note(reference) is None

    store.put_note(reference, b"first")
    store.put_note(reference, b"second")

    assert (store.get_note(reference), store.has_blob(reference)) == (b"first", False)
    stored = store.put_blob(b"here", prefix=prefix)
    assert (store.get_note(stored), store.has_blob(stored), store.get_blob(stored)) == (b"first", True, b"here")


def test_get_blob_of_a_missing_reference_fails_for_good(store: RecordStore) -> None:
    reference = store.put_blob(b"here")

    with pytest.raises(StoreUnavailable) as missing:
        store.get_blob(reference[:-4] + "beef")

    assert not missing.value.retryable


def test_task_that_fails_while_it_is_looked_for_was_not_tried_again(
    place: Place, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_manifest(store)
    again, fails = sample_task("again"), sample_task("fails")
    submitted(place, store, again, fails)
    bury(store, again)
    store.unmark(again.id, 1, TaskState.FAILED)
    blobs: Blobs = store.blobs  # type: ignore[attr-defined]
    list_keys, list_blobs = blobs.list_keys, blobs.list_blobs

    def between(found: Iterator[Any]) -> Iterator[Any]:
        yield from found
        if store.find(fails.id, 1) is None:
            bury(store, fails)

    monkeypatch.setattr(blobs, "list_keys", lambda prefix, **how: between(list_keys(prefix, **how)))
    monkeypatch.setattr(blobs, "list_blobs", lambda prefix, **how: between(list_blobs(prefix, **how)))

    assert list(store.tried_again("sample")) == [(again.id, 1)]


# orders


@pytest.mark.parametrize("queue", ["default", "..", "a/b c%41:ü"])
def test_orders_of_a_queue_are_what_was_given_to_it(place: Place, store: RecordStore, queue: str) -> None:
    nothing = store.control(queue)
    pause = store.put_order(queue, pause_order(T0))
    parts, begun = frozenset({"00000-3-0123456789abcdef"}), frozenset({("t-1", 1), ("t-1", 3), ("t-ü", 2)})
    store.put_order(queue, cancel_order(experiments={"sweep/ü": parts, "empty": frozenset()}, tasks=begun))

    told = store.control(queue)
    covered = told.experiments["sweep/ü"]

    assert nothing == QueueControl()
    assert (told.paused, told.pauses, told.ended, told.tasks) == (True, {pause}, frozenset(), begun)
    assert (covered.parts, covered.ordered_at, told.experiments["empty"].parts) == (parts, T0, frozenset())
    assert abs(covered.before - SystemClock().now()) < timedelta(minutes=5), "by the store's clock"
    assert told.purged_before is None
    assert place.store().control(queue) == told
    assert store.control("another") == QueueControl()


def test_purge_is_ordered_for_every_experiment(store: RecordStore) -> None:
    store.put_order(
        "default", ControlCommand(kind=OrderKind.PURGE, at=T0, experiments={"sweep": frozenset({"00000-1-ab"})})
    )

    told = store.control("default")

    assert told.purged_before == told.experiments["sweep"].before


def test_resume_ends_the_pauses_that_it_names_and_no_other(store: RecordStore) -> None:
    store.put_order("default", pause_order(T0))
    store.put_order("default", pause_order(T0))
    seen = store.control("default")
    unseen = store.put_order("default", pause_order(T0))
    resume = resume_order(seen, T0)
    assert resume is not None
    store.put_order("default", resume)

    left = store.control("default")
    last = resume_order(left, T0)
    assert last is not None
    store.put_order("default", last)

    assert (left.paused, last.ends) == (True, {unseen})
    assert not store.control("default").paused
    assert resume_order(store.control("default"), T0) is None


def test_orders_are_the_same_object_until_there_is_a_new_one(store: RecordStore) -> None:
    store.put_order("default", pause_order(T0))

    first, second = store.control("default"), store.control("default")
    store.put_order("default", pause_order(T0))
    recent, fresh = store.control("default", max_age=timedelta(hours=1)), store.control("default")

    assert first is second
    assert recent is first
    assert len(fresh.pauses) == 2


ORDERER = """
import sys, time
from datetime import UTC, datetime
from functools import partial
from runtime.records import open_records
from runtime.records.control_commands import ControlCommand, OrderKind, pause_order
now = datetime.now(UTC)
cancel_order = partial(ControlCommand, kind=OrderKind.CANCEL, at=now, by="ada@lab")
url, name, start_at, count = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
store = open_records(url)
store.control("default")
time.sleep(max(0, start_at - time.time()))
for n in range(count):
    if n % 3 == 0:
        print(store.put_order("default", pause_order(now)))
    elif n % 3 == 1:
        store.put_order("default", cancel_order(tasks=frozenset({(f"t-{name}-{n}", 1)})))
    else:
        parts = frozenset({f"{n:05}-1-0123456789abcdef"})
        store.put_order("default", cancel_order(experiments={"shared": parts, f"{name}-{n}": parts}))
store.close()
"""


@pytest.mark.slow
@pytest.mark.daily(2)
def test_orders_that_several_processes_give_at_once_are_all_kept(place: Place, store: RecordStore) -> None:
    if not place.processes:
        pytest.skip("memory is one process's own")
    # The servers that stand in for buckets are slow; fewer than 65 orders would not be put together.
    givers, each = 4, 50 if place.server is None else 25
    start_at = SystemClock().now().timestamp() + 2
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ORDERER, store.url, f"p{n}", str(start_at), str(each)],
            env=os.environ | place.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(givers)
    ]
    while any(process.poll() is None for process in processes):
        store.control("default")  # Read concurrently, while orders are compacted.
        time.sleep(0.1)
    printed = [process.communicate(timeout=500)[0] for process in processes]

    assert [process.returncode for process in processes] == [0] * givers
    for told in (store.control("default"), place.store().control("default")):
        assert told.pauses == {identity for text in printed for identity in text.split()}
        assert told.tasks == {(f"t-p{p}-{n}", 1) for p in range(givers) for n in range(1, each, 3)}
        assert told.experiments.keys() == {"shared", *(f"p{p}-{n}" for p in range(givers) for n in range(2, each, 3))}
        assert {int(name[:5]) for name in told.experiments["shared"].parts} == set(range(2, each, 3))


def test_orders_that_threads_give_at_once_are_all_kept(place: Place) -> None:
    stores = [place.store() for _ in range(8)]
    given: list[str] = []

    def give(store: RecordStore) -> None:
        given.extend(store.put_order("default", pause_order(T0)) for _ in range(9))

    threads = [threading.Thread(target=give, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (len(given), place.store().control("default").pauses) == (72, set(given))


def test_many_orders_are_put_together_and_say_the_same(
    place: Place, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = place.store()
    reader.control("default")
    for number in range(ORDERS_APART):
        part = frozenset({f"{number:05}-1-0123456789abcdef"})
        store.put_order("default", cancel_order(experiments={"sweep": part}, tasks=frozenset({(f"t-{number}", 1)})))
    apart = store.control("default")
    pause = store.put_order("default", pause_order(T0))
    both, listed = store.control("default"), len(orders_in(store))
    monkeypatch.setattr("runtime.records.store.MOVED_FOR", timedelta(0))
    monkeypatch.setattr("runtime.records.store.LISTED_WITHIN_S", 300.0)
    store.put_order("default", cancel_order(tasks=frozenset({("t-last", 1)})))

    together = store.control("default")

    assert both == replace(apart, pauses=frozenset({pause}))
    assert together == replace(both, tasks=both.tasks | {("t-last", 1)})
    assert [reader.control("default"), place.store().control("default")] == [together, together]
    assert (listed, len(orders_in(store))) == (ORDERS_APART + 2, 2), "the merged one and the last"


def test_order_that_cannot_be_read_is_named_and_hides_no_other(
    store: RecordStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = store.put_order("default", pause_order(T0))
    blobs: Blobs = store.blobs  # type: ignore[attr-defined]
    damaged, newer = f"orders/default/{'e' * 16}.json", f"orders/default/{'f' * 16}.json"
    blobs.put(damaged, b'{"schema": 1, "order": "pause"}')
    blobs.put(newer, b'{"schema": 2, "order": "hurry"}')
    blobs.put("orders/default/README", b"what people leave there is passed over")

    told = store.control("default"), store.control("default")
    monkeypatch.setattr("runtime.records.store.MOVED_FOR", timedelta(0))
    for number in range(2 * ORDERS_APART):
        store.put_order("default", cancel_order(tasks=frozenset({(f"t-{number}", 1)})))

    assert [control.pauses for control in told] == [{pause}] * 2
    assert caplog.text.count("; passed over") == 2
    assert all(key.rpartition("/")[2] in caplog.text for key in (damaged, newer))
    assert {damaged, newer} <= set(orders_in(store)), "nothing stands in their place"
    assert store.control("default").pauses == {pause}


def orders_in(store: RecordStore) -> list[str]:
    return list(store.blobs.list_keys("orders/default/"))  # type: ignore[attr-defined]


def test_skew_of_a_store_is_none_or_next_to_nothing(store: RecordStore) -> None:
    began = time.monotonic()
    skew = store.skew()
    took = timedelta(seconds=time.monotonic() - began)

    assert skew is None or abs(skew) < timedelta(seconds=5) + took
    assert (skew is None) == (store.holds_tasks or store.url == "memory:")


# workers


def test_workers_lists_the_last_word_of_each_and_leaves_out_the_old(store: RecordStore) -> None:
    now = SystemClock().now().replace(microsecond=0)
    seen = WorkerSeen(
        worker="w-1",
        host="node ü",
        queue="default",
        seen_at=now,
        started_at=T0,
        slots=4,
        running=("t-1",),
        done=7,
        failed=1,
        rate_per_s=2.5,
        labels={"zone": "a"},
        declined={"t-9": "needs 8 GPUs"},
    )
    store.put_worker(dataclasses.replace(seen, done=1))
    store.put_worker(seen)
    store.put_worker(dataclasses.replace(seen, worker="w-0", left=True))
    store.put_worker(dataclasses.replace(seen, worker="w-old", seen_at=now - timedelta(hours=2)))

    assert store.workers(newer_than=timedelta(hours=1)) == [
        dataclasses.replace(seen, worker="w-0", left=True),
        seen,
    ]


# totals


def test_totals_of_an_unknown_experiment_are_zero(store: RecordStore) -> None:
    assert store.totals("unknown").submitted == 0
    assert store.totals("unknown", exact=True).submitted == 0


def test_totals_exact_count_each_task_once_by_its_newest_generation(place: Place, store: RecordStore) -> None:
    tasks = [sample_task(str(n)) for n in range(60)]
    submitted(place, store, *tasks, sample_task(experiment="other"))
    for task in tasks[:30]:
        store.commit(sample_record(task))
    for task in tasks[30:38]:
        bury(store, task)
    bury(store, tasks[38], TaskState.CANCELLED)
    bury(store, tasks[39], TaskState.EXPIRED)
    for task in tasks[30:33]:
        again = next_generation(task)
        submitted(place, store, *() if not store.holds_tasks else (again,))
        store.unmark(task.id, 1, TaskState.FAILED)
        store.commit(sample_record(again, token="b2"))

    totals = store.totals("sample", exact=True)

    assert totals.exact
    assert totals.submitted == 60
    assert {state: n for state, n in totals.counts.items() if n} == {
        TaskState.QUEUED: 20,
        TaskState.SUCCEEDED: 33,
        TaskState.FAILED: 5,
        TaskState.CANCELLED: 1,
        TaskState.EXPIRED: 1,
    }


def test_totals_add_what_workers_last_reported(store: RecordStore) -> None:
    needs_manifest(store)
    store.put_part("sample", 0, [f"{n}" for n in range(100)])
    store.put_part("sample", 1, [f"{n}" for n in range(20)])
    store.put_counters("w-1", {"sample": {TaskState.SUCCEEDED: 5}, "other": {TaskState.SUCCEEDED: 1}})
    store.put_counters("w-1", {"sample": {TaskState.SUCCEEDED: 40}})
    store.put_counters("w/2", {"sample": {TaskState.SUCCEEDED: 10}})
    store.put_counters("w/2", {"sample": {TaskState.SUCCEEDED: 10}})

    totals = store.totals("sample")

    assert not totals.exact
    assert totals.counts == {TaskState.QUEUED: 70, TaskState.SUCCEEDED: 50}
    assert abs(totals.as_of - SystemClock().now()) < timedelta(minutes=1)


def test_tried_again_is_what_has_no_mark_of_its_record(store: RecordStore) -> None:
    needs_manifest(store)
    again, stale, dead = (sample_task(str(n)) for n in range(3))
    for task in (again, stale, dead):
        bury(store, task)
    store.unmark(again.id, 1, TaskState.FAILED)
    store.unmark(stale.id, 1, TaskState.FAILED)
    store.mark(sample_mark(stale, TaskState.CANCELLED))  # from a cancel killed before its refusal

    assert set(store.tried_again("sample")) == {(again.id, 1), (stale.id, 1)}
    assert store.totals("sample", exact=True).counts[TaskState.FAILED] == 1


def test_totals_exact_of_what_was_redriven_and_has_not_ended_are_queued(place: Place, store: RecordStore) -> None:
    needs_manifest(store)
    tasks = [sample_task(str(n)) for n in range(10)]
    submitted(place, store, *tasks)
    for task in tasks[:4]:
        bury(store, task)
    store.mark(sample_mark(tasks[4]))
    store.commit(sample_record(tasks[4]))
    store.unmark(tasks[0].id, 1, TaskState.FAILED)

    assert store.totals("sample", exact=True).counts == {
        TaskState.QUEUED: 6,
        TaskState.SUCCEEDED: 1,
        TaskState.FAILED: 3,
    }


def test_totals_keep_what_an_earlier_worker_of_the_same_name_reported(place: Place) -> None:
    store, clock = place.store(), FakeClock()
    needs_manifest(store)
    if not place.processes:
        pytest.skip("memory is one process's own")
    store.put_part("sample", 0, [f"{n}" for n in range(100)])
    for clock_step, counted in ((0, (30, 40)), (-3600, (2, 5)), (7200, (1, 1))):
        successor = place.store()
        successor._clock = clock  # type: ignore[attr-defined]
        clock.advance(seconds=clock_step)
        for succeeded in counted:
            successor.put_counters("w-1", {"sample": {TaskState.SUCCEEDED: succeeded}})
            clock.advance(seconds=-7)

    assert store.totals("sample").counts == {TaskState.QUEUED: 54, TaskState.SUCCEEDED: 46}


def test_totals_of_what_was_redriven_count_it_as_queued_again(store: RecordStore) -> None:
    needs_manifest(store)
    tasks = [sample_task(str(n)) for n in range(10)]
    store.put_part("sample", 0, [encode_task(task) for task in tasks])
    for task in tasks[:4]:
        bury(store, task)
    store.put_counters("w-1", {"sample": {TaskState.FAILED: 4}})
    store.unmark(tasks[0].id, 1, TaskState.FAILED)

    assert store.totals("sample").counts == {TaskState.QUEUED: 7, TaskState.FAILED: 3}


# files


def test_outputs_of_two_attempts_lie_apart(store: RecordStore) -> None:
    first, second = store.outputs_url("t-1", "a1"), store.outputs_url("t-1", "b2")

    assert first != second
    assert first.endswith("t-1/a1")
    if "://" not in first:
        assert Path(first).is_absolute()


def test_log_appended_by_one_writer_after_another_reads_back_whole(place: Place, store: RecordStore) -> None:
    url = store.append_log("t-1", "a1", b"one\n")
    store.append_log("t-1", "a1", b"two\n")
    store.append_log("t-1", "b2", b"another attempt's\n")
    assert place.store().append_log("t-1", "a1", b"\xff three\n") == url == store.log_url("t-1", "a1")

    assert b"".join(store.read_log(url)) == b"one\ntwo\n\xff three\n"
    assert b"".join(store.read_log(store.log_url("t-1", "never"))) == b""


def test_record_url_names_the_record(place: Place, store: RecordStore) -> None:
    task = sample_task()
    submitted(place, store, task)
    store.commit(sample_record(task))

    url = store.record_url(task.id, 1)
    assert url.startswith(("/", store.url))
    if url.startswith("/"):
        assert task.id in Path(url).read_text()


def test_ids_of_an_experiment_end_with_its_digest() -> None:
    """The layout relies on this to find a record by its id alone."""
    assert task_id("sample", key="1")[-8:] == task_id("sample", key="2")[-8:] != task_id("other", key="1")[-8:]
