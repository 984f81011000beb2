"""Decisions of a world, each drawn from one seed, written to a tape and read back from it.

A decision is named by who took it, its kind and how often that process took one of this kind before, and only harmful
decisions are on the tape. So a shorter tape changes nothing but what was taken out, which makes it easy to shrink.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

Tape = dict[tuple[str, str, int], int]
"""By process, kind and number: the outcome of a decision, if it is not 0."""
LOUD = 8
"""How many times as often a kind of fault happens in the worlds that have more of it."""


class Choice:
    """A decision with weighted outcomes. Outcome 0 is always the harmless one.

    `kinds` names the kind of fault of each further outcome, if they are not all of one kind.
    """

    def __init__(self, name: str, *weights: float, fault: bool = True, kinds: Sequence[str] = ()) -> None:
        self.name, self.fault, self.weights = name, fault, weights
        self.kinds = kinds or [name] * (len(weights) - 1)
        self.limits = tuple(accumulate(weights))
        self.harmless, self.total = self.limits[0], self.limits[-1]

    def tuned(self, often: Callable[[str], int]) -> Choice:
        """The same with each kind of fault so many times as often; what a kind never takes, the harmless outcome does."""
        factors = list(map(often, self.kinds))
        faults = [weight * factor for weight, factor in zip(self.weights[1:], factors, strict=True)]
        never = sum(weight for weight, factor in zip(self.weights[1:], factors, strict=True) if not factor)
        return Choice(self.name, self.weights[0] + never, *faults, kinds=self.kinds)


class Chance:
    """Decides, from a seed or from a tape; keeps the tape of what it decided."""

    def __init__(self, seed: int, script: Tape | None = None, *, wild: bool = False) -> None:
        """`wild` switches every fault on; else each seed has a subset of its own, some of them more often."""
        self._random = random.Random(seed).random
        self._often = (lambda kind: 1) if wild else partial(how_often, seed)
        self._tuned: dict[str, Choice] = {}
        self._script = script
        self._taken: dict[tuple[str, str], int] = {}
        self.tape: Tape = {}
        self.healed = False
        """No fault happens any more."""

    def calm(self, *kept: str) -> None:
        """Switch every fault off, except for the kinds `kept`; before anything is drawn."""
        self._often = lambda kind: int(kind in kept)

    def draw(self, who: str, choice: Choice) -> int:
        key = who, choice.name
        number = self._taken.get(key, 0)
        self._taken[key] = number + 1
        if self._script is not None:
            picked = min(self._script.get((who, choice.name, number), 0), len(choice.limits) - 1)
        else:
            tuned = self._tuned.get(choice.name) or self._tune(choice)
            at = self._random() * tuned.total
            if at < tuned.harmless:
                return 0
            picked = min(bisect_right(tuned.limits, at), len(tuned.limits) - 1)
        if choice.fault and self.healed:
            return 0
        if picked:
            self.tape[who, choice.name, number] = picked
        return picked

    def _tune(self, choice: Choice) -> Choice:
        tuned = self._tuned[choice.name] = choice.tuned(self._often) if choice.fault else choice
        return tuned


def how_often(seed: int, kind: str) -> int:
    """By how much a seed's world has more faults of a kind than usual: half of the worlds have none, some have many.

    Each kind is decided by itself, so that a new one leaves the others as they were.
    """
    picked = hashlib.blake2b(f"{seed} {kind}".encode(), digest_size=1).digest()[0]
    return 0 if picked < 128 else LOUD if picked >= 240 else 1


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
