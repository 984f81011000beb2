"""Named places to launch: read from the project, opened with the record root that they had before, and remembered by job.

`[tool.runtime.targets.NAME]` of the project names them; `local` needs no table.

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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from runtime.config import Settings
from runtime.errors import InvalidValue, RequestRefused, StoreUnavailable, UnknownName
from runtime.jobs.hosts.agent import MARKER
from runtime.jobs.hosts.base import Host
from runtime.jobs.plan import PlanContext, Target
from runtime.launchers.base import Launcher
from runtime.launchers.registry import get_launcher, list_kinds
from runtime.owners import write_private

LOCAL: Final = "local"
_OURS: Final = ("kind", "records", "stack", "defaults")


def list_targets(settings: Settings) -> list[Target]:
    """List every target that can be named, `local` first. Raises `InvalidValue` for a malformed one."""
    named = [read_target(name, settings) for name in sorted(settings.project.targets)]
    return named if any(each.name == LOCAL for each in named) else [Target(name=LOCAL, kind=LOCAL), *named]


def list_usable_targets(settings: Settings, *, tell: Callable[[str], None] = lambda text: None) -> list[Target]:
    """List the targets that are well formed, `local` first; a malformed one hides no other, and `tell` gets its fault."""
    found = []
    for name in dict.fromkeys([LOCAL, *sorted(settings.project.targets)]):
        try:
            found.append(read_target(name, settings))
        except RequestRefused as problem:
            tell(f"target `{name}` cannot be used here: {problem.message}")
    return found


def find_target(name: str, settings: Settings) -> Target:
    """Return the target called `name`, its settings checked. Raises `UnknownName`, `InvalidValue` or the launcher's refusal."""
    if name not in settings.project.targets and name != LOCAL:
        file = settings.project.file
        table = f"[targets.{name}] to {file or 'runtime.toml'}"
        if file is not None and file.name == "pyproject.toml":
            table = f"[tool.runtime.targets.{name}] to {file}"
        raise UnknownName(
            "target",
            name,
            [LOCAL, *sorted(settings.project.targets)],
            hint=f"add {table}; `runtime targets list`",
        )
    target = read_target(name, settings)
    get_launcher(target.kind).check_settings(target)
    return target


def read_target(name: str, settings: Settings) -> Target:
    """Read a target from the project's file, with the types of our own keys checked."""
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


def make_context(settings: Settings, base: Path | None = None) -> PlanContext:
    return PlanContext(
        settings=settings,
        now=datetime.now(UTC),
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
