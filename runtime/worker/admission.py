"""The steps between a lease and its start: the task's demands, its past, and its code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from runtime.end_reasons import EndReason
from runtime.errors import RequestRefused
from runtime.records.base import calls_at_once
from runtime.tasks.artifacts import NO_ARTIFACTS
from runtime.tasks.history import EndedNote, History, Lease, Record, Release, Settlement
from runtime.tasks.model import CommandEntry, FunctionEntry
from runtime.tasks.retry_policy import RetryAt, backoff, judge_history, unstarted
from runtime.worker.artifact_saver import ArtifactSaver
from runtime.worker.attempts.model import AttemptEnd
from runtime.worker.control import ControlReader
from runtime.worker.dispatch import Dispatch
from runtime.worker.environments import Environments
from runtime.worker.options import ENTRY_KINDS, EntryKind
from runtime.worker.pending_settlements import PendingSettlements
from runtime.worker.secret_injection import LONGEST_WAIT, SecretInjection
from runtime.worker.slots import fits
from runtime.worker.thread_calls import Outcome
from runtime.worker.worker_context import HeldLease, WorkerContext

if TYPE_CHECKING:
    from runtime.worker.images import Images

DECLINED_AT_MOST: Final = 20
"""Declined tasks that a worker's report names."""
_KINDS: Final[dict[type, EntryKind]] = {CommandEntry: "command", FunctionEntry: "function"}
_KILLED: Final = frozenset(
    {EndReason.TIMEOUT, EndReason.OOM, EndReason.LOST, EndReason.PREEMPTED, EndReason.CANCELLED, EndReason.DUPLICATE}
)
"""Ends after which the attempt's tree was not tidied."""


class Admission:
    def __init__(
        self,
        services: WorkerContext,
        outbox: PendingSettlements,
        orders: ControlReader,
        dispatch: Dispatch,
        captures: ArtifactSaver,
        conclude: Callable[[AttemptEnd], None],
    ) -> None:
        """`conclude` gets the ends of attempts without their code."""
        self._services = services
        self._outbox = outbox
        self._orders = orders
        orders.changed = self._apply_cancels
        self._dispatch = dispatch
        self._captures = captures
        self._conclude = conclude
        self._unknown: list[HeldLease] = []
        """Leases that need a look into their tasks' past."""
        self._look_up = services.offload.lane(self._read_history, self._looked, at_once=calls_at_once(services.records))
        self._awaited: dict[str, list[HeldLease]] = {}
        """By snapshot: leases that wait until it is here."""
        self._declines: dict[str, int] = {}
        self.furnishing = SecretInjection(services, outbox, dispatch, self._decline)
        self.environments = Environments(services, self._bring, self._decline, conclude)
        self._images: Images | None = None

    def take(self, leases: Sequence[Lease], now: float) -> None:
        services, holdings = self._services, self._services.holdings
        confirmed_at = holdings.clock.boottime()
        holdings.busy_at = now
        holdings.taken += len(leases)
        plain = services.options.accept == frozenset(ENTRY_KINDS) and not self._orders.has_cancels
        leaving = services.leaving.reason is not None
        line: deque[HeldLease] | list[HeldLease] = self._unknown
        if services.queue.traits.tracks_holders:
            line, plain = self._dispatch.ready, plain and services.secrets is None
        for lease in leases:
            held = holdings.take(lease, now, confirmed_at)
            if leaving:
                self._outbox.give_back(held)  # Asked for before.
            elif plain and not lease.tries and not lease.suspect and self._is_plain(lease):
                line.append(held)
            else:
                self._prepare(held)

    def _is_plain(self, lease: Lease) -> bool:
        """Whether the task can start without a further look."""
        task = lease.task
        resources = task.resources
        return (
            task.expires_at is None
            and (task.snapshot is None or task.snapshot in self._services.trees)
            and not resources.gpus
            and not resources.cpus
            and not resources.memory_bytes
            and task.secrets is None
            and task.environment is None
            and task.container is None
            and task.artifacts is NO_ARTIFACTS
            and lease.invalid is None
        )

    def _prepare(self, held: HeldLease) -> None:
        services, lease = self._services, held.lease
        now = services.clock.now()
        if self._orders.is_cancelled(lease) is None:
            self._orders.learn(lease.task.experiment, partial(self._learnt, held))
            return
        settlement = self._orders.refuse(lease, now)
        if settlement is not None:
            self._outbox.end_unstarted(held, settlement)
            return
        why = self._cannot_hold(lease)
        if why is not None:
            self._decline(held, why)
            return
        if lease.tries or lease.suspect or not services.queue.traits.tracks_holders:
            self._unknown.append(held)
        else:
            self._set_up(held)

    def _learnt(self, held: HeldLease, problem: Exception | None) -> None:
        if held.lease.token not in self._services.holdings.by_token:
            return
        if problem is None and self._services.leaving.reason is None:
            self._prepare(held)
        else:
            until = self._services.clock.now() + backoff(4) if problem else None
            self._outbox.release(Release(held.lease, until))

    def _cannot_hold(self, lease: Lease) -> str | None:
        kind = _KINDS.get(type(lease.task.entry), "workflow")
        if kind not in self._services.options.accept:
            return f"this worker accepts no {kind} tasks"
        reasons = [fits(lease.task.resources, slot) for slot in self._services.slots]
        return None if None in reasons else reasons[0]

    def _decline(self, held: HeldLease, why: str, longest: timedelta = timedelta.max) -> None:
        """Give a task back for other workers, less and less often; logged once."""
        task = held.lease.task
        times = self._declines[task.id] = self._declines.get(task.id, 2) + 1
        declined = self._services.holdings.declined
        if task.id not in declined and len(declined) < DECLINED_AT_MOST:
            declined[task.id] = why
        self._services.metrics.task_declined()
        if times == 3:
            self._services.say.declined(task, why)
        self._outbox.postpone(held, self._services.clock.now() + min(backoff(times), longest))

    def _apply_cancels(self) -> None:
        """End all held tasks that the orders cover; for tasks not known yet, ask the store."""
        orders = self._orders
        if not orders.has_cancels:
            return
        for held in list(self._services.holdings.by_token.values()):
            lease = held.lease
            cancelled = orders.is_cancelled(lease)
            if cancelled is None:
                orders.learn(lease.task.experiment)
            elif not cancelled:
                continue
            elif held.sent:
                if held.stop_reason is not EndReason.CANCELLED:
                    held.stop_reason = EndReason.CANCELLED
                    self._services.pool.ask_to_stop(lease.token, EndReason.CANCELLED)
            elif (
                self._dispatch.leave_line(held)
                or lease.task.environment is not None
                or lease.task.container is not None
            ):
                settlement = orders.refuse(lease, self._services.clock.now())
                if settlement is not None:
                    self._outbox.end_unstarted(held, settlement)

    # the past

    def look_up(self) -> None:
        if self._unknown:
            unknown, self._unknown = self._unknown, []
            self._look_up(unknown)

    def _read_history(self, held: HeldLease) -> tuple[Record | None, History]:
        """Read earlier deliveries of a task from the store. Runs off the loop if the store is remote."""
        records, traits = self._services.records, self._services.queue.traits
        lease, task = held.lease, held.lease.task
        history = records.history(task.id, task.generation)
        if traits.tracks_holders:
            record = records.find(task.id, task.generation) if not records.holds_tasks else None
            return record, replace(history, open=())
        if not (history.ended or history.open or lease.suspect):
            return None, history
        record = records.find(task.id, task.generation)
        if record is None:
            now = self._services.clock.now()
            for mark in history.open:
                # This worker has the lease now, so the worker of this mark lost it: it died, or was cut off.
                note = EndedNote(
                    token=mark.token,
                    reason=EndReason.LOST,
                    ended_at=now,
                    started_at=mark.started_at,
                    worker=mark.worker,
                    message=f"worker {mark.worker} vanished",
                    alone=mark.alone,
                    machine=mark.machine,
                    progressed=bool(mark.proven),
                    unseen=mark.proven is not None,
                )
                records.record_ended(task, note)
                history = replace(history, ended=(*history.ended, note))
        return record, replace(history, open=())

    def _looked(self, outcomes: Sequence[Outcome[HeldLease, tuple[Record | None, History]]]) -> None:
        now = self._services.clock.now()
        for held, found, problem in outcomes:
            if held.lease.token in self._services.holdings.by_token:
                self._go_by_past(held, found, problem, now)

    def _go_by_past(
        self, held: HeldLease, found: tuple[Record | None, History] | None, problem: Exception | None, now: datetime
    ) -> None:
        services, lease = self._services, held.lease
        if problem is not None and self._outbox.fail_unstarted(held, problem):
            return
        if found is None:
            services.say.trouble(f"reading the history of {lease.task.id}", problem)
            self._outbox.release(Release(lease, now + backoff(4)))
            return
        record, held.history = found
        if record is not None:
            # Delivered again after its end: settling it with the existing record only ends the delivery.
            self._outbox.end(held, Settlement(lease, record))
            return
        if not held.history.ended:
            self._set_up(held)
            return
        buried = judge_history(lease.task, held.history, now=now)
        if isinstance(buried, RetryAt):
            # A worker that vanished could not set these itself.
            lease.alone, held.fenced = lease.alone or buried.alone, buried.fenced
            if buried.not_before > now:
                self._outbox.postpone(held, buried.not_before, alone=lease.alone)
            else:
                self._set_up(held)
            return
        attempts = len(held.history.ended)
        settlement = unstarted(lease, buried.reason, buried.message, worker=services.name, now=now, attempts=attempts)
        self._outbox.end(held, settlement, partial(services.say.buried, lease.task, buried))

    # the code

    def _set_up(self, held: HeldLease) -> None:
        """Fetch the code that the task is bound to; a task without a snapshot runs this worker's code."""
        snapshot = held.lease.task.snapshot
        if snapshot is None or snapshot in self._services.trees:
            self._place(held)
            return
        waiting = self._awaited.setdefault(snapshot, [])
        waiting.append(held)
        if len(waiting) == 1:
            self._services.offload.call(
                lambda: self._services.trees.fetch(snapshot, self._services.records),
                lambda folder, problem: self._was_set_up(snapshot, folder, problem),
                awaited=True,
            )

    def _was_set_up(self, snapshot: str, folder: str | None, problem: Exception | None) -> None:
        waiting = [
            held for held in self._awaited.pop(snapshot, ()) if held.lease.token in self._services.holdings.by_token
        ]
        if folder is not None:
            self._services.trees.add(snapshot, folder, used=self._services.holdings.snapshots())
            for held in waiting:
                self._place(held)
            return
        reason = EndReason.CONFIG_INVALID if isinstance(problem, RequestRefused) else EndReason.SETUP_FAILED
        now = self._services.clock.now().timestamp()
        for held in waiting:
            self._conclude(
                AttemptEnd(held.lease.token, -1, reason, now, now, message=f"snapshot {snapshot}: {problem}")
            )

    def _place(self, held: HeldLease) -> None:
        """Have the environment or the container of the task made ready."""
        container = held.lease.task.container
        if container is None:
            self.environments.enter(held)
            return
        if self._images is None:
            from runtime.worker.images import Images

            calls = self.environments.calls
            self._images = Images(self._services, self._bring, self._decline, self._conclude, calls)
        self._images.enter(held, container)

    # the files

    def _bring(self, held: HeldLease) -> None:
        """Have the attempt find its artifacts, and then its secrets."""
        if self._captures.wants(held):
            self._captures.bring(held, self.furnishing.inject, self._not_brought)
        else:
            self.furnishing.inject(held)

    def _not_brought(self, held: HeldLease, problem: Exception) -> None:
        """Give the task back: nothing of it has run, so this is not a failure of its own. What no store has fails it."""
        services = self._services
        if isinstance(problem, RequestRefused):
            attempts = len(held.history.ended)
            settlement = unstarted(
                held.lease,
                EndReason.CONFIG_INVALID,
                problem.message,
                worker=services.name,
                now=services.clock.now(),
                attempts=attempts,
            )
            self._outbox.end_unstarted(held, settlement)
            return
        services.say.trouble(f"bringing the artifacts of {held.lease.task.id}", problem)
        self._decline(held, f"its artifacts could not be brought: {problem}", LONGEST_WAIT)

    def tend_trees(self, held: HeldLease, end: AttemptEnd) -> None:
        """Trim the slot's trees after an attempt; a failed set-up has the snapshot fetched again."""
        snapshot = held.lease.task.snapshot
        if not self._dispatch.on_slot(held.slot):  # orders that wait there name their trees
            self._services.trees.trim(held.slot, spoiled=snapshot if end.reason in _KILLED else None)
        if snapshot is not None and end.reason is EndReason.SETUP_FAILED:
            self._services.trees.forget(snapshot, used=self._services.holdings.snapshots(besides=held))
            for waiting in (*self._dispatch.ready, *self._dispatch.suspects.waiting):
                if waiting.lease.task.snapshot == snapshot:
                    self._dispatch.leave_line(waiting)
                    self._set_up(waiting)
