"""`runtime init` as typed, and the note of `runtime submit` about a workflow that is not there."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.cli.init import FILES
from runtime.cli.main import main
from runtime.config import Project
from runtime.tasks.model import WorkflowEntry
from runtime.tasks.workflow_check import describe_missing

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def call(*args: str) -> tuple[int, str, str]:
        code = main(args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_init_makes_a_project_that_is_accepted(run: Run) -> None:
    code, out, err = run("init", "demo")

    assert (code, out) == (0, "demo/train.py\ndemo/job.yaml\ndemo/runtime.toml\n")
    assert err == "try: cd demo && runtime run train fit --seed=1\n"
    tomllib.loads(Path("demo/runtime.toml").read_text())
    assert run("launch", "--on", "local", "-f", "demo/job.yaml", "--dry-run")[0] == 0


def test_init_changes_no_file_that_is_there(run: Run) -> None:
    Path("job.yaml").write_text("mine")

    code, out, err = run("init")

    assert (code, out) == (2, "")
    assert err == (
        f"error: `{Path.cwd()}` has `job.yaml` already\n  nothing was made\n"
        "hint: name a new folder: runtime init demo\n"
    )
    assert [path.name for path in Path().iterdir()] == ["job.yaml"]


def test_init_where_no_folder_can_be_is_refused(run: Run) -> None:
    Path("file").touch()

    code, _, err = run("init", "file/demo")

    assert code == 2
    assert err.startswith("error: cannot make `file/demo`: not a directory\n")


def test_init_that_cannot_write_leaves_nothing_and_can_be_repeated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setitem(FILES, "missing/job.yaml", "")
        code, _, err = run("init", "demo")

    assert (code, err.partition("\n")[0]) == (
        2,
        "error: cannot make `demo/missing/job.yaml`: no such file or directory",
    )
    assert list(Path("demo").iterdir()) == []
    assert run("init", "demo")[0] == 0


def test_init_of_a_name_with_a_blank_prints_a_command_that_can_be_pasted(run: Run) -> None:
    assert run("init", "my demo")[2] == "try: cd 'my demo' && runtime run train fit --seed=1\n"


def test_submit_of_a_workflow_that_is_there_says_nothing_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("init", "demo")
    monkeypatch.chdir("demo")

    _, _, err = run("submit", "train", "fit", "--seed=1")

    assert "note: " not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "fit"], "note: this Python finds no module `trian`; `runtime run trian fit --help` says"),
        (["train", "fitt"], "note: `train` does not mention a workflow `fitt`; `runtime run train fitt --help` says"),
    ],
    ids=["module", "name"],
)
def test_submit_of_a_workflow_that_is_not_there_notes_it_and_submits(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    run("init", "demo")
    monkeypatch.chdir("demo")

    code, out, err = run("submit", "-o", "json", *words)

    assert (code, json.loads(out)["new"]) == (0, 1)
    assert err.startswith(said)


def test_submit_without_a_snapshot_believes_the_workers(run: Run) -> None:
    _, _, err = run("submit", "--no-snapshot", "no.such", "project")

    assert "note: this Python" not in err


@pytest.mark.parametrize(
    ("files", "project", "packages", "missing"),
    [
        ({"lab/__init__.py": "", "lab/eval.py": "def score(): ..."}, "lab", (), False),
        ({"lab/__init__.py": "", "lab/eval.py": "def score(): ..."}, "lab.eval", (), False),
        ({"src/lab.py": "def score(): ..."}, "lab", (), False),
        ({"lab/eval.py": "workflows = {'score': print}"}, "lab.eval", (), False),
        ({"lab/eval.py": ""}, "lab.evil", (), True),
        ({"lab.py": "def other(): ..."}, "lab", (), True),
        ({"lab.py": "def scored(): ..."}, "lab", (), True),
        ({"lab.py": "raise SystemExit('imported')"}, "lab", (), True),
        ({"rslp/satlas.py": "def score(): ..."}, "satlas", ("rslp",), False),
        ({}, "satlas", ("rslp",), False),
        ({}, "no-module", (), True),
        ({}, "", (), True),
    ],
)
def test_workflow_is_looked_for_without_an_import(
    tmp_path: Path, files: dict[str, str], project: str, packages: tuple[str, ...], missing: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    settings = Project(root=tmp_path, workflow_packages=packages)

    assert (describe_missing(WorkflowEntry(project, "score"), settings, [tmp_path]) is not None) == missing


def test_job_of_init_is_the_one_that_the_readme_shows() -> None:
    assert f"```yaml\n{FILES['job.yaml']}```\n" in (Path(__file__).parents[3] / "README.md").read_text()
