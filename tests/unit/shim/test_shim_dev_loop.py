"""A job that keeps its machine between commands: the next tree runs, and the machine is given back."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.shim.record import FolderRecord, RunRecord
from runtime.snapshots.snapshot import make_snapshot
from tests.fakes.gcs import GcsServer
from tests.shim_support import JOB, ShimJob, make_job, processes_with, wait_for
from tests.unit.shim.test_shim_bucket import BucketJob, maker

QUICK = {"FIRST_LOOK_S": 0.1, "MARK_S": 0.1, "HOLD_LOOK_S": 0.05}
AGAIN, DUPLICATE = 10, 3
RUN = "runs/0"

MakeJob = Callable[..., ShimJob]


@pytest.fixture(params=["folder", "bucket"])
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeJob]:
    server = GcsServer().start() if request.param == "bucket" else None
    if server:
        server.make_bucket("lab")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)

    def make(script: str, **changes: Any) -> ShimJob:
        lab = tmp_path / "lab"
        changes = {"hold": True, **changes}
        made: ShimJob = (
            maker(lab, sys.executable)(script, **changes)
            if server
            else make_job(lab, sys.executable, script, **changes)
        )
        made.constants = dict(QUICK)
        return made

    yield make
    if server:
        server.stop()


def put(made: ShimJob, name: str, data: bytes = b"") -> None:
    """Write a whole file of the job's record, as a client does."""
    if isinstance(made, BucketJob):
        made.files.write(f"jobs/{JOB}/{name}", data)
        return
    path = made.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / f"new.{path.name}").write_bytes(data)
    (path.parent / f"new.{path.name}").rename(path)


def names(made: ShimJob, folder: str) -> list[str]:
    if isinstance(made, BucketJob):
        return made.files.names(f"jobs/{JOB}/{folder}")
    path = made.folder / folder
    return [each.name for each in path.iterdir()] if path.is_dir() else []


def ends(made: ShimJob) -> list[str]:
    """How each attempt ended so far, oldest first, and with which code; `-` while it runs."""
    attempts = sorted(name for name in names(made, RUN) if name.startswith("a0"))
    found = [[name for name in names(made, f"{RUN}/{each}") if name.startswith("end.")] for each in attempts]
    return [each[0].removeprefix("end.") if each and each[0].count(".") == 2 else "-" for each in found]


def wait_for_ends(made: ShimJob, *wanted: str) -> None:
    wait_for(lambda: ends(made) == list(wanted), f"{wanted}")


def send(made: ShimJob, number: int, tmp_path: Path, text: str, *, sha256: str = "", **fields: Any) -> None:
    """Send a tree whose `text` is that, as a client does."""
    tree = tmp_path / f"tree{number}"
    tree.mkdir()
    (tree / "text").write_text(text)
    archive = make_snapshot(tree).archive
    put(made, f"hold/{number}.tar", archive)
    sha256 = sha256 or hashlib.sha256(archive).hexdigest()
    put(made, f"hold/{number}.json", json.dumps({"sha256": sha256, **fields}).encode())


def give_back(made: ShimJob, started: subprocess.Popen[str]) -> int:
    put(made, "hold/over")
    return made.finish(started)


READS = "cat text 2>/dev/null || true; exit ${CODE:-0}"


@pytest.mark.parametrize("code", [0, 7])
def test_end_of_a_command_is_noted_and_the_next_tree_runs_though_no_budget_is_left(
    job: MakeJob, tmp_path: Path, code: int
) -> None:
    made = job(READS, env={"CODE": str(code)}, retry={"failure": 0, "preemption": 0})
    end = "succeeded.0" if code == 0 else "app_failed.7"
    started = made.start()
    wait_for_ends(made, end)
    send(made, 1, tmp_path, "first")
    wait_for_ends(made, end, end)
    send(made, 2, tmp_path, "second", command=["sh", "-c", "echo other; cat text"])
    wait_for_ends(made, end, end, "succeeded.0")

    assert give_back(made, started) == 0
    assert made.results() == {0: ("succeeded", 0, 3)}
    if not isinstance(made, BucketJob):
        assert [made.log(attempt=each) for each in (1, 2, 3)] == ["", "first", "other\nsecond"]
    assert made.left_over() == []


def test_start_note_of_an_attempt_has_the_number_of_its_tree(job: MakeJob, tmp_path: Path) -> None:
    made = job(READS)
    started = made.start()
    wait_for_ends(made, "succeeded.0")
    send(made, 4, tmp_path, "fourth")
    wait_for_ends(made, "succeeded.0", "succeeded.0")
    give_back(made, started)
    run = RunRecord(FolderRecord(str(made.folder)), 0)
    assert [(run.started(each) or {})["tree"] for each in (1, 2)] == [0, 4]


def test_newer_tree_ends_the_running_command_and_trees_in_between_are_skipped(job: MakeJob, tmp_path: Path) -> None:
    made = job(
        f"trap 'touch {tmp_path}/asked; while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 3' TERM;"
        f"[ -e text ] && cat text && exit; touch {tmp_path}/up; while :; do sleep 0.05; done",
        grace_s=60.0,
    )
    started = made.start()
    wait_for((tmp_path / "up").exists, "the command")
    send(made, 1, tmp_path, "first")
    wait_for((tmp_path / "asked").exists, "TERM")
    send(made, 2, tmp_path, "second")
    wait_for(lambda: "2.json" in names(made, "hold"), "the second tree")
    time.sleep(3 * QUICK["HOLD_LOOK_S"])  # it may be found later; then the first one runs, too
    (tmp_path / "go").touch()
    wait_for(lambda: ends(made)[-1] == "succeeded.0", "the second tree's command")
    assert give_back(made, started) == 0
    assert made.ends()[0] == "requeue"
    assert set(made.ends()[1:-1]) <= {"succeeded", "requeue"}


def test_command_that_runs_when_the_machine_is_given_back_is_ended(job: MakeJob, tmp_path: Path) -> None:
    made = job(f"touch {tmp_path}/up; exec sleep 600")
    started = made.start()
    wait_for((tmp_path / "up").exists, "the command")
    assert give_back(made, started) == 0
    assert (made.ends(), made.results()) == (["requeue"], {0: ("succeeded", 0, 1)})
    assert processes_with(str(made.root)) == []


def test_machine_that_begins_after_its_client_gave_it_back_runs_nothing(job: MakeJob, tmp_path: Path) -> None:
    made = job(f"touch {tmp_path}/up")
    put(made, "hold/over")
    assert made.run() == 0
    assert made.results() == {0: ("succeeded", 0, 0)}
    assert not (tmp_path / "up").exists()


@pytest.mark.parametrize("busy", [True, False])
def test_cancel_ends_the_run_as_cancelled(job: MakeJob, tmp_path: Path, busy: bool) -> None:
    made = job(f"touch {tmp_path}/up; {'exec sleep 600' if busy else ''}")
    started = made.start()
    wait_for((tmp_path / "up").exists if busy else lambda: ends(made) == ["succeeded.0"], "the command")
    put(made, "cancel")
    assert made.finish(started) == 1
    assert made.results() == {0: ("cancelled", 1, int(busy))}


@pytest.mark.parametrize("busy", [True, False])
def test_next_start_after_a_stop_goes_on_with_the_newest_tree(job: MakeJob, tmp_path: Path, busy: bool) -> None:
    made = job(f"cat text 2>/dev/null || touch {tmp_path}/up; [ -e text ] || {'exec sleep 600' if busy else 'true'}")
    started = made.start("--native", "41")
    wait_for((tmp_path / "up").exists if busy else lambda: ends(made) == ["succeeded.0"], "the command")
    started.send_signal(signal.SIGTERM)
    assert made.finish(started) == AGAIN
    first = "stopped.143" if busy else "succeeded.0"
    assert (ends(made), made.results()) == ([first], {})
    send(made, 1, tmp_path, "first")
    started = made.start("--native", "41")
    wait_for_ends(made, first, "succeeded.0")
    assert give_back(made, started) == 0


def test_losses_of_the_machine_are_charged_although_commands_are_not(job: MakeJob, tmp_path: Path) -> None:
    made = job(f"touch {tmp_path}/up$RUNTIME_ATTEMPT; exec sleep 600", retry={"preemption": 0})
    started = made.start("--native", "41")
    wait_for((tmp_path / "up1").exists, "the command")
    send(made, 1, tmp_path, "first")
    wait_for((tmp_path / "up2").exists, "the next command")
    started.send_signal(signal.SIGTERM)
    assert made.finish(started) == 1
    assert made.results() == {0: ("preempted", 143, 2)}


def test_counter_that_stands_still_gives_the_machine_back(job: MakeJob) -> None:
    made = job("true")
    put(made, "hold/beat", b"7")
    made.constants["SILENT_S"] = 0.5
    assert made.run() == 0
    assert made.results() == {0: ("succeeded", 0, 1)}
    result = json.loads(RunRecord(FolderRecord(str(made.folder)), 0).record.read(f"{RUN}/result") or "")
    assert "no sign of life" in result["message"]


def test_time_limit_counts_for_the_whole_hold(job: MakeJob, tmp_path: Path) -> None:
    made = job("sh -c 'printf %600s >> $CLOCK'", time_limit_s=1000.0)
    made.clock = tmp_path / "clock"
    started = made.start()
    wait_for_ends(made, "succeeded.0")
    send(made, 1, tmp_path, "first", command=["sh", "-c", "printf %600s >> $CLOCK; exec sleep 600"])
    assert made.finish(started) == 1
    assert (made.ends(), made.results()) == (["succeeded", "timeout"], {0: ("timeout", 124, 2)})


def test_time_limit_comes_while_a_tree_is_waited_for(job: MakeJob, tmp_path: Path) -> None:
    made = job("true", time_limit_s=1000.0)
    made.clock = tmp_path / "clock"
    started = made.start()
    wait_for_ends(made, "succeeded.0")
    made.pass_time(2000)
    assert made.finish(started) == 1
    assert (made.ends(), made.results()) == (["succeeded"], {0: ("timeout", 124, 1)})


@pytest.mark.parametrize(
    "damage", [b"", b'{"sha256": "ab', b'["x"]', b"{}", b'{"sha256": "../x"}', b"\xff", b'{"sha256": 1, "command": []}']
)
@pytest.mark.daily(4)
def test_damaged_tree_is_skipped_with_a_word_and_the_next_one_runs(job: MakeJob, tmp_path: Path, damage: bytes) -> None:
    made = job(READS)
    put(made, "hold/1.json", damage)
    put(made, "hold/0.json", b"{}")
    put(made, "hold/x.json", b"{}")
    started = made.start()
    wait_for_ends(made, "succeeded.0")
    send(made, 2, tmp_path, "second")
    wait_for_ends(made, "succeeded.0", "succeeded.0")
    assert give_back(made, started) == 0
    assert made.stderr.count("1.json") == 1, made.stderr


def test_tree_with_other_bytes_than_its_content_id_is_not_unpacked(job: MakeJob, tmp_path: Path) -> None:
    made = job(READS)
    started = made.start()
    wait_for_ends(made, "succeeded.0")
    send(made, 1, tmp_path, "first", sha256="0" * 64)
    wait_for_ends(made, "succeeded.0", "setup_failed.1")
    send(made, 2, tmp_path, "second")
    wait_for_ends(made, "succeeded.0", "setup_failed.1", "succeeded.0")
    assert give_back(made, started) == 0


def test_shim_of_a_later_epoch_takes_the_machine_over(job: MakeJob) -> None:
    made = job("true")
    started = made.start("--native", "41")
    wait_for_ends(made, "succeeded.0")
    put(made, "owners/2.0", b"43")
    put(made, f"{RUN}/a0002/start.json", b"{}")
    assert made.finish(started) == DUPLICATE
    assert made.results() == {}


def test_gpus_stay_claimed_between_commands(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    made = make_job(
        tmp_path / "lab",
        sys.executable,
        "echo $CUDA_VISIBLE_DEVICES",
        hold=True,
        gpus={"count": 1, "devices": ["0", "1"], "locks": str(claims)},
    )
    made.constants = dict(QUICK)
    started = made.start()
    wait_for_ends(made, "succeeded.0")
    held = list(tmp_path.rglob("claim.*"))
    send(made, 1, tmp_path, "first")
    wait_for_ends(made, "succeeded.0", "succeeded.0")
    assert [each.exists() for each in held] == [True]
    assert give_back(made, started) == 0
    assert (made.log(attempt=1), made.log(attempt=2)) == ("0\n", "0\n")
    assert not held[0].exists()
