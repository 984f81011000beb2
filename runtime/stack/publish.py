"""Publishes a stack's contract for machines without Pulumi, and compares contracts.

`plan_publication` reads the present copy and decides; `publish` writes the contract as canonical JSON, with its digest, its
commit and the time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from runtime.errors import InvalidContract, InvalidValue, NotPossible, StoreUnavailable
from runtime.outputs import (
    PUBLISHED,
    SCHEMA,
    MissingOutput,
    PublishedCopy,
    contract_digest,
    decode_fields,
    encode_fields,
    published_fields,
    read_published,
)
from runtime.snapshots.worker_code import ask_git
from runtime.stack.find import FoundStack, NothingThere, is_location, read_location
from runtime.system import system
from runtime.units import parse_time

WRITE_PATIENCE: Final = timedelta(seconds=60)


class ChangeKind(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One leaf in which two contracts differ; an absent value is None too."""

    path: str
    """`queues.default.ack_deadline_s`"""
    kind: ChangeKind
    old: Any = None
    new: Any = None


class Effect(StrEnum):
    """The effect of a publication on the present copy."""

    CREATES = "creates"
    UPDATES = "updates"
    REPEATS = "repeats"
    """The content is the same; commit and time are new."""
    REVERTS = "reverts"
    """The present copy is of a later commit."""
    MENDS = "mends"
    """The present copy is not a readable contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A planned publication: its text and place, and the changes to the present copy."""

    stack: str
    url: str
    source: str
    effect: Effect
    published: PublishedCopy
    changes: tuple[Change, ...]
    previous: PublishedCopy | None
    """Facts of the present copy."""
    text: str
    why: str | None = None
    """The objection to `REVERTS` and `MENDS`."""

    @property
    def needs_consent(self) -> bool:
        return self.effect in (Effect.REVERTS, Effect.MENDS)


@dataclass(frozen=True, slots=True)
class Commit:
    id: str
    """Ends in `+dirty` if the tree had uncommitted changes."""
    at: datetime | None


def plan_publication(
    found: FoundStack, *, now: datetime, to: str | None = None, commit: Commit | None = None, folder: Path | None = None
) -> Publication:
    """Plan the publication of `found` at `to`, by default at the contract's `published_url`.

    `folder` is a git work tree, which may order two commits. Raises `MissingOutput` without an address, `NotPossible` for
    a copy of another stack or of a later `schema`, `StoreUnavailable` if the present copy cannot be reached.
    """
    url = to or found.outputs.published_url
    if url is None:
        raise MissingOutput(found.name, "published_url", "publishing without `--to`", setting="records")
    if not is_location(url) and "/" not in url:
        raise InvalidValue("destination", url, "a path, or a file:, gs:// or s3:// URL")
    contract = found.contract
    digest = contract_digest(contract)
    published = PublishedCopy(
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


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Yield every leaf in which two contracts differ, in the order of their paths. An empty object is a leaf."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    for path in sorted(before.keys() | after.keys()):
        if path not in before:
            yield Change(path=path, kind=ChangeKind.ADDED, new=after[path])
        elif path not in after:
            yield Change(path=path, kind=ChangeKind.REMOVED, old=before[path])
        elif not _same(before[path], after[path]):
            yield Change(path=path, kind=ChangeKind.CHANGED, old=before[path], new=after[path])


def find_commit(folder: Path, commit: str | None = None) -> Commit | None:
    """Return `commit` of the work tree `folder`, by default its head with `+dirty` for uncommitted changes.

    Its time is None if git does not know the commit. Returns None without `commit` and without a work tree.
    """
    named = f"{'HEAD' if commit is None else commit}^{{commit}}"
    shown = ask_git(folder, "show", "-s", "--format=%H %cI", "--end-of-options", named)
    if shown is None:
        return Commit(commit, None) if commit is not None else None
    name, _, at = shown.partition(" ")
    if commit is None and ask_git(folder, "status", "--porcelain", "--untracked-files=no"):
        name += "+dirty"
    return Commit(name, parse_time(at))


def publish(publication: Publication) -> None:
    """Write the planned text to its path or URL; no reader sees a part of it. Raises `StoreUnavailable`."""
    url, data = publication.url, publication.text.encode()
    scheme = url.partition(":")[0] if "://" in url or url.startswith("file:") else ""
    if scheme in ("", "file"):
        _write_file(url, scheme, data)
    elif scheme in ("gs", "s3"):
        from runtime.records.blobs.bucket import BucketBlobs

        folder, _, name = url.rpartition("/")
        with closing(BucketBlobs(folder, retry_for=WRITE_PATIENCE)) as blobs:
            blobs.put(name, data)
    else:
        raise InvalidValue("destination", url, "a path, or a file:, gs:// or s3:// URL")


# the present copy


@dataclass(frozen=True, slots=True)
class _There:
    """The present copy: a contract's fields, or the reason for none."""

    fields: Mapping[str, Any] | None = None
    published: PublishedCopy | None = None
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
    stack: str, url: str, digest: str, published: PublishedCopy, there: _There, folder: Path | None
) -> tuple[Effect, str | None, Mapping[str, Any], PublishedCopy | None]:
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


def _older(new: PublishedCopy, old: PublishedCopy, folder: Path | None) -> str | None:
    """Return the evidence that `new` is of an earlier commit than `old`; None without any."""
    if new.commit is None or old.commit is None:
        return None
    ours, theirs = (each.removesuffix("+dirty") for each in (new.commit, old.commit))
    if ours == theirs:
        return None
    if folder is not None:
        if ask_git(folder, "merge-base", "--is-ancestor", ours, theirs) is not None:
            return f"what lies there was made from commit {old.commit}, which comes after {new.commit}"
        if ask_git(folder, "merge-base", "--is-ancestor", theirs, ours) is not None:
            return None
    if new.committed_at and old.committed_at and new.committed_at < old.committed_at:
        return (
            f"what lies there was made from commit {old.commit} of {old.committed_at:%Y-%m-%d %H:%M} UTC, "
            f"this one from {new.commit} of {new.committed_at:%Y-%m-%d %H:%M} UTC"
        )
    return None


def _same(old: Any, new: Any) -> bool:
    """Compare by JSON's rules: 60 equals 60.0, 1 differs from true."""
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
    temporary = path.with_name(f".{path.name}.{system.urandom(4).hex()}")
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
