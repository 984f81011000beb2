"""The worker's side of running attempts: a guardian, its children, and what is outstanding on each slot.

A slot runs one attempt at a time. Orders go to it in a row and end in that order. Nothing here blocks or uses
threads: the worker's loop passes on readable keys, and calls `tick` when `next_deadline` has come.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import mmap
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from runtime.errors import InfrastructureFailure, explain_json
from runtime.reasons import EndReason
from runtime.units import format_duration, format_size
from runtime.values import dataclass, field
from runtime.worker.attempts import processes, scratch, wire
from runtime.worker.attempts.entries import signal_name
from runtime.worker.attempts.environment import PRELOADABLE
from runtime.worker.attempts.processes import OomWatch

LOG_TAIL_BYTES: Final = 64 * 1024
UNDRAINED_BYTES: Final = 4 * 1024 * 1024
MEMORY_EVERY_S: Final = 1.0
CLOSE_PATIENCE_S: Final = 30.0
TIDY_PATIENCE_S: Final = 60.0
"""What a child gets beyond the time limit, if its user code has ended within it, until it has tidied up and said so."""
STRAYS_PATIENCE_S: Final = 5.0
FALSE_STARTS: Final = 3
GUARDIAN_FALSE_STARTS: Final = 8
"""So many guardians in a row that died before they were ready: none will run here."""
GUARDIAN_WAIT_S: Final = 0.5
"""Before the next guardian, once a second one in a row has died and nothing ended in between; doubled each time."""
GUARDIAN_LONGEST_WAIT_S: Final = 30.0
PING_EVERY_S: Final = 3.0
SILENCES: Final = 20
"""A guardian that has left this many pings unanswered is killed, and so is a child that has neither begun its order nor
exited by then. Pings are counted, not seconds, because this process may have been stopped together with it."""
SILENCES_WHEN_STOPPED: Final = 2
"""The same for a process that the process table shows as stopped."""
SPARED: Final = 1000
"""Tasks of which we remember that an attempt of theirs was put down to its process."""
SEND_PATIENCE_S: Final = 5


@dataclass(slots=True, eq=False, kw_only=True)
class Order:
    """What one attempt should do. Treated as frozen; it is not declared so because that triples its cost."""

    token: str
    body: str
    """The task's wire JSON."""
    task_id: str
    generation: int = 1
    attempt: int = 1
    """A count from 1; it may repeat."""
    experiment: str = "default"
    timeout_s: float | None = None
    memory_bytes: int = 0
    """What the attempt's processes may hold together; 0 means no limit of ours."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables, such as CUDA_VISIBLE_DEVICES."""
    output_dir: str = ""
    """Made on first use and removed if it stayed empty."""
    checkpoint_dir: str = ""
    scratch_root: str = ""
    """The attempt's scratch is `<scratch_root>/<token>`."""
    cwd: str | None = None
    code_dir: str | None = None
    """A snapshot's tree, of this slot alone (`runtime.worker.attempts.trees`): first on the import path, and the working directory where
    `cwd` is None."""
    snapshot: str | None = None
    """The content id of that tree."""


@dataclass(slots=True, eq=False)
class Ended:
    """How an attempt ended. By then its whole process tree is gone."""

    token: str
    slot: int
    reason: EndReason
    started_at: float
    """Seconds since the epoch; 0 if it never started."""
    ended_at: float
    value: str = ""
    """JSON text of what a function returned; empty for None."""
    message: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    progressed: bool = False
    """It reported progress, or left a new file in its checkpoint folder."""
    log: bytes = b""
    """The last 64 KiB of standard output and error."""
    log_bytes: int = 0
    """How much there was in all."""
    undrained: bytes = b""
    """What `drain_log` has not returned; the whole log if it was never called."""
    max_rss_bytes: int | None = None
    """Peak of the attempt's own process; None where it shared a warm one too shortly to tell."""
    not_started: bool = False
    """It never began and counts in no budget: a stop, or the end of the crew, came first."""


@dataclass(slots=True, eq=False)
class Progress:
    """The last word of a running attempt."""

    at: float
    done: float | None = None
    total: float | None = None
    text: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, frozen=True, kw_only=True)
class CrewSettings:
    reuse: bool = False
    """Warm children run many functions each; otherwise each function or workflow gets a fresh process."""
    hold_fds: tuple[int, ...] = ()
    """Descriptors whose locks stand for the worker's life; the guardian holds them until nothing of ours runs."""
    max_outstanding: int = 64
    """Orders a slot takes at a time, the running one included."""
    max_tasks_per_child: int = 1000
    max_growth_bytes: int = 512 * 1024 * 1024
    """A warm child that has grown by more is replaced."""
    stop_grace_s: float = 10.0
    """Between SIGTERM and SIGKILL after a time-out."""
    standby_idle_s: float = 600.0
    """A child that waits for its first order is let go after a slot was idle for so long."""
    adopt_orphans: bool = False
    """The process that runs the crew has no business but this: should the guardian be killed, every process that
    falls to it is one of ours and is ended."""
    sys_path: Sequence[str] | None = None
    """Import path of the children; None takes this process's own."""


class GuardianFailed(InfrastructureFailure):
    """No guardian could be started; nothing can be run here."""

    def __init__(self, times: int, last: str) -> None:
        super().__init__(
            "the process that starts attempts cannot be started",
            facts=[f"{times} in a row ended before they were ready; the last one {last}"],
            hint="see the worker's stderr and the kernel's log; something on this host may be killing it",
        )


class _Channel(NamedTuple):
    """What our keys in the selector carry."""

    crew: Crew
    read: Callable[[], None]


class _Child:
    """A process that serves orders, as the worker sees it."""

    __slots__ = (
        "asked", "bound", "buffer", "cell", "code", "done", "dropped", "held", "kill_at", "log_bytes", "log_fd",
        "memory_peak", "name", "orders", "out", "overdue", "overdue_at", "pid", "progress", "progressed", "result",
        "retired", "slot", "sock", "sock_open", "swept", "tail", "undrained",
    )  # fmt: skip

    def __init__(self, name: str, slot: _Slot, cell: int, sock: socket.socket, log_fd: int) -> None:
        self.name, self.slot, self.cell, self.sock, self.log_fd = name, slot, cell, sock, log_fd
        self.pid = 0
        self.orders: deque[Order] = deque()
        """Sent and not ended; the first is the one that runs."""
        self.done = 0
        """Orders that have ended, as the child counts them."""
        self.bound = False
        self.code: tuple[str | None, str | None] = None, None
        """Tree and working directory: once bound by its first order it imports from there and nowhere else."""
        self.buffer = b""
        self.out = b""
        """What the socket could not take at once."""
        self.sock_open = True
        self.result: Ended | None = None
        """Complete but for the child's own end."""
        self.retired = self.held = self.swept = False
        self.overdue, self.overdue_at = 0, -1
        """Pings since it should have begun its next order, or exited; and how many orders had ended then."""
        self.reset()

    def reset(self) -> None:
        """Forget the attempt that has ended."""
        self.tail = bytearray()
        self.log_bytes = 0
        self.undrained = bytearray()
        self.dropped = 0
        self.progress: Progress | None = None
        self.progressed = False
        self.memory_peak = 0
        self.asked: tuple[EndReason, str | None] | None = None
        self.kill_at = 0.0


class _Slot:
    __slots__ = ("child", "false_starts", "forks_ahead", "idle_since", "index", "pending", "standby")

    def __init__(self, index: int) -> None:
        self.index = index
        self.pending: deque[Order] = deque()
        self.child: _Child | None = None
        self.standby: _Child | None = None
        self.forks_ahead = False
        """Its children serve once, so the next one is forked while one runs."""
        self.false_starts = 0
        """Children in a row that died before they began anything."""
        self.idle_since = time.monotonic()


class Crew:
    """All the slots of one worker."""

    def __init__(
        self,
        *,
        selector: selectors.BaseSelector,
        slots: int,
        settings: CrewSettings = CrewSettings(),  # noqa: B008 (it is frozen)
    ) -> None:
        self._selector, self.settings = selector, settings
        self._slots = [_Slot(index) for index in range(slots)]
        self._children: dict[str, _Child] = {}
        self._guardian: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._inbox = b""
        self._names = itertools.count(1)
        self._page: mmap.mmap | None = None
        self._page_fd = -1
        self._free_cells: list[int] = []
        self._ended: list[Ended] = []
        self._next: float | None = None
        self._memory_at = 0.0
        self._ready = False
        """The guardian has said that it serves."""
        self._deaths = self._false_starts = 0
        """Guardians in a row: that died before any attempt had ended, and that never were ready."""
        self._start_at = 0.0
        """When the next guardian is started, while there is none."""
        self._ping_at = 0.0
        self._silences = 0
        """Pings since the guardian's last word."""
        self.failure: GuardianFailed | None = None
        """Why nothing will ever run here; orders that have not begun can be taken back."""
        self._oom = OomWatch()
        self._env: Mapping[str, str] = {}
        self._env_text = ""
        self._removals: set[str] = set()
        self._learned: set[str] = set()
        self._spared: deque[str] = deque(maxlen=SPARED)
        """Tasks with an attempt that failed by what others had done to its process."""
        self._closed = False

    def start(self) -> None:
        """Start the guardian, without waiting for it."""
        cells = 2 * len(self._slots) + 2
        self._page_fd = _make_memory(cells * wire.CELL_BYTES)
        self._page = mmap.mmap(self._page_fd, cells * wire.CELL_BYTES)
        self._free_cells = [index * wire.CELL_BYTES for index in range(cells)]
        if self.settings.adopt_orphans:
            processes.find_prctl()(processes.PR_SET_CHILD_SUBREAPER, 1)
        self._start_guardian()
        if self._socket is not None:
            self._slots[0].child = self._fork(self._slots[0])

    def close(self, grace_s: float = 0.0) -> list[Ended]:
        """Stop and end everything, wait until it is gone, and return what had not ended yet.

        Running attempts are asked to stop with reason `preempted` and have `grace_s` for it. Safe to call twice.
        """
        if self._closed or self._page is None:
            return []
        self._closed = True
        for slot in self._slots:
            for token in self.take_back(slot.index):
                self._ended.append(_unstarted(token, slot.index, EndReason.PREEMPTED))
        running = [token for slot in self._slots for token in self.outstanding(slot.index)]
        if grace_s > 0:
            for token in running:
                self.ask_to_stop(token, EndReason.PREEMPTED)
            self._wait_until(lambda: not self._is_busy(), grace_s)
        for token in running:
            self.kill(token, EndReason.PREEMPTED)
        self._wait_until(lambda: not self._is_busy() and not (self._removals and self._socket), CLOSE_PATIENCE_S)
        self._stop_guardian()
        return self._take_ended()

    # orders

    def room(self, slot: int) -> int:
        """How many more orders the slot takes now."""
        held = self._slots[slot]
        return self.settings.max_outstanding - len(held.pending) - (len(held.child.orders) if held.child else 0)

    def send(self, slot: int, orders: Sequence[Order]) -> None:
        """Hand orders to a slot, in one system call where it can take them at once; they run strictly in order."""
        held = self._slots[slot]
        held.pending.extend(orders)
        self._pump(held)

    def outstanding(self, slot: int) -> list[str]:
        """Tokens that have not ended, in order; the first is the one that runs, if any does."""
        held = self._slots[slot]
        sent = [order.token for order in held.child.orders] if held.child else []
        return sent + [order.token for order in held.pending]

    def running(self, slot: int) -> tuple[str, float] | None:
        """Token of the attempt that has begun and its start in seconds since the epoch."""
        child = self._slots[slot].child
        if child is None or not child.orders:
            return None
        begun, started, _ = self._begun(child)
        return (child.orders[0].token, started) if begun > child.done else None

    def take_back(self, slot: int) -> list[str]:
        """Drop the orders that have not begun and return their tokens; none of them will run or be reported.

        As with every call here, attempts that turn out to have ended are returned by the next `ready` or `tick`,
        for which `next_deadline` asks at once.
        """
        held = self._slots[slot]
        self._recall(held)
        tokens = [order.token for order in held.pending]
        held.pending.clear()
        return tokens

    # events

    def owns(self, key: selectors.SelectorKey) -> bool:
        return type(key.data) is _Channel and key.data.crew is self

    def ready(self, key: selectors.SelectorKey) -> list[Ended]:
        """Read what a key of ours has; returns the attempts that ended by it."""
        channel: _Channel = key.data
        channel.read()
        return self._take_ended()

    def tick(self) -> list[Ended]:
        """Deadlines, memory, idle children; returns attempts that ended by it. Cheap when nothing is due."""
        now = time.monotonic()
        if self._next is not None and now >= self._next:
            self._next = None
            self._watch_guardian(now)
            self._watch_memory(now)
            for slot in self._slots:
                self._watch(slot, now)
        return self._take_ended()

    def next_deadline(self) -> float | None:
        """`time.monotonic()` at which `tick` is next due; None while nothing is awaited."""
        return 0.0 if self._ended else self._next

    # stopping

    def ask_to_stop(self, token: str, reason: EndReason) -> None:
        """SIGTERM to the attempt's session. Unless it succeeds, it is reported with `reason`.

        One that has not begun is reported as not started. An unknown or ended token is passed over.
        """
        self._stop(token, reason, None, "stop")

    def kill(self, token: str, reason: EndReason, message: str | None = None) -> None:
        """As `ask_to_stop`, with SIGKILL to its whole tree."""
        self._stop(token, reason, message, "kill")

    # what running attempts say

    def progress(self, token: str) -> Progress | None:
        """The last word of a running attempt; None if it said nothing or is not running."""
        child = self._find(token)
        return child.progress if child else None

    def drain_log(self, token: str) -> bytes:
        """Output since the last call; after more than 4 MiB only its end, led by a line that says so."""
        child = self._find(token)
        return _take_undrained(child) if child else b""

    # processes

    def attempt_of(self, pid: int) -> str | None:
        """The token of the running attempt that a process belongs to; None if it belongs to none, or is gone."""
        born = {self._pid(child): child for child in self._children.values()}
        born.pop(0, None)
        while (child := born.get(pid)) is None:
            process = processes.find_process(pid)
            if process is None:
                return None
            pid = process.ppid
        return child.orders[0].token if child.orders else None

    # files

    def discard(self, path: str) -> None:
        """Remove a tree in the background; `close` waits for it."""
        self._removals.add(path)
        self._tell(f"remove {path}")

    # inspection

    def pids(self) -> list[int]:
        """The guardian and its children."""
        guardian = [self._guardian.pid] if self._guardian else []
        return guardian + [child.pid for child in self._children.values() if child.pid]

    # ------------------------------------------------------------------ orders to children

    def _pump(self, slot: _Slot) -> None:
        """Send what the slot's child can take now."""
        pending = slot.pending
        if self._closed:
            self._ended += [_unstarted(order.token, slot.index, EndReason.PREEMPTED) for order in pending]
            pending.clear()
        if not pending or self._socket is None:
            return
        child = slot.child
        if child is None:
            child = slot.child = self._next_child(slot)
        if child.retired or child.held:
            return
        if not child.bound:
            child.bound, child.code = True, (pending[0].code_dir, pending[0].cwd)
        sent, code, reuse = child.orders, child.code, self.settings.reuse
        frames = []
        while pending and (reuse or not sent):
            order = pending[0]
            if (order.code_dir, order.cwd) != code:
                if not sent:
                    self._retire(child)
                break
            if order.timeout_s is not None or order.memory_bytes:
                self._awake_by(time.monotonic() + min(order.timeout_s or MEMORY_EVERY_S, MEMORY_EVERY_S))
            sent.append(order)
            frames.append(self._encode(order))
            pending.popleft()
        if frames:
            self._write(child, b"".join(frames))
            self._awake_by(self._ping_at)
            if slot.forks_ahead and slot.standby is None:
                slot.standby = self._fork(slot)

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

    def _write(self, child: _Child, data: bytes) -> None:
        if child.out:
            child.out += data
            return
        try:
            sent = child.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # It has just died; its end is on the way, and what it had not begun goes to the next one.
        if sent < len(data) and child.sock_open:
            child.out = data[sent:]
            self._listen(child, partial(self._flush, child), selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _flush(self, child: _Child) -> None:
        data, child.out = child.out, b""
        self._write(child, data)
        if not child.out and child.sock_open:
            self._listen(child, partial(self._read_results, child), selectors.EVENT_READ)
        self._read_results(child)

    def _recall(self, slot: _Slot) -> None:
        """Bring the orders that the slot's child has not begun back to the front of what is pending."""
        child = slot.child
        if child is None or not child.orders:
            return
        self._read_results(child)
        if self._begun(child)[0] - child.done < len(child.orders) and self._page is not None:
            self._replace(child)

    def _replace(self, child: _Child) -> None:
        """Let a child go once what it has begun is over; the rest of its orders is for the next one."""
        kept = self._hold(child)
        while len(child.orders) > kept:
            child.slot.pending.appendleft(child.orders.pop())
        if not child.orders:
            self._retire(child)

    def _hold(self, child: _Child) -> int:
        """Have a child begin nothing further; returns how many of its orders have begun and not ended."""
        assert self._page is not None
        child.held = True
        self._page[child.cell + wire.HOLD_AT] = 1
        # The child counts before it looks at HOLD. Leaving the interpreter for the kernel once puts our write before
        # the reading of its count.
        time.sleep(0)
        return self._begun(child)[0] - child.done

    def _retire(self, child: _Child) -> None:
        """Let a child go that runs nothing: it exits at the end of its orders."""
        child.held = True
        self._awake_by(self._ping_at)
        try:
            child.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    # ------------------------------------------------------------------ children

    def _next_child(self, slot: _Slot) -> _Child:
        child, slot.standby = slot.standby, None
        return child or self._fork(slot)

    def _fork(self, slot: _Slot) -> _Child:
        ours, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe()
        ours.setblocking(False)
        os.set_blocking(read_fd, False)
        cell = self._free_cells.pop()
        assert self._page is not None
        self._page[cell : cell + wire.CELL_BYTES] = bytes(wire.CELL_BYTES)
        child = _Child(str(next(self._names)), slot, cell, ours, read_fd)
        self._children[child.name] = child
        self._selector.register(ours, selectors.EVENT_READ, _Channel(self, partial(self._read_results, child)))
        self._selector.register(read_fd, selectors.EVENT_READ, _Channel(self, partial(self._read_log, child)))
        self._tell(f"fork {child.name} {cell}", (theirs.fileno(), write_fd))
        theirs.close()
        os.close(write_fd)
        self._awake_by(time.monotonic() + self.settings.standby_idle_s)
        return child

    def _drop(self, child: _Child) -> None:
        """Forget a child that is gone."""
        del self._children[child.name]
        if child.sock_open:
            self._selector.unregister(child.sock)
        if child.log_fd >= 0:
            self._close_log(child)
        child.sock.close()
        self._free_cells.append(child.cell)
        slot = child.slot
        if slot.standby is child:
            slot.standby = None
        if slot.child is child:
            slot.child = None
            slot.idle_since = time.monotonic()

    def _close_log(self, child: _Child) -> None:
        self._selector.unregister(child.log_fd)
        os.close(child.log_fd)
        child.log_fd = -1

    def _begun(self, child: _Child) -> tuple[int, float, float]:
        """Orders begun, and the start of the last on the wall and the monotonic clock."""
        if self._page is None:
            return 0, 0.0, 0.0
        begun: tuple[int, float, float] = wire.BEGUN.unpack_from(self._page, child.cell)
        return begun

    def _pid(self, child: _Child) -> int:
        """As the guardian has told, or before that the child itself; 0 before that."""
        if child.pid or self._page is None:
            return child.pid
        (pid,) = wire.PID.unpack_from(self._page, child.cell + wire.PID_AT)
        return int(pid)

    def _find(self, token: str) -> _Child | None:
        """The child whose current attempt this is."""
        for slot in self._slots:
            child = slot.child
            if child is not None and child.orders and child.orders[0].token == token:
                return child
        return None

    # ------------------------------------------------------------------ what children say

    def _read_results(self, child: _Child) -> None:
        while child.sock_open:
            try:
                data = child.sock.recv(262144)
            except OSError:
                # BlockingIOError: all read. ECONNRESET: it died with orders unread, and its end is on the way.
                return
            if not data:
                # The end of the stream comes before the guardian's word, and epoll would repeat it until then.
                self._stop_reading(child)
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
                    child.progress = _parse_progress(data[at + _RESULT_BYTES : end], started) or child.progress
                    child.progressed = child.progressed or bool(child.progress and child.progress.done is not None)
                elif flags or peak or child.asked or child.log_bytes or child.progress:
                    self._end_with_result(child, flags, started, ended, peak, data[at + _RESULT_BYTES : end])
                else:
                    child.done += 1
                    order = child.orders.popleft()
                    self._ended.append(Ended(order.token, child.slot.index, _SUCCEEDED, started, ended))
                at = end
            if at < size:
                child.buffer = data[at:]
            if not child.orders:
                self._rest(child)
            if len(data) < 262144:
                return

    def _stop_reading(self, child: _Child) -> None:
        child.sock_open = False
        self._awake_by(self._ping_at)
        self._selector.unregister(child.sock)

    def _reject(self, child: _Child) -> None:
        """Kill a child whose word cannot be read; the attempt that runs has failed."""
        self._stop_reading(child)
        child.held, child.buffer = True, b""
        child.asked = child.asked or (EndReason.APP_FAILED, f"wrote to {_CONTROL}")
        self._tell(f"kill {child.name}")

    def _rest(self, child: _Child) -> None:
        """All its orders have ended."""
        slot = child.slot
        if child.held and not child.retired:
            self._retire(child)
        elif slot.pending:
            self._pump(slot)
        else:
            slot.idle_since = time.monotonic()

    def _end_with_result(
        self, child: _Child, flags: int, started: float, ended: float, peak: int, payload: bytes
    ) -> None:
        """A result with more to it than success."""
        if flags & wire.WAITS:
            # What is in the pipe now is this attempt's: the child begins nothing before we have read it.
            self._read_output(child)
        child.done += 1
        order = child.orders.popleft()
        result = Ended(order.token, child.slot.index, _SUCCEEDED, started, ended)
        result.max_rss_bytes = peak or None
        if flags & wire.DETAILED:
            imported = _fill_in(result, payload)
            self._learn(imported or ())
            if imported is None or result.reason is EndReason.SETUP_FAILED:
                self._distrust(child, order, result, began=imported is None)
        if result.reason is not _SUCCEEDED:
            self._judge_sigkill(result)
        if result.reason is not _SUCCEEDED and child.asked:
            _override(result, *child.asked)
        self._add_evidence(child, order, result)
        if flags & wire.RETIRES:
            child.retired, child.result = True, result
            # Its remaining orders never began.
            while child.orders:
                child.slot.pending.appendleft(child.orders.pop())
            child.slot.forks_ahead = not self.settings.reuse
            return
        self._add_log(child, result)
        child.reset()
        self._ended.append(result)
        if flags & wire.WAITS:
            self._write(child, _pack_order(wire.MAGIC, 0, wire.GO_ON))

    def _distrust(self, child: _Child, order: Order, result: Ended, *, began: bool) -> None:
        """Replace a child that failed at what it does around user code; what ran in it before may have caused that.

        So if anything has, this end spends no failure, once for each task. After that it is the task's own.
        """
        self._replace(child)
        if child.done == 1 or child.asked or order.task_id in self._spared:
            return
        self._spared.append(order.task_id)
        result.reason, result.not_started = EndReason.PREEMPTED, not began
        result.message = f"other attempts in its process may have caused this: {result.message}"

    def _learn(self, imported: Sequence[str]) -> None:
        """Have the guardian load what fresh attempts of ours load."""
        names = PRELOADABLE.intersection(imported) - self._learned
        if names:
            self._learned |= names
            self._tell(f"preload {' '.join(sorted(names))}")

    def _add_evidence(self, child: _Child, order: Order, result: Ended) -> None:
        """What was seen from here of the attempt that has ended."""
        if child.progress is not None:
            result.progressed = result.progressed or child.progressed
            if not result.metrics:
                result.metrics = child.progress.metrics
        if child.memory_peak:
            result.max_rss_bytes = max(result.max_rss_bytes or 0, child.memory_peak)
        if result.reason is not _SUCCEEDED and not result.progressed and order.checkpoint_dir and result.started_at:
            result.progressed = scratch.has_new_file(order.checkpoint_dir, result.started_at)

    def _add_log(self, child: _Child, result: Ended) -> None:
        if child.log_bytes:
            result.log, result.log_bytes = bytes(child.tail[-LOG_TAIL_BYTES:]), child.log_bytes
            result.undrained = _take_undrained(child)

    def _read_log(self, child: _Child) -> None:
        """Output came. It belongs to the attempt that runs: one that ends with output in the pipe waits for us."""
        if child.log_fd < 0 or not _is_readable(child.log_fd):
            return
        before = child.done
        self._read_results(child)
        if child.done == before or child.retired:
            self._read_output(child)

    def _read_output(self, child: _Child) -> None:
        while child.log_fd >= 0:
            try:
                data = os.read(child.log_fd, 262144)
            except BlockingIOError:
                return
            if not data:
                self._close_log(child)
                return
            child.log_bytes += len(data)
            child.tail += data
            if len(child.tail) > 4 * LOG_TAIL_BYTES:
                del child.tail[:-LOG_TAIL_BYTES]
            child.undrained += data
            if len(child.undrained) > 2 * UNDRAINED_BYTES:
                child.dropped += len(child.undrained) - UNDRAINED_BYTES
                del child.undrained[:-UNDRAINED_BYTES]
            if len(data) < 65536:
                return

    # ------------------------------------------------------------------ the guardian

    def _start_guardian(self) -> None:
        """Start it, without waiting for it. If that fails, `tick` tries again."""
        ours, theirs = socket.socketpair()
        # A guardian that does not read must not stop the loop.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_PATIENCE_S, 0))
        source = str(Path(__file__).resolve().parents[3])
        self._ready, self._silences = False, 0
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-P", "-c", _GUARDIAN, source, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._page_fd, *self.settings.hold_fds),
                start_new_session=True,
            )
        except OSError as problem:
            ours.close()
            theirs.close()
            self._start_later(f"could not be started: {problem}")
            return
        theirs.close()
        self._socket = ours
        self._inbox = b""
        self._learned.clear()
        settings = self.settings
        sys_path = sys.path if settings.sys_path is None else settings.sys_path
        here = str(Path.cwd())
        self._tell(
            json.dumps(
                {
                    "worker_pid": os.getpid(),
                    "page_fd": self._page_fd,
                    "page_bytes": len(self._page) if self._page else 0,
                    "hold_fds": settings.hold_fds,
                    "reuse": settings.reuse,
                    "max_tasks": settings.max_tasks_per_child,
                    "max_growth_bytes": settings.max_growth_bytes,
                    "sys_path": [item or here for item in sys_path],
                }
            )
        )
        self._selector.register(ours, selectors.EVENT_READ, _Channel(self, self._read_guardian))
        for path in self._removals:
            self._tell(f"remove {path}")
        for slot in self._slots:
            self._pump(slot)

    def _start_later(self, how: str) -> None:
        """A guardian has ended: plan the next one, later and later as long as nothing gets done between two ends."""
        self._deaths += 1
        self._false_starts = 0 if self._ready else self._false_starts + 1
        if self._false_starts >= GUARDIAN_FALSE_STARTS:
            self.failure = GuardianFailed(self._false_starts, how)
        wait = min(GUARDIAN_LONGEST_WAIT_S, GUARDIAN_WAIT_S * 2 ** (self._deaths - 2)) if self._deaths > 1 else 0.0
        self._start_at = time.monotonic() + wait
        self._awake_by(self._start_at)

    def _watch_guardian(self, now: float) -> None:
        """Start the next one when it is due; end one that is silent, through which nothing else could be ended."""
        if self._guardian is None or self._socket is None:
            if self._closed or self.failure is not None:
                return
            if now >= self._start_at:
                self._start_guardian()
            else:
                self._awake_by(self._start_at)
            return
        awaited = [child for child in self._children.values() if _is_awaited(child)]
        if not self._removals and not awaited:
            self._silences = 0
            return
        if now >= self._ping_at:
            stopped = processes.is_stopped(self._guardian.pid) if self._silences else False
            if self._silences >= (SILENCES_WHEN_STOPPED if stopped else SILENCES):
                state = "was stopped" if stopped else "did not answer"
                self._replace_guardian(f"{state} and had to be killed")
                return
            self._silences += 1
            self._ping_at = now + PING_EVERY_S
            self._tell("ping")
            for child in awaited:
                self._watch_overdue(child)
        self._awake_by(self._ping_at)

    def _stop_guardian(self) -> None:
        """Close our end, upon which it ends everything; wait for that."""
        assert self._page is not None
        for child in list(self._children.values()):
            self._drop(child)
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None
        if self._guardian is not None:
            self._guardian.send_signal(signal.SIGCONT)
            try:
                self._guardian.wait(CLOSE_PATIENCE_S)
            except subprocess.TimeoutExpired:
                pass  # Something cannot be killed; the guardian waits for it, and holds our locks as long.
            self._guardian = None
        self._page.close()
        self._page = None
        os.close(self._page_fd)

    def _tell(self, message: str, fds: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        self._awake_by(self._ping_at)
        data = f"{message}\0".encode("utf-8", "surrogateescape")
        try:
            if fds:
                socket.send_fds(self._socket, [data], fds)
            else:
                self._socket.sendall(data)
        except BlockingIOError:
            # It has not read for seconds, and what it was told now is lost.
            self._silences, self._ping_at = SILENCES, 0.0
            self._awake_by(0.0)
        except OSError:
            pass  # It has died; reading its socket says so.

    def _read_guardian(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._replace_guardian()
            return
        self._silences = 0
        *messages, self._inbox = (self._inbox + data).split(b"\0")
        for message in messages:
            self._hear(message.decode("utf-8", "surrogateescape"))

    def _hear(self, message: str) -> None:
        verb, _, rest = message.partition(" ")
        if verb == "removed":
            self._removals.discard(rest)
            return
        if verb == "ready":
            self._ready = True
            return
        name, _, value = rest.partition(" ")
        child = self._children.get(name)
        if child is None:
            return
        if verb == "forked":
            child.pid = int(value)
        elif verb == "failed":
            self._fail_to_fork(child, int(value))
        elif verb == "exited":
            status, _, peak = value.partition(" ")
            self._bury(child, int(status), int(peak))

    def _fail_to_fork(self, child: _Child, error: int) -> None:
        slot, orders = child.slot, list(child.orders)
        was_current = slot.child is child
        self._drop(child)
        if not was_current or not orders:
            slot.forks_ahead = False
            return
        now = time.time()
        first, *others = orders
        message = f"cannot start a process: {os.strerror(error)}"
        self._ended.append(Ended(first.token, slot.index, EndReason.SETUP_FAILED, now, now, message=message))
        slot.pending.extendleft(reversed(others))
        self._pump(slot)

    def _bury(self, child: _Child, status: int, peak: int) -> None:
        """A child is gone, with all that it left behind."""
        self._deaths = 0
        self._read_results(child)
        self._read_output(child)
        code = os.waitstatus_to_exitcode(status)
        begun, started, _ = self._begun(child)
        if child.result is None and begun > child.done and child.orders:
            if code == wire.CLEAN_EXIT and not child.swept:
                # The user's code took the exit status that stands for a child in good order.
                child.swept = True
                self._tell(f"sweep {child.name}")
                return
            order = child.orders.popleft()
            child.result = self._judge_death(child, order, code, started, peak)
            self._give_back_unheard(child, begun)
        slot, result = child.slot, child.result
        slot.false_starts = 0 if begun or code == wire.CLEAN_EXIT else slot.false_starts + 1
        if slot.false_starts >= FALSE_STARTS and child.orders:
            slot.false_starts = 0
            now = time.time()
            message = f"its process died {FALSE_STARTS} times before it could begin, last with {_describe_code(code)}"
            token = child.orders.popleft().token
            result = Ended(token, slot.index, EndReason.SETUP_FAILED, now, now, message=message)
        slot.pending.extendleft(reversed(child.orders))
        child.orders.clear()
        if result is not None:
            self._add_log(child, result)
            self._ended.append(result)
        self._drop(child)
        self._pump(slot)

    def _give_back_unheard(self, child: _Child, begun: int) -> None:
        """End attempts that began after one that spoilt the socket: however they ended, nobody has heard of it."""
        now = time.time()
        for _ in range(begun - child.done - 1):
            order = child.orders.popleft()
            message = "another attempt in its process kept it from reporting how it ended"
            self._ended.append(Ended(order.token, child.slot.index, EndReason.PREEMPTED, now, now, message=message))
            self._clean_up(order)

    def _judge_death(self, child: _Child, order: Order, code: int, started: float, peak: int) -> Ended:
        """What ended an attempt whose process died without a word."""
        result = Ended(order.token, child.slot.index, EndReason.APP_FAILED, started, time.time())
        result.max_rss_bytes = peak or None
        if code < 0:
            result.signal = -code
            result.message = f"died of {_describe_code(code)}"
        else:
            result.exit_code = code
            result.message = f"the process exited with {_describe_code(code)} before the attempt had ended"
        if self._page is not None and self._page[child.cell + wire.CLOSED_AT]:
            result.exit_code, result.message = None, f"closed {_CONTROL}"
        self._judge_sigkill(result)
        if child.asked:
            _override(result, *child.asked)
        self._add_evidence(child, order, result)
        self._clean_up(order)
        return result

    def _clean_up(self, order: Order) -> None:
        """What the attempt's own process could no longer do."""
        if order.scratch_root and os.path.lexists(f"{order.scratch_root}/{order.token}"):
            self.discard(f"{order.scratch_root}/{order.token}")
        if order.output_dir:
            scratch.remove_empty(order.output_dir, parents=1)

    def _judge_sigkill(self, result: Ended) -> None:
        """Whether it was killed for memory. Asked at each failure, so that what the counter counts is not old."""
        kills = self._oom.kills()
        if result.signal != signal.SIGKILL and result.exit_code != 128 + signal.SIGKILL:
            return
        if kills:
            result.reason = EndReason.OOM
            result.message = "killed for memory by the kernel: the count of out-of-memory kills rose"
            if result.max_rss_bytes:
                result.message += f"; at its peak the process held {format_size(result.max_rss_bytes)}"
        elif result.signal:
            result.message = (
                "killed by signal 9 (SIGKILL) from outside; nothing shows that memory ran out: `dmesg` may say who did"
            )

    def _replace_guardian(self, how: str | None = None) -> None:
        """Its children end with it. End what they left, and begin again. `how` says why it was ended, if it was."""
        assert self._socket is not None
        self._selector.unregister(self._socket)
        self._socket.close()
        self._socket = None
        guardian, self._guardian = self._guardian, None
        children = list(self._children.values())
        self._end_strays(guardian, children)
        if how is None:
            how = f"ended with {_describe_code(guardian.returncode)}" if guardian else "ended"
        for child in children:
            self._lose(child, how)
        self._start_later(how)
        for slot in self._slots:
            self._pump(slot)

    def _lose(self, child: _Child, how: str) -> None:
        self._read_results(child)
        self._read_output(child)
        if child.done:
            self._deaths = 0
        begun, started, _ = self._begun(child)
        result = child.result
        if result is None and begun > child.done and child.orders:
            order = child.orders.popleft()
            result = Ended(order.token, child.slot.index, EndReason.LOST, started, time.time())
            result.message = f"the guardian of this worker {how}, and the attempt with it"
            if child.asked:
                _override(result, *child.asked)
            self._add_evidence(child, order, result)
            self._clean_up(order)
            self._give_back_unheard(child, begun)
        child.slot.pending.extendleft(reversed(child.orders))
        child.orders.clear()
        if result is not None:
            self._add_log(child, result)
            self._ended.append(result)
        self._drop(child)

    def _end_strays(self, guardian: subprocess.Popen[bytes] | None, children: list[_Child]) -> None:
        """Kill what the guardian's children had started, and the guardian.

        As long as it lives, stopped or not, all of that is below it. Of one that is dead the children died with it;
        what they had started shares their session or bears an attempt's token, unless it scrubbed both; only a process
        that adopts orphans finds that too.
        """
        born = {pid for child in children if (pid := self._pid(child))}
        tokens = [order.token for child in children for order in child.orders]
        give_up, pause = time.monotonic() + STRAYS_PATIENCE_S, 0.001
        if guardian is not None:
            # Stopped, it neither forks nor waits for what we kill.
            guardian.send_signal(signal.SIGSTOP)
            while below := processes.find_descendants(processes.read_table(), guardian.pid):
                processes.send_signal(below, signal.SIGKILL)
                if time.monotonic() >= give_up:
                    break
                time.sleep(0.001)
            guardian.kill()
            guardian.wait()
        own_session, me = os.getsid(0), os.getpid()
        while time.monotonic() < give_up:
            table = processes.read_table()
            if any(pid in table and not table[pid].dead for pid in born):
                # They first: one whose command we end would still report that as how its attempt ended.
                processes.send_signal(born, signal.SIGKILL)
                time.sleep(0.001)
                continue
            strays = set(processes.find_marked(table, tokens))
            for process in table.values():
                adopted = self.settings.adopt_orphans and process.ppid == me and process.session != own_session
                if (process.session in born or adopted) and process.pid != me:
                    strays.add(process.pid)
            for pid in list(strays):
                strays.update(processes.find_descendants(table, pid))
            living = [pid for pid in strays if not table[pid].dead]
            processes.send_signal(living, signal.SIGKILL)
            for pid in strays:
                if table[pid].ppid == me:
                    _reap(pid)
            if not living:
                return
            time.sleep(pause)
            pause = min(pause * 2, 0.05)

    # ------------------------------------------------------------------ time, memory, stops

    def _stop(self, token: str, reason: EndReason, message: str | None, verb: str) -> None:
        child = self._find(token)
        if child is not None:
            self._read_results(child)
            child = self._find(token)
        if child is not None and self._begun(child)[0] > child.done:
            self._signal(child, reason, message, verb)
            return
        for slot in self._slots:
            if token in self.outstanding(slot.index):
                self._withdraw(slot, token, reason)
                return

    def _withdraw(self, slot: _Slot, token: str, reason: EndReason) -> None:
        """Take an order back that has not begun; it may begin meanwhile, and is stopped then."""
        self._recall(slot)
        for order in slot.pending:
            if order.token == token:
                slot.pending.remove(order)
                self._ended.append(_unstarted(token, slot.index, reason))
                break
        else:
            child = self._find(token)
            if child is not None:
                self._signal(child, reason, None, "stop")
        self._pump(slot)

    def _signal(self, child: _Child, reason: EndReason, message: str | None, verb: str) -> None:
        assert self._page is not None
        if child.asked is None:
            child.asked = (reason, message)
            code = wire.STOP_REASONS.index(reason) if reason in wire.STOP_REASONS else _OTHER
            self._page[child.cell + wire.REASON_AT] = code
            wire.STOP.pack_into(self._page, child.cell + wire.STOP_AT, child.done + 1)
        self._tell(f"{verb} {child.name}")

    def _awake_by(self, due: float) -> None:
        if self._next is None or due < self._next:
            self._next = due

    def _watch(self, slot: _Slot, now: float) -> None:
        child = slot.child
        if child is not None and child.orders:
            self._watch_deadline(child, now)
            if any(order.memory_bytes for order in child.orders):
                self._awake_by(now + MEMORY_EVERY_S)
            self._awake_by(now + self.settings.standby_idle_s)
        for idle in (slot.standby, None if child and child.orders else child):
            if idle is None or idle.held:
                continue
            since = slot.idle_since + self.settings.standby_idle_s
            if now >= since and not (slot.index == 0 and idle is child):
                self._retire(idle)
            elif slot.index or idle is not child:
                self._awake_by(max(since, now + 1.0))

    def _watch_deadline(self, child: _Child, now: float) -> None:
        begun, _, began = self._begun(child)
        order = child.orders[0]
        assert self._page is not None
        if begun <= child.done:
            if any(waiting.timeout_s is not None for waiting in child.orders):
                self._awake_by(now + 0.05)
            return
        if order.timeout_s is not None:
            due = began + order.timeout_s
            if now < due:
                self._awake_by(due)
                return
            timed_out = f"timed out after {format_duration(order.timeout_s)}"
            if child.kill_at and now >= child.kill_at:
                child.asked = child.asked or (
                    EndReason.TIMEOUT,
                    f"{timed_out}: its code had ended, but not what its process does after that",
                )
                self._tell(f"kill {child.name}")
                child.kill_at = now + 5.0
            elif not child.kill_at and self._page[child.cell + wire.OVER_AT]:
                child.kill_at = now + TIDY_PATIENCE_S
            elif not child.kill_at:
                # One that was asked to stop before will end for that reason, and its limit holds all the same.
                if child.asked is None:
                    self._signal(child, EndReason.TIMEOUT, timed_out, "stop")
                child.kill_at = now + self.settings.stop_grace_s
            self._awake_by(child.kill_at)
        for waiting in child.orders:
            if waiting.timeout_s is not None and waiting is not order:
                self._awake_by(now + waiting.timeout_s)

    def _watch_overdue(self, child: _Child) -> None:
        """Kill a child that neither begins its next order nor exits, as it should; what it has not begun is not lost.

        User code has stopped it, keeps its interpreter busy from a thread, or has read its order from the socket.
        """
        assert self._page is not None
        begun = self._begun(child)[0]
        runs = begun > child.done and bool(child.orders)
        stopped = child.pid != 0 and not runs and processes.is_stopped(child.pid)
        # A child that has run nothing yet may be slow, on a machine that swaps or with much code to lay out.
        if runs or not (stopped or begun):
            child.overdue = 0
            return
        if child.overdue_at != child.done:
            child.overdue, child.overdue_at = 0, child.done
        waits = child.orders and self._page[child.cell + wire.WAITS_AT]
        robbed = waits and not child.out and not _has_unread(child.sock)
        if child.overdue < (SILENCES_WHEN_STOPPED if stopped or robbed else SILENCES):
            child.overdue += 1
            return
        child.overdue = 0
        if not child.orders or self._hold(child) <= 0:
            self._tell(f"kill {child.name}")

    def _watch_memory(self, now: float) -> None:
        watched = [
            slot.child
            for slot in self._slots
            if slot.child and slot.child.pid and slot.child.orders and slot.child.orders[0].memory_bytes
        ]
        if not watched or now < self._memory_at:
            return
        self._memory_at = now + MEMORY_EVERY_S * 0.9
        table = processes.read_table()
        for child in watched:
            limit = child.orders[0].memory_bytes
            used = processes.tree_memory_bytes(table, child.pid, limit_bytes=limit)
            child.memory_peak = max(child.memory_peak, used)
            if used > limit and self._begun(child)[0] > child.done:
                message = f"used {format_size(used)} of memory, over its limit of {format_size(limit)}"
                self._signal(child, EndReason.OOM, message, "kill")

    # ------------------------------------------------------------------ odds and ends

    def _take_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def _is_busy(self) -> bool:
        return any(slot.pending or (slot.child and (slot.child.orders or slot.child.result)) for slot in self._slots)

    def _wait_until(self, done: Callable[[], bool], patience_s: float) -> None:
        """Serve our own descriptors alone until `done`, or for so long."""
        give_up = time.monotonic() + patience_s
        while not done() and (left := give_up - time.monotonic()) > 0:
            with selectors.DefaultSelector() as own:
                for key in list(self._selector.get_map().values()):
                    if self.owns(key) and key.events:
                        own.register(key.fileobj, key.events, key.data)
                for key, _ in own.select(min(left, 0.2)):
                    if key.fd in self._selector.get_map():
                        key.data.read()
            ended, self._ended = self._ended, []
            self._ended = ended + self.tick()

    def _listen(self, child: _Child, read: Callable[[], None], events: int) -> None:
        self._selector.modify(child.sock, events, _Channel(self, read))


# The standard library first: a folder that is put in front of it may hold a module with one of its names.
_GUARDIAN = """
import faulthandler, fcntl, importlib.machinery, json, mmap, resource, select, signal, socket, sys, termios
sys.path.insert(0, sys.argv[1])
from runtime.worker.attempts.guardian import main
main(int(sys.argv[2]))
"""

# The fast path of each result: looked up once.
_SUCCEEDED = EndReason.SUCCEEDED
_RESULT_BYTES = wire.RESULT_HEADER.size
_MAGIC = wire.MAGIC
_unpack_result = wire.RESULT_HEADER.unpack_from
_pack_order = wire.ORDER_HEADER.pack
_OTHER = wire.STOP_REASONS.index("other")
_CONTROL: Final = (
    f"file descriptor {wire.CONTROL_FD}, over which its process reports to the worker; "
    "use only descriptors that your code has opened"
)


def _unstarted(token: str, slot: int, reason: EndReason) -> Ended:
    now = time.time()
    return Ended(token, slot, reason, 0.0, now, message="stopped before it began", not_started=True)


def _describe_code(code: int) -> str:
    return f"code {code}" if code >= 0 else f"signal {-code} ({signal_name(-code)})"


def _is_awaited(child: _Child) -> bool:
    """Whether it is to begin, end or exit, or yet to be forked: all but a child that waits for its next order."""
    return bool(child.orders or child.result or child.held or not child.sock_open or not child.pid)


def _fill_in(result: Ended, payload: bytes) -> Sequence[str] | None:
    """The child's details and value; returns what it imported.

    Details that cannot be read are the attempt's failure; then it returns None.
    """
    try:
        (length,) = wire.DETAIL_HEADER.unpack_from(payload)
        split = wire.DETAIL_HEADER.size + length
        details: dict[str, Any] = json.loads(payload[wire.DETAIL_HEADER.size : split])
        result.value = payload[split:].decode("utf-8", "surrogatepass")
        result.reason = EndReason(details["outcome"])
        result.message = str(details["message"]) if details.get("message") else None
        result.exit_code = _number(details.get("exit_code"))
        result.signal = _number(details.get("signal"))
        result.metrics = _numbers(details.get("metrics"))
        result.progressed = bool(details.get("progressed"))
        return [str(name) for name in details.get("imported") or ()]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, RecursionError, struct.error) as problem:
        result.reason, result.value = EndReason.APP_FAILED, ""
        result.message = f"what it reported cannot be read: {explain_json(problem)}"
        return None


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _numbers(metrics: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in (metrics or {}).items()}


def _override(result: Ended, reason: EndReason, message: str | None) -> None:
    """An attempt that was asked to stop and did not succeed ended for that reason, whatever it said."""
    text = message or f"stopped: {reason}"
    own = result.message
    if own and not own.startswith("stopped") and result.signal not in (signal.SIGTERM, signal.SIGKILL):
        text += f"; it ended with: {own}"
    result.reason, result.message = reason, text


def _parse_progress(payload: bytes, at: float) -> Progress | None:
    """None where it cannot be read: what was said before stands."""
    try:
        said: dict[str, Any] = json.loads(payload)
        done, total, text = said.get("done"), said.get("total"), said.get("text")
        return Progress(
            at,
            None if done is None else float(done),
            None if total is None else float(total),
            None if text is None else str(text),
            _numbers(said.get("metrics")),
        )
    except (AttributeError, TypeError, ValueError, RecursionError, OverflowError):
        return None


def _take_undrained(child: _Child) -> bytes:
    data = bytes(child.undrained)
    if child.dropped:
        data = f"[{child.dropped} bytes of output are not kept]\n".encode() + data
    child.undrained.clear()
    child.dropped = 0
    return data


def _is_readable(fd: int) -> bool:
    """Whether there is data, or the end of it, now: an event may be older than our last reading."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _has_unread(sock: socket.socket) -> bool:
    """Whether the other side has yet to read what was sent."""
    return fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0\0\0\0") != b"\0\0\0\0"


def _make_memory(size: int) -> int:
    """A descriptor of that much zeroed memory without a name."""
    if sys.platform == "linux":
        fd = os.memfd_create("runtime-cells")
    else:
        import tempfile

        fd, path = tempfile.mkstemp()
        Path(path).unlink()
    os.ftruncate(fd, size)
    return fd


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
