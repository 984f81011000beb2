"""Enabled services of a Google project, and the agents that act in their name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi


@dataclass(frozen=True, slots=True, kw_only=True)
class ApisArgs:
    project: str
    services: Sequence[str]
    """Short names: `pubsub`, `secretmanager` …"""
    agents: Sequence[str] = ()
    """Those of `services` whose service agent gets grants; its identity is made at once, not on first use."""


class Apis(pulumi.ComponentResource):
    """Switches services on. A destroy leaves them on: other stacks of the project may need them."""

    agents: Mapping[str, pulumi.Output[str]]
    """Service → IAM member of its agent, `serviceAccount:service-NUMBER@…`."""

    def __init__(self, name: str, args: ApisArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:google:Apis", name, None, opts)
        raise NotImplementedError

    def needs(self, *services: str) -> list[pulumi.Resource]:
        """What a resource of these services depends on: their enablement, and their agents where they have one.
        Raises KeyError for a service that was not asked for."""
        raise NotImplementedError
