"""The orders that a worker obeys: pauses and cancels. The worker leases nothing before it has read them once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from runtime.errors import explain_briefly
from runtime.records.control_commands import QueueControl
from runtime.records.order_scope import Coverage
from runtime.system import system
from runtime.tasks.history import Lease, Settlement
from runtime.tasks.retry_policy import backoff, refuse
from runtime.worker.pending_settlements import REFUSALS
from runtime.worker.worker_context import WorkerContext

CONTROL_EVERY_S: Final = 10.0
ANSWER_WITHIN: Final = timedelta(seconds=30)
"""After this time without an answer a worker logs that it waits for its first orders."""
_NO_ORDERS: Final = "takes no tasks until it has read its orders"


class ControlReader:
    changed: Callable[[], None]
    """Called when orders were read, and when the worker has learnt more of the tasks that they cover."""

    def __init__(self, services: WorkerContext) -> None:
        self._services = services
        self._control: QueueControl | None = None
        self._refused: Exception = TimeoutError("no answer yet")
        """The exception of the last try, while there are no orders yet."""
        self._tries = 0
        """Tries in a row that failed."""
        self._coverage = Coverage(services.records)
        self._learning: dict[str, list[Callable[[Exception | None], None]]] = {}
        """By experiment: calls that wait until its cancelled tasks are known. The first is being read."""
        self.due = 0.0
        self.stale = False
        """The last try to read them failed: nothing starts, since the last answer may be as old as the outage."""

    @property
    def known(self) -> bool:
        return self._control is not None

    @property
    def paused(self) -> bool:
        """Whether the worker may lease nothing now."""
        return self._control is None or self._control.paused or self.stale

    @property
    def has_cancels(self) -> bool:
        return self._control is not None and self._control.cancels

    def is_cancelled(self, lease: Lease) -> bool | None:
        """Return whether an order covers the task; None if the worker has to read that first."""
        control = self._control
        return control is not None and self._coverage.covers(control, lease.task, lease.published_at)

    def refuse(self, lease: Lease, now: datetime) -> Settlement | None:
        """Return the record of a task that must not start; None if it may."""
        return refuse(lease, cancelled=bool(self.is_cancelled(lease)), worker=self._services.name, now=now)

    # reading

    def read_when_due(self, now: float) -> None:
        if now < self.due:
            return
        services = self._services
        self.due = float("inf")  # One call at a time: a store that does not answer gets no second call.
        services.offload.call(lambda: services.records.control(services.queue.name), self._answered)

    def _answered(self, control: QueueControl | None, problem: Exception | None) -> None:
        now = system.monotonic()
        trouble = self._services.leaving.trouble
        self.due = now + CONTROL_EVERY_S
        if control is None:
            assert problem is not None
            self._tries += 1
            if self._control is not None:
                self.stale = True
                trouble("reading the orders", problem)
                return
            self.due = now + min(30.0, backoff(self._tries).total_seconds())
            if explain_briefly(problem) != explain_briefly(self._refused):
                trouble(_NO_ORDERS, problem)
            self._refused = problem
            return
        if self._control is None:
            self._services.holdings.busy_at = now
        self._tries, self._control, self.stale = 0, control, False
        self.changed()

    def wait(self, now: float) -> None:
        """Leave after the idle time-out if no orders could be read: waiting tasks need a worker that gets orders."""
        options, leaving = self._services.options, self._services.leaving
        waited, timeout = timedelta(seconds=now - self._services.holdings.busy_at), options.idle_time
        if not self._tries and waited >= ANSWER_WITHIN:
            self._services.say.trouble(_NO_ORDERS, self._refused)
        elif self._tries <= REFUSALS:
            return
        if timeout is not None and waited >= timeout and not options.wait_for_first:
            why = explain_briefly(self._refused)
            leaving.decide(f"its orders could not be read for {timeout.total_seconds():g} s: {why}", 3)

    # coverage

    def learn(self, experiment: str, then: Callable[[Exception | None], None] | None = None) -> None:
        """Read which tasks of an experiment the orders cover, once for all calls that wait for it.

        The worker reads one experiment after the other: a read may take a while, and the same few threads renew leases.
        """
        first = not self._learning
        waiting = self._learning.setdefault(experiment, [])
        if then is not None:
            waiting.append(then)
        if first:
            self._learn_next()

    def _learn_next(self) -> None:
        control, experiment = self._control or QueueControl(), next(iter(self._learning))
        self._services.offload.call(
            lambda: self._coverage.read(control, experiment),
            lambda _, problem: self._learnt(experiment, problem),
            awaited=True,
        )

    def _learnt(self, experiment: str, problem: Exception | None) -> None:
        if problem is not None:
            self._services.say.trouble(f"reading what was cancelled of {experiment}", problem)
        waiting = self._learning.pop(experiment)
        if self._learning:
            self._learn_next()
        for then in waiting:
            then(problem)
        if problem is None:
            self.changed()
