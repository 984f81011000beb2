"""A project with one module, in the working directory, and workers of the built-in stack, for tests of experiments."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.services_support import PATIENCE_S
from tests.shim_support import processes_with, signal_all


@contextmanager
def open_lab(name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the module, which no other test may have under this name."""
    folder = tmp_path / "project"
    folder.mkdir()
    # Equal trees make equal jobs, and a shim kills leftovers of its job anywhere on the machine, even another test's.
    (folder / "salt").write_bytes(os.urandom(12))
    (folder / "runtime.toml").write_text("")
    (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module(name)
    del sys.modules[name]
    signal_all(processes_with(str(tmp_path)))


@contextmanager
def open_workers() -> Iterator[Callable[[], None]]:
    """Yield a function that starts a worker of the built-in stack."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        words = [sys.executable, "-m", "runtime", "worker", "--slots", "2"]
        started.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    yield start
    for each in started:
        each.terminate()
        each.wait(PATIENCE_S)
