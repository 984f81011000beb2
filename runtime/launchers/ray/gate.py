"""Whether the runs of a driver may take the places that Ray gives them, or let runs of higher priority go first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from runtime.launchers.ray.priority import Claim, Demand, describe_ahead, find_ahead

_T = TypeVar("_T")


class Claims(Protocol):
    """The board of a head."""

    def write(self, claim: Claim) -> None: ...

    def read(self) -> list[Claim]: ...

    def close(self) -> None: ...


class Gate:
    """The claim of a driver. It is closed while its runs let another go first; then none of them asks Ray for a place.

    A failure here orders nothing and stops no run. Every method may be called from several threads.
    """

    def __init__(
        self,
        demand: Demand,
        board: Claims | None,
        list_totals: Callable[[], Sequence[Mapping[str, float]]],
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`list_totals` returns the resources of each living node."""
        self.demand = demand
        self.behind: Claim | None = None
        """The claim that goes first while the gate is closed."""
        self._board, self._list_totals, self._say, self._clock = board, list_totals, say, clock
        self._make: Callable[[], Claims] | None = None
        self._asking: dict[int, float] = {}
        self._taken_at = float("-inf")
        self._said = False
        self._lock = threading.RLock()

    def open(self, make: Callable[[], Claims]) -> None:
        """Show the claim on a board, from now on or as soon as the board can be made."""
        self._make = make
        self._board = self._guard(make)

    def ask(self, index: int) -> None:
        """Note that a run waits for a place from now on, if it did not wait before."""
        with self._lock:
            if index not in self._asking:
                self._asking[index] = self._clock()
                self._write()

    def leave(self, index: int) -> None:
        """Note that a run does not wait any more."""
        with self._lock:
            if self._asking.pop(index, None) is not None:
                self._write()

    def decide(self, index: int) -> bool:
        """Take the place that Ray has given a run, or close the gate and return False: the caller releases the place."""
        with self._lock:
            self.behind = self._try(self._find_ahead)
            if self.behind is None:
                self._taken_at = self._clock()
                self._asking.pop(index, None)
                self._write()
            return self.behind is None

    def poll(self) -> None:
        """Open a closed gate if nobody goes first any more, and show the claim again; to be called every few seconds.

        A claim that is shown once would be lost with a file that was removed, or that a full disk refused.
        """
        with self._lock:
            if self._board is None and self._make is not None:
                self._board = self._guard(self._make)
            self._write()
            if self.behind is not None:
                self.behind = self._try(self._find_ahead)

    def report(self) -> dict[str, Any]:
        """Return lines on the runs that go `before` ours, and the job `behind` which they wait if the gate is closed."""
        with self._lock:
            before = self._try(lambda board: describe_ahead(self.demand, board.read())) or []
            if self.behind is None:
                return {"before": before}
            first = self.behind.demand
            return {
                "before": before,
                "behind": {"job": first.job, "owner": first.owner, "priority": first.priority.value},
            }

    def close(self) -> None:
        self._try(lambda board: board.close())
        self._board = self._make = None

    def _find_ahead(self, board: Claims) -> Claim | None:
        return find_ahead(self.demand, board.read(), self._list_totals(), now=self._clock())

    def _write(self) -> None:
        since = max(next(iter(self._asking.values()), 0.0), self._taken_at)
        claim = Claim(demand=self.demand, waiting=len(self._asking), since=since)
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
