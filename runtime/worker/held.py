"""The leases that a worker holds, from when it takes a task until the task's end waits to be recorded."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final

from runtime.clock import Clock
from runtime.reasons import EndReason
from runtime.tasks.history import History, Lease
from runtime.values import dataclass
from runtime.worker.lease_clock import LeaseClock

_NO_HISTORY: Final = History()


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease on its way through the worker, with what is known of its attempt."""

    lease: Lease
    history: History = _NO_HISTORY
    taken_at: float = 0.0
    slot: int = -1
    sent: bool = False
    announced: bool = False
    """The store knows that the attempt starts."""
    stop_reason: EndReason | None = None
    log_url: str | None = None
    logged_bytes: int = 0
    """Bytes of the attempt's log that are in the store."""
    logged_at: float = 0.0
    crowded: bool = False
    """Another attempt ran beside this one."""
    apart: bool = False
    """The task is a suspect, and no other suspect has run beside it."""
    fenced: bool = False
    output_dir: str = ""


class Holdings:
    """All leases that the worker holds."""

    def __init__(self, ttl: timedelta, clock: Clock) -> None:
        self.by_token: dict[str, HeldLease] = {}
        self.on_trial: dict[str, float] = {}
        """By token: when a suspect was started that has not ended."""
        self.lease_clock = LeaseClock(ttl, clock)
        self.taken = 0
        """Tasks taken in all, less those that went back unstarted."""
        self.busy_at = time.monotonic()
        """When there was last something to do."""

    def drop(self, token: str) -> None:
        """Hold this lease no longer; harmless if it is not held."""
        self.by_token.pop(token, None)
        self.on_trial.pop(token, None)
        self.lease_clock.ended(token)

    def snapshots(self, *, besides: HeldLease | None = None) -> set[str]:
        """The snapshots that held tasks are bound to."""
        named = (held.lease.task.snapshot for held in self.by_token.values() if held is not besides)
        return {snapshot for snapshot in named if snapshot is not None}
