"""The real engine for the tests of this folder, if the `pulumi` command is on PATH."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.engine.harness import REQUIRE_VARIABLE, Lab, require_engine

# Read at import: tests later run without our environment variables.
REQUIRED = os.environ.get(REQUIRE_VARIABLE) == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        here = item.path.is_relative_to(Path(__file__).parent)
        if here and "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.service)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check here, not in the fixture, so that a run without the engine reports it in one line for all tests."""
    if "engine" in getattr(item, "fixturenames", ()):
        require_engine(os.environ.get("PATH"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail instead of skip under RUNTIME_REQUIRE_ENGINE=1, whatever is missing."""
    report = yield
    if REQUIRED and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{str(reason).removeprefix('Skipped: ')} ({REQUIRE_VARIABLE}=1 makes this a failure)"
    return report


@pytest.fixture(scope="session")
def engine() -> str:
    """Find the folder of the `pulumi` command; skip the test if it is missing."""
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
    """The stack `dev`, up; a test leaves it unchanged."""
    lab = Lab(tmp_path_factory.mktemp("dev") / "lab", engine)
    lab.init("dev")
    lab.up("dev")
    return lab
