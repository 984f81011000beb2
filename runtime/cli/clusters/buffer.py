"""`runtime cluster buffer`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from runtime.cli.clusters.common import AddressOption, DryRunOption, OneClusterOption, open_one
from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.console import note
from runtime.cli.output import Columns, OutputFormat, print_list
from runtime.clusters.pools import read_pools
from runtime.errors import InfrastructureFailure, RequestRefused
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.cli.clusters.common import SelectedClusters
    from runtime.clusters.warm_nodes import Wish
    from runtime.outputs import ClusterOutput

HERE: Final = "http://127.0.0.1:8265"
_GCS: Final = 6379
"""The port of Ray's own store, unless the contract names another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRow:
    cluster: str
    pool: str
    buffer: int
    busy: int
    """Nodes on which something holds CPUs or TPUs."""
    max: int
    wanted: int
    """Nodes that the autoscaler is asked to have, idle and busy ones."""
    asked: int
    """Nodes that it was asked for before."""


def buffer(
    dry_run: DryRunOption = False,
    address: AddressOption = HERE,
    cluster: OneClusterOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Ask Ray's autoscaler for the idle nodes of the pools' buffers; runs on the head.

    The timer of a head with buffers does this every 30 seconds. For each pool it asks for as many nodes as are busy, and the
    buffer, within `max`; what programs asked for with `ray.autoscaler.sdk.request_resources` stays. If Google or Ray does not
    answer, the exit code is 3, and what was asked for last holds on.

    \b
    Examples:
      runtime cluster exec -- sudo systemctl start runtime-ray-buffer
      runtime cluster exec -- sudo journalctl -u runtime-ray-buffer --grep=asked -n 20
    """
    from runtime.clusters.autoscaler_request import RayRequest
    from runtime.clusters.warm_nodes import count_asked, merge_request

    chosen, key, each = open_one(stack, cluster)
    url = address or HERE
    host = _read_host(url)
    wishes, removed = _look(chosen, each, url)
    request = RayRequest(f"{host}:{each.ports.get('gcs', _GCS)}")
    before = request.read()
    after = merge_request(before, wishes)
    if after != before and not dry_run:
        request.write(after)
    rows = [
        BufferRow(
            cluster=key,
            pool=wish.pool,
            buffer=wish.buffer,
            busy=wish.busy,
            max=wish.max,
            wanted=wish.wanted,
            asked=count_asked(before, wish.pool),
        )
        for wish in wishes
    ]
    columns: Columns = {
        "CLUSTER": "cluster",
        "POOL": "pool",
        "BUFFER": "buffer",
        "BUSY": "busy",
        "MAX": "max",
        "WANTED": "wanted",
        "ASKED": "asked",
    }
    print_list(rows, columns, output)
    for row in rows:
        if row.wanted != row.asked:
            asks = "would ask" if dry_run else "asked"
            kept = f"{row.busy:,} busy, a buffer of {row.buffer:,}, at most {row.max:,}"
            note(f"{key} {row.pool}: {asks} for {count_noun(row.wanted, 'node')} instead of {row.asked:,}: {kept}")
    if removed:
        note(
            f"{key}: nothing is asked for until Ray has ended the nodes of {', '.join(removed)}, which the stack no longer has"
        )
    if not wishes:
        taken = ", and what was asked for one " + ("would be" if dry_run else "is") + " taken back"
        note(f"{key}: no pool has a buffer{taken if after != before else ''}")
    return 0


def _read_host(url: str) -> str:
    with suppress(ValueError):  # a bracket that nothing closes
        if host := urlsplit(url).hostname:
            return host
    raise RequestRefused(f"`--address {url}` names no host", hint=f"the head's own is `{HERE}`")


def _look(chosen: SelectedClusters, cluster: ClusterOutput, address: str) -> tuple[tuple[Wish, ...], list[str]]:
    """Return what each pool with a buffer needs, and the removed pools that have living nodes. Raises
    `InfrastructureFailure` if Google or Ray does not answer."""
    from runtime.clusters.autoscaler_request import RUNS_THERE
    from runtime.clusters.ray_view import DashboardUnreachable, read_ray
    from runtime.clusters.warm_nodes import find_removed_pools, plan_buffers

    pools = read_pools(cluster)
    if not any(pool.buffer > 0 for pool in pools):
        return (), []
    try:
        ray = read_ray(address)
    except DashboardUnreachable as problem:
        raise InfrastructureFailure(problem.message, hint=RUNS_THERE) from problem
    nodes = chosen.reaper(cluster).list_nodes()
    wishes = plan_buffers(pools, nodes, cluster.cluster_name, ray.busy)
    return wishes, find_removed_pools(pools, nodes, cluster.cluster_name)
