"""Orders for the workers of a queue, and how many orders become one `QueueControl`.

An order is a create-only object of its own, so none is lost to another that is given at the same moment. It names the
pauses, manifest parts or generations that it covers, so its meaning depends on no clock of a submitter, a worker or the
person who gives it. docs/decisions/order-log.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from runtime.system import system

FIRST_OWN_NUMBER: Final = 1 << 32
"""Manifest parts are numbered from 0. A submission of one task takes the task's own 64 bits for a number instead, so
that the experiments that gather single tasks are known from the names of their parts alone."""


class OrderKind(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    PURGE = "purge"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCommand:
    """One order that a person gave to a queue."""

    kind: OrderKind
    at: datetime
    """By the clock of the machine that gave it, for people to read; it decides nothing."""
    by: str | None = None
    ends: frozenset[str] = frozenset()
    """Ids of the pauses that a resume ends. A pause that it has not seen stays."""
    experiments: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of each experiment's manifest parts that a cancel or purge covers."""
    tasks: frozenset[tuple[str, int]] = frozenset()
    """Id and generation of single tasks that a cancel or purge covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledRange:
    """The part of one experiment that orders cancel."""

    parts: frozenset[str]
    before: datetime
    """By the store's clock. A foreign producer's tasks are in no manifest; they are covered if the queue's service took
    them in before."""
    ordered_at: datetime
    """When the newest of the orders was given, for people to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueControl:
    """All orders of a queue, merged; its workers follow it."""

    pauses: frozenset[str] = frozenset()
    """Ids of the orders to pause."""
    ended: frozenset[str] = frozenset()
    """Ids of pauses that a resume has named. Kept for good: a merged copy of such a pause may turn up late."""
    experiments: Mapping[str, CancelledRange] = field(default_factory=dict)
    tasks: frozenset[tuple[str, int]] = frozenset()
    purged_before: datetime | None = None
    """By the store's clock: as `Covered.before`, for every experiment."""

    @property
    def paused(self) -> bool:
        return not self.pauses <= self.ended

    @property
    def cancels(self) -> bool:
        """Whether any task at all is covered."""
        return bool(self.experiments or self.tasks or self.purged_before)


def person() -> str:
    """Name the user who gives an order or cancels a task, for people to read."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    return f"{user}@{system.node()}"


def pause_order(at: datetime) -> ControlCommand:
    """Pause, even a paused queue: a resume that is on its way ends only the pauses that it has seen."""
    return ControlCommand(kind=OrderKind.PAUSE, at=at, by=person())


def resume_order(control: QueueControl, at: datetime) -> ControlCommand | None:
    """End every pause in `control`; None without any."""
    paused = control.pauses - control.ended
    return ControlCommand(kind=OrderKind.RESUME, at=at, by=person(), ends=paused) if paused else None


def control_of(identity: str, order: ControlCommand, stored_at: datetime) -> QueueControl:
    """One order as a `QueueControl`; `stored_at` is the time that the store gave its object."""
    return QueueControl(
        pauses=frozenset({identity}) if order.kind is OrderKind.PAUSE else frozenset(),
        ended=order.ends,
        experiments={
            name: CancelledRange(parts=parts, before=stored_at, ordered_at=order.at)
            for name, parts in order.experiments.items()
        },
        tasks=order.tasks,
        purged_before=stored_at if order.kind is OrderKind.PURGE else None,
    )


def merge(controls: Iterable[QueueControl]) -> QueueControl:
    """All of them as one; their sequence and repetitions do not matter."""
    controls = list(controls)
    experiments: dict[str, CancelledRange] = {}
    for control in controls:
        for name, covered in control.experiments.items():
            known = experiments.get(name, covered)
            experiments[name] = CancelledRange(
                parts=known.parts | covered.parts,
                before=max(known.before, covered.before),
                ordered_at=max(known.ordered_at, covered.ordered_at),
            )
    return QueueControl(
        pauses=frozenset().union(*(control.pauses for control in controls)),
        ended=frozenset().union(*(control.ended for control in controls)),
        experiments=experiments,
        tasks=frozenset().union(*(control.tasks for control in controls)),
        purged_before=max((each.purged_before for each in controls if each.purged_before), default=None),
    )


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """A stored order."""

    control: QueueControl
    """Its meaning for the workers."""
    merged: frozenset[str] = frozenset()
    """Ids of the orders that it replaces; most replace none."""
    readable: bool = True
    """An unreadable order has no meaning, and is left where it lies."""


class OrderLog:
    """One queue's orders as a process has read them. An order never changes, so each is read once."""

    def __init__(self) -> None:
        self._taking = system.lock()
        self._told: frozenset[str] = frozenset()
        self.known: Mapping[str, ReadOrder] = {}
        self.control = QueueControl()
        self.read_at = float("-inf")
        """Boot time just before the listing."""

    def take(self, orders: Mapping[str, ReadOrder], *, at: float) -> None:
        """Take over `orders`, listed at `at`, unless another thread has listed them since."""
        with self._taking:
            if at < self.read_at:
                return
            self.read_at, self.known = at, orders
            if orders.keys() != self._told:
                self._told = frozenset(orders)
                self.control = merge(order.control for order in orders.values())
