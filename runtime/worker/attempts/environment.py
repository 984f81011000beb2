"""The surroundings of an attempt in a child's process: variables, folders, import path, signal handlers, streams.

docs/attempts.md lists the settings for each attempt, and those that are restored between two attempts.
"""

# pathlib is too large for the processes that load this.
# ruff: noqa: PTH109, PTH112, PTH208

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
import sys

from runtime.worker.attempts import scratch, wire, work_trees
from runtime.worker.attempts.entries import AttemptFailed, flush, parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NAMES = (
    b"RUNTIME_TASK_ID",
    b"RUNTIME_GENERATION",
    b"RUNTIME_ATTEMPT",
    b"RUNTIME_RESTARTS",
    b"RUNTIME_ATTEMPT_TOKEN",
    b"RUNTIME_EXPERIMENT",
    b"RUNTIME_OUTPUT_DIR",
    b"RUNTIME_CHECKPOINT_DIR",
    b"RUNTIME_SCRATCH_DIR",
    b"RUNTIME_METRICS",
    b"RUNTIME_SNAPSHOT_ID",
    b"RUNTIME_SNAPSHOT_DIR",
    b"RUNTIME_ORIGIN",
    b"RUNTIME_DEADLINE",
    b"PYTHONPATH",
)

CONTAINER = "RUNTIME_CONTAINER"
"""Variable of an order that describes the attempt's container; the attempt itself does not get it."""

BASE_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "RUNTIME_RANK": "0",
    "RUNTIME_WORLD_SIZE": "1",
    "RUNTIME_LOCAL_RANK": "0",
    "RUNTIME_NODE_RANK": "0",
    "RUNTIME_NUM_NODES": "1",
}
"""Set once for all attempts."""

FOREIGN_ENVIRONMENT = (
    *(name.decode() for name in _NAMES if name != b"PYTHONPATH"),
    *("RUNTIME_PYTHON", "RUNTIME_ENVIRONMENT_ID"),
    "RUNTIME_ARRAY_INDEX",
    "RUNTIME_PREEMPTED_NOTE",
    "RUNTIME_MASTER_ADDR",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
"""Variables of the worker's own job; with them an attempt would take itself for a rank of that job, or report for it."""

# fmt: off
PRELOADABLE = frozenset((
    "argparse", "ast", "base64", "bisect", "bz2", "calendar", "configparser", "contextvars", "copy", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "fnmatch", "fractions", "getpass", "gettext", "glob", "gzip",
    "heapq", "html", "importlib.metadata", "importlib.resources", "importlib.util", "inspect", "itertools",
    "linecache", "locale", "lzma", "numbers", "pathlib", "pickle", "pkgutil", "platform", "pprint", "queue",
    "random", "shlex", "shutil", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap",
    "threading", "tokenize", "tomllib", "traceback", "typing", "unicodedata", "urllib.parse", "uuid", "weakref",
    "zipfile", "zlib", "zoneinfo",
))
# fmt: on
"""Modules of the standard library that the guardian loads too once attempts have loaded them.

Each is small, starts and opens nothing, and works after a fork as before. A fresh attempt with `from pathlib import Path`
would otherwise spend three quarters of its time on that import."""

_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE")
)

# The public module turns handlers into enums, which would be a third of the cost of a small task.
_get_handler: Callable[[int], Any] = _signal.getsignal


class ProcessEnvironment:
    """Variables, folders, import path, signal handlers and streams of the process, as the next attempt has to find them.

    Made in the guardian; `on_term` handles SIGTERM in its children.
    """

    def __init__(self, on_term: Callable[..., None]) -> None:
        self.variables: dict[bytes, bytes] = getattr(os.environ, "_data", {})
        """The contents of `os.environ`."""
        self._base = dict(self.variables)
        """Variables that are restored after each attempt."""
        self._inherited = dict(self.variables)
        self._values = [os.environb.get(name, b"") for name in _NAMES]
        self.python = ""
        """The interpreter of the task's environment; empty if the attempt runs in the worker's own."""
        self.container = ""
        """JSON text about the attempt's container; empty if it runs in none."""
        self._extra = ""
        """JSON text of an order's further variables."""
        self.fenced = False
        """Whether this process has put up a fence, which cannot be taken down; no other attempt may run behind it."""
        self.cwd = os.getcwd()
        """The folder that the worker was started in."""
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._path = list(sys.path)
        self.code_dir = ""
        self._python_path = os.environ.get("PYTHONPATH", "")
        self._preloaded: frozenset[str] = frozenset()
        self._not_loaded = PRELOADABLE.difference(sys.modules)
        self._streams = sys.stdout, sys.stderr
        own: dict[int, Any] = {
            signal.SIGTERM: on_term,
            signal.SIGHUP: _signal.SIG_DFL,
            signal.SIGCHLD: _signal.SIG_DFL,
            signal.SIGINT: _signal.default_int_handler,
        }
        self._handlers = [(signum, own.get(signum, _get_handler(signum))) for signum in _SIGNALS]

    def record_preloaded(self, names: set[str]) -> None:
        """Note modules that the guardian has loaded for all later children."""
        self._preloaded |= names
        self._not_loaded = PRELOADABLE.difference(sys.modules)

    def list_imported(self) -> list[str]:
        """Return modules that the guardian could have loaded ahead and this process had to load itself."""
        return [name for name in self._not_loaded if name in sys.modules]

    # before an attempt

    def prepare(self, fields: list[str], deadline: float) -> None:
        """Set everything as an order has it; `deadline` is 0.0 if the attempt has none."""
        token, task_id, generation, attempt, experiment, _, output_dir, checkpoint_dir = fields[:8]
        scratch_root, cwd, code_dir, snapshot, extra = fields[8 : wire.ORDER_FIELDS]
        if extra != self._extra:
            self._set_extra(extra)
        # What the worker adds to its own Python's path is not for another.
        inherited = "" if self.python or self.container else self._python_path
        values = [
            text.encode("utf-8", "surrogateescape")
            for text in (
                task_id,
                generation,
                attempt,
                str(int(attempt) - 1),
                token,
                experiment,
                output_dir,
                checkpoint_dir,
                f"{scratch_root}/{token}" if scratch_root else "",
                f"{scratch_root}/{token}{scratch.METRICS}" if scratch_root else "",
                snapshot,
                code_dir,
                f"{code_dir.rsplit('/', 2)[0]}/{work_trees.ORIGIN}" if code_dir else "",
                f"{deadline:.3f}" if deadline else "",
                # The submitted code comes before installed code.
                os.pathsep.join([*(_import_folders(code_dir) if code_dir else ()), *filter(None, [inherited])]),
            )
        ]
        if values != self._values:
            for name, value, old in zip(_NAMES, values, self._values, strict=True):
                if value != old:
                    self._set_variable(name, value)
            self._values = values
        if code_dir != self.code_dir:
            self.code_dir = code_dir
            if code_dir and not self.python:
                first = [*([cwd] if cwd else []), *_import_folders(code_dir)]
                self._path = [*first, *(item for item in self._path if item not in first)]
                sys.path[:] = self._path
                for each in first:
                    self._drop_shadowed(each)
        self._enter(cwd, code_dir)

    @property
    def started_in(self) -> str | None:
        """The worker's folder, for files that are in no snapshot; None for an attempt without one, which runs there."""
        return self.cwd if self.code_dir else None

    def _enter(self, cwd: str, code_dir: str) -> None:
        folder = cwd or code_dir or self.cwd
        try:
            if cwd and code_dir and not os.path.isdir(cwd):
                if not os.path.realpath(cwd).startswith(f"{os.path.realpath(code_dir)}/"):
                    raise AttemptFailed(
                        "config_invalid", f"folder `{cwd[len(code_dir) + 1 :]}` leads out of the snapshot"
                    )
                scratch.make_folder(cwd)  # A snapshot has no empty folders.
            os.chdir(folder)
        except OSError as problem:
            raise AttemptFailed("setup_failed", f"cannot enter folder `{folder}`: {problem.strerror}") from None

    def _drop_shadowed(self, folder: str) -> None:
        """Forget modules that were loaded ahead if `folder` has a module of the same name, which comes first."""
        if not self._preloaded:
            return
        try:
            own = {name.partition(".")[0] for name in os.listdir(folder)}
        except OSError:
            return
        for name in self._preloaded:
            if name.partition(".")[0] in own:
                sys.modules.pop(name, None)

    def _set_variable(self, name: bytes, value: bytes) -> None:
        """Set a variable in `os.environ`, for C code, and among the restored variables; an empty value unsets it."""
        if value:
            os.putenv(name, value)
            self.variables[name] = self._base[name] = value
        else:
            os.unsetenv(name)
            self.variables.pop(name, None)
            self._base.pop(name, None)

    def _set_extra(self, text: str) -> None:
        new: dict[str, str] = parse_object(text) if text else {}
        old: dict[str, str] = parse_object(self._extra) if self._extra else {}
        container = new.pop(CONTAINER, "")
        for name in old.keys() - new.keys():
            self._set_variable(os.fsencode(name), self._inherited.get(os.fsencode(name), b""))
        for name, value in new.items():
            # Not as the locale has it: a secret may hold any character, and an error about it would quote it.
            self._set_variable(os.fsencode(name), value.encode("utf-8", "surrogateescape"))
        self._extra, self.python, self.container = text, new.get("RUNTIME_PYTHON", ""), container
        if "RUNTIME_FENCED" in new:
            from runtime.worker.attempts import signal_fence

            signal_fence.put_up(int(new["RUNTIME_FENCED"]))
            self.fenced = True

    # for a container

    def given(self) -> dict[str, str]:
        """Return the variables that the order gives to its attempt, without those of the worker's machine."""
        found = {**BASE_ENVIRONMENT, **parse_object(self._extra)}
        del found[CONTAINER]
        own = zip(_NAMES, self._values, strict=True)
        return found | {name.decode(): value.decode("utf-8", "surrogateescape") for name, value in own if value}

    def inherited(self) -> dict[str, str]:
        """Return the variables of the worker's machine."""
        return {os.fsdecode(name): os.fsdecode(value) for name, value in self._inherited.items()}

    def cwd_of(self, fields: list[str]) -> str:
        """Return the folder of the snapshot's tree that an order's attempt starts in; empty without a snapshot."""
        return os.getcwd() if fields[9] or fields[10] else ""

    # after an attempt

    def restore_streams(self) -> bool:
        """Undo changes of user code to standard output and error; returns False if it has closed them."""
        stdout, stderr = self._streams
        if sys.stdout is not stdout or sys.stderr is not stderr:
            flush()
            sys.stdout, sys.stderr = stdout, stderr
        flush()
        return not (stdout.closed or stderr.closed)

    def restore(self) -> None:
        """Undo changes of user code that the next attempt in this child would inherit."""
        if self.variables != self._base:
            for name in self.variables.keys() - self._base.keys():
                os.unsetenv(name)
                del self.variables[name]
            for name, value in self._base.items():
                if self.variables.get(name) != value:
                    os.putenv(name, value)
                    self.variables[name] = value
        os.umask(self._umask)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.set_handlers()
        if sys.path != self._path:
            sys.path[:] = self._path
        if sys.argv != [""]:
            sys.argv = [""]
        tempfile = sys.modules.get("tempfile")
        if tempfile is not None:
            tempfile.tempdir = None  # type: ignore[attr-defined]

    def set_handlers(self) -> None:
        for signum, handler in self._handlers:
            if _get_handler(signum) != handler:
                _signal.signal(signum, handler)


def _import_folders(tree: str) -> list[str]:
    """Return the folders of a project that hold its modules; the shim has the same rule."""
    return [f"{tree}/src", tree] if os.path.isdir(f"{tree}/src") else [tree]
