"""Whose files and folders are believed: those of this user, of root and of the person behind `sudo`, if nobody else can write them.

A group may write: with the umask 002 of many systems everything that a user makes is writable for the user's own group,
and a lab's folder is writable for the lab on purpose. A file that a member of the group *replaces* belongs to that member.

The shim ships this module too, for Python from 3.6 on.
"""

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Set, Tuple

TRUST = "RUNTIME_TRUST"
"""Variable with folders, separated by colons, whose files are believed whoever owns them."""

MOST_BYTES = 8 << 20
"""The most of a file of settings."""


def own_ids() -> "Set[int]":
    """The owners that are believed. As in git, the person behind `sudo` counts if we are root:
    https://git-scm.com/docs/git-config#Documentation/git-config.txt-safedirectory"""
    ids = {0, os.geteuid()}
    behind = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    if behind.isdecimal():
        ids.add(int(behind))
    return ids


def find_fault(status: os.stat_result, ids: "Optional[Set[int]]" = None, alone: bool = False) -> str:
    """Why a file or folder with this status is not believed; empty if it is. `alone` means that no group may write either."""
    if status.st_uid not in (own_ids() if ids is None else ids):
        return "belongs to another user"
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (0o022 if alone else 0o002) and not sticky and not stat.S_ISLNK(status.st_mode):
        return "can be written by other users" if alone else "can be written by every user"
    return ""


def is_ours(path: str, alone: bool = False) -> bool:
    """Whether a file or folder is believed, with the link that leads to it if it is one. False if it is missing."""
    try:
        return not (find_fault(os.lstat(path), alone=alone) or find_fault(os.stat(path), alone=alone))
    except OSError:
        return False


def find_stranger(path: str, opened: "Optional[os.stat_result]" = None) -> "Optional[Tuple[str, os.stat_result, str]]":
    """The first of a file, its folder, and what they lead to that is not believed: its path, status and fault.

    `opened` is the status of the open file, which counts even if the path leads elsewhere by now. None if all are
    believed, or named by `TRUST`. Raises `OSError` if one of them cannot be looked at.
    """
    ids = own_ids()
    fault = find_fault(opened, ids) if opened else ""
    if opened and fault and not is_named(path):
        return path, opened, fault
    places = [path, os.path.dirname(path) or "."]
    if os.path.islink(path):
        real = os.path.realpath(path)
        places += [real, os.path.dirname(real)]
    for place in places:
        for status in (os.lstat(place), os.stat(place)):
            fault = find_fault(status, ids)
            if fault and not is_named(place):
                return place, status, fault
    return None


def is_named(path: str) -> bool:
    """Whether `TRUST` names the path, or a folder above it."""
    for folder in os.environ.get(TRUST, "").split(os.pathsep):
        if os.path.isabs(folder):
            for each in (os.path.abspath(path), os.path.realpath(path)):
                if each == os.path.normpath(folder) or each.startswith(os.path.normpath(folder).rstrip("/") + "/"):
                    return True
    return False


def check_trusted(path: str, *, instead: str, opened: "Optional[os.stat_result]" = None) -> None:
    """Raise `Untrusted` for a file that chooses code or destinations and that others could have written; `instead` is another way."""
    try:
        found = find_stranger(path, opened)
    except OSError:
        return  # It is gone, or in a folder that we cannot look into: then it cannot be read either.
    if found is not None:
        from runtime.errors import Untrusted

        place, status, fault = found
        folder = place if stat.S_ISDIR(status.st_mode) else os.path.dirname(os.path.abspath(place))
        raise Untrusted(
            path,
            why=fault if place == path else "`%s` %s" % (place, fault),
            owner=user_name(status.st_uid),
            mode=stat.filemode(status.st_mode),
            trust="%s=%s" % (TRUST, folder),
            instead=instead,
        )


def read_file(path: str) -> "Optional[Tuple[os.stat_result, bytes]]":
    """Status and bytes of a regular file, as of one moment; None if there is none.

    Another user's pipe would keep its reader waiting for ever, and a large file would fill the memory: one byte more than
    `MOST_BYTES` is read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            return (status, opened.read(MOST_BYTES + 1)) if stat.S_ISREG(status.st_mode) else None
    except OSError:
        return None


def check_size(path: str, content: bytes) -> None:
    """Raise `RequestRefused` for a file of which `read_file` returned only the beginning."""
    if len(content) > MOST_BYTES:
        from runtime.errors import RequestRefused

        raise RequestRefused("`%s` is too large for a file of settings: over %d MiB" % (path, MOST_BYTES >> 20))


def user_name(uid: int) -> str:
    """The name of a user with the number, for a person to read."""
    import pwd

    try:
        return "%s (uid %d)" % (pwd.getpwuid(uid).pw_name, uid)
    except KeyError:
        return "uid %d" % uid


def check_own(path: str, *, mend: bool, instead: str) -> None:
    """Raise `Untrusted` if a folder with this user's files is another user's, or everybody can make files in it.

    A folder of this user's that others can look into is closed to them if `mend`. A missing one is fine.
    """
    if mend:
        close_file(path, 0o700)
    if os.path.lexists(path):
        check_trusted(path, instead=instead)


def make_folders(path: str) -> None:
    """Make a folder and those above it that are missing, each for this user alone."""
    if not os.path.isdir(path):
        if os.path.dirname(path) != path:
            make_folders(os.path.dirname(path))
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass  # Another process was first, or a file has the name: then its user fails.


def close_file(path: str, mode: int = 0o600) -> None:
    """Take from others what rights they have to a file or folder of this user's."""
    try:
        status = os.lstat(path)
        wide = not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o077
        if wide and status.st_uid == os.geteuid():
            os.chmod(path, mode)
    except OSError:
        pass  # It is missing, or its file system has no modes.


def write_private(path: "os.PathLike[str]", content: str) -> None:
    """Write a file of this user's alone, in folders of this user's alone. Raises `OSError`."""
    name = os.fspath(path)
    make_folders(os.path.dirname(name))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(name, flags, 0o600), "w", encoding="utf-8", errors="surrogateescape") as opened:
        if os.fstat(opened.fileno()).st_mode & 0o077:
            close_file(name)
        opened.write(content)


def private_folder(path: str, mode: int = 0o700) -> str:
    """A folder that only this user can write, made if it is missing: `path`, or `path-…` if somebody else has taken that name.

    The parent may be a folder in which everybody can make files, such as `/tmp`. The same path gives the same folder again.
    """
    if make_private(path, mode):
        return path
    parent, name = os.path.split(path)
    for other in sorted(os.listdir(parent)):
        if other.startswith(name + "-") and make_private(os.path.join(parent, other), mode, make=False):
            return os.path.join(parent, other)
    import tempfile

    made = tempfile.mkdtemp(prefix=name + "-", dir=parent)
    os.chmod(made, mode)
    return made


def make_private(path: str, mode: int = 0o700, make: bool = True) -> bool:
    """Make a folder for this user alone, or close one of this user's to others; False if its name is something else's."""
    try:
        if make:
            os.mkdir(path, mode)
    except FileExistsError:
        pass
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    if stat.S_IMODE(status.st_mode) != mode:
        os.chmod(path, mode)
    return True
