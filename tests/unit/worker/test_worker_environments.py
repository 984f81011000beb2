"""Tasks with an environment: they run with the Python and the packages that they were submitted with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.reasons import EndReason
from runtime.snapshots.environment import Packages, put_packages
from runtime.snapshots.snapshot import take_snapshot
from runtime.tasks.model import CommandEntry, FunctionEntry, Task, TaskState, WorkflowEntry
from runtime.testing import sample_task
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import EXPERIMENT, Bench, bench, start_command

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the tests look at processes in /proc")
HERE = "%d.%d" % sys.version_info[:2]
WHICH = "import sys, tinytool; print(tinytool.VERSION, sys.prefix)"
ROOT = Path(__file__).parents[3]


def make_wheel(folder: Path, version: str, name: str = "tinytool") -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with two releases of a package, which is all that pip finds."""
    folder = bench.folder / "wheels"
    for version in ("1.0", "2.0"):
        make_wheel(folder, version)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    yield folder
    shutil.rmtree(places(bench), ignore_errors=True)


def places(bench: Bench) -> Path:
    return bench.folder / "tmp" / f"runtime-environments-{os.geteuid()}"


def environment(bench: Bench, *lines: str, python: str = HERE) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return put_packages(Packages(manager="pip", python=python, files={"requirements.txt": text}), bench.records)


def command(key: str, *argv: str, **fields: Any) -> Task:
    return sample_task(key, entry=CommandEntry(argv), **{"max_failures": 1, **fields})


def look(key: str, identity: str, **fields: Any) -> Task:
    return command(key, "python", "-c", WHICH, environment=identity, **fields)


def function(key: str, name: str, *args: Any, **fields: Any) -> Task:
    return sample_task(key, entry=FunctionEntry(name, args), **{"max_failures": 1, **fields})


def test_commands_of_different_environments_in_one_queue_run_in_their_own(bench: Bench, wheels: Path) -> None:
    old, new = environment(bench, "tinytool==1.0"), environment(bench, "tinytool==2.0")
    tasks = [look(f"{number}", old if number % 2 else new) for number in range(4)]
    plain = command("plain", "python3", "-c", "import tinytool")
    bench.put(*tasks, plain)

    bench.run(slots=2, max_consecutive_failures=0)

    homes = {path.name: str(path.resolve()) for path in places(bench).iterdir() if path.is_symlink()}
    assert len(homes) == 2
    said = [bench.record(task).log.split() for task in tasks]
    assert [version for version, _ in said] == ["2.0", "1.0", "2.0", "1.0"]
    assert {home for _, home in said} == set(homes.values())
    assert bench.record(plain).reason is EndReason.APP_FAILED


BODY = """
import os, signal, sys, time
from pathlib import Path

import tinytool


def version():
    return tinytool.VERSION, sys.prefix


def give(value):
    return value


def give_set():
    return {1}


def fail():
    raise ValueError("no such luck")


def leave(code):
    sys.exit(code)


def outgrow():
    raise MemoryError("too much")


def keep(name):
    print("looked at", name)
    (Path(os.environ["RUNTIME_OUTPUT_DIR"]) / name).write_text(tinytool.VERSION)
    return sorted(os.environ["PYTHONPATH"].split(os.pathsep)) == [os.environ["RUNTIME_SNAPSHOT_DIR"]]


def wait(path):
    try:
        Path(path).touch()
        time.sleep(600)
    finally:
        Path(path + ".left").touch()


def look_at_attempt(path):
    import runtime

    attempt = runtime.current_attempt()
    attempt.should_stop()
    Path(path).touch()
    while not attempt.should_stop():
        time.sleep(0.01)
    return attempt.task_id


def train(run, variant):
    run.report(loss=0.5)
    run.report(loss=0.25)
    return {"loss": variant["lr"], "index": run.index, "version": tinytool.VERSION}


def odd(run, variant):
    return {1, 2}


workflows = {"tool": lambda size: {"size": size, "version": tinytool.VERSION}}
"""


def code(bench: Bench, **files: str) -> str:
    folder = bench.folder / "source"
    folder.mkdir(exist_ok=True)
    (folder / "lab_body.py").write_text(BODY)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return take_snapshot(folder, bench.records)


def test_function_of_an_environment_returns_raises_and_leaves_as_in_the_workers_own(bench: Bench, wheels: Path) -> None:
    terms = {"environment": environment(bench, "tinytool==1.0"), "snapshot": code(bench)}
    names = {
        "version": (),
        "give": ([1, None, "ä\ud800", {"a": float("inf")}],),
        "give_set": (),
        "fail": (),
        "outgrow": (),
        "keep": ("result",),
        "missing": (),
    }
    tasks = {name: function(name, f"lab_body:{name}", *args, **terms) for name, args in names.items()}
    leaves = {code: function(f"leave {code}", "lab_body:leave", code, **terms) for code in (0, 3)}
    misplaced = function("misplaced", "no_such:module", **terms)
    bench.put(*tasks.values(), *leaves.values(), misplaced)

    bench.run(max_consecutive_failures=0)

    ended = {name: bench.record(task) for name, task in tasks.items()}
    (home,) = [str(path.resolve()) for path in places(bench).iterdir() if path.is_symlink()]
    assert ended["version"].value == ["1.0", home]
    assert ended["give"].value == [1, None, "ä\ud800", {"a": float("inf")}]
    assert ended["keep"].value is True
    assert ended["keep"].log == "looked at result\n"
    assert Path(str(ended["keep"].outputs_url), "result").read_text() == "1.0"
    assert {name: (each.reason, each.message) for name, each in ended.items() if each.state is TaskState.FAILED} == {
        "give_set": (
            EndReason.APP_FAILED,
            "the function returned set, which is no JSON value: Object of type set is not JSON serializable; return plain "
            "numbers, texts, lists and dicts, and write the rest to the output folder",
        ),
        "fail": (EndReason.APP_FAILED, "ValueError: no such luck"),
        "outgrow": (EndReason.OOM, "MemoryError: too much"),
        "missing": (EndReason.CONFIG_INVALID, "module lab_body has no function missing"),
    }
    assert 'in fail\n    raise ValueError("no such luck")' in ended["fail"].log
    assert bench.record(misplaced).reason is EndReason.CONFIG_INVALID
    assert bench.record(leaves[0]).state is TaskState.SUCCEEDED
    assert bench.record(leaves[3]).message == "exit code 3"


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
def test_functions_of_the_workers_own_python_run_beside_those_of_an_environment(
    bench: Bench, wheels: Path, warm: bool
) -> None:
    terms = {"environment": environment(bench, "tinytool==1.0"), "snapshot": code(bench)}
    own = [bench.function("give", number) for number in range(3)]
    theirs = [function(f"{number}", "lab_body:give", number, **terms) for number in range(3)]
    bench.put(*(task for pair in zip(own, theirs, strict=True) for task in pair))
    asked = bench.command("sh", "-c", "echo ${RUNTIME_PYTHON-none} ${VIRTUAL_ENV-none}")
    bench.put(asked)

    bench.run(reuse_process=warm)

    assert [bench.record(task).value for task in (*own, *theirs)] == [0, 1, 2, 0, 1, 2]
    assert bench.record(asked).log == f"none {os.environ.get('VIRTUAL_ENV', 'none')}\n"


def test_experiments_function_in_an_environment_gets_its_run_and_returns_any_value(bench: Bench, wheels: Path) -> None:
    from runtime.client.tasks.returned import read_end
    from runtime.tasks.model import CALL_REQUEST

    terms = {"environment": environment(bench, "tinytool==2.0"), "snapshot": code(bench)}
    request = {"name": "sac", "run": True, "args": [], "kwargs": {}, "packed": False, "item": {"lr": 0.1}, "number": 4}
    tasks = [
        function(name, CALL_REQUEST, {**request, "function": f"lab_body:{name}"}, **terms) for name in ("train", "odd")
    ]
    bench.put(*tasks)

    bench.run()

    trained, odd = (bench.record(task) for task in tasks)
    assert trained.value == {"loss": 0.1, "index": 4, "version": "2.0"}
    assert trained.metrics == {"loss": 0.25}
    assert read_end(bench.records, odd.task_id, 1, loads=True)() == {1, 2}


def test_workflow_in_an_environment_runs_by_the_workers_own_copy_of_this_package(
    bench: Bench, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # jsonargparse, which reads a workflow's arguments, is the environment's own in real use.
    import jsonargparse

    identity = environment(bench, "tinytool==1.0", "jsonargparse-stub==1")
    del jsonargparse, identity
