"""When a worker asks for tasks, for how many, and when it leaves for lack of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.errors import StoreBroken, StoreUnavailable
from runtime.outputs import StackOutputs
from runtime.queues.memory import MemoryQueue
from runtime.records.control_commands import QueueControl
from runtime.tasks.history import Lease, Release, Settlement
from runtime.tasks.retry_policy import unstarted
from runtime.testing import FakeClock, sample_task
from runtime.worker.secret_injection import PATIENT_S
from runtime.worker.secrets import AttemptSecrets
from tests.unit.worker.parts_bench import Parts
from tests.unit.worker.parts_bench import clock as clock  # noqa: PLC0414 (a fixture)

Make = Callable[..., Parts]


@pytest.fixture
def make(tmp_path: Path, clock: FakeClock) -> Make:
    """Return a function that makes a worker's parts; the worker has read its orders."""

    def make_one(**options: Any) -> Parts:
        parts = Parts(tmp_path, clock, **options)
        parts.read_orders()
        return parts

    return make_one


# how many


def test_worker_leases_for_its_slots_and_what_it_holds_ahead_and_then_waits_for_room(make: Make) -> None:
    parts = make(slots=2, look_ahead=1)
    parts.put(*"abcde")

    assert parts.fetch() == ["a", "b", "c"]
    assert (parts.leasing.room(), parts.wait_s()) == (0, None)
    assert parts.fetch() == ["a", "b", "c"]

    parts.outbox.give_back(parts.first())
    parts.outbox.releases.clear()
    assert parts.fetch() == ["b", "c", "d"]


def test_task_that_expires_while_it_is_held_is_not_started(make: Make, clock: FakeClock) -> None:
    parts = make()
    parts.put("a", expires_at=clock.now() + timedelta(seconds=10))
    assert parts.fetch() == ["a"]

    clock.advance(seconds=11)
    parts.dispatch.dispatch(parts.now)

    assert [each.record.reason for each in parts.outbox.settlements] == [EndReason.EXPIRED]
    assert parts.held() == []


def test_worker_with_a_number_of_tasks_takes_no_more_and_leaves_once_their_ends_are_recorded(make: Make) -> None:
    parts = make(slots=4, max_tasks=2)
    parts.put(*"abc")
    assert parts.fetch() == ["a", "b"]

    for held in list(parts.holdings.by_token.values()):
        parts.holdings.drop(held.lease.token)
        assert parts.leaving.reason is None
        parts.fetch()

    assert parts.leaving.reason == "took 2 tasks"
    assert parts.leaving.exit_code == 0


def test_worker_with_a_number_of_tasks_does_not_leave_before_an_end_is_recorded(make: Make) -> None:
    parts = make(max_tasks=1)
    parts.put("a")
    parts.fetch()
    held = parts.first()
    parts.outbox.settlements.append(_cancelled(parts))
    parts.holdings.drop(held.lease.token)

    parts.fetch()
    assert parts.leaving.reason is None

    parts.outbox.settlements.clear()
    parts.fetch()
    assert parts.leaving.reason == "took 1 task"


def test_task_that_went_back_unstarted_does_not_count_as_taken(make: Make) -> None:
    parts = make(max_tasks=1)
    parts.put("a")
    parts.fetch()
    parts.outbox.give_back(parts.first())

    parts.fetch()

    assert parts.leaving.reason is None
    assert parts.leasing.room() == 1


def test_suspects_that_wait_take_no_room(make: Make) -> None:
    parts = make(slots=2)
    parts.put("a", "b", "c")
    parts.fetch()
    held = parts.first()
    held.lease.alone = True
    parts.dispatch.leave_line(held)
    parts.dispatch.line_up(held)

    assert parts.fetch() == ["a", "b", "c"]


def test_tasks_that_wait_for_a_slow_secret_take_no_room_after_a_moment_and_leave_none_when_lost(make: Make) -> None:
    parts = make(slots=3)
    parts.services.secrets = AttemptSecrets(StackOutputs(stack="dev"), clock=parts.clock)
    parts.put("a", "b", secrets=("wandb",))
    parts.put("c")
    parts.fetch()

    # Nothing reads the answer.
    rooms = [parts.leasing.room()]
    parts.clock.advance(seconds=PATIENT_S)
    rooms.append(parts.leasing.room())
    parts.clock.advance(seconds=0.1)
    rooms.append(parts.leasing.room())
    parts.holdings.drop(parts.first().lease.token)
    rooms.append(parts.leasing.room())
    parts.services.secrets.close()

    assert rooms == [0, 0, 2, 2]


def test_worker_without_orders_or_of_a_paused_queue_leases_nothing(tmp_path: Path, clock: FakeClock) -> None:
    parts = Parts(tmp_path, clock)
    parts.put("a")
    assert parts.fetch() == []

    parts.queue.pause()
    parts.read_orders()
    assert (parts.fetch(), parts.wait_s()) == ([], None)

    parts.queue.resume()
    parts.read_orders()
    assert parts.fetch() == ["a"]


def test_worker_that_gets_no_orders_leaves_after_its_time_out_and_says_why(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path, clock, idle_timeout=timedelta(seconds=10))

    def refuse(_: str) -> QueueControl:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(parts.records, "control", refuse)
    for _ in range(3):
        parts.read_orders()
    parts.fetch()
    assert parts.leaving.reason is None

    clock.advance(seconds=10)
    parts.fetch()

    leaving = parts.leaving
    assert (leaving.reason, leaving.exit_code) == ("its orders could not be read for 10 s: no answer", 3)


# when


def test_worker_asks_again_at_once_after_tasks_and_soon_after_none(make: Make) -> None:
    parts = make(slots=2)
    parts.put("a")

    assert parts.fetch() == ["a"]
    assert parts.wait_s() is not None
    assert parts.wait_s() <= 0  # type: ignore[operator]

    parts.fetch()
    assert parts.wait_s() == 0.05
    parts.put("b")
    assert parts.fetch() == ["a"]
    parts.clock.advance(seconds=0.05)
    assert parts.fetch() == ["a", "b"]


def test_worker_that_a_put_wakes_looks_once_a_second_by_itself_and_at_once_when_woken(make: Make) -> None:
    parts = make()
    parts.services.queue_fd = 99
    parts.fetch()
    assert parts.wait_s() == 1.0

    parts.put("a")
    assert parts.fetch() == []
    parts.leasing.poll_now()
    assert parts.fetch() == ["a"]


@pytest.mark.parametrize(("due_s", "wait_s"), [(0.5, 0.501), (0.0001, 0.021), (30.0, 1.0)])
def test_worker_looks_when_a_delayed_task_is_due(make: Make, due_s: float, wait_s: float) -> None:
    parts = make()
    parts.services.queue_fd = 99
    parts.put("later", not_before=parts.clock.now() + timedelta(seconds=due_s))

    parts.fetch()

    assert parts.wait_s() == wait_s


def test_worker_leases_nothing_during_a_pause_nor_while_too_many_ends_are_stuck(make: Make) -> None:
    parts = make()
    parts.put("a")
    parts.dispatch.pause_until = parts.now + 3
    assert (parts.fetch(), parts.wait_s()) == ([], 3.0)
    parts.dispatch.pause_until = 0.0
    parts.preparing.furnishing.slow_until = parts.now + 2
    assert (parts.fetch(), parts.wait_s()) == ([], 2.0)
    parts.preparing.furnishing.slow_until = 0.0

    parts.outbox.settlements.append(_cancelled(parts))
    assert (parts.fetch(), parts.wait_s()) == ([], None)
    parts.outbox.settlements.clear()
    assert parts.fetch() == ["a"]


def test_worker_leases_nothing_while_its_orders_cannot_be_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make()
    parts.read_orders()
    parts.put("a")

    def refuse(queue: str) -> QueueControl:
        raise StoreUnavailable("503")

    with monkeypatch.context() as away:
        away.setattr(parts.records, "control", refuse)
        parts.read_orders()
        assert parts.fetch() == []

    parts.read_orders()
    assert parts.fetch() == ["a"]


class Away(MemoryQueue):
    """A queue whose service may be away."""

    problem: Exception | None = None

    def lease(self, *args: Any, **how: Any) -> Any:
        if self.problem is not None:
            raise self.problem
        return super().lease(*args, **how)

    def outlook(self) -> Any:
        if self.problem is not None:
            raise self.problem
        return super().outlook()


def _away(parts: Parts) -> Away:
    queue = parts.services.queue = parts.queue = Away(parts.records, clock=parts.clock)
    return queue


def test_worker_waits_longer_after_each_call_that_fails_and_not_after_one_that_did_not(make: Make) -> None:
    parts = make()
    queue = _away(parts)
    queue.problem = StoreUnavailable("no answer")
    for shortest, longest in ((0.5, 1.5), (1, 3), (2, 6), (4, 12), (8, 24), (16, 30), (30, 30)):
        parts.fetch()
        wait_s = parts.wait_s()
        assert wait_s is not None
        assert shortest <= wait_s <= longest
        assert not parts.leasing.under_way
        parts.clock.advance(seconds=wait_s)
    assert parts.leaving.reason is None
    assert parts.events("trouble")[0]["what"] == "leasing"

    queue.problem = None
    parts.fetch()
    assert parts.wait_s() == 0.05
    parts.clock.advance(seconds=1)
    queue.problem = StoreUnavailable("no answer")
    parts.fetch()
    assert 0.5 <= (parts.wait_s() or 0) <= 1.5


def test_worker_whose_store_is_broken_for_good_leaves(make: Make) -> None:
    parts = make()
    _away(parts).problem = StoreBroken("the file is damaged")

    parts.fetch()

    assert (parts.leaving.reason, parts.leaving.exit_code) == ("the file is damaged", 3)


# leaving for idleness


def _look_every_second(parts: Parts, seconds: int) -> float | None:
    """Let the worker look once a second; return the time after which it left, None if it stayed."""
    began = parts.now
    for _ in range(seconds + 1):
        parts.leasing.poll_now()
        parts.fetch()
        if parts.leaving.reason is not None:
            return parts.now - began
        parts.clock.advance(seconds=1)
    return None


def test_idle_worker_leaves_after_its_time_out_and_announces_it_once(make: Make) -> None:
    parts = make(idle_timeout=timedelta(seconds=10))

    assert _look_every_second(parts, 20) == 10
    assert (parts.leaving.reason, parts.leaving.exit_code) == ("idle for 10 s", 0)
    assert [event["left_s"] for event in parts.events("worker_idle")] == [10]


def test_idle_worker_without_a_time_out_stays(make: Make) -> None:
    parts = make()

    assert _look_every_second(parts, 20) is None
    assert parts.events("worker_idle") == []


def test_idle_worker_looks_once_more_exactly_at_its_time_out(make: Make) -> None:
    parts = make(idle_timeout=timedelta(seconds=0.5))
    parts.services.queue_fd = 99

    parts.fetch()

    assert parts.wait_s() == 0.5


@pytest.mark.parametrize(("due_s", "leaves_after"), [(69, None), (70, 10), (3600, 10)])
def test_idle_worker_stays_for_a_task_that_is_due_within_a_minute_of_its_time_out(
    make: Make, due_s: float, leaves_after: float | None
) -> None:
    parts = make(idle_timeout=timedelta(seconds=10))
    parts.put("later", not_before=parts.clock.now() + timedelta(seconds=due_s))

    assert _look_every_second(parts, 12) == leaves_after


def test_idle_worker_stays_while_another_worker_may_have_lost_its_tasks(make: Make) -> None:
    parts = make(idle_timeout=timedelta(seconds=10), lease=timedelta(seconds=5))
    parts.put("a")
    parts.queue.lease(1, worker="w-2", ttl=timedelta(seconds=5))

    assert _look_every_second(parts, 20) is None

    parts.queue.tend()
    parts.leasing.poll_now()
    assert parts.fetch() == ["a"]


def test_worker_with_tasks_is_not_idle_and_its_time_out_counts_from_the_last_look_with_any(make: Make) -> None:
    parts = make(slots=2, idle_timeout=timedelta(seconds=10))
    parts.put("a")
    parts.fetch()
    assert _look_every_second(parts, 20) is None

    parts.holdings.drop(parts.first().lease.token)
    assert _look_every_second(parts, 20) == 9


def test_worker_that_awaits_an_answer_is_not_idle(make: Make) -> None:
    parts = make(idle_timeout=timedelta(seconds=10))
    parts.offload.awaited = 1

    assert _look_every_second(parts, 20) is None


def test_worker_that_waits_for_its_first_task_leaves_only_after_one_came(make: Make) -> None:
    parts = make(idle_timeout=timedelta(seconds=10), wait_for_first=True)
    assert _look_every_second(parts, 20) is None

    parts.put("a")
    parts.leasing.poll_now()
    parts.fetch()
    parts.holdings.drop(parts.first().lease.token)

    assert _look_every_second(parts, 20) == 10


def test_idle_worker_whose_queue_cannot_say_what_is_due_leaves_all_the_same(make: Make) -> None:
    class Silent(MemoryQueue):
        def outlook(self) -> Any:
            raise StoreUnavailable("no answer")

    parts = make(idle_timeout=timedelta(seconds=10))
    parts.services.queue = Silent(parts.records, clock=parts.clock)

    assert _look_every_second(parts, 20) == 10
    assert [event["what"] for event in parts.events("trouble")] == ["asking what is due"]


# claiming


def test_claim_asks_for_the_room_and_keeps_it_until_its_answer(make: Make) -> None:
    parts = make(slots=3)
    parts.put(*"abcd")

    assert (parts.leasing.claim(parts.now), parts.leasing.claim(parts.now)) == (3, 0)
    assert (parts.leasing.room(), parts.wait_s()) == (0, None)

    leases = parts.queue.lease(2, worker="w-1", ttl=parts.options.lease)
    parts.leasing.claimed(3, leases)
    assert (parts.held(), parts.leasing.room()) == (["a", "b"], 1)
    assert parts.leasing.claim(parts.now) == 1


def test_claim_that_failed_gives_its_room_back(make: Make) -> None:
    parts = make(slots=2)
    parts.fetch()
    asked = parts.leasing.claim(parts.now)

    parts.leasing.claimed(asked, None)

    assert (asked, parts.leasing.room(), parts.wait_s()) == (2, 2, 0.05)


def test_claim_without_tasks_has_a_worker_that_holds_none_look_at_once_for_what_is_due(make: Make) -> None:
    parts = make(slots=2)
    parts.fetch()
    parts.leasing.claimed(parts.leasing.claim(parts.now), [])
    assert (parts.wait_s() or 0) <= 0

    parts.put("a")
    parts.fetch()
    parts.fetch()
    parts.leasing.claimed(parts.leasing.claim(parts.now), [])
    assert parts.wait_s() == 0.05


def test_nothing_is_claimed_by_a_worker_that_leaves_or_pauses_or_awaits_leases(make: Make) -> None:
    parts = make()
    parts.dispatch.pause_until = parts.now + 1
    assert (parts.leasing.claim(parts.now), parts.leasing.claim(parts.now + 1)) == (0, 1)
    parts.leasing.claimed(1, None)
    parts.dispatch.pause_until = 0.0
    parts.preparing.furnishing.slow_until = parts.now + 1
    assert (parts.leasing.claim(parts.now), parts.leasing.claim(parts.now + 1)) == (0, 1)
    parts.leasing.claimed(1, None)
    parts.preparing.furnishing.slow_until = 0.0

    parts.leasing.under_way = True
    assert parts.leasing.claim(parts.now) == 0
    parts.leasing.under_way = False
    parts.leaving.ask("told to")
    assert parts.leasing.claim(parts.now) == 0


def test_claimed_task_counts_as_the_first_of_a_worker_that_waits_for_it(make: Make) -> None:
    parts = make(idle_timeout=timedelta(seconds=10), wait_for_first=True)
    parts.put("a")
    parts.leasing.claimed(parts.leasing.claim(parts.now), parts.queue.lease(1, worker="w-1", ttl=parts.options.lease))
    held = parts.first()
    parts.dispatch.recall()
    parts.outbox.release(Release(held.lease))

    assert _look_every_second(parts, 20) == 10


def _cancelled(parts: Parts) -> Settlement:
    """Return an end that waits to be recorded."""
    return unstarted(Lease(sample_task("z"), "z"), EndReason.CANCELLED, "no", worker="w-1", now=parts.clock.now())
