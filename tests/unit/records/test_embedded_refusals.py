"""What SQLite's refusals of a task file mean."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from runtime.errors import StoreUnavailable
from runtime.records.sqlite_file import explain_sqlite


def refuse(code: int) -> sqlite3.OperationalError:
    problem = sqlite3.OperationalError("disk I/O error")
    problem.sqlite_errorcode = code
    return problem


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, which has no room for anybody")
def test_refusal_on_a_disk_that_is_full_says_so_whatever_sqlite_calls_it() -> None:
    failure = explain_sqlite(Path("/proc/tasks.db"), refuse(sqlite3.SQLITE_IOERR_WRITE))

    assert isinstance(failure, StoreUnavailable)
    assert failure.message == "the task file `/proc/tasks.db` cannot be used: disk I/O error"
    assert failure.hint == "free some space on its disk"
    assert [fact.partition(" and ")[0] for fact in failure.facts] == ["free: 0B"]


def test_refusal_of_a_disk_with_room_blames_no_full_disk(tmp_path: Path) -> None:
    failure = explain_sqlite(tmp_path / "tasks.db", refuse(sqlite3.SQLITE_IOERR_WRITE))

    assert (failure.facts, failure.hint, failure.retryable) == ((), None, True)
