"""Import directions between the program and the package."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = {
    *(
        "runtime.outputs",
        "runtime.errors",
        "runtime.schema",
        "runtime.secret_detection",
        "runtime.tpu_shapes",
        "runtime.yaml_text",
    ),
    *("runtime.sanitize", "runtime.file_trust", "runtime.stack.google_api"),
}


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= (
                {f"{node.module}.{name.name}" for name in node.names} if node.module == "runtime" else {node.module}
            )
    return found


def of_packages(modules: set[str], *packages: str) -> set[str]:
    return {module for module in modules if module.partition(".")[0] in packages}


def test_infra_imports_only_the_leaves_of_the_runtime() -> None:
    wrong = {
        str(path.relative_to(ROOT)): beyond
        for path in (ROOT / "infra").rglob("*.py")
        if (beyond := of_packages(imported_modules(path), "runtime") - ALLOWED)
    }

    assert wrong == {}


def test_runtime_never_imports_the_program_or_pulumi() -> None:
    wrong = {
        str(path.relative_to(ROOT)): beyond
        for path in (ROOT / "runtime").rglob("*.py")
        if (beyond := of_packages(imported_modules(path), "infra", "pulumi", "pulumi_gcp", "pulumi_kubernetes"))
    }

    assert wrong == {}


def test_boundary_checker_finds_an_import_that_is_not_allowed(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "def f():\n    from runtime.stack.find import find_stack\n    from runtime import worker\n    import pulumi.runtime\n"
    )

    modules = imported_modules(path)

    assert of_packages(modules, "runtime") - ALLOWED == {"runtime.stack.find", "runtime.worker"}
    assert of_packages(modules, "pulumi") == {"pulumi.runtime"}


def find_shadowing(folder: Path) -> set[str]:
    """Find modules that would hide an installed package if `folder` were first on the path."""
    own = {each.stem for each in folder.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()}
    own -= {"__init__", "__main__"}
    installed = {name for name, parts in packages_distributions().items() if parts} | set(sys.stdlib_module_names)
    return own & installed


def test_no_module_of_the_program_hides_a_package() -> None:
    """The engine puts `infra/` first on the program's path."""
    assert find_shadowing(ROOT / "infra") == set()


def test_module_that_hides_a_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "google").mkdir()
    (tmp_path / "google" / "__init__.py").touch()
    (tmp_path / "yaml.py").touch()
    (tmp_path / "naming.py").touch()

    assert find_shadowing(tmp_path) == {"google", "yaml"}
