"""Named places to launch: `[tool.runtime.targets.NAME]` of the project, and `local`, which needs no words.

[tool.runtime.targets.hpc]
kind = "slurm"
host = "login.hpc.example.org"        # everything that is no key of ours is the launcher's
records = "/scratch/lab/runtime"
defaults = { time_limit = "12h", resources = { cpus = 4 } }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from runtime.config import Settings
from runtime.errors import InvalidValue, NotPossible, UnknownName
from runtime.jobs.plan import Target
from runtime.jobs.spec import JobSpec
from runtime.launchers.registry import get_launcher, list_kinds

LOCAL: Final = "local"
_OURS: Final = ("kind", "records", "stack", "defaults")


def list_targets(settings: Settings) -> list[Target]:
    """Every target that can be named, `local` first. A malformed one is raised when it is used."""
    named = [read_target(name, settings) for name in sorted(settings.project.targets)]
    return named if any(each.name == LOCAL for each in named) else [Target(name=LOCAL, kind=LOCAL), *named]


def _table(name: str, file: Path | None) -> str:
    """Where a target of that name would be written."""
    if file is not None and file.name == "pyproject.toml":
        return f"[tool.runtime.targets.{name}] to {file}"
    return f"[targets.{name}] to {file or 'runtime.toml'}"


def find_target(name: str, settings: Settings) -> Target:
    """The target called `name`, its settings checked. Raises `UnknownName`, `InvalidValue` or what its launcher says."""
    if name not in settings.project.targets and name != LOCAL:
        raise UnknownName(
            "target",
            name,
            [LOCAL, *sorted(settings.project.targets)],
            hint=f"add {_table(name, settings.project.file)}; `runtime targets list`",
        )
    target = read_target(name, settings)
    get_launcher(target.kind).check_settings(target)
    return target


def read_target(name: str, settings: Settings) -> Target:
    """As the project's file has it, types of our own keys checked."""
    written: Any = settings.project.targets.get(name, {"kind": LOCAL})
    where = f"targets.{name}"
    if not isinstance(written, Mapping):
        raise InvalidValue(where, written, "a table")
    kind = written["kind"] if "kind" in written else name if name in list_kinds() else None
    if kind is None:
        raise InvalidValue(f"{where}.kind", None, f"one of {', '.join(list_kinds())}")
    for key, expected in (("kind", str), ("records", str), ("stack", str), ("defaults", Mapping)):
        if key in written and not isinstance(written[key], expected):
            raise InvalidValue(f"{where}.{key}", written[key], "a table" if expected is Mapping else "text")
    return Target(
        name=name,
        kind=str(kind),
        records=written.get("records"),
        stack=written.get("stack"),
        defaults=dict(written.get("defaults", {})),
        settings={key: value for key, value in written.items() if key not in _OURS},
    )


def choose_target(spec: JobSpec, names: Sequence[str], settings: Settings) -> list[Target]:
    """The targets to try in order: those named for this launch, else those of the spec. Raises `NotPossible` for none."""
    wanted = list(names) or list(spec.placement.on)
    if not wanted:
        raise NotPossible(
            "no target is named", hint="runtime launch --on local …; `runtime targets list` says which there are"
        )
    return [find_target(name, settings) for name in wanted]
