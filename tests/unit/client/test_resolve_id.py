"""The meaning of ids, prefixes, names and `last`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.client.resolve_id import (
    AmbiguousName,
    IdKind,
    ResolvedId,
    find_submitted,
    get_experiment,
    get_task_id,
    identify,
    recall_last,
    remember_last,
)
from runtime.errors import NotPossible, RequestRefused, StoreUnavailable, UnknownName
from runtime.records.base import ManifestPart
from runtime.testing import sample_task
from tests.verbs_support import Bench


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench.memory() if request.param == "memory" else Bench.sqlite(tmp_path)
    yield bench
    bench.close()


def test_identify_whole_task_id_is_that_task(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)

    assert identify(task.id, bench.records) == ResolvedId(IdKind.TASK, task.id)


@pytest.mark.parametrize("ended", [False, True])
def test_identify_four_letters_of_a_task_are_enough(bench: Bench, ended: bool) -> None:
    task = sample_task(id="t-abcd1")
    bench.put(task)
    if ended:
        bench.succeed()

    assert identify("t-ab", bench.records) == ResolvedId(IdKind.TASK, "t-abcd1")


def test_identify_shared_beginning_lists_the_candidates(bench: Bench) -> None:
    bench.put(sample_task("1", id="t-abcd1"), sample_task("2", id="t-abcd2"))

    with pytest.raises(AmbiguousName) as ambiguous:
        identify("t-abc", bench.records)

    assert [each.name for each in ambiguous.value.candidates] == ["t-abcd1", "t-abcd2"]
    assert "t-abcd1, t-abcd2" in ambiguous.value.facts[0]


def test_identify_whole_id_that_others_begin_with_is_not_ambiguous(bench: Bench) -> None:
    bench.put(sample_task("1", id="t-abcd"), sample_task("2", id="t-abcd2"))

    assert identify("t-abcd", bench.records).name == "t-abcd"


def test_identify_too_short_a_beginning_is_refused(bench: Bench) -> None:
    bench.put(sample_task(id="t-abcd1"))

    with pytest.raises(RequestRefused, match="too short"):
        identify("t-a", bench.records)


def test_identify_unknown_task_names_those_that_begin_alike(bench: Bench) -> None:
    bench.put(sample_task(id="t-abcd1234"))

    with pytest.raises(UnknownName) as unknown:
        identify("t-abcd1299", bench.records)

    assert unknown.value.hint is not None
    assert unknown.value.kind == "task"
    if bench.records.holds_tasks:
        assert unknown.value.hint == "did you mean `t-abcd1234`?"


def test_identify_experiment_by_name_and_by_beginning(bench: Bench) -> None:
    bench.put(sample_task(experiment="sweep-1"), sample_task(experiment="ablation"))

    assert identify("sweep-1", bench.records) == ResolvedId(IdKind.EXPERIMENT, "sweep-1")
    assert identify("swee", bench.records) == ResolvedId(IdKind.EXPERIMENT, "sweep-1")


def test_identify_misspelt_experiment_suggests_the_nearest(bench: Bench) -> None:
    bench.put(sample_task(experiment="sweep-1"))

    with pytest.raises(UnknownName) as unknown:
        identify("swepe-1", bench.records)

    assert unknown.value.hint == "did you mean `sweep-1`?"


def test_identify_experiment_named_like_a_task_is_found(bench: Bench) -> None:
    bench.put(sample_task(experiment="t-shirts"))

    assert identify("t-shirts", bench.records) == ResolvedId(IdKind.EXPERIMENT, "t-shirts")


def test_identify_worker_by_beginning(bench: Bench) -> None:
    bench.report("w-node1-77")

    assert identify("w-node", bench.records) == ResolvedId(IdKind.WORKER, "w-node1-77")


def test_identify_last_is_the_newest_experiment(bench: Bench) -> None:
    bench.put(sample_task(experiment="zebra"))
    bench.clock.advance(seconds=5)
    bench.put(sample_task(experiment="ant"))

    assert identify("last", bench.records).name == "ant"


def test_identify_last_is_the_remembered_one_while_it_exists(bench: Bench) -> None:
    bench.put(sample_task(experiment="mine"))
    bench.clock.advance(seconds=5)
    bench.put(sample_task(experiment="anothers"))

    assert identify("last", bench.records, last="mine").name == "mine"
    assert identify("last", bench.records, last="of another stack").name == "anothers"


def test_identify_last_without_experiments_says_how_to_begin(bench: Bench) -> None:
    with pytest.raises(NotPossible) as refused:
        identify("last", bench.records)

    assert "runtime submit" in (refused.value.hint or "")


def test_remembered_experiment_is_of_one_stack(tmp_path: Path) -> None:
    remember_last(tmp_path, "org/project/dev", "sweep")

    assert recall_last(tmp_path, "org/project/dev") == "sweep"
    assert recall_last(tmp_path, "local") is None


def test_get_task_id_of_an_experiment_says_what_it_is(bench: Bench) -> None:
    bench.put(sample_task(experiment="sweep"))

    with pytest.raises(NotPossible, match="`sweep` is the experiment `sweep`, expected a task") as refused:
        get_task_id("sweep", bench.records)

    assert refused.value.hint == (
        "`runtime status sweep` shows its tasks; `runtime retry --failed sweep` runs all that failed again"
    )


def test_get_experiment_of_a_task_is_refused(bench: Bench) -> None:
    bench.put(sample_task(id="t-abcd1"))

    with pytest.raises(NotPossible, match="expected an experiment"):
        get_experiment("t-abcd1", bench.records)


def test_find_submitted_returns_a_task_that_has_no_record(bench: Bench) -> None:
    first, second = sample_task("1"), sample_task("2", max_failures=7)
    bench.put(first)
    bench.put(second)

    assert find_submitted(bench.records, second.id) == second
    assert find_submitted(bench.records, sample_task("3").id) is None


def test_store_that_refuses_permission_is_not_taken_for_one_without_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, task = Bench.memory(), sample_task()
    bench.put(task)

    def refuse(part: ManifestPart) -> list[str]:
        raise StoreUnavailable("403 Forbidden", denied=True)

    monkeypatch.setitem(vars(bench.records), "read_part", refuse)

    with pytest.raises(StoreUnavailable, match="403"):
        find_submitted(bench.records, task.id)
    bench.close()
