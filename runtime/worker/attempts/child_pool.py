"""The guardian's children, and the slots whose orders they run: sending orders, reading results, ending dead children."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from runtime.end_reasons import EndReason
from runtime.worker.attempts import wire
from runtime.worker.attempts.child_handle import ChildHandle, ChildOutput
from runtime.worker.attempts.exit_classification import WROTE_TO_CONTROL, EndedAttempts, describe_code, record_progress
from runtime.worker.attempts.guardian_link import GuardianLink
from runtime.worker.attempts.model import AttemptEnd, AttemptOrder

FALSE_STARTS: Final = 3
MEMORY_EVERY_S: Final = 1.0

# The fast path of each result: looked up once.
_SUCCEEDED = EndReason.SUCCEEDED
_RESULT_BYTES = wire.RESULT_HEADER.size
_MAGIC = wire.MAGIC
_pack_order = wire.ORDER_HEADER.pack
_unpack_result = wire.RESULT_HEADER.unpack_from


class ChildPool:
    """The children of one pool, by the names that the guardian knows them by."""

    def __init__(self, guardian: GuardianLink, endings: EndedAttempts) -> None:
        self._guardian, self._endings = guardian, endings
        self._settings, self._events = guardian.settings, guardian.events
        self._by_name: dict[str, ChildHandle] = {}
        self._names = itertools.count(1)

    def __iter__(self) -> Iterator[ChildHandle]:
        """Iterate over a copy: children may be dropped meanwhile."""
        return iter(list(self._by_name.values()))

    def find(self, name: str) -> ChildHandle | None:
        return self._by_name.get(name)

    # starting and stopping

    def fork(self, slot: SlotOrders) -> ChildHandle:
        ours, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe()
        ours.setblocking(False)
        os.set_blocking(read_fd, False)
        cell, events = self._guardian.page.take(), self._events
        child = ChildHandle(str(next(self._names)), slot, cell, ours, ChildOutput(read_fd, events), events)
        self._by_name[child.name] = child
        events.listen(ours, partial(self.read_results, child))
        events.listen(read_fd, partial(self._read_output, child))
        self._guardian.tell(f"fork {child.name} {cell.at}", (theirs.fileno(), write_fd))
        theirs.close()
        os.close(write_fd)
        events.wake_by(time.monotonic() + self._settings.standby_idle_s)
        return child

    def ask_to_stop(self, child: ChildHandle, reason: EndReason, message: str | None, verb: str) -> None:
        """Have the guardian `stop` or `kill` the attempt that runs; the first reason asked for is the one that counts."""
        noted = child.note()
        if noted.asked is None:
            noted.asked = (reason, message)
            child.cell.ask_to_stop(child.done + 1, reason)
        self._guardian.tell(f"{verb} {child.name}")

    def drop(self, child: ChildHandle) -> None:
        del self._by_name[child.name]
        if child.sock_open:
            self._events.forget(child.sock)
        child.output.close()
        child.sock.close()
        self._guardian.page.give_back(child.cell)
        child.slot.forget(child)

    # sending

    def write(self, child: ChildHandle, data: bytes) -> None:
        if child.unsent:
            child.unsent += data
            return
        try:
            sent = child.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # The child has just died; the guardian will report that, and its other orders go to the next child.
        if sent < len(data) and child.sock_open:
            child.unsent = data[sent:]
            self._events.change(child.sock, partial(self._flush, child), writable=True)

    def _flush(self, child: ChildHandle) -> None:
        data, child.unsent = child.unsent, b""
        self.write(child, data)
        if not child.unsent and child.sock_open:
            self._events.change(child.sock, partial(self.read_results, child), writable=False)
        self.read_results(child)

    # results

    def read_results(self, child: ChildHandle) -> None:
        while child.sock_open:
            try:
                data = child.sock.recv(262144)
            except OSError:
                # BlockingIOError: all read. ECONNRESET: the child died with orders unread, which the guardian will report.
                return
            if not data:
                # The end of the stream comes before the guardian's report, and epoll would repeat it until then.
                child.stop_reading()
                return
            if child.buffer:
                data = child.buffer + data
                child.buffer = b""
            at, size = 0, len(data)
            while size - at >= _RESULT_BYTES:
                magic, length, kind, flags, started, ended, peak = _unpack_result(data, at)
                if magic != _MAGIC or length > wire.MOST_FRAME_BYTES:
                    self._reject(child)
                    return
                end = at + _RESULT_BYTES + length
                if end > size:
                    break
                if kind == wire.PROGRESS:
                    record_progress(child.note(), data[at + _RESULT_BYTES : end])
                elif flags or peak or child.noted or child.output.size:
                    self._end(child, flags, started, ended, peak, data[at + _RESULT_BYTES : end])
                else:
                    child.done += 1
                    order = child.orders.popleft()
                    self._endings.ended.append(AttemptEnd(order.token, child.slot.index, _SUCCEEDED, started, ended))
                at = end
            if at < size:
                child.buffer = data[at:]
            if not child.orders:
                self._resume_calls(child)
            if len(data) < 262144:
                return

    def _end(self, child: ChildHandle, flags: int, started: float, ended: float, peak: int, payload: bytes) -> None:
        if flags & wire.WAITS:
            # Output in the pipe now is this attempt's: the child begins nothing before the worker has read it.
            child.output.read()
        child.done += 1
        order = child.orders.popleft()
        result = AttemptEnd(order.token, child.slot.index, _SUCCEEDED, started, ended, max_rss_bytes=peak or None)
        self._endings.judge_report(child, order, result, payload if flags & wire.DETAILED else None)
        if flags & wire.RETIRES:
            child.result = result
            child.hand_back()
            child.slot.forks_ahead = not self._settings.reuse
            return
        child.output.add_to(result)
        child.output.reset()
        child.noted = None
        self._endings.ended.append(result)
        if flags & wire.WAITS:
            self.write(child, wire.ORDER_HEADER.pack(wire.MAGIC, 0, wire.GO_ON))

    def _resume_calls(self, child: ChildHandle) -> None:
        """Retire a child whose orders have all ended, if it is held; else send it more."""
        slot = child.slot
        if child.held and child.result is None:
            child.retire()
        elif slot.pending:
            slot.pump()
        else:
            slot.idle_since = time.monotonic()

    def _reject(self, child: ChildHandle) -> None:
        """Kill a child whose report cannot be read; the attempt that runs has failed."""
        child.stop_reading()
        child.held, child.buffer = True, b""
        noted = child.note()
        noted.asked = noted.asked or WROTE_TO_CONTROL
        self._guardian.tell(f"kill {child.name}")

    def _read_output(self, child: ChildHandle) -> None:
        """Read output of the running attempt: a child whose attempt ends with output in the pipe waits for the worker."""
        if not child.output.is_readable():
            return
        before = child.done
        self.read_results(child)
        if child.done == before or child.result is not None:
            child.output.read()

    # ends

    def fail_to_fork(self, child: ChildHandle, error: int) -> None:
        slot, orders = child.slot, child.orders
        was_current = slot.child is child
        self.drop(child)
        if not was_current or not orders:
            slot.forks_ahead = False
            return
        message = f"cannot start a process: {os.strerror(error)}"
        self._endings.add_unable(orders.popleft().token, slot.index, message)
        child.hand_back()
        slot.pump()

    def end_dead(self, child: ChildHandle, status: int, peak: int) -> None:
        """End the attempt of a child that has died with all its processes, and return its other orders."""
        self.read_results(child)
        child.output.read()
        code, slot = os.waitstatus_to_exitcode(status), child.slot
        begun, started, _ = child.cell.begun()
        if child.result is None and begun > child.done and child.orders:
            if code == wire.CLEAN_EXIT and not child.swept:
                # The user's code exited with the status that stands for a child in good order.
                child.swept = True
                self._guardian.tell(f"sweep {child.name}")
                return
            child.result = self._endings.judge_death(child, child.orders.popleft(), code, started, peak)
            self._endings.add_unheard(child, begun)
        slot.false_starts = 0 if begun or code == wire.CLEAN_EXIT else slot.false_starts + 1
        if slot.false_starts >= FALSE_STARTS and child.orders:
            slot.false_starts = 0
            message = f"its process died {FALSE_STARTS} times before it could begin, last with {describe_code(code)}"
            self._endings.add_unable(child.orders.popleft().token, slot.index, message)
        self._finish(child)
        slot.pump()

    def end_lost(self, child: ChildHandle, how: str) -> None:
        """End the attempt of a child that died with its guardian, and return its other orders."""
        self.read_results(child)
        child.output.read()
        begun, started, _ = child.cell.begun()
        if child.result is None and begun > child.done and child.orders:
            child.result = self._endings.judge_loss(child, child.orders.popleft(), started, how)
            self._endings.add_unheard(child, begun)
        self._finish(child)

    def _finish(self, child: ChildHandle) -> None:
        child.hand_back()
        if child.result is not None:
            child.output.add_to(child.result)
            self._endings.ended.append(child.result)
        self.drop(child)


def _code_of(order: AttemptOrder) -> tuple[str | None, str | None, str | None, Mapping[str, str] | None]:
    """Return the facts that orders in one process have in common.

    Among them are the secrets: code of an earlier attempt may have kept a value where the next one would find it. And the
    environment: a process that serves one imports nothing of the code itself.
    """
    return order.code_dir, order.cwd, order.env.get("RUNTIME_PYTHON"), order.secrets


class SlotOrders:
    """Orders of one slot; they run one at a time and in order."""

    def __init__(self, index: int, guardian: GuardianLink, children: ChildPool, endings: EndedAttempts) -> None:
        self.index, self._guardian, self._children, self._endings = index, guardian, children, endings
        self._settings, self._events = guardian.settings, guardian.events
        self.pending: deque[AttemptOrder] = deque()
        self.child: ChildHandle | None = None
        self.standby: ChildHandle | None = None
        self.forks_ahead = False
        """The slot's children serve once, so the next one is forked while one runs."""
        self.false_starts = 0
        """Children in a row that died before they began anything."""
        self.idle_since = time.monotonic()
        self._env: Mapping[str, str] = {}
        self._secrets: Mapping[str, str] | None = None
        self._env_text = ""

    def room(self) -> int:
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
        self.child = self._children.fork(self)

    def send(self, orders: Sequence[AttemptOrder]) -> None:
        """Run these after all earlier orders, strictly in order; one system call if the child takes them at once."""
        self.pending.extend(orders)
        self.pump()

    def pump(self) -> None:
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
            child.code = _code_of(pending[0])
        sent, code, reuse = child.orders, child.code, self._settings.reuse
        frames = []
        while pending and (reuse or not sent):
            order = pending[0]
            if _code_of(order) != code:
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

    def _encode(self, order: AttemptOrder) -> bytes:
        if order.env is not self._env or order.secrets is not self._secrets:
            self._env, self._secrets = order.env, order.secrets
            variables = {**order.env, **(order.secrets or {})}
            self._env_text = json.dumps(variables) if variables else ""
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
