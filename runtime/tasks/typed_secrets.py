"""Refuses work with a secret among its arguments: everyone who reads the queue or the records reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from runtime.errors import InvalidTask
from runtime.secret_signs import find_secret, find_secret_argument
from runtime.tasks.model import CommandEntry, Entry, FunctionEntry

SECRETS_HINT: Final = "let the work read it from the environment or a file of its worker; if it is no secret, give the argument another name"


def refuse_secrets(entry: Entry, *, line: int | None = None) -> None:
    """Raise `InvalidTask` for an argument that looks like a secret; its value is not repeated."""
    if isinstance(entry, FunctionEntry):
        field, found = "kwargs", find_secret(entry.kwargs) or (find_secret(entry.args) if entry.args else None)
    elif isinstance(entry, CommandEntry):
        field, found = "command", find_secret_argument(entry.command)
    else:
        field, found = "args", find_secret_argument(entry.args)
    if found is not None:
        raise _refusal(field, found, line)


def refuse_secret_axes(axes: Iterable[tuple[str, object]]) -> None:
    """The same for the names and values of a grid."""
    if (found := find_secret(dict(axes))) is not None:
        raise _refusal("grid", found, None)


def _refusal(field: str, name: str, line: int | None) -> InvalidTask:
    problem = f"has a value for `{name}`, which looks like a secret"
    return InvalidTask(field, problem, line=line, hint=SECRETS_HINT)
