"""`runtime quickstart` as a newcomer runs it: real workers, one killed, and the records afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services_support import wait_until

LIMIT_S = 500
"""A generous limit: the promised time assumes two cores, and tests share theirs."""


def start(*args: str, data: Path, **options: Any) -> subprocess.Popen[str]:
    environ = {**os.environ, "RUNTIME_DATA_DIR": str(data)}
    command = [sys.executable, "-m", "runtime", "quickstart", *args]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def processes_in(folder: Path) -> list[int]:
    """List the processes whose working directory is in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def make_tree(root: Path) -> Path:
    """Make a tree of more files than shards, with work for some seconds: the standard library has five times as much.

    The first shards hold the large files, so there is work left when a third of all is done and a worker is killed.
    """
    for number in range(24):
        lines = (f"def name_{number}_{line}(a, b={line}):\n    return a.call_{line % 7}(b)\n" for line in range(7_000))
        (root / f"large{number:02}").mkdir(parents=True)
        (root / f"large{number:02}/all.py").write_text("".join(lines))
    (root / "small").mkdir()
    for number in range(300):
        text = f'"""Module {number}."""\n' + "".join(f"value = call_{line}(value)\n" for line in range(number % 50))
        (root / f"small/{number}.py").write_text(text)
    return root


@pytest.mark.slow
def test_quickstart_loses_a_worker_and_nothing_else(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    running = start("-o", "json", "--path", str(tree), data=tmp_path)

    out, err = running.communicate(timeout=LIMIT_S)

    assert running.returncode == 0, err
    result = json.loads(out)
    counts = result["audit"]
    assert (counts["submitted"], counts["recorded"], counts["lost"], counts["recorded_twice"]) == (33, 33, 0, 0)
    assert (counts["files_missing"], counts["files_twice"]) == (0, 0)
    assert counts["files"] > 300
    assert counts["workers_lost"] == counts["attempts_lost"] == len(counts["redone"]) == 1
    assert counts["attempts"] == 34
    assert result["killed"] in err
    assert result["value"]["clusters"] >= 1
    assert wait_until(lambda: not processes_in(tmp_path)), processes_in(tmp_path)

    # The commands printed at the end work as printed.
    status, explain, _ = result["next"]
    shown = subprocess.run([*shlex.split(f"env {status}"), "-o", "json"], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout)["totals"]["succeeded"] == 33
    explained = subprocess.run(shlex.split(f"env {explain}"), capture_output=True, text=True, check=True)
    assert "lost" in explained.stdout.lower()


@pytest.mark.slow
def test_quickstart_over_a_tree_of_the_users_own(tmp_path: Path) -> None:
    tree = tmp_path / "tree with spaces"
    tree.mkdir()
    text = "".join(f"value_{number} = call_{number % 7}(value_{number - 1})\n" for number in range(1, 300))
    (tree / "one.py").write_text(text)
    (tree / "its 'copy'.py").write_text(text)

    running = start("--path", str(tree), "--workers", "1", "--no-kill", data=tmp_path / "data")
    out, err = running.communicate(timeout=LIMIT_S)

    assert running.returncode == 0, err
    assert "3 submitted, 3 recorded, 0 lost, 0 recorded twice" in out
    assert "its 'copy'.py, one.py" in out
    assert "workers   1, 0 lost" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_quickstart_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    running = start("--no-kill", data=tmp_path)
    assert running.stderr
    for line in running.stderr:
        if "tasks submitted" in line:
            break
    assert wait_until(lambda: bool(processes_in(tmp_path)))

    running.send_signal(number)
    running.communicate(timeout=LIMIT_S)

    assert running.returncode == 128 + number
    assert wait_until(lambda: not processes_in(tmp_path)), processes_in(tmp_path)
