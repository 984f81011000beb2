"""The shortest tape that still breaks a law: takes out decisions, ever fewer at a time, and makes the others milder."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from tests.simulation.choices import Tape, parts

Key = tuple[str, str, int]
Breaks = Callable[[Tape], str | None]
"""The law that a tape breaks."""


def shrink(breaks: Breaks, tape: Tape, law: str, *, patience_s: float = 60.0) -> Tape:
    """Return a tape that breaks `law` like `tape` does; from whatever was tried in `patience_s`."""
    until = time.monotonic() + patience_s

    def still(shorter: Tape) -> bool:
        return time.monotonic() < until and breaks(shorter) == law

    def without(some: Collection[Key]) -> Tape:
        return {key: picked for key, picked in tape.items() if key not in some}

    # Most processes, and most kinds of decisions, have nothing to do with it.
    for group in ((0,), (1,), (0, 1)):
        for name in dict.fromkeys(tuple(key[at] for at in group) for key in tape):
            shorter = without({key for key in tape if tuple(key[at] for at in group) == name})
            if still(shorter):
                tape = shorter
    size = max(1, len(tape) // 2)
    while True:
        before = len(tape)
        for some in list(parts(list(tape), size)):
            shorter = without(set(some))
            if still(shorter):
                tape = shorter
        if size == 1 and len(tape) == before:
            break
        size = max(1, size // 2)
    for key in list(tape):
        for milder in range(1, tape[key]):
            if still({**tape, key: milder}):
                tape = {**tape, key: milder}
                break
    return tape
