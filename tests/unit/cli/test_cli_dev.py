"""`runtime dev` as typed: a machine that runs each new state of the folder, and is given back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import PATIENCE_S, processes_with, wait_for
from tests.unit.cli.test_cli_startup import run_cli

QUICK = "import runtime.client.jobs.dev as dev; dev.BEAT_S, dev.LOOK_S = 0.1, 0.2"
CALL = "import sys; from runtime.cli.main import main; sys.exit(main(sys.argv[1:]))"
ENDED = "waiting for a change"


class Dev:
    """A `runtime dev` that runs beside the test, as in another terminal."""

    def __init__(self, tmp_path: Path, words: tuple[str, ...]) -> None:
        self.path = tmp_path / f"said-{os.urandom(4).hex()}"
        program = [sys.executable, "-c", f"{QUICK}\n{CALL}", "dev", "--on", "local", *words]
        with self.path.open("wb") as opened:
            self.process = subprocess.Popen(program, stdout=opened, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    @property
    def said(self) -> str:
        return self.path.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_for(lambda: self.said.count(text) >= times or self.process.poll() is not None, f"{text}: {self.said}")
        assert self.said.count(text) >= times, self.said

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


Start = Callable[..., Dev]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


@pytest.fixture
def start(run: Terminal, tmp_path: Path) -> Iterator[Start]:
    started: list[Dev] = []

    def begin(*words: str) -> Dev:
        started.append(Dev(tmp_path, words))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait()


def jobs(run: Terminal) -> list[str]:
    folder = run.data / "jobs" / "jobs"
    return [each.name for each in folder.iterdir()] if folder.is_dir() else []


def status(run: Terminal) -> Any:
    [job] = jobs(run)
    return run("status", job, "-o", "json").json


def test_help_reads_as_reviewed(golden: Callable[[str, str], None]) -> None:
    done = run_cli("dev", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    golden("cli/dev.txt", done.stdout)


def test_changed_file_runs_the_command_again_and_the_first_interrupt_gives_the_machine_back(
    run: Terminal, start: Start
) -> None:
    dev = start("--", "sh", "-c", "cat main.py; exit 3")
    dev.wait_for("exit code 3; waiting for a change")
    assert "print('hello')" in dev.said
    (run.tree / "main.py").write_text("print('other')\n")
    dev.wait_for(ENDED, 2)
    assert "print('other')" in dev.said
    assert "-- sent tree 1: 2 files" in dev.said

    assert dev.end() == 0
    assert "the machine is given back" in dev.said
    assert [(each["reason"], each["exit_code"]) for each in status(run)["attempts"]] == [("app_failed", 3)] * 2
    assert status(run)["state"] == "succeeded"


def test_changed_file_ends_the_command_that_runs(run: Terminal, start: Start) -> None:
    dev = start("--", "sh", "-c", "echo up; exec sleep 600")
    dev.wait_for("up\n")
    (run.tree / "main.py").write_text("print('other')\n")
    dev.wait_for("up\n", 2)
    dev.wait_for("a newer tree has come")
    assert dev.end(signal.SIGTERM) == 0
    wait_for(lambda: not processes_with(str(run.folder(jobs(run)[0]))), "the end of all processes")


def test_file_that_snapshots_leave_out_runs_nothing(run: Terminal, start: Start) -> None:
    (run.tree / ".runtimeignore").write_text("*.log\n")
    dev = start("--", "sh", "-c", "cat main.py")
    dev.wait_for(ENDED)
    (run.tree / "some.log").write_text("x")
    (run.tree / "main.py").write_text("print('other')\n")
    dev.wait_for(ENDED, 2)
    assert dev.end() == 0
    assert dev.said.count("-- sent tree") == 1


def test_folder_without_a_snapshot_is_noted_and_looked_at_again(run: Terminal, start: Start) -> None:
    dev = start("--", "cat", "main.py")
    dev.wait_for(ENDED)
    (run.tree / ".env").write_text("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzzzz\n")
    dev.wait_for("cannot read the folder, tries again")
    (run.tree / ".env").unlink()
    (run.tree / "main.py").write_text("print('other')\n")
    dev.wait_for(ENDED, 2)
    assert dev.end() == 0


@pytest.mark.parametrize("code", [0, 7])
def test_once_ends_with_the_exit_code_and_gives_the_machine_back(run: Terminal, code: int) -> None:
    said = run("dev", "--on", "local", "--once", "--", "sh", "-c", f"echo hello; exit {code}")
    assert said.code == code, said.err
    assert said.out == "hello\n"
    assert f"exit code {code}\n" in said.err
    assert status(run)["state"] == "succeeded"


def test_kept_machine_runs_the_next_command_and_the_changed_tree(run: Terminal) -> None:
    assert run("dev", "--on", "local", "--once", "--keep", "--", "cat", "main.py").code == 0
    (run.tree / "main.py").write_text("print('other')\n")
    said = run("dev", "--on", "local", "--once", "--", "sh", "-c", "cat main.py; exit 5")
    assert (said.code, said.out) == (5, "print('other')\n")
    assert f"going on with {jobs(run)[0]}" in said.err
    assert [each["exit_code"] for each in status(run)["attempts"]] == [0, 5]


def test_same_command_and_tree_run_again_on_a_kept_machine_if_once(run: Terminal) -> None:
    words = ("dev", "--on", "local", "--once", "--", "cat", "main.py")
    assert run(*words[:4], "--keep", *words[4:]).code == 0
    assert run(*words).out == "print('hello')\n"
    assert len(status(run)["attempts"]) == 2


def test_machine_that_was_given_back_is_not_gone_on_with(run: Terminal) -> None:
    for _ in range(2):
        assert run("dev", "--on", "local", "--once", "--", "true").code == 0
    assert len(jobs(run)) == 2


def test_machine_of_a_client_that_died_is_gone_on_with(run: Terminal, start: Start) -> None:
    words = ("--", "sh", "-c", "echo up; exec sleep 600")
    first = start(*words)
    first.wait_for("up\n")
    first.process.kill()
    first.process.wait()
    second = start(*words)
    second.wait_for("going on with j-")
    second.wait_for("up\n")
    assert second.end() == 0
    assert len(status(run)["attempts"]) == 1


def test_earlier_client_of_a_machine_ends_without_giving_it_back(run: Terminal, start: Start) -> None:
    first = start("--", "cat", "main.py")
    first.wait_for(ENDED)
    second = start("--", "cat", "main.py")
    second.wait_for("going on with j-")
    assert first.process.wait(PATIENCE_S) == 2
    assert "another `runtime dev` of this folder goes on with the machine" in first.said
    assert status(run)["state"] == "running"
    assert second.end() == 0


def test_earlier_client_ends_even_if_it_wrote_over_the_beat_of_the_later_one(run: Terminal, start: Start) -> None:
    first = start("--", "cat", "main.py")
    first.wait_for(ENDED)
    beat = run.data / "jobs" / "jobs" / jobs(run)[0] / "hold" / "beat"
    before = beat.read_bytes()
    second = start("--", "cat", "main.py")
    second.wait_for("going on with j-")
    beat.write_bytes(before)

    assert first.process.wait(PATIENCE_S) == 2
    assert second.process.poll() is None
    assert second.end() == 0


def test_second_interrupt_leaves_at_once(run: Terminal, start: Start) -> None:
    dev = start("--", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done")
    dev.wait_for("up\n")
    dev.process.send_signal(signal.SIGINT)
    dev.wait_for("giving the machine back")
    assert dev.end() == 130
    assert "at the latest after 15 minutes without a beat" in dev.said


def test_cancel_ends_the_session(run: Terminal, start: Start) -> None:
    dev = start("--", "true")
    dev.wait_for(ENDED)
    assert run("cancel", jobs(run)[0], "--yes").code == 0
    assert dev.process.wait(PATIENCE_S) == 1
    assert "cancelled: the machine is given back" in dev.said


def test_status_and_explain_say_that_the_machine_waits(run: Terminal, start: Start) -> None:
    dev = start("--", "true")
    dev.wait_for(ENDED)
    [job] = jobs(run)
    assert "is held and waits for a change of the code" in run("status", job).out
    assert "is held and waits for a change of the code" in run("explain", job).out
    assert dev.end() == 0


def test_order_of_a_machine_has_the_hold_and_a_time_limit(run: Terminal) -> None:
    [plan] = json.loads(run("dev", "--on", "local", "--dry-run", "-o", "json", "--", "true").out)
    assert (plan["order"]["hold"], plan["order"]["time_limit_s"]) == (True, 8 * 3600)
    [other] = json.loads(
        run("dev", "--on", "local", "--dry-run", "-o", "json", "--time-limit", "1h", "--", "false").out
    )
    assert other["order"]["time_limit_s"] == 3600
    (run.tree / "main.py").write_text("print('other')\n")
    [same] = json.loads(run("dev", "--on", "local", "--dry-run", "-o", "json", "--", "false").out)
    assert same["job"] == plan["job"]
    assert jobs(run) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--set", "nodes=2"], "is one machine, and this job asks for 2 nodes"),
        (["--set", "array.seeds=2"], "and this job is an array"),
        (["--set", "code.mode=none"], "runs each new snapshot, and `code.mode` is none"),
    ],
)
def test_job_that_is_no_single_machine_is_refused(run: Terminal, words: list[str], why: str) -> None:
    said = run("dev", "--on", "local", *words, "--", "true")
    assert said.code == 2
    assert why in said.err
    assert jobs(run) == []


def test_launch_of_the_same_spec_is_another_job_and_holds_nothing(run: Terminal) -> None:
    [plan] = json.loads(run("launch", "--on", "local", "--dry-run", "-o", "json", "--", "true").out)
    [held] = json.loads(run("dev", "--on", "local", "--dry-run", "-o", "json", "--", "true").out)
    assert "hold" not in plan["order"]
    assert plan["job"] != held["job"]
