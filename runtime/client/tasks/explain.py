"""Why a task waits, failed or was tried again: one sentence, the evidence, and the next step.

`read_facts` reads; `explain` is a pure function of the facts, so every answer has a test that needs no service.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from runtime.client.resolve_id import FindsTasks
from runtime.client.tasks.notify import read_untold
from runtime.client.tasks.status import ExperimentStatus, TaskQueues, last_line, purged
from runtime.client.tasks.task_facts import Stack, TaskFacts, WorkerStatus, read_standing, read_workers
from runtime.end_reasons import Budget, EndReason, Explanation
from runtime.errors import NotPossible, RuntimeFailure
from runtime.jobs.death_cause import find_raised
from runtime.queues.base import Depth, WaitingLookup
from runtime.records.base import RecordStore
from runtime.records.control_commands import QueueControl
from runtime.records.order_scope import Coverage
from runtime.tasks.history import EndedNote, Record
from runtime.tasks.model import DEFAULT_MAX_FAILURES, Task, TaskState, experiment_digest
from runtime.tasks.retry_policy import PREEMPTION_BUDGET, RetryAt, decide, failures_allowed
from runtime.units import count_noun, format_duration, format_time

PEEKED: Final = 1_000
"""Number of tasks of a queue among which a task's position is looked for."""
ATTEMPTS_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts about one task that an explanation may use."""

    standing: TaskFacts
    queue: str
    now: datetime
    workers: tuple[WorkerStatus, ...] = ()
    """Workers of that queue in the last day."""
    paused: bool = False
    cancelled: bool = False
    cancel_ordered_at: datetime | None = None
    """When its whole experiment or queue was cancelled; None if the order names the task itself."""
    depth: Depth | None = None
    ahead: int | None = None
    """Tasks that will be leased before it."""
    ahead_at_least: int | None = None
    """Set if the exact number is too large to count."""
    due: datetime | None = None
    """When the queue will hand it out, if it knows."""
    queue_problem: str | None = None
    undecodable: bool = False
    untold: tuple[str, ...] = ()
    """Messages about its end that were not sent, for people to read."""

    @property
    def task(self) -> Task | None:
        return self.standing.task

    @property
    def live(self) -> list[WorkerStatus]:
        return [worker for worker in self.workers if worker.live]

    @property
    def declined(self) -> Mapping[str, str]:
        """For each live worker, why none of its slots can hold the task."""
        ours = self.standing.task_id
        return {worker.worker: worker.declined[ours] for worker in self.live if ours in worker.declined}


def read_facts(stack: Stack, task_id: str, *, now: datetime) -> Facts:
    """Read all facts about one task. A queue that cannot be asked is a fact too."""
    records = stack.records
    standing = read_standing(records, task_id)
    queue_name = TaskQueues(stack).find(standing.experiment, task_id)
    control = records.control(queue_name)
    covered = control.experiments.get(standing.experiment)
    named = (task_id, standing.generation) in control.tasks
    facts = Facts(
        standing=standing,
        queue=queue_name,
        now=now,
        workers=tuple(worker for worker in read_workers(records, now) if worker.queue == queue_name),
        paused=control.paused,
        cancelled=_is_covered(records, control, standing),
        cancel_ordered_at=covered.ordered_at if covered and not named else None,
        undecodable=standing.task is None and isinstance(records, FindsTasks),
    )
    if standing.state.terminal:
        return replace(facts, untold=read_untold(records, standing.task, standing.record))
    return _with_queue(stack, facts)


def _is_covered(records: RecordStore, control: QueueControl, standing: TaskFacts) -> bool:
    """Decide as the task's worker does whether an order covers it."""
    if standing.state.terminal:
        return False
    if standing.task is None:
        return (standing.task_id, standing.generation) in control.tasks
    coverage = Coverage(records)
    coverage.read(control, standing.experiment)
    return bool(coverage.covers(control, standing.task))


def _with_queue(stack: Stack, facts: Facts) -> Facts:
    try:
        queue = stack.queue(facts.queue)
        depth = queue.depth()
    except RuntimeFailure as failed:
        return replace(facts, queue_problem=failed.message)
    facts = replace(facts, depth=depth)
    if facts.standing.state is not TaskState.QUEUED:
        return facts
    if isinstance(queue, WaitingLookup):
        waiting = queue.find_waiting(facts.standing.task_id)
        return facts if waiting is None else replace(facts, due=waiting.due, ahead=waiting.ahead)
    try:
        ids = [task.id for task in queue.peek(PEEKED)]
    except (NotPossible, RuntimeFailure):
        return facts
    if facts.standing.task_id in ids:
        return replace(facts, ahead=ids.index(facts.standing.task_id))
    return replace(facts, ahead_at_least=len(ids)) if len(ids) == PEEKED else facts


def explain(facts: Facts) -> Explanation:
    found = _explain(facts)
    return replace(found, evidence=(*found.evidence, *facts.untold))


def _explain(facts: Facts) -> Explanation:
    standing = facts.standing
    if standing.state is TaskState.LEASED:
        return _leased(facts)
    if standing.state is TaskState.QUEUED:
        return _queued(facts)
    record = standing.record
    assert record is not None, "a terminal state comes from a record"
    if standing.state is TaskState.FAILED:
        return _failed(facts, record)
    name, when = f"task `{record.task_id}`", _ago(record.ended_at, facts.now)
    evidence = (*_said(record), *_lives(facts), *_attempts(standing.history.ended))
    if standing.state is TaskState.CANCELLED:
        return Explanation(f"{name} will not run: it was cancelled {when}", evidence, f"runtime retry {record.task_id}")
    if standing.state is TaskState.EXPIRED:
        task = facts.task
        limit = f" at {format_time(task.expires_at)}" if task and task.expires_at else ""
        return Explanation(
            f"{name} will not run: it expired{limit} while it waited for a worker",
            evidence,
            f"`runtime retry {record.task_id}` runs it all the same, without an expiry",
        )
    took = f" after {format_duration(record.ended_at - record.started_at)}" if record.started_at else ""
    by = f" by worker `{record.worker}`" if record.worker else ""
    nth = {2: "second", 3: "third"}.get(record.attempts, f"{record.attempts}th")
    again = f" in its {nth} attempt" if record.attempts > 1 else ""
    return Explanation(f"{name} succeeded{again}{took}{by}, {when}", evidence, f"runtime logs {record.task_id}")


def _failed(facts: Facts, record: Record) -> Explanation:
    standing, mark = facts.standing, facts.standing.mark
    ended = standing.history.ended
    evidence = [*_said(record), *_lives(facts), *_attempts(ended, record)]
    name = f"task `{record.task_id}`"
    if mark is not None and mark.task is None and mark.raw is not None:
        return Explanation(
            f"{name} could not be parsed and is a dead letter: {last_line(record.message)}",
            (*evidence, f"it came as: {_cut(mark.raw, 500)}"),
            f"correct it, submit it again, then drop this one: `runtime queue dead purge {record.task_id}`",
        )
    if mark is not None and purged(mark):
        evidence.append("its dead letter was purged")
    if record.unreadable:
        return Explanation(f"{name} failed, and its record cannot be read", tuple(evidence), _after_failure(record))
    if record.reason is EndReason.CONFIG_INVALID:
        return Explanation(
            f"{name} failed at once, because trying again would not help: {last_line(record.message)}",
            tuple(evidence),
            f"correct the call or the worker's code, then `runtime retry {record.task_id}`, or submit it corrected",
        )
    if record.reason is EndReason.LOST and len(ended) < PREEMPTION_BUDGET - 1:
        return Explanation(
            f"{name} was buried as a crasher: {last_line(record.message)}",
            (*evidence, "losses beside other suspects, after 10 minutes or after progress do not count"),
            f"run it by hand where you can watch memory and GPU, then `runtime retry {record.task_id}`",
        )
    said = last_line(record.message)
    because = f": {_cut(said, 160)}" if said else ""
    raised = find_raised(record.message or "") or find_raised(record.log)
    if raised and record.reason is EndReason.APP_FAILED:
        because = f": {raised}"
    return Explanation(
        f"{name} failed, {_budget_spent(facts, record)}{because}", tuple(evidence), _after_failure(record)
    )


def _budget_spent(facts: Facts, record: Record) -> str:
    limit = failures_allowed(facts.task) if facts.task else DEFAULT_MAX_FAILURES
    why = f"the last attempt {_REASON_TEXTS[record.reason]}"
    match record.reason.budget:
        case Budget.FAILURES:
            before = [note for note in facts.standing.history.ended if note.token != record.token]
            spent = 1 + sum(note.reason.budget is Budget.FAILURES for note in before)
            return f"{spent} of {count_noun(limit, 'failure')} spent, {why}"
        case Budget.PREEMPTIONS:
            return f"its preemption budget of {PREEMPTION_BUDGET} is spent, {why}"
        case Budget.NEVER:
            return f"{_REASON_TEXTS[record.reason]}, which is not tried again"
        case _:
            return why


def _after_failure(record: Record) -> str:
    return {
        EndReason.OOM: f"give it more memory (`resources`) or make it need less, then `runtime retry {record.task_id}`",
        EndReason.TIMEOUT: f"see where it stood with `runtime logs {record.task_id}`; a longer limit needs a new submit",
    }.get(
        record.reason,
        f"`runtime logs {record.task_id}` shows what it printed, `runtime retry {record.task_id}` tries again",
    )


def _leased(facts: Facts) -> Explanation:
    standing = facts.standing
    since = f", for {format_duration(facts.now - standing.held_since)} so far" if standing.held_since else ""
    holder = next((worker for worker in facts.workers if worker.worker == standing.holder), None)
    evidence = [*_worker_lines(holder, facts.now), *_lives(facts), *_attempts(standing.history.ended)]
    name = f"task `{standing.task_id}`"
    if facts.cancelled:
        return Explanation(
            f"{name} was cancelled; worker `{standing.holder}` stops it at its next look, within 10 s", tuple(evidence)
        )
    if holder is not None and not holder.live:
        gone = "left" if holder.state == "left" else f"was last heard of {_ago(holder.seen_at, facts.now)}"
        return Explanation(
            f"{name} is held by worker `{holder.worker}`, which {gone}; it goes back when its lease ends",
            tuple(evidence),
            None if facts.live else f"runtime worker --queue {facts.queue}",
        )
    long = standing.held_since is not None and facts.now - standing.held_since > timedelta(seconds=60)
    if holder is not None and standing.task_id not in holder.running and long:
        evidence.append("the worker has leased it and not reported it as running yet")
    return Explanation(
        f"{name} runs on worker `{standing.holder}`{since}", tuple(evidence), f"runtime logs -f {standing.task_id}"
    )


def _queued(facts: Facts) -> Explanation:
    standing, task = facts.standing, facts.task
    name = f"task `{standing.task_id}`"
    evidence = [*_queue_lines(facts), *_lives(facts), *_attempts(standing.history.ended)]
    if facts.cancelled:
        at = f" at {format_time(facts.cancel_ordered_at)}" if facts.cancel_ordered_at else ""
        return Explanation(
            f"{name} was cancelled{at}; the worker that comes to it will record that instead of running it",
            tuple(evidence),
            None if facts.live else f"runtime worker --queue {facts.queue}",
        )
    if task is not None and task.expires_at is not None and task.expires_at <= facts.now:
        return Explanation(
            f"{name} expired at {format_time(task.expires_at)}; the worker that comes to it will record that",
            tuple(evidence),
        )
    if facts.paused:
        return Explanation(
            f"{name} waits because queue `{facts.queue}` is paused",
            tuple(evidence),
            f"runtime queue resume {facts.queue}",
        )
    if facts.live and len(facts.declined) == len(facts.live):
        return _declined(facts, name, evidence)
    delayed = _delayed(facts, name)
    if delayed is not None:
        sentence, more = delayed
        if not facts.live:
            more = (*more, f"no live worker serves queue `{facts.queue}` to take it then", *_declined_before(facts))
        step = None if facts.live else f"runtime worker --queue {facts.queue}"
        return Explanation(sentence, (*more, *evidence), step)
    if not facts.live:
        return Explanation(
            f"{name} waits because no live worker serves queue `{facts.queue}`",
            (*_last_workers(facts), *_declined_before(facts), *evidence),
            f"runtime worker --queue {facts.queue}",
        )
    evidence = [*(f"worker `{worker}` declined it: {why}" for worker, why in facts.declined.items()), *evidence]
    return Explanation(f"{name} waits for its turn: {_turn(facts)}", tuple(evidence), None)


def _declined(facts: Facts, name: str, evidence: Sequence[str]) -> Explanation:
    reasons = "; ".join(sorted(set(facts.declined.values())))
    step = "start a worker on a machine that can"
    if any(why.startswith("wants ") for why in facts.declined.values()):
        step += ", or submit the task with smaller `resources`"
    if "secret" in reasons:
        step = (
            "`runtime doctor` on a worker's machine says what it may read; `runtime secrets check` looks at the secrets"
        )
    return Explanation(
        f"{name} waits because none of {count_noun(len(facts.live), 'live worker')} can hold it: {reasons}",
        (*(f"worker `{worker}`: {why}" for worker, why in sorted(facts.declined.items())), *evidence),
        step,
    )


def _delayed(facts: Facts, name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the sentence and its evidence for a task that is not due yet."""
    standing, task = facts.standing, facts.task
    until = _until(facts)
    if until is None:
        return None
    earliest, latest = until
    at = format_time(earliest) if earliest == latest else f"between {format_time(earliest)} and {format_time(latest)}"
    if not standing.history.ended:
        if task is not None and task.not_before is not None and task.not_before >= latest - timedelta(seconds=1):
            return f"{name} is delayed by its submitter until {at} ({_in(latest, facts.now)})", ()
        declined = tuple(f"worker `{worker}` declined it: {why}" for worker, why in facts.declined.items())
        return (
            f"{name} was given back unstarted by a worker and is due again at {at} ({_in(latest, facts.now)})",
            declined,
        )
    last = standing.history.ended[-1]
    number = len(standing.history.ended)
    because = last_line(last.message) or _REASON_TEXTS[last.reason]
    sentence = (
        f"{name} waits to be tried again at {at} ({_in(latest, facts.now)}): "
        f"attempt {number} {_REASON_TEXTS[last.reason]}"
    )
    budget = _charged(task, standing.history.ended, facts.now)
    return sentence, (*([f"attempt {number} said: {because}"] if last.message else []), *([budget] if budget else []))


def _until(facts: Facts) -> tuple[datetime, datetime] | None:
    """Return the earliest and latest time at which it becomes due; None if it is due."""
    if facts.due is not None:
        return (facts.due, facts.due) if facts.due > facts.now else None
    task, ended = facts.task, facts.standing.history.ended
    if not ended:
        later = task is not None and task.not_before is not None and task.not_before > facts.now
        return (task.not_before, task.not_before) if later and task and task.not_before else None
    if facts.ahead is not None or task is None:
        return None
    # The queue has no due time; the retry's own rule has one, except for its jitter.
    at = ended[-1].ended_at
    first, latest = decide(task, ended, now=at, jitter=lambda: 0.0), decide(task, ended, now=at, jitter=lambda: 1.0)
    if not isinstance(first, RetryAt) or not isinstance(latest, RetryAt) or latest.not_before <= facts.now:
        return None
    return max(first.not_before, facts.now), latest.not_before


def _charged(task: Task | None, ended: Sequence[EndedNote], now: datetime) -> str | None:
    if task is None:
        return None
    decision = decide(task, ended, now=now)
    if not isinstance(decision, RetryAt):
        return None
    match decision.charged:
        case Budget.FAILURES:
            return f"{decision.spent} of {count_noun(task.max_failures, 'failure')} spent"
        case Budget.PREEMPTIONS:
            return f"{decision.spent} of {PREEMPTION_BUDGET} preemptions spent; its failure budget is untouched"
        case _:
            return None


def _turn(facts: Facts) -> str:
    ahead = "its place in the queue cannot be seen"
    if facts.ahead is not None:
        ahead = f"{count_noun(facts.ahead, 'task')} before it" if facts.ahead else "it is next"
    elif facts.ahead_at_least is not None:
        ahead = f"more than {count_noun(facts.ahead_at_least, 'task')} before it"
    rate = sum(worker.rate_per_s for worker in facts.live)
    left = f", about {format_duration(facts.ahead / rate)} at the present rate" if facts.ahead and rate > 0 else ""
    return f"{ahead}{left}"


def _said(record: Record) -> list[str]:
    said = [line.rstrip() for line in (record.message or "").strip().splitlines()]
    if len(said) > 6:
        said = ["…", *said[-5:]]
    told = "exit code" in (record.message or "")
    code = [f"exit code {record.exit_code}"] if record.exit_code and not told else []
    unread = [record.unreadable] if record.unreadable and record.unreadable not in said else []
    return [*said, *code, *unread]


def _lives(facts: Facts) -> list[str]:
    """Lines on how earlier generations ended; empty for the first generation."""
    earlier = [record for record in facts.standing.recorded if record.generation < facts.standing.generation]
    lines = [
        f"generation {one.generation} ended as {one.state} ({one.reason}) {_ago(one.ended_at, facts.now)}"
        for one in earlier
    ]
    return [*lines, f"this is generation {facts.standing.generation}, with new budgets"] if lines else []


def _attempts(ended: Sequence[EndedNote], record: Record | None = None) -> list[str]:
    lines = [_attempt_line(number, note) for number, note in enumerate(ended, 1)]
    if record is not None and record.attempts > 0 and record.token not in {note.token for note in ended}:
        where = f" on worker `{record.worker}`" if record.worker else ""
        took = f" after {format_duration(record.ended_at - record.started_at)}" if record.started_at else ""
        lines.append(f"attempt {max(record.attempts, len(ended) + 1)}{where}: {_REASON_TEXTS[record.reason]}{took}")
    left_out = len(lines) - ATTEMPTS_SHOWN
    return (
        lines if left_out <= 0 else [f"{count_noun(left_out, 'earlier attempt')} not shown", *lines[-ATTEMPTS_SHOWN:]]
    )


def _attempt_line(number: int, note: EndedNote) -> str:
    where = f" on worker `{note.worker}`" if note.worker else ""
    took = f" after {format_duration(note.ran_for)}" if note.ran_for is not None else ""
    said = last_line(note.message)
    free = ", spent no failure" if note.reason.budget is Budget.PREEMPTIONS else ""
    return f"attempt {number}{where}: {_REASON_TEXTS[note.reason]}{took}{free}" + (
        f": {_cut(said, 160)}" if said else ""
    )


def _queue_lines(facts: Facts) -> list[str]:
    lines = []
    if facts.undecodable:
        lines.append("it cannot be decoded; the worker that comes to it makes a dead letter of it")
    if facts.queue_problem is not None:
        lines.append(f"queue `{facts.queue}` could not be asked: {facts.queue_problem}")
    if facts.depth is not None:
        depth = facts.depth
        lines.append(
            f"queue `{facts.queue}`: {depth.ready:,} ready, {depth.delayed:,} delayed, {depth.leased:,} leased"
        )
    if facts.live:
        slots, running = sum(w.slots for w in facts.live), sum(len(w.running) for w in facts.live)
        lines.append(f"{count_noun(len(facts.live), 'live worker')} with {count_noun(slots, 'slot')}, {running} busy")
    return lines


def _last_workers(facts: Facts) -> list[str]:
    gone = sorted((w for w in facts.workers if not w.live), key=lambda worker: worker.seen_at, reverse=True)
    if not gone:
        return [f"no worker of queue `{facts.queue}` was seen in the last day"]
    return [line for worker in gone[:3] for line in _worker_lines(worker, facts.now)]


def _declined_before(facts: Facts) -> list[str]:
    """What workers that are gone said when they gave the task back: the next one may say the same."""
    ours = facts.standing.task_id
    reasons = {worker.declined[ours]: worker for worker in facts.workers if not worker.live and ours in worker.declined}
    return [f"worker `{worker.worker}`, which is gone, declined it: {why}" for why, worker in reasons.items()][:3]


def _worker_lines(worker: WorkerStatus | None, now: datetime) -> list[str]:
    if worker is None:
        return []
    state = {"live": "reported", "silent": "was last heard of", "left": "left"}[worker.state]
    return [f"worker `{worker.worker}` on `{worker.host}` {state} {_ago(worker.seen_at, now)}"]


_REASON_TEXTS: Final = {
    EndReason.APP_FAILED: "failed",
    EndReason.OOM: "ran out of memory",
    EndReason.DISK: "used more disk than its limit",
    EndReason.PREEMPTED: "was preempted",
    EndReason.NODE_FAILED: "lost its machine",
    EndReason.TIMEOUT: "ran into its time limit",
    EndReason.LOST: "was lost with its worker",
    EndReason.SETUP_FAILED: "could not be set up",
    EndReason.CONFIG_INVALID: "was called wrongly",
    EndReason.CANCELLED: "was cancelled",
    EndReason.EXPIRED: "expired",
    EndReason.IDLE: "was idle for too long",
    EndReason.NO_CAPACITY: "found no capacity",
    EndReason.QUOTA: "was refused by a quota",
    EndReason.IMAGE_FAILED: "had no usable image",
    EndReason.SIBLING_FAILED: "was stopped because a sibling failed",
    EndReason.DUPLICATE: "was a duplicate",
    EndReason.SUCCEEDED: "succeeded",
}


def _ago(at: datetime, now: datetime) -> str:
    span = now - at
    if abs(span) < timedelta(seconds=1):
        return "now"
    return f"{format_duration(span)} ago" if span > timedelta() else _in(at, now)


def _in(at: datetime, now: datetime) -> str:
    return f"in {format_duration(max(at - now, timedelta()))}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def explain_experiment(status: ExperimentStatus) -> Explanation:
    name, totals = f"experiment `{status.experiment}`", status.totals
    reasons = Counter(failure.reason for failure in status.failures)
    evidence = [
        ", ".join(f"{count:,} {state}" for state, count in totals.items() if count) or "nothing was submitted to it",
        *(f"{count_noun(count, 'task')} {_REASON_TEXTS[reason]}" for reason, count in reasons.most_common()),
        *(f"`{failure.task}`: {_cut(failure.error, 160)}" for failure in status.failures[:3]),
    ]
    failed = f"runtime status {status.experiment} --failed" if totals[TaskState.FAILED] else None
    if not status.submitted:
        return Explanation(f"{name} has no tasks", (), None)
    if not status.remaining:
        return Explanation(
            f"{name} is done: {totals[TaskState.SUCCEEDED]:,} of {status.submitted:,} succeeded",
            tuple(evidence),
            failed,
        )
    if status.cancelled_before is not None:
        return Explanation(
            f"{name} was cancelled at {format_time(status.cancelled_before)}; workers record each task as they come to it",
            tuple(evidence),
        )
    if status.why is not None:
        evidence += _declined_of(status)
        left = f", {format_duration(status.eta_s)} left at the present rate" if status.eta_s else ""
        waiting = count_noun(totals[TaskState.QUEUED], "task")
        verb = "waits" if totals[TaskState.QUEUED] == 1 else "wait"
        return Explanation(
            f"{waiting} of {name} {verb}: {status.why}{left}", tuple(evidence), status.next_step or failed
        )
    return Explanation(f"{name} runs: {count_noun(status.remaining, 'task')} left", tuple(evidence), failed)


def _declined_of(status: ExperimentStatus) -> list[str]:
    """Why workers gave tasks of the experiment back, each reason once; those that are gone, too: the next one may say the same."""
    digest = experiment_digest(status.experiment)
    told = {
        why: f"worker `{worker.worker}`{'' if worker.live else ', which is gone,'} declined `{task}`: {why}"
        for worker in status.workers
        for task, why in sorted(worker.declined.items(), reverse=True)
        if task.endswith(digest)
    }
    return list(told.values())[:3]


def explain_worker(worker: WorkerStatus, *, now: datetime) -> Explanation:
    name = f"worker `{worker.worker}`"
    evidence = [
        f"on `{worker.host}`, queue `{worker.queue}`, started {_ago(worker.started_at, now)}",
        f"{worker.done:,} succeeded and {worker.failed:,} failed since",
        *(f"it cannot hold `{task}`: {why}" for task, why in sorted(worker.declined.items())),
    ]
    match worker.state:
        case "left":
            sentence, step = f"{name} left {_ago(worker.seen_at, now)} and holds nothing", None
        case "silent":
            sentence = f"{name} was last heard of {_ago(worker.seen_at, now)} and did not say that it leaves"
            step = "what it held goes back to the queue when its leases end; start another worker if none is left"
        case _ if worker.running:
            sentence = f"{name} runs {count_noun(len(worker.running), 'task')} in {count_noun(worker.slots, 'slot')}"
            evidence += [f"runs `{task}`" for task in worker.running[:10]]
            step = None
        case _:
            sentence, step = f"{name} is idle: nothing that it can hold is due", f"runtime queue stats {worker.queue}"
    return Explanation(sentence, tuple(evidence), step)
