"""Files under names that another machine chose, and the tree of a snapshot, unpacked once its bytes are proven."""

import errno
import fcntl
import hashlib
import io
import os
import tempfile

from runtime.file_trust import is_ours, private_folder
from runtime.shim.common import SetupFailed
from runtime.shim.files import token
from runtime.shim.tree_walk import MOST_PARTS, remove_folder, walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Set, Tuple


_HELD: "List[int]" = []
"""Descriptors that hold the shared trees of this process."""
PART_BYTES, PATH_BYTES = 255, 4095
"""The most bytes of each part of a name that another machine chose, and of the whole path."""


class UnsafeName(ValueError):
    """A name from another machine that becomes no file here."""

    def __init__(self, name: "Any", reason: str) -> None:
        self.name, self.reason = name, reason
        ValueError.__init__(self, "%s %s" % (ascii(name), reason))


def local_parts(name: "Any") -> "List[str]":
    """The parts of a relative path from another machine; raises `UnsafeName` unless it leads below a folder."""
    if not isinstance(name, str):
        raise UnsafeName(name, "is no text")
    parts = name.split("/")
    if "\0" in name:
        raise UnsafeName(name, "holds a NUL")
    if name.startswith("/"):
        raise UnsafeName(name, "is an absolute path")
    if ".." in parts:
        raise UnsafeName(name, "leads to a folder above")
    if "" in parts or "." in parts:
        raise UnsafeName(name, "has an empty part")
    try:
        size = max(len(os.fsencode(part)) for part in parts)
    except UnicodeError:
        raise UnsafeName(name, "cannot be a file name here")
    if size > PART_BYTES:
        raise UnsafeName(name, "has a part of %d bytes, and %d is the most" % (size, PART_BYTES))
    if len(parts) > MOST_PARTS:
        raise UnsafeName(name, "lies %d folders deep, and %d is the most" % (len(parts), MOST_PARTS))
    return parts


def check_length(name: str, folder: str) -> None:
    size = len(os.fsencode(folder)) + 1 + len(os.fsencode(name))
    if size > PATH_BYTES:
        raise UnsafeName(name, "makes a path of %d bytes here, and %d is the most" % (size, PATH_BYTES))


class GuardedFolder(object):
    """An open folder that takes files under names that another machine chose.

    Every folder on the way is opened inside the one above it and never through a link, so a new file lies below the
    folder even if links come meanwhile. `close` releases it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._parts = []  # type: List[str]
        self._open = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def __enter__(self) -> "GuardedFolder":
        return self

    def __exit__(self, *_: "Any") -> None:
        self.close()

    def enter(self, name: "Any") -> "Tuple[int, str]":
        """The descriptor of the folder of `name`, which is made if it is missing, and the last part of `name`.

        The descriptor is valid until the next call. Raises `UnsafeName`.
        """
        parts = local_parts(name)
        return self._walk(name, parts[:-1]), parts[-1]

    def make(self, name: "Any") -> None:
        """Make the folder `name` if it is missing."""
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
                raise UnsafeName(name, "leads through %s, which is no folder here" % ascii(part))
            raise explain_name(name, problem)

    def clear(self, name: "Any") -> "Tuple[int, str]":
        """Unlink the file or link of that name, if any; returns what `enter` does."""
        folder, last = self.enter(name)
        try:
            os.unlink(last, dir_fd=folder)
        except OSError as problem:
            if problem.errno in (errno.EISDIR, errno.EPERM):
                raise UnsafeName(name, "is the name of a folder here")
            if problem.errno != errno.ENOENT:
                raise explain_name(name, problem)
        return folder, last

    def create(self, name: "Any", mode: int = 0o666) -> int:
        """The descriptor of a new, empty file, in place of a file or link of its name."""
        folder, last = self.clear(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(last, flags, mode, dir_fd=folder)
        except OSError as problem:
            raise explain_name(name, problem)

    def link(self, name: "Any", target: str) -> None:
        """Make a symbolic link. Its target is mere text: nothing made here is reached through it."""
        folder, last = self.clear(name)
        try:
            os.symlink(target, last, dir_fd=folder)
        except (OSError, ValueError) as problem:
            raise explain_name(name, problem)


def explain_name(name: "Any", problem: Exception) -> Exception:
    """`UnsafeName` if the file system refuses the name, else the problem itself."""
    number = getattr(problem, "errno", None)
    if isinstance(problem, ValueError) or number in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
        return UnsafeName(name, "is refused by the file system: %s" % (getattr(problem, "strerror", None) or problem))
    return problem


def restore(archive, sha256, folder):
    """Unpack the snapshot into `folder`, once its bytes are proven to be the submitted ones."""
    try:
        with io.open(archive, "rb") as opened:
            content = opened.read()
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot read the snapshot %s: %s" % (archive, problem.strerror))
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise SetupFailed("the snapshot %s holds other bytes than were submitted: sha256 is %s" % (archive, found))
    left = remove_folder(folder)
    if left is not None:
        raise left
    try:
        unpack(content, folder)
    except UnsafeName as problem:
        raise SetupFailed("the snapshot is refused: %s" % problem)
    return folder


def unpack(content: bytes, folder: str) -> None:
    """Make `folder` with the tree of a snapshot; the caller has proven that `content` is the submitted bytes.

    Raises `UnsafeName` for the reasons of `list_entries`, and for a name that the file system refuses.
    """
    entries = list_entries(content, folder)
    os.makedirs(folder)
    with GuardedFolder(folder) as below:
        for name, mode, start, size, target in entries:
            if target:
                below.link(name, target)
                continue
            rest = memoryview(content)[start : start + size]
            descriptor = below.create(name)
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                os.fchmod(descriptor, mode)
            finally:
                os.close(descriptor)


def list_entries(content: bytes, folder: str) -> "List[Tuple[str, int, int, int, str]]":
    """Name, mode, offset and number of the bytes, and a link's target, of each entry of an archive for `folder`.

    An archive holds files and symbolic links, as taking a snapshot makes them. Anything else in it, or a name that leads
    elsewhere or through a link, raises `UnsafeName`. The last of two entries with one name counts.
    """
    import tarfile  # here, for those who import only `GuardedFolder`

    found = {}  # type: Dict[str, Tuple[str, int, int, int, str]]
    folders = {""}
    end = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for entry in tar:
                _check_place(entry.name, found, folders)
                check_length(entry.name, folder)
                _check_entry(entry, len(content))
                end = max(end, entry.offset_data + entry.size)
                found.pop(entry.name, None)
                target = entry.linkname if entry.issym() else ""
                found[entry.name] = entry.name, entry.mode, entry.offset_data, entry.size, target
    except tarfile.TarError as problem:
        raise UnsafeName("archive", "cannot be read: %s" % problem)
    if content[end:].strip(b"\0"):
        raise UnsafeName("archive", "goes on after its last entry")
    return list(found.values())


def _check_entry(entry: "Any", length: int) -> None:
    if entry.type == b"2":  # tarfile.SYMTYPE
        if not entry.linkname:
            raise UnsafeName(entry.name, "is a link to nothing")
        if entry.size:
            raise UnsafeName(entry.name, "is a link with bytes of its own")
        if len(os.fsencode(entry.linkname)) > PATH_BYTES:
            raise UnsafeName(entry.name, "is a link of more than %d bytes" % PATH_BYTES)
        return
    if entry.type != b"0" or entry.issparse():
        raise UnsafeName(entry.name, "is neither a file nor a symbolic link")
    if entry.mode & ~0o777:
        raise UnsafeName(entry.name, "has the mode %o" % entry.mode)
    if entry.size < 0 or entry.offset_data + entry.size > length:
        raise UnsafeName(entry.name, "is cut off")


def _check_place(name: str, found: "Dict[str, Any]", folders: "Set[str]") -> None:
    parts = local_parts(name)
    if name in folders:
        raise UnsafeName(name, "is the name of a folder here")
    if "/".join(parts[:-1]) in folders:
        return
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        if folder in found:
            raise UnsafeName(name, "leads through %s, which is no folder here" % ascii(parts[depth - 1]))
        folders.add(folder)


def shared_tree(archive, sha256):
    """A read-only tree that all attempts of this machine share, made once and published by rename.

    `drop_trees` leaves it while this process lives.
    """
    place = private_folder(os.path.join(tempfile.gettempdir(), "research-runtime-%d" % os.getuid()))
    tree = os.path.join(place, sha256)
    while is_ours(tree) and os.path.isdir(tree):
        if _hold(tree):
            return tree
    fresh = restore(archive, sha256, "%s.%s" % (tree, token()))
    for folder, _, names in walk(fresh):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode & 0o555)
        os.chmod(folder, 0o700 if folder == fresh else 0o555)
    try:
        os.rename(fresh, tree)
    except OSError:
        if not is_ours(tree):
            tree = fresh  # the name is another user's, from before the folder was ours alone
        else:
            remove_folder(fresh)  # another was first
    os.chmod(tree, 0o555)
    return tree if tree == fresh or _hold(tree) else shared_tree(archive, sha256)


def _hold(tree: str) -> bool:
    """Keep others from removing a shared tree; False if it is gone already."""
    try:
        found = os.open(tree, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(found, fcntl.LOCK_SH)
    except OSError:
        pass  # a file system without locks
    if os.path.exists(tree) and os.path.samestat(os.fstat(found), os.stat(tree)):
        _HELD.append(found)
        return True
    os.close(found)
    return False


def drop_trees(trees):
    """Remove shared trees that no process of this machine uses; returns all that are gone, also those gone before."""
    dropped = []
    for tree in trees:
        aside = "%s.%s" % (tree, token())
        try:
            found = os.open(tree, os.O_RDONLY)
        except OSError:
            dropped.append(tree)
            continue
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(tree, aside)
        except OSError:
            continue
        finally:
            os.close(found)
        remove_folder(aside)
        dropped.append(tree)
    return dropped
