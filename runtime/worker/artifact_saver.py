"""The artifacts of attempts: restored before an attempt begins, saved while it runs and once more after its end.

Nothing here waits: files are copied on threads of their own. An attempt with artifacts has a tree of its own, so its files
stay as they were at its end until they are saved. docs/artifacts.md has the promises.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from runtime.config import load_settings
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible, RuntimeFailure, StoreUnavailable
from runtime.system import system
from runtime.tasks.artifacts import CHECKPOINT, EVERY, Version, variable_of
from runtime.tasks.model import Task
from runtime.worker.attempts.model import AttemptEnd, AttemptOrder
from runtime.worker.attempts.scratch import remove_tree
from runtime.worker.thread_calls import ThreadCalls
from runtime.worker.worker_context import HeldLease, WorkerContext

if TYPE_CHECKING:
    from runtime.records.artifacts import ArtifactManifest, ArtifactStore, Cache, Writer

_T = TypeVar("_T")

THREADS: Final = 4
LOOK_EVERY_S: Final = 0.5
"""How often the attempts are looked at: there may be hundreds of quick ones."""
AGAIN_S: Final = 10.0
"""The longest time until a save that failed is tried again."""
LAST_PAUSES_S: Final = (1.0, 4.0, 10.0)
"""Pauses before the last save is tried again."""


class VersionGone(NotPossible):
    """A task names a version of an artifact that the store does not have."""

    def __init__(self, tag: str, version: str) -> None:
        super().__init__(f"there is no version `{version}`, which the task reuses as `{tag}`")


class VersionDamaged(NotPossible):
    """A task names a version of an artifact that the store has no longer as it was saved; no other worker finds more."""

    def __init__(self, tag: str, problem: str) -> None:
        super().__init__(f"`{tag}`, which the task reuses: {problem}")


@dataclass(slots=True)
class RestoredVersions:
    """The versions that an attempt begins with."""

    found: dict[str, tuple[Version, ArtifactManifest]] = field(default_factory=dict)
    attempt: int = 1
    """The attempt's number in the names of its versions."""
    damaged: list[str] = field(default_factory=list)
    """Versions that could not be used, with the reasons."""


@dataclass(slots=True, eq=False)
class _Kept:
    """One attempt's artifacts."""

    held: HeldLease
    brought: RestoredVersions
    place: str
    """Begins the paths of the attempt's own folders."""
    tree: str = ""
    writers: dict[str, Writer] = field(default_factory=dict)
    next_at: float = float("inf")
    every_s: float = EVERY.total_seconds()
    busy: bool = False
    last: Callable[[], None] | None = None
    """Begins the last save, which waits until the one under way has ended."""
    over: bool = False
    problems: dict[str, Exception] = field(default_factory=dict)
    """By tag: why the last save failed."""


class ArtifactSaver:
    def __init__(self, services: WorkerContext, selector: selectors.BaseSelector) -> None:
        self._services, self._selector = services, selector
        self._calls: ThreadCalls | None = None
        self._kept: dict[str, _Kept] = {}
        """By token."""
        self._remote_checkpoints = services.records.checkpoints_path("t-0") is None
        self._closing = False
        self._tend_at = 0.0

    def __contains__(self, token: str) -> bool:
        """Whether anything of the attempt is saved or was brought."""
        return token in self._kept

    # before an attempt

    def wants(self, held: HeldLease) -> bool:
        """Whether files have to be brought before the attempt begins."""
        task = held.lease.task
        if task.artifacts.named:
            return True
        return self._remote_checkpoints and bool(held.history.ended or task.generation > 1)

    def bring(
        self, held: HeldLease, then: Callable[[HeldLease], None], failed: Callable[[HeldLease, Exception], None]
    ) -> None:
        """Restore the files that the attempt begins with; calls `then`, or `failed` with the reason."""
        kept = _Kept(held, RestoredVersions(), f"{self._services.scratch}/{held.lease.token}")

        def brought(found: RestoredVersions | None, problem: Exception | None) -> None:
            if held.lease.token not in self._services.holdings.by_token:
                self._discard(kept)
            elif found is None:
                self._discard(kept)
                assert problem is not None
                failed(held, problem)
            else:
                kept.brought = found
                self._kept[held.lease.token] = kept
                for damaged in found.damaged:
                    self._services.say.left_out(held.lease.task, f"begins without its newest artifact: {damaged}")
                then(held)

        self._call(partial(self._bring, kept), brought)

    def _bring(self, kept: _Kept) -> RestoredVersions:
        held, store = kept.held, self._services.records.open_artifacts()
        task, brought = held.lease.task, RestoredVersions(attempt=len(held.history.ended) + 1)
        for path in (f"{kept.place}.artifacts", f"{kept.place}.checkpoint"):
            remove_tree(path)
        Path(f"{kept.place}.bringing").mkdir(mode=0o700, exist_ok=True)
        tags = list(task.artifacts.capture)
        if self._remote_checkpoints:
            tags.append(CHECKPOINT)
        try:
            for tag in tags:
                self._restore_newest(kept, store, brought, tag)
            for tag, version in task.artifacts.reuse.items():
                self._restore_named(kept, store, tag, version)
            bringing = Path(f"{kept.place}.bringing")
            if (bringing / CHECKPOINT).is_dir():
                (bringing / CHECKPOINT).rename(f"{kept.place}.checkpoint")
            if task.artifacts.named:
                bringing.rename(f"{kept.place}.artifacts")
        finally:
            remove_tree(f"{kept.place}.bringing")
        return brought

    def _restore_newest(self, kept: _Kept, store: ArtifactStore, brought: RestoredVersions, tag: str) -> None:
        """Restore the newest whole version of a tag, if there is any."""
        from runtime.records.artifacts import ArtifactDamaged

        task, token = kept.held.lease.task, kept.held.lease.token
        versions = store.versions(task.id, tag)
        for version in versions:
            if version.generation == task.generation and version.token != token:
                brought.attempt = max(brought.attempt, version.attempt + 1)
        for version in reversed(versions):
            try:
                manifest = store.find(version)
                if manifest is None:
                    continue  # removed meanwhile
                self._restore(kept, store, version, manifest, tag)
            except ArtifactDamaged as problem:
                remove_tree(f"{kept.place}.bringing/{tag}")
                brought.damaged.append(problem.message)
                continue
            brought.found[tag] = version, manifest
            return

    def _restore_named(self, kept: _Kept, store: ArtifactStore, tag: str, named: str) -> None:
        from runtime.records.artifacts import ArtifactDamaged
        from runtime.worker.content_cache import ContentCache

        version = Version.parse(named)
        try:
            manifest = None if version is None else store.find(version)
            if version is None or manifest is None:
                raise VersionGone(tag, named)
            cache = None if self._services.local else ContentCache.open(load_settings().cache_dir)
            self._restore(kept, store, version, manifest, tag, cache)
        except ArtifactDamaged as problem:
            raise VersionDamaged(tag, problem.message) from None

    def _restore(
        self,
        kept: _Kept,
        store: ArtifactStore,
        version: Version,
        manifest: ArtifactManifest,
        tag: str,
        cache: Cache | None = None,
    ) -> None:
        """Put a version beside the attempt's folder, under its tag: the folder, or the single file itself."""
        if manifest.absent:
            return
        to, token = Path(f"{kept.place}.bringing/{tag}"), kept.held.lease.token
        to.mkdir(mode=0o700)
        services = self._services
        gone = lambda: self._closing or token not in services.holdings.by_token  # noqa: E731
        store.restore(version, manifest, to, give_up=gone, cache=cache)
        if manifest.single:
            beside = to.with_name(f".{tag}")
            to.rename(beside)
            next(beside.iterdir()).rename(to)
            beside.rmdir()
        else:
            to.chmod(0o755)

    # an attempt

    def inject(self, held: HeldLease, order: AttemptOrder) -> None:
        """Give an order its own tree, its variables and its checkpoint folder, and begin to save its captured files."""
        task, artifacts = held.lease.task, held.lease.task.artifacts
        named = artifacts.named
        if not named and order.checkpoint_dir:
            return
        place = f"{self._services.scratch}/{order.token}"
        kept = self._kept.get(order.token) or _Kept(held, RestoredVersions(attempt=order.attempt), place)
        self._kept[order.token] = kept
        kept.over, kept.writers = False, {}
        kept.every_s = artifacts.every.total_seconds()
        kept.next_at = system.monotonic() + kept.every_s
        if named and task.snapshot is not None:
            kept.tree = order.code_dir = self._services.trees.place_apart(task.snapshot, order.token)
            order.cwd = f"{kept.tree}/{task.folder}" if task.folder else None
            folder = order.cwd or kept.tree
            variables = {variable_of(tag): f"{folder}/{path}" for tag, path in artifacts.paths.items()}
            order.snapshot = task.snapshot
            order.env = {**order.env, "RUNTIME_ARTIFACTS": f"{folder}/artifacts", **variables}
            for tag, path in artifacts.capture.items():
                self._open(kept, tag, f"{folder}/{path}")
        if not order.checkpoint_dir:
            order.checkpoint_dir = f"{place}.checkpoint"
            self._open(kept, CHECKPOINT, order.checkpoint_dir)

    def _open(self, kept: _Kept, tag: str, path: str) -> None:
        from runtime.records.artifacts import Writer

        task, token = kept.held.lease.task, kept.held.lease.token
        first = Version(task.generation, kept.brought.attempt, 1, token, task.id, tag)
        writer = Writer(self._services.records.open_artifacts(), first, Path(path), Path(f"{kept.place}.saving/{tag}"))
        if (found := kept.brought.found.get(tag)) is not None:
            writer.know(found[1])
        kept.writers[tag] = writer

    # while it runs

    def next_at(self) -> float:
        """When `tend` is due; infinity if nothing is captured."""
        return self._tend_at if self._kept else float("inf")

    def tend(self, now: float) -> None:
        """Save files that are due, and remove the folders of attempts that are gone."""
        if now < self._tend_at or not self._kept:
            return
        self._tend_at = now + LOOK_EVERY_S
        by_token = self._services.holdings.by_token
        for token, kept in list(self._kept.items()):
            if token not in by_token:
                if not kept.busy:
                    del self._kept[token]
                    self._discard(kept)
            elif now >= kept.next_at and not kept.busy and not kept.over:
                kept.next_at = now + kept.every_s
                if kept.held.sent and any(self._exists(kept, tag) for tag in kept.writers):
                    kept.busy = True
                    self._call(partial(self._save, kept), partial(self._saved, kept))

    def _exists(self, kept: _Kept, tag: str) -> bool:
        """Whether there is anything to save, or was. Until the attempt has taken the restored files, they are not its own."""
        if tag != CHECKPOINT and os.path.lexists(f"{kept.place}.artifacts"):
            return False
        writer = kept.writers[tag]
        if writer.saved:
            return True
        try:
            writer.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass  # It cannot be looked at, and saving it says why.
        return True

    def _save(self, kept: _Kept, *, final: bool = False, absent: bool = False) -> dict[str, Exception]:
        problems: dict[str, Exception] = {}
        for tag, writer in kept.writers.items():
            if not self._exists(kept, tag):
                continue
            try:
                writer.save(final=final, absent=absent, give_up=self._must_hurry)
                self._drop_own(kept, writer)
            except Exception as problem:
                problems[tag] = problem
                writer.forget(())  # Its uploads are in no version, so they may be removed with an older one.
        return problems

    def _must_hurry(self) -> bool:
        return self._closing or self._services.leaving.asked > 1

    def _drop_own(self, kept: _Kept, writer: Writer) -> None:
        """Remove older versions of the attempt itself, while it surely is the only one of its task."""
        from runtime.shim.file_manifest import KEPT

        old = writer.saved[:-KEPT]
        if not old:
            return
        keep = writer.saved[-KEPT:]
        found = kept.brought.found
        others = [version for version, _ in found.values()]
        mine = [version for other in kept.writers.values() for version in other.saved if version not in old]
        try:
            writer.store.drop(
                old, keep={*keep, *others, *mine}, may_go_on=lambda: self._services.holdings.holds(kept.held)
            )
        except RuntimeFailure as problem:
            self._services.say.trouble("removing older versions of artifacts", problem)
            return
        finally:
            # Their files may be gone; they are sent again if they come back.
            writer.forget(old)

    def _saved(self, kept: _Kept, problems: dict[str, Exception] | None, problem: Exception | None) -> None:
        kept.busy = False
        for tag, each in (problems or {}).items():
            self._services.say.trouble(f"saving artifact `{tag}` of {kept.held.lease.task.id}", each)
        if problem is not None:
            self._services.say.trouble("saving artifacts", problem)
        if problems or problem:
            kept.next_at = min(kept.next_at, system.monotonic() + AGAIN_S)
        if kept.last is not None:
            begin, kept.last = kept.last, None
            begin()

    # at its end

    def finish(self, held: HeldLease, end: AttemptEnd, then: Callable[[], None]) -> bool:
        """Whether the attempt's last versions have yet to be saved; `then` is called once they are, or cannot be."""
        kept = self._kept[held.lease.token]
        if kept.over or end.not_started:
            return False
        kept.over, succeeded = True, end.reason is EndReason.SUCCEEDED
        if succeeded or held.stop_reason is EndReason.DUPLICATE:
            # Checkpoints are of no use to anybody after a success, and nothing is after another attempt's.
            wanted = [tag for tag in kept.writers if tag != CHECKPOINT and held.stop_reason is not EndReason.DUPLICATE]
        else:
            wanted = list(kept.writers)
        kept.writers = {tag: kept.writers[tag] for tag in wanted}
        if not kept.busy and not any(self._exists(kept, tag) for tag in wanted):
            return False

        def begin() -> None:
            kept.busy = True
            self._call(partial(self._save_last, kept, succeeded), ended)

        def ended(problems: dict[str, Exception] | None, problem: Exception | None) -> None:
            kept.busy = False
            kept.problems = problems or ({} if problem is None else {"": problem})
            then()

        if kept.busy:
            kept.last = begin
        else:
            begin()
        return True

    def _save_last(self, kept: _Kept, succeeded: bool) -> dict[str, Exception]:
        from runtime.shim.common import TransferStopped

        for pause_s in (*LAST_PAUSES_S, None):
            problems = self._save(kept, final=True, absent=succeeded)
            passing = [each for each in problems.values() if isinstance(each, StoreUnavailable | OSError)]
            if pause_s is None or len(passing) < len(problems) or not problems:
                return problems
            until = system.monotonic() + pause_s
            while system.monotonic() < until:
                if self._must_hurry():
                    return {tag: TransferStopped("the worker leaves") for tag in problems}
                system.sleep(0.1)
        return {}

    def describe_end(self, held: HeldLease, *, succeeded: bool) -> tuple[str | None, str | None]:
        """Why the attempt's artifacts could not be saved, and which files they lack; each None if there is nothing to say."""
        kept = self._kept[held.lease.token]
        failed = [f"`{tag}`: {_text(each)}" for tag, each in kept.problems.items()]
        notes = []
        for tag, writer in kept.writers.items():
            if tag == CHECKPOINT or tag in kept.problems:
                continue
            if writer.last is None or writer.last.absent:
                notes.append(f"no artifact `{tag}`: there is no `{held.lease.task.artifacts.capture[tag]}`")
            elif writer.last.left_out:
                notes.append(f"left out of artifact `{tag}`: {writer.last.left_out}")
        return (
            "its artifact could not be saved: " + "; ".join(failed) if failed else None,
            "; ".join(notes) if notes and succeeded else None,
        )

    def clear_after(self, held: HeldLease) -> Callable[[], None] | None:
        """Return what removes the versions that the attempt's success supersedes, to be called once that is recorded.

        None if there are none.
        """
        task, token = held.lease.task, held.lease.token
        tags = list(task.artifacts.capture)
        kept = self._kept.get(token)
        if kept is not None and self._remote_checkpoints and (self._left_checkpoint(kept) or held.history.ended):
            tags.append(CHECKPOINT)
        return partial(self._call, partial(self._clear, task, token, tags), self._cleared) if tags else None

    def _left_checkpoint(self, kept: _Kept) -> bool:
        return os.path.lexists(f"{kept.place}.checkpoint")

    def _clear(self, task: Task, token: str, tags: list[str]) -> None:
        """Keep the last version that the attempt left of each tag; every other version of the task is superseded."""
        store = self._services.records.open_artifacts()
        keep: list[Version] = []
        old: list[Version] = []
        for tag in tags:
            versions = store.versions(task.id, tag)
            own = [version for version in versions if version.token == token and tag != CHECKPOINT][-1:]
            keep += own
            old += [version for version in versions if version not in own]
        store.drop(old, keep=keep)
        # With what attempts sent that were killed before they could name it.
        store.sweep(task.id, keep)

    def _cleared(self, _: None, problem: Exception | None) -> None:
        if problem is not None:
            self._services.say.trouble("removing superseded artifacts", problem)

    # the threads

    def _call(self, work: Callable[[], _T], then: Callable[[_T | None, Exception | None], None]) -> None:
        if self._closing:
            return
        if self._calls is None:
            self._calls = ThreadCalls(inline=False, threads=THREADS)
            assert self._calls.fd is not None
            self._selector.register(self._calls.fd, selectors.EVENT_READ, self._calls.collect)
        self._calls.call(work, lambda result, problem: None if self._closing else then(result, problem))

    def close(self) -> None:
        """Let removals in progress end, and drop everything else."""
        self._closing = True
        if self._calls is not None:
            self._calls.close()

    def _discard(self, kept: _Kept) -> None:
        for path in (
            *(f"{kept.place}.{kind}" for kind in _FOLDERS),
            kept.tree,
            f"{kept.tree}.seen" if kept.tree else "",
        ):
            if path and os.path.lexists(path):
                self._services.pool.discard(path)


_FOLDERS: Final = ("artifacts", "checkpoint", "saving", "bringing")


def _text(problem: Exception) -> str:
    return problem.message if isinstance(problem, RuntimeFailure) else str(problem) or type(problem).__name__
