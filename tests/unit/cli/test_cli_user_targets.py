"""Targets of the user's own file, in any folder: found, hidden by the project's, and refused if others could write them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs_support import Terminal, open_terminal
from tests.owners_support import give_away
from tests.unit.cli.test_cli_startup import in_folder, loaded_by


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def write_user_file(run: Terminal, text: str) -> Path:
    path = run.tree.parent / "config" / "runtime" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def box(run: Terminal, place: str = "mine") -> str:
    return f'[targets.box]\nkind = "local"\nrecords = "{run.tree.parent}/{place}"\n'


def test_target_of_the_users_file_is_used_outside_any_project(run: Terminal) -> None:
    path = write_user_file(run, box(run))

    job = run("launch", "--on", "box", "--", "true").out.strip()

    assert run("wait", job).code == 0
    assert (run.tree.parent / "mine" / "jobs" / job).is_dir()
    assert (
        run("targets", "list").out == f"local\tlocal\t-\t-\tbuilt in\nbox\tlocal\t-\t{run.tree.parent}/mine\t{path}\n"
    )
    assert run("targets", "list", "-o", "json").json[1]["file"] == str(path)
    assert f"file        {path}" in run("targets", "show", "box").out


def test_users_file_without_xdg_is_below_the_home(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(run.tree.parent / "home"))
    path = run.tree.parent / "home" / ".config" / "runtime" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(box(run))

    assert run("targets", "list", "-o", "json").json[1]["file"] == str(path)


def test_project_target_of_the_same_name_goes_first_and_that_is_said(run: Terminal) -> None:
    path = write_user_file(run, box(run) + '[targets.other]\nkind = "local"\n')
    project = run.tree / "runtime.toml"
    project.write_text(box(run, "theirs"))

    said = run("targets", "list")

    assert [line.split("\t")[0::4] for line in said.out.splitlines()] == [
        ["local", "built in"],
        ["box", str(project)],
        ["other", str(path)],
    ]
    assert said.err == f"target `box` of `{path}` is hidden by the project's of that name\n"
    assert run("targets", "show", "box", "-o", "json").json["records"].endswith("/theirs")


def test_kind_that_no_launcher_has_is_said_in_the_list(run: Terminal) -> None:
    path = write_user_file(run, "[targets.hpc]\nkind = 'slrum'\n")

    said = run("targets", "list")

    assert (said.code, said.out.splitlines()[1]) == (0, f"hpc\tslrum\t-\t-\t{path}")
    assert said.err.startswith("target `hpc` cannot be used: no launcher named `slrum`, only kubernetes, local, ")


def test_local_may_be_set_for_a_user(run: Terminal) -> None:
    write_user_file(run, '[targets.local]\nkind = "local"\ngpus = 3\n')

    assert run("targets", "show", "local", "-o", "json").json["settings"] == {"gpus": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[target.box]\nkind = 'local'\n", "error: no setting named `target` in `{file}`"),
        ("stack = 'dev'\n", "error: no setting named `stack` in `{file}`"),
        ("targets = 3\n", "error: `3` is no valid targets in `{file}`"),
        ("[targets\n", "error: `{file}` cannot be read: "),
        ("[targets]\nbox = 3\n", "error: `3` is no valid targets.box in `{file}`"),
        ("[targets.box]\nkind = 3\n", "error: `3` is no valid targets.box.kind in `{file}`"),
        ("[targets.box]\n", "error: `None` is no valid targets.box.kind in `{file}`"),
        ("[targets.box]\nkind = 'local'\ndefaults = 1\n", "error: `1` is no valid targets.box.defaults in `{file}`"),
    ],
)
def test_users_file_with_a_mistake_is_an_error_with_file_and_key(run: Terminal, text: str, said: str) -> None:
    path = write_user_file(run, text)

    refused = run("launch", "--on", "box", "--", "true")

    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(said.format(file=path))


def test_users_target_with_a_key_that_its_launcher_lacks_is_an_error_with_the_file(run: Terminal) -> None:
    path = write_user_file(run, "[targets.box]\nkind = 'local'\npartition = 'gpu'\n")

    refused = run("launch", "--on", "box", "--", "true")

    assert refused.code == 2
    assert "partition" in refused.err
    assert f"  target `box` is defined in `{path}`\n" in refused.err


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a" * (9 << 20)], ids=["no text", "too large"])
def test_users_file_that_is_no_settings_is_an_error_with_the_file(run: Terminal, content: bytes) -> None:
    path = write_user_file(run, "")
    path.write_bytes(content)

    refused = run("targets", "list")

    assert refused.code == 2
    assert f"`{path}`" in refused.err.splitlines()[0]


def test_users_file_that_is_a_folder_is_an_error_with_the_file(run: Terminal) -> None:
    path = write_user_file(run, "")
    path.unlink()
    path.mkdir()

    assert run("targets", "list").err.startswith(f"error: `{path}` cannot be read: it is no file")


def test_users_file_that_everybody_can_write_is_refused_by_name(run: Terminal) -> None:
    path = write_user_file(run, box(run))
    path.chmod(0o666)

    refused = run("launch", "--on", "box", "--", "true")

    assert refused.code == 2
    assert refused.err.startswith(f"error: `{path}` is not used: it can be written by every user")


def test_users_file_of_another_user_is_refused_by_name(run: Terminal) -> None:
    path = write_user_file(run, box(run))
    give_away(path)

    assert run("targets", "show", "box").err.startswith(f"error: `{path}` is not used: it belongs to another user")


def test_users_file_in_a_folder_that_everybody_can_write_is_refused_by_name(run: Terminal) -> None:
    path = write_user_file(run, box(run))
    path.parent.chmod(0o777)

    assert run("targets", "show", "box").err.startswith(f"error: `{path}` is not used: `{path.parent}` can be written")


def test_users_file_that_is_refused_hides_neither_the_projects_targets_nor_jobs(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text(box(run, "theirs"))
    job = run("launch", "--on", "box", "--name", "train", "--", "true").out.strip()
    path = write_user_file(run, "[targets\n")

    said = run("status", "--refresh", "-o", "json")

    assert run("wait", job).code == 0
    assert run("status", "train").code == 0
    assert [each["job"] for each in said.json["jobs"]] == [job]
    assert f"`{path}` cannot be read" in said.err


def test_doctor_says_where_targets_come_from_and_what_is_wrong_there(run: Terminal) -> None:
    path = write_user_file(run, box(run))

    good = next(line for line in run("doctor", "-o", "json").json if line["check"] == "targets")
    path.chmod(0o666)
    bad = next(line for line in run("doctor", "-o", "json").json if line["check"] == "targets")

    assert (good["verdict"], good["text"]) == ("ok", f"box of {path}")
    assert bad["verdict"] == "fail"
    assert str(path) in bad["text"]
    assert "RUNTIME_TRUST" in bad["fix"]


def test_doctor_names_a_target_that_cannot_be_used(run: Terminal) -> None:
    write_user_file(run, box(run) + "[targets.odd]\nkind = 'local'\npartition = 'x'\n")

    lines = {line["check"]: line["verdict"] for line in run("doctor", "-o", "json").json}

    assert (lines["target odd"], lines["targets"]) == ("fail", "ok")


def test_doctor_without_targets_has_no_line_of_them(run: Terminal) -> None:
    assert [line for line in run("doctor", "-o", "json").json if line["check"] == "targets"] == []


def test_status_without_a_users_file_loads_no_toml(tmp_path: Path) -> None:
    assert "tomllib" not in loaded_by(in_folder(tmp_path, "status"))


def test_users_file_of_a_pipe_keeps_nobody_waiting(run: Terminal) -> None:
    path = write_user_file(run, "")
    path.unlink()
    os.mkfifo(path)

    assert run("targets", "list").err.startswith(f"error: `{path}` cannot be read: it is no file")
