"""When totals are counted exactly: counters are hints, and a hint is never the last word.

Counters fall short for good when a worker is killed between a commit and its next report, or when somebody who is no
worker ends a task. Marks run ahead when an attempt dies between its mark and its record. Counting the records is right
and costs a request for each thousand, so how often it is done follows from how long it took.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from threading import Lock
from typing import Final

from runtime.clock import Clock
from runtime.records.base import ManifestStore, Totals
from runtime.records.blobs.base import Blobs
from runtime.records.layout import COUNTED, COUNTER, counters_folder, matched, newest_of_each, quoted, record_shards
from runtime.records.manifests import BlobManifests
from runtime.records.results import BlobResults
from runtime.tasks.idset import IdSet, task_key
from runtime.tasks.model import TaskState, experiment_digest
from runtime.values import dataclass

SHARE: Final = 10
"""Recounts take at most one second in so many."""
EVERY_S: Final = 60.0
"""How old an exact count may be while the counters move."""
STILL_S: Final = 10.0
"""How old it may be while they stand still. Workers report every 30 s."""
FEW: Final = 1_000
"""Tasks that are counted at the first look in any case: a worker that was killed seems to live for 90 s."""
FEW_OF_ONE: Final = 20_000
"""The same for the only experiment that somebody looks at. A listing of that many takes 20 requests, several at a time."""


@dataclass(frozen=True, slots=True)
class Recount:
    """An exact count, and what the counters said before it."""

    totals: Totals
    hint: Totals
    at: float
    """When it was done; seconds by a clock that never jumps, as all times here."""
    took_s: float


def is_recount_due(
    hint: Totals,
    last: Recount | None,
    *,
    now: float,
    still_s: float,
    active: int | None,
    final: bool = False,
    few: int = FEW,
) -> bool:
    """Whether the records have to be counted before anything is said of an experiment.

    The counters have said the same for `still_s`. `active` of its tasks are run by live workers, as far as these report;
    None if they were not asked. After a `final` look there is no other. Up to `few` tasks are counted at the first look.
    """
    if hint.exact:
        return False
    if final:
        return True
    if last is None:
        return not active or hint.submitted <= few or _claims_end(hint)
    rest_s, moved = now - last.at, hint.counts != last.hint.counts
    if _claims_end(hint) and moved:
        return rest_s >= last.took_s or hint.submitted != last.totals.submitted
    if rest_s < (SHARE - 1) * last.took_s or not (moved or open_tasks(last.totals)):
        return False
    return rest_s >= (STILL_S if active == 0 or still_s >= STILL_S else EVERY_S)


def choose_totals(hint: Totals, last: Recount | None) -> Totals:
    """What is known while no recount is due: the exact count, or the hint once that knows of more."""
    if last is None or hint.exact:
        return hint
    if _claims_end(hint) or hint.counts == last.hint.counts:
        return last.totals
    tried_again = ended_tasks(hint) < ended_tasks(last.hint)
    if tried_again or hint.submitted != last.totals.submitted:
        return hint
    return max(last.totals, hint, key=ended_tasks)


def open_tasks(totals: Totals) -> int:
    return sum(count for state, count in totals.counts.items() if not state.terminal)


def ended_tasks(totals: Totals) -> int:
    return sum(count for state, count in totals.counts.items() if state.terminal)


def _claims_end(hint: Totals) -> bool:
    """Whether it says that all has ended and may be wrong. A success is recorded once for each task, counted after that
    by one worker and never taken back, so successes alone are at most counted too low."""
    return not open_tasks(hint) and ended_tasks(hint) > hint.counts.get(TaskState.SUCCEEDED, 0)


class Tally:
    """Totals of experiments as one process looks at them again and again."""

    def __init__(self, records: ManifestStore, *, ticks: Callable[[], float] = time.monotonic) -> None:
        self._records, self._ticks = records, ticks
        self._last: dict[str, Recount] = {}
        self._moved: dict[str, tuple[Mapping[TaskState, int], float]] = {}
        """What the counters said last, and since when."""

    def count(
        self,
        experiment: str,
        *,
        active: int | None = None,
        final: bool = False,
        exact: bool = False,
        few: int = FEW,
    ) -> Totals:
        """Totals that say `all has ended` only if that is certain; `active`, `final` and `few` as in `is_recount_due`."""
        if exact:
            return self._records.totals(experiment, exact=True)
        last, hint, now = self._last.get(experiment), self._records.totals(experiment), self._ticks()
        before = self._moved.get(experiment)
        if before is None or before[0] != hint.counts:
            before = self._moved[experiment] = (hint.counts, now)
        still_s = now - before[1]
        if not is_recount_due(hint, last, now=now, still_s=still_s, active=active, final=final, few=few):
            return choose_totals(hint, last)
        totals = self._records.totals(experiment, exact=True)
        done = self._ticks()
        self._last[experiment] = Recount(totals, hint, at=done, took_s=done - now)
        return totals


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
            folder = f"{counters_folder(experiment)}{quoted(worker)}+{self._start_of_counting}/"
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
