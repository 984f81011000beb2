"""The checks that the rules of settings share, and the problems that they report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from runtime.schema import Problem


def wrong(path: str, value: object, allowed: str, hint: str | None = None) -> Problem:
    """A problem of a value that has the right type."""
    seen = "is empty" if value == "" else f"is `{value}`" if isinstance(value, str) else f"is {value}"
    return Problem(path, f"{seen}, allowed is {allowed}", hint)


def find_repeated(values: tuple[str, ...], path: str) -> Iterator[Problem]:
    for value, count in Counter(values).items():
        if count > 1:
            yield Problem(path, f"has `{value}` {count} times")
