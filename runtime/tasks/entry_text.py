"""A task's work as text for people and for comparing two tasks: calls carry more than their function and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.tasks.calls import CALL_PACKED, CALL_REQUEST
from runtime.tasks.model import CommandEntry, Entry, FunctionEntry, WorkflowEntry


def describe_entry(entry: Entry, *, width: int = 72) -> str:
    """One line for people, cut to `width`."""
    match entry:
        case WorkflowEntry(project, workflow, args):
            text = " ".join((project, workflow, *args))
        case CommandEntry(command):
            text = " ".join(command)
        case FunctionEntry(function, args, _):
            text = f"{_name_called(function, args)}()"
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def without_argv(entry: Entry) -> Entry:
    """Return the entry without the command line of its submitter, which a call carries for people."""
    if isinstance(entry, FunctionEntry) and entry.function in (CALL_PACKED, CALL_REQUEST) and "argv" in entry.kwargs:
        kwargs = {name: value for name, value in entry.kwargs.items() if name != "argv"}
        return FunctionEntry(entry.function, entry.args, kwargs)
    return entry


def _name_called(function: str, args: tuple[Any, ...]) -> str:
    """The function that one of ours calls, for `runtime.worker.attempts.calls`, or the function itself."""
    if function == CALL_PACKED and len(args) > 1:
        return str(args[1])
    if function == CALL_REQUEST and args and isinstance(args[0], Mapping):
        return str(args[0].get("function"))
    return function
