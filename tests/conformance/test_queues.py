"""The promises of every queue, tested on every allowed pair of queue and record store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runtime.client.tasks.repair import repair
from runtime.client.tasks.submit import submit_tasks
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible
from runtime.queues.base import Queue
from runtime.records.base import RecordExists
from runtime.records.control_commands import resume_order
from runtime.records.order_scope import Coverage
from runtime.tasks.history import Record
from runtime.tasks.model import Resources, TaskState, WorkflowEntry, new_token, next_generation
from runtime.tasks.wire import encode_task
from tests.conformance.queue_pairs import (
    PAIRS,
    TTL,
    Limit,
    Pair,
    ended_note,
    failed,
    give_back,
    open_pair,
    record_for,
    sample,
    succeeded,
    tasks,
)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with open_pair(request.param, tmp_path, request) as opened:
        yield opened


@pytest.fixture
def queue(pair: Pair) -> Queue:
    return pair.worker()


def test_put_task_is_delivered_whole(pair: Pair, queue: Queue) -> None:
    task = sample(
        "whole",
        entry=WorkflowEntry("proj", "flow", ('--text=it\'s "quoted" {braces} \n newline ünï', "--path=/a b/c", "")),
        resources=Resources(cpus=1, gpus=0.5, memory_bytes=1 << 30),
        max_failures=7,
        outputs=("gs://b/o",),
        extra={"from_the_future": {"nested": [1, None]}},
    )
    queue.put([task])
    assert pair.one(queue).task == task


def test_put_200_kb_of_arguments_arrive_verbatim(pair: Pair, queue: Queue) -> None:
    task = sample("large", entry=WorkflowEntry("p", "w", ("x" * 200_000,)))
    queue.put([task])
    assert pair.one(queue).task.entry == task.entry


def test_lease_of_many_delivers_each_once(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(25))
    leases = pair.lease(queue, 25)
    assert sorted(lease.task.id for lease in leases) == sorted(task.id for task in tasks(25))
    assert len({lease.token for lease in leases}) == 25
    assert pair.nothing(pair.worker())


def test_lease_while_held_is_exclusive(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    pair.one(queue)
    assert pair.nothing(pair.worker())


def test_lease_of_empty_queue_returns_nothing(pair: Pair, queue: Queue) -> None:
    assert queue.lease(3, worker="w-a", ttl=TTL) == []


def test_lease_in_order_of_priority_then_submission(pair: Pair, queue: Queue) -> None:
    if not queue.traits.priorities:
        with pytest.raises(NotPossible):
            queue.put([sample("urgent", priority=5)])
        return
    queue.put([sample("first"), sample("urgent", priority=5), sample("second")])
    assert [lease.task.key for lease in pair.lease(queue, 3)] == ["urgent", "first", "second"]


def test_put_known_task_is_not_delivered_again(pair: Pair, queue: Queue) -> None:
    if pair.lacks(Limit.FORGETS_WHAT_WAS_PUT, queue):
        pytest.skip(Limit.FORGETS_WHAT_WAS_PUT.value)
    first = queue.put(tasks(2))
    again = queue.put(tasks(3))
    assert (first.new, first.known, again.new, again.known) == (2, 0, 1, 2)
    assert len(pair.lease(queue, 10)) == 3


def test_settle_success_records_and_ends_the_lease(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    lease = pair.one(queue)
    settlement = succeeded(lease, value={"loss": 0.5})
    settled = queue.settle([settlement])
    assert settled.refused == []
    assert pair.records.find(lease.task.id, 1) == settlement.record
    assert pair.nothing(queue)


def test_settle_twice_changes_nothing(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    settlement = succeeded(pair.one(queue))
    queue.settle([settlement])
    assert queue.settle([settlement]).refused == []
    assert pair.records.find_all(settlement.record.task_id) == [settlement.record]


def test_settle_claims_next_in_the_same_step(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(3))
    lease = pair.one(queue)
    claimed = queue.settle([succeeded(lease)], claim_next=2).leases
    claimed += pair.lease(queue, 2 - len(claimed)) if len(claimed) < 2 else []
    assert len({one.task.id for one in claimed} - {lease.task.id}) == 2


def test_settle_after_another_recorded_is_refused_and_the_first_stands(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    lease = pair.one(queue)
    first = replace(record_for(lease), token=new_token(), worker="w-other")
    pair.records.commit(first)
    settled = queue.settle([succeeded(lease)])
    assert [refused.record for refused in settled.refused] == [first]
    assert pair.records.find(lease.task.id, 1) == first
    assert pair.nothing(queue)


def test_settle_of_what_was_ended_meanwhile_is_refused_with_the_record_that_stands(pair: Pair, queue: Queue) -> None:
    pair.submit(queue, tasks(1))
    lease = pair.one(queue)
    assert queue.purge() == 1
    settled = queue.settle([failed(lease)])
    assert [one.record.state for one in settled.refused if one.record] == [TaskState.CANCELLED]
    assert list(pair.records.marks("sample", TaskState.FAILED)) == []


def test_settle_failure_marks_a_dead_letter_that_is_not_leased(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(2))
    lease, other = pair.lease(queue, 2)
    queue.settle([failed(lease, message="no such file")])
    queue.settle([succeeded(other)])
    marks = list(pair.records.marks("sample", TaskState.FAILED))
    assert [(mark.task_id, mark.message, mark.reason) for mark in marks] == [
        (lease.task.id, "no such file", EndReason.APP_FAILED)
    ]
    assert marks[0].task == lease.task
    assert pair.nothing(queue)


def test_release_unstarted_comes_back_uncounted(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    lease = pair.one(queue)
    queue.release([give_back(lease)])
    again = pair.one(pair.worker(), worker="w-b")
    assert again.task == lease.task
    assert again.token != lease.token
    assert again.tries == 0
    assert pair.records.history(lease.task.id, 1).ended == ()


def test_release_with_note_is_remembered(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    lease = pair.one(queue)
    note = ended_note(lease)
    queue.release([give_back(lease, note=note, alone=True)])
    again = pair.one(pair.worker(), worker="w-b")
    assert again.task.generation == 1
    assert again.tries == 1
    assert again.alone
    assert pair.records.history(lease.task.id, 1).ended == (note,)


def test_release_with_delay_is_not_delivered_before(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    started = time.time()
    queue.release([give_back(pair.one(queue), delay_s=1.0)])
    while not (leases := queue.lease(1, worker="w-a", ttl=TTL)):
        assert time.time() - started < 240, "the delayed task never came back"
        queue.tend()
        time.sleep(0.05)
    assert time.time() - started >= 1.0
    assert leases[0].task.id == sample("0").id


def test_release_of_settled_lease_changes_nothing(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    lease = pair.one(queue)
    queue.settle([succeeded(lease)])
    queue.release([give_back(lease)])
    assert pair.nothing(queue)


def test_renew_keeps_what_is_held(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(2))
    leases = pair.lease(queue, 2)
    assert queue.renew(leases, TTL) == []


def test_renew_says_what_is_lost(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(2))
    lost, held = pair.lease(queue, 2)
    queue.settle([succeeded(lost)])
    assert queue.renew([lost, held], TTL) == [lost]


def test_next_generation_begins_anew(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    lease = pair.one(queue)
    queue.release([give_back(lease, note=ended_note(lease))])
    lease = pair.one(queue)
    queue.settle([failed(lease)])
    queue.put([next_generation(lease.task)])
    second = pair.one(queue)
    assert second.task == next_generation(lease.task)
    assert second.tries == 0
    assert pair.records.history(second.task.id, 2).ended == ()
    queue.settle([succeeded(second)])
    found = pair.records.find_all(lease.task.id)
    assert [(record.generation, record.state) for record in found] == [
        (1, TaskState.FAILED),
        (2, TaskState.SUCCEEDED),
    ]
    assert list(pair.records.marks("sample", TaskState.FAILED)) == []


def test_cancelled_record_of_waiting_task_stands_against_its_attempt(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(1))
    lease = pair.one(queue)
    cancelled = replace(
        record_for(lease, state=TaskState.CANCELLED, reason=EndReason.CANCELLED), token=new_token(), attempts=0
    )
    pair.records.commit(cancelled)
    refused = queue.settle([succeeded(lease)]).refused
    assert [one.record for one in refused] == [cancelled]
    with pytest.raises(RecordExists):
        pair.records.commit(record_for(lease))


def test_pause_stops_leasing_until_resume(pair: Pair, queue: Queue) -> None:
    queue.pause()
    queue.put(tasks(1))
    assert pair.nothing(queue)
    queue.resume()
    assert pair.one(queue).task == tasks(1)[0]


def test_pauses_are_ended_by_the_resume_that_saw_them_and_by_no_other(pair: Pair, queue: Queue) -> None:
    other = pair.worker()
    queue.put(tasks(1))
    queue.pause()
    seen = pair.records.control(queue.name)
    other.pause()
    resume = resume_order(seen, datetime.now(UTC))
    assert resume is not None
    pair.records.put_order(queue.name, resume)
    assert pair.records.control(queue.name).paused
    assert pair.nothing(pair.worker())
    other.resume()
    other.resume()
    assert not pair.records.control(queue.name).paused
    assert pair.one(pair.worker()).task == tasks(1)[0]


def test_purge_ends_what_waits_and_what_runs_in_the_store(pair: Pair, queue: Queue) -> None:
    pair.submit(queue, [*tasks(4), sample("later", not_before=datetime.now(UTC) + timedelta(hours=1))])
    done, running, tried = pair.lease(queue, 3)
    queue.settle([succeeded(done)])
    queue.release([give_back(tried, note=ended_note(tried))])
    asked: list[int] = []

    purged = queue.purge(progress=asked.append)

    again = queue.purge()
    refused = queue.settle([succeeded(running)]).refused
    pair.submit(queue, [sample("afterwards")])
    late = pair.worker()
    left = [pair.one(late, worker="w-c")]
    nothing_else = pair.nothing(late, worker="w-c")
    states = [pair.records.find(task.id, 1) for task in (*tasks(4), sample("later"))]
    assert (purged, again) == (4, 0)
    assert [record.state for record in states if record] == [
        TaskState.SUCCEEDED if record.token == done.token else TaskState.CANCELLED for record in states if record
    ]
    assert [one.record.state for one in refused if one.record] == [TaskState.CANCELLED]
    assert ([lease.task for lease in left], nothing_else) == ([sample("afterwards")], True)
    assert asked
    totals = pair.records.totals("sample", exact=True).counts
    open_tasks = sum(totals.get(state, 0) for state in TaskState if not state.terminal)
    assert (open_tasks, totals[TaskState.CANCELLED], totals[TaskState.SUCCEEDED]) == (1, 4, 1)
    marks = {mark.task_id for mark in pair.records.marks("sample", TaskState.CANCELLED)}
    assert marks == {record.task_id for record in states if record and record.token != done.token}


def test_purge_of_nothing_ends_nothing(pair: Pair, queue: Queue) -> None:
    assert queue.purge() == 0


def test_purge_that_is_interrupted_is_gone_on_with(pair: Pair, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    if pair.records.holds_tasks:
        pytest.skip("one transaction cannot be half done")
    pair.submit(queue, tasks(40))
    commit, left = pair.records.commit, iter(range(10))

    def interrupted(record: Record) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        commit(record)

    with monkeypatch.context() as patched:
        patched.setattr(pair.records, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.purge()
    orders = pair.records.control(queue.name)
    coverage = Coverage(pair.records)
    coverage.read(orders, "sample")
    first = pair.records.totals("sample", exact=True).counts[TaskState.CANCELLED]
    second = queue.purge()

    assert all(coverage.covers(orders, task) for task in tasks(40)), "workers run none of them in the meantime"
    assert (first, first + second) == (10, 40)
    assert pair.nothing(pair.worker())


def test_purge_ends_what_a_submission_has_listed_and_not_yet_put(pair: Pair, queue: Queue) -> None:
    if pair.records.holds_tasks:
        pytest.skip("to be listed is to be put")
    pair.records.put_experiment("sample", queue=queue.name)
    part = pair.records.put_part("sample", 0, [encode_task(task) for task in tasks(3)])

    purged = queue.purge()
    queue.put(tasks(3))  # The submission continues,
    pair.records.mark_sent(part)
    taken_up = submit_tasks(tasks(3), queue, experiment="sample")  # or is resumed later.

    assert (purged, taken_up.resumed, taken_up.known) == (3, 0, 3)
    assert pair.records.totals("sample", exact=True).counts[TaskState.CANCELLED] == 3
    if not queue.traits.tracks_holders:
        assert pair.nothing(pair.worker())
    control, coverage = pair.records.control(queue.name), Coverage(pair.records)
    coverage.read(control, "sample")
    assert all(coverage.covers(control, task) for task in tasks(3)), "a worker that leases one does not start it"


def test_what_is_submitted_while_a_purge_runs_is_ended_or_delivered(pair: Pair, queue: Queue) -> None:
    submitter = pair.worker()
    pair.submit(submitter, tasks(30))
    some = [sample(f"beside {n}") for n in range(60)]
    begun, over = threading.Event(), threading.Event()

    def submit() -> None:
        for start in range(0, 60, 4):
            pair.submit(submitter, some[start : start + 4])
            begun.set()
            if start == 40:
                over.wait(600)

    submitting = threading.Thread(target=submit)
    submitting.start()
    begun.wait(600)
    purged = queue.purge()
    over.set()
    submitting.join()

    ended = {task.id for task in (*tasks(30), *some) if pair.records.find(task.id, 1)}
    worker = pair.worker()
    delivered = {lease.task.id for lease in pair.lease(worker, 90 - len(ended), worker="w-c")}
    assert (len(ended), ended | delivered) == (purged, {task.id for task in (*tasks(30), *some)})
    assert not ended & delivered
    assert {task.id for task in tasks(30)} <= ended
    assert {task.id for task in some[44:]} <= delivered


def test_repair_after_a_purge_brings_nothing_back_but_what_was_retried(pair: Pair, queue: Queue) -> None:
    pair.submit(queue, tasks(5))
    queue.settle([failed(pair.one(queue))])
    queue.purge()

    repaired = repair(queue, pair.records)

    assert repaired.published == 0
    assert pair.nothing(pair.worker())
    if not pair.records.holds_tasks:
        [mark, *_] = pair.records.marks("sample", TaskState.CANCELLED)
        pair.records.unmark(mark.task_id, 1, TaskState.CANCELLED)  # A retry does the same after publishing.
        assert repair(queue, pair.records).published == 1
        lease = pair.one(pair.worker(), worker="w-c")
        assert (lease.task.id, lease.task.generation) == (mark.task_id, 2)
        control, coverage = pair.records.control(queue.name), Coverage(pair.records)
        coverage.read(control, "sample")
        assert not coverage.covers(control, lease.task)


def test_purge_ends_what_was_begun_again(pair: Pair, queue: Queue) -> None:
    pair.submit(queue, tasks(3))
    for lease in pair.lease(queue, 3):
        queue.settle([failed(lease)])
    again = next_generation(tasks(1)[0])
    queue.put([again])
    pair.records.unmark(again.id, 1, TaskState.FAILED)

    purged = queue.purge()

    record = pair.records.find(again.id, 2)
    assert (purged, record.state if record else None) == (1, TaskState.CANCELLED)
    assert {mark.generation for mark in pair.records.marks("sample") if mark.task_id == again.id} == {2}
    assert pair.nothing(pair.worker())
    if not pair.records.holds_tasks:
        assert repair(queue, pair.records).published == 0


def test_depth_counts_where_it_can(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(3))
    lease = pair.one(queue)
    queue.release([give_back(lease, delay_s=3600)])
    pair.one(queue)
    depth = queue.depth()
    if pair.lacks(Limit.NO_DEPTH, queue):
        assert depth is None
        return
    assert depth is not None
    assert (depth.ready, depth.delayed, depth.leased) == (1, 1, 1)


def test_peek_leases_nothing(pair: Pair, queue: Queue) -> None:
    queue.put(tasks(3))
    if pair.lacks(Limit.NO_PEEK, queue):
        with pytest.raises(NotPossible):
            queue.peek(2)
        return
    assert queue.peek(2) == tasks(2)
    assert len(pair.lease(queue, 3)) == 3
