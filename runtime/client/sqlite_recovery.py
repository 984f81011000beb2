"""Recovers the readable part of a damaged task file; the file itself is kept under another name and never written to.

The rows come from SQLite's own `.recover`, if its command line is installed and can do it, and from reading each table past
the pages that cannot be read. Only tasks and records count: the waiting tasks and all counters follow from them, since a
task without a record of its newest generation waits.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from runtime.errors import InvalidTask, NotPossible, StoreBroken
from runtime.queues.base import DEFAULT_QUEUE
from runtime.queues.sqlite.local_workers import Presence
from runtime.records.blobs.folder import sync
from runtime.records.sqlite_file import (
    ENTERED,
    TABLES,
    EmbeddedFile,
    check_layout,
    explain_sqlite,
    inspect_file,
    make_tables,
)
from runtime.system import system
from runtime.tasks.model import TERMINAL_STATES
from runtime.tasks.wire import decode_stored

PATIENCE_S: Final = 10.0
"""Longest wait for the file's lock; other processes hold it for one transaction."""
_COUNTED: Final = ("tasks", "records", "notes", "objects")
_HOLDING: Final = TABLES - {ENTERED}
"""Tables whose rows are brought over; each recovered task gets a place anyway."""
_WITHOUT_ROWID: Final = {"claimable": "queue, rank, seq", "deferred": "due, seq", "notes": "token", "objects": "key"}
"""The order of each table that has no row numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Counts of the recovered rows by table."""

    file: str
    kept: str
    tasks: int
    records: int
    notes: int
    objects: int
    waiting: int
    """Tasks that wait to be run, including interrupted ones."""
    lost_tasks: int
    """Tasks that the file's own counters have and that cannot be read; 0 if the counters cannot be read either."""
    lost_results: int
    """Results that the counters have and that cannot be read. A recovered task without its result is run again."""


def recover(path: Path, *, now: datetime | None = None) -> Recovered | None:
    """Replace a task file by its readable part; None if the file is whole. Raises `NotPossible` while a worker lives.

    Killed at any moment and run again, it has the same result: the damaged file has two names until it is replaced.
    """
    inspect_file(path, may_be_empty=True)
    if not path.exists():
        raise NotPossible(f"there is no task file `{path}`", hint="name another with `--file`")
    path = path.resolve()
    lock = path.with_name(path.name + "-lock")
    in_use = lock.exists()
    with _alone(path):
        for left in path.parent.glob(f".{path.name}.recovering-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.recovering-", dir=path.parent) as scratch:
            try:
                done = _recover(path, Path(scratch), now or system.now())
            except NotPossible:
                if not in_use:
                    lock.unlink(missing_ok=True)
                raise
            except sqlite3.DatabaseError as problem:
                raise explain_sqlite(path, problem) from problem
    return done


def _recover(path: Path, scratch: Path, now: datetime) -> Recovered | None:
    # The second name that an interrupted recovery gave the file.
    kept = next((each for each in path.parent.glob(f"{path.name}.damaged-*") if each.samefile(path)), None)
    copy = scratch / "damaged.db"
    _copy(kept or path, copy)
    if kept is None:
        if _is_whole(copy, path):
            return None
        # Closing the copy has merged the readable part of its log.
        _copy(path, copy)
    _lengthen(copy)
    made = scratch / "new.db"
    with closing(sqlite3.connect(made, isolation_level=None)) as new:
        make_tables(new)
        new.execute("BEGIN")
        _recover_with_sqlite3(copy, scratch / "theirs.db")
        for source in (scratch / "theirs.db", copy):
            _bring_over(source, new)
        counted = new.execute(
            f"SELECT coalesce(sum(queued + leased), 0), coalesce(sum({' + '.join(TERMINAL_STATES)}), 0) FROM experiments"
        ).fetchone()
        _put_in_order(new)
        new.execute("COMMIT")
        counts = {table: new.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in _COUNTED}
        waiting = new.execute("SELECT (SELECT count(*) FROM claimable) + (SELECT count(*) FROM deferred)").fetchone()[0]
        ended = counts["tasks"] - waiting
    if not any(counts.values()):
        raise NotPossible(
            f"nothing in `{path}` can be read as a task",
            facts=["nothing was changed"],
            hint=f"begin a new file, and keep this one aside: mv {path} {path}.damaged && rm -f {path}-wal {path}-shm",
        )
    kept = kept or _keep(path, now)
    shutil.copymode(path, made)
    with suppress(PermissionError):
        os.chown(made, path.stat().st_uid, path.stat().st_gid)
    sync(made)
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    made.replace(path)
    sync(path.parent)
    return Recovered(
        file=str(path),
        kept=str(kept),
        **counts,
        waiting=waiting,
        lost_tasks=max(0, sum(counted) - counts["tasks"]),
        lost_results=max(0, counted[1] - ended),
    )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the file's lock, with no worker alive, because a worker would continue with its open file."""
    workers = path.with_name(path.name + "-workers")
    living = [
        each.stem for each in sorted(workers.glob("*.lock")) if Presence.alive(workers, each.name.removesuffix(".lock"))
    ]
    if living:
        raise NotPossible(
            f"`{path}` is in use by {len(living)} worker{'' if len(living) == 1 else 's'}",
            facts=living[:5],
            hint="stop them first, with Ctrl-C or SIGTERM",
        )
    file = EmbeddedFile(path)
    try:
        with file.locked(patience_s=PATIENCE_S):
            yield
    finally:
        file.close()


def _copy(source: Path, target: Path) -> None:
    for end in ("", "-wal"):
        Path(f"{target}{end}").unlink(missing_ok=True)
        if Path(f"{source}{end}").is_file():
            shutil.copyfile(f"{source}{end}", f"{target}{end}")


def _lengthen(copy: Path) -> None:
    """Give a file that was cut short its length again: SQLite refuses all of it otherwise."""
    with copy.open("r+b") as file:
        header = file.read(100)
        page_size = int.from_bytes(header[16:18], "big")
        length = int.from_bytes(header[28:32], "big") * (65536 if page_size == 1 else page_size)
        if header.startswith(b"SQLite format 3\0") and file.seek(0, os.SEEK_END) < length:
            file.truncate(length)


def _is_whole(copy: Path, path: Path) -> bool:
    """Whether the copy is intact. Raises `NotPossible` for an intact database of another program."""
    if not copy.stat().st_size:
        return False
    try:
        with closing(sqlite3.connect(copy)) as connection:
            if connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
                return False
            check_layout(path, connection)
            return True
    except (sqlite3.Error, StoreBroken):
        return False


def _keep(path: Path, now: datetime) -> Path:
    """Give the damaged file and its log a second name."""
    kept = path.with_name(f"{path.name}.damaged-{now:%Y%m%dT%H%M%S%f}")
    wal = path.with_name(path.name + "-wal")
    if wal.is_file():
        # Before the file itself: its second name proves that the log has one too.
        os.link(wal, f"{kept}-wal")
    os.link(path, kept)
    sync(path.parent)
    return kept


def _recover_with_sqlite3(copy: Path, target: Path) -> None:
    """Run SQLite's own recovery on the copy; without the command, or with one that cannot do it, nothing is made."""
    program = shutil.which("sqlite3")
    if program is None:
        return
    # Deleted rows stay deleted. Some distributions build the command without `.recover`.
    asked = [program, "-batch", str(copy), ".recover --ignore-freelist"]
    said = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if said.returncode == 0:
        subprocess.run([program, "-batch", str(target)], input=said.stdout, capture_output=True, check=False)


def _bring_over(source: Path, new: sqlite3.Connection) -> None:
    """Copy every readable row; a row that the new table refuses was damaged."""
    if not source.exists():
        return
    with closing(sqlite3.connect(source, isolation_level=None)) as old:
        old.text_factory = lambda data: data.decode(errors="replace")
        for table in sorted(_HOLDING):
            width = len(new.execute(f"PRAGMA table_info({table})").fetchall())
            insert = f"INSERT OR IGNORE INTO {table} VALUES({', '.join('?' * width)})"
            for row in _read_rows(old, table):
                with suppress(sqlite3.IntegrityError):
                    new.execute(insert, row)


def _read_rows(old: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table that can be read: around damaged pages if the rows have numbers, else from both ends."""
    if table in _WITHOUT_ROWID:
        for order in ("", " DESC"):
            key = ", ".join(each + order for each in _WITHOUT_ROWID[table].split(", "))
            try:
                yield from old.execute(f"SELECT * FROM {table} ORDER BY {key}")
                return
            except sqlite3.DatabaseError:
                continue
        return
    done: int | None = -1
    while done is not None:
        try:
            for row in old.execute(f"SELECT rowid, * FROM {table} WHERE rowid > ? ORDER BY rowid", (done,)):
                done = int(row[0])
                yield row[1:]
            return
        except sqlite3.DatabaseError:
            done = _skip(old, table, done)


def _skip(old: sqlite3.Connection, table: str, after: int) -> int | None:
    """Return the least row number from which the table can be read again after a damaged page; None if there is none."""

    def can_read(step: int) -> bool:
        try:
            old.execute(f"SELECT rowid FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT 1", (after + step,)).fetchone()
        except sqlite3.DatabaseError:
            return False
        return True

    readable = next((1 << shift for shift in range(62) if can_read(1 << shift)), None)
    if readable is None:
        return None
    damaged = readable // 2
    while readable - damaged > 1:
        middle = (readable + damaged) // 2
        damaged, readable = (damaged, middle) if can_read(middle) else (middle, readable)
    return after + readable


def _put_in_order(new: sqlite3.Connection) -> None:
    """Rebuild names, places and counters from the tasks and records."""
    new.execute(
        "DELETE FROM tasks WHERE typeof(generation)<>'integer' OR typeof(rank)<>'integer' OR typeof(id)<>'text'"
    )
    states = ", ".join(f"'{state}'" for state in TERMINAL_STATES)
    for condition in (
        f"DELETE FROM records WHERE state NOT IN ({states}) OR (rid >> 20) NOT IN (SELECT seq FROM tasks)",
        "DELETE FROM notes WHERE seq NOT IN (SELECT seq FROM tasks)",
    ):
        # Their numbers would be given to other tasks, which would then seem to have ended.
        new.execute(condition)
    _name_missing(new)
    tries = {seq: (tries, flags) for seq, tries, flags in new.execute("SELECT seq, tries, flags FROM leases")}
    tries |= {seq: (tries, flags) for seq, tries, flags in new.execute("SELECT seq, tries, flags FROM deferred")}
    tries |= {seq: (tries, flags) for seq, tries, flags in new.execute("SELECT seq, tries, flags FROM claimable")}
    due = dict(new.execute("SELECT seq, due FROM deferred").fetchall())
    for table in ("leases", "holders", "claimable", "deferred"):
        new.execute(f"DELETE FROM {table}")
    open_tasks = new.execute(
        "SELECT seq, queue, rank FROM tasks t WHERE NOT EXISTS "
        "(SELECT 1 FROM records r WHERE r.rid=((t.seq << 20) | t.generation))"
    ).fetchall()
    for seq, queue, rank in open_tasks:
        attempts, flags = tries.get(seq, (0, 0))
        if seq in due:
            new.execute("INSERT INTO deferred VALUES(?, ?, ?, ?)", (due[seq], seq, attempts, flags))
        else:
            new.execute("INSERT INTO claimable VALUES(?, ?, ?, ?, ?)", (queue, rank, seq, attempts, flags))
    new.execute(f"UPDATE {ENTERED} SET seq=(SELECT coalesce(max(seq), 0) FROM tasks)")
    _recount(new)


def _name_missing(new: sqlite3.Connection) -> None:
    """Name queues and experiments without a row from their tasks."""
    known = {row[0] for row in new.execute("SELECT id FROM queues")}
    for (queue,) in new.execute("SELECT DISTINCT queue FROM tasks").fetchall():
        if queue not in known:
            taken = new.execute("SELECT 1 FROM queues WHERE name=?", (DEFAULT_QUEUE,)).fetchone()
            name = f"recovered-{queue}" if taken else DEFAULT_QUEUE
            new.execute("INSERT OR IGNORE INTO queues(id, name) VALUES(?, ?)", (queue, name))
    missing = new.execute(
        "SELECT experiment, min(queue), max(body) FROM tasks WHERE experiment NOT IN (SELECT id FROM experiments) "
        "GROUP BY experiment"
    ).fetchall()
    for number, queue, body in missing:
        try:
            name = decode_stored(body).experiment
        except InvalidTask:
            name = f"recovered-{number}"
        if new.execute("SELECT 1 FROM experiments WHERE name=?", (name,)).fetchone():
            name = f"{name}-recovered-{number}"
        new.execute(
            "INSERT INTO experiments(id, name, queue, created) VALUES(?, ?, ?, ?)", (number, name, queue, system.time())
        )


def _recount(new: sqlite3.Connection) -> None:
    new.execute("UPDATE experiments SET queued=0, leased=0, succeeded=0, failed=0, cancelled=0, expired=0")
    counted: Mapping[int, Counter[str]] = {row[0]: Counter() for row in new.execute("SELECT id FROM experiments")}
    for experiment, state, count in new.execute(
        "SELECT t.experiment, coalesce(r.state, 'queued'), count(*) FROM tasks t LEFT JOIN records r "
        "ON r.rid=((t.seq << 20) | t.generation) GROUP BY 1, 2"
    ).fetchall():
        counted[experiment][state] += count
    for experiment, states in counted.items():
        for state, count in states.items():
            new.execute(f"UPDATE experiments SET {state}=? WHERE id=?", (count, experiment))
