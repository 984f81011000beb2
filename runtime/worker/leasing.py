"""When a worker asks for tasks, and for how many; and when it leaves for lack of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from runtime.queues.base import Outlook
from runtime.system import system
from runtime.tasks.history import Lease
from runtime.tasks.retry_policy import backoff
from runtime.worker.admission import Admission
from runtime.worker.control import ControlReader
from runtime.worker.dispatch import Dispatch
from runtime.worker.pending_settlements import PendingSettlements
from runtime.worker.worker_context import WorkerContext

DUE_SOON: Final = timedelta(seconds=60)
"""A delayed task that is due within this time keeps an idle worker."""
WOKEN_LOOK_S: Final = 5.0
"""How often an idle worker looks at a remote queue that wakes it: for pauses, outages and its own idle time-out."""


class Leasing:
    def __init__(
        self,
        services: WorkerContext,
        outbox: PendingSettlements,
        orders: ControlReader,
        dispatch: Dispatch,
        preparing: Admission,
    ) -> None:
        self._services = services
        self._outbox = outbox
        self._orders = orders
        self._dispatch = dispatch
        self._preparing = preparing
        self.under_way = False
        """Whether a call for leases has not returned."""
        self._claiming = 0
        """Leases asked for while settling, without an answer yet."""
        self._poll_at = 0.0
        self._failures = 0
        """Calls in a row that failed."""
        self._seen_any = False
        self._countdown_of = 0.0
        """`busy_at` when the worker last announced that it will leave."""

    def room(self) -> int:
        """Return how many more tasks to hold."""
        if self._orders.paused:
            return 0
        most = self._services.options.max_tasks
        left = 1 << 30 if most is None else most - self._services.holdings.taken
        dispatch = self._dispatch
        # Waiting suspects take no room.
        held = len(self._services.holdings.by_token) - len(dispatch.suspects.waiting)
        held -= self._preparing.furnishing.count_aside()
        return min(left, len(self._services.slots) + dispatch.look_ahead() - held) - self._claiming

    def next_at(self) -> float | None:
        """Return when to lease next; None without room, while an answer is awaited, or if ends must be recorded first."""
        if self.under_way or self._outbox.blocks_leasing or self.room() <= 0:
            return None
        return self._earliest

    @property
    def _earliest(self) -> float:
        return max(self._poll_at, self._dispatch.pause_until, self._preparing.furnishing.slow_until)

    def poll_now(self) -> None:
        """Ask the queue as soon as the worker has room, even after an empty answer."""
        self._poll_at = 0.0

    def fetch(self, now: float) -> None:
        """Lease as many tasks as the worker has room for; leave after `max_tasks`, or for idleness."""
        services, holdings = self._services, self._services.holdings
        most, taken = services.options.max_tasks, holdings.taken
        nothing_left = not (holdings.by_token or self.under_way or self._outbox.settlements)
        if most is not None and taken >= most and nothing_left:
            services.leaving.decide(f"took {taken} task{'' if taken == 1 else 's'}")
            return
        if not self._orders.known:
            self._orders.wait(now)
            return
        self._preparing.furnishing.leave_if_in_vain(now)
        if self.under_way or now < self._earliest or self._outbox.blocks_leasing:
            return
        room = self.room()
        if room <= 0:
            return
        self.under_way = True
        services.offload.call(
            lambda: services.queue.lease(room, worker=services.name, ttl=services.options.lease_time), self._fetched
        )

    def _fetched(self, leases: list[Lease] | None, problem: Exception | None) -> None:
        self.under_way = False
        now = system.monotonic()
        if problem is not None:
            self._services.leaving.trouble("leasing", problem)
            self._failures += 1
            self._poll_at = now + min(30.0, backoff(self._failures).total_seconds())
            return
        self._failures = 0
        if leases:
            self._poll_at = 0.0
            self._seen_any = True
            self._preparing.take(leases, now)
            return
        self._poll_at = now + self._idle_wait(now)

    def _idle_wait(self, now: float) -> float:
        """Return the seconds until the next look after an empty answer, and decide whether to leave."""
        services, holdings = self._services, self._services.holdings
        try:
            outlook = services.queue.outlook()
        except Exception as problem:
            services.say.trouble("asking what is due", problem)
            outlook = Outlook()
        wakes, remote = services.queue_fd is not None, services.queue.traits.remote
        wait = WOKEN_LOOK_S if wakes and remote else 1.0 if wakes or remote else 0.05
        if outlook.next_due is not None:
            # If the queue is paused, a due task does not come; that is no reason to spin.
            wait = min(wait, max(outlook.next_due.total_seconds(), 0.02) + 0.001)
        expected = outlook.suspect_leases or (outlook.next_due is not None and outlook.next_due < DUE_SOON)
        if holdings.by_token or expected or services.offload.awaited:
            holdings.busy_at = now
            return wait
        timeout = services.options.idle_time
        if timeout is None or (services.options.wait_for_first and not self._seen_any):
            return wait
        # This look found nothing, nor did the look before the whole time-out; a task in between would have moved
        # `busy_at`.
        left = holdings.busy_at + timeout.total_seconds() - now
        if left <= 0:
            services.leaving.decide(f"idle for {timeout.total_seconds():g} s")
        elif self._countdown_of != holdings.busy_at:
            self._countdown_of = holdings.busy_at
            services.say.idle(left)
        return min(wait, max(left, 0.0))

    # claiming in the step that settles

    def claim(self, now: float) -> int:
        """Return how many leases to ask for while settling; `claimed` must follow."""
        not_before = max(self._dispatch.pause_until, self._preparing.furnishing.slow_until)
        if self._services.leaving.reason is not None or now < not_before or self.under_way:
            return 0
        room = max(0, self.room())
        self._claiming += room
        return room

    def claimed(self, asked: int, leases: Sequence[Lease] | None) -> None:
        """Take the leases of a claim; None if the call failed."""
        self._claiming -= asked
        if leases:
            self._seen_any = True
            self._preparing.take(leases, system.monotonic())
        elif leases is not None and not self._services.holdings.by_token:
            self._poll_at = 0.0
