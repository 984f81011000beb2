"""Explains a job's state: facts are read, and turned into one sentence, the evidence and the next step."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runtime.client.jobs.handle import JobHandle, find_native, read_backend_log
from runtime.client.jobs.notifications import UnsentMessage, describe_unsent, read_unsent
from runtime.client.jobs.status import (
    AfterView,
    AttemptView,
    describe_after,
    read_after,
    read_attempts,
    report_attempts,
)
from runtime.end_reasons import EndReason, Explanation
from runtime.errors import RuntimeFailure
from runtime.jobs import ledger
from runtime.jobs.death_cause import UncaughtException, describe_code, find_raised
from runtime.jobs.hosts.base import FreeSpace, read_tail
from runtime.jobs.ledger import IndexStatus, JobStatus, LedgerEntry, check_index, job_folder, newest_natives
from runtime.jobs.log_follower import Heartbeat, HeartbeatWatch, describe_heartbeat
from runtime.jobs.plan import NativeState
from runtime.jobs.spec import JobState
from runtime.launchers.job_status import UNSEEN, ask
from runtime.shim.retry import LOST_IN_A_ROW
from runtime.units import count_noun, format_duration, format_size, format_time

TOLD_LINES: Final = 3
UNCAUGHT: Final = 1
"""Exit code of Python after an uncaught exception."""
TOLD_ALONE: Final = 10
"""Lines of the backend's own log, if no attempt began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """All facts about a job, or one of its runs, that an explanation may use."""

    status: JobStatus
    index: int
    attempts: tuple[AttemptView, ...] = ()
    log: tuple[str, ...] = ()
    raised: UncaughtException | None = None
    """The exception that ended it, if its log has one."""
    backend_log: tuple[str, ...] = ()
    """Last lines of the backend's own log: of programs before the shim, and of the shim itself."""
    backend: Explanation | None = None
    native: NativeState | None = None
    cancelled_by: str | None = None
    one_of_many: bool = False
    """A run of an array was asked for by its index."""
    limits: Mapping[str, Any] | None = None
    heartbeat: Heartbeat | None = None
    """None if it was not looked for, or if nothing is counted yet."""
    after: tuple[AfterView, ...] = ()
    """The jobs that it comes after, if nothing of it has begun."""
    room: FreeSpace | None = None
    """Free space in the record root; None if it was not looked for."""
    unsent: tuple[UnsentMessage, ...] = ()
    """Messages about its end that are not known to be sent."""


def read_facts(job: JobHandle, index: int | None = None, *, watch: Callable[[str], None] | None = None) -> JobFacts:
    """Read all facts that explain a job's state.

    With `watch`, wait for a heartbeat of a running attempt too; `watch` gets a message if that takes time.
    """
    status, said = job.poll_closely(watch) if watch else job.look()
    entry = status.entry
    chosen = check_index(entry, index) if index is not None else _telling_index(status)
    attempts = read_attempts(job.files, job.id, chosen)
    watched = None
    one = next(each for each in status.indices if each.index == chosen)
    if watch and one.state is JobState.RUNNING and attempts and attempts[-1].reason is None:
        watched = HeartbeatWatch(job.files, f"{job_folder(job.id)}/runs/{chosen}", attempts[-1].attempt)
    native, backend = _ask_why(job, entry, chosen, said)
    log: list[str] = []
    if attempts:
        log = read_tail(job.files, f"{job_folder(job.id)}/runs/{chosen}/a{attempts[-1].attempt:04d}/rank0.log", 100)
    mark = job.files.read(f"{job_folder(job.id)}/cancel") or job.files.read(f"{job_folder(job.id)}/cancel.{chosen}")
    order = ledger.read_object(job.files, f"{job_folder(job.id)}/order.json")
    beside = read_backend_log(job, native)
    heartbeat = watched.wait(watch) if watched and watch else None
    if heartbeat and not heartbeat.moved and read_attempts(job.files, job.id, chosen) != attempts:
        return read_facts(job, index)  # it ended meanwhile
    return JobFacts(
        status=status,
        index=chosen,
        attempts=tuple(report_attempts(job, entry, chosen)),
        log=tuple(log[-TOLD_LINES:]),
        raised=find_raised("\n".join(log)) if attempts and attempts[-1].exit_code == UNCAUGHT else None,
        backend_log=tuple(beside[-(TOLD_LINES if attempts else TOLD_ALONE) :]),
        backend=backend,
        native=native,
        cancelled_by=_who(mark),
        one_of_many=entry.indices > 1 and index is not None,
        limits={key: order.get(key) for key in ("retry", "time_limit_s", "idle_timeout_s", "checkpoint")},
        heartbeat=heartbeat,
        after=tuple(read_after(job, entry)),
        room=None if status.state is JobState.SUCCEEDED else job.files.room(),
        unsent=tuple(read_unsent(job.files, job.id)) if order.get("notify") else (),
    )


def _telling_index(status: JobStatus) -> int:
    for state in (JobState.FAILED, JobState.UNKNOWN, JobState.PENDING, JobState.RUNNING):
        for each in status.indices:
            if each.state is state and each.message != ledger.ITS_TURN:
                return each.index
    return status.entry.first_index


def _ask_why(
    job: JobHandle, entry: LedgerEntry, index: int, states: Sequence[NativeState]
) -> tuple[NativeState | None, Explanation | None]:
    natives = [each.native_id for each in newest_natives(entry)]
    states = states or ask(natives, job.target, job.launcher, job.host)
    native = find_native(states, index)
    if native is None or native.state is JobState.UNKNOWN:
        return native, None
    try:
        return native, job.launcher.explain(job.target, native, job.host)
    except RuntimeFailure:
        return native, None


def _who(mark: bytes | None) -> str | None:
    if mark is None:
        return None
    try:
        said = json.loads(mark)
        return f"{said['by']} at {said['at']}"
    except (ValueError, KeyError, TypeError):
        return "somebody"


def explain(facts: JobFacts) -> Explanation:
    """Turn facts into one sentence, the evidence and the next step; a pure function."""
    status = facts.status
    entry = status.entry
    one = next(each for each in status.indices if each.index == facts.index)
    what = f"job `{entry.id[:10]}`" if not facts.one_of_many else f"run {facts.index} of job `{entry.id[:10]}`"
    state = one.state if facts.one_of_many or entry.indices == 1 else status.state
    counted = _count_states(status) if entry.indices > 1 and not facts.one_of_many else None
    evidence = _evidence(facts, one)
    short = entry.id[:10]
    at = f" --index {facts.index}" if entry.indices > 1 else ""
    if state is JobState.SUCCEEDED:
        return Explanation(f"{what} succeeded", evidence, f"runtime fetch {short}")
    if (hopeless := next((each for each in facts.after if each.hopeless), None)) and not facts.cancelled_by:
        will = "never ran" if state.terminal else "will never run"
        return Explanation(
            f"{what} {will}: it comes after {describe_after(hopeless)}",
            evidence,
            f"runtime explain {hopeless.job[:10]}",
        )
    if state is JobState.CANCELLED:
        by = f" by {facts.cancelled_by}" if facts.cancelled_by else ""
        return Explanation(f"{what} was cancelled{by}", evidence, f"runtime retry {short}")
    if state is JobState.UNKNOWN:
        said = facts.native.message if facts.native else one.message
        if facts.native and facts.native.raw in UNSEEN:
            return Explanation(f"nobody knows how {what} stands: {one.message}", evidence, f"runtime explain {short}")
        return Explanation(
            f"nobody knows how {what} stands: target `{entry.target}` does not answer",
            ((said,) if said else ()) + evidence,
            f"runtime targets check {entry.target}",
        )
    if not entry.natives and not entry.outcomes and entry.refused:
        return Explanation(
            f"{what} was not taken by `{entry.target}`: {entry.refused.message}",
            evidence,
            "mend that, and launch it again",
        )
    if not entry.natives and not entry.outcomes:
        return Explanation(
            f"{what} was never handed to `{entry.target}`: its launch did not get to the end",
            evidence,
            "run the same `runtime launch` again: it goes on where it stopped",
        )
    if state in (JobState.PENDING, JobState.RUNNING):
        return _explain_unfinished(facts, what, one, counted, evidence, f"{short}{at}")
    return _explain_failure(facts, what, one, counted, evidence, short, at)


def _explain_unfinished(
    facts: JobFacts, what: str, one: IndexStatus, counted: str | None, evidence: tuple[str, ...], target: str
) -> Explanation:
    if backend := facts.backend:
        if counted and facts.status.state is JobState.RUNNING:
            return Explanation(
                f"{what} runs: {counted}; run {facts.index} {'is pending' if one.state is JobState.PENDING else 'runs'}: "
                f"{backend.sentence}",
                (*backend.evidence, *evidence),
                backend.hint,
            )
        doing = " is pending" if one.state is JobState.PENDING else ""
        return Explanation(f"{what}{doing}: {backend.sentence}", (*backend.evidence, *evidence), backend.hint)
    if one.state is JobState.PENDING and not (counted and facts.status.state is JobState.RUNNING):
        said = f": {one.message}" if one.message else ""
        return Explanation(f"{what} waits on `{facts.status.entry.target}`{said}", evidence, None)
    last, step = facts.attempts[-1] if facts.attempts else None, f"runtime logs -f {target}"
    doing = f"its attempt {last.attempt} runs on {last.host}" if last and last.reason is None else "between attempts"
    if last and last.reason is not None and facts.status.entry.intent.get("hold"):
        doing, step = f"{last.host} is held and waits for a change of the code", f"runtime cancel {target}"
    if not facts.attempts:
        doing = "its first attempt has not begun"
    doing = counted or doing
    if facts.heartbeat and not facts.heartbeat.moved:
        of = f" of run {facts.index}" if counted else ""
        doing += f"; attempt {facts.heartbeat.attempt}{of} gives no sign of life"
        where = last.host if last and last.host else "its machine"
        step = f"see whether {where} and the record root answer; if they do not, runtime cancel {target}"
    return Explanation(f"{what} runs: {doing}", evidence, step)


NOT_FOUND: Final = 127
"""Exit code of a command that is not there, as shells have it."""

NOT_STARTED: Final = 126
"""Exit code of a command that exists and cannot be started, as in shells."""
TOO_LONG: Final = os.strerror(errno.E2BIG)

BY_SETUP: Final = "the setup lines "
"""Beginning of the shim's message about an attempt with failed setup lines."""

_SAYINGS: Final[Mapping[EndReason, tuple[str, str]]] = {
    EndReason.APP_FAILED: ("the command failed with exit code {code}{raised}", "runtime logs {job}{at}"),
    EndReason.OOM: (
        "the command was killed for memory",
        "ask for more: --memory SIZE, or do less at a time; then runtime launch again",
    ),
    EndReason.DISK: (
        "the command used more disk than its limit",
        "ask for more: `resources.disk`, or write less beside the record root; then runtime launch again",
    ),
    EndReason.TIMEOUT: (
        "it came to its time limit{limit} without a new checkpoint",
        "raise --time-limit, or write checkpoints into RUNTIME_CHECKPOINT_DIR",
    ),
    EndReason.IDLE: (
        "it printed nothing for longer than `idle_timeout`",
        "see where it hangs: runtime logs {job}{at}; or raise `idle_timeout`",
    ),
    EndReason.SETUP_FAILED: ("it could not be prepared{said}", "runtime targets check {target}"),
    EndReason.PREEMPTED: (
        "its machine was taken away more often than `retry.preemption` allows",
        "runtime retry {job} --failed",
    ),
    EndReason.NODE_FAILED: ("its machine failed or was started anew", "runtime retry {job} --failed"),
    EndReason.LOST: (
        "it went without a word{often}: neither a result nor its process is there",
        "runtime retry {job} --failed",
    ),
    EndReason.NO_CAPACITY: ("no machine could take it in time", "name another target, or ask for less"),
    EndReason.QUOTA: ("a quota forbids it", "see the quota with whoever runs `{target}`, or ask for less"),
    EndReason.IMAGE_FAILED: ("its container image could not be started", "correct `image`"),
    EndReason.CONFIG_INVALID: ("it cannot run as it is", "correct the job file"),
    EndReason.SIBLING_FAILED: ("another rank of it failed first", "runtime logs {job}{at}"),
    EndReason.DUPLICATE: ("it was a twin: another native job serves it", "runtime status {job}"),
}


def _explain_failure(
    facts: JobFacts, what: str, one: IndexStatus, counted: str | None, evidence: tuple[str, ...], short: str, at: str
) -> Explanation:
    saying, step = _SAYINGS.get(one.reason or EndReason.LOST, (f"it ended as {one.reason}", "runtime logs {job}{at}"))
    told = one.message or (facts.attempts[-1].message if facts.attempts else "")
    if one.reason is EndReason.SETUP_FAILED and facts.index not in facts.status.entry.outcomes:
        step = "mend `setup` or `python` of target `{target}`; runtime logs {job}{at} shows what was printed"
    elif told.startswith(BY_SETUP):
        step = "mend that line of `environment.setup`, or of `setup` of target `{target}`; runtime logs {job}{at}"
    elif one.reason is EndReason.SETUP_FAILED and TOO_LONG in told:
        step = (
            "its arguments or variables are longer than that machine takes (on Linux 128 KiB each): "
            "put what is long into a file of `code.path`, and name the file"
        )
    elif one.reason is EndReason.SETUP_FAILED and one.exit_code == NOT_STARTED:
        step = "make the program executable, and one of that machine's kind"
    elif one.reason is EndReason.SETUP_FAILED and one.exit_code == NOT_FOUND:
        step = "name a program that is there, or bring it with `environment`"
    limit = (facts.limits or {}).get("time_limit_s")
    losses = sum(1 for _ in itertools.takewhile(lambda each: each.reason is EndReason.LOST, reversed(facts.attempts)))
    words = {
        "said": f": {told}" if told else "",
        "code": "unknown" if one.exit_code is None else describe_code(one.exit_code),
        "raised": f": {facts.raised}" if facts.raised else "",
        "limit": f" of {format_duration(limit)}" if limit else "",
        "often": f" {losses} times in a row, after which a run ends" if losses >= LOST_IN_A_ROW else "",
        "job": short,
        "at": at,
        "target": facts.status.entry.target,
    }
    if backend := facts.backend:
        evidence, step = (backend.sentence, *backend.evidence, *evidence), backend.hint or step
    why = saying.format(**words)
    sentence = f"{what} failed: {counted}; run {facts.index}: {why}" if counted else f"{what} failed: {why}"
    return Explanation(sentence, evidence, step.format(**words))


def _count_states(status: JobStatus) -> str:
    parts = [f"{status.counts[state]} {state}" for state in JobState if status.counts.get(state)]
    reasons = Counter(each.reason for each in status.indices if each.state is JobState.FAILED)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common() if reason)
    return ", ".join(parts) + f" of {status.entry.indices}" + (f" ({why})" if why else "")


def _evidence(facts: JobFacts, one: IndexStatus) -> tuple[str, ...]:
    lines = []
    gone = facts.native is not None and facts.native.reason in (EndReason.LOST, EndReason.NODE_FAILED)
    # A process that is gone means nothing if the job has its result.
    tells = facts.native is not None and not (gone and facts.index in facts.status.entry.outcomes)
    if facts.native is not None and tells and (facts.native.raw or facts.native.message):
        known = "\n".join([facts.backend.sentence if facts.backend else "", *(each.message for each in facts.attempts)])
        said = ", ".join(part for part in (facts.native.raw, facts.native.message) if part and part not in known)
        said = said or facts.native.raw
        lines.append(f"{facts.status.entry.kind} says of {facts.native.native_id or 'it'}: {said}")
    if one.message and facts.native is None:
        lines.append(one.message)
    lines += [_attempt_line(attempt) for attempt in facts.attempts[-5:]]
    lines += describe_heartbeat(facts.heartbeat) if facts.heartbeat else []
    if facts.limits and facts.limits.get("retry") and len(facts.attempts) > 1:
        retry = facts.limits["retry"]
        lines.append(
            f"budgets: {count_noun(retry['failure'], 'failure')} and {count_noun(retry['preemption'], 'preemption')} are tried again"
        )
    lines += [f"log: {line}" for line in facts.log]
    if one.reason in (EndReason.LOST, EndReason.SETUP_FAILED, None):
        lines += [f"{facts.status.entry.kind}'s own log: {line}" for line in facts.backend_log]
    lines += [f"it comes after {describe_after(each)}" for each in facts.after]
    lines += map(describe_unsent, facts.unsent)
    if facts.room and facts.room.bytes is not None:
        lines.append(f"the record root has {describe_room(facts.room)} free")
    return tuple(lines)


def describe_room(room: FreeSpace) -> str:
    """`3.2 GiB and 1,204 files`"""
    parts = [format_size(room.bytes)] if room.bytes is not None else []
    parts += [count_noun(room.files, "file")] if room.files is not None else []
    return " and ".join(parts)


def _attempt_line(attempt: AttemptView) -> str:
    where = f" on {attempt.host}" if attempt.host else ""
    if attempt.reason is None:
        began = f", began {format_time(attempt.started_at)}" if attempt.started_at else ""
        return f"attempt {attempt.attempt}{where}{began}: no end is noted"
    code = f", exit code {describe_code(attempt.exit_code)}" if attempt.exit_code else ""
    said = f": {attempt.message}" if attempt.message else ""
    return f"attempt {attempt.attempt}{where} ended as {attempt.reason}{code}{said}"
