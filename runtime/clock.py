"""The two clocks: wall time for people and plans, boot time for leases.

Boot time goes on through a suspend, never jumps, and starts again with each boot, whose id tells one from another.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol


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
    """What names this boot of this kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"booted-{round(time.time() - time.clock_gettime(_BOOT_CLOCK))}"
