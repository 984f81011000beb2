"""`scripts/set-up` finds a suitable Python, or names the packages to install."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder that serves as a machine's whole PATH, with basic shell tools and no Python."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "rm", "env", "sh"):
        (programs / name).symlink_to(shutil.which(name) or name)
    return programs


def add_python(machine: Path, name: str, version: str, *, has_venv: bool = True) -> None:
    """Write a stand-in that answers the script's three questions, and fails at `-m`."""
    is_new = tuple(map(int, version.split("."))) >= (3, 11)
    fake = machine / name
    fake.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f"  *'%d.%d'*) echo {version} ;;\n"
        f"  *'< (3, 11)'*) exit {0 if is_new else 1} ;;\n"
        f"  *ensurepip*) exit {0 if has_venv else 1} ;;\n"
        f'  *) echo "made with {name}" >&2; exit 9 ;;\n'
        "esac\n"
    )
    fake.chmod(0o755)


def set_up(machine: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts/set-up"), str(folder), "locks/dev.txt"],
        env={"PATH": str(machine)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_set_up_without_any_python_says_what_to_install(machine: Path, tmp_path: Path) -> None:
    add_python(machine, "python3", "3.9")

    done = set_up(machine, tmp_path / "venv")

    assert done.returncode == 2
    assert done.stderr.startswith("error: no Python 3.11 or newer was found\n")
    assert "  python3 is Python 3.9\n" in done.stderr
    assert "hint: sudo apt-get install python3 python3-venv" in done.stderr


def test_set_up_with_a_python_that_lacks_venv_names_the_package(machine: Path, tmp_path: Path) -> None:
    add_python(machine, "python3", "3.12", has_venv=False)

    done = set_up(machine, tmp_path / "venv")

    assert done.returncode == 2
    assert "Python 3.12 lacks the modules `venv` and `ensurepip`" in done.stderr
    assert done.stderr.endswith("hint: sudo apt-get install python3.12-venv\n")


def test_set_up_passes_over_a_python_that_will_not_do(machine: Path, tmp_path: Path) -> None:
    add_python(machine, "python3", "3.9")
    add_python(machine, "python3.13", "3.13", has_venv=False)
    add_python(machine, "python3.12", "3.12")

    done = set_up(machine, tmp_path / "venv")

    assert "with python3.12 " in done.stderr
    assert "made with python3.12\n" in done.stderr
