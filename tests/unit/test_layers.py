"""The rows of docs/architecture.md, checked against every import of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROWS = (
    ("cli", "web", "testing"),
    ("compat",),
    ("experiments",),
    ("client",),
    ("launchers", "worker", "images", "clusters"),
    ("stack",),
    ("queues", "jobs", "snapshots"),
    ("records",),
    ("tasks",),
    ("shim",),
)
"""Rows from the top; a package imports from the rows below its own and from the root."""

ROOT_MODULES = {
    "errors",
    "units",
    "end_reasons",
    "clock",
    "system",
    "faults",
    "file_trust",
    "sanitize",
    "config",
    "schema",
    "outputs",
    "json_values",
    "secret_detection",
    "tpu_shapes",
    "yaml_text",
}
FRONT_DOOR = {"__init__", "__main__"}

SHARED_BY_LAUNCHERS = "processes"
"""The one package of `launchers` that the launchers beside it may import."""

ALLOWED: frozenset[tuple[str, str]] = frozenset()
"""Imports in the wrong direction that are still to be removed: (importing module, imported module)."""


def find_package(module: str) -> str:
    """Return the package that a module of the runtime is in; `` for modules of the root."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and any(parts[1] in row for row in ROWS) else ""


def row_of(package: str) -> int:
    """Return the row's height; the root is 0."""
    return next((len(ROWS) - place for place, row in enumerate(ROWS) if package in row), 0)


def is_wrong(importer: str, imported: str) -> bool:
    """Return whether one module may not import the other."""
    above, below = find_package(importer), find_package(imported)
    if above != below:
        return row_of(below) >= row_of(above)
    if above != "launchers":
        return False
    one, other = importer.split(".")[2:], imported.split(".")[2:]
    both_are_launchers = len(one) > 1 and len(other) > 1
    return both_are_launchers and one[0] != other[0] and other[0] != SHARED_BY_LAUNCHERS


def read_imports(source: str, modules: set[str]) -> Iterator[str]:
    """Return every module of the runtime that a source imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] == "runtime")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "runtime":
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                yield inner if inner in modules else str(node.module)


def list_modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


MODULES = list_modules()


def find_wrong(sources: dict[str, str]) -> set[tuple[str, str]]:
    modules = set(MODULES)
    front = {"runtime", "runtime.__main__"}
    return {
        (name, imported)
        for name, source in sources.items()
        if name not in front
        for imported in read_imports(source, modules)
        if imported != "runtime" and is_wrong(name, imported)
    }


def test_no_package_imports_from_its_own_row_or_above() -> None:
    sources = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}

    assert find_wrong(sources) == ALLOWED


def test_the_root_holds_the_vocabulary_and_nothing_else() -> None:
    files = {path.stem for path in (ROOT / "runtime").glob("*.py")}
    folders = {path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")}

    assert files == ROOT_MODULES | FRONT_DOOR
    assert folders <= {package for row in ROWS for package in row}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("runtime.tasks.model", "from runtime.records.base import RecordStore"),
        ("runtime.errors", "def later():\n    from runtime.tasks.model import Task"),
        ("runtime.jobs.spec", "if TYPE_CHECKING:\n    from runtime.launchers import base"),
        ("runtime.queues.memory", "import runtime.jobs.spec"),
        ("runtime.launchers.slurm.launcher", "from runtime.launchers.kubernetes import render"),
    ],
)
def test_an_import_that_points_up_is_found(importer: str, source: str) -> None:
    assert find_wrong({importer: source}) != set()


def test_what_several_launchers_share_may_be_imported() -> None:
    source = "from runtime.launchers.processes import base\nfrom runtime.launchers.base import Launcher"

    assert find_wrong({"runtime.launchers.ssh.launcher": source}) == set()
