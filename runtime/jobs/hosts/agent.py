#!/usr/bin/env python3
"""Files and commands on the machine where it runs; the other end of `RemoteHost`, which `LocalHost` calls directly.

It needs the standard library and `runtime.shim.tree_walk`, on Python 3.6 to 3.14: both are sent over the connection and never
installed. Requests are lines of JSON on standard input. Answers are lines on standard output after a mark of the other end, so that output of
a login shell does no harm.
"""

import binascii
import errno
import hashlib
import io
import json
import os
import re
import select
import stat
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Set

from runtime.shim.tree_walk import remove_folder, walk

FOLDING_S = 10.0
"""How long a folder may change while it is removed."""
MARKER = "record-root"
"""File of a record root that is in use. Its first line is the root's unique id."""
MAKING = ("create", "link", "make_folder", "put_piece", "write", "write_many")
"""Calls that may begin the use of a root."""
_STARTED: Set[int] = set()
"""Processes that were spawned from here and that nobody has waited for."""


class ForeignRoot(Exception):
    """The root is not the expected one: it has the id `found`, or none, or it does not exist."""

    def __init__(self, found: Optional[str], there: bool) -> None:
        Exception.__init__(self, "this is not the record root that it was")
        self.found = found
        self.there = there


def new_marker() -> bytes:
    text = "r-%s\nJobs keep their records in this folder, which is known by this file.\n"
    return (text % os.urandom(12).hex()).encode()


def read_marker(content: bytes) -> str:
    """The id in a marker; a hash of it if its first line is not an id."""
    text = content.partition(b"\n")[0].decode("utf-8", "replace").strip()
    return text if re.match(r"[\w.-]{1,64}$", text, re.ASCII) else "sha256-" + hashlib.sha256(content).hexdigest()[:24]


class GuardedRoot(object):
    """The files below one root."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.path.expandvars(root)))
        self.known = None  # type: Optional[List[str]]
        """Ids, one of which the root must have; if empty, the root is marked on first use. None skips the check."""
        self.id = None  # type: Optional[str]
        """The root's id; from then on no other is accepted."""
        self._seen = None  # type: Any
        """Device, inode and time of the marker that was read."""

    def look(self, making: bool = False) -> None:
        """Raise `ForeignRoot` if this is not the expected root. A call that is `making` something marks a new root."""
        if self.known is None:
            return
        try:
            status = os.stat(os.path.join(self.root, MARKER))
            seen = (status.st_dev, status.st_ino, status.st_mtime_ns)  # type: Any
        except (FileNotFoundError, NotADirectoryError):
            seen = None
        if seen is not None and seen == self._seen:
            return
        content = None if seen is None else self.read(MARKER)
        if content is None and not self.known:
            content = self._mark() if making else None
            if content is None:
                return
        found = None if content is None else read_marker(content)
        if self.known and found not in self.known:
            raise ForeignRoot(found, os.path.isdir(self.root))
        self.id, self.known, self._seen = found, [str(found)], seen

    def _mark(self) -> Optional[bytes]:
        """Make the root and its marker; returns the marker, which may be another's, or None if there is no room for it."""
        there = os.path.isdir(self.root)
        try:
            self.write_many([[MARKER, new_marker(), 0o644, True]])
        except OSError as problem:
            if there and problem.errno in (errno.ENOSPC, errno.EDQUOT):
                return None
            raise
        return self.read(MARKER)

    def where(self) -> str:
        return self.root

    def path(self, name: str) -> str:
        path = os.path.normpath(os.path.join(self.root, name))
        if path != self.root and not path.startswith(self.root + os.sep):
            raise ValueError("%s lies outside of %s" % (name, self.root))
        return path

    def read(self, name: str, offset: int = 0, limit: Optional[int] = None) -> Optional[bytes]:
        """The bytes of a file or of a folded one, None if there is neither or it is a folder."""
        if name.endswith("/result"):
            # A shim that was overtaken may put its own beside a folded one for a moment.
            stands = self._read_folded(name, offset, limit)
            if stands is not None:
                return stands
        for _ in range(2):  # a file that is being unfolded may move between the two looks
            try:
                with io.open(self.path(name), "rb") as opened:
                    opened.seek(offset)
                    return opened.read(-1 if limit is None else limit)
            except IsADirectoryError:
                return None
            except (FileNotFoundError, NotADirectoryError):
                pass
            folded = self._read_folded(name, offset, limit)
            if folded is not None:
                return folded
        return None

    # Shims fold the small files of a job that has ended into one (`fold` in runtime/shim/files.py); callers do not see it.

    def _folded(self, name: str) -> Dict[str, Any]:
        """Name in a job's folder → file, offset and length, of all files folded with `name`. A length of None means the
        whole file."""
        parts = os.path.relpath(self.path(name), self.root).split(os.sep)
        if parts[0] != "jobs" or len(parts) < 2:
            return {}
        job = os.path.join(self.root, *parts[:2])
        files = [os.path.join(job, "ended")]
        if parts[2:3] == ["runs"] and len(parts) > 3:
            files.append(os.path.join(job, "runs", parts[3] + ".ended"))
        found = {}  # type: Dict[str, Any]
        for path in files:
            try:
                with io.open(path, "rb") as opened:
                    line = opened.readline()
                for each, place in json.loads(line.decode("utf-8")).items():
                    if place is None:
                        found[each] = [os.path.join(job, "runs", each[len("runs/") :].replace("/", ".")), 0, None]
                    else:
                        found[each] = [path, len(line) + place[0], int(place[1])]
            except (ValueError, TypeError, LookupError, AttributeError):
                continue  # damaged
            except OSError as problem:
                if problem.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                    raise
                continue
        return found

    def _find_folded(self, name: str) -> Any:
        return self._folded(name).get("/".join(name.split("/")[2:]))

    def _read_folded(self, name: str, offset: int, limit: Optional[int]) -> Optional[bytes]:
        found = self._find_folded(name)
        if found is None:
            return None
        path, begin, size = found
        length = limit if size is None else max(0, size - offset)
        if limit is not None and length is not None:
            length = min(length, limit)
        try:
            with io.open(path, "rb") as opened:
                opened.seek(begin + offset)
                return opened.read(-1 if length is None else length)
        except FileNotFoundError:
            return None

    def read_many(self, names: List[str]) -> Dict[str, bytes]:
        """The files that exist and that we may read; files in another user's job are left out."""
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
        return self.read(name, offset, limit) or b""

    def create(self, name: str, data: bytes, mode: int, lasting: bool) -> bool:
        return self._put([[name, data, mode, True]], lasting)[0]

    def link(self, there: str, name: str) -> bool:
        """Give a file another name. False if there is no file, it is another user's, or links are not possible."""
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

    def put_piece(self, name: str, offset: int, data: bytes) -> None:
        """Write a part of a file that `place` publishes under its name once all parts have arrived."""
        path = self.path(name)
        self._make_parents(path)
        opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                done = os.pwrite(opened, rest, offset)
                rest, offset = rest[done:], offset + done
        finally:
            os.close(opened)

    def place(self, there: str, name: str) -> None:
        """Rename a file once its bytes are on disk."""
        opened = os.open(self.path(there), os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
        os.rename(self.path(there), self.path(name))

    def write(self, name: str, data: bytes, mode: int) -> None:
        self._put([[name, data, mode, False]])

    def write_many(self, files: List[Any]) -> None:
        """Write `[name, data, mode, once]` of each file; contents and names are durable when this returns."""
        self._put(files)
        for folder in sorted({os.path.dirname(self.path(each[0])) for each in files}):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as problem:
                if problem.errno != errno.EINVAL:  # a file system whose folders need no fsync
                    raise
            finally:
                os.close(descriptor)

    def _put(self, files: List[Any], lasting: bool = True) -> List[bool]:
        """Put each file under its name, in this order, once the bytes of all are on disk if they are `lasting`; returns
        whether each was put."""
        beside = []  # type: List[str]
        try:
            self._write_beside(files, beside, lasting)
            return [
                self._place(temporary, self.path(name), once)
                for temporary, (name, _, _, once) in zip(beside, files)  # noqa: B905 - `strict` is of Python 3.10
            ]
        finally:
            for temporary in beside:  # on a full disk the pieces would block everybody
                try:
                    os.unlink(temporary)
                except FileNotFoundError:
                    pass

    def _place(self, temporary: str, path: str, once: bool) -> bool:
        name = os.path.relpath(path, self.root)
        if not once:
            os.rename(temporary, path)
            return True
        if self._find_folded(name) is not None:
            return False
        try:
            os.link(temporary, path)
        except FileExistsError:
            # If the answer to our own link was lost, a second try looks refused; the link count shows which it is.
            return os.stat(temporary).st_nlink > 1
        if self._find_folded(name) is not None:
            os.unlink(path)  # it was folded a moment ago
            return False
        return True

    def _write_beside(self, files: List[Any], beside: List[str], lasting: bool) -> None:
        """Write each file to a temporary one, and add its name to `beside`."""
        opened = []  # type: List[int]
        try:
            for name, data, mode, _ in files:
                path = self.path(name)
                self._make_parents(path)
                temporary = "%s.%d.%s" % (path, os.getpid(), os.urandom(4).hex())
                opened.append(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
                beside.append(temporary)
                if mode & 0o077:
                    os.fchmod(opened[-1], mode)  # for others too, despite the umask
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(opened[-1], rest) :]
            if len(opened) > 1 and hasattr(os, "posix_fadvise"):
                # This begins the writes without waiting, so that the first fsync commits all of them at once.
                for descriptor in opened:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            for descriptor in opened if lasting else ():
                os.fsync(descriptor)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _make_parents(self, path: str) -> None:
        folder = os.path.dirname(path)
        missing = []
        while not os.path.isdir(folder):
            if self.id is not None and not folder.startswith(self.root + os.sep):
                # A root that was used is never made again.
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), self.root)
            missing.append(folder)
            folder = os.path.dirname(folder)
        for each in reversed(missing):
            self._make_folder(each)

    def _make_folder(self, path: str) -> None:
        """Make a folder: a job's for its owner alone, one right below the root or in the index for all who may write to the
        root, and the root and its parents by the umask."""
        below = os.path.relpath(path, self.root).split(os.sep)
        try:
            os.mkdir(path, 0o700 if below[0] == "jobs" and len(below) > 1 else 0o777)
            if (len(below) == 1 or below[0] == "open") and below[0] not in (os.curdir, os.pardir):
                os.chmod(path, stat.S_IMODE(os.stat(self.root).st_mode))
        except FileExistsError:
            pass

    def make_folder(self, name: str, mode: int) -> bool:
        path = self.path(name)
        self._make_parents(path)
        try:
            os.mkdir(path, mode)
            return True
        except FileExistsError:
            self._check_owner(path)
            return False

    def _check_owner(self, path: str) -> None:
        """Raise for a folder that another user put there in advance: they could change files of the launch before they run."""
        uid = os.lstat(path).st_uid
        if uid in (0, os.geteuid()):
            return
        fresh = "%s.%s" % (path, os.urandom(4).hex())
        os.mkdir(fresh, 0o700)
        try:
            # A file server may give the files of root to a user without rights.
            mine = os.lstat(fresh).st_uid
        finally:
            os.rmdir(fresh)
        if uid != mine:
            name = os.path.relpath(path, self.root)
            raise OSError(errno.EPERM, "its folder %s belongs to another user, uid %d" % (name, uid), path)

    def names(self, folder: str, prefix: str) -> List[str]:
        try:
            found = set(os.listdir(self.path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            found = set()
        parts = [part for part in folder.split("/") if part]
        if parts[:1] == ["jobs"] and len(parts) > 1:
            above = "".join(part + "/" for part in parts[2:])
            found |= {each[len(above) :].split("/")[0] for each in self._folded(folder) if each.startswith(above)}
            if parts[2:] == ["runs"]:
                found = {name.partition(".")[0] if name.endswith((".ended", ".log")) else name for name in found}
            found -= {"ended"} if len(parts) == 2 else set()
        return sorted(name for name in found if name.startswith(prefix))

    def tree(self, folder: str) -> List[Any]:
        top = self.path(folder)
        found = []  # type: List[Any]

        def refuse(problem: OSError) -> None:
            if problem.errno == errno.ENAMETOOLONG:
                found.append([os.path.relpath(problem.filename, top) + "/", 0])
            else:
                _raise_unless_gone(problem)

        for place, _, names in walk(top, refuse):
            for name in names:
                path = os.path.join(place, name)
                try:
                    status = os.stat(path)
                except OSError as problem:
                    refuse(problem)
                    continue
                if stat.S_ISREG(status.st_mode):  # a reader of a pipe would wait for ever
                    found.append([os.path.relpath(path, top), status.st_size])
        parts = [part for part in folder.split("/") if part]
        above = "".join(part + "/" for part in parts[2:])
        there = {each[0] for each in found}
        for name, (path, _, size) in self._folded(folder).items() if len(parts) > 2 else ():
            if name.startswith(above) and name[len(above) :] not in there:
                found.append([name[len(above) :], os.path.getsize(path) if size is None else size])
        return sorted(found)

    def remove(self, name: str) -> None:
        path = self.path(name)
        if path == self.root:
            raise ValueError("the root itself is not removed")
        if os.path.isdir(path) and not os.path.islink(path):
            self._remove_tree(path)
            return
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            pass

    def if_held(self, lock: str, token: str, do: str, args: List[Any]) -> Any:
        """Make a change while a lock has this token; returns its value in a list, None once another took the lock over."""
        stem, _, number = lock.rpartition(".")
        if token.encode() not in (self.read(lock) or b"") or self.read("%s.%d" % (stem, int(number) + 1)) is not None:
            return None
        if do == "remove" and args[0] != os.path.dirname(lock) and os.path.isdir(self.path(args[0])):
            there, args = args[0], ["%s.%s" % (args[0], token)]  # files that appear there meanwhile stay
            os.rename(self.path(there), self.path(args[0]))
        return [getattr(self, do)(*args)]

    def _remove_tree(self, path: str) -> None:
        """Remove a folder, even while a shim that has just ended still folds it."""
        until = time.time() + FOLDING_S
        while True:
            left = remove_folder(path)
            if left is None or not os.path.lexists(path):
                return
            if left.errno not in (errno.ENOENT, errno.ENOTEMPTY) or time.time() >= until:
                raise left
            time.sleep(0.02)

    def room(self) -> List[Optional[int]]:
        """Free bytes and free entries; None if the file system does not count entries."""
        folder = self.root
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        found = os.statvfs(folder)
        return [found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None]


def _raise_unless_gone(problem: OSError) -> None:
    """Leave out of a tree only files that were removed since the listing, dead links, and files not open to us."""
    if problem.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
        raise problem


def in_bytes(words: List[str]) -> List[bytes]:
    """Encode words: an old Python without a locale would refuse text that is not ASCII."""
    return [word.encode("utf-8", "surrogateescape") for word in words]


def run(words: List[str], stdin: bytes, timeout_s: float, env: Optional[Dict[str, Optional[str]]]) -> Any:
    """Run a command; returns exit code, output and errors. The code is None if it was killed at its time limit.

    `env` adds variables; a value of None removes one.
    """
    try:
        child = subprocess.Popen(
            in_bytes(words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(env),
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


def _environment(env: Optional[Dict[str, Optional[str]]]) -> Dict[str, str]:
    merged = dict(os.environ, **(env or {}))  # type: Dict[str, Any]
    return {name: value for name, value in merged.items() if value is not None}


def spawn(words: List[str], folder: str, log: str, env: Optional[Dict[str, Optional[str]]]) -> int:
    """Start a process in a session of its own, and make the folder of its log; returns the pid."""
    for pid in list(_STARTED):
        _forget_ended(pid)  # a program that goes on would collect one for each job
    if not os.path.isdir(os.path.dirname(log)):
        os.makedirs(os.path.dirname(log), 0o700)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        child = subprocess.Popen(
            in_bytes(words),
            cwd=folder,
            env=_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            close_fds=True,
        )
    finally:
        os.close(descriptor)
    child.returncode = 0  # it outlives us: Popen must not wait for it
    _STARTED.add(child.pid)
    return child.pid


def _forget_ended(pid: int) -> bool:
    """Whether a spawned process has ended; it is waited for then, and its number may be another's."""
    try:
        ended = bool(os.waitpid(pid, os.WNOHANG)[0])
    except OSError:
        ended = True  # somebody else waited for it
    if ended:
        _STARTED.discard(pid)
    return ended


def wait(pid: int, seconds: float) -> bool:
    """Whether a process that was spawned from here ends within `seconds`; returns as soon as it does."""
    until, pause = time.time() + seconds, 0.001
    descriptor = -1
    open_process = getattr(os, "pidfd_open", None)  # of Python 3.9 on
    if open_process is not None:
        try:
            descriptor = open_process(pid)
        except OSError:
            pass  # an old system, or no child of ours, or one that was waited for
    try:
        while True:
            if _forget_ended(pid):
                return True
            left = until - time.time()
            if left <= 0:
                return False
            if descriptor >= 0:
                select.select([descriptor], [], [], left)
            else:
                time.sleep(min(left, pause))
                pause = min(0.02, pause * 1.5)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def pack(value: Any) -> Any:
    """Encode a value whose bytes JSON cannot hold."""
    if isinstance(value, bytes):
        return {"b64": binascii.b2a_base64(value, newline=False).decode("ascii")}
    if isinstance(value, dict):
        return {"map": {key: pack(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return [pack(item) for item in value]
    return value


def unpack(value: Any) -> Any:
    if isinstance(value, dict):
        if "b64" in value:
            return binascii.a2b_base64(value["b64"])
        return {key: unpack(item) for key, item in value["map"].items()}
    if isinstance(value, list):
        return [unpack(item) for item in value]
    return value


def answer(place: GuardedRoot, do: str, args: Any) -> Any:
    if do == "run":
        return run(*args)
    if do == "wait":
        return wait(*args)
    place.look(making=do in MAKING)
    return spawn(*args) if do == "spawn" else getattr(place, do)(*args)


def serve(mark: str, root: str) -> None:
    """Answer until the input ends."""
    place = GuardedRoot(root)
    while True:
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line.decode("utf-8"))
        if place.id is None:
            place.known = request.get("known")
        try:
            said = {
                "id": request["id"],
                "value": pack(answer(place, request["do"], unpack(request["args"]))),
                "root": place.id,
            }
        except ForeignRoot as strange:
            said = {"id": request["id"], "strange": [strange.found, strange.there]}
        except Exception as problem:  # the other end has to get any error
            said = {"id": request["id"], "error": str(problem), "errno": getattr(problem, "errno", None)}
        sys.stdout.write("%s %s\n" % (mark, json.dumps(said)))
        sys.stdout.flush()
