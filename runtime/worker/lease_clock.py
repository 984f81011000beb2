"""Which leases are due for renewal, and which count as lost because none was confirmed for their whole length.

Bookkeeping only: the worker makes the calls. Boot time throughout, so that a suspended machine finds out.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from runtime.clock import Clock


class Heartbeat:
    """The confirmation times of the leases a worker holds, by token."""

    def __init__(self, ttl: timedelta, clock: Clock) -> None:
        self.ttl = ttl
        self._length = ttl.total_seconds()
        self._clock = clock
        self._confirmed: dict[str, float] = {}
        self._asked_at = float("-inf")

    def began(self, token: str) -> None:
        self._confirmed[token] = self._clock.boottime()

    def ended(self, token: str) -> None:
        self._confirmed.pop(token, None)

    def due_in(self) -> float:
        """Seconds until the next renewal: a third of the length after the last was asked for."""
        if not self._confirmed:
            return self._length / 3
        return max(0.0, self._asked_at + self._length / 3 - self._clock.boottime())

    def asked(self) -> float:
        """A renewal of all leases is on its way; returns when it was asked, for `confirmed`."""
        self._asked_at = self._clock.boottime()
        return self._asked_at

    def confirmed(self, tokens: Iterable[str], asked_at: float) -> None:
        """They hold for the whole length from when that was asked, not from when the answer came."""
        for token in tokens:
            if token in self._confirmed:
                self._confirmed[token] = asked_at

    def holds(self, token: str) -> bool:
        """Whether the lease was confirmed within its length; if not, it counts as lost."""
        confirmed = self._confirmed.get(token)
        return confirmed is not None and self._clock.boottime() - confirmed < self._length
