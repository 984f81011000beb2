"""Finds the function behind a task's entry and turns the entry's arguments into a call.

A workflow is a plain typed function. It is found as `PROJECT.workflows["NAME"]` of an importable module (PROJECT as
given, then under each of the project's `workflow_packages`), by `@workflow`, or by an entry point of the group
`research_runtime.workflows`. Its arguments are parsed from its signature by jsonargparse, the same for
`runtime run`, a queued task and a job.
"""

from __future__ import annotations

import functools
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from runtime.errors import RequestRefused, UnknownName
from runtime.file_trust import check_size, check_trusted, read_file
from runtime.tasks.model import CommandEntry, Entry, FunctionEntry, WorkflowEntry

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from runtime.config import Project

ENTRY_POINT_GROUP: Final = "research_runtime.workflows"

F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[str, dict[str, Callable[..., Any]]] = {}
"""By project, then by name: what `@workflow` has seen in this process."""
_prepared: set[tuple[Path, str | None, tuple[str, ...]]] = set()


class BadArguments(RequestRefused):
    """The entry's arguments do not fit the function's signature; again would not help."""

    def __init__(self, what: str, problem: str, *, facts: Sequence[str] = (), hint: str | None = None) -> None:
        self.what, self.problem = what, problem
        super().__init__(f"{what} refuses its arguments: {problem}", facts=facts, hint=hint)


class UnknownModule(RequestRefused):
    """Neither `name` nor anything it stands for can be imported here."""

    def __init__(self, name: str, tried: Sequence[str], *, hint: str | None = None) -> None:
        self.name, self.tried = name, tuple(tried)
        super().__init__(
            f"no module `{name}` to find the work in",
            facts=[f"tried to import: {', '.join(tried)}", f"from: {Path.cwd()} and the installed packages"],
            hint=hint,
        )


class NoWorkflows(RequestRefused):
    """The project's module exists and declares nothing that can be run."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"module `{module}` declares no workflows",
            facts=["expected a mapping `workflows` from names to functions, or functions under `@runtime.workflow`"],
            hint="a function without registration runs as `module:function`: docs/workflows.md",
        )


class HelpAsked(Exception):
    """The arguments ask for help; `text` is it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@overload
def workflow(function: F, /) -> F: ...
@overload
def workflow(*, name: str | None = None, project: str | None = None) -> Callable[[F], F]: ...
def workflow(
    function: F | None = None, /, *, name: str | None = None, project: str | None = None
) -> F | Callable[[F], F]:
    """Register a function as a workflow and return it unchanged.

    `name` is the function's unless given, `project` the module it is defined in. A project of another name is
    found when one of `workflow_packages` imports the module.
    """

    def register(registered: F) -> F:
        _registered.setdefault(project or registered.__module__, {})[name or registered.__name__] = registered
        return registered

    return register if function is None else register(function)


def load(entry: Entry, *, project: Project | None = None, started_in: str | None = None) -> Callable[[], object]:
    """The entry as a call, its arguments parsed and checked; calling it runs the work.

    Raises `RequestRefused` for problems that no retry solves: `UnknownName`, `UnknownModule`, `BadArguments`. Exceptions
    of the user's own module during its import come through unchanged. `project` holds the settings; by default they are
    looked for from the working directory. If that is a snapshot, which holds no secrets, the files of `env_files` that it
    lacks are read from the project around the folder `started_in`.
    """
    match entry:
        case WorkflowEntry(name, workflow_name, args):
            settings = project or _read_project(Path.cwd())
            prepare_process(settings, started_in)
            function = find_workflow(name, workflow_name, settings)
            try:
                return bind_arguments(function, args, name=f"{name} {workflow_name}")
            except HelpAsked:
                raise BadArguments(
                    f"workflow `{name} {workflow_name}`",
                    "they ask for help",
                    hint=f"`runtime run {name} {workflow_name} --help` prints it",
                ) from None
        case FunctionEntry(name, args, kwargs):
            prepare_process(project or _read_project(Path.cwd()), started_in)
            return bind_call(find_function(name), args, kwargs, name=name)
        case CommandEntry():
            raise TypeError("a command is executed, not called")


def prepare_process(project: Project, started_in: str | None = None) -> None:
    """Make the working directory importable, load `env_files`, and call `workflow_setup`; once in a process."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    key = (project.root, project.workflow_setup, project.env_files)
    if key in _prepared:
        return
    for each in project.env_files:
        _load_env_file(each, project, started_in)
    if project.workflow_setup:
        find_function(project.workflow_setup, kind="workflow_setup")()
    _prepared.add(key)


def find_workflow(project_name: str, name: str, project: Project) -> Callable[..., Any]:
    """The function registered as `name` of `project_name`.

    Raises `UnknownName` with the known names, or `UnknownModule` if no such project exists.
    """
    candidates = [project_name, *(f"{package}.{project_name}" for package in project.workflow_packages)]
    known: dict[str, Callable[..., Any]] = {}
    seen_project = False
    for found in _registries(project_name, candidates, project.workflow_packages):
        seen_project = True
        if name in found:
            return found[name]
        known |= found
    if seen_project:
        raise UnknownName("workflow", name, known, where=f"in project `{project_name}`")
    imported = [name for name in candidates if name in sys.modules]
    if imported:
        raise NoWorkflows(imported[0])
    where = f" of `{project.file.name}`" if project.file else ""
    raise UnknownModule(
        project_name,
        candidates,
        hint=f"run it in the folder that holds the project, or add its package to `workflow_packages`{where}",
    )


def find_function(path: str, *, kind: str = "function") -> Callable[..., Any]:
    """The callable of `module:qualname`."""
    module_name, _, qualname = path.partition(":")
    if not module_name or not qualname:
        raise RequestRefused(f"`{path}` names no {kind}", facts=["expected `module:function`"])
    return _find_function(module_name, qualname)


@functools.lru_cache(maxsize=256)
def _find_function(module_name: str, qualname: str) -> Callable[..., Any]:
    module = _import_if_there(module_name)
    if module is None:
        raise UnknownModule(
            module_name, [module_name], hint="run it in the folder that holds the module, or install its package"
        )
    value: Any = module
    for part in qualname.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        known = [name for name, each in vars(module).items() if callable(each) and not name.startswith("_")]
        raise UnknownName("function", qualname, known, where=f"in module `{module_name}`")
    found: Callable[..., Any] = value
    return found


def bind_arguments(function: Callable[..., Any], args: Sequence[str], *, name: str) -> Callable[[], object]:
    """Parse command-line arguments by the function's signature into a call of it.

    Raises `BadArguments` with jsonargparse's reason, `HelpAsked` if they contain `--help`; prints nothing and never
    exits.
    """
    parser = _parser_of(function, name)
    printed = StringIO()
    try:
        # jsonargparse prints help and some refusals itself.
        with redirect_stdout(printed), redirect_stderr(printed):
            values = _instantiate(parser, parser.parse_args(list(args)))
    except SystemExit as ended:
        if not ended.code:
            raise HelpAsked(printed.getvalue()) from None
        raise _refusal(parser, name, printed.getvalue()) from None
    except Exception as problem:
        # Also exceptions of the user's own types for a value that they refuse.
        raise _refusal(parser, name, str(problem) or type(problem).__name__) from problem
    return _Call(function, (), values)


def bind_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str
) -> Callable[[], object]:
    """A call with JSON arguments; raises `BadArguments` if the signature does not take them."""
    import inspect

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as problem:
            raise BadArguments(f"function `{name}`", str(problem), facts=[f"its signature: {signature}"]) from None
    return _Call(function, tuple(args), kwargs)


class _Call:
    __slots__ = ("_args", "_function", "_kwargs")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs

    def __call__(self) -> object:
        returned = self._function(*self._args, **self._kwargs)
        if hasattr(returned, "__await__") and hasattr(returned, "cr_frame"):
            import asyncio

            return asyncio.run(returned)
        return returned


@functools.lru_cache(maxsize=8)
def _read_project(folder: Path) -> Project:
    from runtime.config import load_project

    return load_project(folder)


def _load_env_file(name: str, project: Project, started_in: str | None) -> None:
    from dotenv import load_dotenv

    path = project.root / name
    if started_in is not None and not path.is_file():
        path = _read_project(Path(started_in)).root / name
    found = read_file(str(path))
    if found is None:
        raise RequestRefused(
            f"no file `{path}` to load variables from",
            facts=[f"`env_files` of `{project.file}` names it"],
            hint="make the file, or take it out of `env_files`",
        )
    status, content = found
    check_trusted(str(path), instead="put a file of your own there", opened=status)
    check_size(str(path), content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise RequestRefused(
            f"`{path}` holds no lines of variables: it is no text",
            facts=[f"`env_files` of `{project.file}` names it"],
            hint="name a file with lines such as NAME=value",
        ) from None
    load_dotenv(stream=io.StringIO(text))


def _registries(
    project_name: str, candidates: Sequence[str], packages: Sequence[str]
) -> Iterator[Mapping[str, Callable[..., Any]]]:
    """Every registry with the project's name, nearest first; modules are imported when they are needed."""
    for candidate in candidates:
        is_name = all(part.isidentifier() for part in candidate.split("."))
        module = _import_if_there(candidate) if is_name else None
        if module is None:
            continue
        declared = getattr(module, "workflows", None)
        if isinstance(declared, Mapping):
            yield declared
        # Functions that `@workflow` saw in the module, then in the imported modules below it.
        below = sorted(name for name in _registered if name.startswith(f"{module.__name__}."))
        yield from (_registered[name] for name in (module.__name__, *below) if name in _registered)
    if project_name not in _registered:
        for package in packages:
            _import_if_there(package)
    if project_name in _registered:
        yield _registered[project_name]
    yield from _entry_points(project_name)


def _entry_points(project_name: str) -> Iterator[Mapping[str, Callable[..., Any]]]:
    """`PROJECT = "module:mapping"` and `PROJECT.NAME = "module:function"` of installed distributions."""
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == project_name:
            loaded = point.load()
            yield loaded if isinstance(loaded, Mapping) else getattr(loaded, "workflows", {})
        elif point.name.startswith(f"{project_name}."):
            yield {point.name[len(project_name) + 1 :]: point.load()}


def _import_if_there(name: str) -> ModuleType | None:
    """The module, or None if no module has that name. Failures inside it come through."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        # The module itself or a parent of it is missing; any other name is an import inside the user's code.
        if problem.name is not None and (name == problem.name or name.startswith(f"{problem.name}.")):
            return None
        raise


@functools.lru_cache(maxsize=256)
def _parser_of(function: Callable[..., Any], name: str) -> ArgumentParser:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(
        prog=f"runtime run {name}",
        exit_on_error=False,
        allow_abbrev=False,
        description=(function.__doc__ or "").strip().partition("\n")[0],
    )
    try:
        parser.add_function_arguments(function, as_positional=False, fail_untyped=False)
    except ValueError as problem:
        raise RequestRefused(
            f"workflow `{name}` cannot be called from a command line: {problem}",
            facts=[f"it is `{function.__module__}:{function.__qualname__}`"],
            hint="give its parameters types that docs/workflows.md lists",
        ) from problem
    for group in parser._action_groups:
        if (group.title or "").startswith("<"):
            group.title = f"options of {function.__qualname__}"
    if not any("--config" in action.option_strings for action in parser._actions):
        parser.add_argument("--config", action="config", help="File with values for the options, YAML or JSON.")
    return parser


def _instantiate(parser: ArgumentParser, parsed: Any) -> dict[str, Any]:
    """Keyword arguments of the call; dataclasses are made from their values."""
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    config_is_ours = any(type(action).__name__ == "ActionConfigFile" for action in parser._actions)
    return {name: value for name, value in vars(make(parsed)).items() if not (name == "config" and config_is_ours)}


def _refusal(parser: ArgumentParser, name: str, text: str) -> BadArguments:
    import difflib

    lines = [line.strip() for line in text.strip().splitlines() if line.strip() and not line.startswith("usage:")]
    lines = [re.sub(r"<(?:class|enum) '(?:\w+\.)*(\w+)'>", r"`\1`", line) for line in lines]
    hint = f"`runtime run {name} --help` lists its options"
    first, rest = (lines or ["they cannot be parsed"])[0].removeprefix("error: "), lines[1:]
    if first.startswith("unrecognized arguments: "):
        word = first.partition(": ")[2].split()[0].partition("=")[0]
        known = _option_names(parser)
        near = difflib.get_close_matches(word, known, n=1)
        return BadArguments(
            f"workflow `{name}`",
            f"it has no option `{word}`" if word.startswith("-") else f"it takes no argument `{word}` without a name",
            facts=[f"its options: {', '.join(known) or 'none'}"],
            hint=f"did you mean `{near[0]}`?" if near else hint,
        )
    if first.startswith("the following arguments are required: "):
        missing = first.partition(": ")[2].split(", ")
        return BadArguments(
            f"workflow `{name}`", " and ".join(f"`--{each}`" for each in missing) + " missing", hint=hint
        )
    if key := re.fullmatch(r'Parser key "([^"]+)":\s*(.*)', first):
        reason, *rest = [line for line in (key[2], *rest) if line] or ["cannot be read"]
        reason = reason[:1].lower() + reason[1:]
        return BadArguments(f"workflow `{name}`", f"`--{key[1]}`: {reason}", facts=rest[:12], hint=hint)
    return BadArguments(f"workflow `{name}`", first, facts=rest[:12], hint=hint)


def _option_names(parser: ArgumentParser) -> list[str]:
    names = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    own = {"--help", "--config", "--print_config", "--print_shtab"}
    return sorted(name for name in names - own if not name.endswith(("+", ".help")))
