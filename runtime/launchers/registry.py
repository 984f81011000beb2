"""Finds launchers: ours, and those of other packages by the entry point `research_runtime.launchers`."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Final, cast

from runtime.errors import MissingExtra, UnknownName
from runtime.jobs.secret_schemes import COMMON_SCHEMES

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from runtime.launchers.base import Launcher

ENTRY_POINTS: Final = "research_runtime.launchers"

_OWN: Final = {
    "local": "runtime.launchers.local.launcher:LocalLauncher",
    "ssh": "runtime.launchers.ssh.launcher:SshLauncher",
    "slurm": "runtime.launchers.slurm.launcher:SlurmLauncher",
    "kubernetes": "runtime.launchers.kubernetes.launcher:KubernetesLauncher",
    "ray": "runtime.launchers.ray.launcher:RayLauncher",
}
_EXTRAS: Final = {"kubernetes": "kubernetes"}


def list_kinds() -> list[str]:
    """The names of all launchers."""
    return sorted({*_OWN, *(point.name for point in _entry_points(tuple(sys.path)))})


def get_launcher(kind: str) -> Launcher:
    """A launcher by its name. Raises `UnknownName`, and `MissingExtra` if its library is not installed."""
    place = _OWN.get(kind) or next(
        (point.value for point in _entry_points(tuple(sys.path)) if point.name == kind), None
    )
    if place is None:
        raise UnknownName("launcher", kind, list_kinds())
    module, _, name = place.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as problem:
        if kind in _EXTRAS and not (problem.name or "").startswith("runtime"):
            raise MissingExtra(f"launcher `{kind}`", _EXTRAS[kind]) from problem
        raise
    launcher = made()
    for name, default in (("resumes", False), ("secret_schemes", COMMON_SCHEMES)):
        if not hasattr(launcher, name):
            setattr(type(launcher), name, default)
    return cast("Launcher", launcher)


@functools.cache
def _entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Looked up once for each import path: it reads a file of every package that is installed."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))
