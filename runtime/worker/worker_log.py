"""A worker's own log: a line for each event, which ends in the task's next step.

People get `12:03:04 failed     t-3f2a9c1d train 7 after 3.2s: ValueError: …; retried in 4s (1 of 3 failures spent)`, programs
one JSON object a line with the keys that log collectors know (`time`, `severity`, `message`) beside `event` and its facts.
Events that come faster than a few a second are counted instead and summed up once a second.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from enum import StrEnum
from typing import IO, TYPE_CHECKING, Any, Final

from runtime.clock import Clock, SystemClock
from runtime.end_reasons import Budget, EndReason
from runtime.errors import RuntimeFailure, StoreBroken
from runtime.sanitize import clean_line
from runtime.system import system
from runtime.tasks.entry_text import describe_entry
from runtime.tasks.model import Task, TaskState
from runtime.tasks.retry_policy import PREEMPTION_BUDGET, Drop, RetryAt, Settle, Verdict
from runtime.units import count_noun, format_duration, format_time
from runtime.worker.slots import Slot, describe_slots

if TYPE_CHECKING:
    from runtime.queues.base import RefusedSettlement
    from runtime.tasks.history import Record
    from runtime.tasks.notifications import Notification
    from runtime.tasks.retry_policy import GiveUp
    from runtime.worker.attempts.model import AttemptEnd
    from runtime.worker.notices import PreemptionNotice

SUCCESSES_PER_S: Final = 5
FAILURES_PER_S: Final = 20
"""Lines of a kind in a second; further events are summed up."""
TROUBLE_EVERY_S: Final = 30.0
"""Time until the same trouble is logged again."""
_TEXT_WIDTH: Final = 400

_COLOURS: Final = {"succeeded": "32", "failed": "31", "dead": "31", "trouble": "31", "worker": "1"}
_YELLOW: Final = ("released", "declined", "paused", "stopping", "lost", "notice", "expired", "cancelled")
_SEVERITIES: Final = {"dead": "ERROR", "trouble": "WARNING", "failed": "WARNING"} | dict.fromkeys(_YELLOW, "WARNING")

_ENDED_AS: Final = {
    EndReason.APP_FAILED: "failed",
    EndReason.OOM: "ran out of memory",
    EndReason.DISK: "used more disk than its limit",
    EndReason.PREEMPTED: "was preempted",
    EndReason.NODE_FAILED: "lost its machine",
    EndReason.TIMEOUT: "timed out",
    EndReason.IDLE: "hung",
    EndReason.SETUP_FAILED: "could not be set up",
    EndReason.CONFIG_INVALID: "cannot run",
    EndReason.CANCELLED: "was cancelled",
    EndReason.EXPIRED: "expired",
    EndReason.LOST: "was lost",
    EndReason.DUPLICATE: "was done elsewhere",
}


class LogFormat(StrEnum):
    AUTO = "auto"
    """Human on a terminal, JSON elsewhere."""
    HUMAN = "human"
    JSON = "json"


class WorkerLog:
    """Writes a worker's lines. Never raises: a log that cannot be written must not end a worker."""

    def __init__(
        self,
        stream: IO[str],
        *,
        json_lines: bool = False,
        colour: bool = False,
        clock: Clock | None = None,
        ticks: Callable[[], float] | None = None,
        zone: tzinfo | None = None,
    ) -> None:
        self._stream, self._json, self._colour = stream, json_lines, colour
        self._clock: Clock = clock or SystemClock()
        self._ticks, self._zone = ticks, zone
        self._worker: dict[str, str] = {}
        self._succeeded = 0
        self._window_ends = float("-inf")
        self._window_began = 0.0
        self._successes = 0
        self._crowded = False
        """Whether the window before this one had more successes than get lines."""
        self._unsaid = 0
        self._failures = 0
        self._unsaid_failures: Counter[str] = Counter()
        self._troubles: dict[str, tuple[float, int]] = {}

    @classmethod
    def for_stderr(cls, log_format: LogFormat = LogFormat.AUTO) -> WorkerLog:
        """Write human lines if stderr is a terminal and JSON lines otherwise, unless `log_format` names one."""
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        human = log_format is LogFormat.HUMAN or (log_format is LogFormat.AUTO and terminal)
        colour = human and terminal and not os.environ.get("NO_COLOR")
        return cls(sys.stderr, json_lines=not human, colour=colour)

    # the worker

    def started(self, worker: str, queue: str, slots: tuple[Slot, ...]) -> None:
        self._worker = {"worker": worker, "queue": queue}
        text = f"{worker} serves queue `{queue}` with {describe_slots(slots)}"
        self._line("worker", "worker_started", text, slots=len(slots))

    def serving_new_queue(self, text: str) -> None:
        self._line("notice", "queue_new", text)

    def serving_metrics(self, url: str, port: int) -> None:
        self._line("worker", "metrics_served", f"metrics at {url}", url=url, port=port)

    def draining(self, reason: str, running: int, grace_s: float) -> None:
        """Log that the worker leases no more. `grace_s` is 0 if it leaves by itself."""
        if not running:
            fate = "nothing runs"
        else:
            those = "the running attempt is" if running == 1 else f"{running} running attempts are"
            limit = f" within {format_duration(grace_s)}" if grace_s else ""
            fate = f"{those} asked to checkpoint and end{limit}, then released; that spends no failure"
            if grace_s:
                fate += "; a second signal ends them now"
        text = f"{reason}: takes no more tasks; {fate}"
        self._line("stopping", "worker_draining", text, reason=reason, running=running, grace_s=grace_s)

    def killing(self, running: int) -> None:
        text = f"ends {count_noun(running, 'running attempt')} now; released, which spends no failure"
        self._line("stopping", "worker_killing", text, running=running)

    def unhanded(self, count: int) -> None:
        """Log that the worker leaves although the service did not take `count` ends."""
        those = "1 task goes" if count == 1 else f"{count:,} tasks go"
        text = (
            f"the queue or the record store is away: {those} back when the leases end, and what they did is done again"
        )
        self._line("trouble", "results_dropped", text, count=count)

    def left(self, reason: str, succeeded: int, failed: int, released: int) -> None:
        self.tick(last=True)
        text = f"left: {reason}; {succeeded:,} succeeded, {failed:,} failed, {released:,} released"
        self._line("worker", "worker_left", text, reason=reason, succeeded=succeeded, failed=failed, released=released)

    def notice(self, notice: PreemptionNotice) -> None:
        left = "" if notice.deadline is None else f" in {format_duration(notice.deadline - notice.at)}"
        deadline = None if notice.deadline is None else format_time(notice.deadline)
        text = f"preemption notice from {notice.source}{left}: {notice.text}"
        self._line("notice", "preemption_notice", text, source=notice.source, deadline=deadline)

    def idle(self, left_s: float) -> None:
        text = f"nothing to do; leaves in {format_duration(left_s)} unless a task comes"
        self._line("worker", "worker_idle", text, left_s=round(left_s, 3))

    def paused(self, failed: int, most: int, wait_s: float, *, stays: bool = False) -> None:
        """Log that different tasks failed in a row. The worker `stays` if any task has succeeded here."""
        if stays:
            then = "does not leave, as tasks have succeeded here"
        else:
            then = f"leaves after {most} with its tasks released (--max-consecutive-failures)"
        text = f"{count_noun(failed, 'task')} in a row failed here; leases again in {format_duration(wait_s)}, {then}"
        self._line(
            "paused", "worker_paused", text, failed=failed, most=None if stays else most, wait_s=round(wait_s, 3)
        )

    def trouble(self, what: str, problem: Exception | None) -> None:
        """Log that a service or disk failed, and the worker tries again; the same trouble again after 30 seconds."""
        now = (self._ticks or system.monotonic)()
        said_at, times = self._troubles.get(what, (float("-inf"), 0))
        if now - said_at < TROUBLE_EVERY_S:
            self._troubles[what] = (said_at, times + 1)
            return
        self._troubles[what] = (now, 0)
        if len(self._troubles) > 100:
            self._troubles = {name: last for name, last in self._troubles.items() if now - last[0] < TROUBLE_EVERY_S}
        explained = problem.message if isinstance(problem, RuntimeFailure) else _name(problem)
        again = f" ({times:,} times more since it was last said)" if times else ""
        hint = problem.hint if isinstance(problem, RuntimeFailure) else None
        stays = "" if isinstance(problem, StoreBroken) else "; tried again, nothing is lost"
        text = f"{what}: {explained}{again}{stays}" + (f"; {hint}" if hint else "")
        self._line("trouble", "trouble", text, what=what, problem=explained, hint=hint, unsaid=times)

    # tasks

    def began(self, task: Task, slot: int, attempt: int) -> None:
        self.tick()
        if self._crowded or self._successes > SUCCESSES_PER_S:
            return
        text = f"{_describe(task)} on slot {slot}" + (f", attempt {attempt}" if attempt > 1 else "")
        self._line("started", "attempt_started", text, **_facts(task), slot=slot, attempt=attempt)

    def succeeded(self, task: Task, end: AttemptEnd) -> None:
        self._succeeded += 1
        if (self._ticks or system.monotonic)() >= self._window_ends:
            self.tick()
        self._successes += 1
        if self._crowded or self._successes > SUCCESSES_PER_S:
            self._unsaid += 1
            return
        seconds = end.ended_at - end.started_at
        text = f"{_describe(task)} after {format_duration(seconds)}: recorded"
        facts = {"seconds": round(seconds, 3), "next": "recorded"}
        self._line("succeeded", "attempt_succeeded", text, **_facts(task), **facts)

    def ended(self, task: Task, end: AttemptEnd, verdict: Verdict) -> None:
        word, fate, next_step = _judge(task, verdict, self._clock.now())
        if self._too_many_failures(next_step):
            return
        seconds = end.ended_at - end.started_at
        ended_as = _ENDED_AS.get(end.reason, f"ended as {end.reason}")
        text = f"{_describe(task)} {ended_as} after {format_duration(seconds)}"
        text += f": {_one_line(end.message)}; {fate}" if end.message else f": {fate}"
        self._line(
            word,
            "attempt_ended",
            text,
            **_facts(task),
            reason=end.reason.value,
            problem=end.message,
            exit_code=end.exit_code,
            seconds=round(seconds, 3),
            next=next_step,
        )

    def buried(self, task: Task, given_up: GiveUp) -> None:
        """Log that the task is not started again, because of how its earlier attempts ended."""
        self._dead("task_buried", task, " is not started again", given_up.reason, given_up.message)

    def unstarted(self, record: Record, task: Task | None = None) -> None:
        """Log the end of a task without a start: malformed, expired or cancelled."""
        dead = record.state not in (TaskState.EXPIRED, TaskState.CANCELLED)
        word, next_step = ("dead", "dead letter") if dead else (record.state.value, record.state.value)
        if self._too_many_failures(next_step):
            return
        name = _describe(task) if task else _short(record.task_id)
        fate = "dead letter, `runtime queue dead show` has it" if dead else f"recorded as {next_step}"
        text = f"{name}: {_one_line(record.message or record.reason)}; {fate}"
        facts = {"task": record.task_id, "experiment": record.experiment, "reason": record.reason.value}
        self._line(word, "task_unstarted", text, **facts, problem=record.message, next=next_step)

    def unrecorded(self, record: Record, task: Task) -> None:
        """Log that no store can hold the end of the task, which is recorded as failed for that reason."""
        self._dead("task_unrecorded", task, "", record.reason, record.message)

    def _dead(self, event: str, task: Task, fate: str, reason: EndReason, message: str | None) -> None:
        if not self._too_many_failures("dead letter"):
            text = f"{_describe(task)}{fate}: {_one_line(message or '')}; {_dead_letter(task)}"
            facts = {"reason": reason.value, "problem": message, "next": "dead letter"}
            self._line("dead", event, text, **_facts(task), **facts)

    def declined(self, task: Task, why: str) -> None:
        text = f"{_describe(task)} {why}: left to other workers, looked at again later"
        self._line("declined", "task_declined", text, **_facts(task), problem=why, next="left to other workers")

    def lost(self, task: Task, record: Record | None) -> None:
        if record is None:
            text = f"lost the lease of {_describe(task)}: another worker runs it; whichever succeeds first is recorded"
            next_step = "runs elsewhere"
        elif record.state is TaskState.CANCELLED:
            text = f"{_describe(task)} was cancelled: asked to stop"
            next_step = "cancelled"
        else:
            where = f" by worker {record.worker}" if record.worker else ""
            text = f"{_describe(task)} already {record.state}{where}: asked to stop, its result is discarded"
            next_step = "recorded elsewhere"
        self._line("lost", "lease_lost", text, **_facts(task), next=next_step)

    def left_out(self, task: Task, what: str | None) -> None:
        """Log that the task succeeds without some of its outputs, if `what` names any."""
        if what is not None:
            self._line("trouble", "outputs_left_out", f"{_describe(task)} {what}", **_facts(task), problem=what)

    def refused(self, refused: RefusedSettlement) -> None:
        task, record = refused.lease.task, refused.record
        if record is not None:
            fate = f"its record exists: {record.state}" + (f" by worker {record.worker}" if record.worker else "")
        elif refused.holder:
            fate = f"worker {refused.holder} holds the task now"
        else:
            fate = "its lease had passed on"
        text = f"{_describe(task)} ended second, result discarded: {fate}"
        self._line("lost", "result_discarded", text, **_facts(task), next=fate)

    def told(self, message: Notification, sent: Sequence[int], problems: Mapping[int, str], *, final: bool) -> None:
        """Log which sinks got a message, and why the others did not."""
        about = f"experiment {message.experiment}" if message.task is None else _short(message.task)
        facts = {"task": message.task, "experiment": message.experiment}
        if sent and not self._crowded:
            text = f"told {_name_sinks(message, sent)} of the end of {about}"
            self._line("worker", "notification_sent", text, **facts, sinks=list(sent))
        for number, why in sorted(problems.items()):
            then = "given up" if final else "tried again later"
            text = f"could not tell {_name_sinks(message, [number])} of the end of {about}: {why}; {then}"
            self._line("trouble", "notification_failed", text, **facts, sink=number, problem=why, next=then)

    # summing up

    def tick(self, *, last: bool = False) -> None:
        """Sum up once a second the events that were only counted. Costs nothing while nothing is due."""
        now = (self._ticks or system.monotonic)()
        if now < self._window_ends and not last:
            return
        if self._unsaid:
            span = format_duration(max(0.001, now - self._window_began))
            text = f"{count_noun(self._unsaid, 'more task')} in {span}: recorded; {self._succeeded:,} by this worker"
            self._line("succeeded", "attempts_succeeded", text, count=self._unsaid, total=self._succeeded)
        if self._unsaid_failures:
            fates = ", ".join(f"{count:,} {fate}" for fate, count in sorted(self._unsaid_failures.items()))
            total = sum(self._unsaid_failures.values())
            text = f"{count_noun(total, 'more attempt')} did not succeed: {fates}; `runtime status` lists them"
            self._line("failed", "attempts_ended", text, count=total, by_next=dict(self._unsaid_failures))
            self._unsaid_failures.clear()
        self._crowded = self._successes > SUCCESSES_PER_S
        self._successes = self._unsaid = self._failures = 0
        self._window_began, self._window_ends = now, now + 1.0

    def due_in(self) -> float | None:
        """Return the seconds until `tick` has something to sum up; None while it has nothing."""
        if not self._unsaid and not self._unsaid_failures:
            return None
        return max(0.0, self._window_ends - (self._ticks or system.monotonic)())

    def _too_many_failures(self, fate: str) -> bool:
        self.tick()
        self._failures += 1
        if self._failures > FAILURES_PER_S:
            self._unsaid_failures[fate] += 1
            return True
        return False

    # lines

    def _line(self, word: str, event: str, text: str, **facts: Any) -> None:
        now = self._clock.now()
        if self._json:
            fields = {
                "time": format_time(now),
                "severity": _SEVERITIES.get(word, "INFO"),
                "event": event,
                "message": text,
                **self._worker,
                **{name: value for name, value in facts.items() if value is not None},
            }
            # ASCII, because stderr spells what its encoding lacks in a way that is no JSON.
            line = json.dumps(fields)
        else:
            line = self._human_line(now, word, text)
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # The reader went away or the disk is full: the work goes on.
            pass

    def _human_line(self, now: datetime, word: str, text: str) -> str:
        at = f"{now.astimezone(self._zone):%H:%M:%S}"
        padded = word.ljust(9)
        if self._colour:
            style = _COLOURS.get(word) or ("33" if word in _YELLOW else "2")
            padded, at = f"\x1b[{style}m{padded}\x1b[0m", f"\x1b[2m{at}\x1b[0m"
        return f"{at} {padded}  {clean_line(text)}"


def _judge(task: Task, verdict: Verdict, now: datetime) -> tuple[str, str, str]:
    if isinstance(verdict, Drop):
        return "lost", f"nothing recorded, {verdict.why}", "nothing recorded"
    if isinstance(verdict, Settle):
        if verdict.settlement.record.state is TaskState.CANCELLED:
            return "cancelled", "recorded as cancelled", "cancelled"
        return "dead", _dead_letter(task), "dead letter"
    retried = describe_retry(verdict.again, task, now)
    return ("failed" if verdict.again.charged is Budget.FAILURES else "released"), retried, "retried"


def describe_retry(again: RetryAt, task: Task, now: datetime) -> str:
    """Describe when a task runs again, and which budget pays for the attempt that ended."""
    wait = again.not_before - now
    when = f"in {format_duration(wait)}" if wait >= timedelta(milliseconds=50) else "at once"
    if again.charged is Budget.FAILURES:
        paid = f"{again.spent} of {count_noun(task.max_failures, 'failure')} spent"
    elif again.charged is Budget.PREEMPTIONS and again.spent:
        paid = f"spends no failure; {again.spent} of {PREEMPTION_BUDGET} early losses"
    else:
        paid = "spends no failure"
    alone = ", with no other suspect beside it" if again.alone else ""
    verb = "retried" if again.charged is Budget.FAILURES else "goes back to the queue, due"
    return f"{verb} {when}{alone} ({paid})"


def _dead_letter(task: Task) -> str:
    return f"dead letter, `runtime retry {_short(task.id)}` runs it again"


def _describe(task: Task) -> str:
    return f"{_short(task.id)} {_one_line(describe_entry(task.entry, width=48))}"


def _name_sinks(message: Notification, numbers: Sequence[int]) -> str:
    """Name sinks by kind and number, never by their address."""
    return ", ".join(f"{message.sinks[number].kind} {number}" for number in numbers)


def _short(task_id: str) -> str:
    """Shorten an id to a prefix that is unique among millions and that every command takes."""
    return task_id[:14]


def _facts(task: Task) -> dict[str, Any]:
    facts: dict[str, Any] = {"task": task.id, "experiment": task.experiment}
    if task.generation != 1:
        facts["generation"] = task.generation
    return facts


def _name(problem: Exception | None) -> str:
    return "failed" if problem is None else f"{type(problem).__name__}: {_one_line(str(problem))}".rstrip(": ")


def _one_line(text: str) -> str:
    text = clean_line(text)
    return text if len(text) <= _TEXT_WIDTH else text[: _TEXT_WIDTH - 1] + "…"
