"""A secret's container and who may read it; never a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pulumi

from infra.components.apis import Apis
from infra.components.site import Site
from infra.config import SecretSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretArgs:
    site: Site
    secret: str
    settings: SecretSettings
    readers: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    """Label → IAM member; one grant each, on this secret alone."""
    apis: Apis | None = None


class Secret(pulumi.ComponentResource):
    resource: pulumi.Output[str]
    """`projects/P/secrets/N`"""
    env: str

    def __init__(self, name: str, args: SecretArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:secret:Secret", name, None, opts)
        raise NotImplementedError
