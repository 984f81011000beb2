"""The steps after an attempt: what is recorded, where its task goes, and what it costs the worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.errors import StoreUnavailable
from runtime.queues.base import SettleAnswer
from runtime.queues.memory import MemoryQueue
from runtime.tasks.history import EndedNote, History, Lease, Record, Release
from runtime.tasks.model import TaskState
from runtime.testing import FakeClock, sample_task
from runtime.worker.attempts.model import AttemptEnd
from runtime.worker.completion import AttemptLogs, Completion
from runtime.worker.metrics import WorkerMetrics
from runtime.worker.worker_context import HeldLease
from tests.services_support import wait_until
from tests.unit.worker.parts_bench import Parts
from tests.unit.worker.parts_bench import clock as clock  # noqa: PLC0414 (a fixture)

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
"""The start of every attempt here, by the wall clock; it takes two seconds."""
OUTGREW = b"\n[runtime: the log outgrew 8B; what follows is its end]\nthe end"


class Counted(WorkerMetrics):
    def __init__(self) -> None:
        self.attempts: list[tuple[EndReason, float]] = []
        self.released: list[EndReason | None] = []

    def attempt_ended(self, reason: EndReason, seconds: float) -> None:
        self.attempts.append((reason, seconds))

    def task_released(self, reason: EndReason | None = None) -> None:
        self.released.append(reason)


class Ends(Parts):
    """A worker's parts, for attempts that have ended."""

    def __init__(self, folder: Path, clock: FakeClock, **options: Any) -> None:
        super().__init__(folder, clock, **options)
        self.logs = AttemptLogs(self.services)
        self.ending = Completion(self.services, self.outbox, self.dispatch, self.preparing, self.logs, self.captures)
        self.metrics = self.services.metrics = Counted()
        self.printed: dict[str, bytes] = {}
        """By token: output that no call has drained."""
        self.services.pool.drain_log = lambda token: self.printed.pop(token, b"")  # type: ignore[method-assign]

    def hold(self, key: str = "1", **fields: Any) -> HeldLease:
        """Hold the lease of a task whose attempt runs."""
        held = self.holdings.take(Lease(sample_task(key, **fields), f"token-{key}"), self.now, self.now)
        held.sent = True
        return held

    def end(self, held: HeldLease, reason: EndReason = EndReason.SUCCEEDED, **facts: Any) -> None:
        self.ending.conclude(AttemptEnd(held.lease.token, 0, reason, BEGAN, BEGAN + 2, **facts), self.now)

    def fail(self, key: str, reason: EndReason = EndReason.APP_FAILED, **fields: Any) -> None:
        self.end(self.hold(key, **fields), reason)

    def record(self) -> Record:
        """Return the only record that waits to be settled."""
        [settlement] = self.outbox.settlements
        return settlement.record

    def note(self) -> EndedNote:
        """Return the only note that goes back with a task."""
        [release] = self.outbox.releases
        assert release.note is not None
        return release.note

    def succeed(self) -> None:
        """Have an attempt succeed and its record committed."""
        self.end(self.hold("good"))
        self.outbox.count(self.outbox.settlements, SettleAnswer())
        self.outbox.settlements.clear()


class Places(Ends):
    """Finds where an unstarted task goes."""

    def __init__(self, folder: Path, clock: FakeClock, *, leaving: str | None = None) -> None:
        super().__init__(folder, clock)
        if leaving is not None:
            self.leaving.ask(leaving)

    def end(self, *, alone: bool = False, stop_reason: EndReason | None = None) -> str:
        """End an attempt that has not begun; return its task's place."""
        waiting = HeldLease(Lease(sample_task("waiting"), "w"))
        self.dispatch.ready.append(waiting)
        held = self.holdings.take(Lease(sample_task("1"), "t", alone=alone), self.now, self.now)
        held.sent, held.stop_reason = True, stop_reason
        self.ending.conclude(AttemptEnd("t", 0, EndReason.PREEMPTED, self.now, self.now, not_started=True), self.now)
        assert not held.sent
        found = {
            "given back": held.lease in [release.lease for release in self.outbox.releases],
            "apart": held in self.dispatch.suspects.waiting,
            "first": self.dispatch.ready[0] is held,
        }
        [place] = [name for name, there in found.items() if there]
        assert ("t" in self.holdings.by_token) is (place != "given back")
        return place


@pytest.mark.parametrize(
    ("leaving", "stop_reason", "alone", "place"),
    [
        (None, None, False, "first"),
        (None, None, True, "apart"),
        ("told to", None, False, "given back"),
        ("told to", None, True, "given back"),
        (None, EndReason.CANCELLED, False, "given back"),
        ("told to", EndReason.PREEMPTED, False, "given back"),
    ],
)
def test_task_whose_attempt_never_began_runs_next_unless_it_is_not_to_run_here(
    leaving: str | None, stop_reason: EndReason | None, alone: bool, place: str, tmp_path: Path, clock: FakeClock
) -> None:
    assert Places(tmp_path, clock, leaving=leaving).end(alone=alone, stop_reason=stop_reason) == place


def test_end_of_an_attempt_that_is_not_held_changes_nothing(tmp_path: Path, clock: FakeClock) -> None:
    places = Places(tmp_path, clock)

    places.ending.conclude(AttemptEnd("unknown", 0, EndReason.PREEMPTED, 0.0, 0.0, not_started=True), 0.0)

    assert not places.outbox.pending
    assert not places.dispatch.ready
    assert not places.dispatch.suspects.waiting


@pytest.fixture
def ends(tmp_path: Path, clock: FakeClock) -> Iterator[Ends]:
    (tmp_path / "code.py").write_text("code = 1\n")
    made = Ends(tmp_path, clock, max_consecutive_failures=3)
    yield made
    made.records.close()


# success


def test_success_is_recorded_with_everything_that_its_attempt_left(ends: Ends) -> None:
    held = ends.hold()
    held.history = History((_note(),))
    ends.clock.advance(seconds=5)
    # It is looked for beside everything else.
    assert wait_until(lambda: ends.services.code.of(held.lease.task.entry) is not None)

    ends.end(held, value='{"x": 1}', log=b"a\xff\n", log_bytes=3, metrics={"loss": 0.5}, exit_code=0)

    assert ends.record() == Record(
        task_id=sample_task().id,
        generation=1,
        experiment="sample",
        state=TaskState.SUCCEEDED,
        token="token-1",
        reason=EndReason.SUCCEEDED,
        ended_at=datetime.fromtimestamp(BEGAN + 2, UTC),
        started_at=datetime.fromtimestamp(BEGAN, UTC),
        worker="w-1",
        attempts=2,
        exit_code=0,
        value={"x": 1},
        log="a\udcff\n",
        metrics={"loss": 0.5},
        code=ends.services.code.of(held.lease.task.entry),
    )
    assert (ends.held(), ends.holdings.busy_at, ends.dispatch.mean_s) == ([], ends.now, 2.0)
    assert (ends.metrics.attempts, ends.metrics.released) == ([(EndReason.SUCCEEDED, 2.0)], [])


@pytest.mark.parametrize(
    "left", [{"value": "1"}, {"log": b"a", "log_bytes": 1}, {"metrics": {"loss": 0.5}}, {"exit_code": 0}]
)
def test_success_is_recorded_with_the_one_thing_that_its_attempt_left(ends: Ends, left: dict[str, Any]) -> None:
    ends.end(ends.hold(snapshot="s-1"), **left)

    record = ends.record()
    assert (record.log, dict(record.metrics), record.exit_code) == (
        left.get("log", b"").decode(),
        left.get("metrics", {}),
        left.get("exit_code"),
    )
    assert (record.value, record.code) == (1 if "value" in left else None, "s-1")


def test_value_that_cannot_be_read_fails_its_attempt_alone(ends: Ends) -> None:
    ends.end(ends.hold(), value="[" * 100_000)

    note = ends.note()
    assert note.reason is EndReason.APP_FAILED
    assert (note.message or "").startswith("the value it returned cannot be recorded: ")


# failure


def test_failure_goes_back_with_a_note_of_everything_that_the_next_worker_asks_for(ends: Ends) -> None:
    held = ends.hold(max_failures=3)

    ends.end(held, EndReason.APP_FAILED, message="boom", progressed=True, exit_code=7, log=b"x" * 9000)

    assert ends.note() == replace(_note("token-1"), message="boom", progressed=True, exit_code=7, log="x" * 8192)
    assert (ends.outbox.settlements, ends.outbox.released, ends.held()) == ([], 1, [])
    assert ends.outbox.releases[0].not_before is not None
    assert ends.metrics.attempts == [(EndReason.APP_FAILED, 2.0)]
    assert ends.metrics.released == [EndReason.APP_FAILED]
    assert len(ends.events("attempt_ended")) == 1


def test_last_failure_is_recorded_with_its_whole_log(ends: Ends) -> None:
    held = ends.hold(max_failures=2)
    held.history = History((_note("token-0"),))

    ends.end(held, EndReason.APP_FAILED, message="boom", exit_code=7, log=b"x" * 9000, log_bytes=9000)

    record = ends.record()
    assert (record.state, record.reason, record.attempts) == (TaskState.FAILED, EndReason.APP_FAILED, 2)
    assert (record.exit_code, record.log, record.worker) == (7, "x" * 9000, "w-1")
    assert (ends.outbox.releases, ends.outbox.released) == ([], 0)


@pytest.mark.parametrize(
    ("crowded", "apart", "alone"),
    [(False, False, True), (True, False, False), (False, True, True), (True, True, True)],
)
def test_note_says_whether_the_attempt_was_alone(ends: Ends, crowded: bool, apart: bool, alone: bool) -> None:
    held = ends.hold()
    held.crowded, held.apart = crowded, apart

    ends.end(held, EndReason.APP_FAILED)

    assert ends.note().alone is alone


@pytest.mark.parametrize(("message", "says"), [("boom", "boom"), (None, "ended")])
def test_note_of_a_fenced_attempt_says_that_it_was_fenced(ends: Ends, message: str | None, says: str) -> None:
    held = ends.hold()
    held.fenced = True

    ends.end(held, EndReason.LOST, message=message)

    assert (
        ends.note().message
        == f"{says} (it ran fenced: workers were lost while it ran, so it could not signal this one)"
    )
    assert ends.note().evidence == "the process that starts attempts"


@pytest.mark.parametrize("tracks", [True, False])
def test_end_of_an_attempt_whose_lease_has_passed_on_is_dropped(ends: Ends, tracks: bool) -> None:
    class Other(MemoryQueue):
        traits = replace(MemoryQueue.traits, tracks_holders=tracks)

    ends.services.queue = Other(ends.records, clock=ends.clock)
    held = ends.hold(max_failures=1)
    ends.clock.advance(seconds=ends.holdings.length_s)

    ends.end(held, EndReason.APP_FAILED)

    assert ends.outbox.settlements == []
    # Where a lease lasts as long as its worker, a lease that no other worker took is given back.
    assert ends.outbox.releases == ([Release(held.lease)] if tracks else [])
    assert (ends.held(), ends.outbox.released) == ([], 0)
    assert len(ends.events("attempt_ended")) == 1


@pytest.mark.parametrize(("reason", "more"), [(EndReason.SUCCEEDED, True), (EndReason.APP_FAILED, False)])
def test_suspect_that_succeeds_lets_two_run_at_a_time_until_a_task_is_lost(
    ends: Ends, reason: EndReason, more: bool
) -> None:
    first = ends.hold("first")
    ends.holdings.on_trial = {first.lease.token: ends.now}
    ends.end(first, reason)
    second = {ends.hold("second").lease.token: ends.now}
    ends.holdings.on_trial = dict(second)
    assert ends.dispatch.suspects.may_try(ends.now) is more

    ends.holdings.on_trial.clear()
    ends.fail("lost", EndReason.LOST)
    ends.holdings.on_trial = dict(second)
    assert not ends.dispatch.suspects.may_try(ends.now)


# failures in a row


def test_worker_pauses_longer_after_each_task_that_fails_and_leaves_if_none_has_succeeded(ends: Ends) -> None:
    waits = []
    for key in "ab":
        ends.fail(key)
        waits.append(ends.dispatch.pause_until - ends.now)
    assert ends.leaving.reason is None

    ends.fail("c")

    assert 0.5 <= waits[0] <= 1.5
    assert 1 <= waits[1] <= 3
    assert (ends.leaving.reason, ends.leaving.exit_code) == (
        "3 tasks in a row failed and none succeeded (--max-consecutive-failures 3)",
        1,
    )


def test_worker_that_has_succeeded_stays_and_its_pause_has_an_end(ends: Ends) -> None:
    ends.succeed()
    for number in range(12):
        ends.fail(str(number))

    assert ends.leaving.reason is None
    assert ends.dispatch.pause_until == ends.now + 60


@pytest.mark.parametrize("between", ["success", "same task", "config", "preempted"])
def test_failures_in_a_row_are_of_different_tasks_by_their_own_fault_without_a_success_between(
    ends: Ends, between: str
) -> None:
    ends.fail("a")
    ends.fail("b")
    if between == "success":
        ends.end(ends.hold("good"))
        ends.fail("c")
    elif between == "same task":
        ends.fail("a")
    else:
        ends.fail("c", {"config": EndReason.CONFIG_INVALID, "preempted": EndReason.PREEMPTED}[between])

    assert ends.leaving.reason is None


def test_worker_without_a_limit_never_pauses_for_failures(tmp_path: Path, clock: FakeClock) -> None:
    ends = Ends(tmp_path, clock, max_consecutive_failures=0)
    for key in "abcdef":
        ends.fail(key)

    assert (ends.leaving.reason, ends.dispatch.pause_until) == (None, 0.0)


# logs


def _stored_log(ends: Ends, held: HeldLease) -> bytes:
    return b"".join(ends.records.read_log(held.log_url)) if held.log_url else b""


@pytest.mark.parametrize(("local", "every_s"), [(True, 1.0), (False, 15.0)])
def test_output_of_a_long_attempt_is_written_again_and_again(ends: Ends, local: bool, every_s: float) -> None:
    ends.services.local = local
    assert ends.logs.next_at() == float("inf")
    held = ends.hold()
    ends.holdings.running = [held.lease.token, "gone"]
    ends.logs.write_when_due(ends.now)
    assert ends.logs.next_at() == ends.now + 1

    stored = []
    for line, wait_s in ((b"first\n", every_s), (b"second\n", every_s - 0.5), (b"third\n", 1), (b"fourth\n", 1)):
        ends.printed["token-1"] = ends.printed.get("token-1", b"") + line
        ends.logs.write_when_due(ends.now)
        stored.append(_stored_log(ends, held))
        ends.clock.advance(seconds=wait_s)
    early, late = b"first\nsecond\n", b"third\nfourth\n"
    # The record would hold it all, but a log that is in the store in part is completed there.
    ends.end(held, log=early + late + b"end\n", log_bytes=30, undrained=b"end\n")

    assert stored == [b"", early, early, early + late]
    assert _stored_log(ends, held) == early + late + b"end\n"
    assert ends.record().log_url == held.log_url


def test_log_that_is_longer_than_its_record_is_stored_whole_and_a_shorter_one_is_not(ends: Ends) -> None:
    ends.end(ends.hold("short"), log=b"ab", log_bytes=2, undrained=b"ab")
    assert ends.record().log_url is None
    ends.outbox.settlements.clear()

    ends.end(ends.hold("long"), log=b"b", log_bytes=2, undrained=b"ab")
    url = ends.record().log_url
    assert url is not None
    assert b"".join(ends.records.read_log(url)) == b"ab"


@pytest.mark.parametrize(
    ("undrained", "stored"),
    [(b"5678", b"12345678"), (b"56789", b"12345678" + OUTGREW), (b"", b"1234")],
)
def test_log_is_stored_up_to_its_limit_and_then_its_end(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, undrained: bytes, stored: bytes
) -> None:
    monkeypatch.setattr("runtime.worker.completion.LOG_LIMIT_BYTES", 8)
    held = ends.hold()
    ends.holdings.running = [held.lease.token]
    ends.logs.write_when_due(ends.now)
    ends.clock.advance(seconds=1)
    ends.printed["token-1"] = b"1234"
    ends.logs.write_when_due(ends.now)

    ends.end(held, log=b"the end", log_bytes=9, undrained=undrained)

    assert _stored_log(ends, held) == stored


def test_output_is_drained_beyond_the_limit_and_only_its_end_is_stored(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.completion.LOG_LIMIT_BYTES", 8)
    held = ends.hold()
    ends.holdings.running = [held.lease.token]
    for text in (b"", b"123456789", b"lost"):
        ends.printed["token-1"] = text
        ends.logs.write_when_due(ends.now)
        ends.clock.advance(seconds=1)
    assert ends.printed == {}

    ends.end(held, log=b"the end", log_bytes=20)

    assert _stored_log(ends, held) == b"12345678" + OUTGREW


def test_log_that_cannot_be_written_is_told_and_costs_nothing_else(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    held = ends.hold()
    held.log_url, held.logged_at = "memory:log", ends.now - 1
    ends.holdings.running = [held.lease.token]
    ends.printed["token-1"] = b"text"

    def refuse(*_: object) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(ends.records, "append_log", refuse)
    ends.logs.write_when_due(ends.now)
    ends.end(held, log_bytes=4)

    assert ends.record().log_url == "memory:log"
    assert [event["what"] for event in ends.events("trouble")] == [
        "writing a log",
        f"writing the log of {held.lease.task.id}",
    ]


def _note(token: str = "token-1") -> EndedNote:
    """Return the note of a plain failure."""
    return EndedNote(
        token=token,
        reason=EndReason.APP_FAILED,
        ended_at=datetime.fromtimestamp(BEGAN + 2, UTC),
        started_at=datetime.fromtimestamp(BEGAN, UTC),
        worker="w-1",
        alone=True,
        machine="m-1",
    )
