"""The parameters of tasks and runs by name, as far as their arguments show them: a variant's keys, options of a command, a grid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from runtime.tasks.calls import CALL_PACKED, CALL_REQUEST
from runtime.tasks.model import CommandEntry, FunctionEntry, WorkflowEntry

ITEM: Final = "item"
"""The name of an argument that is no object."""
_OPTION: Final = re.compile(r"--?([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)


def name_params(value: object) -> dict[str, Any]:
    """Return the keys of a variant with their values, those of objects in it with a dot: `{"net": {"depth": 2}}` has
    `net.depth`. A value that is no object is the parameter `item`."""
    if isinstance(value, Mapping):
        return dict(_flatten(value, ""))
    return {} if value is None else {ITEM: value}


def _flatten(value: Mapping[Any, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _flatten(each, f"{before}{key}.")
        else:
            yield f"{before}{key}", each


def params_of_entry(entry: FunctionEntry | CommandEntry | WorkflowEntry) -> dict[str, Any]:
    """Return the parameters of a task. Packed ones lie in its snapshot, and are not read."""
    match entry:
        case FunctionEntry(function, args, kwargs):
            if function == CALL_PACKED:
                brought = args[3] if len(args) == 4 else None
                return name_params(brought.get(ITEM)) if isinstance(brought, Mapping) else {}
            if function == CALL_REQUEST and len(args) == 1 and isinstance(args[0], Mapping):
                return _params_of_request(args[0])
            return _params_of_call(args, kwargs)
        case CommandEntry(command):
            return params_of_words(command)
        case WorkflowEntry(_, _, args):
            return params_of_words(args)


def _params_of_request(request: Mapping[str, Any]) -> dict[str, Any]:
    args = request.get("args")
    if request.get("packed"):
        return {}
    first = [request[ITEM]] if ITEM in request else []
    return _params_of_call([*first, *(args if isinstance(args, list) else ())], request.get("kwargs") or {})


def _params_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if len(args) == 1:
        return {**name_params(args[0]), **kwargs}
    return {**{f"arg{place}": each for place, each in enumerate(args)}, **kwargs}


def params_of_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line: `--lr=0.1`, `--lr 0.1`, and `--fast`, which is true."""
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        matched = _OPTION.fullmatch(word)
        if matched is None:
            continue
        name, value = matched[1], matched[2]
        after = words[place + 1] if place + 1 < len(words) else None
        if value is None and after is not None and _OPTION.fullmatch(after) is None:
            value = after
        found[name] = True if value is None else read_word(value)
    return found


def read_word(text: str) -> Any:
    """Return the number in `text`, or the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if type(value) in (int, float, bool) else text
