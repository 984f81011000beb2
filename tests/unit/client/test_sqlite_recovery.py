"""A damaged task file: the commands' reports, and the tasks that `runtime doctor --recover` restores."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

import runtime.client.sqlite_recovery
from runtime.cli.main import main
from runtime.client.sqlite_recovery import Recovered, recover
from runtime.errors import NotPossible, StoreBroken, StoreUnavailable
from runtime.queues.sqlite.queue import open_sqlite
from runtime.records.sqlite_file import EmbeddedFile, make_tables
from runtime.tasks.model import TaskState
from runtime.testing import sample_task
from tests.conformance.queue_pairs import TTL, failed, give_back, succeeded
from tests.output_support import differences, documented

PAGE = 4096
TASKS = 300
NOW = datetime(2026, 11, 22, 7, 0, tzinfo=UTC)

Damage = Callable[[Path], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "local.db"


def fill(path: Path) -> None:
    """Fill a file: 100 tasks succeeded, 1 failed, 1 due for a retry, 1 held by a killed worker, 197 queued."""
    queue, _ = open_sqlite(path)
    queue.put([sample_task(str(number), extra={"pad": "x" * 200}) for number in range(TASKS)])
    leases = queue.lease(103, worker="w-one", ttl=TTL)
    queue.settle([succeeded(lease) for lease in leases[:100]])
    queue.settle([failed(leases[100])])
    queue.release([give_back(leases[101])])
    queue.close()


def zero(first: int, count: int) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(first * PAGE)
            file.write(bytes(count * PAGE))

    return damage


def garbage(at: int, count: int) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(random.Random(at).randbytes(count))

    return damage


def pages_of(path: Path, table: str) -> list[int]:
    """Return the leaf pages of a table."""
    with sqlite3.connect(path) as connection:
        try:
            root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name=?", (table,)).fetchone()[0]
        finally:
            pass
    connection.close()
    data = path.read_bytes()
    start = (root - 1) * PAGE
    if data[start] == 0x0D:
        return [root - 1]
    cells = int.from_bytes(data[start + 3 : start + 5], "big")
    places = [int.from_bytes(data[start + 12 + 2 * n : start + 14 + 2 * n], "big") for n in range(cells)]
    return [int.from_bytes(data[start + place : start + place + 4], "big") - 1 for place in places]


def middle_of(table: str) -> Damage:
    def damage(path: Path) -> None:
        leaves = pages_of(path, table)
        zero(leaves[len(leaves) // 2], 1)(path)

    return damage


def two_of_tasks(path: Path) -> None:
    leaves = pages_of(path, "tasks")
    for leaf in (leaves[2], leaves[-3]):
        zero(leaf, 1)(path)


DAMAGE: dict[str, Damage] = {
    "zeros among tasks": middle_of("tasks"),
    "zeros twice among tasks": two_of_tasks,
    "zeros among records": middle_of("records"),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - PAGE),
}
"""Damage after which nearly all rows can be read."""
NOTHING_LEFT: dict[str, Damage] = {
    "garbage header": garbage(0, 100),
    "no database": lambda path: path.write_text("not a database\n" * 1000),
    "a short text": lambda path: path.write_text("hi\n"),
    "nothing": lambda path: os.truncate(path, 0),
}


def digest(path: Path) -> bytes:
    return path.read_bytes()


def states(path: Path) -> dict[str, str]:
    """Return each task's state; assert that each task is in exactly one place."""
    connection = sqlite3.connect(path)
    found = connection.execute(
        "SELECT t.id, coalesce((SELECT state FROM records r WHERE r.rid=(t.seq << 20 | t.generation)), 'queued'), "
        "(SELECT count(*) FROM claimable r WHERE r.seq=t.seq) + (SELECT count(*) FROM deferred d WHERE d.seq=t.seq) + "
        "(SELECT count(*) FROM records c WHERE c.rid=(t.seq << 20 | t.generation)) FROM tasks t"
    ).fetchall()
    counters = connection.execute(
        "SELECT sum(queued), sum(succeeded), sum(failed), sum(leased) FROM experiments"
    ).fetchone()
    whole = connection.execute("PRAGMA integrity_check").fetchall()
    connection.close()
    assert {places for _, _, places in found} <= {1}
    assert whole == [("ok",)]
    names = {identity: state for identity, state, _ in found}
    expected = [sum(state == wanted for state in names.values()) for wanted in ("queued", "succeeded", "failed")]
    assert [each or 0 for each in counters] == [*expected, 0]
    return names


def recovered(path: Path) -> Recovered:
    found = recover(path, now=NOW)
    assert found is not None
    return found


def states_of_all(path: Path) -> dict[str, str]:
    connection = sqlite3.connect(path)
    rows = connection.execute(
        "SELECT t.id, coalesce((SELECT state FROM records r WHERE r.rid=(t.seq << 20 | t.generation)), 'queued') FROM tasks t"
    ).fetchall()
    connection.close()
    return dict(rows)


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_recovered_is_true_and_runs(path: Path, kind: str) -> None:
    fill(path)
    before = states_of_all(path)
    DAMAGE[kind](path)
    damaged = digest(path)

    found = recovered(path)

    after = states(path)
    assert digest(Path(found.kept)) == damaged
    # A task whose result is lost runs again; no result is invented.
    assert all(before[identity] == state or state == "queued" for identity, state in after.items())
    assert found.tasks == len(after) > TASKS - 40
    assert found.lost_tasks == TASKS - found.tasks
    ended = [identity for identity, state in before.items() if state != "queued"]
    assert found.lost_results == sum(after.get(identity, "queued") == "queued" for identity in ended)
    queue, records = open_sqlite(path)
    assert queue.depth().ready + queue.depth().delayed == found.waiting
    assert queue.put([sample_task("new")]).new == 1
    assert len(queue.lease(1000, worker="w-new", ttl=TTL)) == found.waiting + 1
    assert records.totals("sample").counts[TaskState.LEASED] == found.waiting + 1
    queue.close()


@pytest.mark.parametrize("kind", NOTHING_LEFT)
def test_file_without_a_readable_task_stays_and_the_way_on_is_a_command(path: Path, kind: str) -> None:
    fill(path)
    NOTHING_LEFT[kind](path)
    damaged = digest(path)

    with pytest.raises(NotPossible, match="can be read as a task") as refused:
        recover(path)

    assert digest(path) == damaged
    assert f"mv {path} {path}.damaged" in (refused.value.hint or "")


def test_what_only_the_log_holds_is_recovered(path: Path) -> None:
    fill(path)
    queue, _ = open_sqlite(path)
    queue.put([sample_task("in the log")])
    other = path.parent.parent / "copy"
    shutil.copytree(path.parent, other)  # A machine failure leaves it like this: the log was never merged.
    queue.close()
    copy = other / "local.db"
    assert Path(f"{copy}-wal").stat().st_size
    zero(pages_of(path, "records")[0], 1)(copy)

    found = recovered(copy)

    assert sample_task("in the log").id in states(copy)
    assert Path(f"{found.kept}-wal").stat().st_size


def test_recovery_killed_at_any_step_is_complete_after_it_is_run_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    steps = 0
    sync, link, replace, unlink = runtime.client.sqlite_recovery.sync, os.link, Path.replace, Path.unlink

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **more: object) -> object:
            nonlocal steps
            if steps == 0:
                raise Killed
            steps -= 1
            return call(*args, **more)

        return step

    ends: list[dict[str, str]] = []
    for at in range(100):
        shutil.rmtree(path.parent, ignore_errors=True)
        fill(path)
        DAMAGE["zeros among tasks"](path)
        damaged = digest(path)
        steps = at
        with monkeypatch.context() as killing:
            killing.setattr(runtime.client.sqlite_recovery, "sync", counted(sync))
            killing.setattr(os, "link", counted(link))
            killing.setattr(Path, "replace", counted(replace))
            killing.setattr(Path, "unlink", counted(unlink))
            try:
                recover(path, now=NOW)
                done = True
            except Killed:
                done = False
        if not done:
            recover(path, now=NOW)
        ends.append(states(path))
        kept = [each for each in path.parent.glob("local.db.damaged-*") if not each.name.endswith("-wal")]
        assert [digest(each) for each in kept] == [damaged]
        if done:
            assert len(ends) > 5
            assert all(each == ends[-1] for each in ends)
            return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize("pages", [20, 30])
def test_recovery_without_room_changes_nothing_and_is_run_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    fill(path)
    DAMAGE["zeros among tasks"](path)
    damaged = digest(path)

    def make_few(connection: sqlite3.Connection) -> None:
        make_tables(connection)
        connection.execute(f"PRAGMA max_page_count={pages}")

    with monkeypatch.context() as full:
        full.setattr(runtime.client.sqlite_recovery, "make_tables", make_few)
        with pytest.raises(StoreUnavailable, match="full") as refused:
            recover(path, now=NOW)
    assert refused.value.hint == "free some space on its disk"
    assert digest(path) == damaged

    assert recovered(path).tasks == len(states(path)) > TASKS - 40


def test_whole_file_is_left_alone(path: Path) -> None:
    fill(path)
    before = digest(path)

    assert recover(path) is None
    assert digest(path) == before
    assert not list(path.parent.glob("*damaged*"))


def test_database_of_something_else_is_refused_everywhere(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE photos(x)")
    connection.close()
    before = digest(path)

    with pytest.raises(NotPossible, match="no task file"):
        open_sqlite(path)[0].put([sample_task("1")])
    with pytest.raises(NotPossible, match="no task file"):
        recover(path)
    assert digest(path) == before


def test_recovery_is_refused_while_a_worker_lives(path: Path) -> None:
    fill(path)
    queue, _ = open_sqlite(path)
    queue.join("w-living")
    zero(0, 1)(path)

    with pytest.raises(NotPossible) as refused:
        recover(path)

    assert refused.value.facts == ("w-living",)
    assert not list(path.parent.glob("*damaged*"))


def test_recovery_waits_for_the_lock_and_then_says_who_has_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path)
    monkeypatch.setattr(runtime.client.sqlite_recovery, "PATIENCE_S", 0.0)
    other = EmbeddedFile(path)

    with other.locked(patience_s=0), pytest.raises(StoreUnavailable, match="holds the lock"):
        recover(path)
    other.close()


def test_sqlites_own_recovery_is_used_where_the_command_works(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path)
    donor = path.with_name("donor.db")
    shutil.copy(path, donor)
    zero(3, 20)(path)
    folder = path.parent / "bin"
    folder.mkdir()
    real = shutil.which("sqlite3")
    if real is None:
        pytest.skip("the command sqlite3 is not installed: apt-get install sqlite3")
    # A build with `.recover` prints the rows as SQL; here they come from the undamaged file.
    program = folder / "sqlite3"
    program.write_text(
        f'#!/bin/sh\ncase "$3" in .recover*) exec {real} -batch {donor} .dump;; esac\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    found = recovered(path)

    assert found.tasks == TASKS


def test_file_that_was_replaced_while_open_takes_nothing_more(path: Path) -> None:
    fill(path)
    queue, records = open_sqlite(path)
    lease = queue.lease(1, worker="w-one", ttl=TTL)[0]
    other = path.with_name("other.db")
    fill(other)
    other.replace(path)
    before = states_of_all(path)

    for call in (
        lambda: queue.settle([succeeded(lease)]),
        lambda: queue.put([sample_task("new")]),
        records.experiments,
    ):
        with pytest.raises(StoreBroken, match="replaced or removed"):
            call()
    assert states_of_all(path) == before


# the commands' reports


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data" / "local.db"


def used(path: Path) -> None:
    """Leave a worker's traces."""
    path.with_name(path.name + "-workers").mkdir(exist_ok=True)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all.db")


def with_log_folder(path: Path) -> None:
    Path(f"{path}-wal").mkdir()


UNUSABLE: dict[str, Damage] = {
    "a folder": as_folder,
    "a pipe": as_pipe,
    "a link to nowhere": as_link,
    "a folder for a log": with_log_folder,
}
COMMANDS = (
    ["status"],
    ["status", "sample"],
    ["submit", "--no-snapshot", "--", "true"],
    ["worker", "--once"],
    ["retry", "--failed", "sample"],
)


@pytest.mark.parametrize("kind", NOTHING_LEFT)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0] + str(len(words)))
def test_commands_name_the_damaged_file_and_the_way_on(
    data: Path, kind: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(data)
    used(data)
    NOTHING_LEFT[kind](data)
    damaged = digest(data)

    code = main(words)

    said = capsys.readouterr().err
    assert code == 3
    assert said.startswith(f"error: the task file `{data}` is damaged: ")
    assert f"runtime doctor --recover --file {data}" in said
    assert digest(data) == damaged


@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0] + str(len(words)))
def test_commands_name_what_lies_in_the_place_of_the_file(
    data: Path, kind: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(data)
    UNUSABLE[kind](data)

    code = main(words)

    said = capsys.readouterr().err
    assert code == 3
    assert str(data) in said.splitlines()[0]
    assert "hint: " in said
    assert "bug" not in said


def test_worker_that_meets_a_damaged_page_leaves_with_3(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(data)
    DAMAGE["zeros among tasks"](data)

    code = main(["worker", "--slots", "1", "--log-format", "human"])

    said = capsys.readouterr().err
    assert code == 3
    assert "is damaged" in said
    assert "nothing is lost" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another user for this")
def test_file_without_permission_is_named_with_what_is_needed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # pytest's own folders are accessible only to their owner.
        Path(folder).chmod(0o777)
        path = Path(folder, "local.db")
        fill(path)
        path.chmod(stat.S_IRUSR)
        Path(f"{path}-lock").chmod(0o666)
        os.seteuid(65534)
        try:
            with pytest.raises(StoreUnavailable) as refused:
                open_sqlite(path)[0].put([sample_task("new")])
        finally:
            os.seteuid(0)

    assert f"`{path}` cannot be used: " in refused.value.message
    assert "you need to read and write it" in (refused.value.hint or "")
    assert not refused.value.retryable


def test_doctor_recovers_and_says_what_came_back(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(data)
    DAMAGE["zeros among records"](data)

    code = main(["doctor", "--recover"])

    out, err = capsys.readouterr()
    assert code == 1
    assert "recovered  300 tasks" in out
    assert re.search(r"lost +0 tasks and [1-9]\d* results", out)
    assert "the damaged file is kept: " in err
    assert main(["status"]) == 0
    assert main(["doctor", "--recover", "--file", str(data)]) == 0
    assert "nothing is wrong" in capsys.readouterr().err


def test_doctor_recovers_as_json(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(data)
    DAMAGE["zeros among tasks"](data)

    assert main(["doctor", "--recover", "-o", "json"]) == 1

    found = json.loads(capsys.readouterr().out)
    assert differences(documented()["runtime doctor --recover -o json"], found) == []
    assert found["file"] == str(data)


def test_file_goes_with_recover(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--file", str(data)]) == 2
    assert "--recover" in capsys.readouterr().err
    assert main(["doctor", "--recover"]) == 2
    assert "there is no task file" in capsys.readouterr().err
