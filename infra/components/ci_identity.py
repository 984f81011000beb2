"""What pipelines act as: federation without a key, one provider to deploy and one to preview."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from infra.components.apis import Apis
from infra.components.site import Site
from infra.config import CiSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CiIdentityArgs:
    site: Site
    settings: CiSettings
    apis: Apis | None = None


class CiIdentity(pulumi.ComponentResource):
    """Pool, two providers pinned to numeric ids, and the accounts that each may act as."""

    deployer_email: pulumi.Output[str]
    previewer_email: pulumi.Output[str]
    deploy_provider: pulumi.Output[str]
    """`projects/NUMBER/locations/global/workloadIdentityPools/POOL/providers/deploy`, what the pipeline names."""
    preview_provider: pulumi.Output[str]

    def __init__(self, name: str, args: CiIdentityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:identity:CiIdentity", name, None, opts)
        raise NotImplementedError
