"""Attempts' logs in the store: written while an attempt runs, and completed when it ends."""

from __future__ import annotations

from typing import Final

from runtime.units import format_size
from runtime.worker.attempts.model import Ended
from runtime.worker.held import HeldLease
from runtime.worker.services import Services

LOG_EVERY_S: Final = 1.0
REMOTE_LOG_EVERY_S: Final = 15.0
LOG_LIMIT_BYTES: Final = 1 << 30
"""If a log is longer, the store gets this much of its beginning, and its last 64 KiB when it ends."""


class AttemptLogs:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._due = 0.0

    def next_at(self) -> float:
        return self._due if self._services.holdings.by_token else float("inf")

    def write_when_due(self, now: float) -> None:
        """Write the output of long attempts, so that `runtime logs -f` can follow them."""
        if now < self.next_at():
            return
        self._due = now + LOG_EVERY_S
        every = LOG_EVERY_S if self._services.local else REMOTE_LOG_EVERY_S
        holdings = self._services.holdings
        for token in holdings.running:
            held = holdings.by_token.get(token)
            if held is None or now - held.logged_at < every:
                continue
            is_new, held.logged_at = held.logged_at == 0.0, now
            if not is_new:
                self._write(held)

    def _write(self, held: HeldLease) -> None:
        services, task_id, token = self._services, held.lease.task.id, held.lease.token
        # Drained in any case, or the output would wait in memory.
        data = services.pool.drain_log(token)[: LOG_LIMIT_BYTES - held.logged_bytes]
        if not data:
            return
        held.logged_bytes += len(data)

        def written(url: str | None, problem: Exception | None) -> None:
            held.log_url = url or held.log_url
            if problem is not None:
                services.say.trouble("writing a log", problem)

        services.offload.call(lambda: services.records.append_log(task_id, token, data), written)

    def complete(self, held: HeldLease, end: Ended) -> str | None:
        """Write the rest of a log that outgrew the record, or is in the store in part; returns its address."""
        if held.log_url is None and end.log_bytes <= len(end.log):
            return None
        rest, room = end.undrained, LOG_LIMIT_BYTES - held.logged_bytes
        if len(rest) > room or not room:
            said = f"\n[runtime: the log outgrew {format_size(LOG_LIMIT_BYTES)}; what follows is its end]\n"
            rest = rest[:room] + said.encode() + end.log
        task_id = held.lease.task.id
        try:
            return self._services.records.append_log(task_id, end.token, rest)
        except Exception as problem:
            self._services.say.trouble(f"writing the log of {task_id}", problem)
            return held.log_url
