"""`runtime run`: one workflow in this process, with the same arguments as a queued task."""

from __future__ import annotations

import traceback
from typing import Annotated, Any

from typer import Argument

from runtime.cli.console import note_block, say_block, write_json
from runtime.errors import RuntimeFailure, WorkFailed
from runtime.json_values import encode

# Words after PROJECT WORKFLOW belong to the workflow, options and `--help` included.
CONTEXT_SETTINGS: dict[str, Any] = {"allow_interspersed_args": False}


def run(
    project: Annotated[str, Argument(help="Module or package that registers the workflow.")],
    workflow: Annotated[str, Argument(help="Its name there.")],
    args: Annotated[list[str] | None, Argument(help="Its arguments, taken as they are.")] = None,
) -> int:
    """Run one workflow here and now, without a queue.

    What it returns is printed as JSON. Its arguments are parsed from its signature, the same as for a queued task.
    Exit codes: 0 done, 1 it raised, 2 it cannot be found or refuses its arguments.

    \b
    Examples:
      runtime run my.project train --lr=1e-3
      runtime run my.project train --tags+=a --tags+=b --model='{"layers": 4}'
      runtime run my.project train --help          its options
    """
    from runtime.config import load_settings
    from runtime.tasks.workflows import HelpAsked, bind_arguments, find_workflow, prepare_process

    settings = load_settings().project
    name = f"{project} {workflow}"
    try:
        prepare_process(settings)
        call = bind_arguments(find_workflow(project, workflow, settings), args or [], name=name)
    except HelpAsked as asked:
        say_block(asked.text)
        return 0
    except (RuntimeFailure, KeyboardInterrupt):
        raise
    except Exception as problem:
        raise _explain(problem, f"project `{project}` cannot be loaded") from problem
    try:
        value = call()
    except (RuntimeFailure, KeyboardInterrupt):
        raise
    except Exception as problem:
        raise _explain(problem, f"workflow `{name}` failed") from problem
    if value is not None:
        _print_value(value, name)
    return 0


def _explain(problem: Exception, what: str) -> WorkFailed:
    """Print the user's own traceback without our frames, and return the error for the line below it."""
    frames = problem.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] in (
        "runtime",
        "importlib",
    ):
        frames = frames.tb_next
    note_block("".join(traceback.format_exception(type(problem), problem, frames)).rstrip())
    text = " ".join(str(problem).split())
    return WorkFailed(f"{what}: {type(problem).__name__}" + (f": {text}" if text else ""))


def _print_value(value: object, name: str) -> None:
    import json

    try:
        text = json.dumps(value, default=encode, indent=2, ensure_ascii=False)
    except (TypeError, ValueError) as problem:
        raise WorkFailed(
            f"workflow `{name}` returned what JSON cannot hold: {problem}",
            facts=["it ran to its end", f"returned: {type(value).__name__}"],
            hint="return numbers, text, lists and dictionaries, or None, and write the rest to files",
        ) from None
    write_json(text + "\n")
