"""`runtime cancel` of tasks and experiments: what it asks and checks before it acts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runtime.cli import cancel as command
from runtime.cli.main import main
from runtime.client.resolve_id import ResolvedId
from runtime.client.tasks.cancel import CancelResult
from runtime.client.tasks.task_facts import Stack
from runtime.errors import StoreUnavailable
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


def test_cancel_of_several_of_which_one_is_a_worker_cancels_none(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    task = sample_task("1", experiment="sweep")
    bench.put(task)
    bench.report("w-one", seen_at=datetime.now(UTC))

    refused = main(["cancel", task.id, "w-one"])

    assert (refused, capsys.readouterr().out) == (2, "")
    assert bench.records.find(task.id, 1) is None


def test_cancel_that_fails_halfway_prints_the_tasks_before(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [sample_task(str(number), experiment="sweep") for number in range(3)]
    bench.put(*tasks)
    cancel_one = command.cancel_one

    def fail(stack: Stack, what: ResolvedId, *, now: datetime) -> CancelResult:
        if what.name == tasks[1].id:
            raise StoreUnavailable("the store went away")
        return cancel_one(stack, what, now=now)

    monkeypatch.setattr(command, "cancel_one", fail)

    code = main(["cancel", *(task.id for task in tasks), "-o", "json"])

    said = capsys.readouterr()
    assert (code, [row["name"] for row in json.loads(said.out)]) == (3, [tasks[0].id])
    assert said.err.startswith("error: the store went away\n")
