"""How many tasks of an experiment stand where: exactly from the records, or from what workers report."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from threading import Lock
from typing import Final

from runtime.clock import Clock
from runtime.records.base import Totals
from runtime.records.blobs.base import Blobs
from runtime.records.layout import COUNTED, COUNTER, matched, newest_of_each, quoted, record_shards
from runtime.records.manifests import BlobManifests
from runtime.records.results import BlobResults
from runtime.tasks.idset import IdSet, task_key
from runtime.tasks.model import TaskState, experiment_digest

MARKS_COUNTED: Final = 10_000
"""Up to here `totals` counts what did not succeed by the names of its marks; beyond, it believes the counters."""


class BlobTotals(BlobManifests, BlobResults):
    """Tasks by state: manifests say how many were submitted; results and counters say how many ended."""

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        super().__init__(blobs, clock=clock)
        self._counters: dict[tuple[str, str], str] = {}
        """By experiment and worker the name of the last report."""
        self._start_of_counting = os.urandom(4).hex()

    def put_counters(self, worker: str, counters: Mapping[str, Mapping[TaskState, int]]) -> None:
        """The numbers are the name, so that `totals` lists and never reads.

        Each start of a worker has a folder of its own: a successor of the same name counts from 0, and what it does not
        know of has to stay.
        """
        for experiment, counts in counters.items():
            numbers = "-".join(f"{letter}{counts.get(state, 0)}" for letter, state in zip("sfcx", COUNTED, strict=True))
            before = self._counters.get((experiment, worker), "")
            if before.rpartition("/")[2].partition("-")[2] == numbers:
                continue
            folder = f"counters/{experiment_digest(experiment)}/{quoted(worker)}+{self._start_of_counting}/"
            name = f"{folder}{int(self._clock.now().timestamp() * 1000):013}-{numbers}"
            self.blobs.create(name, b"")
            self._counters[experiment, worker] = name
            if before:
                self.blobs.delete(before)

    def totals(self, experiment: str, *, exact: bool = False) -> Totals:
        """Without `exact` a few listings: manifest names, the highest of each worker's counters, mark names."""
        as_of = self._clock.now()
        digest = experiment_digest(experiment)
        if exact:
            ended = self._count_records(experiment)
            submitted = sum(part.count for part in self.parts(experiment))
        else:
            counters = self._start(lambda: self._sum_counters(digest))
            marks = self._start(lambda: self._count_marks(experiment))
            submitted = sum(part.count for part in self.parts(experiment))
            ended, reported_at = counters.result()
            as_of = min(as_of, reported_at or as_of)
            if (marked := marks.result()) is not None:
                ended = Counter({TaskState.SUCCEEDED: ended[TaskState.SUCCEEDED]}) + marked
        queued = max(0, submitted - ended.total())
        counts = {state: ended[state] for state in COUNTED if ended[state]}
        return Totals({TaskState.QUEUED: queued, **counts}, as_of, exact)

    def _count_records(self, experiment: str) -> Counter[TaskState]:
        """Each task by its newest generation. One whose record did not succeed has ended as long as its mark is there:
        without it the next generation was published, and the task waits or runs."""
        others = IdSet()
        lock = Lock()

        def count(shard: str) -> int:
            succeeded = 0
            for task_id, generation, state in self._newest_states(shard):
                if state is TaskState.SUCCEEDED:
                    succeeded += 1
                    continue
                with lock:
                    others.add(task_key(f"{task_id}.{state}", generation))
            return succeeded

        ended = Counter({TaskState.SUCCEEDED: sum(self._in_parallel(count, record_shards(experiment)))})
        # Marks are listed last, as in `tried_again`.
        for mark in self._list_marks(experiment) if others else ():
            if task_key(f"{mark[1]}.{mark[3]}", int(mark[2])) in others:
                ended[TaskState(mark[3])] += 1
        return ended

    def _sum_counters(self, digest: str) -> tuple[Counter[TaskState], datetime | None]:
        """By state, and when the last worker reported by its own clock.

        Of each start of a worker the highest numbers count: they only grow, whatever its clock does and whichever of
        its names could not be deleted.
        """
        highest: dict[str, tuple[int, ...]] = {}
        latest: int | None = None
        for found in matched(self.blobs.list_keys(f"counters/{digest}/"), COUNTER):
            at, *numbers = map(int, found.groups()[1:])
            latest = max(at, latest or 0)
            highest[found[1]] = max(tuple(numbers), highest.get(found[1], ()), key=sum)
        total: Counter[TaskState] = Counter()
        for counts in highest.values():
            total.update(dict(zip(COUNTED, counts, strict=True)))
        return total, None if latest is None else datetime.fromtimestamp(latest / 1000, UTC)

    def _count_marks(self, experiment: str) -> Counter[TaskState] | None:
        """By state of the newest generation; None where there are too many to list."""
        marks = list(itertools.islice(self._list_marks(experiment), MARKS_COUNTED + 1))
        if len(marks) > MARKS_COUNTED:
            return None
        return Counter(TaskState(newest[-1][3]) for newest in newest_of_each(marks))
