"""Messages of `scripts/kubernetes` for things it cannot do; the tests that use it cover the rest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kubernetes"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")


class Machine:
    """A machine with the programs of a test, and those of every Linux."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.cache = folder / "programs", folder / "cache"
        self.programs.mkdir()

    def has(self, *names: str, says: str = "") -> None:
        for name in names:
            (self.programs / name).write_text(f"#!/bin/sh\necho {says}\n")
            (self.programs / name).chmod(0o755)

    def has_built(self) -> None:
        folder = self.cache / version() / "bin"
        folder.mkdir(parents=True)
        for name in PROGRAMS:
            (folder / name).touch(mode=0o755)

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        basics = self.programs.parent / "basics"
        if not basics.exists():
            basics.mkdir()
            for name in ("bash", "basename", "cat", "cut", "dirname", "env", "id", "ls", "mkdir", "rm", "sed", "tr"):
                (basics / name).symlink_to(
                    next(path for path in (Path("/bin", name), Path("/usr/bin", name)) if path.exists())
                )
        return subprocess.run(
            ["bash", str(SCRIPT), *args],
            env={"PATH": f"{self.programs}:{basics}", "HOME": "/nowhere", "RUNTIME_KUBERNETES_CACHE": str(self.cache)},
            capture_output=True,
            text=True,
            check=False,
        )


def version() -> str:
    return next(line.split("=")[1] for line in SCRIPT.read_text().splitlines() if line.startswith("version="))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_help_names_every_command(machine: Machine) -> None:
    said = machine.run("--help")

    assert said.returncode == 0
    assert all(
        f"scripts/kubernetes {each}" in said.stdout
        for each in ("install", "build", "start", "import", "stop", "status")
    )
    assert "set -euo" not in said.stdout


def test_unknown_command_is_refused_with_those_there_are(machine: Machine) -> None:
    said = machine.run("begin")

    assert said.returncode == 2
    assert said.stderr == (
        "error: no command `begin`\n"
        "  known: install, build, start, stop, status, import\n"
        "hint: scripts/kubernetes --help\n"
    )


def test_build_without_go_says_how_to_get_it(machine: Machine) -> None:
    said = machine.run("build")

    assert said.returncode == 2
    assert said.stderr.startswith(f"error: cannot build Kubernetes {version()}: no `go` on PATH\n")
    assert "hint: install Go 1.24 or newer from https://go.dev/dl" in said.stderr


def test_build_of_what_is_built_returns_at_once(machine: Machine) -> None:
    machine.has_built()

    said = machine.run("build")

    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == f"kubernetes: {version()} is built, in {machine.cache}/{version()}/bin\n"


def test_install_without_apt_names_what_is_missing(machine: Machine) -> None:
    said = machine.run("install")

    assert said.returncode == 2
    assert "etcd-server" in said.stderr
    assert "this machine has no `apt-get`" in said.stderr


def test_start_without_packages_names_the_command_that_installs_them(machine: Machine, tmp_path: Path) -> None:
    machine.has("openssl", "curl")

    said = machine.run("start", str(tmp_path / "new"))

    assert said.returncode == 2
    assert said.stderr == (
        "error: cannot start Kubernetes: this machine lacks etcd-server\nhint: scripts/kubernetes install\n"
    )
    assert not (tmp_path / "new").exists()


def test_start_before_it_is_built_names_the_command_that_builds(machine: Machine, tmp_path: Path) -> None:
    machine.has("etcd", "openssl", "curl")

    said = machine.run("start", str(tmp_path / "new"))

    assert said.returncode == 2
    assert f"error: Kubernetes {version()} is not built" in said.stderr
    assert "hint: scripts/kubernetes build" in said.stderr


def test_node_without_root_is_refused_with_what_works_instead(machine: Machine, tmp_path: Path) -> None:
    machine.has("etcd", "openssl", "curl")
    machine.has("id", says="1000")
    machine.has_built()

    said = machine.run("start", str(tmp_path / "new"))

    assert said.returncode == 2
    assert said.stderr.startswith("error: a node needs root: ")
    assert f"scripts/kubernetes start --control-plane-only {tmp_path}/new" in said.stderr


def test_start_in_a_folder_with_files_is_refused_and_leaves_them(machine: Machine, tmp_path: Path) -> None:
    machine.has("etcd", "openssl", "curl")
    machine.has_built()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()

    said = machine.run("start", "--control-plane-only", str(tmp_path / "mine"))

    assert said.returncode == 2
    assert said.stderr.startswith(f"error: the folder {tmp_path}/mine is not empty\n")
    assert (tmp_path / "mine" / "thesis.tex").exists()


@pytest.mark.parametrize("args", [("start",), ("start", "--control-plane-only"), ("start", "--fast", "x"), ("stop",)])
def test_command_without_its_folder_is_refused(machine: Machine, args: tuple[str, ...]) -> None:
    said = machine.run(*args)

    assert said.returncode == 2
    assert said.stderr.startswith("error: `")


def test_stop_of_a_folder_that_is_not_ours_removes_nothing(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()

    said = machine.run("stop", str(tmp_path / "mine"))

    assert said.returncode == 2
    assert said.stderr.startswith(f"error: {tmp_path}/mine is no folder of a Kubernetes of ours\n")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_stop_of_what_is_gone_is_no_error(machine: Machine, tmp_path: Path) -> None:
    said = machine.run("stop", str(tmp_path / "gone"))

    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_import_without_a_node_names_the_command_that_starts_one(machine: Machine, tmp_path: Path) -> None:
    said = machine.run("import", str(tmp_path), "image.tar")

    assert said.returncode == 2
    assert said.stderr == f"error: no node runs in {tmp_path}\nhint: scripts/kubernetes start {tmp_path}\n"


def test_status_says_what_is_missing_and_what_is_built(machine: Machine) -> None:
    before = machine.run("status").stdout
    machine.has_built()
    after = machine.run("status").stdout

    assert before.splitlines()[0].startswith("packages: missing etcd-server openssl curl ")
    assert before.splitlines()[1] == f"kubernetes {version()}: not built"
    assert after.splitlines()[1] == f"kubernetes {version()}: built, in {machine.cache}/{version()}/bin"
