"""Another machine behind the system's `ssh`: one connection carries commands and files."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from runtime.jobs.hosts import agent
from runtime.jobs.hosts.base import (
    AgentHost,
    Answer,
    Files,
    FileToWrite,
    HostUnavailable,
    Room,
    RootWatch,
    check_ended,
    explain_refusal,
    list_fields,
)

_SOCKET_PATH: Final = 104
_SOCKET_NAME: Final = 58
"""Letters of `/%C` and of the ending that ssh gives it until the socket is ready."""


class SshHost(AgentHost):
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
        return check_ended(self.name, words, code, out, err, timeout_s)

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
            raise explain_refusal(f"{self.name}:{self._root}", said["error"], said["errno"])
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
        self._host.ask("write_many", list_fields(files), patience_s=600)

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
