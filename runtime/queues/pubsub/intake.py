"""What a worker has taken from a Pub/Sub subscription and not settled: pulled, looked at, kept, renewed, returned.

One unary pull waits at the service whenever somebody is short of tasks, for just as many as are short: a streaming
pull hands one worker everything, and a second worker nothing. What arrives is compared with the records, waits
for its time if it has one, and rings a doorbell. From the first moment all of it is renewed, here as long as it is
held, by `renew` once it is handed out.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

from runtime.clock import Clock
from runtime.errors import InfrastructureFailure
from runtime.outputs import PubSubQueueOutput
from runtime.queues.base import DEFAULT_LEASE
from runtime.queues.pubsub.client import (
    MAX_ACK_IDS,
    OutgoingMessage,
    PubSubClient,
    PubSubUnavailable,
    ReceivedMessage,
    backoff_s,
    deadline_seconds,
    insist,
)
from runtime.queues.pubsub.message import Delivery, Holding, judge, read_message, split_requests, write_copy
from runtime.queues.threads import Threads
from runtime.records.base import RecordStore, calls_at_once
from runtime.records.orders import Control
from runtime.tasks.model import new_tokens
from runtime.units import format_duration

log = logging.getLogger(__name__)

PULL_WAIT_S: Final = 60.0
"""How long one pull waits; long, because a pull that ends at its deadline may take a message with it for a while."""
EMULATOR_PULL_WAIT_S: Final = 2.0
"""The emulator ends an empty pull a second before its deadline, in good order. But with one that its client gave up, by
closing or dying, it may go on until then and hand it messages, which stay away until their own deadline (measured:
one in seven, for up to a minute). So its pulls are short."""
CLOSE_WAIT_S: Final = 1.3
"""How long closing waits for the pull that is under way, which ends an emulator's in good order."""
FIRST_WAIT_S: Final = 0.1
"""How long the first `take` of a hungry worker waits for its own pull, so that a filled queue is not called empty."""
FIRST_ANSWER_S: Final = 5.0
"""What waits at the service is on its way after this time; a pull that finds nothing waits much longer."""
LOOK_AHEAD_S: Final = 0.25
MAX_LOOK_AHEAD: Final = 1000
UNCLAIMED_S: Final = 3.0
"""What was looked ahead and not taken for so long goes back."""
MAX_LATER: Final = 10_000
MAX_LATER_BYTES: Final = 64 * 1024 * 1024
CONTROL_EVERY_S: Final = 10.0
ACK_DELAY_S: Final = 0.2
"""Acknowledgements are collected for so long: an early one gains nothing, the record stands already."""
FIRST_RENEWAL_S: Final = 1.0
"""What is done within this time was never renewed. No subscription of the service has a deadline below 10 s."""
HOLD_MARGIN_S: Final = 5
"""What is held here is renewed for this much more than a lease, so that it is handed out with a whole one left."""
ACK_PATIENCE_S: Final = 60.0
RETURN_PATIENCE_S: Final = 5.0
EXAMINED_IN: Final = timedelta(milliseconds=20)
PAUSED_LOOK: Final = timedelta(seconds=1)
DELIVERIES_WITHOUT_POLICY: Final = 5
"""The least that a dead-letter policy may allow; assumed where deliveries are counted and no number is known."""


class Intake:
    """Every method may be called from any thread. Threads of its own start with the first `take`."""

    def __init__(
        self,
        settings: PubSubQueueOutput,
        records: RecordStore,
        client: Callable[[], PubSubClient],
        *,
        queue: str,
        clock: Clock,
        patience: timedelta,
    ) -> None:
        self._settings, self._records, self._client = settings, records, client
        self._queue, self._clock, self._patience_s = queue, clock, patience.total_seconds()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._chores = threading.Event()
        self._threads: list[threading.Thread] = []
        self._finders = Threads(calls_at_once(records), "pubsub-find")
        self._bell: tuple[int, int] | None = None

        self._held: dict[tuple[str, int], Delivery] = {}
        """All that is not done, handed out or not, by task and generation."""
        self._new: set[Delivery] = set()
        """Being looked at."""
        self._ready: deque[Delivery] = deque()
        self._unrenewed: deque[tuple[float, list[Delivery]]] = deque()
        """Pulled within the last second: when to renew them, by the boot clock."""
        self._later: list[tuple[float, int, Delivery]] = []
        self._later_bytes = 0
        self._order = itertools.count()
        self._tokens = new_tokens()

        self._wanted = 0
        """Asked for and not had."""
        self._settled: deque[tuple[float, int]] = deque()
        self._widened = 0
        self._pulling = False
        self._pulls = 0
        self._ttl = DEFAULT_LEASE
        self._running: frozenset[str] = frozenset()
        self._control = Control()
        self._control_read = float("-inf")

        self._asked_at: float | None = None
        """When the first pull was sent, by the boot clock."""
        self._reached = False
        self._problem: InfrastructureFailure | None = None
        self._failing_since = 0.0

        self._acks: list[str] = []
        self._acks_changed = threading.Condition()

    # what the worker asks for

    def take(self, n: int, ttl: timedelta, *, wait: bool) -> list[Delivery]:
        """Up to `n` that are due, now the caller's to renew. What is missing is pulled, and the doorbell rings."""
        control = self.read_control()
        with self._changed:
            self._ttl = ttl
            if control.paused or self._stop.is_set():
                self._wanted = 0
                return []
            self._start()
            unasked = not self._pulling and self._shortfall() == 0
            taken = self._pop(n)
            if wait and unasked and n and not taken:
                pulls = self._pulls
                self._changed.wait_for(
                    lambda: self._ready or self._problem or self._stop.is_set() or self._pulls > pulls, FIRST_WAIT_S
                )
                taken = self._pop(n)
            if not taken and n and self._given_up():
                assert self._problem is not None
                raise self._problem
        self._extend([one for one in taken if one.confirmed_until < self._clock.boottime() + ttl.total_seconds()])
        return taken

    def take_more(self, n: int) -> list[Delivery]:
        """As `take`, at once and without asking anybody; `ttl` is that of the last `take`."""
        with self._changed:
            if self._control.paused or self._stop.is_set():
                return []
            return self._pop(n)

    def _pop(self, n: int) -> list[Delivery]:
        now = self._clock.boottime()
        taken: list[Delivery] = []
        while self._ready and len(taken) < n:
            delivery = self._ready.popleft()
            if delivery.confirmed_until <= now:
                self._let_go(delivery)
                continue
            delivery.holding = Holding.LEASED
            delivery.token = next(self._tokens)
            delivery.since = now
            taken.append(delivery)
        self._wanted = n - len(taken)
        if self._shortfall():
            self._changed.notify_all()
        return taken

    def _given_up(self) -> bool:
        if self._problem is None:
            return False
        hopeful = self._problem.retryable or self._reached
        return not hopeful or self._clock.boottime() - self._failing_since > self._patience_s

    def _shortfall(self) -> int:
        """How many to pull now."""
        if self._control.paused or self._stop.is_set():
            return 0
        ahead = self._look_ahead()
        missing = self._wanted + ahead - len(self._ready)
        if missing <= 0 or (self._wanted <= len(self._ready) and 4 * missing <= 3 * ahead):
            return 0
        return max(missing, self._widened)

    def _look_ahead(self) -> int:
        """What is likely to be finished in the next quarter of a second, if tasks have been that short for two."""
        now = self._clock.boottime()
        while self._settled and now - self._settled[0][0] > 2 * LOOK_AHEAD_S:
            self._settled.popleft()
        recent = sum(n for at, n in self._settled if now - at <= LOOK_AHEAD_S)
        earlier = sum(n for _, n in self._settled) - recent
        return min(MAX_LOOK_AHEAD, recent) if earlier else 0

    def say_settled(self, n: int) -> None:
        with self._changed:
            self._settled.append((self._clock.boottime(), n))

    def say_running(self, tokens: Iterable[str]) -> None:
        self._running = frozenset(tokens)

    def renew(self, deliveries: Sequence[Delivery], ttl: timedelta) -> list[Delivery]:
        """Those that are lost. Raises `QueueUnavailable` where it could not be confirmed in a third of `ttl`."""
        now = self._clock.boottime()
        with self._changed:
            for delivery in deliveries:
                delivery.since = now
        live = [one for one in deliveries if one.holding is Holding.LEASED and not one.lost]
        self._confirm(live, ttl, patience_s=max(2.0, ttl.total_seconds() / 3))
        return [one for one in deliveries if one.lost or one.holding is Holding.DONE]

    def finish(self, deliveries: Iterable[Delivery]) -> None:
        """Acknowledge: a record or a confirmed copy stands for each."""
        with self._changed:
            ack_ids: list[str] = []
            for delivery in deliveries:
                if delivery.holding is not Holding.DONE:
                    self._let_go(delivery)
                    ack_ids += delivery.ack_ids.values()
        if not ack_ids:
            return
        with self._acks_changed:
            self._acks += ack_ids
            self._acks_changed.notify()
        if not self._threads:
            self._start()

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        """Let them come back by themselves, when their deadlines have passed."""
        with self._changed:
            for delivery in deliveries:
                self._let_go(delivery)

    def _let_go(self, delivery: Delivery) -> None:
        delivery.holding = Holding.DONE
        if self._held.get(delivery.key) is delivery:
            del self._held[delivery.key]

    def forget_waiting(self) -> None:
        """Drop all that is held here and not handed out."""
        with self._changed:
            waiting = [*self._new, *self._ready, *(one for _, _, one in self._later)]
            self._ready.clear()
            self._later.clear()
            self._later_bytes = 0
            self.drop(waiting)

    def next_due(self) -> timedelta | None:
        with self._changed:
            if self._control.paused:
                return PAUSED_LOOK if self._ready or self._new or self._later else None
            if self._ready:
                return timedelta()
            if self._new:
                return EXAMINED_IN
            if not self._later:
                return None
            return timedelta(seconds=max(0.0, self._later[0][0] - self._clock.now().timestamp()))

    def is_cut_off(self) -> bool:
        """Whether what is there cannot be known at the moment."""
        if self._problem is not None:
            return True
        if self._reached or not self._threads:
            return False
        # To load the client and to connect may take longer than a worker is willing to be idle.
        asked_at = self._asked_at
        return asked_at is None or self._clock.boottime() - asked_at < FIRST_ANSWER_S

    def read_control(self, *, fresh: bool = False) -> Control:
        """At most ten seconds old; an old one where the store cannot be reached."""
        if fresh or self._clock.boottime() - self._control_read >= CONTROL_EVERY_S:
            try:
                # A worker beside this has mostly just read them.
                max_age = timedelta(0) if fresh else timedelta(seconds=CONTROL_EVERY_S)
                self._control = self._records.control(self._queue, max_age=max_age)
            except InfrastructureFailure as problem:
                log.warning("cannot read the orders of queue `%s`, keeping the last: %s", self._queue, problem)
            self._control_read = self._clock.boottime()
        return self._control

    def doorbell(self) -> int:
        with self._changed:
            if self._bell is None:
                self._bell = os.pipe()
                for end in self._bell:
                    os.set_blocking(end, False)
                if self._ready:
                    self._ring()
            return self._bell[0]

    def hush(self) -> None:
        if self._bell is not None:
            with suppress(BlockingIOError):
                while os.read(self._bell[0], 4096):
                    pass

    def _ring(self) -> None:
        if self._bell is not None:
            with suppress(BlockingIOError):
                os.write(self._bell[1], b"\0")

    # pulling

    def _start(self) -> None:
        with self._changed:
            if self._threads or self._stop.is_set():
                return
            for work in (self._pull_on, self._keep_on, self._acknowledge_on):
                thread = threading.Thread(target=work, name=f"pubsub-{work.__name__.strip('_')}", daemon=True)
                self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def _pull_on(self) -> None:
        failures = 0
        while True:
            with self._changed:
                while not (n := self._shortfall()) and not self._stop.is_set():
                    self._changed.wait()
                if self._stop.is_set():
                    return
                self._pulling = True
            try:
                client = self._client()
                wait_s = EMULATOR_PULL_WAIT_S if client.emulator else PULL_WAIT_S
                self._asked_at = self._asked_at or self._clock.boottime()
                received = client.pull(self._settings.subscription, n, wait_s=wait_s)
                self._reached = True
                if received:
                    self._take_in(received, n)
                self._answered()
                failures = 0
            except InfrastructureFailure as problem:
                self._failed(problem)
                failures += 1
            except Exception as problem:
                # A thread that ends takes the queue with it, and nobody would know.
                log.exception("pulling from queue `%s`", self._queue)
                self._failed(PubSubUnavailable(f"queue `{self._queue}` cannot be read: {problem!r}"))
                failures += 1
            finally:
                with self._changed:
                    self._pulling = False
                    self._pulls += 1
                    self._changed.notify_all()
            if failures:
                self._stop.wait(backoff_s(failures))

    def _answered(self) -> None:
        with self._changed:
            if self._problem is None:
                return
            self._problem = None
            outage_s = self._clock.boottime() - self._failing_since
        log.warning("queue `%s` answers again after %s; work goes on", self._queue, format_duration(outage_s))

    def _failed(self, problem: InfrastructureFailure) -> None:
        if self._stop.is_set():
            return
        with self._changed:
            first, self._problem = self._problem is None, problem
            if first:
                self._failing_since = self._clock.boottime()
            self._changed.notify_all()
            given_up = self._given_up()
        if first and not given_up:  # What is given up is raised to the worker, which says it.
            log.warning(
                "%s; attempts go on, and the queue is asked again for up to %s",
                "; ".join((problem.message, *problem.facts)),
                format_duration(self._patience_s),
            )

    def _take_in(self, received: Sequence[ReceivedMessage], asked: int) -> None:
        now = self._clock.boottime()
        fresh: list[Delivery] = []
        unread: InfrastructureFailure | None = None
        for message in received:
            try:
                delivery = read_message(message, self._records.get_blob)
            except InfrastructureFailure as problem:
                unread = problem
                continue
            delivery.confirmed_until = now + self._settings.ack_deadline_s
            delivery.since = now
            with self._changed:
                if not self._absorb(delivery):
                    self._held[delivery.key] = delivery
                    self._new.add(delivery)
                    fresh.append(delivery)
        self._chores.set()
        if self._settings.ack_deadline_s < self._ttl.total_seconds():
            self._extend(fresh)
        else:
            # Renewed all the same: the contract's word on the deadline may be old.
            with self._changed:
                self._unrenewed.append((now + FIRST_RENEWAL_S, fresh))
        had_ready, had_later = self._examine(fresh)
        # A run of tasks that are all due later must not be worked through one by one.
        self._widened = min(100, 2 * asked) if had_later and not had_ready else 0
        if unread is not None:
            raise unread

    def _absorb(self, delivery: Delivery) -> bool:
        """Whether the task is here already: delivered again after an outage, or published twice."""
        old = self._held.get(delivery.key)
        if old is None:
            return False
        if old.holding is Holding.LEASED and not self._is_spoken_of(old):
            # Its holder gave it up without a word; nobody would ever renew or settle it.
            old.lost = True
            self._let_go(old)
            return False
        # With exactly-once delivery only the newest ack id of a message counts.
        old.ack_ids |= delivery.ack_ids
        old.attempt = max(old.attempt, delivery.attempt)
        old.confirmed_until = max(old.confirmed_until, delivery.confirmed_until)
        old.lost = False
        return True

    def _is_spoken_of(self, delivery: Delivery) -> bool:
        silent_s = self._clock.boottime() - delivery.since
        return delivery.token in self._running or silent_s < max(90.0, 3 * self._ttl.total_seconds())

    def _examine(self, deliveries: Sequence[Delivery]) -> tuple[bool, bool]:
        """Sort what was delivered or fell due; whether some is ready, and whether some is for later."""
        if not deliveries:
            return False, False
        try:
            recorded = self._find_recorded(deliveries)
        except InfrastructureFailure:
            self._forget_new(deliveries)
            self.drop(deliveries)
            raise
        now = self._clock.now()
        counted = self._settings.max_delivery_attempts or DELIVERIES_WITHOUT_POLICY
        verdicts = judge(deliveries, recorded=recorded, now=now, last_attempt=counted - 1)
        self.finish(verdicts.finished)
        if verdicts.replace:
            kept = self.give_back([(one, write_copy(one, not_before=one.task.not_before)) for one in verdicts.replace])
            more = judge(kept, recorded=[False] * len(kept), now=now, last_attempt=None)
            verdicts.ready += more.ready
            verdicts.later += more.later
        parked = self._keep_for_later(verdicts.later)
        self._forget_new(deliveries)
        with self._changed:
            # A purge may have come in between.
            verdicts.ready = [one for one in verdicts.ready if one.holding is Holding.HELD]
            if verdicts.ready:
                since = self._clock.boottime()
                for delivery in verdicts.ready:
                    delivery.since = since
                self._ready.extend(verdicts.ready)
                self._changed.notify_all()
                self._ring()
        self._chores.set()
        self._park(parked)
        return bool(verdicts.ready), bool(verdicts.later)

    def _forget_new(self, deliveries: Iterable[Delivery]) -> None:
        with self._changed:
            self._new.difference_update(deliveries)

    def _find_recorded(self, deliveries: Sequence[Delivery]) -> list[bool]:
        # A read for each delivery. Without a dead-letter policy the service does not say that it delivers again, and
        # a copy or a second publication looks like the first; running a finished task again costs far more.
        def find(delivery: Delivery) -> bool:
            try:
                return self._records.find(*delivery.key) is not None
            except InfrastructureFailure:
                raise
            except Exception:
                # Something about this one; the worker looks again before it starts it.
                log.exception("cannot look for the record of `%s`", delivery.task.id)
                return False

        return self._finders.each(find, deliveries, at_once=calls_at_once(self._records))

    def _keep_for_later(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Keep what is due later, as far as there is room; those for which there is none."""
        parked = []
        with self._changed:
            for delivery in deliveries:
                due = delivery.task.not_before
                assert due is not None
                if len(self._later) >= MAX_LATER or self._later_bytes + delivery.size > MAX_LATER_BYTES:
                    parked.append(delivery)
                    continue
                heapq.heappush(self._later, (due.timestamp(), next(self._order), delivery))
                self._later_bytes += delivery.size
        return parked

    def _park(self, deliveries: Sequence[Delivery]) -> None:
        """Leave at the service what is too much to hold; it comes back when it is due, or in ten minutes.

        Each return counts as a delivery, which a dead-letter policy adds up; a copy replaces it before the last.
        """
        now = self._clock.now()
        by_delay: dict[int, list[Delivery]] = {}
        for delivery in deliveries:
            delay = (delivery.task.not_before or now) - now
            by_delay.setdefault(deadline_seconds(delay), []).append(delivery)
        for delay_s, group in by_delay.items():
            with suppress(PubSubUnavailable):
                self._confirm(group, timedelta(seconds=delay_s), patience_s=0)
        self.drop(deliveries)

    # keeping

    def _keep_on(self) -> None:
        while not self._stop.is_set():
            self._chores.clear()
            with self._changed:
                idle = not (self._ready or self._later or self._new or self._unrenewed)
                next_due = self._later[0][0] - self._clock.now().timestamp() if self._later else 1.0
            self._chores.wait(None if idle else min(0.5, max(0.0, next_due)))
            if self._stop.is_set():
                return
            try:
                self._keep()
            except InfrastructureFailure as problem:
                log.warning("queue `%s` cannot keep what it holds: %s", self._queue, problem)
                self._stop.wait(1.0)
            except Exception:
                log.exception("keeping what is held of queue `%s`", self._queue)
                self._stop.wait(1.0)

    def _keep(self) -> None:
        now, hold_s = self._clock.boottime(), self._hold_s()
        with self._changed:
            held = [*self._new, *self._ready, *(one for _, _, one in self._later)]
            unclaimed = self._pop_unclaimed(now)
            due = self._pop_due()
            fresh = self._pop_unrenewed(now)
        ageing = [one for one in held if one.confirmed_until - now < hold_s / 2 and one.holding is Holding.HELD]
        ageing = list({id(one): one for one in (*fresh, *ageing)}.values())
        try:
            self._extend(ageing)
        finally:
            self.drop(self.give_back([(one, write_copy(one, not_before=None)) for one in unclaimed]))
            if due:
                self._examine(due)

    def _pop_unrenewed(self, now: float) -> list[Delivery]:
        fresh: list[Delivery] = []
        while self._unrenewed and self._unrenewed[0][0] <= now:
            fresh += [one for one in self._unrenewed.popleft()[1] if one.holding is not Holding.DONE]
        return fresh

    def _pop_unclaimed(self, now: float) -> list[Delivery]:
        unclaimed = []
        while self._ready and now - self._ready[0].since > UNCLAIMED_S:
            unclaimed.append(self._ready.popleft())
        if unclaimed:
            self._wanted = 0
        return unclaimed

    def _pop_due(self) -> list[Delivery]:
        due = []
        moment = self._clock.now().timestamp()
        while self._later and self._later[0][0] <= moment:
            delivery = heapq.heappop(self._later)[2]
            self._later_bytes -= delivery.size
            if delivery.confirmed_until <= self._clock.boottime():
                self._let_go(delivery)
                continue
            self._new.add(delivery)
            due.append(delivery)
        return due

    def _hold_s(self) -> int:
        return deadline_seconds(self._ttl + timedelta(seconds=HOLD_MARGIN_S))

    def _extend(self, deliveries: Sequence[Delivery]) -> None:
        """Renew what is held, at the pace of a lease; a failure is left to the next time."""
        with suppress(PubSubUnavailable):
            self._confirm(deliveries, timedelta(seconds=self._hold_s()), patience_s=1.0)

    def _confirm(self, deliveries: Sequence[Delivery], span: timedelta, *, patience_s: float) -> None:
        """Renew for `span`; marks as `lost` those of which the service says so."""
        owners = {ack_id: one for one in deliveries for ack_id in list(one.ack_ids.values())}
        failure: PubSubUnavailable | None = None
        for ack_ids in _chunks(list(owners), MAX_ACK_IDS):
            sent = self._clock.boottime()
            try:
                reply = insist(
                    lambda ack_ids=ack_ids: self._client().modify_deadline(  # type: ignore[misc]
                        self._settings.subscription, ack_ids, span
                    ),
                    patience_s=patience_s,
                    known=self._reached,
                    stop=self._stop,
                )
            except PubSubUnavailable as problem:
                failure = problem
                continue
            with self._changed:
                for ack_id in ack_ids:
                    if ack_id not in reply.gone and ack_id not in reply.again:
                        owners[ack_id].confirmed_until = sent + deadline_seconds(span)
                for ack_id in reply.gone:
                    self._mark_gone(owners[ack_id], ack_id)
        if failure is not None:
            raise failure

    def _mark_gone(self, delivery: Delivery, ack_id: str) -> None:
        if delivery.holding is Holding.DONE:
            return
        for message_id, known in list(delivery.ack_ids.items()):
            if known == ack_id:
                del delivery.ack_ids[message_id]
        if not delivery.ack_ids:
            delivery.lost = True
            delivery.confirmed_until = 0.0

    def give_back(
        self, copies: Sequence[tuple[Delivery, OutgoingMessage]], *, patience_s: float = RETURN_PATIENCE_S
    ) -> list[Delivery]:
        """Publish a copy of each and acknowledge it; returns those whose copy is not confirmed.

        Never a nack: each one counts towards the dead-letter policy, whoever was at fault.
        https://cloud.google.com/pubsub/docs/handling-failures#dead_letter_topic
        """
        failed: list[Delivery] = []
        owners = {id(message): delivery for delivery, message in copies}
        # Before its copy is out: a copy that came back while the original was still listed would pass for a second
        # delivery of it, and be acknowledged with it.
        with self._changed:
            for delivery in owners.values():
                if self._held.get(delivery.key) is delivery:
                    del self._held[delivery.key]
        for batch in split_requests(message for _, message in copies):
            deliveries = [owners[id(message)] for message in batch]
            try:
                self.publish(batch, patience_s=patience_s)
            except PubSubUnavailable as problem:
                log.warning(
                    "cannot give %d tasks back to queue `%s`, they come back when their leases end: %s",
                    len(batch),
                    self._queue,
                    "; ".join((problem.message, *problem.facts)),
                )
                failed += deliveries
            else:
                self.finish(deliveries)
        with self._changed:
            for delivery in failed:
                self._held.setdefault(delivery.key, delivery)
        return failed

    def publish(self, batch: Sequence[OutgoingMessage], *, patience_s: float) -> None:
        """One request's worth, confirmed on return."""
        insist(lambda: self._client().publish(self._settings.topic, batch), patience_s=patience_s, known=self._reached)
        self._reached = True

    # acknowledging

    def _acknowledge_on(self) -> None:
        while not self._stop.is_set():
            with self._acks_changed:
                self._acks_changed.wait_for(lambda: self._acks or self._stop.is_set())
            self._stop.wait(ACK_DELAY_S)
            self._flush_acks(ACK_PATIENCE_S)

    def _flush_acks(self, patience_s: float) -> None:
        with self._acks_changed:
            ack_ids, self._acks = self._acks, []
        for chunk in _chunks(ack_ids, MAX_ACK_IDS):
            try:
                self._acknowledge(chunk, patience_s)
            except PubSubUnavailable as problem:
                # Harmless: what comes back is found recorded, or is the twin of a copy.
                log.warning("%d acknowledgements were lost, those tasks are delivered again: %s", len(chunk), problem)

    def _acknowledge(self, ack_ids: Sequence[str], patience_s: float) -> None:
        for attempt in range(6):
            reply = insist(
                lambda ack_ids=ack_ids: self._client().acknowledge(self._settings.subscription, ack_ids),  # type: ignore[misc]
                patience_s=patience_s,
                known=self._reached,
                stop=self._stop,
            )
            ack_ids = list(reply.again)
            if not ack_ids:
                return
            self._stop.wait(backoff_s(attempt))

    def close(self) -> None:
        """Return what is not handed out, confirm what is acknowledged, and end. What is handed out comes back."""
        with self._changed:
            if self._stop.is_set():
                return
            self._stop.set()
            self._changed.notify_all()
            started = bool(self._threads)
        self._chores.set()
        with self._acks_changed:
            self._acks_changed.notify_all()
        if started:
            self._threads[0].join(timeout=CLOSE_WAIT_S)
            self._client().close_pulls()
            for thread in self._threads:
                thread.join(timeout=10)
            waiting = [*self._new, *self._ready, *(one for _, _, one in self._later)]
            waiting = [one for one in waiting if one.holding is Holding.HELD]
            self.drop(self.give_back([(one, write_copy(one, not_before=one.task.not_before)) for one in waiting]))
            self._flush_acks(RETURN_PATIENCE_S)
        self._finders.close(wait=False)
        if self._bell is not None:
            for end in self._bell:
                os.close(end)
            self._bell = None


def _chunks(items: Sequence[str], most: int) -> Iterator[list[str]]:
    for start in range(0, len(items), most):
        yield list(items[start : start + most])
