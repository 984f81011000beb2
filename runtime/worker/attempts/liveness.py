"""The liveness watch over the guardian and its children: pings, silences, and the processes of a dead guardian."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Final

from runtime.worker.attempts import processes
from runtime.worker.attempts.child_handle import ChildHandle
from runtime.worker.attempts.child_pool import ChildPool, SlotOrders
from runtime.worker.attempts.exit_classification import describe_code
from runtime.worker.attempts.guardian_link import GuardianLink
from runtime.worker.attempts.model import GuardianFailed

STRAYS_PATIENCE_S: Final = 5.0
GUARDIAN_FALSE_STARTS: Final = 8
"""After this many guardians in a row that died before they were ready, none will run here."""
GUARDIAN_WAIT_S: Final = 0.5
"""Wait before the next guardian, once two in a row have died without an end in between; doubled each time."""
GUARDIAN_LONGEST_WAIT_S: Final = 30.0
PING_EVERY_S: Final = 3.0
SILENCES: Final = 20
"""A guardian that has left this many pings unanswered is killed, and so is a child that has neither begun its order nor
exited by then. Pings are counted, not seconds, because this process may have been stopped together with it."""
SILENCES_WHEN_STOPPED: Final = 2
"""The same number for a process that the process table shows as stopped."""


class LivenessWatch:
    """Starts the guardian, reads its reports, and replaces it when it is dead or silent."""

    def __init__(self, guardian: GuardianLink, children: ChildPool, slots: Sequence[SlotOrders]) -> None:
        self._guardian, self._children, self._slots = guardian, children, slots
        self._events = guardian.events
        self.failure: GuardianFailed | None = None
        """Why nothing will ever run here; orders that have not begun can be taken back."""
        self._ready = False
        """The guardian has reported that it serves."""
        self._deaths = self._false_starts = 0
        """Guardians in a row: that died before any attempt had ended, and that never were ready."""
        self._start_at = 0.0
        """When the next guardian is started, while none runs."""
        self._overdue: dict[str, tuple[int, int]] = {}
        """By child: pings since it should have begun its next order, or exited, and its ended orders at that time."""

    def start(self) -> None:
        """Start a guardian, without waiting for it. If that fails, `check` tries again."""
        self._ready = False
        try:
            self._guardian.start(self._read)
        except OSError as problem:
            self._start_later(f"could not be started: {problem}")
            return
        for slot in self._slots:
            slot.pump()

    def check(self, now: float) -> None:
        """Start the next guardian when it is due; end a silent one, through which nothing else could be ended."""
        guardian, events = self._guardian, self._events
        if guardian.process is None:
            if guardian.closing or self.failure is not None:
                return
            if now >= self._start_at:
                self.start()
            else:
                events.wake_by(self._start_at)
            return
        awaited = [child for child in self._children if child.is_awaited()]
        if not guardian.removals and not awaited:
            guardian.silences = 0
            return
        if now >= events.ping_at:
            stopped = processes.is_stopped(guardian.process.pid) if guardian.silences else False
            if guardian.silences >= (SILENCES_WHEN_STOPPED if stopped else SILENCES):
                state = "was stopped" if stopped else "did not answer"
                self._replace(f"{state} and had to be killed")
                return
            guardian.silences += 1
            events.ping_at = now + PING_EVERY_S
            guardian.tell("ping")
            self._overdue = {child.name: each for child in awaited if (each := self._check_overdue(child))}
        events.wake_by(events.ping_at)

    def _check_overdue(self, child: ChildHandle) -> tuple[int, int] | None:
        """Kill a child that neither begins its next order nor exits, as it should; its other orders are not lost.

        User code has stopped it, keeps its interpreter busy from a thread, or has read its order from the socket.
        """
        runs = child.runs()
        stopped = child.pid != 0 and not runs and processes.is_stopped(child.pid)
        # A child that has run nothing yet may be slow, on a machine that swaps or with much code to lay out.
        if runs or not (stopped or child.cell.begun()[0]):
            return None
        pings, done = self._overdue.get(child.name, (0, child.done))
        if done != child.done:
            pings = 0
        if pings < (SILENCES_WHEN_STOPPED if stopped or child.has_lost_orders() else SILENCES):
            return pings + 1, child.done
        if not child.orders or child.hold() <= 0:
            self._guardian.tell(f"kill {child.name}")
        return None

    def _read(self) -> None:
        messages = self._guardian.receive()
        if messages is None:
            self._replace()
            return
        for message in messages:
            self._hear(message)

    def _hear(self, message: str) -> None:
        verb, _, rest = message.partition(" ")
        if verb == "removed":
            self._guardian.removals.discard(rest)
            return
        if verb == "ready":
            self._ready = True
            return
        name, _, value = rest.partition(" ")
        child = self._children.find(name)
        if child is None:
            return
        if verb == "forked":
            child.pid = int(value)
        elif verb == "failed":
            self._children.fail_to_fork(child, int(value))
        elif verb == "exited":
            status, _, peak = value.partition(" ")
            self._deaths = 0
            self._children.end_dead(child, int(status), int(peak))

    def _replace(self, how: str | None = None) -> None:
        """End the guardian's processes and its children, and begin again. `how` is why the watch ended it, if it did."""
        guardian, children = self._guardian.disconnect(), list(self._children)
        end_strays(guardian, children, adopt_orphans=self._guardian.settings.adopt_orphans)
        if how is None:
            how = f"ended with {describe_code(guardian.returncode)}" if guardian else "ended"
        for child in children:
            self._children.end_lost(child, how)
            if child.done:
                self._deaths = 0
        self._start_later(how)
        for slot in self._slots:
            slot.pump()

    def _start_later(self, how: str) -> None:
        """Plan the next guardian after one has ended, later and later while no attempt ends between two guardians."""
        self._deaths += 1
        self._false_starts = 0 if self._ready else self._false_starts + 1
        if self._false_starts >= GUARDIAN_FALSE_STARTS:
            self.failure = GuardianFailed(self._false_starts, how)
        wait = min(GUARDIAN_LONGEST_WAIT_S, GUARDIAN_WAIT_S * 2 ** (self._deaths - 2)) if self._deaths > 1 else 0.0
        self._start_at = time.monotonic() + wait
        self._events.wake_by(self._start_at)


def end_strays(
    guardian: subprocess.Popen[bytes] | None, children: Iterable[ChildHandle], *, adopt_orphans: bool
) -> None:
    """Kill the guardian and all processes that its children had started.

    As long as the guardian lives, stopped or not, they are below it. If it is dead, the children died with it; processes
    that they had started share their session or bear an attempt's token. A process that scrubbed both is found only if
    this process adopts orphans.
    """
    born = {pid for child in children if (pid := child.find_pid())}
    tokens = [order.token for child in children for order in child.orders]
    give_up, pause = time.monotonic() + STRAYS_PATIENCE_S, 0.001
    if guardian is not None:
        # Stopped, it neither forks nor waits for the killed processes.
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
            # Children first: a child would report the end of its command as the end of its attempt.
            processes.send_signal(born, signal.SIGKILL)
            time.sleep(0.001)
            continue
        strays = set(processes.find_marked(table, tokens))
        for process in table.values():
            adopted = adopt_orphans and process.ppid == me and process.session != own_session
            if (process.session in born or adopted) and process.pid != me:
                strays.add(process.pid)
        for pid in list(strays):
            strays.update(processes.find_descendants(table, pid))
        living = [pid for pid in strays if not table[pid].dead]
        processes.send_signal(living, signal.SIGKILL)
        for pid in strays:
            if table[pid].ppid == me:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        if not living:
            return
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
