"""Runs of an array as people write them: lists and ranges, checked before they are spelled out."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from runtime.errors import InvalidValue, UnknownName
from runtime.jobs.indices import choose_indices
from runtime.jobs.ledger import LedgerEntry


def array(runs: int = 10, first: int = 0) -> LedgerEntry:
    return LedgerEntry(
        id="j-91c0",
        name="sweep",
        owner="mia",
        target="hpc",
        kind="slurm",
        launched_at=datetime(2026, 1, 31, tzinfo=UTC),
        snapshot=None,
        indices=runs,
        natives=(),
        outcomes={},
        intent={"offset": first},
    )


@pytest.mark.parametrize(
    ("texts", "chosen"),
    [
        (None, ()),
        (["3"], (3,)),
        (["8,9"], (8, 9)),
        (["3-5"], (3, 4, 5)),
        (["0-3,7"], (0, 1, 2, 3, 7)),
        (["7", "0-1"], (0, 1, 7)),
        (["5,3,5,3-4"], (3, 4, 5)),
        ([" 1 , 3 - 4 "], (1, 3, 4)),
        (["007"], (7,)),
    ],
)
def test_indices_as_a_list_or_range_are_read_once_each_and_in_order(
    texts: Sequence[str] | None, chosen: Sequence[int]
) -> None:
    assert choose_indices(array(), texts) == chosen


def test_indices_of_an_array_with_an_offset_count_from_it() -> None:
    assert choose_indices(array(4, first=100), ["101-102"]) == (101, 102)
    with pytest.raises(UnknownName, match="no run named `99`"):
        choose_indices(array(4, first=100), ["99"])


@pytest.mark.parametrize("text", ["", ",", "3,", "x", "3-", "-3", "3..5", "1-2-3", "5-3", "1.5", "٣", "1\n,2x", "0x3"])
def test_indices_that_are_malformed_are_refused_with_the_range(text: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        choose_indices(array(), [text])

    assert refused.value.facts == (
        "allowed: numbers and ranges such as 3, 8,9 or 0-3,7; the runs of job `j-91c0` are 0 to 9",
    )


@pytest.mark.parametrize("text", ["10", "9-10", "0,12", "0-99999999999", "99999999999999999999999999", "9" * 5000])
def test_indices_that_the_job_lacks_are_refused_with_the_range(text: str) -> None:
    with pytest.raises(UnknownName) as refused:
        choose_indices(array(), [text])

    assert refused.value.facts == ("known runs: 0 to 9",)
    assert len(refused.value.message) < 200


def test_range_of_a_hundred_thousand_million_takes_no_memory() -> None:
    tracemalloc.start()
    with pytest.raises(UnknownName):
        choose_indices(array(), ["0-99999999999"])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 1_000_000


def test_indices_of_a_job_that_is_no_array_are_its_one_run() -> None:
    assert choose_indices(array(1), ["0"]) == (0,)
    with pytest.raises(InvalidValue) as refused:
        choose_indices(array(1), ["x"])

    assert refused.value.allowed.endswith("; job `j-91c0` is no array and has run 0 alone")
