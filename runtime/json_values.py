"""Values that the standard JSON encoder lacks."""

from __future__ import annotations

from dataclasses import fields, is_dataclass


def encode(value: object) -> object:
    """Encode a value that the standard JSON encoder lacks; for `json.dumps(default=encode)`."""
    from datetime import datetime, timedelta
    from enum import Enum
    from pathlib import PurePath

    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, datetime):
        from runtime.units import format_time

        return format_time(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"no JSON for {type(value).__name__}")
