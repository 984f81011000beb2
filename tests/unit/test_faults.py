"""Fault points: off by default; each acts after its count of passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import faults


@pytest.fixture(autouse=True)
def disarmed() -> None:
    faults.arm({})


def test_faults_are_parsed_with_their_counts() -> None:
    parsed = faults.parse_faults("worker.mid_commit=kill:after=3, attempt.started=stall")
    assert parsed == {"worker.mid_commit": ("kill", 3), "attempt.started": ("stall", 0)}
    assert faults.parse_faults("") == {}


@pytest.mark.parametrize("text", ["x", "x=explode", "x=kill:after=soon", "x=kill:3"])
def test_malformed_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="RUNTIME_FAULTS"):
        faults.parse_faults(text)


def test_unarmed_point_is_passed() -> None:
    faults.reach("worker.mid_commit")


def test_armed_point_acts_after_its_count() -> None:
    faults.arm({"RUNTIME_FAULTS": "here=raise:after=2"})
    faults.reach("elsewhere")
    faults.reach("here")
    faults.reach("here")
    with pytest.raises(faults.FaultReached):
        faults.reach("here")
    faults.arm({})
    faults.reach("here")


@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("exit", 70)])
def test_armed_process_ends(action: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "from runtime import faults; faults.reach('here'); print('passed')"],
        env={**os.environ, "RUNTIME_FAULTS": f"here={action}", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (code, b"")
    assert f"fault point here: {action}" in ended.stderr.decode()
