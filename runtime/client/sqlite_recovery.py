"""Recovers the readable part of a damaged task file; the file itself is kept under another name and never written to.

The rows of a copy are written into a new file: with the recovery of SQLite's own command line if it is installed and
works, and row by row, past every page that cannot be read. Page 1 holds the first page of each table; if it is unreadable,
page 1 of an empty task file replaces it, because the tables of every task file begin at the same pages.

Only tasks and records count. The waiting tasks and all counters follow from them: a task without a record of its newest
generation waits.
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
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from runtime.errors import InvalidTask, NotPossible, StoreBroken
from runtime.queues.base import DEFAULT_QUEUE
from runtime.queues.sqlite.local_workers import Presence
from runtime.records.blobs.folder import sync
from runtime.records.sqlite_file import (
    ENTERED,
    RENAMED,
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
from runtime.values import dataclass

PATIENCE_S: Final = 10.0
"""Longest wait for the file's lock; other processes hold it for one transaction."""
PAGE_BYTES: Final = 4096
_LARGEST: Final = 2**63 - 1
_COUNTED: Final = ("tasks", "records", "notes", "objects")
_HOLDING: Final = TABLES - {ENTERED}
"""Tables whose rows are brought over; each recovered task gets a place anyway."""
_WITHOUT_ROWID: Final = {"claimable": "queue, rank, seq", "deferred": "due, seq", "notes": "token", "objects": "key"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Counts of the recovered rows by table, and of the lost ones."""

    file: str
    kept: str
    tasks: int
    records: int
    notes: int
    objects: int
    waiting: int
    """Tasks that wait to be run, including interrupted ones."""
    lost_tasks: tuple[str, ...]
    """Ids that an index still has, without readable content."""
    lost_records: int
    """Results that only the readable counters of the experiments have: their tasks run once more."""
    left_out: int
    """Records and notes without a readable task."""
    unreadable: tuple[str, ...]
    used_sqlite3: bool

    @property
    def incomplete(self) -> bool:
        return bool(self.lost_tasks or self.lost_records or self.left_out or self.unreadable)


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
                done = _recover(path, Path(scratch), now or system.now(), in_use=in_use)
            except NotPossible:
                if not in_use:
                    lock.unlink(missing_ok=True)
                raise
            except sqlite3.DatabaseError as problem:
                raise explain_sqlite(path, problem) from problem
    return done


def _recover(path: Path, scratch: Path, now: datetime, *, in_use: bool) -> Recovered | None:
    # The second name that an interrupted recovery gave the file.
    kept = next((each for each in path.parent.glob(f"{path.name}.damaged-*") if each.samefile(path)), None)
    copy = scratch / "damaged.db"
    _copy(kept or path, copy)
    if kept is None:
        if _is_whole(copy, path):
            return None
        # Closing the copy has merged the readable part of its log.
        _copy(path, copy)
    found = _Found()
    made = scratch / "new.db"
    with closing(sqlite3.connect(made, isolation_level=None)) as new:
        make_tables(new)
        new.execute("BEGIN")
        theirs = _recover_with_sqlite3(copy, scratch / "theirs.db")
        for source in (theirs, copy):
            if source is not None:
                _bring_over(source, new, found)
        _put_in_order(new, found)
        new.execute("COMMIT")
        found.count(new)
    if not (in_use or found.named or any(found.counts.values()) or _begins_as_database(path)):
        raise NotPossible(
            f"`{path}` is no task file",
            facts=["it does not begin like a SQLite database, and holds nothing that can be read as a task"],
            hint="if it was one, move it away: the next command makes a new one",
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
        **found.counts,
        lost_tasks=tuple(sorted(found.named - found.ids)),
        lost_records=max(0, found.known_records - found.counts["records"]),
        left_out=found.left_out,
        unreadable=tuple(sorted(found.unreadable)),
        used_sqlite3=theirs is not None,
    )


class _Found:
    def __init__(self) -> None:
        self.unreadable: set[str] = set()
        self.named: set[str] = set()
        self.ids: set[str] = set()
        self.known_records = 0
        self.left_out = 0
        self.counts: dict[str, int] = {}

    def count(self, new: sqlite3.Connection) -> None:
        for table in _COUNTED:
            self.counts[table] = new.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        self.counts["waiting"] = new.execute(
            "SELECT (SELECT count(*) FROM claimable) + (SELECT count(*) FROM deferred)"
        ).fetchone()[0]
        self.ids = {row[0] for row in new.execute("SELECT id FROM tasks")}


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


def _begins_as_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) in (b"", b"SQLite format 3\0")


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


def _recover_with_sqlite3(copy: Path, target: Path) -> Path | None:
    """Run SQLite's own recovery on the copy; None if the command is missing or fails."""
    program = shutil.which("sqlite3")
    if program is None:
        return None
    # Deleted rows stay deleted. Some distributions build the command without `.recover`.
    asked = [program, "-batch", str(copy), ".recover --ignore-freelist"]
    with subprocess.Popen(asked, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as said:
        subprocess.run(
            [program, "-batch", str(target)],
            stdin=said.stdout,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    return target if said.returncode == 0 and target.is_file() and target.stat().st_size else None


def _bring_over(source: Path, new: sqlite3.Connection, found: _Found) -> None:
    with _reading(source) as old:
        if old is None:
            found.unreadable |= _HOLDING
            return
        for table in sorted(_HOLDING):
            width = len(new.execute(f"PRAGMA table_info({table})").fetchall())
            insert = f"INSERT OR IGNORE INTO {table} VALUES({', '.join('?' * width)})"
            for row in _rows(old, table, found):
                # A row that the table refuses was damaged; any other error is about the new file.
                with suppress(sqlite3.IntegrityError):
                    new.execute(insert, row)
        with suppress(sqlite3.Error):
            for (identity,) in old.execute("SELECT id FROM tasks INDEXED BY sqlite_autoindex_tasks_1"):
                if isinstance(identity, str):
                    found.named.add(identity)


@contextmanager
def _reading(source: Path) -> Iterator[sqlite3.Connection | None]:
    """Open a connection that can list the tables, with another page 1 if the file's own cannot be read; else None."""
    for mend in (lambda _: None, _replace_first_page):
        mend(source)
        connection = sqlite3.connect(source, isolation_level=None)
        connection.text_factory = lambda data: data.decode(errors="replace")
        try:
            names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
            for before in RENAMED.keys() & names:
                connection.execute(f"ALTER TABLE {before} RENAME TO {RENAMED[before]}")
                names.add(RENAMED[before])
        except sqlite3.Error:
            names = set()
        if names >= _HOLDING:
            break
        connection.close()
    else:
        yield None
        return
    with closing(connection):
        yield connection


def _replace_first_page(source: Path) -> None:
    """Give a copy the page 1 of an empty task file, with its own length. Its log is dropped."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        empty = EmbeddedFile(Path(folder, "empty.db"))
        with empty.transaction():
            pass
        empty.close()
        whole = Path(folder, "empty.db").read_bytes()
    # SQLite refuses a file with tables that begin beyond its end.
    pages = max(source.stat().st_size, len(whole)) // PAGE_BYTES
    first = bytearray(whole[:PAGE_BYTES])
    # The size in pages; it counts because the two change counters of a page that was closed in order are equal.
    first[28:32] = pages.to_bytes(4, "big")
    first[92:96] = first[24:28]
    with source.open("r+b") as file:
        file.write(first)
        file.truncate(pages * PAGE_BYTES)
    # Page 1 may be in the log too, and would override this one.
    source.with_name(source.name + "-wal").unlink(missing_ok=True)


def _rows(old: sqlite3.Connection, table: str, found: _Found) -> Iterator[tuple[Any, ...]]:
    """Yield every readable row; note the table if one is unreadable."""
    key = _WITHOUT_ROWID.get(table)
    if key is None:
        yield from _rows_by_number(old, table, found)
        return
    for order in ("", " DESC"):
        terms = ", ".join(f"{column}{order}" for column in key.split(", "))
        try:
            yield from old.execute(f"SELECT * FROM {table} ORDER BY {terms}")
            return
        except sqlite3.Error:
            found.unreadable.add(table)


def _rows_by_number(old: sqlite3.Connection, table: str, found: _Found) -> Iterator[tuple[Any, ...]]:
    last = -1
    while last < _LARGEST:
        try:
            for number, *row in old.execute(f"SELECT rowid, * FROM {table} WHERE rowid>? ORDER BY rowid", (last,)):
                last = max(last, number)  # A damaged one may be smaller.
                yield tuple(row)
            return
        except sqlite3.Error:
            found.unreadable.add(table)
        last = _skip(old, table, last)


def _skip(old: sqlite3.Connection, table: str, last: int) -> int:
    """Find the smallest row number after `last` from which reading works again; the largest number if there is none."""
    step = 1
    while not _can_read(old, table, last + step):
        step *= 2
        if last + step >= _LARGEST:
            return _LARGEST
    low, high = last + step // 2, last + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _can_read(old, table, middle) else (middle, high)
    return high


def _can_read(old: sqlite3.Connection, table: str, after: int) -> bool:
    try:
        old.execute(f"SELECT * FROM {table} WHERE rowid>? ORDER BY rowid LIMIT 1", (after,)).fetchall()
    except sqlite3.Error:
        return False
    return True


def _put_in_order(new: sqlite3.Connection, found: _Found) -> None:
    """Rebuild names, places and counters from the tasks and records."""
    found.known_records = new.execute(
        "SELECT coalesce(sum(succeeded + failed + cancelled + expired), 0) FROM experiments"
    ).fetchone()[0]
    new.execute(
        "DELETE FROM tasks WHERE typeof(generation)<>'integer' OR typeof(rank)<>'integer' OR typeof(id)<>'text'"
    )
    states = ", ".join(f"'{state}'" for state in TERMINAL_STATES)
    for condition in (
        f"DELETE FROM records WHERE state NOT IN ({states}) OR (rid >> 20) NOT IN (SELECT seq FROM tasks)",
        "DELETE FROM notes WHERE seq NOT IN (SELECT seq FROM tasks)",
    ):
        # Their numbers would be given to other tasks, which would then seem to have ended.
        found.left_out += new.execute(condition).rowcount
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
