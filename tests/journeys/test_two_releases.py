"""Tasks and jobs of an earlier version, taken over by this one: one queue, one folder, one ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services_support import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EARLIER = "d215118be694"
"""The version before the modules moved into rows. Wire formats, records and ledgers are unchanged since; task files have another layout."""
TASKS = 12


class Checkout:
    """The command line of one version of the code."""

    def __init__(self, source: Path, folder: Path, environ: dict[str, str]) -> None:
        self.source, self.folder = source, folder
        self.environ = {**os.environ, **environ, "PYTHONPATH": str(source)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "runtime", *words],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> str:
        process = self.start(*words)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        return out

    def read(self, *words: str) -> Any:
        return json.loads(self.run(*words, "-o", "json"))


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Check out the package of the earlier version."""
    folder = tmp_path_factory.mktemp("earlier")
    packed = subprocess.run(["git", "archive", EARLIER, "runtime"], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        pytest.skip(f"commit {EARLIER} is not in this clone; `git fetch --unshallow` brings it")
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    return folder


def make_stack(folder: Path, records: str) -> dict[str, str]:
    """Return the environment of a stack with its tasks in one file, and its records there or in a folder."""
    contract = {
        "schema": 1,
        "stack": "shared",
        "labels": {},
        "records": {"url": f"file://{folder}/records" if records == "folder" else f"sqlite:{folder}/tasks.db"},
        "queues": {"default": {"kind": "sqlite", "path": f"{folder}/tasks.db"}},
    }
    (folder / "contract.json").write_text(json.dumps(contract))
    return {"RUNTIME_OUTPUTS": str(folder / "contract.json"), "RUNTIME_DATA_DIR": str(folder / "data")}


@pytest.mark.parametrize("records", ["file", "folder"])
def test_this_release_runs_the_tasks_of_an_earlier_one_whose_workers_are_kept_out(
    earlier: Path, tmp_path: Path, records: str
) -> None:
    environ = make_stack(tmp_path, records)
    (tmp_path / "runtime.toml").write_text("")
    old, new = (Checkout(source, tmp_path, environ) for source in (earlier, ROOT))
    runs = tmp_path / "runs"
    words = ["--grid", f"n=0:{TASKS // 2}", "--", "sh", "-c", f"echo {{n}}-$RUNTIME_TASK_ID >> {runs}"]
    old.run("submit", "--experiment", "old", *words)
    old_worker = old.start("worker", "--max-tasks", "1")
    said_before = old_worker.communicate(timeout=PATIENCE_S)[1]
    assert old_worker.returncode == 0, said_before
    new.run("submit", "--experiment", "new", *words)
    refused = old.start("submit", "--experiment", "more", *words)
    refusal = refused.communicate(timeout=PATIENCE_S)[1]
    worker = new.start("worker", "--idle-timeout", "5s")
    said = worker.communicate(timeout=PATIENCE_S)[1]

    assert worker.returncode == 0, said
    assert refused.returncode != 0
    assert "layout 2" in refusal
    for name in ("old", "new"):
        totals = new.read("status", name, "--exact")["totals"]
        assert {state: count for state, count in totals.items() if count} == {"succeeded": TASKS // 2}, said
    ran = runs.read_text().split()
    assert len(ran) == len(set(ran)) == TASKS


def test_jobs_of_two_releases_are_followed_by_each_other(earlier: Path, tmp_path: Path) -> None:
    environ = {"RUNTIME_DATA_DIR": str(tmp_path / "data")}
    (tmp_path / "runtime.toml").write_text("")
    old, new = (Checkout(source, tmp_path, environ) for source in (earlier, ROOT))

    for name, release, other in (("first", old, new), ("second", new, old)):
        words = ["launch", "--on", "local", "--name", name, "--code", "none"]
        launched = json.loads(release.run(*words, "-o", "json", "--", "echo", "hello"))
        job = launched["job"]
        other.run("logs", "-f", job)

        assert other.run("logs", job).strip() == "hello"
        assert other.read("status", job)["state"] == "succeeded"
        # The same launch by the other version is the same job.
        again = json.loads(other.run(*words, "-o", "json", "--", "echo", "hello"))
        assert (again["job"], again["new"]) == (job, False)
