"""The checks that the rules of settings share, and the problems that they report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from runtime.schema import Problem, join, suggest


def wrong(path: str, value: object, allowed: str, hint: str | None = None) -> Problem:
    """A problem of a value that has the right type."""
    seen = "is empty" if value == "" else f"is `{value}`" if isinstance(value, str) else f"is {value}"
    return Problem(path=path, message=f"{seen}, allowed is {allowed}", hint=hint)


def find_misformed(
    value: object, path: str, key: str, pattern: re.Pattern[str], allowed: str, hint: str | None = None
) -> Iterator[Problem]:
    """Find a text that is set and does not have the form of `pattern`."""
    text = getattr(value, key)
    if text is not None and not pattern.fullmatch(text):
        yield wrong(join(path, key), text, allowed, hint)


def find_unknown(value: object, path: str, key: str, allowed: Sequence[str]) -> Iterator[Problem]:
    text = getattr(value, key)
    if text is not None and text not in allowed:
        yield wrong(join(path, key), text, f"one of {', '.join(allowed)}", suggest(text, allowed))


def find_out_of_range(value: object, path: str, key: str, least: int, most: int) -> Iterator[Problem]:
    number = getattr(value, key)
    if not least <= number <= most:
        yield Problem(path=join(path, key), message=f"is {number:,}, allowed are {least:,} to {most:,}")


def find_repeated(values: tuple[str, ...], path: str) -> Iterator[Problem]:
    for value, count in Counter(values).items():
        if count > 1:
            yield Problem(path=path, message=f"has `{value}` {count} times")


def has_plain_length(cidr: str) -> bool:
    """Whether a range ends in `/20`. Python also reads `/255.255.240.0`, `/020` and no length, Google and Kubernetes do not."""
    return re.fullmatch(r"[^/]+/(?:0|[1-9][0-9]{0,2})", cidr) is not None
