"""Tasks with their code: the submitted code runs, wherever the worker was started and whatever ran before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.client.tasks.task_snapshot import WITHOUT
from runtime.end_reasons import EndReason
from runtime.queues.base import Queue
from runtime.queues.sqlite.queue import SqliteQueue
from runtime.records import open_records
from runtime.records.base import RecordStore
from runtime.records.sqlite_file import EmbeddedFile
from runtime.snapshots.snapshot import take_snapshot
from runtime.tasks.history import Record
from runtime.tasks.model import CommandEntry, FunctionEntry, Task, TaskState
from runtime.testing import sample_task
from tests.fakes.gcs import GcsServer
from tests.unit.worker.worker_bench import ROOT, Bench, bench, open_pair_with_folder

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="attempts' trees are seen through /proc")


def write_all(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def command(*argv: str, key: str, **fields: Any) -> Task:
    return sample_task(key, entry=CommandEntry(argv), **{"max_failures": 1, **fields})


def shell(script: str, key: str, **fields: Any) -> Task:
    return command("sh", "-c", script, key=key, **fields)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_all(
        tmp_path / "source",
        {"a.txt": "one\n", "pkg/b.txt": "two\n", "lab_code.py": "def version():\n    return 'first'\n"},
    )


# the tree of an attempt


LOOK = "find . -type f -not -name '*.pyc' | sort | xargs md5sum; stat -c '%a %n' a.txt; readlink link || true"
DEEDS = {
    "writes in place": "printf 'eno\\n' 1<> a.txt",
    "writes in place at once and again": "for i in 1 2 3; do printf '%s' \"$i\" 1<> a.txt; done",
    "appends": "echo more >> pkg/b.txt",
    "removes": "rm -r pkg a.txt",
    "leaves files": "mkdir -p out/deep; echo 1 > out/deep/x; echo 1 > pkg/new",
    "leaves a daemon that writes": "(while :; do echo x >> pkg/b.txt; sleep 0.01; done) >/dev/null 2>&1 &",
    "replaces a folder by a link": "mv pkg /tmp/x.$$; ln -s /tmp/x.$$ pkg",
    "changes modes": "chmod 000 a.txt; chmod 500 pkg",
    "removes what lies beside its tree": "rm -rf ../* ../.[!.]*",
    "dies": "echo 1 > left; echo x > a.txt; kill -9 $$",
}


def test_attempt_finds_the_tree_as_it_was_submitted_whatever_those_before_it_did(bench: Bench, source: Path) -> None:
    identity = take_snapshot(source, bench.records)
    first = shell(LOOK, "first look", snapshot=identity)
    looks = {deed: shell(LOOK, f"look after: {deed}", snapshot=identity) for deed in DEEDS}
    bench.put(first)
    for deed, script in DEEDS.items():
        bench.put(*(shell(script, f"{deed} {number}", snapshot=identity) for number in range(2)), looks[deed])

    bench.run(max_consecutive_failures=0)

    seen = bench.record(first)
    assert seen.state is TaskState.SUCCEEDED
    assert seen.log.count("\n") == 4
    assert [deed for deed, look in looks.items() if bench.record(look).log != seen.log] == []
    assert (source / "a.txt").read_text() == "one\n"


def test_attempt_that_was_killed_at_its_time_limit_leaves_the_next_a_whole_tree(bench: Bench, source: Path) -> None:
    from datetime import timedelta

    identity = take_snapshot(source, bench.records)
    slow = shell("rm -r pkg; sleep 60", "slow", snapshot=identity, timeout=timedelta(seconds=0.5))
    after = shell("cat pkg/b.txt", "after", snapshot=identity)
    bench.put(slow, after)

    bench.run(max_consecutive_failures=0)

    assert bench.record(slow).reason is EndReason.TIMEOUT
    assert bench.record(after).log == "two\n"


@pytest.mark.parametrize(
    "deed", ["rm -rf ../../archive", 'rm -rf "$(readlink -f ../..)"', "echo garbage > ../../index; rm ../*.seen"]
)
@pytest.mark.daily(1)
def test_attempt_that_destroys_the_workers_copy_of_the_code_costs_the_next_one_try(
    bench: Bench, source: Path, deed: str
) -> None:
    identity = take_snapshot(source, bench.records)
    vandal = shell(f"echo x > a.txt; {deed}", "vandal", snapshot=identity)
    after = [shell("cat a.txt", f"after {number}", snapshot=identity, max_failures=2) for number in range(3)]
    bench.put(vandal, *after)

    bench.run(max_consecutive_failures=0)

    assert {bench.record(task).log for task in after} == {"one\n"}
    assert sum(len(bench.notes(task)) for task in after) == 1


def test_attempts_of_several_slots_have_a_tree_each(bench: Bench, source: Path) -> None:
    identity = take_snapshot(source, bench.records)
    tasks = [
        shell(f"echo {number} > mine; sleep 0.05; cat mine; ls", f"slot {number}", snapshot=identity)
        for number in range(6)
    ]
    bench.put(*tasks)

    bench.run(slots=3)

    logs = [bench.record(task).log.partition("runtime: ")[0] for task in tasks]
    assert logs == [f"{number}\na.txt\nlab_code.py\nmine\npkg\n" for number in range(6)]


def test_log_says_what_an_attempt_left_in_its_copy_of_the_code(bench: Bench, source: Path) -> None:
    identity = take_snapshot(source, bench.records)
    one = shell("echo 1 > results.csv; echo 1 > $RUNTIME_OUTPUT_DIR/kept", "one", snapshot=identity)
    many = shell("touch a b c d", "many", snapshot=identity)
    none = shell("echo 2 > $RUNTIME_SCRATCH_DIR/x", "none", snapshot=identity)
    bench.put(one, many, none)

    bench.run()

    assert bench.record(one).log == (
        "runtime: `results.csv` goes with the attempt's copy of the code; $RUNTIME_OUTPUT_DIR is kept\n"
    )
    assert bench.record(many).log == (
        "runtime: 4 files and folders (a, b, c, …) go with the attempt's copy of the code; $RUNTIME_OUTPUT_DIR is kept\n"
    )
    assert bench.record(none).log == ""


# where it starts


def test_attempt_starts_in_the_folder_it_was_submitted_from(bench: Bench, source: Path) -> None:
    identity = take_snapshot(source, bench.records)
    bound = shell("cat b.txt ../a.txt; basename $PWD", "in", snapshot=identity, folder="pkg")
    empty = shell("ls; ls ../..; basename $PWD", "empty", snapshot=identity, folder="not/there")
    bench.put(bound, empty)

    bench.run()

    assert bench.record(bound).log == "two\none\npkg\n"
    assert bench.record(empty).log == "a.txt\nlab_code.py\nnot\npkg\nthere\n"


def test_folder_that_leads_out_of_the_snapshot_through_a_link_is_not_made(bench: Bench, source: Path) -> None:
    outside = source.with_name("outside")
    outside.mkdir()
    (source / "link").symlink_to(outside)
    identity = take_snapshot(source, bench.records)
    made = shell("true", "made", snapshot=identity, folder="link/new")
    there = shell("pwd -P", "there", snapshot=identity, folder="link")
    bench.put(made, there)

    bench.run(max_consecutive_failures=0)

    assert (bench.record(made).reason, bench.record(made).message) == (
        EndReason.CONFIG_INVALID,
        "folder `link/new` leads out of the snapshot",
    )
    assert bench.record(there).log == f"{outside}\n"
    assert list(outside.iterdir()) == []


def test_modules_are_found_in_that_folder_first_then_in_src_then_in_the_tree(bench: Bench, tmp_path: Path) -> None:
    source = write_all(
        tmp_path / "source",
        {
            "here/one.py": "NAME = 'here'\n",
            "src/one.py": "NAME = 'src'\n",
            "src/two.py": "NAME = 'src'\n",
            "two.py": "NAME = 'tree'\n",
            "three.py": "NAME = 'tree'\n",
            "here/asks.py": "import one, two, three\ndef f():\n    return [one.NAME, two.NAME, three.NAME]\n",
        },
    )
    identity = take_snapshot(source, bench.records)
    function = sample_task("f", entry=FunctionEntry("asks:f"), snapshot=identity, folder="here")
    typed = command(sys.executable, "-c", "import asks; print(*asks.f())", snapshot=identity, folder="here", key="c")
    bench.put(function, typed)

    bench.run()

    assert bench.record(function).value == ["here", "src", "tree"]
    assert bench.record(typed).log == "here src tree\n"


def test_code_that_was_submitted_comes_before_the_same_package_installed_as_a_link(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = write_all(tmp_path / "live", {"src/linked_lab/__init__.py": "V = 'submitted'\n"})
    write_all(live, {"src/linked_lab/__main__.py": "from linked_lab import V\nprint(V)\n"})
    write_all(live, {"src/linked_lab/work.py": "from linked_lab import V\ndef f():\n    return V\n"})
    identity = take_snapshot(live, bench.records)
    write_all(live, {"src/linked_lab/__init__.py": "V = 'edited later'\n"})
    monkeypatch.setenv("PYTHONPATH", str(live / "src"))
    monkeypatch.syspath_prepend(live / "src")
    typed = command(sys.executable, "-m", "linked_lab", snapshot=identity, key="bound")
    function = sample_task("f", entry=FunctionEntry("linked_lab.work:f"), snapshot=identity)
    own = command(sys.executable, "-m", "linked_lab", key="own")
    bench.put(typed, function, own)

    bench.run()

    assert bench.record(typed).log == "submitted\n"
    assert bench.record(function).value == "submitted"
    assert bench.record(own).log == "edited later\n"


# several snapshots on one worker


@pytest.mark.parametrize("reuse_process", [False, True])
def test_functions_of_several_snapshots_never_meet_each_others_modules(
    bench: Bench, tmp_path: Path, reuse_process: bool
) -> None:
    tasks = {}
    for version in ("one", "two", "three"):
        source = write_all(
            tmp_path / version,
            {
                "lab_helper.py": f"VALUE = {version!r}\n",
                "lab_code.py": "import lab_helper\ndef f(n):\n    return [lab_helper.VALUE, n]\n",
            },
        )
        identity = take_snapshot(source, bench.records)
        for number in range(8):
            task = sample_task(f"{version} {number}", entry=FunctionEntry("lab_code:f", (number,)), snapshot=identity)
            tasks[task.id] = task, [version, number]
    mixed = sorted(tasks.values(), key=lambda each: each[0].id)
    bench.put(*(task for task, _ in mixed))

    bench.run(reuse_process=reuse_process, slots=2)

    assert {task.id: bench.record(task).value for task, _ in mixed} == {task.id: value for task, value in mixed}
    assert {bench.record(task).code for task, _ in mixed} == {task.snapshot for task, _ in mixed}


def test_warm_functions_of_one_snapshot_share_a_process_and_other_folders_do_not(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # If a task were slow, the tasks leased ahead would go back, and the process would be replaced.
    monkeypatch.setattr("runtime.worker.dispatch.LOOK_AHEAD_S", 600.0)
    source = write_all(tmp_path / "source", {f"{folder}/config.py": f"NAME = {folder!r}\n" for folder in ("a", "b")})
    write_all(source, {"work.py": "import os, config\ndef f():\n    return [config.NAME, os.getpid()]\n"})
    identity = take_snapshot(source, bench.records)
    tasks = [
        sample_task(f"{folder} {number}", entry=FunctionEntry("work:f"), snapshot=identity, folder=folder)
        for folder in ("a", "b", "a")
        for number in range(3)
    ]
    bench.put(*{task.id: task for task in tasks}.values())

    bench.run(reuse_process=True)

    found = [bench.record(task).value for task in tasks]
    assert [name for name, _ in found] == ["a"] * 3 + ["b"] * 3 + ["a"] * 3
    assert len({pid for _, pid in found}) == 2


def test_warm_function_does_not_see_files_that_another_left(bench: Bench, tmp_path: Path) -> None:
    source = write_all(
        tmp_path / "source",
        {"work.py": "import os\ndef f(n):\n    open(f'left-{n}', 'w').close()\n    return sorted(os.listdir('.'))\n"},
    )
    identity = take_snapshot(source, bench.records)
    tasks = [
        sample_task(f"n {number}", entry=FunctionEntry("work:f", (number,)), snapshot=identity) for number in range(5)
    ]
    bench.put(*tasks)

    bench.run(reuse_process=True)

    for number, task in enumerate(tasks):
        assert [name for name in bench.record(task).value if name != "__pycache__"] == [f"left-{number}", "work.py"]


def test_tasks_with_and_without_code_of_their_own_run_on_one_warm_worker(bench: Bench, source: Path) -> None:
    identity = take_snapshot(
        write_all(source, {"worker_bodies.py": "def give(value):\n    return ['snapshot', value]\n"}), bench.records
    )
    tasks = [
        bench.function("give", number, snapshot=identity if number % 2 else None, key=f"give {number}")
        for number in range(6)
    ]
    bench.put(*tasks)

    bench.run(reuse_process=True)

    assert [bench.record(task).value for task in tasks] == [0, ["snapshot", 1], 2, ["snapshot", 3], 4, ["snapshot", 5]]


@pytest.fixture(params=["folder", "gs"])
def remote(
    request: pytest.FixtureRequest, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Queue, RecordStore]]:
    """The embedded queue with its records elsewhere."""
    if request.param == "folder":
        yield open_pair_with_folder(bench)
        return
    server = GcsServer().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    records = open_records("gs://lab/p")
    yield SqliteQueue(EmbeddedFile(bench.path), records), records
    server.stop()


def test_snapshot_is_fetched_once_for_all_tasks_that_wait_for_it(
    bench: Bench, source: Path, remote: tuple[Queue, RecordStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, records = remote
    identity = take_snapshot(source, records)
    tasks = [shell("cat a.txt", f"n {number}", snapshot=identity) for number in range(10)]
    queue.put(tasks)
    fetched: list[str] = []
    real = type(records).get_blob

    def get_blob(self: Any, reference: str) -> bytes:
        fetched.append(reference)
        return real(self, reference)

    monkeypatch.setattr(type(records), "get_blob", get_blob)

    bench.run(queue, slots=3)

    assert fetched == [f"snapshots/{identity.removeprefix('sha256:')}"]
    assert {bench.record(task, records=records).log for task in tasks} == {"one\n"}


def test_every_task_of_a_snapshot_that_is_gone_fails_and_others_run(bench: Bench, source: Path) -> None:
    identity = take_snapshot(source, bench.records)
    gone = [shell("true", f"gone {number}", snapshot="sha256:" + "0" * 64) for number in range(3)]
    good = [shell("cat a.txt", f"good {number}", snapshot=identity) for number in range(3)]
    bench.put(*gone, *good)

    bench.run(max_consecutive_failures=0)

    assert {bench.record(task).reason for task in gone} == {EndReason.SETUP_FAILED}
    assert {bench.record(task).log for task in good} == {"one\n"}


# through the users' commands


@pytest.fixture
def typed(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `runtime …` as typed in a folder of the test's own project."""
    environ = {**os.environ, "RUNTIME_DATA_DIR": str(tmp_path / "data"), "PYTHONPATH": str(ROOT)}

    def run(*words: str, folder: str = "project") -> subprocess.CompletedProcess[str]:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            [sys.executable, "-m", "runtime", *words],
            cwd=tmp_path / folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


def record_of(tmp_path: Path, task: str) -> Record:
    from runtime.queues.sqlite.queue import open_sqlite

    queue, records = open_sqlite(tmp_path / "data" / "local.db")
    try:
        found = records.find(task, 1)
        assert found is not None
        return found
    finally:
        queue.close()
        records.close()


OTHER = "for that, name another `--experiment` or `--key` (`runtime retry` runs the earlier code again)"


def named(record: Record) -> str:
    return f"`{str(record.code)[:19]}`"


def test_command_runs_the_code_it_was_submitted_with_by_a_worker_of_another_folder(
    tmp_path: Path, typed: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    write_all(
        tmp_path / "project", {"runtime.toml": "", "sub/v.py": "import helper\n", "sub/helper.py": "print('a')\n"}
    )
    submitted = typed("submit", "--", sys.executable, "v.py", folder="project/sub")
    write_all(tmp_path / "project", {"sub/helper.py": "print('edited later')\n"})

    again = typed("submit", "--", sys.executable, "v.py", folder="project/sub")
    other = typed("submit", "-e", "second", "--", sys.executable, "v.py", folder="project/sub")
    own = typed("submit", "--no-snapshot", "-e", "third", "--", sys.executable, "v.py", folder="project/sub")
    worker = typed("worker", "--idle-timeout", "0.1s", folder="elsewhere")

    assert (submitted.returncode, again.returncode, worker.returncode) == (0, 0, 0), worker.stderr
    first = record_of(tmp_path, submitted.stdout.strip())
    assert (first.state, first.log) == (TaskState.SUCCEEDED, "a\n")
    second = record_of(tmp_path, other.stdout.strip())
    assert again.stdout == submitted.stdout
    assert again.stderr.splitlines()[:3] == [
        "0 tasks submitted to queue `default` of stack `local`, experiment `default`",
        "it was already submitted",
        f"what was submitted before runs, or ran, {named(first)} and not {named(second)}; {OTHER}",
    ]
    assert second.log == "edited later\n"
    assert record_of(tmp_path, own.stdout.strip()).state is TaskState.FAILED


def test_workflow_and_function_lines_run_the_code_they_were_submitted_with(
    tmp_path: Path, typed: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    code = "def w(n: int) -> str:\n    return f'submitted {n}'\nworkflows = {'w': w}\n"
    write_all(tmp_path / "project", {"runtime.toml": 'env_files = [".env"]\n', "mylab.py": code, ".env": "A=1\n"})
    write_all(tmp_path / "project", {".runtimeignore": ".env\n", "lines": '{"function": "mylab:w", "args": [2]}\n'})
    write_all(tmp_path / "elsewhere", {"runtime.toml": "", ".env": "A=2\n"})
    workflow = typed("submit", "mylab", "w", "--n=1")
    function = typed("submit", "--from", "lines")
    write_all(tmp_path / "project", {"mylab.py": code.replace("submitted", "edited later")})

    worker = typed("worker", "--idle-timeout", "0.1s", folder="elsewhere")

    assert worker.returncode == 0, worker.stderr
    assert record_of(tmp_path, workflow.stdout.strip()).value == "submitted 1"
    assert record_of(tmp_path, function.stdout.strip()).value == "submitted 2"


def test_submit_from_a_home_is_refused_with_what_to_do(
    tmp_path: Path, typed: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    environ = {**os.environ, "RUNTIME_DATA_DIR": str(tmp_path / "data"), "PYTHONPATH": str(ROOT)}
    write_all(tmp_path / "home", {".bash_history": "secret\n"})

    def submit(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "runtime", "submit", *words, "--", "hostname"],
            cwd=tmp_path / "home",
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    refused, taken = submit(), submit("--no-snapshot")

    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        f"error: `{tmp_path}/home` is no project, and its snapshot would go with the tasks",
        "  it is a home, or lies above one, and has neither a project file nor a git work tree",
        "hint: submit from the folder of the code, or name it with `--snapshot FOLDER`; " + WITHOUT,
    ]
    assert taken.returncode == 0
