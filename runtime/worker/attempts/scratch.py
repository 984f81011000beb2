"""Scratch: a root for each worker, a folder in it for each attempt, and removal of dead workers' leftovers.

A root is `<base>/w-…/` with a lock file beside it. The process that holds the lock is alive; a root whose lock is
free is a leftover. The guardian inherits the lock, so a root outlives its worker until the last attempt is gone.
"""

# pathlib is too large for the processes that load this.
# ruff: noqa: PTH100, PTH102, PTH103, PTH106, PTH108, PTH112, PTH116, PTH120

from __future__ import annotations

import os
import stat
import sys
import time

from runtime.file_trust import private_folder
from runtime.shim.tree_walk import remove_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

CLEANED_S = 5.0
"""How long a worker that starts waits for one that cleans up behind others."""

METRICS = ".metrics.jsonl"
"""Ends the name, beside an attempt's folder, of the file with its reports."""

CONTAINER = ".container"
"""Ends the name, beside an attempt's folder, of the file that names its container as long as there may be one."""


def default_base() -> str:
    """`<tmp>/research-runtime-<uid>`, in the folder that `tempfile` chooses; `…-<uid>-…` if another user has that name."""
    return private_folder(f"{_temporary_folder()}/research-runtime-{os.getuid()}")


def _temporary_folder() -> str:
    if "tempfile" not in sys.modules:  # loading it takes longer, because it loads shutil
        for folder in (*map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp"):
            if folder and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
                return os.path.abspath(folder)
    import tempfile

    return tempfile.gettempdir()


class ScratchRoot:
    """One worker's scratch, from `open_root`."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        """Descriptor that holds the lock; hand it to the attempt pool in `hold_fds`."""

    def close(self) -> None:
        """Remove the root and give up the lock. Safe to call twice."""
        if self.fd < 0:
            return
        _remove_root(self.path)
        os.close(self.fd)
        self.fd = -1


def open_root(worker: str, *, base: str | None = None) -> ScratchRoot:
    """Make a worker's root and lock it. `worker` is a name such as `w-1a2b` that no living worker has.

    Raises `InfrastructureFailure` if the base folder is another user's or the name is taken.
    """
    base = base or default_base()
    _check_base(base)
    path = f"{base}/{worker}"
    fd = None
    until = time.monotonic() + CLEANED_S
    while fd is None:
        try:
            fd = _lock(f"{path}.lock")
        except BlockingIOError:
            # Another worker may be looking whether this root is a dead one's.
            if time.monotonic() >= until:
                fact = "another worker of that name runs on this host"
                raise _failure(f"scratch folder `{path}` is in use", fact) from None
            time.sleep(0.01)
    remove_tree(path)
    os.mkdir(path, 0o700)
    return ScratchRoot(path, fd)


def _lock(path: str) -> int | None:
    """Open and lock a file. None if a cleaner removed it between open and lock: then the lock would guard nothing.

    Raises `BlockingIOError` if the lock cannot be had, mostly because another process holds it.
    """
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except FileNotFoundError:
        pass
    except OSError:
        os.close(fd)
        raise BlockingIOError(path) from None
    os.close(fd)
    return None


def _check_base(base: str) -> None:
    try:
        os.makedirs(base, 0o700, exist_ok=True)
        found = os.lstat(base)
    except OSError as problem:
        raise _failure(f"cannot make scratch folder `{base}`", str(problem)) from problem
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise _failure(
            f"scratch folder `{base}` is not safe to use",
            f"found owner {found.st_uid} and mode {stat.filemode(found.st_mode)}, expected {os.getuid()} and drwx------",
        )


def _failure(message: str, fact: str) -> Exception:
    from runtime.errors import InfrastructureFailure

    return InfrastructureFailure(
        message, facts=[fact], hint="set TMPDIR to a folder of your own, or remove it", retryable=False
    )


def remove_leftovers(base: str | None = None) -> list[str]:
    """Remove the roots of dead workers and return their paths. Takes longer the larger their trees are."""
    base = base or default_base()
    removed = []
    for name in sorted(entry.name for entry in _entries(base)):
        path = f"{base}/{name.removesuffix('.lock')}"
        if not name.endswith(".lock") and os.path.lexists(f"{path}.lock"):
            continue
        try:
            fd = _lock(f"{path}.lock")
        except OSError:
            continue
        if fd is not None:
            if _remove_root(path):
                removed.append(path)
            os.close(fd)
    return removed


def clear_left_containers(base: str | None = None) -> None:
    """End the containers of dead workers, so that no attempt runs beside an earlier one of its task."""
    for entry in _entries(base or default_base()):
        if not find_containers(entry.path):
            continue
        try:
            fd = _lock(f"{entry.path}.lock")
        except OSError:
            continue  # its worker lives
        if fd is not None:
            clear_containers(entry.path)
            os.close(fd)


def _remove_root(path: str) -> bool:
    """Remove a worker's root and its lock; returns whether it is gone. Notes on containers that no engine removes stay, for the
    next worker."""
    if not clear_containers(path):
        for entry in _entries(path):
            if not entry.name.endswith(CONTAINER):
                remove_tree(entry.path)
        return False
    remove_tree(path)
    try:
        os.unlink(f"{path}.lock")
    except OSError:
        pass
    return True


# containers


def record_path(root: str, token: str) -> str:
    """Return the file in which this process notes an attempt's container."""
    return f"{root}/{token}.{os.getpid()}{CONTAINER}"


def find_containers(root: str, pid: int | None = None) -> list[str]:
    """Return the notes on containers, all or those of one process."""
    end = CONTAINER if pid is None else f".{pid}{CONTAINER}"
    return [entry.path for entry in _entries(root) if entry.name.endswith(end)] if root else []


def clear_containers(root: str, pid: int | None = None) -> bool:
    """End and remove the containers that are noted, all or those of one process; returns whether none is left."""
    notes = find_containers(root, pid)
    if notes:
        from runtime.shim import containers

        for note in notes:
            containers.clear_containers(note)
    return not any(map(os.path.lexists, notes))


def remove_tree(path: str) -> None:
    """Remove a file or folder with all in it as `remove_folder` does. Files that do not exist or cannot be removed are passed over."""
    remove_folder(path)


def remove_empty(path: str, *, parents: int = 0) -> None:
    """Remove a folder if it is empty, and then up to `parents` of the folders above it if they are."""
    for _ in range(parents + 1):
        try:
            os.rmdir(path)
        except FileNotFoundError:
            pass  # Another process has, and may have left its parent.
        except OSError:
            return
        path = os.path.dirname(path)


def make_folder(path: str) -> None:
    """Make a folder and its parents; another process may be removing an empty parent meanwhile."""
    for _ in range(10):
        try:
            os.makedirs(path, exist_ok=True)
        except FileNotFoundError:
            continue
        return
    os.makedirs(path, exist_ok=True)


def has_new_file(path: str, since: float, *, limit: int = 5000) -> bool:
    """Whether a file below `path` was written at or after `since`; looks at no more than `limit` entries."""
    todo, seen = [path], 0
    while todo:
        for entry in _entries(todo.pop()):
            seen += 1
            if seen > limit:
                return False
            try:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                elif entry.stat(follow_symlinks=False).st_mtime >= since:
                    return True
            except OSError:
                continue
    return False


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from list(entries)
    except OSError:
        return
