"""Everything that the parts of a worker share: its leases, its decision to leave, its services. Nothing here refers back to a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from runtime.clock import Clock
from runtime.end_reasons import EndReason
from runtime.errors import StoreBroken
from runtime.queues.base import Queue
from runtime.records.base import RecordStore
from runtime.shim.metrics import Reports
from runtime.snapshots.worker_code import CodeIdentity
from runtime.system import system
from runtime.tasks.history import History, Lease
from runtime.worker.attempts.pool import AttemptPool
from runtime.worker.attempts.scratch import METRICS
from runtime.worker.attempts.work_trees import WorkTrees
from runtime.worker.metrics import WorkerMetrics
from runtime.worker.options import WorkerOptions
from runtime.worker.slots import Slot
from runtime.worker.thread_calls import ThreadCalls
from runtime.worker.worker_log import WorkerLog

if TYPE_CHECKING:
    from runtime.shim.containers import Engine
    from runtime.worker.secrets import AttemptSecrets

_NO_HISTORY: Final = History()
_LOST: Final = float("-inf")


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease on its way through the worker, with the state of its attempt."""

    lease: Lease
    history: History = _NO_HISTORY
    taken_at: float = 0.0
    confirmed_at: float = _LOST
    """Boot time from which the lease holds for its whole length."""
    slot: int = -1
    sent: bool = False
    announced: bool = False
    """The store knows that the attempt starts."""
    stop_reason: EndReason | None = None
    log_url: str | None = None
    logged_bytes: int = 0
    """Bytes of the attempt's log that are in the store."""
    logged_at: float = 0.0
    crowded: bool = False
    """Another attempt ran beside this one."""
    apart: bool = False
    """The task is a suspect, and no other suspect has run beside it."""
    fenced: bool = False
    runs_since: float = 0.0
    """When the attempt was first seen to run."""
    output_dir: str = ""
    environment: str = ""
    """The folder of the task's environment; empty for the worker's own."""
    engine: Engine | None = None
    """The engine that runs the task's container; None without a container."""
    reports: Reports | None = None
    """The attempt's reports, once it has made any."""
    left_out: str | None = None
    """The parts that are not in the attempt's artifacts and why, for people to read."""
    secrets: Mapping[str, str] | None = field(default=None, repr=False)
    """Values by variable that the attempt gets."""


class HeldLeases:
    """The leases by token. Times of confirmation are boot time, so a machine that was suspended finds its leases lost."""

    def __init__(self, ttl: timedelta, clock: Clock) -> None:
        self.by_token: dict[str, HeldLease] = {}
        self.running: list[str] = []
        """Tokens of the attempts that run, one for each busy slot."""
        self.on_trial: dict[str, float] = {}
        """By token: the start of each suspect that has not ended."""
        self.proven: set[str] = set()
        """Tokens of running attempts that ran long or made progress, and that is noted."""
        self.length_s = ttl.total_seconds()
        self.clock = clock
        self.declined: dict[str, str] = {}
        """By task: why this worker cannot hold the task."""
        self.taken = 0
        """Tasks taken in all, less the tasks that went back unstarted."""
        self.busy_at = system.monotonic()
        """The last time with something to do."""

    def take(self, lease: Lease, now: float, confirmed_at: float) -> HeldLease:
        held = self.by_token[lease.token] = HeldLease(lease, taken_at=now, confirmed_at=confirmed_at)
        return held

    def drop(self, token: str) -> None:
        """Hold this lease no longer; harmless if it is not held."""
        self.by_token.pop(token, None)
        self.on_trial.pop(token, None)
        self.proven.discard(token)

    def confirm(self, leases: Sequence[Lease], lost: Sequence[Lease], asked_at: float) -> None:
        """Note a renewal's answer; renewed leases hold for their whole length from when it was asked for, not answered."""
        gone = {lease.token for lease in lost}
        for lease in leases:
            held = self.by_token.get(lease.token)
            if held is not None and held.confirmed_at != _LOST:
                held.confirmed_at = _LOST if lease.token in gone else asked_at

    def holds(self, held: HeldLease) -> bool:
        """Return whether the lease was confirmed within its length; if not, it counts as lost."""
        return self.clock.boottime() - held.confirmed_at < self.length_s

    def snapshots(self, *, besides: HeldLease | None = None) -> set[str]:
        """Return the snapshots that held tasks are bound to."""
        named = (held.lease.task.snapshot for held in self.by_token.values() if held is not besides)
        return {snapshot for snapshot in named if snapshot is not None}


class LeaveDecision:
    """The decision to leave: the first reason counts, with its exit code."""

    def __init__(self, say: WorkerLog) -> None:
        self._say = say
        self.reason: str | None = None
        """Why the worker leaves; None while it serves."""
        self.exit_code = 0
        self.asked = 0
        """How often somebody asked the worker to stop. A notice and the signal that follows from it are one request."""
        self._signals = self._notices = 0
        self.wake_up = system.wake_up()
        """It rings when somebody asks, which anybody who knows the worker may do, also after its end."""

    def ask(self, reason: str, exit_code: int = 0, *, notice: bool = False) -> None:
        """Ask the worker to leave, and wake it; safe from a signal handler and from any thread."""
        # The shim of a job, or the machine's shutdown, sends TERM for the same notice, before or after this worker sees it.
        if notice:
            self._notices = 1
        else:
            self._signals += 1
        self.asked = max(self._signals, self._notices)
        self.decide(reason, exit_code)
        self.wake_up.ring()

    def decide(self, reason: str, exit_code: int = 0) -> None:
        if self.reason is None:
            self.exit_code = exit_code
            self.reason = reason

    def trouble(self, what: str, problem: Exception | None) -> None:
        """Report a failed call that the worker will repeat; leave if repeating cannot help."""
        self._say.trouble(what, problem)
        if isinstance(problem, StoreBroken):
            self.decide(problem.message, problem.exit_code)


@dataclass(slots=True, kw_only=True)
class WorkerContext:
    name: str
    options: WorkerOptions
    machine: str
    slots: tuple[Slot, ...]
    queue: Queue
    queue_fd: int | None
    """The queue's wake-up descriptor; None if the queue does not wake its workers."""
    records: RecordStore
    clock: Clock
    say: WorkerLog
    metrics: WorkerMetrics
    offload: ThreadCalls
    leaving: LeaveDecision
    holdings: HeldLeases
    pool: AttemptPool
    scratch: str
    trees: WorkTrees
    code: CodeIdentity
    secrets: AttemptSecrets | None
    """None if the stack grants its workers none."""
    local: bool
    """Whether the queue and the records lie on this machine: calls are made at once, on the loop's thread."""

    def reports_path(self, token: str) -> str:
        """The file to which an attempt adds its reports."""
        return f"{self.scratch}/{token}{METRICS}"
