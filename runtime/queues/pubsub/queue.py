"""The queue over Google Pub/Sub, which delivers and decides nothing.

The service may deliver twice, late, or after a task is done, and it forgets after its retention. So the record store
decides: an acknowledgement follows only a record or a confirmed copy, and the commit of the record is the only fence.
Dead-letter policy and exactly-once delivery of the subscription may be on or off. docs/queues.md describes the queue
for users.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from runtime.clock import Clock, SystemClock
from runtime.errors import InfrastructureFailure, NotPossible
from runtime.outputs import PubSubQueueOutput
from runtime.queues import base
from runtime.queues.base import DEFAULT_QUEUE, RefusedSettlement, SettleAnswer
from runtime.queues.pubsub.client import (
    MAX_ACK_IDS,
    OutgoingMessage,
    PubSubClient,
    PubSubUnavailable,
    check_names,
    ensure_topics,
    insist,
)
from runtime.queues.pubsub.message import (
    Delivery,
    DeliveryState,
    read_message,
    split_requests,
    write_copy,
    write_message,
)
from runtime.queues.pubsub.receiver import Receiver
from runtime.queues.purge import Purge
from runtime.queues.threads import Threads
from runtime.records.base import RecordExists, RecordStore, calls_at_once, settle_record
from runtime.records.control_commands import pause_order, resume_order
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.tasks.history import Lease, Release, Settlement
from runtime.tasks.model import Task, TaskState
from runtime.tasks.retry_policy import malformed
from runtime.units import count_noun, format_time

if TYPE_CHECKING:
    import threading
    from concurrent.futures import Future

T = TypeVar("T")
R = TypeVar("R")
log = CleanLogger(__name__)

PATIENCE: Final = timedelta(minutes=10)
"""How long a worker waits for the end of an outage."""
PUT_PATIENCE_S: Final = 60.0
"""The same for a submitter, with a person waiting."""
RELEASE_PATIENCE_S: Final = 15.0
"""Within the grace that a preempted machine gives."""
PUBLISHES_AT_ONCE: Final = 4
DRAIN_EVERY_S: Final = 5.0
PURGE_MARGIN: Final = timedelta(minutes=1)
"""Messages published this shortly before a purge are left to the workers, so that a purge does not catch a redrive
between its two steps: publish, then close the mark."""


class PubSubQueue:
    """`Queue` over a topic and a subscription, as a stack's contract describes them. It makes no call before it is used."""

    traits = base.QueueTraits(kind="pubsub", tracks_holders=False, remote=True, priorities=False)

    def __init__(
        self,
        settings: PubSubQueueOutput,
        records: RecordStore,
        *,
        name: str = DEFAULT_QUEUE,
        clock: Clock | None = None,
        client: PubSubClient | None = None,
        patience: timedelta = PATIENCE,
    ) -> None:
        check_names(settings)
        self.name = name
        self.records = records
        self._settings = settings
        self._clock: Clock = clock or SystemClock()
        self._opened: PubSubClient | None = client
        self._opening = system.lock()
        self._intake = Receiver(settings, records, self._client, queue=name, clock=self._clock, patience=patience)
        self._at_once = calls_at_once(records)
        self._stores = Threads(2 * self._at_once, "pubsub-store")
        self._published = False
        self._drained_at = float("-inf")
        self._drain: threading.Thread | None = None
        self._closing = False

    def _client(self) -> PubSubClient:
        with self._opening:
            if self._opened is None:
                self._opened = PubSubClient()
            return self._opened

    # submitting

    def put(self, tasks: Sequence[Task]) -> base.PutResult:
        """Durable on return. The service does not reveal known tasks, so `known` is 0."""
        retention_s, now = self._settings.retention_s, self._clock.now()
        last = now + timedelta(seconds=retention_s) if retention_s else None
        for task in tasks:
            check_task(task, queue=self.name, last=last)
        waiting: deque[Future[None]] = deque()
        with system.pool(PUBLISHES_AT_ONCE, name="pubsub-put") as pool:
            try:
                for batch in split_requests(write_message(task, self.records.put_blob) for task in tasks):
                    waiting.append(pool.submit(self._publish, batch))
                    if len(waiting) >= PUBLISHES_AT_ONCE:
                        waiting.popleft().result()
                while waiting:
                    waiting.popleft().result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return base.PutResult(len(tasks), 0)

    def _publish(self, batch: Sequence[OutgoingMessage]) -> None:
        insist(
            lambda: self._client().publish(self._settings.topic, batch),
            patience_s=PUT_PATIENCE_S,
            known=self._published,
        )
        self._published = True

    # leasing

    def join(self, worker: str) -> tuple[int, ...]:
        return ()

    def mark_running(self, tokens: Sequence[str], apart: str | None = None, proven: Collection[str] = ()) -> None:
        self._intake.held.mark_running(tokens)

    def lease(self, n: int, *, worker: str, ttl: timedelta) -> list[Lease]:
        """The held tasks that are due. A pull for the rest goes out, and the wake-up descriptor shows when it brings any.

        Raises `QueueUnavailable` if the subscription cannot be reached for minutes, or never existed.
        """
        return [_lease(delivery) for delivery in self._intake.take(n, ttl)] if n > 0 else []

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease]:
        """Confirm the leases for `ttl`, 10 s to 10 minutes; returns the leases that the service calls lost.

        It does so with exactly-once delivery only; without, it silently accepts a stale renewal. Raises
        `QueueUnavailable` after a third of `ttl`: the leases may hold, and are not confirmed.
        """
        by_delivery = {id(lease.handle): lease for lease in leases}
        lost = self._intake.renew([lease.handle for lease in leases], ttl)
        return [by_delivery[id(delivery)] for delivery in lost]

    def settle(self, settlements: Sequence[Settlement], *, claim_next: int = 0) -> SettleAnswer:
        """As promised; the acknowledgements follow within moments, and a lost one is harmless.

        If the store fails for some, the others are settled before its error is raised.
        """
        outcomes = self._each(self._settle_one, settlements)
        self._intake.held.count_settled(len(settlements))
        problems = [outcome for outcome in outcomes if isinstance(outcome, InfrastructureFailure)]
        if problems:
            raise problems[0]
        settled = SettleAnswer(refused=[outcome for outcome in outcomes if isinstance(outcome, RefusedSettlement)])
        if claim_next:
            settled.leases = [_lease(one) for one in self._intake.take_more(claim_next)]
        return settled

    def _settle_one(self, settlement: Settlement) -> RefusedSettlement | InfrastructureFailure | None:
        record = settlement.record
        delivery: Delivery = settlement.lease.handle
        if delivery.settled_as == record.token:
            return None
        if delivery.lost and record.state is not TaskState.SUCCEEDED:
            return base.refuse_lost(self.records, settlement)
        try:
            refused = base.record_settlement(self.records, settlement)
        except InfrastructureFailure as problem:
            return problem
        if refused is None:
            # Otherwise the same settlement, handed over again, is refused again.
            delivery.settled_as = record.token
        # Also if another was first: its record ends this generation.
        self._intake.finish([delivery])
        return refused

    def release(self, releases: Sequence[Release]) -> None:
        """Publish a confirmed copy of each task, then acknowledge the original; a nack would spend its budget.

        Raises `QueueUnavailable` or `StoreUnavailable` if tasks could not be given back; they keep their leases, may be
        released again, and come back when their leases end.
        """
        held = [one for one in releases if one.lease.handle.holding is DeliveryState.LEASED]
        live = [one for one in held if not one.lease.handle.lost]
        problems = [problem for problem in self._each(self._record_end, live) if problem is not None]
        if problems:
            self._release([one for one in live if one.note is None])
            raise problems[0]
        if failed := self._release(live):
            raise PubSubUnavailable(
                f"cannot give {len(failed)} of {count_noun(len(live), 'task')} back to queue `{self.name}`",
                facts=["they come back when their leases end"],
            )

    def _record_end(self, release: Release) -> InfrastructureFailure | None:
        if release.note is None:
            return None
        try:
            self.records.record_ended(release.lease.task, release.note)
        except InfrastructureFailure as problem:
            return problem
        return None

    def _release(self, releases: Sequence[Release]) -> list[Delivery]:
        copies = [(one.lease.handle, _copy_for(one)) for one in releases]
        return self._intake.give_back(copies, patience_s=RELEASE_PATIENCE_S)

    def _each(self, act: Callable[[T], R], items: Sequence[T]) -> list[R]:
        return self._stores.each(act, items, at_once=self._at_once)

    # upkeep

    def tend(self) -> None:
        """Start a look into the service's dead letters, every five seconds and in the background."""
        now = self._clock.boottime()
        if self._settings.dead_letter_subscription is None or now - self._drained_at < DRAIN_EVERY_S:
            return
        if self._drain is None or not self._drain.is_alive():
            self._drained_at = now
            self._drain = system.thread(target=self._drain_quietly, name="pubsub-drain")
            self._drain.start()

    def _drain_quietly(self) -> None:
        try:
            self.drain_dead_letters()
        except InfrastructureFailure as problem:
            if not self._closing:
                log.warning("cannot look into the dead letters of queue `%s`: %s", self.name, problem)

    def drain_dead_letters(self) -> int:
        """Bring back the messages that the service has put aside; returns their number.

        The service counts deliveries and knows no reasons. A task that has a record is done; any other goes into the
        queue again, and the worker that leases it decides by the attempts in the store.
        """
        subscription = self._settings.dead_letter_subscription
        drained = 0
        while subscription is not None and not self._closing:
            # A short wait: a worker asks again in five seconds.
            received = self._client().pull(subscription, MAX_ACK_IDS, wait_s=2.0)
            if not received:
                break
            copies, handled = [], []
            unread: InfrastructureFailure | None = None
            for message in received:
                try:
                    delivery = read_message(message, self.records.get_blob)
                    if delivery.invalid is not None:
                        buried = malformed(delivery.task, delivery.invalid, now=self._clock.now())
                        with contextlib.suppress(RecordExists):
                            settle_record(self.records, buried.record, buried.mark)
                    elif self.records.find(*delivery.key) is None:
                        copies.append(write_copy(delivery, not_before=delivery.task.not_before, suspect=True))
                # It stays there, and the others are brought back.
                except InfrastructureFailure as problem:
                    unread = problem
                    continue
                except Exception:
                    log.exception("cannot bring back message `%s`", message.message_id)
                    continue
                handled.append(message.ack_id)
            for batch in split_requests(copies):
                self._intake.publish(batch, patience_s=RELEASE_PATIENCE_S)
            if handled:
                self._client().acknowledge(subscription, handled)
                drained += len(handled)
            if unread is not None:
                raise unread
            if not handled:
                break
            log.info(
                "queue `%s`: %d messages of the service's dead letters, %d queued again",
                self.name,
                len(handled),
                len(copies),
            )
        return drained

    def outlook(self) -> base.Outlook:
        """The tasks that this worker holds for later, and whether the service answers at all.

        The service does not report other workers' leases.
        """
        return base.Outlook(next_due=self._intake.next_due(), suspect_leases=self._intake.is_cut_off())

    def wake_descriptor(self) -> int:
        return self._intake.wake_descriptor()

    def drain_wakes(self) -> bool:
        self._intake.drain_wakes()
        return False

    def depth(self) -> None:
        # The API has no call for it; the monitoring metric is minutes late and needs a role of its own.
        # https://cloud.google.com/pubsub/docs/monitoring
        return None

    def peek(self, n: int) -> list[Task]:
        raise NotPossible(
            f"queue `{self.name}` cannot show {count_noun(n, 'task')} without leasing them",
            facts=["Pub/Sub only delivers; what was submitted is in the manifests of the record store"],
            hint="run `runtime status EXPERIMENT` for what has no record yet",
        )

    # control

    def ensure_topics(self) -> list[str]:
        """On an emulator, make forgotten topics again and return their names; elsewhere the stack owns them."""
        emulator = self._client().emulator
        return ensure_topics(self._settings, emulator=emulator) if emulator else []

    def pause(self) -> None:
        """Workers stop leasing within ten seconds."""
        self.records.put_order(self.name, pause_order(self._clock.now()))
        self._intake.orders.read(fresh=True)

    def resume(self) -> None:
        order = resume_order(self.records.control(self.name), self._clock.now())
        if order is not None:
            self.records.put_order(self.name, order)
        self._intake.orders.read(fresh=True)

    def purge(self, *, progress: Callable[[int], None] = base.ignore_progress) -> int:
        """End all tasks as promised. Earlier messages of foreign producers are cancelled too, and not in the number.

        Then the service drops its messages, to be tidy: workers drop a task with a record anyway.
        """
        # Asked before the listing: a later message, which may be in no covered part, is not dropped.
        now = self._client().service_time()
        with contextlib.closing(Purge(self.records, clock=self._clock, progress=progress)) as purge:
            purge.end_submitted(self.name)
        self._intake.orders.read(fresh=True)
        if now is not None:
            self._drop_published_before(now - PURGE_MARGIN)
        self._intake.held.forget_waiting()
        return purge.count

    def _drop_published_before(self, at: datetime) -> None:
        for subscription in (self._settings.subscription, self._settings.dead_letter_subscription):
            if subscription is None:
                continue
            try:
                insist(
                    lambda subscription=subscription: self._client().seek(subscription, at),  # type: ignore[misc]
                    patience_s=PUT_PATIENCE_S,
                )
            except PubSubUnavailable as problem:
                log.warning("%s; workers drop what it holds as it comes", problem.message)

    def close(self) -> None:
        """Return unstarted tasks and acknowledge settled ones. Any other task comes back when its lease ends."""
        self._closing = True
        self._intake.close()
        if self._drain is not None:
            self._drain.join(timeout=5)
        self._stores.close(wait=False)
        if self._opened is not None:
            self._opened.close()


def check_task(task: Task, *, queue: str = DEFAULT_QUEUE, last: datetime | None = None) -> None:
    """Raise `NotPossible` for a task that Pub/Sub cannot queue as it asks; `last` is when it forgets."""
    if task.priority:
        raise NotPossible(
            f"queue `{queue}` cannot honour priority {task.priority} of task `{task.id}`",
            facts=["Pub/Sub delivers in no order that a submitter can choose"],
            hint="leave `--priority` out, or use a queue of its own for what is urgent",
        )
    if last is not None and task.not_before is not None and task.not_before >= last:
        raise NotPossible(
            f"queue `{queue}` cannot hold task `{task.id}` until {format_time(task.not_before)}",
            facts=[f"its subscription forgets messages of today after {format_time(last)}"],
            hint="choose a shorter `--delay`, or raise the queue's retention in the stack",
        )


def _lease(delivery: Delivery) -> Lease:
    return Lease(
        delivery.task,
        delivery.token,
        body=delivery.text,
        tries=delivery.tries,
        suspect=delivery.suspect,
        alone=delivery.alone,
        invalid=delivery.invalid,
        handle=delivery,
        published_at=delivery.published_at,
    )


def _copy_for(release: Release) -> OutgoingMessage:
    delivery: Delivery = release.lease.handle
    ended = release.note is not None
    return write_copy(
        delivery,
        not_before=release.not_before,
        tries=delivery.tries + ended,
        alone=release.alone or (delivery.alone and not ended),
        # A recorded end explains the loss; an attempt that never began explains nothing.
        suspect=delivery.suspect and not ended,
    )
