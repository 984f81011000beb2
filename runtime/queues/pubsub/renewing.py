"""Leases of deliveries, renewed at the service from the first moment; whatever it calls gone is marked as lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

from runtime.clock import Clock
from runtime.queues.pubsub.client import (
    MAX_ACK_IDS,
    PubSubClient,
    PubSubUnavailable,
    chunks,
    deadline_seconds,
    insist,
)
from runtime.queues.pubsub.message import Delivery, Holding
from runtime.queues.pubsub.reach import Reach

HOLD_MARGIN_S: Final = 5
"""What is held here is renewed for this much more than a lease, so that it is handed out with a whole one left."""


class Renewer:
    """Renews leases in batches; safe to call from any thread."""

    def __init__(
        self,
        client: Callable[[], PubSubClient],
        subscription: str,
        *,
        clock: Clock,
        reach: Reach,
        stop: threading.Event,
        changed: threading.Condition,
    ) -> None:
        """`changed` is held while deliveries change."""
        self._client, self._subscription = client, subscription
        self._clock, self._reach, self._stop, self._changed = clock, reach, stop, changed

    def extend(self, deliveries: Sequence[Delivery], ttl: timedelta) -> None:
        """Renew what is held, at the pace of a lease; a failure is left to the next time."""
        with suppress(PubSubUnavailable):
            self.confirm(deliveries, timedelta(seconds=hold_s(ttl)), patience_s=1.0)

    def confirm(self, deliveries: Sequence[Delivery], span: timedelta, *, patience_s: float) -> None:
        """Renew for `span`; marks as `lost` those of which the service says so."""
        owners = {ack_id: one for one in deliveries for ack_id in list(one.ack_ids.values())}
        failure: PubSubUnavailable | None = None
        for ack_ids in chunks(list(owners), MAX_ACK_IDS):
            sent = self._clock.boottime()
            try:
                reply = insist(
                    lambda ack_ids=ack_ids: self._client().modify_deadline(  # type: ignore[misc]
                        self._subscription, ack_ids, span
                    ),
                    patience_s=patience_s,
                    known=self._reach.reached,
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
                    _mark_gone(owners[ack_id], ack_id)
        if failure is not None:
            raise failure


def hold_s(ttl: timedelta) -> int:
    """For how long to renew what is not handed out, if leases have length `ttl`."""
    return deadline_seconds(ttl + timedelta(seconds=HOLD_MARGIN_S))


def _mark_gone(delivery: Delivery, ack_id: str) -> None:
    if delivery.holding is Holding.DONE:
        return
    for message_id, known in list(delivery.ack_ids.items()):
        if known == ack_id:
            del delivery.ack_ids[message_id]
    if not delivery.ack_ids:
        delivery.lost = True
        delivery.confirmed_until = 0.0
