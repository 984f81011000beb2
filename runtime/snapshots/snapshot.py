"""The submitted code, by content id: the exact bytes of a tree, stored once and restored without git.

Git only lists names; the bytes come from the work tree, so filters and line-ending rules change nothing, and nothing is
written to the tree, the index or the object store. The archive is canonical (names sorted, no times, no owners), so its
SHA-256 is an id over path, mode and bytes, by which a store checks the archive that it returns.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from runtime.errors import InvalidValue, NotPossible, StoreUnsafe
from runtime.shim.tree_walk import MOST_PARTS
from runtime.snapshots.cache import CachedFile, SnapshotCache
from runtime.snapshots.git import ask_git
from runtime.snapshots.secret_files import find_secret_files
from runtime.units import format_size

if TYPE_CHECKING:
    from runtime.records.base import RecordStore

IGNORE_FILE: Final = ".runtimeignore"
"""File at the root of the tree, in the syntax of .gitignore: names files that stay out though git tracks them."""

MAX_SNAPSHOT_BYTES: Final = 100 * 1024 * 1024
LONGEST_LOOK_S: Final = 60.0
"""Time limit for listing the names of a tree."""
_PREFIX: Final = "sha256:"
_READS: Final = 5
"""Times that a file is read if it keeps changing."""
_BLOCK: Final = 512
"""Block of a tar: no file takes less, so a limit of bytes also limits the files."""
_RECORD: Final = 20 * _BLOCK
_LOOKED_AT: Final = 10_000
"""Files of a tree that is too large at which a snapshot looks, to name the largest."""


class SecretInTree(NotPossible):
    """A tree with files that look like secrets and were not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRules:
    """Files that a snapshot takes or leaves out beyond git's rules and the ignore files."""

    max_bytes: int = MAX_SNAPSHOT_BYTES
    secrets: Sequence[str] = ()
    """Names of files that look like secrets and are taken all the same."""
    exclude: Sequence[str] = ()
    """Further lines of the ignore file."""
    left_out: Sequence[Path] = ()
    """Files and whole folders that stay out."""


class TreeFile(NamedTuple):
    name: str
    """Relative to the tree's root, with `/`."""
    status: os.stat_result


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    archive: bytes = field(repr=False)
    names: tuple[str, ...] = ()
    """Names of its files, in order; empty for an archive that was not made here."""

    @property
    def files(self) -> int:
        return len(self.names)

    @property
    def id(self) -> str:
        return snapshot_id(self.archive)


def take_snapshot(
    folder: Path,
    records: RecordStore | None,
    *,
    rules: SnapshotRules | None = None,
    cache_dir: Path | None = None,
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> str:
    """Store the tree at `folder` as it is now and return its content id; raises as `make_snapshot`.

    Without `records` nothing is stored. With `cache_dir`, the user's cache folder, files whose status did not change
    since they were last read are not read again, and a snapshot that `records` has is not sent again. `more` are files at
    the root of the snapshot, in place of those of the tree.
    """
    rules = rules or SnapshotRules()
    files = survey(folder, rules)
    if more:
        kept = _read_all(folder, [each for each in files if each.name not in more])
        archive = _pack(sorted(kept + _make_files(more), key=lambda each: each[0].name))
        if records is not None:
            _store(archive, folder, files, rules, records)
        return snapshot_id(archive)
    cache = SnapshotCache.open(cache_dir, folder)
    identity = None if cache.is_empty else cache.find_id(_read_changed(folder, files, cache))
    if identity is None or (records is not None and not records.has_blob(archive_reference(identity))):
        contents = _read_all(folder, files)
        archive = _pack(contents)
        identity = snapshot_id(archive)
        if records is not None:
            _store(archive, folder, files, rules, records)
        cache.learn([CachedFile.of(file.name, file.status, content) for file, content in contents], identity)
    cache.save()
    return identity


def _store(archive: bytes, folder: Path, files: Sequence[TreeFile], rules: SnapshotRules, records: RecordStore) -> None:
    from runtime.snapshots.provenance import encode_note, read_repositories, without_secrets

    repositories = read_repositories(folder, without_secrets([each.name for each in files], rules))
    # The note first: once the archive exists, nothing is stored again.
    records.put_note(archive_reference(snapshot_id(archive)), encode_note(repositories))
    records.put_blob(archive, prefix="snapshots")


def make_snapshot(folder: Path, rules: SnapshotRules | None = None) -> Snapshot:
    """Pack the tree at `folder` as it is now, without storing it.

    In a git work tree the snapshot has all files that git does not ignore: dirty files, untracked files and nested
    repositories too; elsewhere every file that no .gitignore names. `.runtimeignore` takes out more. Raises `NotPossible`
    for a tree that is too large, that seems to hold a secret, or that keeps changing.
    """
    files = survey(folder, rules or SnapshotRules())
    return Snapshot(archive=_pack(_read_all(folder, files)), names=tuple(each.name for each in files))


def add_file(snapshot: Snapshot, name: str, content: bytes) -> Snapshot:
    """Return a snapshot that was made here with one more file, which comes first in it. It has no file of that name."""
    archive = _pack(_make_files({name: content}))
    start = archive[: _BLOCK + len(content) + -len(content) % _BLOCK]
    whole = start + snapshot.archive
    return Snapshot(archive=whole + bytes(-len(whole) % _RECORD), names=(name, *snapshot.names))


def digest_files(snapshot: Snapshot) -> dict[str, str]:
    """Return a short digest of mode and bytes, or of a link's target, of each file of a snapshot that was made here."""
    view, at, found = memoryview(snapshot.archive), 0, {}
    for name in snapshot.names:
        start = at
        while True:
            header = snapshot.archive[at : at + _BLOCK]
            size = int(header[124:135], 8)
            at += _BLOCK + size + -size % _BLOCK
            if header[156:157] not in b"KL":  # the headers of long names come before the file's own
                break
        found[name] = hashlib.blake2b(view[start:at], digest_size=12).hexdigest()
    return found


def snapshot_id(archive: bytes) -> str:
    return _PREFIX + hashlib.sha256(archive).hexdigest()


def fetch_snapshot(identity: str, records: RecordStore) -> bytes:
    """Return the archive of a content id. Raises `StoreUnsafe` if the store holds other bytes under its name."""
    return records.get_blob(archive_reference(identity))


def archive_reference(identity: str) -> str:
    digest = identity.removeprefix(_PREFIX)
    if digest == identity or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise InvalidValue("snapshot", identity, "sha256: and 64 hex digits, as `runtime submit` prints it")
    return f"snapshots/{digest}"


def read_entries(archive: bytes, identity: str, folder: str) -> list[tuple[str, int, int, int, str]]:
    """List the entries of an archive to restore into `folder`, checked as the shim checks them; see its `list_entries`.

    Raises `StoreUnsafe` if these are not the bytes of `identity`, and `NotPossible` for an archive with an entry that no
    snapshot has: a device, a name that leads elsewhere.
    """
    from runtime.shim.tree import UnsafeName, list_entries

    if snapshot_id(archive) != identity:
        raise StoreUnsafe(
            f"snapshot `{identity}` holds other bytes than were submitted",
            facts=[f"found {snapshot_id(archive)}"],
            retryable=False,
        )
    try:
        return list_entries(archive, folder)
    except UnsafeName as problem:
        raise NotPossible(f"snapshot `{identity}` is refused: {problem}") from None


# the files of the tree


def survey(folder: Path, rules: SnapshotRules) -> list[TreeFile]:
    """Return the files of a snapshot in order, with their status; none is read. Raises as `make_snapshot`.

    The listing of a tree that is far too large ends early.
    """
    if not folder.is_dir():
        raise NotPossible(f"there is no folder `{folder}` to take a snapshot of")
    files: list[TreeFile] = []
    total = 0
    for name, status in _list_below(str(folder), "", _read_ignores(folder, rules), _Patience(folder)):
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            files.append(TreeFile(name, status))
            total += status.st_size
            too_many = len(files) * _BLOCK > rules.max_bytes + _BLOCK * _LOOKED_AT
            if too_many or (total > rules.max_bytes and len(files) > _LOOKED_AT):
                break
    files.sort(key=lambda each: each.name)
    _check_size(folder, files, total, rules.max_bytes)
    _check_secrets(folder, files, set(rules.secrets))
    return files


def _list_below(
    folder: str, prefix: str, ignored: Callable[[str], bool] | None, patience: _Patience
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of a tree and of the repositories inside it, each with `prefix`, in no order."""
    listed = ask_git(Path(folder), "ls-files", "-z", "-co", "--exclude-standard", "--deduplicate", patience=patience)
    if listed is None:
        yield from _walk(folder, prefix, [("", ignored)] if ignored else [], patience)
        return
    real = {"": True}
    for raw in listed.split(b"\0"):
        name = os.fsdecode(raw).rstrip("/")
        if not name or (ignored and ignored(prefix + name)):
            continue
        _check_depth(prefix + name)
        if not _is_inside(folder, name.rpartition("/")[0], real):
            continue  # Git lists the files of a folder that was replaced by a link; these are others.
        try:
            status = os.lstat(f"{folder}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            continue  # Deleted in the work tree, which the snapshot shows.
        if not stat.S_ISDIR(status.st_mode):
            yield prefix + name, status
        elif os.path.lexists(f"{folder}/{name}/.git"):
            # Git names a repository inside the tree and does not look into it. A repository without a commit, or a
            # submodule that was never fetched, counts as a plain folder.
            yield from _list_below(f"{folder}/{name}", f"{prefix}{name}/", ignored, patience)


def _is_inside(folder: str, name: str, known: dict[str, bool]) -> bool:
    """Whether the way from `folder` to a folder inside it has no link; `known` holds earlier answers."""
    if name not in known:
        above = name.rpartition("/")[0]
        known[name] = _is_inside(folder, above, known) and not os.path.islink(f"{folder}/{name}")  # noqa: PTH114
    return known[name]


def _walk(
    folder: str, prefix: str, outer: Sequence[tuple[str, Callable[[str], bool]]], patience: _Patience
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every file below, by the ignore files alone; `outer` has the rules of the folders above, with their prefix."""
    patience.check()
    ignores = list(outer)
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    if any(entry.name == ".gitignore" for entry in found):
        text = Path(folder, ".gitignore").read_text(encoding="utf-8", errors="replace")
        ignores.append((prefix, _matcher(text)))
    for entry in found:
        name = prefix + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in (".git", "__pycache__") or any(
            ignored(name.removeprefix(start) + ("/" if is_folder else "")) for start, ignored in ignores
        ):
            continue
        _check_depth(name)
        if is_folder:
            yield from _walk(f"{folder}/{entry.name}", f"{name}/", ignores, patience)
            continue
        try:
            yield name, entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # Gone since it was listed.


def _check_depth(name: str) -> None:
    """Refuse a name that no machine would unpack, before there are more names below it than Python calls itself."""
    if name.count("/") >= MOST_PARTS:
        raise NotPossible(
            f"`{name[:100]}…` lies in more than {MOST_PARTS - 1} folders, which is too deep for a snapshot",
            hint=f"name folders that are no code in .gitignore or {IGNORE_FILE}",
        )


class _Patience:
    """Ends the listing of a tree that takes too long."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._until = time.monotonic() + LONGEST_LOOK_S

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def check(self) -> None:
        if not self.left_s:
            raise NotPossible(
                f"the tree `{self._folder}` is too large for a snapshot: its files were not listed within"
                f" {LONGEST_LOOK_S:g} s",
                hint=f"name folders that are no code in .gitignore or {IGNORE_FILE}",
            )


def _read_ignores(folder: Path, rules: SnapshotRules) -> Callable[[str], bool] | None:
    path = folder / IGNORE_FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = "\n".join((text, *rules.exclude))
    ignored = _matcher(lines) if lines.strip() else None
    root = os.path.join(os.path.realpath(folder), "")  # noqa: PTH118 - with its slash
    out = [str(each).removeprefix(root) for each in rules.left_out if str(each).startswith(root)]
    if not out:
        return ignored
    folders = tuple(f"{name}/" for name in out)
    return lambda name: name in out or name.startswith(folders) or (ignored is not None and ignored(name))


def _matcher(lines: str) -> Callable[[str], bool]:
    """Return a test for ignored names, by lines in the syntax of .gitignore; a folder's name ends in `/`."""
    import pathspec

    spec: Any = pathspec.GitIgnoreSpec.from_lines(lines.splitlines())
    return lambda name: bool(spec.match_file(name))


def _check_size(folder: Path, files: Sequence[TreeFile], total: int, max_bytes: int) -> None:
    if total <= max_bytes and len(files) * _BLOCK > max_bytes:
        raise NotPossible(
            f"the tree `{folder}` is too large for a snapshot: more than {max_bytes // _BLOCK:,} files",
            facts=[f"among them `{files[len(files) // 2].name}`"],
            hint=f"name folders that are no code in .gitignore or {IGNORE_FILE}",
        )
    if total <= max_bytes:
        return
    largest = sorted(files, key=lambda each: each.status.st_size, reverse=True)[:5]
    raise NotPossible(
        f"the tree `{folder}` is too large for a snapshot: {format_size(total)}",
        facts=[
            f"at most {format_size(max_bytes)}",
            *(f"{each.name}: {format_size(each.status.st_size)}" for each in largest),
        ],
        hint=f"add what the code does not need to .gitignore or {IGNORE_FILE}",
    )


def _check_secrets(folder: Path, files: Sequence[TreeFile], named: set[str]) -> None:
    found = [name for name in find_secret_files(str(folder), files) if name not in named]
    if found:
        raise SecretInTree(
            f"the tree `{folder}` holds what looks like a secret: `{found[0]}`",
            facts=[f"{len(found)} such files; a snapshot can be read by everyone who reads the record store"],
            hint=f"add it to .gitignore or {IGNORE_FILE}, and pass secrets by reference",
        )


# the archive


def _read_changed(folder: Path, files: Sequence[TreeFile], cache: SnapshotCache) -> list[CachedFile]:
    """Digest each file, in order; only files that the cache does not vouch for are read."""
    found = []
    for each in files:
        digest = cache.find_digest(each.name, each.status)
        if digest is None:
            read, content = _read(str(folder), each)
            found.append(CachedFile.of(each.name, read.status, content))
        else:
            found.append(CachedFile(each.name, each.status, digest))
    return found


def _read_all(folder: Path, files: Iterable[TreeFile]) -> list[tuple[TreeFile, bytes]]:
    return [_read(str(folder), each) for each in files]


def _make_files(more: Mapping[str, bytes]) -> list[tuple[TreeFile, bytes]]:
    status = os.stat_result((stat.S_IFREG | 0o600, *(0,) * 9))
    return [(TreeFile(name, status), content) for name, content in more.items()]


def _pack(contents: Iterable[tuple[TreeFile, bytes]]) -> bytes:
    """Return the canonical archive of these files."""
    parts: list[bytes] = []
    for file, content in contents:
        name, mode = os.fsencode(file.name), file.status.st_mode
        if stat.S_ISLNK(mode):
            parts.append(_header(name, 0, 0o777, b"2", content))
            continue
        parts += (_header(name, len(content), 0o755 if mode & 0o100 else 0o644, b"0"), content)
        if remainder := len(content) % _BLOCK:
            parts.append(bytes(_BLOCK - remainder))
    size = sum(map(len, parts)) + 2 * _BLOCK
    parts.append(bytes(2 * _BLOCK + -size % _RECORD))
    return b"".join(parts)


def _header(name: bytes, size: int, mode: int, kind: bytes, link: bytes = b"") -> bytes:
    """Return the header of a GNU tar, written out: `tarfile`'s differs from one Python to the next, and an id must not."""
    long = b""
    for kind_of_long, text in ((b"K", link), (b"L", name)):
        if len(text) > 100:
            long += (
                _header(b"././@LongLink", len(text) + 1, 0, kind_of_long) + text + bytes(_BLOCK - len(text) % _BLOCK)
            )
    start = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0" % (name[:100].ljust(100, b"\0"), mode, 0, 0, size, 0)
    end = b"%b%bustar  \0" % (kind, link[:100].ljust(100, b"\0"))
    sums = sum(start) + 8 * 32 + sum(end)
    return long + start + b"%06o\0 " % sums + end.ljust(_BLOCK - len(start) - 8, b"\0")


def _read(root: str, file: TreeFile) -> tuple[TreeFile, bytes]:
    """Return the bytes of a file, or the text of a link, and the file as it was when they were read."""
    path = f"{root}/{file.name}"
    try:
        if stat.S_ISLNK(file.status.st_mode):
            return file, os.fsencode(os.readlink(path))  # noqa: PTH115 - a Path costs as much again
        found = _read_still(path)
    except PermissionError:
        raise NotPossible(
            f"`{file.name}` cannot be read for a snapshot: permission denied",
            hint=f"make it readable, or add it to .gitignore or {IGNORE_FILE}",
        ) from None
    except OSError as problem:
        if problem.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP):
            raise
        found = None
    if found is None:
        raise NotPossible(
            f"`{file.name}` does not hold still: it changed each time it was read, or was deleted",
            facts=[f"read {_READS} times"],
            hint=f"stop what writes it, or add it to .gitignore or {IGNORE_FILE}",
        )
    content, status = found
    return TreeFile(file.name, status), content


def _read_still(path: str) -> tuple[bytes, os.stat_result] | None:
    """Return content and status, read again if the file changed meanwhile, so that no half-written file is packed."""
    for again in range(_READS):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            before = os.fstat(descriptor)
            content = os.read(descriptor, before.st_size + 1)
            while len(content) < before.st_size and (chunk := os.read(descriptor, before.st_size - len(content) + 1)):
                content += chunk
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size) and len(content) == after.st_size:
            return content, after
        time.sleep(0.05 * 2**again)
    return None
