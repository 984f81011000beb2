"""Results as a table: the columns that a row has, conditions on them, and their order.

A column is a field of the row (`state`), a parameter (`lr`), a metric (`loss`, `loss.min`, `loss.max`), or a key of the value
(`value.accuracy`). `params.lr` and `metrics.lr` name what two of them share.
"""

from __future__ import annotations

import heapq
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol, TypeVar

from runtime.errors import InvalidValue, UnknownName
from runtime.json_values import encode

_CONDITION: Final = re.compile(r"\s*(.+?)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*", re.DOTALL)
_APART: Final = ("params", "metrics", "metric_ranges")


class ResultRow(Protocol):
    """A task or run with what it returned and reported; a value class."""

    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def metric_ranges(self) -> Mapping[str, Sequence[float]]: ...
    @property
    def value(self) -> Any: ...


R = TypeVar("R", bound=ResultRow)


def find_cell(row: ResultRow, name: str) -> Any:
    """Return the cell of a row in the column `name`; None if it has none."""
    if name not in _APART and name in _fields(row):
        return getattr(row, name)
    whole, _, rest = name.partition(".")
    for part, found in (("params", row.params), ("metrics", row.metrics)):
        if name in found:
            return found[name]
        if whole == part and rest in found:
            return found[rest]
    metric, _, end = name.removeprefix("metrics.").rpartition(".")
    if metric in row.metric_ranges and end in ("min", "max"):
        return row.metric_ranges[metric][end == "max"]
    if whole == "value" and isinstance(row.value, Mapping):
        return row.value.get(rest)
    return None


def list_names(row: ResultRow) -> Iterator[str]:
    """Yield the columns that a row has."""
    yield from (name for name in _fields(row) if name not in _APART)
    yield from row.params
    for name in row.metrics:
        yield name
        if name in row.metric_ranges:
            yield from (f"{name}.min", f"{name}.max")
    if isinstance(row.value, Mapping):
        yield from (f"value.{name}" for name in row.value)


def has_column(row: ResultRow, name: str) -> bool:
    plain = name.removeprefix("params.").removeprefix("metrics.")
    return any(each in (name, plain) for each in list_names(row))


def _fields(row: ResultRow) -> list[str]:
    return [each.name for each in fields(row)]  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a column with a number or a text. A row without that cell does not meet it."""

    name: str
    compare: str
    value: str

    def holds(self, row: ResultRow) -> bool:
        cell = find_cell(row, self.name)
        if cell is None:
            return False
        number, wanted = _read_number(cell), _read_number(self.value)
        if number is not None and wanted is not None:
            return _COMPARE[self.compare](number, wanted)
        if self.compare in ("=", "==", "!="):
            return (_text(cell) == self.value) is (self.compare != "!=")
        return False


_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def parse_condition(text: str) -> Condition:
    """Read `loss<0.3`, `state=failed`. Raises `InvalidValue`."""
    matched = _CONDITION.fullmatch(text)
    if matched is None:
        raise InvalidValue("where", text, "a column, one of < <= > >= = !=, and a value, such as loss<0.3")
    if matched[2][0] in "<>" and _read_number(matched[3]) is None:
        raise InvalidValue("where", text, f"a number behind `{matched[2]}`, such as loss<0.3")
    return Condition(matched[1], matched[2], matched[3])


def _read_number(cell: object) -> float | None:
    if isinstance(cell, str):
        try:
            return float(cell)
        except ValueError:
            return None
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return None
    try:
        return float(cell)
    except OverflowError:
        return None


def _text(cell: object) -> str:
    if isinstance(cell, str):
        return cell
    return json.dumps(cell, default=encode, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """Which rows are shown, in which order, and how many."""

    where: tuple[Condition, ...] = ()
    sort: str | None = None
    """A column; with `-` before it the greatest comes first."""
    limit: int | None = None
    columns: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The columns that it names."""
        by = [self.sort.removeprefix("-")] if self.sort else []
        return list(dict.fromkeys([*self.columns, *by, *(each.name for each in self.where)]))

    def apply(self, rows: Iterable[R]) -> Iterator[R]:
        """Yield the chosen rows; without an order as they come. Raises `UnknownName` for a column that no row has."""
        met = (row for row in _known(rows, self.names) if all(each.holds(row) for each in self.where))
        if self.sort is None:
            yield from itertools.islice(met, self.limit)
            return
        name, down = self.sort.removeprefix("-"), self.sort.startswith("-")

        def key(row: R) -> tuple[int, Any]:
            return sort_key(find_cell(row, name), down=down)

        yield from sorted(met, key=key) if self.limit is None else heapq.nsmallest(self.limit, met, key=key)


def sort_key(cell: object, *, down: bool = False) -> tuple[int, Any]:
    """Return a key that puts numbers first, then texts, then NaN and nothing, also if the greatest comes first."""
    number = None if isinstance(cell, str) else _read_number(cell)
    if number is not None and number == number:
        return 0, -number if down else number
    if cell is None or number is not None:
        return 2, 0
    text = _text(cell)
    return 1, [-ord(letter) for letter in text] + [1] if down else [ord(letter) for letter in text]


def _known(rows: Iterable[R], names: Sequence[str]) -> Iterator[R]:
    """Yield the rows once each name was seen as a column. Raises `UnknownName` if the rows end before."""
    missing, waiting = set(names), list[R]()
    known: dict[str, None] = {}
    rows = iter(rows)
    for row in rows:
        missing = {name for name in missing if not has_column(row, name)}
        waiting.append(row)
        if not missing:
            break
        known.update(dict.fromkeys(list_names(row)))
    if missing and waiting:
        name = next(each for each in names if each in missing)
        raise UnknownName("column", name, list(known), where="in these results", hint="choose one of these")
    yield from waiting
    yield from rows
