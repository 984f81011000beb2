"""What is done when an attempt has ended: its task is recorded, given back or dropped. `verdict` decides which."""

from __future__ import annotations

import os
import random
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from runtime.errors import explain_json
from runtime.reasons import EndReason
from runtime.records.base import KeptOutputs
from runtime.snapshots.identity import CodeIdentity
from runtime.tasks.history import EndedNote, Lease, Record, Release, Settlement
from runtime.tasks.model import TaskState
from runtime.tasks.verdict import Drop, Settle, backoff, counts_against_worker, judge_end
from runtime.values import replace
from runtime.worker.attempts.model import Ended
from runtime.worker.attempts.pool import AttemptPool
from runtime.worker.dispatch import Dispatch
from runtime.worker.held import HeldLease, Holdings
from runtime.worker.logs import AttemptLogs
from runtime.worker.outbox import Outbox
from runtime.worker.preparing import Preparing
from runtime.worker.services import Services
from runtime.worker.settling import Settling

LONGEST_PAUSE_S: Final = 60.0
"""The longest pause between two tasks of a worker that has succeeded before, while one task after the other fails."""
STARTER: Final = "the process that starts attempts"
"""What dies when an attempt is lost and its worker is not."""


class Ending:
    def __init__(
        self,
        services: Services,
        holdings: Holdings,
        outbox: Outbox,
        dispatch: Dispatch,
        preparing: Preparing,
        settling: Settling,
        logs: AttemptLogs,
        pool: AttemptPool,
        code: CodeIdentity,
        scratch: str,
    ) -> None:
        self._services = services
        self._holdings = holdings
        self._outbox = outbox
        self._dispatch = dispatch
        self._preparing = preparing
        self._settling = settling
        self._logs = logs
        self._pool = pool
        self._code = code
        self._scratch = scratch
        self._failed_tasks: list[str] = []
        """Distinct tasks that failed since the last success."""

    def conclude(self, end: Ended, now: float) -> None:
        """Record the end of an attempt, give its task back, or drop it."""
        held = self._holdings.by_token.get(end.token)
        if held is None:
            return
        lease, dispatch = held.lease, self._dispatch
        if self._holdings.on_trial or end.reason is EndReason.LOST:
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
        self._holdings.busy_at = now
        value = _read_value(end)
        seconds = end.ended_at - end.started_at
        self._services.metrics.attempt_ended(end.reason, seconds)
        dispatch.note_duration(seconds)
        if end.reason is EndReason.SUCCEEDED:
            self._conclude_success(held, end, value)
        else:
            self._conclude_failure(held, end, now)

    def _code_of(self, lease: Lease) -> str | None:
        return lease.task.snapshot or self._code.of(lease.task.entry)

    def _discard_outputs(self, held: HeldLease) -> None:
        """Remove the folder of outputs that belong in a bucket: they lie there now, or nowhere."""
        if held.output_dir.startswith(self._scratch) and os.path.lexists(held.output_dir):
            self._pool.discard(held.output_dir)

    # success

    def _conclude_success(self, held: HeldLease, end: Ended, value: object) -> None:
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
        )
        if end.value or end.log_bytes or end.metrics or end.exit_code is not None:
            record = replace(
                record,
                value=value,
                log=end.log.decode(errors="surrogateescape"),
                log_url=self._logs.complete(held, end),
                metrics=dict(end.metrics),
                exit_code=end.exit_code,
            )
        # Not the attempt's own word for it: what ran in its process before may have changed what `os` says there.
        if os.path.lexists(held.output_dir):  # on the path of every task
            services.offload.call(
                lambda: services.records.keep_outputs(task.id, lease.token, Path(held.output_dir)),
                lambda kept, problem: self._kept(held, end, record, kept, problem),
                awaited=True,
            )
            return
        self._succeed(held, end, record)

    def _kept(
        self, held: HeldLease, end: Ended, record: Record, kept: KeptOutputs | None, problem: Exception | None
    ) -> None:
        """Record the success if the outputs are durable; otherwise the attempt has failed."""
        if kept is not None:
            self._discard_outputs(held)
            self._services.say.left_out(held.lease.task, kept.left_out)
            self._succeed(held, end, replace(record, outputs_url=kept.url, message=kept.left_out))
        elif held.lease.token in self._holdings.by_token:
            end.reason, end.message = EndReason.SETUP_FAILED, f"its outputs could not be kept: {problem}"
            self.conclude(end, time.monotonic())

    def _succeed(self, held: HeldLease, end: Ended, record: Record) -> None:
        self._failed_tasks.clear()
        say = partial(self._services.say.succeeded, held.lease.task, end)
        self._outbox.end(held, Settlement(held.lease, record), say)

    # failure

    def _conclude_failure(self, held: HeldLease, end: Ended, now: float) -> None:
        services, outbox, lease = self._services, self._outbox, held.lease
        self._discard_outputs(held)
        log = end.log.decode(errors="surrogateescape")
        note = EndedNote(
            token=lease.token,
            reason=end.reason,
            ended_at=datetime.fromtimestamp(end.ended_at, UTC),
            started_at=datetime.fromtimestamp(end.started_at, UTC),
            worker=services.name,
            message=_with_fence(end.message) if held.fenced else end.message,
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
            holds=self._holdings.lease_clock.holds(lease.token),
            now=services.clock.now(),
            code=self._code_of(lease),
            log=log,
            log_url=self._logs.complete(held, end),
            jitter=random.random,
        )
        say = partial(services.say.ended, lease.task, end, verdict)
        if isinstance(verdict, Settle):
            outbox.end(held, verdict.settlement, say)
        elif isinstance(verdict, Drop):
            say()
            self._holdings.drop(lease.token)
            if services.queue.traits.tracks_holders:
                # Leases there are the worker's and not each for itself: one that nobody took is ours as long as we live.
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
        stays = self._settling.succeeded > 0
        wait = backoff(failed).total_seconds()
        if stays:
            # This machine can run tasks. It may have broken since, so it is slow to take more; it does not leave, because
            # as likely as not the tasks are to blame.
            wait = min(wait, LONGEST_PAUSE_S)
        elif failed >= most:
            why = f"{failed} tasks in a row failed and none succeeded (--max-consecutive-failures {most})"
            self._services.leaving.decide(why, 1)
            return
        self._dispatch.pause_until = now + wait
        self._services.say.paused(failed, most, wait, stays=stays)


def _read_value(end: Ended) -> object:
    """Return what the function returned; a value that cannot be read is a failure of that attempt alone."""
    if not end.value or end.reason is not EndReason.SUCCEEDED:
        return None
    import json

    try:
        return json.loads(end.value)
    except (ValueError, RecursionError) as problem:
        end.reason = EndReason.APP_FAILED
        end.message = f"the value it returned cannot be recorded: {explain_json(problem)}"
        return None


def _with_fence(message: str | None) -> str:
    return f"{message or 'ended'} (it ran fenced: workers were lost while it ran, so it could not signal this one)"
