"""The code submitted with tasks: its folder, its exclusions, and refusals."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.client.tasks.submit import submit
from runtime.client.tasks.task_snapshot import SubmittedCode, find_code_folder, import_root, take_code
from runtime.config import Settings, load_settings
from runtime.errors import InvalidValue, NotPossible
from runtime.queues.base import Queue
from runtime.queues.memory import MemoryQueue
from runtime.queues.sqlite.queue import open_sqlite
from runtime.records import open_records
from runtime.records.memory import MemoryRecords
from runtime.shim.tree import list_entries
from runtime.snapshots.snapshot import fetch_snapshot, make_snapshot
from runtime.tasks.model import CommandEntry, Task
from runtime.tasks.wire import encode_task
from runtime.testing import sample_task
from tests.fakes.gcs import GcsServer


@pytest.fixture(params=["sqlite", "folder", "gs", "memory"])
def queue(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """A queue with each kind of store: the embedded file that holds the tasks itself, and stores with manifests."""
    match request.param:
        case "sqlite":
            opened, records = open_sqlite(tmp_path / "queue" / "tasks.db")
            yield opened
            opened.close()
            records.close()
        case "gs":
            server = GcsServer().start()
            server.make_bucket("lab")
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
            yield MemoryQueue(open_records("gs://lab/p"))
            server.stop()
        case "folder":
            (tmp_path / "records").mkdir()
            yield MemoryQueue(open_records(f"file:{tmp_path / 'records'}"))
        case _:
            yield MemoryQueue(open_records("memory:"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home" / "ada"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def project(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a file at its root and one in a folder, which is the working directory's parent."""
    folder = home / "project"
    (folder / "experiments" / "a").mkdir(parents=True)
    (folder / "runtime.toml").write_text("")
    (folder / "main.py").write_text("print(1)\n")
    (folder / "experiments" / "a" / "config").write_text("x")
    monkeypatch.chdir(folder)
    return folder


def names_of(identity: str | None, records: Any) -> list[str]:
    assert identity is not None
    return [entry[0] for entry in list_entries(fetch_snapshot(identity, records), "/")]


def settings(**changes: Any) -> Settings:
    return replace(load_settings(), **changes)


# the folder


@pytest.mark.parametrize("start", [".", "experiments", "experiments/a"])
@pytest.mark.parametrize("mark", ["runtime.toml", "pyproject.toml", ".git", ".git file"])
def test_code_is_that_of_the_project_around_the_working_directory(project: Path, start: str, mark: str) -> None:
    (project / "runtime.toml").unlink()
    match mark:
        case ".git":
            subprocess.run(["git", "init", "-q", str(project)], check=True)
        case ".git file":
            (project / ".git").write_text("gitdir: elsewhere\n")
        case name:
            (project / name).write_text("[tool.runtime]\n" if name == "pyproject.toml" else "")

    assert find_code_folder(project / start) == project


def test_nearest_of_project_file_and_work_tree_is_the_project(project: Path) -> None:
    subprocess.run(["git", "init", "-q", str(project / "experiments")], check=True)
    assert find_code_folder(project / "experiments" / "a") == project / "experiments"

    (project / "experiments" / "a" / "runtime.toml").touch()
    assert find_code_folder(project / "experiments" / "a") == project / "experiments" / "a"


def test_code_outside_of_a_project_is_the_working_directory_itself(home: Path) -> None:
    (home / "runtime.toml").write_text("")  # a user's own settings do not make the home folder a project
    (home / ".git").mkdir()
    (home / "stuff" / "deep").mkdir(parents=True)

    assert find_code_folder(home / "stuff" / "deep") == home / "stuff" / "deep"


@pytest.mark.parametrize("where", ["home", "above", "root"])
def test_home_or_what_lies_above_it_is_refused_with_what_to_do(home: Path, where: str) -> None:
    folder = {"home": home, "above": home.parent, "root": Path("/")}[where]

    with pytest.raises(NotPossible) as refused:
        find_code_folder(folder)

    assert refused.value.exit_code == 2
    assert str(folder) in refused.value.message
    assert "`--snapshot FOLDER`" in (refused.value.hint or "")
    assert "`--no-snapshot`" in (refused.value.hint or "")


def test_home_that_is_a_project_itself_is_taken(home: Path) -> None:
    (home / "runtime.toml").write_text("")

    assert find_code_folder(home) == home


# contents


def test_code_is_stored_and_says_where_in_it_attempts_start(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = MemoryRecords()
    monkeypatch.chdir(project / "experiments" / "a")

    code = take_code(None, records, load_settings())

    assert code == SubmittedCode(snapshot=make_snapshot(project).id, folder="experiments/a", taken_from=project)
    assert names_of(code.snapshot, records) == ["experiments/a/config", "main.py", "runtime.toml"]


def test_attempt_that_submits_from_within_its_tree_passes_its_code_on(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = MemoryRecords()
    submitted = take_code(None, records, load_settings())
    assert submitted.snapshot
    tree = project.parent / "tree"
    (tree / "experiments" / "a").mkdir(parents=True)
    (tree / "experiments" / "a" / "written-by-the-attempt").touch()
    monkeypatch.chdir(tree / "experiments" / "a")
    monkeypatch.setenv("RUNTIME_SNAPSHOT_ID", submitted.snapshot)
    monkeypatch.setenv("RUNTIME_SNAPSHOT_DIR", str(tree))

    assert take_code(None, records, load_settings()) == SubmittedCode(
        snapshot=submitted.snapshot, folder="experiments/a"
    )
    # Another stack's store lacks it; a folder that is named or elsewhere is taken as given.
    assert take_code(None, MemoryRecords(), load_settings()).taken_from == tree / "experiments" / "a"
    assert take_code(Path(), records, load_settings()).taken_from == tree / "experiments" / "a"
    monkeypatch.chdir(project)
    assert take_code(None, records, load_settings()).taken_from == project


def test_setting_of_the_project_and_the_caller_turn_it_off_and_on(project: Path) -> None:
    records = MemoryRecords()
    (project / "runtime.toml").write_text("snapshot = false\n")

    assert take_code(None, records, load_settings()) == SubmittedCode()
    assert take_code(True, records, load_settings()).taken_from == project
    (project / "runtime.toml").write_text("snapshot = true\n")
    assert take_code(False, records, load_settings()) == SubmittedCode()
    assert take_code("sha256:abc", records, load_settings()) == SubmittedCode(snapshot="sha256:abc")


def test_setting_that_is_no_boolean_is_refused(project: Path) -> None:
    (project / "runtime.toml").write_text('snapshot = "no"\n')

    with pytest.raises(InvalidValue, match=r"`no` is no valid snapshot in"):
        load_settings()


def test_folder_that_is_named_counts_and_attempts_start_where_the_caller_is(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "experiments" / "a")

    above = take_code(Path(".."), MemoryRecords(), load_settings())
    monkeypatch.chdir(project)
    elsewhere = take_code(Path("experiments"), MemoryRecords(), load_settings())

    assert (above.folder, elsewhere.folder) == ("a", None)
    assert above.snapshot == elsewhere.snapshot == make_snapshot(project / "experiments").id


@pytest.mark.parametrize("kind", ["sqlite", "file"])
def test_what_this_package_writes_into_the_project_stays_out(project: Path, kind: str) -> None:
    (project / "data" / "records").mkdir(parents=True)
    for name in ("data.py", "data/local.db", "cache/x", "records.db", "records.db-wal", "records.db.py"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("")
    url = f"file:{project / 'data/records'}" if kind == "file" else f"sqlite:{project / 'records.db'}"
    records = open_records("memory:")
    records.url = url

    code = take_code(None, records, settings(data_dir=project / "data", cache_dir=project / "cache"))

    kept = {"data.py", "experiments/a/config", "main.py", "records.db.py", "runtime.toml"}
    assert {*names_of(code.snapshot, records)} == (kept | {"records.db", "records.db-wal"} if kind == "file" else kept)


def test_tree_that_is_refused_says_how_to_submit_without_it(project: Path) -> None:
    (project / "server.key").write_text("")

    with pytest.raises(NotPossible, match=r"`server\.key`") as refused:
        take_code(None, MemoryRecords(), load_settings())

    assert (refused.value.hint or "").endswith(
        "; `--no-snapshot` (in Python `snapshot=False`) submits without the code, and workers run their own"
    )


@pytest.mark.parametrize("name", [".netrc", "sub/.aws/credentials", ".git-credentials", "id_ecdsa", "x.p12"])
def test_files_that_hold_credentials_by_their_names_are_refused(project: Path, name: str) -> None:
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).touch()

    with pytest.raises(NotPossible, match="looks like a secret"):
        take_code(None, MemoryRecords(), load_settings())


def test_file_that_the_projects_settings_name_is_taken_although_it_looks_like_a_secret(project: Path) -> None:
    records = MemoryRecords()
    (project / "certs").mkdir()
    for name in ("test.key", "other.key"):
        (project / "certs" / name).touch()
    (project / "runtime.toml").write_text('snapshot_secrets = ["certs/test.key"]\n')

    with pytest.raises(NotPossible, match=r"`certs/other\.key`") as refused:
        take_code(None, records, load_settings())
    (project / "certs" / "other.key").unlink()
    code = take_code(None, records, load_settings())

    assert (
        "; if it belongs in the snapshot, name it in `snapshot_secrets` of the project's settings; `--no-snapshot`"
        in (refused.value.hint or "")
    )
    assert "certs/test.key" in names_of(code.snapshot, records)


# functions


@pytest.fixture
def elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a package in `src`, imported by this process, which works in another folder."""
    package = home / "elsewhere" / "src" / "elsewhere_lab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("def fit():\n    return 1\n")
    (home / "elsewhere" / "runtime.toml").write_text("")
    monkeypatch.syspath_prepend(home / "elsewhere" / "src")
    yield home / "elsewhere"
    for name in [name for name in sys.modules if name.startswith("elsewhere_lab")]:
        del sys.modules[name]


def test_function_brings_the_project_that_its_module_lies_in(project: Path, elsewhere: Path, queue: Queue) -> None:
    fit = importlib.import_module("elsewhere_lab.train").fit
    done = submit(fit, queue=queue)

    assert import_root(fit) == elsewhere / "src"
    assert done.snapshot == make_snapshot(elsewhere).id
    assert [(task.snapshot, task.folder) for task in queue.peek(9)] == [(done.snapshot, None)]


def test_function_that_is_installed_brings_the_working_directorys_project(project: Path, queue: Queue) -> None:
    done = submit(pytest.raises, queue=queue)

    assert import_root(pytest.raises) is None
    assert done.snapshot == make_snapshot(project).id


# one snapshot for all


def test_every_task_of_a_submission_has_the_code_of_its_beginning(project: Path, queue: Queue) -> None:
    def lines() -> Iterator[dict[str, Any]]:
        for number in range(50):
            (project / "main.py").write_text(f"print({number})\n")
            yield {"command": ["python", "main.py", str(number)]}

    before = make_snapshot(project).id
    done = submit(lines(), queue=queue)

    assert {task.snapshot for task in queue.peek(99)} == {before} == {done.snapshot}


def test_task_that_names_its_code_keeps_it(project: Path, queue: Queue) -> None:
    other = "sha256:" + "1" * 64

    submit(
        [
            {"command": ["a"], "snapshot": other},
            {"command": ["b"], "snapshot": other, "folder": "x/y"},
            {"command": ["c"]},
        ],
        queue=queue,
        experiment="e",
    )
    submit(Task(id="t-1", entry=CommandEntry(("d",)), experiment="e", snapshot=other), queue=queue)
    submit(Task(id="t-2", entry=CommandEntry(("e",)), experiment="e"), queue=queue)

    own = make_snapshot(project).id
    assert [(task.snapshot, task.folder) for task in queue.peek(9)] == [
        (other, None),
        (other, "x/y"),
        (own, None),
        (other, None),
        (own, None),
    ]


def test_folder_of_a_task_survives_the_wire_and_a_retry() -> None:
    from runtime.tasks.model import next_generation
    from runtime.tasks.wire import decode_stored, decode_task

    task = sample_task(snapshot="sha256:" + "1" * 64, folder="a/b", submitted_at=None)

    assert decode_task(encode_task(task)) == decode_stored(encode_task(task)) == task
    assert next_generation(task).folder == "a/b"


# repeated submissions


def test_known_task_keeps_its_code_and_that_is_said(project: Path, queue: Queue) -> None:
    first = submit({"command": ["python", "main.py"]}, queue=queue)
    same = submit({"command": ["python", "main.py"]}, queue=queue)
    (project / "main.py").write_text("print(2)\n")
    again = submit({"command": ["python", "main.py"]}, queue=queue)
    other = submit({"command": ["python", "main.py"]}, queue=queue, experiment="other")

    assert [(done.new, done.known, done.kept_code) for done in (first, same, again, other)] == [
        (1, 0, None),
        (0, 1, None),
        (0, 1, first.snapshot),
        (1, 0, None),
    ]
    assert again.snapshot == other.snapshot == make_snapshot(project).id


def test_known_task_that_brought_no_code_runs_the_workers(project: Path, queue: Queue) -> None:
    submit({"command": ["ls"]}, queue=queue, snapshot=False)

    assert submit({"command": ["ls"]}, queue=queue).kept_code == "worker"
    assert submit({"command": ["ls"]}, queue=queue, snapshot=False).kept_code is None
