"""Which files are believed: this user's and root's, if not everybody can write them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from runtime import file_trust
from runtime.client.tasks.task_snapshot import find_code_folder
from runtime.config import files_looked_at, load_project, load_settings, remember_stack
from runtime.errors import RequestRefused, Untrusted
from runtime.stack.find import cache_path, find_stack, read_cache, remember
from runtime.tasks import workflows
from tests.owners_support import STRANGER, give_away


def status_of(mode: int, uid: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, uid, uid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "fault"),
    [
        (stat.S_IFREG | 0o644, 7, ""),
        (stat.S_IFREG | 0o644, 0, ""),
        (stat.S_IFREG | 0o664, 7, ""),
        (stat.S_IFREG | 0o644, 8, "belongs to another user"),
        (stat.S_IFREG | 0o600, 8, "belongs to another user"),
        (stat.S_IFREG | 0o666, 7, "can be written by every user"),
        (stat.S_IFREG | 0o1666, 7, "can be written by every user"),
        (stat.S_IFDIR | 0o777, 7, "can be written by every user"),
        (stat.S_IFDIR | 0o1777, 7, ""),
        (stat.S_IFDIR | 0o2775, 7, ""),
        (stat.S_IFDIR | 0o1777, 8, "belongs to another user"),
        (stat.S_IFLNK | 0o777, 7, ""),
        (stat.S_IFLNK | 0o777, 8, "belongs to another user"),
    ],
)
def test_fault_of_a_file_depends_on_owner_and_on_everybody_s_rights(mode: int, uid: int, fault: str) -> None:
    assert file_trust.find_fault(status_of(mode, uid), {0, 7}) == fault


@pytest.mark.parametrize(("euid", "ids"), [(0, {0, 501}), (7, {0, 7})])
def test_person_behind_sudo_is_believed_by_root_alone(
    monkeypatch: pytest.MonkeyPatch, euid: int, ids: set[int]
) -> None:
    monkeypatch.setenv("SUDO_UID", "501")
    monkeypatch.setattr(os, "geteuid", lambda: euid)

    assert file_trust.own_ids() == ids


def test_project_file_that_everybody_can_write_is_refused_with_its_name_and_the_ways_out(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    file = tmp_path / "runtime.toml"
    file.write_text('[targets.x]\nkind = "ssh"\n')
    file.chmod(0o666)

    with pytest.raises(Untrusted) as refused:
        load_project(inner)

    assert refused.value.path == str(file)
    assert refused.value.message == f"`{file}` is not used: it can be written by every user"
    assert refused.value.facts[0] == f"owner {file_trust.user_name(os.geteuid())}, mode -rw-rw-rw-"
    assert refused.value.hint is not None
    assert f"RUNTIME_TRUST={tmp_path}" in refused.value.hint
    assert f"an empty `runtime.toml` of your own in `{inner}`" in refused.value.hint


@pytest.mark.parametrize("name", ["runtime.toml", "pyproject.toml"])
def test_project_file_of_another_user_above_is_refused(tmp_path: Path, name: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / name).write_text("[tool.runtime]\n" if name == "pyproject.toml" else "")
    give_away(tmp_path / name)

    with pytest.raises(Untrusted) as refused:
        load_project(inner)

    assert (refused.value.path, refused.value.owner) == (str(tmp_path / name), f"uid {STRANGER}")


def test_project_file_in_a_folder_that_everybody_can_write_is_refused_without_the_sticky_bit(tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text("")
    tmp_path.chmod(0o1777)
    assert load_project(tmp_path).file

    tmp_path.chmod(0o777)
    with pytest.raises(Untrusted, match="can be written by every user"):
        load_project(tmp_path)


def test_project_file_in_another_user_s_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "runtime.toml").write_text("")
    give_away(tmp_path / "theirs")

    with pytest.raises(Untrusted) as refused:
        load_project(tmp_path / "theirs")

    assert refused.value.trust == f"RUNTIME_TRUST={tmp_path / 'theirs'}"


def test_link_counts_with_its_own_owner_and_with_the_one_of_its_target(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "real.toml").write_text("")
    (tmp_path / "mine" / "runtime.toml").symlink_to(tmp_path / "theirs" / "real.toml")
    assert load_project(tmp_path / "mine").file

    give_away(tmp_path / "theirs" / "real.toml")
    with pytest.raises(Untrusted):
        load_project(tmp_path / "mine")

    (tmp_path / "mine" / "runtime.toml").unlink()
    (tmp_path / "mine" / "runtime.toml").symlink_to("real.toml")
    give_away(tmp_path / "mine" / "runtime.toml")
    with pytest.raises(Untrusted):
        load_project(tmp_path / "mine")


def test_folder_that_the_environment_trusts_is_believed_with_all_below_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "lab" / "inner"
    inner.mkdir(parents=True)
    (inner / "runtime.toml").write_text('stack = "dev"\n')
    (inner / "runtime.toml").chmod(0o666)

    monkeypatch.setenv("RUNTIME_TRUST", f"/nowhere:{tmp_path / 'lab'}/")
    assert load_project(inner).stack == "dev"

    monkeypatch.setenv("RUNTIME_TRUST", f"{tmp_path / 'la'}:lab::{inner / 'deeper'}")
    with pytest.raises(Untrusted):
        load_project(inner)


def test_trust_in_the_folder_of_a_link_does_not_cover_what_the_link_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "elsewhere.toml").write_text("")
    (tmp_path / "elsewhere.toml").chmod(0o666)
    (tmp_path / "lab" / "runtime.toml").symlink_to(tmp_path / "elsewhere.toml")
    monkeypatch.setenv("RUNTIME_TRUST", str(tmp_path / "lab"))

    with pytest.raises(Untrusted):
        load_project(tmp_path / "lab")


def test_pyproject_of_others_without_our_table_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "pyproject.toml").chmod(0o666)

    assert load_project(tmp_path).file is None


def test_pipe_in_the_place_of_a_pyproject_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pyproject.toml")

    assert load_project(tmp_path).file is None


@pytest.mark.parametrize("top", [".git", "home", "tree"])
def test_search_for_the_project_ends_at_the_repository_the_home_and_the_attempt_s_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: str
) -> None:
    monkeypatch.delenv("RUNTIME_SNAPSHOT_DIR", raising=False)
    inner = tmp_path / "top" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "runtime.toml").write_text('stack = "above"\n')
    assert load_project(inner).stack == "above"

    if top == ".git":
        (tmp_path / "top" / ".git").write_text("gitdir: elsewhere\n")
    else:
        monkeypatch.setenv("HOME" if top == "home" else "RUNTIME_SNAPSHOT_DIR", str(tmp_path / "top"))
    assert load_project(inner).stack is None

    (tmp_path / "top" / "runtime.toml").write_text('stack = "top"\n')
    assert load_project(inner).stack == "top"


def test_files_looked_at_are_those_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "top" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "top" / ".git").mkdir()
    monkeypatch.chdir(inner)
    settings = load_settings({"XDG_CONFIG_HOME": str(tmp_path)})

    assert files_looked_at(settings) == [
        str(tmp_path / "research-runtime" / "default-stack"),
        *(str(each / name) for each in (inner, tmp_path / "top") for name in ("runtime.toml", "pyproject.toml")),
    ]


def test_work_tree_of_another_user_around_the_working_directory_is_not_taken_for_the_code(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "mine").mkdir()
    assert find_code_folder(tmp_path / "mine") == tmp_path

    (tmp_path / ".git").chmod(0o777)
    with pytest.raises(Untrusted, match=r"\.git"):
        find_code_folder(tmp_path / "mine")


def test_pulumi_project_of_another_user_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pulumi").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexit 1\n")
    (tmp_path / "bin" / "pulumi").chmod(0o755)
    (tmp_path / "inner").mkdir()
    (tmp_path / "Pulumi.yaml").write_text("name: x\nruntime: python\nbackend: {url: 'file:///elsewhere'}\n")
    (tmp_path / "Pulumi.yaml").chmod(0o666)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "inner")

    with pytest.raises(Untrusted, match=r"Pulumi\.yaml"):
        find_stack("dev")

    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("variable", ["XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "RUNTIME_DATA_DIR"])
def test_folder_of_the_user_that_is_another_user_s_is_refused(tmp_path: Path, variable: str) -> None:
    folder = tmp_path / "research-runtime"
    folder.mkdir()
    give_away(folder)
    environ = {variable: str(folder if variable == "RUNTIME_DATA_DIR" else tmp_path)}

    with pytest.raises(Untrusted) as refused:
        load_settings(environ, tmp_path)

    assert refused.value.path == str(folder)


@pytest.mark.parametrize("name", ["data", "research-runtime"])
def test_data_folder_that_somebody_named_keeps_its_mode_and_is_refused_if_everybody_can_write(
    tmp_path: Path, name: str
) -> None:
    folder, environ = tmp_path / name, {"RUNTIME_DATA_DIR": str(tmp_path / name)}
    folder.mkdir()
    folder.chmod(0o2770)
    assert not load_settings(environ, tmp_path).keeps_data_private
    folder.chmod(0o755)
    assert load_settings(environ, tmp_path).keeps_data_private

    folder.chmod(0o777)
    with pytest.raises(Untrusted):
        load_settings(environ, tmp_path)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o777


def test_folder_behind_a_link_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere").chmod(0o755)
    (tmp_path / "research-runtime").symlink_to(tmp_path / "elsewhere")

    load_settings({"XDG_CACHE_HOME": str(tmp_path)}, tmp_path)

    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o755


def test_folders_of_the_user_are_closed_to_others_when_they_are_found_open(tmp_path: Path) -> None:
    environ = {name: str(tmp_path / name) for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")}
    folders = [tmp_path / name / "research-runtime" for name in environ]
    for each in folders:
        each.mkdir(parents=True)
        each.chmod(0o775)

    load_settings(environ, tmp_path)

    assert {stat.S_IMODE(each.stat().st_mode) for each in folders} == {0o700}


def test_remembered_stack_is_private_and_another_user_s_is_refused(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    path = remember_stack("dev", load_settings(environ, tmp_path))

    assert load_settings(environ, tmp_path).stack == "dev"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]

    path.chmod(0o666)
    with pytest.raises(Untrusted):
        load_settings(environ, tmp_path)


def test_cached_contract_is_private_and_another_user_s_is_not_read(tmp_path: Path) -> None:
    settings = load_settings({"XDG_CACHE_HOME": str(tmp_path)}, tmp_path)
    remember(find_stack("local", settings=settings), settings)
    path = cache_path("local", settings)
    assert read_cache("local", settings)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent, path.parents[1])] == [0o600, 0o700, 0o700]

    path.chmod(0o666)
    assert read_cache("local", settings) is None


def test_private_folder_is_the_named_one_and_closed_to_others(tmp_path: Path) -> None:
    path = str(tmp_path / "mine")

    assert file_trust.private_folder(path) == path
    Path(path).chmod(0o777)
    assert file_trust.private_folder(path) == path
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "pipe", "stranger's"])
def test_private_folder_whose_name_is_taken_gets_another_and_the_same_one_again(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine"
    (tmp_path / "mine-0").symlink_to(tmp_path)
    if kind == "link":
        path.symlink_to(tmp_path)
    elif kind == "file":
        path.touch()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
        give_away(path)

    found = file_trust.private_folder(str(path))

    assert found.startswith(f"{path}-")
    assert found != f"{path}-0"
    assert stat.S_IMODE(Path(found).stat().st_mode) == 0o700
    assert file_trust.private_folder(str(path)) == found


class Swapped:
    """Removes a file as soon as it was opened, like a user who watches the folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self._file, self._open = file, os.open
        monkeypatch.setattr(os, "open", self)

    def __call__(self, path: str, flags: int, mode: int = 0o777) -> int:
        opened = self._open(path, flags, mode)
        if path == str(self._file):
            self._file.unlink()
        return opened


def test_project_file_that_is_removed_while_it_is_read_is_judged_by_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runtime.toml"
    file.write_text('stack = "theirs"\n')
    file.chmod(0o666)
    Swapped(monkeypatch, file)

    with pytest.raises(Untrusted) as refused:
        load_project(tmp_path)

    assert refused.value.path == str(file)


def test_env_file_that_is_removed_while_it_is_read_sets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secrets.env"
    file.write_text("THEIRS=1\n")
    file.chmod(0o666)
    (tmp_path / "runtime.toml").write_text('env_files = ["secrets.env"]\n')
    project = load_project(tmp_path)
    Swapped(monkeypatch, file)

    with pytest.raises(Untrusted):
        workflows.prepare_process(project)

    assert "THEIRS" not in os.environ


@pytest.mark.parametrize("name", ["runtime.toml", "pyproject.toml"])
def test_project_file_larger_than_any_settings_is_refused_or_passed_over_without_being_read(
    tmp_path: Path, name: str
) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)

    if name == "pyproject.toml":
        assert load_project(tmp_path).file is None
    else:
        with pytest.raises(RequestRefused, match="too large"):
            load_project(tmp_path)
