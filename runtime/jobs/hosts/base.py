"""Where launchers act: a machine that runs commands, and the files of a record root.

`LocalHost` is this machine, `SshHost` another through the system's `ssh`. Both answer the same Protocols, so a Slurm
launcher does not know whether it runs on the login node.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Protocol, TypeVar, runtime_checkable

from runtime.errors import InfrastructureFailure, NotPossible, StoreUnavailable
from runtime.jobs.hosts import agent
from runtime.values import dataclass

T = TypeVar("T")

LOG_TAIL: Final = 4096
"""Bytes of the end of a log that an explanation rests on."""
_SOCKET_PATH: Final = 104
_SOCKET_NAME: Final = 58
"""Letters of `/%C` and of the ending that ssh gives it until the socket is ready."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """One of many files that are written together."""

    name: str
    data: bytes
    mode: int = 0o600
    once: bool = False
    """It stays as it is where it is there already."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is free in a record root; None has no limit, or none that is told."""

    bytes: int | None = None
    files: int | None = None


class RootWatch(Protocol):
    """Which record root is meant, by the ids that it may bear."""

    known: Sequence[str]
    """Empty before the first use."""

    def saw(self, identity: str) -> None:
        """The root bears this id, one of those that are known or the first."""

    def refusal(self, found: str | None, *, there: bool) -> InfrastructureFailure:
        """What is raised for a root with another id, or without one; `there` says whether there is such a folder."""


class Files(Protocol):
    """Files below one root, by relative names with `/`. Nothing here locks, and all of it is safe on NFS.

    Every method raises `StoreUnavailable` where the place does not answer.
    """

    address: str
    """What the root is called here, whoever asks; the same for all targets that mean it."""

    @property
    def root(self) -> str:
        """In full, as the nodes see it."""

    def keep_to(self, watch: RootWatch) -> None:
        """Before the first use: let no call through to another root than the `watch` knows, and mark one that is new.

        That takes no exchange of its own. From then on every method raises the watch's refusal for a root that is
        another, has lost its marker, or is not there; it is never made again.
        """

    def read(self, name: str) -> bytes | None:
        """None where there is no such file."""

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """Those of the files that there are and that may be read, in one exchange."""

    def read_from(self, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        """At most `limit` bytes from `offset`; empty at the end and where there is no such file."""

    def create(self, name: str, data: bytes, *, mode: int = 0o600, lasting: bool = True) -> bool:
        """Create the file whole, folders above included; False if it is there already. The first of many wins.

        One that need not be `lasting` may be gone or empty after a power failure, and does not wait for the disk.
        """

    def write(self, name: str, data: bytes, *, mode: int = 0o600) -> None:
        """Create or replace it, whole."""

    def write_many(self, files: Sequence[FileToWrite]) -> None:
        """Create or replace each, whole, in one exchange. The last appears after all others, and all of them last when
        this returns. A call that was cut off leaves any of them out and none half, and may be made again."""

    def make_folder(self, name: str, *, mode: int = 0o700) -> bool:
        """False if it is there already. The first of many wins."""

    def names(self, folder: str, prefix: str = "") -> list[str]:
        """Names in the folder that begin with `prefix`, sorted; empty where there is none."""

    def tree(self, folder: str) -> list[tuple[str, int]]:
        """Relative name and size in bytes of every file below; links to files count as files, pipes and the like not."""

    def download(self, name: str, to: BinaryIO) -> None:
        """Copy a file's bytes to one of this machine, which is open for writing and empty.

        Where a file of this machine lies is for the caller to say: `LocalFolder` makes safe places of remote names.
        """

    def remove(self, name: str) -> None:
        """Delete a file or a folder with all below; already gone is success."""

    def room(self) -> Room:
        """What may still be written there."""


@runtime_checkable
class Links(Protocol):
    """Files that may have more than one name."""

    def link(self, there: str, name: str) -> bool:
        """Give the file `there` another name too. False where there is none, or it is not ours to link."""


class Host(Protocol):
    """A machine that runs commands for us, and the record root as seen from it."""

    name: str
    """`localhost`, or as `ssh` knows it."""
    files: Files

    def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60,
        env: Mapping[str, str | None] | None = None,
    ) -> Answer:
        """Run a command to its end; a variable whose value is None is taken away from it. Raises `HostUnavailable`
        where the host cannot be reached or does not answer in time; then it is not known whether the command ran."""

    def spawn(self, words: Sequence[str], *, folder: str, log: str, env: Mapping[str, str | None] | None = None) -> int:
        """Start a process that outlives us and our connection, in a session of its own; its pid. The folder of its log
        is made."""

    def wait(self, pid: int, seconds: float) -> bool:
        """Whether a process that was spawned through this very object ends within so many seconds; says so at once.

        Whoever else asks this host for something may have to wait as long, the lock of a launch too: ask in short turns.
        """

    def close(self) -> None: ...


class HostUnavailable(InfrastructureFailure):
    """A machine cannot be reached, or did not answer in time: it is not known whether the command ran."""


class AccessDenied(StoreUnavailable):
    """A file or folder belongs to somebody else and is not open to us."""


class LocalFiles:
    """A folder that this machine can see."""

    def __init__(self, root: str) -> None:
        self._place = agent.Place(root)
        self.root = self.address = self._place.root
        self._watch: RootWatch | None = None

    def keep_to(self, watch: RootWatch) -> None:
        self._watch, self._place.known = watch, list(watch.known)

    def look(self) -> None:
        """Raise what the watch says if this is another root now."""
        self._do(self._place.where)

    def read(self, name: str) -> bytes | None:
        return self._do(self._place.read, name)

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        return self._do(self._place.read_many, list(names))

    def read_from(self, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        return self._do(self._place.read_from, name, offset, limit)

    def create(self, name: str, data: bytes, *, mode: int = 0o600, lasting: bool = True) -> bool:
        return self._do(self._place.create, name, data, mode, lasting)

    def link(self, there: str, name: str) -> bool:
        return self._do(self._place.link, there, name)

    def write(self, name: str, data: bytes, *, mode: int = 0o600) -> None:
        self._do(self._place.write, name, data, mode)

    def write_many(self, files: Sequence[FileToWrite]) -> None:
        self._do(self._place.write_many, _fields(files))

    def make_folder(self, name: str, *, mode: int = 0o700) -> bool:
        return self._do(self._place.make_folder, name, mode)

    def names(self, folder: str, prefix: str = "") -> list[str]:
        return self._do(self._place.names, folder, prefix)

    def tree(self, folder: str) -> list[tuple[str, int]]:
        return [(name, size) for name, size in self._do(self._place.tree, folder)]

    def download(self, name: str, to: BinaryIO) -> None:
        def copy(path: str) -> None:
            with Path(path).open("rb") as opened:
                shutil.copyfileobj(opened, to)
                found = os.fstat(opened.fileno())
            to.flush()
            os.fchmod(to.fileno(), found.st_mode & 0o777)
            os.utime(to.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))

        self._do(copy, self._place.path(name))

    def remove(self, name: str) -> None:
        self._do(self._place.remove, name)

    def room(self) -> Room:
        return Room(*self._do(self._place.room))

    def _do(self, action: Callable[..., T], *args: Any) -> T:
        try:
            self._place.look(making=action.__name__ in agent.MAKING)
            done = action(*args)
        except agent.StrangeRoot as strange:
            assert self._watch is not None
            raise self._watch.refusal(strange.found, there=strange.there) from None
        except OSError as problem:
            raise _explain(self.root, problem.strerror or str(problem), problem.errno) from problem
        except ValueError as problem:
            raise _explain(self.root, str(problem), None) from None
        if self._watch is not None and self._place.id is not None:
            self._watch.saw(self._place.id)
        return done


class LocalHost:
    """This machine."""

    name = "localhost"

    def __init__(self, root: str) -> None:
        self._local = LocalFiles(root)
        self.files: Files = self._local

    def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60,
        env: Mapping[str, str | None] | None = None,
    ) -> Answer:
        code, out, err = agent.run(list(words), stdin, timeout_s, dict(env or {}))
        return _in_time(self.name, words, code, out, err, timeout_s)

    def spawn(self, words: Sequence[str], *, folder: str, log: str, env: Mapping[str, str | None] | None = None) -> int:
        self._local.look()
        try:
            return agent.spawn(list(words), folder, log, dict(env or {}))
        except OSError as problem:
            raise NotPossible(
                f"cannot start `{words[0]}` on this machine: {(problem.strerror or str(problem)).lower()}",
                hint="set `python` of the target to an interpreter from 3.6 on",
            ) from problem

    def wait(self, pid: int, seconds: float) -> bool:
        return agent.wait(pid, seconds)

    def close(self) -> None:
        pass


class SshHost:
    """A machine behind the system's `ssh`: its settings, its agent, its jump hosts and its known hosts are the user's.

    One connection carries everything. Host keys are checked as the user's ssh checks them.
    """

    def __init__(
        self,
        name: str,
        root: str,
        *,
        python: str = "python3",
        options: Sequence[str] = (),
        control_folder: Path | None = None,
    ) -> None:
        """`control_folder` keeps a connection that later commands share, so that a second factor is asked for once;
        not used where the user's own settings for this host share one already."""
        self.name = name
        self._python, self._options, self._control = python, list(options), control_folder
        self._root = root
        self.watch: RootWatch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._count = 0
        self._lock = threading.Lock()
        self.files: Files = SshFiles(self, root)

    def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60,
        env: Mapping[str, str | None] | None = None,
    ) -> Answer:
        code, out, err = self.ask("run", list(words), stdin, timeout_s, dict(env or {}), patience_s=timeout_s + 30)
        return _in_time(self.name, words, code, out, err, timeout_s)

    def spawn(self, words: Sequence[str], *, folder: str, log: str, env: Mapping[str, str | None] | None = None) -> int:
        pid: int = self.ask("spawn", list(words), folder, log, dict(env or {}))
        return pid

    def wait(self, pid: int, seconds: float) -> bool:
        ended: bool = self.ask("wait", pid, seconds, patience_s=seconds + 30)
        return ended

    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
        """One request to the other end. Raises `HostUnavailable`, and `StoreUnavailable` for what a file refused."""
        with self._lock:
            process = self._process or self._connect()
            self._count += 1
            try:
                assert process.stdin is not None
                process.stdin.write(render_request(self._count, do, args, self.watch))
                process.stdin.flush()
                said = self._hear(process, patience_s)
            except (OSError, EOFError) as problem:
                raise self._lost(process) from problem
        check_root(said, self.watch)
        if "error" in said:
            raise _explain(f"{self.name}:{self._root}", said["error"], said["errno"])
        return agent.unpack(said["value"])

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except OSError:
                        pass
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if self._errors is not None:
                self._errors.close()

    def _connect(self) -> subprocess.Popen[bytes]:
        self._mark = f"=={os.urandom(12).hex()}=="
        source = Path(agent.__file__).read_bytes()
        program = "import sys; n = int(sys.stdin.buffer.readline()); exec(sys.stdin.buffer.read(n).decode())"
        words = [
            "ssh",
            "-T",
            *self._connection_options(),
            self.name,
            "exec",
            self._python,
            "-u",
            "-c",
            shlex.quote(program),
        ]
        import tempfile

        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=not _has_terminal(),
            )
        except OSError as problem:
            self._errors.close()
            raise HostUnavailable(
                f"cannot run `ssh`: {(problem.strerror or str(problem)).lower()}",
                hint="install an OpenSSH client",
                retryable=False,
            ) from problem
        self._process = process
        call = f"\nserve({self._mark!r}, {self._root!r})\n".encode()
        assert process.stdin is not None
        try:
            process.stdin.write(b"%d\n" % (len(source) + len(call)) + source + call)
            process.stdin.flush()
        except OSError as problem:
            raise self._lost(process) from problem
        return process

    def _connection_options(self) -> list[str]:
        options = [
            *self._options,
            "-o",
            "ConnectTimeout=20",
            "-o",
            "ServerAliveInterval=15",
            "-o",
            "ServerAliveCountMax=4",
        ]
        if not _has_terminal():
            options += ["-o", "BatchMode=yes"]
        # A longer path than a socket can have would make ssh give up altogether.
        short = self._control is not None and len(str(self._control)) + _SOCKET_NAME <= _SOCKET_PATH
        if self._control is not None and short and not self._shares_connection():
            self._control.mkdir(parents=True, exist_ok=True, mode=0o700)
            options += ["-o", "ControlMaster=auto", "-o", f"ControlPath={self._control}/%C", "-o", "ControlPersist=10m"]
        return options

    def _shares_connection(self) -> bool:
        asked = subprocess.run(["ssh", "-G", *self._options, self.name], capture_output=True, text=True, check=False)
        settings = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
        # With a path of theirs and `ControlMaster no`, a connection that they opened by hand is used all the same.
        return settings.get("controlpath", "none") != "none"

    def _hear(self, process: subprocess.Popen[bytes], patience_s: float) -> dict[str, Any]:
        """The next answer, whatever else is printed; `EOFError` where none comes."""
        assert process.stdout is not None
        timer = threading.Timer(patience_s, process.kill)
        timer.start()
        try:
            mark = self._mark.encode()
            while line := process.stdout.readline():
                _, found, rest = line.partition(mark)
                if found:
                    said: dict[str, Any] = json.loads(rest)
                    return said
        finally:
            timer.cancel()
        raise EOFError

    def _lost(self, process: subprocess.Popen[bytes]) -> HostUnavailable:
        try:
            code: int | None = process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        said = ""
        if self._errors is not None:
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace").strip()
        self.close()
        last = said.splitlines()[-1] if said else "it closed the connection without a word"
        return HostUnavailable(
            f"no connection to `{self.name}`: {last}",
            facts=[] if code is None else [f"ssh ended with code {code}"],
            hint=_hint(self.name, said, self._python),
        )

    _errors: IO[bytes] | None = None


def render_request(number: int, do: str, args: Sequence[Any], watch: RootWatch | None) -> bytes:
    """A line for an agent. It tells which root is meant, so that looking for its marker takes no exchange."""
    request = {"id": number, "do": do, "args": agent.pack(list(args))}
    if watch is not None:
        request["known"] = list(watch.known)
    return json.dumps(request).encode() + b"\n"


def check_root(said: Mapping[str, Any], watch: RootWatch | None) -> None:
    """Raise the watch's refusal if an agent's answer tells of another root."""
    if watch is None:
        return
    if "strange" in said:
        found, there = said["strange"]
        raise watch.refusal(found, there=there)
    if said.get("root"):
        watch.saw(said["root"])


class SshFiles:
    """A folder of another machine."""

    def __init__(self, host: SshHost, root: str, address: str | None = None) -> None:
        self._host = host
        self.address = address or f"{host.name}:{root}"

    def keep_to(self, watch: RootWatch) -> None:
        self._host.watch = watch

    @functools.cached_property
    def root(self) -> str:
        found: str = self._host.ask("where")
        return found

    def read(self, name: str) -> bytes | None:
        found: bytes | None = self._host.ask("read", name)
        return found

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = self._host.ask("read_many", list(names))
        return found

    def read_from(self, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        found: bytes = self._host.ask("read_from", name, offset, limit)
        return found

    def create(self, name: str, data: bytes, *, mode: int = 0o600, lasting: bool = True) -> bool:
        made: bool = self._host.ask("create", name, data, mode, lasting, patience_s=600)
        return made

    def link(self, there: str, name: str) -> bool:
        linked: bool = self._host.ask("link", there, name)
        return linked

    def write(self, name: str, data: bytes, *, mode: int = 0o600) -> None:
        self._host.ask("write", name, data, mode, patience_s=600)

    def write_many(self, files: Sequence[FileToWrite]) -> None:
        self._host.ask("write_many", _fields(files), patience_s=600)

    def make_folder(self, name: str, *, mode: int = 0o700) -> bool:
        made: bool = self._host.ask("make_folder", name, mode)
        return made

    def names(self, folder: str, prefix: str = "") -> list[str]:
        return [str(name) for name in self._host.ask("names", folder, prefix)]

    def tree(self, folder: str) -> list[tuple[str, int]]:
        found = self._host.ask("tree", folder)
        try:
            return [(str(name), int(size)) for name, size in found]
        except (TypeError, ValueError):
            raise HostUnavailable(
                f"`{self._host.name}` answers with no list of files", hint=f"try it by hand: ssh {self._host.name} true"
            ) from None

    def download(self, name: str, to: BinaryIO) -> None:
        offset = 0
        while chunk := self.read_from(name, offset):
            to.write(chunk)
            offset += len(chunk)

    def remove(self, name: str) -> None:
        self._host.ask("remove", name, patience_s=600)

    def room(self) -> Room:
        return Room(*self._host.ask("room"))


def find_python(settings: Mapping[str, Any], host: Host) -> str:
    """The Python that runs programs of ours on the machine that `host` reaches, by the settings of its target."""
    own = sys.executable if isinstance(host, LocalHost) else "python3"
    return str(settings.get("login_python") or settings.get("python") or own)


def read_tail(files: Files, name: str, lines: int = 3) -> list[str]:
    """The last lines of a file that say anything."""
    folder, _, own = name.rpartition("/")
    size = next((size for relative, size in files.tree(folder) if relative == own), 0)
    text = files.read_from(name, max(0, size - LOG_TAIL), LOG_TAIL).decode("utf-8", "replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def _fields(files: Sequence[FileToWrite]) -> list[list[Any]]:
    return [[each.name, each.data, each.mode, each.once] for each in files]


def _in_time(host: str, words: Sequence[str], code: int | None, out: str, err: str, timeout_s: float) -> Answer:
    if code is None:
        raise HostUnavailable(
            f"`{words[0]}` did not end on `{host}` within {timeout_s:g} s and was killed",
            facts=(err.strip().splitlines() or out.strip().splitlines())[-1:],
            hint=f"try it by hand on `{host}`",
        )
    return Answer(code, out, err)


def _explain(root: str, said: str, number: int | None) -> StoreUnavailable:
    hints = {
        errno.EACCES: "name another record root: `records` of the target",
        errno.EPERM: "name another record root: `records` of the target",
        errno.EROFS: "name another record root: `records` of the target",
        errno.ENOSPC: "free some space, or `runtime gc`",
        errno.EDQUOT: "the quota is spent: free some space, or name another record root",
    }
    kind = AccessDenied if number in (errno.EACCES, errno.EPERM) else StoreUnavailable
    return kind(
        f"the record root `{root}` refuses: {said.lower()}",
        hint=hints.get(number or 0, "`runtime targets check` tries every step"),
        retryable=number not in hints,
    )


def _hint(name: str, said: str, python: str) -> str:
    text = said.lower()
    if "host key verification failed" in text:
        return f"see who it is, by hand: ssh {name}"
    if "permission denied" in text:
        return f"ssh {name} has to work without a question, or be open already (ControlMaster)"
    if "not found" in text or "no such file" in text:
        return f"set `python` of the target: `{python}` is not there"
    return f"try it by hand: ssh {name} true"


def _has_terminal() -> bool:
    """Whether somebody can answer what ssh asks."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
