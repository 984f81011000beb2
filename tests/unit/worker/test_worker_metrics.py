"""What attempts report: last, least and greatest numbers in the record, the course in the store, and a worker's report meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.tasks.model import TaskState
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import Bench
from tests.unit.worker.worker_bench import bench as bench  # noqa: PLC0414 (a fixture)


def left_files(bench: Bench) -> list[str]:
    return [path.name for path in bench.folder.rglob("*.metrics.jsonl")]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["embedded", "folder"])
def test_record_has_the_last_least_and_greatest_numbers_and_the_store_their_course(
    bench: Bench, elsewhere: bool
) -> None:
    if elsewhere:
        bench.keep_records_elsewhere()
    task = bench.function("learn")
    bench.put(task)

    bench.run()

    record = bench.records.find(task.id, 1)
    assert record is not None
    assert record.metrics == {"loss": 2.0, "accuracy": 0.5}
    assert record.metric_ranges == {"loss": [1.0, 3.0], "accuracy": [0.5, 0.5]}
    kept = json.loads(bench.records.read_reports(task.id, record.token) or b"")
    assert [point[1:] for point in kept["names"]["loss"]["points"]] == [[0.0, 3.0], [1.0, 1.0], [2.0, 2.0]]
    assert (kept["step"], kept["of"], kept["lines"]) == (2.0, 3.0, 4)
    assert left_files(bench) == []


def test_task_that_failed_has_what_its_last_attempt_reported(bench: Bench) -> None:
    task = bench.function("learn", True, max_failures=2)
    bench.put(task)

    bench.run()

    record = bench.records.find(task.id, 1)
    assert record is not None
    assert (record.state, record.metrics["loss"], record.metric_ranges["loss"]) == (TaskState.FAILED, 2.0, [1.0, 3.0])


def test_command_reports_by_adding_lines_to_the_file_that_its_environment_names(bench: Bench) -> None:
    script = """for n in 5 7; do echo '{"step": '$n', "loss": '$n'}' >> "$RUNTIME_METRICS"; done; head -c 300 /dev/urandom >> $RUNTIME_METRICS"""
    task = bench.command("sh", "-c", script)
    bench.put(task)

    bench.run()

    record = bench.records.find(task.id, 1)
    assert record is not None
    assert (record.metrics, record.metric_ranges) == ({"loss": 7.0}, {"loss": [5.0, 7.0]})


def test_worker_reports_the_numbers_of_running_attempts(bench: Bench) -> None:
    task = bench.function("watch")
    bench.put(task)

    def reported() -> bool:
        return any(seen.reports for seen in bench.records.workers())

    with bench.running():
        bench.began("watch")
        assert wait_until(reported)
        [seen] = bench.records.workers()
        bench.let_go("watch")

    assert seen.reports == {task.id: {"experiment": "sample", "step": 1.0, "of": 4.0, "metrics": {"loss": 0.5}}}


def test_task_that_reports_nothing_keeps_no_metrics(bench: Bench, tmp_path: Path) -> None:
    task = bench.function("give", 1)
    bench.put(task)

    bench.run()

    record = bench.records.find(task.id, 1)
    assert record is not None
    assert (record.metrics, record.metric_ranges) == ({}, {})
    assert bench.records.read_reports(task.id, record.token) is None
