"""The reaper's memory of its earlier runs, in a file: suspects, refusals, and counts.

The reaper is a process that starts every 45 s. A file that is missing or damaged is an empty memory: suspects wait once
more, and counts begin again, as those of a process that was started again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from runtime.errors import InfrastructureFailure, InvalidValue
from runtime.units import format_time, parse_time

FIRST_PAUSE: Final = timedelta(seconds=45)
LONGEST_PAUSE: Final = timedelta(minutes=10)
LONGEST_GAP: Final = LONGEST_PAUSE + timedelta(minutes=5)
"""What a run saw longer ago than this may have come and gone since: nobody looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaperState:
    """State of one cluster. Refusals and the pause after them are also kept for the zone, since its clusters share them."""

    seen: Mapping[str, datetime] = field(default_factory=dict)
    """Suspect's key → when it was first seen, by Google's clock."""
    looked_at: datetime | None = None
    """The time of the last look, by Google's clock."""
    refusals: int = 0
    """Runs in a row in which Google had no answer or too many requests."""
    wait_until: datetime | None = None
    """The time before which the zone is left alone."""
    removed: Mapping[str, int] = field(default_factory=dict)
    """Kind of the dead → removed so far."""
    failed: int = 0
    """Deletions that failed so far."""


def back_off(memory: ReaperState, now: datetime) -> ReaperState:
    """Leave the zone alone for twice as long as after its last refusal, at most ten minutes."""
    pause = min(FIRST_PAUSE * 2 ** min(memory.refusals, 10), LONGEST_PAUSE)
    return replace(memory, refusals=memory.refusals + 1, wait_until=now + pause)


def forgive(memory: ReaperState) -> ReaperState:
    return replace(memory, refusals=0, wait_until=None)


def waits_until(memory: ReaperState, now: datetime) -> datetime | None:
    """Return the time until which the zone is left alone; None if it may be asked. After the clock was set back by more than
    the longest pause it may."""
    until = memory.wait_until
    return None if until is None or until <= now or until - now > LONGEST_PAUSE else until


def recall_seen(memory: ReaperState, now: datetime) -> Mapping[str, datetime]:
    """Return the suspects of earlier runs and when each was first seen; none if the last look is long ago or unknown."""
    at = memory.looked_at
    return memory.seen if at is not None and abs(now - at) <= LONGEST_GAP else {}


def share_pause(memory: ReaperState, zone: ReaperState) -> ReaperState:
    """Return a cluster's memory with the refusals of its zone, which other clusters may have had."""
    return replace(memory, refusals=zone.refusals, wait_until=zone.wait_until)


def load_memory(path: Path) -> ReaperState:
    try:
        return _decode(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ReaperState()
    except OSError as problem:
        raise _failure("read", path, problem) from problem
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, InvalidValue):
        return ReaperState()


def save_memory(path: Path, memory: ReaperState) -> None:
    write_whole(path, json.dumps(_encode(memory), sort_keys=True).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old text or the new."""
    # Reapers in containers have the same process id.
    new = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(data)
        new.replace(path)
    except OSError as problem:
        # A full disk would keep a piece of each run.
        with contextlib.suppress(OSError):
            new.unlink()
        raise _failure("write", path, problem) from problem


def _failure(verb: str, path: Path, problem: OSError) -> InfrastructureFailure:
    return InfrastructureFailure(
        f"cannot {verb} `{path}`: {problem.strerror or problem}", hint="name a file in a folder that you can write to"
    )


def _encode(memory: ReaperState) -> dict[str, Any]:
    return {
        "seen": {key: format_time(at) for key, at in memory.seen.items()},
        "looked_at": None if memory.looked_at is None else format_time(memory.looked_at),
        "refusals": memory.refusals,
        "wait_until": None if memory.wait_until is None else format_time(memory.wait_until),
        "removed": dict(memory.removed),
        "failed": memory.failed,
    }


def _decode(value: Mapping[str, Any]) -> ReaperState:
    until, looked_at = value["wait_until"], value.get("looked_at")
    counts = [value["refusals"], value["failed"], *value["removed"].values()]
    if any(int(count) < 0 for count in counts):
        raise ValueError("a count is negative")
    return ReaperState(
        seen={str(key): parse_time(at) for key, at in value["seen"].items()},
        looked_at=None if looked_at is None else parse_time(looked_at),
        refusals=int(value["refusals"]),
        wait_until=None if until is None else parse_time(until),
        removed={str(key): int(count) for key, count in value["removed"].items()},
        failed=int(value["failed"]),
    )
