"""How many deliveries to pull: those that the worker asks for, and those that it is about to ask for."""

from __future__ import annotations

from collections import deque
from typing import Final

from runtime.clock import Clock

LOOK_AHEAD_S: Final = 0.25
MAX_LOOK_AHEAD: Final = 1000


class Demand:
    """The caller holds the lock of what is held here while it calls."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.wanted = 0
        """Asked for and not had."""
        self._settled: deque[tuple[float, int]] = deque()
        self.widened = 0
        """The least that a pull asks for, while only tasks that are due later come."""
        self.pulling = False
        self.pulls = 0
        """How many pulls have ended."""

    def shortfall(self, ready: int) -> int:
        """How many to pull now."""
        ahead = self._look_ahead()
        missing = self.wanted + ahead - ready
        if missing <= 0 or (self.wanted <= ready and 4 * missing <= 3 * ahead):
            return 0
        return max(missing, self.widened)

    def _look_ahead(self) -> int:
        """What is likely to be finished in the next quarter of a second, if tasks have been that short for two."""
        now = self._clock.boottime()
        while self._settled and now - self._settled[0][0] > 2 * LOOK_AHEAD_S:
            self._settled.popleft()
        recent = sum(n for at, n in self._settled if now - at <= LOOK_AHEAD_S)
        earlier = sum(n for _, n in self._settled) - recent
        return min(MAX_LOOK_AHEAD, recent) if earlier else 0

    def say_settled(self, n: int) -> None:
        self._settled.append((self._clock.boottime(), n))
