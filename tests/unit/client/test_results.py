"""The results of an experiment's tasks, read from each kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from runtime.client.tasks.logs import read_logs
from runtime.client.tasks.redrive import retry
from runtime.client.tasks.results import BATCH, read_result, read_results
from runtime.client.tasks.wait import wait
from runtime.end_reasons import EndReason
from runtime.errors import ObjectDamaged
from runtime.records.base import ManifestPart
from runtime.tasks.model import CommandEntry, TaskState
from runtime.testing import sample_task
from tests.verbs_support import Bench


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench.memory() if request.param == "memory" else Bench.sqlite(tmp_path)
    yield bench
    bench.close()


def test_results_come_in_the_order_of_submission_with_what_each_task_returned(bench: Bench) -> None:
    tasks = [sample_task(key, entry=CommandEntry(("run", key))) for key in ("c", "a", "b")]
    bench.put(*tasks)
    leases = {lease.task.key: lease for lease in (bench.lease() for _ in tasks)}
    bench.succeed(leases["a"], value={"acc": 0.5}, metrics={"loss": 0.25})
    bench.fail(leases["c"], message="Traceback\nValueError: nan", exit_code=1)

    first, second, third = read_results(bench.records, "sample")

    assert [each.task for each in (first, second, third)] == [task.id for task in tasks]
    assert (first.key, first.arguments, first.state, first.value) == ("c", "run c", TaskState.FAILED, None)
    assert (first.reason, first.message, first.exit_code) == (EndReason.APP_FAILED, "ValueError: nan", 1)
    assert (second.value, second.metrics, second.duration_s) == ({"acc": 0.5}, {"loss": 0.25}, 5.0)
    assert (third.state.terminal, third.value, third.duration_s, third.attempts) == (False, None, None, 0)


def test_result_of_a_retried_task_is_that_of_its_newest_generation(bench: Bench) -> None:
    task = sample_task("1")
    bench.put(task)
    bench.fail()
    retry(bench, task.id, now=bench.now)

    [waiting] = read_results(bench.records, "sample")
    bench.succeed(value=7)
    [ended] = read_results(bench.records, "sample")

    assert (waiting.state, waiting.value, waiting.message) == (TaskState.QUEUED, None, None)
    assert (ended.state, ended.value) == (TaskState.SUCCEEDED, 7)
    assert read_result(bench.records, task.id) == ended


def test_large_value_is_read_only_if_asked_for(bench: Bench) -> None:
    large = "x" * 100_000
    bench.put(sample_task("1"))
    bench.succeed(value=large)

    [place] = read_results(bench.records, "sample")
    [whole] = read_results(bench.records, "sample", large_values=True)

    assert (place.value, place.value_url is None) == (None, False)
    assert whole.value == large


def test_results_of_a_foreign_producers_tasks_are_listed_behind_the_others() -> None:
    bench = Bench.memory()
    foreign = sample_task("2")
    bench.put(sample_task("1"))
    bench.queue().put([foreign])
    for _ in range(2):
        bench.succeed(value="done")

    first, second = read_results(bench.records, "sample")

    assert (first.key, second.key) == ("1", None)
    assert (second.task, second.value, second.arguments) == (foreign.id, "done", None)


def test_malformed_task_is_listed_by_its_record() -> None:
    bench = Bench.memory()
    bench.put(sample_task("1"))
    bench.bury_malformed("t-odd", "{", "is no JSON")

    _, second = read_results(bench.records, "sample")

    assert (second.task, second.state, second.message) == ("t-odd", TaskState.FAILED, "is no JSON")


def test_results_of_the_other_tasks_are_listed_beside_a_damaged_part(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.memory()
    bench.put(sample_task("1"))
    bench.succeed(value="done")

    def refuse(part: ManifestPart) -> list[str]:
        raise ObjectDamaged(part.name, "it was cut")

    monkeypatch.setattr(bench.records, "read_part", refuse)

    [first] = read_results(bench.records, "sample")

    assert (first.task, first.value) == (sample_task("1").id, "done")


def test_results_of_more_tasks_than_a_page_are_all_there(bench: Bench) -> None:
    tasks = [sample_task(str(number)) for number in range(2 * BATCH + 3)]
    bench.put(*tasks)

    assert [each.task for each in read_results(bench.records, "sample")] == [task.id for task in tasks]


def test_logs_of_an_experiment_name_the_task_before_each_line(bench: Bench) -> None:
    bench.put(sample_task("one"), sample_task("two"), sample_task("three"))
    leases = {lease.task.key: lease for lease in (bench.lease() for _ in range(3))}
    bench.succeed(leases["one"], log="a\nb")
    bench.fail(leases["two"], log="c\n")

    assert b"".join(read_logs(bench.records, "sample")) == b"[one] a\n[one] b\n[two] c\n"


def test_wait_for_a_task_returns_with_its_newest_generation(bench: Bench) -> None:
    task = sample_task("1")
    bench.put(task)
    bench.fail()
    retry(bench, task.id, now=bench.now)

    early = wait(task.id, queue=bench.queue(), timeout=timedelta(0))
    bench.succeed(value=7)
    late = wait(task.id, queue=bench.queue())

    assert (early.complete, early.records, early.totals) == (False, (), {TaskState.QUEUED: 1})
    assert (late.complete, late.values()) == (True, [7])
