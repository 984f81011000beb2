"""A worker's numbers for Prometheus, through the official client, which is imported only if a port is given.

The page is served to this machine alone unless an address is named, because everyone who reaches it can read it. It
holds counts, times and the queue's name: no arguments, no ids of tasks, no messages.
"""

from __future__ import annotations

import errno
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue, NotPossible
from runtime.tasks.model import TaskState

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

THIS_MACHINE: Final = "127.0.0.1"
MOST_PORT: Final = 65535

DURATIONS: Final = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 60, 300, 1800, 7200, 28800, 86400)
"""Upper bounds in seconds: from no-ops to tasks of a day, from an idle worker to a queue of a day."""


class WorkerMetrics:
    """The numbers that a worker counts, here without a page. Every method is cheap and never raises."""

    port: int | None = None
    """The port of the page; None if it is not served."""
    url: str | None = None
    """Address of the page; None if it is not served."""

    def set_slots(self, count: int) -> None: ...
    def set_running(self, count: int) -> None: ...
    def set_leases(self, held: int) -> None: ...
    def attempt_started(self, waited: timedelta | None = None) -> None:
        """Count a start; `waited` is the time since the task was submitted, or was due; None if that is unknown."""

    def attempt_ended(self, reason: EndReason, seconds: float) -> None: ...
    def task_recorded(self, state: TaskState) -> None:
        """Count a committed record: the task ended for good."""

    def task_released(self, reason: EndReason | None = None) -> None:
        """Count a task that went back to the queue; `reason` is None if it had not been started."""

    def task_declined(self) -> None: ...
    def renewal_failed(self) -> None: ...
    def lease_lost(self) -> None: ...
    def close(self) -> None: ...


def open_metrics(address: tuple[str, int] | None, *, queue: str) -> WorkerMetrics:
    """Serve the page at `address`, host and port, or count nothing if `address` is None.

    An empty host means this machine alone, `0.0.0.0` or `::` every address that it has; port 0 takes a free one, which
    `port` then has. Raises `NotPossible` if the port is taken or the address is not this machine's.
    """
    return WorkerMetrics() if address is None else PrometheusMetrics(address, queue=queue)


class PrometheusMetrics(WorkerMetrics):
    """The page at `http://HOST:PORT/metrics`. Each number carries the queue as a label."""

    def __init__(self, address: tuple[str, int], *, queue: str) -> None:
        import prometheus_client as prometheus

        self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self._registry)
        self._server = _serve(address, self._registry)
        self.port = self._server.server_address[1]
        host = address[0].strip("[]") or THIS_MACHINE
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

        def gauge(name: str, text: str) -> Any:
            return prometheus.Gauge(name, text, ["queue"], registry=self._registry).labels(queue)

        def counter(name: str, text: str, *more: str) -> Any:
            made = prometheus.Counter(name, text, ["queue", *more], registry=self._registry)
            return made if more else made.labels(queue)

        def histogram(name: str, text: str) -> Any:
            return prometheus.Histogram(name, text, ["queue"], buckets=DURATIONS, registry=self._registry).labels(queue)

        self._slots = gauge("runtime_worker_slots", "Attempts that can run at the same time.")
        self._running = gauge("runtime_worker_running", "Attempts that run.")
        self._leases = gauge("runtime_worker_leases", "Leases held: attempts that run and tasks that wait here.")
        attempts = counter("runtime_attempts", "Attempts that ended, by why.", "reason")
        tasks = counter("runtime_tasks_recorded", "Tasks that ended for good, by how.", "state")
        released = counter("runtime_tasks_released", "Tasks that went back to the queue, by why.", "reason")
        # All label values exist from the start, so that a rate over the first failure is not missed.
        self._attempts = {reason: attempts.labels(queue, reason.value) for reason in EndReason}
        self._tasks = {state: tasks.labels(queue, state.value) for state in TaskState if state.terminal}
        self._released = {reason: released.labels(queue, reason.value) for reason in EndReason}
        self._unstarted = released.labels(queue, "not_started")
        self._declined = counter("runtime_tasks_declined", "Tasks that no slot of this worker can hold.")
        self._renewals_failed = counter("runtime_lease_renewals_failed", "Renewals that got no answer.")
        self._leases_lost = counter("runtime_leases_lost", "Leases that passed on while they were held.")
        self._seconds = histogram("runtime_attempt_seconds", "How long attempts ran.")
        self._latency = histogram(
            "runtime_queue_latency_seconds", "From a task's submission, or its due time, to its start."
        )

    def set_slots(self, count: int) -> None:
        self._slots.set(count)

    def set_running(self, count: int) -> None:
        self._running.set(count)

    def set_leases(self, held: int) -> None:
        self._leases.set(held)

    def attempt_started(self, waited: timedelta | None = None) -> None:
        if waited is not None:
            # The submitter's clock may be ahead of ours.
            self._latency.observe(max(0.0, waited.total_seconds()))

    def attempt_ended(self, reason: EndReason, seconds: float) -> None:
        self._attempts[reason].inc()
        self._seconds.observe(max(0.0, seconds))

    def task_recorded(self, state: TaskState) -> None:
        if state in self._tasks:
            self._tasks[state].inc()

    def task_released(self, reason: EndReason | None = None) -> None:
        (self._unstarted if reason is None else self._released[reason]).inc()

    def task_declined(self) -> None:
        self._declined.inc()

    def renewal_failed(self) -> None:
        self._renewals_failed.inc()

    def lease_lost(self) -> None:
        self._leases_lost.inc()

    def close(self) -> None:
        """Stop serving, and return when the port is free again."""
        import socket
        import threading

        stopping = threading.Thread(target=self._server.shutdown, daemon=True)
        stopping.start()
        # The server looks twice a second whether it should stop, and at once when someone calls.
        host, port = self._server.server_address[:2]
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
        try:
            socket.create_connection((here, port), timeout=0.5).close()
        except OSError:
            pass
        stopping.join()
        self._server.server_close()


def _serve(address: tuple[str, int], registry: Any) -> ThreadingHTTPServer:
    """Serve the client's handler on a server of our own.

    `prometheus_client.start_http_server` looks the host's name up, which may wait on a resolver for seconds, and on
    Python 3.14 shares a port that is taken instead of refusing it.
    """
    import socket
    import socketserver
    import threading
    from http.server import ThreadingHTTPServer

    from prometheus_client import MetricsHandler

    class Server(ThreadingHTTPServer):
        allow_reuse_port = False
        daemon_threads = True

        def server_bind(self) -> None:
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = host, self.server_address[1]

    host, port = address[0].strip("[]") or THIS_MACHINE, address[1]
    if not 0 <= port <= MOST_PORT:
        raise InvalidValue("port", port, f"0 to {MOST_PORT}")
    try:
        # A name may have addresses of both families; the first is the one that a client tries first.
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        Server.address_family = family
        server = Server((str(place[0]), port), MetricsHandler.factory(registry))
    except (OSError, ValueError) as problem:  # A name that no resolver can be asked for is a `ValueError`.
        raise _explain(problem, host, port) from problem
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def _explain(problem: OSError | ValueError, host: str, port: int) -> NotPossible:
    if isinstance(problem, ValueError):
        problem = OSError(None, "no name of a host")
    if problem.errno == errno.EADDRINUSE:
        return NotPossible(
            f"cannot serve metrics on port {port}: it is taken",
            facts=[f"another process listens on `{host}:{port}`, perhaps another worker of this machine"],
            hint="`--metrics-port 0` takes a free port and says which",
        )
    if problem.errno == errno.EACCES:
        return NotPossible(
            f"cannot serve metrics on port {port}: it is reserved for root", hint="take a port above 1023"
        )
    return NotPossible(
        f"cannot serve metrics on `{host}:{port}`: {problem.strerror or problem}",
        facts=["the host is a name or an address of this machine; `0.0.0.0` and `::` are all of its addresses"],
        hint="`--metrics-host 127.0.0.1` serves this machine alone, and so does leaving it out",
    )
