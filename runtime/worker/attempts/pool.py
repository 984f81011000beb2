"""The worker's side of running attempts: slots, limits, and the attempts that have ended.

A slot runs one attempt at a time. Orders go to it in a row and end in that order. Nothing here blocks or uses
threads: the worker's loop calls the data of readable keys in its selector, and `tick` when `next_deadline` has come.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable
from typing import Final

from runtime.end_reasons import EndReason
from runtime.units import format_duration, format_size
from runtime.worker.attempts import processes, wire
from runtime.worker.attempts.child_handle import ChildHandle, Events, Page
from runtime.worker.attempts.child_pool import MEMORY_EVERY_S, ChildPool, SlotOrders
from runtime.worker.attempts.exit_classification import EndedAttempts
from runtime.worker.attempts.guardian_link import GuardianLink
from runtime.worker.attempts.liveness import LivenessWatch
from runtime.worker.attempts.model import AttemptEnd, ChildPoolSettings, GuardianFailed

CLOSE_PATIENCE_S: Final = 30.0
TIDY_PATIENCE_S: Final = 60.0
"""Time beyond the limit in which a child may tidy up and report, if its user code has ended within the limit."""


class AttemptPool:
    """All the slots of one worker. `tick` returns attempts that have ended; `next_deadline` asks for it at once then."""

    def __init__(
        self,
        *,
        selector: selectors.BaseSelector,
        slots: int,
        settings: ChildPoolSettings = ChildPoolSettings(),  # noqa: B008 (it is frozen)
    ) -> None:
        self._settings, self._events = settings, Events(selector)
        self._guardian = GuardianLink(settings, Page(2 * slots + 2), self._events)
        self._endings = EndedAttempts(self._guardian)
        self._children = ChildPool(self._guardian, self._endings)
        self.slots = [SlotOrders(index, self._guardian, self._children, self._endings) for index in range(slots)]
        self._liveness = LivenessWatch(self._guardian, self._children, self.slots)
        self._memory_at = 0.0

    def start(self) -> None:
        """Start the guardian, without waiting for it."""
        if self._settings.adopt_orphans:
            processes.find_prctl()(processes.PR_SET_CHILD_SUBREAPER, 1)
        self._liveness.start()
        if self._guardian.is_open:
            self.slots[0].prepare()

    def close(self) -> list[AttemptEnd]:
        """Kill everything, wait until it is gone, and return the attempts that had not ended yet. Safe to call twice."""
        if self._guardian.closing:
            return []
        self._guardian.closing = True
        for slot in self.slots:
            for token in slot.take_back():
                self._endings.add_unstarted(token, slot.index, EndReason.PREEMPTED)
        for token in [token for slot in self.slots for token in slot.outstanding()]:
            self.kill(token, EndReason.PREEMPTED)
        give_up = time.monotonic() + CLOSE_PATIENCE_S
        while self._is_busy() and (left := give_up - time.monotonic()) > 0:
            self._events.serve(min(left, 0.2))
            self._check()
        for child in self._children:
            self._children.drop(child)
        self._guardian.stop(CLOSE_PATIENCE_S)
        self._guardian.page.close()
        return self._endings.take()

    def _is_busy(self) -> bool:
        removes = self._guardian.is_open and bool(self._guardian.removals)
        return removes or any(slot.is_busy() for slot in self.slots)

    @property
    def failure(self) -> GuardianFailed | None:
        """Why nothing will ever run here; orders that have not begun can be taken back."""
        return self._liveness.failure

    # events

    def tick(self) -> list[AttemptEnd]:
        """Look at deadlines, memory and idle children; returns attempts that have ended. Cheap when nothing is due."""
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
        self._check_memory(self._busy_children(), now)
        for child in self._busy_children():
            self._check_time(child, now)
        for slot in self.slots:
            slot.retire_idle(now)

    def _busy_children(self) -> list[ChildHandle]:
        return [slot.child for slot in self.slots if slot.child and slot.child.orders]

    # limits

    def _check_time(self, child: ChildHandle, now: float) -> None:
        """Stop the attempt of a busy child if its time limit has passed, and kill it if that did not end it."""
        self._events.wake_by(now + self._settings.standby_idle_s)
        begun, _, began = child.cell.begun()
        order, *waiting = child.orders
        waiting_s = [each.timeout_s for each in waiting if each.timeout_s is not None]
        if begun <= child.done:
            if waiting_s or order.timeout_s is not None:
                self._events.wake_by(now + 0.05)
            return
        if order.timeout_s is not None:
            due = began + order.timeout_s
            if now < due:
                self._events.wake_by(due)
                return
            self._enforce(child, order.timeout_s, now)
        for timeout_s in waiting_s:
            self._events.wake_by(now + timeout_s)

    def _enforce(self, child: ChildHandle, timeout_s: float, now: float) -> None:
        timed_out = f"timed out after {format_duration(timeout_s)}"
        noted = child.note()
        if noted.kill_at and now >= noted.kill_at:
            after = f"{timed_out}: its code had ended, but not what its process does after that"
            noted.asked = noted.asked or (EndReason.TIMEOUT, after)
            self._guardian.tell(f"kill {child.name}")
            noted.kill_at = now + 5.0
        elif not noted.kill_at and child.cell.has(wire.OVER_AT):
            noted.kill_at = now + TIDY_PATIENCE_S
        elif not noted.kill_at:
            # One that was asked to stop before will end for that reason, and its limit holds all the same.
            if noted.asked is None:
                self._children.ask_to_stop(child, EndReason.TIMEOUT, timed_out, "stop")
            noted.kill_at = now + self._settings.stop_grace_s
        self._events.wake_by(noted.kill_at)

    def _check_memory(self, busy: Iterable[ChildHandle], now: float) -> None:
        """Kill attempts whose processes together hold more than their limit."""
        watched = [child for child in busy if any(order.memory_bytes for order in child.orders)]
        if watched:
            self._events.wake_by(now + MEMORY_EVERY_S)
        watched = [child for child in watched if child.pid and child.orders[0].memory_bytes]
        if not watched or now < self._memory_at:
            return
        self._memory_at = now + MEMORY_EVERY_S * 0.9
        table = processes.read_table()
        for child in watched:
            limit = child.orders[0].memory_bytes
            used = processes.tree_memory_bytes(table, child.pid, limit_bytes=limit)
            noted = child.note()
            noted.memory_peak = max(noted.memory_peak, used)
            if used > limit and child.runs():
                message = f"used {format_size(used)} of memory, over its limit of {format_size(limit)}"
                self._children.ask_to_stop(child, EndReason.OOM, message, "kill")

    # one attempt

    def ask_to_stop(self, token: str, reason: EndReason) -> None:
        """Send SIGTERM to the attempt's session. Unless it succeeds, it is reported with `reason`.

        An attempt that has not begun is reported as not started. An unknown or ended token is passed over.
        """
        self._stop(token, reason, None, "stop")

    def kill(self, token: str, reason: EndReason, message: str | None = None) -> None:
        """Do as `ask_to_stop`, with SIGKILL to the whole tree."""
        self._stop(token, reason, message, "kill")

    def _stop(self, token: str, reason: EndReason, message: str | None, verb: str) -> None:
        if child := self._find(token):
            self._children.read_results(child)
            child = self._find(token)
        if child is not None and child.runs():
            self._children.ask_to_stop(child, reason, message, verb)
            return
        for slot in self.slots:
            if token in slot.outstanding():
                slot.withdraw(token, reason)
                return

    def drain_log(self, token: str) -> bytes:
        """Return the output since the last call; after more than 4 MiB only its end, after a line with the size of the rest."""
        child = self._find(token)
        return child.output.take_undrained() if child else b""

    def has_progressed(self, token: str) -> bool:
        """Return whether a running attempt has reported progress."""
        child = self._find(token)
        return child is not None and child.noted is not None and child.noted.progressed

    def _find(self, token: str) -> ChildHandle | None:
        """Return the child whose current attempt this is."""
        return next((child for slot in self.slots if (child := slot.find(token))), None)

    def attempt_of(self, pid: int) -> str | None:
        """Return the token of the running attempt that a process belongs to; None if it belongs to none, or is gone."""
        born = {child.find_pid(): child for child in self._children}
        born.pop(0, None)
        while (child := born.get(pid)) is None:
            process = processes.find_process(pid)
            if process is None:
                return None
            pid = process.ppid
        return child.orders[0].token if child.orders else None

    def discard(self, path: str) -> None:
        """Remove a tree in the background; `close` waits for it."""
        self._guardian.remove(path)
