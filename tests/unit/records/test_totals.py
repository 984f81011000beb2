"""When records are counted instead of believing counters, and the totals in between."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.records.base import Totals
from runtime.records.memory import MemoryRecords
from runtime.records.totals import EVERY_S, SHARE, STILL_S, Recount, Tally, choose_totals, is_recount_due
from runtime.tasks.model import TaskState, next_generation
from runtime.tasks.wire import encode_task
from runtime.testing import sample_task
from tests.conformance.records_cases import sample_mark, sample_record

NOW = datetime(2026, 11, 21, 8, 0, 0, tzinfo=UTC)
TASKS = [sample_task(str(number)) for number in range(6)]


def totals(*, exact: bool = False, **counts: int) -> Totals:
    return Totals({TaskState(state): count for state, count in counts.items()}, NOW, exact)


def recount(hint: Totals, found: Totals, *, at: float = 0.0, took_s: float = 1.0) -> Recount:
    return Recount(found, hint, at, took_s)


MANY = totals(queued=3_000, succeeded=7_000)
SHORT = totals(queued=3, succeeded=7)
OVER = totals(queued=0, succeeded=8, failed=2)
DONE = totals(queued=0, succeeded=10)


@pytest.mark.parametrize(
    ("hint", "active", "due"),
    [
        (MANY, None, True),
        (MANY, 0, True),
        (MANY, 1, False),
        (SHORT, 1, True),
        (totals(queued=0, succeeded=8_000, failed=2_000), 1, True),
        (totals(queued=0, succeeded=10_000), 1, False),
        (totals(exact=True, queued=3), 0, False),
    ],
    ids=["nobody was asked", "nobody runs it", "somebody runs it", "few", "claims an end", "all succeeded", "embedded"],
)
def test_recount_at_the_first_look_is_due_unless_work_goes_on(hint: Totals, active: int | None, due: bool) -> None:
    assert is_recount_due(hint, None, now=0, still_s=0, active=active) is due


@pytest.mark.parametrize("active", [None, 0, 1])
@pytest.mark.parametrize("hint", [SHORT, OVER, DONE])
def test_recount_at_the_last_look_is_always_due(hint: Totals, active: int | None) -> None:
    last = recount(hint, totals(exact=True, queued=3, succeeded=7), at=100.0)

    assert is_recount_due(hint, last, now=100.0, still_s=0, active=active, final=True)


@pytest.mark.parametrize(
    ("hint", "still_s", "active", "rest_s"),
    [
        (SHORT, STILL_S, 1, STILL_S),
        (totals(queued=2, succeeded=8), 0.0, 1, EVERY_S),
        (SHORT, 0.0, 0, STILL_S),
        (OVER, 0.0, 1, 1.0),
        (totals(queued=0, succeeded=8, failed=3), 0.0, 1, 0.0),
    ],
    ids=["stands still", "moves", "nobody runs it", "claims an end", "claims an end of more tasks"],
)
def test_recount_is_due_again_after_a_rest(hint: Totals, still_s: float, active: int, rest_s: float) -> None:
    last = recount(SHORT, totals(exact=True, queued=1, succeeded=9), at=100.0)

    assert is_recount_due(hint, last, now=100.0 + rest_s, still_s=still_s, active=active)
    assert not is_recount_due(hint, last, now=99.9 + rest_s, still_s=still_s, active=active) or rest_s == 0.0


def test_recount_that_took_long_is_not_due_before_ten_times_as_long() -> None:
    last = recount(SHORT, totals(exact=True, queued=1, succeeded=9), at=0.0, took_s=60.0)
    moved = totals(queued=2, succeeded=8)

    for hint, active in ((SHORT, 0), (moved, None), (moved, 1)):
        assert not is_recount_due(hint, last, now=539.0, still_s=1000.0, active=active)
        assert is_recount_due(hint, last, now=540.0, still_s=1000.0, active=active)


def test_recount_of_what_has_ended_is_not_due_while_the_counters_say_the_same() -> None:
    last = recount(SHORT, totals(exact=True, queued=0, succeeded=8, failed=2))

    assert not is_recount_due(SHORT, last, now=1e6, still_s=1e6, active=0)


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (SHORT, "exact"),
        (totals(queued=2, succeeded=8), "exact"),
        (totals(queued=0, succeeded=9, failed=1), "exact"),
        (DONE, "hint"),
        (totals(queued=4, succeeded=6), "hint"),
        (totals(queued=7, succeeded=8), "hint"),
    ],
    ids=["the same", "still behind", "claims an end", "all succeeded", "tried again", "more was submitted"],
)
def test_totals_between_two_recounts_are_whichever_know_of_more(hint: Totals, said: str) -> None:
    exact = totals(exact=True, queued=1, succeeded=9)

    assert choose_totals(hint, recount(SHORT, exact)) is {"exact": exact, "hint": hint}[said]


@pytest.mark.parametrize(
    "hint", [totals(queued=2, succeeded=8), OVER, DONE], ids=["open", "claims an end", "all succeeded"]
)
def test_counters_that_miss_tasks_are_not_believed_once_these_were_counted(hint: Totals) -> None:
    last = recount(SHORT, totals(exact=True, queued=4, succeeded=8), at=100.0)

    assert choose_totals(hint, last) is last.totals
    assert not is_recount_due(hint, last, now=100.5, still_s=0, active=1)


class Counted(MemoryRecords):
    """Records with an exact count that takes a while, by the observer's clock."""

    def __init__(self, *, takes_s: float = 0.0) -> None:
        super().__init__()
        self.now_s = 0.0
        self.takes_s = takes_s
        self.recounts = 0

    def totals(self, experiment: str, *, exact: bool = False) -> Totals:
        if exact:
            self.recounts += 1
            self.now_s += self.takes_s
        return super().totals(experiment, exact=exact)

    def tally(self) -> Tally:
        return Tally(self, ticks=lambda: self.now_s)


@pytest.fixture
def records() -> Counted:
    records = Counted()
    records.put_part("sample", 0, [encode_task(task) for task in TASKS])
    return records


def look(tally: Tally, **more: Any) -> dict[str, int]:
    return {state.value: count for state, count in tally.count("sample", **more).counts.items() if count}


def test_totals_of_a_worker_that_died_before_it_reported_are_made_good(records: Counted) -> None:
    for task in TASKS[:3]:
        records.commit(sample_record(task))
    records.put_counters("w-1", {"sample": {TaskState.SUCCEEDED: 3}})
    tally = records.tally()
    assert look(tally, active=3) == {"queued": 3, "succeeded": 3}
    for task in TASKS[3:]:
        records.commit(sample_record(task))

    records.now_s += STILL_S
    assert look(tally, active=0) == {"succeeded": 6}
    records.now_s += 1e6
    assert look(tally, active=0) == {"succeeded": 6}
    assert records.recounts == 2


def test_totals_of_marks_without_a_record_say_no_end(records: Counted) -> None:
    for task in TASKS[:5]:
        records.commit(sample_record(task))
    records.mark(sample_mark(TASKS[5]))
    records.put_counters("w-1", {"sample": {TaskState.SUCCEEDED: 5}})
    tally = records.tally()

    for _ in range(3):
        assert look(tally, active=1) == {"queued": 1, "succeeded": 5}
        records.now_s += EVERY_S
    records.commit(sample_record(TASKS[5]))
    records.put_counters("w-1", {"sample": {TaskState.SUCCEEDED: 6}})
    assert look(tally, active=1) == {"succeeded": 6}


def test_totals_after_an_end_see_what_is_tried_again_and_what_is_submitted(records: Counted) -> None:
    for task in TASKS[:5]:
        records.commit(sample_record(task))
    records.mark(sample_mark(TASKS[5]))
    records.commit(sample_record(TASKS[5], state=TaskState.FAILED))
    records.put_counters("w-1", {"sample": {TaskState.SUCCEEDED: 5, TaskState.FAILED: 1}})
    tally = records.tally()
    assert look(tally, active=0) == {"succeeded": 5, "failed": 1}

    records.unmark(TASKS[5].id, 1, TaskState.FAILED)
    assert look(tally, active=0) == {"queued": 1, "succeeded": 5}
    assert look(tally, final=True) == {"queued": 1, "succeeded": 5}
    records.commit(sample_record(next_generation(TASKS[5]), token="b2"))
    records.put_part("sample", 1, [encode_task(sample_task("one more"))])
    assert look(tally, active=0) == {"queued": 2, "succeeded": 5}
    assert look(tally, final=True) == {"queued": 1, "succeeded": 6}


@given(takes_s=st.floats(0.01, 20), drawn=st.binary(min_size=200, max_size=400))
def test_recounts_take_a_tenth_of_the_time_however_the_counters_move(takes_s: float, drawn: bytes) -> None:
    # A byte per look: drawing the pairs one by one takes longer than all else.
    looks = [(number % 7, (None, 0, 1)[number // 7 % 3]) for number in drawn]
    records = Counted(takes_s=takes_s)
    records.put_part("sample", 0, [encode_task(task) for task in TASKS])
    hints = iter(looks)

    tally = Tally(Hinted(records, hints), ticks=lambda: records.now_s)  # type: ignore[arg-type]
    for _, active in looks:
        tally.count("sample", active=active)
        records.now_s += 0.5

    assert records.recounts * takes_s <= records.now_s / SHARE + 2 * takes_s


class Hinted:
    """A store with counters that the test sets."""

    def __init__(self, records: Counted, hints: Any) -> None:
        self._records, self._hints = records, hints

    def totals(self, experiment: str, *, exact: bool = False) -> Totals:
        if exact:
            return self._records.totals(experiment, exact=True)
        succeeded, _ = next(self._hints)
        counts: Mapping[TaskState, int] = {TaskState.QUEUED: max(1, 6 - succeeded), TaskState.SUCCEEDED: succeeded}
        return Totals(counts, NOW, exact=False)
