"""The embedded queue beyond the promises of every queue: liveness, clocks, fairness, bounds."""

from __future__ import annotations

import gc
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import runtime.records.sqlite_file
from runtime.clock import machine_id
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible, StoreUnavailable
from runtime.queues.sqlite.local_workers import SWEEP_EVERY_S, Presence
from runtime.queues.sqlite.queue import SqliteQueue, open_sqlite
from runtime.records import open_records
from runtime.records.base import RecordStore
from runtime.records.blobs.folder import FolderBlobs
from runtime.records.control_commands import pause_order, resume_order
from runtime.records.memory import MemoryRecords
from runtime.records.sqlite_file import Durability, EmbeddedFile, refuse_network_filesystem
from runtime.records.store import BlobRecords
from runtime.system import system
from runtime.tasks.history import EndedNote, Lease, Release
from runtime.tasks.model import Task, TaskState
from runtime.testing import FakeClock, sample_task
from tests.conformance.queue_pairs import TTL, ended_note, failed, succeeded, tasks
from tests.services_support import wait_readable

HOLDER = """
import sys, time
from datetime import timedelta
from runtime.queues.sqlite.queue import open_sqlite
queue, _ = open_sqlite(sys.argv[1])
leases = queue.lease(int(sys.argv[2]), worker=sys.argv[4], ttl=timedelta(hours=1))
running = [lease.token for lease in leases[:int(sys.argv[3])]]
queue.mark_running(running, running[0] if sys.argv[5:] else None)
print(" ".join(lease.task.key for lease in leases), flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasks.db"


@contextmanager
def holder(
    path: Path, *, leases: int, running: int, worker: str = "w-dying", apart: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A process that holds leases and prints them; the first may be a suspect that is kept apart."""
    arguments = [str(path), str(leases), str(running), worker, *(["apart"] if apart else [])]
    process = subprocess.Popen([sys.executable, "-c", HOLDER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().split()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def check_counters(path: Path) -> None:
    """Check that each task is in exactly one place, and that the counters are right."""
    connection = sqlite3.connect(path)
    places = connection.execute(
        "SELECT t.id, (t.seq > (SELECT seq FROM entered)) + (SELECT count(*) FROM claimable r WHERE r.seq=t.seq) + (SELECT count(*) FROM deferred d WHERE "
        "d.seq=t.seq) + (SELECT count(*) FROM leases l WHERE l.seq=t.seq) + (SELECT count(*) FROM records c WHERE "
        "c.rid=(t.seq << 20 | t.generation)) FROM tasks t"
    ).fetchall()
    assert {count for _, count in places} <= {1}, places
    counted = connection.execute("SELECT sum(queued), sum(leased), sum(succeeded), sum(failed) FROM experiments")
    queued, leased, won, lost = counted.fetchone()
    rows = connection.execute(
        "SELECT (SELECT count(*) FROM claimable)+(SELECT count(*) FROM deferred), (SELECT count(*) FROM leases), "
        "(SELECT count(*) FROM records c JOIN tasks t ON c.rid=(t.seq << 20 | t.generation) WHERE state='succeeded'), "
        "(SELECT count(*) FROM records c JOIN tasks t ON c.rid=(t.seq << 20 | t.generation) WHERE state='failed')"
    ).fetchone()
    assert (queued, leased, won, lost) == rows
    connection.close()


def lease_all(queue: SqliteQueue, n: int = 100) -> list[Lease]:
    return queue.lease(n, worker="w-b", ttl=TTL)


def wait_for(queue: SqliteQueue, n: int, timeout: float = 240.0) -> list[Lease]:
    deadline = time.monotonic() + timeout
    leases: list[Lease] = []
    while len(leases) < n and time.monotonic() < deadline:
        queue.tend()
        leases += lease_all(queue)
        time.sleep(0.02)
    return leases


def test_killed_worker_gives_back_and_only_what_ran_is_blamed(path: Path) -> None:
    queue, records = open_sqlite(path)
    queue.put(tasks(3))
    with holder(path, leases=3, running=1) as process:
        queue.tend()
        assert lease_all(queue) == []
        process.kill()
        process.wait()
        back = wait_for(queue, 3)
    assert sorted(lease.task.key or "" for lease in back) == ["0", "1", "2"]
    assert [
        (lease.task.key, lease.tries, lease.suspect) for lease in sorted(back, key=lambda one: one.task.key or "")
    ] == [
        ("0", 1, True),
        ("1", 0, True),
        ("2", 0, True),
    ]
    notes = records.history(sample_task("0").id, 1).ended
    assert [(note.reason, note.worker, note.alone) for note in notes] == [(EndReason.LOST, "w-dying", True)]
    assert records.history(sample_task("1").id, 1).ended == ()
    check_counters(path)


class LooksAtEachNote(MemoryRecords):
    """Records outside the file; `look` is called before each note of an end is written."""

    def __init__(self, look: Callable[[Task], None]) -> None:
        super().__init__()
        self._look = look

    def record_ended(self, task: Task, note: EndedNote) -> None:
        self._look(task)
        super().record_ended(task, note)


def beside(path: Path, records: RecordStore) -> SqliteQueue:
    return SqliteQueue(EmbeddedFile(path), records)


def test_loss_is_noted_in_a_store_elsewhere_before_another_worker_can_take_the_task(path: Path) -> None:
    taken: list[Lease] = []
    other = beside(path, MemoryRecords())
    records = LooksAtEachNote(lambda task: taken.extend(other.lease(9, worker="w-c", ttl=TTL)))
    queue = beside(path, records)
    queue.put(tasks(3))
    with holder(path, leases=3, running=2) as process:
        process.kill()
        process.wait()
        back = wait_for(queue, 3)

    assert taken == []
    assert {lease.task.key: (lease.tries, lease.suspect) for lease in back} == {
        "0": (1, True),
        "1": (1, True),
        "2": (0, True),
    }
    notes = {key: records.history(sample_task(key).id, 1).ended for key in "012"}
    assert {key: [(note.reason, note.worker, note.alone) for note in found] for key, found in notes.items()} == {
        "0": [(EndReason.LOST, "w-dying", False)],
        "1": [(EndReason.LOST, "w-dying", False)],
        "2": [],
    }


def test_loss_whose_note_a_store_elsewhere_refuses_keeps_no_task_and_no_other_note(path: Path) -> None:
    def refuse_first(task: Task) -> None:
        if task.key == "0":
            raise StoreUnavailable("no answer")

    records = LooksAtEachNote(refuse_first)
    queue = beside(path, records)
    queue.put(tasks(2))
    with holder(path, leases=2, running=2) as process:
        process.kill()
        process.wait()
        with pytest.raises(StoreUnavailable):
            wait_for(queue, 2)

    assert {lease.task.key for lease in wait_for(queue, 2)} == {"0", "1"}
    assert [len(records.history(sample_task(key).id, 1).ended) for key in "01"] == [0, 1]


def notes_after(path: Path, *processes: subprocess.Popen[str]) -> dict[str, EndedNote]:
    """The notes about tasks that ran on workers that were killed together, by key."""
    queue, records = open_sqlite(path)
    for process in processes:
        process.kill()
        process.wait()
    wait_for(queue, 3)
    found = {key: records.history(sample_task(key).id, 1).ended for key in "012"}
    return {key: notes[0] for key, notes in found.items() if notes}


def test_suspect_that_was_kept_apart_is_lost_alone_and_its_neighbours_together(path: Path) -> None:
    open_sqlite(path)[0].put(tasks(3))
    with holder(path, leases=3, running=3, apart=True) as process:
        notes = notes_after(path, process)

    assert {key: note.alone for key, note in notes.items()} == {"0": True, "1": False, "2": False}
    assert {note.machine for note in notes.values()} == {machine_id()}


def test_workers_that_were_lost_together_had_each_its_task_and_none_was_alone(path: Path) -> None:
    open_sqlite(path)[0].put(tasks(3))
    with (
        holder(path, leases=1, running=1, worker="w-1") as one,
        holder(path, leases=1, running=1, worker="w-2") as other,
        holder(path, leases=1, running=0, worker="w-3") as idle,
    ):
        notes = notes_after(path, one, other, idle)

    assert {key: note.alone for key, note in notes.items()} == {"0": False, "1": False}


def test_machine_that_was_started_again_was_lost_with_all_that_ran_on_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_sqlite(path)[0].put(tasks(1))
    with holder(path, leases=1, running=1) as process:
        process.kill()
        process.wait()
    before = machine_id()
    monkeypatch.setitem(vars(system), "boot_id", lambda: "another")
    queue, records = open_sqlite(path)
    wait_for(queue, 1)

    [note] = records.history(sample_task("0").id, 1).ended
    assert (note.alone, note.machine) == (False, before)


def test_silent_worker_loses_its_leases_after_their_length_and_not_before(path: Path) -> None:
    clock = FakeClock()
    queue, _ = open_sqlite(path, clock=clock)
    other, _ = open_sqlite(path, clock=clock)
    queue.put(tasks(1))
    lease = queue.lease(1, worker="w-a", ttl=TTL)[0]
    clock.advance(seconds=29)
    assert wait_for(other, 1, timeout=0.1) == []
    assert queue.renew([lease], TTL) == []
    clock.advance(seconds=29)
    assert wait_for(other, 1, timeout=0.1) == []
    clock.advance(seconds=2)
    assert len(wait_for(other, 1)) == 1
    assert queue.renew([lease], TTL) == [lease]


def test_leases_are_suspect_from_a_missed_renewal_to_the_next_one(path: Path) -> None:
    clock = FakeClock()
    queue, _ = open_sqlite(path, clock=clock)
    other, _ = open_sqlite(path, clock=clock)  # It has leased nothing itself, and goes by the usual length.
    queue.put(tasks(1))
    suspect = [other.outlook().suspect_leases]

    leases = queue.lease(1, worker="w-a", ttl=2 * TTL)
    for seconds in (29, 2):
        clock.advance(seconds=seconds)
        suspect.append(queue.outlook().suspect_leases)
    queue.renew(leases, 2 * TTL)
    suspect.append(queue.outlook().suspect_leases)
    for seconds in (44, 2):
        clock.advance(seconds=seconds)
        suspect.append(other.outlook().suspect_leases)

    assert suspect == [False, False, True, False, False, True]
    queue.close()
    other.close()


def test_lost_attempt_counts_as_proven_only_if_its_worker_said_so(path: Path) -> None:
    clock = FakeClock()
    queue, records = open_sqlite(path, clock=clock)
    lost, _ = open_sqlite(path, clock=clock)
    queue.put(tasks(2))
    leases = lost.lease(2, worker="w-lost", ttl=TTL)
    lost.mark_running([lease.token for lease in leases], None, [leases[0].token])
    clock.advance(minutes=20)

    queue.tend()

    notes = [records.history(lease.task.id, 1).ended[0] for lease in leases]
    assert [(note.progressed, note.unseen, note.ran_for) for note in notes] == [(True, True, None), (False, True, None)]
    lost.close()
    queue.close()


def test_worker_that_was_silent_does_not_take_its_own_leases_for_a_dead_workers(path: Path) -> None:
    clock = FakeClock()
    queue, records = open_sqlite(path, clock=clock)
    queue.put(tasks(1))
    queue.join("w-a")
    lease = queue.lease(1, worker="w-a", ttl=TTL)[0]
    queue.mark_running([lease.token], None)
    clock.advance(seconds=31)

    queue.tend()

    assert queue.renew([lease], TTL) == []
    assert records.history(lease.task.id, 1).ended == ()
    queue.close()


def test_worker_that_has_left_holds_no_descriptor_and_no_file(path: Path) -> None:
    queue, _ = open_sqlite(path)
    queue.put(tasks(1))
    queue.close()
    gc.collect()  # of tests before, whose descriptors would be closed in between
    open_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(3):
        presence = Presence(path.parent / "workers", f"w-{number}")
        others = [Presence(path.parent / "workers", f"w-{number}-{other}") for other in range(2)]
        presence.watch(other.worker for other in others)
        others[0].leave()
        assert presence.drain_wakes()
        assert not presence.drain_wakes()
        others[1].leave()
        presence.leave()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_descriptors
    assert list((path.parent / "workers").iterdir()) == []


@pytest.mark.parametrize(("private", "modes"), [(True, {0o600}), (False, {0o622, 0o644})])
def test_files_of_a_worker_are_for_its_user_alone_in_a_private_folder(
    path: Path, private: bool, modes: set[int]
) -> None:
    folder = path.parent / "workers"
    before = os.umask(0)
    presence = Presence(folder, "w-1", private=private)
    os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == modes
    assert stat.S_IMODE(folder.stat().st_mode) == (0o700 if private else 0o777)
    presence.leave()


def test_files_of_dead_workers_go_with_the_sweep_and_those_of_living_ones_stay(path: Path) -> None:
    clock = FakeClock()
    queue, _ = open_sqlite(path, clock=clock)
    queue.put(tasks(1))
    queue.join("w-a")
    folder = Path(f"{path}-workers")
    for name in ("w-old.lock", "w-old.bell", "w-old.life"):
        (folder / name).touch()

    queue.tend()
    assert sorted(each.name for each in folder.iterdir()) == ["w-a.bell", "w-a.life", "w-a.lock"]

    (folder / "w-old.lock").touch()
    clock.advance(seconds=SWEEP_EVERY_S - 1)
    queue.tend()
    assert (folder / "w-old.lock").exists()
    clock.advance(seconds=1)
    queue.tend()
    assert not (folder / "w-old.lock").exists()
    queue.close()


def test_lease_survives_a_jump_of_the_wall_clock(path: Path) -> None:
    clock = FakeClock()
    queue, _ = open_sqlite(path, clock=clock)
    other, _ = open_sqlite(path, clock=clock)
    queue.put(tasks(1))
    lease = queue.lease(1, worker="w-a", ttl=TTL)[0]
    for days in (400, -800):
        clock.jump_wall(days=days)
        other.tend()
        assert lease_all(other) == []
    assert queue.renew([lease], TTL) == []
    assert queue.settle([succeeded(lease)]).refused == []


def test_lease_of_an_earlier_boot_is_dead_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, _ = open_sqlite(path)
    queue.put(tasks(1))
    assert queue.lease(1, worker="w-a", ttl=TTL)
    monkeypatch.setitem(vars(system), "boot_id", lambda: "another boot")
    rebooted, _ = open_sqlite(path)
    assert len(wait_for(rebooted, 1)) == 1


def test_slow_attempt_that_lost_its_lease_may_still_be_the_first_to_succeed(path: Path) -> None:
    clock = FakeClock()
    slow, records = open_sqlite(path, clock=clock)
    fast, _ = open_sqlite(path, clock=clock)
    slow.put(tasks(1))
    held = slow.lease(1, worker="w-slow", ttl=TTL)[0]
    clock.advance(minutes=2)
    again = wait_for(fast, 1)[0]
    assert slow.settle([succeeded(held, worker="w-slow")]).refused == []
    assert fast.renew([again], TTL) == [again]
    refused = fast.settle([succeeded(again, worker="w-fast")]).refused
    assert [one.record.worker for one in refused if one.record] == ["w-slow"]
    assert [record.worker for record in records.find_all(held.task.id)] == ["w-slow"]
    check_counters(path)


@pytest.mark.parametrize("place", ["in the file", "elsewhere"])
def test_failure_of_a_lost_lease_writes_nothing_and_names_the_holder(path: Path, place: str) -> None:
    clock = FakeClock()
    records: RecordStore = MemoryRecords() if place == "elsewhere" else open_sqlite(path)[1]
    slow, fast = (
        SqliteQueue(EmbeddedFile(path), records, clock=clock)
        if place == "elsewhere"
        else open_sqlite(path, clock=clock)[0]
        for _ in range(2)
    )
    slow.put(tasks(1))
    held = slow.lease(1, worker="w-slow", ttl=TTL)[0]
    clock.advance(minutes=2)
    again = wait_for(fast, 1)[0]
    refused = slow.settle([failed(held, worker="w-slow")]).refused
    assert [(one.holder, one.record) for one in refused] == [("w-b", None)]
    assert records.find_all(held.task.id) == []
    assert fast.settle([succeeded(again)]).refused == []
    assert [record.state for record in records.find_all(held.task.id)] == [TaskState.SUCCEEDED]
    if place == "in the file":
        check_counters(path)


def test_put_wakes_a_waiting_worker(path: Path) -> None:
    waiting, _ = open_sqlite(path)
    waiting.join("w-a")
    wake_fd = waiting.wake_descriptor()
    assert wake_fd is not None
    putting, _ = open_sqlite(path)
    assert not wait_readable(wake_fd, 0)
    putting.put(tasks(1))
    assert wait_readable(wake_fd, 5)
    waiting.drain_wakes()
    assert not wait_readable(wake_fd, 0)
    waiting.close()
    putting.put([sample_task("later")])  # A pipe that nobody reads any more is no error.


def test_put_wakes_every_worker_that_has_come_by_then_and_none_that_has_left(path: Path) -> None:
    putting, _ = open_sqlite(path)
    waiting: list[SqliteQueue] = []
    for number in range(4):
        queue, _ = open_sqlite(path)
        queue.join(f"w-{number}")
        waiting.append(queue)
        putting.put([sample_task(f"{number}")])
        for each in waiting:
            wake_fd = each.wake_descriptor()
            assert wake_fd is not None
            assert wait_readable(wake_fd, 0)
            each.drain_wakes()
        if number == 2:
            waiting.pop(0).close()
    for each in (putting, *waiting):
        each.close()


def test_delayed_task_of_another_queue_is_no_reason_to_stay(path: Path) -> None:
    clock = FakeClock()
    other, _ = open_sqlite(path, clock=clock, queue="other")
    other.put([sample_task("soon", not_before=clock.now() + timedelta(seconds=1))])
    queue, _ = open_sqlite(path, clock=clock)
    fresh = queue.outlook().next_due
    queue.put([sample_task("late", not_before=clock.now() + timedelta(minutes=5))])
    clock.advance(seconds=2)

    assert (fresh, queue.outlook().next_due) == (None, timedelta(minutes=5, seconds=-2))
    assert other.outlook().next_due == timedelta()
    other.close()
    queue.close()


def test_worker_that_was_rung_takes_a_delayed_task_once_it_is_due(path: Path) -> None:
    clock = FakeClock()
    queue, _ = open_sqlite(path, clock=clock)
    queue.put([sample_task("first")])
    assert len(queue.lease(1, worker="w-a", ttl=TTL)) == 1
    queue.put([sample_task("later", not_before=clock.now() + timedelta(minutes=1))])
    queue.drain_wakes()
    assert queue.lease(1, worker="w-a", ttl=TTL) == []
    assert queue.outlook().next_due == timedelta(minutes=1)

    clock.advance(minutes=2)

    assert queue.outlook().next_due == timedelta()
    queue.drain_wakes()
    assert [lease.task.key for lease in queue.lease(1, worker="w-a", ttl=TTL)] == ["later"]
    assert queue.outlook().next_due is None
    queue.close()


@pytest.mark.parametrize("durability", ["full", "normal"])
def test_put_waits_for_the_disk_whatever_came_before_it_and_a_lease_never_does(
    path: Path, durability: Durability
) -> None:
    queue, _ = open_sqlite(path, durability=durability)
    waits: list[tuple[str, int]] = []

    def done(what: str) -> None:
        assert queue._file._writer is not None
        waits.append((what, queue._file._writer.execute("PRAGMA synchronous").fetchone()[0]))

    for number in range(4):
        queue.put([sample_task(f"{number}")])
        done("put")
        [lease] = queue.lease(1, worker="w-a", ttl=TTL)
        done("lease")
        if number % 2:
            queue.settle([succeeded(lease)])
            done("settle")
            assert queue.lease(1, worker="w-a", ttl=TTL) == []

    settle = ("settle", 2 if durability == "full" else 1)
    pair = [("put", 2), ("lease", 1)]
    assert waits == [*pair, *pair, settle, *pair, *pair, settle]
    queue.close()


def test_death_of_a_watched_worker_rings_at_once_and_asks_for_upkeep(path: Path) -> None:
    watching, _ = open_sqlite(path)
    watching.put(tasks(1))
    watching.join("w-b")
    with holder(path, leases=1, running=1) as process:
        watching.tend()
        wake_fd = watching.wake_descriptor()
        assert wake_fd is not None
        watching.drain_wakes()
        assert not wait_readable(wake_fd, 0.2)
        process.kill()
        assert wait_readable(wake_fd, 240)
        assert watching.drain_wakes()
        process.wait()
        assert len(wait_for(watching, 1)) == 1
    assert not watching.drain_wakes()
    assert not wait_readable(wake_fd, 0)


def test_two_processes_share_a_queue_and_neither_starves(path: Path, tmp_path: Path) -> None:
    records = open_sqlite(path)[1]
    stop = tmp_path / "stop"
    script = """
import sys, time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from runtime.queues.sqlite.queue import open_sqlite
from runtime.end_reasons import EndReason
from runtime.tasks.history import Record, Settlement
from runtime.tasks.model import TaskState
from runtime.testing import sample_task
path, worker, stop = sys.argv[1:]
end = {"state": TaskState.SUCCEEDED, "reason": EndReason.SUCCEEDED, "ended_at": datetime.now(UTC)}
queue, _ = open_sqlite(path)
print("ready", flush=True)
sys.stdin.readline()
times, leases = [], []
while not Path(stop).exists():
    if not leases:
        queue.put([sample_task(f"{worker} {len(times)} {n}") for n in range(300)])
        leases = queue.lease(1, worker=worker, ttl=timedelta(hours=1))
    task, token = leases[0].task, leases[0].token
    record = Record(task_id=task.id, generation=1, experiment=task.experiment, token=token, worker=worker, **end)
    leases = queue.settle([Settlement(leases[0], record)], claim_next=1).leases
    times.append(time.monotonic_ns())
    if len(times) == 300:
        print("enough", flush=True)
print(*times)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path), f"w-{number}", str(stop)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "enough\n"
    stop.touch()
    times = [[int(at) for at in process.communicate()[0].split()] for process in processes]
    # While one of them is descheduled, the other gets every turn: their shares show when both run.
    turns = [number for _, number in sorted((at, number) for number, each in enumerate(times) for at in each)]
    shares = [sum(turns[start : start + 50]) for start in range(0, len(turns) - 49, 50)]
    assert sum(10 <= share <= 40 for share in shares) >= 3, shares
    assert records.totals("sample").counts[TaskState.SUCCEEDED] == len(turns)
    check_counters(path)


def test_counters_and_places_agree_after_random_moves(path: Path) -> None:
    rng = random.Random(7)
    clock = FakeClock()
    queue, records = open_sqlite(path, clock=clock)
    held: list[Lease] = []
    for step in range(400):
        match rng.randrange(7):
            case 0:
                queue.put([sample_task(str(rng.randrange(60))) for _ in range(3)])
            case 1 | 2:
                held += queue.lease(rng.randrange(1, 4), worker="w-a", ttl=TTL)
            case 3 if held:
                queue.settle([succeeded(held.pop(rng.randrange(len(held))))], claim_next=0)
            case 4 if held:
                queue.settle([failed(held.pop(rng.randrange(len(held))))])
            case 5 if held:
                lease = held.pop(rng.randrange(len(held)))
                due = clock.now() + timedelta(seconds=rng.randrange(20)) if rng.random() < 0.5 else None
                queue.release([Release(lease, due, ended_note(lease) if rng.random() < 0.5 else None)])
            case 6 if step % 3 == 0:
                for mark in list(records.marks("sample"))[:2]:
                    assert mark.task is not None
                    from runtime.tasks.model import next_generation

                    queue.put([next_generation(mark.task)])
        clock.advance(seconds=1)
        queue.renew(held, TTL)
    check_counters(path)


def test_pauses_and_resumes_of_many_leave_the_file_as_the_orders_say(path: Path) -> None:
    queues = [open_sqlite(path)[0] for _ in range(6)]
    queues[0].put(tasks(1))

    def give(queue: SqliteQueue, number: int) -> None:
        for turn in range(8):
            if (turn + number) % 2:
                queue.pause()
            else:
                queue.resume()

    threads = [threading.Thread(target=give, args=(queue, n)) for n, queue in enumerate(queues)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for turn in (True, False):
        paused = queues[0].records.control("default").paused
        assert bool(queues[1].lease(1, worker="w-a", ttl=TTL)) is not paused
        if turn and not paused:
            break
        queues[2].resume()
    for queue in queues:
        queue.close()


@pytest.mark.parametrize("ahead_s", [-300, 0, 300])
def test_queue_beside_a_store_follows_an_order_whose_giver_was_killed(path: Path, tmp_path: Path, ahead_s: int) -> None:
    """The order exists, and the file's flag was not written."""
    (tmp_path / "records").mkdir()
    clock = FakeClock(datetime.now(UTC) + timedelta(seconds=ahead_s))
    records = BlobRecords(FolderBlobs(tmp_path / "records"), clock=clock)
    queue = SqliteQueue(EmbeddedFile(path), records, clock=clock)
    queue.put(tasks(1))
    records.put_order("default", pause_order(clock.now()))
    before = queue._row.is_paused()

    queue.tend()
    paused = queue.lease(1, worker="w-a", ttl=TTL)
    resume = resume_order(records.control("default"), clock.now())
    assert resume is not None
    records.put_order("default", resume)
    clock.advance(seconds=SWEEP_EVERY_S)
    queue.tend()

    assert (before, paused) == (False, [])
    assert len(queue.lease(1, worker="w-a", ttl=TTL)) == 1
    queue.close()


def test_purge_beside_a_store_ends_what_cannot_be_decoded_too(path: Path, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    records = open_records(f"file:{tmp_path / 'records'}")
    queue = SqliteQueue(EmbeddedFile(path), records)
    queue.put(tasks(3))
    with queue._file.transaction() as connection:
        connection.execute("UPDATE tasks SET body='{' WHERE seq=2")

    assert (queue.purge(), queue.depth().total) == (3, 0)
    assert {records.find(task.id, 1).state for task in tasks(3)} == {TaskState.CANCELLED}  # type: ignore[union-attr]
    queue.close()


def test_full_file_is_explained_and_nothing_is_lost(path: Path) -> None:
    queue, records = open_sqlite(path)
    queue.put(tasks(2))
    lease = lease_all(queue, 1)[0]
    with queue._file.transaction() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    queue._file._writer.execute(f"PRAGMA max_page_count={pages}")  # type: ignore[union-attr]
    large = [sample_task(f"large-{n}", extra={"pad": "x" * 4000}) for n in range(20)]
    with pytest.raises(StoreUnavailable) as full:
        queue.put(large)
    assert full.value.hint is not None
    queue._file._writer.execute("PRAGMA max_page_count=1000000")  # type: ignore[union-attr]
    assert queue.settle([succeeded(lease)]).refused == []
    assert queue.put(large).new == 20
    assert records.totals("sample").counts[TaskState.QUEUED] == 21
    check_counters(path)


def test_file_that_fills_up_by_single_puts_keeps_those_that_returned(path: Path) -> None:
    queue, records = open_sqlite(path)
    for task in tasks(3):
        queue.put([task])
    assert queue._file._writer is not None
    pages = queue._file._writer.execute("PRAGMA page_count").fetchone()[0]
    queue._file._writer.execute(f"PRAGMA max_page_count={pages + 5}")
    large = [sample_task(f"large-{n}", extra={"pad": "x" * 4000}) for n in range(20)]
    kept: list[int] = []
    with pytest.raises(StoreUnavailable) as full:
        kept.extend(queue.put([task]).new for task in large)
    assert full.value.hint is not None
    assert 0 < len(kept) < 20
    check_counters(path)
    assert records.totals("sample").counts[TaskState.QUEUED] == 3 + len(kept)

    queue._file._writer.execute("PRAGMA max_page_count=1000000")
    assert [queue.put([task]).new for task in large] == [0] * len(kept) + [1] * (20 - len(kept))
    check_counters(path)


def test_network_filesystem_is_refused_with_a_way_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.records.sqlite_file, "filesystem_kind", lambda _: "nfs4")
    with pytest.raises(NotPossible) as refused:
        refuse_network_filesystem(path)
    assert "nfs4" in refused.value.message
    assert "RUNTIME_DATA_DIR" in (refused.value.hint or "")


def test_filesystem_kind_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    assert runtime.records.sqlite_file.filesystem_kind(Path("/proc/self")) == "proc"
    assert runtime.records.sqlite_file.filesystem_kind(tmp_path / "not" / "yet") not in (None, "proc")


def test_file_of_another_layout_is_refused(path: Path) -> None:
    file = EmbeddedFile(path)
    with file.transaction() as connection:
        connection.execute("PRAGMA user_version=99")
    file.close()
    with pytest.raises(NotPossible, match="layout 99"):
        open_sqlite(path)[0].put(tasks(1))


def test_killed_in_the_middle_of_a_commit_leaves_the_state_before(path: Path) -> None:
    queue, records = open_sqlite(path)
    queue.put(tasks(1))
    script = """
import sys
from datetime import timedelta
from runtime.queues.sqlite.queue import open_sqlite
from tests.conformance.queue_pairs import succeeded
queue, _ = open_sqlite(sys.argv[1])
lease = queue.lease(1, worker="w-x", ttl=timedelta(seconds=30))[0]
queue.mark_running([lease.token])
queue.settle([succeeded(lease)])
"""
    killed = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={**os.environ, "RUNTIME_FAULTS": "queue.mid_commit=kill"},
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL
    assert records.find(sample_task("0").id, 1) is None
    lease = wait_for(queue, 1)[0]
    assert queue.settle([succeeded(lease)]).refused == []
    check_counters(path)
