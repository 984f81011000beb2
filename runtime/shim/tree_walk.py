"""Trees of folders of any depth: walked, and removed.

A command may leave thousands of folders one below the other: more than Python calls itself, and with paths longer than the
system takes. Attempts of tasks load this module and the agent of a host carries it, so it needs little itself.
"""

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, List, Optional, Tuple

    Refuse = Callable[[OSError], Any]

MOST_PARTS = 255
"""The most parts of a name that is listed, copied or restored."""
KEPT_OPEN = 16
"""How many folders are open at most while a tree is removed."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk(top: str, refuse: "Optional[Refuse]" = None) -> "Iterator[Tuple[str, List[str], List[str]]]":
    """Yield what `os.walk` yields from the top down, in a tree of any depth; links to folders are not followed.

    `refuse` is called with the problem of each folder that cannot be read, and of each whose files would have names of more
    than `MOST_PARTS` parts; nothing below those is listed.
    """
    todo = [(top, 0)]
    while todo:
        place, depth = todo.pop()
        folders, others, links = [], [], set()  # type: List[str], List[str], Any
        try:
            if depth >= MOST_PARTS:
                raise OSError(
                    errno.ENAMETOOLONG, "lies %d folders deep, and %d is the most" % (depth, depth - 1), place
                )
            with os.scandir(place) as entries:
                for entry in entries:
                    (folders if _is_folder(entry) else others).append(entry.name)
                    if entry.is_symlink():
                        links.add(entry.name)
        except OSError as problem:
            if refuse is not None:
                refuse(problem)
            continue
        yield place, folders, others
        todo += [(os.path.join(place, name), depth + 1) for name in reversed(folders) if name not in links]


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that cannot be followed


def remove_folder(path: str) -> "Optional[OSError]":
    """Remove a folder with all in it, or a file; returns the first problem if anything is left, None if nothing is.

    Folders of ours that are closed to us are opened. Links are removed and not followed, and what is mounted in the tree
    stays. A part that cannot be removed does not keep the others.
    """
    removal = _Removal()
    try:
        removal.run(path)
    except OSError as problem:
        removal.note(problem)
    finally:
        removal.close()
    return removal.problem


class _Level(object):
    """A folder on the way from the top to the folder that is being emptied."""

    def __init__(self, name: str, opened: int) -> None:
        self.name = name
        self.folders = []  # type: List[str]
        """Names of the folders in it that are still to be emptied."""
        self.opened = opened  # type: Optional[int]
        status = os.fstat(opened)
        self.identity = status.st_dev, status.st_ino


class _Removal(object):
    """Empties folders from the deepest up, with names relative to open folders; only the last `KEPT_OPEN` of the way are open."""

    def __init__(self) -> None:
        self.problem = None  # type: Optional[OSError]
        self.way = []  # type: List[_Level]

    def note(self, problem: OSError) -> None:
        if self.problem is None and problem.errno != errno.ENOENT:
            # A problem with an open folder names it by a number.
            name = problem.filename if isinstance(problem.filename, str) else ""
            problem.filename = os.path.join(*[level.name for level in self.way], name)
            self.problem = problem

    def run(self, path: str) -> None:
        if not self._drop(path, None):
            return
        self._enter(path, None)
        while self.way:
            level = self.way[-1]
            if level.folders:
                name = level.folders.pop()
                try:
                    # Once more: something may be mounted there by now, and its files are not ours to remove.
                    if self._drop(name, level.opened):
                        self._enter(name, level.opened)
                except OSError as problem:
                    self.note(problem)
            else:
                self._leave()

    def close(self) -> None:
        for level in self.way:
            if level.opened is not None:
                os.close(level.opened)

    def _drop(self, name: str, above: "Optional[int]") -> bool:
        """Remove a file or an empty folder; returns whether it is a folder to be emptied first."""
        try:
            os.unlink(name, dir_fd=above)
            return False
        except OSError as problem:
            if problem.errno == errno.ENOENT:
                return False
            refused = problem
        try:
            os.rmdir(name, dir_fd=above)
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return True
            if problem.errno in (errno.EACCES, errno.EPERM):
                status = os.stat(name, dir_fd=above, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    return True  # what is in it may be ours to remove
            self.note(refused if problem.errno == errno.ENOTDIR else problem)
        return False

    def _enter(self, name: str, above: "Optional[int]") -> None:
        """Open a folder and remove all in it but folders that are not empty."""
        opened = _open_folder(name, above)
        level = _Level(name, opened)
        self.way.append(level)
        level.folders = [each for each in os.listdir(opened) if self._drop(each, opened)]
        far = self.way[-1 - KEPT_OPEN] if len(self.way) > KEPT_OPEN else None
        if far is not None and far.opened is not None:
            os.close(far.opened)
            far.opened = None

    def _leave(self) -> None:
        """Go up to the folder above, and remove this one."""
        level = self.way.pop()
        assert level.opened is not None
        try:
            above = self._open_again(level.opened)
        finally:
            os.close(level.opened)
        try:
            os.rmdir(level.name, dir_fd=above)
        except OSError as problem:
            self.note(problem)

    def _open_again(self, below: int) -> "Optional[int]":
        """The descriptor of the last folder of the way, which is the one above `below`; None at the top."""
        if not self.way:
            return None
        level = self.way[-1]
        if level.opened is None:
            level.opened = os.open("..", _OPEN, dir_fd=below)
            status = os.fstat(level.opened)
            if (status.st_dev, status.st_ino) != level.identity:
                raise OSError(errno.ESTALE, "a folder was moved while it was removed", level.name)
        return level.opened


def _open_folder(name: str, above: "Optional[int]") -> int:
    """Open a folder, never through a link, and give its owner all rights."""
    try:
        opened = os.open(name, _OPEN, dir_fd=above)
    except OSError as problem:
        if problem.errno != errno.EACCES:
            raise
        _unlock(name, above)
        opened = os.open(name, _OPEN, dir_fd=above)
    try:
        if os.fstat(opened).st_mode & 0o700 != 0o700:
            os.fchmod(opened, 0o700)
    except OSError:
        pass  # not ours; what can be removed goes
    return opened


def _unlock(name: str, above: "Optional[int]") -> None:
    """Make a folder of ours that we may not read accessible, never through a link."""
    if not hasattr(os, "O_PATH"):
        os.chmod(name, 0o700, dir_fd=above, follow_symlinks=False)
        return
    # Linux cannot change the mode of a name without following a link; a descriptor of the folder itself leads to it.
    opened = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        os.chmod("/proc/self/fd/%d" % opened, 0o700)
    finally:
        os.close(opened)
