"""When totals are counted exactly: counters are hints, and a hint never decides alone.

Counters fall short for good when a worker is killed between a commit and its next report, or when a command ends a task.
Marks run ahead when an attempt dies between its mark and its record. Counting the records is right and costs a request
for each thousand, so its frequency follows from its duration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from runtime.records.base import ManifestStore, Totals
from runtime.system import system
from runtime.tasks.model import TaskState

SHARE: Final = 10
"""Recounts take at most one second in this many."""
EVERY_S: Final = 60.0
"""How old an exact count may be while the counters change."""
STILL_S: Final = 10.0
"""How old it may be while they do not change. Workers report every 30 s."""
FEW: Final = 1_000
"""Up to this many tasks are always counted at the first look: a killed worker seems to live for 90 s."""
FEW_OF_ONE: Final = 20_000
"""The same for a command about one experiment. A listing of that many takes 20 requests, several at a time."""


@dataclass(frozen=True, slots=True)
class Recount:
    """An exact count, and the hint before it."""

    totals: Totals
    hint: Totals
    at: float
    """When it was done, in seconds by a clock that never jumps, like all times here."""
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
    """Whether the records have to be counted before an experiment's totals are shown.

    The counters have not changed for `still_s`. Live workers report that they run `active` of its tasks; None if they
    were not asked. No look follows a `final` one. Up to `few` tasks are counted at the first look.
    """
    if hint.exact:
        return False
    if final:
        return True
    if last is None:
        return not active or hint.submitted <= few or _claims_end(hint)
    rest_s, moved = now - last.at, hint.counts != last.hint.counts
    if _claims_end(hint) and moved:
        return rest_s >= last.took_s or hint.submitted > last.totals.submitted
    if rest_s < (SHARE - 1) * last.took_s or not (moved or open_tasks(last.totals)):
        return False
    return rest_s >= (STILL_S if active == 0 or still_s >= STILL_S else EVERY_S)


def choose_totals(hint: Totals, last: Recount | None) -> Totals:
    """The best totals while no recount is due: the exact count, or the hint once it counts more."""
    if last is None or hint.exact:
        return hint
    if _claims_end(hint) or hint.counts == last.hint.counts:
        return last.totals
    tried_again = ended_tasks(hint) < ended_tasks(last.hint)
    if tried_again or hint.submitted > last.totals.submitted:
        return hint
    if hint.submitted < last.totals.submitted:
        return last.totals  # The counters do not know of all tasks.
    return max(last.totals, hint, key=ended_tasks)


def open_tasks(totals: Totals) -> int:
    return sum(count for state, count in totals.counts.items() if not state.terminal)


def ended_tasks(totals: Totals) -> int:
    return sum(count for state, count in totals.counts.items() if state.terminal)


def _claims_end(hint: Totals) -> bool:
    """Whether it claims that all tasks have ended and may be wrong. A success is recorded once for each task, counted
    after that by one worker and never revoked, so successes alone are at most counted too low."""
    return not open_tasks(hint) and ended_tasks(hint) > hint.counts.get(TaskState.SUCCEEDED, 0)


class Tally:
    """Totals of experiments as one process looks at them again and again."""

    def __init__(self, records: ManifestStore, *, ticks: Callable[[], float] | None = None) -> None:
        self._records, self._ticks = records, ticks
        self._last: dict[str, Recount] = {}
        self._moved: dict[str, tuple[Mapping[TaskState, int], float]] = {}
        """The last counts of the counters, and since when."""

    def count(
        self,
        experiment: str,
        *,
        active: int | None = None,
        final: bool = False,
        exact: bool = False,
        few: int = FEW,
    ) -> Totals:
        """Totals without an open task only if that is certain; `active`, `final` and `few` as in `is_recount_due`."""
        if exact:
            return self._records.totals(experiment, exact=True)
        last, hint, now = (
            self._last.get(experiment),
            self._records.totals(experiment),
            (self._ticks or system.monotonic)(),
        )
        before = self._moved.get(experiment)
        if before is None or before[0] != hint.counts:
            before = self._moved[experiment] = (hint.counts, now)
        still_s = now - before[1]
        if not is_recount_due(hint, last, now=now, still_s=still_s, active=active, final=final, few=few):
            return choose_totals(hint, last)
        totals = self._records.totals(experiment, exact=True)
        done = (self._ticks or system.monotonic)()
        self._last[experiment] = Recount(totals, hint, at=done, took_s=done - now)
        return totals
