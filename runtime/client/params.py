"""The parameters of tasks and runs by name, as far as their arguments show them: a variant's keys, options of a command, a grid."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from runtime.tasks.calls import CALL_PACKED, CALL_REQUEST
from runtime.tasks.model import CommandEntry, FunctionEntry, WorkflowEntry

ITEM: Final = "item"
"""The name of an argument that is no object."""
SHOWN: Final = "shown"
"""Beside a pickle, the parameters that people see of it."""
MOST_SHOWN: Final = 100
MOST_TEXT: Final = 200
MOST_PARTS: Final = 16
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


def show_params(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a call that has to be pickled, as far as they are numbers, texts and short lists of these: the
    same in each process, so they may be part of what names the work."""
    named = _params_of_call([_by_name(each) for each in args], kwargs)
    shown = ((str(name), _plain(each)) for name, each in named.items())
    return dict([(name, each) for name, each in shown if each is not None][:MOST_SHOWN])


def _by_name(value: Any) -> Any:
    """The fields of a dataclass or named tuple."""
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return {name: getattr(value, name, None) for name in value.__dataclass_fields__}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=False))
    return value


def _plain(value: Any) -> Any:
    """A value as JSON has it, numpy's as Python's; None for what it has not."""
    if type(value).__module__.partition(".")[0] == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() < 64 else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return value[:MOST_TEXT]
    if isinstance(value, list | tuple) and len(value) <= MOST_PARTS:
        parts = [_plain(each) for each in value]
        return None if None in parts else parts
    return None


def params_of_packed(packed: object) -> dict[str, Any]:
    """Return what people see of packed arguments."""
    shown = packed.get(SHOWN) if isinstance(packed, Mapping) else None
    return dict(shown) if isinstance(shown, Mapping) else {}


def params_of_entry(entry: FunctionEntry | CommandEntry | WorkflowEntry) -> dict[str, Any]:
    """Return the parameters of a task. Packed arguments lie in its snapshot, and are not read."""
    match entry:
        case FunctionEntry(function, args, kwargs):
            if function == CALL_PACKED:
                brought = args[3] if len(args) == 4 else None
                if isinstance(brought, Mapping) and ITEM in brought:
                    return name_params(brought[ITEM])
                return params_of_packed(brought)
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
