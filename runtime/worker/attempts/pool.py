"""The worker's side of running attempts: slots, and what is outstanding on each.

A slot runs one attempt at a time. Orders go to it in a row and end in that order. Nothing here blocks or uses
threads: the worker's loop passes on readable keys, and calls `tick` when `next_deadline` has come.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from typing import Final

from runtime.reasons import EndReason
from runtime.worker.attempts import processes
from runtime.worker.attempts.child_handle import ChildHandle, Page
from runtime.worker.attempts.children import Children
from runtime.worker.attempts.endings import Endings
from runtime.worker.attempts.events import Events
from runtime.worker.attempts.guardian_link import GuardianLink
from runtime.worker.attempts.limits import LimitWatch
from runtime.worker.attempts.liveness import LivenessWatch
from runtime.worker.attempts.model import Ended, GuardianFailed, Order, PoolSettings, Progress
from runtime.worker.attempts.slot_orders import SlotOrders

CLOSE_PATIENCE_S: Final = 30.0


class AttemptPool:
    """All the slots of one worker."""

    def __init__(
        self,
        *,
        selector: selectors.BaseSelector,
        slots: int,
        settings: PoolSettings = PoolSettings(),  # noqa: B008 (it is frozen)
    ) -> None:
        self._settings, self._events = settings, Events(selector)
        self._page = Page(2 * slots + 2)
        self._guardian = GuardianLink(settings, self._page, self._events)
        self._endings = Endings(self._guardian)
        self._children = Children(settings, self._page, self._events, self._guardian, self._endings)
        self._slots = [
            SlotOrders(index, settings, self._events, self._guardian, self._children, self._endings)
            for index in range(slots)
        ]
        self._limits = LimitWatch(settings, self._events, self._children)
        self._liveness = LivenessWatch(settings, self._events, self._guardian, self._children, self._slots)

    def start(self) -> None:
        """Start the guardian, without waiting for it."""
        if self._settings.adopt_orphans:
            processes.find_prctl()(processes.PR_SET_CHILD_SUBREAPER, 1)
        self._liveness.start()
        if self._guardian.is_open:
            self._slots[0].prepare()

    def close(self, grace_s: float = 0.0) -> list[Ended]:
        """Stop and end everything, wait until it is gone, and return what had not ended yet.

        Running attempts are asked to stop with reason `preempted` and have `grace_s` for it. Safe to call twice.
        """
        if self._guardian.closing:
            return []
        self._guardian.closing = True
        for slot in self._slots:
            for token in slot.take_back():
                self._endings.add_unstarted(token, slot.index, EndReason.PREEMPTED)
        running = [token for slot in self._slots for token in slot.outstanding()]
        if grace_s > 0:
            for token in running:
                self.ask_to_stop(token, EndReason.PREEMPTED)
            self._wait_until(lambda: not self._is_busy(), grace_s)
        for token in running:
            self.kill(token, EndReason.PREEMPTED)
        self._wait_until(
            lambda: not self._is_busy() and not (self._guardian.removals and self._guardian.is_open), CLOSE_PATIENCE_S
        )
        for child in self._children:
            self._children.drop(child)
        self._guardian.stop(CLOSE_PATIENCE_S)
        self._page.close()
        return self._endings.take()

    @property
    def failure(self) -> GuardianFailed | None:
        """Why nothing will ever run here; orders that have not begun can be taken back."""
        return self._liveness.failure

    # orders

    def room(self, slot: int) -> int:
        """How many more orders the slot takes now."""
        return self._slots[slot].room()

    def send(self, slot: int, orders: Sequence[Order]) -> None:
        """Hand orders to a slot, in one system call if it can take them at once; they run strictly in order."""
        self._slots[slot].send(orders)

    def outstanding(self, slot: int) -> list[str]:
        """Tokens that have not ended, in order; the first is the one that runs, if any does."""
        return self._slots[slot].outstanding()

    def running(self, slot: int) -> tuple[str, float] | None:
        """Token of the attempt that has begun and its start in seconds since the epoch."""
        child = self._slots[slot].child
        if child is None or not child.orders:
            return None
        begun, started, _ = child.cell.begun()
        return (child.orders[0].token, started) if begun > child.done else None

    def take_back(self, slot: int) -> list[str]:
        """Drop the orders that have not begun and return their tokens; none of them will run or be reported.

        As with every call here, attempts that turn out to have ended are returned by the next `ready` or `tick`,
        for which `next_deadline` asks at once.
        """
        return self._slots[slot].take_back()

    # events

    def owns(self, key: selectors.SelectorKey) -> bool:
        return self._events.owns(key)

    def ready(self, key: selectors.SelectorKey) -> list[Ended]:
        """Read what a key of ours has; returns the attempts that ended by it."""
        key.data.read()
        return self._endings.take()

    def tick(self) -> list[Ended]:
        """Deadlines, memory, idle children; returns attempts that ended by it. Cheap when nothing is due."""
        self._check()
        return self._endings.take()

    def next_deadline(self) -> float | None:
        """`time.monotonic()` at which `tick` is next due; None while nothing is awaited."""
        return 0.0 if self._endings.ended else self._events.due

    def _check(self) -> None:
        now = time.monotonic()
        if self._events.due is None or now < self._events.due:
            return
        self._events.due = None
        self._liveness.check(now)
        self._limits.check_memory(self._busy_children(), now)
        for child in self._busy_children():
            self._limits.check_time(child, now)
        for slot in self._slots:
            slot.retire_idle(now)

    def _busy_children(self) -> list[ChildHandle]:
        return [slot.child for slot in self._slots if slot.child and slot.child.orders]

    # stopping

    def ask_to_stop(self, token: str, reason: EndReason) -> None:
        """SIGTERM to the attempt's session. Unless it succeeds, it is reported with `reason`.

        One that has not begun is reported as not started. An unknown or ended token is passed over.
        """
        self._stop(token, reason, None, "stop")

    def kill(self, token: str, reason: EndReason, message: str | None = None) -> None:
        """As `ask_to_stop`, with SIGKILL to its whole tree."""
        self._stop(token, reason, message, "kill")

    def _stop(self, token: str, reason: EndReason, message: str | None, verb: str) -> None:
        if child := self._find(token):
            self._children.read_results(child)
            child = self._find(token)
        if child is not None and child.runs():
            self._children.ask_to_stop(child, reason, message, verb)
            return
        for slot in self._slots:
            if token in slot.outstanding():
                slot.withdraw(token, reason)
                return

    # what running attempts say

    def drain_log(self, token: str) -> bytes:
        """Output since the last call; after more than 4 MiB only its end, led by a line that says so."""
        child = self._find(token)
        return child.output.take_undrained() if child else b""

    def progress(self, token: str) -> Progress | None:
        """The last report of a running attempt; None if it made none or is not running."""
        child = self._find(token)
        return child.noted.progress if child and child.noted else None

    def _find(self, token: str) -> ChildHandle | None:
        """The child whose current attempt this is."""
        return next((child for slot in self._slots if (child := slot.find(token))), None)

    # processes and files

    def attempt_of(self, pid: int) -> str | None:
        """The token of the running attempt that a process belongs to; None if it belongs to none, or is gone."""
        return self._children.attempt_of(pid)

    def pids(self) -> list[int]:
        """The guardian and its children."""
        guardian = [self._guardian.process.pid] if self._guardian.process else []
        return guardian + [child.pid for child in self._children if child.pid]

    def discard(self, path: str) -> None:
        """Remove a tree in the background; `close` waits for it."""
        self._guardian.remove(path)

    # closing

    def _is_busy(self) -> bool:
        return any(slot.is_busy() for slot in self._slots)

    def _wait_until(self, done: Callable[[], bool], patience_s: float) -> None:
        """Serve our own descriptors alone until `done`, or for `patience_s`."""
        give_up = time.monotonic() + patience_s
        while not done() and (left := give_up - time.monotonic()) > 0:
            self._events.serve(min(left, 0.2))
            self._check()
