"""When the leases of a worker are renewed next, and which of them were not confirmed for their whole length.

Bookkeeping only: `upkeep` asks the queue to renew. Boot time throughout, so that a machine that was suspended finds
its leases lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from runtime.clock import Clock


class LeaseClock:
    """The confirmation times of the leases a worker holds, by token."""

    def __init__(self, ttl: timedelta, clock: Clock) -> None:
        self._length = ttl.total_seconds()
        self._clock = clock
        self._confirmed: dict[str, float] = {}
        self._asked_at = float("-inf")

    def began(self, token: str) -> None:
        self._confirmed[token] = self._clock.boottime()

    def ended(self, token: str) -> None:
        self._confirmed.pop(token, None)

    def due_in(self) -> float:
        """Return the seconds until the next renewal, which is due a third of the length after the last was asked for."""
        if not self._confirmed:
            return self._length / 3
        return max(0.0, self._asked_at + self._length / 3 - self._clock.boottime())

    def asked(self) -> float:
        """Note that a renewal of all leases is under way; returns the time that `confirmed` needs."""
        self._asked_at = self._clock.boottime()
        return self._asked_at

    def confirmed(self, tokens: Iterable[str], asked_at: float) -> None:
        """Note that these leases hold for their whole length from when the renewal was asked for, not answered."""
        for token in tokens:
            if token in self._confirmed:
                self._confirmed[token] = asked_at

    def holds(self, token: str) -> bool:
        """Return whether the lease was confirmed within its length; if not, it counts as lost."""
        confirmed = self._confirmed.get(token)
        return confirmed is not None and self._clock.boottime() - confirmed < self._length
