"""Project file and environment: the nearest setting wins, misspelt keys are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.client.tasks.submit import submit
from runtime.config import Project, Settings, load_project, load_settings, remember_stack
from runtime.errors import InvalidValue, NotPossible, RequestRefused, UnknownName


def settings_of(folder: Path, **environ: str) -> Settings:
    return load_settings({"XDG_CONFIG_HOME": str(folder / "config"), **environ}, folder)


def test_no_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_project(tmp_path) == Project(root=tmp_path)


def test_nearest_file_upward_is_read_and_pyprojects_without_our_table_are_passed_over(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text('[project]\nname = "runtime-user"\n')
    (tmp_path / "pyproject.toml").write_text(
        '[tool.runtime]\nstack = "dev"\nworkflow_packages = ["rslp"]\nworkflow_setup = "rslp:setup"\n'
        'env_files = [".env"]\n[tool.runtime.targets.gpu]\nkind = "slurm"\n'
        '[tool.runtime.notify.oncall]\ncommand = ["tell"]\n'
    )

    assert load_project(inner) == Project(
        root=tmp_path,
        file=tmp_path / "pyproject.toml",
        stack="dev",
        workflow_packages=("rslp",),
        workflow_setup="rslp:setup",
        env_files=(".env",),
        targets={"gpu": {"kind": "slurm"}},
        notify={"oncall": {"command": ["tell"]}},
    )


def test_runtime_toml_goes_before_the_pyproject_beside_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.runtime]\nstack = "one"\n')
    (tmp_path / "runtime.toml").write_text('stack = "two"\n')

    assert load_project(tmp_path).stack == "two"


def test_misspelt_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text('workflow_package = ["rslp"]\n')

    with pytest.raises(UnknownName) as refused:
        load_project(tmp_path)

    assert refused.value.name == "workflow_package"
    assert refused.value.hint == "did you mean `workflow_packages`?"
    assert str(tmp_path / "runtime.toml") in refused.value.message


@pytest.mark.parametrize(
    "line",
    ["stack = 3", "stack = ''", "workflow_packages = 'rslp'", "env_files = [1]", "targets = 'x'", "notify = ['x']"],
)
def test_value_of_the_wrong_type_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "runtime.toml").write_text(line + "\n")

    with pytest.raises(InvalidValue):
        load_project(tmp_path)


def test_broken_toml_is_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text("stack = \n")

    with pytest.raises(RequestRefused) as refused:
        load_project(tmp_path)

    assert str(tmp_path / "runtime.toml") in refused.value.message


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_settings_that_are_no_file_are_refused_and_not_passed_over(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "runtime.toml"
    (tmp_path / "pyproject.toml").write_text('[tool.runtime]\nstack = "one"\n')
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to("nowhere")

    with pytest.raises(RequestRefused, match=f"`{path}` cannot be read: it is no file"):
        load_project(tmp_path)

    # In a shared folder it may be another user's, who will not remove it.
    below = tmp_path / "mine"
    below.mkdir()
    with pytest.raises(RequestRefused) as refused:
        load_project(below)
    assert refused.value.hint is not None
    assert f"an empty `runtime.toml` of your own in `{below}` ends the search" in refused.value.hint
    (below / "runtime.toml").touch()
    assert load_project(below).root == below


def test_environment_goes_before_the_project_and_the_project_before_what_was_remembered(tmp_path: Path) -> None:
    remember_stack("remembered", settings_of(tmp_path))
    assert settings_of(tmp_path).stack == "remembered"

    (tmp_path / "runtime.toml").write_text('stack = "project"\nqueue = "q"\n')
    assert settings_of(tmp_path).stack == "project"
    assert settings_of(tmp_path, RUNTIME_STACK="env").stack == "env"
    assert settings_of(tmp_path, RUNTIME_QUEUE="other").queue == "other"


def test_contract_named_in_the_environment_hides_stacks_named_further_away(tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text('stack = "project"\n')

    settings = settings_of(tmp_path, RUNTIME_OUTPUTS="/c.json")

    assert (settings.stack, settings.outputs) == (None, "/c.json")


def test_folders_follow_the_xdg_variables(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, XDG_DATA_HOME="/data", XDG_CACHE_HOME="relative")

    assert settings.data_dir == Path("/data/research-runtime")
    assert settings.cache_dir == Path.home() / ".cache/research-runtime"
    assert settings_of(tmp_path, RUNTIME_DATA_DIR="/elsewhere").data_dir == Path("/elsewhere")


def test_durability_is_full_or_normal(tmp_path: Path) -> None:
    assert settings_of(tmp_path).durability == "full"
    assert settings_of(tmp_path, RUNTIME_DURABILITY="normal").durability == "normal"
    with pytest.raises(InvalidValue):
        settings_of(tmp_path, RUNTIME_DURABILITY="fast")


@pytest.fixture
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which was removed."""
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    folder.rmdir()
    return folder


def test_working_directory_that_was_removed_is_told_with_its_name_and_what_to_do(removed: Path) -> None:
    with pytest.raises(NotPossible) as raised:
        load_settings()

    assert raised.value.message == "the working directory cannot be used: no such file or directory"
    assert str(removed) in raised.value.facts[0]
    assert "cd" in (raised.value.hint or "")


def test_submit_from_a_working_directory_that_was_removed_is_refused(removed: Path) -> None:
    with pytest.raises(NotPossible, match="the working directory"):
        submit(("p", "w"))


@pytest.mark.parametrize("command", ["status", "queue stats", "worker", "submit -- true", "launch -- true", "doctor"])
def test_commands_in_a_working_directory_that_was_removed_say_so(
    command: str, removed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["runtime", *command.split()])

    assert main(command.split()) == 2
    assert capsys.readouterr().err.startswith("error: the working directory cannot be used")
