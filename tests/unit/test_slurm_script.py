"""`scripts/slurm stop` cleans up even if the controller is already dead; the tests with a real Slurm cover the rest."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shim_support import PATIENCE_S, processes_with, signal_all, wait_for

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm"


@pytest.fixture
def lab() -> Iterator[Path]:
    """A folder as left by a Slurm whose controller was killed."""
    folder = Path(tempfile.mkdtemp(prefix="rr-slurm-"))
    for name in ("run", "log"):
        (folder / name).mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    (folder / "run" / "slurmctld.pid").write_text(f"{dead.pid}\n")
    yield folder
    signal_all(processes_with(str(folder)))
    shutil.rmtree(folder)


def start_step(lab: Path) -> subprocess.Popen[bytes]:
    """Start a process named and placed like a step's daemon, with a job below it."""
    program = lab / "slurmstepd"
    shutil.copy("/bin/sh", program)
    script = f"sh -c 'sleep 600; : {lab}' & wait"
    return subprocess.Popen([program, "-c", script], cwd=lab / "log", start_new_session=True)


def stop(lab: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environ}
    return subprocess.run([SCRIPT, "stop", lab], env=environment, capture_output=True, text=True, check=False)


def test_stop_ends_steps_and_their_jobs_that_no_controller_ends(lab: Path, tmp_path: Path) -> None:
    other = tmp_path / "log"
    other.mkdir()
    step = start_step(lab)
    shutil.copy("/bin/sleep", tmp_path / "slurmstepd")
    of_others = subprocess.Popen([tmp_path / "slurmstepd", "600"], cwd=other)
    try:
        wait_for(lambda: len(processes_with(str(lab))) >= 2, "the step and its job")

        done = stop(lab)

        assert (done.returncode, done.stderr) == (0, "")
        assert step.wait(PATIENCE_S) == -9
        wait_for(lambda: not processes_with(str(lab)), "no process")
        assert of_others.poll() is None
    finally:
        of_others.kill()
        of_others.wait()


def test_stop_asks_no_dead_controller(lab: Path, tmp_path: Path) -> None:
    for name in ("scancel", "squeue"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as munge:
        munge.bind(str(lab / "run" / "munge.sock"))

        done = stop(lab, PATH=f"{tmp_path}:{os.environ['PATH']}")

    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "asked").exists()
    assert not (lab / "run" / "slurmctld.pid").exists()
