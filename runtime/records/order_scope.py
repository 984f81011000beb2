"""Whether an order covers a task: exactly, by the manifest parts that the order names, each read once."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from runtime.errors import LOST_FOR_GOOD
from runtime.records.base import ManifestPart, ManifestStore
from runtime.records.control_commands import FIRST_OWN_NUMBER, QueueControl
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.tasks.id_set import IdSet, task_key
from runtime.tasks.model import Task

_OUR_LINE: Final = re.compile(r'\{"schema":1,"id":"t-([0-9a-f]{16})[0-9a-f]{8}"')


def read_keys(records: ManifestStore, part: ManifestPart) -> Sequence[int]:
    """The `task_key` of each task that the part lists, in its order."""
    keys = array("Q")
    for line in records.read_part(part):
        # Most lines begin with an id of ours and are of a first generation; to parse one costs ten times as much.
        ours = None if '"generation":' in line else _OUR_LINE.match(line)
        if ours:
            keys.append(int(ours[1], 16) or 1)
            continue
        try:
            fields = json.loads(line)
            keys.append(task_key(fields["id"], fields.get("generation", 1)))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            continue  # `repair` makes it a dead letter.
    return keys


def own_key(part_name: str) -> int | None:
    """The `task_key` of the only task in a part that is numbered by it."""
    number = int(part_name.partition("-")[0])
    return number if number >= FIRST_OWN_NUMBER else None


class Coverage:
    """The tasks that a queue's orders cover, of the experiments asked for; 16 bytes for each task.

    `covers` never waits, so a worker's loop can ask it; `read` may be called from any thread.
    """

    def __init__(self, records: ManifestStore) -> None:
        self._records = records
        self._keys: dict[str, IdSet] = {}
        self._read: dict[str, frozenset[str]] = {}
        self._whole: dict[str, frozenset[str]] = {}
        """Parts of an experiment that were all read at the last look: comparing sets takes time for each part."""
        self._reading = system.lock()

    def covers(self, control: QueueControl, task: Task, published_at: datetime | None = None) -> bool | None:
        """Whether `control` covers the task; None if `read` has to be called first.

        `published_at` is when the queue's service took in the message of a foreign producer, by the service's clock, in
        whole milliseconds: a message of the order's own millisecond is covered.
        """
        if (task.id, task.generation) in control.tasks:
            return True
        covered = control.experiments.get(task.experiment)
        if published_at is not None:
            times = (control.purged_before, None if covered is None else covered.before)
            if any(at is not None and published_at <= at for at in times):
                return True
        if covered is None or not covered.parts:
            return False
        if self._whole.get(task.experiment) is not covered.parts:
            if not covered.parts <= self._read.get(task.experiment, frozenset()):
                return None
            self._whole[task.experiment] = covered.parts
        return task_key(task.id, task.generation) in self._keys[task.experiment]

    def read(self, control: QueueControl, experiment: str) -> None:
        """Read the parts of an experiment that `control` names and that were not read yet.

        A part that is missing or damaged for good covers nothing: its tasks would otherwise come and go without end.
        """
        covered = control.experiments.get(experiment)
        if covered is None:
            return
        with self._reading:
            keys = self._keys.setdefault(experiment, IdSet())
            left = covered.parts - self._read.get(experiment, frozenset())
            own = {name: key for name in left if (key := own_key(name)) is not None}
            for key in own.values():
                keys.add(key)
            self._add_read(experiment, frozenset(own))
            for name in sorted(left - own.keys()):
                for key in self._keys_of(ManifestPart.named(experiment, name)):
                    keys.add(key)
                self._add_read(experiment, frozenset({name}))

    def _add_read(self, experiment: str, names: frozenset[str]) -> None:
        self._read[experiment] = self._read.get(experiment, frozenset()) | names

    def _keys_of(self, part: ManifestPart) -> Sequence[int]:
        try:
            return read_keys(self._records, part)
        except LOST_FOR_GOOD as problem:
            CleanLogger(__name__).warning(
                "an order covers a part that cannot be read, and its tasks are run: %s", problem.message
            )
            return ()
