"""`runtime run`: the arguments of a queued task, JSON on stdout, and an exit code that names the party at fault."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.cli.main import main

_numbers = itertools.count()

MODULE = """
import dataclasses, sys

@dataclasses.dataclass
class Result:
    loss: float

def fit(x: float, wait: bool = False, experiment: str = ""):
    "Fit it."
    print("working", file=sys.stderr)
    if x < 0:
        raise ValueError("x is\\nnegative")
    return {"x": x, "wait": wait, "experiment": experiment, "result": Result(0.5)}

def quiet(): pass
def odd(): return object()
def leave(): sys.exit(7)

workflows = {"fit": fit, "quiet": quiet, "odd": odd, "leave": leave}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"runlab{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        code = main(["run", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_value_is_printed_as_json_and_nothing_else(run: Run, project: str) -> None:
    code, out, err = run(project, "fit", "--x=1e-3")

    assert (code, err) == (0, "working\n")
    assert json.loads(out) == {"x": 0.001, "wait": False, "experiment": "", "result": {"loss": 0.5}}


def test_nothing_returned_prints_nothing(run: Run, project: str) -> None:
    assert run(project, "quiet") == (0, "", "")


def test_options_of_other_commands_belong_to_the_workflow(run: Run, project: str) -> None:
    code, out, _ = run(project, "fit", "--x", "1", "--wait=true", "--experiment=mine")

    assert (code, json.loads(out)["wait"], json.loads(out)["experiment"]) == (0, True, "mine")


def test_help_behind_the_workflow_is_the_workflows(run: Run, project: str) -> None:
    code, out, err = run(project, "fit", "--help")

    assert (code, err) == (0, "")
    assert f"usage: runtime run {project} fit --x X" in out
    assert "Fit it." in out


def test_help_before_the_workflow_is_the_commands(run: Run) -> None:
    code, out, _ = run("--help")

    assert code == 0
    assert "Run one workflow here and now" in out
    assert "runtime run my.project train --lr=1e-3" in out


def test_bad_arguments_are_refused(run: Run, project: str) -> None:
    code, out, err = run(project, "fit", "--y=1", "--x=1")

    assert (code, out) == (2, "")
    assert err.startswith(f"error: workflow `{project} fit` refuses its arguments: it has no option `--y`\n")


def test_unknown_names_are_refused(run: Run, project: str) -> None:
    assert run(project, "fti")[0] == 2
    assert run("nosuchlab", "fit")[0] == 2
    assert run(project)[0] == 2


def test_failure_of_the_workflow_shows_its_own_traceback_and_no_frame_of_ours(run: Run, project: str) -> None:
    code, out, err = run(project, "fit", "--x=-1")

    assert (code, out) == (1, "")
    assert f"{project}.py" in err
    assert 'raise ValueError("x is\\nnegative")' in err
    assert "runtime/cli" not in err
    assert "runtime/workflows" not in err
    assert err.endswith(f"error: workflow `{project} fit` failed: ValueError: x is negative\n")


def test_module_that_cannot_be_imported_shows_why(run: Run, project: str, tmp_path: Path) -> None:
    (tmp_path / f"{project}broken.py").write_text("import surely_not_installed\n")

    code, _, err = run(f"{project}broken", "fit")

    assert code == 1
    assert f"{project}broken.py" in err
    assert "ModuleNotFoundError: No module named 'surely_not_installed'" in err


def test_value_that_json_cannot_hold_is_said_so(run: Run, project: str) -> None:
    code, _, err = run(project, "odd")

    assert code == 1
    assert "it ran to its end" in err


def test_exit_code_of_the_workflow_is_kept(run: Run, project: str) -> None:
    assert run(project, "leave")[0] == 7
