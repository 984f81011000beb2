"""What people see of arguments that have to be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest

from runtime.client.params import show_params


@dataclass
class Config:
    lr: float
    shape: tuple[int, int]
    made: Any = field(init=False, repr=False)


class Pair(NamedTuple):
    lr: float
    net: object


@pytest.mark.parametrize(
    ("args", "kwargs", "shown"),
    [
        ([{"lr": numpy.float64(0.1), "layers": numpy.int64(3), "warm": numpy.bool_(True)}], {}, {"lr": 0.1, "layers": 3, "warm": True}),
        ([{"lr": float("nan"), "top": float("-inf"), "net": {"shape": (2, 3)}}], {}, {"lr": "nan", "top": "-inf", "net.shape": [2, 3]}),
        ([{"data": numpy.zeros(3), "model": object(), "many": [1] * 17, "mixed": [1, object()], "big": 10**30, "lr": 2}], {}, {"lr": 2}),
        ([Config(0.5, (1, 2))], {}, {"lr": 0.5, "shape": [1, 2]}),
        ([Pair(0.5, object())], {"seed": numpy.uint8(7)}, {"lr": 0.5, "seed": 7}),
        ([Path("a/b")], {}, {"item": "a/b"}),
        ([1, numpy.float32(2), {"x": 1}], {}, {"arg0": 1, "arg1": 2.0}),
        ([{3: "three", "long": "x" * 1000}], {}, {"3": "three", "long": "x" * 200}),
        ([object()], {}, {}),
    ],
)  # fmt: skip
def test_numbers_and_texts_of_pickled_arguments_are_shown(args: list[Any], kwargs: dict[str, Any], shown: Any) -> None:
    found = show_params(args, kwargs)

    assert found == shown
    assert all(type(each) in (int, float, bool, str, list) for each in found.values())


def test_few_of_very_many_are_shown() -> None:
    assert len(show_params([{f"p{number}": number for number in range(1000)}], {})) == 100
