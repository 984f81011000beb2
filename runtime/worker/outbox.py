"""What has ended here and waits until the queue takes it: records to settle with, and leases to give back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from runtime.errors import InfrastructureFailure
from runtime.tasks.history import Lease, Release, Settlement
from runtime.tasks.verdict import backoff, failed_instead
from runtime.values import dataclass
from runtime.worker.held import HeldLease, Holdings
from runtime.worker.services import Services

REFUSALS: Final = 2
"""After this many refusals alone, a record counts as refused for a reason of its own, whatever its store calls it."""
STUCK_AT_MOST: Final = 3
"""With this many stuck ends the store is to blame, and nothing more is begun until it takes one."""


@dataclass(slots=True)
class Stuck:
    """An end that its service refused alone, perhaps for a reason of its own."""

    ended: Settlement | Release
    announced: bool
    handed: int
    """Ends settled before the first refusal; a larger count later shows that the service takes others."""
    times: int = 0


class Outbox:
    def __init__(self, services: Services, holdings: Holdings) -> None:
        self._services = services
        self._holdings = holdings
        self.settlements: list[Settlement] = []
        self.releases: list[Release] = []
        self.retractions: list[Lease] = []
        """Leases that were announced to the store and did not start after all."""
        self.stuck: dict[str, Stuck] = {}
        """By token: ends refused alone by a service that did not say that another try may help."""
        self.to_say: dict[str, Callable[[], None]] = {}
        """By token: the line about an end, said once the end is recorded."""
        self.handed = 0
        """Ends settled in all."""
        self.released = 0
        """Tasks given back in all, besides those declined or postponed."""
        self._unstartable: dict[str, tuple[int, int]] = {}
        """By task: how often the service refused a call before its start, and `handed` at the first refusal."""

    @property
    def pending(self) -> bool:
        return bool(self.settlements or self.releases)

    @property
    def blocks_leasing(self) -> bool:
        """Whether ends must be recorded before the worker takes more."""
        return bool(self.settlements) or len(self.stuck) >= STUCK_AT_MOST

    def end(self, held: HeldLease, settlement: Settlement, say: Callable[[], None] | None = None) -> None:
        """Settle a lease; `say` is called when the end is recorded, which may take a while or come second."""
        token = held.lease.token
        self._holdings.drop(token)
        self.settlements.append(settlement)
        if say is not None:
            self.to_say[token] = say

    def release(self, release: Release) -> None:
        """Give a lease back."""
        self._holdings.drop(release.lease.token)
        self.releases.append(release)

    def postpone(self, held: HeldLease, until: datetime | None, *, alone: bool = False) -> None:
        """Give back a lease whose task never started and cannot start here now."""
        self._holdings.taken -= 1
        self.release(Release(held.lease, until, alone=alone))

    def give_back(self, held: HeldLease, wait: timedelta = timedelta()) -> None:
        """Give back a lease whose attempt never started: nothing is spent, and any worker may have it after `wait`."""
        lease = held.lease
        services = self._services
        services.metrics.task_released()
        self.released += 1
        if held.announced:
            self.retractions.append(lease)
        if lease.alone and services.leaving.reason is None:
            wait = backoff(4)
        self.postpone(held, services.clock.now() + wait if wait else None, alone=lease.alone)

    def fail_unstarted(self, held: HeldLease, problem: Exception) -> bool:
        """Record the failure of a task that alone cannot be started, and return True.

        Returns False for a refusal that another try, or another state of the service, may mend.
        """
        lease = held.lease
        if not self._is_its_own(lease.task.id, problem):
            return False
        services = self._services
        settlement = failed_instead(
            Release(lease), problem, "it could not be started", worker=services.name, now=services.clock.now()
        )
        self.end(held, settlement, partial(services.say.unrecorded, settlement.record, lease.task))
        return True

    def _is_its_own(self, task_id: str, problem: Exception) -> bool:
        """Whether a refusal is about the task: the service takes others meanwhile, and refuses this one again."""
        if not isinstance(problem, InfrastructureFailure):
            return True
        if problem.retryable:
            return False
        if len(self._unstartable) > 1_000:
            self._unstartable.clear()
        times, handed = self._unstartable.get(task_id, (0, self.handed))
        self._unstartable[task_id] = times + 1, handed
        return times >= REFUSALS and self.handed > handed
