"""`runtime.tune`: a function with the parameters that make its number smallest or largest, found by trials.

What was asked for each trial is durable before it begins, under its number, and the first of two that ask is the one that
counts. So the program that tunes may be killed at any moment or run twice: made again, it reads the trials back and goes on.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from runtime.client.functions import name_function
from runtime.client.values import End
from runtime.errors import InfrastructureFailure, InvalidValue, RequestRefused, UnknownName
from runtime.experiments.run import HERE, QUEUE, LocalRun, check_call, refuse_fields
from runtime.experiments.sampling import MakesSampler, ask, load_optuna
from runtime.experiments.space import Space, read_space, spell
from runtime.experiments.trials import Objective, Study, Trial, TrialState, end_trial, read_objective
from runtime.faults import reach
from runtime.sanitize import CleanLogger
from runtime.system import system

FIRST_LOOK_S: Final = 0.02
LAST_LOOK_S: Final = 1.0
MOST_TRIALS: Final = 100_000
KEYWORDS: Final = ("maximize", "minimize", "name", "parallel", "sampler", "seed", "target")


class TrialBackend(Protocol):
    """Where the trials of one study run. Variants are what the function is called with."""

    at_once: bool
    """Whether more than one trial can run at a time."""

    def read(self) -> Sequence[Mapping[str, Any]]:
        """The variants asked so far, by number. Raises `OtherStudy` if they are of another study."""

    def start(self, number: int, variant: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep the variant and start the trial, unless another program was first. Returns the variant that stands.

        Safe to call again for a trial that was started.
        """

    def look(self, open: Sequence[int]) -> dict[int, End]:
        """Return the ends of those of these trials that have ended.

        Raises `InfrastructureFailure` if the backend or the store does not answer.
        """

    def close(self) -> None: ...


class OtherStudy(RequestRefused):
    """Trials under this name that are of another study; nothing was started."""

    def __init__(self, name: str, what: str, then: object, now: object) -> None:
        self.name, self.what = name, what
        super().__init__(
            f"study `{name}` exists, and its {what} is another",
            facts=[f"then {then}", f"now  {now}", "trials of different studies say nothing about each other"],
            hint=f'give the new study a name of its own: name="{name}-2"',
        )


def check_same(name: str, then: object, now: Mapping[str, Any]) -> None:
    """Raise `OtherStudy` unless trials of `then` are those of the study `now`."""
    if not isinstance(then, Mapping):
        raise OtherStudy(name, "work", "no trials of `runtime.tune`", "a study")
    for what, value in now.items():
        if spell(then.get(what)) != spell(value):
            raise OtherStudy(name, what, then.get(what), value)


def warn_of_code(name: str, then: str | None) -> None:
    CleanLogger(__name__).warning(
        "study `%s` goes on with the code that it was begun with, %s, and not with that of now; for that, give the study"
        " another `name`",
        name,
        then or "that of the machines",
    )


def tune(
    function: Callable[..., Any],
    space: Mapping[str, Any],
    *,
    name: str | None = None,
    minimize: str | None = None,
    maximize: str | None = None,
    target: str = HERE,
    n: int = 100,
    parallel: int = 8,
    seed: int = 0,
    sampler: MakesSampler | None = None,
    **fields: Any,
) -> Study:
    """Call `function(run, variant)` for `n` variants of `space`, each chosen by what came out before, and return the study.

    The function returns the number to minimize, or a dictionary with it under the name that `minimize` or `maximize` gives. Up
    to `parallel` trials run at a time. A trial that fails, or returns no finite number, counts among the `n` and never as the
    best. `target` and `fields` are those of `run_experiment`; on `here` trials run one after the other, and are kept in
    memory alone. Elsewhere the same call made again goes on where the last one ended, also with a larger `n`.

    `sampler` makes a sampler of optuna for a seed; by default that is its TPE. Raises `RequestRefused`, and `MissingExtra`
    without optuna.
    """
    load_optuna()
    _check_spelling(fields)
    found, objective = read_space(space), read_objective(minimize, maximize)
    for word, value, most in (("n", n, MOST_TRIALS), ("parallel", parallel, MOST_TRIALS)):
        if type(value) is not int or not 1 <= value <= most:
            raise InvalidValue(word, value, f"a whole number of 1 to {most:,}")
    if type(seed) is not int:
        raise InvalidValue("seed", seed, "a whole number")
    if sampler is not None and not callable(sampler):
        raise InvalidValue(
            "sampler",
            f"{sampler!r:.100}",
            "a function of a seed that returns a sampler of optuna",
            hint="sampler=lambda seed: optuna.samplers.RandomSampler(seed=seed)",
        )
    name = check_call(function, name, target)
    told = {"function": name_function(function), "objective": objective.describe(), "space": found.describe()}
    place = _open(function, name, target, told, fields)
    try:
        trials = _run(place, found, objective, n=n, parallel=parallel, seed=seed, sampler=sampler)
    except KeyboardInterrupt:
        if target != HERE:
            CleanLogger(__name__).warning(
                "study `%s`: its trials run on; run the same program again to go on, or `runtime cancel` to stop them",
                name,
            )
        raise
    finally:
        place.close()
    return Study(name=name, trials=tuple(trials), space=found, objective=objective)


def _check_spelling(fields: Mapping[str, Any]) -> None:
    """Raise `UnknownName` for a keyword of `tune` under a wrong name, which would pass for a field of a job."""
    for word in fields:
        if difflib.get_close_matches(word, KEYWORDS, n=1, cutoff=0.8):
            raise UnknownName("keyword", word, KEYWORDS, where="of `runtime.tune`")


def _open(
    function: Callable[..., Any], name: str, target: str, told: Mapping[str, Any], fields: Mapping[str, Any]
) -> TrialBackend:
    if target == HERE:
        refuse_fields(fields)
        return LocalTrials(function, name)
    if target.startswith(QUEUE):
        from runtime.experiments.tune_queues import QueuePlace

        return QueuePlace(function, name, target.removeprefix(QUEUE), told, fields)
    from runtime.experiments.tune_jobs import JobPlace

    return JobPlace(function, name, target, told, fields)


def _run(
    place: TrialBackend,
    space: Space,
    objective: Objective,
    *,
    n: int,
    parallel: int,
    seed: int,
    sampler: MakesSampler | None,
) -> list[Trial]:
    trials = [Trial(number=number, params=space.take_params(each)) for number, each in enumerate(place.read())]
    parallel = parallel if place.at_once else 1
    pause, began_again = FIRST_LOOK_S, False
    while True:
        ended = _look(place, trials, objective)
        still_open = [each for each in trials if each.state is TrialState.RUNNING]
        if len(trials) - len(still_open) >= n:
            return trials
        if not began_again:
            # A program that was killed may have kept a trial and not started it.
            for each in still_open:
                place.start(each.number, space.make_variant(each.params))
            began_again = True
        for _ in range(min(parallel - len(still_open), n - len(trials))):
            params = ask(trials, space, objective, seed=seed, sampler=sampler)
            reach("tune.asked")
            stands = place.start(len(trials), space.make_variant(params))
            reach("tune.started")
            trials.append(Trial(number=len(trials), params=space.take_params(stands)))
            ended = True
        pause = FIRST_LOOK_S if ended else min(LAST_LOOK_S, pause * 1.5)
        if place.at_once:
            system.sleep(pause)


def _look(place: TrialBackend, trials: list[Trial], objective: Objective) -> bool:
    """Put the ends that are known now into `trials`. Returns whether there were any."""
    running = [each.number for each in trials if each.state is TrialState.RUNNING]
    try:
        ended = place.look(running) if running else {}
    except InfrastructureFailure as problem:
        if not problem.retryable:
            raise
        return False  # it may answer the next time
    for number in sorted(ended):
        trials[number] = end_trial(trials[number], ended[number].take, objective)
    return bool(ended)


class LocalTrials:
    """Trials in this process, one after the other. What they came to is lost with it."""

    at_once = False

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function, self._name = function, name
        self._ended: dict[int, End] = {}

    def read(self) -> Sequence[Mapping[str, Any]]:
        return []

    def start(self, number: int, variant: Mapping[str, Any]) -> Mapping[str, Any]:
        run = LocalRun(self._name, dict(variant), self._function, index=number)
        try:
            value = self._function(run, dict(variant))
            self._ended[number] = End(take=lambda: value)
        except (Exception, SystemExit) as raised:
            problem = raised

            def take() -> Any:
                raise problem

            self._ended[number] = End(take=take, failure=str(problem))
        return variant

    def look(self, open: Sequence[int]) -> dict[int, End]:
        return {number: self._ended.pop(number) for number in open if number in self._ended}

    def close(self) -> None:
        pass
