"""Decisions of a world, each drawn from one seed, written to a tape and read back from it.

A decision is named by who took it, its kind and how often that process took one of this kind before, and only harmful
decisions are on the tape. So a shorter tape changes nothing but what was taken out, which makes it easy to shrink.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import ClassVar

Tape = dict[tuple[str, str, int], int]
"""By process, kind and number: the outcome of a decision, if it is not 0."""


class Choice:
    """A decision with weighted outcomes. Outcome 0 is always the harmless one.

    `kinds` names the kind of fault of each further outcome, if they are not all of one kind.
    """

    known: ClassVar[dict[str, Choice]] = {}

    def __init__(self, name: str, *weights: float, fault: bool = True, kinds: Sequence[str] = ()) -> None:
        self.name, self.fault = name, fault
        self.kinds = ("", *(kinds or [name] * (len(weights) - 1)))
        self.limits = tuple(accumulate(weights))
        self.harmless, self.total = self.limits[0], self.limits[-1]
        self.known[name] = self


class Chance:
    """Decides, from a seed or from a tape; keeps the tape of what it decided."""

    def __init__(self, seed: int, script: Tape | None = None, *, wild: bool = False) -> None:
        """`wild` switches every fault on; else each seed has a subset of its own."""
        self._random = random.Random(seed).random
        self._script = script
        self._taken: dict[tuple[str, str], int] = {}
        self.tape: Tape = {}
        self.healed = False
        """No fault happens any more."""
        kinds = {kind for choice in Choice.known.values() if choice.fault for kind in choice.kinds}
        self._off = set() if wild else {kind for kind in kinds if lacks(seed, kind)}

    def calm(self, *kept: str) -> None:
        """Switch every fault off, except for the kinds `kept`."""
        self._off = {kind for each in Choice.known.values() if each.fault for kind in each.kinds} - {*kept}

    def draw(self, who: str, choice: Choice) -> int:
        key = who, choice.name
        number = self._taken.get(key, 0)
        self._taken[key] = number + 1
        if self._script is not None:
            picked = min(self._script.get((who, choice.name, number), 0), len(choice.limits) - 1)
            if choice.fault and self.healed:
                return 0
        else:
            at = self._random() * choice.total
            if at < choice.harmless or (choice.fault and self.healed):
                return 0
            picked = min(bisect_right(choice.limits, at), len(choice.limits) - 1)
            if choice.fault and choice.kinds[picked] in self._off:
                return 0
        if picked:
            self.tape[who, choice.name, number] = picked
        return picked


def lacks(seed: int, kind: str) -> bool:
    """Whether a seed's world has no fault of this kind: half of them, whatever other kinds there are."""
    return hashlib.blake2b(f"{seed} {kind}".encode(), digest_size=1).digest()[0] < 128


def write_tape(tape: Tape) -> str:
    """Spell a tape in one line: `w1:kill:3=1 w1:latency:7=2`."""
    return " ".join(f"{who}:{kind}:{number}={picked}" for (who, kind, number), picked in tape.items())


def read_tape(text: str) -> Tape:
    """Read what `write_tape` wrote."""
    return dict(_read(word) for word in text.split())


def _read(word: str) -> tuple[tuple[str, str, int], int]:
    name, _, picked = word.rpartition("=")
    who, kind, number = name.split(":")
    return (who, kind, int(number)), int(picked)


def parts(items: Sequence[tuple[str, str, int]], size: int) -> Iterator[Sequence[tuple[str, str, int]]]:
    """Cut a list into pieces of `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
