"""The product with something taken out that it was once without: what a simulator that works has to find.

Each file in `patches/` is a unified diff. Lines before it say what it takes out, in which scenario that is found, which
law it breaks, and a tape that shows it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCHES = Path(__file__).parent / "patches"


@dataclass(frozen=True)
class Patch:
    name: str
    about: str
    scenario: str
    law: str
    """Empty until a seed was found."""
    tape: str
    diff: str


def read_patch(path: Path) -> Patch:
    head, _, diff = path.read_text().partition("--- a/")
    about, *rest = [line.removeprefix("# ") for line in head.splitlines()]
    facts = dict(line.partition(": ")[::2] for line in rest)
    return Patch(path.stem, about, facts["scenario"], facts.get("law", ""), facts.get("tape", ""), f"--- a/{diff}")


def write_patch(patch: Patch) -> None:
    lines = [patch.about, f"scenario: {patch.scenario}", f"law: {patch.law}", f"tape: {patch.tape}"]
    head = "".join(f"# {line}\n" for line in lines)
    (PATCHES / f"{patch.name}.patch").write_text(head + patch.diff)


def find_patches(names: Sequence[str] = ()) -> list[Patch]:
    """Return all patches, or the named ones."""
    found = [read_patch(path) for path in sorted(PATCHES.glob("*.patch"))]
    return [each for each in found if not names or each.name in names]


@contextmanager
def applied(patch: Patch) -> Iterator[Path]:
    """Give a copy of the product and of the simulation in which the patch was applied."""
    with tempfile.TemporaryDirectory(prefix="patched-") as name:
        folder = Path(name)
        for part in ("runtime", "tests/simulation"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests/__init__.py").touch()
        done = _apply(patch, folder)
        assert done.returncode == 0, f"{patch.name}.patch does not fit the code any more: {done.stderr}"
        yield folder


def fits(patch: Patch) -> bool:
    """Return whether the patch applies to the code as it is."""
    return _apply(patch, ROOT, "--check").returncode == 0


def _apply(patch: Patch, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "apply", *options, "-"]
    return subprocess.run(command, cwd=folder, input=patch.diff, text=True, capture_output=True, check=False)


def simulate(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m tests.simulation` on the code in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *args], cwd=folder, text=True, capture_output=True, check=False
    )


def find_broken(patch: Patch, *, seeds: int) -> tuple[int, Patch] | None:
    """Return the first seed that the patch breaks a law in, and the patch with a shrunk tape; None if none does."""
    with applied(patch) as folder:
        found = simulate(folder, "find", patch.scenario, "--seeds", str(seeds))
        assert found.stdout, f"the patched code does not run: {found.stderr[-2000:]}"
        said = json.loads(found.stdout)
    if "law" not in said:
        return None
    return said["tried"], Patch(patch.name, patch.about, patch.scenario, said["law"], said["tape"], patch.diff)
