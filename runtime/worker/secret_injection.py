"""The last step before a task's start: the secrets that its attempt gets.

Nothing here waits. A task whose secrets have to be read stands aside, and after a moment it takes no room from tasks that
need none. What cannot be read buries no task: the task goes back to the queue, and the worker looks for other tasks less
and less often, so that a worker that lacks the right leaves the queue to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from runtime.end_reasons import EndReason
from runtime.errors import NotPossible, RuntimeFailure, may_pass
from runtime.stack.secret_selection import NotGranted
from runtime.system import system
from runtime.tasks.retry_policy import backoff, unstarted
from runtime.worker.dispatch import Dispatch
from runtime.worker.pending_settlements import PendingSettlements
from runtime.worker.worker_context import HeldLease, WorkerContext

if TYPE_CHECKING:
    from runtime.worker.secrets import AttemptSecrets, Values

PATIENT_S: Final = 1.0
"""How long tasks that wait for a call take room. After it, tasks that need the same secrets are given back at once."""
LONGEST_BRAKE_S: Final = 30.0
"""The longest pause between two leases of a worker that may not read a secret."""
LONGEST_PAUSE_S: Final = 0.25
"""The same while the service is away, for every worker alike: tasks behind, which need no secret, have to get their turn."""
LONGEST_WAIT: Final = timedelta(minutes=1)
"""The longest time for which a task is given back."""


@dataclass(slots=True)
class _Fetch:
    began: float
    waiting: list[HeldLease] = field(default_factory=list)


class SecretInjection:
    def __init__(
        self,
        services: WorkerContext,
        outbox: PendingSettlements,
        dispatch: Dispatch,
        decline: Callable[[HeldLease, str, timedelta], None],
    ) -> None:
        """`decline` gives a task back for other workers."""
        self._services = services
        self._outbox = outbox
        self._dispatch = dispatch
        self._decline = decline
        self._fetches: dict[tuple[str, ...], _Fetch] = {}
        self._lacked = 0
        """Times in a row that tasks were given back for their secrets."""
        self.slow_until = 0.0
        """The worker leases nothing before."""
        self._in_vain: tuple[float, RuntimeFailure] | None = None
        """Since when tasks came only to be given back for their secrets, and why."""

    def inject(self, held: HeldLease) -> None:
        """Line the task up, with its secrets once they are here."""
        secrets, named = self._services.secrets, held.lease.task.secrets
        if secrets is None:
            if named:
                self._release([held], NotPossible("the task names secrets, and this worker's queue gives none"))
            else:
                self._dispatch.line_up(held)
            return
        names = secrets.choose(named)
        if not names:
            self._line_up(held, None)
            return
        found = secrets.find(names)
        if found is None:
            self._wait(held, names, secrets)
        else:
            self._conclude([held], found)

    def count_aside(self) -> int:
        """Count the tasks that wait for a slow call and take no room."""
        if not self._fetches:
            return 0
        now, by_token = system.monotonic(), self._services.holdings.by_token
        slow = [fetch for fetch in self._fetches.values() if now - fetch.began > PATIENT_S]
        # A task that was dropped meanwhile is not held: it takes no room anyway.
        return sum(held.lease.token in by_token for fetch in slow for held in fetch.waiting)

    def leave_if_in_vain(self, now: float) -> None:
        """Leave after the idle time-out if in all that time no task could start, for its secrets."""
        if self._in_vain is None:
            return
        services, timeout = self._services, self._services.options.idle_time
        if timeout is None:
            return
        since, problem = self._in_vain
        if services.holdings.running:
            self._in_vain = now, problem
        elif now - since >= timeout.total_seconds():
            why = f"no secret of its tasks could be read for {timeout.total_seconds():g} s: {problem.message}"
            services.leaving.decide(why, problem.exit_code)

    def _wait(self, held: HeldLease, names: tuple[str, ...], secrets: AttemptSecrets) -> None:
        now = system.monotonic()
        fetch = self._fetches.get(names)
        if fetch is None:
            self._fetches[names] = _Fetch(now, [held])
            secrets.fetch(names, partial(self._fetched, names))
        elif now - fetch.began <= PATIENT_S:
            fetch.waiting.append(held)
        else:
            self._brake(LONGEST_PAUSE_S)
            self._decline(held, "its secrets cannot be read now: the service does not answer", LONGEST_WAIT)

    def _fetched(self, names: tuple[str, ...], found: Values | RuntimeFailure) -> None:
        by_token = self._services.holdings.by_token
        self._conclude([held for held in self._fetches.pop(names).waiting if held.lease.token in by_token], found)

    def _conclude(self, tasks: Sequence[HeldLease], found: Values | RuntimeFailure) -> None:
        if isinstance(found, NotGranted):
            for held in tasks:
                self._fail(held, found)
        elif isinstance(found, RuntimeFailure):
            self._release(tasks, found)
        else:
            for held in tasks:
                self._line_up(held, found)

    def _line_up(self, held: HeldLease, values: Values | None) -> None:
        self._lacked, self._in_vain = 0, None
        self._services.holdings.declined.pop(held.lease.task.id, None)
        held.secrets = values
        self._dispatch.line_up(held)

    def _release(self, tasks: Sequence[HeldLease], problem: RuntimeFailure) -> None:
        """Give tasks back without spending anything: the service is away, or this worker may not read the secrets."""
        if tasks:
            self._services.say.trouble("secrets for attempts", problem)
            self._brake(LONGEST_PAUSE_S if may_pass(problem) else LONGEST_BRAKE_S)
            self._in_vain = self._in_vain or (system.monotonic(), problem)
        for held in tasks:
            self._decline(held, problem.message, LONGEST_WAIT)

    def _fail(self, held: HeldLease, problem: NotGranted) -> None:
        """Record the failure of a task that asks for what its stack does not give."""
        settlement = unstarted(
            held.lease,
            EndReason.CONFIG_INVALID,
            "; ".join((problem.message, *problem.facts)),
            worker=self._services.name,
            now=self._services.clock.now(),
            attempts=len(held.history.ended),
        )
        self._outbox.end_unstarted(held, settlement)

    def _brake(self, longest_s: float) -> None:
        now = system.monotonic()
        if now >= self.slow_until:
            self._lacked += 1
            self.slow_until = now + min(longest_s, backoff(self._lacked).total_seconds())
