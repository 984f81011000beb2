"""Hands ended leases to the queue one by one, after it refused them together.

A queue settles many leases in one step, so one result that no store can hold would keep all the others waiting, for
ever. What is refused for a reason of its own is recorded as failed with that reason, and the rest goes its way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from runtime.errors import InfrastructureFailure, RuntimeFailure
from runtime.queues.base import Lease, Queue, Release, Settled, Settlement
from runtime.reasons import EndReason
from runtime.records.base import Record
from runtime.tasks import TaskState
from runtime.verdict import mark_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What ended and is to be handed over."""

    settlements: Sequence[Settlement] = ()
    releases: Sequence[Release] = ()
    retractions: Sequence[Lease] = ()
    """Announced to the store, and did not start after all; taken back before its release."""


@dataclass(slots=True)
class Handed:
    """What became of it."""

    settled: list[tuple[Settlement, Settled]] = field(default_factory=list)
    replaced: list[tuple[Settlement | Release, Settlement, Settled]] = field(default_factory=list)
    """Refused for a reason of its own, and recorded as failed instead."""
    dropped: list[tuple[Lease, Exception]] = field(default_factory=list)
    """Not even that was taken. The lease is left alone: it ends with this worker, or by itself."""
    settlements: list[Settlement] = field(default_factory=list)
    """To be handed over again, as are the next two."""
    releases: list[Release] = field(default_factory=list)
    retractions: list[Lease] = field(default_factory=list)
    problem: Exception | None = None
    """Why anything is to be handed over again."""
    unexplained: list[str] = field(default_factory=list)
    """Tokens of those that the service refused without saying that again may help."""


def may_pass(problem: Exception) -> bool:
    """Whether again may help, whatever it was that was handed over."""
    return isinstance(problem, InfrastructureFailure) and problem.retryable


def hand_over(
    queue: Queue, outgoing: Outgoing, *, worker: str, now: datetime, given_up: Collection[str] = frozenset()
) -> Handed:
    """Settle and release each alone.

    A service that refuses without saying that again may help may mean everything or this one: only of the tokens in
    `given_up` it is taken for their own fault.
    """
    handed = Handed()

    def keeps(token: str, problem: Exception) -> bool:
        if not isinstance(problem, InfrastructureFailure) or (token in given_up and not problem.retryable):
            return False
        handed.problem = problem
        if not problem.retryable:
            handed.unexplained.append(token)
        return True

    def replace(refused: Settlement | Release, problem: Exception) -> bool:
        """Record the failure instead; False if that is to be tried again."""
        what = "its result could not be recorded" if isinstance(refused, Settlement) else "it could not be given back"
        instead = failed_instead(refused, problem, what, worker=worker, now=now)
        try:
            handed.replaced.append((refused, instead, queue.settle([instead])))
        except Exception as again:
            if may_pass(again):
                handed.problem = again
                return False
            handed.dropped.append((refused.lease, again))
        return True

    for settlement in outgoing.settlements:
        try:
            handed.settled.append((settlement, queue.settle([settlement])))
        except Exception as problem:
            if keeps(settlement.lease.token, problem) or not replace(settlement, problem):
                handed.settlements.append(settlement)
    announced = {lease.token: lease for lease in outgoing.retractions}
    for release in outgoing.releases:
        token = release.lease.token
        try:
            if token in announced:
                queue.records.retract_started(release.lease.task, token)
            queue.release([release])
        except Exception as problem:
            if keeps(token, problem) or not replace(release, problem):
                handed.releases.append(release)
                handed.retractions += [announced[token]] if token in announced else []
    return handed


def failed_instead(
    refused: Settlement | Release, problem: Exception, what: str, *, worker: str, now: datetime
) -> Settlement:
    """The record of a task of which something was refused; it bears the same token."""
    lease = refused.lease
    task = lease.task
    known = refused.record if isinstance(refused, Settlement) else refused.note
    said = problem.message if isinstance(problem, RuntimeFailure) else f"{type(problem).__name__}: {problem}"
    record = Record(
        task_id=task.id,
        generation=task.generation,
        experiment=task.experiment,
        state=TaskState.FAILED,
        token=lease.token,
        reason=EndReason.CONFIG_INVALID,
        ended_at=known.ended_at if known else now,
        started_at=known.started_at if known else None,
        message=f"{what}: {said[:2000]}",
        worker=worker,
        attempts=refused.record.attempts if isinstance(refused, Settlement) else lease.tries + (known is not None),
    )
    raw = lease.invalid.raw if lease.invalid else None
    return Settlement(lease, record, mark_of(record, None if lease.invalid else task, raw=raw))
