"""The checks of the failure suite work: each is fed a state that it must refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState
from tests.services.failure_support import MARK, Aftermath, Yard, call, find_problems, find_processes
from tests.services.test_soak import check_runs
from tests.services_support import wait_until

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def record(task: str, state: TaskState = TaskState.SUCCEEDED, generation: int = 1) -> Record:
    reason = EndReason.SUCCEEDED if state is TaskState.SUCCEEDED else EndReason.APP_FAILED
    return Record(
        task_id=task, generation=generation, experiment="x", state=state, token="a" * 16, reason=reason, ended_at=NOW
    )


def good_end() -> Aftermath:
    counts = {TaskState.SUCCEEDED: 2, TaskState.FAILED: 1}
    return Aftermath(
        tasks={"t-1": 1, "t-2": 1, "t-3": 2},
        records=[
            record("t-1"),
            record("t-2", TaskState.FAILED),
            record("t-3", TaskState.FAILED),
            record("t-3", generation=2),
        ],
        dead={("t-2", 1)},
        totals={"x": counts},
        reported={"x": counts},
        exactly_reported=True,
    )


def test_find_problems_of_a_good_end_finds_none() -> None:
    assert find_problems(good_end()) == []


Change = Callable[[Aftermath], Aftermath]

BAD_ENDS: dict[str, tuple[Change, str]] = {
    "a task without a record": (
        lambda end: replace(end, tasks={**end.tasks, "t-4": 1}),
        "t-4 generation 1 has no record",
    ),
    "only an earlier life is recorded": (
        lambda end: replace(end, tasks={**end.tasks, "t-1": 2}),
        "t-1 generation 2 has no record",
    ),
    "two records": (lambda end: replace(end, records=[*end.records, record("t-1")]), "t-1 generation 1 has 2 records"),
    "failed and no dead letter": (lambda end: replace(end, dead=()), "t-2 failed, and is not in the dead letters"),
    "succeeded and a dead letter": (
        lambda end: replace(end, dead={*end.dead, ("t-1", 1)}),
        "t-1 succeeded, and is in the dead letters",
    ),
    "a dead letter of nothing": (
        lambda end: replace(end, dead={*end.dead, ("t-9", 1)}),
        "dead letter t-9 generation 1 has no record",
    ),
    "a record of a state that is no end": (
        lambda end: replace(end, records=[record("t-1", TaskState.LEASED), *end.records[1:]]),
        "t-1 is recorded as leased",
    ),
    "totals that count one as queued": (
        lambda end: replace(end, totals={"x": {**end.totals["x"], TaskState.QUEUED: 1}}),
        "totals of x say 1 queued, records say 0",
    ),
    "totals that miss one": (
        lambda end: replace(end, totals={"x": {TaskState.FAILED: 1, TaskState.SUCCEEDED: 1}}),
        "totals of x say 1 succeeded, records say 2",
    ),
    "workers that counted twice": (
        lambda end: replace(end, exactly_reported=False, reported={"x": {TaskState.SUCCEEDED: 3, TaskState.FAILED: 1}}),
        "workers report 3 succeeded of x, records say 2",
    ),
    "workers that counted too few": (
        lambda end: replace(end, reported={"x": {TaskState.SUCCEEDED: 1, TaskState.FAILED: 1}}),
        "workers report 1 succeeded of x, records say 2",
    ),
    "a queue that is not empty": (lambda end: replace(end, waiting=3), "3 tasks still in the queue"),
    "a process": (lambda end: replace(end, running=["7 python"]), "still running: 7 python"),
    "scratch": (lambda end: replace(end, scratch=["w-1"]), "scratch left: w-1"),
    "a lock of a dead worker": (lambda end: replace(end, leftovers=["w-1.lock"]), "left behind: w-1.lock"),
    "an exit code": (lambda end: replace(end, complaints=["worker-1 exited with 3"]), "worker-1 exited with 3"),
}


@pytest.mark.parametrize("name", BAD_ENDS)
def test_find_problems_of_a_bad_end_names_it(name: str) -> None:
    change, expected = BAD_ENDS[name]

    assert expected in find_problems(change(good_end()))


def test_find_problems_of_workers_that_were_killed_allows_them_to_have_reported_less() -> None:
    end = replace(good_end(), exactly_reported=False, reported={"x": {}})

    assert find_problems(end) == []


@pytest.mark.parametrize("trace", ["environment", "command line", "working folder", "token"])
def test_find_processes_sees_what_is_left_by_any_of_its_traces(trace: str, tmp_path: Path) -> None:
    token = os.urandom(8).hex()
    options: dict[str, Any] = {"env": {}, "cwd": "/"}
    arguments = [sys.executable, "-c", "import time; time.sleep(600)"]
    if trace == "environment":
        options["env"] = {MARK: str(tmp_path)}
    elif trace == "command line":
        arguments.append(str(tmp_path / "data"))
    elif trace == "working folder":
        options["cwd"] = tmp_path
    else:
        options["env"] = {"RUNTIME_ATTEMPT_TOKEN": token}
    assert find_processes(str(tmp_path), [token]) == []
    left = subprocess.Popen(arguments, start_new_session=True, **options)
    try:
        assert wait_until(lambda: bool(find_processes(str(tmp_path), [token])))
        assert find_processes(str(tmp_path), [token])[0].startswith(f"{left.pid} ")
    finally:
        left.kill()
        left.wait()
    assert find_processes(str(tmp_path), [token]) == []


@pytest.fixture
def yard(tmp_path: Path) -> Any:
    opened = Yard(tmp_path)
    yield opened
    opened.close()


def test_check_of_a_task_that_never_ran_fails(yard: Yard) -> None:
    yard.submit([call("quick", "left")])

    with pytest.raises(pytest.fail.Exception, match=r"has no record(.|\n)*1 tasks still in the queue"):
        yard.check()


def test_check_of_scratch_a_leftover_and_an_exit_code_names_all_three(yard: Yard) -> None:
    yard.start("--idle-timeout", "0.1s").wait()
    yard.workers[0].expected = {1}
    (yard.scratch / "research-runtime-0").mkdir(exist_ok=True)
    (yard.scratch / "research-runtime-0" / "w-gone").mkdir()
    (yard.folder / "data" / "local.db-workers" / "w-gone.lock").touch()

    with pytest.raises(pytest.fail.Exception) as failed:
        yard.check()

    for text in ("scratch left: research-runtime-0/w-gone", "left behind: w-gone.lock", "exited with 0, expected [1]"):
        assert text in str(failed.value)


@pytest.mark.parametrize("said", ["Traceback (most recent call last):", "error: unexpected KeyError: 1"])
def test_check_of_a_worker_that_broke_names_its_log(yard: Yard, said: str) -> None:
    yard.start("--idle-timeout", "0.1s").wait()
    with yard.workers[0].log_path.open("a") as log:
        log.write(f"{said}\n")

    with pytest.raises(pytest.fail.Exception, match=r"worker-1\.log shows an unexpected error"):
        yard.check()


def test_wait_for_with_a_worker_that_left_in_error_fails_at_once(yard: Yard) -> None:
    yard.start("--slots", "none").process.wait(300)

    with pytest.raises(pytest.fail.Exception, match=r"worker-1\.log exited with 2"):
        yard.wait_for(lambda: False, "nothing")


def test_check_runs_of_a_task_that_ran_after_its_record_fails(yard: Yard) -> None:
    yard.submit([call("quick", "s1", key="k1")])
    yard.start("--idle-timeout", "0.1s").wait()
    check_runs(yard)
    [run] = yard.runs()
    later = run._replace(token="b" * 16, at=run.at + timedelta(minutes=1).total_seconds())
    with (yard.folder / "runs.jsonl").open("a") as file:
        import json

        file.write(json.dumps(later._asdict()) + "\n")

    with pytest.raises(AssertionError, match="ran again after it was recorded"):
        check_runs(yard)
