"""The view of an attempt that user code gets from `current_attempt()`, and its reports.

Outside of an attempt, and in a Python that a command started, user code gets a stand-in with the same methods, so the
same function runs anywhere.
"""

from __future__ import annotations

import os
import sys
import time

from runtime.worker.attempts import child, scratch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path


class Attempt:
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

    @property
    def output_dir(self) -> Path:
        """The attempt's own folder for results; made on first use, and removed if it stays empty."""
        raise NotImplementedError

    @property
    def scratch_dir(self) -> Path:
        """A folder that is removed after the attempt; made on first use."""
        raise NotImplementedError

    @property
    def checkpoint_dir(self) -> Path:
        """A folder that all attempts of the task share; made on first use."""
        raise NotImplementedError

    @property
    def stop_reason(self) -> str | None:
        """Why the attempt should stop: `preempted`, `cancelled`, `timeout` …; None as long as it should not."""
        raise NotImplementedError

    def should_stop(self) -> bool:
        """Whether to save a checkpoint and return soon.

        From the first call on, SIGTERM raises no exception in this attempt: it only makes this true.
        """
        return self.stop_reason is not None

    def progress(self, done: float, total: float | None = None, text: str | None = None, **metrics: float) -> None:
        """Report how far the attempt is; cheap enough for every step. Also keeps `metrics`, as `report` does."""
        raise NotImplementedError

    def report(self, **metrics: float) -> None:
        """Keep numbers for the record; the last number of each name counts."""
        self.metrics.update((name, float(value)) for name, value in metrics.items())


def current_attempt() -> Attempt:
    """Return the attempt that this code runs in, or a stand-in for it."""
    if child.current is not None and (execution := child.current.execution) is not None:
        if execution.context is None:
            execution.context = _ChildAttempt(execution)
        return execution.context
    global _local
    if _local is None:
        _local = _LocalAttempt()
    return _local


class _ChildAttempt(Attempt):
    def __init__(self, execution: child.Execution) -> None:
        self._execution = execution
        self.token, self.task_id, generation, count, self.experiment = execution.fields[:5]
        self.generation, self.attempt = int(generation), int(count)
        self.deadline = _time(execution.deadline) if execution.deadline else None
        self.metrics = execution.metrics

    @property
    def output_dir(self) -> Path:
        return _path(self._execution.make_output() or "output")

    @property
    def scratch_dir(self) -> Path:
        return _path(self._execution.make_scratch() or _temporary())

    @property
    def checkpoint_dir(self) -> Path:
        return _made(self._execution.checkpoint_dir or f"checkpoints/{self.task_id}")

    @property
    def stop_reason(self) -> str | None:
        self._execution.looks_at_stop = True
        return self._execution.stop_reason() or None

    def progress(self, done: float, total: float | None = None, text: str | None = None, **metrics: float) -> None:
        if metrics:
            super().report(**metrics)
        # Only their being numbers matters here, as it does outside of a worker, where they are printed.
        _ = float(done), None if total is None else float(total)
        self._execution.note_progress(progressed=True)

    def report(self, **metrics: float) -> None:
        super().report(**metrics)
        self._execution.note_progress(progressed=False)


_SPEAK_EVERY_S = 5.0


class _LocalAttempt(Attempt):
    """An attempt outside of a child: from the environment contract if a command started this Python, otherwise made up.

    Progress is printed to stderr every five seconds.
    """

    def __init__(self) -> None:
        get = os.environ.get
        self.token = get("RUNTIME_ATTEMPT_TOKEN") or "local"
        self.task_id = get("RUNTIME_TASK_ID") or "local"
        self.attempt = int(get("RUNTIME_ATTEMPT") or 1)
        self.generation = int(get("RUNTIME_GENERATION") or 1)
        self.experiment = get("RUNTIME_EXPERIMENT") or "local"
        deadline = get("RUNTIME_DEADLINE")
        self.deadline = _time(float(deadline)) if deadline else None
        self.metrics = {}
        self._scratch = ""
        self._spoke_at = 0.0
        self._reason: str | None = None
        self._listens = False

    @property
    def output_dir(self) -> Path:
        return _made(os.environ.get("RUNTIME_OUTPUT_DIR") or "output")

    @property
    def scratch_dir(self) -> Path:
        self._scratch = self._scratch or os.environ.get("RUNTIME_SCRATCH_DIR") or _temporary()
        return _made(self._scratch)

    @property
    def checkpoint_dir(self) -> Path:
        return _made(os.environ.get("RUNTIME_CHECKPOINT_DIR") or "checkpoints")

    @property
    def stop_reason(self) -> str | None:
        if not self._listens:
            self._listens = True
            self._listen()
        return self._reason

    def progress(self, done: float, total: float | None = None, text: str | None = None, **metrics: float) -> None:
        self.report(**metrics)
        now = time.monotonic()
        if now - self._spoke_at >= _SPEAK_EVERY_S or done == total:
            self._spoke_at = now
            parts = [f"progress {done:g}" + (f"/{total:g}" if total is not None else ""), text or ""]
            parts += [f"{name}={value:g}" for name, value in self.metrics.items()]
            sys.stderr.write(" ".join(filter(None, parts)) + "\n")

    def _listen(self) -> None:
        """Take SIGTERM for a request to stop, unless the code has its own handler or calls this in another thread."""
        import signal
        import threading

        def on_term(signum: int, frame: object) -> None:
            self._reason = "other"

        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, on_term)


_local: _LocalAttempt | None = None


def _time(seconds: float) -> datetime:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC)


def _path(path: str) -> Path:
    from pathlib import Path

    return Path(path).absolute()


def _made(path: str) -> Path:
    scratch.make_folder(path)
    return _path(path)


def _temporary() -> str:
    import atexit
    import tempfile

    path = tempfile.mkdtemp(prefix="research-runtime-")
    atexit.register(scratch.remove_tree, path)
    return path
