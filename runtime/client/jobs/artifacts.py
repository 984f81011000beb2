"""The artifacts of a job's runs: which there are, and their bytes, read from the job's folder.

What this module returns of a run that succeeded is what the attempt that succeeded left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final

from runtime.client.artifacts import download_version, facts_of
from runtime.client.jobs.find import open_job
from runtime.client.jobs.handle import JobHandle, find_job
from runtime.config import Settings, load_settings
from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure, NotPossible, ObjectGone, RequestRefused, UnknownName
from runtime.jobs.artifacts import owner_of
from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import LedgerEntry, RunOutcome, as_damage, check_index, job_folder, read_object
from runtime.records.artifacts import ArtifactDamaged, ArtifactReader
from runtime.tasks.artifacts import Version
from runtime.units import count_noun

_OWNER: Final = re.compile(r"(j-[0-9a-f]+)-(\d+)")
_RUN: Final = re.compile(r"(.+)\.(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArtifact:
    """The newest version of an artifact of one run."""

    tag: str
    job: str
    index: int
    state: str
    """`final` of a run that succeeded, `saved` of any other: its newest version so far. `damaged` is a final one that cannot
    be read."""
    files: int
    size_bytes: int
    saved_at: datetime | None
    version: str
    """Its id, which never stands for other bytes."""
    left_out: str | None = None


class ManyRuns(RequestRefused):
    """More than one run of a job has an artifact of that tag."""

    def __init__(self, job: str, tag: str, found: list[RunArtifact]) -> None:
        self.found = found
        indices = ", ".join(str(each.index) for each in found[:10]) + (" …" if len(found) > 10 else "")
        super().__init__(
            f"job `{job}` has an artifact `{tag}` of {count_noun(len(found), 'run')}",
            facts=[f"they are: {indices}"],
            hint=f"name the run, such as {job[:10]}.{found[0].index}",
        )


class JobBlobs:
    """A folder of a job with artifacts, under the keys that a store has for those of `owner`."""

    def __init__(self, files: Files, folder: str, owner: str) -> None:
        self.files, self._folder, self._above = files, folder, f"artifacts/{owner}/"

    def name(self, key: str) -> str:
        """The file of a key."""
        return f"{self._folder}/{key.removeprefix(self._above)}"

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        return (prefix + name for name in self.files.names(self.name(prefix.rstrip("/"))))

    def get(self, key: str) -> bytes | None:
        return self.files.read(self.name(key))

    def path(self, key: str) -> None:
        return None

    def download(self, key: str, to: BinaryIO) -> None:
        place, name = self.name(key).rsplit("/", 1)
        try:
            self.files.download(f"{place}/{name}", to)
        except InfrastructureFailure:
            if name in self.files.names(place):
                raise
            raise ObjectGone(key) from None


def run_blobs(files: Files, job: str, index: int) -> JobBlobs:
    return JobBlobs(files, f"{job_folder(job)}/runs/{index}/artifacts", owner_of(job, index))


def split_run(text: str) -> tuple[str, int | None]:
    """The job and the run that `JOB` or `JOB.INDEX` names."""
    found = _RUN.fullmatch(text)
    return (found[1], int(found[2])) if found else (text, None)


def list_artifacts(job: JobHandle, index: int | None = None) -> list[RunArtifact]:
    """List the newest version of each tag of each run, or of one run; of a run that succeeded, what that attempt left last."""
    entry = job.entry()
    with as_damage(job.files, job.id, "spec.json"):
        spec = json.loads(job.files.read(f"{job_folder(job.id)}/spec.json") or b"{}")
        tags = sorted({**(spec.get("capture") or {})})
    first = entry.first_index
    indices = range(first, first + entry.indices) if index is None else [check_index(entry, index)]
    return [found for each in indices for tag in tags if (found := _find_newest(job, entry, each, tag)) is not None]


def _find_newest(job: JobHandle, entry: LedgerEntry, index: int, tag: str) -> RunArtifact | None:
    owner, outcome = _owner_of_result(job, entry, index)
    reader, of = ArtifactReader(run_blobs(job.files, owner, index)), owner_of(owner, index)
    final = outcome is not None and outcome.reason is EndReason.SUCCEEDED
    versions = reader.versions(of, tag)
    if final and outcome is not None:
        versions = [version for version in versions if version.attempt == outcome.attempt]
    for version in reversed(versions):
        try:
            manifest = reader.find(version)
        except ArtifactDamaged as problem:
            if final:
                return RunArtifact(tag=tag, job=job.id, index=index, **facts_of(version, problem, "final"))
            continue
        if manifest is None:
            continue
        if manifest.absent:
            return None
        facts = facts_of(version, manifest, "final" if final else "saved")
        return RunArtifact(tag=tag, job=job.id, index=index, **facts)
    return None


def _owner_of_result(job: JobHandle, entry: LedgerEntry, index: int) -> tuple[str, RunOutcome | None]:
    """The job whose folder has the run, which is an earlier one if a retry as a new job took its result over, and its outcome."""
    outcome = entry.outcomes.get(index)
    if outcome is None or job.files.names(f"{job_folder(job.id)}/runs/{index}/artifacts"):
        return job.id, outcome
    result = read_object(job.files, f"{job_folder(job.id)}/runs/{index}/result")
    return str(result.get("from", job.id)), outcome


def find_artifact(job: JobHandle, tag: str, index: int | None = None) -> RunArtifact:
    """Find the one artifact of that tag. Raises `UnknownName`, `ManyRuns` if several runs have one, and `ArtifactDamaged`."""
    listed = list_artifacts(job, index)
    found = [each for each in listed if each.tag == tag]
    if not found:
        raise UnknownName("artifact", tag, sorted({each.tag for each in listed}), where=f"of job `{job.id}`")
    if len(found) > 1:
        raise ManyRuns(job.id, tag, found)
    if found[0].state == "damaged":
        version = Version.parse(found[0].version)
        assert version is not None
        _open_run(job.files, version).find(version)  # raises what is wrong with it
    return found[0]


def get_artifact(job: JobHandle, info: RunArtifact, to: Path, *, progress: Callable[[int], None] | None = None) -> Path:
    """Bring a version home as `runtime.client.artifacts.get_artifact` does."""
    version = Version.parse(info.version)
    assert version is not None
    reader = _open_run(job.files, version)
    manifest = reader.find(version)
    if manifest is None:
        raise NotPossible(f"version `{version.id}` of artifact `{info.tag}` is gone", hint="a newer one may be there")
    return download_version(reader, version, manifest, to, progress=progress)


def _open_run(files: Files, version: Version) -> ArtifactReader:
    """The artifacts of the run that a version is of. A retry as a new job left the run in the folder of the earlier one."""
    owned = _OWNER.fullmatch(version.owner)
    assert owned is not None
    return ArtifactReader(run_blobs(files, owned[1], int(owned[2])))


def find_final(job: JobHandle, tag: str, index: int | None = None) -> RunArtifact:
    """Find an artifact that does not change any more. Raises `NotPossible` for that of a run that has not succeeded."""
    found = find_artifact(job, tag, index)
    if found.state != "final":
        run = f"{job.id[:10]}.{found.index}"
        raise NotPossible(
            f"run {found.index} of job `{job.id}` has not succeeded, so its artifact `{tag}` may change",
            hint=f"wait for it, or take it as it is now: runtime artifacts get {run} {tag}, then --reuse ./{tag}:{tag}",
        )
    return found


def open_source(source: str, to: Path) -> Path:
    """Bring home what `JOB/TAG`, `JOB.INDEX/TAG` or the id of a job's version stands for, of a run that has succeeded."""
    settings = load_settings()
    if (version := Version.parse(source)) is not None and (owned := open_owner(version, settings)) is not None:
        job, folder = owned
        with job:
            reader = ArtifactReader(folder)
            manifest = reader.find(version)
            if manifest is None or manifest.absent:
                raise NotPossible(f"version `{version.id}` of artifact `{version.tag}` is gone")
            return download_version(reader, version, manifest, to)
    owner, _, tag = source.rpartition("/")
    name, index = split_run(owner)
    with open_job(name, settings=settings) as job:
        return get_artifact(job, find_final(job, tag, index), to)


def open_owner(version: Version, settings: Settings) -> tuple[JobHandle, JobBlobs] | None:
    """The job that a version is of, and its artifacts; None for a version of no job."""
    found = _OWNER.fullmatch(version.owner)
    if found is None:
        return None
    job = find_job(found[1], settings=settings)
    return job, run_blobs(job.files, job.id, int(found[2]))
