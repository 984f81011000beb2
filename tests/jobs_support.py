"""Jobs on this machine for tests of the verbs: a data folder, a work tree, and a helper that runs commands as typed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from runtime.jobs import run_config
from tests.shim_support import processes_with, signal_all, wait_for


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """Make a folder that other users may enter; each start of pytest closes pytest's own folder to them again."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def as_somebody_else(root: Path, *, hidden: str, shown: str = "") -> Iterator[None]:
    """View a record root as a user other than the owner of the folder `hidden`; `shown` is that user's own folder.

    The root lies in a `folder_for_all`.
    """
    if os.geteuid() != 0:
        (root / hidden).chmod(0)
        yield
        (root / hidden).chmod(0o700)
        return
    for folder in ((root / hidden).parent, root, *root.parents):
        if folder.is_relative_to(tempfile.gettempdir()) and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    for path in (root / shown, *(root / shown).rglob("*")) if shown else ():
        os.chown(path, 12345, 12345)
    os.seteuid(12345)
    try:
        yield
    finally:
        os.seteuid(0)


def launch_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch all later jobs of this machine as versions without folding did."""
    make = run_config.make_order
    monkeypatch.setattr("runtime.launchers.processes.base.make_order", lambda *a, **k: {**make(*a, **k), "fold": False})


@dataclass
class Typed:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Terminal:
    """Runs `runtime …` as typed in a work tree with its own data folder."""

    tree: Path
    data: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> Typed:
        self.capsys.readouterr()
        code = main(list(words))
        said = self.capsys.readouterr()
        return Typed(code, said.out, said.err)

    def launch(self, script: str, *words: str) -> str:
        """Launch a job that runs `script` in a shell; return its id."""
        said = self("launch", "--on", "local", *words, "--", "sh", "-c", script)
        assert said.code == 0, said.err
        return said.out.strip()

    def finish(self, script: str, *words: str) -> str:
        job = self.launch(script, *words)
        self.wait(job)
        # The job's shim lives a moment longer than its result exists; until then the job must not be collected.
        wait_for(lambda: not processes_with(str(self.folder(job))), f"the end of the shim of {job}")
        return job

    def wait(self, job: str, *states: str) -> None:
        wanted = states or ("succeeded", "failed", "cancelled")
        wait_for(lambda: self("status", job, "-o", "json").json["state"] in wanted, f"{wanted} of {job}")

    def folder(self, job: str) -> Path:
        return self.data / "jobs" / "jobs" / job


@contextmanager
def open_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Terminal]:
    tree = tmp_path / "tree"
    tree.mkdir()
    # Equal trees make equal jobs, and a shim kills leftovers of its job anywhere on the machine, even another test's.
    (tree / "salt").write_bytes(os.urandom(12))
    (tree / "main.py").write_text("print('hello')\n")
    monkeypatch.chdir(tree)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    try:
        yield Terminal(tree, tmp_path / "data", capsys)
    finally:
        signal_all(processes_with(str(tmp_path)))
