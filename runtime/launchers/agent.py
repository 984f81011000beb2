#!/usr/bin/env python3
"""Files and commands on the machine where it runs; the other end of `SshHost`, and what `LocalHost` calls directly.

One file of the standard library, for Python 3.6 to 3.14: it is sent over the connection and never installed. Requests
are lines of JSON on standard input, answers lines on standard output behind a mark that the other end chose, so that
what a login shell prints does no harm.
"""

import base64
import errno
import io
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from typing import Any, Dict, List, Optional

BLOCK = 1 << 20


class Place(object):
    """The files below one root."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.path.expandvars(root)))

    def where(self) -> str:
        return self.root

    def path(self, name: str) -> str:
        path = os.path.normpath(os.path.join(self.root, name))
        if path != self.root and not path.startswith(self.root + os.sep):
            raise ValueError("%s lies outside of %s" % (name, self.root))
        return path

    def read(self, name: str) -> Optional[bytes]:
        try:
            with io.open(self.path(name), "rb") as opened:
                return opened.read()
        except (IOError, OSError) as problem:
            if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                return None
            raise

    def read_many(self, names: List[str]) -> Dict[str, bytes]:
        """Those that are there and that we may read: what lies in another user's job is none of ours."""
        found = {}
        for name in names:
            try:
                content = self.read(name)
            except (IOError, OSError) as problem:
                if problem.errno != errno.EACCES:
                    raise
                continue
            if content is not None:
                found[name] = content
        return found

    def read_from(self, name: str, offset: int, limit: int) -> bytes:
        try:
            with io.open(self.path(name), "rb") as opened:
                opened.seek(offset)
                return opened.read(limit)
        except (IOError, OSError) as problem:
            if problem.errno in (errno.ENOENT, errno.ENOTDIR):
                return b""
            raise

    def create(self, name: str, data: bytes, mode: int) -> bool:
        path, temporary = self._write_beside(name, data, mode)
        try:
            os.link(temporary, path)
        except OSError as problem:
            # An answer that was lost on the way looks like a refusal of our own link; the link count tells.
            if problem.errno != errno.EEXIST:
                raise
            return os.stat(temporary).st_nlink > 1
        finally:
            os.unlink(temporary)
        return True

    def link(self, there: str, name: str) -> bool:
        """Give a file another name too. False where there is none, or it is another user's, or links cannot be had."""
        path = self.path(name)
        self._make_parents(path)
        try:
            os.link(self.path(there), path)
        except OSError as problem:
            if problem.errno == errno.EEXIST:
                return os.path.samefile(self.path(there), path)
            if problem.errno not in (errno.ENOENT, errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK):
                raise
            return False
        return True

    def write(self, name: str, data: bytes, mode: int) -> None:
        path, temporary = self._write_beside(name, data, mode)
        os.rename(temporary, path)

    def _write_beside(self, name: str, data: bytes, mode: int) -> Any:
        path = self.path(name)
        self._make_parents(path)
        temporary = "%s.%d.%08x" % (path, os.getpid(), random.SystemRandom().getrandbits(32))
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(data)
                opened.flush()
                os.fsync(opened.fileno())
        except (IOError, OSError):
            os.unlink(temporary)  # on a full disk the pieces would be in the way of everybody
            raise
        return path, temporary

    def _make_parents(self, path: str) -> None:
        folder = os.path.dirname(path)
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for each in reversed(missing):
            self._make_folder(each)

    def _make_folder(self, path: str) -> None:
        """Folders of a job are its owner's alone; those below the root are for all who may write to the root, and the
        root itself and what lies above is made as the umask says."""
        below = os.path.relpath(path, self.root).split(os.sep)
        try:
            os.mkdir(path, 0o700 if below[0] == "jobs" and len(below) > 1 else 0o777)
            if len(below) == 1 and below[0] not in (os.curdir, os.pardir):
                os.chmod(path, stat.S_IMODE(os.stat(self.root).st_mode))
        except OSError as problem:
            if problem.errno != errno.EEXIST:
                raise

    def make_folder(self, name: str, mode: int) -> bool:
        path = self.path(name)
        self._make_parents(path)
        try:
            os.mkdir(path, mode)
        except OSError as problem:
            if problem.errno == errno.EEXIST:
                return False
            raise
        return True

    def names(self, folder: str, prefix: str) -> List[str]:
        try:
            return sorted(name for name in os.listdir(self.path(folder)) if name.startswith(prefix))
        except OSError as problem:
            if problem.errno in (errno.ENOENT, errno.ENOTDIR):
                return []
            raise

    def tree(self, folder: str) -> List[Any]:
        top = self.path(folder)
        found = []
        for place, _, names in os.walk(top):
            for name in names:
                path = os.path.join(place, name)
                try:
                    status = os.stat(path)
                except OSError:
                    continue  # gone since it was listed, or a link to nowhere
                if stat.S_ISREG(status.st_mode):  # whoever reads a pipe waits for ever
                    found.append([os.path.relpath(path, top), status.st_size])
        return sorted(found)

    def remove(self, name: str) -> None:
        path = self.path(name)
        if path == self.root:
            raise ValueError("the root itself is not removed")
        if os.path.isdir(path) and not os.path.islink(path):
            for place, folders, _ in os.walk(path):
                for folder in folders:
                    if not os.path.islink(os.path.join(place, folder)):
                        os.chmod(os.path.join(place, folder), 0o700)
            shutil.rmtree(path)
            return
        try:
            os.unlink(path)
        except OSError as problem:
            if problem.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise

    def free_bytes(self) -> int:
        folder = self.root
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


def in_bytes(words: List[str]) -> List[bytes]:
    """An old Python that is started without a locale would refuse what is not ASCII."""
    return [word.encode("utf-8", "surrogateescape") for word in words]


def run(words: List[str], stdin: bytes, timeout_s: float, env: Optional[Dict[str, Optional[str]]]) -> Any:
    """Exit code, output and errors of a command; code None where it did not end in time and was killed.

    `env` adds variables; one whose value is None is taken away.
    """
    environment = dict(os.environ)
    for name, value in (env or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    try:
        child = subprocess.Popen(
            in_bytes(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
    except OSError as problem:
        return [127, "", "%s: %s" % (words[0], os.strerror(problem.errno or 0))]
    try:
        out, err = child.communicate(stdin, timeout=timeout_s)
        code = child.returncode  # type: Optional[int]
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        code = None
    return [code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")]


def spawn(words: List[str], folder: str, log: str, env: Optional[Dict[str, str]]) -> int:
    """Start a process in a session of its own and leave it; its pid."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        child = subprocess.Popen(
            in_bytes(words),
            cwd=folder,
            env=dict(os.environ, **(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            close_fds=True,
        )
    finally:
        os.close(descriptor)
    child.returncode = 0  # It outlives us; nobody waits for it.
    return child.pid


# requests


def pack(value: Any) -> Any:
    """What JSON cannot carry: bytes."""
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, dict):
        return {"map": {key: pack(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return [pack(item) for item in value]
    return value


def unpack(value: Any) -> Any:
    if isinstance(value, dict):
        if "b64" in value:
            return base64.b64decode(value["b64"])
        return {key: unpack(item) for key, item in value["map"].items()}
    if isinstance(value, list):
        return [unpack(item) for item in value]
    return value


def answer(place: Place, request: Any) -> Any:
    do, args = request["do"], unpack(request["args"])
    if do == "run":
        return run(*args)
    if do == "spawn":
        return spawn(*args)
    return getattr(place, do)(*args)


def serve(mark: str, root: str) -> None:
    """Answer until the input ends."""
    place = Place(root)
    while True:
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line.decode("utf-8"))
        try:
            said = {"id": request["id"], "value": pack(answer(place, request))}
        except Exception as problem:  # whatever it is, the other end has to hear of it
            said = {"id": request["id"], "error": str(problem), "errno": getattr(problem, "errno", None)}
        sys.stdout.write("%s %s\n" % (mark, json.dumps(said)))
        sys.stdout.flush()
