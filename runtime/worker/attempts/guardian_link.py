"""The worker's end of its guardian: the process, and the socket over which it is given orders and reports."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from runtime.worker.attempts.child_handle import Events, Page
from runtime.worker.attempts.environment import PRELOADABLE
from runtime.worker.attempts.model import ChildPoolSettings

SEND_PATIENCE_S: Final = 5

# The standard library first: a folder that is put in front of it may hold a module with one of its names.
_GUARDIAN = """
import faulthandler, fcntl, importlib.machinery, json, mmap, resource, select, signal, socket, sys, termios
sys.path.insert(0, sys.argv[1])
from runtime.worker.attempts.fork_server import main
main(int(sys.argv[2]))
"""


class GuardianLink:
    """The guardian of one pool; when one has ended, `start` starts the next."""

    def __init__(self, settings: ChildPoolSettings, page: Page, events: Events) -> None:
        self.settings, self.page, self.events = settings, page, events
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._inbox = b""
        self.silences = 0
        """Pings since the guardian's last word."""
        self.removals: set[str] = set()
        """Trees that it has yet to remove."""
        self._preloaded: set[str] = set()
        self.closing = False
        """The pool ends: no guardian follows this one, and nothing further begins."""

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def start(self, read: Callable[[], None]) -> None:
        """Start the guardian, without waiting for it; `read` is called when it reports. Raises OSError."""
        ours, theirs = socket.socketpair()
        # A guardian that does not read must not stop the loop.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_PATIENCE_S, 0))
        source = str(Path(__file__).resolve().parents[3])
        self.silences = 0
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _GUARDIAN, source, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self.page.fd, *self.settings.hold_fds),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket, self._inbox = ours, b""
        self._preloaded.clear()
        sys_path = sys.path if self.settings.sys_path is None else self.settings.sys_path
        configuration = {
            "worker_pid": os.getpid(),
            "page_fd": self.page.fd,
            "page_bytes": self.page.size,
            "hold_fds": self.settings.hold_fds,
            "scratch": self.settings.scratch,
            "reuse": self.settings.reuse,
            "max_tasks": self.settings.max_tasks_per_child,
            "max_growth_bytes": self.settings.max_growth_bytes,
            "sys_path": [item or str(Path.cwd()) for item in sys_path],
        }
        self.tell(json.dumps(configuration))
        self.events.listen(ours, read)
        for path in self.removals:
            self.tell(f"remove {path}")

    def tell(self, message: str, fds: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        self.events.await_answer()
        data = f"{message}\0".encode("utf-8", "surrogateescape")
        try:
            if fds:
                socket.send_fds(self._socket, [data], fds)
            else:
                self._socket.sendall(data)
        except BlockingIOError:
            # It has not read for seconds, and this message is lost: the liveness watch replaces it.
            self.silences, self.events.ping_at = sys.maxsize, 0.0
            self.events.wake_by(0.0)
        except OSError:
            pass  # It has died; reading its socket shows that.

    def receive(self) -> list[str] | None:
        """Return the guardian's reports; None if it has ended."""
        assert self._socket is not None
        try:
            data = self._socket.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.silences = 0
        *messages, self._inbox = (self._inbox + data).split(b"\0")
        return [message.decode("utf-8", "surrogateescape") for message in messages]

    def remove(self, path: str) -> None:
        """Have a tree removed in the background; if the guardian dies before that, the next one removes it."""
        self.removals.add(path)
        self.tell(f"remove {path}")

    def preload(self, imported: Iterable[str]) -> None:
        """Have the guardian load modules that attempts have loaded, if they are fit for that."""
        names = PRELOADABLE.intersection(imported) - self._preloaded
        if names:
            self._preloaded |= names
            self.tell(f"preload {' '.join(sorted(names))}")

    def disconnect(self) -> subprocess.Popen[bytes] | None:
        """Close our end, so that the guardian ends everything; returns its process."""
        if self._socket is not None:
            self.events.forget(self._socket)
            self._socket.close()
            self._socket = None
        process, self.process = self.process, None
        return process

    def stop(self, patience_s: float) -> None:
        process = self.disconnect()
        if process is not None:
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                pass  # A process cannot be killed; the guardian waits for it, and holds our locks until then.
