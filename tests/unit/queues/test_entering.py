"""Single tasks, which are put as one row of the task file, and enter its other tables with the next transaction or reading."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtime.client.sqlite_recovery import recover
from runtime.errors import StoreBroken
from runtime.queues.sqlite.queue import SqliteQueue, open_sqlite
from runtime.records import sqlite_file
from runtime.records.sqlite import SqliteRecords
from runtime.records.sqlite_file import EmbeddedFile
from runtime.tasks.history import Lease
from runtime.tasks.model import Task, TaskState
from tests.conformance.queue_pairs import TTL, succeeded, tasks
from tests.unit.queues.test_queue_sqlite import check_counters


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasks.db"


def ask(path: Path, question: str) -> list[tuple[Any, ...]]:
    """Look into the file as it is, without a connection of ours."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(question).fetchall()


def put_singly(path: Path, count: int = 3) -> tuple[SqliteQueue, SqliteRecords, list[Task]]:
    """Put tasks one by one; the first two number the experiment and the queue, and the others are put as their rows alone."""
    queue, records = open_sqlite(path)
    made = tasks(count)
    for each in made:
        assert queue.put([each]).new == 1
    assert ask(path, "SELECT seq FROM entered") == [(2,)]
    return queue, records, made


def test_single_put_writes_its_row_alone_and_is_known_at_once(path: Path) -> None:
    queue, _, made = put_singly(path)

    assert ask(
        path, "SELECT (SELECT count(*) FROM tasks), (SELECT count(*) FROM claimable), queued FROM experiments"
    ) == [(3, 2, 2)]
    assert (queue.put([made[2]]).new, queue.put([made[2]]).known) == (0, 1)
    check_counters(path)


READERS: dict[str, Callable[[SqliteQueue, SqliteRecords, list[Task]], object]] = {
    "totals": lambda queue, records, made: records.totals(made[0].experiment).counts[TaskState.QUEUED],
    "peek": lambda queue, records, made: len(queue.peek(10)),
    "depth": lambda queue, records, made: queue.depth().ready,
    "place in the line": lambda queue, records, made: queue.find_waiting(made[2].id).ahead + 1,  # type: ignore[union-attr, operator]
    "lease": lambda queue, records, made: len(queue.lease(10, worker="w-a", ttl=TTL)),
    "purge": lambda queue, records, made: queue.purge(),
    "cancel": lambda queue, records, made: queue.cancel_open(made[0].experiment),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "another opening"])
def test_every_reader_sees_what_was_put_just_before(path: Path, reader: str, elsewhere: bool) -> None:
    queue, records, made = put_singly(path)
    if elsewhere:
        queue, records = open_sqlite(path)

    assert READERS[reader](queue, records, made) == 3

    check_counters(path)


def test_tasks_are_leased_in_the_order_of_their_puts_whichever_way_they_were_put(path: Path) -> None:
    queue, records, made = put_singly(path, 6)
    more = tasks(12)[6:]
    queue.put(more[:3])
    for each in more[3:]:
        queue.put([each])

    leases = queue.lease(20, worker="w-a", ttl=TTL)
    queue.settle([succeeded(lease) for lease in leases])

    assert [lease.task.id for lease in leases] == [task.id for task in [*made, *more]]
    assert records.totals(made[0].experiment).counts[TaskState.SUCCEEDED] == 12
    check_counters(path)


def test_rolled_back_transaction_leaves_the_tasks_to_the_next_one(path: Path) -> None:
    queue, records, made = put_singly(path)
    with pytest.raises(ZeroDivisionError), queue._file.transaction():
        raise ZeroDivisionError
    assert ask(path, "SELECT seq FROM entered") == [(2,)]

    assert records.totals(made[0].experiment).counts[TaskState.QUEUED] == 3


def test_reading_in_a_transaction_of_the_same_thread_begins_no_other(path: Path) -> None:
    queue, records, made = put_singly(path)
    with queue._file.transaction():
        assert records.find_task(made[2].id) is not None

    assert records.find_task(made[2].id).state is TaskState.QUEUED  # type: ignore[union-attr]


def test_reader_waits_for_a_writer_and_then_tells_the_truth(path: Path) -> None:
    _, records, made = put_singly(path)
    other = EmbeddedFile(path)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with other.locked(patience_s=240):
            inside.set()
            leave.wait(240)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(240)
    threading.Timer(0.05, leave.set).start()

    assert records.totals(made[0].experiment).counts[TaskState.QUEUED] == 3

    holder.join()
    other.close()


def test_workers_are_woken_with_the_lock_held_before_the_commit(path: Path) -> None:
    queue, _, _ = put_singly(path)
    seen: list[object] = []

    def announce() -> None:
        fd = os.open(f"{path}-lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            seen.append("locked")
        os.close(fd)
        seen.append(len(ask(path, "SELECT 1 FROM tasks")))

    queue._wakes.wake = announce  # type: ignore[method-assign]
    queue.put([tasks(4)[3]])

    assert seen == ["locked", 3]
    assert len(ask(path, "SELECT 1 FROM tasks")) == 4


LOOKS = {name: READERS[name] for name in ("totals", "peek", "depth", "place in the line")}


@pytest.mark.parametrize("look", LOOKS)
def test_look_needs_no_lock_and_no_space(path: Path, look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, records, made = put_singly(path)
    other = EmbeddedFile(path)
    monkeypatch.setattr(sqlite_file, "READ_PATIENCE_S", 0.01)
    tries: list[object] = []
    monkeypatch.setattr(sqlite_file, "show_new", lambda reader, real=sqlite_file.show_new: tries.append(real(reader)))
    with other.locked(patience_s=240):
        assert [LOOKS[look](queue, records, made) for _ in range(3)] == [3] * 3
    assert len(tries) == 1
    assert ask(path, "SELECT seq FROM entered") == [(2,)]
    queue.put([tasks(4)[3]])

    def refuse(*_: object) -> None:
        problem = sqlite3.OperationalError("database or disk is full")
        problem.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise problem

    monkeypatch.setattr(sqlite_file, "enter_new", refuse)
    monkeypatch.setattr(sqlite_file, "SHOWN_S", 0.0)
    queue._file._shown_until = 0.0
    assert LOOKS[look](queue, records, made) == (4 if look != "place in the line" else 3)
    other.close()


@pytest.mark.parametrize("damage", ["DROP TABLE entered", "DELETE FROM entered", "INSERT INTO entered VALUES(0)"])
def test_file_of_this_layout_without_the_number_is_damaged_and_recovered(path: Path, damage: str) -> None:
    put_singly(path)[0].close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(damage)

    with pytest.raises(StoreBroken, match=r"its? (table|lacks the table) `entered`"):
        open_sqlite(path)[0].peek(1)

    assert recover(path, now=datetime.now(UTC)).tasks == 3  # type: ignore[union-attr]
    assert len(open_sqlite(path)[0].peek(9)) == 3
    check_counters(path)


def test_worker_that_is_woken_looks_with_the_lock_from_its_first_lease_on(path: Path) -> None:
    idle = open_sqlite(path)[0]
    assert idle.lease(1, worker="w-a", ttl=TTL) == []
    queue, _, _ = put_singly(path)
    assert len(queue.lease(9, worker="w-b", ttl=TTL)) == 3
    found: list[Lease] = []

    def look() -> None:
        idle.drain_wakes()
        found.extend(idle.lease(1, worker="w-a", ttl=TTL))

    looking = threading.Thread(target=look)

    def announce() -> None:
        looking.start()
        looking.join(0.2)  # without the lock it would be done by then, and would have seen nothing

    queue._wakes.wake = announce  # type: ignore[method-assign]
    queue.put([tasks(4)[3]])
    looking.join()

    assert [lease.task.id for lease in found] == [tasks(4)[3].id]
