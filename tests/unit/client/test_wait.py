"""Waiting for an experiment: what the records say counts, whatever the workers' counters say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

import pytest

from runtime.client.tasks.wait import wait
from runtime.system import system
from runtime.tasks.model import TaskState
from runtime.testing import sample_task
from tests.services_support import replace_sleep
from tests.verbs_support import Bench

AT_ONCE = timedelta(0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench.memory()
    yield bench
    bench.close()


def count(bench: Bench, worker: str, **counts: int) -> None:
    """Have a worker report what it has recorded of the experiment."""
    said = {TaskState(state): number for state, number in counts.items()}
    bench.records.put_counters(worker, {"sample": said})


def nonzero(totals: Mapping[TaskState, int]) -> dict[TaskState, int]:
    return {state: number for state, number in totals.items() if number}


def test_wait_with_counters_above_the_records_goes_on_until_the_last_record(bench: Bench) -> None:
    """Two workers may count the same failure; only one of them recorded it."""
    bench.put(*(sample_task(str(number)) for number in range(3)))
    bench.fail()
    count(bench, "w-one", failed=1)
    count(bench, "w-two", failed=2)
    seen: list[dict[TaskState, int]] = []

    def go_on(totals: Mapping[TaskState, int]) -> None:
        seen.append(nonzero(totals))
        if len(seen) <= 2:
            bench.succeed()
            count(bench, "w-one", failed=1, succeeded=len(seen))

    done = wait("sample", queue=bench.queue(), poll=AT_ONCE, progress=go_on)

    assert (done.complete, nonzero(done.totals)) == (True, {TaskState.SUCCEEDED: 2, TaskState.FAILED: 1})
    assert seen[0] == {TaskState.QUEUED: 2, TaskState.FAILED: 1}


def test_wait_that_runs_out_of_time_reports_the_records_and_not_the_counters(bench: Bench) -> None:
    bench.put(*(sample_task(str(number)) for number in range(3)))
    bench.succeed()
    count(bench, "w-one", succeeded=2, failed=1)

    late = wait("sample", queue=bench.queue(), timeout=0, poll=AT_ONCE)

    assert (late.complete, nonzero(late.totals)) == (False, {TaskState.SUCCEEDED: 1, TaskState.QUEUED: 2})
    assert late.failed == 0


def test_wait_looks_at_the_records_once_more_when_its_time_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is killed after its commit never counts it."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setitem(vars(system), "monotonic", lambda: now[0])
    replace_sleep(monkeypatch, sleep)
    bench.put(sample_task("1"))
    seen: list[Mapping[TaskState, int]] = []

    def end_at_first_look(totals: Mapping[TaskState, int]) -> None:
        if not seen:
            bench.succeed()
        seen.append(totals)

    done = wait("sample", queue=bench.queue(), timeout=0.01, progress=end_at_first_look)

    assert nonzero(seen[0]) == {TaskState.QUEUED: 1}
    assert (done.complete, nonzero(done.totals), len(seen)) == (True, {TaskState.SUCCEEDED: 1}, 2)
    assert now == [0.01]
