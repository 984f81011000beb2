"""The checkers of the test suite itself: each is fed an input that it must refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import services_support
from tests.conftest import GoldenFiles, _running_kubernetes
from tests.services_support import REQUIRE_VARIABLE, Service, require

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these tests use components as marked ones do; they use none."""
    monkeypatch.setattr(services_support, "unmarked_test", None)


def test_component_in_a_test_without_the_mark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services_support, "unmarked_test", "test_x.py::test_y")

    with pytest.raises(AssertionError, match=r"test_x\.py::test_y uses Redis: mark it with `service`"):
        require("Redis", "/usr/bin/redis-server", "make services")
    with pytest.raises(AssertionError, match=r"test_x\.py::test_y uses service: mark it with `service`"):
        Service().start()


def test_require_found_component_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_VARIABLE, "1")

    require("Redis", "/usr/bin/redis-server", "make services")


def test_require_missing_component_skips_with_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRE_VARIABLE, raising=False)

    with pytest.raises(pytest.skip.Exception) as skipped:
        require("Redis", None, "make services")

    assert str(skipped.value) == "Redis is not installed; install it with `make services`"


def test_require_missing_component_fails_where_services_are_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_VARIABLE, "1")

    with pytest.raises(pytest.fail.Exception) as failed:
        require("Redis", None, "make services")

    assert "make services" in str(failed.value)


def test_node_that_takes_root_fails_without_root_where_services_are_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_VARIABLE, "1")
    monkeypatch.setattr("os.geteuid", lambda: 12345)

    with pytest.raises(pytest.fail.Exception) as failed:
        next(_running_kubernetes(node=True))

    assert "takes root" in str(failed.value)


def test_service_that_dies_at_start_is_reported_with_its_output() -> None:
    class Broken(Service):
        name = "broken service"

        def _command(self) -> list[str]:
            return ["sh", "-c", "echo no room for me; exit 7"]

        def _is_ready(self) -> bool:
            return False

    service = Broken()

    with pytest.raises(RuntimeError, match=r"broken service did not start \(exit code 7\): no room for me"):
        service.start()

    assert service.pid is None


def test_golden_that_differs_or_is_missing_fails_and_update_writes_it(tmp_path: Path) -> None:
    compare, update = GoldenFiles(tmp_path, update=False), GoldenFiles(tmp_path, update=True)

    with pytest.raises(pytest.fail.Exception):
        compare.check("a/script.sh", "one\n")
    update.check("a/script.sh", "one\n")
    compare.check("a/script.sh", "one\n")
    with pytest.raises(AssertionError):
        compare.check("a/script.sh", "two\n")
