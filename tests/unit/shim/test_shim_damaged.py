"""Shims whose record is damaged: what has ended is not run again, and nothing that an attempt left is written over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import JOB, ShimJob, processes_with, wait_for
from tests.unit.shim.test_shim_overtaken import MakeJob, put
from tests.unit.shim.test_shim_overtaken import job as job  # noqa: PLC0414 (a fixture)

FAILED = 1
DAMAGED = ['{"rea', "", "[]", '{"reason": "succeeded"}', "\0" * 60]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def announce(made: ShimJob, outcome: str) -> None:
    (made.root / "done").mkdir(parents=True, exist_ok=True)
    (made.root / "done" / f"{JOB}.{outcome}").touch()


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize(("outcome", "code"), [("0.succeeded.0.1", 0), ("0.app_failed.7.1", FAILED)])
def test_run_with_a_damaged_result_has_ended_as_its_outcome_says(
    job: MakeJob, tmp_path: Path, outcome: str, code: int, text: str
) -> None:
    made = job(f"touch {tmp_path}/ran")
    put(made, "runs/0/result", text)
    announce(made, outcome)

    assert made.run() == code
    assert "its result cannot be read" in made.stderr
    assert not (tmp_path / "ran").exists()
    assert [path.name for path in (made.root / "done").iterdir()] == [f"{JOB}.{outcome}"]


@pytest.mark.parametrize("text", DAMAGED)
def test_run_with_a_damaged_result_and_no_outcome_has_ended_and_nobody_knows_how(
    job: MakeJob, tmp_path: Path, text: str
) -> None:
    made = job(f"touch {tmp_path}/ran")
    put(made, "runs/0/result", text or " ")

    assert made.run() == FAILED
    assert (made.ends(), made.results(), (tmp_path / "ran").exists()) == ([], {}, False)


def test_outcome_of_an_attempt_that_a_retry_has_forgiven_ends_no_run(job: MakeJob) -> None:
    made = job("true", forgiven={"0": 1}, epoch=2)
    put(made, "runs/0/a0001/start.json")
    announce(made, "0.app_failed.7.1")  # as a listing shows it that is older than the retry

    assert made.run() == 0
    assert made.ends() == ["-", "-"]
    assert (made.root / "done" / f"{JOB}.0.succeeded.0.2").exists()


def test_outcome_of_a_removed_job_of_the_same_id_ends_no_run(job: MakeJob) -> None:
    made = job("true")
    announce(made, "0.app_failed.7.1")

    assert made.run() == 0
    assert (made.root / "done" / f"{JOB}.0.succeeded.0.1").exists()


def test_attempt_takes_the_number_of_no_output(job: MakeJob) -> None:
    made = job("echo new > $RUNTIME_OUTPUT_DIR/kept")
    put(made, "runs/0/output/a0002/kept", "old")

    assert made.run() == 0
    assert made.results() == {0: ("succeeded", 0, 3)}
    kept = {path.parent.name: path.read_text() for path in made.folder.glob("runs/0/output/*/kept")}
    assert kept == {"a0002": "old", "a0003": "new\n"}


def test_damaged_end_of_an_attempt_is_the_one_of_its_name(job: MakeJob) -> None:
    made = job("true", retry={"failure": 1})
    for number in (1, 2):
        put(made, f"runs/0/a000{number}/start.json", "\0")
        put(made, f"runs/0/a000{number}/end.app_failed.9", "\0\0")

    assert made.run() == FAILED
    assert made.results() == {0: ("app_failed", 1, 2)}


SCRIPT = "echo $RUNTIME_ATTEMPT; echo $RUNTIME_ATTEMPT > $RUNTIME_OUTPUT_DIR/o; exit $((SEED * (RUNTIME_ATTEMPT < 2)))"


def finish_array(run: Terminal) -> str:
    job = run.finish(SCRIPT, "--seeds", "2")
    wait_for(lambda: not processes_with(f"jobs/{job}"), "the end of its shim")
    return job


def end_again(run: Terminal, job: str) -> None:
    assert run("retry", job, "--failed").code == 0
    run.wait(job, "succeeded")
    wait_for(lambda: not processes_with(f"jobs/{job}"), "the end of its shim")


@pytest.mark.parametrize("damage", ["header", "body", "no places", "gone"])
def test_retry_of_what_failed_leaves_a_run_alone_whose_folded_file_is_damaged(run: Terminal, damage: str) -> None:
    job = finish_array(run)
    folded = run.folder(job) / "runs/0.ended"
    header = folded.read_bytes().index(b"\n") + 1
    if damage == "gone":
        folded.unlink()
    elif damage == "no places":
        folded.write_bytes(b"[1]\n")
    else:
        os.truncate(folded, 40 if damage == "header" else header + 5)

    end_again(run, job)

    assert sorted(path.name for path in (run.folder(job) / "runs/0/output").iterdir()) == ["a0001"]
    assert (run.folder(job) / "runs/1/output/a0002/o").read_text() == "2\n"
    assert run("status", job, "-o", "json").json["totals"]["succeeded"] == 2


def test_retry_of_a_run_whose_folded_file_is_damaged_writes_over_nothing(run: Terminal) -> None:
    job = finish_array(run)
    os.truncate(run.folder(job) / "runs/1.ended", 40)

    end_again(run, job)

    outputs = {path.parent.name: path.read_text() for path in (run.folder(job) / "runs/1/output").glob("*/o")}
    assert outputs == {"a0001": "1\n", "a0002": "2\n"}
    assert run("logs", job, "--index", "1").out == "1\n2\n"
    assert (run.folder(job) / "runs/1.ended.damaged").exists()
    assert json.loads((run.folder(job) / "runs/1.ended").read_bytes().splitlines()[0])
