"""A user's settings: the project's file and the environment, as frozen dataclasses.

The only module that reads environment variables for settings. The project's file is the nearest, going up from the
working directory to the top of the repository or a home, of a `runtime.toml` and a `pyproject.toml` that has a
`[tool.runtime]` table. A file of another user is refused: it could name any command to run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, cast

from runtime.errors import InvalidValue, NotPossible, RequestRefused, UnknownName
from runtime.file_trust import check_own, check_size, check_trusted, read_file, write_private

APP: Final = "research-runtime"
DEFAULT_STACK_FILE: Final = "default-stack"
USER_FILE: Final = "runtime/config.toml"
MEND: Final = "mend or remove it"
Durability = Literal["full", "normal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that a project sets to its launches."""

    max_hourly_cost: float | None = None
    """The most that one launch may cost in dollars an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The table `[tool.runtime]` of pyproject.toml, or all of runtime.toml."""

    root: Path
    """Folder of the file; relative paths in it start here. The working directory if there is no file."""
    file: Path | None = None
    stack: str | None = None
    queue: str | None = None
    outputs: str | None = None
    """Path or URL of a published contract."""
    workflow_packages: tuple[str, ...] = ()
    """Packages under which a project is looked for, after its name as given."""
    workflow_setup: str | None = None
    """`module:function`, called once in each process that runs workflows."""
    env_files: tuple[str, ...] = ()
    """Dotenv files loaded before that; variables that are already set stay."""
    targets: Mapping[str, Any] = field(default_factory=dict)
    """Named places to launch, as written."""
    notify: Mapping[str, Any] = field(default_factory=dict)
    """Named sinks of messages about the ends of jobs and tasks, as written."""
    limits: Limits = Limits()
    snapshot: bool = True
    """Whether tasks carry the code of the folder that they are submitted from."""
    snapshot_secrets: tuple[str, ...] = ()
    """Names of files that look like secrets and go with that code all the same."""
    environment: str | None = None
    """Packages that go with tasks: a lock file, by its path from here, or `frozen`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that is set for this user, this machine and this project."""

    project: Project
    data_dir: Path
    """The local stack's file and output folder."""
    cache_dir: Path
    config_dir: Path
    stack: str | None = None
    queue: str | None = None
    outputs: str | None = None
    """Path or URL of a published contract; the environment's wins over the project's."""
    durability: Durability = "full"
    google_api: str | None = None
    """A server that stands in for all of Google's JSON APIs."""

    @property
    def default_stack_file(self) -> Path:
        """Holds the stack that `runtime stack use` chose."""
        return self.config_dir / DEFAULT_STACK_FILE

    @property
    def user_file(self) -> Path:
        """The user's own settings, which count in every folder: `~/.config/runtime/config.toml`."""
        return self.config_dir.parent / USER_FILE

    @property
    def keeps_data_private(self) -> bool:
        """Whether files of the data folder are for this user alone.

        They are, unless `RUNTIME_DATA_DIR` names a folder that is set up for a group: one with the setgid bit, in which the
        group may write. The folder in `XDG_DATA_HOME` never has these rights once settings were read.
        """
        try:
            mode = self.data_dir.stat().st_mode
        except OSError:
            return True
        return mode & _FOR_A_GROUP != _FOR_A_GROUP


_FOR_A_GROUP: Final = stat.S_ISGID | stat.S_IWGRP


def load_settings(environ: Mapping[str, str] | None = None, folder: Path | None = None) -> Settings:
    """Read all settings once. Raises `RequestRefused` for an invalid one, naming file and key."""
    env = os.environ if environ is None else environ
    project = load_project(folder)
    config_dir = _user_folder(env, "XDG_CONFIG_HOME", ".config")
    cache_dir = _user_folder(env, "XDG_CACHE_HOME", ".cache")
    data_dir = Path(env.get("RUNTIME_DATA_DIR") or _user_folder(env, "XDG_DATA_HOME", ".local/share")).expanduser()
    check_own(str(config_dir), mend=True, instead="set XDG_CONFIG_HOME to a folder of your own")
    check_own(str(cache_dir), mend=True, instead="set XDG_CACHE_HOME to a folder of your own")
    # A folder that somebody named may hold other things, too.
    mend = not env.get("RUNTIME_DATA_DIR")
    check_own(str(data_dir), mend=mend, instead="set RUNTIME_DATA_DIR to a folder of your own")
    outputs = env.get("RUNTIME_OUTPUTS") or project.outputs
    return Settings(
        project=project,
        data_dir=data_dir,
        cache_dir=cache_dir,
        config_dir=config_dir,
        stack=_choose_stack(env, project, config_dir / DEFAULT_STACK_FILE),
        queue=env.get("RUNTIME_QUEUE") or project.queue,
        outputs=outputs,
        durability=check_durability(env.get("RUNTIME_DURABILITY") or "full"),
        google_api=env.get("RUNTIME_GOOGLE_API") or None,
    )


def _choose_stack(env: Mapping[str, str], project: Project, remembered: Path) -> str | None:
    """Nearest wins: the environment, the project, the user's choice; a contract named at one level hides those below."""
    if env.get("RUNTIME_STACK") or env.get("RUNTIME_OUTPUTS"):
        return env.get("RUNTIME_STACK") or None
    if project.stack or project.outputs:
        return project.stack
    found = read_file(str(remembered))
    chosen = found[1].decode(errors="replace").strip() if found else ""
    if found and chosen:
        check_trusted(str(remembered), instead="set RUNTIME_STACK", opened=found[0])
    return chosen or None


def check_durability(value: str) -> Durability:
    if value not in ("full", "normal"):
        raise InvalidValue("durability", value, "full, or normal to let a power cut undo the last settlements")
    return cast(Durability, value)


def working_folder() -> Path:
    """The working directory. Raises `NotPossible` if it was removed."""
    try:
        return Path.cwd()
    except OSError as problem:
        raise no_working_folder(problem) from problem


def no_working_folder(problem: OSError) -> NotPossible:
    """The failure for a process without a usable working directory."""
    return NotPossible(
        f"the working directory cannot be used: {(problem.strerror or str(problem)).lower()}",
        facts=[f"the shell came into it as `{os.environ['PWD']}`"] if os.environ.get("PWD") else [],
        hint="it was removed, or moved away: `cd` into a folder that exists, and do it again",
    )


def load_project(folder: Path | None = None) -> Project:
    """The nearest project file at or above `folder`, or the defaults without one. Raises `Untrusted` for another user's."""
    start = folder.absolute() if folder is not None else working_folder()
    for each in folders_above(start):
        for name in ("runtime.toml", "pyproject.toml"):
            table = _read_table(each / name, start)
            if table is not None:
                return _parse_project(table, each / name)
    return Project(root=start)


def folders_above(start: Path) -> Iterator[Path]:
    """`start` and the folders above it, up to the top of a repository, of an attempt's tree, or a home."""
    ends = {os.path.expanduser("~"), os.environ.get("RUNTIME_SNAPSHOT_DIR")}  # noqa: PTH111 - a home may be unknown
    ends |= {os.path.realpath(each) for each in ends if each}
    for each in (start, *start.parents):
        yield each
        if str(each) in ends or os.path.lexists(each / ".git"):
            return


def files_looked_at(settings: Settings) -> list[str]:
    """Every file that settings like these are read from, or would be if it were there."""
    found = [str(settings.default_stack_file)]
    for each in folders_above(working_folder()):
        found += [str(each / "runtime.toml"), str(each / "pyproject.toml")]
        if settings.project.file is not None and settings.project.root == each:
            break
    return found


def _user_folder(env: Mapping[str, str], variable: str, fallback: str) -> Path:
    base = env.get(variable)
    # The XDG specification has relative paths ignored.
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / fallback
    return folder / APP


def _read_table(path: Path, start: Path) -> Mapping[str, Any] | None:
    in_pyproject = path.name == "pyproject.toml"
    ends = f"an empty `runtime.toml` of your own in `{start}` ends the search there"
    found = read_file(str(path))
    if found is None:
        if not in_pyproject and os.path.lexists(path):
            raise _no_file(str(path), hint=MEND if path.parent == start else f"{MEND}; {ends}")
        return None
    status, data = found
    # Most pyproject files have no such table; a look at the bytes saves loading a TOML parser for them.
    if in_pyproject and b"runtime" not in data:
        return None
    instead = "work in a folder of your own" if path.parent == start else ends
    check_trusted(str(path), instead=instead, opened=status)
    table = _parse_table(str(path), data)
    if not in_pyproject:
        return table
    found = table.get("tool", {}).get("runtime")
    return found if isinstance(found, dict) else None


def _no_file(path: str, *, hint: str = MEND) -> RequestRefused:
    return RequestRefused(f"`{path}` cannot be read: it is no file, or not open to you", hint=hint)


def _parse_table(path: str, data: bytes) -> dict[str, Any]:
    check_size(path, data)
    import tomllib

    try:
        return tomllib.loads(data.decode())
    except ValueError as problem:
        raise RequestRefused(f"`{path}` cannot be read: {problem}", hint="correct the file there") from None


_SETTABLE: Final = tuple(each.name for each in fields(Project) if each.name not in ("root", "file"))
_LISTS: Final = ("workflow_packages", "env_files", "snapshot_secrets")
_KINDS: Final[Mapping[str, tuple[type, str]]] = {
    "snapshot": (bool, "true or false"),
    "targets": (dict, "a table for each target"),
    "notify": (dict, "a table for each sink"),
    "limits": (dict, "a table"),
}


def _parse_project(table: Mapping[str, Any], file: Path) -> Project:
    where = f"in `{file}`"
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in _SETTABLE:
            hint = "settings stand at the top level of runtime.toml" if name == "tool" else None
            raise UnknownName("setting", name, _SETTABLE, where=where, hint=hint)
        if name in _LISTS:
            allowed = 'a list of strings, such as ["rslp"]'
            items = _checked(value, list, f"{name} {where}", allowed)
            values[name] = tuple(_checked(item, str, f"{name} {where}", allowed) for item in items)
        else:
            kind, allowed = _KINDS.get(name, (str, "a string"))
            values[name] = _checked(value, kind, f"{name} {where}", allowed)
    if "limits" in values:
        values["limits"] = _parse_limits(values["limits"], where)
    return Project(root=file.parent, file=file, **values)


def _parse_limits(table: Mapping[str, Any], where: str) -> Limits:
    known = [each.name for each in fields(Limits)]
    for name, value in table.items():
        if name not in known:
            raise UnknownName("setting", f"limits.{name}", [f"limits.{each}" for each in known], where=where)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise InvalidValue(f"limits.{name} {where}", value, "a number of dollars, 0 or more")
    return Limits(**table)


def _checked(value: object, kind: type, what: str, allowed: str) -> Any:
    if not isinstance(value, kind) or value == "":
        raise InvalidValue(what, value, allowed)
    return value


def read_user_targets(settings: Settings) -> Mapping[str, Any]:
    """The targets in the user's own file, as written; none without a file.

    Raises `Untrusted` for another user's file, and `RequestRefused` for one that cannot be read, naming file and key.
    It is read by commands that name targets alone, so a mistake in it stops no other.
    """
    path = str(settings.user_file)
    found = read_file(path)
    if found is None:
        if os.path.lexists(path):
            raise _no_file(path)
        return {}
    status, data = found
    check_trusted(path, instead="set XDG_CONFIG_HOME to a folder of your own", opened=status)
    table = _parse_table(path, data)
    for name, value in table.items():
        if name != "targets":
            hint = "this file has `[targets.NAME]` alone; other settings stand in a project's runtime.toml"
            raise UnknownName("setting", name, ["targets"], where=f"in `{path}`", hint=hint)
        _checked(value, dict, f"targets in `{path}`", "a table for each target")
    targets: Mapping[str, Any] = table.get("targets", {})
    return targets


def remember_stack(name: str, settings: Settings) -> Path:
    """Make `name` the stack of commands that name none; returns the file that stores it."""
    path = settings.default_stack_file
    try:
        write_private(path, name + "\n")
    except OSError as problem:
        raise NotPossible(
            f"cannot remember the stack in `{path}`: {problem.strerror}", hint="set RUNTIME_STACK instead"
        ) from problem
    return path
