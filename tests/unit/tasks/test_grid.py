"""Grid options: their combinations and refusals."""

from __future__ import annotations

import pytest

from runtime.errors import InvalidValue, RequestRefused
from runtime.tasks.grid import apply_grid, check_grid, parse_grid, replace_names
from runtime.tasks.model import CommandEntry, WorkflowEntry


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("lr=1e-3,1e-4", ["1e-3", "1e-4"]),
        ("seed=0:3", ["0", "1", "2"]),
        ("seed=0:10:5", ["0", "5"]),
        ("seed=3:0:-2", ["3", "1"]),
        ("seed=-2:1", ["-2", "-1", "0"]),
        ("seed=0:2,9", ["0", "1", "9"]),
        ("url=gs://a/b:c", ["gs://a/b:c"]),
        ("x=a=b", ["a=b"]),
        ('x=["a,b", "0:3", "", 1.5, null, {"k": [1]}]', ["a,b", "0:3", "", "1.5", "null", '{"k": [1]}']),
        ("optimizer.lr=1", ["1"]),
    ],
)
def test_axis_values(option: str, values: list[str]) -> None:
    (axis,) = parse_grid([option]).axes

    assert (axis.name, list(axis.values)) == (option.partition("=")[0], values)


@pytest.mark.parametrize(
    "option", ["lr", "=1", "lr=", "lr=1,,2", "lr=1,", "2lr=1", "seed=5:5", "seed=0:9:0", "seed=9:0", "x=[", "x=[]"]
)
def test_unreadable_grid_is_refused(option: str) -> None:
    with pytest.raises(InvalidValue):
        parse_grid([option])


@pytest.mark.parametrize(
    "options", [["seed=0:99999999999999"], ["seed=0:1000001"], [f"{n}=0:1000" for n in "abcdefgh"]]
)
def test_grid_of_more_than_anybody_runs_is_refused_before_it_is_made(options: list[str]) -> None:
    with pytest.raises((InvalidValue, RequestRefused)):
        parse_grid(options)


def test_name_given_twice_is_refused() -> None:
    with pytest.raises(RequestRefused, match="given twice"):
        parse_grid(["a=1", "a=2"])


def test_combinations_come_with_the_last_axis_fastest() -> None:
    grid = parse_grid(["a=1,2", "b=x,y"])

    assert len(grid) == 4
    assert [tuple(each.values()) for each in grid] == [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]


def test_no_grid_is_one_combination_of_nothing() -> None:
    assert (len(parse_grid([])), list(parse_grid([]))) == (1, [{}])


def test_only_declared_names_are_replaced_and_other_braces_stay() -> None:
    assert replace_names('{"a": {seed}, "b": {}, {other}}', {"seed": "3"}) == '{"a": 3, "b": {}, {other}}'


def test_workflow_gets_options_and_replaced_arguments() -> None:
    entry = WorkflowEntry("p", "w", ("--out=/o/{seed}.json",))

    assert apply_grid(entry, {"lr": "0.1", "seed": "3"}) == WorkflowEntry(
        "p", "w", ("--out=/o/3.json", "--lr=0.1", "--seed=3")
    )


def test_command_is_replaced_in_place() -> None:
    entry = CommandEntry(("train", "--seed", "{seed}", "{}", '{"a": 1}'))

    assert apply_grid(entry, {"seed": "3"}) == CommandEntry(("train", "--seed", "3", "{}", '{"a": 1}'))


def test_name_that_tells_no_tasks_apart_is_refused() -> None:
    grid = parse_grid(["seed=0:3"])

    with pytest.raises(RequestRefused, match="nowhere in the command"):
        check_grid(grid, CommandEntry(("train",)))
    with pytest.raises(RequestRefused, match="nowhere in the key"):
        check_grid(grid, WorkflowEntry("p", "w"), key="one")
    check_grid(grid, WorkflowEntry("p", "w"))
    check_grid(grid, CommandEntry(("train", "{seed}")), key="run-{seed}")
