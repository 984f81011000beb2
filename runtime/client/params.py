"""The parameters of tasks and runs by name, as far as their arguments show them: a variant's keys, options of a command, a grid."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
MOST_LOOKED: Final = 1000
DEEPEST: Final = 4
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
    same in each process, so they may be part of what names the work. Nothing that its objects define is called, but for
    numpy's numbers; what cannot be shown so is left out.
    """
    parts = _parts_of(args[0]) if len(args) == 1 else ((f"arg{place}", each) for place, each in enumerate(args))
    every = itertools.chain(((ITEM, args[0]),) if parts is None else parts, kwargs.items())
    try:
        return dict(itertools.islice(_show(every, "", iter(range(MOST_LOOKED))), MOST_SHOWN))
    except Exception:
        return {}


def _show(parts: Iterable[tuple[Any, Any]], before: str, steps: Iterator[int]) -> Iterator[tuple[str, Any]]:
    """Yield names and values as long as there are `steps` left, which all parts of parts share."""
    for (name, each), _ in zip(parts, steps, strict=False):
        if type(name) not in (str, int):
            continue
        path = before + _text(str(name))
        inner = _parts_of(each) if path.count(".") < DEEPEST else None
        if inner is not None:
            yield from _show(inner, path + ".", steps)
        elif (plain := _plain(each)) is not None:
            yield path, plain


def _parts_of(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """The names and values of a dictionary, dataclass or named tuple; None for anything else."""
    kind = type(value)
    if isinstance(value, dict):
        return iter(dict.items(value))
    if isinstance(value, tuple) and isinstance(fields := getattr(kind, "_fields", None), tuple):
        return zip(fields, tuple.__iter__(value), strict=False)
    if isinstance(fields := getattr(kind, "__dataclass_fields__", None), dict):
        return ((name, _read_field(value, name)) for name in fields)
    return None


def _read_field(value: object, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except Exception:
        return None


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON has it, numpy's as Python's; None for what it has not."""
    if type(value).__module__ == "numpy" and not isinstance(value, str):
        value = _read_number(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        plain = int.__index__(value)
        return plain if plain.bit_length() < 64 else None
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else repr(number)
    if isinstance(value, str):
        return _text(str.__str__(value))
    if type(value).__module__.startswith("pathlib"):
        return _text(str(value))
    if type(value) in (list, tuple) and len(value) <= MOST_PARTS and depth < DEEPEST:
        parts = [_plain(each, depth + 1) for each in value]
        return None if None in parts else parts
    return None


def _read_number(value: Any) -> Any:
    try:
        return value.item() if value.ndim == 0 else None
    except Exception:
        return None


def _text(text: str) -> str:
    """A text that can be stored, not too long."""
    return text[:MOST_TEXT].encode("utf-8", "backslashreplace").decode()


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
