"""The network of a stack's machines: private, with a way out and none in."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from infra.components.apis import Apis
from infra.components.site import Site
from infra.config import NetworkSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkArgs:
    site: Site
    settings: NetworkSettings = NetworkSettings()
    apis: Apis | None = None


class Network(pulumi.ComponentResource):
    """VPC, subnet with private Google access, router and NAT; or an existing subnet, of which nothing is touched."""

    network: pulumi.Output[str]
    """Self-link."""
    subnet: pulumi.Output[str]
    """Self-link."""
    cidr: pulumi.Output[str]
    """Range of the machines; for an existing subnet what the settings say."""

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:network:Network", name, None, opts)
        raise NotImplementedError
