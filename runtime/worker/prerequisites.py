"""Prerequisites of a task on this machine, each made once for all tasks that wait for it: an environment, a container's image.

Making it may take minutes and happens on threads of its own; the leases of the tasks that wait are renewed meanwhile, and no
time limit runs. What this machine cannot make for a reason of its own (no such program, a full disk, no network) buries no
task: the task goes back to the queue for other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Generic, TypeVar

from runtime.end_reasons import EndReason
from runtime.errors import RequestRefused
from runtime.shim.common import SetupFailed
from runtime.system import system
from runtime.worker.attempts.child_handle import LOG_TAIL_BYTES
from runtime.worker.attempts.model import AttemptEnd
from runtime.worker.thread_calls import ThreadCalls
from runtime.worker.worker_context import HeldLease, WorkerContext

AT_ONCE: Final = 4
"""Things that are made at a time."""
CANNOT_FOR_S: Final = 60.0
"""Time after which this machine tries again to make a prerequisite that failed."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class MakingFailed(Exception):
    """It cannot be made, for the problem; `said` was printed meanwhile."""

    def __init__(self, problem: SetupFailed, said: str) -> None:
        self.problem, self.said = problem, said
        super().__init__(str(problem))


@dataclass(slots=True)
class WaitingLeases:
    waiting: list[HeldLease] = field(default_factory=list)


class Prerequisites(Generic[K, T]):
    """The things of one kind, each by its key."""

    fresh_s: float
    """Time for which a thing counts as made without a further look."""
    kind: str
    """Begins the reason for which a task is given back."""

    def __init__(
        self,
        services: WorkerContext,
        then: Callable[[HeldLease], None],
        decline: Callable[[HeldLease, str, timedelta], None],
        conclude: Callable[[AttemptEnd], None],
        calls: ThreadCalls | None = None,
    ) -> None:
        """`then` gets tasks that have all they need, `decline` those for other workers, `conclude` the ends of the others."""
        self.services = services
        self._then, self._decline, self._conclude = then, decline, conclude
        self.calls = calls or ThreadCalls(inline=False, threads=AT_ONCE)
        self._made: dict[K, tuple[T, float]] = {}
        """With the time when it was made."""
        self._cannot: dict[K, tuple[str, float]] = {}
        """Why this machine cannot make it, and until when that counts."""
        self._wanted: dict[K, WaitingLeases] = {}

    # for each kind

    def make(self, key: K, gives_up: Callable[[], bool]) -> None:
        """Begin to make it; the end is told to `answer`. `gives_up` may be asked on any thread."""
        raise NotImplementedError

    def give(self, held: HeldLease, made: T) -> None:
        """Have a task use the prerequisite."""
        raise NotImplementedError

    def is_there(self, made: T) -> bool:
        """Whether the prerequisite is still there, as far as a short look shows."""
        return True

    def name(self, key: K) -> str:
        """Return the words that begin the message of a task that fails for it."""
        raise NotImplementedError

    # tasks

    def take(self, held: HeldLease, key: K) -> None:
        """Pass the task on once its prerequisite is here."""
        made, made_at = self._made.get(key, (None, 0.0))
        why, until = self._cannot.get(key, ("", 0.0))
        now = system.monotonic()
        if made is not None and now - made_at < self.fresh_s and self.is_there(made):
            self.give(held, made)
            self._then(held)
        elif now < until:
            self._decline(held, why, timedelta(seconds=CANNOT_FOR_S))
        elif key in self._wanted:
            self._wanted[key].waiting.append(held)
        else:
            wanted = self._wanted[key] = WaitingLeases([held])
            self.make(key, lambda: self._is_unwanted(wanted))

    def close(self) -> None:
        """Wait for the threads, which give up once the worker leaves."""
        self.calls.close()

    def _is_unwanted(self, wanted: WaitingLeases) -> bool:
        """Whether no task waits for it any more. Called on a thread that makes it."""
        by_token = self.services.holdings.by_token
        leaving = self.services.leaving.reason is not None
        return leaving or not any(held.lease.token in by_token for held in list(wanted.waiting))

    def answer(self, key: K, made: T | None, problem: Exception | None, said: str = "") -> None:
        """Pass on, give back or end the tasks that wait; `said` goes first in their logs."""
        waiting = [
            held for held in self._wanted.pop(key).waiting if held.lease.token in self.services.holdings.by_token
        ]
        if made is not None:
            self._made[key] = made, system.monotonic()
            for held in waiting:
                self.give(held, made)
                if said:
                    self._log(held, said)
                else:
                    self._then(held)
            return
        told = problem.problem if isinstance(problem, MakingFailed) else problem
        if self.is_given_up(told):
            # Tasks that came while it was given up still want it.
            if self.services.leaving.reason is None:
                for held in waiting:
                    self.take(held, key)
        elif self.is_of_the_machine(told):
            why = f"{self.kind}{told}"
            now = system.monotonic()
            self._cannot = {each: known for each, known in self._cannot.items() if now < known[1]}
            self._cannot[key] = why, now + CANNOT_FOR_S
            for held in waiting:
                self._decline(held, why, timedelta(seconds=CANNOT_FOR_S))
        else:
            self._fail(key, waiting, told, problem.said if isinstance(problem, MakingFailed) else "")

    def is_given_up(self, problem: Exception | None) -> bool:
        raise NotImplementedError

    def is_of_the_machine(self, problem: Exception | None) -> bool:
        """Whether another machine may be able to make it."""
        raise NotImplementedError

    def _fail(self, key: K, waiting: list[HeldLease], problem: Exception | None, said: str) -> None:
        reason = EndReason.CONFIG_INVALID if isinstance(problem, RequestRefused) else EndReason.SETUP_FAILED
        if isinstance(problem, SetupFailed):
            reason = EndReason(problem.reason)
        now, log = self.services.clock.now().timestamp(), said.encode(errors="replace")
        for held in waiting:
            self._conclude(
                AttemptEnd(
                    held.lease.token,
                    -1,
                    reason,
                    now,
                    now,
                    message=f"{self.name(key)}: {problem}",
                    log=log[-LOG_TAIL_BYTES:],
                    log_bytes=len(log),
                    undrained=log,
                )
            )

    def _log(self, held: HeldLease, said: str) -> None:
        """Begin the attempt's log with the output so far, and then pass the task on."""
        services, task, token = self.services, held.lease.task.id, held.lease.token
        data = said.encode(errors="replace")
        held.logged_bytes = len(data)

        def written(url: str | None, problem: Exception | None) -> None:
            held.log_url = url or held.log_url
            if problem is not None:
                services.say.trouble("writing a log", problem)
            if held.lease.token in services.holdings.by_token:
                self._then(held)

        services.offload.call(lambda: services.records.append_log(task, token, data), written)
