"""What the documentation says of the checked-in stacks holds for the contracts that these stacks have."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from runtime.cli.main import main

ROOT = Path(__file__).parents[3]
CONTRACTS = ROOT / "tests/golden/infra/contract"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "runtime/cli").rglob("*.py"))]
COMMAND = re.compile(r"runtime (?P<verb>[a-z]+)(?P<more> [^`|\n]*?)? --stack (?P<stack>[a-z0-9-]+)(?P<rest>[^`|\n#]*)")
NEEDED = {"cluster": "clusters", "image": "registries", "secrets": "secrets", "submit": "queues", "worker": "queues"}
"""Verb → the part of the contract that it uses."""


def find_commands() -> list[tuple[str, str, str]]:
    """Return verb, stack and the words behind the stack of each command that names a checked-in stack."""
    known = {each.stem for each in CONTRACTS.glob("*.json")}
    found = (each for page in PAGES for each in COMMAND.finditer(page.read_text()))
    wanted = (each for each in found if each["verb"] in NEEDED and each["stack"] in known)
    return sorted({(each["verb"], each["stack"], each["rest"]) for each in wanted})


COMMANDS = find_commands()


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `pulumi` that prints the contracts of the checked-in stacks."""
    script = tmp_path / "bin/pulumi"
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        f"print(pathlib.Path({str(CONTRACTS)!r}, sys.argv[sys.argv.index('--stack') + 1] + '.json').read_text())\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


def test_there_are_commands_of_each_kind() -> None:
    assert {verb for verb, _, _ in COMMANDS} >= {"submit", "worker", "image", "cluster"}


@pytest.mark.parametrize(("verb", "stack"), sorted({(verb, stack) for verb, stack, _ in COMMANDS}))
def test_documented_command_finds_what_it_needs_in_the_contract(verb: str, stack: str) -> None:
    assert json.loads((CONTRACTS / f"{stack}.json").read_text())[NEEDED[verb]] != {}


@pytest.mark.parametrize("stack", sorted({stack for verb, stack, _ in COMMANDS if NEEDED[verb] == "queues"}))
def test_tasks_can_be_submitted_to_a_documented_stack_and_served_from_it(
    stack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    queues = {
        match[1]
        for verb, named, rest in COMMANDS
        if named == stack and (match := re.search(r"--queue ([a-z-]+)", rest)) and NEEDED[verb] == "queues"
    }
    for more in ([], *(["--queue", queue] for queue in queues)):
        assert main(["submit", "--stack", stack, "--dry-run", *more, "--", *shlex.split("python train.py")]) == 0
        assert main(["worker", "--on", "local", "--count", "2", "--stack", stack, "--dry-run", *more]) == 0
    assert "error" not in capsys.readouterr().err
