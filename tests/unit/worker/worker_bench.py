"""A worker in this process over one embedded file, with real children and bodies for them to run."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.queues.base import Queue
from runtime.queues.sqlite.queue import SqliteQueue, open_sqlite
from runtime.records.base import RecordStore
from runtime.records.sqlite_file import EmbeddedFile
from runtime.tasks.history import EndedNote, Record
from runtime.tasks.model import CommandEntry, FunctionEntry, Task
from runtime.testing import sample_task
from runtime.worker.options import WorkerOptions, WorkerResult
from runtime.worker.worker import Worker
from runtime.worker.worker_log import WorkerLog
from tests.services_support import wait_until

ROOT = Path(__file__).parents[3]
IDLE = timedelta(seconds=0.05)
EXPERIMENT = "sample"

BODIES = """
import os, signal, sys, time
from pathlib import Path

from runtime import current_attempt

HERE = Path(__file__).parent


def give(value=None):
    return value


def pid():
    return os.getpid()


def note(name):
    with open(HERE / "order", "a") as file:
        file.write(name + "\\n")
    return name


def fail(text="no"):
    raise ValueError(text)


def fail_first(name):
    path = HERE / f"{name}.failed"
    if not path.exists():
        path.touch()
        raise RuntimeError("once")
    return current_attempt().attempt


def wait(name):
    (HERE / f"{name}.began").touch()
    while not (HERE / f"{name}.go").exists():
        time.sleep(0.01)
    return name


def stubborn(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return wait(name)


def polite(name):
    attempt = current_attempt()
    attempt.should_stop()
    (HERE / f"{name}.began").touch()
    while not attempt.should_stop():
        time.sleep(0.01)
    return attempt.stop_reason


def write(text):
    (current_attempt().output_dir / "result.txt").write_text(text)
    return "wrote"


def scratch():
    (current_attempt().scratch_dir / "part").write_text("x")


def talk(lines):
    for number in range(lines):
        print(f"line {number}", file=sys.stderr if number % 2 else sys.stdout)


def report():
    current_attempt().report(loss=0.5)
    current_attempt().report(loss=0.25, accuracy=0.9)


def learn(fails=False):
    run = current_attempt()
    for step in range(3):
        run.progress(step, 3, loss=[3.0, 1.0, 2.0][step])
    os.system("echo '{\\"accuracy\\": 0.5}' >> $RUNTIME_METRICS")
    if fails:
        raise ValueError("diverged")


def watch():
    run = current_attempt()
    run.progress(1, 4, loss=0.5)
    return wait("watch")


def say(kind):
    # What no text file takes, in all the places where a task may say something.
    odd = {"surrogate": "a\\udcff b\\ud800", "nul": "a\\0b"}[kind]
    os.write(1, b"log \\xff\\n")
    current_attempt().progress(1, text=odd, **{odd: 0.5})
    return [odd, {odd: float("inf")}]


def raise_odd():
    raise ValueError("a\\udcff b")


def long_number():
    sys.set_int_max_str_digits(0)
    return 10**5000
"""


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "tasks.db"
        self.code = folder / "code"
        self.log = io.StringIO()
        self.elsewhere = False
        self._queue: Queue
        self.records: RecordStore
        self._queue, self.records = open_sqlite(self.path)

    # tasks

    def put(self, *tasks: Task) -> None:
        self._queue.put(tasks)

    def function(self, name: str, *args: Any, key: str | None = None, **fields: Any) -> Task:
        key = key or f"{name} {args}"
        return sample_task(key, entry=FunctionEntry(f"worker_bodies:{name}", args), **fields)

    def command(self, *argv: str, **fields: Any) -> Task:
        return sample_task(" ".join(argv), entry=CommandEntry(argv), **fields)

    def began(self, name: str) -> None:
        """Wait until a body has begun."""
        assert wait_until((self.code / f"{name}.began").exists), self.log.getvalue()

    def let_go(self, name: str) -> None:
        (self.code / f"{name}.go").touch()

    # workers

    def open_queue(self) -> Queue:
        return open_pair_with_folder(self)[0] if self.elsewhere else open_sqlite(self.path)[0]

    def keep_records_elsewhere(self) -> None:
        """Have the records in a folder beside the file, from the first task on."""
        self._queue.close()
        self.elsewhere = True
        self._queue, self.records = open_pair_with_folder(self)

    def run(self, queue: Queue | None = None, **options: Any) -> WorkerResult:
        """Run a worker until it is idle, unless the options set another end."""
        queue = queue or self.open_queue()
        try:
            return self._worker(queue, options).run()
        finally:
            queue.close()

    def _worker(self, queue: Queue, options: dict[str, Any]) -> Worker:
        options = {"idle_timeout": IDLE, **options}
        return Worker(queue, WorkerOptions(**options), reporter=WorkerLog(self.log, json_lines=True))

    @contextmanager
    def running(self, *, over: Callable[[Queue], Any] = lambda queue: queue, **options: Any) -> Iterator[Running]:
        """Run a worker in a thread, without an idle time-out; at the end it is stopped and has left.

        `over` may wrap the worker's queue.
        """
        running = Running(lambda queue: self._worker(over(queue), {"idle_timeout": None, **options}), self.open_queue)
        try:
            yield running
        finally:
            running.worker.stop()
            running.worker.stop()
            running.join()

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [event for event in events if event["event"] == kind]

    # outcomes

    def record(self, task: Task, *, records: RecordStore | None = None) -> Record:
        found = (records or self.records).find(task.id, task.generation)
        assert found is not None, f"no record of {task.key}:\n{self.log.getvalue()}"
        return found

    def notes(self, task: Task) -> list[EndedNote]:
        return list(self.records.history(task.id, task.generation).ended)

    def close(self) -> None:
        self._queue.close()


class Running:
    def __init__(self, make: Callable[[Queue], Worker], open_queue: Callable[[], Queue]) -> None:
        self._made = threading.Event()
        self.worker: Worker
        self.result: WorkerResult | None = None
        self._failure: BaseException | None = None

        def serve() -> None:
            queue = open_queue()
            try:
                self.worker = make(queue)
                self._made.set()
                self.result = self.worker.run()
            except BaseException as failure:
                self._failure = failure
                self._made.set()
            finally:
                queue.close()

        self._thread = threading.Thread(target=serve, name="worker")
        self._thread.start()
        self._made.wait()

    def join(self, timeout_s: float = 240) -> WorkerResult:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the worker has not left"
        if self._failure is not None:
            raise self._failure
        assert self.result is not None
        return self.result


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    opened = Bench(tmp_path)
    opened.code.mkdir()
    (opened.code / "worker_bodies.py").write_text(BODIES)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(opened.code)
    monkeypatch.syspath_prepend(opened.code)
    yield opened
    opened.close()
    # A thread of the last worker may still be checking the leftovers of others.
    assert wait_until(lambda: not list((tmp_path / "tmp").glob("*/*"))), "scratch was left"


@pytest.fixture(params=["embedded", "folder"])
def stored(request: pytest.FixtureRequest, bench: Bench) -> None:
    """The records are in the queue's file, or in a folder."""
    if request.param == "folder":
        bench.keep_records_elsewhere()


def open_pair_with_folder(bench: Bench) -> tuple[Queue, RecordStore]:
    """Open the embedded queue with its records in a folder."""
    from runtime.records import open_records

    (bench.folder / "records").mkdir(exist_ok=True)
    return open_pair_with_records(bench, open_records(f"file:{bench.folder / 'records'}"))


def open_pair_with_records(bench: Bench, records: RecordStore) -> tuple[Queue, RecordStore]:
    """Open the embedded queue with its records elsewhere."""
    return SqliteQueue(EmbeddedFile(bench.path), records), records


def start_command(bench: Bench, *args: str, **environment: str) -> subprocess.Popen[str]:
    """Run `runtime worker` on the bench's file."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(bench.code))),
        "RUNTIME_QUEUE": f"sqlite:{bench.path}",
        "RUNTIME_PREEMPTION_NOTICES": "off",
        "TMPDIR": str(bench.folder / "tmp"),
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "runtime", "worker", *args],
        env=env,
        cwd=bench.code,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ago(**span: float) -> datetime:
    return datetime.now(UTC) - timedelta(**span)
