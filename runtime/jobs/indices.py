"""Which runs of a job are meant by `3`, `8,9`, `3-5` or `0-3,7`, and which are open."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from runtime.errors import InvalidValue, UnknownName
from runtime.jobs.ledger import LedgerEntry

_LONGEST = 18
"""Digits of a number; no array has more runs, and longer ones take long to read."""


def choose_indices(entry: LedgerEntry, texts: Iterable[str] | None) -> tuple[int, ...]:
    """The runs of a job that are named, in order and each once; empty if none is.

    Ranges include both ends, and are checked before they are spelled out. Raises `InvalidValue` for a text that is no
    list of runs, and `UnknownName` for runs that the job does not have, both with the runs that it has.
    """
    first, last = entry.first_index, entry.first_index + entry.indices - 1
    known = f"{first} to {last}" if entry.indices > 1 else f"only {first}, it is no array"
    chosen: set[int] = set()
    for text in texts or ():
        for part in text.split(","):
            found = re.fullmatch(rf"\s*([0-9]{{1,{_LONGEST}}})\s*(?:-\s*([0-9]{{1,{_LONGEST}}})\s*)?", part)
            low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
            if low > high and not re.fullmatch(r"\s*[0-9]+\s*", part):
                has = f"the runs of job `{entry.id}` are {known}"
                if entry.indices == 1:
                    has = f"job `{entry.id}` is no array and has run {first} alone"
                raise InvalidValue(
                    "list of runs",
                    text if len(text) <= 100 else f"{text[:100]}…",
                    f"numbers and ranges such as 3, 8,9 or 0-3,7; {has}",
                )
            if not first <= low <= high <= last:
                name = part.strip() if len(part) <= 50 else f"{part.strip()[:50]}…"
                raise UnknownName("run", name, [known], where=f"in job `{entry.id}`")
            chosen.update(range(low, high + 1))
    return tuple(sorted(chosen))


def open_runs(entry: LedgerEntry, *, cancelled: bool = False) -> list[int]:
    """The runs without a result; those that were cancelled one by one only with `cancelled`."""
    gone: Collection[int] = () if cancelled else entry.cancelled_indices
    indices = range(entry.first_index, entry.first_index + entry.indices)
    return [index for index in indices if index not in entry.outcomes and index not in gone]
