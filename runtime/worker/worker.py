"""The worker's loop: lease, run, settle, repeat; it drains when asked and loses nothing when killed.

One loop on one thread. It never waits on a task, which runs in a child of the guardian, nor on a network: calls to a
remote queue or store are made by a few threads that hand their results back to the loop. `verdict` decides what an end
means; the modules beside this one act upon it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime.clock import Clock, SystemClock, machine_id
from runtime.config import load_project
from runtime.queues.base import Queue
from runtime.reasons import EndReason
from runtime.snapshots.identity import CodeIdentity
from runtime.worker.attempts.model import Ended, PoolSettings
from runtime.worker.attempts.pool import AttemptPool
from runtime.worker.attempts.scratch import open_root, remove_leftovers
from runtime.worker.attempts.trees import Trees
from runtime.worker.dispatch import Dispatch
from runtime.worker.draining import Drain
from runtime.worker.ending import Ending
from runtime.worker.held import Holdings
from runtime.worker.leasing import Leasing
from runtime.worker.leaving import Leaving
from runtime.worker.logs import AttemptLogs
from runtime.worker.metrics import WorkerMetrics, open_metrics
from runtime.worker.offload import Offload
from runtime.worker.options import WorkerOptions, WorkerResult, new_worker_name
from runtime.worker.orders import Orders
from runtime.worker.outbox import Outbox
from runtime.worker.preparing import Preparing
from runtime.worker.reporter import Reporter
from runtime.worker.services import Services
from runtime.worker.settling import Settling
from runtime.worker.signals import SignalReader
from runtime.worker.slots import plan_slots, read_machine
from runtime.worker.upkeep import Upkeep

if TYPE_CHECKING:
    from runtime.worker.notices import Notice

LINGER_S: Final = 0.0005
"""A pause of the loop before it looks what has ended, so that it goes round once for many and not for each."""


class Worker:
    def __init__(
        self,
        queue: Queue,
        options: WorkerOptions | None = None,
        *,
        clock: Clock | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        options, say = options or WorkerOptions(), reporter or Reporter.for_stderr()
        local = not queue.traits.remote and (queue.records.holds_tasks or queue.records.url.startswith("memory:"))
        self.name = options.name or new_worker_name()
        self._leaving = Leaving(say)
        self._services = Services(
            name=self.name,
            options=options,
            machine=machine_id(),
            slots=plan_slots(read_machine(os.environ), options.slots, options.gpus_per_slot),
            queue=queue,
            records=queue.records,
            clock=clock or SystemClock(),
            say=say,
            metrics=WorkerMetrics(),
            offload=Offload(inline=local),
            leaving=self._leaving,
            local=local,
        )
        self._selector = selectors.DefaultSelector()
        self._signal_reader: SignalReader | None = None
        self._queue_fd: int | None = None
        """The queue's wake-up descriptor."""
        self._hears_queue = False

    def run(self) -> WorkerResult:
        """Serve until asked to leave. Raises what makes it impossible to begin; afterwards only reports."""
        services, leaving = self._services, self._leaving
        queue, options, say = services.queue, services.options, services.say
        services.records.check()
        metrics = services.metrics = open_metrics(options.metrics_address, queue=queue.name)
        metrics.set_slots(len(services.slots))
        life_fds = queue.join(self.name)
        self._scratch = open_root(self.name)
        self._pool = AttemptPool(
            selector=self._selector,
            slots=len(services.slots),
            settings=PoolSettings(
                reuse=options.reuse_process,
                hold_fds=(*life_fds, self._scratch.fd),
                adopt_orphans=options.owns_process,
                # As `python -m` would have it, also under the `runtime` script: the folder it is started in comes first.
                sys_path=[str(Path.cwd()), *sys.path] if options.owns_process else None,
            ),
        )
        self._pool.start()
        # Trees of dead workers may be large; nothing waits for their end.
        threading.Thread(target=remove_leftovers, name="leftovers", daemon=True).start()
        self._queue_fd = queue.wake_descriptor()
        self._build_parts()
        if services.offload.fd is not None:
            self._selector.register(services.offload.fd, selectors.EVENT_READ, services.offload)
        self._selector.register(leaving.wake_fd, selectors.EVENT_READ)
        with self._listen_to_signals():
            say.started(self.name, queue.name, services.slots)
            if metrics.port is not None:
                say.serving_metrics(metrics.port)
            try:
                self._loop()
            finally:
                self._leave()
        if self._pool.failure is not None:
            raise self._pool.failure
        settling = self._settling
        return WorkerResult(
            leaving.exit_code, settling.succeeded, settling.failed, self._outbox.released, self._why_left()
        )

    def stop(self, reason: str = "asked to stop", *, exit_code: int = 0) -> None:
        """Drain and leave; safe from a signal handler and from any thread. A second call kills what still runs."""
        self._leaving.ask(reason, exit_code)

    def _build_parts(self) -> None:
        """Make the parts, each of which knows those made before it."""
        services, pool, scratch = self._services, self._pool, self._scratch.path
        trees = Trees(scratch, pool.discard)
        code = CodeIdentity(Path.cwd(), load_project().workflow_packages)
        holdings = Holdings(services.options.lease, services.clock)
        outbox = Outbox(services, holdings)
        orders = Orders(services, holdings)
        dispatch = Dispatch(services, holdings, outbox, orders, pool, trees, code, scratch)
        preparing = Preparing(
            services,
            holdings,
            outbox,
            orders,
            dispatch,
            pool,
            trees,
            conclude=lambda end: ending.conclude(end, time.monotonic()),
        )
        leasing = Leasing(services, holdings, outbox, orders, dispatch, preparing, is_woken=self._queue_fd is not None)
        settling = Settling(services, outbox, leasing)
        logs = AttemptLogs(services, holdings, dispatch, pool)
        ending = Ending(services, holdings, outbox, dispatch, preparing, settling, logs, pool, code, scratch)
        self._outbox, self._dispatch, self._preparing = outbox, dispatch, preparing
        self._leasing, self._settling, self._ending = leasing, settling, ending
        self._upkeep = Upkeep(services, holdings, orders, dispatch, preparing, settling, logs, pool)
        self._drain = Drain(services, holdings, outbox, dispatch, leasing, settling, pool)

    # the loop

    def _loop(self) -> None:
        leaving, say, pool = self._leaving, self._services.say, self._pool
        outbox, dispatch, preparing = self._outbox, self._dispatch, self._preparing
        leasing, settling, ending = self._leasing, self._settling, self._ending
        upkeep, drain = self._upkeep, self._drain
        ended: list[Ended] = []
        while True:
            now = time.monotonic()
            drain.advance(now)
            self._listen_to_queue()
            if ended and leaving.reason is None and dispatch.may_linger():
                time.sleep(LINGER_S)
            ended = self._wait(now)
            now = time.monotonic()
            deadline = pool.next_deadline()
            if deadline is not None and now >= deadline:
                ended += pool.tick()
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
            if leaving.reason is None:
                leasing.fetch(now)
                preparing.look_up()
                dispatch.dispatch(now)
            elif drain.is_over(now):
                return
            dispatch.note_running()
            upkeep.note_busy()

    def _wait(self, now: float) -> list[Ended]:
        """Sleep until something happens or is due, and return the attempts that have ended."""
        pool, offload = self._pool, self._services.offload
        ended: list[Ended] = []
        for key, _ in self._selector.select(self._patience(now)):
            if pool.owns(key):
                ended += pool.ready(key)
            elif key.data is offload:
                offload.collect()
            elif key.fd == self._queue_fd:
                if self._services.queue.drain_wakes():
                    self._upkeep.tend_now()
                self._leasing.poll_now()
            elif key.fd == self._leaving.wake_fd:
                self._leaving.clear_wake()
            elif key.data is self._signal_reader:
                self._read_signals()
        return ended

    def _patience(self, now: float) -> float:
        """Return how many seconds the loop may sleep."""
        until = min(self._upkeep.next_at(), self._settling.next_at())
        deadline = self._pool.next_deadline()
        if deadline is not None:
            until = min(until, deadline)
        unsaid = self._services.say.due_in()
        if unsaid is not None:
            until = min(until, now + unsaid)
        if self._leaving.reason is not None:
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
        if self._queue_fd is None:
            return
        wanted = self._leaving.reason is None and self._leasing.room() > 0
        if wanted != self._hears_queue:
            self._hears_queue = wanted
            if wanted:
                self._selector.register(self._queue_fd, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._queue_fd)

    # signals

    @contextlib.contextmanager
    def _listen_to_signals(self) -> Iterator[None]:
        """Answer signals and preemption notices inside, if the process is the worker's own."""
        if not self._services.options.owns_process:
            yield
            return
        from runtime.worker.notices import NoticeWatch, answer_notice, notice_settings_from

        def on_notice(notice: Notice) -> None:
            self._services.say.notice(notice)
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
        """Leave if asked to, unless an attempt of this worker asks: it has no say in that, and fails for having tried."""
        assert self._signal_reader is not None
        for heard in self._signal_reader.read():
            token = self._pool.attempt_of(heard.sender)
            if token is None:
                self._on_signal(heard.number)
            else:
                name = signal.Signals(heard.number).name
                self._pool.kill(token, EndReason.APP_FAILED, f"sent {name} to its worker, which goes on")

    # leaving

    def _leave(self) -> None:
        """Leave nothing behind: children, scratch, the lock that says we live."""
        services, settling = self._services, self._settling
        self._pool.close()
        self._upkeep.report_in(left=True)
        services.offload.close()
        services.metrics.close()
        self._scratch.close()
        self._selector.close()
        services.say.left(self._why_left(), settling.succeeded, settling.failed, self._outbox.released)

    def _why_left(self) -> str:
        return self._leaving.reason or "interrupted"


def run_worker(queue: Queue, options: WorkerOptions | None = None, *, clock: Clock | None = None) -> WorkerResult:
    """Serve `queue` in this thread until it is drained or told to stop; as `runtime worker` does."""
    return Worker(queue, options, clock=clock).run()
