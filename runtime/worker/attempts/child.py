"""One attempt at a time, in a child of the guardian: environment, signals, output, and how it ended.

The child reads orders from its control socket and answers each in turn. It runs functions and workflows itself and
spawns commands, whose parent it stays. It is the subreaper of all that they start, so at the end of an attempt
`waitpid` says for sure whether anything of it still lives. docs/attempts.md describes what user code sees.

Every fresh attempt pays for what this module loads; user code should find a bare Python.
"""

# pathlib is too large for the processes that load this.
# ruff: noqa: PTH109, PTH110, PTH112, PTH208

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import errno
import fcntl
import importlib
import json
import os
import resource
import signal
import struct
import sys
import termios
import time

from runtime import faults
from runtime.worker.attempts import processes, scratch, trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Mapping
    from types import FrameType, TracebackType
    from typing import Any, NoReturn

    from runtime.worker.attempts.context import Attempt

# The wire between worker and child. Frames from the worker: magic, length, kind. An order's fields are joined by NUL,
# which neither paths nor JSON can hold; the task's JSON is last. Frames to the worker: magic, length, kind, flags, start,
# end, and the peak of resident memory or 0. User code has the descriptor too, and may write to it or read from it: after
# bytes that are no frame, neither side knows where the next one begins, and the child is replaced.
MAGIC = 0x1DF7A3C5
ORDER_HEADER = struct.Struct("<IIB")
ORDER, GO_ON = 1, 2
RESULT_HEADER = struct.Struct("<IIBBddQ")
RESULT, PROGRESS = 1, 2
RETIRES, WAITS, DETAILED = 1, 2, 4
"""Flags of a result: the child exits and takes no further order; it waits for GO_ON, since output of this attempt is
still in the pipe; JSON details and then the value follow."""
ORDER_FIELDS = 13
DETAIL_HEADER = struct.Struct("<I")
MOST_VALUE_BYTES = 64 * 1024 * 1024
MOST_FRAME_BYTES = 4 * MOST_VALUE_BYTES + (16 << 20)
"""A value's characters take up to four bytes each."""

# A cell of the page that worker, guardian and children share, one for each child. Written by the child: how many
# orders it has begun, and when the last one began on the wall and the monotonic clock; the command's pid; OVER once
# the user's code has ended; CLOSED if it found its end of the socket gone; WAITS while it waits for a frame; its own
# pid, of which the guardian's word may come later than what it does. Written by the worker: HOLD (begin nothing
# further), which order is asked to stop, and why.
CELL_BYTES = 64
BEGUN = struct.Struct("<Qdd")
COMMAND_PID = PID = struct.Struct("<I")
STOP = struct.Struct("<Q")
COMMAND_PID_AT, OVER_AT, CLOSED_AT, WAITS_AT, HOLD_AT, REASON_AT, STOP_AT, PID_AT = 24, 28, 29, 30, 32, 33, 40, 48
STOP_REASONS = ("", "preempted", "cancelled", "timeout", "expired", "lost", "other")

CONTROL_FD = 3
CLEAN_EXIT = 117
"""Exit status of a child that left nothing behind and had said all there was to say."""

_ENV_NAMES = (
    b"RUNTIME_TASK_ID",
    b"RUNTIME_GENERATION",
    b"RUNTIME_ATTEMPT",
    b"RUNTIME_RESTARTS",
    b"RUNTIME_ATTEMPT_TOKEN",
    b"RUNTIME_EXPERIMENT",
    b"RUNTIME_OUTPUT_DIR",
    b"RUNTIME_CHECKPOINT_DIR",
    b"RUNTIME_SCRATCH_DIR",
    b"RUNTIME_SNAPSHOT_ID",
    b"RUNTIME_SNAPSHOT_DIR",
    b"RUNTIME_DEADLINE",
    b"PYTHONPATH",
)

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
    *(name.decode() for name in _ENV_NAMES if name != b"PYTHONPATH"),
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
"""What describes the worker's own job, and would make an attempt believe that it is a rank of that, or speak for it."""

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
"""Modules of the standard library that the guardian loads too once it hears that attempts load them.

Each is small, starts nothing, opens nothing, and is as good after a fork as when it was loaded. Without this a fresh
attempt that says `from pathlib import Path` spends three quarters of its time on that."""

_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE")
)


# The public module makes enums of what it finds, which would be a third of what a small task costs.
_get_handler: Callable[[int], Any] = _signal.getsignal


class Stopped(SystemExit):
    """Raised in the main thread of an attempt that is asked to stop and does not look at its context."""


class _Failed(Exception):
    """An attempt that cannot go on, with what the worker shall report."""

    def __init__(self, outcome: str, message: str, *, exit_code: int | None = None, signum: int | None = None) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = {"outcome": outcome, "message": message}
        if exit_code is not None:
            self.details["exit_code"] = exit_code
        if signum is not None:
            self.details["signal"] = signum


class Limits:
    """When a child is replaced."""

    __slots__ = ("max_growth_bytes", "max_tasks", "reuse")

    def __init__(self, *, reuse: bool, max_tasks: int, max_growth_bytes: int) -> None:
        self.reuse, self.max_tasks, self.max_growth_bytes = reuse, max_tasks, max_growth_bytes


current: Child | None = None
"""The child this process is, once it serves; `runtime.worker.attempts.context` reads it."""


class Child:
    """Serves orders until its socket ends, it is held, or it must be replaced.

    The guardian makes one and forks it many times: what is set here costs nothing in the children, while each page
    of memory that a child writes to must be copied first, which is most of the price of a fresh attempt.
    """

    def __init__(self, page: mmap.mmap, limits: Limits) -> None:
        self.page, self.limits = page, limits
        self.cell = self.pid = 0
        self.begun = 0
        self.functions_run = 0
        self.buffer = b""
        self.fields: list[str] = []
        self.environ: dict[bytes, bytes] = getattr(os.environ, "_data", {})
        self.base_environ = dict(self.environ)
        self.inherited = dict(self.environ)
        self.env_values = [os.environb.get(name, b"") for name in _ENV_NAMES]
        self.env_text = ""
        self.cwd = os.getcwd()
        self.umask = os.umask(0o022)
        os.umask(self.umask)
        self.path = list(sys.path)
        self.code_dir = ""
        self.python_path = os.environ.get("PYTHONPATH", "")
        self.tree: trees.Tree | None = None
        self.loaded: dict[str, Callable[..., object]] = {}
        self.preloaded: frozenset[str] = frozenset()
        self.not_loaded = PRELOADABLE.difference(sys.modules)
        self.must_retire = False
        self.settled_rss_bytes = 0
        self.command_rss_bytes = 0
        self.checked_at = time.monotonic()
        self.stdout, self.stderr = sys.stdout, sys.stderr
        self.in_user_code = False
        self.ran_user_code = False
        self.stop_signalled = False
        self.context: Attempt | None = None
        self.looks_at_stop = False
        self.metrics: dict[str, float] = {}
        self.progress_text = b""
        self.progress_sent_at = 0.0
        self.progress_said: dict[str, Any] = {}
        self.progressed = False
        self.made_scratch = self.made_output = False
        self.deadline = 0.0
        own: dict[int, Any] = {
            signal.SIGTERM: self._on_term,
            signal.SIGHUP: _signal.SIG_DFL,
            signal.SIGCHLD: _signal.SIG_DFL,
            signal.SIGINT: _signal.default_int_handler,
        }
        self.handlers = [(signum, own.get(signum, _signal.getsignal(signum))) for signum in _SIGNALS]
        self.own_handlers = list(own.items())

    # the loop

    def serve(self, cell: int) -> NoReturn:
        """Be a child: called right after the fork, with output on 1 and 2 and the control socket on 3."""
        self.cell, self.pid = cell, os.getpid()
        PID.pack_into(self.page, cell + PID_AT, self.pid)
        # Nobody needs an owner of this socket; it is the cheapest mark by which the socket can be told later.
        fcntl.fcntl(CONTROL_FD, fcntl.F_SETOWN, self.pid)
        for signum, handler in self.own_handlers:
            _signal.signal(signum, handler)
        while True:
            fields = self._next_order()
            # Before it counts as begun: its time limit is for what was submitted.
            unprepared = self._lay_out(fields[10])
            started = time.time()
            self.begun += 1
            BEGUN.pack_into(self.page, self.cell, self.begun, started, time.monotonic())
            self.page[self.cell + OVER_AT] = 0
            # After the count: whoever sets HOLD and then reads the count knows what has not begun.
            if self.page[self.cell + HOLD_AT]:
                BEGUN.pack_into(self.page, self.cell, self.begun - 1, started, 0.0)
                os._exit(CLEAN_EXIT)
            self._run(fields, started, unprepared)

    def _lay_out(self, code_dir: str) -> str | None:
        """Have the tree of the code as it was submitted; what is wrong if that cannot be."""
        if not code_dir:
            return None
        if self.tree is None or self.tree.folder != code_dir:
            self.tree = trees.Tree(code_dir)
        try:
            self.tree.prepare()
        except Exception as problem:  # a full disk, or files that another attempt has damaged
            return f"cannot lay out the code: {describe(problem)}"
        return None

    def _next_order(self) -> list[str]:
        while True:
            kind, payload = self._next_frame()
            if kind == ORDER:
                return payload.decode("utf-8", "surrogatepass").split("\0", ORDER_FIELDS)

    def _next_frame(self) -> tuple[int, bytes]:
        buffer, header = self.buffer, ORDER_HEADER.size
        while True:
            if len(buffer) >= header:
                magic, length, kind = ORDER_HEADER.unpack_from(buffer)
                if magic != MAGIC or length > MOST_FRAME_BYTES:
                    os._exit(1)  # User code has read from the socket; what was not begun goes to another child.
                end = header + length
                if len(buffer) >= end:
                    self.buffer = buffer[end:]
                    return kind, buffer[header:end]
                if end - len(buffer) > 65536:
                    buffer = self._read_long(buffer, end)
                    continue
            buffer += self._read(65536)

    def _read(self, size: int) -> bytes:
        self.page[self.cell + WAITS_AT] = 1
        data = os.read(CONTROL_FD, size)
        self.page[self.cell + WAITS_AT] = 0
        if not data:
            os._exit(CLEAN_EXIT)
        return data

    def _read_long(self, start: bytes, end: int) -> bytes:
        parts, size = [start], len(start)
        while size < end:
            parts.append(self._read(min(end - size, 1 << 20)))
            size += len(parts[-1])
        return b"".join(parts)

    def _run(self, fields: list[str], started: float, unprepared: str | None) -> None:
        self.fields = fields
        details: dict[str, Any] | None = None
        value = ""
        fresh = functions = False
        self.command_rss_bytes = 0
        self.ran_user_code = False
        try:
            if unprepared is not None:
                raise _Failed("setup_failed", unprepared)
            self._prepare(fields, started)
            faults.reach("attempt.started")
            body = parse_object(fields[ORDER_FIELDS])
            if "command" in body:
                self._run_command(body["command"])
            else:
                functions, fresh = True, not self.limits.reuse
                value = self._run_python(body, fresh=fresh)
        except _Failed as failure:
            details = failure.details
        except Stopped as stopped:
            details = {"outcome": "app_failed", "message": str(stopped.args[0] if stopped.args else "stopped")}
        except BaseException as problem:
            self._show(problem, problem.__traceback__)
            # `setup_failed` says that nothing of the user's has run, and that the same attempt may begin again.
            outcome = "app_failed" if self.ran_user_code else "setup_failed"
            details = {"outcome": outcome, "message": describe(problem)}
        if os.getpid() != self.pid:
            # A process that the attempt forked has come back out of the user's code: it is no attempt.
            flush()
            os._exit(1 if details else 0)
        self._finish(details, value, started, fresh=fresh, functions=functions)

    def _finish(
        self, details: dict[str, Any] | None, value: str, started: float, *, fresh: bool, functions: bool
    ) -> None:
        self.page[self.cell + OVER_AT] = 1
        flags = RETIRES if fresh or self.must_retire or (functions and self._is_worn()) else 0
        if self.stdout.closed or self.stderr.closed:
            flags |= RETIRES
        if sys.stdout is not self.stdout or sys.stderr is not self.stderr:
            flush()
            sys.stdout, sys.stderr = self.stdout, self.stderr
        flush()
        self._end_descendants()
        if self.tree is not None:
            self._tidy(self.tree)
        self._remove_folders()
        if not flags:
            self._restore()
            if self._has_output():
                flags = WAITS
        self._send_last_progress()
        ended = time.time()
        # Of several functions in one process, none has a peak of its own.
        peak = self.command_rss_bytes or (max_rss_bytes() if fresh or self.functions_run == 1 else 0)
        payload = b""
        imported = [name for name in self.not_loaded if name in sys.modules] if fresh else ()
        if details is not None or value or self.metrics or self.progressed or imported:
            flags |= DETAILED
            details = details or {"outcome": "succeeded"}
            if self.metrics:
                details["metrics"] = self.metrics
            if self.progressed:
                details["progressed"] = True
            if imported:
                details["imported"] = imported
            try:
                text = _encode(details).encode()
            except (TypeError, ValueError, RecursionError) as problem:
                # User code has put what is no number among its metrics.
                details = {"outcome": "app_failed", "message": f"its metrics cannot be recorded: {problem}"}
                text, value = _encode(details).encode(), ""
            payload = DETAIL_HEADER.pack(len(text)) + text + value.encode("utf-8", "surrogatepass")
            if len(payload) > MOST_FRAME_BYTES:
                message = f"it reported {len(payload) >> 20} MiB; the most is {MOST_FRAME_BYTES >> 20} MiB"
                text = _encode({"outcome": "app_failed", "message": message}).encode()
                payload = DETAIL_HEADER.pack(len(text)) + text
        self.context, self.looks_at_stop = None, False
        self.metrics = {}
        self.progressed, self.progress_said = False, {}
        self._write(RESULT_HEADER.pack(MAGIC, len(payload), RESULT, flags, started, ended, peak) + payload)
        if flags & RETIRES:
            os._exit(CLEAN_EXIT)
        if flags & WAITS:
            self._wait_to_go_on()

    def _wait_to_go_on(self) -> None:
        orders = b""
        while True:
            kind, payload = self._next_frame()
            if kind == GO_ON:
                break
            orders += ORDER_HEADER.pack(MAGIC, len(payload), kind) + payload
        self.buffer = orders + self.buffer

    # around the user's code

    def _prepare(self, fields: list[str], started: float) -> None:
        token, task_id, generation, attempt, experiment, timeout, output_dir, checkpoint_dir = fields[:8]
        scratch_root, cwd, code_dir, snapshot, env_text = fields[8:ORDER_FIELDS]
        self.stop_signalled = False
        if timeout:
            self.deadline = started + float(timeout)
            deadline = f"{self.deadline:.3f}"
        else:
            self.deadline, deadline = 0.0, ""
        if env_text != self.env_text:
            self._set_extra_environment(env_text)
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
                snapshot,
                code_dir,
                deadline,
                self._python_path(code_dir),
            )
        ]
        if values != self.env_values:
            environ = self.environ
            for name, value, old in zip(_ENV_NAMES, values, self.env_values, strict=True):
                if value != old:
                    self._set_variable(environ, name, value)
            self.env_values = values
        if code_dir != self.code_dir:
            self.code_dir = code_dir
            if code_dir:
                first = [*([cwd] if cwd else []), *import_folders(code_dir)]
                self.path = [*first, *(item for item in self.path if item not in first)]
                sys.path[:] = self.path
                for each in first:
                    self._uncover(each)
        folder = cwd or code_dir or self.cwd
        try:
            if cwd and code_dir and not os.path.isdir(cwd):
                if not os.path.realpath(cwd).startswith(f"{os.path.realpath(code_dir)}/"):
                    raise _Failed("config_invalid", f"folder `{cwd[len(code_dir) + 1 :]}` leads out of the snapshot")
                scratch.make_folder(cwd)  # A snapshot has no empty folders.
            os.chdir(folder)
        except OSError as problem:
            raise _Failed("setup_failed", f"cannot enter folder `{folder}`: {problem.strerror}") from None

    def _python_path(self, code_dir: str) -> str:
        """For what the attempt starts: the code that was submitted comes before any that is installed."""
        parts = [*import_folders(code_dir), self.python_path] if code_dir else [self.python_path]
        return os.pathsep.join(part for part in parts if part)

    def _uncover(self, folder: str) -> None:
        """Forget modules that were loaded ahead and that `folder` has one of its own of: that comes first."""
        if not self.preloaded:
            return
        try:
            own = {name.partition(".")[0] for name in os.listdir(folder)}
        except OSError:
            return
        for name in self.preloaded:
            if name.partition(".")[0] in own:
                sys.modules.pop(name, None)

    def _set_variable(self, environ: dict[bytes, bytes], name: bytes, value: bytes) -> None:
        """In `os.environ`, for C code, and in what is restored after each attempt; empty means unset."""
        if value:
            os.putenv(name, value)
            environ[name] = self.base_environ[name] = value
        else:
            os.unsetenv(name)
            environ.pop(name, None)
            self.base_environ.pop(name, None)

    def _set_extra_environment(self, text: str) -> None:
        new: dict[str, str] = parse_object(text) if text else {}
        old: dict[str, str] = parse_object(self.env_text) if self.env_text else {}
        for name in old.keys() - new.keys():
            self._set_variable(self.environ, os.fsencode(name), self.inherited.get(os.fsencode(name), b""))
        for name, value in new.items():
            self._set_variable(self.environ, os.fsencode(name), os.fsencode(value))
        self.env_text = text
        if "RUNTIME_FENCED" in new:
            from runtime.worker.attempts import fence

            fence.put_up(int(new["RUNTIME_FENCED"]))
            self.must_retire = True  # It cannot be taken down, and no other attempt is to run behind it.

    def _restore(self) -> None:
        """Undo what user code changed and the next attempt in this child would inherit; docs/attempts.md lists it."""
        if self.environ != self.base_environ:
            for name in self.environ.keys() - self.base_environ.keys():
                os.unsetenv(name)
                del self.environ[name]
            for name, value in self.base_environ.items():
                if self.environ.get(name) != value:
                    os.putenv(name, value)
                    self.environ[name] = value
        os.umask(self.umask)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self.handlers:
            if _get_handler(signum) != handler:
                _signal.signal(signum, handler)
        if sys.path != self.path:
            sys.path[:] = self.path
        if sys.argv != [""]:
            sys.argv = [""]
        tempfile = sys.modules.get("tempfile")
        if tempfile is not None:
            tempfile.tempdir = None  # type: ignore[attr-defined]

    def _left_threads(self) -> bool:
        """Whether the attempt has threads that Python would wait for at exit."""
        threading = sys.modules.get("threading")
        if threading is None or threading.active_count() == 1:
            return False
        return any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate())

    def _is_worn(self) -> bool:
        if self.functions_run >= self.limits.max_tasks:
            return True
        if self.functions_run == 1:
            # Growth counts from here: what the first one imported stays for the others.
            self.settled_rss_bytes = processes.own_rss_bytes()
        now = time.monotonic()
        if now - self.checked_at < 0.25:
            return False
        self.checked_at = now
        return processes.own_rss_bytes() - self.settled_rss_bytes > self.limits.max_growth_bytes

    def _end_descendants(self) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        count = processes.end_tree(self.pid)
        if count:
            noun = "process" if count == 1 else "processes"
            os.write(2, f"runtime: ended {count} {noun} that the attempt had left running\n".encode())

    def _tidy(self, tree: trees.Tree) -> None:
        if cwd := self.fields[9]:
            scratch.remove_empty(cwd, parents=cwd.count("/", len(tree.folder) + 1))
        try:
            left = tree.tidy()
        except OSError:
            return  # The next attempt there finds out.
        if left:
            names = ", ".join(left[:3]) + (", …" if len(left) > 3 else "")
            what = f"`{names}` goes" if len(left) == 1 else f"{len(left)} files and folders ({names}) go"
            print_error(f"runtime: {what} with the attempt's copy of the code; $RUNTIME_OUTPUT_DIR is kept")

    def _has_output(self) -> bool:
        """Whether the pipe still holds output, which is then this attempt's."""
        if sys.platform != "linux":
            return True
        try:
            return fcntl.ioctl(1, termios.FIONREAD, b"\0\0\0\0") != b"\0\0\0\0"
        except OSError:
            return False

    def _remove_folders(self) -> None:
        if self.made_scratch:
            self.made_scratch = False
            scratch.remove_tree(self.scratch_dir)
        if self.made_output:
            self.made_output = False
            scratch.remove_empty(self.output_dir, parents=1)

    # what the context offers

    @property
    def output_dir(self) -> str:
        return self.fields[6]

    @property
    def checkpoint_dir(self) -> str:
        return self.fields[7]

    @property
    def scratch_dir(self) -> str:
        return f"{self.fields[8]}/{self.fields[0]}" if self.fields[8] else ""

    def make_output(self) -> str:
        if self.output_dir:
            self.made_output = True
            scratch.make_folder(self.output_dir)
        return self.output_dir

    def make_scratch(self) -> str:
        if self.scratch_dir and not self.made_scratch:
            self.made_scratch = True
            scratch.make_folder(self.scratch_dir)
        return self.scratch_dir

    def stop_reason(self) -> str:
        """Why the worker asks the attempt to stop; empty as long as it does not."""
        if STOP.unpack_from(self.page, self.cell + STOP_AT)[0] == self.begun:
            return STOP_REASONS[self.page[self.cell + REASON_AT]]
        return "other" if self.stop_signalled else ""

    def is_asked_to_stop(self) -> bool:
        asked: int = STOP.unpack_from(self.page, self.cell + STOP_AT)[0]
        return self.stop_signalled or asked == self.begun

    def note_progress(self, done: float | None, total: float | None, text: str | None) -> None:
        """Tell the worker, at most twice a second; the last word is always passed on."""
        if os.getpid() != self.pid:
            return
        if done is not None:
            self.progressed = True
        if done is not None:
            self.progress_said = {"done": done, "total": total, "text": text}
        message = dict(self.progress_said)
        if self.metrics:
            message["metrics"] = self.metrics
        self.progress_text = _encode(message).encode()
        now = time.monotonic()
        if now - self.progress_sent_at >= 0.5:
            self.progress_sent_at = now
            self._send_last_progress()

    def _send_last_progress(self) -> None:
        payload, self.progress_text = self.progress_text, b""
        if payload and len(payload) <= MOST_FRAME_BYTES:
            self._write(RESULT_HEADER.pack(MAGIC, len(payload), PROGRESS, 0, time.time(), 0.0, 0) + payload)

    def _write(self, data: bytes) -> None:
        """All of it, to the worker; without a way to the worker the process ends."""
        with _writing:
            try:
                if fcntl.fcntl(CONTROL_FD, fcntl.F_GETOWN) != self.pid:
                    # User code has closed it and opened something else, which must not get this.
                    raise OSError(errno.EBADF, "not the control socket")
                sent = os.write(CONTROL_FD, data)
                while sent < len(data):
                    sent += os.write(CONTROL_FD, data[sent:])
            except OSError:
                self.page[self.cell + CLOSED_AT] = 1
                os._exit(1)

    # the three kinds of entries

    def _run_python(self, body: dict[str, Any], *, fresh: bool) -> str:
        """Call the function or workflow and return its value as JSON text; empty for None."""
        self.functions_run += 1
        self.in_user_code = self.ran_user_code = True
        try:
            if self.is_asked_to_stop():
                raise Stopped("stopped before it began")
            if "workflow" in body:
                returned = self._call_workflow(body)
            else:
                returned = self._call_function(body)
            if fresh or self._left_threads():
                self.must_retire = True
                leave_python()
        except _Failed:
            raise
        except BaseException as problem:
            self.in_user_code = False
            raise self._explain(problem, problem.__traceback__) from None
        finally:
            self.in_user_code = False
        if returned is None:
            return ""
        return encode_value(returned, strict="workflow" not in body)

    def _call_function(self, body: dict[str, Any]) -> object:
        name: str = body["function"]
        function = self.loaded.get(name)
        if function is None:
            function = self.loaded[name] = load_function(name)
        args, kwargs = body.get("args"), body.get("kwargs")
        if kwargs:
            return function(*(args or ()), **kwargs)
        if args:
            return function(*args)
        return function()

    def _call_workflow(self, body: dict[str, Any]) -> object:
        from runtime.errors import RequestRefused
        from runtime.tasks.model import WorkflowEntry
        from runtime.tasks.workflows import load

        os.environ["TMPDIR"] = self.make_scratch() or os.environ.get("TMPDIR", "/tmp")
        self.make_output()
        sys.argv = [body["workflow"], *(body.get("args") or ())]
        try:
            call = load(WorkflowEntry(body["project"], body["workflow"], tuple(body.get("args") or ())))
        except RequestRefused as refusal:
            print_error(refusal.render())
            raise _Failed("config_invalid", "; ".join((refusal.message, *refusal.facts))) from None
        return call()

    def _run_command(self, argv: list[str]) -> None:
        environ = (
            dict(self.environ) if self.environ else {os.fsencode(k): os.fsencode(v) for k, v in os.environ.items()}
        )
        if self.make_scratch():
            environ[b"TMPDIR"] = os.fsencode(self.scratch_dir)
        self.make_output()
        if self.is_asked_to_stop():
            raise Stopped("stopped before it began")
        try:
            pid = spawn(argv, environ)
        except (OSError, ValueError) as problem:
            raise explain_spawn(argv, problem) from None
        self.ran_user_code = True
        COMMAND_PID.pack_into(self.page, self.cell + COMMAND_PID_AT, pid)
        if self.is_asked_to_stop():
            # Whoever sends the signal may have looked for the command before its pid was there.
            processes.send_signal([pid], signal.SIGTERM)
        try:
            while True:
                ended, status, usage = os.wait4(-1, 0)
                if ended == pid:
                    self.command_rss_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
                    break
        finally:
            COMMAND_PID.pack_into(self.page, self.cell + COMMAND_PID_AT, 0)
        explain_status(os.waitstatus_to_exitcode(status))

    # signals and failures

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self.pid:
            # A process that the attempt forked has this handler too, and ends as it would without.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        meant = STOP.unpack_from(self.page, self.cell + STOP_AT)[0]
        if meant and meant != self.begun:
            return  # Sent for an attempt that has ended meanwhile.
        first, self.stop_signalled = not self.stop_signalled, True
        if first and self.in_user_code and not self.looks_at_stop:
            raise Stopped(f"stopped by signal {signum} (SIGTERM)")

    def _explain(self, problem: BaseException, traceback: TracebackType | None) -> _Failed:
        """What the worker shall say of an exception that user code let go; the traceback goes to the log."""
        if isinstance(problem, Stopped):
            return _Failed("app_failed", str(problem.args[0]))
        if isinstance(problem, SystemExit):
            return explain_exit(problem.code)
        self._show(problem, traceback)
        if isinstance(problem, MemoryError):
            return _Failed("oom", describe(problem))
        if isinstance(problem, _Misnamed) or (isinstance(problem, TypeError) and is_refused_call(traceback)):
            return _Failed("config_invalid", describe(problem))
        return _Failed("app_failed", describe(problem))

    def _show(self, problem: BaseException, traceback: TracebackType | None) -> None:
        """The traceback on stderr, from the user's first frame on."""
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        if isinstance(problem, _Misnamed):
            traceback = None
        try:
            sys.__excepthook__(type(problem), problem.with_traceback(traceback), traceback)
        except Exception:
            pass


class _Misnamed(Exception):
    """An entry that names nothing that can be called."""


# Our own, made before any user code runs: in a warm process that may replace what `json` offers.
_decoder = json.JSONDecoder()
_scan = _decoder.raw_decode
_encode = json.JSONEncoder().encode
_encode_value = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def import_folders(tree: str) -> list[str]:
    """Where modules of a project lie; the shim has the same."""
    return [f"{tree}/src", tree] if os.path.isdir(f"{tree}/src") else [tree]


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object, at half the cost where the text begins with it."""
    parsed: dict[str, Any] = _scan(text)[0] if text.startswith("{") else _decoder.decode(text)
    return parsed


def load_function(name: str) -> Callable[..., object]:
    """The callable of `module:qualname`."""
    module_name, _, qualname = name.partition(":")
    target = import_named(module_name)
    if target is None:
        # What a long-lived child knows of a folder may be older than the module.
        importlib.invalidate_caches()
        target = import_named(module_name)
    if target is None:
        raise _Misnamed(f"no module named `{module_name}` for function `{name}`")
    for part in qualname.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise _Misnamed(f"module `{module_name}` has no function `{qualname}`") from None
    if not callable(target):
        raise _Misnamed(f"`{name}` is {type(target).__name__}, which cannot be called")
    found: Callable[..., object] = target
    return found


def import_named(name: str) -> Any:
    """The module, or None if there is none of that name; raises what importing it raises."""
    try:
        __import__(name)
        return sys.modules[name]
    except ModuleNotFoundError as problem:
        if problem.name and (name == problem.name or name.startswith(f"{problem.name}.")):
            return None
        raise


def is_refused_call(traceback: TracebackType | None) -> bool:
    """Whether the exception came from the call itself: none of the user's code had run yet."""
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename != __file__:
            return False
        traceback = traceback.tb_next
    return True


def describe(problem: BaseException) -> str:
    """`Type: message`, as a traceback ends."""
    kind = type(problem)
    if isinstance(problem, _Misnamed):
        return str(problem)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        text = str(problem)
    except Exception:
        text = "<no text>"
    return (f"{name}: {text}" if text else name)[:4000]


def encode_value(value: object, *, strict: bool) -> str:
    """JSON text of what was returned. Otherwise raises `_Failed`, or, where not strict, says so in the log."""
    problem: str | None
    try:
        text = _encode_value(value)
        if len(text) <= MOST_VALUE_BYTES:
            return text
        problem = f"which is {len(text) >> 20} MiB of JSON; the most is {MOST_VALUE_BYTES >> 20} MiB"
    except (TypeError, ValueError, RecursionError) as failure:
        from runtime.errors import explain_json

        problem = f"which is no JSON value: {explain_json(failure)}"
    message = f"returned {type(value).__qualname__}, {problem}"
    if strict:
        message += "; return plain numbers, texts, lists and dicts, and write the rest to the output folder"
        print_error(f"error: the function {message}")
        raise _Failed("app_failed", f"the function {message}")
    print_error(f"runtime: the workflow {message}; the value is not kept")
    return ""


def explain_exit(code: object) -> _Failed:
    """What `SystemExit` means; raises nothing itself. A `succeeded` failure stands for an exit with 0 or None."""
    if code is None or code == 0:
        return _Failed("succeeded", "")
    if isinstance(code, int):
        return _Failed("app_failed", f"exited with code {code}", exit_code=code)
    try:
        text = str(code)
    except Exception:
        text = ""
    if not text.strip():
        return _Failed("app_failed", "exited with code 1", exit_code=1)
    print_error(text)
    return _Failed("app_failed", text[:4000], exit_code=1)


def explain_status(code: int) -> None:
    """Raise `_Failed` unless a command's exit code is 0; negative stands for a signal."""
    if code == 0:
        return
    if code < 0:
        raise _Failed("app_failed", f"died of signal {-code} ({signal_name(-code)})", signum=-code)
    text = f"exit code {code}"
    if 128 < code < 160 and signal_name(code - 128):
        text += f" (128 + {code - 128}: as a shell reports {signal_name(code - 128)})"
    raise _Failed("app_failed", text, exit_code=code)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def spawn(argv: list[str], environ: Mapping[bytes, bytes]) -> int:
    """Start a command in a session of its own; returns its pid."""
    if _CAN_SPAWN_SESSIONS:
        return os.posix_spawnp(argv[0], argv, environ, setsid=True, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])
    import subprocess

    return subprocess.Popen(argv, env=environ, start_new_session=True).pid


_CAN_SPAWN_SESSIONS = sys.platform.startswith("linux")


def explain_spawn(argv: list[str], problem: OSError | ValueError) -> _Failed:
    """As a shell would: 127 where there is no such program, 126 where it cannot be run."""
    program = argv[0]
    if isinstance(problem, ValueError):
        failure = _Failed("config_invalid", f"cannot start `{program}`: {problem}", exit_code=126)
    elif problem.errno in (errno.ENOENT, errno.ENOTDIR):
        where = f"in folder `{os.getcwd()}`" if "/" in program else "on PATH"
        interpreter = ", or the interpreter in its first line is missing" if os.path.exists(program) else ""
        failure = _Failed("config_invalid", f"no program `{program}` {where}{interpreter}", exit_code=127)
    elif problem.errno == errno.EACCES:
        failure = _Failed("config_invalid", f"`{program}` may not be executed: permission denied", exit_code=126)
    elif problem.errno == errno.ENOEXEC:
        failure = _Failed(
            "config_invalid", f"`{program}` is no program: it needs a first line such as #!/bin/sh", exit_code=126
        )
    elif problem.errno == errno.E2BIG:
        failure = _Failed(
            "config_invalid", f"cannot start `{program}`: arguments and environment are too long", exit_code=126
        )
    else:
        failure = _Failed("setup_failed", f"cannot start `{program}`: {problem.strerror}", exit_code=126)
    print_error(f"error: {failure}")
    return failure


def leave_python() -> None:
    """What Python does at exit and user code counts on: wait for threads, call what is registered, flush."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    atexit = sys.modules.get("atexit")
    if atexit is not None:
        atexit._run_exitfuncs()


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the user's own stream, or one it closed
            pass


def print_error(text: str) -> None:
    flush()
    os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))


def max_rss_bytes() -> int:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


_writing = _thread.allocate_lock()
"""Threads of the user's code report progress too."""
