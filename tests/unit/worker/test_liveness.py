"""The watch over the guardian: when it is started again, pinged, given up, and when a child is overdue."""

from __future__ import annotations

import os
import selectors
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.worker.attempts import liveness
from runtime.worker.attempts.child_handle import Events
from runtime.worker.attempts.liveness import LivenessWatch, end_strays
from runtime.worker.attempts.processes import ProcessRow


class Guardian:
    """A guardian of which only the reports matter."""

    def __init__(self) -> None:
        self.events = Events(selectors.DefaultSelector())
        self.settings = SimpleNamespace(adopt_orphans=False)
        self.process: Any = None
        self.removals: set[str] = set()
        self.silences = 0
        self.closing = False
        self.starts = 0
        self.told: list[str] = []
        self.reports: list[str] | None = []
        self.refuses = False

    def start(self, read: Any) -> None:
        if self.refuses:
            raise OSError(11, "Resource temporarily unavailable")
        self.starts += 1
        self.silences = 0
        self.process = SimpleNamespace(pid=4242, returncode=-9)

    def tell(self, message: str) -> None:
        self.told.append(message)

    def receive(self) -> list[str] | None:
        if self.reports:
            self.silences = 0
        return self.reports

    def disconnect(self) -> Any:
        process, self.process = self.process, None
        return process


class Child:
    def __init__(self, name: str, *, pid: int = 7, begun: int = 0, done: int = 0, running: bool = False) -> None:
        self.name, self.pid, self.done, self.running = name, pid, done, running
        self.cell = SimpleNamespace(begun=lambda: (begun, 0))
        self.orders: list[Any] = [SimpleNamespace(token="t")]
        self.lost_orders = False
        self.held = self.begins = 0

    def is_awaited(self) -> bool:
        return True

    def runs(self) -> bool:
        return self.running

    def has_lost_orders(self) -> bool:
        return self.lost_orders

    def hold(self) -> int:
        self.held += 1
        return self.begins


class Children(list[Child]):
    def __init__(self) -> None:
        super().__init__()
        self.ended: list[tuple[str, object]] = []

    def find(self, name: str) -> Child | None:
        return next((child for child in self if child.name == name), None)

    def end_lost(self, child: Child, how: str) -> None:
        self.ended.append((child.name, how))

    def end_dead(self, child: Child, status: int, peak: int) -> None:
        self.ended.append((child.name, (status, peak)))

    def fail_to_fork(self, child: Child, number: int) -> None:
        self.ended.append((child.name, number))


class Watch:
    def __init__(self) -> None:
        self.guardian, self.children = Guardian(), Children()
        self.slot = SimpleNamespace(pumped=0)
        self.slot.pump = lambda: setattr(self.slot, "pumped", self.slot.pumped + 1)
        guardian, children, slots = self.guardian, self.children, [self.slot]
        self.watch = LivenessWatch(guardian, children, slots)  # type: ignore[arg-type]
        self.watch.start()

    def hear(self, *reports: str) -> None:
        self.guardian.reports = list(reports)
        self.watch._read()

    def die(self) -> None:
        self.guardian.reports = None
        self.watch._read()

    def pings(self, times: int, *, start: float = 1000.0) -> int:
        """Let `times` pings fall due; returns how many were sent."""
        before = self.guardian.told.count("ping")
        for number in range(times):
            self.watch.check(start + number * liveness.PING_EVERY_S)
        return self.guardian.told.count("ping") - before


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Pids that the process table shows as stopped; nothing real is signalled."""
    pids: set[int] = set()
    monkeypatch.setattr(liveness.processes, "is_stopped", lambda pid: pid in pids)
    monkeypatch.setattr(liveness, "end_strays", lambda *_, **__: None)
    return pids


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    return now


def test_slots_go_on_after_a_death_with_what_they_still_have(stopped: set[int], now: list[float]) -> None:
    bench = Watch()
    pumped = bench.slot.pumped
    bench.die()
    assert bench.slot.pumped == pumped + 1


def test_guardian_is_not_started_before_its_time_nor_at_the_end(stopped: set[int], now: list[float]) -> None:
    bench = Watch()
    bench.die()
    bench.watch.check(now[0])
    bench.die()

    bench.guardian.events.due = None
    bench.watch.check(now[0] + 0.499)
    assert (bench.guardian.starts, bench.guardian.events.due) == (2, now[0] + 0.5)

    bench.guardian.closing = True
    bench.watch.check(now[0] + 0.5)
    assert bench.guardian.starts == 2

    bench.guardian.closing = False
    bench.watch.check(now[0] + 0.5)
    assert bench.guardian.starts == 3


def test_reports_reach_the_children_that_they_name_and_no_others(stopped: set[int]) -> None:
    bench = Watch()
    first, second = Child("c1", pid=0), Child("c2", pid=0)
    bench.children += [first, second]
    bench.guardian.removals = {"/a b", "/c"}

    bench.hear("forked c1 17", "failed c2 11", "exited c3 0 0", "forked c4 3", "removed /a b", "pong")

    assert (first.pid, second.pid) == (17, 0)
    assert bench.children.ended == [("c2", 11)]
    assert bench.guardian.removals == {"/c"}


def test_guardian_without_anything_to_do_is_never_pinged(stopped: set[int]) -> None:
    bench = Watch()
    bench.guardian.silences = 5

    assert bench.pings(10) == 0
    assert bench.guardian.silences == 0


@pytest.mark.parametrize(("is_stopped", "most", "how"), [(False, 20, "did not answer"), (True, 2, "was stopped")])
def test_guardian_that_leaves_pings_unanswered_is_replaced(
    stopped: set[int], is_stopped: bool, most: int, how: str
) -> None:
    if is_stopped:
        stopped.add(4242)
    bench = Watch()
    bench.children.append(Child("c1", running=True))

    assert bench.pings(most) == most
    assert bench.children.ended == []
    bench.watch.check(5000.0)

    assert bench.guardian.told.count("ping") == most
    assert bench.children.ended == [("c1", f"{how} and had to be killed")]


def test_pings_are_sent_one_at_a_time_and_the_next_is_awaited(stopped: set[int]) -> None:
    bench = Watch()
    bench.children.append(Child("c1", running=True))
    bench.guardian.events.due = None

    bench.watch.check(1000.0)
    bench.watch.check(1000.0 + liveness.PING_EVERY_S - 0.1)

    assert bench.guardian.told == ["ping"]
    assert bench.guardian.events.due == 1000.0 + liveness.PING_EVERY_S


def test_tree_that_is_to_be_removed_keeps_the_guardian_watched(stopped: set[int]) -> None:
    bench = Watch()
    bench.guardian.removals = {"/a"}

    assert bench.pings(3) == 3


@pytest.mark.parametrize(
    ("child", "is_stopped", "lost", "kill_after"),
    [
        (Child("c1", begun=1, done=1), False, False, 21),
        (Child("c1", begun=1, done=1), True, False, 3),
        (Child("c1", begun=1, done=1), False, True, 3),
        (Child("c1"), True, False, 3),
        (Child("c1"), False, False, None),
        (Child("c1", begun=1, running=True), True, False, None),
        (Child("c1", pid=0), True, False, None),
    ],
    ids=["silent", "stopped", "orders lost", "stopped before its first", "slow to begin", "runs", "not forked yet"],
)
def test_child_that_neither_begins_nor_leaves_is_killed(
    stopped: set[int], child: Child, is_stopped: bool, lost: bool, kill_after: int | None
) -> None:
    bench = Watch()
    child.lost_orders = lost
    bench.children.append(child)
    if is_stopped:
        stopped.add(child.pid)
    killed_at = None

    for number in range(1, 40):
        bench.hear("pong")
        bench.watch.check(number * 1000.0)
        if "kill c1" in bench.guardian.told:
            killed_at = number
            break

    assert killed_at == kill_after
    assert child.held == (0 if kill_after is None else 1)


def test_child_that_begins_while_it_is_held_is_not_killed(stopped: set[int]) -> None:
    bench = Watch()
    child = Child("c1", begun=1, done=1)
    child.begins = 1
    bench.children.append(child)
    for number in range(1, 22):
        bench.hear("pong")
        bench.watch.check(number * 1000.0)

    assert (child.held, "kill c1" in bench.guardian.told) == (1, False)


def test_child_that_has_ended_an_order_meanwhile_gets_its_time_again(stopped: set[int]) -> None:
    bench = Watch()
    child = Child("c1", begun=1, done=1)
    bench.children.append(child)
    for number in range(1, 21):
        bench.hear("pong")
        bench.watch.check(number * 1000.0)
    child.done = 2

    for number in range(21, 41):
        bench.hear("pong")
        bench.watch.check(number * 1000.0)
    assert "kill c1" not in bench.guardian.told

    for number in (41, 42):
        bench.hear("pong")
        bench.watch.check(number * 1000.0)
    assert "kill c1" in bench.guardian.told


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("adopt", [False, True])
def test_strays_of_a_dead_guardian_are_its_childrens_sessions_tokens_and_what_was_adopted(
    monkeypatch: pytest.MonkeyPatch, adopt: bool, alive: bool
) -> None:
    me, session = os.getpid(), os.getsid(0)
    table = {
        process.pid: process
        for process in [
            ProcessRow(me, 1, session, "R", 0),
            ProcessRow(70, 1, 70, "S" if alive else "Z", 0),  # a child
            ProcessRow(71, 1, 71, "Z", 0),  # another, which is dead
            ProcessRow(11, 1, 70, "S", 0),  # in a child's session
            ProcessRow(12, 1, 12, "S", 0),  # with a token
            ProcessRow(13, 12, 13, "S", 0),  # below that
            ProcessRow(14, me, 14, "S", 0),  # adopted, unless it is a child of this process in its own session
            ProcessRow(15, me, session, "S", 0),
            ProcessRow(16, 1, 16, "S", 0),  # a stranger's
            ProcessRow(17, 1, 0, "S", 0),  # in a session that began outside this container
        ]
    }
    killed: list[int] = []

    def kill(pids: Any, number: int) -> None:
        killed.extend(pids)
        for pid in pids:
            table[pid] = ProcessRow(pid, table[pid].ppid, table[pid].session, "Z", 0)

    monkeypatch.setattr(liveness.processes, "read_table", lambda: dict(table))
    monkeypatch.setattr(liveness.processes, "send_signal", kill)
    pauses: list[float] = []
    monkeypatch.setattr(liveness.time, "sleep", pauses.append)
    monkeypatch.setattr(liveness.processes, "find_marked", lambda _, tokens: [12] if tokens == ["t"] else [])
    children = [Child("c1", pid=70), Child("c2", pid=71), Child("c3", pid=0)]
    for child in children:
        child.find_pid = lambda pid=child.pid: pid  # type: ignore[attr-defined]
    children[1].orders = children[2].orders = []

    end_strays(None, children, adopt_orphans=adopt)  # type: ignore[arg-type]

    # A child that lives would report the end of its command as the end of its attempt.
    assert (set(killed[:2]) == {70, 71}) is alive
    assert sorted(set(killed) - {70, 71}) == ([11, 12, 13, 14] if adopt else [11, 12, 13])
    assert len(pauses) == 1 + alive


def test_strays_that_do_not_die_are_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    def sleep(seconds: float) -> None:
        now[0] += 0.5

    said: list[str] = []
    guardian: Any = SimpleNamespace(
        pid=50,
        send_signal=lambda number: said.append(f"signal {int(number)}"),
        kill=lambda: said.append("kill"),
        wait=lambda: said.append("wait"),
    )
    table = {pid: ProcessRow(pid, 50, 50, "D", 0) for pid in (51, 52)}
    monkeypatch.setattr(liveness.time, "sleep", sleep)
    monkeypatch.setattr(liveness.processes, "read_table", lambda: dict(table))
    monkeypatch.setattr(
        liveness.processes, "send_signal", lambda pids, number: said.append(f"{sorted(pids)} {int(number)}")
    )

    end_strays(guardian, [], adopt_orphans=False)

    assert said == ["signal 19", *["[51, 52] 9"] * 11, "kill", "wait"]
