"""Image repositories of a stack, one in each region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pulumi

from infra.components.apis import Apis
from infra.components.site import Site
from infra.config import RegistrySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryArgs:
    site: Site
    registry: str
    settings: RegistrySettings = RegistrySettings()
    readers: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    """Label → IAM member."""
    writers: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    apis: Apis | None = None


class Registry(pulumi.ComponentResource):
    """Docker repositories with mutable tags and a clean-up; those that another stack owns are only referred to."""

    urls: Mapping[str, pulumi.Output[str]]
    """Region → `REGION-docker.pkg.dev/PROJECT/REPOSITORY`."""
    repositories: Mapping[str, pulumi.Output[str]]
    """Region → `projects/P/locations/REGION/repositories/N`."""

    def __init__(self, name: str, args: RegistryArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:registry:Registry", name, None, opts)
        raise NotImplementedError
