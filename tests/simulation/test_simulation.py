"""Seeds in which every law holds, every bug that a seed ever found, and what a simulator that works has to find."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.simulation.choices import read_tape
from tests.simulation.patched import Patch, applied, find_patches, fits, simulate
from tests.simulation.scenarios import SCENARIOS, run

SEEDS = Path(__file__).with_name("seeds.txt")


def read_seeds() -> list[tuple[str, str, str]]:
    """Return scenario, law and tape of each bug; lines with a hash sign describe it."""
    lines = [line for line in SEEDS.read_text().splitlines() if line and not line.startswith("#")]
    return [(scenario, law, tape) for scenario, law, tape in (line.split("\t") for line in lines)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_laws_hold_in_some_worlds(scenario: str) -> None:
    seeds = range(2 if scenario == "day" else 8)
    broken = {seed: str(result.broken) for seed in seeds if (result := run(scenario, seed)).broken}

    assert broken == {}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_seed_is_the_whole_run(scenario: str) -> None:
    first, again = run(scenario, 11, tracing=True), run(scenario, 11, tracing=True)
    by_tape = run(scenario, 0, first.tape, tracing=True)

    assert first.trace == again.trace
    assert first.trace == by_tape.trace


@pytest.mark.parametrize(("scenario", "law", "tape"), read_seeds())
def test_bug_that_a_seed_found_stays_mended(scenario: str, law: str, tape: str) -> None:
    assert run(scenario, 0, read_tape(tape)).broken is None, law


def choose_patches() -> list[Patch]:
    """Return all patches under SOAK=1, otherwise the one of each scenario with the shortest tape."""
    if os.environ.get("SOAK") == "1":
        return find_patches()
    ordered = sorted(find_patches(), key=lambda patch: -len(patch.tape))
    return list({patch.scenario: patch for patch in ordered}.values())


def test_every_patch_fits_the_code() -> None:
    assert [patch.name for patch in find_patches() if not fits(patch)] == []


@pytest.mark.soak
@pytest.mark.parametrize("patch", choose_patches(), ids=lambda patch: patch.name)
def test_mended_code_taken_out_again_breaks_its_law(patch: Patch) -> None:
    assert run(patch.scenario, 0, read_tape(patch.tape)).broken is None

    with applied(patch) as folder:
        replayed = simulate(folder, "replay", patch.scenario, patch.tape)

    assert replayed.returncode == 1, replayed.stdout[-2000:] + replayed.stderr[-2000:]
    assert patch.law in replayed.stdout.splitlines()[-1]
