"""What the commands of `runtime cluster` share: the clusters of a stack's contract, and the means to look at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from typer import Option

from runtime.cli.console import note
from runtime.config import load_settings
from runtime.errors import InfrastructureFailure, NotPossible, RequestRefused, UnknownName
from runtime.stack.find import find_stack
from runtime.stack.iap_ssh import find_way, need_project

if TYPE_CHECKING:
    from runtime.clusters.ray_view import RayView
    from runtime.clusters.reaper import Reaper
    from runtime.config import Settings
    from runtime.jobs.maintenance_lock import MaintenanceLock
    from runtime.outputs import ClusterOutput, StackOutputs
    from runtime.stack.google_api import GoogleApi
    from runtime.stack.iap_ssh import HeadWay

ClusterOption = Annotated[str | None, Option("--cluster", metavar="NAME", help="Only this one.")]
OneClusterOption = Annotated[
    str | None, Option("--cluster", metavar="NAME", help="Which one, if the stack has several.", show_default=False)
]
DryRunOption = Annotated[bool, Option("--dry-run", help="Print what would be done, and do nothing.")]
UserOption = Annotated[
    str | None,
    Option(metavar="NAME", help="Name to log in with; by default that of your ssh settings.", show_default=False),
]
SshOption = Annotated[
    list[str] | None, Option("--ssh-option", metavar="WORD", help="A word for ssh; repeat it.", show_default=False)
]
AddressOption = Annotated[
    str | None, Option("--address", metavar="URL", help="Where Ray's dashboard is reachable.", show_default=False)
]

TunnelOption = Annotated[bool, Option("--tunnel", help="Reach Ray's dashboard by ssh.")]

NOT_ASKED = "not asked: `--address URL` or `--tunnel` reaches its dashboard"


class SelectedClusters:
    """Clusters of a stack, and the means to look at them, each opened when it is needed."""

    def __init__(self, outputs: StackOutputs, settings: Settings, cluster: str | None) -> None:
        self.stack = outputs.stack
        self.settings = settings
        self.clusters: Mapping[str, ClusterOutput] = _choose_clusters(outputs, cluster)
        self.outputs = outputs

    @property
    def project(self) -> str:
        """Raises `NotPossible` if the contract names none."""
        return need_project(self.outputs)

    def find_way(self, cluster: ClusterOutput, user: str | None, options: list[str] | None) -> HeadWay:
        return find_way(self.outputs, cluster, user=user, options=options)

    @cached_property
    def api(self) -> GoogleApi:
        """Raises `GoogleUnreachable` without credentials."""
        from runtime.stack.google_api import GoogleApi

        return GoogleApi(server=self.settings.google_api)

    def reaper(self, cluster: ClusterOutput) -> Reaper:
        from runtime.clusters.reaper import Reaper

        return Reaper(self.api, project=self.project, zone=cluster.zone)


def open_clusters(stack: str | None, cluster: str | None) -> SelectedClusters:
    settings = load_settings()
    return SelectedClusters(find_stack(stack, settings=settings).outputs, settings, cluster)


def _choose_clusters(outputs: StackOutputs, name: str | None) -> dict[str, ClusterOutput]:
    if not outputs.clusters:
        raise NotPossible(
            f"stack `{outputs.stack}` has no Ray cluster",
            hint="`runtime stack list` shows the stacks that can be named",
        )
    if name is None:
        return dict(outputs.clusters)
    if name not in outputs.clusters:
        raise UnknownName("cluster", name, outputs.clusters, where=f"in stack `{outputs.stack}`")
    return {name: outputs.clusters[name]}


def open_one(stack: str | None, cluster: str | None) -> tuple[SelectedClusters, str, ClusterOutput]:
    """Return the stack's only cluster, or the one named, and its name. Raises `RequestRefused` if the stack has several and
    none was named."""
    chosen = open_clusters(stack, cluster)
    if len(chosen.clusters) > 1:
        raise RequestRefused(
            f"stack `{chosen.stack}` has {len(chosen.clusters)} clusters",
            facts=[f"clusters: {', '.join(sorted(chosen.clusters))}"],
            hint=f"name one: `--cluster {min(chosen.clusters)}`",
        )
    [(key, each)] = chosen.clusters.items()
    return chosen, key, each


def find_restart(chosen: SelectedClusters, name: str) -> MaintenanceLock | None:
    """Return the mark of a restart of the cluster; None if there is none, or its records cannot be read, which is noted."""
    from runtime.jobs.hosts.bucket import BucketFiles, is_bucket
    from runtime.jobs.maintenance_lock import read_hold
    from runtime.launchers.ray.settings import default_root

    records = chosen.outputs.records
    if records is None or not is_bucket(records.url):
        return None
    try:
        return read_hold(BucketFiles(default_root(records.url, name)))
    except (InfrastructureFailure, RequestRefused) as problem:
        note(f"{name}: nobody knows whether it is being restarted: {problem.message}")
        return None


def refuse_two_ways(address: str | None, *, tunnel: bool) -> None:
    if address is not None and tunnel:
        raise RequestRefused("`--address` and `--tunnel` are two ways to one dashboard", hint="name one of them")


@contextmanager
def reach_dashboard(
    chosen: SelectedClusters,
    cluster: ClusterOutput,
    address: str | None,
    user: str | None,
    options: list[str] | None,
    *,
    tunnel: bool,
) -> Iterator[str | None]:
    """Yield the URL of Ray's dashboard; None if neither way was named. Raises `TunnelFailed` or `NotPossible`."""
    from runtime.stack.port_forward import open_forward

    if not tunnel:
        yield address
        return
    with open_forward(chosen.find_way(cluster, user, options)) as url:
        yield url


def ask_ray(
    chosen: SelectedClusters,
    cluster: ClusterOutput,
    address: str | None,
    user: str | None,
    options: list[str] | None,
    *,
    tunnel: bool,
    jobs: bool = False,
) -> tuple[RayView | None, str | None]:
    """Return what Ray says, or why it is not known."""
    from runtime.clusters.ray_view import read_jobs, read_ray

    try:
        with reach_dashboard(chosen, cluster, address, user, options, tunnel=tunnel) as url:
            if url is None:
                return None, NOT_ASKED
            view = read_ray(url)
            return read_jobs(url, view) if jobs else view, None
    except InfrastructureFailure as problem:
        return None, problem.message
