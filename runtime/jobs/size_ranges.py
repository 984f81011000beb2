"""Amounts of memory and disk that a job asks for: a size, or a range of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from runtime.errors import RequestRefused
from runtime.units import format_size, parse_size


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes at least `low` and, where there is one, at most `high`: `16GiB`, `16GiB..`, `16GiB..64GiB`."""

    low: int
    high: int | None = None
    """Equal to `low` where one amount was written."""

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "type": ["string", "integer"],
        "examples": ["16GiB", "16GiB..", "16GiB..64GiB"],
    }

    @classmethod
    def read(cls, value: object) -> Range:
        if isinstance(value, str | int) and not isinstance(value, bool):
            low, dots, high = str(value).partition("..")
            try:
                least = parse_size(low)
                most = parse_size(high) if high else (None if dots else least)
            except RequestRefused:
                pass
            else:
                if least > 0 and (most is None or most >= least):
                    return cls(least, most)
        raise ValueError("a size such as 16GiB, 16GiB.. or 16GiB..64GiB")

    def __str__(self) -> str:
        if self.high == self.low:
            return _exact_size(self.low)
        return f"{_exact_size(self.low)}..{'' if self.high is None else _exact_size(self.high)}"


def _exact_size(size: int) -> str:
    text = format_size(size)
    return text if parse_size(text) == size else str(size)
