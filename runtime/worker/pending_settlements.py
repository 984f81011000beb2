"""Ends that wait until the queue takes them: records to settle with, and leases to give back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeAlias

from runtime.errors import InfrastructureFailure
from runtime.queues.base import SettleAnswer
from runtime.system import system
from runtime.tasks.history import Release, Settlement
from runtime.tasks.model import TaskState
from runtime.tasks.retry_policy import backoff, failed_instead
from runtime.worker.worker_context import HeldLease, WorkerContext

REFUSALS: Final = 2
"""After this many refusals alone, a record counts as refused for a reason of its own."""
DENIED_FOR_S: Final = 120.0
"""A call before the start that lacks a permission is blamed on the task only if that lasts: a new grant takes a minute or
two to hold everywhere."""
STUCK_AT_MOST: Final = 3
"""With this many stuck ends the store is to blame, and no attempt begins until it takes one."""

End: TypeAlias = Settlement | Release


@dataclass(slots=True)
class StuckSettlement:
    ended: End
    handed: int
    """Ends settled before the first refusal; a larger count later shows that the service takes others."""
    times: int = 0


class PendingSettlements:
    def __init__(self, services: WorkerContext) -> None:
        self._services = services
        self.settlements: list[Settlement] = []
        self.releases: list[Release] = []
        self.announced: set[str] = set()
        """Tokens of leases to release that were announced to the store and did not start after all."""
        self.stuck: dict[str, StuckSettlement] = {}
        """By token: ends refused alone by a service that did not say that another try may help."""
        self.to_say: dict[str, Callable[[], None]] = {}
        """By token: logs an end once it is recorded."""
        self.to_tell: list[Settlement] = []
        """Recorded ends that somebody wants to hear of."""
        self.handed = 0
        """Ends settled in all."""
        self.succeeded = self.failed = 0
        self.counters: dict[str, dict[TaskState, int]] = {}
        """By experiment: records that this worker has committed."""
        self.released = 0
        """Tasks given back in all, besides those declined or postponed."""
        self._unstartable: dict[str, tuple[int, int, float, float]] = {}
        """By task: refusals of a call before its start, `handed` at the first one, and the times of the first and the last."""

    @property
    def pending(self) -> bool:
        return bool(self.settlements or self.releases)

    @property
    def blocks_leasing(self) -> bool:
        """Whether ends must be recorded before the worker takes more."""
        return bool(self.settlements) or len(self.stuck) >= STUCK_AT_MOST

    def end(self, held: HeldLease, settlement: Settlement, say: Callable[[], None] | None = None) -> None:
        """Settle a lease; `say` is called when the end is recorded, which may take a while or come second."""
        self._services.holdings.drop(held.lease.token)
        self.settlements.append(settlement)
        if say is not None:
            self.to_say[held.lease.token] = say

    def end_unstarted(self, held: HeldLease, settlement: Settlement) -> None:
        task = None if held.lease.invalid else held.lease.task
        self.end(held, settlement, partial(self._services.say.unstarted, settlement.record, task))

    def release(self, release: Release) -> None:
        self._services.holdings.drop(release.lease.token)
        self.releases.append(release)

    def postpone(self, held: HeldLease, until: datetime | None, *, alone: bool = False) -> None:
        """Give back a lease: its task never started and cannot start here now."""
        self._services.holdings.taken -= 1
        self.release(Release(held.lease, until, alone=alone))

    def give_back(self, held: HeldLease, wait: timedelta = timedelta()) -> None:
        """Give back a lease unstarted: nothing is spent, and any worker may have it after `wait`."""
        lease = held.lease
        services = self._services
        services.metrics.task_released()
        self.released += 1
        if held.announced:
            self.announced.add(lease.token)
        if lease.alone and services.leaving.reason is None:
            wait = backoff(4)
        self.postpone(held, services.clock.now() + wait if wait else None, alone=lease.alone)

    def fail_unstarted(self, held: HeldLease, problem: Exception) -> bool:
        """Record the failure of a task that alone cannot be started, and return True.

        Returns False for a refusal that may pass with another try, or another state of the service.
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
        """Whether a refusal is about the task: the service takes other tasks, and refuses this one again."""
        if not isinstance(problem, InfrastructureFailure):
            return True
        if problem.retryable:
            return False
        if len(self._unstartable) > 1_000:
            self._unstartable.clear()
        now = system.monotonic()
        times, handed, since, last = self._unstartable.get(task_id, (0, self.handed, now, now))
        if problem.denied and now - last > DENIED_FOR_S:
            times, handed, since = 0, self.handed, now  # Nobody knows how it was in between.
        self._unstartable[task_id] = times + 1, handed, since, now
        return times >= REFUSALS and self.handed > handed and (not problem.denied or now - since > DENIED_FOR_S)

    def count(self, settlements: Sequence[Settlement], settled: SettleAnswer) -> None:
        services, counters = self._services, self.counters
        self.handed += len(settlements)
        refused = {id(one.lease): one for one in settled.refused}
        for settlement in settlements:
            record = settlement.record
            say = self.to_say.pop(settlement.lease.token, None)
            second = refused.get(id(settlement.lease))
            if second is not None:
                # An attempt that was stopped for a cancel ended as cancelled, even if another worker has recorded that.
                stands = second.record is not None and second.record.state is record.state is TaskState.CANCELLED
                if stands and say is not None:
                    say()
                else:
                    services.say.refused(second)
            # An existing record counts for the worker that committed it.
            elif record.token == settlement.lease.token:
                if say is not None:
                    say()
                if settlement.lease.task.notify:
                    self.to_tell.append(settlement)
                self.succeeded += record.state is TaskState.SUCCEEDED
                self.failed += record.state is TaskState.FAILED
                services.metrics.task_recorded(record.state)
                counts = counters.get(record.experiment)
                if counts is None:
                    counts = counters[record.experiment] = {}
                counts[record.state] = counts.get(record.state, 0) + 1
