"""`runtime.shim.call`: a function called by a program of its own, on every Python of this machine."""

from __future__ import annotations

import base64
import json
import math
import pickle
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.client.values import StoredValue, parse_stored
from runtime.shim import call
from runtime.shim.call import encode_failure, encode_value, is_json
from tests.shim_support import find_pythons

MODULE = """\
import os, sys

class Odd(object):
    def __init__(self, n):
        self.n = n

class Refused(Exception):
    def __init__(self, code, why):
        super().__init__(why)
        self.code = code

    def __reduce__(self):
        return Refused, (self.code, str(self))

class Unpicklable(Exception):
    def __init__(self, why):
        super().__init__(why, __import__("threading").Lock())

class Places(object):
    @staticmethod
    def add(a, b=0):
        return a + b

def tell(*args, **kwargs):
    return [list(args), kwargs]

def refuse(why):
    raise Refused(7, why)

class Small(Exception):
    def __init__(self, n):
        super().__init__("%d is small" % n)
        self.n = n

def be_small(n):
    raise Small(n)

def fail_strangely():
    raise Unpicklable("no way")

def leave(code):
    sys.exit(code)

def make(n):
    return {n, n + 1}

def lock():
    import threading
    return threading.Lock()

def where():
    return os.getcwd()

def train(run, variant):
    run.report(step=1, loss=0.5)
    run.report(loss=0.25)
    (run.output / "w").write_text("x")
    (run.checkpoint / "c").write_text("y")
    assert run.argv == ["launch.py", "--lr=1"] and run.git == [{"folder": ".", "commit": "c0"}] and run.gpus == ["2", "3"]
    return [run.name, run.variant == variant, run.index, run.attempt, run.ids, run.should_stop(), repr(run)]
"""

ORIGIN = {"argv": ["launch.py", "--lr=1"], "git": [{"folder": ".", "commit": "c0"}], "ids": {"SLURM_JOB_ID": "7"}}


@dataclass
class Place:
    folder: Path
    python: str

    def call(self, function: str, *args: Any, code: int = 0, rank: int = 0, **request: Any) -> StoredValue | None:
        """Make a call as the shim does; returns what it left. `said` keeps its standard error."""
        attempt = self.folder / "attempt"
        attempt.mkdir(exist_ok=True)
        for name in ("value", "setup_failed"):
            (attempt / name).unlink(missing_ok=True)
        (self.folder / "tree").mkdir(exist_ok=True)
        (self.folder / "tree" / "lab.py").write_text(MODULE)
        given = {"function": function, "name": "fit", "args": list(args), "kwargs": {}, "run": False, "packed": False}
        given |= {"paths": ["."], "folder": ".", "attempt": str(attempt), **request}
        (self.folder / "origin.json").write_text(json.dumps(ORIGIN))
        (self.folder / "call.json").write_text(json.dumps(given))
        done = subprocess.run(
            [self.python, call.__file__, self.folder / "call.json"],
            cwd=self.folder / "tree",
            env={
                "RUNTIME_RANK": str(rank),
                "RUNTIME_ARRAY_INDEX": "3",
                "RUNTIME_ATTEMPT": "2",
                "RUNTIME_OUTPUT_DIR": str(self.folder / "out"),
                "RUNTIME_METRICS": str(self.folder / "attempt" / "metrics.jsonl"),
                "RUNTIME_CHECKPOINT_DIR": str(self.folder / "kept"),
                "RUNTIME_JOB_ID": "j-1",
                "RUNTIME_ORIGIN": str(self.folder / "origin.json"),
                "CUDA_VISIBLE_DEVICES": "2, 3",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        self.said = done.stderr
        assert done.returncode == code, done.stderr
        value = attempt / "value"
        return parse_stored(value.read_bytes()) if value.exists() else None

    def value(self, function: str, *args: Any, **request: Any) -> Any:
        stored = self.call(function, *args, **request)
        assert stored is not None
        return json.loads(stored.body) if stored.head["form"] == "json" else pickle.loads(stored.body)


@pytest.fixture(params=sorted(find_pythons()))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, find_pythons()[request.param])


def pack(value: object) -> str:
    return base64.b64encode(pickle.dumps(value, protocol=call.PROTOCOL)).decode()


# calls


def test_function_of_a_module_is_called_and_its_value_kept_as_json(place: Place) -> None:
    assert place.value("lab:tell", 1, [2.5, None], kwargs={"x": {"y": "ü"}}) == [[1, [2.5, None]], {"x": {"y": "ü"}}]
    assert place.value("lab:Places.add", 1, kwargs={"b": 2}) == 3


def test_item_comes_before_the_arguments(place: Place) -> None:
    assert place.value("lab:tell", 1, item={"lr": 0.1}) == [[{"lr": 0.1}, 1], {}]


def test_packed_arguments_and_items_are_loaded(place: Place) -> None:
    args = pack(((1, (2,)), {"x": 3}))

    assert place.value("lab:tell", args, item=pack([4]), packed=True) == [[[4], 1, (2,)], {"x": 3}]
    assert place.value("lab:tell", item=pack([4]), packed=True) == [[[4]], {}]


def test_modules_are_found_in_the_named_folders_of_the_tree(place: Place) -> None:
    source = place.folder / "tree" / "src"
    source.mkdir(parents=True)
    (source / "deep.py").write_text("import lab\ndef f(): return [__name__, lab.where()]\n")

    name, folder = place.value("deep:f", paths=[".", "src"], folder="src")

    assert (name, Path(folder)) == ("deep", source.resolve())


def test_function_gets_its_run_with_folders_numbers_and_reports(place: Place) -> None:
    said = place.value("lab:train", {"lr": 0.1}, run=True)

    assert said == [
        "fit",
        True,
        3,
        2,
        {"SLURM_JOB_ID": "7", "RUNTIME_JOB_ID": "j-1"},
        False,
        "<run 3 of fit, attempt 2>",
    ]
    assert ((place.folder / "out" / "w").read_text(), (place.folder / "kept" / "c").read_text()) == ("x", "y")
    lines = [json.loads(line) for line in (place.folder / "attempt" / "metrics.jsonl").read_text().splitlines()]
    assert [{name: line[name] for name in line if name != "at"} for line in lines] == [
        {"step": 1, "loss": 0.5},
        {"loss": 0.25},
    ]


@pytest.mark.parametrize("left", [None, "[]", "{", '{"argv": null}'])
def test_run_without_a_readable_origin_has_empty_lists(
    left: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*call.IDS, "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNTIME_ORIGIN", str(tmp_path / "origin.json"))
    if left is not None:
        (tmp_path / "origin.json").write_text(left)

    run = call.Run("fit", None, {})

    assert (run.argv, run.git, run.ids, run.gpus) == ([], [], {}, [])


@pytest.mark.parametrize(
    ("cuda", "nvidia", "gpus"),
    [
        ("0", None, ["0"]),
        ("GPU-8a,MIG-1", "all", ["GPU-8a", "MIG-1"]),
        (None, "1,2", ["1", "2"]),
        ("", "all", []),
        ("-1", None, []),
        ("NoDevFiles", None, []),
        (None, "void", []),
    ],
)
def test_gpus_are_those_of_the_variables_of_cuda_and_its_containers(
    cuda: str | None, nvidia: str | None, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", cuda), ("NVIDIA_VISIBLE_DEVICES", nvidia)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    assert call.Run("fit", None, {}).gpus == gpus


# ends


def test_value_that_json_does_not_hold_is_a_pickle_with_its_type_and_python(place: Place) -> None:
    stored = place.call("lab:make", 3)

    assert stored is not None
    assert (stored.head["form"], stored.head["type"], stored.raised) == ("pickle", "set", False)
    assert pickle.loads(stored.body) == {3, 4}


def test_exception_is_kept_with_its_traceback_and_printed(place: Place) -> None:
    stored = place.call("lab:refuse", "too small", code=1)

    assert stored is not None
    assert (stored.raised, stored.head["type"], stored.head["message"]) == (True, "lab.Refused", "too small")
    assert stored.head["traceback"] == place.said
    assert place.said.startswith("Traceback (most recent call last):\n")
    assert "call.py" not in place.said
    assert place.said.endswith("lab.Refused: too small\n")


def test_exception_that_its_arguments_do_not_make_again_is_kept_in_parts(place: Place) -> None:
    stored = place.call("lab:be_small", 3, code=1)

    assert stored is not None
    assert (stored.head["form"], stored.head["message"]) == ("parts", "3 is small")


def test_exception_that_cannot_be_pickled_is_kept_as_text(place: Place) -> None:
    stored = place.call("lab:fail_strangely", code=1)

    assert stored is not None
    assert (stored.head["form"], stored.head["type"], stored.body) == ("text", "lab.Unpicklable", b"")


def test_value_that_cannot_be_pickled_fails_the_call(place: Place) -> None:
    stored = place.call("lab:lock", code=1)

    assert stored is not None
    assert (stored.raised, stored.head["type"]) == (True, "TypeError")
    assert "pickle" in stored.head["message"]


def test_function_that_ends_the_process_keeps_its_exit_code_and_leaves_no_value(place: Place) -> None:
    assert place.call("lab:leave", 5, code=5) is None


def test_only_the_first_rank_leaves_a_value(place: Place) -> None:
    assert place.call("lab:tell", rank=1) is None
    assert place.call("lab:refuse", "x", rank=1, code=1) is None


# what cannot be called


@pytest.mark.parametrize(
    ("function", "said"),
    [("nothere:f", "no module nothere in "), ("lab:nothere", "module lab has no function nothere")],
)
def test_function_that_is_not_there_is_a_failure_of_the_setup(place: Place, function: str, said: str) -> None:
    assert place.call(function, code=1) is None
    assert (place.folder / "attempt" / "setup_failed").read_text().startswith(said)
    assert place.said.startswith(f"error: {said}")


def test_module_that_fails_as_it_is_imported_fails_the_call(place: Place) -> None:
    (place.folder / "tree").mkdir()
    (place.folder / "tree" / "broken.py").write_text("import nothere\n")

    stored = place.call("broken:f", code=1)

    assert stored is not None
    assert stored.raised
    assert "No module named 'nothere'" in stored.head["message"]


def test_function_of_another_python_is_refused_before_it_is_loaded(place: Place) -> None:
    packed = {"function": "bm9uc2Vuc2U=", "python": "2.7", "cloudpickle": "3.1.3"}

    assert place.call("lab:tell", code=1, pickled=packed) is None
    assert "was packed by Python 2.7, whose code" in (place.folder / "attempt" / "setup_failed").read_text()


# what counts as JSON


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "ü", [], [1, ["x"]], {}, {"a": {"b": [None]}}])
def test_value_that_json_gives_back_as_it_is(value: object) -> None:
    assert is_json(value)
    assert json.loads(encode_value(value).partition(b"\n")[2]) == value


@pytest.mark.parametrize("value", [(1,), {1}, {1: 2}, [(1,)], [math.nan, (1,)], b"x", {"a": (1,)}, True.__class__, 1j])
def test_value_that_json_would_change_or_refuse_is_pickled(value: object) -> None:
    assert not is_json(value)
    stored = parse_stored(encode_value(value))
    assert stored.head["form"] == "pickle"
    assert repr(pickle.loads(stored.body)) == repr(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {"loss": math.nan, "all": [1, -math.inf]}])
def test_number_that_is_not_finite_stays_readable_in_a_value_and_is_no_json_of_a_call(value: object) -> None:
    stored = parse_stored(encode_value(value))

    assert (is_json(value), is_json(value, finite=False), stored.head["form"]) == (False, True, "json")
    assert repr(json.loads(stored.body)) == repr(value)


@pytest.mark.parametrize("text", ["\ud800", "x" * 10])
def test_text_that_no_file_holds_is_pickled(text: str) -> None:
    stored = parse_stored(encode_value(text))

    assert (pickle.loads if stored.head["form"] == "pickle" else json.loads)(stored.body) == text


def test_subclass_of_a_plain_type_is_pickled() -> None:
    class Name(str):
        __slots__ = ()

    assert not is_json(Name("x"))


def test_traceback_of_a_failure_is_cut_at_its_beginning() -> None:
    try:
        raise ValueError("x" * 200_000)
    except ValueError as problem:
        stored = parse_stored(encode_failure(problem, traceback.format_exc()))

    assert len(stored.head["message"]) == len(stored.head["traceback"]) == call.MOST_TEXT
    assert str(pickle.loads(stored.body)) == "x" * 200_000
    assert sys.version_info[:2] == tuple(map(int, stored.head["python"].split(".")))
