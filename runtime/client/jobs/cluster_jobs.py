"""The jobs of one Ray cluster of a stack, under any target's name: its record root, its head, and keeping all that is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from runtime.client.jobs.reconcile import KeptTarget, keep_target
from runtime.client.jobs.targets import KnownRoot, OpenTarget
from runtime.config import Settings
from runtime.errors import NotPossible
from runtime.jobs import open_jobs
from runtime.jobs.hosts.bucket import is_bucket
from runtime.jobs.plan import Target
from runtime.launchers.ray.client import RayRefused, RayUnavailable
from runtime.launchers.ray.launcher import RayHost, RayLauncher
from runtime.launchers.ray.settings import RaySettings, RayTarget, default_root
from runtime.outputs import StackOutputs
from runtime.stack.iap_ssh import HeadWay, find_way


def open_cluster_jobs(
    outputs: StackOutputs,
    cluster: str,
    settings: Settings,
    *,
    address: str | None = None,
    way: HeadWay | None = None,
) -> OpenTarget:
    """Open the record root and the head of a stack's cluster.

    `address` is the head's API where it can be reached as it is, such as on the head itself; else a tunnel leads there, by
    `way` if it is given.
    """
    url = outputs.records.url if outputs.records else None
    if url is None or not is_bucket(url):
        raise NotPossible(
            f"the contract of stack `{outputs.stack}` names no bucket for records, so the jobs of cluster `{cluster}` are "
            "not known",
            facts=[f"records: {url or 'none'}"],
            hint=f"run `pulumi up --stack {outputs.stack}`, then `runtime stack pull`",
        )
    tunnel = None if address else way or find_way(outputs, outputs.clusters[cluster])
    place = RayTarget(
        target=cluster,
        root=default_root(url, cluster),
        python=RaySettings().python,
        address=address.rstrip("/") if address else None,
        tunnel=tunnel,
    )
    return open_place(place, settings)


def open_place(place: RayTarget, settings: Settings) -> OpenTarget:
    """Open a record root and a head; nothing is asked yet."""
    host = RayHost(place)
    host.files.keep_to(KnownRoot(place.target, host.files.address, settings.data_dir))
    return OpenTarget(Target(name=place.target, kind="ray", records=place.root), RayLauncher(), host)


def keep_cluster(
    place: OpenTarget, settings: Settings, *, holder: str = "", progress: Callable[[str], None] = lambda text: None
) -> KeptTarget:
    """Keep each open job of the cluster once, whatever its target is called. Raises `InfrastructureFailure`, and has
    done nothing for the rest, if the head does not answer."""
    try:
        found = [keep_target(each, settings, holder=holder, progress=progress) for each in list_places(place)]
    except RayRefused as broken:
        # A head that has just begun answers 500 to a question; to a request for one job it would be noted with the job.
        raise RayUnavailable(f"the head is not ready: {broken.said}", facts=broken.facts) from broken
    return KeptTarget(
        jobs=tuple(job for each in found for job in each.jobs),
        problems=tuple(problem for each in found for problem in each.problems),
    )


def list_places(place: OpenTarget) -> list[OpenTarget]:
    """The cluster under each name that a target of it has; they share one connection."""
    return [
        OpenTarget(replace(place.target, name=name), place.launcher, place.host)
        for name in open_jobs.list_targets(place.files)
    ]
