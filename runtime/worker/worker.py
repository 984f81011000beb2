"""The worker's loop: lease, run, settle, repeat; it drains when asked and loses nothing when killed.

One loop on one thread. It never waits on a task, which runs in a child of the guardian, nor on a network: a few threads
call a remote queue or store and hand the results back to the loop. `retry_policy` decides what an end means; the modules
beside this one act upon it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import struct
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime.clock import Clock, SystemClock, machine_id
from runtime.end_reasons import EndReason
from runtime.queues.base import Queue
from runtime.system import system
from runtime.worker.admission import Admission
from runtime.worker.artifact_saver import ArtifactSaver
from runtime.worker.attempts.model import AttemptEnd, ChildPoolSettings
from runtime.worker.attempts.work_trees import WorkTrees
from runtime.worker.completion import AttemptLogs, Completion
from runtime.worker.control import ControlReader
from runtime.worker.dispatch import Dispatch
from runtime.worker.host import WorkerHost
from runtime.worker.leasing import Leasing
from runtime.worker.maintenance import Maintenance
from runtime.worker.metrics import open_metrics
from runtime.worker.notifying import Notifier
from runtime.worker.options import WorkerOptions, WorkerResult, new_worker_name
from runtime.worker.pending_settlements import REFUSALS, PendingSettlements
from runtime.worker.settling import Settler
from runtime.worker.slots import plan_slots
from runtime.worker.thread_calls import ThreadCalls
from runtime.worker.worker_context import HeldLeases, LeaveDecision, WorkerContext
from runtime.worker.worker_log import WorkerLog

if TYPE_CHECKING:
    from runtime.worker.notices import PreemptionNotice
    from runtime.worker.secrets import AttemptSecrets

GRACE_FOR_MESSAGES_S: Final = 40.0
"""How long a worker that has nothing else to do stays to send messages: a little longer than one try takes."""
LINGER_S: Final = 0.0005
"""A pause of the loop before it looks for ended attempts, so that it goes round once for many and not for each."""
_SIGINFO_BYTES: Final = 128
_SIGINFO: Final = struct.Struct("<IiiI")
"""The beginning of `struct signalfd_siginfo`: number, errno, code, pid of the sender (0 from outside a container)."""


class Worker:
    def __init__(
        self,
        queue: Queue,
        options: WorkerOptions | None = None,
        *,
        clock: Clock | None = None,
        reporter: WorkerLog | None = None,
        secrets: AttemptSecrets | None = None,
        host: WorkerHost | None = None,
    ) -> None:
        self._queue = queue
        self._host = host or WorkerHost()
        self._secrets = secrets
        self._options = options or WorkerOptions()
        self._clock = clock or SystemClock()
        self._say = reporter or WorkerLog.for_stderr()
        self._slots = plan_slots(self._host.read_machine(), self._options.slots, self._options.gpus_per_slot)
        self._leaving = LeaveDecision(self._say)
        self.name = self._options.name or new_worker_name()

    def run(self) -> WorkerResult:
        """Serve until asked to leave. Raises problems that keep it from beginning; afterwards only reports them."""
        queue, options, say, leaving, host = self._queue, self._options, self._say, self._leaving, self._host
        queue.records.check()
        metrics = open_metrics(options.metrics_address, queue=queue.name)
        metrics.set_slots(len(self._slots))
        life_fds = queue.join(self.name)
        scratch = host.open_scratch(self.name)
        host.clear_left()
        selector = system.selector()
        settings = ChildPoolSettings(
            reuse=options.reuse_process,
            hold_fds=(*life_fds, scratch.fd),
            adopt_orphans=options.owns_process,
            scratch=scratch.path,
            # The `runtime` script has no current folder on its path; `python -m` puts it first.
            sys_path=[str(Path.cwd()), *sys.path] if options.owns_process else None,
        )
        pool = self._pool = host.make_pool(selector, len(self._slots), settings)
        pool.start()
        local = not queue.traits.remote and (queue.records.holds_tasks or queue.records.url.startswith("memory:"))
        services = WorkerContext(
            name=self.name,
            options=options,
            machine=machine_id(),
            slots=self._slots,
            queue=queue,
            queue_fd=queue.wake_descriptor(),
            records=queue.records,
            clock=self._clock,
            say=say,
            metrics=metrics,
            offload=ThreadCalls(inline=local),
            leaving=leaving,
            holdings=HeldLeases(options.lease_time, self._clock),
            pool=pool,
            scratch=scratch.path,
            trees=WorkTrees(scratch.path, pool.discard),
            code=host.identify_code(),
            secrets=self._secrets,
            local=local,
        )
        loop = Loop(services, selector)
        outbox = loop.outbox
        with self._listen_to_signals(selector):
            say.started(self.name, queue.name, self._slots)
            if metrics.port is not None and metrics.url is not None:
                say.serving_metrics(metrics.url, metrics.port)
            try:
                loop.run()
            finally:
                # Nothing is left behind: no children, no scratch, no lock that shows that the worker lives.
                pool.close()
                loop.upkeep.report_in(left=True)
                loop.environments.close()
                loop.notifying.close()
                services.offload.close()
                loop.captures.close()
                if services.secrets is not None:
                    services.secrets.close()
                metrics.close()
                scratch.close()
                selector.close()
                reason = leaving.reason or "interrupted"
                say.left(reason, outbox.succeeded, outbox.failed, outbox.released)
        if pool.failure is not None:
            raise pool.failure
        return WorkerResult(leaving.exit_code, outbox.succeeded, outbox.failed, outbox.released, reason)

    def stop(self, reason: str = "asked to stop", *, exit_code: int = 0) -> None:
        """Drain and leave; safe from a signal handler and from any thread. A second call kills what still runs."""
        self._leaving.ask(reason, exit_code)

    # signals

    @contextlib.contextmanager
    def _listen_to_signals(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Answer signals and preemption notices inside, if the process is the worker's own."""
        if not self._options.owns_process:
            yield
            return
        from runtime.worker.notices import NoticeWatch, answer_notice, notice_settings_from

        def on_notice(notice: PreemptionNotice) -> None:
            self._say.notice(notice)
            self._leaving.ask("preemption notice", answer_notice(notice, os.environ), notice=True)

        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        reader = SignalReader(tuple(previous))
        if reader.fd is not None:
            selector.register(reader.fd, selectors.EVENT_READ, lambda: self._read_signals(reader))
        try:
            with NoticeWatch(notice_settings_from(os.environ), on_notice):
                yield
        finally:
            reader.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object = None) -> None:
        # The shim of a job may get the same signal a moment later; the worker's end must not look like a success before.
        a_job = bool(os.environ.get("RUNTIME_JOB_ID"))
        self.stop(f"received {signal.Signals(number).name}", exit_code=128 + number if a_job else 0)

    def _read_signals(self, reader: SignalReader) -> None:
        """Leave if asked to, unless an attempt of this worker asks: it may not decide that, and fails for having tried."""
        for number, sender in reader.read():
            token = self._pool.attempt_of(sender)
            if token is None:
                self._on_signal(number)
            else:
                name = signal.Signals(number).name
                self._pool.kill(token, EndReason.APP_FAILED, f"sent {name} to its worker, which goes on")


class Loop:
    """The parts of a running worker, and the loop over them."""

    def __init__(self, services: WorkerContext, selector: selectors.BaseSelector) -> None:
        """Make the parts; each knows the parts that were made before it."""
        self._services, self._selector = services, selector
        self._hears_queue = False
        self.outbox = PendingSettlements(services)
        orders = ControlReader(services)
        self.captures = ArtifactSaver(services, selector)
        self._dispatch = Dispatch(services, self.outbox, orders, self.captures)
        self._preparing = Admission(
            services,
            self.outbox,
            orders,
            self._dispatch,
            self.captures,
            conclude=lambda end: self._ending.conclude(end, system.monotonic()),
        )
        self._leasing = Leasing(services, self.outbox, orders, self._dispatch, self._preparing)
        self._settling = Settler(services, self.outbox, self._leasing)
        logs = AttemptLogs(services)
        self._ending = Completion(services, self.outbox, self._dispatch, self._preparing, logs, self.captures)
        self.upkeep = Maintenance(services, self.outbox, orders, self._dispatch, logs)
        self.notifying = Notifier(services)
        self._drain = Drain(services, self.outbox, self._dispatch, self._leasing, self._settling, self.notifying)
        if services.offload.fd is not None:
            selector.register(services.offload.fd, selectors.EVENT_READ, services.offload.collect)
        if services.secrets is not None:
            calls = services.secrets.calls
            assert calls.fd is not None
            selector.register(calls.fd, selectors.EVENT_READ, calls.collect)
        self.environments = self._preparing.environments
        for calls in (self.environments.calls, self.notifying.calls):
            assert calls.fd is not None
            selector.register(calls.fd, selectors.EVENT_READ, calls.collect)
        wake_up = services.leaving.wake_up
        selector.register(wake_up.fd, selectors.EVENT_READ, wake_up.drain)

    def run(self) -> None:
        leaving, say, pool = self._services.leaving, self._services.say, self._services.pool
        outbox, dispatch, preparing = self.outbox, self._dispatch, self._preparing
        leasing, settling, ending = self._leasing, self._settling, self._ending
        upkeep, drain, captures, notifying = self.upkeep, self._drain, self.captures, self.notifying
        ended: list[AttemptEnd] = []
        while True:
            now = system.monotonic()
            drain.advance(now)
            self._listen_to_queue()
            if ended and leaving.reason is None and dispatch.may_linger():
                system.sleep(LINGER_S)
            for key, _ in self._selector.select(self._patience(now)):
                key.data()
            now = system.monotonic()
            deadline = pool.next_deadline()
            ended = pool.tick() if deadline is not None and now >= deadline else []
            if pool.failure is not None:
                leaving.decide(pool.failure.message, pool.failure.exit_code)
            for end in ended:
                ending.conclude(end, now)
            if outbox.pending:
                settling.flush(now)
            if outbox.stuck:
                settling.retry_stuck(now)
            say.tick()
            upkeep.do_what_is_due(now)
            captures.tend(now)
            if outbox.to_tell:
                told, outbox.to_tell = outbox.to_tell, []
                notifying.tell(told)
            notifying.poll_when_due(now)
            if leaving.reason is None:
                leasing.fetch(now)
                preparing.look_up()
                dispatch.dispatch(now)
            elif drain.is_over(now):
                return
            dispatch.record_running()
            upkeep.record_busy()

    def _patience(self, now: float) -> float:
        until = min(self.upkeep.next_at(), self._settling.next_at(), self.captures.next_at(), self.notifying.next_at())
        deadline = self._services.pool.next_deadline()
        if deadline is not None:
            until = min(until, deadline)
        unsaid = self._services.say.due_in()
        if unsaid is not None:
            until = min(until, now + unsaid)
        if self._services.leaving.reason is not None:
            until = min(until, self._drain.next_at(now))
        else:
            lease_at = self._leasing.next_at()
            if lease_at is not None:
                until = min(until, lease_at)
            if self._dispatch.ready and self._dispatch.pause_until > now:
                until = min(until, self._dispatch.pause_until)
        return max(0.0, until - now)

    def _listen_to_queue(self) -> None:
        """Listen to the queue only while there is room; when full, every put would wake the loop for nothing."""
        fd = self._services.queue_fd
        if fd is None:
            return
        wanted = self._services.leaving.reason is None and self._leasing.room() > 0
        if wanted != self._hears_queue:
            self._hears_queue = wanted
            if wanted:
                self._selector.register(fd, selectors.EVENT_READ, self._on_queue)
            else:
                self._selector.unregister(fd)

    def _on_queue(self) -> None:
        if self._services.queue.drain_wakes():
            self.upkeep.tend_now()
        self._leasing.poll_now()


class Drain:
    """The time between the decision to leave and the end: nothing starts, and running attempts are asked to end."""

    def __init__(
        self,
        services: WorkerContext,
        outbox: PendingSettlements,
        dispatch: Dispatch,
        leasing: Leasing,
        settling: Settler,
        notifying: Notifier,
    ) -> None:
        self._services = services
        self._outbox = outbox
        self._notifying = notifying
        self._dispatch = dispatch
        self._leasing = leasing
        self._settling = settling
        self._begun = self._hurried = False
        self._kill_at = float("inf")
        """When attempts are killed."""
        self._give_up_at = float("inf")
        """When the worker leaves without the ends that it cannot record."""

    def advance(self, now: float) -> None:
        """Begin once the worker is to leave; end the grace at the second request."""
        leaving = self._services.leaving
        if leaving.reason is None:
            return
        if not self._begun:
            self._begun = True
            self._begin(now, leaving.reason)
        if leaving.asked > 1 and not self._hurried:
            self._hurried = True
            self._kill_at = 0.0

    def _begin(self, now: float, reason: str) -> None:
        """Give back tasks that have not begun, and ask running attempts to checkpoint and end."""
        running = 0
        self._dispatch.recall()
        for held in list(self._services.holdings.by_token.values()):
            if held.sent:
                running += 1
                held.stop_reason = EndReason.PREEMPTED
                self._services.pool.ask_to_stop(held.lease.token, EndReason.PREEMPTED)
            else:
                self._outbox.give_back(held)
        grace_s = self._services.options.grace_time.total_seconds()
        self._kill_at = self._give_up_at = now + grace_s
        self._services.say.draining(reason, running, grace_s if self._services.leaving.asked else 0.0)

    def next_at(self, now: float) -> float:
        return min(now + 0.5, self._kill_at) if self._services.holdings.by_token else now + 0.5

    def is_over(self, now: float) -> bool:
        """Return whether all attempts have ended and are handed over; kill attempts that outlive the grace."""
        services, outbox, by_token = self._services, self._outbox, self._services.holdings.by_token
        asked = services.leaving.asked
        if by_token and now >= self._kill_at:
            self._kill_at = float("inf")
            services.say.killing(len(by_token))
            for held in by_token.values():
                self._services.pool.kill(held.lease.token, held.stop_reason or EndReason.PREEMPTED)
        if by_token or self._leasing.under_way or services.offload.awaited:
            return False
        if outbox.pending:
            asked_for_long = asked > 0 and self._settling.failures > 0 and now >= self._give_up_at
            if asked > 2 or asked_for_long:
                services.say.unhanded(len(outbox.settlements) + len(outbox.releases) + len(outbox.stuck))
                return True
            self._settling.flush(now)
            return False
        if outbox.stuck:
            if asked < 3 and any(stuck.times <= REFUSALS for stuck in outbox.stuck.values()):
                return False
            services.say.unhanded(len(outbox.stuck))
            return True
        # A machine that is about to go leaves the rest to other workers.
        patience_s = min(GRACE_FOR_MESSAGES_S, self._give_up_at - now) if asked else GRACE_FOR_MESSAGES_S
        return asked > 1 or self._notifying.is_over(now, patience_s=patience_s)


class SignalReader:
    """Holds signals back in this thread, and in threads that it starts later, until they are read from a descriptor.

    A handler in Python does not learn the sender. A signal that another thread gets still goes to its handler. On a
    system without signalfd all signals do; `fd` is None then.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self.numbers = numbers
        self.fd: int | None = None
        if sys.platform == "linux":
            import ctypes

            mask = sum(1 << (number - 1) for number in numbers).to_bytes(_SIGINFO_BYTES, sys.byteorder)
            fd = ctypes.CDLL(None).signalfd(-1, mask, os.O_NONBLOCK | os.O_CLOEXEC)
            if fd >= 0:
                self.fd = fd
                signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def read(self) -> list[tuple[int, int]]:
        """Return number and sender of each signal since the last call; the same signal twice may count once."""
        heard: list[tuple[int, int]] = []
        while self.fd is not None:
            try:
                data = os.read(self.fd, 16 * _SIGINFO_BYTES)
            except BlockingIOError:
                break
            for at in range(0, len(data), _SIGINFO_BYTES):
                number, _, _, sender = _SIGINFO.unpack_from(data, at)
                heard.append((number, sender))
        return heard

    def close(self) -> None:
        """Forget signals that were not read, and let signals through again."""
        if self.fd is not None:
            self.read()
            os.close(self.fd)
            self.fd = None
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)
