"""Hands ended leases to the queue one by one, after it refused them together.

A queue settles many leases in one step, so one result that no store can hold would keep all the others waiting, for
ever. What is refused for a reason of its own is recorded as failed with that reason, and the rest goes its way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from runtime.errors import InfrastructureFailure, explain_briefly
from runtime.queues.base import Queue, Settled
from runtime.reasons import EndReason
from runtime.tasks.history import Record, mark_of
from runtime.tasks.lease import Lease, Release, Settlement
from runtime.tasks.model import TaskState
from runtime.values import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What ended and is to be handed over."""

    settlements: Sequence[Settlement] = ()
    releases: Sequence[Release] = ()
    retractions: Sequence[Lease] = ()
    """Announced to the store, and did not start after all; taken back before its release."""

    @property
    def ended(self) -> list[Settlement | Release]:
        return [*self.settlements, *self.releases]


@dataclass(slots=True)
class Handed:
    """What became of it."""

    settled: list[tuple[Settlement, Settled]] = field(default_factory=list)
    replaced: list[tuple[Settlement | Release, Settlement, Settled]] = field(default_factory=list)
    """Refused for a reason of its own, and recorded as failed instead."""
    dropped: list[tuple[Lease, Exception]] = field(default_factory=list)
    """Not even that was taken. The lease is left alone: it ends with this worker, or by itself."""
    again: list[Settlement | Release] = field(default_factory=list)
    """The service was away."""
    stuck: list[Settlement | Release] = field(default_factory=list)
    """The service refused, and did not say that again may help: it may mean everything, or this one."""
    problem: Exception | None = None
    """Why anything is `again` or `stuck`."""


def may_pass(problem: Exception) -> bool:
    """Whether again may help, whatever it was that was handed over."""
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

    Of the tokens in `given_up` a service's refusal is taken for their own fault, and of those in `hopeless`, also that
    of the failure that is recorded instead.
    """
    handed = Handed()

    def try_again(one: Settlement | Release, problem: Exception, blamed: Collection[str]) -> bool:
        if may_pass(problem):
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


def failed_instead(
    refused: Settlement | Release, problem: Exception, what: str, *, worker: str, now: datetime
) -> Settlement:
    """The record of a task of which something was refused; it bears the same token."""
    lease = refused.lease
    task = lease.task
    known = refused.record if isinstance(refused, Settlement) else refused.note
    record = Record(
        task_id=task.id,
        generation=task.generation,
        experiment=task.experiment,
        state=TaskState.FAILED,
        token=lease.token,
        reason=EndReason.CONFIG_INVALID,
        ended_at=known.ended_at if known else now,
        started_at=known.started_at if known else None,
        message=f"{what}: {explain_briefly(problem)[:2000]}",
        worker=worker,
        attempts=refused.record.attempts if isinstance(refused, Settlement) else lease.tries + (known is not None),
    )
    raw = lease.invalid.raw if lease.invalid else None
    return Settlement(lease, record, mark_of(record, None if lease.invalid else task, raw=raw))
