"""Publishes a stack's contract where machines without Pulumi read it, and compares contracts.

`plan_publication` reads what lies there now and decides; `publish` writes. What is written is the contract itself, as
canonical JSON, with its digest, the commit that it was made from and the time.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from runtime.errors import InvalidContract, InvalidValue, NotPossible, StoreUnavailable
from runtime.outputs import (
    PUBLISHED,
    SCHEMA,
    MissingOutput,
    Published,
    contract_digest,
    decode_fields,
    encode_fields,
    published_fields,
    read_published,
)
from runtime.stack.find import FoundStack, NothingThere, is_location, read_location
from runtime.units import parse_time
from runtime.values import dataclass

WRITE_PATIENCE: Final = timedelta(seconds=60)


class ChangeKind(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One leaf in which two contracts differ; None stands for absent too."""

    path: str
    """`queues.default.ack_deadline_s`"""
    kind: ChangeKind
    old: Any = None
    new: Any = None


class Effect(StrEnum):
    """What a publication does to what lies there."""

    CREATES = "creates"
    UPDATES = "updates"
    REPEATS = "repeats"
    """The content is the same; commit and time are written anew."""
    REVERTS = "reverts"
    """What lies there was made from a later commit."""
    MENDS = "mends"
    """What lies there is no contract that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What would be written where, and what that changes."""

    stack: str
    url: str
    source: str
    effect: Effect
    published: Published
    changes: tuple[Change, ...]
    previous: Published | None
    """Of the copy that lies there."""
    text: str
    why: str | None = None
    """Of `REVERTS` and `MENDS`, what speaks against it."""

    @property
    def needs_consent(self) -> bool:
        return self.effect in (Effect.REVERTS, Effect.MENDS)


@dataclass(frozen=True, slots=True)
class Commit:
    id: str
    """With `+dirty` behind it where the tree had other changes."""
    at: datetime | None


def plan_publication(
    found: FoundStack, *, now: datetime, to: str | None = None, commit: Commit | None = None, folder: Path | None = None
) -> Publication:
    """Decide what publishing `found` at `to`, by default at the contract's `published_url`, would do.

    `folder` is a git work tree that may know which of two commits is the older. Raises `MissingOutput` where there is
    no address, `NotPossible` for a copy of another stack or of a later `schema`, `StoreUnavailable` if it cannot be told
    what lies there.
    """
    url = to or found.outputs.published_url
    if url is None:
        raise MissingOutput(found.name, "published_url", "publishing without `--to`", setting="records")
    if not is_location(url) and "/" not in url:
        raise InvalidValue("destination", url, "a path, or a file:, gs:// or s3:// URL")
    contract = found.contract
    digest = contract_digest(contract)
    published = Published(
        digest=digest, at=now, commit=commit.id if commit else None, committed_at=commit.at if commit else None
    )
    there = _read_there(url)
    effect, why, before, previous = _judge(found.name, url, digest, published, there, folder)
    return Publication(
        stack=found.name,
        url=url,
        source=found.source,
        effect=effect,
        published=published,
        changes=tuple(compare(before, contract)),
        previous=previous,
        text=encode_fields(published_fields(contract, published)) + "\n",
        why=why,
    )


def publish(publication: Publication) -> None:
    """Write it: whole or not at all for every reader. Raises `StoreUnavailable`."""
    write_location(publication.url, publication.text.encode())


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Every leaf in which two contracts differ, in the order of their paths. An empty object is a leaf."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    for path in sorted(before.keys() | after.keys()):
        if path not in before:
            yield Change(path=path, kind=ChangeKind.ADDED, new=after[path])
        elif path not in after:
            yield Change(path=path, kind=ChangeKind.REMOVED, old=before[path])
        elif not _same(before[path], after[path]):
            yield Change(path=path, kind=ChangeKind.CHANGED, old=before[path], new=after[path])


def find_commit(folder: Path, commit: str | None = None) -> Commit | None:
    """The commit `commit` of the work tree `folder`, by default the one that is checked out with `+dirty` where its tree
    has changes; with its time, where git knows it. None without either."""
    if commit is not None:
        shown = _git(folder, "show", "-s", "--format=%H %cI", "--end-of-options", f"{commit}^{{commit}}")
        if shown is None:
            return Commit(commit, None)
        name, _, at = shown.partition(" ")
        return Commit(name, parse_time(at))
    head = _git(folder, "show", "-s", "--format=%H %cI", "HEAD")
    if head is None:
        return None
    name, _, at = head.partition(" ")
    dirty = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return Commit(name + ("+dirty" if dirty else ""), parse_time(at))


def write_location(url: str, data: bytes) -> None:
    """Put `data` at a path or a `file:`, `gs://` or `s3://` URL, whole or not at all."""
    scheme = url.partition(":")[0] if "://" in url or url.startswith("file:") else ""
    if scheme in ("", "file"):
        _write_file(url, scheme, data)
    elif scheme in ("gs", "s3"):
        from runtime.records.blobs.bucket import BucketBlobs

        folder, _, name = url.rpartition("/")
        blobs = BucketBlobs(folder, retry_for=WRITE_PATIENCE)
        try:
            blobs.put(name, data)
        finally:
            blobs.close()
    else:
        raise InvalidValue("destination", url, "a path, or a file:, gs:// or s3:// URL")


# what lies there


@dataclass(frozen=True, slots=True)
class _There:
    """What was found at an address: a contract's fields, or why there are none."""

    fields: Mapping[str, Any] | None = None
    published: Published | None = None
    problem: str | None = None


def _read_there(url: str) -> _There:
    scheme = url.partition(":")[0] if "://" in url else ""
    if scheme in ("http", "https"):
        raise InvalidValue("destination", url, "a path, or a file:, gs:// or s3:// URL", hint="a web page is only read")
    try:
        data = read_location(url)
    except NothingThere:
        return _There()
    try:
        value = decode_fields(data, source=url)
    except InvalidContract as problem:
        return _There(problem=problem.message)
    if not isinstance(value, Mapping):
        return _There(problem=f"`{url}` holds no object")
    try:
        return _There(fields=value, published=read_published(value, source=url))
    except InvalidContract as problem:
        return _There(fields=value, problem=problem.message)


def _judge(
    stack: str, url: str, digest: str, published: Published, there: _There, folder: Path | None
) -> tuple[Effect, str | None, Mapping[str, Any], Published | None]:
    if there.fields is None:
        effect = Effect.MENDS if there.problem else Effect.CREATES
        return effect, there.problem, {}, None
    before = {key: value for key, value in there.fields.items() if key != PUBLISHED}
    _refuse_others(stack, url, before)
    if there.problem is not None:
        return Effect.MENDS, there.problem, before, None
    previous = there.published
    if previous is not None and previous.digest == digest:
        return Effect.REPEATS, None, before, previous
    if previous is not None and (why := _older(published, previous, folder)):
        return Effect.REVERTS, why, before, previous
    return Effect.UPDATES, None, before, previous


def _refuse_others(stack: str, url: str, fields: Mapping[str, Any]) -> None:
    owner, schema = fields.get("stack"), fields.get("schema")
    if isinstance(owner, str) and owner != stack:
        raise NotPossible(
            f"`{url}` holds the contract of stack `{owner}`, and this one is of `{stack}`",
            facts=["nothing was written"],
            hint="name another place with `--to`",
        )
    if type(schema) in (int, float) and schema > SCHEMA:  # type: ignore[operator]
        raise NotPossible(
            f"`{url}` holds a contract of schema {schema}, and this release writes {SCHEMA}",
            facts=["nothing was written"],
            hint="pip install --upgrade research-runtime",
        )


def _older(new: Published, old: Published, folder: Path | None) -> str | None:
    """Why `new` seems to be made from an earlier commit than `old`; None where nothing says so."""
    if new.commit is None or old.commit is None:
        return None
    ours, theirs = _bare(new.commit), _bare(old.commit)
    if ours == theirs:
        return None
    if folder is not None:
        if _git(folder, "merge-base", "--is-ancestor", ours, theirs) is not None:
            return f"what lies there was made from commit {old.commit}, which comes after {new.commit}"
        if _git(folder, "merge-base", "--is-ancestor", theirs, ours) is not None:
            return None
    if new.committed_at and old.committed_at and new.committed_at < old.committed_at:
        return (
            f"what lies there was made from commit {old.commit} of {old.committed_at:%Y-%m-%d %H:%M} UTC, "
            f"this one from {new.commit} of {new.committed_at:%Y-%m-%d %H:%M} UTC"
        )
    return None


def _bare(commit: str) -> str:
    return commit.removesuffix("+dirty")


def _same(old: Any, new: Any) -> bool:
    """As JSON has it: 60 and 60.0 are one, 1 and true are two."""
    return bool(old == new) and isinstance(old, bool) == isinstance(new, bool)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif path:
        yield path, value


def _write_file(url: str, scheme: str, data: bytes) -> None:
    from urllib.parse import unquote, urlsplit

    path = Path(unquote(urlsplit(url).path) if scheme else url).expanduser()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as problem:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreUnavailable(
            f"cannot write `{path}`: {(problem.strerror or str(problem)).lower()}",
            hint="name another place with `--to`",
            retryable=False,
        ) from problem


def _git(folder: Path, *args: str) -> str | None:
    """What git prints, None if it refuses or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args],
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
