"""Looks for a workflow without importing anything, for a warning where the code is that of the user's own project."""

from __future__ import annotations

import importlib.machinery
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from runtime.config import Project
from runtime.shim.tree_walk import walk
from runtime.tasks.model import WorkflowEntry

_FILES_READ: Final = 200
"""Source files of a package that are searched for a name; a larger package is believed."""


def describe_missing(entry: WorkflowEntry, project: Project, folders: Sequence[Path]) -> str | None:
    """Return why this Python would not find the workflow; None if it would, or if only an import could tell.

    `folders` are those that tasks import from, before installed code.
    """
    packages = project.workflow_packages
    candidates = [entry.project, *(f"{package}.{entry.project}" for package in packages)]
    search = [str(place) for folder in folders for place in (folder / "src", folder)] + sys.path
    found = [sources for name in candidates if (sources := _find_sources(name, search)) is not None]
    if found:
        files = [path for sources in found for path in sources]
        if len(files) > _FILES_READ or packages or _names_in(files, entry.workflow) or _has_entry_point(entry):
            return None
        return f"`{entry.project}` does not mention a workflow `{entry.workflow}`"
    # A function can be registered for a project of any name by a module of these packages.
    if packages or _has_entry_point(entry):
        return None
    return f"this Python finds no module `{entry.project}`"


def _find_sources(name: str, search: list[str]) -> list[Path] | None:
    """Return the source files of a module, or of a package and its subpackages; None if there is no such module."""
    places: Sequence[str] | None = search
    origin = None
    parts = name.split(".")
    for depth in range(len(parts)):
        if places is None or not parts[depth].isidentifier():
            return None
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), list(places))
        if spec is None:
            return None
        places, origin = spec.submodule_search_locations, spec.origin if spec.has_location else None
    below = [
        Path(where, each)
        for place in places or ()
        for where, _, names in walk(place)
        for each in names
        if each.endswith(".py")
    ]
    return below or ([Path(origin)] if origin else [])


def _names_in(files: Sequence[Path], name: str) -> bool:
    """Whether a file has the name as a word, or is not a source that can be searched."""
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    for path in files:
        try:
            if path.suffix != ".py" or word.search(path.read_text(encoding="utf-8", errors="replace")):
                return True
        except OSError:
            return True
    return not files


def _has_entry_point(entry: WorkflowEntry) -> bool:
    from importlib.metadata import entry_points

    from runtime.tasks.workflows import ENTRY_POINT_GROUP

    names = (entry.project, f"{entry.project}.{entry.workflow}")
    return any(point.name in names for point in entry_points(group=ENTRY_POINT_GROUP))
