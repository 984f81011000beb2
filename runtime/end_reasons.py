"""Why an attempt or a job ended, as one enum on every backend, and which budget pays for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Budget(StrEnum):
    """The budget that a retry after an end reason is charged to."""

    FAILURES = "failures"
    PREEMPTIONS = "preemptions"
    CAPACITY = "capacity"
    NONE = "none"
    """Free: it may be tried again for ever."""
    NEVER = "never"
    """Not tried again automatically."""


class EndReason(StrEnum):
    """Why an attempt ended; `budget` decides who pays for the next one."""

    SUCCEEDED = "succeeded"
    APP_FAILED = "app_failed"
    """The code raised, or exited with a code other than 0, or died of a signal of its own."""
    OOM = "oom"
    """Killed for memory; needs evidence (a cgroup's counter or a resident size over the limit)."""
    DISK = "disk"
    """Wrote more to the disk of its machine than its limit."""
    PREEMPTED = "preempted"
    """The machine or the worker was asked to leave; the attempt was released."""
    NODE_FAILED = "node_failed"
    TIMEOUT = "timeout"
    IDLE = "idle"
    NO_CAPACITY = "no_capacity"
    QUOTA = "quota"
    SETUP_FAILED = "setup_failed"
    """The attempt could not be prepared: environment, snapshot, disk."""
    IMAGE_FAILED = "image_failed"
    CONFIG_INVALID = "config_invalid"
    """Malformed, unknown, or called with arguments its signature refuses; again would not help."""
    SIBLING_FAILED = "sibling_failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"
    """The worker or host vanished and left no word of how the attempt ended."""
    DUPLICATE = "duplicate"

    @property
    def budget(self) -> Budget:
        return _BUDGETS[self]


_BUDGETS = {
    EndReason.SUCCEEDED: Budget.NEVER,
    EndReason.APP_FAILED: Budget.FAILURES,
    EndReason.OOM: Budget.FAILURES,
    EndReason.DISK: Budget.FAILURES,
    EndReason.TIMEOUT: Budget.FAILURES,
    EndReason.IDLE: Budget.FAILURES,
    EndReason.SETUP_FAILED: Budget.FAILURES,
    EndReason.SIBLING_FAILED: Budget.NONE,
    EndReason.PREEMPTED: Budget.PREEMPTIONS,
    EndReason.NODE_FAILED: Budget.PREEMPTIONS,
    EndReason.LOST: Budget.PREEMPTIONS,
    EndReason.NO_CAPACITY: Budget.CAPACITY,
    EndReason.QUOTA: Budget.CAPACITY,
    EndReason.IMAGE_FAILED: Budget.NEVER,
    EndReason.CONFIG_INVALID: Budget.NEVER,
    EndReason.CANCELLED: Budget.NEVER,
    EndReason.EXPIRED: Budget.NEVER,
    EndReason.DUPLICATE: Budget.NEVER,
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why something waits, failed or stands where it does."""

    sentence: str
    evidence: tuple[str, ...] = ()
    """Facts, a line each, with their source."""
    hint: str | None = None
    """The next step: a command, or what to change."""
