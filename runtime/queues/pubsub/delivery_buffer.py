"""Deliveries that this worker holds, by the step that each waits for, and how many more to pull."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

from runtime.clock import Clock
from runtime.queues.pubsub.message import Delivery, DeliveryState
from runtime.system import system
from runtime.tasks.model import new_tokens

UNCLAIMED_S: Final = 3.0
"""A delivery that was pulled ahead of need and not taken in this time goes back."""
LOOK_EVERY_S: Final = 0.5
"""How often the held deliveries are looked at, if none is due before."""
LOOK_LATER_EVERY_S: Final = 2.0
"""The same while all of them wait for their time and only their leases matter."""
MAX_LATER: Final = 10_000
MAX_LATER_BYTES: Final = 64 * 1024 * 1024
EXAMINED_IN: Final = timedelta(milliseconds=20)
LOOK_AHEAD_S: Final = 0.25
MAX_LOOK_AHEAD: Final = 1000


class DeliveryBuffer:
    """Methods may be called from any thread: most wait for `changed`, the others are called with it held.

    It holds the deliveries that the worker asks for, and some that it is about to ask for.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.changed = system.condition()
        """Held for every change, and notified when a delivery is ready or one is asked for."""
        self._by_key: dict[tuple[str, int], Delivery] = {}
        """All that is not done, handed out or not, by task and generation."""
        self.new: dict[Delivery, None] = {}
        """Being examined, in the order in which they came."""
        self.ready: deque[Delivery] = deque()
        self._unrenewed: deque[tuple[float, list[Delivery]]] = deque()
        """Pulled within the last second: when to renew them, by the boot clock."""
        self._later: list[tuple[float, int, Delivery]] = []
        self._later_bytes = 0
        self._order = itertools.count()
        self._tokens = new_tokens()
        self._running: frozenset[str] = frozenset()
        self.wanted = 0
        """Asked for and not had."""
        self._settled: deque[tuple[float, int]] = deque()
        self.widened = 0
        """The least that a pull asks for, while only tasks that are due later come."""
        self.pulling = False
        self.pulls = 0
        """How many pulls have ended."""

    def shortfall(self) -> int:
        """How many to pull now; called with `changed` held."""
        ready, ahead = len(self.ready), self._prefetch()
        missing = self.wanted + ahead - ready
        if missing <= 0 or (self.wanted <= ready and 4 * missing <= 3 * ahead):
            return 0
        return max(missing, self.widened)

    def _prefetch(self) -> int:
        """How many are likely to finish in the next quarter of a second, if tasks have been that short for two."""
        now = self._clock.boottime()
        while self._settled and now - self._settled[0][0] > 2 * LOOK_AHEAD_S:
            self._settled.popleft()
        recent = sum(n for at, n in self._settled if now - at <= LOOK_AHEAD_S)
        earlier = sum(n for _, n in self._settled) - recent
        return min(MAX_LOOK_AHEAD, recent) if earlier else 0

    def count_settled(self, n: int) -> None:
        with self.changed:
            self._settled.append((self._clock.boottime(), n))

    def add(self, delivery: Delivery, *, ttl_s: float) -> bool:
        """Hold a delivery; False if its task is here already, delivered again after an outage or published twice."""
        with self.changed:
            if self._absorb(delivery, ttl_s):
                return False
            self._by_key[delivery.key] = delivery
            self.new[delivery] = None
            return True

    def _absorb(self, delivery: Delivery, ttl_s: float) -> bool:
        old = self._by_key.get(delivery.key)
        if old is None:
            return False
        silent_s = self._clock.boottime() - old.since
        in_use = old.token in self._running or silent_s < max(90.0, 3 * ttl_s)
        if old.holding is DeliveryState.LEASED and not in_use:
            # Its holder gave it up silently; nobody would ever renew or settle it.
            old.lost = True
            self.let_go(old)
            return False
        # With exactly-once delivery only the newest ack id of a message counts.
        old.ack_ids |= delivery.ack_ids
        old.attempt = max(old.attempt, delivery.attempt)
        old.confirmed_until = max(old.confirmed_until, delivery.confirmed_until)
        old.lost = False
        return True

    def mark_running(self, tokens: Iterable[str]) -> None:
        self._running = frozenset(tokens)

    def hand_out(self, n: int) -> list[Delivery]:
        """Up to `n` that are ready, each under a token of its own."""
        now = self._clock.boottime()
        taken: list[Delivery] = []
        while self.ready and len(taken) < n:
            delivery = self.ready.popleft()
            if delivery.confirmed_until <= now:
                self.let_go(delivery)
                continue
            delivery.holding = DeliveryState.LEASED
            delivery.token = next(self._tokens)
            delivery.since = now
            taken.append(delivery)
        return taken

    def let_go(self, delivery: Delivery) -> None:
        delivery.holding = DeliveryState.DONE
        if self._by_key.get(delivery.key) is delivery:
            del self._by_key[delivery.key]

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        """Leave them to the service, which delivers them again after their deadlines."""
        with self.changed:
            for delivery in deliveries:
                self.let_go(delivery)

    def finish(self, deliveries: Iterable[Delivery]) -> list[str]:
        """Let go of unfinished deliveries; returns the ids to acknowledge."""
        ack_ids: list[str] = []
        with self.changed:
            for delivery in deliveries:
                if delivery.holding is not DeliveryState.DONE:
                    self.let_go(delivery)
                    ack_ids += delivery.ack_ids.values()
        return ack_ids

    def delist(self, deliveries: Iterable[Delivery]) -> None:
        """No longer take another delivery of their tasks for a second one."""
        with self.changed:
            for delivery in deliveries:
                if self._by_key.get(delivery.key) is delivery:
                    del self._by_key[delivery.key]

    def relist(self, deliveries: Iterable[Delivery]) -> None:
        with self.changed:
            for delivery in deliveries:
                self._by_key.setdefault(delivery.key, delivery)

    def list_waiting(self) -> list[Delivery]:
        """All deliveries that are not handed out."""
        with self.changed:
            return [*self.new, *self.ready, *(one for _, _, one in self._later)]

    def forget_waiting(self) -> None:
        """Drop all deliveries that are not handed out."""
        with self.changed:
            waiting = self.list_waiting()
            self.ready.clear()
            self._later.clear()
            self._later_bytes = 0
            self.drop(waiting)

    def examined(self, deliveries: Iterable[Delivery]) -> None:
        with self.changed:
            for delivery in deliveries:
                self.new.pop(delivery, None)

    def make_ready(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Have them handed out from now on, except any that a purge dropped meanwhile; returns the others."""
        with self.changed:
            ready = [one for one in deliveries if one.holding is DeliveryState.HELD]
            since = self._clock.boottime()
            for delivery in ready:
                delivery.since = since
            self.ready.extend(ready)
            if ready:
                self.changed.notify_all()
            return ready

    def keep_for_later(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Keep deliveries that are due later; returns the surplus, for lack of room."""
        parked = []
        with self.changed:
            for delivery in deliveries:
                due = delivery.task.not_before
                assert due is not None
                if len(self._later) >= MAX_LATER or self._later_bytes + delivery.size > MAX_LATER_BYTES:
                    parked.append(delivery)
                    continue
                heapq.heappush(self._later, (due.timestamp(), next(self._order), delivery))
                self._later_bytes += delivery.size
        return parked

    def renew_at(self, at: float, deliveries: list[Delivery]) -> None:
        with self.changed:
            self._unrenewed.append((at, deliveries))

    def pop_unrenewed(self, now: float) -> list[Delivery]:
        fresh: list[Delivery] = []
        while self._unrenewed and self._unrenewed[0][0] <= now:
            fresh += [one for one in self._unrenewed.popleft()[1] if one.holding is not DeliveryState.DONE]
        return fresh

    def pop_unclaimed(self, now: float) -> list[Delivery]:
        unclaimed = []
        while self.ready and now - self.ready[0].since > UNCLAIMED_S:
            unclaimed.append(self.ready.popleft())
        return unclaimed

    def pop_due(self) -> list[Delivery]:
        due: list[Delivery] = []
        moment = self._clock.now().timestamp()
        while self._later and self._later[0][0] <= moment:
            delivery = heapq.heappop(self._later)[2]
            self._later_bytes -= delivery.size
            if delivery.confirmed_until <= self._clock.boottime():
                self.let_go(delivery)
                continue
            self.new[delivery] = None
            due.append(delivery)
        return due

    def next_due(self) -> timedelta | None:
        """The time until one can be handed out; None if nothing waits here."""
        with self.changed:
            if self.ready:
                return timedelta()
            if self.new:
                return EXAMINED_IN
            if not self._later:
                return None
            return timedelta(seconds=max(0.0, self._later[0][0] - self._clock.now().timestamp()))

    def next_look_s(self) -> float | None:
        """Seconds in which no delivery needs to be renewed or examined; None if nothing is held."""
        with self.changed:
            is_busy = self.ready or self.new or self._unrenewed
            if not (is_busy or self._later):
                return None
            every_s = LOOK_EVERY_S if is_busy else LOOK_LATER_EVERY_S
            next_due = self._later[0][0] - self._clock.now().timestamp() if self._later else every_s
            return min(every_s, max(0.0, next_due))
