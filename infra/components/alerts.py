"""Who hears of what: dead letters, old tasks, too many TPUs, a silent head, spend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pulumi

from infra.components.apis import Apis
from infra.components.site import Site
from infra.config import AlertSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedQueue:
    subscription: pulumi.Input[str]
    """Full name, like the other."""
    dead_letter_subscription: pulumi.Input[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedCluster:
    cluster_name: str
    zone: str
    head: pulumi.Input[str]
    max_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsArgs:
    site: Site
    settings: AlertSettings
    queues: Mapping[str, WatchedQueue] = field(default_factory=dict)
    clusters: Mapping[str, WatchedCluster] = field(default_factory=dict)
    apis: Apis | None = None


class Alerts(pulumi.ComponentResource):
    def __init__(self, name: str, args: AlertsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:monitoring:Alerts", name, None, opts)
        raise NotImplementedError
