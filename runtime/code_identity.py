"""Which code a worker runs: the commit it stands on, or a digest of its sources.

A task that names a snapshot is bound to that; for any other its record names what this module finds.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MOST_FILES: Final = 5_000
_LONGEST_WAIT_S: Final = 2.0


class CodeIdentity:
    """Looked up beside the start of the worker; `value` waits for it at most two seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._value: str | None = None
        self._thread = threading.Thread(target=self._look, name="code-identity", daemon=True)
        self._thread.start()

    @property
    def value(self) -> str | None:
        """`git:<commit>`, with `+dirty` where the tree differs from it, `sha256:<digest>` of the Python files
        elsewhere, or None where neither is to be had in time."""
        if self._value is None:
            self._thread.join(_LONGEST_WAIT_S)
        return self._value

    def _look(self) -> None:
        self._value = find_commit(self._folder) or digest_sources(self._folder)


def find_commit(folder: Path) -> str | None:
    """None outside a git work tree, or without git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+dirty", "--abbrev=40", "--exclude=*"],
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            # Never take the index lock of a tree that its owner works in.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except OSError:
        return None
    return f"git:{done.stdout.strip()}" if done.returncode == 0 else None


def digest_sources(folder: Path) -> str | None:
    """Over path and bytes of every Python file below; None if there are none, or more than 5,000."""
    paths = list(itertools.islice(_find_sources(folder), _MOST_FILES + 1))
    if not paths or len(paths) > _MOST_FILES:
        return None
    digest = hashlib.sha256()
    for path in sorted(paths):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return f"sha256:{digest.hexdigest()}"


def _find_sources(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(root) / name for name in names if name.endswith(".py"))
