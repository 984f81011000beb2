"""Whether the runs of a driver may take the places that Ray gives them, or let the runs of other drivers go first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from runtime.launchers.ray import turns
from runtime.launchers.ray.cluster_state import NodeView
from runtime.launchers.ray.turns import Better, Chances, Claim, Demand, Spent
from runtime.units import count_noun
from runtime.values import fields

SETTLE_S: Final = 1.0
"""How long a run waits before it decides on a place that a rival of its own priority could get: until then further runs of the
driver may be given places that became free at the same time, and these are shared out together."""
_T = TypeVar("_T")


class Claims(Protocol):
    """The board of a head."""

    def write(self, claim: Claim) -> None: ...

    def read(self) -> list[Claim]: ...

    def close(self) -> None: ...


class Gate:
    """The claim of a driver. It is closed while its runs let another go first; then none of them asks Ray for any place.

    What fails here orders nothing, and stops no run. Every method may be called from several threads.
    """

    def __init__(
        self,
        demand: Demand,
        board: Claims | None,
        view: Callable[[], Mapping[str, NodeView]],
        say: Callable[[str], object],
        budgets: Callable[[], Mapping[str, float]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.demand = demand
        self.behind: Better | None = None
        """The run that goes first while the gate is closed."""
        self._board, self._view, self._say, self._budgets, self._clock = board, view, say, budgets, clock
        self._make: Callable[[], Claims] | None = None
        self._chances = Chances()
        self._asking: dict[int, float] = {}
        self._granted: set[int] = set()
        self._holding: set[int] = set()
        self._taken = 0
        self._place: tuple[str, ...] = ()
        """The place that was given back."""
        self._spots: list[str] = []
        self._said = False
        self._lock = threading.RLock()

    def open(self, make: Callable[[], Claims]) -> None:
        """Take part in the turns of a board, from now or as soon as it can be made."""
        self._make = make
        self._board = self._guard(make)

    def ask(self, index: int) -> None:
        """Note that a run waits for a place from now, if it did not wait before."""
        with self._lock:
            self._holding.discard(index)
            if index not in self._asking:
                self._asking[index] = self._clock()
                self._write()

    def leave(self, index: int) -> None:
        """Note that a run neither waits nor has a place."""
        with self._lock:
            self._asking.pop(index, None)
            self._granted.discard(index)
            self._holding.discard(index)
            self._write()

    def receive(self, index: int) -> bool:
        """Note that Ray has given a run a place; returns whether to wait for `SETTLE_S` before `decide`."""
        with self._lock:
            self._granted.add(index)
            rivals = self._try(lambda board: turns.list_rivals(*self._see(board), len(self._granted) - 1))
            return any(cause is turns.Cause.SHARE for _, cause in rivals or ())

    def decide(self, index: int, place: Sequence[str]) -> bool:
        """Take the place on these nodes, or close the gate and return False: the caller gives the place back."""
        with self._lock:
            self._granted.discard(index)
            better = self._try(lambda board: self._judge(board, place))
            if better is None:
                self._asking.pop(index, None)
                self._holding.add(index)
                self._taken += 1
                self._write()
            else:
                self.behind, self._place, self._spots = better, tuple(place), []
            return better is None

    def look(self) -> None:
        """Look whether a closed gate may open, and show the claim again; to be called every few seconds.

        A claim that is shown once would be lost with a file that was removed, or that a full disk refused.
        """
        with self._lock:
            if self._board is None and self._make is not None:
                self._board = self._guard(self._make)
            self._write()
            if self.behind is not None:
                self.behind, self._spots = self._try(self._poll_again) or (None, [])

    def take_spot(self) -> str | None:
        """A node that has room for a run although the gate is closed, for one caller."""
        with self._lock:
            return self._spots.pop() if self._spots else None

    def tell(self) -> dict[str, Any]:
        """Who waits before our runs, for the driver's note: the one `behind` which they wait if the gate is closed, lines on
        those that go `before` them, and the budget of their owner if it is `spent`."""
        with self._lock:
            told = self._try(self._tell_order) or {"before": []}
            behind = self.behind and {each.name: getattr(self.behind, each.name) for each in fields(self.behind)}
            return {**told, **({"behind": behind} if behind else {})}

    def close(self) -> None:
        self._try(lambda board: board.close())
        self._board = self._make = None

    def _see(self, board: Claims) -> tuple[Claim, list[Claim]]:
        """Our claim and those of others, marked where a budget is used up."""
        (mine, *others), _ = self._read(board)
        return mine, others

    def _read(self, board: Claims) -> tuple[list[Claim], dict[str, Spent]]:
        claims = [self._claim(), *board.read()]
        spent = turns.find_spent(claims, self._budgets())
        return turns.mark_spent(claims, spent), spent

    def _tell_order(self, board: Claims) -> dict[str, Any]:
        (mine, *others), found = self._read(board)
        before = turns.tell_order(mine, others)
        if not mine.spent:
            return {"before": before}
        spent = found[mine.demand.owner]
        line = f"{spent.owner} holds {count_noun(round(spent.held), 'TPU chip')}, and the budget is {spent.budget:g}"
        return {"before": [line, *before], "spent": {each.name: getattr(spent, each.name) for each in fields(spent)}}

    def _judge(self, board: Claims, place: Sequence[str]) -> Better | None:
        (mine, others), spare = self._see(board), len(self._granted)
        if not turns.list_rivals(mine, others, spare):
            return None
        nodes = turns.give_back(self._view(), place, self.demand.need)
        return turns.find_better(mine, others, place, nodes, self._chances, now=self._clock(), spare=spare)

    def _poll_again(self, board: Claims) -> tuple[Better | None, list[str]]:
        (mine, others), nodes, now = self._see(board), self._view(), self._clock()
        better = turns.find_better(mine, others, self._place, nodes, self._chances, now=now)
        if better is None or self.demand.places > 1:
            return better, []
        return better, turns.find_spots(mine, others, nodes, self._chances, now=now)

    def _claim(self) -> Claim:
        return Claim(
            demand=self.demand,
            waiting=len(self._asking),
            since=next(iter(self._asking.values()), 0.0),
            holding=len(self._holding),
            taken=self._taken,
        )

    def _write(self) -> None:
        claim = self._claim()
        self._try(lambda board: board.write(claim))

    def _try(self, do: Callable[[Any], _T]) -> _T | None:
        board = self._board
        return None if board is None else self._guard(lambda: do(board))

    def _guard(self, do: Callable[[], _T]) -> _T | None:
        try:
            return do()
        except Exception as problem:  # the disk's, or Ray's, whose errors have no common base
            if not self._said:
                self._say(f"the order of runs is not kept: {type(problem).__name__}: {problem}")
            self._said = True
            return None
