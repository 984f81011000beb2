"""The shim's modules as earlier starts on this machine compiled them, which takes longer than all else before a command.

Every start compiles this module, so it is small and imports next to nothing.
"""

import marshal
import os
import stat
import sys
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Optional


def find_code(program: str, name: str, source: str, path: str) -> "CodeType":
    """The code of a module; it is compiled if no earlier start has left it, and left for later ones.

    `program` is the shim's content id, `path` what tracebacks show.
    """
    folder = name_folder(program)
    found = read_code(folder, name)
    if found is None:
        found = compile(source, path, "exec")
        if not sys.dont_write_bytecode:
            keep_code(folder, name, found)
    return found


def name_folder(program: str) -> str:
    """The folder of what this Python compiled of that shim, below this user's own folder for temporary files."""
    magic = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER
    python = "%s-%s-%d" % (sys.implementation.cache_tag, magic.hex(), sys.flags.optimize)
    private = "%s/research-runtime-%d" % (os.environ.get("TMPDIR") or "/tmp", os.geteuid())
    return "%s/shim-%s-%s" % (private, program, python)


def read_code(folder: str, name: str) -> "Optional[CodeType]":
    """The code in a file that only this user can have written, None if there is none."""
    how = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(os.path.join(folder, name), how), "rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISREG(status.st_mode):
                return None
            head, _, body = opened.read().partition(b"\n")
    except OSError:
        return None
    return marshal.loads(body) if head == make_head(folder, name, body) else None


def keep_code(folder: str, name: str, code: "CodeType") -> None:
    """Leave code for later starts, where that can be done."""
    body = marshal.dumps(code)
    place = os.path.join(folder, name)
    temporary = "%s.%d" % (place, os.getpid())
    try:
        for each in (os.path.dirname(folder), folder):
            if not is_own_folder(each):
                return
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    try:
        with open(descriptor, "wb") as opened:
            opened.write(make_head(folder, name, body) + b"\n" + body)
        os.rename(temporary, place)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass


def is_own_folder(path: str) -> bool:
    """Whether a folder, made if it is missing, is this user's. `runtime.file_trust` is among the modules that are loaded so."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def make_head(folder: str, name: str, body: bytes) -> bytes:
    """The first line of a file. It repeats the names, since others can rename this user's files in a folder that they can
    write, and has a checksum, since a machine that loses its power may keep a part of a file."""
    return ("%s/%s %08x" % (os.path.basename(folder), name, zlib.crc32(body))).encode("utf-8")
