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
from typing import Any

from runtime.shim.call import PROTOCOL, reduce_cached


def dumps(value: object) -> bytes:
    """Return a pickle of `value`. Raises `ImportError` without cloudpickle, and what pickling raises."""
    buffer = io.BytesIO()
    _pickler()(buffer, protocol=PROTOCOL).dump(value)
    return buffer.getvalue()


@functools.cache
def _pickler() -> Any:
    from cloudpickle import cloudpickle  # type: ignore[import-untyped]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):
                function, args = self.dispatch_table[types.CodeType](obj)
                return function, tuple(map(_in_order, args))
            if (cached := reduce_cached(obj)) is not None:
                return cached
            if isinstance(obj, type) and obj.__module__ == "__main__" and "<" not in obj.__qualname__:
                _name_class(cloudpickle, obj)
            return super().reducer_override(obj)

    return Pickler


def _name_class(cloudpickle: Any, found: type) -> None:
    """Give a class of the script an id by the script's text, its name, and the number of classes that had the name before."""
    text = _text_of_script()
    if text is None:
        return
    number = 0
    while True:
        name = hashlib.sha256(b"%s %s %d" % (text, found.__qualname__.encode(), number)).hexdigest()[:32]
        # Pickles call this function by its name, so it is there in each version.
        if cloudpickle._lookup_class_or_track(name, found) is found:
            return
        number += 1


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
