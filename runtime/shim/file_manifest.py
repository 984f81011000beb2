"""Files of this machine as versions in a record: lists of files, and their bytes by content.

Checkpoints and artifacts of jobs and artifacts of tasks have this format. A list is written once all its bytes are stored,
so an existing list is a whole version. The names in it were chosen by another machine.
"""

import hashlib
import io
import os
import stat
import time

from runtime.shim.tree import GuardedFolder, UnsafeName
from runtime.shim.tree_walk import MOST_PARTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Optional, Tuple

    Status = Tuple[int, int, int, int, int]
    Found = Dict[str, Tuple[str, Any]]

KEPT = 2
"""How many versions of an attempt that runs are kept."""
MOST_FILES = 100000
MOST_BYTES = 1 << 40
SETTLED_NS = 2000000000
"""A file written within this time before it is read is read again for the next version: its time may not show a later write."""
TRIES = 3
"""How often a file that changes while it is copied is copied again."""
PIECE = 1 << 20


class UnsuitableFile(Exception):
    """A file or folder that cannot be an artifact, for the reason in the text."""

    hint = None  # type: Optional[str]


def as_text(path: str) -> str:
    """A relative path as a key, independent of this process's encoding. Raises `UnicodeError`."""
    return os.fsencode(path).decode("utf-8").replace(os.sep, "/")


def from_text(name: str) -> str:
    return os.fsdecode(name.encode("utf-8", "surrogatepass"))


def is_content(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def hash_file(path: str) -> str:
    found = hashlib.sha256()
    with io.open(path, "rb") as opened:
        for piece in iter(lambda: opened.read(PIECE), b""):
            found.update(piece)
    return found.hexdigest()


def status_of(found: "os.stat_result") -> "Status":
    """Size, mode, inode, and the times of the last write and of the last change of these, in nanoseconds.

    A program can set the time of the last write, and not that of the last change.
    """
    return found.st_size, found.st_mode & 0o777, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def is_settled(status: "Status") -> bool:
    """Whether a file was written so long ago that a later write shows in its times."""
    return time.time() * 1e9 - status[4] > SETTLED_NS


def look(path: str) -> "Tuple[Optional[Found], Dict[str, str]]":
    """What lies at `path`, by its path from there ("" is the artifact itself), and why the rest is not a part of it.

    None if there is nothing. Raises `UnsuitableFile`.
    """
    found = {}  # type: Found
    left_out = {}  # type: Dict[str, str]
    try:
        top = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None, {}
    if not (stat.S_ISREG(top.st_mode) or stat.S_ISDIR(top.st_mode)):
        what = "a link" if stat.S_ISLNK(top.st_mode) else "neither a file nor a folder"
        refused = UnsuitableFile("`%s` is %s" % (path, what))
        refused.hint = "name a file or a folder itself"
        raise refused
    found[""] = ("file", status_of(top)) if stat.S_ISREG(top.st_mode) else ("folder", None)
    size = top.st_size if stat.S_ISREG(top.st_mode) else 0
    folders = [("", path)] if stat.S_ISDIR(top.st_mode) else []
    while folders:
        above, place = folders.pop()
        try:
            listed = sorted(os.listdir(place))
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed meanwhile
        except OSError as problem:
            left_out[above or os.path.basename(path)] = "cannot be read: %s" % problem.strerror
            continue
        for each in listed:
            own = os.path.join(place, each)
            try:
                name = as_text(os.path.join(above, each))
                status = os.lstat(own)
            except UnicodeError:
                left_out[ascii(each)] = "has a name that is no UTF-8"
                continue
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed meanwhile
            except OSError as problem:
                left_out[name] = "cannot be read: %s" % problem.strerror
                continue
            if name.count("/") >= MOST_PARTS:
                left_out[name] = "lies in more than %d folders" % (MOST_PARTS - 1)
                continue
            if stat.S_ISLNK(status.st_mode):
                _take_link(own, name, found, left_out)
            elif stat.S_ISDIR(status.st_mode):
                found[name] = ("folder", None)
                folders.append((name, own))
            elif stat.S_ISREG(status.st_mode):
                found[name] = ("file", status_of(status))
                size += status.st_size
            else:
                left_out[name] = "is no regular file"
            if len(found) > MOST_FILES:
                refused = UnsuitableFile("`%s` has more than %s files" % (path, "{:,}".format(MOST_FILES)))
                refused.hint = "pack them into an archive"
                raise refused
    if size > MOST_BYTES:
        raise UnsuitableFile("`%s` has more than 1 TiB: %d bytes" % (path, size))
    return found, left_out


def _take_link(path: str, name: str, found: "Found", left_out: "Dict[str, str]") -> None:
    try:
        target = os.fsencode(os.readlink(path)).decode("utf-8")
    except UnicodeError:
        left_out[name] = "is a link to a name that is no UTF-8"
        return
    except OSError:
        return  # removed meanwhile
    if leads_out(name, target):
        left_out[name] = "is a link out of the artifact"
    else:
        found[name] = ("link", target)


def leads_out(name: str, target: str) -> bool:
    """Whether a link leads out of the artifact that it is in."""
    if not target or target.startswith("/") or "\0" in target:
        return True
    depth = name.count("/")
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            return True
    return False


def tell(left_out: "Dict[str, str]") -> "Optional[str]":
    """Describe the parts that are not in an artifact and why, for people to read."""
    if not left_out:
        return None
    told = "; ".join("`%s` %s" % each for each in sorted(left_out.items())[:5])
    return told + (", and {:,} more".format(len(left_out) - 5) if len(left_out) > 5 else "")


def copy_file(source: str, to: str) -> "Tuple[str, Status]":
    """Copy a file and return content id and status of the copy; a file that changes meanwhile is copied again."""
    for left in reversed(range(TRIES)):
        found, size = hashlib.sha256(), 0
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened, io.open(to, "wb") as copy:
            before = status_of(os.fstat(opened.fileno()))
            for piece in iter(lambda: opened.read(PIECE), b""):
                found.update(piece)
                copy.write(piece)
                size += len(piece)
            after = status_of(os.fstat(opened.fileno()))
        if (before == after and size == after[0]) or not left:
            break
    return found.hexdigest(), (size,) + after[1:]


def restore_files(
    files: "Dict[str, Any]",
    folder: str,
    stage: str,
    fetch: "Callable[[str, str], bool]",
    inside: bool = False,
) -> bool:
    """Make the files of a list in `folder`; returns whether the bytes of all of them were there.

    `fetch` saves a content as a file in `stage`, a folder on the same file system, and returns whether there is one.
    Raises `UnsafeName` for a name that would lie elsewhere, and, if the list is to stay `inside`, for a link out of it.
    """
    one = os.path.join(stage, "one")
    with GuardedFolder(folder) as below:
        for name, about in sorted(files.items()):
            local = from_text(name)
            if "link" in about:
                target = about["link"]
                if inside and leads_out(name, target):
                    raise UnsafeName(name, "is a link out of the artifact")
                below.link(local, from_text(target) if inside else target)
            elif about.get("folder"):
                below.make(local)
            else:
                if not fetch(about["sha256"], one) or hash_file(one) != about["sha256"]:
                    return False
                os.chmod(one, about["mode"] & 0o777)
                opened, last = below.clear(local)
                os.rename(one, last, dst_dir_fd=opened)
    return True
