"""The place that a target of kind `ray` names: a head, the way to it, and a record root that all nodes see.

[tool.runtime.targets.tpu]
kind = "ray"
stack = "marin-us-central2"               # its cluster, its bucket for records, and a tunnel to the head
cluster = "main"                          # absent: the stack's only one
[tool.runtime.targets.lab]
kind = "ray"
address = "http://ray-head.lab:8265"      # a head that can be reached from here
records = "/shared/lab/runtime"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from runtime.errors import InvalidValue, NotPossible, UnknownName
from runtime.jobs.hosts.bucket import check_bucket, is_bucket
from runtime.jobs.plan import PlanContext, Target
from runtime.launchers.ray.cluster_state import PoolView, read_pools
from runtime.launchers.settings import read_target_settings
from runtime.outputs import ClusterOutput, StackOutputs, need_output
from runtime.stack.iap_ssh import HeadWay, find_way

_EXPECTED: Final = {"address": "http://HOST:8265, the address of the head's dashboard"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """The settings of a target, as a project's file has them."""

    address: str | None = None
    cluster: str | None = None
    python: str = "python3"
    """Interpreter on the head and the nodes; it has Ray and this package."""
    ssh_options: tuple[str, ...] = ()
    """Further words for the `ssh` that opens the tunnel to a stack's head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTarget:
    """A target, resolved."""

    target: str
    root: str
    """The record root: a folder, or a bucket's URL."""
    python: str
    address: str | None
    """URL of the head; None if a tunnel leads to it."""
    tunnel: HeadWay | None = None
    pools: tuple[PoolView, ...] | None = None
    """Pools of the stack's cluster; None if the nodes are of no stack that is known."""
    apart: tuple[str, str] | None = None
    """The regions of the stack's records and of its cluster, if they are known not to be the same."""

    @property
    def bucket(self) -> str | None:
        return self.root if is_bucket(self.root) else None


def read_settings(target: Target) -> RaySettings:
    return read_target_settings(RaySettings, target, _EXPECTED, where=f"for target `{target.name}`")


def check_settings(target: Target) -> None:
    """Raise `UnknownName` or `InvalidValue` for a setting that cannot be used; nothing is asked."""
    where, settings = f"targets.{target.name}", read_settings(target)
    if settings.address is not None:
        parts = urlsplit(settings.address)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise InvalidValue(f"{where}.address", settings.address, _EXPECTED["address"])
        # With a stack, `cluster` says whose records are meant.
        for name in ("ssh_options",) if target.stack else ("cluster", "ssh_options"):
            if name in target.settings:
                raise InvalidValue(
                    f"{where}.{name}", target.settings[name], "nothing: `address` is the way to the head"
                )
    elif target.stack is None:
        raise InvalidValue(f"{where}.address", None, f"{_EXPECTED['address']}, or a `stack` that has a cluster")
    if is_bucket(target.records):
        check_bucket(target)
    elif target.records is not None and re.match("[A-Za-z][A-Za-z0-9+.-]+:/", target.records):
        raise InvalidValue(
            f"{where}.records", target.records, "gs://… or s3://…, or a folder that this machine and all nodes share"
        )
    elif target.records is None and target.stack is None:
        raise InvalidValue(
            f"{where}.records", None, "a bucket, or a folder that this machine and all nodes of the cluster share"
        )


def read_place(target: Target, context: PlanContext) -> RayTarget:
    """Resolve a target by its settings first, then by its stack. Raises `NotPossible` for a value that neither has."""
    settings = read_settings(target)
    outputs, tunnel, pools = None, None, None
    if settings.address is None or target.records is None or settings.cluster is not None:
        outputs = _outputs(target, context)
        _, cluster = _choose_cluster(target, settings.cluster, outputs)
        pools = read_pools(cluster.pools)
        if settings.address is None:
            tunnel = find_way(outputs, cluster, options=settings.ssh_options)
    return RayTarget(
        target=target.name,
        root=_root(target, settings.cluster, outputs),
        python=settings.python,
        address=settings.address.rstrip("/") if settings.address else None,
        tunnel=tunnel,
        pools=pools,
        apart=None if outputs is None or target.records is not None else _find_apart(settings.cluster, target, outputs),
    )


def _outputs(target: Target, context: PlanContext) -> StackOutputs:
    from runtime.stack.find import find_stack

    return find_stack(target.stack, settings=context.settings).outputs


def _root(target: Target, cluster: str | None, outputs: StackOutputs | None) -> str:
    if is_bucket(target.records):
        return str(target.records).rstrip("/")
    if target.records is not None:
        from runtime.jobs.hosts.local import LocalFiles

        return LocalFiles(target.records).root
    url = outputs.records.url.rstrip("/") if outputs and outputs.records else None
    if outputs is None or url is None or not is_bucket(url):
        raise NotPossible(
            f"target `{target.name}` has no record root: a bucket or folder that its nodes write to and that is read from here",
            facts=[f"records of stack `{target.stack}`: {url or 'none'}"],
            hint='set records = "gs://BUCKET/PATH" for the target; docs/ray.md',
        )
    return default_root(url, _choose_cluster(target, cluster, outputs)[0])


def _find_apart(named: str | None, target: Target, outputs: StackOutputs) -> tuple[str, str] | None:
    """The regions of the stack's records and of a cluster, if both are known and they are not the same."""
    location = outputs.records.location if outputs.records else None
    region = _choose_cluster(target, named, outputs)[1].zone.rpartition("-")[0]
    # A larger place, such as `us` or `nam4`, may have the region in it.
    return (location, region) if location and "-" in location and location != region else None


def default_root(url: str, cluster: str) -> str:
    """The record root of a stack's cluster, by the stack's records: all that is open there is the cluster's."""
    return f"{url.rstrip('/')}/jobs-of-ray/{cluster}"


def _choose_cluster(target: Target, named: str | None, outputs: StackOutputs) -> tuple[str, ClusterOutput]:
    clusters = need_output(outputs, "clusters", f"target `{target.name}`")
    if named is None and len(clusters) == 1:
        only: tuple[str, ClusterOutput] = next(iter(clusters.items()))
        return only
    if named is None:
        raise NotPossible(
            f"stack `{target.stack}` has more than one cluster",
            facts=[f"it has: {', '.join(clusters)}"],
            hint=f'set cluster = "…" in [tool.runtime.targets.{target.name}]',
        )
    if named not in clusters:
        raise UnknownName("cluster", named, list(clusters), where=f"in stack `{target.stack}`")
    found: ClusterOutput = clusters[named]
    return named, found
