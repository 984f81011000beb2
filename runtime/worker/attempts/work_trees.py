"""Trees of snapshots for attempts: each slot has its own tree, and every attempt finds it as it was submitted.

A worker fetches a snapshot once, proves its bytes and checks every name (`WorkTrees`). The attempt's process lays the tree out
if its slot has none, and before each later attempt finds and mends changed files alone (`WorkTree`): looking at 2,000 files
costs a few milliseconds, writing them a few hundred.

Every fresh attempt pays for what this module loads.
"""

# pathlib is too large for the processes that load this.
# ruff: noqa: PTH102, PTH103, PTH104, PTH106, PTH112, PTH119, PTH105, PTH108, PTH114, PTH115, PTH120, PTH123, PTH208, PTH211

from __future__ import annotations

import marshal
import os
import stat
import time

from runtime.worker.attempts import scratch
from runtime.worker.attempts.entries import AttemptFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from runtime.records.base import RecordStore

KEPT = 4
"""Snapshots that a worker keeps although no attempt needs them now."""
KEPT_OF_SLOT = 2
"""Trees that a slot keeps while nothing runs on it."""
TICKS_NS = 100_000_000
"""A file written within this time before a look may be written again unnoticed: the clock that file systems read
ticks every 1 to 10 ms."""
_CACHE = "__pycache__"
_ARCHIVE, _INDEX = "archive", "index"
ORIGIN = "origin.json"
"""The file that `RUNTIME_ORIGIN` names, in the folder of a snapshot: the state of its git repositories."""
_LONGEST = "trees/000000.000000"
"""The longest name of a tree."""


class WorkTrees:
    """The snapshots that a worker's attempts run, below its scratch folder."""

    def __init__(self, root: str, discard: Callable[[str], None]) -> None:
        """`discard` removes a folder in the background."""
        self._root, self._discard = root, discard
        self._places: dict[str, str] = {}
        """Folder of each fetched snapshot, the last used at the end."""
        self._of_slot: dict[int, dict[str, str]] = {}
        """Path and snapshot of each slot's trees, the last used at the end."""
        self._doubted: set[str] = set()
        """Snapshots to fetch again before the next attempt; attempts that were set up before may still run."""
        self._dropped = 0

    def __contains__(self, snapshot: str) -> bool:
        return snapshot in self._places and snapshot not in self._doubted

    def fetch(self, snapshot: str, records: RecordStore) -> str:
        """Bring a snapshot to this host and return its folder, for `add`. May be called from any thread.

        Raises as `fetch_snapshot`, and `NotPossible` for an archive that is not a snapshot.
        """
        from runtime.snapshots.snapshot import archive_reference, fetch_snapshot, read_entries

        folder = f"{self._root}/code-{os.urandom(4).hex()}"
        archive = fetch_snapshot(snapshot, records)
        note = records.get_note(archive_reference(snapshot)) or b"{}"
        entries = read_entries(archive, snapshot, f"{folder}/{_LONGEST}")
        # One folder for each snapshot: an attempt that removes files beside its tree harms no other snapshot.
        os.makedirs(f"{folder}/trees", 0o700)
        try:
            for name, content in ((_ARCHIVE, archive), (_INDEX, marshal.dumps(entries)), (ORIGIN, note)):
                with open(f"{folder}/{name}", "wb") as opened:
                    opened.write(content)
        except OSError:
            scratch.remove_tree(folder)  # on a full disk it would be in the way
            raise
        return folder

    def add(self, snapshot: str, folder: str, *, used: Collection[str]) -> None:
        """Register the folder of `fetch`, and remove the oldest snapshots beyond `KEPT` that are not in `used`."""
        self._places[snapshot] = folder
        self._doubted.discard(snapshot)
        idle = [each for each in self._places if each not in used and each != snapshot]
        for each in idle[: max(0, len(self._places) - KEPT)]:
            self.forget(each, used=used)

    def forget(self, snapshot: str, *, used: Collection[str]) -> None:
        """Have a snapshot fetched again for the next attempt that needs it."""
        for trees in self._of_slot.values():
            for path in [path for path, held in trees.items() if held == snapshot]:
                del trees[path]
        if snapshot in used:
            self._doubted.add(snapshot)
        elif snapshot in self._places:
            self._discard(self._places.pop(snapshot))

    def place(self, snapshot: str, slot: int) -> str:
        """Return the path of the slot's tree; the attempt's process makes the tree."""
        folder = self._places[snapshot] = self._places.pop(snapshot)
        trees = self._of_slot.setdefault(slot, {})
        path = next((path for path, held in trees.items() if held == snapshot), None)
        if path is None:
            # A name is used once: the tree that had it before may still be being removed.
            path = f"{folder}/trees/{slot}.{self._dropped}"
        trees[path] = trees.pop(path, snapshot)
        return path

    def place_apart(self, snapshot: str, token: str) -> str:
        """Return the path of a tree for one attempt alone, which the caller discards."""
        folder = self._places[snapshot] = self._places.pop(snapshot)
        return f"{folder}/trees/{token[: len(_LONGEST) - len('trees/')]}"

    def trim(self, slot: int, *, spoiled: str | None = None) -> None:
        """Remove the slot's tree of the snapshot `spoiled`, and trees beyond `KEPT_OF_SLOT`; nothing may run on the slot."""
        trees = self._of_slot.get(slot, {})
        old = list(trees)[: max(0, len(trees) - KEPT_OF_SLOT)]
        for path in [path for path, held in trees.items() if path in old or held == spoiled]:
            del trees[path]
            self._dropped += 1
            self._discard(path)


class WorkTree:
    """One slot's tree, in the attempt's process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._seen: dict[str, Any] | None = None

    def prepare(self) -> None:
        """Make the tree as submitted, byte for byte. Nothing else may use the tree meanwhile. Raises `OSError`."""
        seen = self._seen or self._load()
        if seen is None:
            self._lay()
            return
        folders, files = seen["folders"], seen["files"]
        settled = seen["at"] - TICKS_NS
        touched = self._find_touched(folders, settled)
        if touched is None:
            self._lay()
            return
        suspect = [name for name, known in files.items() if self._look(name) != known or known[3] >= settled]
        if touched or suspect:
            self._mend(seen, touched, suspect)

    def tidy(self) -> list[str]:
        """Remove files that an attempt has left in the tree beside the submitted files; returns their names.

        Compiled Python stays: it belongs to unchanged files, and `prepare` removes that of changed files.
        """
        if self._seen is None:
            return []
        folders = self._seen["folders"]
        touched = self._find_touched(folders, None)
        return sorted(self._remove_strangers(touched or [], self._seen["files"], folders))

    # laying it out

    def _lay(self) -> None:
        self._seen = None
        entries = self._entries()
        scratch.remove_tree(self.folder)
        os.makedirs(self.folder, 0o700)
        made = {""}
        descriptor = os.open(self._beside(_ARCHIVE), os.O_RDONLY | os.O_CLOEXEC)
        try:
            for entry in entries:
                self._make_folder(entry[0].rpartition("/")[0], made)
                self._write(entry, descriptor)
        except OSError:
            scratch.remove_tree(self.folder)
            raise
        finally:
            os.close(descriptor)
        self._remember({"files": dict.fromkeys(each[0] for each in entries), "folders": dict.fromkeys(made)})

    def _make_folder(self, name: str, made: set[str]) -> None:
        if name not in made:
            self._make_folder(name.rpartition("/")[0], made)
            os.mkdir(f"{self.folder}/{name}")
            made.add(name)

    def _write(self, entry: tuple[str, int, int, int, str], archive: int) -> None:
        name, mode, start, size, target = entry
        path = f"{self.folder}/{name}"
        if target:
            os.symlink(target, path)
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            while size > 0:
                written = os.write(descriptor, os.pread(archive, min(size, 1 << 24), start))
                start, size = start + written, size - written
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)

    # mending it

    def _mend(self, seen: dict[str, Any], touched: list[str], suspect: list[str]) -> None:
        """Remove foreign files, write changed files again, and remember the status of all files."""
        files, folders = seen["files"], seen["folders"]
        self._seen = None
        self._forget()
        self._remove_strangers(touched, files, folders)
        wanted = set(suspect)
        changed = any(self._look(name) != files[name] for name in suspect)
        entries = {each[0]: each for each in self._entries() if each[0] in wanted} if wanted else {}
        descriptor = os.open(self._beside(_ARCHIVE), os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name, entry in entries.items():
                if not self._holds(entry, descriptor):
                    scratch.remove_tree(f"{self.folder}/{name}")
                    self._write(entry, descriptor)
                    changed = True
        finally:
            os.close(descriptor)
        if changed:
            # Byte code of the changed files might fit by its time, which counts seconds, and its size.
            for folder in folders:
                if f"{folder}/{_CACHE}".lstrip("/") not in folders:
                    scratch.remove_tree(f"{self.folder}/{folder}/{_CACHE}")
        self._remember(seen)

    def _remove_strangers(self, touched: list[str], files: dict[str, Any], folders: dict[str, Any]) -> list[str]:
        removed = []
        for folder in touched:
            prefix = f"{folder}/" if folder else ""
            for name in os.listdir(f"{self.folder}/{folder}"):
                own = prefix + name
                path = f"{self.folder}/{own}"
                if own in files or own in folders or (name == _CACHE and _is_compiled(path)):
                    continue
                scratch.remove_tree(path)
                removed.append(own)
        return removed

    def _holds(self, entry: tuple[str, int, int, int, str], archive: int) -> bool:
        name, mode, start, size, target = entry
        path = f"{self.folder}/{name}"
        try:
            found = os.lstat(path)
            if target:
                return stat.S_ISLNK(found.st_mode) and os.readlink(path) == target
            if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) != mode or found.st_size != size:
                return False
            if found.st_nlink > 1:
                return False  # Another name of the file, outside of the tree, would stay writable.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            at = 0
            while at < size:
                piece = os.pread(descriptor, min(size - at, 1 << 20), at)
                if not piece or piece != os.pread(archive, len(piece), start + at):
                    return False
                at += len(piece)
            return True
        finally:
            os.close(descriptor)

    # how it looked

    def _find_touched(self, folders: dict[str, Any], settled: int | None) -> list[str] | None:
        """Return folders that may have other names now, or changed after `settled`; None if a folder was replaced."""
        touched = []
        for name, known in folders.items():
            now = self._look(name)
            if now is None or now[:2] != known[:2]:
                return None
            if now != known or (settled is not None and known[3] >= settled):
                touched.append(name)
        return touched

    def _look(self, name: str) -> tuple[int, int, int, int, int] | None:
        try:
            found = os.lstat(f"{self.folder}/{name}" if name else self.folder)
        except OSError:
            return None
        return found.st_mode, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size

    def _beside(self, name: str) -> str:
        return f"{os.path.dirname(os.path.dirname(self.folder))}/{name}"

    def _entries(self) -> list[tuple[str, int, int, int, str]]:
        with open(self._beside(_INDEX), "rb") as opened:
            found: list[tuple[str, int, int, int, str]] = marshal.loads(opened.read())
        return found

    def _load(self) -> dict[str, Any] | None:
        try:
            with open(f"{self.folder}.seen", "rb") as opened:
                self._seen = marshal.loads(opened.read())
        except (OSError, ValueError, EOFError, TypeError):
            self._seen = None
        return self._seen

    def _remember(self, names: dict[str, Any]) -> None:
        # Before the looks: a file that changes meanwhile is looked at again.
        at = time.time_ns()
        seen = {kind: {name: self._look(name) for name in names[kind]} for kind in ("files", "folders")}
        self._seen = {**seen, "at": at}
        try:
            with open(f"{self.folder}.seen.new", "wb") as opened:
                opened.write(marshal.dumps(self._seen))
            os.replace(f"{self.folder}.seen.new", f"{self.folder}.seen")
        except OSError:
            self._forget()  # the next process lays the tree out again

    def _forget(self) -> None:
        try:
            os.unlink(f"{self.folder}.seen")
        except FileNotFoundError:
            pass


def _is_compiled(path: str) -> bool:
    """Whether `path` is a folder of byte code alone."""
    try:
        with os.scandir(path) as entries:
            return not os.path.islink(path) and all(
                each.name.endswith(".pyc") and each.is_file(follow_symlinks=False) for each in entries
            )
    except OSError:
        return False


def take_artifacts(artifacts: dict[str, Any], brought: str, tree: str) -> None:
    """Move the artifacts that the worker has brought for an attempt to their places, below the current folder.

    The folder `brought` is gone once all of them have moved. Raises `OSError`, and `AttemptFailed` for a place out of the tree.
    """
    if not os.path.isdir(brought):
        return  # A worker of another release, or a task whose attempt has taken them.
    places = {tag: f"artifacts/{tag}" for tag in artifacts.get("reuse", ())}
    places.update(artifacts.get("capture", ()))
    root = os.path.realpath(tree)
    for tag, path in places.items():
        parent = os.path.realpath(os.path.dirname(path) or ".")
        if parent != root and not parent.startswith(f"{root}/"):
            raise AttemptFailed("config_invalid", f"the place `{path}` of artifact `{tag}` leads out of the snapshot")
        if os.path.lexists(f"{brought}/{tag}"):
            scratch.make_folder(parent)
            scratch.remove_tree(path)
            os.rename(f"{brought}/{tag}", f"{parent}/{os.path.basename(path)}")
    os.rmdir(brought)
