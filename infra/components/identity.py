"""One service account for each role, and what people may do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi

from infra.components.apis import Apis
from infra.components.site import Site
from infra.config import AccessSettings, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityArgs:
    site: Site
    roles: Sequence[Role]
    access: AccessSettings = AccessSettings()
    has_heads: bool = False
    """Whether there are machines that people log in to."""
    apis: Apis | None = None


class Identity(pulumi.ComponentResource):
    """The accounts are protected: one made again under its old name has silently lost its grants."""

    emails: Mapping[Role, pulumi.Output[str]]
    members: Mapping[Role, pulumi.Output[str]]
    """`serviceAccount:EMAIL`"""
    accounts: Mapping[Role, pulumi.Resource]

    def __init__(self, name: str, args: IdentityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:identity:Identity", name, None, opts)
        raise NotImplementedError
