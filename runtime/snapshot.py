"""The submitted code, by content id: the exact bytes of a tree, stored once and restored without git.

The archive is canonical (names sorted, no times, no owners), so that its SHA-256 is an id over path, mode and bytes, and
a store that hands back anything else is found out by its own check of what it returns.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime.errors import InvalidValue, NotPossible
from runtime.units import format_size

if TYPE_CHECKING:
    from runtime.records.base import RecordStore

MAX_SNAPSHOT_BYTES: Final = 100 * 1024 * 1024
_PREFIX: Final = "sha256:"
_SECRETS: Final = (".env", ".pem", ".key", "id_rsa", "id_ed25519", "credentials.json")


def take_snapshot(folder: Path, records: RecordStore, *, max_bytes: int = MAX_SNAPSHOT_BYTES) -> str:
    """Store the tree at `folder` as it is now and return its content id.

    In a git work tree that is what git tracks and what it does not ignore, dirty and untracked files included; elsewhere
    every file. Raises `NotPossible` for a tree that is too large, or that holds what looks like a secret.
    """
    names = list_files(folder)
    _check(folder, names, max_bytes)
    archive = pack(folder, names)
    records.put_blob(archive, prefix="snapshots")
    return snapshot_id(archive)


def snapshot_id(archive: bytes) -> str:
    return _PREFIX + hashlib.sha256(archive).hexdigest()


def fetch_snapshot(identity: str, records: RecordStore) -> bytes:
    """The archive of a content id; raises `StoreUnsafe` if the store holds other bytes under its name."""
    digest = identity.removeprefix(_PREFIX)
    if digest == identity or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise InvalidValue("snapshot", identity, "sha256: and 64 hex digits, as `runtime submit --snapshot` prints it")
    archive = records.get_blob(f"snapshots/{digest}")
    assert snapshot_id(archive) == identity
    return archive


def restore(archive: bytes, folder: Path) -> None:
    """Unpack into `folder`, which must not exist; nothing lands outside of it."""
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        # Not the stricter `data`: a link of the tree may point where it likes, and modes are part of the id.
        tar.extractall(folder, filter="tar")


def list_files(folder: Path) -> list[str]:
    """Relative names in order, as git lists them, or by walking where there is no git."""
    if not folder.is_dir():
        raise NotPossible(f"there is no folder `{folder}` to take a snapshot of")
    try:
        listed = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"],
            capture_output=True,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except OSError:
        listed = None
    if listed is not None and listed.returncode == 0:
        names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
        # Listed though deleted in the work tree: the snapshot is of the work tree.
        return sorted(name for name in names if os.path.lexists(folder / name) and not (folder / name).is_dir())
    found = (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    return sorted(str(path.relative_to(folder)) for path in found if "__pycache__" not in path.parts)


def pack(folder: Path, names: Iterable[str]) -> bytes:
    """The canonical archive of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            path = folder / name
            mode = path.lstat().st_mode
            entry = tarfile.TarInfo(name)
            if stat.S_ISLNK(mode):
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
                tar.addfile(entry)
            elif stat.S_ISREG(mode):
                content = path.read_bytes()
                entry.size, entry.mode = len(content), 0o755 if mode & 0o100 else 0o644
                tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _check(folder: Path, names: list[str], max_bytes: int) -> None:
    """Before anything is read: the sizes, and names that look like secrets."""
    sizes = {name: (folder / name).lstat().st_size for name in names}
    if sum(sizes.values()) > max_bytes:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
        raise NotPossible(
            f"the tree `{folder}` is too large for a snapshot: {format_size(sum(sizes.values()))}",
            facts=[f"at most {format_size(max_bytes)}", *(f"{name}: {format_size(sizes[name])}" for name in largest)],
            hint="add what the code does not need to .gitignore",
        )
    secrets = [name for name in names if Path(name).name.endswith(_SECRETS)]
    if secrets:
        raise NotPossible(
            f"the tree `{folder}` holds what looks like a secret: `{secrets[0]}`",
            facts=[f"{len(secrets)} such files; a snapshot can be read by everyone who reads the record store"],
            hint="add it to .gitignore, and pass secrets by reference",
        )
