"""`runtime cluster attach`, `exec` and `dashboard`: the ways to a head and its nodes, all through one ssh."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, NoReturn

from typer import Argument, Option

from runtime.cli.clusters.common import (
    DryRunOption,
    OneClusterOption,
    SelectedClusters,
    SshOption,
    UserOption,
    open_one,
)
from runtime.cli.commands import StackOption
from runtime.cli.console import flush, is_terminal, note, say
from runtime.errors import InvalidValue, NotPossible, UnknownName
from runtime.stack.iap_ssh import DASHBOARD, render_node_ssh, render_ssh
from runtime.stack.port_forward import need_programs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.outputs import ClusterOutput
    from runtime.stack.iap_ssh import HeadWay

NodeOption = Annotated[
    str | None,
    Option(
        "--node",
        metavar="NODE",
        help="A TPU node by name or address; `NAME/1` is a slice's second host.",
        show_default=False,
    ),
]
STDERR = 2
"""The descriptor."""


def attach(
    node: NodeOption = None,
    cluster: OneClusterOption = None,
    user: UserOption = None,
    ssh_option: SshOption = None,
    dry_run: DryRunOption = False,
    stack: StackOption = None,
) -> None:
    """Open a shell on a cluster's head, or on one of its TPU nodes.

    The way leads through Google's identity-aware proxy, with `gcloud` and `ssh` of this machine. To a node it leads over
    the head, which needs the rights of an operator.

    \b
    Examples:
      runtime cluster attach --stack marin-us-west4
      runtime cluster attach --node ray-marin-main-worker-0123abcd-tpu
      runtime cluster attach --dry-run
    """
    _go(stack, cluster, node, (), user, ssh_option, dry_run=dry_run, terminal=True)


def exec_(
    command: Annotated[list[str], Argument(metavar="COMMAND...", help="The command and its arguments.")],
    node: NodeOption = None,
    cluster: OneClusterOption = None,
    user: UserOption = None,
    ssh_option: SshOption = None,
    dry_run: DryRunOption = False,
    stack: StackOption = None,
) -> None:
    """Run a command on a cluster's head, or on one of its TPU nodes. Its exit code is this command's.

    Ray runs in the container `ray` of these machines.

    \b
    Examples:
      runtime cluster exec -- sudo docker logs --tail 100 ray
      runtime cluster exec -- sudo docker exec ray ray status
      runtime cluster exec --node ray-marin-main-worker-0123abcd-tpu -- uptime
    """
    terminal = sys.stdin.isatty() and is_terminal()
    _go(stack, cluster, node, command, user, ssh_option, dry_run=dry_run, terminal=terminal)


def dashboard(
    port: Annotated[int, Option(metavar="PORT", min=1, max=65535, help="Port on this machine.")] = DASHBOARD,
    cluster: OneClusterOption = None,
    user: UserOption = None,
    ssh_option: SshOption = None,
    dry_run: DryRunOption = False,
    stack: StackOption = None,
) -> None:
    """Forward Ray's dashboard to a port of this machine.

    The port stays until the command is interrupted.

    \b
    Examples:
      runtime cluster dashboard
      runtime cluster dashboard --stack marin-us-west4 --port 8300
    """
    chosen, _, each = open_one(stack, cluster)
    way = chosen.find_way(each, user, ssh_option)
    words = render_ssh(way, forwards=[(port, way.dashboard)])
    if not dry_run:
        note(f"http://127.0.0.1:{port} is the dashboard of {each.cluster_name}, until Ctrl-C")
    _become(way, words, dry_run=dry_run)


def _go(
    stack: str | None,
    cluster: str | None,
    node: str | None,
    command: Sequence[str],
    user: str | None,
    options: list[str] | None,
    *,
    dry_run: bool,
    terminal: bool,
) -> None:
    chosen, _, each = open_one(stack, cluster)
    if node is not None:
        command = render_node_ssh(_find_address(chosen, each, node), command, terminal=terminal)
    way = chosen.find_way(each, user, options)
    words = render_ssh(way, command, terminal=terminal)
    _become(way, words, dry_run=dry_run)


def _find_address(chosen: SelectedClusters, cluster: ClusterOutput, node: str) -> str:
    """Return the address of `NAME`, `NAME/HOST` or of an address itself."""
    try:
        return str(ip_address(node))
    except ValueError:
        pass
    name, _, host = node.partition("/")
    if not re.fullmatch(r"[0-9]{0,6}", host):
        raise InvalidValue("--node", node, "a name, `NAME/1` for the second host of a slice, or an address")
    nodes = {each.name: each for each in chosen.reaper(cluster).list_nodes() if each.cluster == cluster.cluster_name}
    if name not in nodes:
        raise UnknownName("node", name, nodes, where=f"in cluster `{cluster.cluster_name}`")
    addresses = nodes[name].addresses
    if len(addresses) <= int(host or 0):
        raise NotPossible(
            f"node `{name}` has no host {int(host or 0)}",
            facts=[f"it is {nodes[name].state} and has {len(addresses)} addresses: {', '.join(addresses) or 'none'}"],
            hint="`runtime cluster status` shows the nodes",
        )
    return addresses[int(host or 0)]


def _become(way: HeadWay, words: list[str], *, dry_run: bool) -> None:
    """Print the command, or become it."""
    if dry_run:
        say(shlex.join(words))
        return
    run_ssh(way, words)


def run_ssh(way: HeadWay, words: list[str]) -> NoReturn:
    """Replace this process by ssh, so that its terminal, signals and exit code are the user's. Raises `NotPossible` if a
    program is missing."""
    need_programs(way)
    flush()
    os.execvp(words[0], words)


def run_on_head(way: HeadWay, command: Sequence[str], *, timeout_s: float | None = None) -> int:
    """Run a command on a head, and return ssh's exit code. What it prints is no data of ours, so it goes to stderr.

    Raises `NotPossible` if a program is missing, and `TimeoutExpired`.
    """
    need_programs(way)
    flush()
    words = render_ssh(way, command)
    return subprocess.run(words, stdout=STDERR, check=False, timeout=timeout_s).returncode
