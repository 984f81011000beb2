"""The product with something taken out that it was once without: what a simulator that works has to find.

Each file in `patches/` names the functions that it changes and the lines that it replaces in them, the scenario in which that
is found, and the law that it breaks. A patch that seeds find late has a tape, too.
"""

from __future__ import annotations

import ast
import json
import runpy
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
SEEDS = 1000
"""The number of seeds that are tried for a patch without a tape."""


class PatchStale(Exception):
    """A patch names a function, or lines of one, that the code does not have."""


@dataclass(frozen=True)
class Edit:
    where: str
    """`module:Class.method`, `module:function`, or a module."""
    old: str
    new: str

    @property
    def path(self) -> str:
        return self.where.partition(":")[0].replace(".", "/") + ".py"

    def apply(self, source: str) -> str:
        """Return the module's source with the lines replaced. Raises `PatchStale` unless they are there exactly once."""
        first, last = _find_lines(source, self.where)
        lines = source.splitlines(keepends=True)
        body = "".join(lines[first:last])
        if body.count(self.old) != 1:
            raise PatchStale(f"{self.where} has {body.count(self.old)} times:\n{self.old}")
        return "".join([*lines[:first], body.replace(self.old, self.new), *lines[last:]])


@dataclass(frozen=True)
class Patch:
    name: str
    about: str
    scenario: str
    law: str
    edits: tuple[Edit, ...]
    tape: str = ""


def _find_lines(source: str, where: str) -> tuple[int, int]:
    """Return the lines of a definition, as for a slice; for a module all of them."""
    _, _, names = where.partition(":")
    if not names:
        return 0, source.count("\n") + 1
    found: ast.AST = ast.parse(source)
    for name in names.split("."):
        inner = (each for each in ast.iter_child_nodes(found) if getattr(each, "name", None) == name)
        if (one := next(inner, None)) is None:
            raise PatchStale(f"there is no `{where}`")
        found = one
    assert isinstance(found, ast.FunctionDef | ast.ClassDef)
    return found.lineno - 1, found.end_lineno or found.lineno


def read_patch(path: Path) -> Patch:
    said = runpy.run_path(str(path))
    edits = tuple(Edit(*each) for each in said["EDITS"])
    return Patch(path.stem, said["__doc__"], said["SCENARIO"], said["LAW"], edits, said.get("TAPE", ""))


def find_patches(names: Sequence[str] = ()) -> list[Patch]:
    """Return all patches, or the named ones."""
    found = [read_patch(path) for path in sorted(PATCHES.glob("*.py"))]
    return [each for each in found if not names or each.name in names]


def apply_edits(patch: Patch, folder: Path) -> None:
    """Change the product in `folder`. Raises `PatchStale`."""
    for edit in patch.edits:
        path = folder / edit.path
        path.write_text(edit.apply(path.read_text()))


@contextmanager
def applied(patch: Patch) -> Iterator[Path]:
    """Give a copy of the product and of the simulation in which the patch was applied."""
    with tempfile.TemporaryDirectory(prefix="patched-") as name:
        folder = Path(name)
        for part in ("runtime", "tests/simulation"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests/__init__.py").touch()
        apply_edits(patch, folder)
        yield folder


def simulate(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m tests.simulation` on the code in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *args], cwd=folder, text=True, capture_output=True, check=False
    )


@dataclass(frozen=True)
class Found:
    law: str
    seed: int
    tape: str
    """As short as it could be made."""


def find_broken(patch: Patch, *, seeds: int = SEEDS, shrink_s: float = 0.0) -> Found | None:
    """Return the first seed, from 1 on, in which the patch breaks a law; None if none does."""
    with applied(patch) as folder:
        said = simulate(folder, "find", patch.scenario, "--seeds", str(seeds), "--seconds", str(shrink_s))
        assert said.stdout, f"the patched code does not run: {said.stderr[-2000:]}"
        found = json.loads(said.stdout)
    return Found(found["law"], found["seed"], found["tape"]) if "law" in found else None
