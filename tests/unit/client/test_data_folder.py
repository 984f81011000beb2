"""Who can read what commands leave in the folders of a user: nobody else, except where a lab shares a file on purpose."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.config import load_settings
from runtime.errors import Untrusted
from runtime.stack.open import open_stack
from runtime.testing import sample_task
from tests.copies_support import COMMAND, Copies
from tests.owners_support import give_away


def modes_of(folder: Path) -> dict[str, int]:
    """Rights of group and others, of everything in a folder and of itself."""
    paths = [folder, *folder.rglob("*")]
    return {str(each): stat.S_IMODE(each.lstat().st_mode) & 0o077 for each in paths if not each.is_symlink()}


OPEN = 0o002


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(OPEN)
    yield
    os.umask(before)


def run(copies: Copies, environ: dict[str, str], *words: str) -> None:
    variables = {**os.environ, "HOME": str(Path.cwd().parent), **environ}
    done = copies.run(f"import os; os.umask({OPEN}); {COMMAND}", words, variables)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("explicit", [False, True])
def test_commands_leave_nothing_that_others_can_read_in_the_folders_of_the_user(
    tmp_path: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch, explicit: bool
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    (project / "code.py").write_text("")
    environ = {name: str(tmp_path / "own" / name) for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")}
    if explicit:
        environ["RUNTIME_DATA_DIR"] = str(tmp_path / "own" / "data")
    command = 'echo out > "$RUNTIME_OUTPUT_DIR/out"; head -c 100000 /dev/zero | base64'

    run(copies, environ, "submit", "--experiment", "e", "--", "sh", "-c", command)
    run(copies, environ, "worker", "--once")
    run(copies, environ, "status")
    run(copies, environ, "status", "e")
    run(copies, environ, "stack", "use", "local")

    data = tmp_path / "own" / ("data" if explicit else "XDG_DATA_HOME/research-runtime")
    assert (data / "local.db").is_file()
    outputs = f"{data / 'local.db-files'}/"
    open_to_others = {path for path, mode in modes_of(tmp_path / "own").items() if mode}
    # What attempts write, they write by their own umask, in a folder that nobody else can enter.
    assert {path for path in open_to_others if not path.startswith(outputs)} == set()
    assert any(path.startswith(f"{outputs}outputs/") for path in modes_of(data))


def test_files_of_an_earlier_release_are_closed_to_others_when_they_are_opened(tmp_path: Path) -> None:
    data = tmp_path / "research-runtime"
    (data / "local.db-workers").mkdir(parents=True)
    (data / "local.db-files").mkdir()
    with open_stack(queue=f"sqlite:{data / 'local.db'}") as stack:
        stack.queue().put([sample_task()])
        assert set(modes_of(data).values()) > {0o064 & 0o077}

        settings = load_settings({"XDG_DATA_HOME": str(tmp_path)}, tmp_path)
        with open_stack("local", settings=settings) as again:
            assert again.records.experiments()
            assert set(modes_of(data).values()) == {0}


def test_queue_file_that_somebody_names_keeps_the_umask_and_so_does_a_data_folder_of_a_group(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    lab.chmod(0o2775)

    with open_stack(queue=f"sqlite:{lab / 'queue.db'}", settings=load_settings({}, tmp_path)) as stack:
        stack.queue().put([sample_task()])
    with open_stack("local", settings=load_settings({"RUNTIME_DATA_DIR": str(lab)}, tmp_path)) as stack:
        stack.queue().put([sample_task()])

    assert {stat.S_IMODE((lab / name).stat().st_mode) & 0o666 for name in ("queue.db", "local.db")} == {0o664}
    assert stat.S_IMODE(lab.stat().st_mode) == 0o2775


def test_task_file_of_another_user_in_the_data_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "local.db").touch()
    give_away(tmp_path / "local.db")
    tmp_path.chmod(0o1777)

    with (
        pytest.raises(Untrusted),
        open_stack("local", settings=load_settings({"RUNTIME_DATA_DIR": str(tmp_path)})) as it,
    ):
        it.queue()
