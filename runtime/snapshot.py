"""The submitted code, by content id: the exact bytes of a tree, stored once and restored without git.

Git lists names and nothing else; the bytes come from the work tree, so filters and line-ending rules change nothing, and
nothing is written to the tree, the index or the object store. The archive is canonical (names sorted, no times, no
owners), so that its SHA-256 is an id over path, mode and bytes, and a store that hands back anything else is found out by
its own check of what it returns.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import InvalidValue, NotPossible, StoreUnsafe
from runtime.units import format_size

if TYPE_CHECKING:
    from runtime.records.base import RecordStore

IGNORE_FILE: Final = ".runtimeignore"
"""At the root of the tree, in the syntax of .gitignore: what stays out though git tracks it."""

MAX_SNAPSHOT_BYTES: Final = 100 * 1024 * 1024
_PREFIX: Final = "sha256:"
_SECRETS: Final = (".env", ".pem", ".key", "id_rsa", "id_ed25519", "credentials.json")
_READS: Final = 5
"""How often a file that changes under our hands is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRules:
    """What goes in, beyond what git and the ignore files say."""

    max_bytes: int = MAX_SNAPSHOT_BYTES
    secrets: Sequence[str] = ()
    """Names, as listed, of files that look like secrets and are meant to go in."""
    exclude: Sequence[str] = ()
    """Further lines of the ignore file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFile:
    name: str
    """Relative to the tree's root, with `/`."""
    status: os.stat_result


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """Where the tree stood in its history; for people, the content id vouches for the bytes."""

    commit: str | None
    """None before the first commit."""
    branch: str | None
    """None on a detached head."""
    diff: str
    """Of tracked files against the commit; empty for a clean tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    archive: bytes = field(repr=False)
    files: int
    content_bytes: int

    @property
    def id(self) -> str:
        return snapshot_id(self.archive)


def take_snapshot(
    folder: Path, records: RecordStore, *, max_bytes: int = MAX_SNAPSHOT_BYTES, rules: SnapshotRules | None = None
) -> str:
    """Store the tree at `folder` as it is now and return its content id; see `make_snapshot`."""
    made = make_snapshot(folder, rules or SnapshotRules(max_bytes=max_bytes))
    records.put_blob(made.archive, prefix="snapshots")
    return made.id


def make_snapshot(folder: Path, rules: SnapshotRules | None = None) -> Snapshot:
    """The tree at `folder` as it is now, nothing stored.

    In a git work tree that is what git tracks and what it does not ignore, dirty and untracked files and nested
    repositories included; elsewhere every file that no .gitignore names. `.runtimeignore` takes out more. Raises
    `NotPossible` for a tree that is too large, that holds what looks like a secret, or that does not hold still.
    """
    rules = rules or SnapshotRules()
    files = survey(folder, rules)
    return Snapshot(archive=_pack(folder, files), files=len(files), content_bytes=_total(files))


def snapshot_id(archive: bytes) -> str:
    return _PREFIX + hashlib.sha256(archive).hexdigest()


def fetch_snapshot(identity: str, records: RecordStore) -> bytes:
    """The archive of a content id; raises `StoreUnsafe` if the store holds other bytes under its name."""
    digest = identity.removeprefix(_PREFIX)
    if digest == identity or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise InvalidValue("snapshot", identity, "sha256: and 64 hex digits, as `runtime submit --snapshot` prints it")
    return records.get_blob(f"snapshots/{digest}")


def restore(archive: bytes, identity: str, folder: Path) -> None:
    """Unpack into `folder`, which must not exist, by the rules that the shim has; nothing lands outside of it.

    Raises `StoreUnsafe` if these are not the bytes of `identity`, and `NotPossible` for an archive that holds what no
    snapshot has: a device, a name that leads elsewhere.
    """
    from runtime import shim

    if snapshot_id(archive) != identity:
        raise StoreUnsafe(
            f"snapshot `{identity}` holds other bytes than were submitted",
            facts=[f"found {snapshot_id(archive)}"],
            retryable=False,
        )
    try:
        shim.unpack(archive, str(folder))
    except shim.NameRefused as problem:
        raise NotPossible(f"snapshot `{identity}` is refused: {problem}") from None


# what is in the tree


def survey(folder: Path, rules: SnapshotRules) -> list[TreeFile]:
    """The files of a snapshot in order, each looked at and none read. Raises as `make_snapshot`."""
    files = [
        TreeFile(name=name, status=status)
        for name, status in _with_status(folder, list_files(folder, exclude=rules.exclude))
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
    ]
    _check_size(folder, files, rules.max_bytes)
    _check_secrets(folder, files, set(rules.secrets))
    return files


def list_files(folder: Path, *, exclude: Sequence[str] = ()) -> list[str]:
    """Relative names in order, as git lists them, or by walking where there is no git."""
    if not folder.is_dir():
        raise NotPossible(f"there is no folder `{folder}` to take a snapshot of")
    names = sorted(_list_tree(folder, ""))
    ignored = _read_ignores(folder, exclude)
    return [name for name in names if not ignored(name)] if ignored else names


def read_git_state(folder: Path) -> GitState | None:
    """Commit, branch and diff of the work tree around `folder`; None where there is none."""
    # Both at once. Without external drivers and filters: they are the user's programs and may write.
    where = _start_git(folder, "rev-parse", "--is-inside-work-tree", "HEAD", "--symbolic-full-name", "HEAD")
    changed = _start_git(folder, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD", "--", ".")
    said, diff = where(), changed()
    if said is not None:
        _, commit, name = said.splitlines()
        branch: bytes | None = name.removeprefix(b"refs/heads/") if name != b"HEAD" else None
    elif _git(folder, "rev-parse", "--is-inside-work-tree") is None:
        return None
    else:
        commit, branch = b"", _git(folder, "symbolic-ref", "--quiet", "--short", "HEAD")
    return GitState(
        commit=os.fsdecode(commit) or None,
        branch=os.fsdecode(branch).strip() if branch else None,
        diff=(diff or b"").decode("utf-8", "replace") if commit else "",
    )


def _list_tree(folder: Path, prefix: str) -> Iterator[str]:
    """The names of a tree and of the repositories inside it, each with `prefix`."""
    listed = _git(folder, "ls-files", "-z", "-co", "--exclude-standard", "--deduplicate")
    if listed is None:
        yield from (prefix + name for name in _walk(folder, "", ()))
        return
    for raw in listed.split(b"\0"):
        name = os.fsdecode(raw).rstrip("/")
        path = folder / name
        if not name or not os.path.lexists(path):
            continue  # Deleted in the work tree, which is what the snapshot is of.
        if path.is_dir() and not path.is_symlink():
            # Git names a repository inside the tree and does not look into it. One without a commit, or a submodule
            # that was never fetched, is a plain folder to us.
            yield from _list_tree(path, f"{prefix}{name}/") if (path / ".git").exists() else ()
        else:
            yield prefix + name


def _walk(folder: Path, prefix: str, outer: Sequence[tuple[str, Callable[[str], bool]]]) -> Iterator[str]:
    """Every file below, by the .gitignore files alone; `outer` holds those of the folders above, with their prefix."""
    ignores = list(outer)
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    if any(entry.name == ".gitignore" for entry in found):
        ignores.append((prefix, _matcher((folder / ".gitignore").read_text(encoding="utf-8", errors="replace"))))
    for entry in found:
        name = prefix + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in (".git", "__pycache__") or any(
            ignored(name.removeprefix(start) + ("/" if is_folder else "")) for start, ignored in ignores
        ):
            continue
        if is_folder:
            yield from _walk(folder / entry.name, f"{name}/", ignores)
        else:
            yield name


def _read_ignores(folder: Path, exclude: Sequence[str]) -> Callable[[str], bool] | None:
    path = folder / IGNORE_FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = "\n".join((text, *exclude))
    return _matcher(lines) if lines.strip() else None


def _matcher(lines: str) -> Callable[[str], bool]:
    """Whether a name is ignored by lines in the syntax of .gitignore; a folder's name ends in `/`."""
    import pathspec

    spec: Any = pathspec.GitIgnoreSpec.from_lines(lines.splitlines())
    return lambda name: bool(spec.match_file(name))


def _git(folder: Path, *args: str) -> bytes | None:
    """What git prints; None where it refuses or is not installed. It takes no lock and writes nothing."""
    return _start_git(folder, *args)()


def _start_git(folder: Path, *args: str) -> Callable[[], bytes | None]:
    """The same, begun; the answer is for whoever calls."""
    try:
        asked = subprocess.Popen(
            ["git", "-C", str(folder), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except OSError:
        return lambda: None

    def answer() -> bytes | None:
        with asked:
            said, _ = asked.communicate()
        return said if asked.returncode == 0 else None

    return answer


def _with_status(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    root = str(folder)
    for name in names:
        try:
            yield name, os.lstat(f"{root}/{name}")
        except FileNotFoundError:
            continue  # Gone since it was listed.


def _total(files: Iterable[TreeFile]) -> int:
    return sum(each.status.st_size for each in files)


def _check_size(folder: Path, files: Sequence[TreeFile], max_bytes: int) -> None:
    total = _total(files)
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
    found = [each.name for each in files if each.name.endswith(_SECRETS) and each.name not in named]
    if found:
        raise NotPossible(
            f"the tree `{folder}` holds what looks like a secret: `{found[0]}`",
            facts=[f"{len(found)} such files; a snapshot can be read by everyone who reads the record store"],
            hint=f"add it to .gitignore or {IGNORE_FILE}, and pass secrets by reference",
        )


# the archive


def pack(folder: Path, names: Iterable[str]) -> bytes:
    """The canonical archive of these files."""
    return _pack(folder, [TreeFile(name=name, status=status) for name, status in _with_status(folder, names)])


def _pack(folder: Path, files: Iterable[TreeFile]) -> bytes:
    root = str(folder)
    parts: list[bytes] = []
    for each in files:
        path = f"{root}/{each.name}"
        if stat.S_ISLNK(each.status.st_mode):
            parts.append(_header(each.name, 0, 0o777, tarfile.SYMTYPE, os.readlink(path)))  # noqa: PTH115 - as for open below
        elif stat.S_ISREG(each.status.st_mode):
            content = _read_still(path, each)
            mode = 0o755 if each.status.st_mode & 0o100 else 0o644
            parts += (_header(each.name, len(content), mode, tarfile.REGTYPE, ""), content)
            if remainder := len(content) % tarfile.BLOCKSIZE:
                parts.append(b"\0" * (tarfile.BLOCKSIZE - remainder))
    size = sum(map(len, parts)) + 2 * tarfile.BLOCKSIZE
    parts.append(b"\0" * (2 * tarfile.BLOCKSIZE + -size % tarfile.RECORDSIZE))
    return b"".join(parts)


def _header(name: str, size: int, mode: int, kind: bytes, link: str) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.type, entry.linkname = size, mode, kind, link
    return entry.tobuf(tarfile.GNU_FORMAT, tarfile.ENCODING, "surrogateescape")


def _read_still(path: str, file: TreeFile) -> bytes:
    """The content, read again if the file changed meanwhile, so that no half-written one goes in."""
    for again in range(_READS):
        try:
            with open(path, "rb", buffering=0) as opened:  # noqa: PTH123 - Path.open is a third of the time here
                before = os.fstat(opened.fileno())
                content = opened.read()
                while chunk := opened.read():
                    content += chunk
                after = os.fstat(opened.fileno())
        except FileNotFoundError:
            break
        if (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size) and len(content) == after.st_size:
            return content
        time.sleep(0.05 * 2**again)
    raise NotPossible(
        f"`{file.name}` does not hold still: it changed each time it was read, or was deleted",
        facts=[f"read {_READS} times"],
        hint=f"stop what writes it, or add it to .gitignore or {IGNORE_FILE}",
    )
