"""Stacks that this process keeps open between calls, because opening one costs many times more than a task.

Only stacks with their tasks in a file of this machine are kept. A stack is lent to one call at a time, so threads never
share one. It is lent again only if opening it would give the same: the same working directory, variables and settings
files, and the same file at its path. From the third look on these files are watched, and read again after a notice of the
kernel, or once a second. A forked child keeps nothing of its parent's.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime.client.tasks.task_snapshot import LOOK_EVERY_S, CodeInHand, SubmittedCode, take_code
from runtime.config import files_looked_at, no_working_folder
from runtime.queues.sqlite.queue import SqliteQueue
from runtime.sanitize import CleanLogger
from runtime.stack.open import OpenStack, open_stack
from runtime.system import system

if TYPE_CHECKING:
    from runtime.snapshots.watch import TreeWatch

MOST: Final = 4
"""Most stacks kept at a time, and most folders of code for each; the oldest makes room for another."""
SETTLED_NS: Final = 2_000_000_000
"""A settings file that was written shortly before it was read may change again with the same stamp."""
PLAIN_LOOKS: Final = 3
"""Looks before the settings files are watched: a watch costs as much as many looks, and a process may submit only twice."""
_VARIABLES: Final = (
    *("RUNTIME_STACK", "RUNTIME_OUTPUTS", "RUNTIME_QUEUE", "RUNTIME_DATA_DIR", "RUNTIME_DURABILITY"),
    *("RUNTIME_SNAPSHOT_ID", "RUNTIME_SNAPSHOT_DIR", "RUNTIME_ENVIRONMENT_ID", "RUNTIME_GOOGLE_API"),
    *("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HOME"),
    *("LOGNAME", "USER", "LNAME", "USERNAME"),
)
_RAW: Final = tuple(map(os.fsencode, _VARIABLES))
look_up_variable: Final[Callable[[bytes], bytes | None]] = getattr(os.environb, "_data", os.environb).get
"""`os.environb.get` on the dictionary behind it, which is five times faster: each call looks up twenty variables."""
_Key = tuple[str | bytes | None, ...]


class KeptStack:
    """An open stack, with the code that calls submit through it."""

    def __init__(self, stack: OpenStack) -> None:
        self.stack = stack
        self.queue = stack.queue()
        self._codes: dict[tuple[Path | bool | None, Path | None], CodeInHand] = {}
        self._stamps = {path: _stamp(path) for path in files_looked_at(stack.settings)}
        self._watch: TreeWatch | None = None
        """The watch of the settings files and the queue's file, which are read after a notice and every `LOOK_EVERY_S`."""
        self._looked_at = 0.0
        self._looks = 0
        """Number of looks without a watch."""
        settled = time.time_ns() - SETTLED_NS
        self.may_be_kept = (
            # The contract of another stack may change at any time, and the threads of its clients survive no fork.
            stack.found.source == "built-in"
            and isinstance(self.queue, SqliteQueue)
            and all(stamp is None or stamp[0] < settled for stamp in self._stamps.values())
        )

    @property
    def is_current(self) -> bool:
        now = system.monotonic()
        quiet = self._watch is not None and self._watch.is_quiet()
        if quiet and now - self._looked_at < LOOK_EVERY_S:
            return True
        if not isinstance(self.queue, SqliteQueue):
            return False
        if not quiet:
            self._close_watch()
            self._looks += 1
            if self._looks == PLAIN_LOOKS:
                from runtime.snapshots.watch import TreeWatch

                self._watch = TreeWatch.of_files(self._stamps, [str(self.queue.path)])
        self._looked_at = now
        return self.queue.is_same and all(_stamp(path) == stamp for path, stamp in self._stamps.items())

    def take_code(self, wanted: str | Path | bool | None, start: Path | None) -> SubmittedCode:
        """Return the same as `runtime.client.tasks.task_snapshot.take_code`, without a search if nothing has changed."""
        records, settings = self.queue.records, self.stack.settings
        if not self.may_be_kept or isinstance(wanted, str) or wanted is False:
            return take_code(wanted, records, settings, start=start)
        code = self._codes.get((wanted, start))
        if code is None:
            if len(self._codes) >= MOST:
                self._codes.pop(next(iter(self._codes))).close()
            code = self._codes[wanted, start] = CodeInHand(wanted, start)
        return code.take(records, settings)

    def close(self) -> None:
        _all.discard(self)
        self._close_watches()
        self.stack.close()

    def abandon(self) -> None:
        self._close_watches()
        self.stack.abandon()

    def _close_watches(self) -> None:
        for code in self._codes.values():
            code.close()
        self._codes.clear()
        self._close_watch()

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch, self._looks = None, 0


_kept: dict[_Key, KeptStack] = {}
"""Needs no lock: only one of two threads gets an item from `pop`, and only one of two items enters by `setdefault`."""
_all: set[KeptStack] = set()


class borrow_stack:  # noqa: N801 - a context manager, read as a call
    """`open_stack`, with the stack kept open for the next call if that is safe."""

    __slots__ = ("_asked", "_kept", "_key")

    def __init__(self, name: str | None = None, queue: str | None = None) -> None:
        self._asked = name, queue

    def __enter__(self) -> KeptStack:
        try:
            self._key = _key_of(*self._asked)
        except OSError as problem:
            raise no_working_folder(problem) from problem
        kept = _kept.pop(self._key, None)
        if kept is not None and not kept.is_current:
            kept.close()
            kept = None
        self._kept = kept or _open(*self._asked)
        return self._kept

    def __exit__(self, kind: object, problem: object, trace: object) -> None:
        if kind is None:
            _keep(self._key, self._kept)
        else:
            self._kept.close()


def _key_of(name: str | None, queue: str | None) -> _Key:
    """What decides which stack is opened, and as whom. Raises `OSError` if the working directory is gone."""
    return (name, queue, os.getcwd(), *map(look_up_variable, _RAW))  # noqa: PTH109 - each call asks


def _keep(key: _Key, kept: KeptStack) -> None:
    """Keep a stack for the next call, unless this process was forked since it was borrowed."""
    if kept not in _all:
        return
    if not kept.may_be_kept or _kept.setdefault(key, kept) is not kept:
        kept.close()
    elif len(_kept) > MOST:
        _close_these(list(_kept)[:-MOST])


def _open(name: str | None, queue: str | None) -> KeptStack:
    stack = open_stack(name, queue=queue)
    try:
        kept = KeptStack(stack)
        if new := stack.describe_new(kept.queue):
            CleanLogger(__name__).warning(new)
    except BaseException:
        stack.close()
        raise
    _all.add(kept)
    return kept


def _close_these(keys: list[_Key]) -> None:
    for key in keys:
        if (kept := _kept.pop(key, None)) is not None:  # Another thread may have borrowed it meanwhile.
            kept.close()


def close_kept() -> None:
    """Close all kept stacks, at the exit of the process or before their files are removed."""
    _close_these(list(_kept))


def _forget_parents() -> None:
    for each in _all:
        each.abandon()
    _all.clear()
    _kept.clear()


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    if not os.access(path, os.F_OK):
        return None
    try:
        status = os.stat(path)  # noqa: PTH116 - each call asks
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


atexit.register(close_kept)
os.register_at_fork(after_in_child=_forget_parents)
