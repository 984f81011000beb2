"""Artifacts in a record store: versions of files and folders, and their bytes by content.

A version is one manifest, in the format of the shim's checkpoints, which is written once the store has all its bytes: so it is
whole or absent. The names in a manifest were chosen by another machine; files are made by the shim's rules for such names.

- `artifacts/<owner>/<tag>/<version>.json` is a manifest; its name holds the attempt that saved it.
- `artifacts/<owner>/data/<sha256>` are the bytes of a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from runtime.errors import InfrastructureFailure, NotPossible, ObjectGone
from runtime.records.blobs import Blobs
from runtime.shim.common import TransferStopped
from runtime.shim.file_manifest import (
    MOST_FILES,
    UnsuitableFile,
    copy_file,
    from_text,
    hash_file,
    is_content,
    is_settled,
    leads_out,
    look,
    tell,
)
from runtime.shim.tree import GuardedFolder, UnsafeName
from runtime.system import system
from runtime.tasks.artifacts import Version
from runtime.units import count_noun, format_size

if TYPE_CHECKING:
    from runtime.shim.file_manifest import Found, Status

MOST_MANIFEST_BYTES: Final = 64 << 20
_PIECE: Final = 1 << 20
_FOLDER: Final = "artifacts"

GiveUp = Callable[[], bool]


class ArtifactDamaged(InfrastructureFailure):
    """A version that cannot be restored: its bytes are gone or are others, or its manifest names what no folder may hold."""

    def __init__(self, version: Version, problem: str) -> None:
        self.version = version
        super().__init__(f"version `{version.id}` cannot be used: {problem}", retryable=False)


class ArtifactRefused(NotPossible):
    """Files that cannot be an artifact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """A file, a link or an empty folder of a version."""

    sha256: str | None = None
    size: int = 0
    mode: int = 0o644
    link: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactManifest:
    entries: Mapping[str, ManifestEntry]
    """By path from the artifact; the one entry of a single file has the name of that file."""
    single: bool = False
    """The artifact is one file, and no folder."""
    absent: bool = False
    """There was neither a file nor a folder at the artifact's path."""
    saved_at: float = 0.0
    """Seconds since the epoch, by the clock of the machine that saved it."""
    left_out: str | None = None
    """The parts that were left out and why, for people to read."""

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    @property
    def contents(self) -> set[str]:
        return {entry.sha256 for entry in self.entries.values() if entry.sha256 is not None}

    def encode(self) -> bytes:
        files: dict[str, Any] = {}
        for name, entry in self.entries.items():
            if entry.link is not None:
                files[name] = {"link": entry.link}
            elif entry.sha256 is None:
                files[name] = {"folder": True}
            else:
                files[name] = {"sha256": entry.sha256, "size": entry.size, "mode": entry.mode}
        said: dict[str, Any] = {"files": files, "at": self.saved_at}
        more = {"single": self.single, "absent": self.absent, "left_out": self.left_out}
        said |= {name: value for name, value in more.items() if value}
        return json.dumps(said, sort_keys=True).encode()


def decode_manifest(data: bytes) -> ArtifactManifest:
    """Raise `ValueError` unless the data is a manifest."""
    if len(data) > MOST_MANIFEST_BYTES:
        raise ValueError(f"it has {format_size(len(data))}")
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("its manifest is no JSON") from None
    try:
        entries = {name: _decode_entry(about) for name, about in said["files"].items()}
        saved_at, left_out = float(said.get("at", 0)), said.get("left_out")
    except (AttributeError, KeyError, TypeError, RecursionError) as problem:
        raise ValueError(f"its manifest cannot be read: {problem!r:.200}") from None
    single, absent = bool(said.get("single")), bool(said.get("absent"))
    if len(entries) > MOST_FILES:
        raise ValueError(f"it has {count_noun(len(entries), 'file')}")
    if single and (len(entries) != 1 or next(iter(entries.values())).sha256 is None):
        raise ValueError("it is one file, and its manifest names others")
    return ArtifactManifest(entries=entries, single=single, absent=absent, saved_at=saved_at, left_out=left_out)


def _decode_entry(about: dict[str, Any]) -> ManifestEntry:
    if "link" in about:
        return ManifestEntry(link=str(about["link"]))
    if about.get("folder"):
        return ManifestEntry()
    sha256, size, mode = about["sha256"], about["size"], about["mode"]
    if not isinstance(sha256, str) or not is_content(sha256):
        raise ValueError("its manifest names a file without a content id")
    if type(size) is not int or type(mode) is not int or size < 0:
        raise ValueError("its manifest names a file without a size")
    return ManifestEntry(sha256=sha256, size=size, mode=mode & 0o777)


class Cache(Protocol):
    def fetch(self, sha256: str, to: Path, load: Callable[[Path], None]) -> None:
        """Make the file `to` from the cache, or with `load`."""


class ReadableBlobs(Protocol):
    """The part of `Blobs` that reading artifacts needs; `download(key, to)` may fetch large ones."""

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]: ...
    def get(self, key: str) -> bytes | None: ...
    def path(self, key: str) -> Path | None: ...


class ArtifactReader:
    def __init__(self, blobs: ReadableBlobs) -> None:
        self._readable = blobs

    def versions(self, owner: str, tag: str | None = None) -> list[Version]:
        """The versions of a tag, or of all tags of an owner, the newest last."""
        prefix = f"{_FOLDER}/{owner}/" + (f"{tag}/" if tag else "")
        found = (
            Version.parse(key[len(_FOLDER) + 1 :].removesuffix(".json")) for key in self._readable.list_keys(prefix)
        )
        return sorted(version for version in found if version is not None)

    def find(self, version: Version) -> ArtifactManifest | None:
        """The manifest, None if there is no such version. Raises `ArtifactDamaged`."""
        data = self._readable.get(_manifest_key(version))
        if data is None:
            return None
        try:
            return decode_manifest(data)
        except ValueError as problem:
            raise ArtifactDamaged(version, str(problem)) from None

    def restore(
        self,
        version: Version,
        manifest: ArtifactManifest,
        folder: Path,
        *,
        give_up: GiveUp | None = None,
        progress: Callable[[int], None] | None = None,
        cache: Cache | None = None,
    ) -> None:
        """Make the files of a version in an existing, empty folder; a single file lies there under its own name.

        `cache` keeps files of a store that is no folder of this machine. `progress` is called with the size of each file.
        Raises `ArtifactDamaged`, `StoreUnavailable`, `TransferStopped`, and `OSError` for a folder that cannot take them.
        """
        with (
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=".restoring-") as stage,
            GuardedFolder(str(folder)) as below,
        ):
            for name, entry in sorted(manifest.entries.items()):
                if give_up is not None and give_up():
                    raise TransferStopped
                try:
                    self._restore_one(version, name, entry, below, Path(stage) / "one", cache)
                except UnsafeName as problem:
                    raise ArtifactDamaged(version, str(problem)) from None
                if progress is not None and entry.sha256 is not None:
                    progress(entry.size)

    def _restore_one(
        self, version: Version, name: str, entry: ManifestEntry, below: GuardedFolder, stage: Path, cache: Cache | None
    ) -> None:
        local = from_text(name)
        if entry.link is not None:
            if leads_out(name, entry.link):
                raise UnsafeName(name, "is a link out of the artifact")
            below.link(local, from_text(entry.link))
        elif entry.sha256 is None:
            below.make(local)
        else:
            if cache is None or self._readable.path(_content_key(version.owner, entry.sha256)) is not None:
                self.fetch(version, name, entry, stage)
            else:
                cache.fetch(entry.sha256, stage, lambda to: self.fetch(version, name, entry, to))
            stage.chmod(entry.mode)
            folder, last = below.clear(local)
            os.rename(stage, last, dst_dir_fd=folder)

    def fetch(self, version: Version, name: str, entry: ManifestEntry, to: Path) -> None:
        """Save the bytes of a version's file `name` as `to`. Raises `ArtifactDamaged`."""
        assert entry.sha256 is not None
        key = _content_key(version.owner, entry.sha256)
        path, download = self._readable.path(key), getattr(self._readable, "download", None)
        with to.open("w+b") as opened:
            if path is not None and path.is_file():
                with path.open("rb") as source:
                    shutil.copyfileobj(source, opened, _PIECE)
            elif download is not None:
                try:
                    download(key, opened)
                except ObjectGone:
                    raise ArtifactDamaged(version, f"file `{name}` of it is gone") from None
            elif (data := self._readable.get(key)) is not None:
                opened.write(data)
            else:
                raise ArtifactDamaged(version, f"file `{name}` of it is gone")
            opened.flush()
            opened.seek(0)
            if hash_pieces(iter(lambda: opened.read(_PIECE), b"")) != entry.sha256:
                raise ArtifactDamaged(version, f"file `{name}` of it has other bytes than it names")


class ArtifactStore(ArtifactReader):
    def __init__(self, blobs: Blobs) -> None:
        super().__init__(blobs)
        self._blobs = blobs

    def write(self, version: Version, manifest: ArtifactManifest) -> None:
        """Make a version of bytes that are all there. It is durable on return."""
        self._blobs.put(_manifest_key(version), manifest.encode())

    def put_content(self, owner: str, sha256: str, file: Path) -> None:
        self._blobs.upload(_content_key(owner, sha256), file)

    def list_stored(self, owner: str, manifest: ArtifactManifest) -> set[str]:
        """The contents of a manifest that the store has in their full size."""
        sizes = {entry.sha256: entry.size for entry in manifest.entries.values()}
        prefix = f"{_FOLDER}/{owner}/data/"
        found = ((blob.key.removeprefix(prefix), blob.size) for blob in self._blobs.list_blobs(prefix))
        return {sha256 for sha256, size in found if sizes.get(sha256) == size}

    def sweep(self, owner: str, keep: Collection[Version]) -> None:
        """Remove the bytes of an owner that no version in `keep` names, of which none may be saved any more."""
        used: set[str] = set()
        for version in keep:
            manifest = self.find(version)
            used |= manifest.contents if manifest is not None else set()
        prefix = f"{_FOLDER}/{owner}/data/"
        for key in list(self._blobs.list_keys(prefix)):
            # Versions of a tag `data` lie there, too.
            if is_content(key.removeprefix(prefix)) and key.removeprefix(prefix) not in used:
                self._blobs.delete(key)

    def drop(self, versions: Iterable[Version], *, keep: Collection[Version], may_go_on: GiveUp = lambda: True) -> None:
        """Remove versions of one owner, and bytes that no version in `keep` names and they alone do.

        Bytes go last, so a version never lacks what it names. Nothing more is removed once `may_go_on` is false.
        """
        used: set[str] = set()
        for version in keep:
            manifest = self.find(version)  # a damaged one raises, and nothing is removed
            used |= manifest.contents if manifest is not None else set()
        for version in versions:
            with suppress(ArtifactDamaged):
                manifest = self.find(version)
                if not may_go_on():
                    return
                self._blobs.delete(_manifest_key(version))
                for sha256 in sorted((manifest.contents if manifest else set()) - used):
                    if not may_go_on():
                        return
                    self._blobs.delete(_content_key(version.owner, sha256))


def _manifest_key(version: Version) -> str:
    return f"{_FOLDER}/{version.id}.json"


def _content_key(owner: str, sha256: str) -> str:
    return f"{_FOLDER}/{owner}/data/{sha256}"


def read_files(path: Path) -> tuple[ArtifactManifest, dict[str, Path]]:
    """Return the manifest that a version of a local file or folder would have, and where each content lies.

    Raises `ArtifactRefused` for too much, and `OSError` for a file that cannot be read.
    """
    found, left_out = _look(path)
    entries: dict[str, ManifestEntry] = {}
    places: dict[str, Path] = {}
    for name, (kind, detail) in sorted((found or {}).items()):
        if kind == "link":
            entries[name] = ManifestEntry(link=detail)
        elif kind == "folder":
            if name:
                entries[name] = ManifestEntry()
        else:
            place = path / from_text(name) if name else path
            content = hash_file(str(place))
            entries[name or path.name] = ManifestEntry(sha256=content, size=detail[0], mode=detail[1])
            places[content] = place
    single = found is not None and found[""][0] == "file"
    made = ArtifactManifest(
        entries=entries, single=single, absent=found is None, saved_at=system.time(), left_out=tell(left_out)
    )
    return made, places


def hash_pieces(pieces: Iterator[bytes]) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


# saving


@dataclass(slots=True)
class Writer:
    """Saves versions of one artifact, each time only bytes that the store does not have.

    All versions have the name of one attempt.
    """

    store: ArtifactStore
    first: Version
    """Names the attempt, with the number of its first version."""
    path: Path
    stage: Path
    """A folder for copies of files while they are sent; made on first use."""
    there: set[str] = field(default_factory=set)
    """Contents that the store has for this owner."""
    known: dict[tuple[str, Status], str] = field(default_factory=dict)
    """Contents of files that were read before."""
    last: ArtifactManifest | None = None
    """The last version of this attempt."""
    saved: list[Version] = field(default_factory=list)
    """Versions of this attempt in the store."""
    saved_before: int = 0
    """Number of its versions that are gone from there."""
    seen: Any = None
    """What the last version was made of."""

    def know(self, manifest: ArtifactManifest) -> None:
        """Take the bytes of another version of this owner for stored."""
        self.there |= manifest.contents

    def forget(self, dropped: Collection[Version]) -> None:
        """Stop counting on bytes that the last version does not name; these versions are gone from the store."""
        self.saved_before += len(dropped)
        self.saved = [version for version in self.saved if version not in dropped]
        self.there = set(self.last.contents) if self.last is not None else set()

    def save(self, *, final: bool = False, absent: bool = False, give_up: GiveUp | None = None) -> Version | None:
        """Save a new version if anything changed; returns it. A final one is saved in any case, if there is anything.

        That it is gone is saved only with `absent`: an attempt that was killed may have been about to write it again.

        Raises `ArtifactRefused` for too much, `StoreUnavailable`, `OSError` and `TransferStopped`. Safe to call again.
        """
        found, left_out = _look(self.path)
        looked = (found, left_out) if found is not None else None
        if looked == self.seen and self.last is not None and not final:
            return None
        if found is None and not (absent and (self.last is not None or (final and self.saved))):
            return None
        if final and looked == self.seen and self.last is not None and self._is_settled(found or {}):
            return None
        manifest = self._send(found, dict(left_out), give_up)
        if self.last is not None and _same(manifest, self.last):
            self.seen = looked
            return None
        numbered = Version(
            self.first.generation,
            self.first.attempt,
            self.first.number + self.saved_before + len(self.saved),
            self.first.token,
            self.first.owner,
            self.first.tag,
        )
        self.store.write(numbered, manifest)
        self.saved.append(numbered)
        self.last, self.seen = manifest, looked
        return numbered

    def _is_settled(self, found: Mapping[str, Any]) -> bool:
        return all(kind != "file" or is_settled(detail) for kind, detail in found.values())

    def _send(self, found: dict[str, Any] | None, left_out: dict[str, str], give_up: GiveUp | None) -> ArtifactManifest:
        entries: dict[str, ManifestEntry] = {}
        single = found is not None and found.get("", ("",))[0] == "file"
        for name, about in sorted((found or {}).items()):
            if give_up is not None and give_up():
                raise TransferStopped
            kind, detail = about
            if kind == "link":
                entries[name] = ManifestEntry(link=detail)
            elif kind == "folder":
                if name:
                    entries[name] = ManifestEntry()
            else:
                place = self.path / from_text(name) if name else self.path
                shown = name or self.path.name
                try:
                    entries[shown] = self._send_file(name, place, detail)
                except FileNotFoundError:
                    continue  # removed meanwhile
                except PermissionError as problem:
                    left_out[shown] = f"cannot be read: {problem.strerror}"
        return ArtifactManifest(
            entries=entries,
            single=single and bool(entries),
            absent=found is None or (single and not entries),
            saved_at=system.time(),
            left_out=tell(left_out),
        )

    def _send_file(self, name: str, place: Path, status: Status) -> ManifestEntry:
        content = self.known.get((name, status))
        if content is not None and content in self.there:
            return ManifestEntry(sha256=content, size=status[0], mode=status[1])
        self.stage.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy = self.stage / "one"
        try:
            content, status = copy_file(str(place), str(copy))
            if content not in self.there:
                self.store.put_content(self.first.owner, content, copy)
                self.there.add(content)
        finally:
            copy.unlink(missing_ok=True)
        if is_settled(status):
            self.known[name, status] = content
        return ManifestEntry(sha256=content, size=status[0], mode=status[1])


def _look(path: Path) -> tuple[Found | None, dict[str, str]]:
    """What lies at `path`, as `look` has it. Raises `ArtifactRefused` for too much."""
    try:
        return look(str(path))
    except UnsuitableFile as problem:
        raise ArtifactRefused(str(problem), hint=problem.hint) from None


def _same(one: ArtifactManifest, other: ArtifactManifest) -> bool:
    return (one.entries, one.single, one.absent, one.left_out) == (
        other.entries,
        other.single,
        other.absent,
        other.left_out,
    )
