"""Jobs on a real Ray head with a second node, both on this machine."""

from __future__ import annotations

import pytest
import os
import sys

from collections.abc import Iterator
from pathlib import Path

from runtime.testing.launcher_bench import LauncherCase

pytest.register_assert_rewrite("runtime.testing.launchers")
from runtime.testing.launchers import LauncherSuite

pytestmark = pytest.mark.service


class TestRay(LauncherSuite):
    @pytest.fixture
    def case(self, tmp_path: Path) -> LauncherCase:
        return LauncherCase(
            kind="ray",
            settings={"address": "http://127.0.0.1:31001", "python": sys.executable},
            records=str(tmp_path / "records"),
            patience_s=60,
            break_job=lambda job: None,
        )
