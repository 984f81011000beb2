"""`python -m infra check|preflight|plan-deploy|deploy`: questions before an `up`, and the work of the pipelines."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from runtime.errors import RequestRefused, RuntimeFailure, UnknownName
from runtime.sanitize import clean, clean_json

PROGRAM: Final = "python -m infra"

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "check": ("infra.check.command", "what a stack would make, without an engine, an account or a network"),
    "preflight": ("infra.preflight.command", "whether its Google project would let it be made; reads only"),
    "plan-deploy": ("infra.deploy.plan", "which stacks a pipeline deploys, as whom, and in what order"),
    "deploy": ("infra.deploy.deploy", "brings these stacks up and pushes their images; for pipelines"),
}
"""Verb → module with `main(args) -> int`, and a line of help."""

HELP: Final = """usage: {program} COMMAND [OPTIONS]

Asks about the stacks in this folder before anything is made. `pulumi up` itself runs the same program.

commands:
{commands}

`{program} COMMAND --help` has the options and examples; `{program} check --all` is where to begin.
"""


class InfraParser(argparse.ArgumentParser):
    """Raises a problem of the options in the shape of every other error."""

    def __init__(self, verb: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"{PROGRAM} {verb}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise RequestRefused(f"`{self.prog}`: {message}", hint=f"`{self.prog} --help` has every option with examples")


def say(text: str) -> None:
    """Write lines for people on stdout. Nothing of a stack file or an answer of Google commands their terminal."""
    sys.stdout.write(clean(text))


def say_json(document: str) -> None:
    sys.stdout.write(clean_json(f"{document}\n"))


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit code; errors are printed."""
    try:
        return _run(list(args))
    except RuntimeFailure as problem:
        sys.stderr.write(clean(problem.render()) + "\n")
        return problem.exit_code
    except BrokenPipeError:
        # The reader has closed the pipe, such as `head`.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        lines = "\n".join(f"  {name:<13}{summary}" for name, (_, summary) in COMMANDS.items())
        sys.stdout.write(HELP.format(program=PROGRAM, commands=lines))
        return 0
    if args[0] not in COMMANDS:
        raise UnknownName("command", args[0], COMMANDS, hint=f"`{PROGRAM} --help` lists what there is")
    module = importlib.import_module(COMMANDS[args[0]][0])
    return int(module.main(args[1:]))
