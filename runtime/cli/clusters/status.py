"""`runtime cluster list` and `runtime cluster status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from runtime.cli.clusters.common import (
    NOT_ASKED,
    AddressOption,
    ClusterOption,
    SshOption,
    TunnelOption,
    UserOption,
    ask_ray,
    find_restart,
    open_clusters,
    refuse_two_ways,
)
from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.console import note
from runtime.cli.output import Columns, OutputFormat, print_list
from runtime.clusters.drift import Mismatch, PoolDrift
from runtime.clusters.pools import read_pools
from runtime.errors import InfrastructureFailure, RequestRefused
from runtime.units import count_noun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.cli.clusters.common import SelectedClusters
    from runtime.clusters.nodes import TpuNode
    from runtime.clusters.pools import Pool
    from runtime.clusters.ray_view import RayView
    from runtime.outputs import ClusterOutput


_SHOWN: Final = 10
"""Jobs that the text names; `-o json` has all."""
_NODES_SHOWN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow:
    cluster: str
    cluster_name: str
    zone: str
    head: str
    internal_ip: str
    pools: Mapping[str, str]
    """Pool → accelerator and bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job of ours that has not ended."""

    job: str
    name: str
    owner: str
    state: str
    """Ray's word for its driver: `PENDING` or `RUNNING`."""
    nodes: tuple[str, ...] | None
    """TPU nodes on which it has a place; a host that Google does not list has its address. None if Ray does not say."""
    show: str
    """The command that says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    cluster: str
    zone: str
    head: bool | None
    """Whether Google has a head of this cluster; None if heads cannot be listed."""
    pools: tuple[PoolDrift, ...]
    queued: Mapping[str, int]
    """State → queued resources of the cluster."""
    wanted: Mapping[str, int]
    """Resources that something waits for in Ray → how often."""
    mismatches: tuple[Mismatch, ...]
    jobs: tuple[JobRow, ...] | None
    """None if Ray was not asked for its jobs, or did not answer."""
    others: int | None
    """Living jobs that the runtime did not start."""
    ray: str | None
    """Why Ray's side is not shown; None if it is."""


def list_(stack: StackOption = None, output: OutputOption = OutputFormat.TEXT) -> None:
    """List the clusters of the stack, from its contract alone.

    \b
    Examples:
      runtime cluster list
      runtime cluster list --stack marin-us-west4 -o json
    """
    chosen = open_clusters(stack, None)
    rows = [
        ClusterRow(
            cluster=name,
            cluster_name=each.cluster_name,
            zone=each.zone,
            head=each.head,
            internal_ip=each.internal_ip,
            pools={pool.name: _describe_bounds(pool) for pool in read_pools(each)},
        )
        for name, each in chosen.clusters.items()
    ]
    columns: Columns = {
        "CLUSTER": "cluster",
        "ZONE": "zone",
        "HEAD": "head",
        "POOLS": lambda row: "; ".join(f"{pool}: {text}" for pool, text in row.pools.items()),
    }
    print_list(rows, columns, output)


def _describe_bounds(pool: Pool) -> str:
    idle = f", {pool.buffer} idle" if pool.buffer else ""
    return f"{pool.accelerator or '?'}, {pool.min} to {pool.max}{idle}"


def status(
    cluster: ClusterOption = None,
    address: AddressOption = None,
    tunnel: TunnelOption = False,
    user: UserOption = None,
    ssh_option: SshOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Show what the stack wants, and what there is.

    That is for each pool what Google has, what Ray sees and what runs, and each mismatch, and each request that waits, with
    its next step. With `--address` or `--tunnel` the jobs that run are named.

    Members, which `runtime cluster add` made, have a row each. LIVE counts the nodes that Google makes or runs, DEAD those that the reaper would remove, RAY those that Ray counts
    on, and BUSY those on which something holds CPUs or TPUs. Without `--address` or `--tunnel` Ray is not asked. Exit code
    3 if Google could not be asked about a cluster.

    \b
    Examples:
      runtime cluster status
      runtime cluster status --tunnel
      runtime cluster status --address http://127.0.0.1:8265 -o json
    """
    refuse_two_ways(address, tunnel=tunnel)
    chosen = open_clusters(stack, cluster)
    if address is not None and len(chosen.clusters) > 1:
        raise RequestRefused(
            f"`--address` is of one cluster, and stack `{chosen.stack}` has {len(chosen.clusters)}",
            hint=f"name it: `--cluster {min(chosen.clusters)}`",
        )
    shown, failed = [], 0
    for name, each in chosen.clusters.items():
        try:
            ray, why = ask_ray(chosen, each, address, user, ssh_option, tunnel=tunnel, jobs=True)
            shown.append(_look(chosen, name, each, ray, why))
        except InfrastructureFailure as problem:
            note(f"{name}: {problem.message}")
            if problem.hint:
                note(f"  next: {problem.hint}")
            failed += 1
    _print(shown, output)
    return 3 if failed else 0


def _look(
    chosen: SelectedClusters, name: str, cluster: ClusterOutput, ray: RayView | None, why: str | None
) -> ClusterStatus:
    from runtime.clusters.drift import compare_pools, find_mismatches
    from runtime.clusters.reap_policy import plan_reaping

    reaper = chosen.reaper(cluster)
    view = reaper.look()
    now = datetime.now(UTC) - reaper.skew()
    plan = plan_reaping(view, cluster.cluster_name, now, seen={})
    pools = read_pools(cluster)
    queued: dict[str, int] = {}
    for each in view.queued:
        if each.cluster == cluster.cluster_name:
            queued[each.state] = queued.get(each.state, 0) + 1
    return ClusterStatus(
        cluster=name,
        zone=cluster.zone,
        head=None if view.heads is None else cluster.cluster_name in view.heads,
        pools=tuple(compare_pools(pools, view, cluster.cluster_name, plan, ray)),
        queued=queued,
        wanted=dict(ray.wanted) if ray else {},
        mismatches=(
            *_find_hold(chosen, name),
            *find_mismatches(name, pools, view, cluster.cluster_name, plan, ray, now),
        ),
        jobs=None if ray is None or ray.jobs is None else _name_jobs(ray, view.nodes),
        others=None if ray is None or ray.jobs is None else sum(each.job is None for each in ray.jobs),
        ray=why,
    )


def _name_jobs(ray: RayView, nodes: Sequence[TpuNode]) -> tuple[JobRow, ...]:
    names = {address: node.name for node in nodes for address in node.addresses}
    return tuple(
        JobRow(
            job=each.job,
            name=each.name,
            owner=each.owner,
            state=each.state,
            nodes=None if each.hosts is None else tuple(sorted({names.get(host, host) for host in each.hosts})),
            # Why a job has no place yet is for `explain` to say.
            show=f"runtime {'explain' if each.hosts is not None and not each.hosts else 'status'} {each.job}",
        )
        for each in ray.jobs or ()
        if each.job is not None
    )


def _find_hold(chosen: SelectedClusters, name: str) -> Iterator[Mismatch]:
    """Yield that the cluster is being restarted, as far as its records can be read."""
    from runtime.jobs.ledger import now
    from runtime.jobs.maintenance_lock import HINT

    if (held := find_restart(chosen, name)) is not None:
        silent = "" if held.blocks(now()) else ", and gave no sign for an hour, so launches and keepers go on"
        yield Mismatch(pool=None, what=held.tell() + silent, next=HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    cluster: str
    pool: PoolDrift


def _print(shown: list[ClusterStatus], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_list(shown, {}, output)
        return
    columns: Columns = {
        "CLUSTER": "cluster",
        "POOL": lambda line: line.pool.pool or "-",
        "MIN": lambda line: None if line.pool.member else _describe_least(line.pool),
        "MAX": lambda line: None if line.pool.member else line.pool.max,
        "LIVE": lambda line: line.pool.live,
        "DEAD": lambda line: line.pool.dead,
        "RAY": lambda line: line.pool.ray,
        "BUSY": lambda line: line.pool.busy,
        "GOOGLE": lambda line: ", ".join(f"{count} {state}" for state, count in line.pool.states.items()) or "-",
    }
    print_list([_Line(cluster=each.cluster, pool=pool) for each in shown for pool in each.pools], columns)
    for each in shown:
        if each.ray is not None:
            note(f"{each.cluster}: Ray was {each.ray}" if each.ray is NOT_ASKED else f"{each.cluster}: {each.ray}")
        for state, count in each.queued.items():
            note(f"{each.cluster}: {count_noun(count, 'queued resource')} {state}")
        for line in _describe_jobs(each):
            note(f"{each.cluster}: {line}")
        for mismatch in each.mismatches:
            pool = f" {mismatch.pool}" if mismatch.pool else ""
            note(f"{each.cluster}{pool}: {mismatch.what}")
            note(f"  next: {mismatch.next}")


def _describe_least(pool: PoolDrift) -> str | int:
    return f"{pool.min:,}, {pool.buffer:,} idle" if pool.buffer else pool.min


def _describe_jobs(shown: ClusterStatus) -> Iterator[str]:
    for job in (shown.jobs or ())[:_SHOWN]:
        if job.nodes is None:
            place = ""
        elif job.nodes:
            more = len(job.nodes) - _NODES_SHOWN
            place = f" on {', '.join(job.nodes[:_NODES_SHOWN])}" + (f" and {more:,} more" if more > 0 else "")
        else:
            place = ", on no node yet"
        yield f"{job.job} `{job.name}` of {job.owner or 'an unknown owner'}: {job.state}{place}: `{job.show}`"
    if (more := len(shown.jobs or ()) - _SHOWN) > 0:
        yield f"{count_noun(more, 'other job')} of ours: `-o json` has all"
    if shown.others:
        yield f"{count_noun(shown.others, 'job')} that the runtime did not start: `runtime cluster dashboard`"
