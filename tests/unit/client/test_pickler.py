"""Packed functions and values: the same in each start of an unchanged program, and other ones after a change."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.client.pickler import dumps
from tests.services_support import PATIENCE_S

SCRIPT = """\
import functools, hashlib, sys
from dataclasses import dataclass
from enum import Enum
from runtime.client.pickler import dumps

LIMIT = 10

class Base:
    def twice(self):
        return 2 * self.x

@dataclass
class Config(Base):
    x: int = 1

class Kind(Enum):
    A = "a"

def uses_class(n):
    return Config(n).twice() * LIMIT

def annotated(c: Config) -> Kind:
    return Kind.A

def has_set(n):
    return n in {"a", "b", "c", "d", ("e", "f")} or [n for n in "x" if n in {"g", "h", "i"}]

def nested():
    class Own:
        pass
    return Own

@functools.lru_cache(maxsize=8)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

THINGS = [fibonacci, uses_class, annotated, has_set, Config(3), Kind.A, Config(2).twice, lambda n: Config(n)]
print([hashlib.sha256(dumps(each)).hexdigest() for each in THINGS])
"""


def digests(folder: Path, script: str, seed: int) -> str:
    path = folder / "script.py"
    path.write_text(script)
    environ = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, str(path)], env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_unchanged_program_packs_the_same_each_time(tmp_path: Path) -> None:
    assert len({digests(tmp_path, SCRIPT, seed) for seed in range(4)}) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [("2 * self.x", "3 * self.x"), ('"c"', '"k"'), ("LIMIT = 10", "LIMIT = 11"), ("x: int = 1", "x: int = 2")],
)
def test_changed_program_packs_something_else(tmp_path: Path, old: str, new: str) -> None:
    assert digests(tmp_path, SCRIPT, 0) != digests(tmp_path, SCRIPT.replace(old, new), 0)


def test_classes_that_share_a_name_stay_apart_and_values_come_back_as_their_own(tmp_path: Path) -> None:
    script = """\
import pickle
from runtime.client.pickler import dumps

class P:
    n = 1

first, P0 = dumps(P()), P

class P:
    n = 2

second = dumps(P())
assert (type(pickle.loads(first)), type(pickle.loads(second))) == (P0, P)
assert dumps(P()) == second and dumps(P0()) == first
f = pickle.loads(dumps(lambda w: w in {"a", "b"} and {"c", ("d",)} >= {w} | {"c"}))
assert (f("c"), type(f.__code__.co_consts)) == (False, tuple)
print("ok")
"""
    assert digests(tmp_path, script, 0) == "ok\n"


def test_constants_of_a_function_are_sets_again() -> None:
    from runtime.client.pickler import dumps

    made = pickle.loads(dumps(lambda word: word in {"a", "b"}))

    assert (made("a"), made("z")) == (True, False)
    assert frozenset({"a", "b"}) in made.__code__.co_consts


def test_cached_function_of_a_script_goes_by_value(tmp_path: Path) -> None:
    script = SCRIPT.replace("print(", "sys.stdout.buffer.write(dumps(fibonacci)) #")
    path = tmp_path / "script.py"
    path.write_text(script)
    packed = subprocess.run([sys.executable, str(path)], capture_output=True, timeout=PATIENCE_S, check=True).stdout

    found = pickle.loads(packed)

    assert (found(30), found.cache_info().maxsize) == (832040, 8)


MANY = """\
import gc, sys
from collections import namedtuple
from runtime.client.pickler import dumps

def make(k):
    class Model:
        K = k
        def value(self):
            return k, self.K
    return Model

packed = []
for k in range(5):
    class Model:
        K = k
        def value(self):
            return self.K
    Row = namedtuple("Row", [f"a{k}"])
    packed.append(dumps([Model(), make(k)(), type("Typed", (), {"K": k}), Row(k)]))
    del Model, Row
    gc.collect()
print(packed)
"""


def test_classes_of_one_name_stay_different_ones_for_who_loads_them(tmp_path: Path) -> None:
    first, again = (ast.literal_eval(digests(tmp_path, MANY, seed)) for seed in (1, 2))

    found = [pickle.loads(each) for each in first]

    assert [model.value() for model, _, _, _ in found] == [0, 1, 2, 3, 4]
    assert [made.value() for _, made, _, _ in found] == [(k, k) for k in range(5)]
    assert [typed.K for _, _, typed, _ in found] == [0, 1, 2, 3, 4]
    assert [row._asdict() for _, _, _, row in found] == [{f"a{k}": k} for k in range(5)]
    assert first == again


def test_cached_function_that_its_module_has_not_goes_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "import functools\ndef f(n):\n    return n + 1\nkept = functools.lru_cache(f)\n@functools.cache\ndef g(n):\n    return n\n"
    (tmp_path / "cached_of_test.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.import_module("cached_of_test")

    assert pickle.loads(dumps(found.kept))(1) == 2
    assert pickle.loads(dumps(functools.lru_cache(found.f)))(1) == 2
    assert pickle.loads(dumps(found.g)) is found.g
