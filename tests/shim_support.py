"""A job's folder for the shim, and ways to run it on any Python of this machine."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.shim.bundle import build_shim, list_shipped
from runtime.shim.processes import StopRequests
from tests.services_support import PATIENCE_S, wait_until


def write_shim() -> Path:
    """Write the shim as it is on a machine; it is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="runtime-shim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "shim.py").write_bytes(build_shim())
    return folder / "shim.py"


SHIM = write_shim()


IMPORT = f"import os, sys\nsys.path.insert(0, {str(SHIM.parent)!r})\nimport shim\nsys.argv[0] = {str(SHIM)!r}\n"
"""Lines of Python that make the shim's modules importable, as on a machine without the package."""
CALL = "from runtime.shim.main import main\nsys.exit(main(sys.argv[1:]))"
CLOCK = """
import time
clock, ahead = time.time, 0
def read():
    global ahead
    if os.path.exists({path!r}):
        ahead = os.path.getsize({path!r})
    return clock() + ahead
time.time = read
"""
"""A clock that is ahead by one second per byte of a file."""
JOB = f"j-{os.urandom(12).hex()}"
"""Unique to this process, since a shim kills leftovers of its job anywhere on the machine, even in parallel tests."""


def find_pythons() -> dict[str, str]:
    """Return version → interpreter, for every Python from 3.6 on that this machine has."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for minor in range(6, 15):
        version = f"3.{minor}"
        installed = sorted(str(path) for path in root.glob(f"{version}.*/bin/python"))
        path = next(iter(installed), None) or shutil.which(f"python{version}")
        if path:
            found.setdefault(version, path)
    return found


def each_python() -> list[Any]:
    """Parameters of a test: this interpreter, with the mark `service` the machine's oldest, and with `nightly` its newest."""
    import pytest

    found = find_pythons()
    ordered = sorted(found, key=lambda version: int(version[2:]))
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    marks: dict[str, list[pytest.MarkDecorator]]
    marks = {ordered[-1]: [pytest.mark.nightly], ordered[0]: [pytest.mark.service], own: []}
    return [
        pytest.param(found[version], marks=marks[version], id=f"python{version}")
        for version in dict.fromkeys((own, ordered[0], ordered[-1]))
    ]


DAEMON = """
import os, subprocess, sys, time
os.fork() and os._exit(0)
os.setsid()
os.fork() and os._exit(0)
os.closerange(0, 64)
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
"""A textbook daemon, which writes its process id to a file."""


def set_constant(name: str, value: float | str) -> str:
    """Return lines of Python that set a constant of the shim in every module that has it."""
    word = re.compile(rf"\b{name}\b")
    modules = [module for module, path in list_shipped().items() if word.search(path.read_text(encoding="utf-8"))]
    assert modules, name
    return "".join(f"import {module} as module\nmodule.{name} = {value!r}\n" for module in modules)


@dataclass
class ShimJob:
    """A run folder; `run` starts the shim on it as a backend would."""

    root: Path
    python: str
    order: dict[str, Any]
    environ: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float | str] = field(default_factory=dict)
    """Constants of the shim to replace in this job, if the real ones would make a test hurry or wait, or search the
    whole machine."""
    clock: Path | None = None
    """A file, `$CLOCK` of the command, with a byte for each second by which the shim's clock moves ahead."""

    @property
    def folder(self) -> Path:
        return self.root / "jobs" / JOB

    def write(self) -> ShimJob:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "order.json").write_text(json.dumps(self.order))
        return self

    def start(self, *words: str, folder: Path | None = None, **environ: str) -> subprocess.Popen[str]:
        """Start the shim, in `folder` if its folder shall differ from the job's."""
        scratch = self.root / "scratch"
        scratch.mkdir(exist_ok=True)
        program = [str(SHIM)]
        if self.constants or self.clock:
            lines = "".join(set_constant(name, value) for name, value in self.constants.items())
            lines += CLOCK.format(path=str(self.clock)) if self.clock else ""
            program = ["-c", IMPORT + lines + CALL]
        return subprocess.Popen(
            [self.python, *program, str(folder or self.folder), "--scratch", str(scratch), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                "PATH": os.environ["PATH"],
                "TMPDIR": str(scratch),
                "CLOCK": str(self.clock),
                **self.environ,
                **environ,
            },
        )

    def pass_time(self, seconds: int) -> None:
        """Move the shim's clock ahead, as `printf %99s >> $CLOCK` does in a command."""
        assert self.clock is not None
        with self.clock.open("ab") as opened:
            opened.write(bytes(seconds))

    def run(self, *words: str, **environ: str) -> int:
        return self.finish(self.start(*words, **environ))

    def finish(self, started: subprocess.Popen[str]) -> int:
        """Wait for a started shim; return its exit code."""
        try:
            self.stdout, self.stderr = started.communicate(timeout=PATIENCE_S)
        finally:
            started.kill()
        return started.returncode

    def results(self) -> dict[int, tuple[str, int, int]]:
        """Return index → reason, exit code and attempt, from the names in `done`."""
        found = {}
        for path in sorted((self.root / "done").glob(f"{JOB}.*")):
            words = path.name.removeprefix(f"{JOB}.").split(".")
            if len(words) == 4:  # longer names are of a file still being written
                found[int(words[0])] = (words[1], int(words[2]), int(words[3]))
        return found

    def ends(self, index: int = 0) -> list[str]:
        """Return how each attempt ended, oldest first; `-` if it left no record."""
        ends = []
        for folder in sorted((self.folder / "runs" / str(index)).glob("a0*")):
            notes = [path.name.removeprefix("end.").rpartition(".")[0] for path in folder.glob("end.*")]
            ends.append(notes[0] if notes else "-")
        return ends

    def log(self, index: int = 0, attempt: int = 1, rank: int = 0) -> str:
        return (self.folder / "runs" / str(index) / f"a{attempt:04d}" / f"rank{rank}.log").read_text()

    def left_over(self) -> list[str]:
        """List the scratch folder, which is empty once the shim has ended."""
        return sorted(
            path.name for path in (self.root / "scratch").iterdir() if not path.name.startswith("research-runtime-")
        )


def make_job(
    root: Path,
    python: str,
    script: str | Sequence[str],
    *,
    runs: Mapping[int, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> ShimJob:
    """Make a job from a shell script or an argv, with the order's fields that matter to a test."""
    command = ["sh", "-c", script] if isinstance(script, str) else list(script)
    retry = {"failure": 0, "preemption": 100, "on_exit": {}, "backoff_s": [0.05, 0.1]} | changes.pop("retry", {})
    order: dict[str, Any] = {
        "schema": 1,
        "job": JOB,
        "runs": {str(index): {"command": command, **(run or {})} for index, run in (runs or {0: {}}).items()},
        "nodes": 1,
        "tasks_per_node": 1,
        "grace_s": 1.0,
        "retry": retry,
        "retries": "shim",
        **changes,
    }
    return ShimJob(root, python, order).write()


def add_snapshot(job: ShimJob, archive: bytes, **code: Any) -> None:
    (job.folder / "snapshot.tar").write_bytes(archive)
    job.order["code"] = {"archive": "snapshot.tar", "sha256": hashlib.sha256(archive).hexdigest(), **code}
    job.write()


def make_asked(**values: Any) -> StopRequests:
    """Return requests to a shim that no signal changes."""
    asked = StopRequests.__new__(StopRequests)
    asked.__dict__.update(values)
    return asked


def kill_all(text: str) -> None:
    """Kill every process with `text` on its command line or in its variables, also those that start meanwhile."""

    def kill() -> bool:
        signal_all(found := processes_with(text))
        return not found

    wait_for(kill, f"the end of all processes with {text}")


def wait_for(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    assert wait_until(lambda: bool(condition()), timeout_s=seconds), f"{what} did not come within {seconds} s"


def wait_until_it_listens(process: subprocess.Popen[str]) -> None:
    """Wait until a process handles SIGTERM; before that, the signal would kill it."""

    def listens() -> bool:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except FileNotFoundError:
            return True
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    wait_for(listens, "its handler of SIGTERM")


def processes_with(text: str) -> list[int]:
    """List pids whose command line or environment contains `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (path / "environ").read_bytes() or text.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def shims_with(text: str) -> list[int]:
    """List those processes with `text` that are shims by their command line."""
    found = []
    for pid in processes_with(text):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"shim.py" in line and text.encode() in line:
                found.append(pid)
    return found


def is_running(pid: int) -> bool:
    """Return whether the process exists and has not ended; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError if the process ends during the read
        return False


def signal_all(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to each process; processes that have ended are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def lives(said: Path) -> bool:
    """Return whether the process whose id this file holds runs."""
    return said.exists() and is_running(int(said.read_text()))
