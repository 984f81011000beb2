"""Worker, submission and job of an earlier version beside those of this one: one queue, one folder, one ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.services_support import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EARLIER = "d215118be694"
"""The version before the modules moved into rows. Wire formats, records and ledgers are unchanged since."""
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


def end_workers(workers: Sequence[subprocess.Popen[str]]) -> list[str]:
    said = [worker.communicate(timeout=PATIENCE_S)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), said
    return said


@pytest.mark.parametrize("records", ["file", "folder"])
def test_workers_of_two_releases_share_a_queue_and_each_task_is_recorded_once(
    earlier: Path, tmp_path: Path, records: str
) -> None:
    environ = make_stack(tmp_path, records)
    (tmp_path / "runtime.toml").write_text("")
    old, new = (Checkout(source, tmp_path, environ) for source in (earlier, ROOT))
    running, both = tmp_path / "running", tmp_path / "both"
    running.mkdir()
    # A worker runs one attempt at a time. The first attempts wait until two run, so both workers take part.
    body = f"touch {running}/$$; until [ -e {both} ]; do [ $(ls {running} | wc -l) -lt 2 ] || touch {both}; sleep 0.05; done"
    for release, name in ((old, "old"), (new, "new")):
        release.run(
            "submit", "--experiment", name, "--grid", f"n=0:{TASKS // 2}", "--", "sh", "-c", body + "; echo {n}"
        )

    workers = [release.start("worker", "--idle-timeout", "5s", "--look-ahead", "0") for release in (old, new)]
    said = end_workers(workers)

    for release in (old, new):
        for name in ("old", "new"):
            totals = release.read("status", name, "--exact")["totals"]
            assert {state: count for state, count in totals.items() if count} == {"succeeded": TASKS // 2}, said
    assert both.exists()


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
