"""Outputs of jobs and tasks, copied home into a local folder; a local file that differs is never lost.

Agents, buckets and pods name the files that are fetched. Only this module turns their names into local ones, by the
shim's rules for snapshots, and never writes outside the folder.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias

from runtime.errors import NotPossible
from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import LedgerEntry, check_index, job_folder, list_attempts
from runtime.shim import tree
from runtime.shim.tree_walk import MOST_PARTS
from runtime.snapshots.excludes import MARKER, make_output_folder
from runtime.system import system
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.client.tasks.results import ListedTask
    from runtime.records.base import RecordStore

_PIECE: Final = 1 << 20


class FetchOutcome(StrEnum):
    FETCHED = "fetched"
    SAME = "same"
    """The same file was there."""
    REPLACED = "replaced"
    DIFFERS = "differs"
    """Another file has its name here, and stays."""


class UnsafeRemoteName(NotPossible):
    """A remote name that leads elsewhere, or that no file can have here; nothing was written for it."""

    def __init__(self, problem: tree.UnsafeName) -> None:
        self.name, self.reason = problem.name, problem.reason
        super().__init__(
            f"the remote side names a file `{ascii(self.name)[1:-1]}`, which is refused: it {self.reason}",
            hint="look at the files where they lie; a link or a long path of this machine is passed by naming another folder",
        )


def _open_part(name: str, folder: int) -> tuple[int, bool]:
    """Open a new file, and tell whether it has the name. One without a name goes with a process that is killed."""
    if hasattr(os, "O_TMPFILE") and os.path.exists("/proc/self/fd"):  # noqa: PTH110 - as it is linked to
        try:
            return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666, dir_fd=folder), False
        except OSError:
            pass  # such as a file system that has none
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=folder), True


def check_name(name: str) -> str:
    """Return `name`, from another machine, if one file or folder can have it. Raises `UnsafeRemoteName`."""
    try:
        parts = tree.local_parts(name)
        if len(parts) > 1:
            raise tree.UnsafeName(name, "is a path")
    except tree.UnsafeName as problem:
        raise UnsafeRemoteName(problem) from None
    return name


class LocalFolder:
    """A folder that is created if missing, and then left out of snapshots if `marked`. Its own path may contain links: the user named it."""

    def __init__(self, path: Path, *, marked: bool = False) -> None:
        try:
            make_output_folder(path, marked=marked)
        except (FileExistsError, NotADirectoryError):
            raise NotPossible(f"`{path}` is no folder", hint="name another folder, or move it away") from None
        except FileNotFoundError:
            raise NotPossible(f"the folder `{path}` cannot be made there", hint="name another folder") from None
        self._below = tree.GuardedFolder(str(path))

    def put(self, name: str, write: Callable[[BinaryIO], None], *, overwrite: bool = False) -> FetchOutcome:
        """Place the file that `write` fills under its remote name, whole or not at all.

        A file that differs stays unless `overwrite`; a link under the name counts as one that differs. Raises
        `UnsafeRemoteName` before anything is written.
        """
        try:
            return self._put(name, write, overwrite)
        except tree.UnsafeName as problem:
            raise UnsafeRemoteName(problem) from None

    def _put(self, name: str, write: Callable[[BinaryIO], None], overwrite: bool) -> FetchOutcome:
        folder, last = self._below.enter(name)
        part = f".{system.urandom(8).hex()}.part"
        descriptor, is_named = _open_part(part, folder)
        try:
            with os.fdopen(descriptor, "r+b") as opened:
                write(opened)
                opened.flush()
                became = _compare(opened, folder, name, last, overwrite)
                if became in (FetchOutcome.FETCHED, FetchOutcome.REPLACED):
                    if not is_named:
                        os.link(f"/proc/self/fd/{opened.fileno()}", part, dst_dir_fd=folder)
                    os.rename(
                        part, last, src_dir_fd=folder, dst_dir_fd=folder
                    )  # replaces a link and does not follow it
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
        return became

    def __enter__(self) -> LocalFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._below.close()


def _compare(new: BinaryIO, folder: int, name: str, last: str, overwrite: bool) -> FetchOutcome:
    try:
        found = os.stat(last, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return FetchOutcome.FETCHED
    except OSError as problem:
        raise tree.explain_name(name, problem) from None
    if stat.S_ISREG(found.st_mode) and _is_same(new, folder, last):
        return FetchOutcome.SAME
    if overwrite and (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        return FetchOutcome.REPLACED
    return FetchOutcome.DIFFERS


def _is_same(new: BinaryIO, folder: int, last: str) -> bool:
    try:
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENOENT, errno.EACCES):
            return False
        raise
    with os.fdopen(descriptor, "rb") as old:
        new.seek(0)
        while True:
            ours, theirs = old.read(_PIECE), new.read(_PIECE)
            if ours != theirs:
                return False
            if not ours:
                return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    name: str
    """Its name in the record root."""
    place: str
    """Its path in the local folder."""
    size_bytes: int

    @property
    def too_deep(self) -> bool:
        """Whether it lies too deep to be fetched, or stands for what does."""
        return self.place.endswith("/") or self.place.count("/") >= MOST_PARTS


FetchList: TypeAlias = "tuple[Files, list[RemoteFile]]"
"""Files that lie together, and the way to read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFile:
    path: str
    size_bytes: int
    what: FetchOutcome


class FilesDiffer(NotPossible):
    """Files that were not fetched because other files have their names here."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.names = list(names)
        differ = (
            "differs from what was written, and was" if len(names) == 1 else "differ from what was written, and were"
        )
        super().__init__(
            f"{count_noun(len(names), 'file')} in `{folder}` {differ} left as found",
            facts=list(names)[:10],
            hint="name another folder, or `--overwrite`",
        )


def list_outputs(files: Files, entry: LedgerEntry, indices: Sequence[int] = ()) -> list[RemoteFile]:
    """List the output files of the attempts that count, for all runs or for some."""
    first = entry.first_index
    wanted = [check_index(entry, each) for each in indices] or range(first, first + entry.indices)
    found = []
    for index in wanted:
        for name, relative, size in _outputs_of(files, entry.id, index):
            place = relative if entry.indices == 1 else f"{index}/{relative}"
            found.append(RemoteFile(name=f"{name}/{relative}", place=place, size_bytes=size))
    return found


def _outputs_of(files: Files, job: str, index: int) -> Iterator[tuple[str, str, int]]:
    run = f"{job_folder(job)}/runs/{index}"
    result = json.loads(files.read(f"{run}/result") or b"{}")
    # Results of runs that a retry did not repeat lie with the job that made them.
    run = f"{job_folder(result.get('from', job))}/runs/{index}"
    attempt = result.get("attempt") or max(list_attempts(files, job, index), default=None)
    if attempt is not None:
        folder = f"{run}/output/a{attempt:04d}"
        for relative, size in files.tree(folder):
            yield folder, relative, size


def fetch(files: Files, listed: Sequence[RemoteFile], to: Path, *, overwrite: bool = False) -> Iterator[FetchedFile]:
    """Copy the files, one by one, but for those that lie too deep. A file appears whole or not at all, and below `to`.

    Raises `UnsafeRemoteName` at the first name that leads elsewhere; files before it stay.
    """
    listed = [each for each in listed if not each.too_deep]
    if not listed:
        return
    # A file of the job that has the marker's name comes as it is.
    with LocalFolder(to, marked=all(each.place != MARKER for each in listed)) as folder:
        for each in listed:
            became = folder.put(each.place, partial(files.download, each.name), overwrite=overwrite)
            yield FetchedFile(path=str(to / each.place), size_bytes=each.size_bytes, what=became)


def refuse_differing(done: Sequence[FetchedFile], folder: Path) -> None:
    if differing := [each.path for each in done if each.what is FetchOutcome.DIFFERS]:
        raise FilesDiffer(folder, differing)


def list_task(text: str, records: RecordStore, *, last: str | None = None) -> tuple[str, list[FetchList]]:
    """Return a default name for a local folder, and the output files of the task, or of each task of the experiment.

    Raises `NotPossible` if there are none, or this machine cannot see the folder they lie in.
    """
    from runtime.client.resolve_id import IdKind, get_task_id, identify
    from runtime.client.tasks.results import list_tasks, read_result

    found = identify(text, records, last=last)
    if found.kind is not IdKind.EXPERIMENT:
        task = get_task_id(found.name, records)
        url = read_result(records, task).outputs_url
        if url is None:
            raise NotPossible(f"task `{task}` has no outputs", hint=f"runtime status {task}")
        return check_name(task), [_list_folder(url, f"task `{task}`", "")]
    lists = []
    for listed in list_tasks(records, found.name):
        record = records.find(listed.task_id, listed.generation)
        if record is not None and record.outputs_url is not None:
            lists.append(_list_folder(record.outputs_url, f"experiment `{found.name}`", f"{_place_of(listed)}/"))
    if not lists:
        raise NotPossible(f"no task of `{found.name}` has outputs", hint=f"runtime status {found.name}")
    return check_name(found.name), lists


def _place_of(listed: ListedTask) -> str:
    """The folder of a task among those of its experiment: its key, if a folder can have that name, or its id."""
    try:
        return check_name(listed.label) if listed.task and listed.task.key else listed.task_id
    except UnsafeRemoteName:
        return listed.task_id


def _list_folder(url: str, whose: str, below: str) -> FetchList:
    from runtime.jobs.hosts.local import LocalFiles

    if "://" in url and not url.startswith("file://"):
        tool = f"gcloud storage cp -r {url} ." if url.startswith("gs://") else f"aws s3 cp --recursive {url} ."
        raise NotPossible(
            f"outputs of {whose} lie in a bucket", facts=[url], hint=f"copy them with its own tool: {tool}"
        )
    files = LocalFiles(url.removeprefix("file://"))
    return files, [RemoteFile(name=name, place=f"{below}{name}", size_bytes=size) for name, size in files.tree("")]
