"""Completion of jobs, experiments and targets: from this machine's files alone, and silent whatever lies in them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs_support import Terminal, open_terminal
from tests.unit.cli.test_cli_startup import HEAVY, loaded_by


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


@pytest.fixture
def complete(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> Completion:
    return Completion(run, monkeypatch)


class Completion:
    """Asks as bash does after TAB at the end of a line."""

    def __init__(self, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self._monkeypatch = run, monkeypatch

    def __call__(self, line: str) -> list[str]:
        with self._monkeypatch.context() as asked:
            asked.setenv("_RUNTIME_COMPLETE", "complete_bash")
            asked.setenv("COMP_WORDS", line)
            asked.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
            said = self.run()
        assert said.err == ""
        return said.out.split("\n")[:-1] if said.out.strip() else []


@pytest.mark.parametrize("verb", ["status", "logs", "fetch", "cancel", "retry", "wait", "explain", "interrupt"])
@pytest.mark.daily(3)
def test_completion_of_a_job_has_its_name_and_its_id(complete: Completion, verb: str) -> None:
    job = complete.run.finish("true", "--name", "train-7b")

    assert complete(f"runtime {verb} tra") == ["train-7b"]
    assert complete(f"runtime {verb} {job[:6]}") == [job]
    assert complete(f"runtime {verb} las") == ["last"]


def test_completion_of_a_job_knows_targets_as_they_were_last_read(complete: Completion) -> None:
    run = complete.run
    (run.tree / "runtime.toml").write_text(f'[targets.box]\nkind = "local"\nrecords = "{run.tree.parent}/box"\n')
    job = run("launch", "--on", "box", "--name", "there", "--", "true").out.strip()
    run("wait", job)
    run("status", "--refresh")
    for note in [*(run.data / "launched").iterdir(), *(run.data / "known" / "launches").iterdir()]:
        note.unlink()

    assert complete("runtime logs the") == ["there"]


def test_completion_of_an_experiment_has_those_of_the_local_stack(complete: Completion) -> None:
    for name in ("sweep-a", "sweep-b", "other"):
        assert complete.run("submit", "--experiment", name, "proj", "train").code == 0

    assert sorted(complete("runtime status sweep")) == ["sweep-a", "sweep-b"]
    assert complete("runtime results oth") == ["other"]
    assert complete("runtime retry --failed sweep-a") == ["sweep-a"]


@pytest.mark.parametrize(
    "line",
    [
        "status --on ",
        "launch --on ",
        "launch --on local,",
        "targets show ",
        "targets check ",
        "gc --on ",
        "import --on ",
    ],
)
def test_completion_of_a_target_has_those_of_the_project_and_of_the_user(complete: Completion, line: str) -> None:
    run = complete.run
    (run.tree / "runtime.toml").write_text('[targets.hpc]\nkind = "slurm"\n[targets.h2]\nkind = 3\n')
    path = run.tree.parent / "config" / "runtime" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text('[targets.hbox]\nkind = "ssh"\n')

    before = "local," if line.endswith(",") else ""
    assert complete(f"runtime {line}h") == [f"{before}hbox", f"{before}hpc"]


def test_completion_of_a_job_file_is_left_to_the_shell(complete: Completion) -> None:
    complete.run.finish("true", "--name", "train-7b")

    assert complete("runtime launch --file tra") == []


@pytest.mark.parametrize(
    "name", ["tra\x1b[31m", "tra in", "tra\nx", "tra$(id)", "tra`id`", "tra\u202ex", "tra:x", "tra'x"]
)
def test_completion_offers_no_name_that_a_shell_or_terminal_would_read_otherwise(
    complete: Completion, name: str
) -> None:
    complete.run.finish("true", "--name", "train-7b")
    (complete.run.data / "known" / "launches" / f"j-0123456789abcdef01234567.{name}").write_text("{}")
    (complete.run.data / "launched" / "j-0123456789abcdef01234567").write_text("local\n")
    (complete.run.data / "last").mkdir(exist_ok=True)
    (complete.run.data / "last" / "local").write_text(name)

    assert complete("runtime logs tra") == ["train-7b"]


def test_completion_over_damaged_files_is_silent_and_goes_on(complete: Completion) -> None:
    run = complete.run
    run.finish("true", "--name", "train-7b")
    (run.data / "local.db").write_bytes(b"no database")
    (run.data / "last").mkdir(exist_ok=True)
    (run.data / "last" / "local").write_bytes(b"\xff\xfe")
    (run.data / "known" / "targets").mkdir(exist_ok=True)
    for number, content in enumerate([b"[" * 100_000, b'{"jobs": 3}', b'{"jobs": [3, {"job": 4}, {}]}', b"\xff"]):
        (run.data / "known" / "targets" / f"{number}.json").write_bytes(content)

    assert complete("runtime logs tra") == ["train-7b"]


@pytest.mark.parametrize("text", ["[targets\n", "stack = 3\n", '[targets.h]\nkind = "nothing"\n'])
def test_completion_with_a_project_that_cannot_be_read_is_silent(complete: Completion, text: str) -> None:
    (complete.run.tree / "runtime.toml").write_text(text)

    assert complete("runtime status --on x") == []
    assert complete("runtime status x") == []
    assert complete("runtime stat") == ["status"]


def test_completion_in_a_folder_that_was_removed_is_silent(complete: Completion) -> None:
    folder = complete.run.tree / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()

    assert complete("runtime logs tra") == []
    os.chdir(complete.run.tree)


def test_completion_with_garbage_from_the_shell_is_silent(
    complete: Completion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_RUNTIME_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "runtime logs 'tra")
    for place in ("x", "-3", "99999"):
        monkeypatch.setenv("COMP_CWORD", place)
        assert complete.run().err == ""


def test_completion_writes_nothing(complete: Completion) -> None:
    run = complete.run
    assert run("submit", "--experiment", "sweep", "proj", "train").code == 0
    before = sorted(path for path in run.data.rglob("*") if not path.name.endswith(("-wal", "-shm")))

    assert complete("runtime status swe") == ["sweep"]
    assert sorted(path for path in run.data.rglob("*") if not path.name.endswith(("-wal", "-shm"))) == before


def test_completion_without_any_data_makes_no_folder(complete: Completion) -> None:
    assert complete("runtime status x") == []
    assert not complete.run.data.exists()


def test_completion_of_a_locked_task_file_waits_for_nobody(complete: Completion) -> None:
    assert complete.run("submit", "--experiment", "sweep", "proj", "train").code == 0
    held = sqlite3.connect(complete.run.data / "local.db", isolation_level=None)
    held.execute("BEGIN IMMEDIATE")

    assert complete("runtime status swe") == ["sweep"]
    held.close()


def test_completion_loads_no_launcher_and_no_cloud_library(tmp_path: Path) -> None:
    modules = loaded_by(
        f"""
import os
os.chdir({str(tmp_path)!r})
os.environ.update(RUNTIME_DATA_DIR={str(tmp_path)!r}, XDG_CONFIG_HOME={str(tmp_path)!r}, _RUNTIME_COMPLETE="complete_bash")
os.environ.update(COMP_WORDS="runtime cancel x", COMP_CWORD="2")
from runtime.cli.main import main
main([])
"""
    )

    assert {module.partition(".")[0] for module in modules} & HEAVY == set()
    assert not [module for module in modules if module.startswith("runtime.launchers.kubernetes")]
