"""Another machine behind the system's `ssh`: one connection carries commands and files."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from runtime.file_trust import make_folders, make_private
from runtime.jobs.hosts.base import Files, HostUnavailable
from runtime.jobs.hosts.remote import PROGRAM, RemoteFiles, RemoteHost, render_agent
from runtime.system import system

_SOCKET_PATH: Final = 104
_SOCKET_NAME: Final = 58
"""Letters of `/%C` and of ssh's ending for a socket that is not ready."""


class SshHost(RemoteHost):
    """A machine behind the system's `ssh`, with the user's settings, agent, jump hosts and known hosts.

    One connection carries everything. The user's ssh checks the host keys.
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
        """`control_folder` keeps a connection for later commands, so that a second factor is asked for once; it is not
        used if the user's own settings for this host share a connection."""
        super().__init__()
        self.name = name
        self._python, self._options, self._control = python, list(options), control_folder
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self.files: Files = RemoteFiles(self, f"{name}:{root}")

    def exchange(self, request: bytes, patience_s: float) -> dict[str, Any]:
        process = self._process or self._connect()
        try:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
            return self._hear(process, patience_s)
        except (OSError, EOFError) as problem:
            raise self._lost(process) from problem

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
        self._mark = f"=={system.urandom(12).hex()}=="
        words = ["ssh", "-T", *self._connection_options(), self.name]
        words += ["exec", self._python, "-u", "-c", shlex.quote(PROGRAM)]
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
        assert process.stdin is not None
        try:
            process.stdin.write(render_agent(self._mark, self._root))
            process.stdin.flush()
        except OSError as problem:
            raise self._lost(process) from problem
        return process

    def _connection_options(self) -> list[str]:
        options = [*self._options, "-o", "ConnectTimeout=20"]
        options += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
        if not _has_terminal():
            options += ["-o", "BatchMode=yes"]
        # ssh fails if the path is too long for a socket.
        short = self._control is not None and len(str(self._control)) + _SOCKET_NAME <= _SOCKET_PATH
        if self._control is not None and short and not self._shares_connection():
            make_folders(str(self._control.parent))
            if not make_private(str(self._control)):
                return options
            options += ["-o", "ControlMaster=auto", "-o", f"ControlPath={self._control}/%C", "-o", "ControlPersist=10m"]
        return options

    def _shares_connection(self) -> bool:
        asked = subprocess.run(["ssh", "-G", *self._options, self.name], capture_output=True, text=True, check=False)
        settings = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
        # With a path of theirs and `ControlMaster no`, ssh still uses a connection that they opened by hand.
        return settings.get("controlpath", "none") != "none"

    def _hear(self, process: subprocess.Popen[bytes], patience_s: float) -> dict[str, Any]:
        """The next answer; other output is skipped. Raises `EOFError` if none comes."""
        assert process.stdout is not None
        timer = threading.Timer(patience_s, process.kill)
        timer.start()
        try:
            mark = self._mark.encode()
            while line := process.stdout.readline():
                _, found, rest = line.partition(mark)
                if found:
                    return dict(json.loads(rest))
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
    """Whether a person can answer ssh's questions."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
