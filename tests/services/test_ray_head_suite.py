"""The README's launch and the launchers' suite on a head that our own boot scripts start, with nodes that Ray's autoscaler makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.testing.launcher_bench import Bench, LauncherCase
from tests.readme_support import AS_PROMISED, follow_readme
from tests.services.head_support import LabHead, pool, require_ray
from tests.services.test_launcher_ray import kill_processes

pytest.register_assert_rewrite("runtime.testing.launchers")
from runtime.testing.launchers import LauncherSuite  # noqa: E402  its assertions are rewritten first

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def head() -> Iterator[LabHead]:
    require_ray()
    with LabHead({"one": pool("v4-8", min=1, max=3, cpus=4)}) as running:
        yield running


@pytest.fixture
def case(head: LabHead, tmp_path: Path) -> LauncherCase:
    return LauncherCase(
        kind="ray",
        settings={"address": head.address, "python": sys.executable},
        records=str(tmp_path / "records"),
        patience_s=400,
        break_job=kill_processes,
        tell=head.tell,
    )


@pytest.fixture
def bench(case: LauncherCase, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(case, tmp_path / "bench")
    yield made
    made.close()


def test_readme_launch_on_a_ray_head_ends_as_promised(case: LauncherCase, tmp_path: Path) -> None:
    assert follow_readme(tmp_path / "project", "tpu", settings=case.target()) == AS_PROMISED


class TestRayHead(LauncherSuite):
    @pytest.fixture
    def case(self, case: LauncherCase) -> LauncherCase:
        return case
