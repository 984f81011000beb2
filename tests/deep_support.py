"""Trees of folders that are deeper than Python calls itself, and whose paths are longer than the system takes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.shim.tree_walk import remove_folder

LEVELS = 3000

_MAKE = f"""
import os, sys
os.makedirs(sys.argv[1], exist_ok=True)
os.chdir(sys.argv[1])
open("near", "w").close()
for _ in range({LEVELS}):
    os.mkdir("d")
    os.chdir("d")
open("bottom", "w").close()
"""


def dig(where: str) -> str:
    """Return a line for a shell that makes a deep tree, with a file `near` its top, in the folder `where`."""
    return f'{sys.executable} -c {shlex.quote(_MAKE)} "{where}"'


@pytest.fixture(autouse=True)
def cleared(tmp_path: Path) -> Iterator[None]:
    """Remove the test's folder at its end, which pytest itself cannot do."""
    yield
    assert remove_folder(str(tmp_path)) is None
    tmp_path.mkdir()
