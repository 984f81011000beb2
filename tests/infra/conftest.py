"""Every checked-in stack, recorded and checked once for all tests that only read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.check.check import Report, check_stack, record_stack
from infra.check.recording import Recording
from infra.settings.files import list_stacks, load_stack_config

ROOT = Path(__file__).resolve().parents[2]
STACKS = list_stacks(ROOT)


@functools.cache
def recorded(stack: str) -> Recording:
    return record_stack(stack, load_stack_config(ROOT / f"Pulumi.{stack}.yaml"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `stack` or `recording` once for every checked-in stack."""
    own = any("stack" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "stack" in metafunc.fixturenames and not own:
        metafunc.parametrize("stack", STACKS)


@pytest.fixture
def recording(stack: str) -> Recording:
    return recorded(stack)


@functools.cache
def checked(stack: str) -> Report:
    return check_stack(stack, folder=ROOT)


class Project:
    """A folder with the real Pulumi.yaml and its own stack files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "Pulumi.yaml").write_text((ROOT / "Pulumi.yaml").read_text(encoding="utf-8"), encoding="utf-8")

    def copy(self, stack: str, change: Callable[[dict[str, Any]], None] = lambda config: None, *, to: str = "") -> Path:
        """Write the checked-in stack after `change`, which gets its `config` with our keys stripped of their prefix."""
        content = yaml.safe_load((ROOT / f"Pulumi.{stack}.yaml").read_text(encoding="utf-8"))
        config = {key.removeprefix("research-runtime:"): value for key, value in content["config"].items()}
        if to:
            # They name a bucket of the original.
            for head in config.get("heads", {}).values():
                head.pop("variables", None)
        change(config)
        return self.write(to or stack, config)

    def write(self, stack: str, config: Mapping[str, Any]) -> Path:
        keys = {key if ":" in key else f"research-runtime:{key}": value for key, value in config.items()}
        return self.write_text(stack, yaml.safe_dump({"config": keys}, sort_keys=False))

    def write_text(self, stack: str, text: str) -> Path:
        file = self.folder / f"Pulumi.{stack}.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    def record(self, stack: str) -> Recording:
        return record_stack(stack, load_stack_config(self.folder / f"Pulumi.{stack}.yaml"))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)
