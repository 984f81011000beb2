"""Logs and folders beside a task file: those of users who cannot write the file itself are not believed."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest

from runtime.errors import Untrusted
from runtime.queues.sqlite.queue import open_sqlite
from runtime.records import sidecar_files
from runtime.testing import sample_task
from tests.owners_support import give_away


def status_of(mode: int, uid: int, gid: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


def fill(file: Path, key: str) -> None:
    queue, _ = open_sqlite(file)
    queue.put([sample_task(key)])
    queue.close()


@pytest.mark.parametrize("end", [*sidecar_files.LOGS, *sidecar_files.FOLDERS])
def test_task_file_beside_a_log_of_another_user_is_refused_and_unchanged(tmp_path: Path, end: str) -> None:
    file, theirs = tmp_path / "q.db", tmp_path / "theirs.db"
    fill(file, "ours")
    fill(theirs, "theirs")
    log = Path(f"{file}{end}")
    if end in sidecar_files.FOLDERS:
        shutil.rmtree(log, ignore_errors=True)
        log.mkdir()
    else:
        with sqlite3.connect(theirs) as connection:
            connection.execute("UPDATE tasks SET body = body")
            connection.commit()
            shutil.copyfile(f"{theirs}-wal", log)
    give_away(log)
    before = file.read_bytes()

    queue, _ = open_sqlite(file)
    with pytest.raises(Untrusted) as refused:
        queue.peek(1)
    queue.close()

    assert refused.value.path == str(log)
    assert file.read_bytes() == before


def test_task_file_in_a_folder_of_everybody_leaves_no_name_of_a_log_to_others_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    file = tmp_path / "q.db"
    fill(file, "1")
    seen: list[str] = []
    monkeypatch.setattr(
        "runtime.records.sqlite_file.check_beside", lambda _: seen.extend(each.name for each in tmp_path.glob("q.db-*"))
    )

    queue, _ = open_sqlite(file)

    assert [task.key for task in queue.peek(2)] == ["1"]
    assert {"q.db-journal", "q.db-wal", "q.db-shm"} <= set(seen)
    queue.put([sample_task("2")])
    queue.close()
