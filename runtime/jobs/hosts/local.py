"""This machine as a place to launch from: its commands, and a record root that it can see."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from runtime.errors import NotPossible
from runtime.jobs.hosts import agent
from runtime.jobs.hosts.base import AgentFiles, AgentHost, Files, Host, RootWatch, explain_refusal


class LocalFiles(AgentFiles):
    """A folder that this machine can see."""

    def __init__(self, root: str) -> None:
        self._place = agent.GuardedRoot(root)
        self.root = self.address = self._place.root
        self._watch: RootWatch | None = None

    def keep_to(self, watch: RootWatch) -> None:
        self._watch, self._place.known = watch, list(watch.known)

    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
        try:
            done = agent.answer(self._place, do, args)
        except agent.ForeignRoot as strange:
            assert self._watch is not None
            raise self._watch.refusal(strange.found, there=strange.there) from None
        except OSError as problem:
            raise explain_refusal(self.root, problem.strerror or str(problem), problem.errno) from problem
        except ValueError as problem:
            raise explain_refusal(self.root, str(problem), None) from None
        if self._watch is not None and self._place.id is not None:
            self._watch.saw(self._place.id)
        return done

    def download(self, name: str, to: BinaryIO) -> None:
        path = self.ask("path", name)
        try:
            with Path(path).open("rb") as opened:
                shutil.copyfileobj(opened, to)
                found = os.fstat(opened.fileno())
            to.flush()
            os.fchmod(to.fileno(), found.st_mode & 0o777)
            os.utime(to.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        except OSError as problem:
            raise explain_refusal(self.root, problem.strerror or str(problem), problem.errno) from problem


class LocalHost(AgentHost):
    """This machine."""

    name = "localhost"

    def __init__(self, root: str) -> None:
        self._local = LocalFiles(root)
        self.files: Files = self._local

    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
        return self._local.ask(do, *args)

    def spawn(self, words: Sequence[str], *, folder: str, log: str, env: Mapping[str, str | None] | None = None) -> int:
        self._local.ask("where")  # raises if this is another root now
        try:
            return agent.spawn(list(words), folder, log, dict(env or {}))
        except OSError as problem:
            raise NotPossible(
                f"cannot start `{words[0]}` on this machine: {(problem.strerror or str(problem)).lower()}",
                hint="set `python` of the target to an interpreter from 3.6 on",
            ) from problem

    def close(self) -> None:
        pass


def find_python(settings: Mapping[str, Any], host: Host) -> str:
    """The Python that runs programs of ours on the machine that `host` reaches, by the settings of its target."""
    own = sys.executable if isinstance(host, LocalHost) else "python3"
    return str(settings.get("login_python") or settings.get("python") or own)
