"""The regular duties of a worker, and its way out, by the times at which they fall due."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.errors import StoreBroken, StoreUnavailable
from runtime.queues.memory import MemoryQueue
from runtime.system import system
from runtime.tasks.history import Lease, Record
from runtime.tasks.model import Task, TaskState
from runtime.testing import FakeClock, sample_task
from runtime.worker.completion import AttemptLogs
from runtime.worker.maintenance import Maintenance
from runtime.worker.options import WorkerOptions
from runtime.worker.worker import Drain
from runtime.worker.worker_context import HeldLease, HeldLeases, LeaveDecision
from tests.unit.worker.parts_bench import Parts
from tests.unit.worker.parts_bench import clock as clock  # noqa: PLC0414 (a fixture)

FAR = float("inf")


class Said:
    """Notes every call, by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **_: self.calls.append((name, *args))

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class Bench:
    """A worker's duties over calls that are answered at once."""

    def __init__(self, *, lease_s: float = 30.0) -> None:
        self.clock = FakeClock(datetime(2026, 1, 1, tzinfo=UTC))
        self.say, self.metrics, self.calls, self.pool = Said(), Said(), Said(), Said()
        self.lost: list[Lease] = []
        self.record: Record | None = None
        self.problem: Exception | None = None
        self.stands_in_line = True
        lease = timedelta(seconds=lease_s)
        self.holdings = HeldLeases(lease, self.clock)
        self.seen: list[Any] = []
        self.leaving = LeaveDecision(self.say)  # type: ignore[arg-type]
        self.outbox = SimpleNamespace(
            succeeded=3, failed=1, counters={"lab": {TaskState.SUCCEEDED: 3}}, give_back=self.calls.give_back
        )
        self.dispatch = SimpleNamespace(
            shed=self.calls.shed,
            leave_line=self.calls.leave_line,
            recall=self.calls.recall,
            mark_running=self.calls.mark_running,
        )
        self.services: Any = SimpleNamespace(
            name="w-1",
            holdings=self.holdings,
            clock=self.clock,
            options=WorkerOptions(lease=lease, grace=timedelta(seconds=20), labels={"a": "b"}),
            queue=SimpleNamespace(
                name="q", traits=SimpleNamespace(tracks_holders=True), renew=self.renew, tend=self.calls.tend
            ),
            records=SimpleNamespace(
                find=lambda *_: self.record,
                put_worker=self.seen.append,
                put_counters=self.calls.put_counters,
                record_proven=self.record_proven,
            ),
            offload=SimpleNamespace(call=self.call, awaited=0),
            say=self.say,
            metrics=self.metrics,
            leaving=self.leaving,
            pool=self.pool,
            slots=(1, 2),
        )
        orders: Any = SimpleNamespace(due=FAR, read_when_due=self.calls.read_orders)
        logs: Any = SimpleNamespace(next_at=lambda: FAR, write_when_due=self.calls.write_logs)
        self.upkeep = Maintenance(self.services, self.outbox, orders, self.dispatch, logs)  # type: ignore[arg-type]

    def call(self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None]) -> None:
        try:
            found = work()
        except Exception as problem:
            done(None, problem)
        else:
            done(found, None)

    def renew(self, leases: list[Lease], ttl: timedelta) -> list[Lease]:
        self.calls.renew(len(leases), ttl)
        if self.problem is not None:
            raise self.problem
        return self.lost

    def record_proven(self, task: Task, token: str) -> None:
        self.calls.record_proven(task.id, token)
        if self.problem is not None:
            raise self.problem

    def proofs(self, after_s: float, *, progressed: bool = False) -> int:
        """Look at what runs that long after the first look, and count what was noted up to then."""
        self.pool.has_progressed = lambda _: progressed
        self.upkeep.do_what_is_due(1.0 + after_s)
        return sum(name in ("record_proven", "mark_running") for name in self.calls.names())

    def take(self, token: str = "t", *, sent: bool = True) -> HeldLease:
        held = self.holdings.take(Lease(sample_task(token), token), 0.0, self.clock.boottime())
        held.sent = sent
        return held


@pytest.mark.parametrize(("lease_s", "every_s"), [(30.0, 10.0), (9.0, 3.0), (300.0, 10.0), (0.3, 0.2)])
def test_leases_are_renewed_after_a_third_of_their_length_and_at_least_every_ten_seconds(
    lease_s: float, every_s: float
) -> None:
    bench = Bench(lease_s=lease_s)
    bench.take()

    def renewals(now: float) -> int:
        bench.upkeep.do_what_is_due(now)
        return bench.calls.names().count("renew")

    assert [renewals(now) for now in (0.0, every_s - 0.01, every_s + 0.01)] == [1, 1, 2]
    assert [renewals(now) for now in (2 * every_s, 2 * every_s + 0.02)] == [2, 3]
    assert ("renew", 1, timedelta(seconds=lease_s)) in bench.calls.calls


@pytest.mark.parametrize("tracks_holders", [True, False])
def test_attempt_that_has_run_for_ten_minutes_is_noted_once(tracks_holders: bool) -> None:
    bench = Bench()
    bench.services.queue.traits.tracks_holders = tracks_holders
    bench.holdings.running = [bench.take().lease.token]

    assert [bench.proofs(after_s) for after_s in (0.0, 599.0, 610.0, 630.0)] == [0, 0, 1, 1]
    assert bench.holdings.proven == {"t"}


def test_attempt_that_makes_progress_is_noted_after_a_minute() -> None:
    bench = Bench()
    bench.holdings.running = [bench.take().lease.token]

    assert [bench.proofs(after_s, progressed=True) for after_s in (0.0, 50.0, 65.0)] == [0, 0, 1]


def test_proof_that_could_not_be_noted_is_noted_at_the_next_look() -> None:
    bench = Bench()
    bench.services.queue.traits.tracks_holders = False
    bench.holdings.running = [bench.take().lease.token]
    bench.proofs(0.0)
    bench.problem = StoreUnavailable("away")

    assert (bench.proofs(610.0), bench.holdings.proven) == (1, set())
    bench.problem = None
    assert (bench.proofs(630.0), bench.holdings.proven) == (2, {"t"})


def test_proof_of_an_attempt_goes_with_its_lease() -> None:
    bench = Bench()
    bench.holdings.running = [bench.take().lease.token]
    bench.proofs(0.0)
    bench.proofs(610.0)

    bench.holdings.drop("t")

    assert bench.holdings.proven == set()


def test_queue_is_tended_and_what_waits_too_long_is_shed_every_eight_tenths() -> None:
    bench = Bench()
    for now in (0.0, 0.79, 0.81, 1.6, 1.62):
        bench.upkeep.do_what_is_due(now)

    assert bench.calls.names().count("tend") == 3
    assert [call[1] for call in bench.calls.calls if call[0] == "shed"] == [0.0, 0.81, 1.62]
    bench.upkeep.tend_now()
    assert bench.upkeep.next_at() == 0.0


def test_orders_and_logs_are_looked_at_each_time_and_know_themselves_when_they_are_due() -> None:
    bench = Bench()
    for now in (0.0, 0.1):
        bench.upkeep.do_what_is_due(now)

    looks = [call for call in bench.calls.calls if call[0] in ("read_orders", "write_logs")]
    assert looks == [("read_orders", 0.0), ("write_logs", 0.0), ("read_orders", 0.1), ("write_logs", 0.1)]


def test_worker_without_leases_renews_nothing() -> None:
    bench = Bench()
    bench.upkeep.do_what_is_due(0.0)

    assert "renew" not in bench.calls.names()


def test_renewal_counts_from_when_it_was_asked_for_and_not_for_what_was_lost() -> None:
    bench = Bench()
    kept, lost = bench.take("kept"), bench.take("lost", sent=False)
    bench.clock.advance(seconds=29)
    bench.lost = [lost.lease]

    bench.upkeep.do_what_is_due(0.0)

    assert bench.holdings.holds(kept)
    assert not bench.holdings.holds(lost)
    bench.clock.advance(seconds=30)
    assert not bench.holdings.holds(kept)


def test_lease_holds_no_longer_for_a_renewal_that_was_answered_late(tmp_path: Path, clock: FakeClock) -> None:
    class Slow(MemoryQueue):
        def renew(self, *args: Any) -> Any:
            clock.advance(seconds=5)
            return super().renew(*args)

    parts = Parts(tmp_path, clock, lease=timedelta(seconds=30))
    parts.queue = parts.services.queue = Slow(parts.records, clock=clock)
    parts.read_orders()
    parts.put("a")
    parts.fetch()
    duties = Maintenance(parts.services, parts.outbox, parts.orders, parts.dispatch, AttemptLogs(parts.services))
    clock.advance(seconds=10)

    duties.do_what_is_due(parts.now)

    clock.advance(seconds=24.9)
    assert parts.holdings.holds(parts.first())
    clock.advance(seconds=0.1)
    assert not parts.holdings.holds(parts.first())


@pytest.mark.parametrize(
    ("sent", "state", "stops"),
    [
        (True, TaskState.CANCELLED, EndReason.CANCELLED),
        (True, TaskState.SUCCEEDED, EndReason.DUPLICATE),
        (True, None, None),
        (False, TaskState.SUCCEEDED, None),
        (False, None, None),
    ],
)
def test_lost_lease_stops_an_attempt_only_if_its_task_has_a_record(
    sent: bool, state: TaskState | None, stops: EndReason | None
) -> None:
    bench = Bench()
    held = bench.take(sent=sent)
    bench.lost = [held.lease]
    bench.record = None if state is None else SimpleNamespace(state=state)  # type: ignore[assignment]

    bench.upkeep.do_what_is_due(0.0)

    assert bench.pool.calls == ([] if stops is None else [("ask_to_stop", "t", stops)])
    assert held.stop_reason is stops
    assert ("t" in bench.holdings.by_token) is sent
    assert ("leave_line" in bench.calls.names()) is not sent
    assert bench.metrics.names() == ["lease_lost"]
    assert bench.say.calls == [("lost", held.lease.task, bench.record)]


def test_renewal_that_fails_takes_no_lease_and_is_told() -> None:
    bench = Bench()
    held = bench.take()
    bench.problem = StoreUnavailable("no answer")
    bench.clock.advance(seconds=10)

    bench.upkeep.do_what_is_due(0.0)

    assert bench.holdings.holds(held)
    assert (bench.metrics.names(), bench.say.names()) == (["renewal_failed"], ["trouble"])
    bench.clock.advance(seconds=20)
    assert not bench.holdings.holds(held)


def test_worker_reports_in_every_thirty_seconds_and_soon_after_it_became_busy_or_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    monkeypatch.setitem(vars(system), "monotonic", lambda: 5.0)
    for now in (0.0, 29.9, 30.0):
        bench.upkeep.do_what_is_due(now)
    assert len(bench.seen) == 2

    bench.upkeep.record_busy()
    bench.upkeep.do_what_is_due(31.0)
    assert len(bench.seen) == 2

    bench.take()
    bench.holdings.running = ["t", "gone"]
    bench.clock.advance(seconds=100)
    bench.upkeep.record_busy()
    bench.upkeep.record_busy()
    bench.upkeep.do_what_is_due(6.9)
    assert len(bench.seen) == 2
    bench.upkeep.do_what_is_due(7.0)
    last = bench.seen[-1]
    assert (last.worker, last.queue, last.slots, last.left) == ("w-1", "q", 2, False)
    assert (last.running, last.done, last.failed, last.rate_per_s) == ((sample_task("t").id,), 3, 1, 0.04)
    assert last.seen_at - last.started_at == timedelta(seconds=100)
    assert ("put_counters", "w-1", {"lab": {TaskState.SUCCEEDED: 3}}) in bench.calls.calls

    monkeypatch.setitem(vars(system), "monotonic", lambda: 8.0)
    bench.upkeep.record_busy()
    bench.upkeep.do_what_is_due(36.9)
    assert len(bench.seen) == 3
    bench.upkeep.do_what_is_due(37.0)
    assert len(bench.seen) == 4


def test_worker_that_holds_nothing_of_a_remote_queue_tends_it_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.services.queue.traits.tracks_holders = False

    def tended(now: float) -> int:
        bench.upkeep.do_what_is_due(now)
        return bench.calls.names().count("tend")

    assert [tended(now) for now in (0.0, 0.9, 4.9, 5.0)] == [1, 1, 1, 2]

    bench.take()
    bench.holdings.running = ["t"]
    monkeypatch.setitem(vars(system), "monotonic", lambda: 5.1)
    bench.upkeep.record_busy()

    assert [tended(now) for now in (5.8, 5.9, 6.6, 6.7)] == [2, 3, 3, 4]


def test_duty_that_a_broken_store_refuses_for_good_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def tend() -> None:
        raise StoreBroken("the file is damaged")

    bench.services.queue.tend = tend
    bench.upkeep.do_what_is_due(0.0)

    assert (bench.leaving.reason, bench.leaving.exit_code) == ("the file is damaged", 3)


# leaving


class Way:
    """The way out of a worker with some attempts."""

    def __init__(self, *, failures: int = 0) -> None:
        self.bench = Bench()
        self.outbox = SimpleNamespace(
            give_back=lambda held: (self.bench.calls.give_back(held), self.bench.holdings.drop(held.lease.token)),
            pending=False,
            stuck={},
            settlements=[],
            releases=[],
        )
        self.leasing = SimpleNamespace(under_way=False)
        self.settling = SimpleNamespace(failures=failures, flush=self.bench.calls.flush)
        self.drain = Drain(
            self.bench.services,
            self.outbox,  # type: ignore[arg-type]
            self.bench.dispatch,  # type: ignore[arg-type]
            self.leasing,  # type: ignore[arg-type]
            self.settling,  # type: ignore[arg-type]
            SimpleNamespace(is_over=lambda now, patience_s: True),  # type: ignore[arg-type]
        )


def test_leaving_gives_back_what_has_not_begun_and_asks_the_rest_to_end_within_the_grace() -> None:
    way = Way()
    bench = way.bench
    running, waiting = bench.take("running"), bench.take("waiting", sent=False)
    way.drain.advance(99.0)
    assert bench.pool.calls == []

    bench.leaving.ask("told to")
    way.drain.advance(100.0)
    way.drain.advance(101.0)

    assert ("give_back", waiting) in bench.calls.calls
    assert bench.pool.calls == [("ask_to_stop", "running", EndReason.PREEMPTED)]
    assert running.stop_reason is EndReason.PREEMPTED
    assert ("draining", "told to", 1, 20.0) in bench.say.calls
    assert (bench.calls.names().count("recall"), way.drain.next_at(119.9)) == (1, 120.0)
    assert way.drain.next_at(110.0) == 110.5

    assert not way.drain.is_over(119.9)
    assert len(bench.pool.calls) == 1
    assert not way.drain.is_over(120.0)
    assert not way.drain.is_over(121.0)
    assert bench.pool.calls[1:] == [("kill", "running", EndReason.PREEMPTED)]

    bench.holdings.drop("running")
    assert way.drain.is_over(122.0)


def test_second_request_ends_the_grace_at_once() -> None:
    way = Way()
    way.bench.take("running")
    way.bench.leaving.ask("told to")
    way.drain.advance(100.0)
    way.bench.leaving.ask("told again")
    way.drain.advance(100.1)

    assert not way.drain.is_over(100.1)
    assert way.bench.pool.names() == ["ask_to_stop", "kill"]
    assert way.bench.leaving.reason == "told to"


def test_attempt_that_is_cancelled_during_the_grace_is_killed_as_cancelled() -> None:
    way = Way()
    held = way.bench.take("running")
    way.bench.leaving.ask("told to")
    way.drain.advance(100.0)
    held.stop_reason = EndReason.CANCELLED

    way.drain.is_over(120.0)

    assert way.bench.pool.calls[-1] == ("kill", "running", EndReason.CANCELLED)


def test_worker_that_leaves_waits_for_its_calls() -> None:
    way = Way()
    way.bench.leaving.ask("told to")
    way.drain.advance(100.0)

    way.leasing.under_way = True
    assert not way.drain.is_over(1000.0)
    way.leasing.under_way = False
    way.bench.services.offload.awaited = 1
    assert not way.drain.is_over(1000.0)
    way.bench.services.offload.awaited = 0
    assert way.drain.is_over(1000.0)


@pytest.mark.parametrize(
    ("requests", "failures", "now", "over"),
    [(1, 0, 500.0, False), (1, 1, 119.9, False), (1, 1, 120.0, True), (2, 0, 100.0, False), (3, 0, 100.0, True)],
)
def test_worker_that_leaves_with_ends_unrecorded_keeps_trying_for_the_grace_or_until_the_third_request(
    requests: int, failures: int, now: float, over: bool
) -> None:
    way = Way(failures=failures)
    way.outbox.pending = True
    way.bench.leaving.ask("told to")
    way.drain.advance(100.0)
    for _ in range(requests - 1):
        way.bench.leaving.ask("told again")

    assert way.drain.is_over(now) is over
    assert ("flush" in way.bench.calls.names()) is not over
    assert ("unhanded" in way.bench.say.names()) is over


def test_worker_that_leaves_by_itself_never_gives_up_an_end() -> None:
    way = Way(failures=9)
    way.outbox.pending = True
    way.bench.leaving.decide("idle for 1 s")
    way.drain.advance(100.0)

    assert ("draining", "idle for 1 s", 0, 0.0) in way.bench.say.calls
    assert not way.drain.is_over(1e6)


@pytest.mark.parametrize(("times", "requests", "over"), [(1, 1, False), (1, 3, True), (100, 1, True)])
def test_worker_that_leaves_with_a_refused_end_tries_it_a_few_times(times: int, requests: int, over: bool) -> None:
    way = Way()
    way.outbox.stuck = {"t": SimpleNamespace(times=times)}
    way.bench.leaving.ask("told to")
    way.drain.advance(100.0)
    for _ in range(requests - 1):
        way.bench.leaving.ask("told again")

    assert way.drain.is_over(101.0) is over
