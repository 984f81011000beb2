"""Named places to launch: read from the project, opened with the record root that they had before, and remembered by job.

`[tool.runtime.targets.NAME]` of the project names them, or `[targets.NAME]` of the user's own file; `local` needs no table.

[tool.runtime.targets.hpc]
kind = "slurm"
host = "login.hpc.example.org"        # a key that is not listed in `_OURS` belongs to the launcher
records = "/scratch/lab/runtime"
defaults = { time_limit = "12h", resources = { cpus = 4 } }

The id of a record root that was used tells it from an empty folder under the same name, such as a mount point without its
file system. The ids are kept as names in the user's data folder, `roots/ADDRESS/ID`, created and never changed, so any
number of processes learn them at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from runtime.config import Settings, read_user_targets
from runtime.errors import InvalidValue, RequestRefused, StoreUnavailable, UnknownName
from runtime.file_trust import write_private
from runtime.jobs.hosts.agent import MARKER
from runtime.jobs.hosts.base import Host
from runtime.jobs.plan import PlanContext, Target
from runtime.launchers.base import Launcher
from runtime.launchers.registry import get_launcher, list_kinds
from runtime.system import system

LOCAL: Final = "local"
_OURS: Final = ("kind", "records", "stack", "defaults")


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A target as it is written, and the file that has it."""

    written: Any
    file: Path | None
    """None for `local`, if no file has it."""
    of_user: bool = False
    hides: Path | None = None
    """The user's own file, if it has a target of this name too, which then does not count."""


def read_definitions(settings: Settings) -> dict[str, Definition]:
    """Name → definition of every target that can be named, `local` first. The project's go before the user's own.

    Raises what is wrong with the user's file.
    """
    mine, file = read_user_targets(settings), settings.user_file
    found = {LOCAL: Definition(written={"kind": LOCAL}, file=None)}
    found |= {name: Definition(written=mine[name], file=file, of_user=True) for name in sorted(mine)}
    return {LOCAL: found[LOCAL]} | found | _read_project(settings, mine)


def _read_project(settings: Settings, mine: Mapping[str, Any]) -> dict[str, Definition]:
    written, file = settings.project.targets, settings.project.file
    return {
        name: Definition(written=written[name], file=file, hides=settings.user_file if name in mine else None)
        for name in sorted(written)
    }


def list_usable_targets(settings: Settings, *, tell: Callable[[str], None] = lambda text: None) -> list[Target]:
    """List the targets that are well formed, `local` first; a malformed one hides no other, and `tell` gets its fault."""
    try:
        definitions = read_definitions(settings)
    except RequestRefused as problem:
        tell(f"your own targets cannot be used: {problem.message}")
        definitions = {LOCAL: Definition(written={"kind": LOCAL}, file=None), **_read_project(settings, {})}
    found = []
    for name, each in definitions.items():
        try:
            found.append(read_target(name, each))
        except RequestRefused as problem:
            tell(f"target `{name}` cannot be used here: {problem.message}")
    return found


def find_target(name: str, settings: Settings) -> Target:
    """Return the target called `name`, its settings checked. Raises `UnknownName`, `InvalidValue` or the launcher's refusal."""
    definition = find_definition(name, settings)
    target = read_target(name, definition)
    try:
        get_launcher(target.kind).check_settings(target)
    except RequestRefused as problem:
        if definition.of_user:
            problem.facts = (*problem.facts, f"target `{name}` is defined in `{definition.file}`")
        raise
    return target


def find_definition(name: str, settings: Settings) -> Definition:
    """Return how the target called `name` is defined. Raises `UnknownName`."""
    # A target of the project is used without a look at the user's file.
    definitions = _read_project(settings, {}) if name in settings.project.targets else read_definitions(settings)
    if name not in definitions and (name == "here" or name.startswith("queue:")):
        raise RequestRefused(
            f"`{name}` is no target of jobs",
            hint="calls of functions take it, `runtime.map` and `runtime.run_experiment`; `runtime submit` puts work into queues",
        )
    if name not in definitions:
        file = settings.project.file
        table = f"[targets.{name}] to {file or 'runtime.toml'}"
        if file is not None and file.name == "pyproject.toml":
            table = f"[tool.runtime.targets.{name}] to {file}"
        raise UnknownName("target", name, definitions, hint=f"add {table}; `runtime targets list`")
    return definitions[name]


def read_target(name: str, definition: Definition) -> Target:
    """Read a target from its file, with the types of our own keys checked."""
    written = definition.written
    key, where = f"targets.{name}", f" in `{definition.file}`" if definition.of_user else ""
    if not isinstance(written, Mapping):
        raise InvalidValue(f"{key}{where}", written, "a table")
    kind = written["kind"] if "kind" in written else name if name in list_kinds() else None
    if kind is None:
        raise InvalidValue(f"{key}.kind{where}", None, f"one of {', '.join(list_kinds())}")
    for part, expected in (("kind", str), ("records", str), ("stack", str), ("defaults", Mapping)):
        if part in written and not isinstance(written[part], expected):
            allowed = "a table" if expected is Mapping else "text"
            raise InvalidValue(f"{key}.{part}{where}", written[part], allowed)
    return Target(
        name=name,
        kind=str(kind),
        records=written.get("records"),
        stack=written.get("stack"),
        defaults=dict(written.get("defaults", {})),
        settings={key: value for key, value in written.items() if key not in _OURS},
    )


def make_context(settings: Settings, base: Path | None = None) -> PlanContext:
    return PlanContext(
        settings=settings,
        now=system.now(),
        base=base or Path.cwd(),
        environ=dict(os.environ),
        records=str(settings.data_dir / "jobs"),
    )


class OpenTarget:
    """A target with its launcher and the machine that submits. Closing it closes the connection."""

    def __init__(self, target: Target, launcher: Launcher, host: Host) -> None:
        self.target, self.launcher, self.host = target, launcher, host
        self.files = host.files

    def close(self) -> None:
        self.host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_target(
    target: Target, context: PlanContext, launcher: Launcher | None = None, *, new_records: bool = False
) -> OpenTarget:
    """Open a target with the record root that it had before. No request is made yet.

    With `new_records` any root is accepted from now on, an existing or a new one.
    """
    launcher = launcher or get_launcher(target.kind)
    host = launcher.open_host(target, context)
    host.files.keep_to(KnownRoot(target.name, host.files.address, context.settings.data_dir, new=new_records))
    return OpenTarget(target, launcher, host)


class RootLost(StoreUnavailable):
    """A record root that was used is missing or was replaced, so nothing is known of its jobs."""


class KnownRoot:
    """A `RootWatch` that remembers on this machine."""

    def __init__(self, target: str, address: str, data_dir: Path, *, new: bool = False) -> None:
        self._target, self._address = target, address
        self._folder = data_dir / "roots" / hashlib.sha256(os.fsencode(address)).hexdigest()[:24]
        self._remembered: list[str] = []
        with contextlib.suppress(OSError):
            self._remembered = sorted(path.name for path in self._folder.iterdir())
        self.known: Sequence[str] = [] if new else self._remembered

    def saw(self, identity: str) -> None:
        if identity not in self._remembered:
            self._remembered = [*self._remembered, identity]
            # A data folder that cannot be written stops no command.
            with contextlib.suppress(OSError):
                write_private(self._folder / identity, f"{self._address}\n")
        self.known = [identity]

    def refusal(self, found: str | None, *, there: bool) -> RootLost:
        what = f"the record root `{self._address}` of target `{self._target}`"
        known = ", ".join(self._remembered)
        if found is not None:
            message = f"{what} is another one than it was"
            facts = [f"its file `{MARKER}` names {found}, and it was {known}"]
        elif there:
            message = f"{what} has lost its file `{MARKER}`, or its file system is not mounted"
            facts = [f"it was {known}"]
        else:
            message = f"{what} is not there"
            facts = [f"it was used before, as {known}"]
        return RootLost(
            message,
            facts=[*facts, "nothing was made or started, and nothing is known of its jobs"],
            hint=f"bring it back; if it was removed on purpose: runtime targets check {self._target} --new-records",
        )
