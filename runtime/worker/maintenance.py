"""The regular duties of a worker: renew leases, tend the queue, read its orders, write logs, report in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from runtime.end_reasons import EndReason
from runtime.records.base import WorkerSeen
from runtime.system import system
from runtime.tasks.history import Lease, Record
from runtime.tasks.model import TaskState
from runtime.tasks.retry_policy import PROVEN_AFTER
from runtime.worker.completion import AttemptLogs
from runtime.worker.control import ControlReader
from runtime.worker.dispatch import Dispatch
from runtime.worker.pending_settlements import PendingSettlements
from runtime.worker.worker_context import HeldLease, WorkerContext

TEND_EVERY_S: Final = 0.8
TEND_IDLE_EVERY_S: Final = 5.0
"""The same while the worker holds nothing, of a queue that does not know its holders: nobody here waits for its upkeep."""
RENEW_AT_LEAST_EVERY_S: Final = 10.0
"""A cancelled task of the embedded file shows as a lost lease, which the worker learns no later than an order."""
SEEN_EVERY_S: Final = 30.0
SEEN_AFTER_CHANGE_S: Final = 2.0
"""After a change between busy and idle: `status` should not have to wait for the next report."""
LIVE_EVERY_S: Final = 5.0
"""How often a worker beside its records reports in while its attempts report numbers."""
PROGRESS_COUNTS_AFTER_S: Final = 60.0
"""An attempt that reports progress is noted as proven after this time, so that a short one costs no further write."""
MOST_REPORTS: Final = 64
"""How many attempts' numbers are in a worker's report."""
MOST_METRICS: Final = 8
"""How many numbers of each."""


class Maintenance:
    def __init__(
        self,
        services: WorkerContext,
        outbox: PendingSettlements,
        orders: ControlReader,
        dispatch: Dispatch,
        logs: AttemptLogs,
    ) -> None:
        self._services = services
        self._outbox = outbox
        self._orders = orders
        self._dispatch = dispatch
        self._logs = logs
        self._started_at = services.clock.now()
        self._tend_at = self._renew_at = self._seen_at = 0.0
        self._was_busy = False

    def next_at(self) -> float:
        return min(self._tend_at, self._renew_at, self._seen_at, self._orders.due, self._logs.next_at())

    def tend_now(self) -> None:
        self._tend_at = 0.0

    def do_what_is_due(self, now: float) -> None:
        services = self._services
        if now >= self._renew_at:
            self._renew()
            self._record_proven(now)
            self._renew_at = now + max(0.2, min(services.holdings.length_s / 3, RENEW_AT_LEAST_EVERY_S))
        if now >= self._tend_at:
            idle = not (services.holdings.by_token or services.queue.traits.tracks_holders)
            self._tend_at = now + (TEND_IDLE_EVERY_S if idle else TEND_EVERY_S)
            services.offload.call(services.queue.tend, self._log_trouble("upkeep"))
            self._dispatch.shed(now)
        self._orders.read_when_due(now)
        if now >= self._seen_at:
            self._seen_at = now + (LIVE_EVERY_S if self._reports() and services.local else SEEN_EVERY_S)
            self.report_in()
        self._logs.write_when_due(now)

    def record_busy(self) -> None:
        """Report in soon if the worker has become busy or idle."""
        busy = bool(self._services.holdings.running)
        if busy != self._was_busy:
            self._was_busy = busy
            now = system.monotonic()
            self._seen_at = min(self._seen_at, now + SEEN_AFTER_CHANGE_S)
            self._tend_at = min(self._tend_at, now + TEND_EVERY_S)

    def _renew(self) -> None:
        services = self._services
        leases = [held.lease for held in self._services.holdings.by_token.values()]
        if not leases:
            return
        asked_at = services.clock.boottime()
        services.offload.call(
            lambda: services.queue.renew(leases, services.options.lease_time),
            lambda lost, problem: self._renewed(leases, lost, problem, asked_at),
        )

    def _renewed(
        self, leases: list[Lease], lost: list[Lease] | None, problem: Exception | None, asked_at: float
    ) -> None:
        services = self._services
        if lost is None:
            services.metrics.renewal_failed()
            services.say.trouble("renewing leases", problem)
            return
        services.holdings.confirm(leases, lost, asked_at)
        for lease in lost:
            if held := services.holdings.by_token.get(lease.token):
                services.offload.call(
                    partial(services.records.find, lease.task.id, lease.task.generation), partial(self._lost, held)
                )

    def _lost(self, held: HeldLease, record: Record | None, _: Exception | None) -> None:
        """Stop a task whose record exists; if only the lease passed on, the attempt may still be the first to succeed."""
        services, task = self._services, held.lease.task
        services.metrics.lease_lost()
        services.say.lost(task, record)
        if not held.sent:
            self._dispatch.leave_line(held)
            self._services.holdings.drop(held.lease.token)
        elif record is not None:
            cancelled = record.state is TaskState.CANCELLED
            held.stop_reason = EndReason.CANCELLED if cancelled else EndReason.DUPLICATE
            self._services.pool.ask_to_stop(held.lease.token, held.stop_reason)

    def _record_proven(self, now: float) -> None:
        """Note which running attempts have proven themselves: if this worker is lost, nobody else can tell.

        Without that, an attempt that ended its worker at once looks long if the next worker comes late.
        """
        services = self._services
        holdings = services.holdings
        leases = [
            held.lease for held in filter(None, map(holdings.by_token.get, holdings.running)) if self._proves(held, now)
        ]
        holdings.proven.update(lease.token for lease in leases)
        if leases and services.queue.traits.tracks_holders:
            self._dispatch.mark_running()
            return
        for lease in leases:
            services.offload.call(
                partial(services.records.record_proven, lease.task, lease.token), partial(self._proven, lease.token)
            )

    def _proves(self, held: HeldLease, now: float) -> bool:
        """Return whether an attempt has run long enough, or made progress, and that is not noted yet."""
        token = held.lease.token
        held.runs_since = held.runs_since or now
        ran_s = now - held.runs_since
        if ran_s < PROGRESS_COUNTS_AFTER_S or token in self._services.holdings.proven:
            return False
        return ran_s >= PROVEN_AFTER.total_seconds() or self._services.pool.has_progressed(token)

    def _proven(self, token: str, _: None, problem: Exception | None) -> None:
        if problem is not None:
            self._services.holdings.proven.discard(token)
            self._services.say.trouble("noting how long an attempt has run", problem)

    def _reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports of the running attempts, by task."""
        holdings, found = self._services.holdings, dict[str, dict[str, Any]]()
        for held in filter(None, map(holdings.by_token.get, holdings.running)):
            reports = held.reports
            if reports is not None and reports.lines and len(found) < MOST_REPORTS:
                last = dict(itertools.islice(reports.last.items(), MOST_METRICS))
                task = held.lease.task
                about = {"experiment": task.experiment, "step": reports.step, "of": reports.of}
                found[task.id] = {**about, "metrics": last}
        return found

    def report_in(self, *, left: bool = False) -> None:
        """Overwrite this worker's report in the store, and its counters."""
        services, outbox, holdings = self._services, self._outbox, self._services.holdings
        now = services.clock.now()
        lived = max(1e-9, (now - self._started_at).total_seconds())
        seen = WorkerSeen(
            worker=services.name,
            host=system.node(),
            queue=services.queue.name,
            seen_at=now,
            started_at=self._started_at,
            slots=len(services.slots),
            running=tuple(
                holdings.by_token[token].lease.task.id for token in holdings.running if token in holdings.by_token
            ),
            done=outbox.succeeded,
            failed=outbox.failed,
            rate_per_s=round((outbox.succeeded + outbox.failed) / lived, 3),
            left=left,
            labels=services.options.labels,
            declined=dict(holdings.declined),
            reports=self._reports(),
        )
        counters = {name: dict(counts) for name, counts in outbox.counters.items()}
        services.offload.call(lambda: services.records.put_worker(seen), self._log_trouble("reporting in"))
        services.offload.call(
            lambda: services.records.put_counters(services.name, counters),
            self._log_trouble("reporting what was recorded"),
        )

    def _log_trouble(self, what: str) -> Callable[[Any, Exception | None], None]:
        def done(_: Any, problem: Exception | None) -> None:
            if problem is not None:
                self._services.leaving.trouble(what, problem)

        return done
