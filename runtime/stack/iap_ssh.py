"""The way to a head without an external address: ssh through Google's identity-aware proxy, as words of a command.

Everything here renders; nothing connects. A TPU node takes the head's key alone, so the way to a node is over the head.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from runtime.errors import NotPossible

if TYPE_CHECKING:
    from runtime.outputs import ClusterOutput, StackOutputs

DASHBOARD: Final = 8265
"""Port of a head's dashboard and API, if the contract of its stack names none."""

NODE_USER: Final = "ray"
NODE_KEY: Final = "/etc/runtime-ray/ssh/id_ed25519"
"""The head's key for its nodes; only root reads it."""

_ALIVE: Final = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
# Addresses of nodes are used again by other nodes, whose keys nobody knows before; Ray's own ssh does the same.
_NODE_OPTIONS: Final = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWay:
    head: str
    """Name of the VM."""
    project: str
    zone: str
    user: str | None = None
    """None: ssh's own settings name the user."""
    options: tuple[str, ...] = ()
    """More words for ssh; they come first, and ssh takes the first value of an option."""
    dashboard: int = DASHBOARD
    """The head's port."""


def need_project(outputs: StackOutputs) -> str:
    """Raises `NotPossible` if the contract names none."""
    if outputs.project is None:
        raise NotPossible(
            f"the contract of stack `{outputs.stack}` names no Google project",
            hint=f"run `pulumi up --stack {outputs.stack}`, then `runtime stack pull`",
        )
    return outputs.project


def find_way(
    outputs: StackOutputs, cluster: ClusterOutput, *, user: str | None = None, options: Iterable[str] | None = None
) -> HeadWay:
    """Return the way to the head of a stack's cluster. Raises `NotPossible` if the contract names no project."""
    return HeadWay(
        head=cluster.head,
        project=need_project(outputs),
        zone=cluster.zone,
        user=user,
        options=tuple(options or ()),
        dashboard=cluster.ports.get("dashboard", DASHBOARD),
    )


def render_proxy(way: HeadWay) -> str:
    """Return the command that carries ssh's bytes; ssh puts the port for `%p`."""
    words = ["gcloud", "compute", "start-iap-tunnel", way.head, "%p", "--listen-on-stdin"]
    words += ["--project", way.project, "--zone", way.zone]
    # Names of Google's hold nothing that a shell or ssh would read.
    return shlex.join(words)


def render_ssh(
    way: HeadWay, command: Sequence[str] = (), *, terminal: bool = False, forwards: Iterable[tuple[int, int]] = ()
) -> list[str]:
    """Return the words that run `command` on the head, or a login shell.

    `forwards` are pairs of a port here, on the loopback interface, and a port of the head; with them and no command ssh
    only forwards.
    """
    ports = [word for here, there in forwards for word in ("-L", f"127.0.0.1:{here}:127.0.0.1:{there}")]
    return [
        "ssh",
        *way.options,
        "-o",
        f"ProxyCommand={render_proxy(way)}",
        *_ALIVE,
        *(("-o", "ExitOnForwardFailure=yes", *ports) if ports else ()),
        *(("-l", way.user) if way.user else ()),
        *(("-N",) if ports and not command else ()),
        *(("-t",) if terminal else ()),
        way.head,
        # ssh joins the words behind the name by spaces and gives them to a shell.
        *((shlex.join(command),) if command else ()),
    ]


def render_node_ssh(address: str, command: Sequence[str] = (), *, terminal: bool = False) -> list[str]:
    """Return the words that, on the head, run `command` on the node at `address`, or a login shell."""
    return [
        *("sudo", "ssh", "-i", NODE_KEY, *_NODE_OPTIONS),
        *(("-t",) if terminal else ()),
        f"{NODE_USER}@{address}",
        *((shlex.join(command),) if command else ()),
    ]
