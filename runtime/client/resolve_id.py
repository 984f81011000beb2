"""Resolves an id, the beginning of one, an experiment's name or `last`.

`t-…` is the id of a task, `w-…` of a worker; any other text is an experiment. Four letters are enough if only one name
begins with them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from runtime.errors import LOST_FOR_GOOD, InvalidTask, NotPossible, RequestRefused, UnknownName
from runtime.file_trust import write_private
from runtime.records.base import ExperimentSeen, RecordStore, StoredTask
from runtime.sanitize import CleanLogger
from runtime.tasks.model import Task, experiment_digest
from runtime.tasks.wire import decode_task

SHORTEST_PREFIX: Final = 4
LAST: Final = "last"
SHOWN: Final = 10
PARTS_SEARCHED: Final = 100
"""Manifest parts read for the beginning of an id without a record; for a whole id, all parts of its experiment."""

_WHOLE_ID: Final = len("t-") + 24


class IdKind(StrEnum):
    TASK = "task"
    WORKER = "worker"
    EXPERIMENT = "experiment"


@dataclass(frozen=True, slots=True)
class ResolvedId:
    kind: IdKind
    name: str


class AmbiguousName(RequestRefused):
    def __init__(self, text: str, candidates: Sequence[ResolvedId], *, more: bool = False) -> None:
        self.text, self.candidates = text, list(candidates)
        shown = ", ".join(each.name for each in candidates)
        super().__init__(
            f"`{text}` is the beginning of more than one {candidates[0].kind}",
            facts=[f"it may be: {shown}" + (" …" if more else "")],
            hint="add letters until only one is left",
        )


@runtime_checkable
class FindsTasks(Protocol):
    """A record store that can look up a task, because it lies in the queue's own file."""

    def find_task(self, task_id: str) -> StoredTask | None: ...
    def list_tasks(self, experiment: str) -> Iterator[tuple[str, StoredTask]]: ...


def identify(text: str, records: RecordStore, *, last: str | None = None) -> ResolvedId:
    """Resolve `text`. `last` is the experiment that this user submitted last, if it was remembered.

    Raises `UnknownName` with the nearest names, `AmbiguousName` with the candidates.
    """
    if text == LAST:
        return ResolvedId(IdKind.EXPERIMENT, find_last(records, last))
    if text.startswith("w-"):
        return _choose(text, IdKind.WORKER, [seen.worker for seen in records.workers()])
    if text.startswith("t-"):
        _check_length(text)
        ids = []
        if text.isascii():
            ids = records.resolve(text, SHOWN + 1) or _queued_ids(records, text, SHOWN + 1)
        if ids:
            return _choose(text, IdKind.TASK, ids)
    names = [seen.name for seen in records.experiments()]
    if text.startswith("t-") and text not in names:
        raise _unknown_task(text, records)
    return _choose(text, IdKind.EXPERIMENT, names)


def get_task_id(text: str, records: RecordStore, *, last: str | None = None) -> str:
    """Return the whole id of the task that `text` names. Raises `NotPossible` if it names something else."""
    found = identify(text, records, last=last)
    if found.kind is IdKind.TASK:
        return found.name
    hint = f"`runtime status {found.name}`"
    if found.kind is IdKind.EXPERIMENT:
        hint += f" shows its tasks; `runtime retry --failed {found.name}` runs all that failed again"
    raise NotPossible(f"`{text}` is the {found.kind} `{found.name}`, expected a task", hint=hint)


def get_experiment(text: str, records: RecordStore, *, last: str | None = None) -> str:
    """Return the experiment that `text` names. Raises `NotPossible` if it names something else."""
    found = identify(text, records, last=last)
    if found.kind is IdKind.EXPERIMENT:
        return found.name
    raise NotPossible(f"`{text}` is a {found.kind}, expected an experiment", hint="`runtime status` lists them")


def find_last(records: RecordStore, last: str | None = None) -> str:
    """Return the experiment that `last` means: the remembered one while it exists, otherwise the newest of all."""
    seen = records.experiments()
    if last is not None and any(each.name == last for each in seen):
        return last
    if not seen:
        raise NotPossible(
            "`last` means your newest experiment or job, and there is none yet",
            hint="`runtime submit --help` and `runtime launch --help` show how to begin one",
        )
    return max(seen, key=age_of).name


def age_of(seen: ExperimentSeen) -> datetime:
    return seen.created_at or datetime.min.replace(tzinfo=UTC)


def remember_last(data_dir: Path, stack: str, experiment: str) -> None:
    """Remember `experiment` as this user's `last` on this stack. A folder that cannot be written raises nothing."""
    path = _last_path(data_dir, stack)
    with suppress(OSError):
        write_private(path, experiment + "\n")


def recall_last(data_dir: Path, stack: str) -> str | None:
    try:
        return _last_path(data_dir, stack).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def newest_job(data_dir: Path) -> str | None:
    """Return the job that this user launched last, unless an experiment was submitted since."""
    launched, submitted = _newest(data_dir / "launched"), _newest(data_dir / "last")
    if launched is None or (submitted is not None and submitted.stat().st_mtime_ns > launched.stat().st_mtime_ns):
        return None
    return launched.name


def list_remembered(data_dir: Path) -> list[str]:
    """Return the experiment that this user submitted last, of each stack."""
    with suppress(OSError, ValueError):
        return [path.read_text(encoding="utf-8").strip() for path in (data_dir / "last").iterdir()]
    return []


def newest_submission(data_dir: Path) -> tuple[str, datetime] | None:
    """Return the experiment that this user submitted last, to any stack, and when."""
    path = _newest(data_dir / "last")
    try:
        return (
            (path.read_text(encoding="utf-8").strip(), datetime.fromtimestamp(path.stat().st_mtime, UTC))
            if path
            else None
        )
    except (OSError, ValueError):
        return None


def _newest(folder: Path) -> Path | None:
    try:
        return max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, default=None)
    except OSError:
        return None


def _last_path(data_dir: Path, stack: str) -> Path:
    return data_dir / "last" / stack.replace("/", "%2F")


def find_submitted(records: RecordStore, task_id: str) -> Task | None:
    """Return the task as it was submitted or is stored now; None if only a foreign message describes it."""
    if isinstance(records, FindsTasks):
        found = records.find_task(task_id)
        return found.task if found else None
    needle = f'"id":"{task_id}"'
    for line in _manifest_lines(records, task_id):
        if needle in line:
            try:
                return decode_task(line)
            except InvalidTask:
                return None
    return None


def find_home(records: RecordStore, task_id: str) -> str | None:
    """Return the experiment whose digest ends the id, if it is known here."""
    digest = task_id[-8:]
    return next((seen.name for seen in records.experiments() if experiment_digest(seen.name) == digest), None)


def _queued_ids(records: RecordStore, prefix: str, limit: int) -> list[str]:
    """List submitted ids that begin with `prefix`; a store that holds its tasks has answered already."""
    if records.holds_tasks:
        return []
    needle = f'"id":"{prefix}'
    start = len('"id":"')
    found: set[str] = set()
    for line in _manifest_lines(records, prefix):
        at = line.find(needle)
        if at >= 0:
            found.add(line[at + start : line.index('"', at + start)])
            if len(found) >= limit or len(prefix) == _WHOLE_ID:
                break
    return sorted(found)


def _manifest_lines(records: RecordStore, task_id: str) -> Iterator[str]:
    experiments = sorted(records.experiments(), key=age_of, reverse=True)
    parts_left = PARTS_SEARCHED
    if len(task_id) == _WHOLE_ID:
        own = [seen for seen in experiments if experiment_digest(seen.name) == task_id[-8:]]
        experiments, parts_left = (own, 1_000_000) if own else (experiments, parts_left)
    for seen in experiments:
        for part in records.parts(seen.name):
            if parts_left == 0:
                return
            parts_left -= 1
            try:
                yield from records.read_part(part)
            except LOST_FOR_GOOD as problem:
                _report_once(problem.message)


@functools.cache
def _report_once(problem: str) -> None:
    CleanLogger(__name__).warning("%s; passed over", problem)


def _choose(text: str, kind: IdKind, names: Sequence[str]) -> ResolvedId:
    if text in names:
        return ResolvedId(kind, text)
    candidates = [ResolvedId(kind, name) for name in sorted(names) if name.startswith(text)]
    if candidates:
        _check_length(text)
    if len(candidates) > 1:
        raise AmbiguousName(text, candidates[:SHOWN], more=len(candidates) > SHOWN)
    if not candidates:
        hints = {
            IdKind.EXPERIMENT: "`runtime status` lists experiments; ids begin with `t-` for tasks, `j-` for jobs, `w-` for workers",
            IdKind.WORKER: "`runtime status` lists the workers of the last day",
            IdKind.TASK: None,
        }
        raise UnknownName(kind.value, text, names, hint=hints[kind])
    return candidates[0]


def _check_length(text: str) -> None:
    if len(text) < SHORTEST_PREFIX:
        raise RequestRefused(
            f"`{text}` is too short to name anything",
            facts=[f"expected at least {SHORTEST_PREFIX} letters of an id or name"],
            hint="`runtime status` shows ids",
        )


def _unknown_task(text: str, records: RecordStore) -> UnknownName:
    near = records.resolve(text[: max(SHORTEST_PREFIX, len(text) - 4)], SHOWN)
    problem = UnknownName("task", text, near, hint="`runtime status EXPERIMENT --failed` lists tasks that failed")
    problem.facts = (
        *([f"ids that begin alike: {', '.join(near)}"] if near else []),
        f"looked in `{records.url}`",
        *([] if records.holds_tasks else ["a foreign producer's task is known here once an attempt of it ended"]),
    )
    return problem
