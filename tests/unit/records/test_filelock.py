"""A lock that another process keeps: its holder is named, commands give up in the end, and workers do not."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runtime.errors import StoreUnavailable
from runtime.file_trust import user_name
from runtime.queues.sqlite.queue import open_sqlite
from runtime.records.filelock import LockBusy, find_holder, take_lock
from runtime.records.sqlite_file import EmbeddedFile
from runtime.testing import sample_task


class Hasty:
    """A clock on which half a minute passes between two looks."""

    def __init__(self) -> None:
        self.looks = 0
        self.on_look: dict[int, Callable[[], None]] = {}

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def boottime(self) -> float:
        self.looks += 1
        self.on_look.get(self.looks, lambda: None)()
        return self.looks * 30.0


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """A descriptor that holds the lock of the file `db`."""
    fd = os.open(tmp_path / "db-lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield fd
    os.close(fd)


def test_lock_that_is_kept_is_given_up_after_a_minute_with_the_holder(tmp_path: Path, holder: int) -> None:
    file = EmbeddedFile(tmp_path / "db", clock=Hasty())

    with pytest.raises(LockBusy) as busy, file.transaction():
        pytest.fail("the lock was not ours")

    assert busy.value.message == f"another process holds the lock `{tmp_path / 'db-lock'}`"
    name = Path("/proc/self/comm").read_text().strip()
    assert busy.value.facts[0] == "waited 1m; what needs the lock was not done"
    assert busy.value.facts[1] == f"holder: process {os.getpid()} of {user_name(os.geteuid())}, `{name}`"
    assert busy.value.hint is not None
    assert busy.value.hint.endswith(f"kill {os.getpid()}")
    assert isinstance(busy.value, StoreUnavailable)
    assert busy.value.exit_code == 3


def _read(file: EmbeddedFile) -> None:
    with file.reading():
        pass


def _hold(file: EmbeddedFile) -> None:
    with file.locked(patience_s=1):
        pass


@pytest.mark.parametrize("call", [lambda file: file.execute("SELECT 1", (), announce=list), _read, _hold])
def test_every_way_to_the_lock_gives_it_up(tmp_path: Path, holder: int, call: Callable[[EmbeddedFile], None]) -> None:
    file = EmbeddedFile(tmp_path / "db", clock=Hasty())

    with pytest.raises(LockBusy):
        call(file)
    file.close()


def test_file_whose_lock_was_given_up_can_be_used_when_it_is_free(tmp_path: Path, holder: int) -> None:
    file = EmbeddedFile(tmp_path / "db", clock=Hasty())
    with pytest.raises(LockBusy), file.transaction():
        pass

    fcntl.flock(holder, fcntl.LOCK_UN)

    for _ in range(3):  # nor does the attempt that was given up take the lock away
        with file.transaction() as connection:
            assert connection.execute("SELECT count(*) FROM tasks").fetchone() == (0,)
            with pytest.raises(BlockingIOError):
                fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.close()


def test_command_that_has_written_ends_though_the_lock_is_kept(tmp_path: Path) -> None:
    file = EmbeddedFile(tmp_path / "db", clock=Hasty())
    with file.transaction() as connection:
        connection.execute("INSERT INTO queues(name) VALUES('q')")
    other = os.open(tmp_path / "db-lock", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)

    file.close()

    os.close(other)
    with EmbeddedFile(tmp_path / "db").reading() as connection:
        assert connection.execute("SELECT name FROM queues").fetchall() == [("q",)]


def test_worker_waits_on_for_a_lock_that_is_kept_with_one_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue, _ = open_sqlite(tmp_path / "db", clock=Hasty())
    queue.join("w-1")
    queue.put([sample_task()])
    other = os.open(tmp_path / "db-lock", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    gives_up = logging.Handler()
    gives_up.emit = lambda record: fcntl.flock(other, fcntl.LOCK_UN)  # type: ignore[method-assign]
    logging.getLogger().addHandler(gives_up)

    with caplog.at_level(logging.WARNING):
        (lease,) = queue.lease(1, worker="w-1", ttl=timedelta(hours=9))
    logging.getLogger().removeHandler(gives_up)

    assert lease.task == sample_task()
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.startswith(f"waiting for the lock `{tmp_path / 'db-lock'}`, held by process {os.getpid()} of ")
    os.close(other)


def test_lock_is_taken_as_soon_as_it_is_free(tmp_path: Path, holder: int) -> None:
    clock = Hasty()
    fd = os.open(tmp_path / "db-lock", os.O_RDWR)
    waiting = threading.Thread(target=take_lock, args=(fd, "db-lock"), kwargs={"clock": clock, "patience_s": None})
    waiting.start()

    fcntl.flock(holder, fcntl.LOCK_UN)
    waiting.join()

    with pytest.raises(BlockingIOError):
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_holder_of_a_file_that_nobody_locks_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert find_holder(str(tmp_path / "file")) is None
    assert find_holder(str(tmp_path / "nothing")) is None
