"""The embedded queue with its records in a folder: what a preempted or killed worker leaves, and what is durable."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.tasks.model import TaskState
from runtime.worker.attempts.scratch import remove_leftovers
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import ROOT, Bench, bench, open_pair_with_folder

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")

MORE_BODIES = """

def go_on(name):
    folder = Path(os.environ["RUNTIME_CHECKPOINT_DIR"])
    assert folder == current_attempt().checkpoint_dir
    if (folder / "step").exists():
        return [str(folder), (folder / "step").read_text()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step").write_text("7")
    return wait(name)
"""

WORKER = """
import sys
from pathlib import Path
from runtime.queues.sqlite.queue import SqliteQueue
from runtime.records import open_records
from runtime.records.sqlite_file import EmbeddedFile
from runtime.worker.options import WorkerOptions
from runtime.worker.run import run_worker

queue = SqliteQueue(EmbeddedFile(Path(sys.argv[1])), open_records(f"file:{sys.argv[2]}"))
run_worker(queue, WorkerOptions(slots=2, look_ahead=4))
"""


@pytest.fixture(autouse=True)
def bodies(bench: Bench) -> None:
    path = bench.code / "worker_bodies.py"
    path.write_text(path.read_text() + MORE_BODIES)


def path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def start_worker(bench: Bench) -> subprocess.Popen[bytes]:
    """Start a worker over the pair, in a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(bench.code))),
        "RUNTIME_PREEMPTION_NOTICES": "off",
        "TMPDIR": str(bench.folder / "tmp"),
    }
    words = [sys.executable, "-c", WORKER, str(bench.path), str(bench.folder / "records")]
    return subprocess.Popen(words, cwd=bench.code, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)


def test_task_that_was_preempted_finds_its_checkpoint_in_the_record_folder(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, records = open_pair_with_folder(bench)
    task = bench.function("go_on", "a")
    queue.put([task])
    monkeypatch.setattr(bench, "open_queue", lambda: open_pair_with_folder(bench)[0])
    with bench.running():
        bench.began("a")

    result = bench.run(queue)

    assert (result.exit_code, result.succeeded) == (0, 1), bench.log.getvalue()
    [preempted] = records.history(task.id, 1).ended
    assert (preempted.reason, preempted.progressed) == (EndReason.PREEMPTED, True)
    folder = bench.folder / "records" / "checkpoints" / task.id
    assert bench.record(task, records=records).value == [str(folder), "7"]


def test_killed_worker_leaves_a_note_of_each_attempt_that_ran_and_their_checkpoints(bench: Bench) -> None:
    queue, records = open_pair_with_folder(bench)
    running, waiting = [bench.function("go_on", name) for name in "ab"], [bench.function("give", n) for n in range(3)]
    queue.put([*running, *waiting])
    worker = start_worker(bench)
    bench.began("a")
    bench.began("b")
    worker.kill()
    worker.wait()

    result = bench.run(queue, slots=2, idle_timeout=None, max_tasks=5)
    remove_leftovers()  # The next worker does the same.

    assert (result.succeeded, result.failed) == (5, 0), bench.log.getvalue()
    for task in running:
        [lost] = records.history(task.id, 1).ended
        assert (lost.reason, lost.alone) == (EndReason.LOST, False)
        assert (lost.message or "").endswith(" vanished")
        folder = bench.folder / "records" / "checkpoints" / task.id
        record = bench.record(task, records=records)
        assert (record.value, record.attempts) == ([str(folder), "7"], 2)
    for task in waiting:
        assert records.history(task.id, 1).ended == ()
        assert bench.record(task, records=records).attempts == 1


def test_log_of_an_attempt_that_runs_can_be_read_before_it_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.worker.completion.LOG_EVERY_S", 0.02)
    monkeypatch.setattr("runtime.worker.completion.REMOTE_LOG_EVERY_S", 0.02)
    queue, records = open_pair_with_folder(bench)
    task = bench.command("sh", "-c", "echo begun; while [ ! -e a.go ]; do sleep 0.05; done; echo done")
    queue.put([task])
    monkeypatch.setattr(bench, "open_queue", lambda: open_pair_with_folder(bench)[0])
    logs = bench.folder / "records" / "logs" / task.id

    with bench.running():
        assert wait_until(lambda: [path.read_text() for path in logs.glob("*.log")] == ["begun\n"])
        running = records.find(task.id, 1)
        bench.let_go("a")
        assert wait_until(lambda: records.find(task.id, 1))

    assert running is None
    record = bench.record(task, records=records)
    assert record.log == "begun\ndone\n"
    assert record.log_url is not None
    assert b"".join(records.read_log(record.log_url)) == b"begun\ndone\n"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were made durable, and the names that were given to files, in order."""
    made: list[str] = []
    real_sync, real_link = os.fsync, os.link

    def sync(descriptor: int) -> None:
        made.append(f"sync {path_of(descriptor)}")
        real_sync(descriptor)

    def link(source: Any, target: Any, **more: Any) -> None:
        made.append(f"link {target}")
        real_link(source, target, **more)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "link", link)
    return made


def test_outputs_are_durable_before_the_record_that_names_them(bench: Bench, steps: list[str]) -> None:
    queue, records = open_pair_with_folder(bench)
    task = bench.function("write", "the result")
    queue.put([task])

    bench.run(queue)

    record = bench.record(task, records=records)
    assert record.outputs_url is not None
    outputs = Path(record.outputs_url)
    named = next((bench.folder / "records" / "records").rglob("*.json"))
    at = steps.index(f"link {named}")
    # Each name is synced with its folder, after what it names; then comes the record, which is synced in the same way.
    kept = [step for step in steps[:at] if "/records/outputs" in step]
    assert kept[-4:] == [
        f"sync {outputs / 'result.txt'}",
        f"sync {outputs}",
        f"sync {outputs.parent}",
        f"sync {outputs.parent.parent}",
    ]
    assert steps[at - 1].startswith(f"sync {named.parent}/.tmp-")
    assert steps[at + 1] == f"sync {named.parent}"


def fail_sync(match: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch, number: int = errno.EIO) -> None:
    real = os.fsync

    def sync(descriptor: int) -> None:
        if match(path_of(descriptor)):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)


@pytest.mark.parametrize("place", ["file", "folder", "above"])
def test_outputs_that_the_disk_does_not_keep_are_no_success(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    queue, records = open_pair_with_folder(bench)
    task = bench.function("write", "the result", max_failures=1)
    queue.put([task])
    depth = {"file": 3, "folder": 2, "above": 1}[place]

    def is_there(path: str) -> bool:
        _, outputs, below = path.partition(f"/outputs/{task.id}")
        return bool(outputs) and below.count("/") == depth - 1

    fail_sync(is_there, monkeypatch)

    bench.run(queue)

    record = bench.record(task, records=records)
    assert (record.state, record.reason, record.outputs_url) == (TaskState.FAILED, EndReason.SETUP_FAILED, None)
    assert os.strerror(errno.EIO) in (record.message or "")
