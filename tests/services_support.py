"""Real components for tests and benchmarks: find, start on a free port, and stop each of them.

Only `require` needs pytest, so the benchmarks start their services with the same code.
"""

from __future__ import annotations

import http.client
import itertools
import os
import random
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from runtime.system import system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

REQUIRE_VARIABLE = "RUNTIME_REQUIRE_SERVICES"

unmarked_test: str | None = None
"""The running test's id if the test lacks the mark `service`; set by tests/conftest.py."""

PATIENCE_S = 600.0
"""The longest wait for a certain event, on a machine busy with other work."""

_EMULATOR_FOLDERS = (
    "/usr/lib/google-cloud-sdk",
    "/usr/share/google-cloud-sdk",
    "~/google-cloud-sdk",
    "/opt/google-cloud-sdk",
)
# Fast start and a small heap: the emulator of a test lives for seconds.
_JVM_FLAGS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m")


def require(component: str, found: object, install: str) -> None:
    """Return if `component` was found; otherwise skip the test with the reason and the command that installs it.

    Under RUNTIME_REQUIRE_SERVICES=1, which CI sets, the test fails instead.
    """
    refuse_unmarked(component)
    if not found:
        pass_over(f"{component} is not installed; install it with `{install}`")


def refuse_unmarked(component: str) -> None:
    """Fail a test that uses a real component without the mark `service`: `make test` would run it."""
    if unmarked_test is not None:
        raise AssertionError(f"{unmarked_test} uses {component}: mark it with `service`")


def pass_over(reason: str) -> NoReturn:
    """Skip the test; under RUNTIME_REQUIRE_SERVICES=1 it fails."""
    import pytest

    if os.environ.get(REQUIRE_VARIABLE) == "1":
        pytest.fail(f"{reason} ({REQUIRE_VARIABLE}=1 makes this a failure)", pytrace=False)
    pytest.skip(reason)


def find_emulator_jar() -> Path | None:
    """Find the Pub/Sub emulator of an installed Google Cloud CLI."""
    gcloud = shutil.which("gcloud")
    roots = [Path(gcloud).resolve().parent.parent] if gcloud else []
    roots += [Path(folder).expanduser() for folder in _EMULATOR_FOLDERS]
    jars = (jar for root in roots for jar in sorted(root.glob("platform/pubsub-emulator/lib/*.jar"), reverse=True))
    return next(jars, None)


class Service:
    """A child process that listens on a port of 127.0.0.1 and dies with us."""

    name = "service"

    def __init__(self) -> None:
        self.port = find_free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, *, timeout_s: float = 300) -> Self:
        """Start on the same port as before and return when it answers. Raises RuntimeError with its output on exit."""
        refuse_unmarked(self.name)
        # A killed test run must leave no JVM behind. setpriv is part of every Debian; other systems do without it.
        tied_to_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        # A file rather than a pipe, because nobody reads while the service runs, and a full pipe would block it.
        with tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                [*tied_to_us, *self._command()], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            deadline = time.monotonic() + timeout_s
            while not self._is_ready():
                code = self._process.poll()
                if code is not None or time.monotonic() > deadline:
                    self.kill()
                    output.seek(0)
                    said = output.read()[-2000:].decode(errors="replace")
                    raise RuntimeError(f"{self.name} did not start (exit code {code}): {said}")
                time.sleep(0.02)
        return self

    def stop(self) -> None:
        """End it with SIGTERM; stopping twice changes nothing."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it with SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start on the same port; its memory is lost."""
        self.kill()
        self.start()

    def _order(self, path: str) -> None:
        """Send a command and wait until it is done, so that it cannot affect the next test."""
        if _request("POST", self.port, path, timeout_s=300) is None:
            raise RuntimeError(f"{self.name} did not answer POST {path}")

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _is_ready(self) -> bool:
        raise NotImplementedError


class PubsubEmulator(Service):
    """Google's Pub/Sub emulator, without gcloud's wrapper, which would leave the JVM behind.

    It keeps everything in memory and forgets it when restarted. Clients need `environment` and any project name.
    """

    name = "Pub/Sub emulator"

    def __init__(self, jar: Path | None = None) -> None:
        super().__init__()
        self.jar = jar or find_emulator_jar()
        self._projects = 0

    @property
    def environment(self) -> dict[str, str]:
        return {"PUBSUB_EMULATOR_HOST": self.address}

    def new_project(self) -> str:
        """Return a project name unused by other tests, so that topics of two tests never meet."""
        self._projects += 1
        return f"test-project-{self._projects}"

    def reset(self) -> None:
        """Delete every topic and subscription; clients stay connected."""
        self._order("/reset")

    def _command(self) -> list[str]:
        return ["java", *_JVM_FLAGS, "-jar", str(self.jar), "--host=127.0.0.1", f"--port={self.port}"]

    def _is_ready(self) -> bool:
        return "Ok" in (_request("GET", self.port, "/") or "")


class MotoServer(Service):
    """S3 and EC2 from moto. Clients need `environment`, which holds fake credentials."""

    name = "moto server"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def reset(self) -> None:
        """Delete every bucket and machine."""
        self._order("/moto-api/reset")

    def _command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).parent / "fakes/s3.py"), "-H", "127.0.0.1", "-p", str(self.port)]

    def _is_ready(self) -> bool:
        return _request("GET", self.port, "/moto-api/data.json") is not None


class RedisServer(Service):
    """Redis without persistence."""

    name = "Redis"

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    def _command(self) -> list[str]:
        return ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


_PORTS = range(10_000, 13_000)
"""Below the kernel's ephemeral ports; `scripts/kubernetes` uses the next ones, and rows of `tests.ports` begin at 20000."""
_held: list[int] = []


def find_free_port() -> int:
    """Find a TCP port of 127.0.0.1 without a listener, which no other process here gets during this process's life.

    Some seconds can pass until a server listens on it, and the server may be down for a while later.
    """
    start = random.SystemRandom().randrange(len(_PORTS))
    for port in itertools.chain(_PORTS[start:], _PORTS[:start]):
        # A name that lives as long as this process, in the same network namespace as the port.
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0research-runtime-port-{port}")
            with socket.socket() as probe:
                # Servers set this too: a recently closed connection does not block them.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _held.append(name.detach())
        return port
    raise RuntimeError(f"no port of {_PORTS} is free")


def replace_sleep(monkeypatch: pytest.MonkeyPatch, instead: Callable[[float], object]) -> None:
    """Have `system.sleep` and `time.sleep` of this thread do something else; threads that other tests left behind sleep on."""
    sleep, mine = time.sleep, threading.get_ident()

    def sleep_or(seconds: float) -> object:
        return instead(seconds) if threading.get_ident() == mine else sleep(seconds)

    monkeypatch.setitem(vars(system), "sleep", sleep_or)
    monkeypatch.setattr(time, "sleep", sleep_or)


def wait_until(condition: Callable[[], bool], *, timeout_s: float = PATIENCE_S, every_s: float = 0.02) -> bool:
    """Return whether `condition` came true in time. Checks take at most a third of the time, which the work needs."""
    deadline = time.monotonic() + timeout_s
    while True:
        looked = time.monotonic()
        if condition():
            return True
        now = time.monotonic()
        if now > deadline:
            return False
        time.sleep(max(every_s, 2 * (now - looked)))


def _request(method: str, port: int, path: str, *, timeout_s: float = 5) -> str | None:
    # http.client rather than urllib, which would use a proxy from the environment for 127.0.0.1.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
        return body if response.status < 400 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class _Relay(socketserver.BaseRequestHandler):
    server: Any

    def handle(self) -> None:
        with socket.create_connection(self.server.to) as there:
            back = threading.Thread(target=self._copy, args=(there, self.request), daemon=True)
            back.start()
            self._copy(self.request, there)
            back.join(5)

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


@contextmanager
def relayed(address: str, *, port: int = 0) -> Iterator[int]:
    """Open a port on every interface that forwards to the server at `address`; 0 is any free one."""
    server = socketserver.ThreadingTCPServer(("0.0.0.0", port), _Relay)
    server.daemon_threads = True
    host, _, to = address.rpartition(":")
    server.to = (host, int(to))  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def wait_readable(fd: int, patience_s: float = PATIENCE_S) -> bool:
    """Wait until a descriptor, of whatever number, can be read."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))
