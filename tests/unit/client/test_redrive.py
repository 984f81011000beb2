"""Dead letters and retries: generations, refusals, and the state after a kill between the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from runtime.client.tasks.cancel import cancel_experiment, cancel_task
from runtime.client.tasks.redrive import (
    begin_again,
    dead_letter,
    find_dead,
    parse_reasons,
    plan_redrive,
    purge_dead,
    read_dead,
    redrive,
    retry,
)
from runtime.client.tasks.task_facts import read_standing
from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue
from runtime.records.order_scope import Coverage
from runtime.tasks.history import Mark, Record
from runtime.tasks.model import Task, TaskState
from runtime.testing import sample_task
from tests.verbs_support import TTL, Bench


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench.memory() if request.param == "memory" else Bench.sqlite(tmp_path)
    yield bench
    bench.close()


def dead(bench: Bench, *, experiment: str | None = None) -> list[Mark]:
    return list(read_dead(bench.records, experiment))


def redrive_all(bench: Bench) -> list[Any]:
    return list(redrive(bench, dead(bench), now=bench.now))


# listing


def test_dead_letters_are_failed_tasks_and_nothing_else(bench: Bench) -> None:
    bench.put(*(sample_task(str(number)) for number in range(4)))
    failed = bench.fail(message="first line\nlast line")
    bench.succeed()
    cancel_task(bench, bench.queue().peek(1)[0].id, now=bench.now, by="ada")

    [letter] = [dead_letter(mark) for mark in dead(bench)]

    assert (letter.task, letter.error, letter.message) == (failed.task_id, "last line", "first line\nlast line")
    assert (letter.redrivable, letter.raw) == (True, None)


def test_dead_letters_by_reason_and_experiment(bench: Bench) -> None:
    bench.put(sample_task("1"), sample_task("2", experiment="other"))
    bench.fail(reason=EndReason.OOM)
    bench.fail(reason=EndReason.APP_FAILED)

    ooms = list(read_dead(bench.records, reasons=parse_reasons(["oom"])))

    assert [mark.experiment for mark in ooms] == ["sample"]
    assert [mark.experiment for mark in dead(bench, experiment="other")] == ["other"]


def test_listing_dead_letters_leases_nothing(bench: Bench) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    bench.fail()
    before = bench.queue().depth()

    dead(bench)

    assert bench.queue().depth() == before


def test_unknown_reason_names_those_that_exist() -> None:
    with pytest.raises(InvalidValue) as refused:
        parse_reasons(["app_faild"])

    assert "app_failed" in refused.value.allowed


# redrive


def test_redrive_queues_the_next_generation_and_closes_the_mark(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.fail()
    bench.clock.advance(seconds=5)

    [done] = redrive_all(bench)

    [waiting] = bench.queue().peek(10)
    assert (done.task, done.generation, done.queue, done.refused) == (task.id, 2, "default", None)
    assert waiting == replace(task, generation=2, submitted_at=bench.now)
    assert dead(bench) == []


def test_redriven_task_succeeds_once_and_is_then_refused(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.fail()
    redrive_all(bench)
    bench.succeed()

    again = retry(bench, task.id, now=bench.now)

    assert [(record.generation, record.state) for record in bench.records.find_all(task.id)] == [
        (1, "failed"),
        (2, "succeeded"),
    ]
    assert again.refused == "it succeeded"
    assert bench.queue().peek(10) == []


def test_redrive_starts_budgets_anew(bench: Bench) -> None:
    bench.put(sample_task())
    bench.try_again()
    bench.fail()
    redrive_all(bench)

    lease = bench.lease()

    assert lease.tries == 0
    assert bench.records.history(lease.task.id, 2).ended == ()


def test_redriven_task_that_fails_again_is_a_dead_letter_of_its_new_generation(bench: Bench) -> None:
    bench.put(sample_task())
    bench.fail(message="once")
    redrive_all(bench)
    bench.fail(message="twice")

    [mark] = dead(bench)
    [done] = redrive_all(bench)

    assert (mark.generation, mark.message) == (2, "twice")
    assert done.generation == 3


class Killed(Exception):
    pass


@pytest.mark.parametrize("ran_meanwhile", ["nothing", "leased", "succeeded", "failed"])
def test_redrive_killed_before_it_closed_the_mark_doubles_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ran_meanwhile: str
) -> None:
    task = sample_task()
    bench.put(task)
    bench.fail()
    with monkeypatch.context() as patched:

        def die(*_: object) -> None:
            raise Killed

        patched.setattr(bench.records, "unmark", die)
        with pytest.raises(Killed):
            redrive_all(bench)
    if ran_meanwhile == "leased":
        bench.lease()
    if ran_meanwhile == "succeeded":
        bench.succeed()
    if ran_meanwhile == "failed":
        bench.fail(message="again")

    redrive_all(bench)

    depth = bench.queue().depth()
    assert depth is not None
    expected = {"nothing": (1, 0), "leased": (0, 1), "succeeded": (0, 0), "failed": (1, 0)}[ran_meanwhile]
    assert (depth.ready, depth.leased) == expected
    assert dead(bench) == []
    if ran_meanwhile == "failed":
        assert bench.queue().peek(1)[0].generation == 3


def test_redrive_publishes_before_it_closes_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    bench.put(sample_task())
    bench.fail()
    order: list[str] = []
    queue: Any = bench.queue()
    put, unmark = queue.put, bench.records.unmark
    monkeypatch.setattr(queue, "put", lambda tasks: order.append("put") or put(tasks))
    monkeypatch.setattr(bench.records, "unmark", lambda *mark: order.append("unmark") or unmark(*mark))

    redrive_all(bench)

    assert order == ["put", "unmark"]


def test_two_redrives_at_once_each_say_what_they_queued_themselves(bench: Bench) -> None:
    bench.put(*(sample_task(str(number)) for number in range(6)))
    for _ in range(6):
        bench.fail()
    seen = dead(bench)

    first = list(redrive(bench, seen[:4], now=bench.now))
    second = list(redrive(bench, seen, now=bench.now))

    assert [one.done for one in first] == [True] * 4
    assert [(one.done, one.already) for one in second] == [(False, True)] * 4 + [(True, False)] * 2
    assert {one.refused for one in second[:4]} == {"it is queued already, as generation 2"}
    depth = bench.queue().depth()
    assert depth is not None
    assert depth.ready == 6


def test_two_redrives_at_once_where_the_queue_cannot_tell_go_by_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    bench.put(sample_task("1"))
    bench.fail()
    seen, queue = dead(bench), bench.queue()
    put = queue.put
    monkeypatch.setattr(queue, "put", lambda tasks: replace(put(tasks), new=len(tasks), known=0, begun_before=None))

    results = [one for _ in range(2) for one in redrive(bench, seen, now=bench.now)]

    assert [(one.done, one.already) for one in results] == [(True, False), (False, True)]


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_mark_closed_while_another_writes_it_stays_closed(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    bench = Bench.memory()
    bench.put(sample_task("1"))
    record = bench.fail()
    [letter] = dead(bench)
    blobs = bench.records.blobs  # type: ignore[attr-defined]
    put = blobs.put

    def close() -> None:
        assert bench.records.unmark(record.task_id, 1, TaskState.FAILED)

    def slow(key: str, data: bytes) -> None:
        if moment == "between":
            close()
        put(key, data)
        if moment == "after":
            close()

    monkeypatch.setattr(blobs, "put", slow)
    if moment == "before":
        close()

    bench.records.mark(letter)

    assert dead(bench) == []
    assert list(blobs.list_keys("marks/")) == []


def test_redrive_of_what_could_not_be_parsed_is_refused_and_it_stays() -> None:
    bench = Bench.memory()
    bench.bury_malformed("t-bad1", '{"project": 7}', "task is malformed: `project` is a number")

    [done] = redrive_all(bench)

    assert done.refused is not None
    assert "could not be parsed" in done.refused
    assert [mark.raw for mark in dead(bench)] == ['{"project": 7}']


def test_redrive_in_batches_loses_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.client.tasks.redrive.BATCH", 4)
    bench.put(*(sample_task(str(number)) for number in range(11)))
    for _ in range(11):
        bench.fail()
    batches: list[int] = []
    put = bench.queue().put
    monkeypatch.setattr(type(bench.queue()), "put", lambda queue, tasks: (batches.append(len(tasks)), put(tasks))[1])

    done = list(redrive(bench, dead(bench), now=bench.now))

    assert len({one.task for one in done}) == 11
    assert batches == [4, 4, 3]
    assert len(bench.queue().peek(20)) == 11


def record(task: Task, generation: int, state: TaskState) -> Record:
    reason = EndReason.SUCCEEDED if state is TaskState.SUCCEEDED else EndReason.APP_FAILED
    return Record(
        task_id=task.id,
        generation=generation,
        experiment=task.experiment,
        state=state,
        token=f"{generation}",
        reason=reason,
        ended_at=Bench.memory().now,
    )


def mark_of(task: Task, generation: int) -> Mark:
    return Mark(
        task_id=task.id,
        generation=generation,
        experiment=task.experiment,
        state=TaskState.FAILED,
        marked_at=Bench.memory().now,
        reason=EndReason.APP_FAILED,
        message=None,
        task=task,
    )


def test_plan_for_a_mark_without_its_record_leaves_the_task_to_its_queue() -> None:
    task = sample_task()

    plan = plan_redrive(mark_of(task, 1), [], now=Bench.memory().now)

    assert (plan.task, plan.closes) == (None, ())
    assert plan.refused is not None


def test_plan_for_a_mark_older_than_another_record_only_closes_it() -> None:
    task = sample_task()
    recorded = [record(task, 1, TaskState.FAILED), record(task, 2, TaskState.FAILED)]

    plan = plan_redrive(mark_of(task, 1), recorded, now=Bench.memory().now)

    assert (plan.task, plan.closes) == (None, ((1, TaskState.FAILED),))


def test_plan_after_any_success_is_refused_and_closes_the_mark() -> None:
    task = sample_task()
    recorded = [record(task, 1, TaskState.FAILED), record(task, 2, TaskState.SUCCEEDED)]

    plan = plan_redrive(mark_of(task, 1), recorded, now=Bench.memory().now)

    assert (plan.task, plan.refused, plan.closes) == (None, "generation 2 succeeded", ((1, TaskState.FAILED),))


def test_begin_again_drops_an_expiry_that_has_passed_and_keeps_one_to_come() -> None:
    now = Bench.memory().now
    passed = sample_task(expires_at=now - timedelta(seconds=1), not_before=now - timedelta(hours=1))
    to_come = sample_task(expires_at=now + timedelta(hours=1))

    assert (begin_again(passed, now=now).expires_at, begin_again(passed, now=now).not_before) == (None, None)
    assert begin_again(to_come, now=now).expires_at == to_come.expires_at


# retry


@pytest.mark.parametrize("how", ["failed", "cancelled", "expired"])
def test_retry_brings_back_what_did_not_succeed(bench: Bench, how: str) -> None:
    task = sample_task()
    bench.put(task)
    if how == "failed":
        bench.fail()
    elif how == "cancelled":
        cancel_task(bench, task.id, now=bench.now, by="ada")
        bench.queue().lease(1, worker="w-one", ttl=TTL)
    else:
        lease = bench.lease()
        bench._settle(lease, TaskState.EXPIRED, EndReason.EXPIRED, message="expired")

    done = retry(bench, task.id, now=bench.now)

    standing = read_standing(bench.records, task.id)
    assert (done.generation, done.refused) == (2, None)
    assert (standing.state, standing.generation) == (TaskState.QUEUED, 2)


@pytest.mark.parametrize("running", [False, True])
def test_retry_of_what_has_not_ended_is_refused(bench: Bench, running: bool) -> None:
    task = sample_task()
    bench.put(task)
    if running:
        bench.lease("w-seven")

    done = retry(bench, task.id, now=bench.now)

    expected = "it has not ended: it is leased by worker `w-seven`" if running else "it has not ended: it is queued"
    assert done.refused == expected
    assert (read_standing(bench.records, task.id).generation, done.queue) == (1, None)


def test_retry_twice_queues_it_once(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.fail()

    first, second = retry(bench, task.id, now=bench.now), retry(bench, task.id, now=bench.now)

    assert (first.generation, second.refused) == (2, "it has not ended: it is queued")
    assert len(bench.queue().peek(10)) == 1


def test_retry_after_cancel_is_not_cancelled_again(bench: Bench) -> None:
    task = sample_task(submitted_at=bench.now)
    bench.put(task)
    cancel_experiment(bench, "sample", now=bench.now)
    cancel_task(bench, task.id, now=bench.now, by="ada")
    bench.clock.advance(seconds=1)

    retry(bench, task.id, now=bench.now)

    control, coverage = bench.records.control("default"), Coverage(bench.records)
    again = read_standing(bench.records, task.id).task
    assert again is not None
    coverage.read(control, "sample")
    assert (again.generation, coverage.covers(control, again)) == (2, False)


def test_retry_of_a_purged_dead_letter_finds_the_task_where_it_was_submitted(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.fail()
    purge_dead(bench.records, dead(bench))

    done = retry(bench, task.id, now=bench.now)

    assert (done.generation, done.refused) == (2, None)


# purge


def test_purged_dead_letters_are_gone_from_the_list_and_stay_in_the_totals(bench: Bench) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    first = bench.fail()
    bench.fail()

    purged = purge_dead(bench.records, [mark for mark in dead(bench) if mark.task_id == first.task_id])

    assert purged == 1
    assert len(dead(bench)) == 1
    assert find_dead(bench.records, first.task_id) is None
    for exact in (False, True):
        assert bench.records.totals("sample", exact=exact).counts[TaskState.FAILED] == 2


def test_purge_of_what_could_not_be_parsed_drops_its_text() -> None:
    bench = Bench.memory()
    bench.bury_malformed("t-bad1", "not json", "task is malformed: `json` cannot be read")

    purge_dead(bench.records, dead(bench))

    assert dead(bench) == []


def test_find_dead_of_a_task_that_succeeded_is_none(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.succeed()

    assert find_dead(bench.records, task.id) is None


@pytest.mark.parametrize(
    "words", [["retry", "--failed", "sample"], ["queue", "dead", "redrive", "--all"]], ids=" ".join
)
@pytest.mark.parametrize("asked", [False, True], ids=["yes", "asked"])
def test_what_failed_is_read_one_batch_ahead_of_what_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], asked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.cli import output
    from runtime.cli import queue as queue_command
    from runtime.cli import retry as retry_command

    monkeypatch.setattr("runtime.client.tasks.redrive.BATCH", 2)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    bench = Bench.sqlite(tmp_path, "local.db")
    bench.put(*(sample_task(str(number)) for number in range(9)))
    for _ in range(9):
        bench.fail()
    bench.close()
    reads = [0]

    def counted(*args: Any, **more: Any) -> Iterator[Mark]:
        reads.append(0)
        for mark in read_dead(*args, **more):
            reads[-1] += 1
            yield mark

    ahead: list[int] = []

    def print_rows(rows: Any, *_: object) -> None:
        ahead.extend(reads[-1] - number for number, _ in enumerate(rows))

    for command in (retry_command, queue_command):
        monkeypatch.setattr(command, "read_dead", counted)
        monkeypatch.setattr(command, "print_done", print_rows)
    questions: list[str] = []

    def agree(question: str, *, yes: bool) -> None:
        questions.append(question)

    monkeypatch.setattr(retry_command, "confirm", agree)

    assert main([*words, *([] if asked else ["--yes"])]) == 0

    assert "9 queued again" in capsys.readouterr().err
    assert len(ahead) == 9
    assert max(ahead) <= 2
    assert [output.format_count(9) in question for question in questions] == [True] * asked
    assert len(reads) == 2 + asked


def test_task_that_fails_again_while_the_others_are_redriven_is_redriven_once(bench: Bench) -> None:
    bench.put(*(sample_task(str(number)) for number in range(5)))
    for _ in range(5):
        bench.fail()
    seen = []

    for mark in read_dead(bench.records, "sample"):
        seen.append(mark.task_id)
        [again] = redrive(bench, [mark], now=bench.now)
        assert again.done
        bench.fail(message="again")

    assert len(seen) == len(set(seen)) == 5
