"""`map_tasks`: a durable task for each input, and their ends as they come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.client.tasks.mapping import MappedTask, map_tasks
from runtime.client.tasks.redrive import retry
from runtime.end_reasons import EndReason
from runtime.errors import InvalidTask, InvalidValue, RequestRefused, WorkFailed
from runtime.tasks.model import TaskState
from tests.verbs_support import Bench

EXAMPLE = Path(__file__).parents[3] / "examples" / "shards"


def square(number: int, output: str) -> int:
    return number * number


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench.memory() if request.param == "memory" else Bench.sqlite(tmp_path)
    yield bench
    bench.close()


def mapped(bench: Bench, inputs: Any = (1, 2, 3), **options: Any) -> Any:
    options = {"output": "/out/{}.json", "snapshot": False, "poll": timedelta(0), **options}
    return map_tasks(square, inputs, queue=bench.queue(), **options)


def succeed_all(bench: Bench, count: int) -> None:
    for _ in range(count):
        lease = bench.lease()
        number, _ = lease.task.entry.args  # type: ignore[union-attr]
        bench.succeed(lease, value=number * number)


def test_tasks_are_submitted_with_their_output_as_key_before_anything_is_iterated(bench: Bench) -> None:
    tasks = mapped(bench)

    leases = [bench.lease() for _ in range(3)]
    assert sorted((lease.task.key, lease.task.outputs) for lease in leases) == [
        (f"/out/{number}.json", (f"/out/{number}.json",)) for number in (1, 2, 3)
    ]
    assert {lease.task.entry.args for lease in leases} == {(number, f"/out/{number}.json") for number in (1, 2, 3)}  # type: ignore[union-attr]
    assert (len(tasks), repr(tasks)) == (3, "<3 tasks of experiment default>")


def test_ends_come_as_they_are_recorded_with_input_output_and_value(bench: Bench) -> None:
    tasks = iter(mapped(bench))
    leases = {lease.task.key: lease for lease in (bench.lease() for _ in range(3))}
    seen = []
    for number in (3, 1, 2):
        bench.succeed(leases[f"/out/{number}.json"], value=number * number)
        seen.append(next(tasks))

    assert [(each.input, each.output, each.value, each.succeeded) for each in seen] == [
        (number, f"/out/{number}.json", number * number, True) for number in (3, 1, 2)
    ]
    assert list(tasks) == []


def test_ordered_ends_come_in_the_order_of_the_inputs(bench: Bench) -> None:
    tasks = mapped(bench, ordered=True)
    leases = {lease.task.key: lease for lease in (bench.lease() for _ in range(3))}
    for number in (3, 2, 1):
        bench.succeed(leases[f"/out/{number}.json"], value=0)

    assert [each.input for each in tasks] == [1, 2, 3]
    assert [each.input for each in tasks] == [1, 2, 3], "it may be iterated again"


def test_same_call_again_does_nothing_twice_and_yields_what_is_recorded(bench: Bench) -> None:
    mapped(bench)
    succeed_all(bench, 2)

    again = mapped(bench, inputs=(1, 2, 3, 4))

    assert (again.submission.new, again.submission.known) == (1, 3)
    assert bench.queue().depth().total == 2  # type: ignore[union-attr]
    succeed_all(bench, 2)
    assert sorted(each.value for each in again) == [1, 4, 9, 16]


def test_failure_is_yielded_and_raised_after_the_last_end(bench: Bench) -> None:
    tasks = mapped(bench)
    bench.fail(message="no such shard")
    succeed_all(bench, 2)
    seen: list[MappedTask] = []

    with pytest.raises(WorkFailed) as failed:
        seen.extend(tasks)
    kept = list(mapped(bench, keep_going=True))

    assert (failed.value.message, failed.value.exit_code) == ("1 of 3 tasks did not succeed", 1)
    assert "app_failed: no such shard" in failed.value.facts[0]
    assert sorted(each.state for each in kept) == [TaskState.FAILED, TaskState.SUCCEEDED, TaskState.SUCCEEDED]
    assert [each.reason for each in kept if not each.succeeded] == [EndReason.APP_FAILED]


def test_task_that_is_retried_is_waited_for_and_its_first_end_does_not_count(bench: Bench) -> None:
    tasks = mapped(bench, inputs=(5,))
    record = bench.fail()
    retry(bench, record.task_id, now=bench.now)
    ends = iter(tasks)
    succeed_all(bench, 1)

    assert [each.value for each in ends] == [25]


def test_two_inputs_with_one_output_are_refused(bench: Bench) -> None:
    with pytest.raises(InvalidValue) as refused:
        mapped(bench, output=lambda number: "/out/same")

    assert refused.value.hint == "two inputs share it"


@pytest.mark.parametrize("output", [None, "", 7])
def test_output_that_is_no_text_is_refused(bench: Bench, output: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        mapped(bench, output=lambda number: output)

    assert (refused.value.field, refused.value.value) == ("output", repr(output))


def test_same_input_twice_is_one_task(bench: Bench) -> None:
    tasks = mapped(bench, inputs=(2, 2))
    succeed_all(bench, 1)

    assert [each.value for each in tasks] == [4]


@pytest.mark.parametrize("output", ["/out/same.json", 3, None])
def test_output_that_is_the_same_for_each_input_is_refused(bench: Bench, output: Any) -> None:
    with pytest.raises(RequestRefused) as refused:
        mapped(bench, output=output)

    assert "an output of its own" in refused.value.message


def test_function_that_no_worker_can_import_is_refused_before_anything_is_submitted(bench: Bench) -> None:
    with pytest.raises(RequestRefused) as refused:
        map_tasks(lambda one, output: one, [1], output="/{}", queue=bench.queue(), snapshot=False)

    assert "it is a lambda" in refused.value.message
    assert bench.queue().depth().total == 0  # type: ignore[union-attr]


def test_input_that_json_does_not_have_is_refused_with_its_place(bench: Bench) -> None:
    with pytest.raises(InvalidTask) as refused:
        mapped(bench, inputs=[1, {2}])

    assert refused.value.line == 2


def test_no_inputs_are_no_tasks_and_no_error(bench: Bench) -> None:
    assert list(mapped(bench, inputs=())) == []


def test_example_goes_on_after_its_driver_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards example over real files: the driver is killed in the middle, and its successor repeats nothing."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for number in range(6):
        (sources / f"s{number}.txt").write_text(f"one two\n\none two\n\nshard {number}\n")
    environ = {**os.environ, "RUNTIME_DATA_DIR": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path)}
    words = [
        sys.executable,
        "shards.py",
        str(tmp_path / "out"),
        *(f"file://{each}" for each in sorted(sources.iterdir())),
    ]

    def start_worker(most: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "runtime", "worker", "--max-tasks", str(most)]
        return subprocess.Popen(command, env=environ, cwd=tmp_path, stderr=subprocess.DEVNULL)

    first = subprocess.Popen(words, cwd=EXAMPLE, env=environ, stderr=subprocess.DEVNULL)
    assert start_worker(4).wait(120) == 0
    first.send_signal(signal.SIGKILL)
    first.wait()
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/raw").iterdir()}
    second = subprocess.Popen(
        words, cwd=EXAMPLE, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    worker = start_worker(14)
    said = second.communicate(timeout=240)[0]

    assert (second.returncode, worker.wait(120)) == (0, 0)
    assert said == '{"bytes": 156, "dropped": 6, "kept": 12, "tokens": 24}\n'
    assert len(written) == 4
    assert {name: (tmp_path / "out/raw" / name).stat().st_mtime_ns for name in written} == written
    assert sorted(path.name for path in (tmp_path / "out/tokens").iterdir()) == [
        f"s{number}.json" for number in range(6)
    ]


def test_front_door_has_it() -> None:
    assert runtime.map_tasks is map_tasks
