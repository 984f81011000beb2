"""What starts of the shim leave compiled on a machine, and which of it a later start believes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.shim.bundle import build_shim
from runtime.shim.compiled import keep_code, name_folder, read_code
from tests.owners_support import give_away
from tests.shim_support import IMPORT, SHIM, find_pythons

PROGRAM = re.findall(r"^PROGRAM = '(.*)'$", build_shim().decode(), re.MULTILINE)[0]
MAIN = "runtime.shim.main"
OTHER = compile("def main(words):\n    print('kept')\n    return 0\n", "other", "exec")
"""Code in the place of a module, by which a test sees that it was taken."""
USAGE = "usage: shim.py"


def start(temporary: Path, *, python: str = sys.executable, options: tuple[str, ...] = (), **environ: str) -> str:
    """Ask the shim for its usage; returns the first words that it prints."""
    words = [python, *options, str(SHIM), "--help"]
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(temporary), **environ}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout[: len(USAGE)].strip()


def list_kept(temporary: Path) -> list[str]:
    return sorted(path.name for path in temporary.glob(f"research-runtime-*/shim-{PROGRAM}-*/*"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this Python in a temporary folder that no start has used."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Path(name_folder(PROGRAM))


@pytest.mark.parametrize("version", sorted(find_pythons()))
def test_start_takes_what_an_earlier_one_has_compiled(version: str, tmp_path: Path) -> None:
    python = find_pythons()[version]

    assert start(tmp_path, python=python) == USAGE

    (folder,) = tmp_path.glob("research-runtime-*/shim-*")
    assert {MAIN, "runtime.shim.record", "runtime.faults"} <= {path.name for path in folder.iterdir()}
    text = f"{IMPORT}from runtime.shim.compiled import keep_code\n"
    text += f"keep_code({str(folder)!r}, {MAIN!r}, compile('def main(words): print(1.5)', 'other', 'exec'))"
    subprocess.run([python, "-c", text], check=True)
    assert start(tmp_path, python=python) == "1.5"


def test_what_is_kept_is_this_users_alone(tmp_path: Path) -> None:
    start(tmp_path, options=("-X", "utf8"))

    kept = [tmp_path / f"research-runtime-{os.geteuid()}", *tmp_path.rglob("shim-*"), *tmp_path.rglob("runtime.*")]
    assert len(kept) > 10
    assert {path.stat().st_mode & 0o077 for path in kept} == {0}


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_a_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def take_from_another_module(path: Path) -> None:
    keep_code(str(path.parent), "runtime.shim.other", OTHER)
    path.with_name("runtime.shim.other").rename(path)


def take_from_another_shim(path: Path) -> None:
    other = path.parent.with_name(path.parent.name.replace(PROGRAM, "0" * 16))
    keep_code(str(other), path.name, OTHER)
    (other / path.name).rename(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o620),
        lambda path: path.chmod(0o602),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(4096)),
        replace_by_link,
        replace_by_folder,
        replace_by_pipe,
        cut,
        change_a_byte,
        take_from_another_module,
        take_from_another_shim,
    ],
)
def test_file_that_another_may_have_written_or_that_is_not_whole_is_not_run(
    spoil: Callable[[Path], None], folder: Path, tmp_path: Path
) -> None:
    keep_code(str(folder), MAIN, OTHER)
    assert start(tmp_path) == "kept"

    spoil(folder / MAIN)

    assert start(tmp_path) == USAGE


@pytest.mark.parametrize("what", ["file", "folder", "private folder"])
def test_what_belongs_to_another_user_is_neither_run_nor_written(what: str, folder: Path, tmp_path: Path) -> None:
    keep_code(str(folder), MAIN, OTHER)
    give_away({"file": folder / MAIN, "folder": folder, "private folder": folder.parent}[what])
    if what != "file":
        (folder / MAIN).unlink()

    assert start(tmp_path) == USAGE

    if what != "file":
        assert list_kept(tmp_path) == []


def test_another_level_of_optimisation_has_code_of_its_own(folder: Path, tmp_path: Path) -> None:
    keep_code(str(folder), MAIN, OTHER)

    assert start(tmp_path, options=("-O",)) == USAGE

    assert len(list(folder.parent.iterdir())) == 2


def test_start_that_may_write_no_byte_code_leaves_none_and_takes_what_is_there(folder: Path, tmp_path: Path) -> None:
    assert start(tmp_path, PYTHONDONTWRITEBYTECODE="1") == USAGE
    assert list_kept(tmp_path) == []

    keep_code(str(folder), MAIN, OTHER)
    assert start(tmp_path, PYTHONDONTWRITEBYTECODE="1") == "kept"


def test_start_needs_no_temporary_folder(tmp_path: Path) -> None:
    assert start(tmp_path / "missing") == USAGE
    (tmp_path / "file").touch()
    assert start(tmp_path / "file") == USAGE


def test_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        keep_code(str(folder), MAIN, OTHER)

    assert list(folder.iterdir()) == []
    assert read_code(str(folder), MAIN) is None


def test_name_that_a_killed_start_left_keeps_no_other_from_starting(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / f"{MAIN}.{os.getpid()}").touch()

    keep_code(str(folder), MAIN, OTHER)

    assert not (folder / MAIN).exists()


def test_starts_at_once_all_come_to_their_work(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    words = [sys.executable, str(SHIM), "--help"]
    started = [subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]

    assert {each.communicate()[0][: len(USAGE)] for each in started} == {USAGE}

    assert start(tmp_path) == USAGE
    assert [name for name in list_kept(tmp_path) if name.rpartition(".")[2].isdigit()] == []
