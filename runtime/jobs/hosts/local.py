"""This machine as a place to launch from: its commands, and a record root that it can see."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from runtime.errors import NotPossible
from runtime.jobs.hosts import agent
from runtime.jobs.hosts.base import (
    Answer,
    Files,
    FileToWrite,
    Host,
    Room,
    RootWatch,
    check_ended,
    explain_refusal,
    list_fields,
)

T = TypeVar("T")


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
        self._do(self._place.write_many, list_fields(files))

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
            raise explain_refusal(self.root, problem.strerror or str(problem), problem.errno) from problem
        except ValueError as problem:
            raise explain_refusal(self.root, str(problem), None) from None
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
        return check_ended(self.name, words, code, out, err, timeout_s)

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


def find_python(settings: Mapping[str, Any], host: Host) -> str:
    """The Python that runs programs of ours on the machine that `host` reaches, by the settings of its target."""
    own = sys.executable if isinstance(host, LocalHost) else "python3"
    return str(settings.get("login_python") or settings.get("python") or own)
