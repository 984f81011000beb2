"""`runtime cancel` of an experiment: what it asks before it acts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.testing import sample_task
from tests.verbs_support import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The stack `local`, on a file that commands of this test use too."""
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    bench = Bench.sqlite(tmp_path / "data", "local.db")
    yield bench
    bench.close()


def test_cancel_asks_only_if_a_task_is_left(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.put(sample_task("1", experiment="sweep"))

    asked = main(["cancel", "sweep"])
    said = capsys.readouterr().err
    bench.succeed()
    done = main(["cancel", "sweep"])

    assert asked == 2
    assert said.startswith("error: cancel experiment `sweep` with 1 unfinished task: nobody is there to answer\n")
    assert done == 0
