"""The main job end to end on this machine: shards of real files, real workers, one of them killed, and the count.

Everything happens in a folder of its own: a copy of the example, a local stack, the workers' logs. The final report is
read back from the records and the outputs.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final, Protocol, Self

from runtime.client.tasks.submit import Submission, submit
from runtime.client.tasks.wait import wait
from runtime.config import load_settings
from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure, InvalidValue, NotPossible, RequestRefused, WorkFailed
from runtime.file_trust import make_folders
from runtime.outputs import SqliteQueueOutput
from runtime.queues.sqlite.local_workers import Presence
from runtime.records.base import RecordStore
from runtime.records.sqlite_file import refuse_network_filesystem
from runtime.stack.find import LOCAL
from runtime.stack.open import OpenStack, open_stack
from runtime.system import system
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState
from runtime.units import count_noun

EXPERIMENT: Final = "curation"
SHARDS: Final = 32
KILL_AFTER: Final = 0.3
"""Part of the shards that are recorded before the worker is killed."""
STALLED_AFTER_S: Final = 60.0
_POLL_S: Final = 0.05


class Show(Protocol):
    """Receives messages and progress for the person at the terminal."""

    def say(self, text: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    submitted: int
    recorded: int
    """Tasks with a record of success."""
    lost: int
    recorded_twice: int
    """Records beyond one for each task."""
    attempts: int
    attempts_lost: int
    workers: int
    """Workers that recorded something or lost an attempt."""
    workers_lost: int
    files: int
    files_missing: int
    """Files in a shard and in no recorded output."""
    files_twice: int
    redone: tuple[str, ...] = ()
    """Ids of tasks that lost their worker."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.recorded_twice or self.files_missing or self.files_twice)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartResult:
    folder: Path
    """Holds the stack's file, the outputs, the workers' logs and the copy of the example."""
    root: Path
    bytes: int
    seconds: float
    killed: str | None
    killed_running: tuple[str, ...]
    """Tokens of the attempts it ran at that moment."""
    audit: Audit
    value: Mapping[str, Any] = field(default_factory=dict)


def run_quickstart(
    show: Show, *, path: Path | None = None, workers: int = 2, kill: bool = True, keep: bool = False
) -> QuickstartResult:
    """Run the job and count. Every started process has ended on return, also after an error or Ctrl-C.

    Without `keep` the next quickstart uses the folder again, so that at most one is left behind.
    """
    if workers < 1:
        raise InvalidValue("number of workers", workers, "1 or more")
    if path is not None and not path.is_dir():
        raise RequestRefused(f"`{path}` is no folder", hint="name the root of a tree of source files")
    started = system.monotonic()
    with ExitStack() as undo:
        undo.enter_context(_leave_on_sigterm())
        folder = undo.enter_context(_work_folder(keep=keep))
        project = folder / "curation"
        shutil.copytree(find_example(), project, ignore=shutil.ignore_patterns("__pycache__"))
        environ = _environment(folder)
        settings = replace(load_settings(environ, folder=project), stack=LOCAL)
        stack = undo.enter_context(open_stack(LOCAL, settings=settings))
        fleet = undo.enter_context(_Fleet(project, folder / "logs", environ, _workers_folder(stack)))
        fleet.start(workers)
        shards = _make_shards(project, path)
        show.say(
            f"{count_noun(shards['files'], 'file')}, {shards['bytes'] / 1e6:.1f} MB below {shards['root']}, in {count_noun(shards['shards'], 'shard')}"
        )
        queue = stack.queue()
        tasks = list(_read_lines(project / "shards/tasks.jsonl"))
        mapped = submit(tasks, experiment=EXPERIMENT, queue=queue, snapshot=project)
        show.say(f"{count_noun(mapped.new, 'task')} submitted, run by {count_noun(workers, 'worker')}")
        killed, running = _watch_map(show, mapped, stack.records, fleet, kill=kill)
        records = _records_of(mapped, stack.records)
        inputs = project / "inputs.txt"
        inputs.write_text("".join(f"{record.value['output']}\n" for record in records), encoding="utf-8")
        show.say("reduce: near-duplicates over all shards, one more task")
        reduced = submit(
            ("curation", "duplicates", [f"--inputs={inputs}"]),
            experiment=EXPERIMENT,
            key="duplicates",
            queue=queue,
            snapshot=project,
        )
        value = _watch_reduce(reduced, stack.records, fleet)
        fleet.stop()
        listed = [
            name
            for each in sorted((project / "shards").glob("shard-*.txt"))
            for name in each.read_text(encoding="utf-8").splitlines()[1:]
        ]
        return QuickstartResult(
            folder=folder,
            root=Path(shards["root"]),
            bytes=shards["bytes"],
            seconds=system.monotonic() - started,
            killed=killed,
            killed_running=running,
            audit=audit([*_ids(mapped), *_ids(reduced)], stack.records, listed),
            value=value,
        )


def audit(submitted: list[tuple[str, int]], store: RecordStore, files: list[str]) -> Audit:
    """Count results of the tasks `submitted` and of the `files` of all shards, from the store and the outputs."""
    records = list(store.records(EXPERIMENT))
    of_task = Counter((record.task_id, record.generation) for record in records)
    ended = {identity: store.history(*identity).ended for identity in submitted}
    lost_notes = {
        identity: [note for note in notes if note.reason is EndReason.LOST] for identity, notes in ended.items()
    }
    lost_workers = {note.worker for notes in lost_notes.values() for note in notes}
    succeeded = [record for record in records if record.state is TaskState.SUCCEEDED]
    rows = Counter(
        row["path"]
        for record in succeeded
        if (output := (record.value or {}).get("output", "")).endswith("rows.jsonl")
        for row in _read_lines(Path(output))
    )
    return Audit(
        submitted=len(set(submitted)),
        recorded=len({(record.task_id, record.generation) for record in succeeded}),
        lost=len(set(submitted) - of_task.keys()),
        recorded_twice=sum(count - 1 for count in of_task.values()),
        attempts=len(records) + sum(len(notes) for notes in ended.values()),
        attempts_lost=sum(len(notes) for notes in lost_notes.values()),
        workers=len(lost_workers | {record.worker for record in records}),
        workers_lost=len(lost_workers),
        files=len(rows),
        files_missing=len(set(files) - rows.keys()),
        files_twice=sum(count - 1 for count in rows.values()),
        redone=tuple(identity[0] for identity, notes in lost_notes.items() if notes),
    )


def find_example() -> Path:
    """Find the folder of the example: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "examples" / "curation", package.parent / "examples" / "curation"):
        if (folder / "curation.py").is_file():
            return folder
    raise NotPossible(
        "the example of the quickstart is not installed",
        facts=[f"looked beside `{package}`"],
        hint="install research-runtime again, or run it from a checkout",
    )


@contextmanager
def _leave_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind, so that the workers are stopped too; only on the main thread, where handlers can be set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch_map(
    show: Show, mapped: Submission, store: RecordStore, fleet: _Fleet, *, kill: bool
) -> tuple[str | None, tuple[str, ...]]:
    """Wait for the map tasks, and kill a worker once some are recorded. Returns its name and its running attempts."""
    total = mapped.count
    kill_from = max(1, round(total * KILL_AFTER))
    killed: str | None = None
    running: tuple[str, ...] = ()
    last_done, last_change = -1, system.monotonic()
    while True:
        counts = store.totals(EXPERIMENT).counts
        done = sum(count for state, count in counts.items() if state.terminal)
        show.progress(done, total)
        if done >= total:
            if kill and killed is None:
                show.say("every shard was done before a worker could be killed: give it a larger tree")
            return killed, running
        if done != last_done:
            last_done, last_change = done, system.monotonic()
        if kill and killed is None and done >= kill_from and (victim := fleet.find_busy()) is not None:
            killed, running = victim.name, fleet.kill(victim)
            when = "in the middle of a task" if running else "between two tasks"
            show.say(f"killed worker {killed} with SIGKILL {when}, {done} of {total} recorded; another takes its place")
            fleet.start(1)
        fleet.check()
        if system.monotonic() - last_change > STALLED_AFTER_S:
            raise fleet.explain_stall(done, total)
        system.sleep(_POLL_S)


def _records_of(submission: Submission, store: RecordStore) -> list[Record]:
    """Return the records of all tasks. Raises `WorkFailed` for the first one that did not succeed."""
    records = []
    for identity in _ids(submission):
        record = store.find(*identity)
        if record is None:
            raise WorkFailed("a task has no record")
        if record.state is not TaskState.SUCCEEDED:
            raise WorkFailed(
                f"task `{record.task_id}` ended as {record.state}: {record.message}",
                facts=[f"after {count_noun(record.attempts, 'attempt')}, the last on worker {record.worker}"],
                hint="`runtime quickstart --keep`, then `runtime logs` in the folder that it names",
            )
        records.append(record)
    return records


def _watch_reduce(reduced: Submission, store: RecordStore, fleet: _Fleet) -> Mapping[str, Any]:
    deadline = system.monotonic() + STALLED_AFTER_S
    while system.monotonic() < deadline:
        if wait(reduced, timeout=0.2).complete:
            value: Mapping[str, Any] = _records_of(reduced, store)[0].value
            return value
        fleet.check()
    raise fleet.explain_stall(0, 1)


def _ids(submission: Submission) -> list[tuple[str, int]]:
    assert submission.tasks is not None
    return list(submission.tasks)


@dataclass(slots=True)
class _Process:
    number: int
    popen: subprocess.Popen[bytes]
    log: Path
    name: str | None = None
    """The worker's own name; None until its log has it."""
    killed: bool = False


class _Fleet:
    """Real `runtime worker` processes, which all end with the context."""

    def __init__(self, project: Path, logs: Path, environ: Mapping[str, str], presence: Path) -> None:
        self._project, self._logs, self._environ, self._presence = project, logs, environ, presence
        self._processes: list[_Process] = []

    def __enter__(self) -> Self:
        self._logs.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(grace_s=2)

    def start(self, count: int) -> None:
        for _ in range(count):
            number = len(self._processes) + 1
            log = self._logs / f"worker-{number}.jsonl"
            with log.open("wb") as stream:
                self._processes.append(_Process(number, self._popen(stream), log))

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "runtime", "worker", "--stack", LOCAL, "--reuse-process"]
        # If this process is killed, the workers leave when there is nothing left to do.
        command += ["--log-format", "json", "--idle-timeout", "30s", "--grace", "5s"]
        # A session of its own: Ctrl-C reaches this process alone, which stops the workers.
        return subprocess.Popen(
            command,
            cwd=self._project,
            env=dict(self._environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def find_busy(self) -> _Process | None:
        """Return the first worker that runs an attempt at this moment."""
        return next((each for each in self._alive() if self._running(each)), None)

    def kill(self, process: _Process) -> tuple[str, ...]:
        """Send SIGKILL, and return the tokens of the attempts that the worker ran."""
        process.killed = True
        process.popen.kill()
        process.popen.wait()
        # The worker writes no more, so these are its last attempts.
        return tuple(sorted(self._running(process)))

    def check(self) -> None:
        """Raise if a worker ended by itself."""
        for each in self._processes:
            code = each.popen.poll()
            if code is not None and not each.killed:
                raise InfrastructureFailure(
                    f"worker {each.number} ended with exit code {code}",
                    facts=[f"its log says: {line}" for line in _tail(each.log)],
                    hint="run it again; `--keep` keeps the folder with the logs",
                    retryable=False,
                )

    def explain_stall(self, done: int, total: int) -> InfrastructureFailure:
        return InfrastructureFailure(
            f"nothing was recorded for {STALLED_AFTER_S:.0f} s, with {done} of {count_noun(total, 'task')} done",
            facts=[f"worker {each.number}: {line}" for each in self._alive() for line in _tail(each.log)[-1:]],
            hint="`runtime quickstart --keep` keeps the folder with the logs",
        )

    def stop(self, grace_s: float = 10) -> None:
        """Send SIGTERM, and SIGKILL to workers that are left after the grace."""
        for each in self._alive():
            each.killed = True
            each.popen.terminate()
        deadline = system.monotonic() + grace_s
        for each in self._processes:
            try:
                each.popen.wait(max(0, deadline - system.monotonic()))
            except subprocess.TimeoutExpired:
                each.popen.send_signal(signal.SIGKILL)
                each.popen.wait()

    def _alive(self) -> Iterator[_Process]:
        return (each for each in self._processes if each.popen.poll() is None)

    def _running(self, process: _Process) -> frozenset[str]:
        process.name = process.name or _name_in(process.log)
        return Presence.running(self._presence, process.name).tokens if process.name else frozenset()


def _name_in(log: Path) -> str | None:
    """Read the worker's name from the first line that has it."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            name = json.loads(line).get("worker")
        except (ValueError, AttributeError):
            continue
        if isinstance(name, str):
            return name
    return None


def _tail(log: Path) -> list[str]:
    """Return the messages of the last lines."""
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-4:]:
        try:
            found.append(str(json.loads(line)["message"]))
        except (ValueError, KeyError, TypeError):
            found.append(line)
    return found


@contextmanager
def _work_folder(*, keep: bool) -> Iterator[Path]:
    """Make an empty folder in the user's data folder, or in the temporary one if the data folder lies on a network."""
    base = load_settings().data_dir
    with ExitStack() as held:
        try:
            refuse_network_filesystem(base)
            make_folders(str(base.absolute()))
        except (NotPossible, OSError):
            path = Path(tempfile.mkdtemp(prefix="runtime-quickstart-"))
        else:
            path = base / "quickstart"
            if keep or not _take(held.enter_context((base / "quickstart.lock").open("w", encoding="utf-8"))):
                path = Path(tempfile.mkdtemp(prefix=f"quickstart-{system.now():%Y%m%d-%H%M%S}-", dir=base))
            else:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(0o700)
        yield path


def _take(lock: IO[str]) -> bool:
    """Lock the folder that quickstarts share; False if another quickstart runs in it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _environment(folder: Path) -> dict[str, str]:
    """Return this process's variables with our own data folder and without other settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RUNTIME_")}
    return {**kept, "RUNTIME_DATA_DIR": str(folder)}


def _workers_folder(stack: OpenStack) -> Path:
    """The folder in which workers of the local stack report their attempts."""
    output = stack.outputs.queues["default"]
    assert isinstance(output, SqliteQueueOutput)
    return Path(f"{output.path}-workers")


def _make_shards(project: Path, path: Path | None) -> Mapping[str, Any]:
    try:
        summary: Mapping[str, Any] = _load_example(project).shards(project / "shards", path=path, count=SHARDS)
    except ValueError as problem:
        raise RequestRefused(str(problem), hint="`--path` names the root of a tree of source files") from problem
    return summary


def _load_example(project: Path) -> ModuleType:
    """Load the copy's module by its file: another `curation` may be on the path."""
    spec = importlib.util.spec_from_file_location("curation", project / "curation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look up their module while it is loaded.
    before = sys.modules.get("curation")
    sys.modules["curation"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules["curation"]
        else:
            sys.modules["curation"] = before
    return module


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)
