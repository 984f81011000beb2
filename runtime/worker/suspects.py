"""Tasks that may have ended their workers: each waits for a moment when nothing else runs, within its patience."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from runtime.reasons import EndReason
from runtime.tasks.verdict import ALONE_FOR
from runtime.worker.held import HeldLease, Holdings

ALONE_PATIENCE_S: Final = 60.0
"""How long a suspect waits here until nothing else runs; then it gets the next slot, beside whatever else runs."""


class Suspects:
    def __init__(self, holdings: Holdings, most: int) -> None:
        """`most` suspects wait here at a time."""
        self._holdings = holdings
        self._most = most
        self.waiting: deque[HeldLease] = deque()
        self._waits_since: dict[str, float] = {}
        """By task: since when a suspect has waited, over all its leases here."""
        self._trust = 1
        """Suspects that may run at a time: one more with each that succeeds, one again after a loss."""

    def add(self, held: HeldLease) -> bool:
        """Have a suspect wait; returns False if too many wait here already."""
        task_id = held.lease.task.id
        if task_id not in self._waits_since and len(self._waits_since) > 1_000:
            self._waits_since.clear()
        self._waits_since.setdefault(task_id, time.monotonic())
        if len(self.waiting) >= self._most:
            return False
        self.waiting.append(held)
        return True

    def start_next(self, now: float) -> HeldLease:
        """Take the first out of the line; it is on trial from now on."""
        held = self.waiting.popleft()
        on_trial = self._holdings.on_trial
        self._waits_since.pop(held.lease.task.id, None)
        held.apart = not self._unproven(now)
        for token in on_trial:
            self._holdings.by_token[token].apart = False
        on_trial[held.lease.token] = now
        return held

    def ended(self, token: str, reason: EndReason) -> None:
        """Trust more suspects after a success of one, and only one after any loss."""
        if self._holdings.on_trial.pop(token, None) is not None and reason is EndReason.SUCCEEDED:
            self._trust += 1
        if reason is EndReason.LOST:
            self._trust = 1

    def may_try(self, now: float) -> bool:
        return self._unproven(now) < self._trust

    def _unproven(self, now: float) -> int:
        """The number of suspects that run and have not yet proved themselves."""
        return sum(now - began < ALONE_FOR.total_seconds() for began in self._holdings.on_trial.values())

    def has_waited(self, held: HeldLease, now: float) -> bool:
        return now - self._waits_since.get(held.lease.task.id, now) >= ALONE_PATIENCE_S

    def overdue(self, now: float, margin_s: float) -> list[HeldLease]:
        """Those that could not start within their patience and may find a slot elsewhere; here they keep their place."""
        return [held for held in self.waiting if now - held.taken_at > ALONE_PATIENCE_S + margin_s]
