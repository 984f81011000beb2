"""One bad value, option or stored row fails only its own task: the worker goes on, and leaves when asked to."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.errors import InvalidRecord, StoreUnavailable
from runtime.queues.base import Queue
from runtime.records.base import RecordStore
from runtime.tasks.model import TaskState
from runtime.worker.options import WorkerOptions
from runtime.worker.pending_settlements import REFUSALS, STUCK_AT_MOST
from runtime.worker.worker import Worker
from runtime.worker.worker_log import WorkerLog
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import EXPERIMENT, Bench, bench, open_pair_with_folder

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="attempts' trees are seen through /proc")

KINDS = pytest.mark.parametrize("kind", ["embedded", "folder"])


def opened(bench: Bench, kind: str) -> tuple[Queue, RecordStore]:
    return (bench.open_queue(), bench.records) if kind == "embedded" else open_pair_with_folder(bench)


class Picky:
    """Forwards every call of a queue or a store; `refuse` may raise first, given the call's name and arguments."""

    def __init__(self, inner: Any, refuse: Callable[[str, tuple[Any, ...]], None], **attributes: Any) -> None:
        self._inner, self._refuse = inner, refuse
        for name, value in attributes.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **keywords: Any) -> Any:
            self._refuse(name, args)
            return found(*args, **keywords)

        return call


# tasks' results


@KINDS
@pytest.mark.parametrize("said", ["surrogate", "nul"])
def test_task_that_says_what_is_no_text_is_recorded_as_it_said(bench: Bench, kind: str, said: str) -> None:
    queue, records = opened(bench, kind)
    task, after = bench.function("say", said), bench.function("give", 1)
    queue.put([task, after])

    result = bench.run(queue)

    odd = {"surrogate": "a\udcff b\ud800", "nul": "a\0b"}[said]
    record = bench.record(task, records=records)
    assert (result.succeeded, result.failed) == (2, 0)
    assert record.value == [odd, {odd: float("inf")}]
    assert record.metrics == {odd: 0.5}
    assert record.log.encode(errors="surrogateescape") == b"log \xff\n"


@KINDS
def test_task_that_fails_with_what_is_no_text_is_tried_again_and_recorded(
    bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.FIRST_DELAY", timedelta(seconds=0.02))
    queue, records = opened(bench, kind)
    task = bench.function("raise_odd", max_failures=2)
    queue.put([task])

    bench.run(queue)

    record = bench.record(task, records=records)
    assert (record.state, record.message, record.attempts) == (TaskState.FAILED, "ValueError: a\udcff b", 2)
    assert [note.message for note in records.history(task.id, 1).ended] == ["ValueError: a\udcff b"]


@KINDS
def test_value_that_this_interpreter_cannot_read_fails_its_task_alone(bench: Bench, kind: str) -> None:
    queue, records = opened(bench, kind)
    task, after = bench.function("long_number", max_failures=1), bench.function("give", 1)
    queue.put([task, after])

    result = bench.run(queue)

    record = bench.record(task, records=records)
    assert (result.exit_code, result.succeeded, result.failed) == (0, 1, 1)
    assert (record.state, record.reason) == (TaskState.FAILED, EndReason.APP_FAILED)
    assert (record.message or "").startswith("the value it returned cannot be recorded: it holds a whole number")


# refusals by a store


def unicode_error() -> Exception:
    try:
        "\udcff".encode()
    except UnicodeEncodeError as problem:
        return problem
    raise AssertionError


OWN = {
    "no text": unicode_error,
    "no record": lambda: InvalidRecord("value", ValueError("it is blue")),
    "no column": lambda: sqlite3.InterfaceError("Error binding parameter 9"),
    "a bug": lambda: TypeError("unhashable"),
    "too large": lambda: StoreUnavailable("413 Entity Too Large", retryable=False),
}
"""Permanent errors of a store about one record."""
PROBLEMS = pytest.mark.parametrize("problem", OWN.values(), ids=OWN)
PROBLEMS_AND_KINDS = pytest.mark.parametrize(
    ("problem", "kind"),
    [*((problem, "embedded") for problem in OWN.values()), (OWN["no record"], "folder")],
    ids=[*OWN, "no record, in a folder"],
)
"""Each problem, and each kind of store: a refusal comes before the store is asked, so the two need not be crossed."""


def poisoned(problem: Callable[[], Exception]) -> Callable[[str, tuple[Any, ...]], None]:
    """Refuse every call that contains the poison, alone or beside others."""

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == "settle" and any(one.record.value == "poison" for one in args[0]):
            raise problem()

    return refuse


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.FIRST_DELAY", timedelta(seconds=0.02))


@PROBLEMS_AND_KINDS
@pytest.mark.usefixtures("quick")
def test_result_that_its_store_refuses_is_recorded_as_failed_with_the_reason_and_the_rest_stands(
    bench: Bench, kind: str, problem: Callable[[], Exception]
) -> None:
    queue, records = opened(bench, kind)
    good = [bench.function("give", n) for n in range(6)]
    poison = bench.function("give", "poison")
    queue.put([*good[:3], poison, *good[3:]])

    result = bench.run(Picky(queue, poisoned(problem)), slots=2, reuse_process=True)  # type: ignore[arg-type]

    record = bench.record(poison, records=records)
    said = getattr(problem(), "message", None) or str(problem())
    assert [bench.record(task, records=records).value for task in good] == list(range(6))
    assert (result.succeeded, result.failed, result.exit_code) == (6, 1, 0)
    assert (record.state, record.reason, record.value) == (TaskState.FAILED, EndReason.CONFIG_INVALID, None)
    assert (record.message or "").startswith("its result could not be recorded: ")
    assert said in (record.message or "")
    assert [mark.task for mark in records.marks(EXPERIMENT, TaskState.FAILED)] == [poison]
    [event] = bench.events("task_unrecorded")
    assert event["task"] == poison.id


@pytest.mark.usefixtures("quick")
def test_result_that_could_not_be_recorded_for_lack_of_a_permission_is_recorded_once_it_is_there(bench: Bench) -> None:
    late, good = bench.function("give", "poison"), bench.function("give", 1)
    denied = 0

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        nonlocal denied
        if name == "settle" and denied < REFUSALS + 2 and any(one.record.task_id == late.id for one in args[0]):
            denied += 1
            raise StoreUnavailable("403 Forbidden", denied=True)

    bench.put(late, good)
    with bench.running(over=lambda queue: Picky(queue, refuse)) as running:
        assert wait_until(lambda: bench.records.find(late.id, 1) is not None)
        running.worker.stop()
        result = running.join()

    assert (denied, result.succeeded, result.failed) == (REFUSALS + 2, 2, 0)
    assert bench.record(late).value == "poison"


@PROBLEMS
@pytest.mark.usefixtures("quick")
def test_task_whose_every_record_is_refused_stops_neither_the_worker_nor_the_others(
    bench: Bench, problem: Callable[[], Exception]
) -> None:
    poison, good = bench.function("give", "poison"), bench.function("give", 1)

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == "settle" and any(one.record.task_id == poison.id for one in args[0]):
            raise problem()

    bench.put(poison, good)
    with bench.running(over=lambda queue: Picky(queue, refuse)) as running:
        assert wait_until(lambda: bench.records.find(good.id, 1) is not None)
        assert wait_until(lambda: any(poison.id in event["what"] for event in bench.events("trouble"))), (
            bench.log.getvalue()
        )
        running.worker.stop("enough")
        result = running.join()

    assert (result.exit_code, result.reason) == (0, "enough")
    assert bench.records.find(poison.id, 1) is None
    # It is released, and the next worker may try again.
    assert bench.run().succeeded == 1


@pytest.mark.usefixtures("quick")
def test_store_that_refuses_everything_for_a_while_loses_no_result_and_nothing_more_is_begun(bench: Bench) -> None:
    tasks = [bench.function("note", str(number)) for number in range(20)]
    bench.put(*tasks)
    allowed = threading.Event()
    tries: list[int] = []

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        # Refuse failure records even when allowed, so that none can replace a result at that moment.
        if name == "settle" and (
            not allowed.is_set() or any(one.record.reason is not EndReason.SUCCEEDED for one in args[0])
        ):
            tries.append(len(args[0]))
            raise StoreUnavailable("403 Forbidden", retryable=False)

    with bench.running(over=lambda queue: Picky(queue, refuse), look_ahead=0) as running:
        assert wait_until(lambda: len(tries) > 40)
        begun = (bench.code / "order").read_text().split()
        allowed.set()
        assert wait_until(lambda: bench.records.totals(EXPERIMENT).counts[TaskState.SUCCEEDED] == 20)
        running.worker.stop()
        result = running.join()

    assert len(begun) <= STUCK_AT_MOST + 1
    assert (result.succeeded, result.failed) == (20, 0)
    assert sorted(bench.record(task).value for task in tasks) == sorted(str(number) for number in range(20))
    assert len((bench.code / "order").read_text().split()) == 20


@pytest.mark.usefixtures("quick")
def test_an_end_is_said_and_counted_once_it_is_recorded(bench: Bench) -> None:
    good, bad = bench.function("give", 1), bench.function("fail", "b", max_failures=0)
    bench.put(good, bad)
    allowed = threading.Event()
    tries: list[int] = []

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == "settle" and not allowed.is_set():
            tries.append(len(args[0]))
            raise StoreUnavailable("the disk is full")

    def said() -> list[str]:
        return [event["task"] for kind in ("attempt_succeeded", "attempt_ended") for event in bench.events(kind)]

    with bench.running(over=lambda queue: Picky(queue, refuse), slots=2, reuse_process=True) as running:
        assert wait_until(lambda: 2 in tries)
        early = said()
        allowed.set()
        assert wait_until(lambda: len(said()) == 2)
        running.worker.stop()
        result = running.join()

    assert early == []
    assert said() == [good.id, bad.id]
    assert (result.succeeded, result.failed) == (1, 1)


@PROBLEMS_AND_KINDS
@pytest.mark.usefixtures("quick")
def test_end_whose_note_is_refused_is_recorded_as_failed_and_the_rest_is_given_back(
    bench: Bench, kind: str, problem: Callable[[], Exception]
) -> None:
    queue, records = opened(bench, kind)
    poison, again = bench.function("fail", "poison"), bench.function("fail_first", "a")

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == "release" and any(one.lease.task.id == poison.id and one.note for one in args[0]):
            raise problem()

    queue.put([poison, again])

    bench.run(Picky(queue, refuse))  # type: ignore[arg-type]

    record = bench.record(poison, records=records)
    assert record.state is TaskState.FAILED
    assert (record.message or "").startswith("it could not be given back: ")
    assert bench.record(again, records=records).attempts == 2


@pytest.mark.parametrize(
    ("call", "problem"), [*(("record_started", problem) for problem in OWN.values()), ("history", OWN["a bug"])]
)
@pytest.mark.usefixtures("quick")
def test_task_that_cannot_be_announced_or_looked_up_is_recorded_as_failed_and_the_rest_runs(
    bench: Bench, call: str, problem: Callable[[], Exception]
) -> None:
    poison, good = bench.function("note", "poison"), bench.function("give", 1)

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == call and poison.id in (args[0], getattr(args[0], "id", None)):
            raise problem()

    queue, records = open_pair_with_folder(bench)
    queue.put([poison, good])
    untracked = replace(queue.traits, tracks_holders=False)
    picky = Picky(queue, lambda *_: None, traits=untracked, records=Picky(records, refuse))

    result = bench.run(picky)  # type: ignore[arg-type]

    record = bench.record(poison, records=records)
    assert (result.succeeded, result.failed) == (1, 1)
    assert (record.state, record.attempts) == (TaskState.FAILED, 0)
    assert (record.message or "").startswith("it could not be started: ")
    assert not (bench.code / "order").exists()


DUTIES = ("put_worker", "put_counters", "append_log", "keep_outputs", "outlook", "tend", "renew")


# What catches a problem depends on the duty and not on the problem, so two duties meet the other problems.
@pytest.mark.parametrize(
    ("call", "problem"),
    [
        *((call, OWN["a bug"]) for call in DUTIES),
        *((call, problem) for call in ("append_log", "renew") for problem in (OWN["too large"], OSError)),
    ],
)
@pytest.mark.usefixtures("quick")
def test_duty_that_fails_for_good_keeps_no_task_from_its_record(
    bench: Bench, call: str, problem: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.completion.LOG_EVERY_S", 0.05)
    queue, records = open_pair_with_folder(bench)
    tasks = [bench.function("talk", 20_000), bench.function("give", 1), bench.function("wait", "slow")]
    bench.let_go("slow")
    queue.put(tasks)

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == call:
            raise problem()

    result = bench.run(
        Picky(queue, refuse, records=Picky(records, refuse)),  # type: ignore[arg-type]
        lease=timedelta(seconds=2),
        max_tasks=3,
        idle_timeout=None,
    )

    assert (result.exit_code, result.succeeded) == (0, 3)
    assert all(records.find(task.id, 1) for task in tasks)


def test_worker_whose_queue_cannot_say_what_is_due_waits_and_takes_what_comes(bench: Bench) -> None:
    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == "outlook":
            raise TypeError("no outlook")

    task = bench.function("give", 1)
    with bench.running(over=lambda queue: Picky(queue, refuse)) as running:
        assert wait_until(lambda: bool(bench.events("trouble")))
        bench.put(task)
        assert wait_until(lambda: bench.records.find(task.id, 1) is not None)
        running.worker.stop()
        assert running.join().exit_code == 0


# asked to leave


def away(name: str, args: tuple[Any, ...]) -> None:
    if name == "settle":
        raise StoreUnavailable("the store is away")


def test_worker_asked_to_leave_while_its_store_is_away_leaves_after_the_grace_and_the_task_is_free(
    bench: Bench,
) -> None:
    task = bench.function("give", 1)
    bench.put(task)
    with bench.running(over=lambda queue: Picky(queue, away), grace=timedelta(seconds=0.5)) as running:
        assert wait_until(lambda: bool(bench.events("trouble")))
        running.worker.stop("SIGTERM")
        result = running.join()

    assert (result.exit_code, result.reason) == (0, "SIGTERM")
    assert [event["count"] for event in bench.events("results_dropped")] == [1]
    assert bench.run().succeeded == 1
    assert bench.record(task).value == 1


def test_worker_asked_to_leave_records_what_its_store_takes_within_the_grace(bench: Bench) -> None:
    task = bench.function("give", 1)
    bench.put(task)
    back = threading.Event()

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if not back.is_set():
            away(name, args)

    with bench.running(over=lambda queue: Picky(queue, refuse), grace=timedelta(minutes=10)) as running:
        assert wait_until(lambda: bool(bench.events("trouble")))
        running.worker.stop("SIGTERM")
        assert wait_until(lambda: bool(bench.events("worker_draining")))
        back.set()
        running.join()

    assert bench.record(task).value == 1
    assert bench.events("results_dropped") == []


# undecodable stored data

ROWS = {
    "no JSON": "{",
    "another release": '{"schema":2,"id":"t-1","experiment":"sample","container":"x"}',
    "out of bounds": '{"schema":1,"id":"t-1","experiment":"sample","command":["true"],"timeout_s":0}',
    "wrong types": '{"schema":1,"id":7,"experiment":null,"command":"true"}',
    "nested": '{"schema":1,"id":"t-1","experiment":"sample","command":["true"],"x":'
    + "[" * 100_000
    + "]" * 100_000
    + "}",
    "no UTF-8": b"\xff\xfe",
    "a number": 7,
}


def spoil(bench: Bench, task_id: str, body: object) -> None:
    with sqlite3.connect(bench.path) as connection:
        assert connection.execute("UPDATE tasks SET body=? WHERE id=?", (body, task_id)).rowcount == 1
    connection.close()


# The queue's file holds the row either way; the records take one dead letter of text and one of bytes in a folder, too.
@pytest.mark.parametrize(
    ("body", "kind"),
    [*((body, "embedded") for body in ROWS.values()), (ROWS["no JSON"], "folder"), (ROWS["no UTF-8"], "folder")],
    ids=[*ROWS, "no JSON, in a folder", "no UTF-8, in a folder"],
)
def test_stored_row_that_cannot_be_decoded_is_a_dead_letter_and_the_rest_runs(
    bench: Bench, kind: str, body: object
) -> None:
    queue, records = opened(bench, kind)
    first, spoilt, last = bench.function("give", 1), bench.function("give", 2), bench.function("give", 3)
    queue.put([first, spoilt, last])
    spoil(bench, spoilt.id, body)

    result = bench.run(queue, max_consecutive_failures=1)

    record = bench.record(spoilt, records=records)
    assert (result.exit_code, result.succeeded) == (0, 2)
    assert (record.state, record.reason, record.attempts) == (TaskState.FAILED, EndReason.CONFIG_INVALID, 0)
    assert "malformed" in (record.message or "")
    [mark] = records.marks(EXPERIMENT, TaskState.FAILED)
    assert (mark.task_id, mark.task) == (spoilt.id, None)
    assert (mark.raw or "")[:20] == (body.decode(errors="replace") if isinstance(body, bytes) else str(body))[:20]


def test_leases_of_a_dead_worker_go_back_though_one_of_them_cannot_be_decoded(bench: Bench) -> None:
    queue, records = open_pair_with_folder(bench)
    spoilt, good = bench.function("give", 1), bench.function("give", 2)
    queue.put([spoilt, good])
    held = queue.lease(2, worker="w-dead", ttl=timedelta(seconds=30))
    queue.mark_running([lease.token for lease in held])
    spoil(bench, spoilt.id, "{")
    queue.close()

    queue, records = open_pair_with_folder(bench)
    result = bench.run(queue, idle_timeout=timedelta(minutes=4), max_tasks=2)

    assert result.succeeded == 1
    assert bench.record(spoilt, records=records).state is TaskState.FAILED
    assert bench.record(good, records=records).value == 2


# turns of the loop


class Turns(WorkerLog):
    """Counts the turns of the loop, each of which polls it once for lines to write."""

    def __init__(self) -> None:
        super().__init__(io.StringIO(), json_lines=True)
        self.count = 0

    def tick(self, *, last: bool = False) -> None:
        self.count += 1
        super().tick(last=last)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]  # type: ignore[attr-defined]


def serve(queue: Any, turns: Turns, *, until: Callable[[], bool], **options: Any) -> None:
    """Run a worker in a thread until the condition holds."""
    worker = Worker(queue, WorkerOptions(grace=timedelta(seconds=0.1), **options), reporter=turns)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        assert wait_until(until)
    finally:
        worker.stop()
        worker.stop()
        thread.join(240)
        queue.close()
    assert not thread.is_alive()


class Calls(dict[str, list[int]]):
    """The turns at which each call was made."""

    def __missing__(self, name: str) -> list[int]:
        self[name] = []
        return self[name]


TURNS_AT_MOST = 60
"""Between two tries about a second apart; a few duties come up each second. A loop that spins makes hundreds of
thousands of turns, and a loop on a busy machine makes fewer."""


def test_loop_sleeps_while_its_store_is_away(bench: Bench) -> None:
    turns, calls = Turns(), Calls()

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        calls[name].append(turns.count)
        away(name, args)

    bench.put(bench.function("give", 1), bench.function("give", 2))

    serve(Picky(bench.open_queue(), refuse), turns, until=lambda: len(calls["settle"]) >= 3)

    between = [after - before for before, after in zip(calls["settle"], calls["settle"][1:], strict=False)]
    assert max(between[:2]) <= TURNS_AT_MOST


def test_loop_sleeps_while_a_remote_lease_does_not_answer(bench: Bench) -> None:
    turns, calls = Turns(), Calls()
    answer = threading.Event()

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        calls[name].append(turns.count)
        if name == "lease":
            answer.wait(240)

    queue, _ = open_pair_with_folder(bench)
    remote = replace(queue.traits, remote=True)

    def long_enough() -> bool:
        # Upkeep continues while the lease call is pending.
        if len(calls["tend"]) < 3:
            return False
        answer.set()
        return True

    serve(Picky(queue, refuse, traits=remote), turns, until=long_enough)

    assert calls["lease"][0] < calls["tend"][2]
    assert calls["tend"][2] - calls["tend"][0] <= 2 * TURNS_AT_MOST


def test_loop_sleeps_while_settling_hangs_and_then_settles_together_what_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.settling.SETTLING_HANGS_S", 1000.0)
    turns, calls = Turns(), Calls()
    settled: list[int] = []
    answer = threading.Event()

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        calls[name].append(turns.count)
        if name == "settle":
            settled.append(len(args[0]))
            answer.wait(240)

    queue, _ = open_pair_with_folder(bench)
    remote = replace(queue.traits, remote=True)
    queue.put([bench.function("note", f"{number}") for number in range(12)])
    hung: list[tuple[int, ...]] = []

    def all_settled() -> bool:
        order = bench.code / "order"
        if not hung and order.exists() and len(order.read_text().splitlines()) == 12 and len(calls["tend"]) >= 3:
            hung.append(tuple(settled))
            answer.set()
        return sum(settled) == 12

    serve(Picky(queue, refuse, traits=remote), turns, until=all_settled, look_ahead=20)

    assert len(hung[0]) == 2
    assert len(settled) <= 5
    assert calls["tend"][2] - calls["tend"][0] <= 2 * TURNS_AT_MOST


def test_what_ends_while_two_calls_to_settle_hang_is_settled_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.settling.SETTLING_HANGS_S", 0.05)
    queue, records = open_pair_with_folder(bench)
    tasks = [bench.function("give", number) for number in range(6)]
    queue.put(tasks)
    hung: list[set[str]] = []
    answer = threading.Event()

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == "settle" and len(hung) < 2:
            hung.append({one.lease.task.id for one in args[0]})
            answer.wait(240)

    def others_settled() -> bool:
        if len(hung) >= 2 and all(records.find(task.id, 1) for task in tasks if task.id not in set().union(*hung)):
            answer.set()
        return answer.is_set()

    remote = replace(queue.traits, remote=True)
    serve(Picky(queue, refuse, traits=remote), Turns(), until=others_settled, look_ahead=9)


def test_loop_sleeps_after_a_second_signal_while_its_store_is_away(bench: Bench) -> None:
    turns, calls = Turns(), Calls()
    bench.put(bench.function("give", 1))

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        calls[name].append(turns.count)
        away(name, args)

    worker = Worker(
        Picky(bench.open_queue(), refuse),  # type: ignore[arg-type]
        WorkerOptions(grace=timedelta(minutes=10)),
        reporter=turns,
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert wait_until(lambda: bool(calls["settle"]))
    worker.stop()
    worker.stop()
    seen = len(calls["settle"])
    assert wait_until(lambda: len(calls["settle"]) >= seen + 2)
    worker.stop()
    thread.join(240)

    assert not thread.is_alive()
    between = [after - before for before, after in zip(calls["settle"], calls["settle"][1:], strict=False)]
    assert max(between[seen:]) <= TURNS_AT_MOST


# orders that cannot be read


def deaf(problem: Callable[[], Exception], calls: Calls, turns: Turns) -> Callable[[str, tuple[Any, ...]], None]:
    def refuse(name: str, args: tuple[Any, ...]) -> None:
        calls[name].append(turns.count)
        if name == "control":
            raise problem()

    return refuse


def put_behind(queue: Queue, refuse: Callable[[str, tuple[Any, ...]], None], *, remote: bool) -> Any:
    traits = replace(queue.traits, remote=remote)
    return Picky(queue, refuse, traits=traits, records=Picky(queue.records, refuse))


REMOTE = pytest.mark.parametrize("remote", [False, True], ids=["inline", "remote"])


@REMOTE
@pytest.mark.parametrize("kind", ["embedded", "folder"])
def test_worker_that_cannot_read_its_orders_leases_nothing_says_why_once_and_leaves_when_told(
    bench: Bench, kind: str, remote: bool
) -> None:
    turns, calls = Turns(), Calls()
    queue, _ = opened(bench, kind)
    queue.put([bench.function("give", 1)])
    refuse = deaf(lambda: StoreUnavailable("403 Forbidden", retryable=False), calls, turns)

    serve(put_behind(queue, refuse, remote=remote), turns, until=lambda: len(calls["control"]) >= 3)

    between = [after - before for before, after in zip(calls["control"], calls["control"][1:], strict=False)]
    assert calls["lease"] == []
    assert max(between) <= TURNS_AT_MOST
    # The order to leave came right after the last try, and the worker made no further one.
    assert turns.count - calls["control"][2] <= TURNS_AT_MOST
    said = [event["message"] for event in turns.events() if event["event"] == "trouble"]
    assert said == ["takes no tasks until it has read its orders: 403 Forbidden; tried again, nothing is lost"]
    assert turns.events()[-1]["reason"] == "asked to stop"


# Beside the loop, the call brings back any exception alike.
@pytest.mark.parametrize(
    ("problem", "remote"),
    [*((problem, False) for problem in OWN.values()), (OWN["a bug"], True), (OWN["too large"], True)],
)
@pytest.mark.usefixtures("quick")
def test_worker_that_cannot_read_its_orders_leaves_after_its_idle_time_with_code_3_and_the_reason(
    bench: Bench, remote: bool, problem: Callable[[], Exception]
) -> None:
    task = bench.function("give", 1)
    bench.put(task)
    queue = put_behind(bench.open_queue(), deaf(problem, Calls(), Turns()), remote=remote)

    result = bench.run(queue, idle_timeout=timedelta(seconds=0.2))

    said = getattr(problem(), "message", None) or f"{type(problem()).__name__}: {problem()}"
    assert (result.exit_code, result.succeeded) == (3, 0)
    assert result.reason == f"its orders could not be read for 0.2 s: {said}"
    assert bench.run().succeeded == 1


def test_worker_whose_orders_are_not_answered_says_so_and_leaves_after_its_idle_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.control.ANSWER_WITHIN", timedelta(seconds=0.1))
    answer = threading.Event()

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == "control":
            answer.wait(240)
        if name == "put_worker" and args[0].left:
            answer.set()  # The worker has decided, and waits for its calls.

    result = bench.run(put_behind(bench.open_queue(), refuse, remote=True), idle_timeout=timedelta(seconds=1))

    assert (result.exit_code, result.reason) == (
        3,
        "its orders could not be read for 1 s: TimeoutError: no answer yet",
    )
    [event] = bench.events("trouble")
    assert event["what"] == "takes no tasks until it has read its orders"


@pytest.mark.usefixtures("quick")
def test_worker_whose_orders_can_be_read_again_takes_what_waits(bench: Bench) -> None:
    refused: list[str] = []

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name == "control" and len(refused) < 5:
            refused.append(name)
            raise StoreUnavailable("403 Forbidden", retryable=False)

    task = bench.function("give", 1)
    bench.put(task)

    result = bench.run(
        put_behind(bench.open_queue(), refuse, remote=False), idle_timeout=timedelta(minutes=4), max_tasks=1
    )

    assert (result.exit_code, result.succeeded, len(refused)) == (0, 1, 5)


@pytest.mark.usefixtures("quick")
def test_worker_that_could_read_its_orders_before_goes_by_those_and_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.control.CONTROL_EVERY_S", 0.02)
    calls, turns = Calls(), Turns()
    broken = deaf(lambda: StoreUnavailable("403 Forbidden", retryable=False), calls, turns)

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name != "control" or calls["control"] or calls["lease"]:
            broken(name, args)

    task = bench.function("wait", "slow")
    bench.put(task)
    with bench.running(over=lambda queue: put_behind(queue, refuse, remote=False)) as running:
        bench.began("slow")
        assert wait_until(lambda: len(calls["control"]) >= 3)
        bench.let_go("slow")
        assert wait_until(lambda: bench.records.find(task.id, 1) is not None)
        running.worker.stop()
        assert running.join().exit_code == 0
