"""The leases that a worker holds, from when it takes a task until the task's end waits to be recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from runtime.clock import Clock
from runtime.reasons import EndReason
from runtime.tasks.history import History, Lease
from runtime.values import dataclass

_NO_HISTORY: Final = History()
_LOST: Final = float("-inf")


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease on its way through the worker, with the state of its attempt."""

    lease: Lease
    history: History = _NO_HISTORY
    taken_at: float = 0.0
    confirmed_at: float = _LOST
    """Boot time from which the lease holds for its whole length."""
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
    """The leases by token. Times of confirmation are boot time, so a machine that was suspended finds its leases lost."""

    def __init__(self, ttl: timedelta, clock: Clock) -> None:
        self.by_token: dict[str, HeldLease] = {}
        self.running: list[str] = []
        """Tokens of the attempts that run, one for each busy slot."""
        self.on_trial: dict[str, float] = {}
        """By token: the start of each suspect that has not ended."""
        self.length_s = ttl.total_seconds()
        self.clock = clock
        self.declined: dict[str, str] = {}
        """By task: why this worker cannot hold the task."""
        self.taken = 0
        """Tasks taken in all, less the tasks that went back unstarted."""
        self.busy_at = time.monotonic()
        """The last time with something to do."""

    def take(self, lease: Lease, now: float, confirmed_at: float) -> HeldLease:
        held = self.by_token[lease.token] = HeldLease(lease, taken_at=now, confirmed_at=confirmed_at)
        return held

    def drop(self, token: str) -> None:
        """Hold this lease no longer; harmless if it is not held."""
        self.by_token.pop(token, None)
        self.on_trial.pop(token, None)

    def confirm(self, leases: Sequence[Lease], lost: Sequence[Lease], asked_at: float) -> None:
        """Note a renewal's answer; renewed leases hold for their whole length from when it was asked for, not answered."""
        gone = {lease.token for lease in lost}
        for lease in leases:
            held = self.by_token.get(lease.token)
            if held is not None and held.confirmed_at != _LOST:
                held.confirmed_at = _LOST if lease.token in gone else asked_at

    def holds(self, held: HeldLease) -> bool:
        """Return whether the lease was confirmed within its length; if not, it counts as lost."""
        return self.clock.boottime() - held.confirmed_at < self.length_s

    def snapshots(self, *, besides: HeldLease | None = None) -> set[str]:
        """Return the snapshots that held tasks are bound to."""
        named = (held.lease.task.snapshot for held in self.by_token.values() if held is not besides)
        return {snapshot for snapshot in named if snapshot is not None}
