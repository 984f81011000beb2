"""Hands ends to the queue: together, and one by one after the queue refused them together.

A queue settles many leases in one step, so one result that no store can hold would keep all the others waiting for ever.
A result that is refused for a reason of its own is recorded as failed with that reason, and the others are settled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from runtime import faults
from runtime.errors import InfrastructureFailure, may_pass
from runtime.queues.base import SettleAnswer
from runtime.system import system
from runtime.tasks.history import Lease, Release, Settlement
from runtime.tasks.retry_policy import backoff, failed_instead
from runtime.worker.leasing import Leasing
from runtime.worker.notifying import write_ahead
from runtime.worker.pending_settlements import REFUSALS, End, PendingSettlements, StuckSettlement
from runtime.worker.worker_context import WorkerContext

SETTLES_AT_ONCE: Final = 2
"""With this many calls to settle under way, further ends wait for the next call, which takes all of them together."""
SETTLING_HANGS_S: Final = 1.0
"""When the last of these calls has taken this long, one more may begin,"""
SETTLES_AT_MOST: Final = 8
"""up to this many."""


@dataclass(slots=True)
class SettleResults:
    """The answers to ends that were handed over one by one."""

    settled: list[tuple[Settlement, SettleAnswer]] = field(default_factory=list)
    replaced: list[tuple[End, Settlement, SettleAnswer]] = field(default_factory=list)
    """Ends refused for a reason of their own, and recorded as failed instead."""
    dropped: list[tuple[Lease, Exception]] = field(default_factory=list)
    """Leases whose failure was refused too; each ends with this worker, or by itself."""
    again: list[End] = field(default_factory=list)
    """Ends that met a service that was away."""
    stuck: list[End] = field(default_factory=list)
    """Ends that the service refused without a hint that another try may help: it may refuse everything, or this end."""
    problem: Exception | None = None
    """Why anything is `again` or `stuck`."""


class Settler:
    def __init__(self, services: WorkerContext, outbox: PendingSettlements, leasing: Leasing) -> None:
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
        self._singly: set[str] = set()
        """Tokens of ends that are being handed over one by one."""

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
        if releases:
            unstarted = [one.lease for one in releases if one.lease.token in outbox.announced]
            services.offload.call(
                lambda: self._release(releases, unstarted),
                lambda _, problem: self._answered(releases, problem),
                awaited=True,
            )
        if outbox.settlements and now >= self._settle_at():
            settlements, outbox.settlements = outbox.settlements, []
            room = self._leasing.claim(now)
            faults.reach("worker.before_commit")
            self._under_way, self._last_began = self._under_way + 1, now
            services.offload.call(
                lambda: self._settle(settlements, room),
                lambda settled, problem: self._settled(settlements, room, settled, problem),
                awaited=True,
            )

    def _settle(self, settlements: Sequence[Settlement], claim_next: int = 0) -> SettleAnswer:
        queue = self._services.queue
        write_ahead(settlements, queue.records, queue.name)
        return queue.settle(settlements, claim_next=claim_next)

    def _settled(
        self, settlements: list[Settlement], claimed: int, settled: SettleAnswer | None, problem: Exception | None
    ) -> None:
        self._under_way -= 1
        if settled is None:
            assert problem is not None
            self._leasing.claimed(claimed, None)
            self._answered(settlements, problem)
            return
        self.failures = 0
        faults.reach("worker.after_commit")
        self._outbox.count(settlements, settled)
        self._leasing.claimed(claimed, settled.leases)

    def _release(self, releases: Sequence[Release], unstarted: Sequence[Lease]) -> None:
        # First, so that the next worker does not take the attempt for lost.
        for lease in unstarted:
            self._services.records.retract_started(lease.task, lease.token)
        self._services.queue.release(releases)

    def _answered(self, ended: Sequence[End], problem: Exception | None) -> None:
        """Keep refused ends for another try; if that fails too, their leases, no longer renewed, come back by themselves."""
        if problem is None:
            self.failures = 0
            self._outbox.announced.difference_update(one.lease.token for one in ended)
        elif may_pass(problem):
            self._hand_again(ended, problem)
        else:
            self._hand_singly(ended)

    def _hand_again(self, ended: Sequence[End], problem: Exception) -> None:
        outbox = self._outbox
        outbox.settlements = [*(one for one in ended if isinstance(one, Settlement)), *outbox.settlements]
        outbox.releases = [*(one for one in ended if isinstance(one, Release)), *outbox.releases]
        self.failures += 1
        self._retry_at = system.monotonic() + min(30.0, backoff(self.failures).total_seconds())
        self._services.leaving.trouble("recording", problem)

    # one by one

    def _hand_singly(self, ended: Sequence[End]) -> None:
        """Hand ends over one by one: one of them may be at fault, and the others are settled."""
        services, outbox = self._services, self._outbox
        given_up = {token for token, stuck in outbox.stuck.items() if stuck.times >= REFUSALS}
        hopeless = {token for token in given_up if outbox.handed > outbox.stuck[token].handed}
        announced = frozenset(outbox.announced)
        self._singly.update(one.lease.token for one in ended)
        services.offload.call(
            lambda: self._hand_each(ended, announced, given_up, hopeless),
            lambda handed, problem: self._handed_singly(ended, handed, problem),
            awaited=True,
        )

    def _hand_each(
        self, ended: Sequence[End], announced: Collection[str], given_up: Collection[str], hopeless: Collection[str]
    ) -> SettleResults:
        """Settle and release each alone. Runs off the loop if the queue is remote.

        For tokens in `given_up` a service's refusal counts as their own fault; for those in `hopeless`, so does a
        refusal of the failure that is recorded instead. A missing permission is never a task's fault: a failure needs the
        same one to be recorded, and what cannot be given back comes back when its lease ends.
        """
        queue, handed = self._services.queue, SettleResults()

        def try_again(one: End, problem: Exception, blamed: Collection[str]) -> bool:
            if may_pass(problem):
                handed.again.append(one)
            elif isinstance(problem, InfrastructureFailure) and (problem.denied or one.lease.token not in blamed):
                handed.stuck.append(one)
            else:
                return False
            handed.problem = problem
            return True

        def replace(one: End, problem: Exception) -> None:
            what = "its result could not be recorded" if isinstance(one, Settlement) else "it could not be given back"
            now = self._services.clock.now()
            instead = failed_instead(one, problem, what, worker=self._services.name, now=now)
            try:
                handed.replaced.append((one, instead, self._settle([instead])))
            except Exception as again:
                if not try_again(one, again, hopeless):
                    handed.dropped.append((one.lease, again))

        for one in ended:
            try:
                if isinstance(one, Settlement):
                    handed.settled.append((one, self._settle([one])))
                    continue
                if one.lease.token in announced:
                    queue.records.retract_started(one.lease.task, one.lease.token)
                queue.release([one])
            except Exception as problem:
                if not try_again(one, problem, given_up):
                    replace(one, problem)
        return handed

    def _handed_singly(self, ended: Sequence[End], handed: SettleResults | None, problem: Exception | None) -> None:
        outbox, say = self._outbox, self._services.say
        self._singly.difference_update(one.lease.token for one in ended)
        if handed is None:
            assert problem is not None
            self._hand_again(ended, problem)
            return
        for settlement, settled in handed.settled:
            self._outbox.count([settlement], settled)
        for refused, instead, settled in handed.replaced:
            outbox.to_say[refused.lease.token] = partial(say.unrecorded, instead.record, instead.lease.task)
            self._outbox.count([instead], settled)
        for lease, refusal in handed.dropped:
            outbox.to_say.pop(lease.token, None)
            say.trouble(f"recording how `{lease.task.id}` ended", refusal)
        before = outbox.stuck
        tokens = {one.lease.token for one in ended}
        outbox.stuck = {token: stuck for token, stuck in before.items() if token not in tokens}
        outbox.announced -= tokens - {one.lease.token for one in (*handed.again, *handed.stuck)}
        for one in handed.stuck:
            token = one.lease.token
            known = before.get(token) or StuckSettlement(one, outbox.handed)
            known.times += 1
            outbox.stuck[token] = known
        if handed.stuck:
            times = max(stuck.times for stuck in outbox.stuck.values())
            self._stuck_at = system.monotonic() + min(30.0, backoff(times).total_seconds())
        if handed.problem is not None:
            self._services.leaving.trouble("recording", handed.problem)
        if handed.again:
            assert handed.problem is not None
            self._hand_again(handed.again, handed.problem)
        else:
            self.failures = 0
            self._leasing.poll_now()

    def retry_stuck(self, now: float) -> None:
        if now < self._stuck_at:
            return
        self._stuck_at = float("inf")
        self._hand_singly([each.ended for token, each in self._outbox.stuck.items() if token not in self._singly])
