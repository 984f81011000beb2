"""Seeds in which every law holds, every bug that a seed ever found, and what a simulator that works has to find."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.simulation.choices import read_tape
from tests.simulation.patched import ROOT, Edit, Patch, PatchStale, applied, find_broken, find_patches, simulate
from tests.simulation.scenarios import SCENARIOS, run

SEEDS = Path(__file__).with_name("seeds.txt")
QUICK = (
    "acknowledged_before_commit",
    "both_redrives_claim",
    "cancel_spares_running",
    "conflict_taken_for_existing",
    "gc_keeps_done_marks",
    "guess_beats_the_end",
    "jobs_intent_last",
)
"""Patches that their first seeds find, of several scenarios; `make soak` has all of them."""


def read_seeds() -> list[tuple[str, str, str]]:
    """Return scenario, law and tape of each bug; lines with a hash sign describe it."""
    lines = [line for line in SEEDS.read_text().splitlines() if line and not line.startswith("#")]
    return [(scenario, law, tape) for scenario, law, tape in (line.split("\t") for line in lines)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_laws_hold_in_some_worlds(scenario: str) -> None:
    seeds = range(1 if scenario == "day" else 4)
    broken = {seed: str(result.broken) for seed in seeds if (result := run(scenario, seed)).broken}

    assert broken == {}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.daily(4)
def test_seed_is_the_whole_run(scenario: str) -> None:
    first, again = run(scenario, 11, tracing=True), run(scenario, 11, tracing=True)
    by_tape = run(scenario, 0, first.tape, tracing=True)

    assert first.trace == again.trace
    assert first.trace == by_tape.trace


def choose_patches() -> list[Patch]:
    """Return all patches under SOAK=1, otherwise one that a few seeds find in each scenario."""
    if os.environ.get("SOAK") == "1":
        return find_patches()
    return find_patches(QUICK)


@pytest.mark.parametrize(("scenario", "law", "tape"), read_seeds())
def test_bug_that_a_seed_found_stays_mended(scenario: str, law: str, tape: str) -> None:
    assert run(scenario, 0, read_tape(tape)).broken is None, law


@pytest.mark.parametrize("patch", find_patches(), ids=lambda patch: patch.name)
def test_every_patch_fits_the_code(patch: Patch) -> None:
    for edit in patch.edits:
        assert edit.apply((ROOT / edit.path).read_text())


@pytest.mark.parametrize(
    ("where", "old"),
    [
        ("runtime.units:parse_size", "not in this function"),
        ("runtime.units:parse_size", "    "),
        ("runtime.units:no_such_function", "def"),
    ],
    ids=["not there", "more than once", "no function"],
)
def test_edit_that_does_not_fit_is_refused(where: str, old: str) -> None:
    edit = Edit(where, old, "")

    with pytest.raises(PatchStale):
        edit.apply((ROOT / edit.path).read_text())


@pytest.mark.soak
@pytest.mark.parametrize("patch", choose_patches(), ids=lambda patch: patch.name)
def test_mended_code_taken_out_again_breaks_its_law(patch: Patch) -> None:
    if not patch.tape:
        found = find_broken(patch)
        assert found is not None
        assert found.law == patch.law
        return
    assert run(patch.scenario, 0, read_tape(patch.tape)).broken is None

    with applied(patch) as folder:
        replayed = simulate(folder, "replay", patch.scenario, patch.tape)

    assert replayed.returncode == 1, replayed.stdout[-2000:] + replayed.stderr[-2000:]
    assert patch.law in replayed.stdout.splitlines()[-1]
