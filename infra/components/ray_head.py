"""The persistent head of a Ray cluster on TPUs, and everything it is allowed to do.

Ray on the head makes and removes TPU nodes; they never belong to Pulumi. The names and labels here obey what Ray's
Google node provider reads from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pulumi

from infra.components.apis import Apis
from infra.components.site import Site
from infra.config import HeadSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretVariable:
    env: str
    resource: pulumi.Input[str]
    """`projects/P/secrets/N`; the newest enabled version is read on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHeadArgs:
    site: Site
    zone: str
    head: str
    """The name that users say; `Names.cluster` makes Ray's name of it."""
    settings: HeadSettings
    network: pulumi.Input[str]
    subnet: pulumi.Input[str]
    cidr: pulumi.Input[str]
    environment: Mapping[str, SecretVariable] = field(default_factory=dict)
    """Secret → variable of every process of the cluster. The component grants its nodes access to each."""
    repositories: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    """Label → `projects/P/locations/R/repositories/N` that the nodes pull from."""
    reapers: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    """Label → member that may list, create and delete nodes and queued resources, beside the head."""
    operators: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    apis: Apis | None = None


class RayHead(pulumi.ComponentResource):
    name: str
    """Of the VM."""
    cluster_name: str
    zone: str
    image: str
    internal_ip: pulumi.Output[str]
    ports: Mapping[str, int]
    """`gcs`, `client`, `dashboard`, `metrics` …"""
    pools: Mapping[str, object]
    """As the contract has them: accelerator, runtime_version, capacity, min, max, cpus."""
    config_sha256: pulumi.Output[str]
    """Of the rendered autoscaler file."""
    head_email: pulumi.Output[str]
    node_email: pulumi.Output[str]

    def __init__(self, name: str, args: RayHeadArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:ray:RayHead", name, None, opts)
        raise NotImplementedError
