"""The subscription as one worker reaches it: whether the service answers, acknowledgements, and renewals of leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from runtime.clock import Clock
from runtime.errors import InfrastructureFailure
from runtime.queues.pubsub.client import (
    MAX_ACK_IDS,
    AckReply,
    PubSubClient,
    PubSubUnavailable,
    backoff_s,
    chunks,
    deadline_seconds,
    insist,
)
from runtime.queues.pubsub.message import Delivery, DeliveryState
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.units import format_duration

if TYPE_CHECKING:
    import threading

log = CleanLogger(__name__)

FIRST_ANSWER_S: Final = 5.0
"""Messages that wait at the service are on their way after this time; a pull that finds none waits much longer."""
HOLD_MARGIN_S: Final = 5
"""Held deliveries are renewed for this much more than a lease, so that they are handed out with a whole one left."""
ACK_DELAY_S: Final = 0.2
"""Acknowledgements are collected for this long: an early one gains nothing, the record stands already."""
ACK_PATIENCE_S: Final = 60.0


class Subscription:
    """Calls for one subscription, from any thread, and the outcome of the last pulls."""

    def __init__(
        self,
        client: Callable[[], PubSubClient],
        name: str,
        *,
        queue: str,
        clock: Clock,
        patience: timedelta,
        stop: threading.Event,
        changed: threading.Condition,
    ) -> None:
        """`changed` is held while deliveries change."""
        self._client, self._name, self._queue, self._clock = client, name, queue, clock
        self._stop, self._changed = stop, changed
        self._patience_s = patience.total_seconds()
        self._asked_at: float | None = None
        """When the first pull was sent, by the boot clock."""
        self.reached = False
        """The service has answered this process, at least once."""
        self.problem: InfrastructureFailure | None = None
        self._failing_since = 0.0
        self._ack_ids: list[str] = []
        self._ack_ids_changed = system.condition()

    # whether the service answers; only the pulling thread reports

    def asking(self) -> None:
        self._asked_at = self._asked_at or self._clock.boottime()

    def answered(self) -> None:
        if self.problem is None:
            return
        self.problem = None
        outage_s = self._clock.boottime() - self._failing_since
        log.warning("queue `%s` answers again after %s; work goes on", self._queue, format_duration(outage_s))

    def failed(self, problem: InfrastructureFailure) -> None:
        if self._stop.is_set():
            return
        first = self.problem is None
        if first:
            self._failing_since = self._clock.boottime()
        self.problem = problem
        if first and self.given_up() is None:  # A given-up problem is raised to the worker, which reports it.
            log.warning(
                "%s; attempts go on, and the queue is asked again for up to %s",
                "; ".join((problem.message, *problem.facts)),
                format_duration(self._patience_s),
            )

    def given_up(self) -> InfrastructureFailure | None:
        """The problem, once it cannot be expected to pass."""
        problem = self.problem
        if problem is None:
            return None
        hopeful = problem.retryable or self.reached
        lasts = self._clock.boottime() - self._failing_since > self._patience_s
        return problem if lasts or not hopeful else None

    def is_cut_off(self, *, started: bool) -> bool:
        """Whether this process cannot know at the moment if messages wait at the service."""
        if self.problem is not None:
            return True
        if self.reached or not started:
            return False
        # To load the client and to connect may take longer than a worker is willing to be idle.
        asked_at = self._asked_at
        return asked_at is None or self._clock.boottime() - asked_at < FIRST_ANSWER_S

    def _insist(self, call: Callable[[], AckReply], patience_s: float) -> AckReply:
        return insist(call, patience_s=patience_s, known=self.reached, stop=self._stop)

    # leases

    def extend(self, deliveries: Sequence[Delivery], ttl: timedelta) -> None:
        """Renew held deliveries, at the pace of a lease; a failure is left to the next time."""
        with suppress(PubSubUnavailable):
            self.confirm(deliveries, timedelta(seconds=hold_s(ttl)), patience_s=1.0)

    def confirm(self, deliveries: Sequence[Delivery], span: timedelta, *, patience_s: float) -> None:
        """Renew for `span`; a delivery that the service calls gone is marked as `lost`."""
        owners = {ack_id: one for one in deliveries for ack_id in list(one.ack_ids.values())}
        failure: PubSubUnavailable | None = None
        for ack_ids in chunks(list(owners), MAX_ACK_IDS):
            sent = self._clock.boottime()
            try:
                reply = self._insist(
                    lambda ack_ids=ack_ids: self._client().modify_deadline(self._name, ack_ids, span),  # type: ignore[misc]
                    patience_s,
                )
            except PubSubUnavailable as problem:
                failure = problem
                continue
            with self._changed:
                for ack_id in ack_ids:
                    if ack_id in reply.gone:
                        _mark_gone(owners[ack_id], ack_id)
                    elif ack_id not in reply.again:
                        owners[ack_id].confirmed_until = sent + deadline_seconds(span)
        if failure is not None:
            raise failure

    # acknowledgements

    def acknowledge(self, ack_ids: Iterable[str]) -> None:
        """Have `acknowledge_on` send them."""
        with self._ack_ids_changed:
            self._ack_ids += ack_ids
            self._ack_ids_changed.notify()

    def wake(self) -> None:
        """Have `acknowledge_on` look at `stop`."""
        with self._ack_ids_changed:
            self._ack_ids_changed.notify_all()

    def acknowledge_on(self) -> None:
        """Collect acknowledgements for a moment and send them together, until `stop` is set."""
        while not self._stop.is_set():
            with self._ack_ids_changed:
                self._ack_ids_changed.wait_for(lambda: self._ack_ids or self._stop.is_set())
            self._stop.wait(ACK_DELAY_S)
            self.flush(ACK_PATIENCE_S)

    def flush(self, patience_s: float) -> None:
        with self._ack_ids_changed:
            ack_ids, self._ack_ids = self._ack_ids, []
        for chunk in chunks(ack_ids, MAX_ACK_IDS):
            try:
                self._send(chunk, patience_s)
            except PubSubUnavailable as problem:
                # Harmless: a task that comes back is found recorded, or is the twin of a copy.
                log.warning("%d acknowledgements were lost, those tasks are delivered again: %s", len(chunk), problem)

    def _send(self, ack_ids: Sequence[str], patience_s: float) -> None:
        for attempt in range(6):
            reply = self._insist(
                lambda ack_ids=ack_ids: self._client().acknowledge(self._name, ack_ids),  # type: ignore[misc]
                patience_s,
            )
            ack_ids = list(reply.again)
            if not ack_ids:
                return
            self._stop.wait(backoff_s(attempt))


def hold_s(ttl: timedelta) -> int:
    """Seconds to renew a held delivery for, if leases have length `ttl`."""
    return deadline_seconds(ttl + timedelta(seconds=HOLD_MARGIN_S))


def _mark_gone(delivery: Delivery, ack_id: str) -> None:
    if delivery.holding is DeliveryState.DONE:
        return
    for message_id, known in list(delivery.ack_ids.items()):
        if known == ack_id:
            del delivery.ack_ids[message_id]
    if not delivery.ack_ids:
        delivery.lost = True
        delivery.confirmed_until = 0.0
