"""The claims of a head's drivers: a folder of the user who runs them, with a file for each driver, which it locks while it lives.

The drivers of all jobs run on one machine, so that files do. A file that nobody locks is of a driver that has ended, and is
removed. What is written here only orders runs: what cannot be read is not a claim.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from runtime.file_trust import private_folder
from runtime.jobs.spec import Priority
from runtime.launchers.ray.priority import Claim, Demand

FOLDER: Final = "/tmp/runtime-ray-turns"
MOST_BYTES: Final = 1 << 14
SILENT_S: Final = 60.0
"""A driver that has not written its file for this long counts as stopped, and its runs hold nobody back."""
_READS: Final = 3


class Board:
    """The claim of one driver, and those of the others on its cluster. Every method may raise `OSError`."""

    def __init__(self, cluster: str, folder: str | None = None) -> None:
        """`cluster` is the address of Ray's store: heads of one machine have different ones."""
        self._wanted = folder or f"{FOLDER}-{os.geteuid()}"
        self._prefix = hashlib.sha256(cluster.encode()).hexdigest()[:16]
        self._version = 0
        self._make_file()

    def _make_file(self) -> None:
        self.folder = Path(private_folder(self._wanted))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            path = self.folder / f"{self._prefix}.{secrets.token_hex(8)}"
            opened = os.open(path, flags, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(opened).st_nlink:
                    self._path, self._file = path, opened
                    return
            # Another driver took it for a dead one's before it was locked.
            os.close(opened)

    def write(self, claim: Claim) -> None:
        """Show a claim in place of the last one, and that the driver is alive. After an error none is shown, rather than an
        old one. A file that somebody has removed, as what cleans `/tmp` does, is made again."""
        if not self._is_there():
            removed = self._file
            self._make_file()
            os.close(removed)
        self._version += 1
        content = encode_claim(claim, self._version)
        try:
            written = os.pwrite(self._file, content, 0)
            os.ftruncate(self._file, written if written == len(content) else 0)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            raise

    def read(self) -> list[Claim]:
        """The claims of the other drivers that live."""
        paths = [path for path in self.folder.iterdir() if path != self._path]
        return [claim for path in sorted(paths) if (claim := self._read(path)) is not None]

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _is_there(self) -> bool:
        """Whether the others find our file under its name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(self._path), os.fstat(self._file))
        return False

    def _read(self, path: Path) -> Claim | None:
        try:
            opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None  # it is gone, or a link or something else that no driver made
        try:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                path.unlink(missing_ok=True)
                return None
            if not path.name.startswith(f"{self._prefix}."):
                return None
            claim = _read_claim(opened)
            silent = abs(time.time() - status.st_mtime) > SILENT_S
            return replace(claim, waiting=0) if claim and silent else claim
        finally:
            os.close(opened)


def encode_claim(claim: Claim, version: int) -> bytes:
    """The content of a file. Its driver writes it in place, so the version at both ends shows what was read while it was written."""
    demand = {name: getattr(claim.demand, name) for name in ("job", "owner", "kind", "places")}
    counts = {"waiting": claim.waiting, "since": claim.since}
    more = {"priority": claim.demand.priority.value, "need": dict(claim.demand.need)}
    return json.dumps({"version": version, **demand, **more, **counts, "end": version}).encode()


def _read_claim(opened: int) -> Claim | None:
    for _ in range(_READS):
        content = os.pread(opened, MOST_BYTES, 0)
        with contextlib.suppress(ValueError, RecursionError):
            return decode_claim(content)
    return None


def decode_claim(content: bytes) -> Claim:
    """Raises `ValueError` for anything but a whole claim."""
    found = json.loads(content)
    if not isinstance(found, dict) or found.get("version") != found.get("end"):
        raise ValueError("it was read while it was written")
    need = found.get("need")
    if not isinstance(need, dict) or not need:
        raise ValueError("it names no need")
    demand = Demand(
        job=_text(found, "job"),
        owner=_text(found, "owner"),
        priority=Priority(_text(found, "priority")),
        kind=_text(found, "kind"),
        need={str(name): _number(need, name, above=0.0) for name in need},
        places=_count(found, "places", least=1),
    )
    return Claim(demand=demand, waiting=_count(found, "waiting"), since=_number(found, "since"))


def _text(found: dict[str, Any], name: str) -> str:
    if not isinstance(text := found.get(name), str):
        raise ValueError(f"{name} is no text")
    return text


def _count(found: dict[str, Any], name: str, least: int = 0) -> int:
    if type(number := found.get(name)) is not int or number < least:
        raise ValueError(f"{name} is no count")
    return number


def _number(found: dict[str, Any], name: str, above: float = -1.0) -> float:
    number = found.get(name)
    if (
        not isinstance(number, int | float)
        or isinstance(number, bool)
        or not (math.isfinite(number) and number > above)
    ):
        raise ValueError(f"{name} is no number")
    return float(number)
