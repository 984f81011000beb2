"""Which CPUs of a machine a run is kept to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.shim import cpus
from runtime.shim.cpus import CpuShare, choose_cpus, keep_to_share

PAIRS = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
"""Four cores of two CPUs each."""
ALL = range(8)


@pytest.mark.parametrize(
    ("count", "taken", "idle", "chosen"),
    [
        (2, set(), {}, [0, 4]),
        (4, set(), {2: 9, 6: 9, 3: 5, 7: 5}, [2, 3, 6, 7]),
        (3, set(), {}, [0, 1, 4]),
        (0.5, set(), {3: 1}, [3]),
        (1, {0}, {}, [4]),
        (2, {0}, {}, [1, 5]),
        (3, {0}, {}, [1, 4, 5]),
        (7, {0}, {}, [1, 2, 3, 4, 5, 6, 7]),
        (4, {0, 1, 2, 4, 5, 6}, {1: 9, 5: 8}, [1, 3, 5, 7]),
    ],
)
def test_cpus_are_whole_cores_then_parts_and_others_last(
    count: float, taken: set[int], idle: dict[int, int], chosen: list[int]
) -> None:
    assert choose_cpus(count, ALL, taken, PAIRS, idle) == chosen


def test_only_allowed_cpus_are_chosen_and_an_unknown_core_is_one_of_its_own() -> None:
    assert choose_cpus(2, [3, 5, 6], {5}, {}, {}) == [3, 6]


def share(folder: Path, count: float, **claim: Any) -> CpuShare:
    found = CpuShare({"count": count, "locks": str(folder / "cpus")}, [str(cpu) for cpu in ALL])
    found.claim.update(claim)
    return found


def test_claims_of_two_shims_do_not_overlap_until_there_are_too_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [share(tmp_path, count).choose(PAIRS, {}) for count in (4, 3)]
    assert (chosen, capsys.readouterr().err) == ([[0, 1, 4, 5], [2, 3, 6]], "")

    crowded = share(tmp_path, 2).choose(PAIRS, {1: 9})

    assert crowded == [1, 7]
    assert capsys.readouterr().err == "shim: 1 of its 2 CPUs are others' too: this machine has not enough for all\n"


def test_parts_of_a_cpu_fit_on_one_together(tmp_path: Path) -> None:
    assert [share(tmp_path, 0.5).choose(PAIRS, {}) for _ in range(3)] == [[0], [0], [4]]


def test_claim_is_released_by_the_death_of_its_shim_and_by_drop(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    share(tmp_path, 8, pid=dead.pid, start=None).choose(PAIRS, {})
    mine = share(tmp_path, 6)
    assert mine.choose(PAIRS, {}) == [0, 1, 2, 4, 5, 6]

    mine.drop()

    assert share(tmp_path, 8).choose(PAIRS, {}) == list(ALL)


@pytest.mark.parametrize(
    ("count", "said"),
    [(8, ""), (9, "shim: 9 CPUs are asked for and 8 are there, so it is kept to none of them\n")],
)
def test_run_that_wants_all_or_more_is_kept_to_none(
    count: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpus, "allowed_cpus", lambda: list(ALL))
    monkeypatch.setattr(cpus, "keep_to", lambda _: pytest.fail("it was kept to some"))

    assert keep_to_share({"cpus": count, "claims": str(tmp_path / "cpus")}) is None
    assert (capsys.readouterr().err, list(tmp_path.iterdir())) == (said, [])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be shared out")
def test_two_processes_of_one_machine_are_kept_to_different_cpus(tmp_path: Path) -> None:
    script = "import os, sys; from runtime.shim.cpus import keep_to_share; share = keep_to_share({'cpus': 1, 'claims': sys.argv[1]})"
    script += "; print(*sorted(os.sched_getaffinity(0)), flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", script, str(tmp_path / "cpus")]
    going = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [each.stdout.readline().split() for each in going if each.stdout]
    finally:
        for each in going:
            each.communicate()

    assert [len(each) for each in said] == [1, 1]
    assert said[0] != said[1]
