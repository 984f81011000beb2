"""A program that tunes, killed at its fault points and started again, or run twice at once: each number is recorded once."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services_support import PATIENCE_S
from tests.shim_support import processes_with, signal_all

pytest.importorskip("optuna")

PROGRAM = """\
import json, os, sys
import runtime

def loss(run, variant):
    with open(os.environ["CALLS_OF_TEST"], "a") as opened:
        opened.write("%d %r\\n" % (run.index, variant["x"]))
    return (variant["x"] - 0.3) ** 2

if __name__ == "__main__":
    target, n, parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    space = {"x": runtime.uniform(0, 1), "of": runtime.choice("a", [1])}
    study = runtime.tune(loss, space, target=target, n=n, parallel=parallel)
    print(json.dumps([[each.number, each.params["x"], each.value, each.state] for each in study.trials]))
"""
KILLED = -9


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script of a project, whose function no module has."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "salt").write_bytes(os.urandom(12))
    (folder / "runtime.toml").write_text("")
    (folder / "fit.py").write_text(PROGRAM)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CALLS_OF_TEST", str(tmp_path / "calls"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    yield folder / "fit.py"
    signal_all(processes_with(str(tmp_path)))


@pytest.fixture
def worker(program: Path) -> Iterator[None]:
    words = [sys.executable, "-m", "runtime", "worker", "--slots", "2"]
    started = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield
    started.terminate()
    started.wait(PATIENCE_S)


def begin(program: Path, target: str, n: int, parallel: int, faults: str = "") -> subprocess.Popen[str]:
    words = [sys.executable, str(program), target, str(n), str(parallel)]
    environ = {**os.environ, "RUNTIME_FAULTS": faults}
    return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(begun: subprocess.Popen[str]) -> tuple[int, list[Any], str]:
    out, err = begun.communicate(timeout=PATIENCE_S)
    return begun.returncode, json.loads(out) if out else [], err


def check_once(trials: list[Any], n: int, calls: Path) -> None:
    """Each number was asked once: the function was called once for each, with what the study has."""
    assert [each[0] for each in trials] == list(range(n))
    assert {each[3] for each in trials} == {"succeeded"}
    assert [each[2] for each in trials] == [(each[1] - 0.3) ** 2 for each in trials]
    assert sorted(calls.read_text().splitlines()) == sorted(f"{each[0]} {each[1]!r}" for each in trials)


@pytest.mark.parametrize(
    ("target", "faults"),
    [
        ("queue:", "tune.asked=kill:after=3"),
        ("queue:", "tune.started=kill:after=3"),
        ("local", "tune.asked=kill:after=3"),
        ("local", "tune.noted=kill:after=2"),
        ("local", "launch.written=kill:after=5"),
        ("local", "launch.submitted=kill:after=2"),
    ],
)
@pytest.mark.usefixtures("worker")
@pytest.mark.daily(2)
def test_killed_program_goes_on_and_records_each_number_once(
    program: Path, tmp_path: Path, target: str, faults: str
) -> None:
    n, ended = 8, []
    for _ in range(n + 1):
        code, trials, err = finish(begin(program, target, n, 4, faults))
        ended.append(code)
        if code != KILLED:
            break

    assert ended[-1] == 0, err
    assert "goes on with the code" not in err
    assert len(ended) > 1
    check_once(trials, n, tmp_path / "calls")


@pytest.mark.soak
@pytest.mark.usefixtures("worker")
def test_many_trials_survive_a_kill_after_every_few(program: Path, tmp_path: Path) -> None:
    n, ended = 60 if os.environ.get("SOAK") == "1" else 20, []
    points = itertools.cycle(["tune.asked=kill:after=9", "tune.started=kill:after=7", "tune.asked=kill"])
    while not ended or ended[-1] == KILLED:
        code, trials, err = finish(begin(program, "queue:", n, 8, next(points)))
        ended.append(code)

    assert ended[-1] == 0, err
    assert len(ended) > 2
    check_once(trials, n, tmp_path / "calls")


@pytest.mark.parametrize("target", ["queue:", "local"])
@pytest.mark.usefixtures("worker")
@pytest.mark.daily(1)
def test_two_programs_at_once_share_the_trials(program: Path, tmp_path: Path, target: str) -> None:
    both = [begin(program, target, 12, 3) for _ in range(2)]

    found = [finish(each) for each in both]

    assert [code for code, _, _ in found] == [0, 0], found
    assert found[0][1] == found[1][1]
    check_once(found[0][1], 12, tmp_path / "calls")


@pytest.mark.usefixtures("worker")
def test_one_at_a_time_asks_the_same_whether_killed_or_not(program: Path) -> None:
    code = KILLED
    while code == KILLED:
        code, killed, _ = finish(begin(program, "queue:", 14, 1, "tune.asked=kill:after=4"))

    _, here, _ = finish(begin(program, "here", 14, 1))

    assert killed == here
