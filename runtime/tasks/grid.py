"""Grids: `--grid lr=1e-3,1e-4 --grid seed=0:10` is every combination, as one task each."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runtime.errors import InvalidValue, RequestRefused
from runtime.tasks.grid_ranges import FORMS, NoSpread, read_spread
from runtime.tasks.model import CommandEntry, WorkflowEntry

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(-?\d+))?")
MOST_VALUES = 1_000_000
"""The limit of one option; its values are held in memory."""
MOST_COMBINATIONS = 100_000_000
_MOST_DIGITS = 18
_TOO_MANY = "for more, let a program write each combination as a line: `runtime submit --from FILE`"
_VALUES = f"VALUE,VALUE…, START:END (END left out), START:END:STEP, {', '.join(FORMS.values())} or [JSON array]"
ALLOWED = f"NAME=VALUES, and VALUES are {_VALUES}"


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One grid option: its values are text, as a command line has them."""

    name: str
    values: Sequence[str]


@dataclass(frozen=True, slots=True)
class Grid:
    """Every combination of its axes; the last one changes fastest."""

    axes: tuple[GridAxis, ...] = ()

    def __len__(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    def __iter__(self) -> Iterator[dict[str, str]]:
        names = [axis.name for axis in self.axes]
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield dict(zip(names, values, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)


def read_options(grid: Sequence[str], seed: int | None) -> Grid:
    """The grid of a command's `--grid` and `--grid-seed`. Raises as `parse_grid`, and for a seed of no grid."""
    if seed is not None and not grid:
        raise RequestRefused("`--grid-seed` is of a grid, and there is no `--grid`", hint="--grid lr=sample:10:0.0:1.0")
    return parse_grid(grid, seed=seed or 0)


def parse_grid(options: Sequence[str], *, seed: int = 0) -> Grid:
    """The grid of the texts after `--grid`. Raises `InvalidValue`, or `RequestRefused` for a name given twice.

    Random values depend on `seed` and the name of their axis, so the same options are the same grid.
    """
    axes = tuple(_parse_axis(option, seed) for option in options)
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise RequestRefused(
                f"grid `{name}` is given twice", hint=f"put all its values into one: --grid {name}=A,B"
            )
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_COMBINATIONS:
        raise RequestRefused(
            f"the grid has {count:,} combinations, and {MOST_COMBINATIONS:,} at most are taken",
            hint=_TOO_MANY,
        )
    return Grid(axes)


def replace_names(text: str, values: Mapping[str, str]) -> str:
    """`text` with each `{name}` of the grid replaced. Any other brace stays, so JSON passes through."""
    for name, value in values.items():
        if "{" not in text:
            break
        text = text.replace("{" + name + "}", value)
    return text


def apply_grid(entry: WorkflowEntry | CommandEntry, values: Mapping[str, str]) -> WorkflowEntry | CommandEntry:
    """The entry of one combination: `{name}` replaced, and for a workflow `--name=value` added."""
    match entry:
        case WorkflowEntry(project, workflow, args):
            replaced = tuple(replace_names(arg, values) for arg in args)
            return WorkflowEntry(project, workflow, (*replaced, *(f"--{name}={values[name]}" for name in values)))
        case CommandEntry(command):
            return CommandEntry(tuple(replace_names(word, values) for word in command))


def check_grid(grid: Grid, entry: WorkflowEntry | CommandEntry, *, key: str | None = None) -> None:
    """Refuse a grid if its combinations would not be separate tasks."""
    texts = [key] if key is not None else list(entry.command) if isinstance(entry, CommandEntry) else None
    if texts is None:
        return
    for axis in grid.axes:
        if not any("{" + axis.name + "}" in text for text in texts):
            where = "key" if key is not None else "command"
            raise RequestRefused(
                f"grid `{axis.name}` appears nowhere in the {where}, so its values would all be the same task",
                hint=f"write `{{{axis.name}}}` where its value belongs",
            )


def _parse_axis(option: str, seed: int) -> GridAxis:
    name, equals, text = option.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise InvalidValue("grid", option, ALLOWED)
    return parse_axis(name, text, seed=seed)


def parse_axis(name: str, text: str, *, seed: int = 0) -> GridAxis:
    """The axis of a name and the text of its values. Raises `InvalidValue`."""
    option = f"{name}={text}"
    if text.startswith("["):
        return GridAxis(name, _json_values(option, text))
    rng = random.Random(f"{seed}:{name}")
    pieces = [_piece_values(option, piece, rng) for piece in text.split(",")]
    if sum(map(len, pieces)) > MOST_VALUES:
        raise InvalidValue("grid", _shorten(option), f"{MOST_VALUES:,} values at most", hint=_TOO_MANY)
    return GridAxis(name, tuple(str(value) for values in pieces for value in values))


def _shorten(option: str) -> str:
    return option if len(option) <= 200 else f"{option[:200]}…"


def _piece_values(option: str, piece: str, rng: random.Random) -> Sequence[int] | Sequence[str]:
    """Return the values of a piece; those of a range are not spelled yet, as they may be too many."""
    try:
        spread = read_spread(piece, most=MOST_VALUES, rng=rng)
    except NoSpread as problem:
        meant = problem.hint
        raise InvalidValue(
            "grid",
            _shorten(option),
            problem.allowed,
            hint=f"{meant}; a text of that form is written as [{json.dumps(piece)}]" if meant else None,
        ) from None
    if spread is not None:
        return spread
    if matched := _RANGE.fullmatch(piece):
        if max(len(number or "") for number in matched.groups()) > _MOST_DIGITS:
            raise InvalidValue(
                "grid", _shorten(option), f"a range of numbers of at most {_MOST_DIGITS} characters", hint=_TOO_MANY
            )
        start, end, step = int(matched[1]), int(matched[2]), int(matched[3] or 1)
        numbers = range(start, end, step) if step else range(0)
        if not numbers:
            raise InvalidValue("grid", option, f"a range that is not empty; `{piece}` holds no number")
        return numbers
    if not piece:
        raise InvalidValue("grid", option, f'{ALLOWED}; an empty value is written as [""]')
    return [piece]


def _json_values(option: str, text: str) -> tuple[str, ...]:
    try:
        values = json.loads(text)
    except ValueError as problem:
        raise InvalidValue("grid", option, f"{ALLOWED}; the array cannot be read: {problem}") from None
    if not values:
        raise InvalidValue("grid", option, "an array with at least one value")
    return tuple(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
