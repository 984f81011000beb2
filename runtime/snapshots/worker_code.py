"""The code that a worker runs for tasks that bring none: a commit, or a digest of the sources.

The record of a task with a snapshot names that snapshot. The record of any other task names what this module finds: the
package of the task's module if it is installed on the worker, otherwise the folder that the worker was started in.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from runtime.shim.tree_walk import walk
from runtime.tasks.model import CommandEntry, Entry, FunctionEntry

_MOST_FILES: Final = 5_000
_MOST_PACKAGES: Final = 100
"""Foreign messages may name any module."""
_LONGEST_WAIT_S: Final = 2.0


class CodeIdentity:
    """Looks beside the worker's loop, which waits for an answer at most two seconds."""

    def __init__(self, folder: Path, packages: Sequence[str] = ()) -> None:
        """`packages` are those under which workflows are looked for, after their project's own name."""
        self._folder, self._packages = folder.resolve(), packages
        self._threads: dict[str, threading.Thread] = {}
        self._found: dict[str, str | None] = {}
        self._start("")

    def begin(self, entry: Entry) -> str:
        """Start to look for the code of a task that will ask for it with `of`; returns the package that is looked for."""
        package = _package_of(entry)
        if package not in self._threads:
            if len(self._threads) > _MOST_PACKAGES:
                return ""
            self._start(package)
        return package

    def of(self, entry: Entry) -> str | None:
        """Return `git:<commit>`, with `+dirty` if the tree differs from it; without git `sha256:<digest>` of the Python
        files; None if neither is found in time."""
        package = self.begin(entry)
        if package not in self._found:
            self._threads[package].join(_LONGEST_WAIT_S)
        return self._found.get(package)

    def _start(self, package: str) -> None:
        def look() -> None:
            self._found[package] = self._look(package)

        thread = self._threads[package] = threading.Thread(target=look, name="code-identity", daemon=True)
        thread.start()

    def _look(self, package: str) -> str | None:
        """Return the identity of a package, or of the folder if it is none or lies there."""
        place = self._folder
        for name in (package, *self._packages) if package else ():
            found = _find_package(name, self._folder)
            if found is not None and {"site-packages", "dist-packages"} & set(found.parts):
                return _find_installed_commit(name) or digest_sources(found)
            if found is not None:
                place = self._folder if found.is_relative_to(self._folder) else found
                break
        return find_commit(place) or digest_sources(place)


def _package_of(entry: Entry) -> str:
    """Return the top-level package that a task names; empty for a command."""
    if isinstance(entry, CommandEntry):
        return ""
    name = entry.function.partition(":")[0] if isinstance(entry, FunctionEntry) else entry.project
    return name.partition(".")[0]


def _find_package(name: str, folder: Path) -> Path | None:
    try:
        spec = importlib.machinery.PathFinder.find_spec(name, [str(folder), *sys.path])
        spec = spec or importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    place = places[0] if places else spec.origin if spec.has_location else None
    return Path(place).resolve() if place else None


def _find_installed_commit(package: str) -> str | None:
    """Return the commit that a package was installed from, as `pip install git+…` records it."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(package.replace("_", "-"))
        said = json.loads(found.read_text("direct_url.json") or "{}")
        owns = any(each.parts[0] in (package, f"{package}.py") for each in found.files or () if each.parts)
        commit = said.get("vcs_info", {}).get("commit_id")
    except (PackageNotFoundError, OSError, ValueError, AttributeError):
        return None
    return f"git:{commit}" if owns and isinstance(commit, str) else None


def find_commit(place: Path) -> str | None:
    """Return the commit of the work tree that a folder or file lies in; None outside of a work tree, or without git."""
    folder = place if place.is_dir() else place.parent
    commit = ask_git(folder, "describe", "--always", "--dirty=+dirty", "--abbrev=40", "--exclude=*")
    return None if commit is None else f"git:{commit}"


def ask_git(folder: Path, *args: str) -> str | None:
    """Return the output of git; None if it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args],
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            # Never take the index lock of a tree that its owner works in.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def digest_sources(place: Path) -> str | None:
    """Digest path and bytes of a file, or of every Python file in a folder; None if it has none, or more than 5,000."""
    folder = place if place.is_dir() else place.parent
    paths = [place] if place.is_file() else list(itertools.islice(_find_sources(folder), _MOST_FILES + 1))
    if not paths or len(paths) > _MOST_FILES:
        return None
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(paths):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return f"sha256:{digest.hexdigest()}"


def _find_sources(folder: Path) -> Iterator[Path]:
    for root, folders, names in walk(str(folder)):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(root) / name for name in names if name.endswith(".py"))
