"""The two clocks: wall time for people and plans, boot time for leases.

Boot time goes on through a suspend, never jumps, and starts again with each boot; each boot has an id.
Nothing is decided by comparing wall times of two machines; a large difference is reported all the same.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, Protocol

from runtime.system import system
from runtime.units import format_duration

SKEW: Final = timedelta(seconds=30)
"""Synchronized clocks agree far better; a larger difference is reported."""


class Clock(Protocol):
    def now(self) -> datetime:
        """Aware, in UTC."""

    def boottime(self) -> float:
        """Seconds since this boot, suspends included."""


class SystemClock:
    def now(self) -> datetime:
        return system.now()

    def boottime(self) -> float:
        return system.boottime()


def machine_id(boot: str | None = None) -> str:
    """Host name and boot: two losses on machines that differ in both were on different hosts, containers or not."""
    return f"{system.node()}/{boot or system.boot_id()}"


def describe_skew(skew: timedelta | None, whose: str) -> str | None:
    """How far this machine's clock is off, such as "6m ahead of Google's"; None up to `SKEW`, and if it is not known."""
    if skew is None or abs(skew) <= SKEW:
        return None
    return f"{format_duration(abs(skew))} {'ahead of' if skew > timedelta(0) else 'behind'} {whose}"
