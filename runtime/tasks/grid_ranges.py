"""Numbers of a grid's axis by two ends and a count: `lin` and `log` are even, `sample` and `logsample` random.

All are rounded to 12 significant digits and spelled as Python spells them, so that a text is short and reads back as the same
number. If both ends are written as whole numbers, random numbers are whole and differ from each other, and an even one is
spelled without a point if it is whole.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from typing import Final

FORMS: Final = {
    "lin": "lin:LO:HI:N",
    "log": "log:LO:HI:N",
    "sample": "sample:N:LO:HI",
    "logsample": "logsample:N:LO:HI",
}
_NUMBER: Final = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_WHOLE: Final = re.compile(r"[-+]?\d{1,18}")
_MOST_LISTED: Final = 1_000_000
"""Most whole numbers between two ends that are drawn from by a key for each; of more, equal draws are repeated."""
_MOST_LETTERS: Final = 200
"""Longest text that may be meant as a form of StudioML."""


class NoSpread(ValueError):
    """A text that is meant as one of `FORMS` and is none; the message names the allowed forms. `hint` is the text that was probably meant."""

    def __init__(self, allowed: str, hint: str | None = None) -> None:
        super().__init__(allowed)
        self.allowed, self.hint = allowed, hint


def read_spread(text: str, *, most: int, rng: random.Random) -> list[str] | None:
    """Return the numbers of a form, spelled; None for a text that is none. Raises `NoSpread`."""
    form, colon, rest = text.partition(":")
    if not colon or form not in FORMS:
        _refuse_foreign(text)
        return None
    parts = rest.split(":")
    if len(parts) != 3:
        raise NoSpread(FORMS[form])
    count_text, low_text, high_text = parts if form.endswith("sample") else (parts[2], parts[0], parts[1])
    if not re.fullmatch(r"\d{1,18}", count_text) or not 1 <= int(count_text) <= most:
        raise NoSpread(f"{FORMS[form]} with a count N of 1 to {most:,}")
    low, high, count = _read_end(form, low_text), _read_end(form, high_text), int(count_text)
    if low > high or (low == high and count > 1):
        raise NoSpread(f"{FORMS[form]} with LO below HI", None if low == high else _swap(form, parts))
    if form.startswith("log") and low <= 0:
        raise NoSpread(f"{FORMS[form]} with LO above 0: a logarithm is of positive numbers")
    whole = bool(_WHOLE.fullmatch(low_text) and _WHOLE.fullmatch(high_text))
    if form in ("lin", "log"):
        return [_spell(each, whole=whole) for each in _space(low, high, count, log=form == "log")]
    log = form == "logsample"
    if not whole:
        return [_spell(min(max(_round(_place(low, high, rng.random(), log)), low), high)) for _ in range(count)]
    first, last = int(low_text), int(high_text)
    if count > last - first + 1:
        raise NoSpread(
            f"at most {last - first + 1:,} numbers of {first} to {last}: whole ones are not repeated",
            f"write the ends with a point for numbers between the whole ones: {form}:{count}:{first}.0:{last}.0",
        )
    return [str(each) for each in _draw_whole(first, last, count, log=log, rng=rng)]


def _read_end(form: str, text: str) -> float:
    number = float(text) if re.fullmatch(_NUMBER, text) else math.inf
    if not math.isfinite(number):
        raise NoSpread(f"{FORMS[form]} with finite numbers LO and HI")
    return number


def _swap(form: str, parts: list[str]) -> str:
    first, second, third = parts
    return f"{form}:{first}:{third}:{second}" if form.endswith("sample") else f"{form}:{second}:{first}:{third}"


def _space(low: float, high: float, count: int, *, log: bool) -> list[float]:
    inner = [_round(_place(low, high, number / (count - 1), log)) for number in range(1, count - 1)]
    return [low, *inner, high][:count]


def _place(low: float, high: float, share: float, log: bool) -> float:
    """The number at a share of the way from `low` to `high`."""
    if log:
        return math.exp(math.log(low) * (1 - share) + math.log(high) * share)
    return low * (1 - share) + high * share


def _draw_whole(first: int, last: int, count: int, *, log: bool, rng: random.Random) -> list[int]:
    """Draw different whole numbers. `random()` is the one method whose numbers stay the same in later versions of Python."""
    size = last - first + 1
    if size <= _MOST_LISTED:
        # The smallest of exponential keys, by the weight of each number, are a draw without repetition.
        keys = (
            (-math.log(1 - rng.random()) / (math.log1p(1 / number) if log else 1.0), number)
            for number in range(first, last + 1)
        )
        return [number for _, number in heapq.nsmallest(count, keys)]
    found: dict[int, None] = {}
    while len(found) < count:
        share = rng.random()
        drawn = int(_place(first, last + 1, share, log)) if log else first + int(share * size)
        found[min(max(drawn, first), last)] = None
    return list(found)


def _round(number: float) -> float:
    return float(f"{number:.12g}")


def _spell(number: float, *, whole: bool = False) -> str:
    return str(int(number)) if whole and number.is_integer() else repr(number)


def _refuse_foreign(text: str) -> None:
    """Refuse the forms of StudioML, whose end is another than ours, and ranges of numbers with a point."""
    if text.count(":") != 2 or len(text) > _MOST_LETTERS or re.fullmatch(r"[-\d:]+", text):
        return
    number, flag = f"({_NUMBER})", r"[ular]*"
    if found := re.fullmatch(f"{number}:([lu])(\\d+):{number}", text):
        low, kind, count, high = found.groups()
    elif found := re.fullmatch(f"{number}:{number}:(?:([lu])(\\d+)|(\\d+)({flag}l{flag}))", text):
        low, high, kind = found[1], found[2], found[3] or "l"
        count = found[4] or found[5]
    elif found := re.fullmatch(f"{number}:{number}:{number}", text):
        low, step, high = found.groups()
        raise NoSpread(
            "a range START:END:STEP of whole numbers", _suggest_even(float(low), float(step), float(high), low, high)
        )
    else:
        return
    raise NoSpread(f"{FORMS['log']} or {FORMS['lin']}", f"{'log' if kind == 'l' else 'lin'}:{low}:{high}:{count}")


def _suggest_even(low: float, step: float, high: float, low_text: str, high_text: str) -> str:
    steps = (high - low) / step if step else -1
    if 1 <= steps <= 10_000:  # StudioML's LO:STEP:HI
        return f"lin:{low_text}:{high_text}:{math.floor(steps + 1e-9) + 1}"
    return FORMS["lin"]
