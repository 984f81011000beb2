"""Files by content on this machine, so that a large artifact is fetched once for all tasks that reuse it.

The cache belongs to this user, and is shared by all of the user's workers. A file appears whole by a rename, so a writer that
was killed leaves a part and nothing else; a reader verifies what it copies. What was not used for longest goes first.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from runtime.file_trust import make_folders, private_folder
from runtime.records.artifacts import hash_pieces
from runtime.system import system
from runtime.units import parse_size

LIMIT_VARIABLE: Final = "RUNTIME_REUSE_CACHE"
LIMIT: Final = "50GiB"
LEAST_FREE: Final = 0.1
"""The share of the disk that the cache leaves free."""
STALE_AFTER_S: Final = 86_400.0
_PART: Final = ".part-"
_PIECE: Final = 1 << 20


class ContentCache:
    """All methods may be called from any thread and process at once. A cache that fails costs a transfer and nothing else."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes

    @classmethod
    def open(cls, cache_dir: Path) -> ContentCache | None:
        """The user's cache; None if it is switched off or has no place."""
        limit = parse_size(os.environ.get(LIMIT_VARIABLE) or LIMIT)
        if not limit:
            return None
        try:
            make_folders(str(cache_dir))
            return cls(Path(private_folder(str(cache_dir / "artifacts"))), limit)
        except OSError:
            return None

    def fetch(self, sha256: str, to: Path, load: Callable[[Path], None]) -> None:
        """Make the file `to` from the cache, or with `load`, which verifies the content; then the cache has it too."""
        if self._copy(sha256, to):
            return
        load(to)
        with suppress(OSError):
            self._keep(sha256, to)

    def _copy(self, sha256: str, to: Path) -> bool:
        path = self._folder / sha256
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        with os.fdopen(descriptor, "rb") as cached, to.open("w+b") as opened:
            status = os.fstat(cached.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return False
            shutil.copyfileobj(cached, opened, _PIECE)
            opened.flush()
            opened.seek(0)
            whole = hash_pieces(iter(lambda: opened.read(_PIECE), b"")) == sha256
        with suppress(OSError):
            if whole:
                os.utime(path)
            else:
                path.unlink()  # damaged, as by a disk that filled up
        return whole

    def _keep(self, sha256: str, file: Path) -> None:
        size = file.stat().st_size
        disk = shutil.disk_usage(self._folder)
        if size > self._limit_bytes or disk.free - size < LEAST_FREE * disk.total:
            return
        part = self._folder / f"{_PART}{system.urandom(8).hex()}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with file.open("rb") as source, os.fdopen(os.open(part, flags, 0o600), "wb") as opened:
                shutil.copyfileobj(source, opened, _PIECE)
            part.rename(self._folder / sha256)
        finally:
            part.unlink(missing_ok=True)
        self._trim()

    def _trim(self) -> None:
        kept: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with suppress(OSError):
                status = path.lstat()
                if path.name.startswith(_PART):
                    if time.time() - status.st_mtime > STALE_AFTER_S:
                        path.unlink()
                else:
                    kept.append((status.st_mtime, status.st_size, path))
        over = sum(size for _, size, _ in kept) - self._limit_bytes
        for _, size, path in sorted(kept):
            if over <= 0:
                return
            with suppress(OSError):
                path.unlink()  # a reader that has it open reads on
            over -= size
