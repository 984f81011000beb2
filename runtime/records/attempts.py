"""Attempts of tasks: which began, and how those ended that did not succeed."""

from __future__ import annotations

from typing import Final

from runtime.records import codec
from runtime.records.layout import ATTEMPT, matched, started_key
from runtime.records.results import BlobResults, end_of
from runtime.tasks.history import EndedNote, History, StartedMark
from runtime.tasks.model import Task
from runtime.values import replace

NOTE_LOG_BYTES: Final = 8 * 1024


class BlobAttempts(BlobResults):
    """Notes of attempts; the attempt whose record stands is over."""

    def note_started(self, task: Task, started: StartedMark) -> None:
        self.blobs.create(started_key(task, started.token), codec.encode_started(started))

    def retract_started(self, task: Task, token: str) -> None:
        self.blobs.delete(started_key(task, token))

    def note_ended(self, task: Task, note: EndedNote) -> None:
        note = replace(note, log=end_of(note.log, NOTE_LOG_BYTES))
        self.blobs.create(f"attempts/{task.id}/g{task.generation}/{note.token}.ended.json", codec.encode_ended(note))

    def history(self, task_id: str, generation: int) -> History:
        ended: list[EndedNote] = []
        started: list[StartedMark] = []
        closed: set[str] = set()
        found = list(matched(self.blobs.list_keys(f"attempts/{task_id}/g{generation}/"), ATTEMPT))
        if not found:
            return History()
        for key, data in self._read_all(each[0] for each in found):
            token = key.rpartition("/")[2].partition(".")[0]
            if key.endswith(".ended.json"):
                # Whatever it says, that attempt is over.
                closed.add(token)
                ended += self._decoded(key, data, codec.decode_ended)
            elif key.endswith(".started.json"):
                started += self._decoded(key, data, codec.decode_started)
        still_open = [mark for mark in started if mark.token not in closed]
        if still_open and (record := self.find(task_id, generation)):
            still_open = [mark for mark in still_open if mark.token != record.token]
        return History(
            ended=tuple(sorted(ended, key=lambda note: note.ended_at)),
            open=tuple(sorted(still_open, key=lambda mark: mark.started_at)),
        )
