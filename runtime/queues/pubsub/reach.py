"""Whether the service answers, and for how long a worker bears it if it does not."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final

from runtime.clock import Clock
from runtime.errors import InfrastructureFailure
from runtime.units import format_duration

log = logging.getLogger(__name__)

FIRST_ANSWER_S: Final = 5.0
"""What waits at the service is on its way after this time; a pull that finds nothing waits much longer."""


class Reach:
    """What the last pulls met. One thread pulls and reports here; any thread may ask."""

    def __init__(self, clock: Clock, *, queue: str, patience: timedelta) -> None:
        self._clock, self._queue, self._patience_s = clock, queue, patience.total_seconds()
        self._asked_at: float | None = None
        """When the first pull was sent, by the boot clock."""
        self.reached = False
        """The service has answered this process, at least once."""
        self.problem: InfrastructureFailure | None = None
        self._failing_since = 0.0

    def asking(self) -> None:
        self._asked_at = self._asked_at or self._clock.boottime()

    def answered(self) -> None:
        if self.problem is None:
            return
        self.problem = None
        outage_s = self._clock.boottime() - self._failing_since
        log.warning("queue `%s` answers again after %s; work goes on", self._queue, format_duration(outage_s))

    def failed(self, problem: InfrastructureFailure) -> None:
        first = self.problem is None
        if first:
            self._failing_since = self._clock.boottime()
        self.problem = problem
        if first and self.given_up() is None:  # What is given up is raised to the worker, which says it.
            log.warning(
                "%s; attempts go on, and the queue is asked again for up to %s",
                "; ".join((problem.message, *problem.facts)),
                format_duration(self._patience_s),
            )

    def given_up(self) -> InfrastructureFailure | None:
        """The problem, once there is no more hope that it passes."""
        problem = self.problem
        if problem is None:
            return None
        hopeful = problem.retryable or self.reached
        lasts = self._clock.boottime() - self._failing_since > self._patience_s
        return problem if lasts or not hopeful else None

    def is_cut_off(self, *, started: bool) -> bool:
        """Whether it cannot be known at the moment what waits at the service."""
        if self.problem is not None:
            return True
        if self.reached or not started:
            return False
        # To load the client and to connect may take longer than a worker is willing to be idle.
        asked_at = self._asked_at
        return asked_at is None or self._clock.boottime() - asked_at < FIRST_ANSWER_S
