"""Shims whose job was taken up elsewhere while they lived: the later attempt counts, and the earlier one decides nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.shim import run_loop
from runtime.shim.files import fold
from runtime.shim.record import FolderRecord, RunRecord
from tests.fakes.gcs import GcsServer
from tests.shim_support import JOB, ShimJob, make_job, processes_with, wait_for
from tests.unit.shim.test_shim_bucket import BucketJob, maker

QUICK = {"FIRST_LOOK_S": 0.1, "MARK_S": 0.1}
"""Constants of the shim, for looks into a bucket."""
NEVER_LOOKS = {"FIRST_LOOK_S": 3600.0}
"""With these a shim learns of the next attempt only when its command has ended."""
DUPLICATE, AGAIN = 3, 10

MakeJob = Callable[..., ShimJob]


@pytest.fixture(params=["folder", "bucket"])
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "folder":
        yield lambda script, **changes: make_job(tmp_path / "lab", sys.executable, script, **changes)
        return
    server = GcsServer().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield maker(tmp_path / "lab", sys.executable)
    server.stop()


def put(made: ShimJob, name: str, text: str = "{}") -> None:
    """Write a file of the job's record, as another machine does."""
    if isinstance(made, BucketJob):
        made.files.write(f"jobs/{JOB}/{name}", text.encode())
        return
    path = made.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def start_at_work(made: ShimJob, at_work: Path, **constants: float) -> subprocess.Popen[str]:
    """Start a shim and wait until its command has begun."""
    made.constants = {**QUICK, **constants}
    started = made.start("--native", "41")
    wait_for(at_work.exists, "the command")
    return started


def test_attempt_that_runs_is_ended_once_a_shim_of_a_later_epoch_has_begun_another(
    job: MakeJob, tmp_path: Path
) -> None:
    made = job(f"touch {tmp_path}/$RUNTIME_ATTEMPT; while ! [ -e {tmp_path}/go$RUNTIME_ATTEMPT ]; do sleep 0.05; done")
    earlier = start_at_work(made, tmp_path / "1")
    made.order["epoch"] = 2
    made.write()
    later = made.start("--native", "43")

    assert made.finish(earlier) == DUPLICATE
    assert "the job was taken up elsewhere" in made.stderr
    assert (made.ends(), made.results()) == (["stopped", "-"], {})
    (tmp_path / "go2").touch()
    assert made.finish(later) == 0
    assert (made.ends(), made.results()) == (["stopped", "-"], {0: ("succeeded", 0, 2)})


@pytest.mark.parametrize("code", [0, 7])
def test_command_that_ends_by_itself_after_a_later_attempt_began_has_no_result_and_costs_no_failure(
    job: MakeJob, tmp_path: Path, code: int
) -> None:
    later = tmp_path / f"lab/jobs/{JOB}/runs/0/a0002"
    made = job(f"touch {tmp_path}/up; while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; mkdir -p {later}; exit {code}")
    started = start_at_work(made, tmp_path / "up", **NEVER_LOOKS)
    if isinstance(made, BucketJob):
        put(made, "runs/0/a0002/start.json")
    (tmp_path / "go").touch()

    assert made.finish(started) == DUPLICATE
    assert (made.ends()[0], made.results()) == ("stopped", {})


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("looks", [QUICK, NEVER_LOOKS], ids=["while it runs", "after it"])
def test_attempt_whose_run_another_shim_has_ended_and_folded_is_over_and_leaves_nothing(
    tmp_path: Path, code: int, looks: dict[str, float]
) -> None:
    made = make_job(
        tmp_path / "lab",
        sys.executable,
        f"touch {tmp_path}/up; while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; exit {code}",
    )
    started = start_at_work(made, tmp_path / "up", **looks)
    started.send_signal(signal.SIGSTOP)  # else it may see the other attempt before there is a result
    put(made, "runs/0/a0002/start.json")
    put(made, "runs/0/result", '{"reason": "app_failed", "code": 5, "attempt": 2}')
    fold(str(made.folder))
    put(made, "runs/0/a0001/beat")  # a sign of life from just before the fold's last look
    if looks is NEVER_LOOKS:
        (tmp_path / "go").touch()
    started.send_signal(signal.SIGCONT)

    assert made.finish(started) == DUPLICATE
    assert json.loads(FolderRecord(str(made.folder)).read("runs/0/result") or "")["code"] == 5
    assert (made.ends(), made.results()) == (["-"], {})


@pytest.mark.parametrize("when", ["before its command", "after it"])
def test_shim_that_stood_still_while_others_went_on_with_the_run_leaves_it_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    made = make_job(tmp_path / "lab", sys.executable, "true").write()
    begun: list[int] = []

    def claim_late(run: RunRecord, *given: Any) -> int:
        number = claim(run, *given)
        if when == "before its command":
            put(made, f"runs/0/a{number + 1:04d}/start.json")
        return number

    def attempt(order: Any, run: RunRecord, number: int, *_: Any) -> Any:
        begun.append(number)
        return "app_failed", 1, {}

    def end_late(run: RunRecord, *given: Any) -> None:
        end(run, *given)
        if when == "after it":
            put(made, "runs/0/result", '{"reason": "succeeded", "code": 0, "attempt": 2}')
            fold(str(made.folder))

    claim, end = RunRecord.claim, RunRecord.end
    monkeypatch.setattr(RunRecord, "claim", claim_late)
    monkeypatch.setattr(RunRecord, "end", end_late)
    monkeypatch.setattr(run_loop, "attempt_once", attempt)
    options = SimpleNamespace(native="41", scratch=str(tmp_path), part=None)

    code = run_loop.serve(
        made.order, FolderRecord(str(made.folder)), 0, options, SimpleNamespace(stop=False, goes=False), {}
    )

    assert (code, len(begun)) == (DUPLICATE, when == "after it")


def test_shim_does_not_begin_another_attempt_of_a_job_that_a_later_epoch_serves(job: MakeJob, tmp_path: Path) -> None:
    made = job(f"touch {tmp_path}/up; while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 7", retry={"failure": 5})
    started = start_at_work(made, tmp_path / "up")
    put(made, "owners/2.0", "43")
    (tmp_path / "go").touch()

    assert made.finish(started) == DUPLICATE
    assert "index 0 was taken up by 2.0" in made.stderr
    assert (made.ends(), made.results()) == (["app_failed"], {})


def test_owner_of_another_part_does_not_keep_a_shim_from_its_next_attempt(job: MakeJob) -> None:
    made = job("exit $((2 - RUNTIME_ATTEMPT))", retry={"failure": 5})
    put(made, "owners/2.1", "43")

    assert made.run("--native", "41") == 0
    assert made.results() == {0: ("succeeded", 0, 2)}


def test_cancel_of_a_run_counts_whichever_attempt_hears_of_it(job: MakeJob, tmp_path: Path) -> None:
    made = job(f"touch {tmp_path}/up; exec sleep 600")
    started = start_at_work(made, tmp_path / "up")
    put(made, "cancel", "")
    put(made, "runs/0/a0002/start.json")

    made.finish(started)

    assert made.results() == {0: ("cancelled", 1, 1)}
    assert processes_with(str(made.root)) == []


def test_shim_that_is_stopped_after_a_later_attempt_began_notes_that_and_asks_for_no_other_end(
    job: MakeJob, tmp_path: Path
) -> None:
    made = job(
        f"trap 'touch {tmp_path}/asked; sleep 0.5; exit 0' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done"
    )
    started = start_at_work(made, tmp_path / "up")
    started.send_signal(signal.SIGTERM)
    wait_for((tmp_path / "asked").exists, "TERM")
    put(made, "runs/0/a0002/start.json")

    assert made.finish(started) == AGAIN
    assert (made.ends()[0], made.results()) == ("stopped", {})
