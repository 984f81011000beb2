"""What a worker does between the decision to leave and its end: nothing new starts, and what runs is asked to end."""

from __future__ import annotations

from runtime.reasons import EndReason
from runtime.worker.dispatch import Dispatch
from runtime.worker.leasing import Leasing
from runtime.worker.outbox import REFUSALS, Outbox
from runtime.worker.services import Services
from runtime.worker.settling import Settling


class Drain:
    def __init__(
        self, services: Services, outbox: Outbox, dispatch: Dispatch, leasing: Leasing, settling: Settling
    ) -> None:
        self._services = services
        self._outbox = outbox
        self._dispatch = dispatch
        self._leasing = leasing
        self._settling = settling
        self._begun = self._hurried = False
        self._kill_at = float("inf")
        """When attempts are killed."""
        self._give_up_at = float("inf")
        """When the worker leaves without the ends that cannot be recorded."""

    def advance(self, now: float) -> None:
        """Begin once the worker is to leave; end the grace at the second request."""
        leaving = self._services.leaving
        if leaving.reason is None:
            return
        if not self._begun:
            self._begun = True
            self._begin(now, leaving.reason)
        if leaving.asked > 1 and not self._hurried:
            self._hurried = True
            self._kill_at = 0.0

    def _begin(self, now: float, reason: str) -> None:
        """Return what has not begun, and ask what runs to checkpoint and end."""
        running = 0
        self._dispatch.recall()
        for held in list(self._services.holdings.by_token.values()):
            if held.sent:
                running += 1
                held.stop_reason = EndReason.PREEMPTED
                self._services.pool.ask_to_stop(held.lease.token, EndReason.PREEMPTED)
            else:
                self._outbox.give_back(held)
        grace_s = self._services.options.grace.total_seconds()
        self._kill_at = self._give_up_at = now + grace_s
        self._services.say.draining(reason, running, grace_s if self._services.leaving.asked else 0.0)

    def next_at(self, now: float) -> float:
        return min(now + 0.5, self._kill_at) if self._services.holdings.by_token else now + 0.5

    def is_over(self, now: float) -> bool:
        """Return whether all attempts have ended and all of them are handed over; kill what outlives the grace."""
        services, outbox, by_token = self._services, self._outbox, self._services.holdings.by_token
        asked = services.leaving.asked
        if by_token and now >= self._kill_at:
            self._kill_at = float("inf")
            services.say.killing(len(by_token))
            for held in by_token.values():
                self._services.pool.kill(held.lease.token, held.stop_reason or EndReason.PREEMPTED)
        if by_token or self._leasing.under_way or services.offload.awaited:
            return False
        if outbox.pending:
            asked_for_long = asked > 0 and self._settling.failures > 0 and now >= self._give_up_at
            if asked > 2 or asked_for_long:
                services.say.unhanded(len(outbox.settlements) + len(outbox.releases) + len(outbox.stuck))
                return True
            self._settling.flush(now)
            return False
        if outbox.stuck:
            if asked < 3 and any(stuck.times <= REFUSALS for stuck in outbox.stuck.values()):
                return False
            services.say.unhanded(len(outbox.stuck))
        return True
