"""A Kubernetes namespace to launch into: quota, closed network, a service account, claims.

Needs a Kubernetes provider in `opts` and nothing of Google.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pulumi

from infra.config import NamespaceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceArgs:
    namespace: str
    settings: NamespaceSettings = NamespaceSettings()
    labels: Mapping[str, str] = field(default_factory=dict)
    protect: bool = True


class Workspace(pulumi.ComponentResource):
    service_account: pulumi.Output[str]
    """What jobs run as."""
    claims: Mapping[str, pulumi.Output[str]]
    """Name that users say → name of the PersistentVolumeClaim."""

    def __init__(self, name: str, args: WorkspaceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:kubernetes:Workspace", name, None, opts)
        raise NotImplementedError
