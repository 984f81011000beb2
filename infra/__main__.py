"""The engine runs this file for `pulumi up`; `python -m infra` is the command that checks stacks without it."""

from __future__ import annotations

import signal
import sys

try:
    import pulumi
    import yaml  # noqa: F401
    from pulumi.runtime import settings as engine
except ModuleNotFoundError as missing:
    # Not the project's own Python, so the package that explains errors may be missing, too.
    sys.stderr.write(
        f"error: this Python has no package `{missing.name}`\n"
        f"  it is {sys.executable}; what this project needs is in its `.venv`\n"
        "hint: `make .venv/.ready` fills it once; then `.venv/bin/python -m infra check --all`\n"
    )
    sys.exit(2)

from runtime.errors import RuntimeFailure
from runtime.sanitize import clean


def main() -> None:
    if engine.get_monitor() is not None:
        # The engine interrupts the program once a resource has failed, and its own report says all there is to say.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        run_program()
    else:
        from infra.cli import main as run_command

        sys.exit(run_command(sys.argv[1:]))


def run_program() -> None:
    from infra.export import export
    from infra.program import build
    from infra.settings.read import read_settings

    try:
        export(build(read_settings()))
    except RuntimeFailure as problem:
        # The engine prints a RunError without a traceback, behind `error: `.
        raise pulumi.RunError(clean(problem.render()).removeprefix("error: ")) from problem


if __name__ == "__main__":
    main()
