"""The contract of every queue: tasks are put, leases are handed out, and a settled lease has its record.

A queue delivers; the record store that it settles into is the truth. Delivery may come twice or late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Protocol, runtime_checkable

from runtime.records.base import RecordExists, RecordStore, ResultStore, is_unwritten, settle_record
from runtime.tasks.history import Lease, Record, Release, Settlement
from runtime.tasks.model import Task

DEFAULT_QUEUE: Final = "default"
DEFAULT_LEASE: Final = timedelta(seconds=30)


def ignore_progress(_: int) -> None:
    """The `progress` of callers that do not show it."""


@dataclass(frozen=True, slots=True)
class QueueTraits:
    """The abilities of a kind of queue; the conformance suite checks each."""

    kind: str
    tracks_holders: bool
    """It knows who holds a lease and notices a dead holder, so attempts need no started mark."""
    remote: bool
    """Calls cross a network: the worker makes them off its loop."""
    priorities: bool


@dataclass(frozen=True, slots=True)
class RunningAttempts:
    """The attempts that a worker ran when it last reported them."""

    tokens: frozenset[str] = frozenset()
    apart: str | None = None
    """The one suspect among them."""
    proven: frozenset[str] | None = None
    """Those that ran long or made progress; None if the worker's release does not note that."""

    def alone(self, token: str) -> bool:
        return len(self.tokens) == 1 or token == self.apart

    def is_proven(self, token: str) -> bool:
        return self.proven is not None and token in self.proven


@dataclass(frozen=True, slots=True)
class RefusedSettlement:
    """A settlement that came second. `holder` has the task now; `record` exists already. Nothing was written."""

    lease: Lease
    holder: str | None = None
    record: Record | None = None


@dataclass(slots=True)
class SettleAnswer:
    leases: list[Lease] = field(default_factory=list)
    """Claimed in the same step."""
    refused: list[RefusedSettlement] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PutResult:
    new: int
    known: int
    """Already queued, leased or recorded, so not put again; 0 if the queue cannot know."""
    begun_before: frozenset[str] | None = None
    """Ids of the later generations among them; None if the queue cannot know."""


@dataclass(frozen=True, slots=True)
class Depth:
    ready: int
    delayed: int
    leased: int

    @property
    def total(self) -> int:
        return self.ready + self.delayed + self.leased


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """The place of a task that no worker holds."""

    ahead: int
    """Tasks that will be leased before it, as things are; for a delayed task, the ready ones."""
    due: datetime | None = None
    """When a delayed task will be ready; None for a ready one."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The work that an idle worker may still expect."""

    next_due: timedelta | None = None
    """Until the next delayed task; None if there is none or it cannot be known."""
    suspect_leases: bool = False
    """A holder missed a renewal: its tasks may come back soon."""


@runtime_checkable
class WaitingLookup(Protocol):
    """A queue that can look up a task without leasing it."""

    def find_waiting(self, task_id: str) -> WaitingTask | None:
        """None if it does not wait here: it is leased, has ended, or was never put."""


@runtime_checkable
class MakesTopics(Protocol):
    """A queue whose service can forget that it exists, as an emulator does when it starts again."""

    def ensure_topics(self) -> list[str]:
        """Make forgotten topics again if they are ours to make; returns their names."""


class Queue(Protocol):
    """Safe to call again after any failure. `QueueUnavailable` means retried with backoff, and given up."""

    name: str
    traits: QueueTraits
    records: RecordStore
    """Settled tasks are recorded here."""

    def put(self, tasks: Sequence[Task]) -> PutResult:
        """Durable on return. A queue that knows its tasks puts no id and generation twice."""

    def join(self, worker: str) -> tuple[int, ...]:
        """Begin to hold leases as `worker`.

        Returns the descriptors that prove that the worker lives, if the queue tracks its holders; the guardian keeps
        them open until the worker's attempts are gone.
        """

    def mark_running(self, tokens: Sequence[str], apart: str | None = None, proven: Collection[str] = ()) -> None:
        """Note which attempts run at this moment, so that a sudden death blames no others; cheap.

        `apart` is the suspect among them, if exactly one is; `proven` those that ran long or made progress.
        """

    def lease(self, n: int, *, worker: str, ttl: timedelta) -> list[Lease]:
        """At most `n` tasks that are due, without waiting for more; may be empty though tasks exist."""

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease]:
        """Confirm the leases for `ttl` from now; returns the lost ones."""

    def settle(self, settlements: Sequence[Settlement], *, claim_next: int = 0) -> SettleAnswer:
        """Mark, record and end each lease, and claim up to `claim_next` more for the same worker.

        Settling twice with the same lease and record changes nothing. A settlement that came second is in
        `refused`; the others stand.
        """

    def release(self, releases: Sequence[Release]) -> None:
        """Give leases back. One that is lost already is passed over."""

    def tend(self) -> None:
        """Upkeep on the worker's clock (about each half second): leases of the dead go back, due tasks come up."""

    def outlook(self) -> Outlook: ...
    def wake_descriptor(self) -> int | None:
        """A descriptor that turns readable when tasks may have arrived; `drain_wakes` empties it."""

    def drain_wakes(self) -> bool:
        """Empty the wake-up descriptor. True if a holder's death woke it: `tend` has something to do at once."""

    def depth(self) -> Depth | None: ...
    def peek(self, n: int) -> list[Task]:
        """The next tasks, without leasing; raises `NotPossible` if the service cannot."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def purge(self, *, progress: Callable[[int], None] = ignore_progress) -> int:
        """End every task that was put before and has not ended, running ones too, in the store; the queue follows.

        Returns how many were recorded as cancelled. Safe to interrupt at any moment and to call again. `progress` gets
        the number of tasks that were looked at since its last call.
        """

    def close(self) -> None: ...


def record_settlement(records: ResultStore, settlement: Settlement) -> RefusedSettlement | None:
    """Write the mark and the record; the caller ends the lease in either case, since a record stands."""
    try:
        settle_record(records, settlement.record, settlement.mark)
    except RecordExists as first:
        return RefusedSettlement(settlement.lease, first.record.worker, first.record)
    return None


def refuse_lost(records: ResultStore, settlement: Settlement, holder: str | None = None) -> RefusedSettlement | None:
    """Refuse a settlement other than a success if its lease passed on: another attempt may be running.

    Returns None if its own record stands already.
    """
    record = settlement.record
    existing = records.find(record.task_id, record.generation)
    try:
        unwritten = is_unwritten(record, existing)
    except RecordExists as first:
        return RefusedSettlement(settlement.lease, first.record.worker, first.record)
    return RefusedSettlement(settlement.lease, holder) if unwritten else None
