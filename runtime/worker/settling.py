"""Hands what has ended to the queue: together, and one by one after the queue refused them together.

A queue settles many leases in one step, so one result that no store can hold would keep all the others waiting, for
ever. A result that is refused for a reason of its own is recorded as failed with that reason, and the rest is settled.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import partial
from typing import Final

from runtime import faults
from runtime.errors import InfrastructureFailure
from runtime.queues.base import Queue, Settled
from runtime.tasks.history import Lease, Release, Settlement
from runtime.tasks.model import TaskState
from runtime.tasks.verdict import backoff, failed_instead
from runtime.values import dataclass, field
from runtime.worker.leasing import Leasing
from runtime.worker.outbox import REFUSALS, Outbox, Stuck
from runtime.worker.services import Services

SETTLES_AT_ONCE: Final = 2
"""With this many calls to settle under way, further ends wait for the next call, which takes all of them together."""
SETTLING_HANGS_S: Final = 1.0
"""When the last of them has taken this long, one more may begin,"""
SETTLES_AT_MOST: Final = 8
"""up to this many."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Ends that are handed over."""

    ended: Sequence[Settlement | Release]
    retractions: Sequence[Lease] = ()
    """Leases announced to the store that did not start after all; taken back before they are released."""


@dataclass(slots=True)
class Handed:
    """What became of them."""

    settled: list[tuple[Settlement, Settled]] = field(default_factory=list)
    replaced: list[tuple[Settlement | Release, Settlement, Settled]] = field(default_factory=list)
    """Refused for a reason of its own, and recorded as failed instead."""
    dropped: list[tuple[Lease, Exception]] = field(default_factory=list)
    """Leases for which not even the failure was taken; each ends with this worker, or by itself."""
    again: list[Settlement | Release] = field(default_factory=list)
    """The service was away."""
    stuck: list[Settlement | Release] = field(default_factory=list)
    """The service refused, and did not say that again may help: it may mean everything, or this one."""
    problem: Exception | None = None
    """Why anything is `again` or `stuck`."""


class Settling:
    def __init__(self, services: Services, outbox: Outbox, leasing: Leasing) -> None:
        self._services = services
        self._outbox = outbox
        self._leasing = leasing
        self._retry_at = 0.0
        self.failures = 0
        """Calls in a row that failed."""
        self._under_way = 0
        """Calls that settle and have not returned."""
        self._last_began = 0.0
        self._stuck_at = float("inf")
        """When the stuck ends are handed over next."""
        self.counters: dict[str, dict[TaskState, int]] = {}
        """By experiment: records that this worker has committed."""
        self.succeeded = 0
        self.failed = 0

    def next_at(self) -> float:
        """Return when to hand over next; infinity if nothing waits."""
        outbox = self._outbox
        at = self._stuck_at if outbox.stuck else float("inf")
        if outbox.releases:
            at = min(at, self._retry_at)
        if outbox.settlements:
            at = min(at, self._settle_at())
        return at

    def _settle_at(self) -> float:
        if self._under_way < SETTLES_AT_ONCE:
            return self._retry_at
        if self._under_way < SETTLES_AT_MOST:
            return max(self._retry_at, self._last_began + SETTLING_HANGS_S)
        return float("inf")

    # together

    def flush(self, now: float) -> None:
        """Hand what ended to the queue, and claim the next tasks in the same step."""
        if now < self._retry_at:
            return
        services, outbox = self._services, self._outbox
        releases, outbox.releases = outbox.releases, []
        retractions, outbox.retractions = outbox.retractions, []
        if releases:
            services.offload.call(
                lambda: self._release(releases, retractions),
                lambda _, problem: self._given_back(Outgoing(releases, retractions), problem),
                awaited=True,
            )
        if outbox.settlements and now >= self._settle_at():
            settlements, outbox.settlements = outbox.settlements, []
            room = self._leasing.claim(now)
            faults.reach("worker.before_commit")
            self._under_way, self._last_began = self._under_way + 1, now
            services.offload.call(
                lambda: services.queue.settle(settlements, claim_next=room),
                lambda settled, problem: self._settled(settlements, room, settled, problem),
                awaited=True,
            )

    def _settled(
        self, settlements: list[Settlement], claimed: int, settled: Settled | None, problem: Exception | None
    ) -> None:
        self._under_way -= 1
        if settled is None:
            assert problem is not None
            self._leasing.claimed(claimed, None)
            self._not_handed(Outgoing(settlements), problem)
            return
        self.failures = 0
        faults.reach("worker.after_commit")
        self._count(settlements, settled)
        self._leasing.claimed(claimed, settled.leases)

    def _release(self, releases: Sequence[Release], retractions: Sequence[Lease]) -> None:
        # First, so that the next worker does not take it for lost.
        for lease in retractions:
            self._services.records.retract_started(lease.task, lease.token)
        self._services.queue.release(releases)

    def _given_back(self, outgoing: Outgoing, problem: Exception | None) -> None:
        if problem is None:
            self.failures = 0
        else:
            self._not_handed(outgoing, problem)

    def _not_handed(self, outgoing: Outgoing, problem: Exception) -> None:
        """Nothing is lost: it stays here, and the leases, no longer renewed, would come back by themselves."""
        if _may_pass(problem):
            self._hand_again(outgoing, problem)
        else:
            self._hand_singly(outgoing)

    def _hand_again(self, outgoing: Outgoing, problem: Exception) -> None:
        outbox = self._outbox
        outbox.settlements = [*(one for one in outgoing.ended if isinstance(one, Settlement)), *outbox.settlements]
        outbox.releases = [*(one for one in outgoing.ended if isinstance(one, Release)), *outbox.releases]
        outbox.retractions = [*outgoing.retractions, *outbox.retractions]
        self.failures += 1
        self._retry_at = time.monotonic() + min(30.0, backoff(self.failures).total_seconds())
        self._services.leaving.trouble("recording", problem)

    def _count(self, settlements: Sequence[Settlement], settled: Settled) -> None:
        """Say and count what is recorded now."""
        outbox, services, counters = self._outbox, self._services, self.counters
        outbox.handed += len(settlements)
        refused = {id(one.lease): one for one in settled.refused}
        for settlement in settlements:
            record = settlement.record
            say = outbox.to_say.pop(settlement.lease.token, None)
            second = refused.get(id(settlement.lease))
            if second is not None:
                # An attempt that was stopped for a cancel ended as that says, whichever worker has written it.
                stands = second.record is not None and second.record.state is record.state is TaskState.CANCELLED
                if stands and say is not None:
                    say()
                else:
                    services.say.refused(second)
            # A record that was found counts for the worker that committed it.
            elif record.token == settlement.lease.token:
                if say is not None:
                    say()
                self.succeeded += record.state is TaskState.SUCCEEDED
                self.failed += record.state is TaskState.FAILED
                services.metrics.task_recorded(record.state)
                counts = counters.get(record.experiment)
                if counts is None:
                    counts = counters[record.experiment] = {}
                counts[record.state] = counts.get(record.state, 0) + 1

    # one by one

    def _hand_singly(self, outgoing: Outgoing) -> None:
        """One of them may be at fault, and the others are settled meanwhile."""
        services, outbox = self._services, self._outbox
        given_up = {token for token, stuck in outbox.stuck.items() if stuck.times >= REFUSALS}
        hopeless = {token for token in given_up if outbox.handed > outbox.stuck[token].handed}
        services.offload.call(
            lambda: hand_over(
                services.queue,
                outgoing,
                worker=services.name,
                now=services.clock.now(),
                given_up=given_up,
                hopeless=hopeless,
            ),
            lambda handed, problem: self._handed_singly(outgoing, handed, problem),
            awaited=True,
        )

    def _handed_singly(self, outgoing: Outgoing, handed: Handed | None, problem: Exception | None) -> None:
        outbox, say = self._outbox, self._services.say
        if handed is None:
            assert problem is not None
            self._hand_again(outgoing, problem)
            return
        for settlement, settled in handed.settled:
            self._count([settlement], settled)
        for refused, instead, settled in handed.replaced:
            outbox.to_say[refused.lease.token] = partial(say.unrecorded, instead.record, instead.lease.task)
            self._count([instead], settled)
        for lease, refusal in handed.dropped:
            outbox.to_say.pop(lease.token, None)
            say.trouble(f"recording how `{lease.task.id}` ended", refusal)
        announced = {lease.token for lease in outgoing.retractions}
        before = outbox.stuck
        tokens = {one.lease.token for one in outgoing.ended}
        outbox.stuck = {token: stuck for token, stuck in before.items() if token not in tokens}
        for one in handed.stuck:
            token = one.lease.token
            known = before.get(token) or Stuck(one, token in announced, outbox.handed)
            known.times += 1
            outbox.stuck[token] = known
        if handed.stuck:
            times = max(stuck.times for stuck in outbox.stuck.values())
            self._stuck_at = time.monotonic() + min(30.0, backoff(times).total_seconds())
        if handed.problem is not None:
            self._services.leaving.trouble("recording", handed.problem)
        if handed.again:
            assert handed.problem is not None
            self._hand_again(_outgoing(handed.again, announced), handed.problem)
        else:
            self.failures = 0
            self._leasing.poll_now()

    def retry_stuck(self, now: float) -> None:
        if now < self._stuck_at:
            return
        self._stuck_at = float("inf")
        stuck = self._outbox.stuck
        announced = {token for token, each in stuck.items() if each.announced}
        self._hand_singly(_outgoing([each.ended for each in stuck.values()], announced))


def _outgoing(ended: Sequence[Settlement | Release], announced: Collection[str]) -> Outgoing:
    unstarted = [one.lease for one in ended if isinstance(one, Release) and one.lease.token in announced]
    return Outgoing(ended, unstarted)


def _may_pass(problem: Exception) -> bool:
    """Whether another try may help, whatever it was that was handed over."""
    return isinstance(problem, InfrastructureFailure) and problem.retryable


def hand_over(
    queue: Queue,
    outgoing: Outgoing,
    *,
    worker: str,
    now: datetime,
    given_up: Collection[str] = frozenset(),
    hopeless: Collection[str] = frozenset(),
) -> Handed:
    """Settle and release each alone.

    For tokens in `given_up` a service's refusal counts as their own fault; for those in `hopeless`, so does a refusal
    of the failure that is recorded instead.
    """
    handed = Handed()

    def try_again(one: Settlement | Release, problem: Exception, blamed: Collection[str]) -> bool:
        if _may_pass(problem):
            handed.again.append(one)
        elif isinstance(problem, InfrastructureFailure) and one.lease.token not in blamed:
            handed.stuck.append(one)
        else:
            return False
        handed.problem = problem
        return True

    def replace(one: Settlement | Release, problem: Exception) -> None:
        what = "its result could not be recorded" if isinstance(one, Settlement) else "it could not be given back"
        instead = failed_instead(one, problem, what, worker=worker, now=now)
        try:
            handed.replaced.append((one, instead, queue.settle([instead])))
        except Exception as again:
            if not try_again(one, again, hopeless):
                handed.dropped.append((one.lease, again))

    announced = {lease.token for lease in outgoing.retractions}
    for one in outgoing.ended:
        try:
            if isinstance(one, Settlement):
                handed.settled.append((one, queue.settle([one])))
                continue
            if one.lease.token in announced:
                queue.records.retract_started(one.lease.task, one.lease.token)
            queue.release([one])
        except Exception as problem:
            if not try_again(one, problem, given_up):
                replace(one, problem)
    return handed
