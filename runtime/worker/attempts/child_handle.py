"""One child of the guardian as the worker sees it: its cell of the shared page, its output, its orders, its events."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import selectors
import socket
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.end_reasons import EndReason
from runtime.units import count_noun
from runtime.worker.attempts import wire

if TYPE_CHECKING:
    from runtime.worker.attempts.child_pool import SlotOrders
    from runtime.worker.attempts.model import AttemptEnd, AttemptOrder

LOG_TAIL_BYTES: Final = 64 * 1024
UNDRAINED_BYTES: Final = 4 * 1024 * 1024
_OTHER = wire.STOP_REASONS.index("other")


class Events:
    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._own: set[Any] = set()
        """Files of the pool in the selector, each with the function that reads it."""
        self.due: float | None = None
        """`time.monotonic()` of the next tick; None while nothing is awaited."""
        self.ping_at = 0.0
        """When the guardian is pinged next, while anything is awaited from it or its children."""

    def wake_by(self, due: float) -> None:
        if self.due is None or due < self.due:
            self.due = due

    def await_answer(self) -> None:
        """Have the liveness watch look at a process that now has something to do."""
        if self.due is None or self.ping_at < self.due:
            self.due = self.ping_at

    def listen(self, file: Any, read: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, read)
        self._own.add(file)

    def change(self, file: Any, read: Callable[[], None], *, writable: bool) -> None:
        """Listen with another function, and if `writable` also for room to write."""
        events = selectors.EVENT_READ | selectors.EVENT_WRITE if writable else selectors.EVENT_READ
        self._selector.modify(file, events, read)

    def forget(self, file: Any) -> None:
        self._selector.unregister(file)
        self._own.discard(file)

    def serve(self, timeout_s: float) -> None:
        with selectors.DefaultSelector() as own:
            for file in self._own:
                key = self._selector.get_key(file)
                own.register(file, key.events, key.data)
            for key, _ in own.select(timeout_s):
                if key.fileobj in self._own:
                    key.data()


class Page:
    """The memory that worker, guardian and children share; each child has a cell of it."""

    def __init__(self, cells: int) -> None:
        self.size = cells * wire.CELL_BYTES
        if sys.platform == "linux":
            self.fd = os.memfd_create("runtime-cells")
        else:
            import tempfile

            self.fd, path = tempfile.mkstemp()
            Path(path).unlink()
        os.ftruncate(self.fd, self.size)
        self._memory = mmap.mmap(self.fd, self.size)
        self._free = list(range(0, self.size, wire.CELL_BYTES))

    def take(self) -> Cell:
        at = self._free.pop()
        self._memory[at : at + wire.CELL_BYTES] = bytes(wire.CELL_BYTES)
        return Cell(self._memory, at)

    def give_back(self, cell: Cell) -> None:
        self._free.append(cell.at)

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class Cell:
    """The worker's side of one cell; `runtime.worker.attempts.wire` has its layout."""

    def __init__(self, memory: mmap.mmap, at: int) -> None:
        self._memory, self.at = memory, at

    def begun(self) -> tuple[int, float, float]:
        """Return the orders begun, and the start of the last on the wall and the monotonic clock."""
        begun: tuple[int, float, float] = wire.BEGUN.unpack_from(self._memory, self.at)
        return begun

    def pid(self) -> int:
        (pid,) = wire.PID.unpack_from(self._memory, self.at + wire.PID_AT)
        return int(pid)

    def has(self, flag_at: int) -> bool:
        return bool(self._memory[self.at + flag_at])

    def hold(self) -> None:
        self._memory[self.at + wire.HOLD_AT] = 1
        # The child counts before it looks at HOLD. Leaving the interpreter for the kernel once puts our write before
        # the reading of its count.
        time.sleep(0)

    def ask_to_stop(self, order: int, reason: EndReason) -> None:
        code = wire.STOP_REASONS.index(reason) if reason in wire.STOP_REASONS else _OTHER
        self._memory[self.at + wire.REASON_AT] = code
        wire.STOP.pack_into(self._memory, self.at + wire.STOP_AT, order)


class ChildOutput:
    """Standard output and error of a child, read from its pipe; it holds the current attempt's output."""

    def __init__(self, fd: int, events: Events) -> None:
        self.fd, self._events = fd, events
        self.reset()

    def reset(self) -> None:
        self.size = self._dropped = 0
        self._tail, self._undrained = bytearray(), bytearray()

    def is_readable(self) -> bool:
        """Whether data, or its end, can be read now: an event may be older than the last reading."""
        if self.fd < 0:
            return False
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def read(self) -> None:
        while self.fd >= 0:
            try:
                data = os.read(self.fd, 262144)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            self.size += len(data)
            self._tail += data
            if len(self._tail) > 4 * LOG_TAIL_BYTES:
                del self._tail[:-LOG_TAIL_BYTES]
            self._undrained += data
            if len(self._undrained) > 2 * UNDRAINED_BYTES:
                self._dropped += len(self._undrained) - UNDRAINED_BYTES
                del self._undrained[:-UNDRAINED_BYTES]
            if len(data) < 65536:
                return

    def take_undrained(self) -> bytes:
        data = bytes(self._undrained)
        if self._dropped:
            data = f"[{count_noun(self._dropped, 'byte')} of output not kept]\n".encode() + data
        self._undrained.clear()
        self._dropped = 0
        return data

    def add_to(self, result: AttemptEnd) -> None:
        if self.size:
            result.log, result.log_bytes = bytes(self._tail[-LOG_TAIL_BYTES:]), self.size
            result.undrained = self.take_undrained()

    def close(self) -> None:
        if self.fd >= 0:
            self._events.forget(self.fd)
            os.close(self.fd)
            self.fd = -1


class AttemptNotes:
    """The worker's notes on a running attempt."""

    def __init__(self) -> None:
        self.metrics: Mapping[str, float] = {}
        self.progressed = False
        self.memory_peak = 0
        self.asked: tuple[EndReason, str | None] | None = None
        """Why it was asked to stop."""
        self.kill_at = 0.0


class ChildHandle:
    """A process that serves orders."""

    def __init__(
        self, name: str, slot: SlotOrders, cell: Cell, sock: socket.socket, output: ChildOutput, events: Events
    ) -> None:
        self.name, self.slot, self.cell, self.sock, self.output, self.events = name, slot, cell, sock, output, events
        self.pid = 0
        self.orders: deque[AttemptOrder] = deque()
        """Sent and not ended; the first is the one that runs."""
        self.done = 0
        """Orders that have ended, as the child counts them."""
        self.code: tuple[str | None, str | None, str | None, Mapping[str, str] | None] | None = None
        """Tree, working directory, interpreter and secrets of its first order; the child imports from there and nowhere else."""
        self.buffer = self.unsent = b""
        self.sock_open = True
        self.noted: AttemptNotes | None = None
        """None without a note on the attempt that runs."""
        self.result: AttemptEnd | None = None
        """The end of its last attempt; complete but for the child's own output."""
        self.held = self.swept = False

    def find_pid(self) -> int:
        """Return the pid as the guardian has reported it, or before that the child itself; 0 before both."""
        return self.pid or self.cell.pid()

    def runs(self) -> bool:
        return bool(self.orders) and self.cell.begun()[0] > self.done

    def note(self) -> AttemptNotes:
        if self.noted is None:
            self.noted = AttemptNotes()
        return self.noted

    @property
    def asked(self) -> tuple[EndReason, str | None] | None:
        return self.noted.asked if self.noted else None

    def is_awaited(self) -> bool:
        """Whether the child is about to be forked, begin, end or exit: false only if it waits for its next order."""
        return bool(self.orders or self.result or self.held or not self.sock_open or not self.pid)

    def has_lost_orders(self) -> bool:
        """Whether the child waits for a frame although its socket has none of its orders: user code has read them."""
        waits = self.orders and self.cell.has(wire.WAITS_AT)
        return bool(waits) and not self.unsent and fcntl.ioctl(self.sock, termios.TIOCOUTQ, b"\0" * 4) == b"\0" * 4

    def hold(self) -> int:
        """Have the child begin nothing further; returns the number of its orders that have begun and not ended."""
        self.held = True
        self.cell.hold()
        return self.cell.begun()[0] - self.done

    def replace(self) -> None:
        """Retire the child once the orders that it has begun are over; the next child gets the rest."""
        self.hand_back(self.hold())
        if not self.orders:
            self.retire()

    def hand_back(self, kept: int = 0) -> None:
        """Return all orders but the first `kept` to the front of the slot's."""
        while len(self.orders) > kept:
            self.slot.pending.appendleft(self.orders.pop())

    def retire(self) -> None:
        """Have a child that runs nothing exit at the end of its orders."""
        self.held = True
        self.events.await_answer()
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def stop_reading(self) -> None:
        self.sock_open = False
        self.events.await_answer()
        self.events.forget(self.sock)
