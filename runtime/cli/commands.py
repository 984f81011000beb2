"""The tree of commands, each loaded when it is used.

To add a command, write `runtime/cli/<verb>.py` and one line in `SECTIONS`: nothing else is touched, and `runtime --help`
imports none of the command modules. A command module exposes one of

- a function named like the verb (`-` as `_`), whose typed signature is the command line and whose docstring its help:

      def cancel(ids: Annotated[list[str], Argument(metavar="ID...")], yes: YesOption = False) -> None:
          \"\"\"Cancel tasks, experiments or jobs.

          \\b
          Examples:
            runtime cancel t-41
            runtime cancel sweep --yes
          \"\"\"

  (`\\b` on a line of its own keeps the line breaks of the paragraph below it.) If the module has a dictionary
  `CONTEXT_SETTINGS` too, the command gets it: `{"ignore_unknown_options": True, "allow_extra_args": True}` leaves other
  words in `ctx.args`, for `runtime run PROJECT WORKFLOW ARGS…` and the like, and `COMMAND_CLASS` replaces
  typer's own class of commands;

- or `app = new_app("help")`, for a group such as `runtime queue …` with `@app.command()` for each verb in it.

A command returns None or its exit code, raises a `RuntimeFailure` with an explanation, prints data to stdout and
everything else to stderr (`runtime.cli.console` and `output`). Two commands bypass this tree: `--version`, and `worker`, for which
`runtime.cli.worker` has `main(argv) -> int` and `build_parser()`.
"""

from __future__ import annotations

import importlib
import inspect
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option, _click
from typer._click import exceptions as click_exceptions  # the usage errors have no public name in this typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from runtime.cli.console import say_block
from runtime.cli.output import OutputFormat
from runtime.errors import NotPossible, RequestRefused, UnknownName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typer._click.shell_completion import CompletionItem

    from runtime.errors import RuntimeFailure

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Start here": {
        "quickstart": ("runtime.cli.quickstart", "The main job end to end on this machine."),
        "init": ("runtime.cli.init", "Make a small project that runs."),
    },
    "Run work": {
        "run": ("runtime.cli.run", "Run one workflow here and now."),
        "submit": ("runtime.cli.submit", "Put tasks into a queue."),
        "worker": ("runtime.cli.worker", "Serve a queue: lease tasks and run them."),
        "launch": ("runtime.cli.launch", "Start a job on this machine, a host or a cluster."),
        "dev": ("runtime.cli.dev", "A machine that runs a command again at each change."),
        "convert": ("runtime.cli.convert", "Make job files of what you launched with before."),
    },
    "See": {
        "status": ("runtime.cli.status", "What runs, what waits and why, what failed."),
        "logs": ("runtime.cli.logs", "What a task or a job printed."),
        "explain": ("runtime.cli.explain", "Why something waits or failed, and the next step."),
        "results": ("runtime.cli.results", "What tasks and runs returned and reported."),
        "plot": ("runtime.cli.plot", "How a metric went, in the terminal or as a picture."),
        "fetch": ("runtime.cli.fetch", "Bring home what a job or a task wrote."),
        "artifacts": ("runtime.cli.artifacts", "Files and folders that tasks save as they run, by tag."),
    },
    "Act": {
        "wait": ("runtime.cli.wait", "Return when an experiment, a task or a job has ended."),
        "cancel": ("runtime.cli.cancel", "Stop tasks, experiments and jobs."),
        "retry": ("runtime.cli.retry", "Run what failed once more, with new budgets."),
        "interrupt": ("runtime.cli.interrupt", "Rehearse a preemption, a time-out, a dead node."),
    },
    "Look after": {
        "queue": ("runtime.cli.queue", "Pause, purge or repair queues; redrive dead letters."),
        "cluster": ("runtime.cli.cluster", "Look after Ray clusters on TPUs."),
        "targets": ("runtime.cli.targets", "Places to launch on, and whether they work."),
        "keep": ("runtime.cli.keep", "Start jobs again whose machine went, if their backend does not."),
        "import": ("runtime.cli.import_", "Know the jobs that a bundle submitted."),
        "gc": ("runtime.cli.gc", "Remove what jobs left that ended long ago."),
        "stack": ("runtime.cli.stack", "Choose the stack that commands use, and show what it offers."),
        "image": ("runtime.cli.image", "Build container images and push them to every region."),
        "secrets": ("runtime.cli.secrets", "Put the values of the stack's secrets, and see who can read them."),
        "doctor": ("runtime.cli.doctor", "What works here, what does not, and how to mend it."),
        "completion": ("runtime.cli.completion", "Print the completion script of a shell."),
    },
}
"""Section of `runtime --help` → command → its module and its line there."""

COMMANDS = {name: entry for commands in SECTIONS.values() for name, entry in commands.items()}

OutputOption = Annotated[
    OutputFormat, Option("--output", "-o", help="`text` for people, `json` for programs.", show_default=False)
]
YesOption = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]
StackOption = Annotated[str | None, Option("--stack", envvar="RUNTIME_STACK", metavar="NAME", help="Stack to use.")]
CaptureOption = Annotated[
    list[str] | None,
    Option("--capture", metavar="PATH:TAG", help="A file or folder that attempts save as they run; may repeat."),
]
CaptureEveryOption = Annotated[
    str | None, Option("--capture-every", metavar="1m", help="How often, while an attempt runs.")
]

_COMPLETE = "_RUNTIME_COMPLETE"
"""Variable with which a shell asks for completions."""

_LEAN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["--help", "-h"], "max_content_width": 110},
}


class CommandGroup(TyperGroup):
    """A group that explains a misspelt command and prints its help without one."""

    def resolve_command(
        self, ctx: _click.Context, args: list[str]
    ) -> tuple[str | None, _click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] in known:
            return args[0], self.get_command(ctx, args[0]), args[1:]
        if ctx.resilient_parsing:
            return None, None, args[1:]
        if args[0].startswith("-"):
            raise click_exceptions.NoSuchOption(args[0], ctx=ctx)
        raise UnknownName("command", args[0], known, hint=f"`{ctx.command_path} --help` says what each does")


class RootGroup(CommandGroup):
    """The tree's root. It has the commands of `SECTIONS` and imports one only to use it."""

    def list_commands(self, ctx: _click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: _click.Context, cmd_name: str) -> _click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: _click.Context, formatter: _click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(widest), line) for name, (_, line) in commands.items()])

    def shell_complete(self, ctx: _click.Context, incomplete: str) -> list[CompletionItem]:
        from typer._click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=COMMANDS[name][1]) for name in COMMANDS if name.startswith(incomplete)]
        return names + _click.Command.shell_complete(self, ctx, incomplete)


def new_app(help_text: str, **settings: Any) -> typer.Typer:
    """Make a typer app for a group of commands, as lean as the root: no rich, no completion options, our errors."""
    return typer.Typer(**{**_LEAN, "cls": CommandGroup, "no_args_is_help": True, "help": help_text, **settings})


def load_command(name: str) -> _click.Command:
    """Import the module of the command `name` and build its command line."""
    if name == "worker":
        return _worker_command()
    module = importlib.import_module(COMMANDS[name][0])
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(**_LEAN)
        # `import` is a word of Python's own; its function has an underscore behind it.
        function = getattr(module, name.replace("-", "_"), None) or getattr(module, f"{name}_")
        settings = {**_LEAN["context_settings"], **getattr(module, "CONTEXT_SETTINGS", {})}
        app.command(name, cls=getattr(module, "COMMAND_CLASS", None), context_settings=settings)(function)
    command = _build(app)
    command.name = name
    if _COMPLETE in os.environ:
        from runtime.cli.completion import add_candidates

        add_candidates(command)
    return command


def _complete(instruction: str) -> int:
    """Answer a shell; what goes wrong leaves it without an answer, for the person is in the middle of a line."""
    from typer._completion_classes import completion_init
    from typer.completion import shell_complete

    try:
        completion_init()
        return shell_complete(_build_root(), {}, "runtime", _COMPLETE, instruction)
    except Exception:
        return 1


def run(args: Sequence[str]) -> int:
    """Parse `args`, run the command they name and return its exit code. Errors are raised for `main` to print."""
    if instruction := os.environ.get(_COMPLETE):
        return _complete(instruction)
    # The root is built only for its help and for misspelt commands; a known command needs nothing of it.
    named = args[:1] and args[0] in COMMANDS
    command, path, rest = (
        (load_command(args[0]), f"runtime {args[0]}", args[1:]) if named else (_build_root(), "runtime", args)
    )
    try:
        with command.make_context(path, list(rest)) as ctx:
            returned = command.invoke(ctx)
    except typer.Exit as done:
        return done.exit_code
    return returned if isinstance(returned, int) else 0


def explain_usage(problem: BaseException) -> RuntimeFailure | None:
    """Turn typer's error about a command line into ours; None if `problem` is another error."""
    if isinstance(problem, typer.Abort):
        return NotPossible(
            "not confirmed, nothing was done", hint="answer `y`, or pass `--yes` where nobody can answer"
        )
    if not isinstance(problem, click_exceptions.ClickException):
        return None
    ctx = getattr(problem, "ctx", None)
    command = ctx.command_path if ctx else "runtime"
    if isinstance(problem, click_exceptions.NoArgsIsHelpError):
        facts = [f"commands: {', '.join(ctx.command.list_commands(ctx))}"] if ctx else []
        return RequestRefused(f"`{command}` needs a command", facts=facts, hint=f"`{command} --help`")
    if isinstance(problem, click_exceptions.NoSuchOption):
        return _explain_option(problem, command)
    facts = [ctx.command.get_usage(ctx).replace("Usage:", "usage:", 1)] if ctx else []
    return RequestRefused(
        _usage_message(problem, command), facts=facts, hint=f"`{command} --help` explains each of them"
    )


def _explain_option(problem: click_exceptions.NoSuchOption, command: str) -> RuntimeFailure:
    known = []
    if problem.ctx:
        options = [param for param in problem.ctx.command.get_params(problem.ctx) if isinstance(param, TyperOption)]
        known = [name for option in options if not option.hidden for name in (*option.opts, *option.secondary_opts)]
    if problem.option_name == "--debug":
        return RequestRefused(
            f"`{command}` has no option `--debug`", hint="it goes before the command: `runtime --debug …`"
        )
    return UnknownName("option", problem.option_name, known, where=f"in `{command}`", hint=f"`{command} --help`")


def _usage_message(problem: click_exceptions.ClickException, command: str) -> str:
    """Word `problem` as we do: `--slots` of `runtime worker`: `x` is not a valid int."""
    ctx = getattr(problem, "ctx", None)
    param = getattr(problem, "param", None)
    if isinstance(problem, click_exceptions.MissingParameter) and param is not None:
        return f"`{command}` needs {_name_of(param, ctx)}"
    text = problem.message.rstrip(".").replace("'", "`")
    text = text[:1].lower() + text[1:]
    if isinstance(problem, click_exceptions.BadParameter) and param is not None:
        return f"{_name_of(param, ctx)} of `{command}`: {text}"
    return f"`{command}`: {text}"


def _name_of(param: _click.Parameter, ctx: Any) -> str:
    shown = param.opts[0] if isinstance(param, TyperOption) else param.make_metavar(ctx)
    return f"`{shown}`"


def _build(app: typer.Typer) -> _click.Command:
    for function in (each.callback for each in (app.registered_callback, *app.registered_commands) if each):
        if function:
            # Typer evaluates textual annotations four times, which took a tenth of the instructions of a launch.
            function.__annotations__ = inspect.get_annotations(function, eval_str=True)
    return get_command(app)


def _build_root() -> TyperGroup:
    app = typer.Typer(cls=RootGroup, **_LEAN)
    app.callback(invoke_without_command=True)(_root)
    root = _build(app)
    assert isinstance(root, TyperGroup)
    root.name = "runtime"
    root.subcommand_metavar = "COMMAND …"
    return root


def _root(
    ctx: typer.Context,
    # `main` reads both before typer loads; here they serve the help and completion.
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, Option("--debug", help="Print tracebacks with errors.")] = False,
) -> None:
    """Run a lab's work: tasks in queues, workers that any machine can start.

    \b
    Examples:
      runtime quickstart                              see the whole thing work
      runtime submit --grid seed=0:10 my.project train
      runtime worker --slots auto                     on any machine, as many as you like
      runtime status                                  what runs, waits and failed
    """
    if ctx.invoked_subcommand is None:
        say_block(ctx.get_help() + "\n")


def _worker_command() -> _click.Command:
    """Make a stand-in for the worker, which has its own parser, for help and completion."""

    class WorkerCommand(TyperCommand):
        def shell_complete(self, ctx: _click.Context, incomplete: str) -> list[CompletionItem]:
            from typer._click.shell_completion import CompletionItem

            from runtime.cli.worker import build_parser

            return [
                CompletionItem(option, help=action.help)
                for action in build_parser(fleet=True)._actions
                for option in action.option_strings
                if option.startswith(incomplete) and incomplete
            ]

    def serve(ctx: typer.Context) -> int:
        from runtime.cli.worker import main

        return main(ctx.args)

    app = typer.Typer(**_LEAN)
    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command("worker", cls=WorkerCommand, context_settings=passed_on)(serve)
    return _build(app)
