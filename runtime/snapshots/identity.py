"""Which code a worker runs for tasks that bring none: a commit, or a digest of the sources.

A task that carries a snapshot runs that, and its record says so. For any other the record names what this module finds:
where the task's module is installed on the worker, that package; else the folder that the worker was started in.
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

from runtime.tasks.model import CommandEntry, Entry, FunctionEntry

_MOST_FILES: Final = 5_000
_MOST_PACKAGES: Final = 100
"""Foreign messages may name any module."""
_LONGEST_WAIT_S: Final = 2.0


class CodeIdentity:
    """Looked up beside the worker's loop, which waits for an answer at most two seconds."""

    def __init__(self, folder: Path, packages: Sequence[str] = ()) -> None:
        """`packages` are those under which workflows are looked for, after their project's own name."""
        self._folder, self._packages = folder.resolve(), packages
        self._lookups: dict[str, _Lookup] = {}
        self._begin("")

    def begin(self, entry: Entry) -> None:
        """Start to look for the code of a task that will ask for it with `of`."""
        self._begin(_package_of(entry))

    def of(self, entry: Entry) -> str | None:
        """`git:<commit>`, with `+dirty` where the tree differs from it, `sha256:<digest>` of the Python files where
        there is no git, or None where neither is to be had in time."""
        return self._begin(_package_of(entry)).wait()

    def _begin(self, package: str) -> _Lookup:
        known = self._lookups.get(package)
        if known is not None:
            return known
        if len(self._lookups) > _MOST_PACKAGES:
            return self._lookups[""]
        found = self._lookups[package] = _Lookup(self, package)
        return found

    def look(self, package: str) -> str | None:
        """The identity of a package, or of the folder if it is none or lies there."""
        place = self._folder
        for name in (package, *self._packages) if package else ():
            found = _find_package(name, self._folder)
            if found is not None and _is_installed(found):
                return _find_installed_commit(name) or digest_sources(found)
            if found is not None:
                place = self._folder if found.is_relative_to(self._folder) else found
                break
        return find_commit(place) or digest_sources(place)


class _Lookup:
    def __init__(self, identity: CodeIdentity, package: str) -> None:
        self._identity, self._package = identity, package
        self._value: str | None = None
        self._thread = threading.Thread(target=self._look, name="code-identity", daemon=True)
        self._thread.start()

    def wait(self) -> str | None:
        if self._value is None and self._thread.is_alive():
            self._thread.join(_LONGEST_WAIT_S)
        return self._value

    def _look(self) -> None:
        self._value = self._identity.look(self._package)


def _package_of(entry: Entry) -> str:
    """The top of the package that a task names; empty for a command."""
    if isinstance(entry, CommandEntry):
        return ""
    name = entry.function.partition(":")[0] if isinstance(entry, FunctionEntry) else entry.project
    return name.partition(".")[0]


def _find_package(name: str, folder: Path) -> Path | None:
    """Where a top-level module lies: its file, or its folder. Nothing is imported."""
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


def _is_installed(place: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(place.parts))


def _find_installed_commit(package: str) -> str | None:
    """The commit that a package was installed from, as `pip install git+…` writes it down."""
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
    """The commit of the work tree that a folder or file lies in; None outside of one, or without git."""
    folder = place if place.is_dir() else place.parent
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


def digest_sources(place: Path) -> str | None:
    """Over path and bytes of a file, or of every Python file in a folder; None if there are none, or more than 5,000."""
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
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(root) / name for name in names if name.endswith(".py"))
