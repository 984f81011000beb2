"""Even and random values of a grid, and the refusals of what is meant as such."""

from __future__ import annotations

import random
import re

import pytest

from runtime.errors import InvalidValue, RequestRefused
from runtime.tasks.grid import parse_grid, read_options


def values_of(option: str, *, seed: int = 0) -> list[str]:
    (axis,) = parse_grid([option], seed=seed).axes
    return list(axis.values)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("lr=log:1e-5:1e-1:5", ["1e-05", "0.0001", "0.001", "0.01", "0.1"]),
        ("n=log:1:1024:6", ["1", "4", "16", "64", "256", "1024"]),
        ("n=log:1:8:3", ["1", "2.82842712475", "8"]),
        ("x=lin:0:1:5", ["0", "0.25", "0.5", "0.75", "1"]),
        ("x=lin:0.0:1.0:3", ["0.0", "0.5", "1.0"]),
        ("x=lin:-1:1:3", ["-1", "0", "1"]),
        ("x=lin:0:0.3:4", ["0.0", "0.1", "0.2", "0.3"]),
        ("x=lin:3:3:1", ["3"]),
        ("x=lin:3:5:1", ["3"]),
        ("x=lin:0:1:2,7", ["0", "1", "7"]),
        ("x=sample:3:7:9", ["9", "8", "7"]),
        ("x=sample:2:0.0:1", ["0.900188839378", "0.72734519957"]),
    ],
)
def test_even_and_random_values_are_short(option: str, values: list[str]) -> None:
    assert values_of(option) == values
    assert all(repr(float(value)) == value or re.fullmatch(r"-?\d+", value) for value in values)


@pytest.mark.parametrize("form", ["sample:50:1e-4:1e-1", "logsample:50:1e-4:1e-1", "logsample:50:1:200"])
def test_random_values_depend_on_seed_and_name_alone(form: str) -> None:
    assert values_of(f"lr={form}") == values_of(f"lr={form}")
    assert values_of(f"lr={form}") != values_of(f"lr={form}", seed=1)
    assert values_of(f"lr={form}") != values_of(f"wd={form}")


def test_random_values_lie_between_the_ends_and_differ() -> None:
    rates = [float(each) for each in values_of("lr=logsample:200:1e-4:1e-1")]
    whole = [int(each) for each in values_of("n=logsample:200:1:400")]
    far = [int(each) for each in values_of("n=sample:200:1:4000000000")]

    assert all(1e-4 <= each <= 1e-1 for each in rates)
    assert 50 < sum(each < 10**-2.5 for each in rates) < 150
    assert all(1 <= each <= 400 for each in whole)
    assert all(1 <= each <= 4_000_000_000 for each in far)
    assert [len(set(each)) for each in (rates, whole, far)] == [200, 200, 200]
    assert sorted(map(int, values_of("n=sample:11:0:10"))) == list(range(11))


@pytest.mark.parametrize(
    ("option", "said", "meant"),
    [
        ("x=lin:0:1", "lin:LO:HI:N", None),
        ("x=lin:0:1:0", "a count N of 1 to 1,000,000", None),
        ("x=lin:0:1:-3", "a count N of 1", None),
        ("x=lin:0:1:1e3", "a count N of 1", None),
        ("x=lin:0:1:9999999", "a count N of 1", None),
        ("x=lin:5:1:3", "LO below HI", "lin:1:5:3"),
        ("x=sample:3:5:1", "LO below HI", "sample:3:1:5"),
        ("x=lin:1:1:2", "LO below HI", None),
        ("x=lin:0:nan:2", "finite", None),
        ("x=lin:0:1e999:2", "finite", None),
        ("x=log:0:1:3", "LO above 0", None),
        ("x=logsample:3:-1:1", "LO above 0", None),
        ("x=sample:12:0:10", "at most 11 numbers of 0 to 10", "sample:12:0.0:10.0"),
        ("x=0.1:l5:10", "log:LO:HI:N", "log:0.1:10:5"),
        ("x=0:u10:5", "lin:LO:HI:N", "lin:0:5:10"),
        ("x=1e-5:1e-1:l5", "log:LO:HI:N", "log:1e-5:1e-1:5"),
        ("x=1e-5:1e-1:5l", "log:LO:HI:N", "log:1e-5:1e-1:5"),
        ("x=0.1:0.1:0.5", "whole numbers", "lin:0.1:0.5:5"),
    ],
)
def test_unreadable_spread_is_refused_with_what_was_meant(option: str, said: str, meant: str | None) -> None:
    with pytest.raises(InvalidValue) as refused:
        parse_grid([option])

    assert said in refused.value.allowed
    assert (refused.value.hint or "").partition("; a text")[0].rpartition(": ")[2] == (meant or "")


@pytest.mark.parametrize("text", ["10:30", "a:b:c", "gs://a/b:c", "linear:0:1", "1:l:2", "http://x:80/y"])
def test_other_texts_with_colons_are_values(text: str) -> None:
    assert values_of(f"x={text}")[0] == ("10" if text == "10:30" else text)
    assert values_of(f'x=["log:{text}"]') == [f"log:{text}"]


def test_seed_of_no_grid_is_refused() -> None:
    with pytest.raises(RequestRefused, match="no `--grid`"):
        read_options([], 3)
    assert read_options(["x=sample:5:0.0:1"], None) == parse_grid(["x=sample:5:0.0:1"])
    assert read_options(["x=sample:5:0.0:1"], 3) == parse_grid(["x=sample:5:0.0:1"], seed=3)


def test_whole_numbers_are_drawn_by_their_logarithm() -> None:
    from runtime.tasks.grid_ranges import read_spread

    firsts = [int((read_spread("logsample:1:1:100", most=9, rng=random.Random(each)) or [])[0]) for each in range(400)]

    assert 150 < sum(each < 10 for each in firsts) < 250
