"""A script that saves two artifacts: killed half-way with its worker, gone on with by another, and its results brought home."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services_support import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")

TRAIN = """
import os, pathlib, sys, time

model, log = pathlib.Path("out/model"), pathlib.Path("loss.csv")
model.mkdir(parents=True, exist_ok=True)
last = model / "step"
step = int(last.read_text()) if last.exists() else 0
print("begins at", step, flush=True)
while step < 6:
    step += 1
    (model / "next").write_text(str(step))
    os.replace(model / "next", last)
    with log.open("a") as file:
        file.write(f"{step}\\n")
    if step == 3 and not (half := pathlib.Path(sys.argv[1])).exists():
        half.touch()
        time.sleep(600)
"""
"""Six steps of training; the first attempt hangs after the third."""

EVALUATE = """
import runtime

print((runtime.artifact("base") / "step").read_text(), runtime.artifact("base").parent.name)
(runtime.artifact("score")).write_text("0.5")
"""


class Lab:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder / "project"
        self.project.mkdir()
        (self.project / "pyproject.toml").write_text('[project]\nname = "lab"\nversion = "1"\n')
        (self.project / "train.py").write_text(TRAIN)
        (self.project / "evaluate.py").write_text(EVALUATE)
        (folder / "tmp").mkdir()
        self.environ = {
            **os.environ,
            "RUNTIME_DATA_DIR": str(folder / "data"),
            "RUNTIME_PREEMPTION_NOTICES": "off",
            "TMPDIR": str(folder / "tmp"),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "runtime", *words]
        return subprocess.Popen(command, cwd=self.project, env=self.environ, text=True, stderr=subprocess.DEVNULL)

    def run(self, *words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "runtime", *words]
        done = subprocess.run(command, cwd=self.project, env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def read(self, *words: str) -> Any:
        return json.loads(self.run(*words, "-o", "json"))


def test_training_goes_on_from_its_artifacts_after_its_worker_was_killed(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    capture = ("--capture", "out/model:model", "--capture", "loss.csv:loss", "--capture-every", "1s")
    train = ("--", sys.executable, "train.py", str(tmp_path / "half"))
    lab.run("submit", "--experiment", "sac", *capture, *train)
    worker = lab.start("worker")
    try:
        assert wait_until((tmp_path / "half").exists)
        assert wait_until(lambda: len(lab.read("artifacts", "list", "sac")) == 2)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    saved = lab.read("artifacts", "list", "sac")
    early = lab.read("artifacts", "get", "sac", "model", "early")
    refused = lab.run("submit", "--reuse", "sac/model:base", "--", "true", code=2)

    lab.run("worker", "--idle-timeout", "2s")

    final = lab.read("artifacts", "list", "sac")
    assert {(each["tag"], each["state"]) for each in saved} == {("model", "saved"), ("loss", "saved")}
    assert {(each["tag"], each["state"]) for each in final} == {("model", "final"), ("loss", "final")}
    assert (lab.project / early["path"] / "step").read_text() == "3"
    assert "has not succeeded, so its artifact `model` may change" in refused
    model = lab.run("artifacts", "get", "sac", "model").strip()
    loss = lab.run("artifacts", "get", "sac", "loss", "results").strip()
    assert (lab.project / model / "step").read_text() == "6"
    assert (lab.project / loss).read_text() == "".join(f"{step}\n" for step in range(1, 7))
    assert lab.run("logs", final[0]["task"]).endswith("begins at 3\n")

    lab.run("submit", "--experiment", "eval", "--reuse", "sac/model:base", "--", sys.executable, "evaluate.py")
    lab.run("worker", "--idle-timeout", "2s")
    (result,) = lab.read("results", "eval")
    assert result["state"] == "succeeded"
    assert lab.run("logs", result["task"]) == "6 artifacts\n"
    assert (Path(result["outputs_url"]) / "artifacts" / "score").read_text() == "0.5"


def test_file_that_was_put_is_found_by_tasks_and_is_the_same_version_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    (lab.project / "step").mkdir()
    (lab.project / "step" / "step").write_text("9")
    put = lab.read("artifacts", "put", "step", "--tag", "base", "--experiment", "inputs")
    again = lab.read("artifacts", "put", "step", "--tag", "base", "--experiment", "inputs")
    (lab.project / "step" / "step").write_text("10")
    other = lab.read("artifacts", "put", "step", "--tag", "base", "--experiment", "inputs")
    words = ("--", sys.executable, "evaluate.py")
    lab.run("submit", "--experiment", "old", "--reuse", f"{put['version']}:base", *words)
    lab.run("submit", "--experiment", "new", "--reuse", "inputs/base:base", *words)
    lab.run("submit", "--experiment", "local", "--reuse", "./step:base", *words)

    lab.run("worker", "--idle-timeout", "2s")

    assert put["version"] == again["version"] != other["version"]
    printed = {name: lab.run("logs", lab.read("results", name)[0]["task"]) for name in ("old", "new", "local")}
    assert printed == {"old": "9 artifacts\n", "new": "10 artifacts\n", "local": "10 artifacts\n"}
    assert "is there already and is no empty folder" in lab.run("artifacts", "get", "inputs", "base", "step", code=2)
    assert "did you mean" in lab.run("artifacts", "get", "inputs", "bse", code=2)


def test_script_finds_its_artifacts_outside_of_any_task(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    (lab.project / "artifacts" / "base").mkdir(parents=True)
    (lab.project / "artifacts" / "base" / "step").write_text("1")

    done = subprocess.run(
        [sys.executable, "evaluate.py"], cwd=lab.project, env=lab.environ, capture_output=True, text=True, check=True
    )

    assert done.stdout == "1 artifacts\n"
    assert (lab.project / "artifacts" / "score").read_text() == "0.5"
