"""Entry point of `runtime`: commands that need no typer, exit codes, and the one place that explains errors.

`runtime --version` and `runtime worker` never import typer: a fleet starts the worker often, and argparse costs a third.
Everything else goes to the tree in `runtime.cli.commands`. Exit codes: 0 done, 1 the work failed, 2 the request was
wrong or refused, 3 infrastructure failed or we did, 124 timed out, 130 interrupted; and 141, as in the shell, if the
reader of a pipe closed it first.
"""

from __future__ import annotations

import gc
import os
import sys

from runtime.cli import console
from runtime.cli.console import INTERRUPTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.errors import RuntimeFailure

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (pathlib costs 3 ms)

READER_LEFT = 141
_GARBAGE_AFTER = 100_000

EXTRA_OF = {
    "matplotlib": "plot",
    "google": "gcp",
    "grpc": "gcp",
    "kubernetes": "kubernetes",
    "obstore": "gcp",
    "optuna": "tune",
    "ray": "ray",
    "requests": "gcp",
    "urllib3": "kubernetes",
}
"""The library's top-level name → the extra that installs it."""
# Refusals of the machine, as opposed to faults of a program (no room, no right, no handle left), with the next step.
_MACHINE_ERRNOS = {
    "EACCES": "use a folder that you can read and write",
    "EDQUOT": "free some of your quota, and run it again",
    "EIO": "look at the disk's health: `dmesg`",
    "EMFILE": "raise the limit of open files: `ulimit -n`",
    "ENFILE": "close programs with many open files",
    "ENOMEM": "free some memory, and run it again",
    "ENOSPC": "free some space, and run it again",
    "EPERM": "use a folder that you can read and write",
    "EROFS": "use a folder that can be written",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of this process, and return its exit code, after printing errors to stderr."""
    args = sys.argv[1:] if argv is None else argv
    console.prepare_streams()
    try:
        code = _dispatch(list(args))
        console.flush()
        return code
    except BaseException as ended:
        return _end(ended)


def _dispatch(args: list[str]) -> int:
    while args[:1] == ["--debug"]:
        os.environ["RUNTIME_DEBUG"] = "1"
        del args[0]
    if args[:1] == ["--version"]:
        from runtime import __version__

        console.say(f"runtime {__version__}")
        return 0
    if args[:1] == ["worker"] and "_RUNTIME_COMPLETE" not in os.environ:
        from runtime.cli.worker import main as run_worker

        return run_worker(args[1:])
    # Imported modules are no garbage. A collection after every 700 objects takes a tenth of a short command.
    gc.set_threshold(_GARBAGE_AFTER, *gc.get_threshold()[1:])
    from runtime.cli.commands import run

    return run(args)


def _end(ended: BaseException) -> int:
    if isinstance(ended, SystemExit):
        if isinstance(ended.code, str):
            console.write_error(ended.code)
            return 1
        return ended.code or 0
    if isinstance(ended, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(ended, BrokenPipeError) and console.reader_left():
        console.drop_unwritten()
        return READER_LEFT
    failure = explain(ended)
    if os.environ.get("RUNTIME_DEBUG") == "1":
        import traceback

        console.write_error("".join(traceback.format_exception(ended)).rstrip())
    console.write_error(failure.render())
    return failure.exit_code


def explain(problem: BaseException) -> RuntimeFailure:
    """Turn `problem` into the error to print: itself if it is one of ours, else its meaning, else a fault of ours."""
    from runtime.errors import InfrastructureFailure, MissingExtra, RuntimeFailure

    if isinstance(problem, RuntimeFailure):
        return problem
    if isinstance(problem, ModuleNotFoundError) and (extra := EXTRA_OF.get((problem.name or "").partition(".")[0])):
        return MissingExtra(f"library `{problem.name}`", extra)
    import errno

    if isinstance(problem, OSError) and (hint := _MACHINE_ERRNOS.get(errno.errorcode.get(problem.errno or 0, ""))):
        where = f"cannot use `{problem.filename}`" if problem.filename else "the machine refused"
        return InfrastructureFailure(f"{where}: {os.strerror(problem.errno or 0).lower()}", hint=hint)
    if "typer" in sys.modules:
        from runtime.cli.commands import explain_usage

        if (refused := explain_usage(problem)) is not None:
            return refused
    return _own_fault(problem)


def _own_fault(problem: BaseException) -> RuntimeFailure:
    import traceback

    from runtime import __version__
    from runtime.errors import RuntimeFailure

    frames = traceback.extract_tb(problem.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)] or frames
    text = str(problem).strip().partition("\n")[0]
    return RuntimeFailure(
        f"unexpected {type(problem).__name__}" + (f": {text}" if text else ""),
        facts=[
            *(f"in `{frame.name}`, {frame.filename}:{frame.lineno}" for frame in ours[-1:]),
            f"this is a bug in research-runtime {__version__}, not in your request",
        ],
        hint="run it again as `runtime --debug …` for the traceback, and report both",
    )


if __name__ == "__main__":
    sys.exit(main())
