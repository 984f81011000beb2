"""The attempt that runs in this process, as its context sees it: folders, progress, and whether it is asked to stop."""

from __future__ import annotations

import os
import time

from runtime.worker.attempts import scratch
from runtime.worker.attempts.wire import encode_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from runtime.worker.attempts.context import Attempt
    from runtime.worker.attempts.wire import Control


class Execution:
    """One order that a child has begun."""

    def __init__(self, fields: list[str], started: float, control: Control) -> None:
        self.fields, self._control = fields, control
        self.deadline = started + float(fields[5]) if fields[5] else 0.0
        """Seconds since the epoch; 0.0 without a time limit."""
        self.output_dir, self.checkpoint_dir = fields[6], fields[7]
        self.context: Attempt | None = None
        self.looks_at_stop = False
        """User code has asked its context whether to stop, so SIGTERM raises nothing in it."""
        self.stop_signalled = False
        self.in_user_code = self.ran_user_code = False
        self.metrics: dict[str, float] = {}
        self.progressed = False
        self._said: dict[str, Any] = {}
        self._unsent = b""
        self._sent_at = 0.0
        self._made_scratch = self._made_output = False

    # folders

    @property
    def scratch_dir(self) -> str:
        return f"{self.fields[8]}/{self.fields[0]}" if self.fields[8] else ""

    def make_output(self) -> str:
        if self.output_dir:
            self._made_output = True
            scratch.make_folder(self.output_dir)
        return self.output_dir

    def make_scratch(self) -> str:
        if self.scratch_dir and not self._made_scratch:
            self._made_scratch = True
            scratch.make_folder(self.scratch_dir)
        return self.scratch_dir

    def remove_folders(self) -> None:
        if self._made_scratch:
            scratch.remove_tree(self.scratch_dir)
        if self._made_output:
            scratch.remove_empty(self.output_dir, parents=1)

    # stopping

    def stop_reason(self) -> str:
        """Why the worker asks the attempt to stop; empty as long as it does not."""
        if self._control.order_to_stop() == self._control.begun:
            return self._control.stop_reason()
        return "other" if self.stop_signalled else ""

    def is_asked_to_stop(self) -> bool:
        return self.stop_signalled or self._control.order_to_stop() == self._control.begun

    # progress

    def note_progress(self, done: float | None, total: float | None, text: str | None) -> None:
        """Report to the worker, at most twice a second; the last report is always passed on."""
        if os.getpid() != self._control.pid:
            return
        if done is not None:
            self.progressed = True
            self._said = {"done": done, "total": total, "text": text}
        message = dict(self._said)
        if self.metrics:
            message["metrics"] = self.metrics
        self._unsent = encode_json(message).encode()
        now = time.monotonic()
        if now - self._sent_at >= 0.5:
            self._sent_at = now
            self.send_progress()

    def send_progress(self) -> None:
        """Send the last report if the worker does not have it."""
        payload, self._unsent = self._unsent, b""
        if payload:
            self._control.send_progress(payload)
