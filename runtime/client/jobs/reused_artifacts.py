"""What a job reuses: each source settled to one version, and its bytes brought into the job's folder.

All attempts of the job, and its retries, find the bytes there, whatever happens to the source.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from runtime.client import artifacts as stored
from runtime.client.jobs import artifacts as of_jobs
from runtime.client.jobs.artifacts import JobBlobs
from runtime.client.jobs.find import is_known_name, open_job
from runtime.client.resolve_id import LAST, newest_job, recall_last
from runtime.config import Settings
from runtime.errors import NotPossible, UnknownName
from runtime.jobs.artifacts import REUSED
from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import job_folder
from runtime.jobs.spec import JobSpec
from runtime.records.artifacts import ArtifactManifest, ArtifactReader, ManifestEntry, decode_manifest, read_files
from runtime.shim.file_manifest import copy_file
from runtime.stack.open import open_stack
from runtime.tasks.artifacts import Version
from runtime.units import count_noun, format_size


class OpenVersion(Protocol):
    """Where the files of a version lie, while it is open."""

    def fetch(self, version: Version, name: str, entry: ManifestEntry, to: Path) -> None:
        """Save the bytes of a file, verified."""

    def find(self, version: Version, entry: ManifestEntry, files: Files) -> str | None:
        """The name of the file among these `files`, if it lies there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusedArtifact:
    """A version that a job reuses under a tag."""

    tag: str
    version: Version
    manifest: ArtifactManifest
    open: Callable[[], AbstractContextManager[OpenVersion]]


class _Here:
    """Files of this machine, as they were read."""

    def __init__(self, places: Mapping[str, Path], shown: str) -> None:
        self._places, self._shown = places, shown

    def fetch(self, version: Version, name: str, entry: ManifestEntry, to: Path) -> None:
        assert entry.sha256 is not None
        try:
            found, _ = copy_file(str(self._places[entry.sha256]), str(to))
        except OSError as problem:
            raise NotPossible(f"`{self._shown}` cannot be read: {problem.strerror}") from None
        if found != entry.sha256:
            raise NotPossible(f"`{self._shown}` has changed since the launch began", hint="launch it again")

    def find(self, version: Version, entry: ManifestEntry, files: Files) -> str | None:
        return None


class _Stored:
    """Versions in a store of artifacts, or in a folder of a job."""

    def __init__(self, reader: ArtifactReader, folder: JobBlobs | None = None) -> None:
        self._folder = folder
        self.fetch = reader.fetch

    def find(self, version: Version, entry: ManifestEntry, files: Files) -> str | None:
        if self._folder is None or self._folder.files.address != files.address:
            return None
        return self._folder.name(f"artifacts/{version.owner}/data/{entry.sha256}")


class Sources:
    """Settles what jobs reuse, each source once, however many targets are tried.

    `stack` is the one whose tasks are meant; None is the one that the user's commands use.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[tuple[str, str, str | None], ReusedArtifact] = {}

    def settle(self, spec: JobSpec, stack: str | None) -> tuple[JobSpec, tuple[ReusedArtifact, ...]]:
        """Return the spec with the ids of versions in the place of its sources, and the versions."""
        if not spec.reuse:
            return spec, ()
        for tag, source in spec.reuse.items():
            if (tag, source, stack) not in self._found:
                self._found[tag, source, stack] = self._settle_one(tag, source, stack)
        reused = tuple(self._found[tag, source, stack] for tag, source in sorted(spec.reuse.items()))
        return replace(spec, reuse={each.tag: each.version.id for each in reused}), reused

    def _settle_one(self, tag: str, source: str, stack: str | None) -> ReusedArtifact:
        if stored.is_address(source):
            folder = Path(tempfile.mkdtemp(prefix="runtime-get-"))
            # Another target, or a launch that is repeated, may need it as long as this object exists.
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            return _read_here(tag, stored.download(source, folder), source)
        if source.startswith((".", "/", "~")):
            return _read_here(tag, Path(source).expanduser(), source)
        if (version := Version.parse(source)) is None:
            version = self._find_version(source, stack)
        opening = partial(self._open, version, stack)
        with opening() as (_, reader):
            manifest = reader.find(version)
        if manifest is None or manifest.absent:
            hint = "`runtime artifacts list` shows the newest ones"
            raise NotPossible(f"version `{version.id}` of artifact `{version.tag}` is gone", hint=hint)
        return ReusedArtifact(tag=tag, version=version, manifest=manifest, open=partial(_only_bytes, opening))

    def _find_version(self, source: str, stack: str | None) -> Version:
        owner, theirs = stored.split_source(source)
        found = self._find_of_job(owner, theirs) if self._means_job(owner) else self._find_of_task(owner, theirs, stack)
        version = Version.parse(found)
        assert version is not None
        return version

    def _means_job(self, owner: str) -> bool:
        return stored.is_job_id(owner) or (owner == LAST and newest_job(self._settings.data_dir) is not None)

    def _find_of_job(self, owner: str, tag: str) -> str:
        name, index = of_jobs.split_run(owner)
        with open_job(name, settings=self._settings) as job:
            return of_jobs.find_final(job, tag, index).version

    def _find_of_task(self, owner: str, tag: str, stack: str | None) -> str:
        """An experiment goes before a job of the same name."""
        try:
            with open_stack(stack, settings=self._settings) as opened:
                last = recall_last(self._settings.data_dir, opened.name)
                return stored.find_final(owner, tag, opened.records, last=last).version
        except UnknownName:
            if not is_known_name(of_jobs.split_run(owner)[0], self._settings):
                raise
        return self._find_of_job(owner, tag)

    @contextmanager
    def _open(self, version: Version, stack: str | None) -> Iterator[tuple[OpenVersion, ArtifactReader]]:
        """Open the place of a version: the folder of a job's run, or the store of a stack."""
        if (owned := of_jobs.open_owner(version, self._settings)) is not None:
            job, folder = owned
            with job:
                reader = ArtifactReader(folder)
                yield _Stored(reader, folder), reader
        else:
            with open_stack(stack, settings=self._settings) as opened:
                reader = opened.records.open_artifacts()
                yield _Stored(reader), reader


@contextmanager
def _only_bytes(
    opening: Callable[[], AbstractContextManager[tuple[OpenVersion, ArtifactReader]]],
) -> Iterator[OpenVersion]:
    with opening() as (found, _):
        yield found


def _opened(found: OpenVersion) -> Callable[[], AbstractContextManager[OpenVersion]]:
    return lambda: nullcontext(found)


def _read_here(tag: str, path: Path, shown: str) -> ReusedArtifact:
    """A version that is made of the bytes of a file or folder, so that the same bytes are the same job."""
    if not path.exists():
        raise NotPossible(f"there is no `{shown}`, which `reuse` names", hint="name a file or a folder")
    if not (path.is_file() or path.is_dir()):
        raise NotPossible(f"`{shown}`, which `reuse` names, is neither a file nor a folder")
    try:
        manifest, places = read_files(path.resolve())
    except OSError as problem:
        raise NotPossible(f"`{shown}` cannot be read: {problem.strerror}") from None
    content = hashlib.sha256(replace(manifest, saved_at=0.0).encode()).hexdigest()
    version = Version(1, 1, 1, content[:24], f"local-{content[:32]}", tag)
    return ReusedArtifact(tag=tag, version=version, manifest=manifest, open=_opened(_Here(places, shown)))


def read_kept(spec: JobSpec, files: Files, job: str) -> tuple[ReusedArtifact, ...]:
    """What a job that was launched reuses, from its own folder."""
    found = []
    for tag, named in sorted(spec.reuse.items()):
        version = Version.parse(named)
        text = files.read(f"{job_folder(job)}/{REUSED}/{tag}.json")
        if version is None or text is None:
            raise NotPossible(f"what job `{job}` reuses as `{tag}` is gone", hint="runtime launch --again")
        folder = JobBlobs(files, f"{job_folder(job)}/{REUSED}", version.owner)
        opening = _opened(_Stored(ArtifactReader(folder), folder))
        found.append(ReusedArtifact(tag=tag, version=version, manifest=decode_manifest(text), open=opening))
    return tuple(found)


def store_reused(
    reused: tuple[ReusedArtifact, ...], folder: str, files: Files, progress: Callable[[str], None]
) -> None:
    """Copy each version into the folder of a job, unless it has it: the list last. Safe to repeat."""
    folder = f"{folder}/{REUSED}"
    for each in reused:
        if f"{each.tag}.json" in files.names(folder):
            continue
        there = set(files.names(f"{folder}/data"))
        entries = {
            entry.sha256: (name, entry)
            for name, entry in each.manifest.entries.items()
            if entry.sha256 not in (None, *there)
        }
        if entries:
            size = format_size(sum(entry.size for _, entry in entries.values()))
            progress(f"bringing `{each.tag}`, which it reuses: {count_noun(len(entries), 'file')}, {size}")
        with each.open() as found, tempfile.TemporaryDirectory(prefix="runtime-reuse-") as stage:
            for sha256, (name, entry) in sorted(entries.items(), key=lambda one: str(one[0])):
                place, known = f"{folder}/data/{sha256}", found.find(each.version, entry, files)
                if known is None or not files.link(known, place):
                    found.fetch(each.version, name, entry, Path(stage) / "one")
                    files.upload(place, Path(stage) / "one")
        files.write(f"{folder}/{each.tag}.json", each.manifest.encode())
