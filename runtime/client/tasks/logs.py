"""Logs of attempts: read from the record, from the note of the attempt's end, or while they are written.

A short log lies in the record; a long one, or the log of an attempt that has run for a while, lies in the store beside
it and grows while the attempt runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.client.tasks.results import list_tasks
from runtime.client.tasks.task_facts import TaskFacts, read_standing
from runtime.errors import NotPossible, UnknownName
from runtime.records.base import RecordStore
from runtime.system import system
from runtime.tasks.history import EndedNote, StartedMark
from runtime.tasks.model import TaskState

LOCAL_POLL_S: Final = 0.5
REMOTE_POLL_S: Final = 5.0
"""Workers write to a bucket every 15 s."""


@dataclass(frozen=True, slots=True)
class AttemptLog:
    token: str
    generation: int
    state: TaskState
    """`leased` while it runs, `queued` if it ended and the task is to be tried again, or the state of its record."""
    worker: str | None
    url: str | None
    """The whole log; None if `text` is the whole."""
    text: str = ""
    """The text in the record or note: the end of a longer log."""


Said = Callable[[AttemptLog], None]
"""Called with each attempt before its output begins."""


def find_logs(records: RecordStore, standing: TaskFacts) -> list[AttemptLog]:
    """List every known attempt of every generation, oldest first."""
    found: list[AttemptLog] = []
    recorded = {record.generation: record for record in standing.recorded}
    for generation in sorted({*recorded, standing.generation}):
        current = generation == standing.generation
        history = standing.history if current else records.history(standing.task_id, generation)
        record = recorded.get(generation)
        seen: list[EndedNote | StartedMark] = [*history.ended, *history.open]
        for each in seen:
            if record is not None and each.token == record.token and isinstance(each, EndedNote):
                continue
            state, text = (TaskState.QUEUED, each.log) if isinstance(each, EndedNote) else (TaskState.LEASED, "")
            url = records.log_url(standing.task_id, each.token)
            found.append(AttemptLog(each.token, generation, state, each.worker, url, text))
        if record is not None and (record.started_at or record.log or record.log_url):
            found.append(AttemptLog(record.token, generation, record.state, record.worker, record.log_url, record.log))
    return found


def choose_log(task_id: str, logs: list[AttemptLog], attempt: str | None = None) -> AttemptLog:
    """Choose the newest attempt, or the one whose token begins with `attempt`."""
    if attempt is None:
        if logs:
            return logs[-1]
        raise NotPossible(
            f"task `{task_id}` has no log: no attempt of it has started, or it was cancelled while its first one ran",
            hint=f"`runtime explain {task_id}` says why; `-f` waits for it",
        )
    chosen = [log for log in logs if log.token.startswith(attempt)]
    if len(chosen) != 1:
        raise UnknownName("attempt", attempt, [log.token for log in logs], where=f"of task `{task_id}`")
    return chosen[0]


def read_log(records: RecordStore, log: AttemptLog, *, offset: int = 0) -> Iterator[bytes]:
    """Yield the output from byte `offset` on, or the text in the record if the store has no more."""
    read = 0
    if log.url is not None:
        for piece in _pieces(records, log.url, offset):
            read += len(piece)
            yield piece
    if read == 0 and offset == 0 and log.text:
        yield log.text.encode(errors="surrogateescape")


def read_logs(records: RecordStore, experiment: str) -> Iterator[bytes]:
    """Yield the lines that the newest attempt of each task has printed, each behind the task's label."""
    for listed in list_tasks(records, experiment):
        logs = find_logs(records, read_standing(records, listed.task_id, with_task=False))
        label = f"[{listed.label}] ".encode(errors="surrogateescape")
        rest = b""
        for piece in read_log(records, logs[-1]) if logs else ():
            *whole, rest = (rest + piece).split(b"\n")
            if whole:
                yield b"".join(b"%s%s\n" % (label, line) for line in whole)
        if rest:
            yield b"%s%s\n" % (label, rest)


def follow(
    records: RecordStore,
    task_id: str,
    *,
    said: Said = lambda _: None,
    poll_s: float | None = None,
    sleep: Callable[[float], None] | None = None,
) -> Iterator[bytes]:
    """Yield the output of the newest attempt and of later ones, until the task has ended."""
    pause = poll_s if poll_s is not None else LOCAL_POLL_S if records.holds_tasks else REMOTE_POLL_S
    token, offset = None, 0
    seen: set[str] = set()
    while True:
        standing = read_standing(records, task_id, with_task=False)
        logs = find_logs(records, standing)
        # Attempts between two looks are included; before the first look only the newest counts.
        fresh = logs[-1:] if not seen else [log for log in logs if log.token == token or log.token not in seen]
        for log in fresh:
            if log.token != token:
                token, offset = log.token, 0
                said(log)
            for piece in read_log(records, log, offset=offset):
                offset += len(piece)
                yield piece
        seen |= {log.token for log in logs}
        if standing.state.terminal:
            return
        (sleep or system.sleep)(pause)


def _pieces(records: RecordStore, url: str, offset: int) -> Iterator[bytes]:
    path = Path(url)
    if offset and path.is_absolute() and path.exists():
        with path.open("rb") as file:
            file.seek(offset)
            while piece := file.read(1 << 20):
                yield piece
        return
    for piece in records.read_log(url):
        if offset >= len(piece):
            offset -= len(piece)
        else:
            yield piece[offset:]
            offset = 0
