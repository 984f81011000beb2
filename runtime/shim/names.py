"""Names that another machine chose, and files that are made under them."""

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Tuple

PART_BYTES, PATH_BYTES, MOST_PARTS = 255, 4095, 255
"""The most of a name that another machine chose: bytes of each part, bytes of the whole path, and parts."""


class NameRefused(ValueError):
    """A name that another machine chose and that becomes no file here."""

    def __init__(self, name: "Any", reason: str) -> None:
        self.name, self.reason = name, reason
        ValueError.__init__(self, "%s %s" % (ascii(name), reason))


def local_parts(name: "Any") -> "List[str]":
    """The parts of a relative path that another machine named; raises `NameRefused` unless it leads below a folder."""
    if not isinstance(name, str):
        raise NameRefused(name, "is no text")
    parts = name.split("/")
    if "\0" in name:
        raise NameRefused(name, "holds a NUL")
    if name.startswith("/"):
        raise NameRefused(name, "is an absolute path")
    if ".." in parts:
        raise NameRefused(name, "leads to a folder above")
    if "" in parts or "." in parts:
        raise NameRefused(name, "has an empty part")
    try:
        size = max(len(os.fsencode(part)) for part in parts)
    except UnicodeError:
        raise NameRefused(name, "cannot be a file name here")
    if size > PART_BYTES:
        raise NameRefused(name, "has a part of %d bytes, and %d is the most" % (size, PART_BYTES))
    if len(parts) > MOST_PARTS:
        raise NameRefused(name, "lies %d folders deep, and %d is the most" % (len(parts), MOST_PARTS))
    return parts


def check_length(name: str, folder: str) -> None:
    size = len(os.fsencode(folder)) + 1 + len(os.fsencode(name))
    if size > PATH_BYTES:
        raise NameRefused(name, "makes a path of %d bytes here, and %d is the most" % (size, PATH_BYTES))


class Below(object):
    """An open folder that takes files under names which another machine chose.

    Every folder on the way is opened inside the one above it and never through a link, so what is made here lies below
    the folder whatever links are there or come meanwhile. `close` lets go of it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._parts = []  # type: List[str]
        self._open = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def __enter__(self) -> "Below":
        return self

    def __exit__(self, *_: "Any") -> None:
        self.close()

    def enter(self, name: "Any") -> "Tuple[int, str]":
        """The descriptor of the folder that `name` lies in, made where it is missing, and its last part.

        The descriptor holds until the next call. Raises `NameRefused`.
        """
        parts = local_parts(name)
        return self._walk(name, parts[:-1]), parts[-1]

    def make(self, name: "Any") -> None:
        """Make the folder `name` where it is missing."""
        self._walk(name, local_parts(name))

    def _walk(self, name: str, folders: "List[str]") -> int:
        check_length(name, self.path)
        kept = 0
        while kept < min(len(folders), len(self._parts)) and folders[kept] == self._parts[kept]:
            kept += 1
        del self._parts[kept:]
        while len(self._open) > kept + 1:
            os.close(self._open.pop())
        for part in folders[kept:]:
            self._open.append(self._step(name, part))
            self._parts.append(part)
        return self._open[-1]

    def _step(self, name: "Any", part: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            try:
                return os.open(part, flags, dir_fd=self._open[-1])
            except OSError as problem:
                if problem.errno != errno.ENOENT:
                    raise
            try:
                os.mkdir(part, 0o777, dir_fd=self._open[-1])
            except OSError as problem:
                if problem.errno != errno.EEXIST:
                    raise
            return os.open(part, flags, dir_fd=self._open[-1])
        except OSError as problem:
            if problem.errno in (errno.ENOTDIR, errno.ELOOP):
                raise NameRefused(name, "leads through %s, which is no folder here" % ascii(part))
            raise explain_name(name, problem)

    def clear(self, name: "Any") -> "Tuple[int, str]":
        """Unlink the file or link of that name, if any; returns what `enter` does."""
        folder, last = self.enter(name)
        try:
            os.unlink(last, dir_fd=folder)
        except OSError as problem:
            if problem.errno in (errno.EISDIR, errno.EPERM):
                raise NameRefused(name, "is the name of a folder here")
            if problem.errno != errno.ENOENT:
                raise explain_name(name, problem)
        return folder, last

    def create(self, name: "Any", mode: int = 0o666) -> int:
        """The descriptor of a new, empty file in the place of whatever file or link had its name."""
        folder, last = self.clear(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(last, flags, mode, dir_fd=folder)
        except OSError as problem:
            raise explain_name(name, problem)

    def link(self, name: "Any", target: str) -> None:
        """A symbolic link, whose target is text to us: nothing made here is reached through it."""
        folder, last = self.clear(name)
        try:
            os.symlink(target, last, dir_fd=folder)
        except (OSError, ValueError) as problem:
            raise explain_name(name, problem)


def explain_name(name: "Any", problem: Exception) -> Exception:
    """`NameRefused` where it is the name that the file system does not take, else the problem itself."""
    number = getattr(problem, "errno", None)
    if isinstance(problem, ValueError) or number in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
        return NameRefused(name, "is refused by the file system: %s" % (getattr(problem, "strerror", None) or problem))
    return problem
