"""Acknowledgements: collected for a moment, then sent together until the service has taken each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from runtime.queues.pubsub.client import MAX_ACK_IDS, PubSubClient, PubSubUnavailable, backoff_s, chunks, insist
from runtime.queues.pubsub.reach import Reach

log = logging.getLogger(__name__)

ACK_DELAY_S: Final = 0.2
"""Acknowledgements are collected for so many seconds: an early one gains nothing, the record stands already."""
ACK_PATIENCE_S: Final = 60.0


class Acknowledger:
    """Collects ids from any thread; one thread, in `acknowledge_on`, sends them."""

    def __init__(
        self, client: Callable[[], PubSubClient], subscription: str, *, reach: Reach, stop: threading.Event
    ) -> None:
        self._client, self._subscription, self._reach, self._stop = client, subscription, reach, stop
        self._ack_ids: list[str] = []
        self._changed = threading.Condition()

    def add(self, ack_ids: Iterable[str]) -> None:
        with self._changed:
            self._ack_ids += ack_ids
            self._changed.notify()

    def wake(self) -> None:
        """Have `acknowledge_on` look at `stop`."""
        with self._changed:
            self._changed.notify_all()

    def acknowledge_on(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._ack_ids or self._stop.is_set())
            self._stop.wait(ACK_DELAY_S)
            self.flush(ACK_PATIENCE_S)

    def flush(self, patience_s: float) -> None:
        with self._changed:
            ack_ids, self._ack_ids = self._ack_ids, []
        for chunk in chunks(ack_ids, MAX_ACK_IDS):
            try:
                self._acknowledge(chunk, patience_s)
            except PubSubUnavailable as problem:
                # Harmless: what comes back is found recorded, or is the twin of a copy.
                log.warning("%d acknowledgements were lost, those tasks are delivered again: %s", len(chunk), problem)

    def _acknowledge(self, ack_ids: Sequence[str], patience_s: float) -> None:
        for attempt in range(6):
            reply = insist(
                lambda ack_ids=ack_ids: self._client().acknowledge(self._subscription, ack_ids),  # type: ignore[misc]
                patience_s=patience_s,
                known=self._reach.reached,
                stop=self._stop,
            )
            ack_ids = list(reply.again)
            if not ack_ids:
                return
            self._stop.wait(backoff_s(attempt))
