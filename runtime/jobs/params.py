"""The values of an array's parameters: a list, or the text that `--grid NAME=` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from runtime.errors import InvalidValue
from runtime.schema import describe


class _Values:
    """Reads the values of a parameter; `Array` makes a list of a text, since random ones depend on the name."""

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "type": ["array", "string"],
        "items": {},
        "examples": [[0.1, 0.01], "0:10", "log:1e-5:1e-1:5"],
    }

    @classmethod
    def read(cls, value: object) -> tuple[Any, ...] | str:
        if isinstance(value, str):
            return value
        if isinstance(value, list | tuple):
            return tuple(value)
        raise ValueError("a list, or a text such as 0:10 or log:1e-5:1e-1:5")


ParamValues: TypeAlias = tuple[Any, ...] | str
if not TYPE_CHECKING:
    ParamValues = _Values  # what `runtime.schema` reads the field by


def read_values(name: str, values: tuple[Any, ...] | str) -> tuple[Any, ...]:
    """Return the values of a parameter as a list. Raises `ValueError`."""
    if not isinstance(values, str) or not values:
        return tuple(values)
    from runtime.tasks.grid import parse_axis

    try:
        return tuple(parse_axis(name, values).values)
    except InvalidValue as problem:
        meant = f"; {problem.hint}" if problem.hint else ""
        raise ValueError(f"has `params.{name}` {describe(values)}, expected {problem.allowed}{meant}") from None
