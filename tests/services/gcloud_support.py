"""A stand-in for `gcloud compute start-iap-tunnel`, which leads to the sshd of a test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.ssh_support import SshServer

_GCLOUD: Final = """#!{python}
import socket, sys, threading

words = sys.argv[1:]
expected = ["compute", "start-iap-tunnel", {head!r}, "22", "--listen-on-stdin", "--project", {project!r}, "--zone", {zone!r}]
if words[: len(expected)] != expected:
    sys.exit(f"gcloud: {{words}}, expected {{expected}}")
tunnel = socket.create_connection(("127.0.0.1", {port}))


def send():
    while data := sys.stdin.buffer.raw.read(65536):
        tunnel.sendall(data)
    tunnel.shutdown(socket.SHUT_WR)


threading.Thread(target=send, daemon=True).start()
while data := tunnel.recv(65536):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
"""


def add_gcloud(folder: Path, server: SshServer, head: str, zone: str, project: str = "p-1") -> None:
    """Put `gcloud` into `folder`, and let the client's settings of `server` name it `head`."""
    folder.mkdir(exist_ok=True)
    gcloud = folder / "gcloud"
    gcloud.write_text(_GCLOUD.format(python=sys.executable, head=head, project=project, zone=zone, port=server.port))
    gcloud.chmod(0o700)
    key = (server.folder / "host_key.pub").read_text().split()
    server.known_hosts.write_text(f"{head} {key[0]} {key[1]}\n")
    # The client's settings are of the host `box`; a head has them under its own name, without an address or a port.
    lines = server.config.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("HostName", "Port"))]
    server.config.write_text("\n".join([f"Host {head}", *kept[1:]]) + "\n")
