"""The view of an attempt that user code gets from `current_attempt()`, and its reports.

Outside of an attempt, and in a Python that a command started, user code gets a stand-in with the same methods, so the
same function runs anywhere.
"""

from __future__ import annotations

import os
import sys
import time

from runtime.shim.call import PROGRAM, Run, handle, to_number
from runtime.worker.attempts import current, scratch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path
    from typing import Any

    from runtime.worker.attempts.child import Execution

_SPEAK_EVERY_S = 5.0


class Attempt(Run):
    """One execution of a task."""

    task_id: str
    attempt: int
    """How many times the task was begun, this time included; it may repeat after a lost worker."""
    token: str
    """Names this attempt and no other."""
    experiment: str
    generation: int
    deadline: datetime | None
    """When the attempt will be stopped, in UTC; None without a time limit."""
    metrics: dict[str, float]
    """Numbers reported so far."""

    def __init__(self, execution: Execution | _Outside) -> None:
        self._execution = execution
        self.token, self.task_id, generation, count, self.experiment = execution.fields[:5]
        index = int(os.environ.get("RUNTIME_ARRAY_INDEX") or 0)
        super().__init__(self.experiment, None, {"metrics": execution.reports_path}, index=index, attempt=int(count))
        self.generation = int(generation)
        self.deadline = None
        if execution.deadline:
            from datetime import UTC, datetime

            self.deadline = datetime.fromtimestamp(execution.deadline, UTC)
        self.metrics = execution.metrics

    def bind(self, index: int, argv: list[str] | None) -> None:
        """Take the description of the call that runs in this attempt."""
        self.index, self._argv = index, argv

    @property
    def output(self) -> Path:
        """The attempt's own folder for results; made on first use, and removed if it stays empty."""
        return _path(self._execution.make_output() or "output")

    @property
    def checkpoint(self) -> Path:
        """A folder that all attempts of the task share; made on first use."""
        path = self._execution.checkpoint_dir or f"checkpoints/{self.task_id}"
        scratch.make_folder(path)
        return _path(path)

    @property
    def output_dir(self) -> Path:
        """The same as `output`."""
        return self.output

    @property
    def checkpoint_dir(self) -> Path:
        """The same as `checkpoint`."""
        return self.checkpoint

    @property
    def scratch_dir(self) -> Path:
        """A folder that is removed after the attempt; made on first use."""
        return _path(self._execution.make_scratch() or _temporary())

    @property
    def stop_reason(self) -> str | None:
        """Why the attempt should stop: `preempted`, `cancelled`, `timeout` …; None as long as it should not."""
        return self._execution.stop_reason() or None

    def should_stop(self) -> bool:
        """Whether to save a checkpoint and return soon.

        From the first call on, SIGTERM raises no exception in this attempt: it only makes this true.
        """
        return self.stop_reason is not None

    def progress(self, done: float, total: float | None = None, text: str | None = None, **numbers: float) -> None:
        """Report how far the attempt is; cheap enough for every step. Also keeps numbers, as `report` does."""
        self._keep(numbers, done, total)
        self._execution.record_progress(
            to_number("done", done), None if total is None else to_number("total", total), text
        )

    def report(self, step: float | None = None, **numbers: float) -> None:
        """Keep numbers, at a step if there is one: the record has the last, least and greatest number of each name."""
        self._keep(numbers, step)
        self._execution.record_progress(None if step is None else to_number("step", step))

    def _keep(self, numbers: dict[str, float], step: float | None = None, of: float | None = None) -> None:
        if self._folders["metrics"]:
            super()._keep(numbers, step, of)
        self.metrics.update((name, to_number(name, value)) for name, value in numbers.items())

    def _read_origin(self) -> dict[str, Any]:
        return self._execution.read_origin() or super()._read_origin()


def current_attempt() -> Attempt:
    """Return the attempt that this code runs in, or a stand-in for it."""
    if current.server is not None and (execution := current.server.execution) is not None:
        if execution.context is None:
            execution.context = Attempt(execution)
        return execution.context
    global _local
    if _local is None:
        _local = Attempt(_Outside())
        program = sys.modules["__main__"]
        if getattr(program, "PROGRAM", None) == PROGRAM and program.current is not None:
            _local.variant = program.current.variant
            _local.bind(program.current.index, program.current.argv)
    return _local


def artifact(tag: str) -> Path:
    """Return the path of an artifact: the same call inside a task and outside of any.

    In a task it is the path that `capture` names for the tag, or where `reuse` puts it; a tag that the task does not name
    lies among its outputs. Outside it is `artifacts/<tag>` in the current folder, or in `$RUNTIME_ARTIFACTS`. The folder
    around it exists; whether the artifact is a file or a folder is up to you.
    """
    from runtime.tasks.artifacts import is_tag, place_of, variable_of

    if not is_tag(tag):
        from runtime.errors import InvalidValue

        raise InvalidValue("tag", tag, "up to 64 letters, digits and _.-, such as model")
    get = os.environ.get
    path = get(variable_of(tag))
    if not path and (get("RUNTIME_TASK_ID") or get("RUNTIME_JOB_ID")):
        path = f"{current_attempt().output_dir}/{place_of(tag)}"
    path = path or f"{get('RUNTIME_ARTIFACTS') or 'artifacts'}/{tag}"
    found = _path(path)
    scratch.make_folder(str(found.parent))
    return found


_local: Attempt | None = None


class _Outside:
    """Stands for an execution outside of a child: from the environment contract if a command started this Python,
    otherwise made up. Progress is printed to stderr every five seconds."""

    def __init__(self) -> None:
        get = os.environ.get
        self.fields = [
            get("RUNTIME_ATTEMPT_TOKEN") or "local",
            get("RUNTIME_TASK_ID") or "local",
            get("RUNTIME_GENERATION") or "1",
            get("RUNTIME_ATTEMPT") or "1",
            get("RUNTIME_EXPERIMENT") or "local",
        ]
        self.deadline = float(get("RUNTIME_DEADLINE") or 0)
        self.reports_path = get("RUNTIME_METRICS") or ""
        self.metrics: dict[str, float] = {}
        self._scratch = ""
        self._spoke_at = 0.0
        self._reason = ""
        self._listens = False

    def make_output(self) -> str:
        path = os.environ.get("RUNTIME_OUTPUT_DIR") or "output"
        scratch.make_folder(path)
        return path

    def make_scratch(self) -> str:
        self._scratch = self._scratch or os.environ.get("RUNTIME_SCRATCH_DIR") or _temporary()
        scratch.make_folder(self._scratch)
        return self._scratch

    @property
    def checkpoint_dir(self) -> str:
        return os.environ.get("RUNTIME_CHECKPOINT_DIR") or "checkpoints"

    def stop_reason(self) -> str:
        """Take SIGTERM for a request to stop, unless the code has its own handler or calls this in another thread."""
        if not self._listens:
            self._listens = True
            import signal
            import threading

            def on_term(signum: int, frame: object) -> None:
                self._reason = "other"

            in_main = threading.current_thread() is threading.main_thread()
            handler = signal.getsignal(signal.SIGTERM)
            # `runtime.shim.call` ends a function that does not look.
            gives_way = handler is signal.SIG_DFL or getattr(handler, "gives_way", False)
            if in_main and gives_way:
                handle(signal.SIGTERM, on_term)
        return self._reason

    def read_origin(self) -> dict[str, Any]:
        """Read the provenance that a launch would record, if this is neither a task nor a job."""
        if os.environ.get("RUNTIME_ATTEMPT"):
            return {}
        from runtime.snapshots.provenance import read_origin_here

        return read_origin_here()

    def record_progress(self, done: float | None = None, total: float | None = None, text: str | None = None) -> None:
        now = time.monotonic()
        if done is not None and (now - self._spoke_at >= _SPEAK_EVERY_S or done == total):
            self._spoke_at = now
            parts = [f"progress {done:g}" + (f"/{total:g}" if total is not None else ""), text or ""]
            parts += [f"{name}={value:g}" for name, value in self.metrics.items()]
            sys.stderr.write(" ".join(filter(None, parts)) + "\n")


def _path(path: str) -> Path:
    from pathlib import Path

    return Path(path).absolute()


def _temporary() -> str:
    import atexit
    import tempfile

    path = tempfile.mkdtemp(prefix="research-runtime-")
    atexit.register(scratch.remove_tree, path)
    return path
