"""What the driver hands on about nodes that died, and how the next shim counts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.client.jobs.status import read_attempts
from runtime.jobs.hosts.local import LocalFiles
from runtime.launchers.ray.node_failures import find_dead, has_living, record_dead
from runtime.shim.record import FolderRecord, RunRecord
from runtime.shim.retry import decide

PLACES: list[dict[str, Any]] = [{"host": "h0", "node": "a" * 56}, {"host": "h1", "node": "b" * 56}]
NODES = [{"NodeID": "a" * 56, "Alive": True}, {"NodeID": "b" * 56, "Alive": False}]
ORDER: dict[str, Any] = {"retries": "backend"}
RETRY = {"failure": 0, "preemption": 9, "on_exit": {}, "backoff_s": [1.0, 2.0]}
SAID = {"code": 1, "reason": "node_failed", "message": "ray says that its node h1 (bbbbbbbb) is dead"}


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    folder = tmp_path / "jobs/j-1"
    folder.mkdir(parents=True)
    return RunRecord(FolderRecord(str(folder)), 0)


def test_only_a_lost_node_that_ray_counts_as_dead_is_dead() -> None:
    both, one = [None, None], [0, None]

    assert [find_dead(each, PLACES, NODES) for each in (both, one, [None, 10])] == [[PLACES[1]], [PLACES[1]], []]
    assert [has_living(each, PLACES, NODES) for each in (both, one, [None, 10])] == [True, False, True]


@pytest.mark.parametrize("end", [None, "stopped"])
def test_attempt_without_a_cause_whose_node_died_is_node_failed(
    run: RunRecord, tmp_path: Path, end: str | None
) -> None:
    run.claim("driver")
    if end:
        run.end(1, end, 143, {"message": "asked to stop by SIGTERM"})

    noted = record_dead(run, "driver", 0, [PLACES[1]])

    counted = run.counted(ORDER)
    assert noted == 1
    assert [(each["reason"], each["message"]) for each in counted] == [(SAID["reason"], SAID["message"])]
    shown = read_attempts(LocalFiles(str(tmp_path)), "j-1", 0)
    assert [(each.reason, each.message) for each in shown] == [(SAID["reason"], SAID["message"])]


def test_attempts_whose_nodes_died_four_times_in_a_row_do_not_end_the_run_as_lost_ones_do(run: RunRecord) -> None:
    for number in range(4):
        run.claim("driver")
        assert record_dead(run, "driver", number, [PLACES[1]]) == number + 1

    assert decide(run.counted(ORDER), RETRY, lambda: 0.0)[0] == "again"
    assert decide([None] * 4, RETRY) == ("final", "lost")


@pytest.mark.parametrize("reason", ["preempted", "app_failed", "oom", "lost"])
def test_end_of_the_attempt_itself_stays(run: RunRecord, reason: str) -> None:
    run.claim("driver")
    run.end(1, reason, 1, {})

    assert record_dead(run, "driver", 0, [PLACES[1]]) is None
    # Its shim may write its end after the driver looked, too.
    (Path(run.job) / "runs/0/a0001/node_failed").write_text(json.dumps({"message": "dead"}))
    assert [each["reason"] for each in run.counted(ORDER)] == [reason]


def test_attempt_of_an_earlier_placement_or_another_driver_is_left_alone(run: RunRecord) -> None:
    run.claim("driver")

    assert record_dead(run, "driver", 1, [PLACES[1]]) is None
    assert record_dead(run, "another", 0, [PLACES[1]]) is None
    assert record_dead(run, "driver", 0, []) is None
    assert run.counted(ORDER) == [None]


def test_backend_that_starts_attempts_in_place_looks_for_no_such_file(run: RunRecord) -> None:
    run.claim("driver")
    record_dead(run, "driver", 0, [PLACES[1]])

    assert run.counted({"retries": "shim"}) == [None]
