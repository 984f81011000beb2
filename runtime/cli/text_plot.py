"""Pictures of curves, points and bars as lines of text: in Braille dots or blocks, and in ASCII where a terminal has no others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runtime.cli.output import fit_text
from runtime.client.metric_series import Curve

STYLES: Final = ("cyan", "yellow", "green", "red", "blue", "bold", "dim", "cyan")
"""Styles of the curves, in their order."""
MARKS: Final = "*o+x#@%&"
"""The same without colours: a letter for each."""
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille letter, by column and row: https://www.unicode.org/charts/PDF/U2800.pdf"""
_NARROWEST: Final = 20
_LOWEST: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """How much room a picture has, and what its terminal can show."""

    width: int = 80
    height: int = 20
    """Rows of the picture itself."""
    unicode: bool = True
    paint: Callable[[str, str], str] | None = None
    """Marks a text for a style; None without colours."""

    def dress(self, text: str, style: str) -> str:
        return self.paint(text, style) if self.paint is not None else text


def draw_curves(curves: Sequence[Curve], *, over: str, canvas: Canvas, lines: bool = True) -> Iterator[str]:
    """Yield the rows of a picture with its axes, and a line about each curve. `lines` joins the points of a curve."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        yield "no finite number was reported"
        return
    left, right = _widen(min(x for x, _ in points), max(x for x, _ in points))
    low, high = _widen(min(y for _, y in points), max(y for _, y in points))
    # At the edges of the picture; for a single value they are wider than the numbers.
    top, bottom = f"{high:.4g}", f"{low:.4g}"
    margin = max(len(top), len(bottom))
    width, height = max(_NARROWEST, canvas.width - margin - 2), max(_LOWEST, canvas.height)
    grid = _Grid(
        width, height, canvas, dots=lines and canvas.unicode and (canvas.paint is not None or len(curves) == 1)
    )
    for place, curve in enumerate(curves):
        scaled = [(_scale(x, left, right), 1 - _scale(y, low, high)) for x, y in curve.points]
        grid.add(scaled, place, lines=lines)
    bar, corner, dash = ("│", "└", "─") if canvas.unicode else ("|", "+", "-")
    for row in range(height):
        label = top if row == 0 else bottom if row == height - 1 else ""
        yield f"{label:>{margin}} {bar}{grid.render(row)}".rstrip()
    yield f"{'':>{margin}} {corner}{dash * width}"
    start, end = f"{left:.6g}", f"{right:.6g}"
    middle = f"{over:^{max(0, width - len(start) - len(end))}}"
    yield f"{'':>{margin}}  {start}{middle}{end}"
    for place, curve in enumerate(curves):
        yield from _legend(curve, place, grid, canvas)


def _legend(curve: Curve, place: int, grid: _Grid, canvas: Canvas) -> Iterator[str]:
    numbers = [y for _, y in curve.points]
    span = f", {min(numbers):.4g} to {max(numbers):.4g}" if numbers else ", no finite number"
    mark = canvas.dress(grid.mark(place), STYLES[place % len(STYLES)])
    text = fit_text(f"{curve.label}: last {curve.last:.4g}{span}", max(_NARROWEST, canvas.width - 4))
    yield f"  {mark} {text}"


class _Grid:
    """The cells of a picture: dots of Braille letters, or a mark for each curve."""

    def __init__(self, width: int, height: int, canvas: Canvas, *, dots: bool) -> None:
        self._width, self._height, self._canvas, self._dots = width, height, canvas, dots
        self._across, self._down = (2, 4) if dots else (1, 1)
        self._bits = [[0] * width for _ in range(height)]
        self._owners: list[list[int]] = [[-1] * width for _ in range(height)]

    def mark(self, place: int) -> str:
        return "⣿" if self._dots else MARKS[place % len(MARKS)]

    def add(self, points: Sequence[tuple[float, float]], place: int, *, lines: bool) -> None:
        across, down = self._width * self._across - 1, self._height * self._down - 1
        cells = [(round(x * across), round(y * down)) for x, y in points]
        for before, cell in zip([cells[0], *cells] if cells else [], cells, strict=False):
            for x, y in _line(before, cell) if lines else [cell]:
                self._set(x, y, place)

    def _set(self, x: int, y: int, place: int) -> None:
        column, row = x // self._across, y // self._down
        if self._dots:
            self._bits[row][column] |= _DOTS[x % 2][y % 4]
        self._owners[row][column] = place

    def render(self, row: int) -> str:
        parts = []
        for bits, owner in zip(self._bits[row], self._owners[row], strict=True):
            if owner < 0:
                parts.append(" ")
                continue
            letter = chr(0x2800 + bits) if self._dots else MARKS[owner % len(MARKS)]
            parts.append(self._canvas.dress(letter, STYLES[owner % len(STYLES)]))
        return "".join(parts)


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the cells from `start` to `end`."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    for step in range(steps + 1):
        part = step / steps if steps else 0
        yield round(start[0] + part * (end[0] - start[0])), round(start[1] + part * (end[1] - start[1]))


def _scale(value: float, low: float, high: float) -> float:
    """Return the place of a value between two others, from 0 to 1, without a sum that overflows."""
    return (value / 2 - low / 2) / (high / 2 - low / 2)


def _widen(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis; for a single value some room around it."""
    if high / 2 - low / 2 > sys.float_info.min:
        return low, high
    room = abs(low) / 10 or 1.0
    return max(low - room, -sys.float_info.max), min(high + room, sys.float_info.max)


def draw_bars(pairs: Sequence[tuple[Any, float]], *, canvas: Canvas) -> Iterator[str]:
    """Yield a line for each name: the name, a bar from the least of the numbers, or from zero, and the number."""
    if not pairs:
        yield "no finite number was reported"
        return
    names = [fit_text(str(name), canvas.width // 3) for name, _ in pairs]
    margin = max(map(len, names))
    numbers = [number for _, number in pairs]
    low, high = _widen(min(0.0, *numbers), max(0.0, *numbers))
    room = max(_LOWEST, canvas.width - margin - 14)
    for name, number in zip(names, numbers, strict=True):
        bar = ("█" if canvas.unicode else "#") * round(room * _scale(number, low, high))
        yield f"{name:>{margin}} {canvas.dress(bar, STYLES[0])} {number:.4g}"
