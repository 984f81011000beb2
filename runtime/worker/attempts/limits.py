"""Time and memory limits of running attempts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from runtime.reasons import EndReason
from runtime.units import format_duration, format_size
from runtime.worker.attempts import processes, wire
from runtime.worker.attempts.child_handle import ChildHandle
from runtime.worker.attempts.children import Children
from runtime.worker.attempts.events import Events
from runtime.worker.attempts.model import PoolSettings
from runtime.worker.attempts.slot_orders import MEMORY_EVERY_S

TIDY_PATIENCE_S: Final = 60.0
"""What a child gets beyond the time limit to tidy up and report, if its user code has ended within it."""


class LimitWatch:
    """Stops attempts that exceed a limit of their order."""

    def __init__(self, settings: PoolSettings, events: Events, children: Children) -> None:
        self._settings, self._events, self._children = settings, events, children
        self._memory_at = 0.0

    def check_time(self, child: ChildHandle, now: float) -> None:
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
            self._children.kill(child)
            noted.kill_at = now + 5.0
        elif not noted.kill_at and child.cell.has(wire.OVER_AT):
            noted.kill_at = now + TIDY_PATIENCE_S
        elif not noted.kill_at:
            # One that was asked to stop before will end for that reason, and its limit holds all the same.
            if noted.asked is None:
                self._children.ask_to_stop(child, EndReason.TIMEOUT, timed_out, "stop")
            noted.kill_at = now + self._settings.stop_grace_s
        self._events.wake_by(noted.kill_at)

    def check_memory(self, busy: Iterable[ChildHandle], now: float) -> None:
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
