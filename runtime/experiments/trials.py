"""The trials of a study: what was asked, how each ended, and the number that was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from runtime.errors import RequestRefused, WorkFailed, explain_briefly
from runtime.experiments.space import Space, show
from runtime.units import count_noun

if TYPE_CHECKING:
    import optuna


class TrialState(StrEnum):
    RUNNING = "running"
    """Asked and not ended: it waits, runs, or is tried again after a preemption."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    number: int
    params: Mapping[str, Any]
    """The searched parameters, by name; the function's variant has the constants as well."""
    value: float | None = None
    state: TrialState = TrialState.RUNNING
    error: str | None = None
    """Why a trial has no value."""


class NoNumber(Exception):
    """A returned value in which there is no number to compare trials by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The number that counts, and whether more or less of it is better."""

    measure: str
    maximize: bool = False

    def describe(self) -> dict[str, str]:
        return {"maximize" if self.maximize else "minimize": self.measure}

    def read(self, value: Any) -> float:
        """The number in what a function returned: the value itself, or of a dictionary the entry of that name.

        Raises `NoNumber` for anything that is not a finite number.
        """
        where = ""
        if isinstance(value, Mapping):
            if self.measure not in value:
                named = ", ".join(f"`{each}`" for each in list(value)[:10])
                raise NoNumber(f"the function returned no `{self.measure}`, but {named or 'nothing'}")
            value, where = value[self.measure], f" as `{self.measure}`"
        number = None
        if not isinstance(value, str | bytes | bool):
            try:
                number = float(value)  # NumPy's and PyTorch's numbers, too
            except Exception:
                number = None
        if number is None or not math.isfinite(number):
            raise NoNumber(f"the function returned {show(value)}{where}, which is no finite number")
        return number


def end_trial(trial: Trial, take: Callable[[], Any], objective: Objective) -> Trial:
    """Return the trial with its end, where `take` returns the function's value or raises what stands for it."""
    try:
        value = objective.read(take())
    except CancelledError:
        return _ended(trial, TrialState.CANCELLED, "it was cancelled")
    except NoNumber as problem:
        return _ended(trial, TrialState.FAILED, str(problem))
    except (Exception, SystemExit) as problem:
        return _ended(trial, TrialState.FAILED, explain_briefly(problem))
    return Trial(number=trial.number, params=trial.params, value=value, state=TrialState.SUCCEEDED)


def _ended(trial: Trial, state: TrialState, error: str) -> Trial:
    return Trial(number=trial.number, params=trial.params, state=state, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The trials of a `runtime.tune` by their numbers."""

    name: str
    trials: Sequence[Trial]
    space: Space = field(repr=False)
    objective: Objective = field(repr=False)

    @property
    def best(self) -> Trial:
        """The trial with the best value, the earlier one of two. Raises `WorkFailed` if none has a value."""
        valued = [each for each in self.trials if each.value is not None]
        if not valued:
            said = [f"trial {each.number}: {each.error}" for each in self.trials if each.error]
            raise WorkFailed(f"no trial of study `{self.name}` has a value", facts=said[:3])
        sign = -1 if self.objective.maximize else 1
        return min(valued, key=lambda each: (sign * (each.value or 0.0), each.number))

    def count(self, state: TrialState) -> int:
        return sum(each.state is state for each in self.trials)

    def to_optuna(self) -> optuna.Study:
        """An optuna study in memory with the same trials, for its plots and analyses."""
        from runtime.experiments.sampling import build_study

        return build_study(self.trials, self.space, self.objective)

    def __repr__(self) -> str:
        found = {state: self.count(state) for state in TrialState}
        told = ", ".join(f"{count} {state}" for state, count in found.items() if count)
        return f"<study {self.name}: {count_noun(len(self.trials), 'trial')}{': ' if told else ''}{told}>"


def read_objective(minimize: str | None, maximize: str | None) -> Objective:
    """Raises `RequestRefused` unless one of them is given, or neither, which minimizes `loss`."""
    if minimize is not None and maximize is not None:
        raise RequestRefused("`minimize` and `maximize` contradict each other", hint="leave one of them out")
    measure = maximize if maximize is not None else "loss" if minimize is None else minimize
    if type(measure) is not str or not measure:
        raise RequestRefused(
            f"`{'minimize' if maximize is None else 'maximize'}` is {measure!r}, expected the name of a number",
            hint='minimize="loss"',
        )
    return Objective(measure=measure, maximize=maximize is not None)
