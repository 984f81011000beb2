"""Deliveries of a Pub/Sub subscription that a worker has not settled: pulled, examined, kept, renewed, returned.

One unary pull waits at the service whenever the worker is short of tasks, for just as many as are short: a streaming
pull hands one worker everything, and a second worker nothing. An arriving delivery is compared with the records, waits
for its time if it has one, and wakes the worker. Its lease is renewed from the first moment, here while it is held, by
`renew` once it is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from runtime.clock import Clock
from runtime.errors import InfrastructureFailure
from runtime.outputs import PubSubQueueOutput
from runtime.queues.base import DEFAULT_LEASE
from runtime.queues.pubsub.client import (
    OutgoingMessage,
    PubSubClient,
    PubSubUnavailable,
    ReceivedMessage,
    backoff_s,
    deadline_seconds,
    insist,
)
from runtime.queues.pubsub.delivery_buffer import DeliveryBuffer
from runtime.queues.pubsub.message import Delivery, DeliveryState, judge, read_message, split_requests, write_copy
from runtime.queues.pubsub.subscription import Subscription, hold_s
from runtime.queues.threads import Threads
from runtime.records.base import FleetStore, RecordStore, calls_at_once
from runtime.records.control_commands import QueueControl
from runtime.sanitize import CleanLogger
from runtime.system import WakeUp, system

if TYPE_CHECKING:
    import threading

log = CleanLogger(__name__)

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
CONTROL_EVERY_S: Final = 10.0
FIRST_RENEWAL_S: Final = 1.0
"""A task that is done within this time is never renewed. No subscription has a deadline below 10 s."""
RETURN_PATIENCE_S: Final = 5.0
PAUSED_LOOK: Final = timedelta(seconds=1)
DELIVERIES_WITHOUT_POLICY: Final = 5
"""The least that a dead-letter policy may allow; assumed where deliveries are counted and no number is known."""


class Receiver:
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
        self._queue, self._clock = queue, clock
        self._stop = system.event()
        self._chores = system.event()
        self._threads: list[threading.Thread] = []
        self._finders = Threads(calls_at_once(records), "pubsub-find")
        self._ttl = DEFAULT_LEASE
        self.held = DeliveryBuffer(clock)
        self._subscription = Subscription(
            client,
            settings.subscription,
            queue=queue,
            clock=clock,
            patience=patience,
            stop=self._stop,
            changed=self.held.changed,
        )
        self.orders = OrdersSeen(records, queue=queue, clock=clock)
        self._wake_up: WakeUp | None = None
        """Rings when a delivery is ready; made for the first who waits for it."""

    # calls of the worker

    def take(self, n: int, ttl: timedelta) -> list[Delivery]:
        """Up to `n` that are due, now the caller's to renew.

        The rest is pulled, and the wake-up descriptor turns readable when it comes.
        """
        control = self.orders.read()
        held = self.held
        with held.changed:
            self._ttl = ttl
            if control.paused or self._stop.is_set():
                held.wanted = 0
                return []
            self._start()
            unasked = not held.pulling and self._shortfall() == 0
            taken = self._pop(n)
            if unasked and n and not taken:
                pulls = held.pulls
                held.changed.wait_for(
                    lambda: held.ready or self._subscription.problem or self._stop.is_set() or held.pulls > pulls,
                    FIRST_WAIT_S,
                )
                taken = self._pop(n)
            if not taken and n and (problem := self._subscription.given_up()):
                raise problem
        lasting = self._clock.boottime() + ttl.total_seconds()
        self._subscription.extend([one for one in taken if one.confirmed_until < lasting], ttl)
        return taken

    def take_more(self, n: int) -> list[Delivery]:
        """Like `take`, at once and from the held deliveries alone; `ttl` is that of the last `take`."""
        with self.held.changed:
            if self.orders.control.paused or self._stop.is_set():
                return []
            return self._pop(n)

    def _pop(self, n: int) -> list[Delivery]:
        taken = self.held.hand_out(n)
        self.held.wanted = n - len(taken)
        if self._shortfall():
            self.held.changed.notify_all()
        return taken

    def _shortfall(self) -> int:
        """How many to pull now."""
        if self.orders.control.paused or self._stop.is_set():
            return 0
        return self.held.shortfall()

    def renew(self, deliveries: Sequence[Delivery], ttl: timedelta) -> list[Delivery]:
        """The lost ones. Raises `QueueUnavailable` if the service confirms nothing for a third of `ttl`."""
        now = self._clock.boottime()
        with self.held.changed:
            for delivery in deliveries:
                delivery.since = now
        live = [one for one in deliveries if one.holding is DeliveryState.LEASED and not one.lost]
        self._subscription.confirm(live, ttl, patience_s=max(2.0, ttl.total_seconds() / 3))
        return [one for one in deliveries if one.lost or one.holding is DeliveryState.DONE]

    def finish(self, deliveries: Iterable[Delivery]) -> None:
        """Acknowledge: a record or a confirmed copy stands for each."""
        ack_ids = self.held.finish(deliveries)
        if not ack_ids:
            return
        self._subscription.acknowledge(ack_ids)
        if not self._threads:
            self._start()

    def next_due(self) -> timedelta | None:
        due = self.held.next_due()
        return due if due is None or not self.orders.control.paused else PAUSED_LOOK

    def is_cut_off(self) -> bool:
        """Whether this process cannot know at the moment if messages wait at the service."""
        return self._subscription.is_cut_off(started=bool(self._threads))

    def wake_descriptor(self) -> int:
        with self.held.changed:
            if self._wake_up is None:
                self._wake_up = system.wake_up()
                if self.held.ready:
                    self._wake_up.ring()
            return self._wake_up.fd

    def drain_wakes(self) -> None:
        if self._wake_up is not None:
            self._wake_up.drain()

    # pulling

    def _start(self) -> None:
        with self.held.changed:
            if self._threads or self._stop.is_set():
                return
            for name, work in (
                ("pull", self._pull_on),
                ("keep", self._keep_on),
                ("acknowledge", self._subscription.acknowledge_on),
            ):
                self._threads.append(system.thread(target=work, name=f"pubsub-{name}"))
        for thread in self._threads:
            thread.start()

    def _pull_on(self) -> None:
        failures = 0
        while True:
            with self.held.changed:
                while not (n := self._shortfall()) and not self._stop.is_set():
                    self.held.changed.wait()
                if self._stop.is_set():
                    return
                self.held.pulling = True
            try:
                client = self._client()
                wait_s = EMULATOR_PULL_WAIT_S if client.emulator else PULL_WAIT_S
                self._subscription.asking()
                received = client.pull(self._settings.subscription, n, wait_s=wait_s)
                self._subscription.reached = True
                if received:
                    self._take_in(received, n)
                self._subscription.answered()
                failures = 0
            except InfrastructureFailure as problem:
                self._subscription.failed(problem)
                failures += 1
            except Exception as problem:
                # If this thread ended, the queue would stand still and nobody would know.
                log.exception("pulling from queue `%s`", self._queue)
                self._subscription.failed(PubSubUnavailable(f"queue `{self._queue}` cannot be read: {problem!r}"))
                failures += 1
            finally:
                with self.held.changed:
                    self.held.pulling = False
                    self.held.pulls += 1
                    self.held.changed.notify_all()
            if failures:
                self._stop.wait(backoff_s(failures))

    def _take_in(self, received: Sequence[ReceivedMessage], asked: int) -> None:
        now, ttl_s = self._clock.boottime(), self._ttl.total_seconds()
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
            if self.held.add(delivery, ttl_s=ttl_s):
                fresh.append(delivery)
        self._chores.set()
        if self._settings.ack_deadline_s < ttl_s:
            self._subscription.extend(fresh, self._ttl)
        else:
            # Renewed all the same: the deadline in the contract may be old.
            self.held.renew_at(now + FIRST_RENEWAL_S, fresh)
        had_ready, had_later = self._examine(fresh)
        # A run of tasks that are all due later must not be worked through one by one.
        self.held.widened = min(100, 2 * asked) if had_later and not had_ready else 0
        if unread is not None:
            raise unread

    def _examine(self, deliveries: Sequence[Delivery]) -> tuple[bool, bool]:
        """Sort deliveries that arrived or fell due; returns whether some are ready, and whether some are for later."""
        if not deliveries:
            return False, False
        try:
            recorded = self._find_recorded(deliveries)
        except InfrastructureFailure:
            self.held.examined(deliveries)
            self.held.drop(deliveries)
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
        parked = self.held.keep_for_later(verdicts.later)
        with self.held.changed:
            self.held.examined(deliveries)
            ready = self.held.make_ready(verdicts.ready)
            if ready and self._wake_up is not None:
                self._wake_up.ring()
        self._chores.set()
        self._park(parked)
        return bool(ready), bool(verdicts.later)

    def _find_recorded(self, deliveries: Sequence[Delivery]) -> list[bool]:
        # A read for each delivery. Without a dead-letter policy the service does not mark a second delivery, and a copy
        # or a second publication looks like the first; running a finished task again costs far more.
        def find(delivery: Delivery) -> bool:
            try:
                return self._records.find(*delivery.key) is not None
            except InfrastructureFailure:
                raise
            except Exception:
                # Something is wrong with this one; the worker looks again before it starts it.
                log.exception("cannot look for the record of `%s`", delivery.task.id)
                return False

        return self._finders.each(find, deliveries, at_once=calls_at_once(self._records))

    def _park(self, deliveries: Sequence[Delivery]) -> None:
        """Leave deliveries that are too much to hold at the service until they are due, or for ten minutes.

        Each return counts as a delivery, which a dead-letter policy adds up; a copy replaces it before the last.
        """
        now = self._clock.now()
        by_delay: dict[int, list[Delivery]] = {}
        for delivery in deliveries:
            delay = (delivery.task.not_before or now) - now
            by_delay.setdefault(deadline_seconds(delay), []).append(delivery)
        for delay_s, group in by_delay.items():
            with suppress(PubSubUnavailable):
                self._subscription.confirm(group, timedelta(seconds=delay_s), patience_s=0)
        self.held.drop(deliveries)

    # keeping

    def _keep_on(self) -> None:
        while not self._stop.is_set():
            self._chores.clear()
            self._chores.wait(self.held.next_look_s())
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
        now, held_for_s = self._clock.boottime(), hold_s(self._ttl)
        held = self.held
        with held.changed:
            waiting = held.list_waiting()
            unclaimed = held.pop_unclaimed(now)
            if unclaimed:
                self.held.wanted = 0
            due = held.pop_due()
            fresh = held.pop_unrenewed(now)
        ageing = [
            one for one in waiting if one.confirmed_until - now < held_for_s / 2 and one.holding is DeliveryState.HELD
        ]
        ageing = list({id(one): one for one in (*fresh, *ageing)}.values())
        try:
            self._subscription.extend(ageing, self._ttl)
        finally:
            held.drop(self.give_back([(one, write_copy(one, not_before=None)) for one in unclaimed]))
            if due:
                self._examine(due)

    def give_back(
        self, copies: Sequence[tuple[Delivery, OutgoingMessage]], *, patience_s: float = RETURN_PATIENCE_S
    ) -> list[Delivery]:
        """Publish a copy of each and acknowledge it; returns the deliveries without a confirmed copy.

        Never a nack: each one counts towards the dead-letter policy, even if the task is not at fault.
        https://cloud.google.com/pubsub/docs/handling-failures#dead_letter_topic
        """
        failed: list[Delivery] = []
        owners = {id(message): delivery for delivery, message in copies}
        # Before its copy is out: a copy that came back while the original was still listed would pass for a second
        # delivery of it, and be acknowledged with it.
        self.held.delist(owners.values())
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
        self.held.relist(failed)
        return failed

    def publish(self, batch: Sequence[OutgoingMessage], *, patience_s: float) -> None:
        """One request's worth, confirmed on return."""
        insist(
            lambda: self._client().publish(self._settings.topic, batch),
            patience_s=patience_s,
            known=self._subscription.reached,
        )
        self._subscription.reached = True

    def close(self) -> None:
        """Return the held deliveries, send the acknowledgements, and end. Leased deliveries come back after their deadlines."""
        with self.held.changed:
            if self._stop.is_set():
                return
            self._stop.set()
            self.held.changed.notify_all()
            started = bool(self._threads)
        self._chores.set()
        self._subscription.wake()
        if started:
            self._threads[0].join(timeout=CLOSE_WAIT_S)
            self._client().close_pulls()
            for thread in self._threads:
                thread.join(timeout=10)
            waiting = [one for one in self.held.list_waiting() if one.holding is DeliveryState.HELD]
            copies = [(one, write_copy(one, not_before=one.task.not_before)) for one in waiting]
            self.held.drop(self.give_back(copies))
            self._subscription.flush(RETURN_PATIENCE_S)
        self._finders.close(wait=False)
        with self.held.changed:
            if self._wake_up is not None:
                self._wake_up.close()
                self._wake_up = None


class OrdersSeen:
    """A queue's orders when they were last read."""

    def __init__(self, records: FleetStore, *, queue: str, clock: Clock) -> None:
        self._records, self._queue, self._clock = records, queue, clock
        self.control = QueueControl()
        self._read_at = float("-inf")

    def read(self, *, fresh: bool = False) -> QueueControl:
        """The orders, at most ten seconds old; older if the store cannot be reached."""
        if fresh or self._clock.boottime() - self._read_at >= CONTROL_EVERY_S:
            try:
                # The worker has mostly just read them.
                max_age = timedelta(0) if fresh else timedelta(seconds=CONTROL_EVERY_S)
                self.control = self._records.control(self._queue, max_age=max_age)
            except InfrastructureFailure as problem:
                log.warning("cannot read the orders of queue `%s`, keeping the last: %s", self._queue, problem)
            self._read_at = self._clock.boottime()
        return self.control
