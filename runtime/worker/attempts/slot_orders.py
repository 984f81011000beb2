"""The outstanding orders of one slot: orders that wait, and the child with the orders that were sent."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from runtime.reasons import EndReason
from runtime.worker.attempts import wire
from runtime.worker.attempts.child_handle import ChildHandle, Events
from runtime.worker.attempts.children import Children
from runtime.worker.attempts.endings import Endings
from runtime.worker.attempts.guardian_link import GuardianLink
from runtime.worker.attempts.model import Order, PoolSettings

MEMORY_EVERY_S: Final = 1.0
_pack_order = wire.ORDER_HEADER.pack


class SlotOrders:
    """Orders of one slot; they run one at a time and in order."""

    def __init__(
        self,
        index: int,
        settings: PoolSettings,
        events: Events,
        guardian: GuardianLink,
        children: Children,
        endings: Endings,
    ) -> None:
        self.index, self._settings, self._events = index, settings, events
        self._guardian, self._children, self._endings = guardian, children, endings
        self.pending: deque[Order] = deque()
        self.child: ChildHandle | None = None
        self.standby: ChildHandle | None = None
        self.forks_ahead = False
        """The slot's children serve once, so the next one is forked while one runs."""
        self.false_starts = 0
        """Children in a row that died before they began anything."""
        self.idle_since = time.monotonic()
        self._env: Mapping[str, str] = {}
        self._env_text = ""

    def room(self) -> int:
        """Return how many more orders the slot takes now."""
        return self._settings.max_outstanding - len(self.pending) - (len(self.child.orders) if self.child else 0)

    def is_busy(self) -> bool:
        return bool(self.pending or (self.child and (self.child.orders or self.child.result)))

    def outstanding(self) -> list[str]:
        """Return tokens that have not ended, in order; the first is the one that runs, if any does."""
        sent = [order.token for order in self.child.orders] if self.child else []
        return sent + [order.token for order in self.pending]

    def running(self) -> tuple[str, float] | None:
        """Return token and start, in seconds since the epoch, of the attempt that has begun."""
        child = self.child
        if child is None or not child.orders:
            return None
        begun, started, _ = child.cell.begun()
        return (child.orders[0].token, started) if begun > child.done else None

    def find(self, token: str) -> ChildHandle | None:
        """The slot's child if `token` names its current attempt."""
        child = self.child
        return child if child is not None and child.orders and child.orders[0].token == token else None

    # sending

    def prepare(self) -> None:
        """Have a child ready for the first order."""
        self.child = self._children.fork(self)

    def send(self, orders: Sequence[Order]) -> None:
        """Run these after all earlier orders, strictly in order; one system call if the child takes them at once."""
        self.pending.extend(orders)
        self.pump()

    def pump(self) -> None:
        """Send the orders that the slot's child can take now."""
        pending = self.pending
        if self._guardian.closing:
            for order in pending:
                self._endings.add_unstarted(order.token, self.index, EndReason.PREEMPTED)
            pending.clear()
        if not pending or not self._guardian.is_open:
            return
        child = self.child
        if child is None:
            child = self.child = self.standby or self._children.fork(self)
            self.standby = None
        if child.result is not None or child.held:
            return
        if child.code is None:
            child.code = (pending[0].code_dir, pending[0].cwd)
        sent, code, reuse = child.orders, child.code, self._settings.reuse
        frames = []
        while pending and (reuse or not sent):
            order = pending[0]
            if (order.code_dir, order.cwd) != code:
                if not sent:
                    child.retire()
                break
            if order.timeout_s is not None or order.memory_bytes:
                self._events.wake_by(time.monotonic() + min(order.timeout_s or MEMORY_EVERY_S, MEMORY_EVERY_S))
            sent.append(order)
            frames.append(self._encode(order))
            pending.popleft()
        if frames:
            self._children.write(child, b"".join(frames))
            self._events.await_answer()
            if self.forks_ahead and self.standby is None:
                self.standby = self._children.fork(self)

    def _encode(self, order: Order) -> bytes:
        if order.env is not self._env:
            self._env, self._env_text = order.env, json.dumps(dict(order.env)) if order.env else ""
        payload = "\0".join(
            (
                order.token,
                order.task_id,
                str(order.generation),
                str(order.attempt),
                order.experiment,
                "" if order.timeout_s is None else repr(order.timeout_s),
                order.output_dir,
                order.checkpoint_dir,
                order.scratch_root,
                order.cwd or "",
                order.code_dir or "",
                order.snapshot or "",
                self._env_text,
                order.body,
            )
        ).encode("utf-8", "surrogatepass")
        return _pack_order(wire.MAGIC, len(payload), wire.ORDER) + payload

    # taking back

    def take_back(self) -> list[str]:
        """Drop the orders that have not begun, and return their tokens; none of them will run or be reported."""
        self._recall()
        tokens = [order.token for order in self.pending]
        self.pending.clear()
        return tokens

    def withdraw(self, token: str, reason: EndReason) -> None:
        """Take back an order that has not begun; if it begins meanwhile, it is stopped."""
        self._recall()
        for order in self.pending:
            if order.token == token:
                self.pending.remove(order)
                self._endings.add_unstarted(token, self.index, reason)
                break
        else:
            if child := self.find(token):
                self._children.ask_to_stop(child, reason, None, "stop")
        self.pump()

    def _recall(self) -> None:
        """Bring the orders that the slot's child has not begun back to the front of the pending orders."""
        child = self.child
        if child is None or not child.orders:
            return
        self._children.read_results(child)
        if child.cell.begun()[0] - child.done < len(child.orders):
            child.replace()

    # children

    def forget(self, child: ChildHandle) -> None:
        """Forget a child that has died."""
        if self.standby is child:
            self.standby = None
        if self.child is child:
            self.child = None
            self.idle_since = time.monotonic()

    def retire_idle(self, now: float) -> None:
        """Retire children that have waited too long for their first order; the first slot keeps its own."""
        child = self.child
        for idle in (self.standby, None if child and child.orders else child):
            if idle is None or idle.held or (self.index == 0 and idle is child):
                continue
            since = self.idle_since + self._settings.standby_idle_s
            if now >= since:
                idle.retire()
            else:
                self._events.wake_by(max(since, now + 1.0))
