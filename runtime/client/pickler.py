"""Pickles by cloudpickle that are the same for the same program, so that a call made again is found again.

cloudpickle gives each class of a script a random id, and Python writes the constants of a set in an order that differs from
process to process. Both are made steady here; a set among the values themselves is not.
"""

from __future__ import annotations

import functools
import hashlib
import io
import sys
import types
from pathlib import Path
from typing import Any, Final

from runtime.shim.call import PROTOCOL, reduce_cached

DEEPEST: Final = 6
_EVERYWHERE: Final = {"__dict__", "__weakref__", "__module__", "__doc__"}


def dumps(value: object) -> bytes:
    """Return a pickle of `value`. Raises `ImportError` without cloudpickle, and what pickling raises."""
    buffer = io.BytesIO()
    _pickler()(buffer, protocol=PROTOCOL).dump(value)
    return buffer.getvalue()


@functools.cache
def _pickler() -> Any:
    from cloudpickle import cloudpickle  # type: ignore[import-untyped]

    class SubmitPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):
                function, args = self.dispatch_table[types.CodeType](obj)
                return function, tuple(map(_in_order, args))
            if (cached := reduce_cached(obj)) is not None:
                return cached
            if isinstance(obj, type) and (obj.__module__ == "__main__" or "<" in obj.__qualname__):
                _name_class(cloudpickle, obj)
            return super().reducer_override(obj)

    return SubmitPickler


_named: Final[dict[int, type]] = {}
"""Classes that have their names for as long as this process lives: two that share one would be one class for who loads them."""


def _name_class(cloudpickle: Any, found: type) -> None:
    """Give a class of the script an id by the script's text, its name, what is in it, and the number of equal classes before."""
    text = _text_of_script()
    if text is None:
        return
    about, number = f"{found.__qualname__} {describe_class(found)}".encode("utf-8", "backslashreplace"), 0
    while True:
        name = hashlib.sha256(b"%s %s %d" % (text, about, number)).hexdigest()[:32]
        # Pickles call this function by its name, so each version has it.
        if cloudpickle._lookup_class_or_track(name, found) is found:
            _named[id(found)] = found
            return
        number += 1


def describe_class(found: type) -> str:
    """Describe what is in a class as far as it is code and plain values, the same in each process."""
    own = sorted((name, value) for name, value in vars(found).items() if name not in _EVERYWHERE)
    return repr([[each.__qualname__ for each in found.__bases__], [(name, _describe(value)) for name, value in own]])


def _describe(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        return "…"
    inner = functools.partial(_describe, depth=depth + 1)
    if isinstance(value, types.CodeType):
        return value.co_code.hex(), value.co_names, value.co_varnames, [inner(each) for each in value.co_consts]
    if isinstance(value, types.FunctionType):
        cells = [inner(each.cell_contents) for each in value.__closure__ or () if each != types.CellType()]
        return inner(value.__code__), inner(value.__defaults__), inner(value.__kwdefaults__), cells
    if isinstance(value, staticmethod | classmethod):
        return inner(value.__func__)
    if isinstance(value, property):
        return [inner(each) for each in (value.fget, value.fset, value.fdel)]
    if isinstance(value, type):
        return value.__qualname__
    if type(value) in (type(None), bool, int, float, complex, str, bytes):
        return repr(value)
    if type(value) in (tuple, list):
        return [inner(each) for each in value]
    if type(value) in (set, frozenset):
        return sorted(repr(inner(each)) for each in value)
    if isinstance(value, dict | types.MappingProxyType):
        return [(inner(name), inner(each)) for name, each in value.items()]
    known = getattr(value, "__dict__", {}).get("_value_")  # a member of an enum
    return [type(value).__qualname__, inner(known)]


@functools.cache
def _text_of_script() -> bytes | None:
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest() if path else None
    except OSError:
        return None


def _in_order(value: Any) -> Any:
    """A constant of code with its sets in the order of their texts."""
    if type(value) is tuple:
        return tuple(map(_in_order, value))
    return _Sorted(value) if type(value) is frozenset else value


class _Sorted:
    """Stands for a set in a pickle."""

    def __init__(self, values: frozenset[Any]) -> None:
        self._values = values

    def __reduce__(self) -> Any:
        return frozenset, (sorted(self._values, key=lambda each: (type(each).__name__, repr(each))),)
