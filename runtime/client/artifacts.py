"""Artifacts for a user's commands: which there are, brought home, put into a store, and named for tasks that reuse them.

docs/artifacts.md has the promises. What this module returns of a task that succeeded is what the attempt that succeeded left.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from runtime.client.resolve_id import IdKind, get_task_id, identify
from runtime.client.tasks.results import ListedTask, list_tasks
from runtime.client.tasks.task_facts import read_standing
from runtime.config import load_settings, working_folder
from runtime.errors import InfrastructureFailure, InvalidValue, NotPossible, RequestRefused, UnknownName
from runtime.records.artifacts import ArtifactDamaged, ArtifactManifest, ArtifactReader, ArtifactStore, Writer
from runtime.records.base import RecordStore
from runtime.tasks.artifacts import EVERY, NO_ARTIFACTS, ArtifactSpec, Version, is_tag
from runtime.tasks.model import TaskState, check_new_experiment, experiment_digest, new_token
from runtime.units import Span, count_noun, to_span

MOST_URL_BYTES: Final = 64 << 30
_URL: Final = re.compile(r"(https?|gs|s3)://.+")
SOURCES: Final = "JOB/TAG, JOB.INDEX/TAG, EXPERIMENT/TAG, TASK/TAG, an address, a path that begins with `.`, `/` or `~`, or the id of a version"
TAG: Final = "up to 64 letters, digits and _.-, such as model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactInfo:
    """A version of an artifact."""

    tag: str
    task: str | None
    """The task whose attempts saved it; None if somebody put it."""
    key: str | None
    """The key of that task."""
    state: str
    """`final` of a task that succeeded, `put`, or `saved` of any other task: its newest version so far. `damaged` is a final
    one that cannot be read; it has no files, and `left_out` says why."""
    files: int
    size_bytes: int
    saved_at: datetime | None
    version: str
    """Its id, which never stands for other bytes."""
    left_out: str | None = None


class ManyArtifacts(RequestRefused):
    """More than one task of an experiment has an artifact of that tag."""

    def __init__(self, experiment: str, tag: str, found: list[ArtifactInfo]) -> None:
        self.found = found
        tasks = ", ".join(str(each.task) for each in found[:5]) + (" …" if len(found) > 5 else "")
        super().__init__(
            f"`{experiment}` has an artifact `{tag}` of {count_noun(len(found), 'task')}",
            facts=[f"they are: {tasks}"],
            hint=f"name the task, such as {found[0].task}",
        )


def list_artifacts(text: str, records: RecordStore, *, last: str | None = None) -> list[ArtifactInfo]:
    """List the artifacts of a task, or of an experiment with all its tasks.

    Of each tag of a task it is the newest version; once the task has succeeded, the last one of the attempt that did.
    """
    store = records.open_artifacts()
    try:
        found = identify(text, records, last=last)
    except UnknownName:
        if put := list(_list_put(store, text)):
            return put
        raise
    if found.kind is IdKind.WORKER:
        raise RequestRefused(f"`{text}` is a worker, which has no artifacts", hint="name an experiment or a task")
    if found.kind is IdKind.TASK:
        task = get_task_id(found.name, records)
        standing = read_standing(records, task)
        listed = ListedTask(task, standing.task, standing.generation, standing.state)
        return list(_list_of(records, store, listed))
    rows = [row for each in list_tasks(records, found.name) for row in _list_of(records, store, each)]
    return [*rows, *_list_put(store, found.name)]


def _list_of(records: RecordStore, store: ArtifactStore, listed: ListedTask) -> Iterator[ArtifactInfo]:
    if listed.task is None or not listed.task.artifacts.capture:
        return
    record = None
    if listed.state is None or listed.state.terminal:
        record = records.find(listed.task_id, listed.generation)
    final = record is not None and record.state is TaskState.SUCCEEDED
    for tag in sorted(listed.task.artifacts.capture):
        versions = store.versions(listed.task_id, tag)
        if final and record is not None:
            versions = [version for version in versions if version.token == record.token]
        info = _newest(store, versions, listed, "final" if final else "saved")
        if info is not None:
            yield info


def has_put(experiment: str, records: RecordStore) -> bool:
    """Whether artifacts were put for an experiment of that very name."""
    return any(True for _ in _list_put(records.open_artifacts(), experiment))


def _list_put(store: ArtifactStore, experiment: str) -> Iterator[ArtifactInfo]:
    by_tag: dict[str, list[Version]] = {}
    for version in store.versions(_owner(experiment)):
        by_tag.setdefault(version.tag, []).append(version)
    for _, versions in sorted(by_tag.items()):
        if (info := _newest(store, versions, None, "put")) is not None:
            yield info


def _newest(
    store: ArtifactStore, versions: list[Version], listed: ListedTask | None, state: str
) -> ArtifactInfo | None:
    """The newest version that can be read; of a final one there is no other."""
    task, key = (listed.task_id, listed.task.key if listed.task else None) if listed else (None, None)
    for version in reversed(versions):
        try:
            manifest = store.find(version)
        except ArtifactDamaged as problem:
            if state == "final":
                return ArtifactInfo(tag=version.tag, task=task, key=key, **facts_of(version, problem, state))
            continue
        if manifest is None or manifest.absent:
            if state == "final":
                return None
            continue
        return ArtifactInfo(tag=version.tag, task=task, key=key, **facts_of(version, manifest, state))
    return None


def facts_of(version: Version, found: ArtifactManifest | ArtifactDamaged, state: str) -> dict[str, Any]:
    """What is shown of a version besides its owner: `damaged`, with the reason, if it cannot be read."""
    if isinstance(found, ArtifactDamaged):
        facts = {"state": "damaged", "files": 0, "size_bytes": 0, "saved_at": None, "left_out": found.message}
    else:
        facts = {
            "state": state,
            "files": sum(entry.sha256 is not None for entry in found.entries.values()),
            "size_bytes": found.size,
            "saved_at": datetime.fromtimestamp(found.saved_at, UTC),
            "left_out": found.left_out,
        }
    return {**facts, "version": version.id}


def find_artifact(text: str, tag: str, records: RecordStore, *, last: str | None = None) -> ArtifactInfo:
    """Find the one artifact of that tag. Raises `UnknownName`, `ManyArtifacts` if several tasks have one, and
    `ArtifactDamaged`."""
    _check_tag(tag)
    listed = list_artifacts(text, records, last=last)
    found = [each for each in listed if each.tag == tag]
    if not found:
        raise UnknownName("artifact", tag, sorted({each.tag for each in listed}), where=f"of `{text}`")
    # Files that somebody put come before those of tasks.
    put = [each for each in found if each.task is None]
    if not put and len(found) > 1:
        raise ManyArtifacts(text, tag, found)
    chosen = (put or found)[0]
    if chosen.state == "damaged":
        open_version(chosen, records)  # raises what is wrong with it
    return chosen


# bringing home


def open_version(info: ArtifactInfo, records: RecordStore) -> tuple[Version, ArtifactManifest]:
    version = Version.parse(info.version)
    manifest = None if version is None else records.open_artifacts().find(version)
    if version is None or manifest is None:
        raise NotPossible(f"version `{info.version}` of artifact `{info.tag}` is gone", hint="a newer one may be there")
    return version, manifest


def get_artifact(
    info: ArtifactInfo, to: Path, records: RecordStore, *, progress: Callable[[int], None] | None = None
) -> Path:
    """Bring a version home into a folder that is new or empty; the folder appears whole or not at all.

    Returns the path of the artifact: that folder, or a single file in it.
    """
    version, manifest = open_version(info, records)
    return download_version(records.open_artifacts(), version, manifest, to, progress=progress)


def download_version(
    store: ArtifactReader,
    version: Version,
    manifest: ArtifactManifest,
    to: Path,
    *,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Bring a version home as `get_artifact` does."""
    target = to.absolute()
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise NotPossible(f"`{to}` is there already and is no empty folder", hint="name another, or move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as problem:
        raise NotPossible(f"the folder `{to}` cannot be made: {problem.strerror}", hint="name another folder") from None
    try:
        store.restore(version, manifest, part, progress=progress)
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o777 & ~umask)
        part.rename(target)
    except OSError as problem:
        raise InfrastructureFailure(
            f"artifact `{version.tag}` cannot be saved in `{to}`: {problem.strerror}", hint="make room there"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return to / next(iter(manifest.entries)) if manifest.single else to


# putting


def _owner(experiment: str) -> str:
    return f"x-{experiment_digest(experiment)}"


def put_artifact(path: Path, tag: str, experiment: str, records: RecordStore) -> ArtifactInfo:
    """Save a file or folder of this machine under an experiment. The same bytes again are the same version, and mend it."""
    _check_tag(tag)
    check_new_experiment(experiment)
    if not (path.is_file() or path.is_dir()):
        problem = f"`{path}` is neither a file nor a folder" if path.exists() else f"there is no `{path}`"
        raise NotPossible(problem, hint="name a file or a folder")
    store = records.open_artifacts()
    versions = store.versions(_owner(experiment), tag)
    attempt = versions[-1].attempt + 1 if versions else 1
    first = Version(1, attempt, 1, new_token(), _owner(experiment), tag)
    with tempfile.TemporaryDirectory(prefix="runtime-put-") as stage:
        writer = Writer(store, first, path.resolve(), Path(stage))
        if versions and (newest := _find_whole(store, versions[-1])) is not None:
            # A file that was damaged since is sent again.
            writer.there |= store.list_stored(first.owner, newest)
            writer.last = newest
        try:
            writer.save(final=True)
        except OSError as problem:
            raise NotPossible(f"`{path}` cannot be read: {problem.strerror}") from None
    records.put_experiment(experiment, queue=None)
    info = _newest(store, writer.saved or versions[-1:], None, "put")
    assert info is not None
    return info


def _find_whole(store: ArtifactStore, version: Version) -> ArtifactManifest | None:
    try:
        return store.find(version)
    except ArtifactDamaged:
        return None


# naming them for tasks


def make_artifacts(
    capture: Mapping[str, object] | None,
    every: Span | None,
    reuse: Mapping[str, object] | None,
    records: RecordStore,
    experiment: str,
    *,
    last: str | None = None,
) -> ArtifactSpec:
    """The artifacts of tasks that are submitted from the current folder; what they reuse is settled here, once and for all.

    `reuse` names `EXPERIMENT/TAG`, `TASK/TAG` or `JOB/TAG`, a path that begins with `.`, `/` or `~`, or an address; what is
    of a job or behind a path or an address is put under the experiment.
    """
    if not (capture or reuse):
        return NO_ARTIFACTS
    named = {tag: resolve_reuse(source, tag, records, experiment, last=last) for tag, source in (reuse or {}).items()}
    span, here = EVERY if every is None else to_span(every, "capture-every"), working_folder()
    return ArtifactSpec({tag: relative_path(path, here) for tag, path in (capture or {}).items()}, span, named)


def relative_path(path: object, here: Path) -> str:
    """A path below the folder `here` as an attempt that starts there has it."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidValue("capture", f"{path!r:.100}", "a path below the current folder, such as out/model")
    named = here / Path(path).expanduser()
    found = os.path.relpath(named, here)
    if found.startswith("../"):  # the same folder may have two names
        found = os.path.relpath(os.path.realpath(named), os.path.realpath(here))
    if found in (".", "..") or found.startswith("../"):
        raise InvalidValue("capture", os.fspath(path), "a path below the current folder, such as out/model")
    return found


def resolve_reuse(source: object, tag: str, records: RecordStore, experiment: str, *, last: str | None = None) -> str:
    """The id of the version that a source stands for now."""
    _check_tag(tag)
    if isinstance(source, os.PathLike):
        return put_artifact(Path(source).expanduser(), tag, experiment, records).version
    if not isinstance(source, str):
        raise InvalidValue("reuse", f"{source!r:.100}", SOURCES)
    if is_address(source):
        with _downloaded(source) as path:
            return put_artifact(path, tag, experiment, records).version
    if source.startswith((".", "/", "~")):
        return put_artifact(Path(source).expanduser(), tag, experiment, records).version
    if (version := Version.parse(source)) is not None:
        return _put_from_job(source, tag, records, experiment) if version.owner.startswith("j-") else source
    owner, theirs = split_source(source)
    if not is_job_id(owner):
        try:
            return find_final(owner, theirs, records, last=last).version
        except UnknownName:
            if not _names_job(owner):
                raise
    return _put_from_job(source, tag, records, experiment)


def is_job_id(owner: str) -> bool:
    """Whether the owner in a source is the id of a job or its beginning, perhaps with a run's index."""
    return re.fullmatch(r"j-[0-9a-f]*(\.\d+)?", owner, re.ASCII) is not None


def _names_job(owner: str) -> bool:
    from runtime.client.jobs.artifacts import split_run
    from runtime.client.jobs.find import is_known_name

    return is_known_name(split_run(owner)[0], load_settings())


def _put_from_job(source: str, tag: str, records: RecordStore, experiment: str) -> str:
    """Put what a run of a job left, which lies in the record root of its target."""
    from runtime.client.jobs.artifacts import open_source

    with tempfile.TemporaryDirectory(prefix="runtime-reuse-") as folder:
        return put_artifact(open_source(source, Path(folder) / "home"), tag, experiment, records).version


def split_source(source: str) -> tuple[str, str]:
    """The owner and the tag of `OWNER/TAG`."""
    owner, slash, theirs = source.rpartition("/")
    if not slash or not owner:
        raise InvalidValue("reuse", source, SOURCES)
    return owner, theirs


def find_final(owner: str, tag: str, records: RecordStore, *, last: str | None = None) -> ArtifactInfo:
    """Find an artifact that does not change any more. Raises `NotPossible` for that of a task that has not succeeded."""
    found = find_artifact(owner, tag, records, last=last)
    if found.state == "saved":
        raise NotPossible(
            f"task `{found.task}` has not succeeded, so its artifact `{tag}` may change",
            hint=f"wait for it, or take it as it is now: runtime artifacts get {found.task} {tag}, then --reuse ./{tag}:{tag}",
        )
    return found


def split_reuse(text: str) -> tuple[str, str]:
    """Source and tag of `SOURCE:TAG`; without a tag it is the last part of the source."""
    source, colon, tag = text.rpartition(":")
    if not colon or not is_tag(tag) or not source or (tag.isdigit() and "://" in source):
        source, tag = text, re.sub(r"[?#].*", "", text).rstrip("/").rpartition("/")[2]
    _check_tag(tag)
    return source, tag


def split_capture(text: str) -> tuple[str, str]:
    """Path and tag of `PATH:TAG`; without a tag it is the last part of the path."""
    path, colon, tag = text.rpartition(":")
    if not colon:
        path, tag = text, text.rstrip("/").rpartition("/")[2]
    if not path:
        raise InvalidValue("capture", text, "PATH:TAG, such as out/model:model")
    _check_tag(tag)
    return path, tag


def _check_tag(tag: str) -> None:
    if not is_tag(tag):
        raise InvalidValue("tag", tag, TAG)


@contextmanager
def _downloaded(address: str) -> Iterator[Path]:
    """The file behind an address, while it is needed."""
    with tempfile.TemporaryDirectory(prefix="runtime-get-") as folder:
        yield download(address, Path(folder))


def is_address(source: str) -> bool:
    return _URL.fullmatch(source) is not None


def download(address: str, folder: Path) -> Path:
    """Save the file behind an address, checked against `#sha256=HEX` if the address ends with it."""
    url, _, fragment = address.partition("#")
    wanted = fragment.removeprefix("sha256=")
    if fragment and (not fragment.startswith("sha256=") or not re.fullmatch("[0-9a-f]{64}", wanted)):
        raise InvalidValue("reuse", address, "an address with `#sha256=` and 64 hex digits at its end, or without any")
    name = re.sub(r"[^\w.+@=-]", "_", url.partition("?")[0].rstrip("/").rpartition("/")[2]).lstrip(".") or "file"
    path = folder / name
    found = _download(url, path)
    if wanted and found != wanted:
        raise NotPossible(f"`{url}` has other bytes than expected", facts=[f"found sha256 {found}"])
    return path


def _download(url: str, to: Path) -> str:
    """Save the file and return its SHA-256."""
    from runtime.records.artifacts import hash_pieces

    scheme, _, rest = url.partition("://")
    with to.open("w+b") as opened:
        if scheme in ("gs", "s3"):
            from runtime.records.blobs.bucket import BucketBlobs

            bucket, _, key = rest.partition("/")
            blobs = BucketBlobs(f"{scheme}://{bucket}")
            try:
                blobs.download(key, opened)
            finally:
                blobs.close()
        else:
            import urllib.error
            import urllib.request

            try:
                with urllib.request.urlopen(url, timeout=60) as answer:
                    size = 0
                    while piece := answer.read(1 << 20):
                        opened.write(piece)
                        if (size := size + len(piece)) > MOST_URL_BYTES:
                            raise NotPossible(f"`{url}` is larger than 64 GiB")
                    wanted = answer.headers.get("Content-Length")
                    if wanted is not None and int(wanted) != size:
                        raise InfrastructureFailure(f"`{url}` was cut off", hint="try again", retryable=True)
            except (OSError, ValueError) as problem:
                # `urllib` wraps what the machine said.
                reason = getattr(problem, "reason", None)
                said = reason if isinstance(reason, OSError) else problem
                why = getattr(said, "strerror", None) or said
                raise InfrastructureFailure(f"`{url}` cannot be read: {why}", hint="check the address") from None
        opened.flush()
        opened.seek(0)
        return hash_pieces(iter(lambda: opened.read(1 << 20), b""))
