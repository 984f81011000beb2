"""Whether a worker leaves, and why. What it does then is in `draining`."""

from __future__ import annotations

import os

from runtime.errors import StoreBroken
from runtime.worker.reporter import Reporter


class Leaving:
    """The decision to leave: the first reason counts, with its exit code."""

    def __init__(self, say: Reporter) -> None:
        self._say = say
        self.reason: str | None = None
        """Why the worker leaves; None while it serves."""
        self.exit_code = 0
        self.asked = 0
        """How often somebody asked the worker to stop."""
        self.wake_fd, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """`wake_fd` turns readable when somebody asks."""

    def ask(self, reason: str, exit_code: int = 0) -> None:
        """Ask the worker to leave, and wake it; safe from a signal handler and from any thread."""
        self.asked += 1
        self.decide(reason, exit_code)
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            pass  # It is full of wake-ups already.

    def decide(self, reason: str, exit_code: int = 0) -> None:
        """Leave for a reason of the worker's own."""
        if self.reason is None:
            self.exit_code = exit_code
            self.reason = reason

    def trouble(self, what: str, problem: Exception | None) -> None:
        """Say what failed and will be tried again; leave if that cannot help."""
        self._say.trouble(what, problem)
        if isinstance(problem, StoreBroken):
            self.decide(problem.message, problem.exit_code)

    def clear_wake(self) -> None:
        os.read(self.wake_fd, 4096)
