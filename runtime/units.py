"""Durations (`90s`, `2h`), sizes (`16GiB`), counts and times as people write them."""

from __future__ import annotations

import functools
import math
import re
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from runtime.errors import InvalidValue

Span: TypeAlias = timedelta | float | str
"""A duration as the whole API takes it: a `timedelta`, seconds, or text such as `2h`."""

_DURATION = r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?"
_MILLIS = r"(\d+(?:\.\d+)?)ms"
_SIZE = r"(\d+(?:\.\d+)?)\s*([KMGTP]i?)?B?"
_SCALE: dict[str | None, int] = {
    None: 1,
    **{f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", 1)},
    **{letter: 1000**power for power, letter in enumerate("KMGTP", 1)},
}


def parse_duration(text: str, *, field: str = "duration") -> timedelta:
    """`90s`, `1h30m`, `2d`, `250ms`, or a bare number of seconds."""
    stripped = text.strip()
    if (millis := re.fullmatch(_MILLIS, stripped)) and float(millis[1]) < 1e12:
        return timedelta(milliseconds=float(millis[1]))
    try:
        seconds = float(stripped)
        if 0 <= seconds < 1e9:
            return timedelta(seconds=seconds)
    except ValueError:
        matched = re.fullmatch(_DURATION, stripped) if stripped else None
        if matched and any(matched.groups()):
            days, hours, minutes, seconds = (float(part or 0) for part in matched.groups())
            total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
            if total < 1e9:
                return timedelta(seconds=total)
    raise InvalidValue(field, text, "such as 90s, 5m, 2h, 1d or 1h30m")


def to_span(value: Span, name: str) -> timedelta:
    """Read a duration as the whole API takes it. Raises `InvalidValue`, which names the argument `name`."""
    return value if isinstance(value, timedelta) else parse_duration(str(value), field=name)


def read_span(value: Span | None, name: str) -> timedelta | None:
    """Read a duration that may be left out, like `to_span`."""
    return None if value is None else to_span(value, name)


def parse_size(text: str) -> int:
    """Bytes of `16GiB` (1024-based), `500MB` (1000-based) or a bare number of bytes."""
    matched = re.fullmatch(_SIZE, text.strip())
    size = float(matched[1]) * _SCALE[matched[2]] if matched else math.inf
    if not math.isfinite(size):
        raise InvalidValue("size", text, "such as 512MiB, 16GiB or 2TB")
    return int(size)


def format_duration(span: timedelta | float) -> str:
    """At most two units: `850ms`, `12.3s`, `4m10s`, `2h5m`, `3d4h`."""
    seconds = span.total_seconds() if isinstance(span, timedelta) else span
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}".rstrip("0").rstrip(".") + "s"
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            major, rest = divmod(int(seconds), size)
            minor = rest // smaller_size
            return f"{major}{unit}" + (f"{minor}{smaller}" if minor else "")
    raise AssertionError(seconds)


def format_size(size: float) -> str:
    """`512B`, `1.5KiB`, `16GiB`."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024 or unit == "PiB":
            break
        size /= 1024
    return f"{size:.1f}".rstrip("0").rstrip(".") + unit


def count_noun(number: int, noun: str) -> str:
    """`1 task`, `1,234 tasks`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def divide(total: int, parts: int) -> list[int]:
    """Split a number into parts that differ by at most 1, the larger ones first."""
    return [total // parts + (place < total % parts) for place in range(parts)]


def format_time(at: datetime) -> str:
    """RFC 3339 in UTC with milliseconds, as records and messages carry it."""
    at = at.astimezone(UTC)
    # A third of what `isoformat` costs: the minute is spelled already when another time of it was.
    minute = _spell_minute(at.year, at.month, at.day, at.hour, at.minute)
    return f"{minute}:{_TWO_DIGITS[at.second]}.{str(1000 + at.microsecond // 1000)[1:]}Z"


@functools.lru_cache(maxsize=256)
def _spell_minute(year: int, month: int, day: int, hour: int, minute: int) -> str:
    return f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}"


_TWO_DIGITS = tuple(f"{number:02}" for number in range(60))


def parse_time(text: str, *, field: str = "time") -> datetime:
    """An RFC 3339 time; a zone is required."""
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None:
            return at.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise InvalidValue(field, text, "RFC 3339 with a zone, such as 2026-01-31T12:00:00Z")
