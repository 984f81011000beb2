"""Real workers over their own stack, bodies for them to run, and the checks after every scenario.

A `Yard` is a folder with everything of one scenario: data, scratch, records, code, and the bodies' output. Its workers
are real `runtime worker` processes. `Yard.check` inspects all of it afterwards; `find_problems`, a pure function with
tests of its own, decides which findings are problems.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from runtime.client.tasks.submit import submit
from runtime.config import load_settings
from runtime.outputs import PubSubQueueOutput, RecordsOutput, StackOutputs, encode_outputs
from runtime.records.base import RecordStore
from runtime.stack.open import OpenStack, open_stack
from runtime.tasks.history import EndedNote, Record
from runtime.tasks.model import TaskState
from runtime.worker.attempts import processes
from tests.services_support import wait_until

if TYPE_CHECKING:
    from runtime.queues.base import Queue
    from tests.services_support import PubsubEmulator

ROOT = Path(__file__).parents[2]
EXPERIMENT = "failures"
MARK = "FAILURE_YARD"
"""Names the yard in the environment of each of its processes."""

BODIES = '''
"""What the tasks of a failure scenario do. Each says first that it was begun, by which attempt and under which worker."""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

YARD = Path(os.environ["FAILURE_YARD"])


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def worker_pid():
    return parent_of(os.getppid())


def began(name):
    line = json.dumps({
        "name": name, "token": os.environ["RUNTIME_ATTEMPT_TOKEN"], "worker": worker_pid(), "pid": os.getpid(),
        "at": time.time(),
    })
    fd = os.open(YARD / "runs.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, line.encode() + b"\\n")
    os.close(fd)


def quick(name):
    began(name)
    return name


def held(name, gate=None):
    """Runs until its gate is opened."""
    began(name)
    while not (YARD / "gates" / (gate or name)).exists():
        time.sleep(0.01)
    return os.environ["RUNTIME_ATTEMPT_TOKEN"]


def short(name, seconds):
    began(name)
    time.sleep(seconds)
    return name


def kill_worker(name):
    began(name)
    os.kill(worker_pid(), signal.SIGKILL)
    time.sleep(600)


def wrong(name):
    began(name)
    raise ValueError(f"{name} cannot be right")


def wrong_once(name):
    """Fails until its gate is opened."""
    began(name)
    if not (YARD / "gates" / name).exists():
        raise RuntimeError("the input is not there yet")
    return name


def leave(name):
    began(name)
    sys.exit("nothing to do here")


def crash(name):
    began(name)
    ctypes.string_at(0)


def fill(name):
    """Takes memory in steps, so that a limit is seen to be crossed, and no more than a machine has."""
    began(name)
    kept = []
    while True:
        if len(kept) < 100:
            kept.append(b"x" * (8 << 20))
        time.sleep(0.02)


def hang(name):
    began(name)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)


def write(name, text):
    began(name)
    folder = Path(os.environ["RUNTIME_OUTPUT_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "out.txt").write_bytes(text.encode())
    return name


def daemonise(name):
    """Leaves a daemon in a session of its own that scrubbed its environment, and holds a lock while it lives."""
    began(name)
    lock = YARD / "daemon.lock"
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (YARD / "overlap").touch()
    os.close(fd)
    if (YARD / "gates" / name).exists():
        return "the daemon was gone" if (YARD / "daemon.pid").exists() else "there was none"
    code = (
        "import fcntl, os, sys, time; fd = os.open(sys.argv[1], os.O_RDWR); fcntl.flock(fd, fcntl.LOCK_EX); "
        "open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(600)"
    )
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", code, str(lock), str(YARD / "daemon.pid")], {})
        os._exit(0)
    time.sleep(600)


def echo(*args, **kwargs):
    began("echo")
    return [list(args), kwargs]


def train(epochs: int, name: str = "", path: str = "") -> dict:
    """A workflow: its arguments come from a command line."""
    began("train")
    return {"epochs": epochs, "name": name, "path": path}


workflows = {"train": train}
'''


class Run(NamedTuple):
    """A line that a body wrote when it began."""

    name: str
    token: str
    worker: int
    pid: int
    at: float


class WorkerProcess:
    """A `runtime worker` with its output in a file."""

    def __init__(self, yard: Yard, number: int, args: Sequence[str], environment: Mapping[str, str]) -> None:
        self.log_path = yard.folder / f"worker-{number}.log"
        self.expected = {0}
        """Expected exit codes."""
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "runtime", "worker", *args],
                cwd=yard.code,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = []
        for line in self.log().splitlines():
            if line.startswith('{"'):
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if kind is None or event["event"] == kind:
                        found.append(event)
        return found

    def said(self, text: str, *, timeout_s: float = 400) -> None:
        """Wait for a text in its output."""
        assert wait_until(lambda: text in self.log(), timeout_s=timeout_s), f"never said {text!r}:\n{self.log()}"

    def ready(self) -> WorkerProcess:
        self.said("worker_started")
        return self

    @property
    def name(self) -> str:
        return str(self.ready().events("worker_started")[0]["worker"])

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it with SIGKILL, as a crash would."""
        self.expected = {-signal.SIGKILL}
        self.process.kill()
        self.process.wait()

    def stop(self, *, timeout_s: float = 400) -> int:
        """Send SIGTERM and return the exit code."""
        if self.alive:
            self.process.terminate()
        return self.process.wait(timeout_s)

    def wait(self, *, timeout_s: float = 400) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the worker did not leave within {timeout_s} s:\n{self.log()}")


@dataclass(kw_only=True)
class Aftermath:
    """The state after a scenario."""

    tasks: Mapping[str, int] = field(default_factory=dict)
    """Id of each submitted task, and its newest generation."""
    records: Sequence[Record] = ()
    """All records that the store lists."""
    dead: Collection[tuple[str, int]] = ()
    """Task and generation of each open dead letter."""
    totals: Mapping[str, Mapping[TaskState, int]] = field(default_factory=dict)
    """Counts by experiment, from records."""
    reported: Mapping[str, Mapping[TaskState, int]] = field(default_factory=dict)
    """Counts by experiment, as workers reported; killed workers may have reported less."""
    exactly_reported: bool = False
    """Whether no worker was killed, so that the reported counts must be exact."""
    waiting: int = 0
    """Tasks that the queue still holds, if it can tell."""
    running: Sequence[str] = ()
    """Processes of the scenario."""
    scratch: Sequence[str] = ()
    leftovers: Sequence[str] = ()
    """Files that make dead workers look alive."""
    complaints: Sequence[str] = ()
    """Log lines that workers should never write, and unexpected exit codes."""


def find_problems(after: Aftermath) -> list[str]:
    """Return the reasons why a scenario has not ended well; empty if it has."""
    return [
        *_record_problems(after),
        *_total_problems(after),
        *(f"still running: {process}" for process in after.running),
        *(f"scratch left: {path}" for path in after.scratch),
        *(f"left behind: {path}" for path in after.leftovers),
        *after.complaints,
        *([f"{after.waiting} tasks still in the queue"] if after.waiting else []),
    ]


def _record_problems(after: Aftermath) -> Iterator[str]:
    counts = Counter((record.task_id, record.generation) for record in after.records)
    for (task, generation), times in counts.items():
        if times > 1:
            yield f"{task} generation {generation} has {times} records"
    for task, generation in after.tasks.items():
        if not counts[task, generation]:
            yield f"{task} generation {generation} has no record"
    newest = {}
    for record in sorted(after.records, key=lambda record: record.generation):
        newest[record.task_id] = record
        if not record.state.terminal:
            yield f"{record.task_id} is recorded as {record.state}"
    for record in newest.values():
        listed = (record.task_id, record.generation) in after.dead
        if (record.state is TaskState.FAILED) != listed:
            yield f"{record.task_id} {record.state}, and {'is' if listed else 'is not'} in the dead letters"
    for task, generation in after.dead:
        if (task, generation) not in counts:
            yield f"dead letter {task} generation {generation} has no record"


def _total_problems(after: Aftermath) -> Iterator[str]:
    newest: dict[str, Record] = {}
    for record in sorted(after.records, key=lambda record: record.generation):
        newest[record.task_id] = record
    recorded: dict[str, Counter[TaskState]] = {}
    for record in newest.values():
        recorded.setdefault(record.experiment, Counter())[record.state] += 1
    for experiment in {*recorded, *after.totals}:
        told, found = after.totals.get(experiment, {}), recorded.get(experiment, Counter())
        for state in TaskState:
            if told.get(state, 0) != found[state]:
                yield f"totals of {experiment} say {told.get(state, 0)} {state}, records say {found[state]}"
        counted = after.reported.get(experiment, {})
        for state in TaskState:
            if not state.terminal:
                continue
            times = counted.get(state, 0)
            if times > found[state] or (after.exactly_reported and times != found[state]):
                yield f"workers report {times} {state} of {experiment}, records say {found[state]}"


class Yard:
    """One scenario: its stack, its workers, and all that they touch."""

    def __init__(
        self, folder: Path, *, emulator: PubsubEmulator | None = None, records: Path | str | None = None
    ) -> None:
        """`records` is a folder or the URL of a bucket."""
        self.folder = folder
        self.emulator = emulator
        self.kind = "pubsub" if emulator else "sqlite"
        self.code = folder / "code"
        self.scratch = folder / "tmp"
        for each in (self.code, self.scratch, folder / "gates", folder / "data"):
            each.mkdir(parents=True, exist_ok=True)
        (self.code / "bodies.py").write_text(BODIES)
        self.environment = self._environment()
        self.settings_output: PubSubQueueOutput | None = None
        if emulator is not None:
            self._publish_contract(emulator, records or folder / "records")
        self.stack: OpenStack = open_stack(settings=load_settings(self.environment, folder=self.code))
        self.workers: list[WorkerProcess] = []
        self.tasks: dict[str, int] = {}
        self.experiments: set[str] = set()
        self._keys = itertools.count(1)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RUNTIME_")}
        return kept | {
            MARK: str(self.folder),
            "RUNTIME_DATA_DIR": str(self.folder / "data"),
            "RUNTIME_PREEMPTION_NOTICES": "off",
            "TMPDIR": str(self.scratch),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(self.code))),
        }

    def _publish_contract(self, emulator: PubsubEmulator, records: Path | str) -> None:
        from runtime.queues.pubsub.client import ensure_topics

        if isinstance(records, Path):
            records.mkdir(exist_ok=True)
            records = f"file:{records}"
        root = f"projects/{emulator.new_project()}"
        self.settings_output = PubSubQueueOutput(
            topic=f"{root}/topics/tasks", subscription=f"{root}/subscriptions/tasks", ack_deadline_s=10
        )
        contract = StackOutputs(
            stack="yard", records=RecordsOutput(url=records), queues={"default": self.settings_output}
        )
        path = self.folder / "contract.json"
        path.write_text(encode_outputs(contract))
        self.environment |= emulator.environment
        self.environment["RUNTIME_OUTPUTS"] = str(path)
        ensure_topics(self.settings_output, emulator=emulator.address)

    @property
    def queue(self) -> Queue:
        return self.stack.queue()

    @property
    def records(self) -> RecordStore:
        return self.queue.records

    # users

    def submit(self, work: Iterable[Mapping[str, Any]], *, experiment: str = EXPERIMENT) -> list[str]:
        """Submit lines of the wire format; return their ids. The bodies are in the workers' working directory."""
        done = submit(list(work), queue=self.queue, experiment=experiment, snapshot=False)
        self.experiments.add(experiment)
        assert done.tasks is not None
        self.tasks.update(done.tasks)
        return list(done.ids or ())

    def submit_one(self, body: str, *args: Any, experiment: str = EXPERIMENT, **fields: Any) -> str:
        """Submit a call of one of the bodies."""
        return self.submit([call(body, *args, **fields)], experiment=experiment)[0]

    def open_gate(self, name: str) -> None:
        (self.folder / "gates" / name).touch()

    def cli(self, *args: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
        """Run a `runtime` command."""
        return subprocess.run(
            [sys.executable, "-m", "runtime", *args],
            cwd=self.code,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    # workers

    def start(self, *args: str, faults: str = "", **environment: str) -> WorkerProcess:
        """Start a worker without waiting until it is ready. Leases are short, so that lost tasks come back soon, but
        longer than a process may wait for a CPU."""
        env = self.environment | environment
        if faults:
            env["RUNTIME_FAULTS"] = faults
        if "--lease" not in args:
            args = (*args, "--lease", "10s")
        worker = WorkerProcess(self, len(self.workers) + 1, args, env)
        self.workers.append(worker)
        return worker

    def logs(self) -> str:
        """Return the ends of the last workers' logs."""
        return "\n".join(f"--- {worker.log_path.name}\n{worker.log()[-4000:]}" for worker in self.workers[-4:])

    # observations

    def runs(self, name: str | None = None) -> list[Run]:
        """Return the runs that the bodies recorded, oldest first."""
        try:
            text = (self.folder / "runs.jsonl").read_text()
        except FileNotFoundError:
            return []
        # The last line may be incomplete.
        found = [Run(**json.loads(line)) for line in text.split("\n")[:-1]]
        return [run for run in found if name is None or run.name == name]

    def wait_for(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 400) -> None:
        """Wait for a condition; give up as soon as a worker has ended unexpectedly."""
        if not wait_until(self._unless_broken(condition), timeout_s=timeout_s, every_s=0.05):
            pytest.fail(f"{what} did not happen within {timeout_s} s\n{self.logs()}")

    def _unless_broken(self, condition: Callable[[], bool]) -> Callable[[], bool]:
        def looked() -> bool:
            if condition():
                return True
            for worker in self.workers:
                if not worker.alive and worker.process.returncode not in {*worker.expected, -signal.SIGKILL}:
                    pytest.fail(f"{worker.log_path.name} exited with {worker.process.returncode}\n{self.logs()}")
            return False

        return looked

    def wait_run(self, name: str, times: int = 1, *, timeout_s: float = 400) -> Run:
        """Wait until the body has begun `times` times; return that run."""
        self.wait_for(lambda: len(self.runs(name)) >= times, f"run {times} of {name}", timeout_s=timeout_s)
        return self.runs(name)[times - 1]

    def wait_recorded(self, ids: Iterable[str] | None = None, *, timeout_s: float = 400) -> list[Record]:
        """Wait until each of these tasks, or all tasks, has a record; return the records."""
        wanted = list(self.tasks if ids is None else ids)
        found: dict[str, Record] = {}

        def complete() -> bool:
            for task in wanted:
                if task not in found and (record := self.records.find(task, self.tasks.get(task, 1))):
                    found[task] = record
            return len(found) == len(wanted)

        if not wait_until(self._unless_broken(complete), timeout_s=timeout_s, every_s=0.05):
            missing = [task for task in wanted if task not in found]
            pytest.fail(f"no record of {len(missing)} tasks after {timeout_s} s: {missing[:5]}\n{self.logs()}")
        return [found[task] for task in wanted]

    def notes(self, task: str) -> list[EndedNote]:
        return list(self.records.history(task, self.tasks[task]).ended)

    def processes(self) -> list[str]:
        """List living processes of this yard, by environment, command line, working folder, or an attempt's token."""
        return find_processes(str(self.folder), {run.token for run in self.runs()})

    def scratch_left(self) -> list[str]:
        return [str(path.relative_to(self.scratch)) for path in self._scratch_paths()]

    def _scratch_paths(self) -> Iterator[Path]:
        for path in self.scratch.rglob("*"):
            # The base folder, which all workers share, stays.
            if path.parent != self.scratch or not path.name.startswith("research-runtime-"):
                yield path

    # the end

    def check(self, *, extra: Iterable[str] = ()) -> None:
        """Stop all workers, let one more worker start and clean up, and check the aftermath.

        `extra` are tasks that came in by other ways than `submit`.
        """
        self.tasks |= dict.fromkeys(extra, 1)
        for worker in self.workers:
            if worker.alive:
                worker.send(signal.SIGCONT)
                # Before the worker handles signals, SIGTERM would kill it.
                worker.ready().process.terminate()
        for worker in self.workers:
            worker.wait()
        killed = any(worker.process.returncode < 0 for worker in self.workers)
        if killed:
            self._clean_up()
        wait_until(lambda: not self.processes(), every_s=0.1)
        problems = find_problems(self.look(killed=killed))
        if problems:
            pytest.fail("\n".join([*problems, self.logs()]))

    def _clean_up(self) -> None:
        """Remove a killed worker's leftovers by starting another worker on its host."""
        cleaner = self.start("--idle-timeout", "never").ready()
        wait_until(lambda: not self._others_left(cleaner.name), every_s=0.05)
        cleaner.stop()

    def _others_left(self, name: str) -> bool:
        presence = self.folder / "data" / "local.db-workers"
        places = [self.scratch.glob("research-runtime-*/*"), presence.glob("*")]
        return any(not path.name.startswith(name) for place in places for path in place)

    def look(self, *, killed: bool) -> Aftermath:
        """Read everything once."""
        experiments = {seen.name for seen in self.records.experiments()} | self.experiments
        records = [record for name in experiments for record in self.records.records(name)]
        depth = self.queue.depth()
        presence = self.folder / "data" / "local.db-workers"
        return Aftermath(
            tasks=self.tasks,
            records=records,
            dead={(mark.task_id, mark.generation) for mark in self.records.marks(state=TaskState.FAILED)},
            totals={name: self.records.totals(name, exact=True).counts for name in experiments},
            reported={name: self.records.totals(name).counts for name in experiments},
            exactly_reported=not killed,
            waiting=0 if depth is None else depth.total,
            running=self.processes(),
            scratch=self.scratch_left(),
            leftovers=[path.name for path in presence.glob("*")],
            complaints=[*self._exit_problems(), *self._log_problems()],
        )

    def _exit_problems(self) -> Iterator[str]:
        for worker in self.workers:
            code = worker.process.returncode
            if code not in worker.expected:
                yield f"{worker.log_path.name} exited with {code}, expected {sorted(worker.expected)}"

    def _log_problems(self) -> Iterator[str]:
        for worker in self.workers:
            if "Traceback (most recent call last)" in worker.log() or "\nerror: unexpected" in f"\n{worker.log()}":
                yield f"{worker.log_path.name} shows an unexpected error"

    def close(self) -> None:
        """End the remains of a failed test."""
        for worker in self.workers:
            if worker.alive:
                worker.process.kill()
                worker.process.wait()
        if not wait_until(lambda: not self.processes(), timeout_s=5, every_s=0.05):
            for shown in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(shown.split()[0]), signal.SIGKILL)
        self.stack.close()


def call(body: str, *args: Any, **fields: Any) -> dict[str, Any]:
    """Make a line of the wire format that calls one of the bodies."""
    return {"function": f"bodies:{body}", "args": list(args), **fields}


def find_processes(folder: str, tokens: Iterable[str] = ()) -> list[str]:
    """Return `PID COMMAND` of each live process that belongs to a yard, except this one."""
    table = processes.read_table()
    marked = set(processes.find_marked(table, tokens))
    found = []
    for pid, process in sorted(table.items()):
        if process.dead or pid == os.getpid():
            continue
        command = processes.read_file(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
        environment = processes.read_file(f"/proc/{pid}/environ")
        if (
            pid in marked
            or f"{MARK}={folder}\0".encode() in environment
            or folder in command
            or _works_in(pid).startswith(folder)
        ):
            found.append(f"{pid} {command[:200]}")
    return found


def _works_in(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""


def publish_raw(yard: Yard, *bodies: bytes) -> None:
    """Publish messages as a foreign producer."""
    from runtime.queues.pubsub.client import OutgoingMessage, PubSubClient

    assert yard.emulator is not None
    assert yard.settings_output is not None
    client = PubSubClient(emulator=yard.emulator.address)
    try:
        client.publish(yard.settings_output.topic, [OutgoingMessage(body, {}) for body in bodies])
    finally:
        client.close()


STACKS = ("sqlite", pytest.param("pubsub", marks=pytest.mark.service))
"""Either the embedded queue with its own records, or Pub/Sub with a folder."""


@contextlib.contextmanager
def open_yard(
    kind: str, folder: Path, request: pytest.FixtureRequest, *, records: Path | str | None = None
) -> Iterator[Yard]:
    emulator = request.getfixturevalue("pubsub_emulator") if kind == "pubsub" else None
    yard = Yard(folder, emulator=emulator, records=records)
    try:
        yield yard
    finally:
        yard.close()
