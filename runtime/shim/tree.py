"""The tree of a snapshot, unpacked after its bytes have proven to be the ones that were submitted."""

import hashlib
import io
import os
import shutil
import tarfile
import tempfile

from runtime.shim.files import make_folder, remove_folder, token
from runtime.shim.names import PATH_BYTES, Below, NameRefused, check_length, local_parts
from runtime.shim.words import SetupFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Set, Tuple


def restore(archive, sha256, folder):
    """Unpack the snapshot into `folder`, after its bytes have proven to be the ones that were submitted."""
    try:
        with io.open(archive, "rb") as opened:
            content = opened.read()
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot read the snapshot %s: %s" % (archive, problem.strerror))
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise SetupFailed("the snapshot %s holds other bytes than were submitted: sha256 is %s" % (archive, found))
    if os.path.islink(folder):
        os.unlink(folder)
    elif os.path.exists(folder):
        shutil.rmtree(folder)
    try:
        unpack(content, folder)
    except NameRefused as problem:
        raise SetupFailed("the snapshot is refused: %s" % problem)
    return folder


def unpack(content: bytes, folder: str) -> None:
    """Make `folder` with the tree of a snapshot; `content` has proven to be the bytes that were submitted.

    Raises `NameRefused` as `list_entries` does, and for what the file system says of a name.
    """
    entries = list_entries(content, folder)
    os.makedirs(folder)
    with Below(folder) as below:
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
    """Name, mode, where the bytes begin, their number, and a link's target, of each file and link of an archive that is
    to be unpacked into `folder`.

    An archive holds files and symbolic links, as taking a snapshot makes them. With anything else in it, or with a name
    that leads elsewhere or through a link, it raises `NameRefused`. Of two with one name the last counts.
    """
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
        raise NameRefused("archive", "cannot be read: %s" % problem)
    if content[end:].strip(b"\0"):
        raise NameRefused("archive", "goes on after its last entry")
    return list(found.values())


def _check_entry(entry: "Any", length: int) -> None:
    if entry.type == tarfile.SYMTYPE:
        if not entry.linkname:
            raise NameRefused(entry.name, "is a link to nothing")
        if entry.size:
            raise NameRefused(entry.name, "is a link with bytes of its own")
        if len(os.fsencode(entry.linkname)) > PATH_BYTES:
            raise NameRefused(entry.name, "is a link of more than %d bytes" % PATH_BYTES)
        return
    if entry.type != tarfile.REGTYPE or entry.issparse():
        raise NameRefused(entry.name, "is neither a file nor a symbolic link")
    if entry.mode & ~0o777:
        raise NameRefused(entry.name, "has the mode %o" % entry.mode)
    if entry.size < 0 or entry.offset_data + entry.size > length:
        raise NameRefused(entry.name, "is cut off")


def _check_place(name: str, found: "Dict[str, Any]", folders: "Set[str]") -> None:
    parts = local_parts(name)
    if name in folders:
        raise NameRefused(name, "is the name of a folder here")
    if "/".join(parts[:-1]) in folders:
        return
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        if folder in found:
            raise NameRefused(name, "leads through %s, which is no folder here" % ascii(parts[depth - 1]))
        folders.add(folder)


def shared_tree(archive, sha256):
    """A tree that all attempts of this machine share and none can write to, made once and published by rename."""
    place = os.path.join(tempfile.gettempdir(), "research-runtime-%d" % os.getuid())
    make_folder(place)
    os.chmod(place, 0o700)
    tree = os.path.join(place, sha256)
    if os.path.isdir(tree):
        return tree
    fresh = restore(archive, sha256, "%s.%s" % (tree, token()))
    for folder, _, names in os.walk(fresh):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode & 0o555)
        os.chmod(folder, 0o700 if folder == fresh else 0o555)
    try:
        os.rename(fresh, tree)
    except OSError:
        remove_folder(fresh)  # another was first
    os.chmod(tree, 0o555)
    return tree
