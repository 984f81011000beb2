"""Values of a stack file that readers of YAML take differently, and files that no program can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.check.check import check_stack
from infra.cli import main
from infra.settings.files import InvalidStackFile, find_project_folder, load_stack_config
from runtime.errors import Untrusted
from runtime.file_trust import TRUST
from tests.infra.conftest import Project
from tests.owners_support import give_away


def refused(folder: Path, text: str) -> str:
    file = folder / "Pulumi.x.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidStackFile) as said:
        load_stack_config(file)
    return said.value.problem


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("0200", "write `128`"),
        ("-010", "write `-8`"),
        ("+5", "write `5`"),
        ("1_000", "write `1000`"),
        ("0x10", "write `16`"),
        ("0b11", "write `3`"),
        ("1:30", "write `90`"),
        ("0o17", "write a plain decimal number"),
        ("1e3", "write a plain decimal number"),
        ("1.5e+3", "write a plain decimal number"),
        ("12e4", "write a plain decimal number"),
        (".5", "write a plain decimal number"),
        (".nan", "write a plain decimal number"),
        ("yes", "write `true`"),
        ("No", "write `false`"),
        ("on", "write `true`"),
        ("OFF", "write `false`"),
        ("True", "write `true`"),
    ],
)
@pytest.mark.parametrize("place", ["config:\n  a: {}\n", "config:\n  a: {{b: [{}]}}\n", "config:\n  a: {{{}: b}}\n"])
def test_value_that_is_not_the_same_to_every_reader_is_refused_with_what_to_write(
    tmp_path: Path, place: str, written: str, right: str
) -> None:
    said = refused(tmp_path, place.format(written))
    assert "line 2, column " in said
    assert f'`{written}` is not the same value to every reader of YAML; {right}, or `"{written}"` for a text' in said


@pytest.mark.parametrize(
    "written",
    ["200", "-3", "0", "1.5", "true", "false", "10.64.0.0/20", '"0200"', "'yes'", "v5e", "e3", "~", "12-e", "0a", "y"],
)  # fmt: skip
def test_value_that_is_the_same_to_every_reader_is_read(tmp_path: Path, written: str) -> None:
    file = tmp_path / "Pulumi.x.yaml"
    file.write_text(f"config:\n  a: {{b: {written}}}\n", encoding="utf-8")
    assert set(load_stack_config(file).values) == {"research-runtime:a"}


def test_merge_of_keys_is_refused_with_its_place(tmp_path: Path) -> None:
    text = "config:\n  a: &common {min: 1}\n  b:\n    <<: *common\n    max: 2\n"
    said = refused(tmp_path, text)
    assert "line 4, column 5: the key `<<` takes over the keys of another object" in said
    assert "repeat them here" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config:\n  a: &a [*a]\n", "has something under `a` that the engine cannot pass on"),
        ("config:\n  a: {2026-01-02: b}\n", 'write `"2026-01-02"`'),
        ("config:\n  a: {b: 2026-01-02}\n", 'write `"2026-01-02"`'),
        ("config:\n  zone: b\n  research-runtime:zone: c\n", "has the key `zone` twice"),
        (
            "config:\n  a: &a0 [1, 2]\n"
            + "".join(f"  b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)),
            "has anchors that stand for more than 100,000 values",
        ),
        ("config:\n  a: {[b]: c}\n", "is no valid YAML"),
        (f"config:\n  a: {'[' * 5000}{']' * 5000}\n", "is nested too deeply"),
        (f"config:\n  a: {'9' * 5000}\n", "has a value that cannot be read"),
        ("config:\n  a: 2026-13-40\n", "has a value that cannot be read"),
        ("config:\n  a: !!python/object:os.system b\n", "is no valid YAML"),
        ("config:\n  a: =\n", "is no valid YAML"),
        ("config: 0\n", "has `0` under `config`"),
        ("config: []\n", "has a list under `config`"),
        ("config: ''\n", "has a text under `config`"),
    ],
    ids=[
        "itself",
        "date-key",
        "date",
        "twice",
        "anchors",
        "list-key",
        "deep",
        "long-number",
        "no-date",
        "tag",
        "equals",
        "zero",
        "list",
        "text",
    ],
)
def test_file_that_no_program_can_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


@pytest.mark.parametrize(
    "written",
    ['!!bool "no"', '!!int "190:20"', "!!str 5", "!!set {a, b}", "!!binary YQ==", "!!map {}", "!own 1", "! a"],
)
def test_tag_that_makes_another_value_is_refused_with_its_place(tmp_path: Path, written: str) -> None:
    said = refused(tmp_path, f"config:\n  a: {{b: {written}}}\n")
    assert f"line 2, column 10: the tag `{written.split(maxsplit=1)[0]}` makes another value" in said


SALT = "v1:RGVoSU9SUmU=:v1:YWJjZGVmZ2hpamts:c2VjcmV0c2VjcmV0"


@pytest.mark.parametrize("salt", ["v1:abc", "", "12", SALT[3:], SALT.replace("v1", "v2"), SALT[:-1] + "#", SALT[:20]])
def test_damaged_salt_is_refused_before_the_engine_meets_it(tmp_path: Path, salt: str) -> None:
    assert "has a damaged `encryptionsalt`" in refused(tmp_path, f"encryptionsalt: {salt!r}\nconfig: {{}}\n")


def test_whole_salt_is_read(tmp_path: Path) -> None:
    file = tmp_path / "Pulumi.x.yaml"
    file.write_text(f"encryptionsalt: {SALT}\nconfig: {{a: 1}}\n", encoding="utf-8")
    assert set(load_stack_config(file).values) == {"research-runtime:a"}


def test_settings_from_elsewhere_that_no_check_sees_are_refused(tmp_path: Path) -> None:
    assert "names an `environment`" in refused(tmp_path, "environment:\n- lab/dev\nconfig: {}\n")


@pytest.mark.parametrize(
    "text",
    ["config:\n  \"a\\x1b]0;x\\x07\": 1\n  b: [\n", "\"\\x1b[2J\": 1\n", "config: {\"\\x9b1A\": 1, \"\\x9b1A\": 2}\n"],
)  # fmt: skip
@pytest.mark.parametrize("more", [[], ["-o", "json"]])
def test_nothing_in_a_stack_file_commands_the_terminal(
    project: Project, text: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    project.write_text("dev", text)
    assert main(["check", "--all", "--folder", str(project.folder), *more]) == 2
    said = capsys.readouterr()
    assert [char for char in said.out + said.err if not (char.isprintable() or char == "\n")] == []


def test_name_of_a_resource_that_holds_an_escape_is_shown_spelled(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.copy("phoebe", lambda config: config["kubernetes"]["phoebe"].update(context="a\x1b]0;x\x07"))
    main(["check", "--stack", "phoebe", "--folder", str(project.folder)])
    assert "\x1b" not in "".join(capsys.readouterr())


# whose folder it is


def test_project_of_another_user_further_up_is_refused_unless_it_is_named(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = project.folder / "below"
    below.mkdir()
    give_away(project.folder / "Pulumi.yaml")
    monkeypatch.chdir(below)

    with pytest.raises(Untrusted):
        find_project_folder()
    with pytest.raises(Untrusted):
        find_project_folder(below)
    assert find_project_folder(project.folder) == project.folder
    monkeypatch.setenv(TRUST, str(project.folder))
    assert find_project_folder() == project.folder


def test_project_that_everybody_can_write_is_refused_unless_it_is_named(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project.copy("dev")
    os.chmod(project.folder / "Pulumi.yaml", 0o666)  # noqa: PTH101
    monkeypatch.chdir(project.folder)
    assert main(["check", "--all"]) == 2
    assert f"--folder {project.folder}" in capsys.readouterr().err
    assert check_stack("dev", folder=project.folder).ok
