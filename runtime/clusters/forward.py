"""A forwarded port of a head, for one look: ssh as a child process that ends with the look."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from runtime.clusters.tunnel import render_ssh
from runtime.errors import InfrastructureFailure

if TYPE_CHECKING:
    from runtime.clusters.tunnel import HeadWay

PATIENCE_S: Final = 45
"""For gcloud, the proxy and ssh together."""
_LOOK_EVERY_S: Final = 0.1


class TunnelFailed(InfrastructureFailure):
    """ssh to `head` ended, or made no forward in time; `said` is its last line."""

    def __init__(self, head: str, said: str) -> None:
        self.head, self.said = head, said
        super().__init__(
            f"no way to head `{head}`: {said}", hint="`runtime cluster attach` shows what ssh and gcloud say"
        )


@contextmanager
def open_forward(way: HeadWay, port: int) -> Iterator[str]:
    """Forward a free port of this machine to `port` of the head; yields `http://127.0.0.1:PORT`. Raises `TunnelFailed`."""
    here = _free_port()
    words = render_ssh(way, forwards=[(here, port)])
    # In a file, which cannot fill up as a pipe does.
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [words[0], "-o", "BatchMode=yes", *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        try:
            _wait(process, here, way.head, said)
            yield f"http://127.0.0.1:{here}"
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, head: str, said: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        # ssh listens only once it has logged in.
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            pass
        if process.poll() is not None:
            said.seek(0)  # type: ignore[attr-defined]
            lines = said.read().decode(errors="replace").strip().splitlines()  # type: ignore[attr-defined]
            raise TunnelFailed(head, lines[-1] if lines else f"ssh ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise TunnelFailed(head, f"no forward within {PATIENCE_S} s")
        time.sleep(_LOOK_EVERY_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
