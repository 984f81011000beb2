"""The worker's end of its guardian: what a guardian is started with, and what is said and heard over the socket."""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.worker.attempts.child_handle import Events, Page
from runtime.worker.attempts.guardian_link import GuardianLink
from runtime.worker.attempts.model import ChildPoolSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a guardian's facts are read from /proc")

# Answers the configuration and two orders to remove trees with what it knows about itself, and exits.
ANSWERS = """
import json, os, socket, sys
worker = socket.socket(fileno=int(sys.argv[2]))
data = b""
while data.count(b"\\0") < 3:
    data += worker.recv(65536)
configuration, *orders = data.decode("utf-8", "surrogateescape").split("\\0")[:-1]
configuration = json.loads(configuration)
answer = {
    "leads": os.getsid(0) == os.getpid(),
    "streams": [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1)],
    "held": [os.fstat(fd).st_ino for fd in configuration["hold_fds"]],
    "page": os.fstat(configuration["page_fd"]).st_size,
    "source": sys.argv[1],
    "safe": sys.flags.safe_path,
    "orders": sorted(orders),
    "configuration": configuration,
}
worker.sendall(json.dumps(answer).encode() + b"\\0")
"""


class Bench:
    def __init__(self, **settings: Any) -> None:
        self.selector = selectors.DefaultSelector()
        self.events = Events(self.selector)
        self.link = GuardianLink(ChildPoolSettings(**settings), Page(2), self.events)

    def connect(self) -> socket.socket:
        """Connect the link without a process; returns the guardian's end."""
        ours, theirs = socket.socketpair()
        # A full socket shows at once.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 1000))
        self.events.listen(ours, lambda: None)
        self.link._socket = ours
        return theirs

    def hear(self) -> list[str]:
        """Return the next reports."""
        self.selector.select()
        reports = self.link.receive()
        assert reports is not None
        return reports


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.link.disconnect()
    made.link.page.close()


def test_guardian_is_started_in_a_session_of_its_own_with_what_it_needs_and_what_its_predecessor_owed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runtime.worker.attempts.guardian_link._GUARDIAN", ANSWERS)
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "lock").open("w") as lock:
        bench = Bench(reuse=True, hold_fds=(lock.fileno(),), sys_path=["", "/code"], max_tasks_per_child=7)
        link = bench.link
        link.removals, link.silences, link._inbox = {"/a", "/b\udcff"}, 99, b"half a repo"
        link.start(lambda: None)

        assert (link.is_open, link.silences, bench.events.due) == (True, 0, 0.0)
        assert link._socket is not None
        patience = link._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
        answer = json.loads(bench.hear()[0])
        configuration = answer.pop("configuration")
        inode = os.fstat(lock.fileno()).st_ino
    process = link.disconnect()
    assert process is not None
    process.wait()
    size = link.page.size
    link.page.close()

    # A guardian that does not read must not stop the worker's loop.
    assert struct.unpack("ll", patience) == (5, 0)
    assert answer == {
        "leads": True,
        "streams": ["/dev/null", "/dev/null"],
        "held": [inode],
        "page": size,
        "source": str(Path(__file__).parents[3]),
        "safe": True,
        "orders": ["remove /a", "remove /b\udcff"],
    }
    assert (configuration["worker_pid"], configuration["sys_path"]) == (os.getpid(), [str(tmp_path), "/code"])
    assert (configuration["page_bytes"], configuration["reuse"], configuration["max_tasks"]) == (size, True, 7)
    assert configuration["max_growth_bytes"] == 512 << 20
    assert (link.is_open, bench.selector.get_map()) == (False, {})


def test_guardian_that_cannot_be_started_leaves_no_socket(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        bench.link.start(lambda: None)

    # Its sockets are closed, or their warnings would fail this test.
    assert (bench.link.is_open, bench.link.process, bench.selector.get_map()) == (False, None, {})


def test_reports_come_whole_and_end_the_silence(bench: Bench) -> None:
    with bench.connect() as theirs:
        assert bench.link.receive() == []
        bench.link.silences = 3
        theirs.sendall(b"removed /\xff\0exited 1 ")
        assert bench.hear() == ["removed /\udcff"]
        assert bench.link.silences == 0
        theirs.sendall(b"9 0\0pong\0")
        assert bench.hear() == ["exited 1 9 0", "pong"]
    assert bench.link.receive() is None


def test_order_to_a_guardian_that_has_died_is_passed_over(bench: Bench) -> None:
    bench.connect().close()
    bench.link.remove("/a")

    assert (bench.link.silences, bench.link.removals) == (0, {"/a"})
    bench.link.disconnect()
    bench.link.remove("/b")
    assert bench.link.removals == {"/a", "/b"}


def test_order_that_the_guardian_does_not_take_has_the_watch_replace_it_at_once(bench: Bench) -> None:
    with bench.connect():
        bench.events.ping_at = bench.events.due = 1e9
        while not bench.link.silences:
            bench.link.tell("x" * 65536)

    assert bench.link.silences >= 20
    assert (bench.events.ping_at, bench.events.due) == (0.0, 0.0)


def test_descriptors_go_along_with_their_order_and_the_watch_awaits_the_answer(bench: Bench) -> None:
    with bench.connect() as theirs:
        bench.events.ping_at, bench.events.due = 70.0, None
        bench.link.tell("fork 1 0", (0, 1))
        data, fds, _, _ = socket.recv_fds(theirs, 100, 8)

    assert (data, [os.fstat(fd).st_ino for fd in fds]) == (b"fork 1 0\0", [os.fstat(fd).st_ino for fd in (0, 1)])
    assert bench.events.due == 70.0
    for fd in fds:
        os.close(fd)


def test_orders_name_each_module_to_load_ahead_once_and_a_tree_to_remove_as_it_is_called(bench: Bench) -> None:
    with bench.connect() as theirs:
        bench.link.preload(["random", "no_such_module", "fractions"])
        bench.link.preload(["random"])
        bench.link.remove("/a b\udcff")

        assert theirs.recv(100) == b"preload fractions random\0remove /a b\xff\0"
