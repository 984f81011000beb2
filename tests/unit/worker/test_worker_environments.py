"""Tasks with an environment: they run with the Python and the packages that they were submitted with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.client.tasks.call_results import read_end, read_task_log
from runtime.end_reasons import EndReason
from runtime.snapshots.environment import Packages, put_packages
from runtime.snapshots.snapshot import take_snapshot
from runtime.tasks.calls import CALL_REQUEST
from runtime.tasks.model import CommandEntry, FunctionEntry, Task, TaskState, WorkflowEntry
from runtime.testing import sample_task
from tests.services_support import wait_until
from tests.shim_support import is_running
from tests.unit.worker.worker_bench import EXPERIMENT, Bench, ago, bench, start_command

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the tests look at processes in /proc")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
WHICH = "import sys, tinytool; print(tinytool.VERSION, sys.prefix)"


def make_wheel(
    wheels: Path, version: str, name: str = "tinytool", *, folder: Path | None = None, needs: str = ""
) -> None:
    """Make a wheel with the modules of a folder, or with one module that has the version."""
    wheels.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        if folder is None:
            wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        for path in folder.rglob("*.py") if folder else ():
            wheel.write(path, f"{name}/{path.relative_to(folder)}")
        more = f"Requires-Dist: {needs}\n" if needs else ""
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
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
    shutil.rmtree(bench.folder / "tmp" / f"runtime-environments-{os.geteuid()}", ignore_errors=True)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that keeps environments, so that tests of their use do not make one each."""
    return tmp_path_factory.mktemp("machine")


@pytest.fixture
def made_before(wheels: Path, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(machine))


def places(bench: Bench) -> Path:
    return Path(tempfile.gettempdir(), f"runtime-environments-{os.geteuid()}")


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


NO_JSON = (
    "the function returned set, which is no JSON value: Object of type set is not JSON serializable; return plain numbers, "
    "texts, lists and dicts, and write the rest to the output folder"
)
BODY = """
import os, signal, sys, time
from pathlib import Path

import tinytool


def version():
    return tinytool.VERSION, sys.prefix


def give(value):
    return value


def give_odd():
    return [1, None, "ä\\ud800", {"a": float("inf")}]


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


def tool(size: int):
    return {"size": size, "version": tinytool.VERSION, "of the file": os.environ.get("SECRET_SIZE")}


workflows = {"tool": tool}
"""


def code(bench: Bench, **files: str) -> str:
    folder = bench.folder / "source"
    folder.mkdir(exist_ok=True)
    (folder / "lab_body.py").write_text(BODY)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return take_snapshot(folder, bench.records)


def test_function_of_an_environment_returns_raises_and_leaves_as_in_the_workers_own(
    bench: Bench, made_before: None
) -> None:
    terms = {"environment": environment(bench, "tinytool==1.0"), "snapshot": code(bench)}
    names = {
        "version": (),
        "give_odd": (),
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
    assert ended["give_odd"].value == [1, None, "ä\ud800", {"a": float("inf")}]
    assert ended["keep"].value is True
    assert ended["keep"].log == "looked at result\n"
    assert Path(str(ended["keep"].outputs_url), "result").read_text() == "1.0"
    assert {name: (each.reason, each.message) for name, each in ended.items() if each.state is TaskState.FAILED} == {
        "give_set": (EndReason.APP_FAILED, NO_JSON),
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
    bench: Bench, made_before: None, warm: bool
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


def test_experiments_function_in_an_environment_gets_its_run_and_returns_any_value(
    bench: Bench, made_before: None
) -> None:
    terms = {"environment": environment(bench, "tinytool==1.0"), "snapshot": code(bench)}
    request = {"name": "sac", "run": True, "args": [], "kwargs": {}, "packed": False, "item": {"lr": 0.1}, "number": 4}
    tasks = [
        function(name, CALL_REQUEST, {**request, "function": f"lab_body:{name}"}, **terms) for name in ("train", "odd")
    ]
    bench.put(*tasks)

    bench.run()

    trained, odd = (bench.record(task) for task in tasks)
    assert trained.value == {"loss": 0.1, "index": 4, "version": "1.0"}
    assert trained.metrics == {"loss": 0.25}
    assert read_end(bench.records, odd.task_id, 1, loads=True).take() == {1, 2}


def test_workflow_in_an_environment_runs_by_the_workers_own_copy_of_this_package(
    bench: Bench, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # jsonargparse and dotenv, which read a workflow's arguments and files of variables, come from the environment.
    import dotenv
    import jsonargparse
    import yaml

    for module in (dotenv, jsonargparse, yaml):
        make_wheel(wheels, "1.0", module.__name__, folder=Path(str(module.__file__)).parent)
    (bench.folder / "source").mkdir()
    (bench.folder / "source" / "runtime.toml").write_text('env_files = [".env"]\n')
    (bench.folder / ".env").write_text("SECRET_SIZE=7\n")
    monkeypatch.chdir(bench.folder)
    terms = {
        "environment": environment(bench, "tinytool==1.0", "dotenv==1.0", "jsonargparse==1.0", "yaml==1.0"),
        "snapshot": code(bench),
        "max_failures": 1,
    }
    tool = sample_task("tool", entry=WorkflowEntry("lab_body", "tool", ("--size=3",)), **terms)
    wrong = sample_task("wrong", entry=WorkflowEntry("lab_body", "tool", ("--sise=3",)), **terms)
    missing = sample_task("missing", entry=WorkflowEntry("lab_body", "no-such"), **terms)
    bench.put(tool, wrong, missing)

    bench.run(max_consecutive_failures=0)

    # The file of variables, which is in no snapshot, is that of the project that the worker was started in.
    assert bench.record(tool).value == {"size": 3, "version": "1.0", "of the file": "7"}, bench.record(tool).message
    assert [bench.record(task).reason for task in (wrong, missing)] == [EndReason.CONFIG_INVALID] * 2
    assert "no-such" in str(bench.record(missing).message)


@pytest.mark.nightly
def test_frozen_list_is_installed_as_it_is_whatever_its_packages_ask_for(bench: Bench, wheels: Path) -> None:
    make_wheel(wheels, "1.0", "needy", needs="tinytool==2.0")
    files = {"requirements.txt": "needy==1.0\ntinytool==1.0\n"}
    frozen, locked = (
        put_packages(Packages(manager="pip", python=HERE, files=files, complete=complete), bench.records)
        for complete in (True, False)
    )
    tasks = [look("frozen", frozen), look("locked", locked)]
    bench.put(*tasks)

    bench.run(max_consecutive_failures=0)

    assert bench.record(tasks[0]).log.startswith("1.0 ")
    assert bench.record(tasks[1]).reason is EndReason.SETUP_FAILED


# what cannot be made


def test_lock_file_that_cannot_be_installed_fails_its_task_with_what_pip_said(bench: Bench, wheels: Path) -> None:
    task = look("wrong", environment(bench, "tinytool==3.0"))
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert (record.state, record.reason, record.attempts) == (TaskState.FAILED, EndReason.SETUP_FAILED, 1)
    assert "No matching distribution found for tinytool==3.0" in str(record.message)
    assert "-m pip install" in record.log
    assert list(places(bench).iterdir()) == []


def test_machine_without_the_python_leaves_the_task_to_other_workers(
    bench: Bench, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    stranger = look("stranger", environment(bench, "tinytool==1.0", python="3.99"))
    bench.put(stranger, bench.function("give", 1))

    with bench.running():
        assert wait_until(lambda: bool(bench.events("task_declined"))), bench.log.getvalue()
        assert wait_until(lambda: bench.records.totals(EXPERIMENT).counts[TaskState.SUCCEEDED] == 1)

    assert bench.records.find(stranger.id, 1) is None
    assert bench.notes(stranger) == []
    (said,) = bench.events("task_declined")
    assert "needs Python 3.99, and neither it nor uv is on PATH" in json.dumps(said)
    assert bench.record(bench.function("give", 1)).value == 1


FULL = """#!/bin/sh
echo "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
exit 1
"""


def fake_python(bench: Bench, monkeypatch: pytest.MonkeyPatch, script: str, minor: str = "3.98") -> Path:
    """Put a Python on PATH whose environments have an interpreter that runs `script`."""
    folder = bench.folder / "bin"
    folder.mkdir()
    (folder / "inner").write_text(script)
    program = folder / f"python{minor}"
    program.write_text(
        f'#!/bin/sh\n[ "$2" = -c ] && {{ echo {minor}; exit; }}\n'
        f'mkdir -p "$4/bin"; cp "{folder}/inner" "$4/bin/python"; chmod 755 "$4/bin/python"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_full_disk_buries_no_task_and_leaves_nothing(
    bench: Bench, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(bench, monkeypatch, FULL)
    task = look("full", environment(bench, "tinytool==1.0", python="3.98"))
    bench.put(task)

    with bench.running():
        assert wait_until(lambda: bool(bench.events("task_declined"))), bench.log.getvalue()

    assert bench.records.find(task.id, 1) is None
    assert bench.notes(task) == []
    assert "No space left on device" in json.dumps(bench.events("task_declined"))
    assert list(places(bench).iterdir()) == []


def test_environment_that_the_store_does_not_have_fails_the_task(bench: Bench, wheels: Path) -> None:
    task = look("unknown", f"sha256:{'0' * 64}")
    bench.put(task)

    bench.run(max_consecutive_failures=0)

    assert bench.record(task).reason is EndReason.SETUP_FAILED


DAEMON = """#!/bin/sh
[ "$2" = -m ] || exec echo ran
setsid sleep 1000 &
echo $! > "$RECORD"
"""


def test_package_whose_build_leaves_a_daemon_keeps_no_task_waiting(
    bench: Bench, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(bench, monkeypatch, DAEMON)
    monkeypatch.setenv("RECORD", str(bench.folder / "daemon"))
    task = look("daemon", environment(bench, "tinytool==1.0", python="3.98"))
    bench.put(task)

    try:
        bench.run()
        assert bench.record(task).log == "ran\n"
    finally:
        os.kill(int((bench.folder / "daemon").read_text()), signal.SIGKILL)


def test_folder_of_another_user_is_left_alone(
    bench: Bench, wheels: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if os.geteuid():
        pytest.skip("only root gives a folder to somebody else")
    fake_python(bench, monkeypatch, "#!/bin/sh\necho ran\n")
    task = look("own", environment(bench, "tinytool==1.0", python="3.98"))
    places(bench).mkdir()
    os.chown(places(bench), 12345, 12345)
    bench.put(task)

    bench.run()

    assert bench.record(task).log == "ran\n"
    assert list(places(bench).iterdir()) == []
    (own,) = (bench.folder / "tmp").glob("runtime-environments-*-*")
    shutil.rmtree(own)


# while it is made

SLOW = """#!/bin/sh
echo $$ > "$RECORD.new"
mv "$RECORD.new" "$RECORD"
exec sleep 1000
"""


@pytest.fixture
def slow(bench: Bench, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose pip does not end; the file has its pid."""
    fake_python(bench, monkeypatch, SLOW)
    monkeypatch.setenv("RECORD", str(bench.folder / "pip"))
    return bench.folder / "pip"


def test_cancelled_task_ends_the_making_of_its_environment(
    bench: Bench, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.maintenance.RENEW_AT_LEAST_EVERY_S", 0.05)
    task = look("slow", environment(bench, "tinytool==1.0", python="3.98"), submitted_at=ago(seconds=5))
    bench.put(task)
    with bench.running():
        assert wait_until(slow.exists), bench.log.getvalue()
        assert bench.open_queue().cancel_open(EXPERIMENT) == 1  # type: ignore[attr-defined]
        assert wait_until(lambda: bench.records.find(task.id, 1) is not None)
        assert wait_until(lambda: not is_running(int(slow.read_text())))

    assert bench.record(task).state is TaskState.CANCELLED
    assert list(places(bench).iterdir()) == []


def test_worker_that_is_asked_to_leave_ends_the_making_and_gives_the_task_back(bench: Bench, slow: Path) -> None:
    task = look("slow", environment(bench, "tinytool==1.0", python="3.98"))
    bench.put(task)
    worker = start_command(bench, "--lease", "3s")
    assert wait_until(slow.exists)

    worker.send_signal(signal.SIGTERM)

    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0, said
    assert not is_running(int(slow.read_text()))
    assert list(places(bench).iterdir()) == []
    assert bench.notes(task) == []
    queue = bench.open_queue()
    assert [lease.task.id for lease in queue.lease(1, worker="test", ttl=timedelta(minutes=1))] == [task.id]
    queue.close()


def test_worker_that_is_killed_leaves_nothing_that_is_taken_for_an_environment(
    bench: Bench, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = look("slow", environment(bench, "tinytool==1.0", python="3.98"))
    bench.put(task)
    worker = start_command(bench)
    assert wait_until(slow.exists)
    worker.kill()
    worker.communicate(timeout=60)
    os.kill(int(slow.read_text()), signal.SIGKILL)
    (bench.folder / "bin" / "inner").write_text('#!/bin/sh\n[ "$2" = -m ] || echo ran; exit 0\n')

    bench.run(idle_timeout=timedelta(seconds=2))

    assert bench.record(task).log == "ran\n"


def test_workers_of_one_machine_make_an_environment_once(bench: Bench, wheels: Path) -> None:
    identity = environment(bench, "tinytool==1.0")
    tasks = [look(f"{number}", identity) for number in range(6)]
    bench.put(*tasks)

    workers = [start_command(bench, "--idle-timeout", "1s") for _ in range(3)]

    said = [worker.communicate(timeout=110)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], said
    assert len({bench.record(task).log for task in tasks}) == 1
    assert len([path for path in places(bench).iterdir() if path.is_dir() and not path.is_symlink()]) == 1


def test_making_an_environment_spends_none_of_the_tasks_time_and_keeps_its_lease(bench: Bench, wheels: Path) -> None:
    fast = look("fast", environment(bench, "tinytool==1.0"), timeout=timedelta(seconds=2))
    bench.put(fast)

    bench.run(lease=timedelta(seconds=1))

    record = bench.record(fast)
    assert (record.state, record.attempts) == (TaskState.SUCCEEDED, 1)
    log = read_task_log(bench.records, fast.id)
    assert "-m pip install" in log
    assert log.endswith(record.log)


@pytest.mark.parametrize("way", ["plain", "by its attempt"])
def test_function_in_an_environment_that_is_asked_to_stop_ends_as_in_the_workers_own(
    bench: Bench, made_before: None, way: str
) -> None:
    mark = bench.folder / "began"
    name = "wait" if way == "plain" else "look_at_attempt"
    terms = {"environment": environment(bench, "tinytool==1.0"), "snapshot": code(bench)}
    task = function(way, f"lab_body:{name}", str(mark), **terms)
    bench.put(task)
    with bench.running() as running:
        assert wait_until(mark.exists), bench.log.getvalue()
        running.worker.stop()
        running.join()

    if way == "plain":
        assert mark.with_name("began.left").exists()
        assert [note.reason for note in bench.notes(task)] == [EndReason.PREEMPTED]
    else:
        assert bench.record(task).value == task.id


# strangers


def test_snapshot_with_names_of_ours_and_of_the_standard_library_is_called_all_the_same(
    bench: Bench, made_before: None
) -> None:
    bad = "raise RuntimeError('the wrong module')\n"
    own = dict.fromkeys(("call", "json", "base64", "pip", "venv", "ensurepip", "site", "sitecustomize"), bad)
    snapshot = code(bench, **own)
    identity = environment(bench, "tinytool==1.0")
    (bench.folder / "source" / "requirements.txt").write_text("nothing==1\n")
    (bench.folder / "source" / ".runtime-call").mkdir()
    (bench.folder / "source" / ".runtime-call" / "call.json").write_text("{}")
    snapshot = take_snapshot(bench.folder / "source", bench.records)
    task = function("strange", "lab_body:version", environment=identity, snapshot=snapshot)
    bench.put(task)

    bench.run()

    assert bench.record(task).value[0] == "1.0"


@pytest.mark.nightly
def test_variables_of_the_worker_that_redirect_pip_change_nothing(
    bench: Bench, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = bench.folder / "elsewhere"
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH", "PIP_REQUIREMENT", "PIP_CONSTRAINT"):
        monkeypatch.setenv(name, str(elsewhere))
    monkeypatch.setenv("PIP_USER", "1")
    task = look("redirected", environment(bench, "tinytool==1.0"))
    bench.put(task)

    bench.run()

    assert bench.record(task).state is TaskState.SUCCEEDED, bench.record(task).message
    assert not elsewhere.exists()


@pytest.mark.nightly
def test_environment_folder_that_others_can_write_is_not_used(bench: Bench, wheels: Path) -> None:
    identity = environment(bench, "tinytool==1.0")
    bench.put(look("first", identity))
    bench.run()
    (home,) = [path.resolve() for path in places(bench).iterdir() if path.is_symlink()]
    home.chmod(0o777)
    again = look("again", identity)
    bench.put(again)

    bench.run()

    assert bench.record(again).state is TaskState.SUCCEEDED
    assert str(home) not in bench.record(again).log


SUBMIT = """
import os, runtime
from runtime.client.tasks.submit import submit

done = submit(["command"] and {"command": ["python", "-c", "import tinytool; print(tinytool.VERSION)"]},
    queue="sqlite:" + os.environ["QUEUE"], key="inner", experiment="sample")
print(done.environment)
"""


def test_tasks_that_an_attempt_submits_carry_its_environment(
    bench: Bench, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE", str(bench.path))
    identity = environment(bench, "tinytool==2.0")
    # The submitting Python is the worker's, by its path: it has this package's dependencies.
    outer = command("outer", sys.executable, "submits.py", environment=identity, snapshot=code(bench, submits=SUBMIT))
    bench.put(outer)

    bench.run(idle_timeout=timedelta(seconds=2), max_consecutive_failures=0)

    assert bench.record(outer).log == f"{identity}\n"
    assert bench.record(sample_task("inner")).log == "2.0\n"
