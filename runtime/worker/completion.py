"""The steps after an attempt: its task is recorded, given back or dropped. `retry_policy` decides which."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from runtime.end_reasons import EndReason
from runtime.errors import explain_json
from runtime.records.base import KeptOutputs
from runtime.shim.metrics import Reports
from runtime.system import system
from runtime.tasks.history import EndedNote, Lease, Record, Release, Settlement
from runtime.tasks.model import TaskState
from runtime.tasks.retry_policy import Drop, Settle, backoff, counts_against_worker, judge_end
from runtime.units import count_noun, format_size
from runtime.worker.admission import Admission
from runtime.worker.artifact_saver import ArtifactSaver
from runtime.worker.attempts.model import AttemptEnd
from runtime.worker.dispatch import Dispatch
from runtime.worker.pending_settlements import PendingSettlements
from runtime.worker.worker_context import HeldLease, WorkerContext

_FENCED: Final = "(it ran fenced: workers were lost while it ran, so it could not signal this one)"
LONGEST_PAUSE_S: Final = 60.0
"""The longest pause between two tasks of a worker that has succeeded before, while one task after the other fails."""
STARTER: Final = "the process that starts attempts"
"""The process that died if an attempt is lost and its worker is not."""


LOG_EVERY_S: Final = 1.0
REMOTE_LOG_EVERY_S: Final = 15.0
LOG_LIMIT_BYTES: Final = 1 << 30
"""If a log is longer, the store gets this much of its beginning, and its last 64 KiB when it ends."""


LOOK_BYTES: Final = 1 << 18
"""How much of a running attempt's reports one look takes in, so that no attempt keeps the worker from the others."""
SUM_UP_S: Final = 2.0
"""How long the worker may read the reports of an attempt that has ended."""


class AttemptLogs:
    """Attempts' logs in the store: written while an attempt runs, and completed when it ends. Their reports are read."""

    def __init__(self, services: WorkerContext) -> None:
        self._services = services
        self._due = 0.0

    def next_at(self) -> float:
        return self._due if self._services.holdings.by_token else float("inf")

    def write_when_due(self, now: float) -> None:
        """Write the output of long attempts, so that `runtime logs -f` can follow them."""
        if now < self.next_at():
            return
        self._due = now + LOG_EVERY_S
        every = LOG_EVERY_S if self._services.local else REMOTE_LOG_EVERY_S
        holdings = self._services.holdings
        for token in holdings.running:
            held = holdings.by_token.get(token)
            if held is None or now - held.logged_at < every:
                continue
            is_new, held.logged_at = held.logged_at == 0.0, now
            if not is_new:
                self._look(held)
                self._write(held)

    def _look(self, held: HeldLease) -> None:
        """Take in a running attempt's new reports, for this worker's own report."""
        if held.reports is None:
            path = self._services.reports_path(held.lease.token)
            held.reports = Reports(path) if os.path.lexists(path) else None
        if held.reports is not None:
            held.reports.look(LOOK_BYTES)

    def _write(self, held: HeldLease) -> None:
        services, task_id, token = self._services, held.lease.task.id, held.lease.token
        # Drained in any case, or the output would wait in memory.
        data = services.pool.drain_log(token)[: LOG_LIMIT_BYTES - held.logged_bytes]
        if not data:
            return
        held.logged_bytes += len(data)

        def written(url: str | None, problem: Exception | None) -> None:
            held.log_url = url or held.log_url
            if problem is not None:
                services.say.trouble("writing a log", problem)

        services.offload.call(lambda: services.records.append_log(task_id, token, data), written)

    def complete(self, held: HeldLease, end: AttemptEnd) -> str | None:
        """Write the rest of a log that outgrew the record, or is in the store in part; returns its address."""
        if held.log_url is None and end.log_bytes <= len(end.log):
            return None
        rest, room = end.undrained, LOG_LIMIT_BYTES - held.logged_bytes
        if len(rest) > room or not room:
            said = f"\n[runtime: the log outgrew {format_size(LOG_LIMIT_BYTES)}; what follows is its end]\n"
            rest = rest[:room] + said.encode() + end.log
        task_id = held.lease.task.id
        try:
            return self._services.records.append_log(task_id, end.token, rest)
        except Exception as problem:
            self._services.say.trouble(f"writing the log of {task_id}", problem)
            return held.log_url


class Completion:
    def __init__(
        self,
        services: WorkerContext,
        outbox: PendingSettlements,
        dispatch: Dispatch,
        preparing: Admission,
        logs: AttemptLogs,
        captures: ArtifactSaver,
    ) -> None:
        self._services = services
        self._outbox = outbox
        self._dispatch = dispatch
        self._captures = captures
        self._preparing = preparing
        self._logs = logs
        self._failed_tasks: list[str] = []
        """Distinct tasks that failed since the last success."""

    def conclude(self, end: AttemptEnd, now: float) -> None:
        """Record the end of an attempt, give its task back, or drop it."""
        holdings = self._services.holdings
        held = holdings.by_token.get(end.token)
        reports = self._services.reports_path(end.token)
        if not end.summed_up and os.access(reports, os.F_OK):  # on the path of every task, as below
            end.summed_up = True
            if held is not None:
                self._sum_up(held, end, reports)
                return
            _drop(reports)
        if held is None:
            return
        lease, dispatch = held.lease, self._dispatch
        if end.token in self._captures:
            if self._captures.finish(held, end, lambda: self.conclude(end, system.monotonic())):
                return  # The lease is renewed until then.
            self._report_artifacts(held, end)
        if holdings.on_trial or end.reason is EndReason.LOST:
            dispatch.suspects.ended(end.token, end.reason)
        if lease.task.snapshot is not None and held.slot >= 0:
            self._preparing.tend_trees(held, end)
        if end.not_started:
            held.sent = False
            if self._services.leaving.reason is not None or held.stop_reason is not None:
                self._outbox.give_back(held)
            elif lease.alone:
                dispatch.line_up(held)
            else:
                dispatch.ready.appendleft(held)
            return
        holdings.busy_at = now
        value = _read_value(end)
        seconds = end.ended_at - end.started_at
        self._services.metrics.attempt_ended(end.reason, seconds)
        dispatch.record_duration(seconds)
        if end.reason is EndReason.SUCCEEDED:
            self._conclude_success(held, end, value)
        else:
            self._conclude_failure(held, end, now)

    def _sum_up(self, held: HeldLease, end: AttemptEnd, path: str) -> None:
        """Read the rest of the attempt's reports and keep their sum in the store; then the end is concluded, with them."""
        services, task_id = self._services, held.lease.task.id
        reports, held.reports = held.reports or Reports(path), None

        def sum_up() -> Reports:
            reports.finish(SUM_UP_S)
            _drop(path)
            return reports

        def keep(reports: Reports) -> None:
            if reports.lines:
                services.records.keep_reports(task_id, end.token, reports.encode().encode())

        def conclude(_: None, problem: Exception | None) -> None:
            if problem is not None:
                services.say.trouble(f"keeping the metrics of {task_id}", problem)
            self.conclude(end, system.monotonic())

        def take(reports: Reports | None, problem: Exception | None) -> None:
            if reports is None:
                conclude(None, problem)
                return
            end.metrics, end.metric_ranges = {**end.metrics, **reports.last}, reports.ranges
            services.offload.call(lambda: keep(reports), conclude, awaited=True)

        services.offload.call(sum_up, take, awaited=True)

    def _report_artifacts(self, held: HeldLease, end: AttemptEnd) -> None:
        """Add the files that its artifacts lack to the attempt's message; a success without them is none."""
        succeeded = end.reason is EndReason.SUCCEEDED
        failed, note = self._captures.describe_end(held, succeeded=succeeded)
        if failed is not None and succeeded:
            end.reason, end.message = EndReason.SETUP_FAILED, failed
        elif failed is not None:
            end.message = f"{end.message or 'ended'}; {failed}"
        held.left_out = note

    def _code_of(self, lease: Lease) -> str | None:
        return lease.task.snapshot or self._services.code.of(lease.task.entry)

    def _discard_outputs(self, held: HeldLease) -> None:
        """Remove the local folder of outputs that belong in a bucket."""
        if held.output_dir.startswith(self._services.scratch) and os.path.lexists(held.output_dir):
            self._services.pool.discard(held.output_dir)

    # success

    def _conclude_success(self, held: HeldLease, end: AttemptEnd, value: object) -> None:
        services, lease = self._services, held.lease
        task = lease.task
        record = Record(
            task_id=task.id,
            generation=task.generation,
            experiment=task.experiment,
            state=TaskState.SUCCEEDED,
            token=lease.token,
            reason=EndReason.SUCCEEDED,
            ended_at=datetime.fromtimestamp(end.ended_at, UTC),
            started_at=datetime.fromtimestamp(end.started_at, UTC),
            worker=services.name,
            attempts=len(held.history.ended) + 1,
            code=self._code_of(lease),
            message=held.left_out,
        )
        if held.left_out is not None:
            self._services.say.left_out(task, held.left_out)
        if end.value or end.log_bytes or end.metrics or end.exit_code is not None:
            record = replace(
                record,
                value=value,
                log=end.log.decode(errors="surrogateescape"),
                log_url=self._logs.complete(held, end),
                metrics=dict(end.metrics),
                metric_ranges=dict(end.metric_ranges),
                exit_code=end.exit_code,
            )
        # Not from the attempt's own report: earlier code in its process may have changed `os` there.
        if os.path.lexists(held.output_dir):  # on the path of every task
            services.offload.call(
                lambda: services.records.keep_outputs(task.id, lease.token, Path(held.output_dir)),
                lambda kept, problem: self._kept(held, end, record, kept, problem),
                awaited=True,
            )
            return
        self._succeed(held, end, record)

    def _kept(
        self, held: HeldLease, end: AttemptEnd, record: Record, kept: KeptOutputs | None, problem: Exception | None
    ) -> None:
        """Record the success if the outputs are durable; otherwise the attempt has failed."""
        if kept is not None:
            self._discard_outputs(held)
            self._services.say.left_out(held.lease.task, kept.left_out)
            left_out = "; ".join(filter(None, (kept.left_out, held.left_out))) or None
            self._succeed(held, end, replace(record, outputs_url=kept.url, message=left_out))
        elif held.lease.token in self._services.holdings.by_token:
            end.reason, end.message = EndReason.SETUP_FAILED, f"its outputs could not be kept: {problem}"
            self.conclude(end, system.monotonic())

    def _succeed(self, held: HeldLease, end: AttemptEnd, record: Record) -> None:
        self._failed_tasks.clear()
        say: Callable[[], None] = partial(self._services.say.succeeded, held.lease.task, end)
        clear = self._captures.clear_after(held)
        if clear is not None:
            say = partial(_call_all, say, clear)
        self._outbox.end(held, Settlement(held.lease, record), say)

    # failure

    def _conclude_failure(self, held: HeldLease, end: AttemptEnd, now: float) -> None:
        services, outbox, lease = self._services, self._outbox, held.lease
        self._discard_outputs(held)
        log = end.log.decode(errors="surrogateescape")
        note = EndedNote(
            token=lease.token,
            reason=end.reason,
            ended_at=datetime.fromtimestamp(end.ended_at, UTC),
            started_at=datetime.fromtimestamp(end.started_at, UTC),
            worker=services.name,
            message=f"{end.message or 'ended'} {_FENCED}" if held.fenced else end.message,
            alone=held.apart or not held.crowded,
            machine=services.machine,
            evidence=STARTER if end.reason is EndReason.LOST else None,
            progressed=end.progressed,
            exit_code=end.exit_code,
            log=log[-8192:],
        )
        verdict = judge_end(
            lease,
            note,
            held.history,
            holds=services.holdings.holds(held),
            now=services.clock.now(),
            code=self._code_of(lease),
            log=log,
            log_url=self._logs.complete(held, end),
            jitter=system.random,
        )
        say = partial(services.say.ended, lease.task, end, verdict)
        if isinstance(verdict, Settle):
            outbox.end(held, _with_metrics(verdict.settlement, end), say)
        elif isinstance(verdict, Drop):
            say()
            self._services.holdings.drop(lease.token)
            if services.queue.traits.tracks_holders:
                # There a lease lasts as long as its worker: one that no other worker took is still this worker's.
                outbox.release(Release(lease))
        else:
            say()
            services.metrics.task_released(end.reason)
            outbox.released += 1
            outbox.release(verdict.release)
        if counts_against_worker(end.reason):
            self._count_failure(lease.task.id, now)

    def _count_failure(self, task_id: str, now: float) -> None:
        """Pause after tasks that failed in a row; leave if none has succeeded here."""
        most = self._services.options.max_consecutive_failures
        if not most or task_id in self._failed_tasks:
            return
        self._failed_tasks.append(task_id)
        failed = len(self._failed_tasks)
        stays = self._outbox.succeeded > 0
        wait = backoff(failed).total_seconds()
        if stays:
            # This machine can run tasks. It may have broken since, so it is slow to take more; it does not leave, because
            # the tasks may be to blame.
            wait = min(wait, LONGEST_PAUSE_S)
        elif failed >= most:
            why = f"{count_noun(failed, 'task')} in a row failed and none succeeded (--max-consecutive-failures {most})"
            self._services.leaving.decide(why, 1)
            return
        self._dispatch.pause_until = now + wait
        self._services.say.paused(failed, most, wait, stays=stays)


def _call_all(*calls: Callable[[], None]) -> None:
    for each in calls:
        each()


def _drop(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()


def _with_metrics(settlement: Settlement, end: AttemptEnd) -> Settlement:
    """The settlement of a task that failed, with what its last attempt reported."""
    if not end.metrics:
        return settlement
    record = replace(settlement.record, metrics=dict(end.metrics), metric_ranges=dict(end.metric_ranges))
    return replace(settlement, record=record)


def _read_value(end: AttemptEnd) -> object:
    """Return the function's value; a value that cannot be read is a failure of that attempt alone."""
    if not end.value or end.reason is not EndReason.SUCCEEDED:
        return None
    import json

    try:
        return json.loads(end.value)
    except (ValueError, RecursionError) as problem:
        end.reason = EndReason.APP_FAILED
        end.message = f"the value it returned cannot be recorded: {explain_json(problem)}"
        return None
