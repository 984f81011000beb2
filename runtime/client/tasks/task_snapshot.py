"""The code that goes with submitted tasks: its folder, its snapshot, and the place in it where attempts start."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from runtime.config import Settings, folders_above, load_project, working_folder
from runtime.errors import NotPossible, RequestRefused
from runtime.file_trust import check_trusted
from runtime.system import system

if TYPE_CHECKING:
    from runtime.records.base import RecordStore
    from runtime.snapshots.snapshot import SnapshotRules
    from runtime.snapshots.watch import TreeWatch

LOOK_EVERY_S: Final = 1.0
"""Time for which a tree without notice of a change counts as unchanged: the kernel does not notice every change."""
MOST_PLAIN: Final = 64

WITHOUT = "`--no-snapshot` (in Python `snapshot=False`) submits without the code, and workers run their own"
NAMED = "if it belongs in the snapshot, name it in `snapshot_secrets` of the project's settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedCode:
    """The code of tasks; all None for tasks that run the worker's own."""

    snapshot: str | None = None
    folder: str | None = None
    """The folder in the snapshot in which attempts start; None is its root."""
    taken_from: Path | None = None
    """The folder whose snapshot it is; None if a content id was given."""


def take_code(
    wanted: str | Path | bool | None,
    records: RecordStore | None,
    settings: Settings,
    *,
    start: Path | None = None,
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> SubmittedCode:
    """Return the code to submit, after storing it in `records` if given.

    `wanted` is a content id, a folder, True for the folder of the project around `start` (the working directory if
    None), False for none, or None for the project's setting. `more` are files beside those of the tree. Raises `NotPossible` for a folder that cannot be code: too
    large, a home, or with a file that looks like a secret.
    """
    if isinstance(wanted, str):
        return SubmittedCode(snapshot=wanted)
    if wanted is False or (wanted is None and not settings.project.snapshot):
        return SubmittedCode()
    from runtime.snapshots.snapshot import SecretInTree, take_snapshot

    here = working_folder()
    if not more and not isinstance(wanted, Path) and (inherited := _inherit(here, records)) is not None:
        return inherited
    folder = wanted.absolute() if isinstance(wanted, Path) else find_code_folder(start or here)
    try:
        identity = take_snapshot(
            folder, records, rules=_rules(settings, records), cache_dir=settings.cache_dir, more=more
        )
    except NotPossible as problem:
        named = [NAMED] if isinstance(problem, SecretInTree) else []
        problem.hint = "; ".join([*([problem.hint] if problem.hint else []), *named, WITHOUT])
        raise
    return SubmittedCode(snapshot=identity, folder=_place_in(folder, here), taken_from=folder)


class CodeInHand:
    """The code that successive calls submit from one folder, which is searched again only after a change.

    The first calls search the tree, as `take_code` does. Later the tree is watched, and a call without a change in it,
    less than `LOOK_EVERY_S` after the last search, submits the same code as the call before.
    """

    def __init__(self, wanted: Path | bool | None, start: Path | None) -> None:
        self._wanted, self._start = wanted, start
        self._code: SubmittedCode | None = None
        self._looked_at = 0.0
        self._watch: TreeWatch | None = None
        self._used = False
        self._plain = self._plain_left = 1
        """Calls that search the tree before it is watched again; more of them if the last watch did not pay."""

    def take(self, records: RecordStore, settings: Settings) -> SubmittedCode:
        """Return the same as `take_code`, for one stack and one working directory at every call."""
        now = system.monotonic()
        quiet = self._watch is not None and self._watch.is_quiet()
        if quiet and self._code is not None and now - self._looked_at < LOOK_EVERY_S:
            self._used = True
            return self._code
        if self._watch is not None and not quiet:
            self.close()
            self._plain = self._plain_left = 1 if self._used else min(2 * self._plain, MOST_PLAIN)
        elif self._watch is None and self._code is not None and self._code.taken_from is not None:
            self._plain_left -= 1
            if self._plain_left < 0:
                self._open_watch(self._code.taken_from, records, settings)
        code = take_code(self._wanted, records, settings, start=self._start)
        if self._code is not None and code.taken_from != self._code.taken_from:
            self.close()
        self._code, self._looked_at = code, now
        return code

    def _open_watch(self, folder: Path, records: RecordStore, settings: Settings) -> None:
        from runtime.snapshots.snapshot import survey
        from runtime.snapshots.watch import TreeWatch

        try:
            files = survey(folder, _rules(settings, records))
        except NotPossible:
            return  # The search that follows raises it again, with a hint.
        self._watch = TreeWatch.open(folder, [each.name for each in files])
        self._used = False
        if self._watch is None:
            self._plain = self._plain_left = MOST_PLAIN

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _inherit(here: Path, records: RecordStore | None) -> SubmittedCode | None:
    """Return the code of the attempt that submits from its own tree, which also holds files that the attempt wrote."""
    snapshot, tree = os.environ.get("RUNTIME_SNAPSHOT_ID"), os.environ.get("RUNTIME_SNAPSHOT_DIR")
    if not snapshot or not tree or not here.is_relative_to(Path(tree).resolve()) or records is None:
        return None
    known = records.has_blob(f"snapshots/{snapshot.removeprefix('sha256:')}")
    return SubmittedCode(snapshot=snapshot, folder=_place_in(Path(tree), here)) if known else None


def find_code_folder(start: Path) -> Path:
    """Find the project around `start`: the nearest folder, going up, with a project file or at the top of a git work tree.

    Without one it is `start` itself. A home, or a folder above one, counts only if it is `start` and a project.
    """
    start = start.resolve()
    above_homes = _home_and_above()
    file = load_project(start).file
    for each in folders_above(start):
        if each in above_homes and each != start:
            break
        if file is not None and file.parent == each:
            return each
        if os.path.lexists(each / ".git"):
            check_trusted(str(each / ".git"), instead="name the folder of the code with `--snapshot FOLDER`")
            return each
    if start in above_homes:
        raise NotPossible(
            f"`{start}` is no project, and its snapshot would go with the tasks",
            facts=["it is a home, or lies above one, and has neither a project file nor a git work tree"],
            hint=f"submit from the folder of the code, or name it with `--snapshot FOLDER`; {WITHOUT}",
        )
    return start


def import_root(function: Callable[..., Any]) -> Path | None:
    """Return the folder from which a function's module is imported; None for an installed module or one without a file."""
    name = getattr(function, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    return _import_root(name, file) if file else None


def read_code_git(function: Callable[..., Any]) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder of a function's code, and the state of the git repositories in it; none in a folder that no call takes
    along."""
    from runtime.config import load_settings
    from runtime.snapshots.provenance import read_folder

    start = import_root(function) or working_folder()
    try:
        folder = find_code_folder(start).resolve()
    except RequestRefused:
        return start, []
    return folder, read_folder(folder, _rules(load_settings(), None))


@functools.lru_cache(1_000)
def _import_root(name: str, file: str) -> Path | None:
    import sysconfig

    path = Path(file).resolve()
    installed = [Path(place).resolve() for place in set(sysconfig.get_paths().values())]
    if any(path.is_relative_to(place) for place in installed if place.name != "include"):
        return None
    depth = name.count(".") + (path.name == "__init__.py")
    return path.parents[depth]


def _place_in(folder: Path, here: Path) -> str | None:
    real = folder.resolve()
    if not here.is_relative_to(real) or here == real:
        return None
    return here.relative_to(real).as_posix()


def _home_and_above() -> set[Path]:
    try:
        home = Path.home().resolve()
    except RuntimeError:
        return {Path("/")}
    return {home, *home.parents}


def _rules(settings: Settings, records: RecordStore | None) -> SnapshotRules:
    """Leave out files and folders of this package, which may lie in the folder of the code and are never submitted."""
    from runtime.snapshots.excludes import list_own_places
    from runtime.snapshots.snapshot import SnapshotRules

    places: list[str] = []
    kind, _, path = (records.url if records else "").partition(":")
    if kind == "file":
        places.append(path)
    elif kind == "sqlite":
        places += [f"{path}{end}" for end in ("", "-wal", "-shm", "-journal", "-lock", "-workers", "-files")]
    return SnapshotRules(secrets=settings.project.snapshot_secrets, left_out=list_own_places(settings, *places))
