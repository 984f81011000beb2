"""The two clocks: wall time for people and plans, boot time for leases.

Boot time goes on through a suspend, never jumps, and starts again with each boot; each boot has an id.
Nothing is decided by comparing wall times of two machines; a large difference is reported all the same.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from runtime.units import format_duration

SKEW: Final = timedelta(seconds=30)
"""Synchronized clocks agree far better; a larger difference is reported."""


class Clock(Protocol):
    def now(self) -> datetime:
        """Aware, in UTC."""

    def boottime(self) -> float:
        """Seconds since this boot, suspends included."""


# CLOCK_BOOTTIME is Linux's; elsewhere the monotonic clock stands in, which may stop in a suspend: leases then
# only live longer.
_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def boottime(self) -> float:
        return time.clock_gettime(_BOOT_CLOCK)


def boot_id() -> str:
    """The id of this boot of this kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"booted-{round(time.time() - time.clock_gettime(_BOOT_CLOCK))}"


def machine_id(boot: str | None = None) -> str:
    """Host name and boot: two losses on machines that differ in both were on different hosts, containers or not."""
    return f"{os.uname().nodename}/{boot or boot_id()}"


def describe_skew(skew: timedelta | None, whose: str) -> str | None:
    """How far this machine's clock is off, such as "6m ahead of Google's"; None up to `SKEW`, and if it is not known."""
    if skew is None or abs(skew) <= SKEW:
        return None
    return f"{format_duration(abs(skew))} {'ahead of' if skew > timedelta(0) else 'behind'} {whose}"
