"""The worker's loop in a time of its own: what wakes it, and when it goes round by itself."""

from __future__ import annotations

import itertools
import math
import os
import selectors
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import StoreUnavailable
from runtime.queues.memory import MemoryQueue
from runtime.tasks.model import TaskState
from runtime.testing import FakeClock, sample_task
from runtime.worker.worker import Loop
from tests.unit.worker.parts_bench import Parts
from tests.unit.worker.parts_bench import clock as clock  # noqa: PLC0414 (a fixture)

MOST_ROUNDS = 5_000
"""More than any of these loops needs; one that spins ends here."""


class Waits(selectors.DefaultSelector):
    """Lets the time pass at once; what is planned for a moment happens then, and ends the wait if a descriptor turns readable."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock, self.began = clock, clock.boottime()
        self.rounds: list[float] = []
        self.planned: list[tuple[float, Callable[[], object]]] = []

    @property
    def passed(self) -> float:
        return round(self.clock.boottime() - self.began, 6)

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        self.planned.append((seconds, action))

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        assert timeout >= 0
        self.rounds.append(self.passed)
        assert len(self.rounds) < MOST_ROUNDS, "the loop spins"
        while self.planned and self.planned[0][0] <= self.passed + timeout:
            at, action = self.planned.pop(0)
            before = self.passed
            self.clock.advance(seconds=max(0.0, at - before))
            action()
            if ready := super().select(0):
                return ready
            timeout = max(0.0, timeout - (self.passed - before))
        # As epoll does, which waits for whole milliseconds.
        self.clock.advance(seconds=math.ceil(timeout * 1e3) / 1e3)
        return super().select(0)


class Woken(MemoryQueue):
    """A queue that can wake its worker, and notes when it is asked for what."""

    waits: Waits
    problems: int = 0
    """How often a call to settle fails."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[tuple[str, float]] = []
        self.wake_fd, self._write = os.pipe2(os.O_NONBLOCK)
        self.new_member = False

    def wake(self) -> None:
        os.write(self._write, b"!")

    def drain_wakes(self) -> bool:
        self._note("drain")
        os.read(self.wake_fd, 100)
        return self.new_member

    def lease(self, *args: Any, **options: Any) -> Any:
        self._note("lease")
        return super().lease(*args, **options)

    def tend(self) -> None:
        self._note("tend")
        super().tend()

    def settle(self, *args: Any, **options: Any) -> Any:
        self._note("settle")
        if self.problems:
            self.problems -= 1
            raise StoreUnavailable("no answer")
        return super().settle(*args, **options)

    def _note(self, what: str) -> None:
        self.asked.append((what, self.waits.passed))

    def times(self, what: str) -> list[float]:
        return [at for name, at in self.asked if name == what]

    def close_pipe(self) -> None:
        os.close(self.wake_fd)
        os.close(self._write)


class Course:
    """A worker that accepts functions alone, so that commands that it leases go back at once."""

    def __init__(self, folder: Path, clock: FakeClock, *, wakes: bool = True, **options: Any) -> None:
        self.waits = Waits(clock)
        self.parts = Parts(folder, clock, selector=self.waits, **{"accept": frozenset({"function"}), **options})
        self.queue = Woken(self.parts.records, clock=clock)
        self.queue.waits = self.waits
        self.parts.queue = self.parts.services.queue = self.queue
        self.parts.services.queue_fd = self.queue.wake_fd if wakes else None
        self.leaving = self.parts.leaving

    def run(self) -> float:
        """Let the worker serve until it leaves; return the seconds that it took."""
        self.loop().run()
        return self.waits.passed

    @cache  # noqa: B019 (it lives as long as its test)
    def loop(self) -> Loop:
        return Loop(self.parts.services, self.waits)

    def put(self, key: str, **fields: Any) -> None:
        self.queue.put([sample_task(key, **fields)])
        self.queue.wake()


@pytest.fixture
def make(tmp_path: Path, clock: FakeClock) -> Iterator[Callable[..., Course]]:
    made: list[Course] = []

    def make_one(**options: Any) -> Course:
        made.append(Course(tmp_path, clock, **options))
        return made[-1]

    yield make_one
    for course in made:
        course.queue.close_pipe()
        course.waits.close()
        course.parts.records.close()


Make = Callable[..., Course]


@pytest.mark.parametrize(("wakes", "look_s"), [(True, 1.0), (False, 0.05)])
def test_idle_worker_looks_at_its_queue_again_and_again_and_leaves_on_time(
    make: Make, wakes: bool, look_s: float
) -> None:
    course = make(wakes=wakes, idle_timeout=timedelta(seconds=10))

    assert 10 <= course.run() < 10.6
    assert course.leaving.reason == "idle for 10 s"
    looks = course.queue.times("lease")
    assert looks[-1] == pytest.approx(10, abs=0.02)
    assert len(looks) == pytest.approx(10 / look_s + 1, abs=2)
    assert len(course.waits.rounds) < 2 * (10 / look_s + 10 / 0.8)


def test_worker_has_read_its_orders_and_leases_in_its_first_rounds(make: Make) -> None:
    course = make(idle_timeout=timedelta(seconds=10))
    course.run()

    assert course.queue.times("lease")[0] == 0


def test_duties_fall_due_while_nothing_else_happens(make: Make) -> None:
    course = make(idle_timeout=timedelta(seconds=60))
    course.run()

    tended = course.queue.times("tend")
    assert len(tended) == pytest.approx(60 / 0.8, abs=3)
    assert [worker.worker for worker in course.parts.records.workers()] == ["w-1"]


def test_put_wakes_the_worker_at_once(make: Make) -> None:
    course = make(idle_timeout=timedelta(seconds=10))
    course.waits.at(3.3, lambda: course.put("a"))

    course.run()

    assert 3.3 in course.queue.times("lease")
    assert course.queue.times("drain") == [3.3]
    assert list(course.parts.holdings.declined) == [sample_task("a").id]


@pytest.mark.parametrize("new_member", [True, False])
def test_wake_up_about_a_holder_has_the_queue_tended_at_once(make: Make, new_member: bool) -> None:
    course = make(idle_timeout=timedelta(seconds=10))
    course.queue.new_member = new_member
    course.waits.at(3.3, course.queue.wake)

    course.run()

    assert (3.3 in course.queue.times("tend")) is new_member


def test_worker_of_a_paused_queue_is_woken_by_no_put_and_hears_the_queue_again_when_it_is_resumed(make: Make) -> None:
    course = make(idle_timeout=timedelta(seconds=60))
    course.queue.pause()
    course.waits.at(3.3, course.queue.wake)
    course.waits.at(15.0, course.queue.resume)
    course.waits.at(40.3, course.queue.wake)

    course.run()

    # Orders are read every ten seconds.
    assert course.queue.times("lease")[0] == pytest.approx(20, abs=0.02)
    assert course.queue.times("drain")[-1] == 40.3
    assert min(course.queue.times("drain")) >= 20


def test_worker_that_is_asked_to_leave_does_so_at_once_and_leases_no_more(make: Make) -> None:
    course = make()
    course.waits.at(5.5, lambda: course.leaving.ask("told to", 7))

    assert course.run() == 5.5
    assert (course.leaving.reason, course.leaving.exit_code) == ("told to", 7)
    assert max(course.queue.times("lease")) < 5.5


def test_worker_whose_guardian_cannot_be_started_gives_its_tasks_back_and_leaves(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("runtime.worker.attempts.guardian_link.subprocess.Popen", refuse)
    course = make(accept=frozenset({"command"}))
    course.put("a")
    course.parts.services.pool.start()

    course.run()

    assert (course.leaving.reason, course.leaving.exit_code) == (
        "the process that starts attempts cannot be started",
        3,
    )
    assert course.parts.held() == []
    assert len(course.queue.lease(2, worker="w-2", ttl=course.parts.options.lease)) == 1


def test_worker_that_has_left_its_queue_is_not_woken_by_it(make: Make) -> None:
    course = make()
    course.parts.offload.awaited = 1

    def answer() -> None:
        course.parts.offload.awaited = 0

    course.waits.at(5.0, lambda: course.leaving.ask("told to"))
    course.waits.at(5.7, course.queue.wake)
    course.waits.at(9.0, answer)

    left = course.run()

    assert left == pytest.approx(9.0, abs=0.5)
    assert course.queue.times("drain") == []
    assert len([at for at in course.waits.rounds if at > 5]) < 25


def test_end_is_recorded_in_the_round_in_which_it_came(make: Make) -> None:
    course = make(idle_timeout=timedelta(seconds=10))
    late = course.parts.clock.now() + timedelta(seconds=1)
    course.waits.at(2.2, lambda: course.put("late", expires_at=late))

    course.run()

    record = course.parts.records.find(sample_task("late").id, 1)
    assert record is not None
    assert record.state is TaskState.EXPIRED
    assert course.queue.times("settle")[0] == pytest.approx(2.2, abs=0.06)


def test_end_that_the_queue_did_not_take_is_handed_over_again_after_pauses(make: Make) -> None:
    course = make(idle_timeout=timedelta(seconds=10))
    course.queue.problems = 3
    late = course.parts.clock.now() - timedelta(seconds=1)
    course.put("late", expires_at=late)

    course.run()

    settles = course.queue.times("settle")
    assert len(settles) >= 4
    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(settles))
    assert course.parts.records.find(sample_task("late").id, 1) is not None


def test_worker_that_leaves_records_its_ends_first(make: Make) -> None:
    course = make()
    course.queue.problems = 2
    late = course.parts.clock.now() - timedelta(seconds=1)
    course.put("late", expires_at=late)
    course.waits.at(0.01, lambda: course.leaving.ask("told to"))

    course.run()

    assert course.parts.records.find(sample_task("late").id, 1) is not None
    assert course.waits.passed < 30


def test_delayed_task_is_leased_when_it_is_due(make: Make) -> None:
    course = make(idle_timeout=timedelta(seconds=10))
    course.queue.put([sample_task("later", not_before=course.parts.clock.now() + timedelta(seconds=7.25))])

    course.run()

    assert any(7.25 <= at <= 7.26 for at in course.queue.times("lease"))


def test_ends_that_are_counted_instead_of_logged_are_summed_up_without_haste(make: Make) -> None:
    course = make(slots=60, idle_timeout=timedelta(seconds=10))
    late = course.parts.clock.now() - timedelta(seconds=1)
    for number in range(60):
        course.put(f"late-{number}", expires_at=late)

    course.run()

    assert len([at for at in course.waits.rounds if at < 1.1]) < 10


def test_worker_reports_soon_after_it_got_a_task(make: Make) -> None:
    course = make(accept=frozenset({"command"}))
    course.waits.at(11.0, lambda: course.put("a"))
    course.waits.at(15.0, lambda: course.leaving.ask("told to"))

    course.run()

    [seen] = course.parts.records.workers()
    assert seen.running == (sample_task("a").id,)
    assert (seen.seen_at - seen.started_at).total_seconds() == pytest.approx(13, abs=0.1)
