"""Gives prepared tasks to slots: one at a time, or several to a warm child while tasks are quick."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure
from runtime.records.base import calls_at_once
from runtime.system import system
from runtime.tasks.history import StartedMark
from runtime.tasks.model import FunctionEntry
from runtime.tasks.retry_policy import ALONE_FOR, backoff
from runtime.tasks.wire import encode_task
from runtime.worker.artifact_saver import ArtifactSaver
from runtime.worker.attempts import signal_fence
from runtime.worker.attempts.model import AttemptOrder
from runtime.worker.control import ControlReader
from runtime.worker.environments import entered
from runtime.worker.pending_settlements import PendingSettlements
from runtime.worker.slots import Slot
from runtime.worker.thread_calls import Outcome
from runtime.worker.worker_context import HeldLease, HeldLeases, WorkerContext

LOOK_AHEAD_S: Final = 1.0
LONGEST_LOOK_AHEAD: Final = 128
"""Tasks held beyond the free slots: at most a second's worth of recent task time, and at most this many for each slot."""
PIPELINE_BELOW_S: Final = 0.05
"""Tasks quicker than this are handed to a warm child several at a time."""
LINGER_BELOW_S: Final = 0.001
"""The loop lingers only for tasks that are quicker than this,"""
LINGER_WITH: Final = 8
"""and while each slot has more orders than this, so that none becomes idle meanwhile."""
ALONE_PATIENCE_S: Final = 60.0
"""How long a suspect waits until nothing else runs; then it gets the next slot, beside other attempts."""


class Suspects:
    def __init__(self, holdings: HeldLeases, most: int) -> None:
        self._holdings = holdings
        self._most = most
        self.waiting: deque[HeldLease] = deque()
        self._waits_since: dict[str, float] = {}
        """By task: the time since which a suspect has waited, over all its leases here."""
        self._trust = 1
        """Suspects that may run at a time: one more after each success, one again after a loss."""

    def add(self, held: HeldLease) -> bool:
        """Have a suspect wait; returns False if too many wait here already."""
        task_id = held.lease.task.id
        if task_id not in self._waits_since and len(self._waits_since) > 1_000:
            self._waits_since.clear()
        self._waits_since.setdefault(task_id, system.monotonic())
        if len(self.waiting) >= self._most:
            return False
        self.waiting.append(held)
        return True

    def start_next(self, now: float) -> HeldLease:
        """Take the first suspect out of the line; it is on trial from now on."""
        held = self.waiting.popleft()
        on_trial = self._holdings.on_trial
        self._waits_since.pop(held.lease.task.id, None)
        held.apart = not self._unproven(now)
        for token in on_trial:
            self._holdings.by_token[token].apart = False
        on_trial[held.lease.token] = now
        return held

    def ended(self, token: str, reason: EndReason) -> None:
        """Trust more suspects after a success of one, and only one after any loss."""
        if self._holdings.on_trial.pop(token, None) is not None and reason is EndReason.SUCCEEDED:
            self._trust += 1
        if reason is EndReason.LOST:
            self._trust = 1

    def may_try(self, now: float) -> bool:
        return self._unproven(now) < self._trust

    def _unproven(self, now: float) -> int:
        """Return the number of suspects that run and have not yet proved themselves."""
        return sum(now - began < ALONE_FOR.total_seconds() for began in self._holdings.on_trial.values())

    def has_waited(self, held: HeldLease, now: float) -> bool:
        return now - self._waits_since.get(held.lease.task.id, now) >= ALONE_PATIENCE_S


class Dispatch:
    def __init__(
        self, services: WorkerContext, outbox: PendingSettlements, orders: ControlReader, captures: ArtifactSaver
    ) -> None:
        self._services = services
        self._outbox = outbox
        self._orders = orders
        self._captures = captures
        self._pool_slots = services.pool.slots
        self.ready: deque[HeldLease] = deque()
        """Prepared and not given to a slot."""
        self.suspects = Suspects(services.holdings, len(services.slots))
        self.pause_until = 0.0
        """Nothing starts and nothing is leased before."""
        self.mean_s = float("inf")
        """Mean duration of recent tasks; unknown tasks count as long, so that none is held ahead."""
        self._announcing = [0] * len(services.slots)
        """By slot: attempts that start once the store has their marks."""
        self._environments = [slot.environment() for slot in services.slots]
        self._tell_store = services.offload.lane(
            self._announce, self._announced, at_once=calls_at_once(services.records)
        )

    # lines

    def line_up(self, held: HeldLease) -> None:
        """Have a prepared task start when a slot is free; a suspect when its moment has come."""
        if not held.lease.alone:
            self.ready.append(held)
        elif not self.suspects.add(held):
            self._outbox.give_back(held)

    def leave_line(self, held: HeldLease) -> bool:
        """Take a task out of its line; returns whether it stood in one."""
        for line in (self.ready, self.suspects.waiting):
            if held in line:
                line.remove(held)
                return True
        return False

    def recall(self) -> None:
        """Empty the lines, and take back what slots have not begun."""
        for slot in self._pool_slots:
            for token in slot.take_back():
                self._services.holdings.by_token[token].sent = False
        self.ready.clear()
        self.suspects.waiting.clear()

    def shed(self, now: float) -> None:
        """Give back tasks held ahead if a running task takes longer than expected: other workers may be idle."""
        free = False
        by_token = self._services.holdings.by_token
        for slot in self._pool_slots:
            running = slot.running()
            free = free or running is None
            if running is not None and system.time() - running[1] > LOOK_AHEAD_S:
                self.mean_s = max(self.mean_s, system.time() - running[1])
                for token in slot.take_back():
                    by_token[token].sent = False
                    self._outbox.give_back(by_token[token])
        late = [held for held in self.ready if not free and now - held.taken_at > LOOK_AHEAD_S]
        # Suspects whose patience is over may find a slot elsewhere; here they keep their place.
        late += [held for held in self.suspects.waiting if now - held.taken_at > ALONE_PATIENCE_S + LOOK_AHEAD_S]
        for held in late:
            self.leave_line(held)
            self._outbox.give_back(held)

    # pace

    def look_ahead(self) -> int:
        options = self._services.options
        if options.look_ahead is not None:
            return options.look_ahead
        return min(LONGEST_LOOK_AHEAD, int(LOOK_AHEAD_S / max(self.mean_s, 1e-4))) * len(self._services.slots)

    def record_duration(self, seconds: float) -> None:
        self.mean_s = seconds if self.mean_s == float("inf") else self.mean_s + 0.1 * (seconds - self.mean_s)

    def may_linger(self) -> bool:
        """Whether quick tasks end one after the other, and more will soon. The embedded file's commits take longer."""
        return (
            not self._services.local
            and self.mean_s < LINGER_BELOW_S
            and all(self.on_slot(slot.index) > LINGER_WITH for slot in self._services.slots)
        )

    def on_slot(self, slot: int) -> int:
        """Return how many orders the slot has or is about to get."""
        return len(self._pool_slots[slot].outstanding()) + self._announcing[slot]

    def _depth(self, held: HeldLease) -> int:
        """Return how many orders a slot may hold: more than one only for quick tasks on warm children."""
        if not self._services.options.reuse_process or self.mean_s >= PIPELINE_BELOW_S or held.lease.suspect:
            return 1
        return 1 + min(self.look_ahead(), 32)

    # starting

    def dispatch(self, now: float) -> None:
        if now < self.pause_until:
            return
        waiting = self.suspects.waiting
        if waiting:
            self._dispatch_suspects(now)
        ready = self.ready
        if not ready:
            return
        services, pool_slots, announcing = self._services, self._pool_slots, self._announcing
        # A suspect whose patience is over gets the next free slot, so no slot is filled ahead.
        one_each = bool(waiting) and self.suspects.may_try(now) and self.suspects.has_waited(waiting[0], now)
        for slot in services.slots:
            while ready:
                depth = 1 if one_each else self._depth(ready[0])
                queued = self.on_slot(slot.index)
                if queued >= depth or pool_slots[slot.index].room() <= announcing[slot.index]:
                    break
                if queued > depth // 2 and not services.queue.traits.tracks_holders:
                    break  # The store gets many marks together.
                batch = [ready.popleft()]
                most = min(depth - queued, pool_slots[slot.index].room() - announcing[slot.index])
                while ready and len(batch) < most and not ready[0].lease.suspect:
                    batch.append(ready.popleft())
                self._start(batch, slot)

    def _dispatch_suspects(self, now: float) -> None:
        """Start a suspect when nothing else runs or is ready, or once it has waited, if no more suspects run than may.
        Other tasks start beside it as they come."""
        suspects, slots = self.suspects, self._services.slots
        while suspects.waiting and suspects.may_try(now):
            idle = [slot for slot in slots if not self.on_slot(slot.index)]
            others = len(slots) - len(idle) > len(self._services.holdings.on_trial)
            if not idle or ((others or self.ready) and not suspects.has_waited(suspects.waiting[0], now)):
                return
            self._start([suspects.start_next(now)], idle[0])

    def _start(self, batch: list[HeldLease], slot: Slot) -> None:
        """Send a batch, after marks in the store if the queue does not know its workers' attempts.

        No mark is written earlier: a task with a mark and no end when a worker dies counts as one that ran, which may
        bury it.
        """
        if self._services.queue.traits.tracks_holders:
            batch = [held for held in batch if held.lease.task.expires_at is None or self._may_start(held)]
            if batch:
                self._send(batch, slot)
            return
        for held in batch:
            held.slot, held.sent, held.announced = slot.index, True, True
        self._announcing[slot.index] += len(batch)
        self._tell_store(batch)

    def _may_start(self, held: HeldLease) -> bool:
        """Whether a task has not expired while it was held; one that has is ended."""
        refusal = self._orders.refuse(held.lease, self._services.clock.now())
        if refusal is not None:
            self._outbox.end_unstarted(held, refusal)
        return refusal is None

    def _announce(self, held: HeldLease) -> None:
        services = self._services
        lease, alone = held.lease, len(services.slots) == 1 or held.apart
        mark = StartedMark(lease.token, services.name, services.clock.now(), alone, services.machine, proven=False)
        services.records.record_started(lease.task, mark)

    def _announced(self, outcomes: Sequence[Outcome[HeldLease, None]]) -> None:
        services, outbox = self._services, self._outbox
        going: dict[int, list[HeldLease]] = {}
        now = services.clock.now()
        for held, _, problem in outcomes:
            lease = held.lease
            self._announcing[held.slot] -= 1
            if lease.token not in services.holdings.by_token:
                continue
            refusal = self._orders.refuse(lease, now)
            if refusal is not None:
                outbox.end_unstarted(held, refusal)
            elif problem is not None and outbox.fail_unstarted(held, problem):
                continue
            elif (
                problem is None
                and not (services.leaving.reason or held.stop_reason or self._orders.stale)
                # It has read an order meanwhile, and not yet which tasks that covers.
                and self._orders.is_cancelled(lease) is not None
            ):
                going.setdefault(held.slot, []).append(held)
            else:
                # Other tasks come first then, which shows whether the refusal is about this task.
                outbox.give_back(held, backoff(4) if problem is not None else timedelta())
        away = [problem for _, _, problem in outcomes if isinstance(problem, InfrastructureFailure)]
        if away:
            services.say.trouble("saying what starts", away[0])
            self.pause_until = max(self.pause_until, system.monotonic() + backoff(2).total_seconds())
        for slot, batch in going.items():
            self._send(batch, services.slots[slot])

    def _send(self, batch: list[HeldLease], slot: Slot) -> None:
        services = self._services
        slots, metrics = services.slots, services.metrics
        others = any(self.on_slot(other.index) for other in slots if other.index != slot.index)
        orders = []
        for held in batch:
            task = held.lease.task
            held.slot, held.sent, held.crowded = slot.index, True, others
            order = self._order(held)
            orders.append(order)
            if metrics.port is not None:
                since = task.not_before or task.submitted_at
                metrics.attempt_started(None if since is None else services.clock.now() - since)
            if not isinstance(task.entry, FunctionEntry):
                services.say.began(task, slot.index, order.attempt)
        if others:
            for token, _ in filter(None, (other.running() for other in self._pool_slots)):
                services.holdings.by_token[token].crowded = True
        # First, because a crashing task may end this process before the next line.
        self.record_running(starting=(slot.index, orders[0].token))
        self._pool_slots[slot.index].send(orders)

    def _order(self, held: HeldLease) -> AttemptOrder:
        services, lease = self._services, held.lease
        task = lease.task
        environment = self._environments[held.slot]
        order = AttemptOrder(
            token=lease.token,
            body=lease.body or encode_task(task),
            task_id=task.id,
            generation=task.generation,
            attempt=len(held.history.ended) + 1,
            experiment=task.experiment,
            env=environment,
            secrets=held.secrets,
            scratch_root=services.scratch,
        )
        if task.environment is not None:
            order.env = {**order.env, **entered(held.environment, task.environment)}
        if task.container is not None:
            from runtime.worker.images import contained

            order.env = {**order.env, **contained(held, task.resources.memory_bytes)}
            held.fenced = False  # It sees no process but its own, and a fence would keep an engine from its work.
        elif task.resources.memory_bytes:
            order.memory_bytes = task.resources.memory_bytes
        if held.fenced:
            order.env = {**order.env, signal_fence.VARIABLE: str(os.getpid())}
        if task.timeout is not None:
            order.timeout_s = task.timeout.total_seconds()
        if task.snapshot is not None and not task.artifacts.named:
            order.code_dir, order.snapshot = services.trees.place(task.snapshot, held.slot), task.snapshot
            order.cwd = f"{order.code_dir}/{task.folder}" if task.folder else None
        elif task.snapshot is None:
            services.code.begin(task.entry)
        url = services.records.outputs_url(task.id, lease.token)
        held.output_dir = order.output_dir = url if "://" not in url else f"{services.scratch}/{lease.token}.outputs"
        order.checkpoint_dir = services.records.checkpoints_path(task.id) or ""
        self._captures.inject(held, order)
        return order

    def record_running(self, starting: tuple[int, str] | None = None) -> None:
        """Report the running attempts if they have changed; `starting` is a slot and the token that it is about to begin."""
        running = []
        for slot in self._pool_slots:
            if tokens := slot.outstanding():
                running.append(tokens[0])
            elif starting is not None and starting[0] == slot.index:
                running.append(starting[1])
        holdings, metrics = self._services.holdings, self._services.metrics
        if running != holdings.running:
            holdings.running = running
            self.mark_running()
            metrics.set_running(len(running))
            metrics.set_leases(len(holdings.by_token))

    def mark_running(self) -> None:
        """Tell the queue how far the running attempts are, in case this worker is lost."""
        holdings = self._services.holdings
        running = holdings.running
        apart = (token for token in holdings.on_trial if token in running and holdings.by_token[token].apart)
        self._services.queue.mark_running(running, next(apart, None), holdings.proven.intersection(running))
