"""A forwarded port of a head: ssh as a child process that ends with what needs it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, Final

from runtime.errors import InfrastructureFailure, NotPossible
from runtime.stack.iap_ssh import render_ssh
from runtime.system import system

if TYPE_CHECKING:
    from runtime.stack.iap_ssh import HeadWay

PATIENCE_S: Final = 60
"""For gcloud, the proxy and ssh together."""
_LOOK_EVERY_S: Final = 0.1
_ENDS_WITHIN_S: Final = 10
_ENDS_WITH_US: Final = ("cat",)
"""On the head: ends at the end of its input, which is when this process ends, even if it is killed."""


class TunnelFailed(InfrastructureFailure):
    """ssh to a head ended, or made no forward in time; `said` is its last line."""

    def __init__(self, way: HeadWay, said: str) -> None:
        self.way, self.said = way, said
        super().__init__(
            f"no way to head `{way.head}`: {said}",
            facts=[f"through IAP, to project `{way.project}` in {way.zone}"],
            hint="`runtime cluster attach` shows what ssh and gcloud say; `gcloud auth login`, and the role for IAP tunnels",
        )


@contextmanager
def open_forward(way: HeadWay) -> Iterator[str]:
    """Forward a free port of this machine to the head's dashboard; yields `http://127.0.0.1:PORT`.

    Raises `TunnelFailed`, and `NotPossible` if a program is missing.
    """
    need_programs(way)
    here = _free_port()
    # ssh takes the first value of an option, so the user's own words come before it.
    silent = replace(way, options=(*way.options, "-o", "BatchMode=yes"))
    # In a file, which cannot fill up as a pipe does.
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            render_ssh(silent, _ENDS_WITH_US, forwards=[(here, way.dashboard)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            # Undoing a step after Ctrl-C may need the way.
            start_new_session=True,
        )
        try:
            _wait(process, here, way, said)
            yield f"http://127.0.0.1:{here}"
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
            try:
                process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def need_programs(way: HeadWay) -> None:
    """Raise `NotPossible` if a program that `way` needs is missing; with a proxy of the user's own it needs no `gcloud`."""
    has_own = any(re.match(r"-J|(?:-o *)?proxy(?:command|jump)\b", each, re.IGNORECASE) for each in way.options)
    for program, hint in (
        ("ssh", "install OpenSSH's client"),
        ("gcloud", "https://cloud.google.com/sdk/docs/install"),
    ):
        if shutil.which(program) is None and not (program == "gcloud" and has_own):
            raise NotPossible(f"`{program}` is not on this machine, and the way to a head needs it", hint=hint)


def _wait(process: subprocess.Popen[bytes], port: int, way: HeadWay, said: BinaryIO) -> None:
    deadline = system.monotonic() + PATIENCE_S
    while True:
        # ssh listens only once it has logged in.
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            pass
        if process.poll() is not None or system.monotonic() > deadline:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            ended = (
                f"no forward within {PATIENCE_S} s" if process.poll() is None else f"ssh ended with {process.poll()}"
            )
            raise TunnelFailed(way, lines[-1] if lines else ended)
        system.sleep(_LOOK_EVERY_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
