"""Rows of results: their columns, conditions on them, and their order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.client.params import name_params, params_of_entry
from runtime.client.result_table import RowSelection, find_cell, list_names, parse_condition
from runtime.client.tasks.results import TaskResult
from runtime.errors import InvalidValue, UnknownName
from runtime.tasks.calls import CALL_PACKED, CALL_REQUEST
from runtime.tasks.model import CommandEntry, FunctionEntry, TaskState, WorkflowEntry


def row(name: str, **fields: Any) -> TaskResult:
    metrics = fields.get("metrics", {})
    ranges = {each: [value - 1, value + 1] for each, value in metrics.items() if value == value}
    return TaskResult(
        task=name, key=None, arguments=None, state=TaskState.SUCCEEDED, **{"metric_ranges": ranges, **fields}
    )


def names(rows: Iterator[TaskResult]) -> list[str]:
    return [each.task for each in rows]


def test_column_is_a_field_a_parameter_a_metric_its_range_or_a_key_of_the_value() -> None:
    one = row("a", params={"lr": 0.1, "loss": "mse"}, metrics={"loss": 2.0, "a.b": 1.0}, value={"acc": 0.5})

    found = {name: find_cell(one, name) for name in ("task", "lr", "params.lr", "loss", "metrics.loss", "loss.max")}
    assert found == {"task": "a", "lr": 0.1, "params.lr": 0.1, "loss": "mse", "metrics.loss": 2.0, "loss.max": 3.0}
    assert (find_cell(one, "a.b.min"), find_cell(one, "value.acc"), find_cell(one, "nothing")) == (0.0, 0.5, None)
    assert {"state", "lr", "loss", "loss.min", "a.b", "value.acc"} <= set(list_names(one))
    assert "metrics" not in list_names(one)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss<2", ["a"]),
        ("loss <= 2", ["a", "b"]),
        ("loss!=1", ["b"]),
        ("loss=1.0", ["a"]),
        ("lr=fast", ["b"]),
        ("lr!=fast", ["a"]),
        ("lr>0", ["a"]),
        ("state=succeeded", ["a", "b", "c"]),
        ("state>=1", []),
    ],
)
def test_condition_compares_numbers_as_such_and_leaves_out_rows_without_the_cell(
    text: str, expected: list[str]
) -> None:
    rows = [
        row("a", params={"lr": 0.1}, metrics={"loss": 1.0}),
        row("b", params={"lr": "fast"}, metrics={"loss": 2.0}),
        row("c"),
    ]

    assert names(RowSelection(where=(parse_condition(text),)).apply(rows)) == expected


@pytest.mark.parametrize("text", ["", "loss", "<3", "loss<>3", "loss<", "loss>=abc"])
def test_condition_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_condition(text)


def test_rows_are_sorted_with_what_is_nothing_last_in_both_directions() -> None:
    rows = [row("none"), row("nan", metrics={"loss": math.nan}), *(row(str(n), metrics={"loss": n}) for n in (2, 3, 1))]

    assert names(RowSelection(sort="loss").apply(rows)) == ["1", "2", "3", "none", "nan"]
    assert names(RowSelection(sort="-loss").apply(rows)) == ["3", "2", "1", "none", "nan"]
    assert names(RowSelection(sort="-loss", limit=1).apply(rows)) == ["3"]
    assert names(RowSelection(sort="-task").apply(rows)) == ["none", "nan", "3", "2", "1"]


def test_unknown_column_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UnknownName) as refused:
        list(RowSelection(columns=("los",)).apply([row("a", metrics={"loss": 1.0})]))

    assert (refused.value.name, refused.value.hint) == ("los", "did you mean `loss`?")
    assert list(RowSelection(columns=("los",)).apply([])) == []


def test_column_that_only_a_later_row_has_is_known() -> None:
    rows = [row("a"), row("b", metrics={"loss": 1.0})]

    assert names(RowSelection(columns=("loss",)).apply(rows)) == ["a", "b"]


def test_rows_are_taken_one_by_one_and_no_further_than_the_limit() -> None:
    taken = []

    def read() -> Iterator[TaskResult]:
        for number in range(100_000):
            taken.append(number)
            yield row(str(number), metrics={"loss": float(number)})

    choice = RowSelection(where=(parse_condition("loss>=5"),), limit=3, columns=("loss",))

    assert names(choice.apply(read())) == ["5", "6", "7"]
    assert len(taken) < 20


def test_parameters_of_a_variant_are_its_keys_with_dots_for_objects_in_it() -> None:
    assert name_params({"lr": 0.1, "net": {"depth": 2, "act": {}}}) == {"lr": 0.1, "net.depth": 2, "net.act": {}}
    assert (name_params(3), name_params(None)) == ({"item": 3}, {})


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (CommandEntry(("python", "train.py", "--lr=0.1", "--seed", "3", "--fast", "--name", "a b")),
         {"lr": 0.1, "seed": 3, "fast": True, "name": "a b"}),
        (WorkflowEntry("my.project", "train", ("--lr=1e-3",)), {"lr": 0.001}),
        (FunctionEntry("m:f", ({"lr": 1},), {"seed": 2}), {"lr": 1, "seed": 2}),
        (FunctionEntry("m:f", (1, "x")), {"arg0": 1, "arg1": "x"}),
        (FunctionEntry(CALL_REQUEST, ({"args": [], "kwargs": {}, "item": {"lr": 1}, "number": 4},)), {"lr": 1}),
        (FunctionEntry(CALL_PACKED, (3, "m:f", "00")), {}),
    ],
)  # fmt: skip
def test_parameters_of_a_task_are_what_its_entry_shows(entry: Any, expected: dict[str, Any]) -> None:
    assert params_of_entry(entry) == expected
