"""The places where launchers act: a machine that runs commands, and the files of a record root.

`LocalHost` is this machine, `SshHost` another through the system's `ssh`. Both fulfil the same Protocols, so a Slurm
launcher does not depend on whether it runs on the login node.
"""

from __future__ import annotations

import contextlib
import errno
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from runtime.errors import InfrastructureFailure, NotPossible, StoreUnavailable
from runtime.system import system

_PIECE: Final = 4 << 20
CHANGES: Final = frozenset({"create", "link", "make_folder", "place", "put_piece", "remove", "write", "write_many"})
"""Requests of the agent that change files."""
LOG_TAIL: Final = 4096
"""Bytes of the end of a log for an explanation."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """One of several files that are written together."""

    name: str
    data: bytes
    mode: int = 0o600
    once: bool = False
    """An existing file stays as it is."""


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Free space in a record root; None for no limit, or an unknown one."""

    bytes: int | None = None
    files: int | None = None


class RootWatch(Protocol):
    """The expected record root, by the ids that it may have."""

    known: Sequence[str]
    """Empty before the first use."""

    def saw(self, identity: str) -> None:
        """Note the root's id, one of the known ones or the first."""

    def refusal(self, found: str | None, *, there: bool) -> InfrastructureFailure:
        """The error for a root with another id, or without one; `there` is whether the folder exists."""


class Files(Protocol):
    """Files below one root, by relative names with `/`. Nothing here locks, and all of it is safe on NFS.

    Every method raises `StoreUnavailable` if the place does not answer.
    """

    address: str
    """The root's name on this machine; the same for all targets that mean it."""

    @property
    def root(self) -> str:
        """The full path, as the nodes see it."""

    def keep_to(self, watch: RootWatch) -> None:
        """Let no call through to another root than the `watch` knows, and mark a new one; called before the first use.

        It takes no exchange of its own. From then on every method raises the watch's refusal for another root, or one
        that lost its marker or does not exist; it is never made again.
        """

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None if there is none."""

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """The files that exist and that we may read, in one exchange."""

    def read_from(self, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        """At most `limit` bytes from `offset`; empty at the end and if there is no file."""

    def create(self, name: str, data: bytes, *, mode: int = 0o600, lasting: bool = True) -> bool:
        """Create the whole file and the folders above it; False if it exists. The first of many wins.

        A file that is not `lasting` does not wait for the disk, and may be missing or empty after a power failure.
        """

    def link(self, there: str, name: str) -> bool:
        """Give the file `there` another name. False if there is none, or it is not ours to link."""

    def write(self, name: str, data: bytes, *, mode: int = 0o600) -> None:
        """Create or replace the whole file."""

    def write_many(self, files: Sequence[FileToWrite]) -> None:
        """Create or replace each whole file in one exchange. The last appears after all others, and all are durable when
        this returns. A call that was cut off leaves out files, never half of one, and may be repeated."""

    def make_folder(self, name: str, *, mode: int = 0o700) -> bool:
        """Make a folder; False if it exists. The first of many wins."""

    def names(self, folder: str, prefix: str = "") -> list[str]:
        """Sorted names in the folder that begin with `prefix`; empty if there is no folder."""

    def tree(self, folder: str) -> list[tuple[str, int]]:
        """Relative name and size in bytes of every file below, and of links to files, but not of pipes and the like.

        A name with a slash at its end stands for what lies too deep to be listed or read.
        """

    def download(self, name: str, to: BinaryIO) -> None:
        """Copy a file's bytes to an empty file of this machine that is open for writing.

        The caller chooses its place: `LocalFolder` makes safe places of remote names.
        """

    def upload(self, name: str, file: Path) -> None:
        """Create or replace a file of any size with the bytes of one of this machine; the whole file appears at once."""

    def remove(self, name: str) -> None:
        """Delete a file or a folder with all below; already gone is success."""

    def room(self) -> FreeSpace:
        """The space that is left."""

    def while_held(self, lock: str, token: str) -> Files:
        """The same files, which are changed only while the file `lock`, named `….N`, has the token and no `….N+1` exists.

        A change raises `LockLost` after that, and is not made. The agent looks within the call that changes.
        """


class LockLost(NotPossible):
    """Another command took a job over, because this one stood still for too long."""

    def __init__(self) -> None:
        super().__init__(
            "another command took this job over, because this one stood still for too long",
            hint="run the same command again: it finds the job",
        )


class Host(Protocol):
    """A machine that runs commands, and the record root as seen from it."""

    name: str
    """`localhost`, or the name for `ssh`."""
    files: Files

    def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60,
        env: Mapping[str, str | None] | None = None,
    ) -> CommandResult:
        """Run a command to its end; a value of None removes a variable. Raises `HostUnavailable` if the host cannot be
        reached or does not answer in time; then it is not known whether the command ran."""

    def spawn(self, words: Sequence[str], *, folder: str, log: str, env: Mapping[str, str | None] | None = None) -> int:
        """Start a process that outlives us and our connection, and make the folder of its log; returns the pid."""

    def wait(self, pid: int, seconds: float) -> bool:
        """Whether a process that was spawned through this object ends within `seconds`; returns as soon as it does.

        Other calls of this host, those of a launch's lock too, wait meanwhile: ask in short turns.
        """

    def close(self) -> None: ...


class AgentFiles(ABC):
    """`Files` of a machine where the agent runs: `ask` brings the agent one request."""

    address: str

    @abstractmethod
    def keep_to(self, watch: RootWatch) -> None: ...

    @abstractmethod
    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any: ...

    @functools.cached_property
    def root(self) -> str:
        return str(self.ask("where"))

    def read(self, name: str) -> bytes | None:
        found: bytes | None = self.ask("read", name)
        return found

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        return dict(self.ask("read_many", list(names)))

    def read_from(self, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        return bytes(self.ask("read_from", name, offset, limit))

    def create(self, name: str, data: bytes, *, mode: int = 0o600, lasting: bool = True) -> bool:
        return bool(self.ask("create", name, data, mode, lasting, patience_s=600))

    def link(self, there: str, name: str) -> bool:
        return bool(self.ask("link", there, name))

    def write(self, name: str, data: bytes, *, mode: int = 0o600) -> None:
        self.ask("write", name, data, mode, patience_s=600)

    def write_many(self, files: Sequence[FileToWrite]) -> None:
        fields = [[each.name, each.data, each.mode, each.once] for each in files]
        self.ask("write_many", fields, patience_s=600)

    def make_folder(self, name: str, *, mode: int = 0o700) -> bool:
        return bool(self.ask("make_folder", name, mode))

    def names(self, folder: str, prefix: str = "") -> list[str]:
        return [str(name) for name in self.ask("names", folder, prefix)]

    def tree(self, folder: str) -> list[tuple[str, int]]:
        return [(str(name), int(size)) for name, size in self.ask("tree", folder)]

    def download(self, name: str, to: BinaryIO) -> None:
        offset = 0
        while chunk := self.read_from(name, offset):
            to.write(chunk)
            offset += len(chunk)

    def upload(self, name: str, file: Path) -> None:
        part, offset = f"{name}.{system.urandom(4).hex()}.part", 0
        try:
            with file.open("rb") as opened:
                while (piece := opened.read(_PIECE)) or not offset:
                    self.ask("put_piece", part, offset, piece, patience_s=600)
                    offset += len(piece)
                    if not piece:
                        break
            self.ask("place", part, name, patience_s=600)
        except BaseException:
            with contextlib.suppress(InfrastructureFailure):
                self.remove(part)
            raise

    def remove(self, name: str) -> None:
        self.ask("remove", name, patience_s=600)

    def room(self) -> FreeSpace:
        return FreeSpace(*self.ask("room"))

    def while_held(self, lock: str, token: str) -> Files:
        return HeldFiles(self, lock, token)


class HeldFiles(AgentFiles):
    """`AgentFiles` whose changes depend on a lock."""

    def __init__(self, files: AgentFiles, lock: str, token: str) -> None:
        self.address = files.address
        self._files, self._lock, self._token = files, lock, token

    def keep_to(self, watch: RootWatch) -> None:
        self._files.keep_to(watch)

    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
        if do not in CHANGES:
            return self._files.ask(do, *args, patience_s=patience_s)
        found = self._files.ask("if_held", self._lock, self._token, do, list(args), patience_s=patience_s)
        if found is None:
            raise LockLost
        return found[0]


class AgentHost(ABC):
    """A machine where the agent runs: `ask` brings the agent one request."""

    name: str
    files: Files

    @abstractmethod
    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any: ...

    def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60,
        env: Mapping[str, str | None] | None = None,
    ) -> CommandResult:
        code, out, err = self.ask("run", list(words), stdin, timeout_s, dict(env or {}), patience_s=timeout_s + 30)
        if code is None:
            raise HostUnavailable(
                f"`{words[0]}` did not end on `{self.name}` within {timeout_s:g} s and was killed",
                facts=(err.strip().splitlines() or out.strip().splitlines())[-1:],
                hint=f"try it by hand on `{self.name}`",
            )
        return CommandResult(code, out, err)

    def spawn(self, words: Sequence[str], *, folder: str, log: str, env: Mapping[str, str | None] | None = None) -> int:
        return int(self.ask("spawn", list(words), folder, log, dict(env or {})))

    def wait(self, pid: int, seconds: float) -> bool:
        return bool(self.ask("wait", pid, seconds, patience_s=seconds + 30))


class HostUnavailable(InfrastructureFailure):
    """A machine cannot be reached, or did not answer in time: it is not known whether the command ran."""


class AccessDenied(StoreUnavailable):
    """A file or folder belongs to another user and is not open to us."""


def read_tail(files: Files, name: str, lines: int = 3) -> list[str]:
    """The last lines of a file that are not blank."""
    folder, _, own = name.rpartition("/")
    size = next((size for relative, size in files.tree(folder) if relative == own), 0)
    text = files.read_from(name, max(0, size - LOG_TAIL), LOG_TAIL).decode("utf-8", "replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def explain_refusal(root: str, said: str, number: int | None) -> StoreUnavailable:
    hints = {
        **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "name another record root: `records` of the target"),
        errno.ENOSPC: "free some space, or `runtime gc`",
        errno.EDQUOT: "the quota is spent: free some space, or name another record root",
    }
    kind = AccessDenied if number in (errno.EACCES, errno.EPERM) else StoreUnavailable
    return kind(
        f"the record root `{root}` refuses: {said.lower()}",
        hint=hints.get(number or 0, "`runtime targets check` tries every step"),
        retryable=number not in hints,
    )
