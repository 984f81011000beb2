"""The entries that an attempt runs, and the end reasons that follow from their exceptions, exit codes and signals."""

# pathlib is too large for the processes that load this.
# ruff: noqa: PTH109, PTH110

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys

from runtime.worker.attempts import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Any

_FOLDER = __file__.rpartition("/")[0]
OWN_FILES = frozenset(f"{_FOLDER}/{name}.py" for name in ("calls", "child", "entries", "environment", "wire"))
"""Files of the code between a child's loop and the user's code; tracebacks are shown without their frames."""


class AttemptStopped(SystemExit):
    """Raised in the main thread of an attempt that is asked to stop and does not look at its context."""


class AttemptFailed(Exception):
    """An attempt that cannot go on, with the details for the worker."""

    def __init__(self, outcome: str, message: str, *, exit_code: int | None = None, signum: int | None = None) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = {"outcome": outcome, "message": message}
        if exit_code is not None:
            self.details["exit_code"] = exit_code
        if signum is not None:
            self.details["signal"] = signum


class _Misnamed(Exception):
    """An entry that names no callable."""


# Made before any user code runs: in a warm process user code may replace what `json` offers.
_decoder = json.JSONDecoder()
_scan = _decoder.raw_decode
_encode_value = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def _encode_other(value: object) -> object:
    from runtime.json_values import encode

    return encode(value)


_encode_returned = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=_encode_other).encode
"""For a workflow, whose value is what `runtime run` prints: dataclasses, times, paths and enums too."""


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, at half the cost if the text begins with it."""
    parsed: dict[str, Any] = _scan(text)[0] if text.startswith("{") else _decoder.decode(text)
    return parsed


# functions


def load_function(name: str) -> Callable[..., object]:
    module_name, _, qualname = name.partition(":")
    target = _import_named(module_name)
    if target is None:
        # A long-lived child's listing of a folder may be older than the module.
        importlib.invalidate_caches()
        target = _import_named(module_name)
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


def _import_named(name: str) -> Any:
    """Return the module, or None if no module has that name. Raises as the import does."""
    try:
        __import__(name)
        return sys.modules[name]
    except ModuleNotFoundError as problem:
        if problem.name and (name == problem.name or name.startswith(f"{problem.name}.")):
            return None
        raise


def encode_value(value: object, *, strict: bool) -> str:
    """Return the JSON text of a returned value. A value without one raises `AttemptFailed`, or if not strict, is logged."""
    try:
        text = (_encode_value if strict else _encode_returned)(value)
        if len(text) <= wire.MOST_VALUE_BYTES:
            return text
        problem = f"which is {len(text) >> 20} MiB of JSON; the most is {wire.MOST_VALUE_BYTES >> 20} MiB"
    except (TypeError, ValueError, RecursionError) as failure:
        from runtime.errors import explain_json

        problem = f"which is no JSON value: {explain_json(failure)}"
    message = f"returned {type(value).__qualname__}, {problem}"
    if strict:
        message += "; return plain numbers, texts, lists and dicts, and write the rest to the output folder"
        print_error(f"error: the function {message}")
        raise AttemptFailed("app_failed", f"the function {message}")
    print_error(f"runtime: the workflow {message}; the value is not kept")
    return ""


def leave_python() -> None:
    """Do the steps of Python's exit that user code counts on: wait for threads, call registered functions, flush."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    atexit = sys.modules.get("atexit")
    if atexit is not None:
        atexit._run_exitfuncs()


# exceptions


def explain(problem: BaseException, traceback: TracebackType | None) -> AttemptFailed:
    """Return the failure that an exception of user code stands for; the traceback goes to the log."""
    if isinstance(problem, AttemptStopped):
        return AttemptFailed("app_failed", str(problem.args[0]))
    if isinstance(problem, SystemExit):
        return _explain_exit(problem.code)
    show(problem, traceback)
    if isinstance(problem, MemoryError):
        return AttemptFailed("oom", describe(problem))
    if isinstance(problem, _Misnamed) or (isinstance(problem, TypeError) and _skip_own(traceback) is None):
        # A TypeError of the call itself: none of the user's code had run yet.
        return AttemptFailed("config_invalid", describe(problem))
    return AttemptFailed("app_failed", describe(problem))


def show(problem: BaseException, traceback: TracebackType | None) -> None:
    """Print the traceback on stderr, from the user's first frame on."""
    traceback = None if isinstance(problem, _Misnamed) else _skip_own(traceback)
    try:
        sys.__excepthook__(type(problem), problem.with_traceback(traceback), traceback)
    except Exception:
        pass


def _skip_own(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename in OWN_FILES:
        traceback = traceback.tb_next
    return traceback


def describe(problem: BaseException) -> str:
    kind = type(problem)
    if isinstance(problem, _Misnamed):
        return str(problem)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        text = str(problem)
    except Exception:
        text = "<no text>"
    return (f"{module}{kind.__qualname__}: {text}" if text else module + kind.__qualname__)[:4000]


def _explain_exit(code: object) -> AttemptFailed:
    """Return the meaning of `SystemExit`; a `succeeded` failure stands for an exit with 0 or None."""
    if code is None or code == 0:
        return AttemptFailed("succeeded", "")
    if isinstance(code, int):
        return AttemptFailed("app_failed", f"exited with code {code}", exit_code=code)
    try:
        text = str(code)
    except Exception:
        text = ""
    if not text.strip():
        return AttemptFailed("app_failed", "exited with code 1", exit_code=1)
    print_error(text)
    return AttemptFailed("app_failed", text[:4000], exit_code=1)


# commands


def spawn(argv: list[str], environ: Mapping[bytes, bytes]) -> int:
    """Start a command in a session of its own; returns its pid."""
    try:
        if _CAN_SPAWN_SESSIONS:
            return os.posix_spawnp(argv[0], argv, environ, setsid=True, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])
        import subprocess

        return subprocess.Popen(argv, env=environ, start_new_session=True).pid
    except (OSError, ValueError) as problem:
        raise _explain_spawn(argv, problem) from None


_CAN_SPAWN_SESSIONS = sys.platform.startswith("linux")


def _explain_spawn(argv: list[str], problem: OSError | ValueError) -> AttemptFailed:
    """Choose the exit code as a shell does: 127 if no such program exists, 126 if it cannot be run."""
    program = argv[0]
    outcome, exit_code = "config_invalid", 126
    if isinstance(problem, ValueError):
        message = f"cannot start `{program}`: {problem}"
    elif problem.errno in (errno.ENOENT, errno.ENOTDIR):
        where = f"in folder `{os.getcwd()}`" if "/" in program else "on PATH"
        interpreter = ", or the interpreter in its first line is missing" if os.path.exists(program) else ""
        message, exit_code = f"no program `{program}` {where}{interpreter}", 127
    elif problem.errno == errno.EACCES:
        message = f"`{program}` may not be executed: permission denied"
    elif problem.errno == errno.ENOEXEC:
        message = f"`{program}` is no program: it needs a first line such as #!/bin/sh"
    elif problem.errno == errno.E2BIG:
        message = f"cannot start `{program}`: arguments and environment are too long"
    else:
        outcome, message = "setup_failed", f"cannot start `{program}`: {problem.strerror}"
    print_error(f"error: {message}")
    return AttemptFailed(outcome, message, exit_code=exit_code)


def explain_status(code: int) -> None:
    """Raise `AttemptFailed` unless a command's exit code is 0; negative stands for a signal."""
    if code == 0:
        return
    if code < 0:
        raise AttemptFailed("app_failed", f"died of signal {-code} ({signal_name(-code)})", signum=-code)
    text = f"exit code {code}"
    if 128 < code < 160 and signal_name(code - 128):
        text += f" (128 + {code - 128}: as a shell reports {signal_name(code - 128)})"
    raise AttemptFailed("app_failed", text, exit_code=code)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# output


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the user's own stream, or one it closed
            pass


def print_error(text: str) -> None:
    flush()
    os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))
