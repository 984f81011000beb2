"""New values of secrets from the machine's own file."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.launchers.ray import node, secret_rotation
from runtime.launchers.ray.secret_rotation import read_rotated

VALUE = 'it\'s $HOME `id` "x" \\n # no\nsecond line = é'


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_file_of_exports_is_read_as_a_shell_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path / "env", f"export A={shlex.quote(VALUE)}\nexport B=''\nexport C=plain\n")

    said = subprocess.run(
        ["bash", "-c", f'set -a; . {path}; exec "$0" -c \'import os; print(repr(os.environ["A"]))\'', sys.executable],
        capture_output=True,
        text=True,
        check=True,
    )

    assert read_rotated(path, owner=os.getuid()) == {"A": VALUE, "B": "", "C": "plain"}
    assert said.stdout == repr(VALUE) + "\n"


@pytest.mark.parametrize(
    "text", ["A=1\n", "export A\n", "export 'open\n", "export A=1 B=2\n", "export 1=2\n", "rm -rf /"]
)
def test_text_of_another_form_gives_nothing(tmp_path: Path, text: str) -> None:
    assert read_rotated(write(tmp_path / "env", text), owner=os.getuid()) == {}


def test_file_that_another_user_could_have_written_gives_nothing(tmp_path: Path) -> None:
    good = "export A=1\n"
    link = tmp_path / "link"
    link.symlink_to(write(tmp_path / "env", good))
    mine = os.getuid()

    assert read_rotated(str(tmp_path / "env"), owner=mine + 1) == {}
    assert read_rotated(str(link), owner=mine) == {}
    assert read_rotated(str(tmp_path), owner=mine) == {}
    assert read_rotated(str(tmp_path / "missing"), owner=mine) == {}
    for mode in (0o620, 0o602):
        assert read_rotated(write(tmp_path / "env", good, mode), owner=mine) == {}
    assert read_rotated(write(tmp_path / "env", good, 0o640), owner=mine) == {"A": "1"}


def test_next_attempt_has_the_new_value_and_its_own_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "env"
    monkeypatch.setattr(node, "read_rotated", lambda: secret_rotation.read_rotated(str(file), owner=os.getuid()))
    for name in ("TOKEN", "RUNTIME_ADDRESS", "KEPT"):
        monkeypatch.setenv(name, "old")
    root = tmp_path / "jobs/j-1"
    root.mkdir(parents=True)
    shim = b"import os; print([os.environ[name] for name in ('TOKEN', 'RUNTIME_ADDRESS', 'KEPT')])"

    for value in ("one", "two"):
        write(file, f"export TOKEN={value}\nexport RUNTIME_ADDRESS=stolen\n")
        assert node.Node().run(shim, "j-1", str(tmp_path), [], {"RUNTIME_ADDRESS": "10.0.0.2"}) == 0

    lines = (root / "shim.log").read_text().splitlines()
    assert lines == ["['one', '10.0.0.2', 'old']", "['two', '10.0.0.2', 'old']"]
