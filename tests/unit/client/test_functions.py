"""Functions packed for jobs and tasks: by name where a module has them, by cloudpickle elsewhere."""

from __future__ import annotations

import base64
import functools
import json
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.client import functions
from runtime.client.functions import import_paths, make_call, name_function, pack_function
from runtime.errors import RequestRefused
from runtime.shim.call import unpack


def plain(x: int) -> int:
    return x


class Model:
    def fit(self, x: int) -> int:
        return x

    @staticmethod
    def load(x: int) -> int:
        return x

    def __call__(self, x: int) -> int:
        return x


async def wait(x: int) -> int:
    return x


def count(x: int) -> Iterator[int]:
    yield x


@pytest.mark.parametrize("function", [plain, Model.load, json.dumps])
def test_function_of_a_module_goes_by_its_name(function: Callable[..., Any]) -> None:
    packed = pack_function(function)

    assert packed.pickled is None
    module, _, name = packed.name.partition(":")
    assert functools.reduce(getattr, name.split("."), sys.modules[module]) is function  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x, ":<lambda>"),
        (functools.partial(plain, 1), ":plain"),
        (Model().fit, ":Model.fit"),
        (Model(), ":Model"),
    ],
)
def test_function_that_no_module_has_under_its_name_is_packed(function: Callable[..., Any], name: str) -> None:
    packed = pack_function(function)

    assert packed.name == f"{__name__}{name}" or packed.name.endswith(name)
    assert packed.pickled is not None
    assert packed.pickled.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    loaded = pickle.loads(base64.b64decode(packed.pickled.function))
    assert loaded() == 1 if isinstance(function, functools.partial) else loaded(3) == 3


def test_function_that_is_hidden_by_another_of_its_name_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    function = plain
    monkeypatch.setattr(sys.modules[__name__], "plain", None)

    assert pack_function(function).pickled is not None


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (wait, "a coroutine function"),
        (count, "a generator function"),
        (functools.partial(wait, 1), "a coroutine function"),
    ],
)
def test_function_without_one_value_is_refused(function: Callable[..., Any], kind: str) -> None:
    with pytest.raises(RequestRefused, match=f"it is {kind}, and a call returns one value") as refused:
        pack_function(function)

    assert "lambda x:" in (refused.value.hint or "")


def test_function_around_what_cannot_be_packed_is_refused_with_the_reason() -> None:
    lock = threading.Lock()

    with pytest.raises(RequestRefused, match=r"cannot be packed: TypeError: .*lock") as refused:
        pack_function(lambda: lock)

    assert "let the function open" in (refused.value.hint or "")


def test_packed_function_and_arguments_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MOST_BYTES", 1000)
    large = b"x" * 1000

    with pytest.raises(RequestRefused, match=r"with all that it refers to is .* when packed, and the most is 1000B"):
        pack_function(lambda: large)
    with pytest.raises(RequestRefused, match="item 1 of"):
        make_call(plain, items=[b"", large])
    with pytest.raises(RequestRefused, match="is called with is"):
        make_call(plain, [large])


def test_plain_arguments_stay_json_and_others_are_packed_together() -> None:
    call, items = make_call(plain, [1, {"a": [None]}], {"b": "x"}, items=[1, "x"])
    assert (call.args, call.kwargs, call.packed, items) == ((1, {"a": [None]}), {"b": "x"}, False, (1, "x"))

    call, items = make_call(plain, [(1, 2)], {"b": {3}}, items=[1, {2}])
    assert (call.packed, call.kwargs, len(call.args)) == (True, {}, 1)
    assert unpack(call.args[0]) == (((1, 2),), {"b": {3}})
    assert [unpack(each) for each in items] == [1, {2}]
    assert [each["shown"] for each in (*call.args, *items)] == [{"item": [1, 2]}, {"item": 1}, {}]


def test_argument_that_cannot_be_packed_is_refused_by_its_number() -> None:
    with pytest.raises(RequestRefused, match=r"item 1 of `.*plain` cannot be packed: TypeError"):
        make_call(plain, items=[1, threading.Lock()])


def test_modules_are_looked_for_where_this_process_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("src", "libs/deep", "lib/site-packages"):
        (tmp_path / name).mkdir(parents=True)
    places = ["", str(tmp_path / "src"), str(tmp_path / "gone"), str(tmp_path / "lib/site-packages"), "/usr/lib"]
    monkeypatch.setattr(sys, "path", places)
    monkeypatch.chdir(tmp_path / "libs/deep")

    assert import_paths(tmp_path) == (".", "libs/deep", "src")
    assert make_call(plain, folder=tmp_path)[0].folder == "libs/deep"
    assert make_call(plain, folder=tmp_path / "src")[0].folder == "."


def test_names_are_those_that_people_know() -> None:
    assert name_function(plain) == f"{__name__}:plain"
    assert name_function(functools.partial(functools.partial(plain))) == f"{__name__}:plain"
