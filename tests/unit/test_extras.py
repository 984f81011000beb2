"""Commands in an environment of `locks/base.txt`: a library that is missing is an error that names its extra."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

from runtime.cli.main import EXTRA_OF

ROOT = Path(__file__).parent.parent.parent
STACK = {
    "schema": 1,
    "stack": "dev",
    "project": "some-project",
    "records": {"url": "gs://some-bucket"},
    "queues": {
        "default": {"kind": "pubsub", "topic": "projects/p/topics/t", "subscription": "projects/p/subscriptions/s"}
    },
    "secrets": {"hf": {"resource": "projects/some-project/secrets/hf", "env": "HF_TOKEN"}},
    "registries": {"images": {"us-west4": {"url": "us-west4-docker.pkg.dev/some-project/images"}}},
    "published_url": "gs://some-bucket/contract/v1.json",
}
TARGETS = """
[targets.cluster]
kind = "kubernetes"
records = "s3://some-bucket/jobs"
image = "some/image"
namespace = "lab"

[targets.local-records]
kind = "kubernetes"
records = "gs://some-bucket/jobs"
image = "some/image"
namespace = "lab"
"""
NEEDS_AN_EXTRA = re.compile(
    r"error: .* needs an extra that is not installed\nhint: pip install 'research-runtime\[(gcp|ec2|kubernetes)\]'\n"
)


def base_distributions() -> list[Distribution]:
    locked = re.findall(
        r"^([a-z0-9_.-]+)==[^ ]+(?: ; (.*?))?(?: \\)?$", (ROOT / "locks/base.txt").read_text(), re.MULTILINE
    )
    return [distribution(name) for name, marker in locked if "win32" not in marker]


def third_party_imports() -> dict[str, str]:
    """Top-level name of each library that `runtime` imports → a file that does."""
    found = {}
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        if path.is_relative_to(ROOT / "runtime/testing"):
            continue  # The suite that pytest runs.
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            for name in {name.partition(".")[0] for name in names} - {"runtime"}:
                if name not in sys.stdlib_module_names:
                    found.setdefault(name, str(path.relative_to(ROOT)))
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the packages of `locks/base.txt` alone, and this project."""
    folder = tmp_path_factory.mktemp("base")
    for each in base_distributions():
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(str(each.locate_file(top)))
    (folder / "runtime").symlink_to(ROOT / "runtime")
    return folder


def runs(base: Path, tmp_path: Path, *words: str, stack: bool = False) -> subprocess.CompletedProcess[str]:
    (tmp_path / "runtime.toml").write_text(TARGETS)
    (tmp_path / "contract.json").write_text(json.dumps(STACK))
    # Without `site`, the interpreter sees its standard library and the base folder, and no other package.
    return subprocess.run(
        [sys.executable, "-S", "-m", "runtime", *words],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(base),
            **({"RUNTIME_OUTPUTS": str(tmp_path / "contract.json")} if stack else {}),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_of_every_library_outside_the_base_have_an_extra_named() -> None:
    base_names = {
        file.parts[0].removesuffix(".py")
        for each in base_distributions()
        for file in each.files or ()
        if file.suffix == ".py"
    }

    unnamed = {name: file for name, file in third_party_imports().items() if name not in base_names | EXTRA_OF.keys()}

    assert unnamed == {}
    # The record stores import `obstore` by its name.
    assert EXTRA_OF.keys() - {"obstore"} <= third_party_imports().keys()


def test_base_environment_has_no_library_of_an_extra(base: Path) -> None:
    """Guards the tests below against an environment that has everything."""
    code = f"import importlib.util as u; print([n for n in {sorted(EXTRA_OF)!r} if u.find_spec(n)])"

    found = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(base)}, capture_output=True, text=True, check=True
    )

    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "--on", "cluster", "--", "true"],
        ["launch", "--on", "local-records", "--", "true"],
        ["gc", "--on", "cluster"],
        ["status", "j-0123456789", "--on", "cluster"],
        ["logs", "j-0123456789", "--on", "cluster"],
        ["explain", "j-0123456789", "--on", "cluster"],
        ["cancel", "j-0123456789", "--yes", "--on", "cluster"],
        ["fetch", "j-0123456789", "--on", "cluster"],
    ],
    ids=" ".join,
)
@pytest.mark.daily(3)
def test_command_on_a_target_without_its_library_names_the_extra(base: Path, tmp_path: Path, words: list[str]) -> None:
    ended = runs(base, tmp_path, *words)

    assert NEEDS_AN_EXTRA.fullmatch(ended.stderr), ended.stderr
    assert ended.returncode == 2


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["submit", "--no-snapshot", "--", "true"],
        ["worker", "--once"],
        ["queue", "list"],
        ["queue", "dead", "list"],
        ["queue", "repair"],
        ["secrets", "list"],
        ["logs", "t-0123456789"],
    ],
    ids=" ".join,
)
@pytest.mark.daily(3)
def test_command_on_a_stack_without_its_library_names_the_extra(base: Path, tmp_path: Path, words: list[str]) -> None:
    ended = runs(base, tmp_path, *words, stack=True)

    assert NEEDS_AN_EXTRA.fullmatch(ended.stderr), ended.stderr
    assert ended.returncode == 2


def test_job_is_found_beside_targets_whose_library_is_missing(base: Path, tmp_path: Path) -> None:
    launched = runs(base, tmp_path, "launch", "--on", "local", "-o", "json", "--", "true")
    job = json.loads(launched.stdout)["job"]

    found = runs(base, tmp_path, "status", job, "-o", "json")

    assert json.loads(found.stdout)["job"] == job, found.stderr


def test_job_that_is_nowhere_names_the_targets_that_cannot_be_used(base: Path, tmp_path: Path) -> None:
    ended = runs(base, tmp_path, "status", "j-0123456789")

    assert ended.returncode == 2
    assert "  target `cluster` cannot be used here: record store" in ended.stderr
    assert "; pip install 'research-runtime[ec2]'" in ended.stderr
