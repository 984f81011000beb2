"""How attempts ended: the children's reports, the worker's evidence, and the end reason that follows."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from runtime.end_reasons import EndReason
from runtime.errors import explain_json
from runtime.units import format_size
from runtime.worker.attempts import scratch, wire
from runtime.worker.attempts.child_handle import AttemptNotes, ChildHandle
from runtime.worker.attempts.entries import signal_name
from runtime.worker.attempts.guardian_link import GuardianLink
from runtime.worker.attempts.model import AttemptEnd, AttemptOrder
from runtime.worker.attempts.processes import OomWatch

SPARED: Final = 1000
"""Tasks remembered because a failed attempt of theirs was blamed on its process."""
_SUCCEEDED = EndReason.SUCCEEDED
_CONTROL: Final = (
    f"file descriptor {wire.CONTROL_FD}, over which its process reports to the worker; "
    "use only descriptors that your code has opened"
)
WROTE_TO_CONTROL = EndReason.APP_FAILED, f"wrote to {_CONTROL}"


class EndedAttempts:
    """Attempts that have ended and that the worker has yet to take."""

    def __init__(self, guardian: GuardianLink) -> None:
        self._guardian = guardian
        self.ended: list[AttemptEnd] = []
        self._oom = OomWatch()
        self._spared: deque[str] = deque(maxlen=SPARED)
        """Tasks with an attempt that others in its process may have made fail."""

    def take(self) -> list[AttemptEnd]:
        ended, self.ended = self.ended, []
        return ended

    def add_unstarted(self, token: str, slot: int, reason: EndReason) -> None:
        message = "stopped before it began"
        self.ended.append(AttemptEnd(token, slot, reason, 0.0, time.time(), message=message, not_started=True))

    def add_unable(self, token: str, slot: int, message: str) -> None:
        """End an attempt for which no process could begin it."""
        now = time.time()
        self.ended.append(AttemptEnd(token, slot, EndReason.SETUP_FAILED, now, now, message=message))

    def add_unheard(self, child: ChildHandle, begun: int) -> None:
        """End attempts that began after one that damaged the socket: their ends were never reported."""
        now = time.time()
        for _ in range(begun - child.done - 1):
            order = child.orders.popleft()
            message = "another attempt in its process kept it from reporting how it ended"
            self.ended.append(AttemptEnd(order.token, child.slot.index, EndReason.PREEMPTED, now, now, message=message))
            self._clean_up(order)

    # judging

    def judge_report(self, child: ChildHandle, order: AttemptOrder, result: AttemptEnd, payload: bytes | None) -> None:
        """Complete a result with the child's report, in `payload`, and the worker's evidence."""
        if payload is not None:
            imported = read_report(result, payload)
            self._guardian.preload(imported or ())
            if imported is None or result.reason is EndReason.SETUP_FAILED:
                self._distrust(child, order, result, began=imported is None)
        if result.reason is not _SUCCEEDED:
            self._judge_sigkill(result)
            if child.asked:
                _override(result, *child.asked)
        _add_evidence(child, order, result)

    def judge_death(self, child: ChildHandle, order: AttemptOrder, code: int, started: float, peak: int) -> AttemptEnd:
        result = AttemptEnd(order.token, child.slot.index, EndReason.APP_FAILED, started, time.time())
        result.max_rss_bytes = peak or None
        if code < 0:
            result.signal = -code
            result.message = f"died of {describe_code(code)}"
        else:
            result.exit_code = code
            result.message = f"the process exited with {describe_code(code)} before the attempt had ended"
        if child.cell.has(wire.CLOSED_AT):
            result.exit_code, result.message = None, f"closed {_CONTROL}"
        self._judge_sigkill(result)
        return self._judge_cut_off(child, order, result)

    def judge_loss(self, child: ChildHandle, order: AttemptOrder, started: float, how: str) -> AttemptEnd:
        result = AttemptEnd(order.token, child.slot.index, EndReason.LOST, started, time.time())
        result.message = f"the guardian of this worker {how}, and the attempt with it"
        return self._judge_cut_off(child, order, result)

    def _judge_cut_off(self, child: ChildHandle, order: AttemptOrder, result: AttemptEnd) -> AttemptEnd:
        if child.asked:
            _override(result, *child.asked)
        _add_evidence(child, order, result)
        self._clean_up(order)
        return result

    def _distrust(self, child: ChildHandle, order: AttemptOrder, result: AttemptEnd, *, began: bool) -> None:
        """Replace a child that failed in its steps around user code; earlier attempts in it may have caused that.

        After earlier attempts this end spends no failure, once for each task. The next time the failure is the task's.
        """
        child.replace()
        if child.done == 1 or child.asked or order.task_id in self._spared:
            return
        self._spared.append(order.task_id)
        result.reason, result.not_started = EndReason.PREEMPTED, not began
        result.message = f"other attempts in its process may have caused this: {result.message}"

    def _judge_sigkill(self, result: AttemptEnd) -> None:
        """Find out whether it was killed for memory. Called at each failure, so that a rise of the counter is recent."""
        kills = self._oom.kills()
        if result.signal != signal.SIGKILL and result.exit_code != 128 + signal.SIGKILL:
            return
        if kills:
            result.reason = EndReason.OOM
            result.message = "killed for memory by the kernel: the count of out-of-memory kills rose"
            if result.max_rss_bytes:
                result.message += f"; at its peak the process held {format_size(result.max_rss_bytes)}"
        elif result.signal:
            result.message = (
                "killed by signal 9 (SIGKILL) from outside; nothing shows that memory ran out: `dmesg` may say who did"
            )

    def _clean_up(self, order: AttemptOrder) -> None:
        """Remove folders that the attempt's own process could no longer remove."""
        if order.scratch_root and os.path.lexists(f"{order.scratch_root}/{order.token}"):
            self._guardian.remove(f"{order.scratch_root}/{order.token}")
        if order.output_dir:
            scratch.remove_empty(order.output_dir, parents=1)


def _add_evidence(child: ChildHandle, order: AttemptOrder, result: AttemptEnd) -> None:
    if (noted := child.noted) is not None:
        result.progressed = result.progressed or noted.progressed
        result.metrics = result.metrics or noted.metrics
        if noted.memory_peak:
            result.max_rss_bytes = max(result.max_rss_bytes or 0, noted.memory_peak)
    if result.reason is not _SUCCEEDED and not result.progressed and order.checkpoint_dir and result.started_at:
        result.progressed = scratch.has_new_file(order.checkpoint_dir, result.started_at)


def describe_code(code: int) -> str:
    return f"code {code}" if code >= 0 else f"signal {-code} ({signal_name(-code)})"


def read_report(result: AttemptEnd, payload: bytes) -> Sequence[str] | None:
    """Fill in the child's details and value; returns the modules that it imported.

    Details that cannot be read are the attempt's failure; then None is returned.
    """
    try:
        (length,) = wire.DETAIL_HEADER.unpack_from(payload)
        split = wire.DETAIL_HEADER.size + length
        details: dict[str, Any] = json.loads(payload[wire.DETAIL_HEADER.size : split])
        result.value = payload[split:].decode("utf-8", "surrogatepass")
        result.reason = EndReason(details["outcome"])
        result.message = str(details["message"]) if details.get("message") else None
        result.exit_code = _number(details.get("exit_code"))
        result.signal = _number(details.get("signal"))
        result.metrics = _numbers(details.get("metrics"))
        result.progressed = bool(details.get("progressed"))
        return [str(name) for name in details.get("imported") or ()]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, RecursionError, struct.error) as problem:
        result.reason, result.value = EndReason.APP_FAILED, ""
        result.message = f"what it reported cannot be read: {explain_json(problem)}"
        return None


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _numbers(metrics: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in (metrics or {}).items()}


def _override(result: AttemptEnd, reason: EndReason, message: str | None) -> None:
    """Replace the reported reason of an attempt that was asked to stop and did not succeed."""
    text = message or f"stopped: {reason}"
    own = result.message
    if own and not own.startswith("stopped") and result.signal not in (signal.SIGTERM, signal.SIGKILL):
        text += f"; it ended with: {own}"
    result.reason, result.message = reason, text


def record_progress(noted: AttemptNotes, payload: bytes) -> None:
    """Keep an attempt's report of progress; if it cannot be read, the report before it stands."""
    try:
        said: dict[str, Any] = json.loads(payload)
        metrics, progressed = _numbers(said.get("metrics")), bool(said.get("progressed"))
    except (AttributeError, TypeError, ValueError, RecursionError, OverflowError):
        return
    noted.metrics, noted.progressed = metrics, noted.progressed or progressed
