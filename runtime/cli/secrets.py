"""`runtime secrets`: put the values of the stack's secrets, and see who can read them. No value is ever printed."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption, new_app
from runtime.cli.console import ask_secret, note
from runtime.cli.output import Columns, OutputFormat, print_json, print_list
from runtime.config import load_settings
from runtime.errors import NotPossible, RequestRefused
from runtime.stack.find import find_stack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.config import Settings
    from runtime.outputs import StackOutputs
    from runtime.stack.google_api import GoogleApi

app = new_app("Put the values of the stack's secrets, and see who can read them. No value is ever printed.")

# A value on the command line is in the shell's history and in every list of processes. The error explains that, and the
# usual error would repeat the value.
_TAKE_ALL = {"ignore_unknown_options": True, "allow_extra_args": True}


@app.command("list")
def list_(stack: StackOption = None, output: OutputOption = OutputFormat.TEXT) -> None:
    """List the stack's secrets: variable, versions, newest version, who can read it.

    Readers are those who were granted it on the secret itself. `-` stands for facts that this identity may not see.

    \b
    Examples:
      runtime secrets list
      runtime secrets list --stack marin-us-west4 -o json | jq -r '.[] | select(.newest == null) | .name'
    """
    from runtime.stack.secrets import list_secrets

    columns: Columns = {
        "SECRET": "name",
        "VARIABLE": "env",
        "RESOURCE": "resource",
        "VERSIONS": "versions",
        "NEWEST": "newest",
        "CREATED": "created_at",
        "READERS": lambda seen: None if seen.readers is None else ", ".join(seen.readers) or "nobody",
        "PROBLEM": "problem",
    }
    with _open(stack) as (outputs, api):
        print_list(list_secrets(outputs, api), columns, output)


@app.command(context_settings=_TAKE_ALL)
def put(
    ctx: typer.Context,
    name: Annotated[str, Argument(metavar="NAME", help="A secret of the stack.")],
    file: Annotated[
        Path | None, Option("--file", "-f", metavar="PATH", help="Read the value from a file, as it is.")
    ] = None,
    disable_older: Annotated[
        bool, Option("--disable-older", help="Switch off every older version afterwards.")
    ] = False,
    project: Annotated[
        str | None,
        Option("--project", metavar="PROJECT", help="The secret's project, if it is not the stack's own."),
    ] = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Add a version to a secret. The value comes from standard input, a file, or a hidden prompt; never as an argument.

    One newline at the end of standard input is dropped, so that `echo` and `pbpaste` work; a file is taken byte by
    byte. Readers get the new version when they start next; `--disable-older` ends the old one, which those that ask
    for it by number then miss. The value goes to the stack's own project only, unless `--project` names the secret's.

    \b
    Examples:
      runtime secrets put hf-token                         asks, and shows nothing
      pass show hf | runtime secrets put hf-token
      runtime secrets put deploy-key --file key.pem --disable-older
    """
    from runtime.stack.google_api import GoogleApi
    from runtime.stack.secrets import check_value, find_destination, put_secret

    if ctx.args:
        raise RequestRefused(
            "`runtime secrets put` takes one NAME, and no value on the command line",
            facts=["what was typed is in this shell's history now: if it was a secret, replace it"],
            hint="pipe the value in, name its file with `--file`, or type it when asked; `--help` lists the options",
        )
    settings, outputs = _find(stack)
    secret = find_destination(outputs, name, project)
    note(f"the value goes to `{secret.resource}`")
    # The connection comes first, so that no value is asked for in vain.
    with GoogleApi(server=settings.google_api) as api:
        value = _read_value(name, file)
        check_value(value, name)
        made = put_secret(outputs, name, value, api, disable_older=disable_older, project=project)
    if output is OutputFormat.JSON:
        print_json(made)
        return
    older = f"; disabled {', '.join(made.disabled)}" if made.disabled else ""
    note(f"secret `{name}` has version {made.version} now, for `{made.env}`{older}")


@app.command()
def check(stack: StackOption = None, output: OutputOption = OutputFormat.TEXT) -> int:
    """Check that each secret of the stack has a value that its readers can get. Exit code 1 where one has not.

    That this identity may not read a value itself is no failure: most should not.

    \b
    Examples:
      runtime secrets check
      runtime secrets check --stack marin-us-west4 -o json | jq -r '.[] | select(.problem) | .next_step'
    """
    from runtime.stack.secrets import list_secrets

    columns: Columns = {
        "SECRET": "name",
        "STATE": lambda seen: "lacking" if seen.problem else "ok",
        "VERSION": "newest",
        "READERS": lambda seen: None if seen.readers is None else len(seen.readers),
        "I MAY READ": "may_read",
        "PROBLEM": "problem",
        "NEXT STEP": "next_step",
    }
    with _open(stack) as (outputs, api):
        found = list(list_secrets(outputs, api))
    print_list(found, columns, output)
    lacking = sum(seen.problem is not None for seen in found)
    if output is OutputFormat.TEXT:
        note(f"{lacking} of {len(found)} lacking" if lacking else f"{len(found)} of {len(found)} in order")
    return 1 if lacking else 0


@contextmanager
def _open(stack: str | None) -> Iterator[tuple[StackOutputs, GoogleApi]]:
    from runtime.stack.google_api import GoogleApi

    settings, outputs = _find(stack)
    with GoogleApi(server=settings.google_api) as api:
        yield outputs, api


def _find(stack: str | None) -> tuple[Settings, StackOutputs]:
    """Read settings and contract, before any request to Google."""
    from runtime.outputs import need_output

    settings = load_settings()
    outputs = find_stack(stack, settings=settings).outputs
    need_output(outputs, "secrets", "`runtime secrets`")
    return settings, outputs


def _read_value(name: str, file: Path | None) -> bytes:
    if file is not None:
        try:
            data = file.expanduser().read_bytes()
        except OSError as problem:
            raise RequestRefused(
                f"cannot read `{file}`: {(problem.strerror or str(problem)).lower()}", hint="check the path of `--file`"
            ) from problem
        if data.endswith(b"\n"):
            note("the file ends with a newline, which is part of the value; `… | runtime secrets put` drops it")
        return data
    if sys.stdin is None or sys.stdin.closed:
        raise NotPossible("there is no standard input to read the value from", hint="name its file with `--file`")
    if sys.stdin.isatty():
        try:
            return ask_secret(f"value of `{name}`: ").encode()
        except EOFError:
            raise RequestRefused("no value was typed, nothing was added", hint="try again") from None
    typed = sys.stdin.buffer.read()
    return typed[:-2] if typed.endswith(b"\r\n") else typed.removesuffix(b"\n")
