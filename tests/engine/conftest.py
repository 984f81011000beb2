"""The real engine for the tests of this folder, where the `pulumi` command is on PATH."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.engine.harness import REQUIRE_VARIABLE, Lab, require_engine

# Read at once: tests see no variable of ours later on.
REQUIRED = os.environ.get(REQUIRE_VARIABLE) == "1"


PATIENCE_S = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        here = item.path.is_relative_to(Path(__file__).parent)
        if here and "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.service)
            # The life of a stack is many commands, and each starts four processes.
            item.add_marker(pytest.mark.timeout(PATIENCE_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Here and not in the fixture, so that a run without the engine says so in one line for all its tests."""
    if "engine" in getattr(item, "fixturenames", ()):
        require_engine(os.environ.get("PATH"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under RUNTIME_REQUIRE_ENGINE=1 no test of this folder is skipped, whatever it is that it lacks."""
    report = yield
    if REQUIRED and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{str(reason).removeprefix('Skipped: ')} ({REQUIRE_VARIABLE}=1 makes this a failure)"
    return report


@pytest.fixture(scope="session")
def engine() -> str:
    """The folder of the `pulumi` command; without one the test is skipped."""
    return require_engine(os.environ.get("PATH"))


@pytest.fixture
def make_lab(engine: str, tmp_path: Path) -> Callable[..., Lab]:
    def make(name: str = "lab", *, virtualenv: bool = True) -> Lab:
        return Lab(tmp_path / name, engine, virtualenv=virtualenv)

    return make


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    return make_lab()


@pytest.fixture(scope="module")
def dev(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The stack `dev`, up; a test leaves it as it was."""
    lab = Lab(tmp_path_factory.mktemp("dev") / "lab", engine)
    lab.init("dev")
    lab.up("dev")
    return lab
