"""A worker's log lines: golden files of every event, summaries, and robustness against a failing log."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from runtime.end_reasons import Budget, EndReason
from runtime.errors import QueueUnavailable
from runtime.queues.base import RefusedSettlement
from runtime.tasks.history import Lease, Record, Release, Settlement
from runtime.tasks.model import CommandEntry, Task, TaskState, WorkflowEntry
from runtime.tasks.retry_policy import Drop, GiveUp, RetryAt, Settle, TryAgain, Verdict
from runtime.testing import FakeClock, sample_task
from runtime.worker.attempts.model import AttemptEnd
from runtime.worker.notices import PreemptionNotice
from runtime.worker.slots import HostResources, plan_slots
from runtime.worker.worker_log import FAILURES_PER_S, SUCCESSES_PER_S, TROUBLE_EVERY_S, WorkerLog, describe_retry

NOW = datetime(2026, 1, 31, 12, 3, 4, tzinfo=UTC)
TRAIN = sample_task("7", entry=WorkflowEntry("lab", "train", ("--lr=1e-3",)))


class Log:
    """A reporter that writes to a string, with clocks that move only when set."""

    def __init__(self, **options: Any) -> None:
        self.stream = io.StringIO()
        self.clock = FakeClock(NOW)
        self.reporter = WorkerLog(self.stream, clock=self.clock, ticks=self.clock.boottime, zone=UTC, **options)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def lines(self) -> list[str]:
        """Return the lines since the last call, without time stamps."""
        lines = [line.partition(" ")[2] for line in self.text.splitlines()]
        self.stream.seek(0)
        self.stream.truncate()
        return lines


def ended(
    reason: EndReason = EndReason.SUCCEEDED, message: str | None = None, seconds: float = 3.2, **more: Any
) -> AttemptEnd:
    return AttemptEnd("token", 0, reason, started_at=1_000.0, ended_at=1_000.0 + seconds, message=message, **more)


def record(state: TaskState, reason: EndReason, task: Task = TRAIN, **more: Any) -> Record:
    return Record(
        task_id=task.id,
        generation=1,
        experiment=task.experiment,
        state=state,
        token="token",
        reason=reason,
        ended_at=NOW,
        **more,
    )


def again(charged: Budget, spent: int, wait_s: float = 0, *, alone: bool = False) -> TryAgain:
    decision = RetryAt(NOW + timedelta(seconds=wait_s), alone, charged, spent)
    return TryAgain(Release(Lease(TRAIN, "token"), decision.not_before), decision)


def settle(state: TaskState, reason: EndReason) -> Settle:
    return Settle(Settlement(Lease(TRAIN, "token"), record(state, reason)))


def say_everything(log: Log) -> None:
    """Write one event of every kind, each in a second of its own."""
    say, clock = log.reporter, log.clock
    events: list[Callable[[], None]] = [
        lambda: say.started("w-node3-0a1b", "default", plan_slots(HostResources(8, 64 * 1024**3), 2)),
        lambda: None,  # A second without an event.
        lambda: say.began(TRAIN, 0, 1),
        lambda: say.began(TRAIN, 1, 2),
        lambda: say.succeeded(TRAIN, ended()),
        lambda: say.ended(
            TRAIN, ended(EndReason.APP_FAILED, "ValueError: bad rate"), again(Budget.FAILURES, 1, wait_s=10)
        ),
        lambda: say.ended(TRAIN, ended(EndReason.OOM, "killed at 2GiB"), settle(TaskState.FAILED, EndReason.OOM)),
        lambda: say.ended(TRAIN, ended(EndReason.PREEMPTED), again(Budget.PREEMPTIONS, 0)),
        lambda: say.ended(TRAIN, ended(EndReason.LOST), again(Budget.PREEMPTIONS, 2, wait_s=10, alone=True)),
        lambda: say.ended(TRAIN, ended(EndReason.CANCELLED), settle(TaskState.CANCELLED, EndReason.CANCELLED)),
        lambda: say.ended(TRAIN, ended(EndReason.TIMEOUT, "ran for 2h"), Drop("its lease had passed on")),
        lambda: say.buried(TRAIN, GiveUp(EndReason.LOST, "its worker was lost on 3 hosts one after the other")),
        lambda: say.unstarted(record(TaskState.EXPIRED, EndReason.EXPIRED, message="expired at noon"), TRAIN),
        lambda: say.unstarted(record(TaskState.CANCELLED, EndReason.CANCELLED), TRAIN),
        lambda: say.unstarted(record(TaskState.FAILED, EndReason.CONFIG_INVALID, message="`args` is a number")),
        lambda: say.declined(TRAIN, "wants 2 GPUs, a slot has 0.25"),
        lambda: say.lost(TRAIN, None),
        lambda: say.lost(TRAIN, record(TaskState.SUCCEEDED, EndReason.SUCCEEDED, worker="w-node4-9f")),
        lambda: say.lost(TRAIN, record(TaskState.CANCELLED, EndReason.CANCELLED)),
        lambda: say.refused(RefusedSettlement(Lease(TRAIN, "token"), holder="w-node4-9f")),
        lambda: say.refused(
            RefusedSettlement(
                Lease(TRAIN, "token"), record=record(TaskState.SUCCEEDED, EndReason.SUCCEEDED, worker="w-node4-9f")
            )
        ),
        lambda: say.trouble("leasing", QueueUnavailable("queue `default` does not answer", hint="is it up?")),
        lambda: say.trouble("reporting in", OSError(28, "No space left on device")),
        lambda: say.paused(2, 3, 1.9),
        lambda: say.idle(10),
        lambda: say.notice(
            PreemptionNotice("gce", NOW, NOW + timedelta(seconds=30), "Compute Engine preempts this machine")
        ),
        lambda: say.draining("received SIGTERM", 2, 30),
        lambda: say.draining("idle for 10 s", 0, 0),
        lambda: say.draining("3 tasks in a row failed and none succeeded (--max-consecutive-failures 3)", 1, 0),
        lambda: say.killing(1),
        lambda: say.left("received SIGTERM", 12_345, 2, 1),
    ]
    for event in events:
        clock.advance(seconds=1)
        event()


def test_human_lines(golden: Callable[[str, str], None]) -> None:
    log = Log()
    say_everything(log)

    golden("reporting/human.txt", log.text)


def test_json_lines(golden: Callable[[str, str], None]) -> None:
    log = Log(json_lines=True)
    say_everything(log)

    golden("reporting/lines.jsonl", log.text)


def test_json_lines_say_time_severity_and_worker() -> None:
    log = Log(json_lines=True)
    log.reporter.started("w-1", "default", plan_slots(HostResources(1, 1024**3), 1))
    log.reporter.ended(TRAIN, ended(EndReason.APP_FAILED, "é\udc80"), settle(TaskState.FAILED, EndReason.APP_FAILED))

    first, second = map(json.loads, log.text.splitlines())
    assert first["time"] == "2026-01-31T12:03:04.000Z"
    assert (second["severity"], second["worker"], second["task"]) == ("ERROR", "w-1", TRAIN.id)
    assert (second["next"], second["reason"], second["problem"]) == ("dead letter", "app_failed", "é\udc80")


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (RetryAt(NOW + timedelta(seconds=4), False, Budget.FAILURES, 1), "retried in 4s (1 of 3 failures spent)"),
        (RetryAt(NOW, False, Budget.FAILURES, 2), "retried at once (2 of 3 failures spent)"),
        (RetryAt(NOW, False, Budget.PREEMPTIONS, 0), "goes back to the queue, due at once (spends no failure)"),
        (
            RetryAt(NOW + timedelta(minutes=1), True, Budget.PREEMPTIONS, 2),
            "goes back to the queue, due in 1m, with no other suspect beside it (spends no failure; 2 of 100 early losses)",
        ),
        (
            RetryAt(NOW + timedelta(seconds=2), False, Budget.NONE, 1),
            "goes back to the queue, due in 2s (spends no failure)",
        ),
    ],
)
def test_describe_retry_says_when_and_who_pays(decision: RetryAt, expected: str) -> None:
    assert describe_retry(decision, TRAIN, NOW) == expected


def test_few_successes_a_second_get_a_line_each() -> None:
    log = Log()

    for _ in range(3):
        for _ in range(SUCCESSES_PER_S):
            log.reporter.succeeded(TRAIN, ended())
        log.clock.advance(seconds=1)
    log.reporter.tick()

    assert len(log.lines()) == 3 * SUCCESSES_PER_S
    assert log.reporter.due_in() is None


def test_many_successes_a_second_are_summed_up_once_a_second() -> None:
    log = Log()
    for _ in range(1000):
        log.reporter.succeeded(TRAIN, ended())
    assert len(log.lines()) == SUCCESSES_PER_S
    assert log.reporter.due_in() == 1.0

    log.clock.advance(seconds=1)
    log.reporter.tick()
    assert log.lines() == [f"succeeded  {1000 - SUCCESSES_PER_S} more tasks in 1s: recorded; 1,000 by this worker"]

    # At this rate, no task gets its own line, and begins are not logged.
    for _ in range(1000):
        log.reporter.began(TRAIN, 0, 1)
        log.reporter.succeeded(TRAIN, ended())
    assert log.lines() == []
    log.clock.advance(seconds=1)
    log.reporter.succeeded(TRAIN, ended())
    assert log.lines() == ["succeeded  1,000 more tasks in 1s: recorded; 2,001 by this worker"]

    # After a slowdown, the last task is logged, and from then on each has its own line again.
    log.clock.advance(seconds=1)
    log.reporter.tick()
    assert log.lines() == ["succeeded  1 more task in 1s: recorded; 2,001 by this worker"]
    log.reporter.began(TRAIN, 0, 1)
    log.reporter.succeeded(TRAIN, ended())
    assert len(log.lines()) == 2


def test_every_success_is_in_exactly_one_line() -> None:
    log = Log(json_lines=True)
    for count in (3, 700, 5, 6, 7, 0, 40, 1):
        for _ in range(count):
            log.reporter.succeeded(TRAIN, ended())
        log.clock.advance(seconds=1)
        log.reporter.tick()
    log.reporter.left("done", 762, 0, 0)

    lines = [json.loads(line) for line in log.text.splitlines()]
    single = sum(line["event"] == "attempt_succeeded" for line in lines)
    summed = sum(line["count"] for line in lines if line["event"] == "attempts_succeeded")
    assert single + summed == 762
    assert summed > 0
    assert single > 0


def test_what_is_not_said_yet_is_said_before_leaving() -> None:
    log = Log()
    for _ in range(SUCCESSES_PER_S + 2):
        log.reporter.succeeded(TRAIN, ended())
    log.lines()

    log.reporter.left("drained", SUCCESSES_PER_S + 2, 0, 0)

    summary, left = log.lines()
    assert summary.startswith("succeeded  2 more tasks")
    assert left == f"worker     left: drained; {SUCCESSES_PER_S + 2} succeeded, 0 failed, 0 released"


def test_flood_of_failures_is_summed_up_by_what_comes_next() -> None:
    log = Log()
    verdicts: list[Verdict] = [again(Budget.FAILURES, 1), settle(TaskState.FAILED, EndReason.APP_FAILED)]
    for index in range(FAILURES_PER_S + 30):
        log.reporter.ended(TRAIN, ended(EndReason.APP_FAILED, "no"), verdicts[index % 2])
    assert len(log.lines()) == FAILURES_PER_S

    log.clock.advance(seconds=1)
    log.reporter.tick()

    assert log.lines() == [
        "failed     30 more attempts did not succeed: 15 dead letter, 15 retried; `runtime status` lists them"
    ]


def test_same_trouble_is_said_once_in_a_while() -> None:
    log = Log()
    for _ in range(100):
        log.reporter.trouble("leasing", OSError(111, "Connection refused"))
    log.reporter.trouble("recording", None)
    assert len(log.lines()) == 2

    log.clock.advance(seconds=TROUBLE_EVERY_S)
    log.reporter.trouble("leasing", OSError(111, "Connection refused"))

    (line,) = log.lines()
    assert "(99 times more since it was last said)" in line


def test_trouble_with_a_hostile_answer_of_a_service_cannot_move_the_cursor() -> None:
    log = Log()

    log.reporter.trouble("leasing\x1b[2A", QueueUnavailable("no\x9b6n\nanswer", hint="try\u202e it"))

    (line,) = log.lines()
    assert r"leasing\x1b[2A: no\x9b6n answer; tried again, nothing is lost; try\u202e it" in line


def test_message_stays_on_one_line_and_cannot_move_the_cursor() -> None:
    log = Log()

    task = sample_task(entry=CommandEntry(("printf", "\x1b[2J\n")))
    log.reporter.ended(task, ended(EndReason.APP_FAILED, "line 1\nline\x1b[31m 2 \udc80" + "x" * 999), Drop("gone"))

    (line,) = log.lines()
    assert r"line 1 line\x1b[31m 2 \udc80x" in line
    assert "\x1b" not in line
    assert len(line) < 600


def test_colour_marks_the_word_only() -> None:
    log = Log(colour=True)
    log.reporter.succeeded(TRAIN, ended())

    assert log.text.startswith("\x1b[2m12:03:04\x1b[0m \x1b[32msucceeded\x1b[0m  t-")


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_log_that_cannot_be_written_stops_nothing() -> None:
    reporter = WorkerLog(BrokenStream(), clock=FakeClock())

    reporter.started("w-1", "default", plan_slots(HostResources(1, 1024**3), 1))
    reporter.succeeded(TRAIN, ended())


def report_from_child(stderr: int, **environ: str) -> None:
    code = "from runtime.worker.worker_log import WorkerLog; WorkerLog.for_stderr().idle(10)"
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    subprocess.run(
        [sys.executable, "-c", code], stderr=stderr, env={**environment, "TERM": "xterm", **environ}, check=True
    )


def test_format_follows_the_terminal() -> None:
    reading, writing = os.pipe()
    report_from_child(writing)
    assert json.loads(os.read(reading, 1000))["event"] == "worker_idle"

    master, terminal = pty.openpty()
    report_from_child(terminal)
    assert b"\x1b[1mworker" in os.read(master, 1000)
    report_from_child(terminal, NO_COLOR="1")
    plain = os.read(master, 1000)
    assert b"\x1b" not in plain
    assert b"worker     nothing to do; leaves in 10s" in plain
    for fd in (reading, writing, master, terminal):
        os.close(fd)


def test_importing_loads_no_logging() -> None:
    code = "import sys, runtime.worker.worker_log; assert 'logging' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_success_costs_next_to_nothing_when_many() -> None:
    log = Log()
    end = ended()
    for _ in range(SUCCESSES_PER_S):
        log.reporter.succeeded(TRAIN, end)
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(1000):
            log.reporter.succeeded(TRAIN, end)
    finally:
        sys.setprofile(None)

    # The call itself, and one call of the test's clock.
    assert calls < 5_000
