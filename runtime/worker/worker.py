"""The worker: lease, run, settle, repeat; it drains when asked and loses nothing when killed.

One loop on one thread. It never waits on a task, which runs in a child of the guardian, nor on a network: calls to a
remote queue or store are made by a few threads that hand their results back to the loop. What an end means is decided
in `verdict`; here it is acted upon.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from runtime import faults
from runtime.clock import Clock, SystemClock, machine_id
from runtime.config import load_project
from runtime.errors import InfrastructureFailure, RequestRefused, StoreBroken, explain_briefly, explain_json
from runtime.queues.base import DEFAULT_LEASE, Outlook, Queue, Settled
from runtime.reasons import EndReason
from runtime.records.base import KeptOutputs, WorkerSeen, calls_at_once
from runtime.records.coverage import Coverage
from runtime.records.orders import Control
from runtime.snapshots.identity import CodeIdentity
from runtime.tasks.history import EndedNote, History, Record, StartedMark
from runtime.tasks.lease import Lease, Release, Settlement
from runtime.tasks.model import CommandEntry, FunctionEntry, TaskState
from runtime.tasks.retry import ALONE_FOR, Again, backoff
from runtime.tasks.verdict import Drop, Settle, counts_against_worker, judge_end, judge_history, unstarted
from runtime.tasks.wire import encode_task
from runtime.units import format_size
from runtime.values import dataclass, field, replace
from runtime.worker.attempts import fence
from runtime.worker.attempts.model import Ended, Order, PoolSettings
from runtime.worker.attempts.pool import AttemptPool
from runtime.worker.attempts.scratch import open_root, remove_leftovers
from runtime.worker.attempts.trees import Trees
from runtime.worker.handover import Handed, Outgoing, failed_instead, hand_over, may_pass
from runtime.worker.lease_clock import Heartbeat
from runtime.worker.metrics import NoMetrics, WorkerMetrics, open_metrics
from runtime.worker.offload import Offload, Outcome
from runtime.worker.reporter import Reporter
from runtime.worker.signals import SignalReader
from runtime.worker.slots import Slot, fits, plan_slots, read_machine

if TYPE_CHECKING:
    from runtime.worker.notices import Notice

TEND_EVERY_S: Final = 0.8
CONTROL_EVERY_S: Final = 10.0
ANSWER_WITHIN: Final = timedelta(seconds=30)
"""After this long without an answer a worker says that it waits for its first orders."""
SEEN_EVERY_S: Final = 30.0
SEEN_AFTER_CHANGE_S: Final = 2.0
LOG_EVERY_S: Final = 1.0
LOG_LIMIT_BYTES: Final = 1 << 30
"""Of a longer log the store gets its beginning, and in the end its last 64 KiB."""
REMOTE_LOG_EVERY_S: Final = 15.0
DUE_SOON: Final = timedelta(seconds=60)
"""A delayed task due within this keeps an idle worker."""
LOOK_AHEAD_S: Final = 1.0
ALONE_PATIENCE_S: Final = 60.0
"""How long a suspect waits here until nothing else runs; then it gets the next slot, beside whatever else runs."""
REFUSALS: Final = 2
"""A record that its store refused alone so often is refused for a reason of its own, whatever the store calls it."""
STUCK_AT_MOST: Final = 3
"""With so many that are stuck it is the store, and nothing more is begun until it takes one."""
LINGER_S: Final = 0.0005
"""A pause of the loop before it looks what has ended, so that it goes round once for many and not for each."""
LINGER_BELOW_S: Final = 0.001
"""Only for tasks that are quicker than this,"""
LINGER_WITH: Final = 8
"""and while each slot has more orders than this, so that none becomes idle meanwhile."""
SETTLES_AT_ONCE: Final = 2
"""What ends while this many calls to settle are under way waits for the next, which takes all of it together."""
SETTLING_HANGS_S: Final = 1.0
"""When the last of them has taken this long, one more may begin,"""
SETTLES_AT_MOST: Final = 8
"""up to this many."""
LONGEST_PAUSE_S: Final = 60.0
"""Between two tasks of a worker that has succeeded before, while one task after the other fails."""
LONGEST_LOOK_AHEAD: Final = 128
"""Tasks held beyond the free slots: at most a second's worth of recent task time, and at most so many."""
PIPELINE_BELOW_S: Final = 0.05
"""Tasks quicker than this are handed to a warm child several at a time."""

EntryKind = Literal["workflow", "command", "function"]
ENTRY_KINDS: Final[tuple[EntryKind, ...]] = ("workflow", "command", "function")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    slots: int | Literal["auto"] = 1
    gpus_per_slot: float = 0
    idle_timeout: timedelta | None = None
    """Leave after so long without work; None stays."""
    wait_for_first: bool = False
    """Do not leave for idleness before the first task came."""
    max_tasks: int | None = None
    max_consecutive_failures: int = 3
    """Distinct tasks that fail in a row, before any has succeeded, until the worker leaves with exit code 1; 0 never does."""
    lease: timedelta = DEFAULT_LEASE
    grace: timedelta = timedelta(seconds=30)
    """Between asking attempts to stop and killing them."""
    reuse_process: bool = False
    accept: frozenset[EntryKind] = frozenset(ENTRY_KINDS)
    labels: Mapping[str, str] = field(default_factory=dict)
    look_ahead: int | None = None
    """Tasks held beyond the free slots; None derives it from how long they take."""
    name: str | None = None
    metrics_address: tuple[str, int] | None = None
    owns_process: bool = False
    """The process has no business but this worker, as under `runtime worker`: orphans that fall to it are ended, and
    notices and signals are its own."""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What a worker did until it left."""

    exit_code: int
    succeeded: int
    failed: int
    released: int
    reason: str


def new_worker_name() -> str:
    """`w-` and what makes it unique in the world and sortable by host."""
    host = "".join(c for c in socket.gethostname().lower() if c.isalnum() or c == "-")[:24].strip("-") or "host"
    return f"w-{host}-{os.urandom(4).hex()}"


_NO_ORDERS: Final = "takes no tasks until it has read its orders"
STARTER: Final = "the process that starts attempts"
"""What dies when an attempt is lost and its worker is not."""
_NO_HISTORY: Final = History()
_KILLED: Final = frozenset(
    {EndReason.TIMEOUT, EndReason.OOM, EndReason.LOST, EndReason.PREEMPTED, EndReason.CANCELLED, EndReason.DUPLICATE}
)
"""Ends after which nobody has tidied the attempt's tree."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """A lease on its way through the worker."""

    lease: Lease
    history: History = _NO_HISTORY
    taken_at: float = 0.0
    slot: int = -1
    sent: bool = False
    announced: bool = False
    """The store was told that it starts."""
    stop_reason: EndReason | None = None
    log_url: str | None = None
    logged_bytes: int = 0
    """What of its log is in the store."""
    logged_at: float = 0.0
    crowded: bool = False
    """Another attempt ran beside it."""
    apart: bool = False
    """A suspect, and no other has run beside it."""
    fenced: bool = False
    output_dir: str = ""


@dataclass(slots=True)
class _Stuck:
    """What its service refuses, and may have refused for a reason of its own."""

    ended: Settlement | Release
    announced: bool
    handed: int
    """What had been settled before; once it is more, the service takes others."""
    times: int = 0


@dataclass(slots=True)
class _Due:
    """When each recurring duty comes up next, in seconds of `time.monotonic`."""

    tend: float = 0.0
    renew: float = 0.0
    control: float = 0.0
    seen: float = 0.0
    logs: float = 0.0
    poll: float = 0.0


class Worker:
    def __init__(
        self,
        queue: Queue,
        options: WorkerOptions | None = None,
        *,
        clock: Clock | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.queue = queue
        self.records = queue.records
        self.options = options or WorkerOptions()
        self.name = self.options.name or new_worker_name()
        self._clock: Clock = clock or SystemClock()
        self._say = reporter or Reporter.for_stderr()
        self._slots: tuple[Slot, ...] = plan_slots(
            read_machine(os.environ), self.options.slots, self.options.gpus_per_slot
        )
        self._environments = [slot.environment() for slot in self._slots]
        self._selector = selectors.DefaultSelector()
        self._heartbeat = Heartbeat(self.options.lease, self._clock)
        self._attempts: dict[str, _Attempt] = {}
        """All that is held, by token."""
        self._unknown: list[_Attempt] = []
        """What is to be read of their past first."""
        self._ready: deque[_Attempt] = deque()
        """Prepared and not given to a slot."""
        self._apart: deque[_Attempt] = deque()
        """Suspects among those, which wait for a free moment."""
        self._waits_since: dict[str, float] = {}
        """By task: since when a suspect has waited, over all its leases here."""
        self._on_trial: dict[str, float] = {}
        """By token: when a suspect was started that has not ended."""
        self._trust = 1
        """Suspects that may run at a time: one more with each that succeeds, one again after a loss."""
        self._announcing = [0] * len(self._slots)
        """By slot: attempts that start as soon as the store knows."""
        self._settlements: list[Settlement] = []
        self._to_say: dict[str, Callable[[], None]] = {}
        """By token: what is said of an end once it is recorded."""
        self._releases: list[Release] = []
        self._awaited: dict[str, list[_Attempt]] = {}
        """By snapshot: attempts that wait until it is here."""
        self._retractions: list[Lease] = []
        """Announced, and did not start after all."""
        self._stuck: dict[str, _Stuck] = {}
        """By token: refused alone by a service that did not say that again may help."""
        self._stuck_at = float("inf")
        """When they are handed over next."""
        self._handed = 0
        """Settled in all."""
        self._unstartable: dict[str, tuple[int, int]] = {}
        """By task: how often the service refused what comes before its start, and what had been settled at the first."""
        self._retry_at = 0.0
        self._retries = 0
        self._settling = 0
        """Calls under way that settle."""
        self._settling_since = 0.0
        """When the last of them began."""
        self._busy_io = 0
        self._leasing = False
        self._claiming = 0
        """Leases asked for and not had."""
        self._due = _Due()
        self._counters: dict[str, dict[TaskState, int]] = {}
        self._declines: dict[str, int] = {}
        self._declined: dict[str, str] = {}
        self._failed_tasks: list[str] = []
        self._pause_until = 0.0
        self._mean_s = float("inf")
        """What recent tasks took; unknown tasks are taken for long ones, so nothing is held ahead of them."""
        self._taken = 0
        self._succeeded = self._failed = self._released = 0
        self._started_at = self._clock.now()
        self._machine = machine_id()
        self._busy_at = time.monotonic()
        self._countdown_of = 0.0
        self._seen_any = False
        self._control: Control | None = None
        """What it is told; None until that was read once, and nothing is leased before."""
        self._orders_refused: Exception = TimeoutError("no answer yet")
        """Why there are none: what the last try came to."""
        self._orders_tried = 0
        """How often in a row they could not be read."""
        self._coverage = Coverage(self.records)
        self._learning: dict[str, list[_Attempt]] = {}
        """By experiment: what waits until it is known what the orders cover of it. The first is being asked for."""
        self._stopping: str | None = None
        """Why it leaves; None while it serves."""
        self._exit_code = 0
        self._kill_at = self._give_up_at = float("inf")
        """While it drains: when attempts are killed, and when it leaves without what cannot be recorded."""
        self._signals = 0
        self._signal_reader: SignalReader | None = None
        self._bell: int | None = None
        self._bell_on = False
        self._running: list[str] = []
        local = not queue.traits.remote and (self.records.holds_tasks or self.records.url.startswith("memory:"))
        self._offload = Offload(inline=local)
        at_once = calls_at_once(self.records)
        self._past = self._offload.lane(self._look_back, self._looked, at_once=at_once)
        self._word = self._offload.lane(self._announce, self._announced, at_once=at_once)
        self._count: WorkerMetrics = NoMetrics()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._local = local

    # life

    def run(self) -> WorkerResult:
        """Serve until told to leave. Raises what makes it impossible to begin; afterwards only reports."""
        self.records.check()
        self._count = open_metrics(self.options.metrics_address, queue=self.queue.name)
        self._count.set_slots(len(self._slots))
        life_fds = self.queue.join(self.name)
        self._scratch = open_root(self.name)
        self._crew = AttemptPool(
            selector=self._selector,
            slots=len(self._slots),
            settings=PoolSettings(
                reuse=self.options.reuse_process,
                hold_fds=(*life_fds, self._scratch.fd),
                adopt_orphans=self.options.owns_process,
                # As `python -m` would have it, also under the `runtime` script: the folder it is started in comes first.
                sys_path=[str(Path.cwd()), *sys.path] if self.options.owns_process else None,
            ),
        )
        self._crew.start()
        self._trees = Trees(self._scratch.path, self._crew.discard)
        self._code = CodeIdentity(Path.cwd(), load_project().workflow_packages)
        # Trees of dead workers may be large; nothing waits for their end.
        threading.Thread(target=remove_leftovers, name="leftovers", daemon=True).start()
        self._bell = self.queue.doorbell()
        if self._offload.fd is not None:
            self._selector.register(self._offload.fd, selectors.EVENT_READ, self._offload)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        with self._listen():
            self._say.started(self.name, self.queue.name, self._slots)
            if self._count.port is not None:
                self._say.serving_metrics(self._count.port)
            try:
                self._loop()
            finally:
                self._leave()
        if self._crew.failure is not None:
            raise self._crew.failure
        return WorkerResult(
            self._exit_code, self._succeeded, self._failed, self._released, self._stopping or "interrupted"
        )

    def stop(self, reason: str = "asked to stop", *, exit_code: int = 0) -> None:
        """Drain and leave; safe from a signal handler and from any thread. A second call kills what still runs."""
        self._signals += 1
        self._stop_by_itself(reason, exit_code)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            pass  # It is full of wake-ups already.

    def _loop(self) -> None:
        selector, crew = self._selector, self._crew
        drained = hurried = False
        ended: list[Ended] = []
        while True:
            now = time.monotonic()
            if self._stopping is not None and not drained:
                drained = True
                self._begin_drain(now)
            if drained and self._signals > 1 and not hurried:
                hurried = True
                self._kill_at = 0.0
            self._watch_bell()
            if self._may_linger(ended):
                time.sleep(LINGER_S)
            ended = []
            for key, _ in selector.select(self._patience(now)):
                if crew.owns(key):
                    ended += crew.ready(key)
                elif key.data is self._offload:
                    self._offload.collect()
                elif key.fd == self._bell:
                    if self.queue.hush():
                        self._due.tend = 0.0
                    self._due.poll = 0.0
                elif key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                elif key.data is self._signal_reader:
                    self._read_signals()
            now = time.monotonic()
            deadline = crew.next_deadline()
            if deadline is not None and now >= deadline:
                ended += crew.tick()
            if crew.failure is not None:
                self._stop_by_itself(crew.failure.message, crew.failure.exit_code)
            for end in ended:
                self._conclude(end, now)
            if self._settlements or self._releases:
                self._flush(now)
            if self._stuck:
                self._retry_stuck(now)
            self._say.tick()
            self._duties(now)
            if self._stopping is None:
                self._fetch(now)
                if self._unknown:
                    self._look_into()
                self._dispatch(now)
            elif self._finished(now):
                return
            self._note_running()

    def _may_linger(self, ended: Sequence[Ended]) -> bool:
        """Whether quick tasks end one after the other, and more will have soon. The embedded file's commits take longer."""
        return (
            not self._local
            and self._stopping is None
            and bool(ended)
            and self._mean_s < LINGER_BELOW_S
            and all(self._on_slot(slot.index) > LINGER_WITH for slot in self._slots)
        )

    def _patience(self, now: float) -> float:
        """Seconds the loop may sleep."""
        due = self._due
        until = min(due.tend, due.renew, due.control, due.seen)
        deadline = self._crew.next_deadline()
        if deadline is not None:
            until = min(until, deadline)
        if self._releases:
            until = min(until, self._retry_at)
        if self._settlements:
            until = min(until, self._settle_at())
        if self._stuck:
            until = min(until, self._stuck_at)
        if self._attempts:
            until = min(until, due.logs)
        unsaid = self._say.due_in()
        if unsaid is not None:
            until = min(until, now + unsaid)
        if self._stopping is not None:
            until = min(until, now + 0.5)
            if self._attempts:
                until = min(until, self._kill_at)
        else:
            fetch_at = self._fetch_at()
            if fetch_at is not None:
                until = min(until, fetch_at)
            if self._ready and self._pause_until > now:
                until = min(until, self._pause_until)
        return max(0.0, until - now)

    # leasing

    def _room(self) -> int:
        """How many more tasks to hold."""
        if self.options.max_tasks is not None:
            left = self.options.max_tasks - self._taken
        else:
            left = 1 << 30
        if self._control is None or self._control.paused:
            return 0
        # Suspects that wait stand in nobody's way.
        held = len(self._attempts) - len(self._apart)
        return min(left, len(self._slots) + self._look_ahead() - held) - self._claiming

    def _look_ahead(self) -> int:
        if self.options.look_ahead is not None:
            return self.options.look_ahead
        return min(LONGEST_LOOK_AHEAD, int(LOOK_AHEAD_S / max(self._mean_s, 1e-4))) * len(self._slots)

    def _fetch_at(self) -> float | None:
        """When to lease next; None while there is no room, an answer is awaited, or what ended must be recorded first."""
        if self._leasing or self._settlements or len(self._stuck) >= STUCK_AT_MOST or self._room() <= 0:
            return None
        return max(self._due.poll, self._pause_until)

    def _fetch(self, now: float) -> None:
        """Lease what there is room for, and leave for idleness."""
        most = self.options.max_tasks
        if most is not None and self._taken >= most and not (self._attempts or self._leasing or self._settlements):
            self._stop_by_itself(f"took {self._taken} task{'' if self._taken == 1 else 's'}")
            return
        if self._control is None:
            self._wait_for_orders(now)
            return
        at = self._fetch_at()
        if at is None or now < at:
            return
        room = self._room()
        self._leasing = True
        self._offload.call(lambda: self.queue.lease(room, worker=self.name, ttl=self.options.lease), self._fetched)

    def _wait_for_orders(self, now: float) -> None:
        """Leave as a worker that has nothing to do leaves; the tasks, if there are any, need a worker that can be told."""
        waited, timeout = timedelta(seconds=now - self._busy_at), self.options.idle_timeout
        if not self._orders_tried and waited >= ANSWER_WITHIN:
            self._say.trouble(_NO_ORDERS, self._orders_refused)
        elif self._orders_tried <= REFUSALS:
            return
        if timeout is not None and waited >= timeout and not self.options.wait_for_first:
            why = explain_briefly(self._orders_refused)
            self._stop_by_itself(f"its orders could not be read for {timeout.total_seconds():g} s: {why}", 3)

    def _fetched(self, leases: list[Lease] | None, problem: Exception | None) -> None:
        self._leasing = False
        now = time.monotonic()
        if problem is not None:
            self._trouble("leasing", problem)
            self._retries += 1
            self._due.poll = now + min(30.0, backoff(self._retries).total_seconds())
            return
        self._retries = 0
        if leases:
            self._due.poll = 0.0
            self._take(leases, now)
            return
        self._due.poll = now + self._idle_wait(now)

    def _idle_wait(self, now: float) -> float:
        """Nothing came: how long until the next look, and whether to leave."""
        try:
            outlook = self.queue.outlook()
        except Exception as problem:
            self._say.trouble("asking what is due", problem)
            outlook = Outlook()
        wait = 1.0 if self._bell is not None or self.queue.traits.remote else 0.05
        if outlook.next_due is not None:
            # What is due already and did not come, because the queue is paused, is no reason to spin.
            wait = min(wait, max(outlook.next_due.total_seconds(), 0.02) + 0.001)
        expected = outlook.suspect_leases or (outlook.next_due is not None and outlook.next_due < DUE_SOON)
        if self._attempts or expected or self._busy_io:
            self._busy_at = now
            return wait
        timeout = self.options.idle_timeout
        if timeout is None or (self.options.wait_for_first and not self._seen_any):
            return wait
        # This look found nothing and the one before the whole time-out did not either; whatever came in between
        # would have moved `_busy_at`.
        left = self._busy_at + timeout.total_seconds() - now
        if left <= 0:
            self._stop_by_itself(f"idle for {timeout.total_seconds():g} s")
        elif self._countdown_of != self._busy_at:
            self._countdown_of = self._busy_at
            self._say.idle(left)
        return min(wait, max(left, 0.0))

    def _take(self, leases: Sequence[Lease], now: float) -> None:
        self._seen_any = True
        self._busy_at = now
        self._taken += len(leases)
        began, attempts, ready = self._heartbeat.began, self._attempts, self._ready
        plain = self.options.accept == frozenset(ENTRY_KINDS) and not self._has_cancels()
        line = ready if self.queue.traits.tracks_holders else self._unknown
        for lease in leases:
            attempt = _Attempt(lease, taken_at=now)
            attempts[lease.token] = attempt
            began(lease.token)
            if self._stopping is not None:
                self._give_back(attempt)  # Asked for before.
            elif plain and not lease.tries and not lease.suspect and self._plain(lease):
                line.append(attempt)
            else:
                self._prepare(attempt)

    def _plain(self, lease: Lease) -> bool:
        """Nothing about the task needs a look before it starts."""
        task = lease.task
        resources = task.resources
        return (
            task.expires_at is None
            and (task.snapshot is None or task.snapshot in self._trees)
            and not resources.gpus
            and not resources.cpus
            and not resources.memory_bytes
            and lease.invalid is None
        )

    def _prepare(self, attempt: _Attempt) -> None:
        """Everything between a lease and its start: what the task asks for, and what its past says."""
        lease = attempt.lease
        now = self._clock.now()
        if self._is_cancelled(lease) is None:
            self._learn(lease.task.experiment, attempt)
            return
        settlement = self._refuse(lease, now)
        if settlement is not None:
            say = partial(self._say.unstarted, settlement.record, None if lease.invalid else lease.task)
            self._end(attempt, settlement, say)
            return
        why = self._cannot_hold(lease)
        if why is not None:
            self._decline(attempt, why, now)
            return
        if lease.tries or lease.suspect or not self.queue.traits.tracks_holders:
            self._unknown.append(attempt)
        else:
            self._set_up(attempt)

    def _refuse(self, lease: Lease, now: datetime) -> Settlement | None:
        """The record of a task that must not start."""
        task = lease.task
        if lease.invalid is not None:
            return unstarted(lease, EndReason.CONFIG_INVALID, lease.invalid.problem, worker=self.name, now=now)
        if task.expires_at is not None and task.expires_at <= now:
            message = f"expired at {task.expires_at:%Y-%m-%d %H:%M:%S} UTC before it was started"
            return unstarted(lease, EndReason.EXPIRED, message, worker=self.name, now=now)
        if self._is_cancelled(lease):
            return unstarted(lease, EndReason.CANCELLED, "cancelled before it was started", worker=self.name, now=now)
        return None

    def _has_cancels(self) -> bool:
        return self._control is not None and self._control.cancels

    def _is_cancelled(self, lease: Lease) -> bool | None:
        """Whether an order covers it; None while that has to be read first."""
        control = self._control
        return control is not None and self._coverage.covers(control, lease.task, lease.published_at)

    def _learn(self, experiment: str, attempt: _Attempt | None = None) -> None:
        """Read what the orders cover of an experiment, once for all attempts that wait for it.

        One experiment after the other: it may take a while, and leases are renewed by the same few threads.
        """
        first = not self._learning
        waiting = self._learning.setdefault(experiment, [])
        if attempt is not None:
            waiting.append(attempt)
        if first:
            self._learn_next()

    def _learn_next(self) -> None:
        control, experiment = self._control or Control(), next(iter(self._learning))
        self._busy_io += 1
        self._offload.call(
            lambda: self._coverage.read(control, experiment), lambda _, problem: self._learnt(experiment, problem)
        )

    def _learnt(self, experiment: str, problem: Exception | None) -> None:
        self._busy_io -= 1
        if problem is not None:
            self._say.trouble(f"reading what was cancelled of {experiment}", problem)
        waiting = self._learning.pop(experiment)
        if self._learning:
            self._learn_next()
        for attempt in waiting:
            if attempt.lease.token not in self._attempts:
                continue
            if problem is None and self._stopping is None:
                self._prepare(attempt)
            else:
                self._drop(attempt)
                self._releases.append(Release(attempt.lease, self._clock.now() + backoff(4) if problem else None))
        if problem is None:
            self._stop_cancelled()

    def _cannot_hold(self, lease: Lease) -> str | None:
        kind = _kind(lease)
        if kind not in self.options.accept:
            return f"this worker accepts no {kind} tasks"
        reasons = [fits(lease.task.resources, slot) for slot in self._slots]
        return None if None in reasons else reasons[0]

    def _decline(self, attempt: _Attempt, why: str, now: datetime) -> None:
        """Give it back for other workers, less and less often; said once."""
        task = attempt.lease.task
        times = self._declines[task.id] = self._declines.get(task.id, 2) + 1
        if task.id not in self._declined and len(self._declined) < 20:
            self._declined[task.id] = why
        self._count.task_declined()
        if times == 3:
            self._say.declined(task, why)
        self._taken -= 1
        self._drop(attempt)
        self._releases.append(Release(attempt.lease, now + backoff(times)))

    def _look_into(self) -> None:
        """Read what is on file of all that came in this round."""
        unknown, self._unknown = self._unknown, []
        self._busy_io += len(unknown)
        self._past(unknown)

    def _look_back(self, attempt: _Attempt) -> tuple[Record | None, History]:
        """What the store knows of earlier deliveries. Runs off the loop where the store is remote."""
        lease, task = attempt.lease, attempt.lease.task
        history = self.records.history(task.id, task.generation)
        if self.queue.traits.tracks_holders:
            record = self.records.find(task.id, task.generation) if not self.records.holds_tasks else None
            return record, replace(history, open=())
        if not (history.ended or history.open or lease.suspect):
            return None, history
        record = self.records.find(task.id, task.generation)
        if record is None:
            now = self._clock.now()
            for mark in history.open:
                # The lease is ours now, so whoever opened this lost it: a dead worker, or one cut off.
                note = EndedNote(
                    token=mark.token,
                    reason=EndReason.LOST,
                    ended_at=now,
                    started_at=mark.started_at,
                    worker=mark.worker,
                    message=f"worker {mark.worker} vanished",
                    alone=mark.alone,
                    machine=mark.machine,
                )
                self.records.note_ended(task, note)
                history = replace(history, ended=(*history.ended, note))
        return record, replace(history, open=())

    def _looked(self, outcomes: Sequence[Outcome[_Attempt, tuple[Record | None, History]]]) -> None:
        self._busy_io -= len(outcomes)
        now = self._clock.now()
        for attempt, found, problem in outcomes:
            if attempt.lease.token in self._attempts:
                self._go_by_past(attempt, found, problem, now)

    def _go_by_past(
        self,
        attempt: _Attempt,
        found: tuple[Record | None, History] | None,
        problem: Exception | None,
        now: datetime,
    ) -> None:
        lease = attempt.lease
        if problem is not None and self._is_its_own(lease.task.id, problem):
            self._fail_unstarted(attempt, problem)
            return
        if found is None:
            self._say.trouble(f"reading the history of {lease.task.id}", problem)
            self._drop(attempt)
            self._releases.append(Release(lease, now + backoff(4)))
            return
        record, attempt.history = found
        if record is not None:
            # Delivered again after it ended: settling it with the record that stands only ends the delivery.
            self._end(attempt, Settlement(lease, record))
            return
        if not attempt.history.ended:
            self._set_up(attempt)
            return
        buried = judge_history(lease.task, attempt.history, now=now)
        if isinstance(buried, Again):
            # A worker that vanished could not say so itself.
            lease.alone, attempt.fenced = lease.alone or buried.alone, buried.fenced
            if buried.not_before > now:
                self._postpone(attempt, buried.not_before)
                return
        else:
            attempts = len(attempt.history.ended)
            settlement = unstarted(lease, buried.reason, buried.message, worker=self.name, now=now, attempts=attempts)
            self._end(attempt, settlement, partial(self._say.buried, lease.task, buried))
            return
        self._set_up(attempt)

    def _set_up(self, attempt: _Attempt) -> None:
        """Have the code here that the task is bound to; a task that names none runs this worker's."""
        snapshot = attempt.lease.task.snapshot
        if snapshot is None or snapshot in self._trees:
            self._line_up(attempt)
            return
        waiting = self._awaited.setdefault(snapshot, [])
        waiting.append(attempt)
        if len(waiting) == 1:
            self._busy_io += 1
            self._offload.call(
                lambda: self._trees.fetch(snapshot, self.records),
                lambda folder, problem: self._was_set_up(snapshot, folder, problem),
            )

    def _was_set_up(self, snapshot: str, folder: str | None, problem: Exception | None) -> None:
        self._busy_io -= 1
        waiting = [each for each in self._awaited.pop(snapshot, ()) if each.lease.token in self._attempts]
        if folder is not None:
            self._trees.add(snapshot, folder, used=self._snapshots_held())
            for attempt in waiting:
                self._line_up(attempt)
            return
        reason = EndReason.CONFIG_INVALID if isinstance(problem, RequestRefused) else EndReason.SETUP_FAILED
        now = self._clock.now().timestamp()
        for attempt in waiting:
            message = f"snapshot {snapshot}: {problem}"
            self._conclude(Ended(attempt.lease.token, -1, reason, now, now, message=message), time.monotonic())

    def _line_up(self, attempt: _Attempt) -> None:
        """It may start; a suspect when its moment has come."""
        if not attempt.lease.alone:
            self._ready.append(attempt)
            return
        task_id = attempt.lease.task.id
        if task_id not in self._waits_since and len(self._waits_since) > 1_000:
            self._waits_since.clear()
        self._waits_since.setdefault(task_id, time.monotonic())
        if len(self._apart) < len(self._slots):
            self._apart.append(attempt)
        else:
            self._give_back(attempt)

    def _leave_line(self, attempt: _Attempt) -> bool:
        """Whether it had not been given to a slot."""
        for line in (self._ready, self._apart):
            if attempt in line:
                line.remove(attempt)
                return True
        return False

    # running

    def _dispatch(self, now: float) -> None:
        if now < self._pause_until:
            return
        if self._apart:
            self._dispatch_suspects(now)
        if not self._ready:
            return
        crew = self._crew
        # A suspect whose patience is over gets the slot that is free next, so none is filled ahead.
        one_each = bool(self._apart) and self._may_try(now) and self._has_waited(self._apart[0], now)
        for slot in self._slots:
            while self._ready:
                attempt = self._ready[0]
                depth = 1 if one_each else self._depth(attempt, slot.index)
                queued = self._on_slot(slot.index)
                if queued >= depth or crew.room(slot.index) <= self._announcing[slot.index]:
                    break
                if queued > depth // 2 and not self.queue.traits.tracks_holders:
                    break  # The store is told of many together.
                batch = [self._ready.popleft()]
                most = min(depth - queued, crew.room(slot.index) - self._announcing[slot.index])
                while self._ready and len(batch) < most and self._pipelines(self._ready[0]):
                    batch.append(self._ready.popleft())
                self._start(batch, slot)

    def _dispatch_suspects(self, now: float) -> None:
        """Start a suspect when nothing else runs or is ready, or once it has waited; with no more than it may have
        beside it. The line goes on all the while: others start beside it as they come."""
        while self._apart and self._may_try(now):
            attempt = self._apart[0]
            idle = [slot for slot in self._slots if not self._on_slot(slot.index)]
            others = len(self._slots) - len(idle) > len(self._on_trial)
            if not idle or ((others or self._ready) and not self._has_waited(attempt, now)):
                return
            self._apart.popleft()
            self._waits_since.pop(attempt.lease.task.id, None)
            attempt.apart = not self._tried(now)
            for token in self._on_trial:
                self._attempts[token].apart = False
            self._on_trial[attempt.lease.token] = now
            self._start([attempt], idle[0])

    def _may_try(self, now: float) -> bool:
        return len(self._tried(now)) < self._trust

    def _tried(self, now: float) -> list[str]:
        """The suspects that run and have not yet proved themselves."""
        return [token for token, began in self._on_trial.items() if now - began < ALONE_FOR.total_seconds()]

    def _has_waited(self, attempt: _Attempt, now: float) -> bool:
        return now - self._waits_since.get(attempt.lease.task.id, now) >= ALONE_PATIENCE_S

    def _pipelines(self, attempt: _Attempt) -> bool:
        return not attempt.lease.suspect

    def _depth(self, attempt: _Attempt, slot: int) -> int:
        """How many orders a slot may hold: more than one only for quick tasks on warm children."""
        if not self.options.reuse_process or self._mean_s >= PIPELINE_BELOW_S or not self._pipelines(attempt):
            return 1
        return 1 + min(self._look_ahead(), 32)

    def _start(self, batch: list[_Attempt], slot: Slot) -> None:
        """Where the queue does not know what its workers run, the store is told first.

        Not earlier: whoever has a mark and no end when a worker dies is held to have run, and may be buried for it.
        """
        if self.queue.traits.tracks_holders:
            self._send(batch, slot)
            return
        for attempt in batch:
            attempt.slot, attempt.sent, attempt.announced = slot.index, True, True
        self._announcing[slot.index] += len(batch)
        self._busy_io += len(batch)
        self._word(batch)

    def _announce(self, attempt: _Attempt) -> None:
        lease, alone = attempt.lease, len(self._slots) == 1 or attempt.apart
        mark = StartedMark(lease.token, self.name, self._clock.now(), alone, self._machine)
        self.records.note_started(lease.task, mark)

    def _announced(self, outcomes: Sequence[Outcome[_Attempt, None]]) -> None:
        self._busy_io -= len(outcomes)
        going: dict[int, list[_Attempt]] = {}
        now = self._clock.now()
        for attempt, _, problem in outcomes:
            lease = attempt.lease
            self._announcing[attempt.slot] -= 1
            if lease.token not in self._attempts:
                continue
            refusal = self._refuse(lease, now)
            if refusal is not None:
                self._end(attempt, refusal, partial(self._say.unstarted, refusal.record, lease.task))
            elif problem is not None and self._is_its_own(lease.task.id, problem):
                self._fail_unstarted(attempt, problem)
            elif problem is None and self._stopping is None and attempt.stop_reason is None:
                going.setdefault(attempt.slot, []).append(attempt)
            else:
                # Others come first then, which shows whether it is this one that is refused.
                self._give_back(attempt, backoff(4) if problem is not None else timedelta())
        away = [problem for _, _, problem in outcomes if isinstance(problem, InfrastructureFailure)]
        if away:
            self._say.trouble("saying what starts", away[0])
            self._pause_until = max(self._pause_until, time.monotonic() + backoff(2).total_seconds())
        for slot, batch in going.items():
            self._send(batch, self._slots[slot])

    def _is_its_own(self, task_id: str, problem: Exception) -> bool:
        """Whether a refusal before its start is about the task: others are taken, and this one again and again is not."""
        if not isinstance(problem, InfrastructureFailure):
            return True
        if problem.retryable:
            return False
        if len(self._unstartable) > 1_000:
            self._unstartable.clear()
        times, handed = self._unstartable.get(task_id, (0, self._handed))
        self._unstartable[task_id] = times + 1, handed
        return times >= REFUSALS and self._handed > handed

    def _fail_unstarted(self, attempt: _Attempt, problem: Exception) -> None:
        """Something about this task alone keeps it from being started, and again would not help."""
        lease = attempt.lease
        settlement = failed_instead(
            Release(lease), problem, "it could not be started", worker=self.name, now=self._clock.now()
        )
        self._end(attempt, settlement, partial(self._say.unrecorded, settlement.record, lease.task))

    def _on_slot(self, slot: int) -> int:
        """Orders that the slot has or is about to get."""
        return len(self._crew.outstanding(slot)) + self._announcing[slot]

    def _send(self, batch: list[_Attempt], slot: Slot) -> None:
        orders = []
        environment = self._environments[slot.index]
        others = any(self._on_slot(other.index) for other in self._slots if other.index != slot.index)
        for attempt in batch:
            lease = attempt.lease
            task = lease.task
            attempt.slot, attempt.sent, attempt.crowded = slot.index, True, others
            order = Order(
                token=lease.token,
                body=lease.body or encode_task(task),
                task_id=task.id,
                generation=task.generation,
                attempt=len(attempt.history.ended) + 1,
                experiment=task.experiment,
                env=environment,
                scratch_root=self._scratch.path,
            )
            if attempt.fenced:
                order.env = {**environment, fence.VARIABLE: str(os.getpid())}
            if task.timeout is not None:
                order.timeout_s = task.timeout.total_seconds()
            if task.resources.memory_bytes:
                order.memory_bytes = task.resources.memory_bytes
            if task.snapshot is not None:
                order.code_dir, order.snapshot = self._trees.place(task.snapshot, slot.index), task.snapshot
                order.cwd = f"{order.code_dir}/{task.folder}" if task.folder else None
            else:
                self._code.begin(task.entry)
            attempt.output_dir = order.output_dir = self._output_dir(task.id, lease.token)
            order.checkpoint_dir = self.records.checkpoints_path(task.id) or ""
            orders.append(order)
            if self._count.port is not None:
                since = task.not_before or task.submitted_at
                self._count.attempt_started(None if since is None else self._clock.now() - since)
            if not isinstance(task.entry, FunctionEntry):
                self._say.began(task, slot.index, order.attempt)
        if others:
            for token, _ in filter(None, (self._crew.running(other.index) for other in self._slots)):
                self._attempts[token].crowded = True
        # First, because a crasher may take this process with it before the next line.
        self._note_running(starting=(slot.index, orders[0].token))
        self._crew.send(slot.index, orders)

    def _output_dir(self, task_id: str, token: str) -> str:
        url = self.records.outputs_url(task_id, token)
        return url if "://" not in url else f"{self._scratch.path}/{token}.outputs"

    def _discard_outputs(self, attempt: _Attempt) -> None:
        """Of an attempt that has ended: what belongs in a bucket lies there, or nowhere."""
        if attempt.output_dir.startswith(self._scratch.path) and os.path.lexists(attempt.output_dir):
            self._crew.discard(attempt.output_dir)

    def _note_running(self, starting: tuple[int, str] | None = None) -> None:
        running = []
        for slot in self._slots:
            if tokens := self._crew.outstanding(slot.index):
                running.append(tokens[0])
            elif starting is not None and starting[0] == slot.index:
                running.append(starting[1])
        if running != self._running:
            if not running or not self._running:
                # Busy after idle, or idle after busy: `status` should not have to wait for the next report.
                self._due.seen = min(self._due.seen, time.monotonic() + SEEN_AFTER_CHANGE_S)
            self._running = running
            apart = (token for token in self._on_trial if token in running and self._attempts[token].apart)
            self.queue.mark_running(running, next(apart, None))
            self._count.set_running(len(running))
            self._count.set_leases(len(self._attempts))

    # ends

    def _conclude(self, end: Ended, now: float) -> None:
        """An attempt ended: record it, give it back, or drop it."""
        attempt = self._attempts.get(end.token)
        if attempt is None:
            return
        lease = attempt.lease
        if self._on_trial.pop(end.token, None) is not None:
            self._trust = self._trust + 1 if end.reason is EndReason.SUCCEEDED else self._trust
        if end.reason is EndReason.LOST:
            self._trust = 1
        if lease.task.snapshot is not None and attempt.slot >= 0:
            self._tend_trees(attempt, end)
        if end.not_started:
            attempt.sent = False
            if self._stopping is not None or attempt.stop_reason is not None:
                self._give_back(attempt)
            elif lease.alone:
                self._line_up(attempt)
            else:
                self._ready.appendleft(attempt)
            return
        self._busy_at = now
        value = self._read_value(end)
        seconds = end.ended_at - end.started_at
        self._count.attempt_ended(end.reason, seconds)
        self._mean_s = seconds if self._mean_s == float("inf") else self._mean_s + 0.1 * (seconds - self._mean_s)
        if end.reason is EndReason.SUCCEEDED:
            self._conclude_success(attempt, end, value)
            return
        self._discard_outputs(attempt)
        log = end.log.decode(errors="surrogateescape")
        note = EndedNote(
            token=lease.token,
            reason=end.reason,
            ended_at=datetime.fromtimestamp(end.ended_at, UTC),
            started_at=datetime.fromtimestamp(end.started_at, UTC),
            worker=self.name,
            message=_with_fence(end.message) if attempt.fenced else end.message,
            alone=attempt.apart or not attempt.crowded,
            machine=self._machine,
            evidence=STARTER if end.reason is EndReason.LOST else None,
            progressed=end.progressed,
            exit_code=end.exit_code,
            log=log[-8192:],
        )
        verdict = judge_end(
            lease,
            note,
            attempt.history,
            holds=self._heartbeat.holds(lease.token),
            now=self._clock.now(),
            code=self._code_of(lease),
            log=log,
            log_url=self._finish_log(attempt, end),
            jitter=random.random,
        )
        say = partial(self._say.ended, lease.task, end, verdict)
        if isinstance(verdict, Settle):
            self._end(attempt, verdict.settlement, say)
        elif isinstance(verdict, Drop):
            say()
            self._drop(attempt)
            if self.queue.traits.tracks_holders:
                # Leases there are the worker's and not each for itself: one that nobody took is ours as long as we live.
                self._releases.append(Release(lease))
        else:
            say()
            self._count.task_released(end.reason)
            self._released += 1
            self._drop(attempt)
            self._releases.append(verdict.release)
        if counts_against_worker(end.reason):
            self._count_failure(lease.task.id, now)

    def _tend_trees(self, attempt: _Attempt, end: Ended) -> None:
        snapshot = attempt.lease.task.snapshot
        if not self._on_slot(attempt.slot):  # orders that wait there name their trees
            self._trees.trim(attempt.slot, spoiled=snapshot if end.reason in _KILLED else None)
        if snapshot is not None and end.reason is EndReason.SETUP_FAILED:
            # Whatever it was, what lies here is not believed any more.
            self._trees.forget(snapshot, used=self._snapshots_held(besides=attempt))
            for waiting in [each for each in (*self._ready, *self._apart) if each.lease.task.snapshot == snapshot]:
                self._leave_line(waiting)
                self._set_up(waiting)

    def _snapshots_held(self, *, besides: _Attempt | None = None) -> set[str]:
        held = (each.lease.task.snapshot for each in self._attempts.values() if each is not besides)
        return {each for each in held if each is not None}

    def _read_value(self, end: Ended) -> object:
        """What the function returned; what cannot be read is that attempt's failure and nobody else's."""
        if not end.value or end.reason is not EndReason.SUCCEEDED:
            return None
        import json

        try:
            return json.loads(end.value)
        except (ValueError, RecursionError) as problem:
            end.reason = EndReason.APP_FAILED
            end.message = f"the value it returned cannot be recorded: {explain_json(problem)}"
            return None

    def _conclude_success(self, attempt: _Attempt, end: Ended, value: object) -> None:
        lease = attempt.lease
        task = lease.task
        record = Record(
            task_id=task.id,
            generation=task.generation,
            experiment=task.experiment,
            state=TaskState.SUCCEEDED,
            token=lease.token,
            reason=EndReason.SUCCEEDED,
            ended_at=datetime.fromtimestamp(end.ended_at, UTC),
            started_at=datetime.fromtimestamp(end.started_at, UTC),
            worker=self.name,
            attempts=len(attempt.history.ended) + 1,
            code=self._code_of(lease),
        )
        if end.value or end.log_bytes or end.metrics or end.exit_code is not None:
            record = self._with_results(record, attempt, end, value)
        # Not the attempt's own word for it: what ran in its process before may have changed what `os` says there.
        if os.path.lexists(attempt.output_dir):  # on the path of every task
            self._busy_io += 1
            self._offload.call(
                lambda: self.records.keep_outputs(task.id, lease.token, Path(attempt.output_dir)),
                lambda kept, problem: self._kept(attempt, end, record, kept, problem),
            )
            return
        self._succeed(attempt, end, record)

    def _kept(
        self, attempt: _Attempt, end: Ended, record: Record, kept: KeptOutputs | None, problem: Exception | None
    ) -> None:
        """Its outputs are durable, so it may be recorded; or they are not, and it has failed."""
        self._busy_io -= 1
        if kept is not None:
            self._discard_outputs(attempt)
            self._say.left_out(attempt.lease.task, kept.left_out)
            self._succeed(attempt, end, replace(record, outputs_url=kept.url, message=kept.left_out))
        elif attempt.lease.token in self._attempts:
            end.reason, end.message = EndReason.SETUP_FAILED, f"its outputs could not be kept: {problem}"
            self._conclude(end, time.monotonic())

    def _succeed(self, attempt: _Attempt, end: Ended, record: Record) -> None:
        self._failed_tasks.clear()
        self._end(attempt, Settlement(attempt.lease, record), partial(self._say.succeeded, attempt.lease.task, end))

    def _with_results(self, record: Record, attempt: _Attempt, end: Ended, value: object) -> Record:
        return replace(
            record,
            value=value,
            log=end.log.decode(errors="surrogateescape"),
            log_url=self._finish_log(attempt, end),
            metrics=dict(end.metrics),
            exit_code=end.exit_code,
        )

    def _finish_log(self, attempt: _Attempt, end: Ended) -> str | None:
        """A log that outgrew the record, or was already being written, goes to the store whole."""
        if attempt.log_url is None and end.log_bytes <= len(end.log):
            return None
        rest, room = end.undrained, LOG_LIMIT_BYTES - attempt.logged_bytes
        if len(rest) > room or not room:
            said = f"\n[runtime: the log outgrew {format_size(LOG_LIMIT_BYTES)}; what follows is its end]\n"
            rest = rest[:room] + said.encode() + end.log
        try:
            return self.records.append_log(attempt.lease.task.id, end.token, rest)
        except Exception as problem:
            self._say.trouble(f"writing the log of {attempt.lease.task.id}", problem)
            return attempt.log_url

    def _code_of(self, lease: Lease) -> str | None:
        return lease.task.snapshot or self._code.of(lease.task.entry)

    def _count_failure(self, task_id: str, now: float) -> None:
        most = self.options.max_consecutive_failures
        if not most:
            return
        if task_id in self._failed_tasks:
            return
        self._failed_tasks.append(task_id)
        failed = len(self._failed_tasks)
        wait = backoff(failed).total_seconds()
        if self._succeeded:
            # This machine can run tasks. It may have broken since, so it is slow to take more; it does not leave, because
            # as likely as not the tasks are to blame.
            wait = min(wait, LONGEST_PAUSE_S)
        elif failed >= most:
            self._stop_by_itself(
                f"{failed} tasks in a row failed and none succeeded (--max-consecutive-failures {most})", 1
            )
            return
        self._pause_until = now + wait
        self._say.paused(failed, most, wait, stays=bool(self._succeeded))

    def _end(self, attempt: _Attempt, settlement: Settlement, say: Callable[[], None] | None = None) -> None:
        """Hand its end over; `say` is called when it is recorded, which may take a while or come second."""
        self._drop(attempt)
        self._settlements.append(settlement)
        if say is not None:
            self._to_say[settlement.lease.token] = say

    def _postpone(self, attempt: _Attempt, until: datetime) -> None:
        """It may not run yet: what it waits for has nothing to do with this worker."""
        self._taken -= 1
        self._drop(attempt)
        self._releases.append(Release(attempt.lease, until, alone=attempt.lease.alone))

    def _give_back(self, attempt: _Attempt, wait: timedelta = timedelta()) -> None:
        """It never started: nothing is spent, and any worker may have it, after `wait`."""
        self._drop(attempt)
        self._count.task_released()
        self._taken -= 1
        self._released += 1
        lease = attempt.lease
        if attempt.announced:
            self._retractions.append(lease)
        if lease.alone and self._stopping is None:
            wait = backoff(4)
        self._releases.append(Release(lease, self._clock.now() + wait if wait else None, alone=lease.alone))

    def _drop(self, attempt: _Attempt) -> None:
        self._attempts.pop(attempt.lease.token, None)
        self._on_trial.pop(attempt.lease.token, None)
        self._heartbeat.ended(attempt.lease.token)

    # settling

    def _flush(self, now: float) -> None:
        """Hand what ended to the queue, and claim the next in the same step."""
        if now < self._retry_at:
            return
        releases, self._releases = self._releases, []
        retractions, self._retractions = self._retractions, []
        if releases:
            self._busy_io += 1
            self._offload.call(
                lambda: self._release(releases, retractions),
                lambda _, problem: self._given_back(Outgoing(releases=releases, retractions=retractions), problem),
            )
        if self._settlements and now >= self._settle_at():
            settlements, self._settlements = self._settlements, []
            room = 0
            if self._stopping is None and now >= self._pause_until and not self._leasing:
                room = max(0, self._room())
            faults.reach("worker.before_commit")
            self._settling, self._settling_since = self._settling + 1, now
            self._busy_io += 1
            self._claiming += room
            self._offload.call(
                lambda: self.queue.settle(settlements, claim_next=room),
                lambda settled, problem: self._settled(settlements, room, settled, problem),
            )

    def _settle_at(self) -> float:
        """When what has ended is settled next."""
        if self._settling < SETTLES_AT_ONCE:
            return self._retry_at
        if self._settling < SETTLES_AT_MOST:
            return max(self._retry_at, self._settling_since + SETTLING_HANGS_S)
        return float("inf")

    def _settled(
        self, settlements: list[Settlement], claimed: int, settled: Settled | None, problem: Exception | None
    ) -> None:
        self._claiming -= claimed
        self._settling -= 1
        self._busy_io -= 1
        if settled is None:
            assert problem is not None
            self._not_handed(Outgoing(settlements=settlements), problem)
            return
        self._retries = 0
        faults.reach("worker.after_commit")
        self._count_settled(settlements, settled)
        if settled.leases:
            self._take(settled.leases, time.monotonic())
        elif not self._attempts:
            self._due.poll = 0.0

    def _release(self, releases: Sequence[Release], retractions: Sequence[Lease]) -> None:
        # First, so that the next worker does not take it for lost.
        for lease in retractions:
            self.records.retract_started(lease.task, lease.token)
        self.queue.release(releases)

    def _given_back(self, outgoing: Outgoing, problem: Exception | None) -> None:
        self._busy_io -= 1
        if problem is None:
            self._retries = 0
        else:
            self._not_handed(outgoing, problem)

    def _not_handed(self, outgoing: Outgoing, problem: Exception) -> None:
        """Nothing is lost: it stays here, and the leases, no longer renewed, would come back by themselves."""
        if may_pass(problem):
            self._hand_again(outgoing, problem)
        else:
            self._hand_singly(outgoing)

    def _hand_again(self, outgoing: Outgoing, problem: Exception) -> None:
        self._settlements = [*outgoing.settlements, *self._settlements]
        self._releases = [*outgoing.releases, *self._releases]
        self._retractions = [*outgoing.retractions, *self._retractions]
        self._retries += 1
        self._retry_at = time.monotonic() + min(30.0, backoff(self._retries).total_seconds())
        self._trouble("recording", problem)

    def _hand_singly(self, outgoing: Outgoing) -> None:
        """One of them may be at fault, and the others have to go their way."""
        given_up = {token for token, stuck in self._stuck.items() if stuck.times >= REFUSALS}
        hopeless = {token for token in given_up if self._handed > self._stuck[token].handed}
        self._busy_io += 1
        self._offload.call(
            lambda: hand_over(
                self.queue, outgoing, worker=self.name, now=self._clock.now(), given_up=given_up, hopeless=hopeless
            ),
            lambda handed, problem: self._handed_singly(outgoing, handed, problem),
        )

    def _handed_singly(self, outgoing: Outgoing, handed: Handed | None, problem: Exception | None) -> None:
        self._busy_io -= 1
        if handed is None:
            assert problem is not None
            self._hand_again(outgoing, problem)
            return
        for settlement, settled in handed.settled:
            self._count_settled([settlement], settled)
        for refused, instead, settled in handed.replaced:
            self._to_say[refused.lease.token] = partial(self._say.unrecorded, instead.record, instead.lease.task)
            self._count_settled([instead], settled)
        for lease, refusal in handed.dropped:
            self._to_say.pop(lease.token, None)
            self._say.trouble(f"recording how `{lease.task.id}` ended", refusal)
        announced = {lease.token for lease in outgoing.retractions}
        before = self._stuck
        tokens = {one.lease.token for one in outgoing.ended}
        self._stuck = {token: stuck for token, stuck in before.items() if token not in tokens}
        for one in handed.stuck:
            token = one.lease.token
            known = before.get(token) or _Stuck(one, token in announced, self._handed)
            known.times += 1
            self._stuck[token] = known
        if handed.stuck:
            times = max(stuck.times for stuck in self._stuck.values())
            self._stuck_at = time.monotonic() + min(30.0, backoff(times).total_seconds())
        if handed.problem is not None:
            self._trouble("recording", handed.problem)
        if handed.again:
            assert handed.problem is not None
            self._hand_again(_outgoing(handed.again, announced), handed.problem)
        else:
            self._retries = 0
            self._due.poll = 0.0

    def _retry_stuck(self, now: float) -> None:
        if now < self._stuck_at:
            return
        self._stuck_at = float("inf")
        announced = {token for token, stuck in self._stuck.items() if stuck.announced}
        self._hand_singly(_outgoing([stuck.ended for stuck in self._stuck.values()], announced))

    def _count_settled(self, settlements: Sequence[Settlement], settled: Settled) -> None:
        self._handed += len(settlements)
        refused = {id(one.lease): one for one in settled.refused}
        counters = self._counters
        for settlement in settlements:
            record = settlement.record
            say = self._to_say.pop(settlement.lease.token, None)
            second = refused.get(id(settlement.lease))
            if second is not None:
                # An attempt that was stopped for a cancel ended as that says, whoever has written it.
                stands = second.record is not None and second.record.state is record.state is TaskState.CANCELLED
                if stands and say is not None:
                    say()
                else:
                    self._say.refused(second)
            # A record that was found counts for the worker that committed it.
            elif record.token == settlement.lease.token:
                if say is not None:
                    say()
                self._succeeded += record.state is TaskState.SUCCEEDED
                self._failed += record.state is TaskState.FAILED
                self._count.task_recorded(record.state)
                counts = counters.get(record.experiment)
                if counts is None:
                    counts = counters[record.experiment] = {}
                counts[record.state] = counts.get(record.state, 0) + 1

    # duties

    def _duties(self, now: float) -> None:
        due = self._due
        if now >= due.renew:
            self._renew()
            # A task that was cancelled in the embedded file is a lease that is lost: learnt no later than an order.
            due.renew = now + max(0.2, min(self._heartbeat.due_in(), CONTROL_EVERY_S))
        if now >= due.tend:
            due.tend = now + TEND_EVERY_S
            self._offload.call(self.queue.tend, self._ignore("upkeep"))
            self._shed(now)
        if now >= due.control:
            due.control = float("inf")  # One at a time: a store that does not answer gets no second call.
            self._offload.call(lambda: self.records.control(self.queue.name), self._controlled)
        if now >= due.seen:
            due.seen = now + SEEN_EVERY_S
            self._report_in()
        if self._attempts and now >= due.logs:
            due.logs = now + LOG_EVERY_S
            self._write_logs(now)

    def _shed(self, now: float) -> None:
        """Give back what was held ahead when what runs takes longer than thought: others may be idle."""
        free = False
        for slot in self._slots:
            running = self._crew.running(slot.index)
            free = free or running is None
            if running is not None and time.time() - running[1] > LOOK_AHEAD_S:
                self._mean_s = max(self._mean_s, time.time() - running[1])
                for token in self._crew.take_back(slot.index):
                    self._attempts[token].sent = False
                    self._give_back(self._attempts[token])
        late = [attempt for attempt in self._ready if not free and now - attempt.taken_at > LOOK_AHEAD_S]
        # One that could not start here after its patience may find a slot elsewhere; here it keeps its place.
        late += [attempt for attempt in self._apart if now - attempt.taken_at > ALONE_PATIENCE_S + LOOK_AHEAD_S]
        for attempt in late:
            self._leave_line(attempt)
            self._give_back(attempt)

    def _renew(self) -> None:
        leases = [attempt.lease for attempt in self._attempts.values()]
        if not leases:
            return
        asked = self._heartbeat.asked()
        self._offload.call(
            lambda: self.queue.renew(leases, self.options.lease),
            lambda lost, problem: self._renewed(leases, lost, problem, asked),
        )

    def _renewed(self, leases: list[Lease], lost: list[Lease] | None, problem: Exception | None, asked: float) -> None:
        if lost is None:
            self._count.renewal_failed()
            self._say.trouble("renewing leases", problem)
            return
        gone = {lease.token for lease in lost}
        self._heartbeat.confirmed((lease.token for lease in leases if lease.token not in gone), asked)
        for lease in lost:
            attempt = self._attempts.get(lease.token)
            if attempt is not None:
                self._heartbeat.ended(lease.token)
                self._offload.call(
                    lambda task=lease.task: self.records.find(task.id, task.generation),  # type: ignore[misc]
                    lambda record, _, attempt=attempt: self._lost(attempt, record),  # type: ignore[misc]
                )

    def _lost(self, attempt: _Attempt, record: Record | None) -> None:
        """Its record exists, so it stops; if only the lease passed on, it may still be the first to succeed."""
        task = attempt.lease.task
        cancelled = record is not None and record.state is TaskState.CANCELLED
        self._count.lease_lost()
        self._say.lost(task, record)
        if not attempt.sent:
            self._leave_line(attempt)
            self._drop(attempt)
        elif record is not None:
            attempt.stop_reason = EndReason.CANCELLED if cancelled else EndReason.DUPLICATE
            self._crew.ask_to_stop(attempt.lease.token, attempt.stop_reason)

    def _controlled(self, control: Control | None, problem: Exception | None) -> None:
        now = time.monotonic()
        self._due.control = now + CONTROL_EVERY_S
        if control is None:
            assert problem is not None
            self._orders_tried += 1
            if self._control is not None:
                self._trouble("reading the orders", problem)
                return
            self._due.control = now + min(30.0, backoff(self._orders_tried).total_seconds())
            if explain_briefly(problem) != explain_briefly(self._orders_refused):
                self._trouble(_NO_ORDERS, problem)
            self._orders_refused = problem
            return
        if self._control is None:
            self._busy_at = now
        self._orders_tried, self._control = 0, control
        self._stop_cancelled()

    def _stop_cancelled(self) -> None:
        """End what the orders cover of all that is held here; what they do not say yet, they are asked."""
        if not self._has_cancels():
            return
        for attempt in list(self._attempts.values()):
            cancelled = self._is_cancelled(attempt.lease)
            if cancelled is None:
                self._learn(attempt.lease.task.experiment)
            elif not cancelled:
                continue
            elif attempt.sent:
                if attempt.stop_reason is not EndReason.CANCELLED:
                    attempt.stop_reason = EndReason.CANCELLED
                    self._crew.ask_to_stop(attempt.lease.token, EndReason.CANCELLED)
            elif self._leave_line(attempt):
                settlement = self._refuse(attempt.lease, self._clock.now())
                if settlement is not None:
                    self._end(attempt, settlement, partial(self._say.unstarted, settlement.record, attempt.lease.task))

    def _report_in(self, *, left: bool = False) -> None:
        now = self._clock.now()
        lived = max(1e-9, (now - self._started_at).total_seconds())
        seen = WorkerSeen(
            worker=self.name,
            host=socket.gethostname(),
            queue=self.queue.name,
            seen_at=now,
            started_at=self._started_at,
            slots=len(self._slots),
            running=tuple(self._attempts[token].lease.task.id for token in self._running if token in self._attempts),
            done=self._succeeded,
            failed=self._failed,
            rate_per_s=round((self._succeeded + self._failed) / lived, 3),
            left=left,
            labels=self.options.labels,
            declined=dict(self._declined),
        )
        counters = {name: dict(counts) for name, counts in self._counters.items()}

        self._offload.call(lambda: self.records.put_worker(seen), self._ignore("reporting in"))
        self._offload.call(
            lambda: self.records.put_counters(self.name, counters), self._ignore("reporting what was recorded")
        )

    def _write_logs(self, now: float) -> None:
        """Output of attempts that run for a while, so that `runtime logs -f` can follow them."""
        every = LOG_EVERY_S if self._local else REMOTE_LOG_EVERY_S
        for token in self._running:
            attempt = self._attempts.get(token)
            if attempt is None or now - attempt.logged_at < every:
                continue
            if attempt.logged_at == 0.0:
                attempt.logged_at = now
                continue
            attempt.logged_at = now
            # Drained in any case, or it would wait in memory.
            data = self._crew.drain_log(token)[: LOG_LIMIT_BYTES - attempt.logged_bytes]
            if data:
                attempt.logged_bytes += len(data)
                task_id = attempt.lease.task.id

                def written(url: str | None, problem: Exception | None, attempt: _Attempt = attempt) -> None:
                    attempt.log_url = url or attempt.log_url
                    if problem is not None:
                        self._say.trouble("writing a log", problem)

                self._offload.call(lambda t=token, i=task_id, d=data: self.records.append_log(i, t, d), written)  # type: ignore[misc]

    def _ignore(self, what: str) -> Callable[[Any, Exception | None], None]:
        def done(_: Any, problem: Exception | None) -> None:
            if problem is not None:
                self._trouble(what, problem)

        return done

    def _trouble(self, what: str, problem: Exception | None) -> None:
        """Say what failed and will be tried again; leave if that cannot help."""
        self._say.trouble(what, problem)
        if isinstance(problem, StoreBroken):
            self._stop_by_itself(problem.message, exit_code=problem.exit_code)

    def _watch_bell(self) -> None:
        """Listen to the doorbell only while there is room; when full, every put would wake us for nothing."""
        if self._bell is None:
            return
        wanted = self._stopping is None and self._room() > 0
        if wanted != self._bell_on:
            self._bell_on = wanted
            if wanted:
                self._selector.register(self._bell, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._bell)

    # leaving

    def _stop_by_itself(self, reason: str, exit_code: int = 0) -> None:
        """The first reason counts, with its exit code."""
        if self._stopping is None:
            self._exit_code = exit_code
            self._stopping = reason

    @contextlib.contextmanager
    def _listen(self) -> Iterator[None]:
        """Signals and preemption notices, where the process is the worker's own."""
        if not self.options.owns_process:
            yield
            return
        from runtime.worker.notices import NoticeWatch, answer_notice, notice_settings_from

        def on_notice(notice: Notice) -> None:
            self._say.notice(notice)
            self.stop("preemption notice", exit_code=answer_notice(notice, os.environ))

        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        reader = self._signal_reader = SignalReader(tuple(previous))
        if reader.fd is not None:
            self._selector.register(reader.fd, selectors.EVENT_READ, reader)
        try:
            with NoticeWatch(notice_settings_from(os.environ), on_notice):
                yield
        finally:
            reader.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object = None) -> None:
        # The shim of a job may hear of the same signal a moment later: until then this is no success.
        a_job = bool(os.environ.get("RUNTIME_JOB_ID"))
        self.stop(f"received {signal.Signals(number).name}", exit_code=128 + number if a_job else 0)

    def _read_signals(self) -> None:
        """Leave if somebody wants that; an attempt of ours has no say in it, and fails for having tried."""
        assert self._signal_reader is not None
        for heard in self._signal_reader.read():
            token = self._crew.attempt_of(heard.sender)
            if token is None:
                self._on_signal(heard.number)
            else:
                name = signal.Signals(heard.number).name
                self._crew.kill(token, EndReason.APP_FAILED, f"sent {name} to its worker, which goes on")

    def _begin_drain(self, now: float) -> None:
        """Stop leasing, return what has not begun, ask what runs to checkpoint and end."""
        running = 0
        for slot in self._slots:
            for token in self._crew.take_back(slot.index):
                self._attempts[token].sent = False
        for attempt in list(self._attempts.values()):
            if attempt.sent:
                running += 1
                attempt.stop_reason = EndReason.PREEMPTED
                self._crew.ask_to_stop(attempt.lease.token, EndReason.PREEMPTED)
            else:
                self._give_back(attempt)
        self._ready.clear()
        self._apart.clear()
        self._kill_at = self._give_up_at = now + self.options.grace.total_seconds()
        self._say.draining(self._stopping or "", running, self.options.grace.total_seconds() if self._signals else 0.0)

    def _finished(self, now: float) -> bool:
        """All attempts ended and all of them handed over."""
        if self._attempts and now >= self._kill_at:
            self._kill_at = float("inf")
            self._say.killing(len(self._attempts))
            for attempt in self._attempts.values():
                self._crew.kill(attempt.lease.token, attempt.stop_reason or EndReason.PREEMPTED)
        if self._attempts or self._leasing or self._busy_io:
            return False
        if self._settlements or self._releases:
            asked_for_long = self._signals > 0 and self._retries > 0 and now >= self._give_up_at
            if self._signals > 2 or asked_for_long:
                self._say.unhanded(len(self._settlements) + len(self._releases) + len(self._stuck))
                return True
            self._flush(now)
            return False
        if self._stuck:
            if self._signals < 3 and any(stuck.times <= REFUSALS for stuck in self._stuck.values()):
                return False
            self._say.unhanded(len(self._stuck))
        return True

    def _leave(self) -> None:
        """Leave nothing behind: children, scratch, the lock that says we live."""
        self._crew.close()
        self._report_in(left=True)
        self._offload.close()
        self._count.close()
        self._scratch.close()
        self._selector.close()
        self._say.left(self._stopping or "interrupted", self._succeeded, self._failed, self._released)


def _outgoing(ended: Sequence[Settlement | Release], announced: Collection[str]) -> Outgoing:
    releases = [one for one in ended if isinstance(one, Release)]
    return Outgoing(
        settlements=[one for one in ended if isinstance(one, Settlement)],
        releases=releases,
        retractions=[one.lease for one in releases if one.lease.token in announced],
    )


def _with_fence(message: str | None) -> str:
    return f"{message or 'ended'} (it ran fenced: workers were lost while it ran, so it could not signal this one)"


def _kind(lease: Lease) -> EntryKind:
    match lease.task.entry:
        case CommandEntry():
            return "command"
        case FunctionEntry():
            return "function"
        case _:
            return "workflow"


def run_worker(queue: Queue, options: WorkerOptions | None = None, *, clock: Clock | None = None) -> WorkerResult:
    """Serve `queue` in this thread until it is drained or told to stop; as `runtime worker` does."""
    return Worker(queue, options, clock=clock).run()
