"""The search space of `runtime.tune`: ranges and choices by name, and constants beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from runtime.errors import InvalidValue, RequestRefused
from runtime.schema import find_unencodable
from runtime.shim.call import is_json

MOST_WHOLE: Final = 2**53
"""Beyond it a float holds not every whole number."""


@dataclass(frozen=True, slots=True)
class Real:
    """Numbers between two ends, both included."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True, slots=True)
class Integer:
    """Whole numbers between two ends, both included."""

    low: int
    high: int
    log: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]


Variable: TypeAlias = Real | Integer | Choice


def log(low: float, high: float) -> Real:
    """Numbers from `low` to `high`, tried evenly in their logarithm."""
    return _real("log", low, high, log=True)


def uniform(low: float, high: float) -> Real:
    """Numbers from `low` to `high`, tried evenly."""
    return _real("uniform", low, high, log=False)


def integer(low: int, high: int, *, log: bool = False) -> Integer:
    """Whole numbers from `low` to `high`, both included; with `log` tried evenly in their logarithm."""
    each: Any
    for each in (low, high):
        if isinstance(each, bool) or not isinstance(each, int) or abs(each) > MOST_WHOLE:
            raise InvalidValue("end of `runtime.integer`", each, "a whole number of at most 2**53")
    _check_ends("integer", low, high, log=log)
    return Integer(low, high, log)


def choice(*values: Any) -> Choice:
    """One of `values`, which are such as JSON has: numbers, texts, booleans, None, and lists and dictionaries of them."""
    texts = [_check_plain(each, "`runtime.choice`") for each in values]
    if len(set(texts)) < max(1, len(texts)):
        problem = "gives a value twice" if texts else "has no values"
        raise RequestRefused(f"`runtime.choice` {problem}", hint='runtime.choice("adam", "sgd")')
    return Choice(values)


def _real(name: str, low: float, high: float, *, log: bool) -> Real:
    each: Any
    for each in (low, high):
        if isinstance(each, bool) or not isinstance(each, int | float) or not _is_finite(each):
            raise InvalidValue(f"end of `runtime.{name}`", show(each), "a finite number")
    _check_ends(name, low, high, log=log)
    if not math.isfinite(float(high) - float(low)):
        raise InvalidValue(f"range of `runtime.{name}`", f"{low}, {high}", "ends less than 1.79e308 apart")
    return Real(float(low), float(high), log)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond every float
        return False


def _check_ends(name: str, low: float, high: float, *, log: bool) -> None:
    if low >= high:
        raise InvalidValue(f"range of `runtime.{name}`", f"{low}, {high}", "a low end below the high one")
    if log and low <= 0:
        raise InvalidValue(
            f"range of `runtime.{name}`", f"{low}, {high}", "ends above 0: a logarithm is of positive numbers"
        )


def _check_plain(value: Any, where: str) -> str:
    try:
        if is_json(value) and not any(find_unencodable(value)):
            return spell(value)
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        pass
    raise InvalidValue(
        f"value of {where}",
        show(value),
        "a value of JSON: a finite number, a text of UTF-8, True, False, None, or a list or dictionary with texts as keys of them",
        hint="name it by a text, and let the function make it",
    )


def show(value: Any) -> str:
    """A value as an error names it."""
    try:
        return f"{value!r:.100}"
    except Exception:  # a number of thousands of digits, or a class of the user's
        return f"a value of type {type(value).__name__}"


def spell(value: Any) -> str:
    """The JSON of a value, by which values are compared: 1, 1.0 and True differ."""
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Searched parameters and constants, each in the order of its names."""

    variables: Mapping[str, Variable]
    constants: Mapping[str, Any]

    def make_variant(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the function."""
        return dict(sorted([*self.constants.items(), *params.items()]))

    def take_params(self, variant: Mapping[str, Any]) -> dict[str, Any]:
        """The searched part of a variant."""
        return {name: variant[name] for name in self.variables}

    def describe(self) -> dict[str, Any]:
        """The space as JSON; equal for equal spaces, whatever the order of their names."""
        told: dict[str, Any] = {name: {"value": each} for name, each in self.constants.items()}
        for name, variable in self.variables.items():
            match variable:
                case Choice(values):
                    told[name] = {"choice": list(values)}
                case Integer(low, high, log):
                    told[name] = {"integer": [low, high], **({"log": True} if log else {})}
                case Real(low, high, log):
                    told[name] = {"log" if log else "uniform": [low, high]}
        return dict(sorted(told.items()))


def read_space(space: Mapping[str, Any]) -> Space:
    """Read what a caller of `tune` gives. Raises `RequestRefused` if it has nothing to search."""
    if not isinstance(space, Mapping):
        raise InvalidValue("space", f"{space!r:.100}", 'a dictionary, such as {"lr": runtime.log(1e-5, 1e-1)}')
    for name in space:
        if type(name) is not str or not name or any(find_unencodable(name)):
            raise InvalidValue("name in the space", repr(name), "a text")
    variables = {name: each for name, each in sorted(space.items()) if isinstance(each, Variable)}
    constants = {name: each for name, each in sorted(space.items()) if name not in variables}
    for name, value in constants.items():
        _check_plain(value, f"`{name}` in the space")
    if not variables:
        raise RequestRefused(
            "the space has nothing to search" + (": all its values are constants" if constants else ""),
            hint='{"lr": runtime.log(1e-5, 1e-1), "layers": runtime.integer(1, 8)}',
        )
    return Space(variables=variables, constants=constants)
