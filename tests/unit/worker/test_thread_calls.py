"""Calls off the worker's loop: a hanging call delays no other, slow calls run in parallel, and no result is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from runtime.queues.threads import SLOW_S, Lane, Threads
from runtime.worker.thread_calls import Outcome, ThreadCalls
from tests.services_support import wait_readable, wait_until


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(8, "test")
    yield threads
    threads.close(wait=False)


@pytest.fixture
def offload() -> Iterator[ThreadCalls]:
    offload = ThreadCalls(inline=False)
    yield offload
    offload.close()


def collect_until(offload: ThreadCalls, done: Callable[[], bool]) -> None:
    """Sleep until there are results to collect, as the worker's loop does."""
    assert offload.fd is not None
    while not done():
        assert wait_readable(offload.fd, 240), "nobody woke the loop"
        offload.collect()


# many calls


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("n", [0, 1, 2, 100])
def test_each_returns_all_results_in_order(threads: Threads, n: int, at_once: int) -> None:
    assert threads.each(lambda number: -number, range(n), at_once=at_once) == [-number for number in range(n)]


def test_each_raises_the_first_problem_once_all_calls_were_made(threads: Threads) -> None:
    made = []

    def call(number: int) -> None:
        made.append(number)
        if number in (1, 3):
            raise ValueError(number)

    with pytest.raises(ValueError, match=r"^1$"):
        threads.each(call, range(5), at_once=4)

    assert sorted(made) == [0, 1, 2, 3, 4]


def test_each_at_one_at_once_stays_in_its_thread(threads: Threads) -> None:
    threads.mean_s = 1.0

    assert set(threads.each(lambda _: threading.get_ident(), range(20), at_once=1)) == {threading.get_ident()}


def test_each_works_in_its_own_thread_after_the_others_were_closed(threads: Threads) -> None:
    threads.close()

    assert threads.each(lambda number: -number, range(3), at_once=4) == [0, -1, -2]


def test_slow_calls_are_made_side_by_side(threads: Threads) -> None:
    threads.mean_s = 2 * SLOW_S
    meeting = threading.Barrier(4)

    def call(_: int) -> int:
        return meeting.wait(240)

    assert sorted(threads.each(call, range(4), at_once=4)) == [0, 1, 2, 3]


def test_calls_that_were_quick_so_far_and_hang_keep_no_others(threads: Threads) -> None:
    go_on, made = threading.Event(), []

    def call(number: int) -> None:
        if number < 3:
            go_on.wait(240)
        made.append(number)

    lane = Lane(threads, call, 8)
    lane.add(range(20))

    def others_made() -> bool:
        lane.add(())
        return len(made) == 17

    try:
        assert wait_until(others_made)
    finally:
        go_on.set()
    assert wait_until(lambda: len(made) == 20)


def test_never_more_threads_than_allowed(threads: Threads) -> None:
    go_on = threading.Event()
    running: list[str] = []

    def call() -> None:
        running.append(threading.current_thread().name)
        go_on.wait(240)

    for _ in range(20):
        threads.start(call)

    assert wait_until(lambda: len(running) == 8)
    go_on.set()
    assert wait_until(lambda: len(running) == 20)
    assert len(set(running)) == 8


# handed back to the loop


@pytest.mark.parametrize("inline", [False, True])
def test_lane_hands_over_what_came_of_each_call(inline: bool) -> None:
    offload = ThreadCalls(inline=inline)
    outcomes: list[Outcome[int, int]] = []
    problem = ValueError("odd")

    def work(number: int) -> int:
        if number % 2:
            raise problem
        return 10 * number

    lane = offload.lane(work, outcomes.extend, at_once=4)
    lane(range(4))
    lane(range(4, 6))
    if not inline:
        collect_until(offload, lambda: len(outcomes) == 6)

    assert sorted(outcomes) == [
        (0, 0, None), (1, None, problem), (2, 20, None), (3, None, problem), (4, 40, None), (5, None, problem)
    ]  # fmt: skip
    offload.close()


def test_loop_is_woken_for_what_is_done_while_another_call_of_the_lane_hangs(offload: ThreadCalls) -> None:
    go_on = threading.Event()
    done: list[int] = []

    def then(outcomes: Sequence[Outcome[int, None]]) -> None:
        done.extend(number for number, _, _ in outcomes)

    lane = offload.lane(lambda number: None if number else go_on.wait(240) and None, then, at_once=4)
    lane(range(5))
    try:
        collect_until(offload, lambda: sorted(done) == [1, 2, 3, 4])
    finally:
        go_on.set()
    collect_until(offload, lambda: len(done) == 5)


def test_call_is_made_while_all_of_two_lanes_hang(offload: ThreadCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.queues.threads.SLOW_S", -1.0)
    go_on, hanging = threading.Event(), []

    def hang(number: int) -> None:
        hanging.append(number)
        go_on.wait(240)

    lanes = [offload.lane(hang, lambda _: None, at_once=16) for _ in range(2)]
    renewed: list[str | None] = []
    try:
        for lane in lanes:
            lane(range(100))
        assert wait_until(lambda: len(hanging) == 32)
        offload.call(lambda: "renewed", lambda result, _: renewed.append(result))
        collect_until(offload, lambda: renewed == ["renewed"])
    finally:
        go_on.set()
