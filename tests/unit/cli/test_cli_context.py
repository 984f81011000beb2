"""A script that tells its context, as a job, as a task and by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services_support import PATIENCE_S

SCRIPT = """\
import json, os, runtime
run = runtime.current_attempt()
run.report(step=1, loss=0.5)
run.progress(2, total=4, loss=0.25)
(run.output / "o").write_text("x"); (run.checkpoint / "c").write_text("x")
print(json.dumps({
    "name": run.name, "variant": run.variant, "index": run.index, "attempt": run.attempt, "argv": run.argv,
    "git": [[each["folder"], each["branch"], each["dirty"]] for each in run.git], "gpus": run.gpus,
    "ids": sorted(name for name in run.ids if name.startswith("RUNTIME_")), "stop": run.should_stop(),
}))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "salt").write_bytes(os.urandom(12))
    (folder / "tell.py").write_text(SCRIPT)
    who = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    for words in (["init"], ["add", "tell.py"], ["commit", "-m", "first"]):
        subprocess.run([*who, *words], cwd=folder, check=True, capture_output=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return folder


def call(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(text: str) -> dict[str, Any]:
    return dict(json.loads(text[text.index("{") :]))


COMMON = {"variant": None, "index": 0, "attempt": 1, "git": [[".", "main", True]], "gpus": [], "stop": False}
TELL = (sys.executable, "tell.py")


def test_script_of_a_job_has_the_context_of_a_run(project: Path) -> None:
    words = ("launch", "--on", "local", "--name", "tell", "--follow", "--", *TELL)

    seen = told(call("-m", "runtime", *words))

    argv = seen.pop("argv")
    assert argv[1:] == list(words)
    assert seen == {**COMMON, "name": "tell", "ids": ["RUNTIME_JOB_ID"]}


def test_script_of_a_task_has_the_context_of_a_run(project: Path) -> None:
    call("-m", "runtime", "submit", "--experiment", "tell", "--", *TELL)
    call("-m", "runtime", "worker", "--idle-timeout", "1s")

    seen = told(call("-m", "runtime", "logs", "tell"))

    assert seen == {**COMMON, "name": "tell", "argv": [], "ids": ["RUNTIME_ATTEMPT_TOKEN", "RUNTIME_TASK_ID"]}


def test_script_by_itself_has_its_own_command_line_and_folders_here(project: Path) -> None:
    seen = told(call("tell.py", "--lr=1", "--api-key=canary1"))

    assert seen == {**COMMON, "name": "local", "argv": ["tell.py", "--lr=1"], "ids": []}
    assert ((project / "output/o").exists(), (project / "checkpoints/c").exists()) == (True, True)
