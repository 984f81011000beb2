"""What people see of arguments that have to be pickled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
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


@dataclass(slots=True)
class Slim:
    depth: int


@dataclass
class Outer:
    config: Config
    slim: Slim


class Odd(list[int]):
    def __len__(self) -> int:
        raise ValueError("no length")

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)


class OddFloat(float):
    def __float__(self) -> float:
        raise ValueError("no number")

    def __repr__(self) -> str:
        raise ValueError("no text")


class Endless(Mapping[str, int]):
    def __getitem__(self, name: str) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return map(str, itertools.count())


def itself() -> dict[str, Any]:
    found: dict[str, Any] = {"lr": 1}
    found["me"] = found
    return found


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = (found,)
    return found


@pytest.mark.parametrize(
    ("args", "kwargs", "shown"),
    [
        ([{"lr": numpy.float64(0.1), "layers": numpy.int64(3), "warm": numpy.bool_(True)}], {}, {"lr": 0.1, "layers": 3, "warm": True}),
        ([{"lr": float("nan"), "top": float("-inf"), "net": {"shape": (2, 3)}}], {}, {"lr": "nan", "top": "-inf", "net.shape": [2, 3]}),
        ([{"data": numpy.zeros(3), "model": object(), "many": [1] * 17, "mixed": [1, object()], "big": 10**30, "lr": 2}], {}, {"lr": 2}),
        ([Config(0.5, (1, 2))], {}, {"lr": 0.5, "shape": [1, 2]}),
        ([Pair(0.5, object())], {"seed": numpy.uint8(7)}, {"lr": 0.5, "seed": 7}),
        ([Path("a/b")], {}, {"item": "a/b"}),
        ([1, numpy.float32(2), {"x": 1}], {}, {"arg0": 1, "arg1": 2.0, "arg2.x": 1}),
        ([{3: "three", "long": "x" * 1000}], {}, {"3": "three", "long": "x" * 200}),
        ([object()], {}, {}),
        ([Outer(Config(0.5, (1, 2)), Slim(3))], {}, {"config.lr": 0.5, "config.shape": [1, 2], "slim.depth": 3}),
        ([{"path": "a\udc80b", "b\udc80": 1}], {}, {"path": "a\\udc80b", "b\\udc80": 1}),
        ([{"lr": 1, "odd": Odd(), "mapping": Endless()}], {}, {"lr": 1}),
        ([Endless()], {"lr": 2}, {"lr": 2}),
        ([OddFloat(0.5)], {}, {"item": 0.5}),
        ([itself()], {}, {"lr": 1, "me.lr": 1, "me.me.lr": 1, "me.me.me.lr": 1, "me.me.me.me.lr": 1}),
        ([nested(900)], {}, {}),
    ],
)  # fmt: skip
def test_numbers_and_texts_of_pickled_arguments_are_shown(args: list[Any], kwargs: dict[str, Any], shown: Any) -> None:
    found = show_params(args, kwargs)

    assert found == shown
    assert all(type(each) in (int, float, bool, str, list) for each in found.values())


def test_few_of_very_many_are_shown() -> None:
    assert len(show_params([{f"p{number}": number for number in range(1000)}], {})) == 100


def test_wide_and_deep_variant_is_looked_at_for_a_moment_only() -> None:
    wide: dict[str, Any] = {}
    wide.update((f"p{number}", wide) for number in range(1000))

    assert show_params([wide], {}) == {}
