"""A set of task ids that costs at most 16 bytes each, for inputs of a million lines and more."""

from __future__ import annotations

import re
from array import array
from typing import Final

_OUR_ID: Final = re.compile(r"t-([0-9a-f]{16})[0-9a-f]{8}")

_SEGMENT_BITS: Final = 6
_SEGMENTS: Final = 1 << _SEGMENT_BITS
_SMALLEST: Final = 8
# Between full and just grown a key costs 10 to 15 bytes.
_FULLEST: Final = 0.8
_EMPTY: Final = array("Q", bytes(8 * _SMALLEST))
_GROWTH: Final = 1.5


def task_key(task_id: str, generation: int) -> int:
    """64 bits that stand for one generation of a task of one experiment; never 0.

    An id that we made already is 64 bits of a hash and its experiment's digest, so nothing is lost by taking them.
    """
    matched = _OUR_ID.fullmatch(task_id) if generation == 1 else None
    if matched:
        return int(matched[1], 16) or 1
    import hashlib

    digest = hashlib.blake2b(f"{task_id}/{generation}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


class IdSet:
    """Open addressing in 64 tables that grow one at a time, so that growing never holds the set twice."""

    __slots__ = ("_counts", "_limits", "_tables", "count")

    def __init__(self) -> None:
        self._tables = [_EMPTY] * _SEGMENTS  # Each gets one of its own with its first key.
        self._counts = [0] * _SEGMENTS
        self._limits = [int(_SMALLEST * _FULLEST)] * _SEGMENTS
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __contains__(self, key: int) -> bool:
        table = self._tables[key & (_SEGMENTS - 1)]
        size = len(table)
        slot = (key >> _SEGMENT_BITS) % size
        while found := table[slot]:
            if found == key:
                return True
            slot = slot + 1 if slot + 1 < size else 0
        return False

    def add(self, key: int) -> bool:
        """False if it was there."""
        segment = key & (_SEGMENTS - 1)
        table = self._tables[segment]
        size = len(table)
        slot = (key >> _SEGMENT_BITS) % size
        while found := table[slot]:
            if found == key:
                return False
            slot = slot + 1 if slot + 1 < size else 0
        if table is _EMPTY:
            table = self._tables[segment] = _EMPTY[:]
        table[slot] = key
        self.count += 1
        self._counts[segment] += 1
        if self._counts[segment] > self._limits[segment]:
            self._grow(segment)
        return True

    def _grow(self, segment: int) -> None:
        old = self._tables[segment]
        size = int(len(old) * _GROWTH) + 1
        table = array("Q", bytes(8 * size))
        for key in old:
            if key:
                slot = (key >> _SEGMENT_BITS) % size
                while table[slot]:
                    slot = slot + 1 if slot + 1 < size else 0
                table[slot] = key
        self._tables[segment] = table
        self._limits[segment] = int(size * _FULLEST)
