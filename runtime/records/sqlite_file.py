"""The one SQLite file of the local stack: its schema, its lock, and the moves that queue and records share.

Every write, checkpoint and close happens under an exclusive flock on a file beside the database. It hands over in
order, where SQLite's own busy handler lets one writer starve, and it keeps clear of the corruption that SQLite
3.7.0 to 3.51.2 risks when a WAL reset races with a writer (https://www.sqlite.org/wal.html#walresetbug). Readers
open read-only.

A task's current generation is in exactly one of `claimable`, `deferred`, `leases` and (as a record) `records`, except for the
newest tasks: a single one is put as its row alone, and enters `claimable` and the counters before the next other transaction
or reading, whosever it is. `entered` has the number of the last task that did.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import sqlite3
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from runtime.clock import Clock, SystemClock
from runtime.errors import InfrastructureFailure, NotPossible, StoreBroken, StoreUnavailable, Untrusted
from runtime.file_trust import check_trusted, close_file, make_folders
from runtime.records.filelock import NOTE_AFTER_S, PATIENCE_S, LockBusy, take_lock
from runtime.records.free_space import describe_free, is_full
from runtime.records.sidecar_files import check_beside, take_names
from runtime.records.transitions import enter_new, has_new, show_new
from runtime.system import system

Durability = Literal["full", "normal"]

SCHEMA_VERSION: Final = 2

# `claimable` holds what can be claimed now and nothing else, in the order of claiming: a claim reads its first rows
# however many tasks wait or are finished. It stands for the partial index of a state column, with one write less.
_SCHEMA = """
CREATE TABLE queues(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, paused INTEGER NOT NULL DEFAULT 0);
CREATE TABLE experiments(
  id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, queue INTEGER NOT NULL, created REAL NOT NULL,
  queued INTEGER NOT NULL DEFAULT 0, leased INTEGER NOT NULL DEFAULT 0, succeeded INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0, cancelled INTEGER NOT NULL DEFAULT 0, expired INTEGER NOT NULL DEFAULT 0);
CREATE TABLE tasks(
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, experiment INTEGER NOT NULL, generation INTEGER NOT NULL,
  queue INTEGER NOT NULL, rank INTEGER NOT NULL, due REAL, body TEXT NOT NULL);
CREATE TABLE claimable(
  queue INTEGER NOT NULL, rank INTEGER NOT NULL, seq INTEGER NOT NULL, tries INTEGER NOT NULL,
  flags INTEGER NOT NULL, PRIMARY KEY(queue, rank, seq)) WITHOUT ROWID;
CREATE TABLE deferred(
  due REAL NOT NULL, seq INTEGER NOT NULL, tries INTEGER NOT NULL, flags INTEGER NOT NULL,
  PRIMARY KEY(due, seq)) WITHOUT ROWID;
CREATE UNIQUE INDEX delayed_seq ON deferred(seq);
CREATE TABLE holders(
  id INTEGER PRIMARY KEY, worker TEXT NOT NULL UNIQUE, boot TEXT NOT NULL, deadline REAL NOT NULL);
CREATE TABLE leases(
  seq INTEGER PRIMARY KEY, holder INTEGER NOT NULL, token TEXT NOT NULL, tries INTEGER NOT NULL,
  flags INTEGER NOT NULL, leased REAL NOT NULL);
CREATE TABLE records(
  rid INTEGER PRIMARY KEY, state TEXT NOT NULL, token TEXT NOT NULL, reason TEXT NOT NULL, worker TEXT,
  started REAL, ended REAL NOT NULL, attempts INTEGER NOT NULL, message TEXT, code TEXT, value TEXT,
  log BLOB, rest TEXT);
CREATE INDEX records_failed ON records(rid) WHERE state <> 'succeeded';
CREATE TABLE notes(
  token TEXT PRIMARY KEY, seq INTEGER NOT NULL, generation INTEGER NOT NULL, ended REAL NOT NULL,
  note TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX notes_by_task ON notes(seq, generation, ended);
CREATE TABLE objects(key TEXT PRIMARY KEY, value BLOB NOT NULL, modified REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE entered(seq INTEGER NOT NULL);
INSERT INTO entered VALUES(0);
"""
TABLES: Final = frozenset(re.findall(r"CREATE TABLE (\w+)", _SCHEMA))
ENTERED: Final = "entered"
"""The table with the number of the last task that entered."""

# A record's row id joins the task's number and the generation, so that records are appended in order under one
# integer key.
_GENERATION_BITS = 20

_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "glusterfs", "wekafs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.gcsfuse", "fuse.s3fs", "fuse.juicefs", "fuse.weka", "pvfs2", "orangefs"}
)


def record_id(seq: int, generation: int) -> int:
    return seq << _GENERATION_BITS | generation


def split_record_id(rid: int) -> tuple[int, int]:
    """The task's number and the generation."""
    return rid >> _GENERATION_BITS, rid & ((1 << _GENERATION_BITS) - 1)


READ_PATIENCE_S: Final = 0.5
"""How long a reader waits for the lock to have new tasks enter, before it looks at them where they are."""
SHOWN_S: Final = 5.0
"""How long it leaves it at that then, so that one that asks often does not wait each time."""


class EmbeddedFile:
    """An open database file. Safe to share between threads; one object per process and path is enough."""

    def __init__(
        self, path: Path, *, durability: Durability = "full", private: bool = False, clock: Clock | None = None
    ) -> None:
        """`private` keeps the file, its folder and all beside it for this user alone; else the umask decides."""
        self._lock_fd = -1
        self.path = path
        self.durability: Durability = durability
        self.private = private
        self.patience_s: float | None = PATIENCE_S
        """How long to wait for the lock; a worker sets None and waits for ever, since its attempts go on meanwhile."""
        self._clock = clock or SystemClock()
        self.workers_folder = path.with_name(path.name + "-workers")
        self._mutex = system.rlock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._readings = 0
        """Calls that read from it now."""
        self._shown_until = 0.0
        """Until when the reader shows new tasks without a try to have them enter."""
        self._is_durable = True
        """The writer's commits wait for the disk."""
        self._name = str(path)
        self._opened: tuple[int, int] | None = None
        """Device and inode of the open file."""
        refuse_network_filesystem(path)
        try:
            if private:
                make_folders(str(path.parent.absolute()))
                self._close_to_others()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = self._open_lock()
        except OSError as problem:
            raise StoreUnavailable(
                f"cannot open the task file `{path}`: {(problem.strerror or str(problem)).lower()}",
                facts=[f"at `{problem.filename}`"],
                hint="set RUNTIME_DATA_DIR to a folder you can write",
                retryable=False,
            ) from problem
        with _forking:
            _files.add(self)

    @contextmanager
    def transaction(self, *, durable: bool | None = None, patient: bool = True) -> Iterator[sqlite3.Connection]:
        """One write transaction under the file's lock; rolled back whole if the body raises.

        `durable` overrides the file's durability: commit with an fsync, or without one. One that is not `patient` waits for
        the lock for `READ_PATIENCE_S` at most.
        """
        with self._mutex:
            self._lock(self.patience_s if patient else READ_PATIENCE_S)
            try:
                self._ensure_same()
                connection = self._writer or self._open_writer()
                self._make_durable(connection, self.durability == "full" if durable is None else durable)
                connection.execute("BEGIN IMMEDIATE")
                try:
                    if has_new(connection):
                        enter_new(connection, self._clock.now().timestamp())
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.DatabaseError as problem:
                if type(problem) not in _THE_FILE:
                    raise  # It is about the values to be written.
                raise explain_sqlite(self.path, problem) from problem
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def execute(self, statement: str, values: Sequence[object], *, announce: Callable[[], None]) -> None:
        """Run one statement as a write transaction of its own, with an fsync; it is cheaper than `transaction`.

        `announce` is called with the lock held: who hears of it and wants the lock gets it after the commit, and is awake by then.
        """
        with self._mutex:
            self._lock(self.patience_s)
            try:
                self._ensure_same()
                connection = self._writer or self._open_writer()
                self._make_durable(connection, True)
                announce()
                connection.execute(statement, values)
            except sqlite3.DatabaseError as problem:
                if type(problem) not in _THE_FILE:
                    raise
                raise explain_sqlite(self.path, problem) from problem
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A read-only connection; each statement sees one committed state."""
        with self._mutex:
            self._readings += 1
            try:
                self._ensure_same()
                connection = self._reader or self._open_reader()
                # In a transaction of this thread all had entered before, and nobody has put one since.
                if has_new(connection) and not (self._writer and self._writer.in_transaction):
                    self._have_new_enter(connection)
                yield connection
            except sqlite3.DatabaseError as problem:
                raise explain_sqlite(self.path, problem) from problem
            finally:
                self._readings -= 1

    def _have_new_enter(self, reader: sqlite3.Connection) -> None:
        if system.monotonic() < self._shown_until:
            return
        try:
            with self.transaction(durable=False, patient=False):
                pass
        except StoreUnavailable:
            show_new(reader)
            self._shown_until = system.monotonic() + SHOWN_S

    @contextmanager
    def locked(self, *, patience_s: float) -> Iterator[None]:
        """Hold the file's lock without opening it. Raises `StoreUnavailable` if another holds it for `patience_s`."""
        self._lock(patience_s)
        try:
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return os.open(f"{self._name}-lock", flags, 0o600 if self.private else 0o666)

    def _lock(self, patience_s: float | None) -> None:
        try:
            take_lock(self._lock_fd, f"{self._name}-lock", clock=self._clock, patience_s=patience_s)
        except BaseException:
            self._lock_fd = -1  # the old one is spent, and its number may become another file's
            self._lock_fd = self._open_lock()
            raise

    def _close_to_others(self) -> None:
        """Take others' rights to files that an earlier release made; refuse a task file of another user."""
        for end in ("", "-wal", "-shm", "-lock"):
            close_file(f"{self._name}{end}")
        for end in ("-workers", "-files"):
            close_file(f"{self._name}{end}", 0o700)
        if os.path.lexists(self._name):
            check_trusted(self._name, instead="set RUNTIME_DATA_DIR to a folder of your own")

    def close(self) -> None:
        """Closing the last connection checkpoints, so it happens under the lock too."""
        with self._mutex:
            if self._lock_fd < 0:
                return
            try:
                self._close_connections()
            finally:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def __del__(self) -> None:
        # A program may forget a stack without closing it, and its connections end by themselves.
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    def _close_connections(self) -> None:
        opened = [each for each in (self._reader, self._writer) if each is not None]
        if not opened:
            return
        try:
            self._lock(self.patience_s and NOTE_AFTER_S)
        except LockBusy:
            # What was committed stays, and the next process to open the file tidies up.
            _never_closed.extend(opened)
            self._reader = self._writer = None
            return
        try:
            for connection in opened:
                connection.close()
            self._reader = self._writer = None
        finally:
            # Closing the descriptor does not suffice: a child that was forked meanwhile has it too, and the lock with it.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def abandon(self) -> None:
        """Close the lock in a forked child, which has no connection."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def expect(self, *, durable: bool) -> None:
        """Prepare the durability of the next transaction while nobody waits: a change takes a statement."""
        with self._mutex:
            if self._writer is not None:
                self._make_durable(self._writer, durable)

    def _make_durable(self, connection: sqlite3.Connection, durable: bool) -> None:
        """Have the following transactions wait for the disk, or not."""
        if durable is not self._is_durable:
            connection.execute("PRAGMA synchronous=FULL" if durable else "PRAGMA synchronous=NORMAL")
            self._is_durable = durable

    @property
    def is_same(self) -> bool:
        """Whether the path still leads to the file that is open, if one is."""
        return self._opened is None or _identity(self._name) == self._opened

    def _ensure_same(self) -> None:
        if not self.is_same:
            raise StoreBroken(
                f"the task file `{self.path}` was replaced or removed while it was open",
                facts=["nothing was written"],
                hint="run the command again; a worker is started again",
            )

    def _open_writer(self) -> sqlite3.Connection:
        # Called with the lock held.
        if _identity(self._name) in _in_use_at_fork:
            raise NotPossible(
                f"the task file `{self.path}` was in use when this process was forked",
                facts=["SQLite would take the locks of the parent process for its own"],
                hint="fork outside of a transaction or a listing, or start processes by `spawn`:"
                ' multiprocessing.get_context("spawn")',
            )
        inspect_file(self.path)
        if not self.path.exists():
            # SQLite would make it with the mode 0644 at most, and it gives its other files the mode of this one.
            os.close(os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600 if self.private else 0o666))
        take_names(self._name)
        check_beside(self._name)
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=10)
        try:
            connection.text_factory = _as_text
            check_layout(self.path, connection)
            connection.execute("PRAGMA journal_mode=WAL")
            check_beside(self._name)  # SQLite removes the logs of an empty file, and makes them again
            connection.execute("PRAGMA synchronous=FULL")
            make_tables(connection)
        except Untrusted:
            _never_closed.append(connection)  # closing would write another user's log into the file
            raise
        except BaseException:
            connection.close()
            raise
        self._writer, self._opened, self._is_durable = connection, _identity(self._name), True
        return connection

    def _open_reader(self) -> sqlite3.Connection:
        if self._writer is None:
            self._lock(self.patience_s)
            try:
                self._open_writer()
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode=ro",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=10,
        )
        connection.text_factory = _as_text
        connection.execute("PRAGMA cache_size=-512")
        self._reader, self._shown_until = connection, 0.0
        return connection


# Forks. SQLite records a process's locks in its memory, which a fork copies, unlike the locks. A child that
# had the parent's connections would hang in a lock that a thread of the parent held inside SQLite, find the file locked for
# ever, or write to a log that the parent removes with its last connection: https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_connection_across_a_fork_
# So a process forks only while none of its threads is at a task file, and with all connections closed; both sides open
# them again at their next call.

FORK_PATIENCE_S: Final = 10.0
"""How long a fork waits for other threads to finish with a task file."""

_forking = threading.RLock()
_files: weakref.WeakSet[EmbeddedFile] = weakref.WeakSet()
_waited_for: list[EmbeddedFile] = []
"""Files with a mutex that the forking thread holds now."""
_in_use_at_fork: set[tuple[int, int]] = set()
"""In a child: device and inode of the files that the parent's connections were using."""
_never_closed: list[sqlite3.Connection | None] = []
"""Connections of the parent, in a child, and of a file whose lock another process kept: closing them touches its files."""


def _before_fork() -> None:
    _forking.acquire()
    until = system.monotonic() + FORK_PATIENCE_S
    files = list(_files)
    for file in files:
        if file._mutex.acquire(timeout=max(0.0, until - system.monotonic())):
            _waited_for.append(file)  # noqa: PERF401 - one that is acquired is listed at once
    # If this thread itself is in the middle of a call, waiting for a lock might mean waiting for itself.
    at_work = any(file._readings or (file._writer and file._writer.in_transaction) for file in _waited_for)
    if len(_waited_for) == len(files) and not at_work:
        for file in _waited_for:
            with suppress(OSError, sqlite3.Error):
                file._close_connections()


def _after_fork_in_parent() -> None:
    while _waited_for:
        _waited_for.pop()._mutex.release()
    _forking.release()


def _after_fork_in_child() -> None:
    global _forking
    _forking = threading.RLock()  # Threads that are not here may wait for the parent's.
    for file in list(_files):
        file._mutex = system.rlock()
        file._readings = 0
        if (file._reader or file._writer or file not in _waited_for) and (identity := _identity(file._name)):
            _in_use_at_fork.add(identity)
            _never_closed.extend((file._reader, file._writer))
            file._reader = file._writer = None
        if file._lock_fd >= 0:
            # A lock belongs to an open file description, which parent and child share until the child opens its own.
            with suppress(OSError):
                own = file._open_lock()
                os.close(file._lock_fd)
                file._lock_fd = own
    _waited_for.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def explain_sqlite(path: Path, problem: sqlite3.DatabaseError) -> InfrastructureFailure:
    """The meaning of SQLite's refusal of a task file, and the next step."""
    code = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(path, str(problem))
    facts: list[str] = []
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and is_full(path.parent)):
        facts.append(f"free: {describe_free(path.parent)}")
        hint: str | None = "free some space on its disk"
    elif code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        hint = f"you need to read and write it, what is beside it and its folder: ls -ld {path.parent} {path}*"
    else:
        hint = None
    return StoreUnavailable(
        f"the task file `{path}` cannot be used: {problem}",
        facts=facts,
        hint=hint,
        retryable=code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR),
    )


def damaged(path: Path, said: str) -> StoreBroken:
    """The failure that names a damaged file and the two ways on."""
    return StoreBroken(
        f"the task file `{path}` is damaged: {said}",
        facts=["nothing was written; the file is as it was"],
        hint=f"`runtime doctor --recover --file {path}` keeps it under another name and brings back what can be read;"
        f" or begin without it: mv {path} {path}.damaged",
    )


def inspect_file(path: Path, *, may_be_empty: bool = False) -> None:
    """Raise for a file that SQLite would hang on, explain misleadingly, or take for a new one."""
    try:
        status = path.stat()
    except OSError:
        # SQLite creates a missing file. A link that leads nowhere would look like one.
        if path.is_symlink():
            raise StoreBroken(
                f"the task file `{path}` is a link that leads nowhere",
                facts=[f"it points to `{os.readlink(path)}`"],  # noqa: PTH115 - as it is written
                hint="mount or restore what it points to, or remove the link",
            ) from None
        return
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise StoreBroken(f"the task file `{path}` is {kind}", hint=f"move it away: mv {path} {path}.aside")
    if not (status.st_size or may_be_empty) and path.with_name(path.name + "-workers").is_dir():
        # A worker has served it, so there were tables in it once.
        raise damaged(path, "it is empty, and it was in use before")


def check_layout(path: Path, connection: sqlite3.Connection) -> None:
    """Raise unless the database is a task file of this release, or empty."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if version == 0 and tables:
        raise NotPossible(
            f"`{path}` is no task file",
            facts=[f"it is a SQLite database with other tables: {', '.join(sorted(tables)[:5])}"],
            hint="move it away, or set another RUNTIME_DATA_DIR",
        )
    if version not in (0, SCHEMA_VERSION):
        raise NotPossible(
            f"the task file `{path}` has layout {version}",
            facts=[f"this release reads layout {SCHEMA_VERSION}"],
            hint="use the release that made it, or another RUNTIME_DATA_DIR",
        )
    if version and (missing := TABLES - tables):
        raise damaged(path, f"it lacks the table `{min(missing)}`")
    if version and len(connection.execute(f"SELECT seq FROM {ENTERED}").fetchall()) != 1:
        raise damaged(path, f"its table `{ENTERED}` has not one row")


def examine_file(path: Path, *, patience_s: float) -> bool:
    """Check a task file without changing it; False if `patience_s` passed first. Raises its first problem."""
    inspect_file(path)
    until = system.monotonic() + patience_s
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            check_layout(path, connection)
            connection.set_progress_handler(lambda: system.monotonic() > until, 100_000)
            said = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as problem:
        if getattr(problem, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
            return False
        raise explain_sqlite(path, problem) from problem
    if said != "ok":
        raise damaged(path, " ".join(said.split()))
    return True


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty file."""
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        connection.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - once for each transaction
    except OSError:
        return None
    return status.st_dev, status.st_ino


_THE_FILE: Final = (sqlite3.DatabaseError, sqlite3.OperationalError, sqlite3.InternalError)
"""Errors about the file; their subclasses are about a statement or a value."""

_as_text = functools.partial(str, encoding="utf-8", errors="replace")
"""Without it one damaged text fails its statement, and with it all other rows."""


def refuse_network_filesystem(path: Path) -> None:
    """SQLite's locks and shared memory do not hold across machines: raises `NotPossible` there."""
    kind = filesystem_kind(path)
    if kind in _NETWORK_FILESYSTEMS:
        raise NotPossible(
            f"the task file `{path}` lies on a network file system ({kind})",
            facts=["SQLite's locks do not hold there, and tasks could run twice or be lost"],
            hint="set RUNTIME_DATA_DIR to a local disk; several machines share a queue through Pub/Sub",
        )


def filesystem_kind(path: Path) -> str | None:
    """The type of the file system of `path`, which need not exist; None if the system does not report it."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    target = path.absolute()
    while not target.exists() and target != target.parent:
        target = target.parent
    target = target.resolve()
    best, kind = -1, None
    for line in mounts:
        fields, _, tail = line.partition(" - ")
        mount_point = Path(fields.split()[4].encode().decode("unicode_escape"))
        depth = len(mount_point.parts)
        if depth >= best and target.is_relative_to(mount_point):
            best, kind = depth, tail.split()[0]
    return kind
