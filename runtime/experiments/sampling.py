"""The next point to try, by an optuna study that is made again of our own trials: there is no other storage."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from runtime.errors import InvalidValue, MissingExtra
from runtime.experiments.space import Choice, Integer, Real, Space, spell
from runtime.experiments.trials import Objective, Trial, TrialState

if TYPE_CHECKING:
    import optuna

MakesSampler: TypeAlias = "Callable[[int], optuna.samplers.BaseSampler]"
"""Returns a sampler for a seed."""


def load_optuna() -> Any:
    """Raises `MissingExtra`."""
    try:
        import optuna
    except ImportError:
        raise MissingExtra("`runtime.tune`", "tune") from None
    return optuna


def make_tpe(seed: int) -> optuna.samplers.BaseSampler:
    """The sampler by default, which expects little where a trial is still running."""
    sampler: optuna.samplers.BaseSampler = load_optuna().samplers.TPESampler(seed=seed, constant_liar=True)
    return sampler


def ask(
    trials: Sequence[Trial], space: Space, objective: Objective, *, seed: int, sampler: MakesSampler | None
) -> dict[str, Any]:
    """Return the parameters of the next trial: the same for the same trials and seed."""
    with _quiet():
        made = (sampler or make_tpe)(_seed_of(seed, len(trials)))
        base = load_optuna().samplers.BaseSampler
        if not isinstance(made, base):
            raise InvalidValue("sampler", f"{made!r:.100}", "a function of a seed that returns a sampler of optuna")
        asked = build_study(trials, space, objective, made).ask(_distributions(space))
    return {name: _from_optuna(space, name, value) for name, value in sorted(asked.params.items())}


def _seed_of(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4])


def build_study(
    trials: Sequence[Trial],
    space: Space,
    objective: Objective,
    sampler: optuna.samplers.BaseSampler | None = None,
) -> optuna.Study:
    of = load_optuna()
    states = of.trial.TrialState
    distributions = _distributions(space)
    with _quiet():
        study: optuna.Study = of.create_study(
            sampler=sampler, direction="maximize" if objective.maximize else "minimize"
        )
        study.add_trials(
            [
                of.trial.create_trial(
                    state=_state_of(each, states),
                    params={name: _to_optuna(space, name, value) for name, value in each.params.items()},
                    distributions=distributions,
                    value=each.value,
                    user_attrs={"error": each.error} if each.error else {},
                )
                for each in trials
            ]
        )
    return study


def _state_of(trial: Trial, states: Any) -> Any:
    if trial.state is TrialState.RUNNING:
        return states.RUNNING
    return states.COMPLETE if trial.state is TrialState.SUCCEEDED else states.FAIL


def _distributions(space: Space) -> dict[str, Any]:
    of = load_optuna().distributions
    made = {}
    for name, variable in space.variables.items():
        match variable:
            case Real(low, high, log):
                made[name] = of.FloatDistribution(low, high, log=log)
            case Integer(low, high, log):
                made[name] = of.IntDistribution(low, high, log=log)
            case Choice(values):
                made[name] = of.CategoricalDistribution(_labels(values))
    return made


def _labels(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values as optuna has them: as they are, if it can hold them and tell them apart, and else their JSON."""
    simple = all(value is None or isinstance(value, str | int | float) for value in values)
    return tuple(values) if simple and len(set(values)) == len(values) else tuple(map(spell, values))


def _to_optuna(space: Space, name: str, value: Any) -> Any:
    variable = space.variables[name]
    if not isinstance(variable, Choice):
        return value
    return _labels(variable.values)[[spell(each) for each in variable.values].index(spell(value))]


def _from_optuna(space: Space, name: str, value: Any) -> Any:
    variable = space.variables[name]
    return variable.values[_labels(variable.values).index(value)] if isinstance(variable, Choice) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep optuna's lines about each study, and its warnings about what is experimental, to ourselves."""
    optuna = load_optuna()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
