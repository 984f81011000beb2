"""What every queue promises: tasks go in, leases come out, and a settled lease has its record.

A queue delivers; the record store that it settles into is the truth. Delivery may come twice or late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Final, Protocol, runtime_checkable

from runtime.records.base import RecordStore
from runtime.tasks.history import Record
from runtime.tasks.lease import Lease, Release, Settlement
from runtime.tasks.model import Task
from runtime.values import dataclass, field

DEFAULT_QUEUE: Final = "default"
DEFAULT_LEASE: Final = timedelta(seconds=30)


def ignore_progress(_: int) -> None:
    """For whoever does not show how far a purge is."""


@dataclass(frozen=True, slots=True)
class QueueTraits:
    """What this kind of queue can do; the conformance suite holds each to it."""

    kind: str
    tracks_holders: bool
    """It knows who holds a lease and notices a dead holder, so attempts need no started mark."""
    remote: bool
    """Calls cross a network: the worker makes them off its loop."""
    priorities: bool
    knows_depth: bool
    max_message_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A settlement that came second. `holder` has the task now; `record` exists already. Nothing was written."""

    lease: Lease
    holder: str | None = None
    record: Record | None = None


@dataclass(slots=True)
class Settled:
    leases: list[Lease] = field(default_factory=list)
    """Claimed in the same step."""
    refused: list[Refused] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PutResult:
    new: int
    known: int
    """Already queued, leased or recorded, so not put again; 0 where the queue cannot tell."""
    begun_before: frozenset[str] | None = None
    """Ids of the later generations among those; None where the queue cannot tell."""


@dataclass(frozen=True, slots=True)
class Depth:
    ready: int
    delayed: int
    leased: int

    @property
    def total(self) -> int:
        return self.ready + self.delayed + self.leased


@dataclass(frozen=True, slots=True)
class Waiting:
    """Where a task stands that nobody holds."""

    ahead: int
    """Tasks that will be leased before it, as things are; of a delayed one those that are ready."""
    due: datetime | None = None
    """When a delayed one will be ready; None if it is."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an idle worker may still expect."""

    next_due: timedelta | None = None
    """Until the next delayed task; None if there is none or it cannot be known."""
    suspect_leases: bool = False
    """A holder missed a renewal: its tasks may come back soon."""


@runtime_checkable
class FindsWaiting(Protocol):
    """What a queue is too that can look up a task without leasing."""

    def find_waiting(self, task_id: str) -> Waiting | None:
        """None if it does not wait here: it is leased, has ended, or was never put."""


@runtime_checkable
class MakesTopics(Protocol):
    """A queue whose service can forget that it exists, as an emulator does when it starts again."""

    def ensure_topics(self) -> list[str]:
        """Make again what was forgotten, where that is ours to make; returns the names."""


class Queue(Protocol):
    """Safe to call again after any failure. `QueueUnavailable` means retried with backoff, and given up."""

    name: str
    traits: QueueTraits
    records: RecordStore
    """Where settled tasks are recorded."""

    def put(self, tasks: Sequence[Task]) -> PutResult:
        """Durable on return. A task whose id and generation are known here is not put twice where that can be told."""

    def join(self, worker: str) -> tuple[int, ...]:
        """Begin to hold leases as `worker`.

        Returns the descriptors that say that the worker lives, where the queue tracks its holders; the guardian keeps
        them open until the worker's attempts are gone.
        """

    def mark_running(self, tokens: Sequence[str], apart: str | None = None) -> None:
        """Say which attempts run at this moment, so that a sudden death blames no others; cheap.

        `apart` is the one suspect among them, if there is just one.
        """

    def lease(self, n: int, *, worker: str, ttl: timedelta) -> list[Lease]:
        """At most `n` tasks that are due, without waiting for more; may be empty though tasks exist."""

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease]:
        """Confirm the leases for `ttl` from now; returns those that are lost."""

    def settle(self, settlements: Sequence[Settlement], *, claim_next: int = 0) -> Settled:
        """Mark, record and end each lease, and claim up to `claim_next` more for the same worker.

        Settling twice with the same lease and record changes nothing. A settlement that came second is in
        `refused`; the others stand.
        """

    def release(self, releases: Sequence[Release]) -> None:
        """Give leases back. One that is lost already is passed over."""

    def tend(self) -> None:
        """Upkeep on the worker's clock (about each half second): leases of the dead go back, due tasks come up."""

    def outlook(self) -> Outlook: ...
    def doorbell(self) -> int | None:
        """A descriptor that turns readable when tasks may have arrived; `hush` empties it."""

    def hush(self) -> bool:
        """Empty the doorbell. True if it rang because a holder died: `tend` has something to do at once."""

    def depth(self) -> Depth | None: ...
    def peek(self, n: int) -> list[Task]:
        """The next tasks, without leasing; raises `NotPossible` where the service cannot."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def purge(self, *, progress: Callable[[int], None] = ignore_progress) -> int:
        """End every task that was put before and has not ended, running ones too, in the store; the queue follows.

        Returns how many were recorded as cancelled. Safe to interrupt at any moment and to call again. `progress` is
        called with the number of tasks that were looked at since the last call.
        """

    def close(self) -> None: ...
