"""Refuses work with a secret among its arguments: everyone who reads the queue or the records reads them."""

from __future__ import annotations

from typing import Final

from runtime.errors import InvalidTask
from runtime.secret_detection import (
    ANY_VALUE,
    find_secret,
    find_secret_argument,
    find_secret_in_shell,
    has_known_form,
    is_secret,
)
from runtime.tasks.grid import Grid, apply_grid
from runtime.tasks.model import CommandEntry, Entry, FunctionEntry, WorkflowEntry

SECRETS_HINT: Final = (
    "name a secret of the stack with `--secret`, and let the work read its variable; if it is no secret, give the argument "
    "another name"
)
NUMBERS: Final = frozenset({int, float, bool, type(None)})
"""Types of arguments that are not secrets, unless they have a name."""


def refuse_secrets(entry: Entry, *, line: int | None = None) -> None:
    """Raise `InvalidTask` for an argument that looks like a secret; its value is not repeated."""
    if isinstance(entry, FunctionEntry):
        if not entry.kwargs and NUMBERS.issuperset(map(type, entry.args)):
            return
        field, found = "kwargs", find_secret(entry.kwargs)
        if found is None and entry.args:
            field, found = "args", find_secret(entry.args) or _find_in_options(entry.args)
        for value in entry.kwargs.values():
            found = found or _find_in_options(value)
    elif isinstance(entry, CommandEntry):
        field, found = "command", find_secret_argument(entry.command)
    else:
        field, found = "args", find_secret_argument(entry.args)
    if found is not None:
        raise _refusal(field, found, line)


def _find_in_options(value: object, *, nested: bool = True) -> str | None:
    """Return the name of a secret in a list with options of a command line; other texts are data of a function."""
    if not isinstance(value, list | tuple):
        return None
    words = [each for each in value if isinstance(each, str)]
    if any(word[:2] == "--" for word in words) and (found := find_secret_argument(words)):
        return found
    return next(filter(None, (_find_in_options(each, nested=False) for each in value)), None) if nested else None


def refuse_secret_axes(grid: Grid) -> None:
    """The same for the names and values of a grid."""
    for axis in grid.axes:
        if is_secret(axis.name, axis.values) or any(map(has_known_form, axis.values)):
            raise _refusal("grid", axis.name, None)
        if found := next(filter(None, map(find_secret_in_shell, axis.values)), None):
            raise _refusal("grid", found, None)


def may_become_secret(entry: WorkflowEntry | CommandEntry, grid: Grid) -> bool:
    """Whether a value of the grid may be a secret at its place in the entry; if not, no combination needs a look."""
    try:
        refuse_secrets(apply_grid(entry, dict.fromkeys(grid.names, ANY_VALUE)))
    except InvalidTask:
        return True
    return False


def _refusal(field: str, name: str, line: int | None) -> InvalidTask:
    problem = f"has a value for `{name}`, which looks like a secret"
    return InvalidTask(field, problem, line=line, hint=SECRETS_HINT)
