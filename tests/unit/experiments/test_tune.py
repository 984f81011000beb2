"""`runtime.tune`: trials here, as jobs and in a queue, and a program that may be killed at any moment."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.client.tasks.cancel import cancel_experiment
from runtime.errors import InvalidValue, MissingExtra, QueueUnavailable, RequestRefused, UnknownName, WorkFailed
from runtime.experiments.trials import TrialState
from runtime.experiments.tune import OtherStudy
from runtime.experiments.tune_jobs import StudyDamaged
from runtime.experiments.tune_queues import QueuePlace
from runtime.faults import FaultReached, arm
from runtime.queues.memory import MemoryQueue
from runtime.records import open_records
from tests.experiments_support import open_lab, open_workers

optuna = pytest.importorskip("optuna")

MODULE = """\
import os

def loss(run, variant):
    with open(os.environ["CALLS_OF_TEST"], "a") as opened:
        opened.write("%s %d %r\\n" % (run.name, run.index, variant["x"]))
    return (variant["x"] - 0.3) ** 2

def odd(run, variant):
    if run.index % 3 == 1:
        raise ValueError("%d is odd" % run.index)
    return {"score": variant["x"], "other": 1}
"""
SPACE = {"x": runtime.uniform(0, 1)}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of a project, in the working directory."""
    monkeypatch.setenv("CALLS_OF_TEST", str(tmp_path / "calls"))
    with open_lab("lab_of_tune", MODULE, tmp_path, monkeypatch) as lab:
        yield lab


@pytest.fixture
def worker() -> Iterator[Callable[[], None]]:
    """Starts a worker of the built-in stack."""
    with open_workers() as start:
        yield start


@pytest.fixture(params=("here", "local", "queue:"))
def target(request: pytest.FixtureRequest, lab: Any, worker: Callable[[], None]) -> str:
    if request.param == "queue:":
        worker()
    return str(request.param)


def calls_made(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "calls").read_text().splitlines())


# every target


def test_study_has_every_trial_and_the_best(lab: Any, target: str, tmp_path: Path) -> None:
    study = runtime.tune(lab.loss, SPACE, n=4, parallel=2, target=target)

    assert [each.number for each in study.trials] == [0, 1, 2, 3]
    assert {each.state for each in study.trials} == {TrialState.SUCCEEDED}
    assert [each.value for each in study.trials] == [(each.params["x"] - 0.3) ** 2 for each in study.trials]
    assert study.best == min(study.trials, key=lambda each: each.value or 0)
    assert calls_made(tmp_path) == [f"loss {each.number} {each.params['x']!r}" for each in study.trials]
    assert repr(study) == "<study loss: 4 trials: 4 succeeded>"


def test_failed_trials_count_and_are_never_the_best(lab: Any, target: str) -> None:
    fields: dict[str, Any] = {"max_failures": 1} if target == "queue:" else {}

    study = runtime.tune(lab.odd, {**SPACE, "k": 3}, maximize="score", n=5, target=target, name="odd-2", **fields)

    assert [each.number for each in study.trials if each.state is TrialState.FAILED] == [1, 4]
    assert "ValueError: 1 is odd" in str(study.trials[1].error) or "1 is odd" in str(study.trials[1].error)
    assert study.best.value == max(each.value for each in study.trials if each.value is not None)
    built = study.to_optuna()
    assert [each.state.name for each in built.trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "FAIL"]
    assert (built.best_value, built.direction.name) == (study.best.value, "MAXIMIZE")


# here


def tried(study: Any) -> list[Mapping[str, Any]]:
    return [each.params for each in study.trials]


def parabola(run: Any, variant: Mapping[str, Any]) -> float:
    return float((variant["x"] - 0.3) ** 2)


def test_same_seed_asks_the_same_and_searches(lab: Any) -> None:
    first = runtime.tune(parabola, SPACE, n=40)
    again = runtime.tune(parabola, SPACE, n=40)
    other = runtime.tune(parabola, SPACE, n=40, seed=1)

    assert tried(first) == tried(again)
    assert tried(first)[0] != tried(other)[0]
    assert abs(first.best.params["x"] - 0.3) < 0.05


def test_every_kind_of_variable_stays_in_its_range(lab: Any) -> None:
    variants = []

    def keep(run: Any, variant: dict[str, Any]) -> float:
        variants.append(variant)
        return float(variant["lr"])

    space = {
        "lr": runtime.log(1e-5, 1e-1),
        "n": runtime.integer(1, 8),
        "width": runtime.integer(1, 1024, log=True),
        "which": runtime.choice("a", 1, True, 1.0, None, [1, 2], {"k": [3]}),
        "one": runtime.choice("only"),
        "plain": runtime.choice("adam", "sgd"),
        "data": {"path": "x"},
    }
    study = runtime.tune(keep, space, n=30)

    assert all(1e-5 <= each["lr"] <= 1e-1 and each["n"] in range(1, 9) for each in variants)
    assert all(type(each["width"]) is int and 1 <= each["width"] <= 1024 for each in variants)
    assert {json.dumps(each["which"]) for each in variants} <= {
        '"a"',
        "1",
        "true",
        "1.0",
        "null",
        "[1, 2]",
        '{"k": [3]}',
    }
    assert all(each["data"] == {"path": "x"} and each["one"] == "only" for each in variants)
    assert sorted(variants[0]) == sorted(space)
    assert sorted(study.trials[0].params) == ["lr", "n", "one", "plain", "which", "width"]
    assert {each.params["plain"] for each in study.to_optuna().trials} == {"adam", "sgd"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "the function returned nan, which is no finite number"),
        (float("inf"), "the function returned inf, which is no finite number"),
        (None, "the function returned None, which is no finite number"),
        ("0.5", "the function returned '0.5', which is no finite number"),
        (True, "the function returned True, which is no finite number"),
        pytest.param(10**5000, "the function returned a value of type int, which is no finite number", id="digits"),
        ([1], "the function returned [1], which is no finite number"),
        ({"acc": 1}, "the function returned no `loss`, but `acc`"),
        ({}, "the function returned no `loss`, but nothing"),
        ({"loss": None}, "the function returned None as `loss`, which is no finite number"),
    ],
)
def test_value_that_is_no_number_fails_the_trial(lab: Any, value: Any, said: str) -> None:
    study = runtime.tune(lambda run, variant: value, SPACE, n=2)

    assert [(each.state, each.value, each.error) for each in study.trials] == [(TrialState.FAILED, None, said)] * 2
    with pytest.raises(WorkFailed) as none:
        _ = study.best
    assert none.value.facts == (f"trial 0: {said}", f"trial 1: {said}")


def test_numbers_of_numpy_count(lab: Any) -> None:
    numpy = pytest.importorskip("numpy")

    study = runtime.tune(lambda run, variant: {"loss": numpy.float32(0.5)}, SPACE, n=1)

    assert study.best.value == 0.5


def test_interrupt_here_is_passed_on(lab: Any) -> None:
    def stop(run: Any, variant: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.tune(stop, SPACE)


def test_another_sampler_is_made_for_each_seed(lab: Any) -> None:
    seeds: list[int] = []

    def make(seed: int) -> Any:
        seeds.append(seed)
        return optuna.samplers.RandomSampler(seed=seed)

    first = runtime.tune(parabola, SPACE, n=3, sampler=make)

    assert len(set(seeds)) == 3
    assert tried(first) == tried(runtime.tune(parabola, SPACE, n=3, sampler=make))
    with pytest.raises(InvalidValue, match="sampler"):
        runtime.tune(parabola, SPACE, n=3, sampler=optuna.samplers.RandomSampler(seed=1))
    with pytest.raises(InvalidValue, match="sampler"):
        runtime.tune(parabola, SPACE, n=3, sampler=lambda seed: "tpe")  # type: ignore[arg-type,return-value]


# what is refused


@pytest.mark.parametrize(
    "make",
    [
        lambda: runtime.log(0, 1),
        lambda: runtime.log(1, 0.1),
        lambda: runtime.uniform(1, 1),
        lambda: runtime.uniform(0, float("inf")),
        lambda: runtime.uniform(0, 10**400),
        lambda: runtime.uniform(-1e308, 1e308),
        lambda: runtime.uniform("0", 1),  # type: ignore[arg-type]
        lambda: runtime.integer(0, 8, log=True),
        lambda: runtime.integer(0.5, 8),  # type: ignore[arg-type]
        lambda: runtime.integer(3, 2),
        runtime.choice,
        lambda: runtime.choice("a", "a"),
        lambda: runtime.choice([1], [1]),
        lambda: runtime.choice((1, 2)),
        lambda: runtime.choice(object()),
        lambda: runtime.choice(10**5000),
        lambda: runtime.choice(float("nan")),
        lambda: runtime.choice("a\udcff", "b"),
    ],
)
def test_variable_that_cannot_be_searched_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(RequestRefused):
        make()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"space": {}}, "the space has nothing to search"),
        ({"space": {"k": 3}}, "the space has nothing to search: all its values are constants"),
        ({"space": {**SPACE, "k": (1, 2)}}, r"`\(1, 2\)` is no valid value of `k` in the space"),
        ({"space": {**SPACE, 3: 1}}, "no valid name in the space"),
        ({"space": [1]}, "no valid space"),
        ({"space": {"a\udcff": runtime.uniform(0, 1)}}, "no valid name in the space"),
        ({"minimise": "loss"}, "no keyword named `minimise` of `runtime.tune`"),
        ({"target": "local", "maximise": "reward"}, "no keyword named `maximise`"),
        ({"minimize": "a", "maximize": "b"}, "`minimize` and `maximize` contradict each other"),
        ({"minimize": ""}, "`minimize` is '', expected the name of a number"),
        ({"n": 0}, "`0` is no valid n"),
        ({"parallel": 0}, "`0` is no valid parallel"),
        ({"seed": "x"}, "`x` is no valid seed"),
        ({"resources": {"cpus": 1}}, "`resources` is a field of jobs and tasks"),
        ({"target": "local", "array": {"count": 2}}, "`array` has no place in a study"),
    ],
)
def test_study_that_cannot_be_made_is_refused(lab: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestRefused, match=said):
        runtime.tune(parabola, given.pop("space", SPACE), **given)


def test_trial_that_exits_fails_and_the_others_go_on(lab: Any) -> None:
    def exits(run: Any, variant: Any) -> float:
        if run.index == 1:
            sys.exit("no such data set")
        return float(variant["x"])

    study = runtime.tune(exits, SPACE, n=3)

    assert [(each.state.value, each.error) for each in study.trials] == [
        ("succeeded", None),
        ("failed", "SystemExit: no such data set"),
        ("succeeded", None),
    ]


def test_field_that_no_task_has_is_refused(lab: Any) -> None:
    with pytest.raises(UnknownName, match="nodes"):
        runtime.tune(lab.loss, SPACE, target="queue:", nodes=2)


def test_without_optuna_the_extra_is_named(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)

    with pytest.raises(MissingExtra) as missing:
        runtime.tune(parabola, SPACE, n=1)

    assert missing.value.hint == "pip install 'research-runtime[tune]'"


# made again


@pytest.mark.parametrize("kind", ["local", "queue:"])
def test_study_made_again_goes_on_with_its_trials(
    lab: Any, worker: Callable[[], None], kind: str, tmp_path: Path
) -> None:
    worker()
    first = runtime.tune(lab.loss, SPACE, n=3, parallel=1, target=kind)

    same = runtime.tune(lab.loss, SPACE, n=3, parallel=1, target=kind)
    fewer = runtime.tune(lab.loss, SPACE, n=2, parallel=1, target=kind)
    more = runtime.tune(lab.loss, SPACE, n=5, parallel=1, target=kind)

    assert same.trials == first.trials == fewer.trials
    assert more.trials[:3] == first.trials
    assert tried(more) == tried(runtime.tune(lab.loss, SPACE, n=5))
    made = list(calls_made(tmp_path))
    assert len(made) == 5 + 5


@pytest.mark.parametrize("kind", ["local", "queue:"])
def test_other_study_under_the_same_name_is_refused(lab: Any, worker: Callable[[], None], kind: str) -> None:
    worker()
    runtime.tune(lab.loss, SPACE, n=1, target=kind, name="fit")

    for what, function, given in (
        ("space", lab.loss, {"space": {"x": runtime.uniform(0, 2)}}),
        ("space", lab.loss, {"space": {**SPACE, "k": 1}}),
        ("objective", lab.loss, {"space": SPACE, "maximize": "loss"}),
        ("function", lab.odd, {"space": SPACE}),
    ):
        with pytest.raises(OtherStudy, match="study `fit` exists") as refused:
            runtime.tune(function, n=2, target=kind, name="fit", **given)
        assert refused.value.what == what
        assert refused.value.hint == 'give the new study a name of its own: name="fit-2"'


@pytest.mark.parametrize("file", ["1.json", "study.json"])
@pytest.mark.parametrize("harm", ["cut off", "other", "gone"])
@pytest.mark.daily(2)
def test_study_with_a_damaged_note_names_it_and_starts_nothing(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, harm: str
) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    runtime.tune(lab.loss, SPACE, n=3, target="local", name="fit")
    note = tmp_path / "data" / "studies" / "local" / "fit" / file
    note.unlink() if harm == "gone" else note.write_text('{"it' if harm == "cut off" else "[]")
    before = calls_made(tmp_path)

    with pytest.raises(StudyDamaged) as refused:
        runtime.tune(lab.loss, SPACE, n=4, target="local", name="fit")

    said = "is gone" if harm == "gone" else "is damaged"
    assert refused.value.message == f"study `fit` cannot go on: its note `{note}` {said}"
    assert calls_made(tmp_path) == before


def test_experiment_of_other_tasks_is_no_study(lab: Any) -> None:
    runtime.submit({"command": ["true"]}, experiment="fit", key="0")

    with pytest.raises(OtherStudy, match="its work is another"):
        runtime.tune(lab.loss, SPACE, n=2, target="queue:", name="fit")


@pytest.mark.parametrize("kind", ["local", "queue:"])
def test_changed_code_does_not_mix(
    lab: Any, worker: Callable[[], None], kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker()
    first = runtime.tune(lab.loss, SPACE, n=1, target=kind)
    assert not caplog.messages
    Path("lab_of_tune.py").write_text(MODULE.replace("return (", "return 100 + ("))

    more = runtime.tune(lab.loss, SPACE, n=3, target=kind)

    assert more.trials[0] == first.trials[0]
    assert all((each.value or 100) < 1 for each in more.trials)
    assert ["goes on with the code that it was begun with" in each for each in caplog.messages] == [True]


@pytest.mark.parametrize("kind", ["local", "queue:"])
@pytest.mark.daily(1)
def test_function_defined_again_does_not_mix(
    lab: Any, worker: Callable[[], None], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker()
    runtime.tune(lambda run, variant: 1, SPACE, n=1, target=kind, name="fit")

    study = runtime.tune(lambda run, variant: 2, SPACE, n=2, target=kind, name="fit")

    assert [each.value for each in study.trials] == [1, 1]
    assert ["goes on with the code that it was begun with" in each for each in caplog.messages] == [True]


TOLD = {"function": "f", "objective": {"minimize": "loss"}, "space": {"x": {"uniform": [0, 1]}}}


class Forgetful(MemoryQueue):
    """Fails at the first put, as a service may between the list of the tasks and their publication."""

    failed = False

    def put(self, tasks: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise QueueUnavailable("gone", retryable=False)
        return super().put(tasks)


def test_trials_in_the_parts_of_a_store_are_read_back(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    queue = Forgetful(open_records(f"file:{tmp_path / 'records'}"))
    first, second, third = (QueuePlace(lab.loss, "fit", queue, TOLD, {}) for _ in range(3))
    assert (first.read(), second.read()) == ([], [])

    with pytest.raises(QueueUnavailable):
        first.start(0, {"x": 0.5})

    assert second.start(0, {"x": 0.75}) == {"x": 0.5}
    assert second.start(1, {"x": 0.75}) == {"x": 0.75}
    assert third.read() == [{"x": 0.5}, {"x": 0.75}]
    options = runtime.WorkerOptions(idle_timeout=timedelta(seconds=0.2))
    assert runtime.run_worker(queue, options=options).succeeded == 2
    ends = third.look([0, 1, 2])
    assert {number: end.take() for number, end in ends.items()} == {0: (0.5 - 0.3) ** 2, 1: (0.75 - 0.3) ** 2}
    with pytest.raises(OtherStudy):
        QueuePlace(lab.loss, "fit", queue, {**TOLD, "function": "g"}, {}).read()


def test_trials_of_another_user_are_not_loaded(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(lambda: runtime.tune(lab.loss, SPACE, n=1, target="queue:"))
    monkeypatch.setenv("LOGNAME", "mallory")

    with pytest.raises(OtherStudy, match="its owner is another"):
        runtime.tune(lab.loss, SPACE, n=1, target="queue:")


def cut_off(begin: Callable[[], Any], *, at: str = "tune.started") -> None:
    """Let the first trial come to a fault point, and no further."""
    arm({"RUNTIME_FAULTS": f"{at}=raise"})
    try:
        with pytest.raises(FaultReached):
            begin()
    finally:
        arm({})


def test_cancelled_trial_has_no_value(lab: Any) -> None:
    cut_off(lambda: runtime.tune(lab.loss, SPACE, n=1, target="queue:"))
    with runtime.open_stack() as stack:
        cancel_experiment(stack, "loss", now=datetime.now(UTC))

    study = runtime.tune(lab.loss, SPACE, n=1, target="queue:")

    assert [(each.state, each.error) for each in study.trials] == [(TrialState.CANCELLED, "it was cancelled")]


def test_interrupt_leaves_the_trials_and_says_how_to_come_back(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    def interrupt(seed: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.tune(lab.loss, SPACE, n=1, target="queue:", sampler=interrupt)

    assert "run the same program again to go on" in caplog.messages[0]


@pytest.mark.parametrize(
    ("kind", "at"), [("local", "tune.started"), ("local", "tune.noted"), ("queue:", "tune.started")]
)
def test_later_trials_run_under_the_terms_of_now(
    lab: Any, worker: Callable[[], None], kind: str, at: str, tmp_path: Path
) -> None:
    cut_off(lambda: runtime.tune(lab.loss, SPACE, n=1, target=kind), at=at)
    worker()

    study = runtime.tune(lab.loss, SPACE, n=2, target=kind, time_limit="1h")

    assert [each.state for each in study.trials] == [TrialState.SUCCEEDED] * 2
    assert calls_made(tmp_path) == [f"loss {each.number} {each.params['x']!r}" for each in study.trials]
