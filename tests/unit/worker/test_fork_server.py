"""The guardian's decisions over a process table that a test makes up: whom it ends, and when it reports a dead child."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.worker.attempts import fork_server, wire
from runtime.worker.attempts.child import ChildServer
from runtime.worker.attempts.fork_server import Guardian
from runtime.worker.attempts.processes import ProcessRow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process trees are read from /proc")

ME = 50


class Bench:
    """A guardian of child `c1`, and of a process that removes a tree. It signals and forks nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.killed: list[int] = []
        self.stopped: list[int] = []
        self.dead: list[tuple[int, int]] = []
        """Pid and status of children that have died."""
        self.table: dict[int, ProcessRow] = {}
        self.add(60, ME)
        self.add(61, ME)
        self.worker, theirs = socket.socketpair()
        self.worker.setblocking(False)
        self.guardian = made = Guardian.__new__(Guardian)
        made.worker, made.pid, made.buffer, made.fds, made.unremoved = theirs, ME, b"", [], []
        made.forked, made.names, made.helpers, made.unswept = {"c1": (60, 0)}, {60: "c1"}, {61: "removed /tree"}, []
        made.scratch, made.fds_end = "", 1024
        monkeypatch.setattr(fork_server.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(fork_server.processes, "read_table", lambda: dict(self.table))
        monkeypatch.setattr(fork_server.processes, "send_signal", self.signal)
        monkeypatch.setattr(fork_server.os, "wait4", self.wait)

    def add(self, pid: int, ppid: int, state: str = "S", *, session: int = 0) -> None:
        self.table[pid] = ProcessRow(pid, ppid, session or pid, state, 0)

    def signal(self, pids: list[int], number: int) -> None:
        {signal.SIGKILL: self.killed, signal.SIGTERM: self.stopped}[signal.Signals(number)].extend(pids)

    def wait(self, pid: int, options: int) -> tuple[int, int, Any]:
        assert (pid, options) == (-1, os.WNOHANG)
        pid, status = self.dead.pop(0) if self.dead else (0, 0)
        return pid, status, SimpleNamespace(ru_maxrss=3)

    def die(self, pid: int, status: int) -> None:
        """Let a child die, and the guardian take its status."""
        self.dead.append((pid, status))
        self.table.pop(pid, None)
        self.guardian._reap()

    def heard(self) -> list[str]:
        try:
            return self.worker.recv(65536).decode().split("\0")[:-1]
        except BlockingIOError:
            return []


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.worker.close()
    made.guardian.worker.close()


def test_child_that_died_by_itself_is_reported_at_once_if_nothing_of_it_is_left(bench: Bench) -> None:
    bench.add(62, ME, "Z")
    bench.die(60, signal.SIGSEGV)

    assert bench.heard() == ["exited c1 11 3072"]
    assert (bench.killed, bench.guardian.forked, bench.guardian.names) == ([], {}, {})


def test_child_that_left_in_good_order_is_reported_at_once_whatever_it_left(bench: Bench) -> None:
    bench.add(62, ME)
    bench.die(60, wire.CLEAN_EXIT << 8)

    assert (bench.heard(), bench.killed) == ([f"exited c1 {wire.CLEAN_EXIT << 8} 3072"], [])


def test_status_of_a_removal_or_of_an_orphan_is_no_childs(bench: Bench) -> None:
    bench.dead = [(99, 9), (61, 0)]
    bench.die(60, wire.CLEAN_EXIT << 8)

    assert bench.heard() == ["removed /tree", f"exited c1 {wire.CLEAN_EXIT << 8} 3072"]
    assert bench.guardian.helpers == {}


def test_messages_in_pieces_and_for_children_that_are_gone_are_taken_as_they_come(bench: Bench) -> None:
    for piece in (b"pi", b"ng\0kill c7\0stop c7\0nonsense\0pi", b"ng\0"):
        bench.guardian.obey_all(piece)

    assert (bench.heard(), bench.killed) == (["pong", "pong"], [])


def test_kill_reaches_the_child_and_all_below_it(bench: Bench) -> None:
    bench.add(62, 60)
    bench.add(63, 62)
    bench.guardian.obey_all(b"kill c1\0")

    assert bench.killed == [60, 62, 63]


def give(outcome: int | OSError) -> int:
    """Play a call's outcome."""
    if isinstance(outcome, OSError):
        raise outcome
    return outcome


def test_removal_for_which_no_process_is_free_is_tried_again_at_the_next_ping(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[int | OSError] = [BlockingIOError(11, "Resource temporarily unavailable")] * 2 + [77]

    monkeypatch.setattr(fork_server.os, "fork", lambda: give(outcomes.pop(0)))
    bench.guardian.obey_all(b"remove /a b\0ping\0")
    assert bench.guardian.helpers == {61: "removed /tree"}
    bench.guardian.obey_all(b"ping\0ping\0")

    assert bench.guardian.helpers == {61: "removed /tree", 77: "removed /a b"}
    assert (bench.heard(), outcomes) == (["pong"] * 3, [])


def test_child_whose_container_no_process_can_remove_is_reported_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.guardian.scratch = str(tmp_path)
    (tmp_path / "t.60.container").touch()
    monkeypatch.setattr(fork_server.os, "fork", lambda: give(BlockingIOError(11, "Resource temporarily unavailable")))

    bench.die(60, signal.SIGKILL)

    assert bench.heard() == ["exited c1 9 3072"]
    assert (tmp_path / "t.60.container").exists()


@pytest.mark.parametrize(("command", "stopped"), [(0, [60, 61]), (62, [62, 63])])
def test_stop_reaches_the_session_of_the_child_or_that_of_its_command(
    bench: Bench, command: int, stopped: list[int]
) -> None:
    with mmap.mmap(-1, 2 * wire.CELL_BYTES) as page:
        bench.guardian.child = ChildServer(page, reuse=False, max_tasks=1, max_growth_bytes=1)
        bench.guardian.forked["c1"] = (60, wire.CELL_BYTES)
        wire.COMMAND_PID.pack_into(page, wire.CELL_BYTES + wire.COMMAND_PID_AT, command)
        bench.add(61, 60, session=60)
        bench.add(62, 60)
        bench.add(63, 62, session=62)
        bench.add(64, 62)
        bench.guardian.obey_all(b"stop c1\0")

    assert (bench.stopped, bench.killed) == (stopped, [])


def test_fork_that_fails_is_reported_and_takes_no_descriptor_of_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[int | OSError] = [OSError(11, "Resource temporarily unavailable"), 77]
    fds = [os.dup(0) for _ in range(4)]
    bench.guardian.fds += fds

    monkeypatch.setattr(fork_server.os, "fork", lambda: give(outcomes.pop(0)))
    bench.guardian.obey_all(b"fork c2 64\0")
    assert (bench.heard(), bench.guardian.fds) == (["failed c2 11"], fds[2:])

    bench.guardian.obey_all(b"fork c3 128\0")
    assert (bench.heard(), bench.guardian.fds) == (["forked c3 77"], [])
    assert (bench.guardian.forked["c3"], bench.guardian.names[77]) == ((77, 128), "c3")
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
